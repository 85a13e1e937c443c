"""Held-out scores: pass@k against every way to draw k episodes, and whose episodes are counted together."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError

from rose.train.held_out import pass_at_k, summary_of, told_in_short
from rose.train.rollout import HeldOutEpisode
from rose.train.train_config import EvalSettings


@pytest.mark.parametrize("count", range(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_of_k_with_a_success(count: int) -> None:
    for num_successes, k in itertools.product(range(count + 1), range(1, count + 1)):
        episodes = [index < num_successes for index in range(count)]
        draws = [any(draw) for draw in itertools.combinations(episodes, k)]
        assert pass_at_k(count, num_successes, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_of_many_episodes_is_a_number_of_full_accuracy() -> None:
    """A quotient of two floats would overflow long before: these have 600 digits."""
    assert pass_at_k(2000, 0, 1000) == 0.0
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5, abs=1e-15)
    assert pass_at_k(2000, 1500, 1000) == 1.0


def score(task_index: int, success: bool, task_kind: str = "") -> HeldOutEpisode:
    return HeldOutEpisode(
        task_index=task_index,
        reward=float(success),
        success=success,
        num_turns=2,
        versions=("1.1",),
        task_kind=task_kind,
    )


def test_episodes_of_one_task_are_counted_together_and_those_of_no_other() -> None:
    """Managers number their tasks each from 0, and so do the tasks of a job."""
    first = [score(0, True, "a"), score(0, False, "a"), score(0, False, "b"), score(0, False, "b")]
    second = [score(0, True, "a"), score(0, True, "a"), score(1, False, "a"), score(1, True, "a")]
    found = summary_of([first, second], (1, 2))
    assert found["success_rate"] == found["pass_at_1"] == 0.5
    assert found["pass_at_2"] == 0.75
    assert told_in_short(found) == "0.50 (pass@1 0.50, pass@2 0.75)"
    assert found["num_episodes"] == 8
    assert found["turns_mean"] == 2.0
    assert found["tasks"]["a"]["pass_at_2"] == 1.0
    assert found["tasks"]["b"]["pass_at_2"] == 0.0
    assert summary_of([[score(0, True)]], ()) == {
        "num_episodes": 1,
        "success_rate": 1.0,
        "reward_mean": 1.0,
        "turns_mean": 2.0,
    }


def test_more_than_there_are_episodes_cannot_be_asked_for() -> None:
    assert EvalSettings(episodes_per_task=8, pass_at=(1, 8)).pass_at == (1, 8)
    with pytest.raises(ValidationError, match="pass_at 4 needs episodes_per_task of 4 at least"):
        EvalSettings(episodes_per_task=2, pass_at=(1, 4))
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        EvalSettings(pass_at=(0,))
