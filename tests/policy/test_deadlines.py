"""Deadlines by what was measured, within bounds, or as configured."""

from __future__ import annotations

import dataclasses

import pytest

from rose.errors import PolicyError
from rose.policy import deadlines
from rose.policy.lending import LendingParams
from rose.policy.lending_events import (
    KillRollout,
    Mode,
    ModeSet,
    Phase,
    RolloutReported,
    ServingReported,
    Tick,
)
from rose.policy.lending_policy import LendingPolicy

MEASURED = LendingParams(reclaim_deadline_s=None, backstop_s=None)


@pytest.mark.parametrize(
    ("step_s", "configured_s", "deadline_s"),
    [
        (0.0, None, 1.0),  # no step yet
        (0.0001, None, 0.1002),
        (0.4, None, 0.9),
        (60.0, None, 5.0),  # production does not wait for that
        (0.4, 3.0, 3.0),
        (60.0, 0.05, 0.05),
    ],
)
def test_a_cut_gets_twice_the_longest_step(
    step_s: float, configured_s: float | None, deadline_s: float
) -> None:
    assert deadlines.reclaim_s(step_s, configured_s) == pytest.approx(deadline_s)


@pytest.mark.parametrize(
    ("exit_s", "configured_s", "backstop_s"),
    [(0.0, None, 0.5), (0.1, None, 0.5), (2.0, None, 4.0), (120.0, None, 30.0), (120.0, 0.2, 0.2)],
)
def test_the_dying_get_twice_the_longest_exit(
    exit_s: float, configured_s: float | None, backstop_s: float
) -> None:
    assert deadlines.backstop_s(exit_s, configured_s) == pytest.approx(backstop_s)


def lending(params: LendingParams, **report: float) -> LendingPolicy:
    """A policy with 50 pages lent and held, at 10 s."""
    policy = LendingPolicy(params)
    policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    for at_s in range(11):
        serving = {"phase": Phase.READY, "total_pages": 100, "reserved_pages": 50, "used_pages": 5}
        policy.handle(ServingReported(at_s=at_s, alive=True, **serving))
        policy.handle(
            RolloutReported(
                at_s=at_s, alive=True, phase=Phase.READY, reserved_pages=policy.lend_pages, **report
            )  # type: ignore[arg-type]
        )
    assert policy.lend_pages >= 50
    return policy


@pytest.mark.parametrize(("step_s", "last_s", "late_s"), [(0.4, 10.89, 10.92), (0.05, 10.19, 10.22)])
def test_an_engine_is_killed_when_its_own_steps_say_that_it_does_not_obey(
    step_s: float, last_s: float, late_s: float
) -> None:
    policy = lending(MEASURED, step_s=step_s)
    policy.handle(ModeSet(at_s=10.0, mode=Mode.OFF))
    assert policy.handle(Tick(at_s=last_s)) == []
    assert isinstance(policy.handle(Tick(at_s=late_s))[0], KillRollout)


def test_it_is_killed_again_only_when_it_had_the_time_that_dying_takes_here() -> None:
    policy = lending(MEASURED, step_s=0.05, exit_s=2.0)
    policy.handle(ModeSet(at_s=10.0, mode=Mode.OFF))
    assert isinstance(policy.handle(Tick(at_s=10.3))[0], KillRollout)
    assert policy.handle(Tick(at_s=14.2)) == []
    assert isinstance(policy.handle(Tick(at_s=14.4))[0], KillRollout)


def test_a_configured_deadline_counts_whatever_was_measured() -> None:
    policy = lending(
        dataclasses.replace(MEASURED, reclaim_deadline_s=0.2, backstop_s=0.3), step_s=4.0, exit_s=9.0
    )
    assert (policy.reclaim_deadline_s, policy.backstop_s) == (0.2, 0.3)


def test_the_headroom_counts_with_the_worst_that_was_measured() -> None:
    assert lending(MEASURED, step_s=2.0, exit_s=5.0).reclaim_p99_s == pytest.approx(4.1 + 10.0 + 0.05)


def test_a_long_step_is_forgotten_after_a_while() -> None:
    policy = lending(MEASURED, step_s=2.0)
    assert policy.reclaim_deadline_s == pytest.approx(4.1)
    policy.handle(
        RolloutReported(
            at_s=10.0 + 2 * deadlines.STEP_WINDOW_S,
            alive=True,
            phase=Phase.READY,
            reserved_pages=0,
            step_s=0.2,
        )
    )
    assert policy.reclaim_deadline_s == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["step_s", "exit_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_duration_that_is_none_is_refused(name: str, value: float) -> None:
    with pytest.raises(PolicyError, match=name):
        LendingPolicy(MEASURED).handle(
            RolloutReported(at_s=0.0, alive=False, phase=0, reserved_pages=0, **{name: value})  # type: ignore[arg-type]
        )
