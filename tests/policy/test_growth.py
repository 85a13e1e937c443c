"""PeakGrowth: the most that demand rose within any short time, against a look at all pairs of moments."""

from __future__ import annotations

import math
import random

import pytest

from rose.decisions.freeze import freeze, thaw
from rose.policy.growth import PeakGrowth, WindowMax

WINDOW_S = 32.0
LONGEST_S = 2.0


def staircase(seed: int, num: int) -> list[tuple[float, int]]:
    """Moments, and demand from then on."""
    rng = random.Random(seed)
    at_s, pages, told = 0.0, 0, []
    for _ in range(num):
        at_s += rng.choice((0.01, 0.05, 0.05, 0.3, 1.0))
        pages = max(0, pages + rng.choice((-20, -3, 0, 0, 1, 2, 15)))
        told.append((at_s, pages))
    return told


def rise_within(told: list[tuple[float, int]], horizon_s: float) -> int:
    """By all pairs: demand was ``pages`` until just before the next report."""
    return max(
        later - earlier
        for number, (at_s, later) in enumerate(told)
        for place, (_, earlier) in enumerate(told[: number + 1])
        if place == number or at_s - told[place + 1][0] < horizon_s
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_within_any_horizon_is_that_of_all_pairs(seed: int) -> None:
    growth, told = PeakGrowth(WINDOW_S * 100), staircase(seed, 150)
    for number, (at_s, pages) in enumerate(told):
        growth.add(at_s, pages, LONGEST_S)
        horizon_s = random.Random(seed * 1000 + number).choice((0.02, 0.06, 0.2, 0.5, LONGEST_S))
        assert growth.peak_pages(at_s, horizon_s) == rise_within(told[: number + 1], horizon_s)


def test_a_peak_is_forgotten_after_the_window_and_a_smaller_one_follows() -> None:
    growth = PeakGrowth(WINDOW_S)
    for at_s, pages in ((0.0, 0), (0.1, 40), (10.0, 0), (20.0, 0), (20.1, 10)):
        growth.add(at_s, pages, LONGEST_S)
    assert growth.peak_pages(21.0, 0.5) == 40
    until_s = growth.forgotten_s(21.0, 0.5)
    assert WINDOW_S <= until_s <= WINDOW_S + WINDOW_S / 32
    assert growth.peak_pages(until_s, 0.5) == 40
    assert growth.peak_pages(until_s + 0.01, 0.5) == 10
    assert growth.peak_pages(until_s + WINDOW_S, 0.5) == 0
    assert growth.forgotten_s(until_s + WINDOW_S, 0.5) == math.inf


def test_what_comes_after_a_restart_is_no_rise() -> None:
    growth = PeakGrowth(WINDOW_S)
    growth.add(0.0, 0, LONGEST_S)
    growth.forget_recent()
    growth.add(0.1, 90, LONGEST_S)
    assert growth.peak_pages(0.1, LONGEST_S) == 0


def test_many_different_rises_take_bounded_memory_and_are_never_told_too_small() -> None:
    growth, told = PeakGrowth(WINDOW_S * 100), [(0.0, 0)]
    growth.add(0.0, 0, 1000.0)
    for number in range(1, 200):  # rises of each size from 1 to 199, each within a time of its own
        told.append((number * 0.01, number))
        growth.add(*told[-1], 1000.0)
    assert max(len(rises) for _, rises in growth._rises) <= 32
    for horizon_s in (0.005, 0.1, 0.5, 1.0, 3.0):
        assert growth.peak_pages(2.0, horizon_s) >= rise_within(told, horizon_s)
    assert growth.peak_pages(2.0, 3.0) == 199


def test_an_older_logs_peak_holds_for_any_horizon() -> None:
    """Such a log has the largest rise of each bucket, within a horizon that it does not name."""
    most = WindowMax(WINDOW_S)
    most.add(1.0, 30)
    most.add(5.0, 7)
    older = PeakGrowth.__new__(PeakGrowth)
    older._most = most
    growth = thaw(freeze(older))
    assert growth.peak_pages(6.0, 0.001) == 30
    assert growth.peak_pages(1.5 + WINDOW_S + WINDOW_S / 32, LONGEST_S) == 7
    growth.add(6.0, 0, LONGEST_S)
    growth.add(6.5, 50, LONGEST_S)
    assert growth.peak_pages(6.5, LONGEST_S) == 50
