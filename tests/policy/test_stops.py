"""When a rollout step stands between two layers, and when it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.policy.coserving.stops import MAX_WAIT_S, Scene, longest_wait_s, must_wait

PROMPT = Scene(serving_alive=True, owes_first=True, wanted_back=False)


def test_a_step_waits_for_a_first_token_and_for_nothing_else() -> None:
    assert must_wait(PROMPT, 0.0, 1.0)
    assert not must_wait(replace(PROMPT, owes_first=False), 0.0, 1.0)


@pytest.mark.parametrize("scene", [replace(PROMPT, wanted_back=True), replace(PROMPT, serving_alive=False)])
def test_it_waits_for_nobody_that_wants_memory_back_or_is_gone(scene: Scene) -> None:
    assert not must_wait(scene, 0.0, 1.0)


def test_all_stops_of_a_step_together_have_one_bound() -> None:
    assert must_wait(PROMPT, 0.999, 1.0)
    assert not must_wait(PROMPT, 1.0, 1.0)


@pytest.mark.parametrize(
    ("promise_s", "longest_s"), [(0.5, 0.5), (60.0, MAX_WAIT_S), (0.0, 0.0), (-1.0, 0.0)]
)
def test_the_bound_is_what_a_first_token_may_take_altogether(promise_s: float, longest_s: float) -> None:
    assert longest_wait_s(promise_s) == longest_s
