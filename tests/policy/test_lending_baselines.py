"""The published policy and a fixed split, by the same books; and changing the policy while it rules."""

from __future__ import annotations

import pytest

from rose.errors import ConfigError
from rose.policy.baselines import PaperLending, StaticLending, make_lending
from rose.policy.coserving.rollout import allowed_pages
from rose.policy.lending_events import (
    Mode,
    ModeSet,
    Phase,
    RlStepStarted,
    ServingReported,
    SetLend,
)
from rose.policy.lending_policy import LendingPolicy
from tests.policy.lending_world import CALM, PARAMS, World


@pytest.fixture
def paper() -> World:
    world = World(PaperLending(PARAMS, headroom_fraction=0.2))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    return world


def test_paper_lends_all_that_headroom_leaves_and_halves_once_per_crossing(paper: World) -> None:
    paper.step(0.0)
    assert paper.policy.lend_pages == 80
    paper.used = 11
    paper.step(1.0)
    assert paper.policy.lend_pages == 40
    paper.step(2.0)
    assert paper.policy.lend_pages == 40
    paper.used = 55  # free again above the watermark in between: a new crossing
    paper.step(3.0)
    assert paper.policy.lend_pages == 20


def test_paper_stays_frozen_until_the_next_rl_step(paper: World) -> None:
    paper.step(0.0)
    paper.used = 11
    paper.step(1.0)
    paper.used = 0
    paper.run(1000.0, 1.0)
    assert paper.policy.lend_pages == 40
    paper.policy.handle(RlStepStarted(at_s=1000.0))
    assert paper.policy.lend_pages == 80


# --- a fixed split, and changing the policy while it rules ---


def test_a_fixed_split_is_lent_at_once_and_ignores_what_serving_uses() -> None:
    world = World(StaticLending(PARAMS))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON, max_lend_pages=50))
    world.step(0.0)
    assert world.policy.lend_pages == 50
    world.used = 99
    assert world.step(1.0, needed_pages=49) == []
    assert world.step(2.0, phase=Phase.STARTING)[0] == SetLend(
        pages=0, deadline_s=pytest.approx(2.1), reason="serving is starting"
    )


def test_a_new_policy_goes_on_from_the_loan_and_cuts_what_it_would_not_lend(paper: World) -> None:
    paper.step(0.0)
    paper.step(0.05)  # 80 lent and held
    paper.used = 15
    policy = LendingPolicy(PARAMS)
    policy.take_over(paper.policy)
    actions = policy.handle(
        ServingReported(at_s=0.1, alive=True, phase=2, total_pages=100, reserved_pages=20, used_pages=15)
    )
    # Left are 5 < watermark 10: back to the full headroom of 20.
    assert actions == [
        SetLend(pages=65, deadline_s=pytest.approx(0.2), reason="serving's use crossed the watermark")
    ]
    policy.check()


def test_compute_only_serving_keeps_its_memory_and_rollouts_get_the_operators_number() -> None:
    world = World(LendingPolicy(PARAMS))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    world.step(0.0, compute_only=True)
    assert world.policy.lend_pages == 0  # nobody has said what the device has left
    world.policy.handle(ModeSet(at_s=1.0, mode=Mode.ON, max_lend_pages=40))
    world.used = 100
    world.step(1.0, compute_only=True, needed_pages=7)
    assert world.policy.lend_pages == 40
    calm = {**CALM, "lend_pages": 40, "serving_reserved": 100, "serving_needed": 7}
    assert allowed_pages(**calm, compute_only=True) == (40, "compute only: a fixed budget")  # type: ignore[arg-type]


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="rose, paper, static"):
        make_lending("half")
