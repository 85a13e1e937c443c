"""Skill over predictors that know nothing: 1 for a perfect one, 0 for one that is no better, below for a worse."""

from __future__ import annotations

import math

import pytest

from benchmarks.sim.skill import differences, skills

LIVE = {
    "alone": {"ttft_p99_ms": 100.0},
    "rose": {"ttft_p99_ms": 110.0, "harvested_share": 0.9},
    "rose_serial": {"ttft_p99_ms": 121.0, "harvested_share": 0.6},
}


def test_differences_are_of_pairs_with_an_arm_that_takes_turns() -> None:
    found = differences(LIVE)

    assert found["ttft_p99_ms", "rose_serial", "alone"] == pytest.approx(math.log(1.21))
    assert found["ttft_p99_ms", "rose_serial", "rose"] == pytest.approx(math.log(1.1))
    assert found["harvested_share", "rose_serial", "rose"] == pytest.approx(math.log(2 / 3))
    assert len(found) == 3


def test_a_figure_that_is_nothing_or_not_a_number_has_no_difference() -> None:
    rows = {"alone": {"ttft_p99_ms": math.nan}, "rose_serial": {"ttft_p99_ms": 1.0, "tpot_p99_ms": 0.0}}
    assert differences(rows) == {}


def test_skill_of_the_truth_of_nothing_and_of_the_opposite() -> None:
    live = [differences(LIVE), differences({arm: dict(row) for arm, row in LIVE.items()})]
    nothing = [dict.fromkeys(row, 0.0) for row in live]
    opposite = [{key: -value for key, value in row.items()} for row in live]

    assert skills(live, live) == {"as_alone": 1.0, "constant": 1.0}
    assert skills(live, nothing)["as_alone"] == 0.0
    assert skills(live, opposite)["as_alone"] == pytest.approx(-3.0)


def test_the_constant_has_seen_the_other_workloads_and_not_this_one() -> None:
    key = ("ttft_p99_ms", "rose_serial", "alone")
    live = [{key: 0.2}, {key: 0.2}, {key: 0.5}]
    guesses = [{key: 0.0}, {key: 0.0}, {key: 0.0}]

    # Its errors: 0.15, 0.15 and -0.3.
    assert skills(live, guesses)["constant"] == pytest.approx(1 - 0.33 / (0.15**2 * 2 + 0.3**2))
