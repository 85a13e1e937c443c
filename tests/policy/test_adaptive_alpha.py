"""The bound of staleness that follows mismatch and waiting: laws that hold for whatever is measured, and where it comes to rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policy.adaptive_alpha import (
    CHANGES,
    MAX_HOLD,
    AdaptiveAlpha,
    AlphaDecision,
    AlphaParams,
    StepTaken,
)

ANY = st.floats(allow_nan=True, allow_infinity=True)
STEPS = st.lists(st.builds(StepTaken, mismatch_kl=ANY, idle=ANY), max_size=200)
PARAMS = st.builds(
    lambda least, more, window: AlphaParams(least=least, most=least + more, window=window),
    st.integers(0, 4),
    st.integers(1, 8),
    st.integers(1, 6),
)


def driven(policy: AdaptiveAlpha, steps: list[StepTaken]) -> list[AlphaDecision]:
    return [policy.handle(step) for step in steps]


def settled(
    policy: AdaptiveAlpha, kl: Callable[[int], float], idle: Callable[[int], float], num_steps: int = 600
) -> list[int]:
    """Bounds step by step of a job whose mismatch and waiting are functions of its bound."""
    found: list[int] = []
    for _ in range(num_steps):
        alpha = policy.alpha
        found.append(policy.handle(StepTaken(mismatch_kl=kl(alpha), idle=idle(alpha))).alpha)
    return found


@given(PARAMS, st.integers(0, 20), STEPS)
def test_whatever_is_measured_the_bound_stays_in_its_bounds_and_each_change_has_its_cause(
    params: AlphaParams, start: int, steps: list[StepTaken]
) -> None:
    policy = AdaptiveAlpha(params, start)
    before = policy.alpha
    counts = dict.fromkeys(CHANGES, 0)
    for decision in driven(policy, steps):
        assert params.least <= decision.alpha <= params.most
        assert decision.alpha <= decision.accepted <= params.most
        by = {"idle": before + 1, "fresher": before - 1, "mismatch": max(params.least, before // 2)}
        assert decision.alpha == by.get(decision.cause, before)
        if decision.cause in counts:
            counts[decision.cause] += 1
        before = decision.alpha
    assert policy.num_changes == counts


@given(PARAMS, st.integers(0, 12), STEPS)
def test_nothing_that_was_begun_within_its_bound_grows_too_old_by_a_lower_one(
    params: AlphaParams, start: int, steps: list[StepTaken]
) -> None:
    policy = AdaptiveAlpha(params, start)
    begun = [
        policy.alpha
    ]  # of step 0, 1, ...: what is begun in step s is trained on in step s + alpha at the latest
    accepted = [policy.accepted]
    for decision in driven(policy, steps):
        begun.append(decision.alpha)
        accepted.append(decision.accepted)
    for at, alpha in enumerate(begun):
        for lag in range(alpha + 1):
            if at + lag < len(accepted):
                assert lag <= accepted[at + lag]
    # And no looser than that: a bound that was lowered for good is the only one in the end.
    if len(set(begun[-params.most - 1 :])) == 1 and len(begun) > params.most:
        assert accepted[-1] == begun[-1]


@given(PARAMS, st.integers(0, 12), STEPS)
def test_a_change_waits_until_what_is_trained_on_was_begun_under_the_last_one(
    params: AlphaParams, start: int, steps: list[StepTaken]
) -> None:
    policy = AdaptiveAlpha(params, start)
    last_at, last_alpha, before = -1, policy.alpha, policy.alpha
    for at, decision in enumerate(driven(policy, steps)):
        if decision.alpha != before:
            assert at - last_at > max(before, last_alpha) + params.window
            last_at, last_alpha, before = at, before, decision.alpha


@given(PARAMS, st.integers(0, 12), st.floats(0.011, 10))
def test_too_much_mismatch_halves_it_down_to_the_least_however_idle_the_trainer(
    params: AlphaParams, start: int, kl: float
) -> None:
    bounds = settled(AdaptiveAlpha(params, start), lambda _: kl, lambda _: 0.9)
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == params.least


@given(PARAMS, st.integers(0, 12))
def test_a_trainer_that_waits_gets_all_there_is_where_nothing_forbids_it(
    params: AlphaParams, start: int
) -> None:
    bounds = settled(AdaptiveAlpha(params, start), lambda _: 0.0, lambda _: 0.5)
    assert bounds == sorted(bounds)
    assert bounds[-1] == params.most


@given(PARAMS, st.integers(0, 12))
def test_samples_are_not_old_for_nothing(params: AlphaParams, start: int) -> None:
    assert settled(AdaptiveAlpha(params, start), lambda _: 0.0, lambda _: 0.0)[-1] == params.least


@pytest.mark.parametrize("need", range(2, 9))
def test_it_rests_at_the_least_bound_that_keeps_the_trainer_busy(need: int) -> None:
    def idle(alpha: int) -> float:
        return 0.3 if alpha < need else 0.05 if alpha == need else 0.0

    for start in (1, 4, 8):
        assert set(settled(AdaptiveAlpha(AlphaParams(), start), lambda _: 0.0, idle)[200:]) == {need}


def test_a_mismatch_that_the_next_bound_would_bring_keeps_it_from_rising() -> None:
    """By the square of the lag: 0.004 at a bound of 1 would be 0.009 at 2, and 0.016 at 3."""
    bounds = settled(AdaptiveAlpha(AlphaParams(), 1), lambda a: 0.001 * (a + 1) ** 2, lambda _: 0.5)
    assert set(bounds[50:]) == {2}


@settings(max_examples=60, deadline=None)
@given(
    PARAMS,
    st.integers(0, 12),
    st.lists(st.floats(0, 0.03), min_size=13, max_size=13),
    st.lists(st.floats(0, 1), min_size=13, max_size=13),
)
def test_a_job_between_two_bounds_hardly_goes_back_and_forth(
    params: AlphaParams, start: int, kl: list[float], idle: list[float]
) -> None:
    """Whatever mismatch and waiting belong to each bound, be it that all of them are wrong: first some search, then rest."""
    kl, idle = sorted(kl), sorted(idle, reverse=True)
    bounds = settled(AdaptiveAlpha(params, start), kl.__getitem__, idle.__getitem__, 2000)
    late = bounds[1000:]
    num_turns = _turns(late)
    # Of two turns one at least is not for mismatch, and waits.
    assert num_turns <= 2 * (len(late) / MAX_HOLD) + 2


def _turns(bounds: list[int]) -> int:
    ways = [b > a for a, b in pairwise(bounds) if a != b]
    return sum(a != b for a, b in pairwise(ways))


def test_what_was_left_over_before_a_restart_is_not_too_old_after_it() -> None:
    policy = AdaptiveAlpha(AlphaParams(least=1, most=8), 2, accepted=5)
    assert policy.accepted == 5
    later = driven(policy, [StepTaken(mismatch_kl=0.0, idle=0.05)] * 7)
    assert [one.accepted for one in later] == [5, 5, 5, 5, 2, 2, 2]


@pytest.mark.parametrize(
    "nothing", [StepTaken(mismatch_kl=math.nan, idle=0.9), StepTaken(mismatch_kl=0.0, idle=math.nan)]
)
def test_a_step_that_measured_nothing_says_nothing(nothing: StepTaken) -> None:
    policy = AdaptiveAlpha(AlphaParams(), 2)
    assert {one.cause for one in driven(policy, [nothing] * 100)} == {"settling"}
