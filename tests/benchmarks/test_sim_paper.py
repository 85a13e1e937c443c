"""When a claim about draws is decided."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.sim_paper import interval, is_faster, verdict


def row(rose_s: float | None, fixed_s: float | None) -> dict[str, Any]:
    return {"rose": {"step_s": rose_s}, "fixed_sync": {"step_s": fixed_s}}


def test_intervals_are_those_of_the_tables() -> None:
    """Clopper and Pearson, 95 %: 0 and 10 of 10, 45 of 50."""
    assert interval(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert interval(10, 10) == pytest.approx((0.6915, 1.0), abs=1e-4)
    assert interval(45, 50) == pytest.approx((0.7819, 0.9667), abs=1e-4)


def test_an_answer_needs_certainty_or_an_interval_that_leaves_ninety_percent_out() -> None:
    lost, won = row(3.0, 2.0), row(1.0, 2.0)

    assert verdict([lost] * 21, "rose", "fixed_sync", 200) == (False, 21)
    assert verdict([won] * 51, "rose", "fixed_sync", 200) == (None, 51)
    assert verdict([won] * 60, "rose", "fixed_sync", 200) == (True, 52)
    assert verdict([lost] + [won] * 60, "rose", "fixed_sync", 200) == (None, 61)
    assert verdict(([lost] + [won] * 9) * 17 + [won] * 27, "rose", "fixed_sync", 200) == (True, 197)


@pytest.mark.parametrize(("chance", "holds"), [(0.8, False), (0.98, True)])
def test_few_early_answers_are_wrong(chance: float, holds: bool) -> None:
    rng = random.Random(7)
    answers = []
    for _ in range(100):
        rows = [row(1.0 if rng.random() < chance else 3.0, 2.0) for _ in range(200)]
        answers.append(verdict(rows, "rose", "fixed_sync", 200)[0])

    assert answers.count(holds) >= 95


def test_a_step_that_never_ended_is_slower_than_one_that_did() -> None:
    assert is_faster(row(5.0, None), "rose", "fixed_sync")
    assert not is_faster(row(None, 5.0), "rose", "fixed_sync")
    assert not is_faster(row(None, None), "rose", "fixed_sync")
