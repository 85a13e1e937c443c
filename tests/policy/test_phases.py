"""What is learned of a job that rolls out and trains in turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policy.phases import GONE_FACTOR, LEAST_KNOWN, SETTLE_S, Phases


def played(*parts: tuple[int, float], period_s: float = 1.0, speed: float = 2.0) -> tuple[Phases, float]:
    """Seen every ``period_s`` through ``(turns, seconds)`` in order; and the time then."""
    phases, now_s = Phases(), 0.0
    phases.saw(now_s, parts[0][0], speed)
    for turns, seconds in parts:
        until_s = now_s + seconds
        while now_s + period_s <= until_s:
            now_s += period_s
            phases.saw(now_s, turns, speed)
    return phases, now_s


def test_nothing_is_said_of_a_job_that_has_not_been_seen_to_alternate() -> None:
    phases, now_s = played((8, 40), (0, 30), (8, 40))
    assert not phases.alternates
    assert phases.left_s(now_s, 2.0) is None
    assert phases.gone_after_s is None


@settings(max_examples=200, deadline=None)
@given(
    sampled_s=st.integers(10, 200),
    away_s=st.integers(10, 200),
    cycles=st.integers(LEAST_KNOWN + 1, 6),
    speed=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_both_phases_are_known_to_the_second(sampled_s: int, away_s: int, cycles: int, speed: float) -> None:
    phases, now_s = played(*[(8, sampled_s), (0, away_s)] * cycles, (8, 5), speed=speed)
    assert phases.alternates
    assert phases.is_sampling
    # It is asked once a second, so each phase may be seen a second late.
    assert phases.usual_work == pytest.approx(sampled_s * speed, abs=2.0 * speed)
    assert phases.usual_away_s == pytest.approx(away_s, abs=2.0)
    left_s = phases.left_s(now_s, speed)
    assert left_s is not None
    assert left_s >= phases.usual_work / 4 / speed
    half = phases.left_s(now_s, speed / 2)
    assert half == pytest.approx(2 * left_s)  # with half of the engines it lasts twice as long
    assert phases.num_turns == pytest.approx(8.0, rel=0.2)


def test_a_moment_in_which_every_agent_waits_for_its_tools_is_no_phase() -> None:
    gap_s = SETTLE_S - 2.0
    phases, _ = played((8, 20), (0, gap_s), (8, 20), (0, 30), (8, 20), (0, gap_s), (8, 20), (0, 30), (8, 3))
    assert len(phases.work) == 2
    assert phases.usual_away_s == pytest.approx(30, abs=2.0)


def test_the_other_phase_begins_with_the_first_moment_without_a_turn() -> None:
    phases, now_s = played((8, 20), (0, SETTLE_S + 2.0))
    assert not phases.is_sampling
    assert phases.since_s == pytest.approx(now_s - SETTLE_S - 1.0, abs=1.0)


def test_an_overdue_phase_is_expected_to_end_as_soon_as_a_quarter_of_its_kind() -> None:
    phases, now_s = played(*[(8, 40), (0, 40)] * 3, (8, 100))
    assert phases.left_s(now_s, 2.0) == pytest.approx(10.0, abs=0.5)


def test_a_job_is_gone_once_it_is_away_much_longer_than_ever() -> None:
    phases, _ = played(*[(8, 20), (0, 30)] * 3)
    assert phases.gone_after_s == pytest.approx(30 * GONE_FACTOR, abs=2 * GONE_FACTOR)
