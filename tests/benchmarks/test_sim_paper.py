"""When a claim about draws is decided."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.sim_paper import (
    CEILINGS,
    CELLS,
    ceiling_scenario,
    cell_scenario,
    conclude,
    interval,
    is_faster,
    table,
    verdict,
)


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


@pytest.mark.parametrize("cell", CELLS)
def test_a_ceiling_has_all_gpus_of_its_cell_or_an_engine_for_each_trajectory(cell: str) -> None:
    scenario = cell_scenario(cell, 0)
    dedicated, unlimited = (ceiling_scenario(scenario, name).fleet for name in CEILINGS)

    fleet, job = scenario.fleet, scenario.job
    gpus = fleet.dedicated * fleet.rollout_gpus + fleet.serving * fleet.serving_gpus
    assert (dedicated.dedicated * dedicated.rollout_gpus, dedicated.serving) == (gpus, 0)
    assert unlimited.dedicated >= job.num_groups * job.group_size
    assert (unlimited.dedicated > job.num_groups * job.group_size) == (job.algorithm == "dapo")


def test_each_gain_stands_beside_the_ceiling_of_its_cell_and_misses_are_judged_by_request() -> None:
    def result(step_s: float, late: list[list[float]] | None) -> dict[str, Any]:
        row = {
            "step_s": step_s,
            "rollout_s": step_s / 2,
            "slo_missed": None if late is None else len(late) / 100,
        }
        return {**row, "allocation_overhead": 0.0, "end_s": 200.0, "late": late or []}

    runs = {
        "fixed_sync": result(300.0, [[3, 1.0], [5, 2.0]]),
        "rose": result(250.0, [[3, 1.0], [6, 2.5], [7, 199.0]]),
        "ceiling_dedicated": result(200.0, None),
        "ceiling_unlimited": result(150.0, None),
    }
    summary = conclude({"cells": {"grpo_8b": {"0": runs}}, "draws": {}})
    (line,) = table(summary)

    assert "rose" in line
    assert "1.20x" in line
    assert "dedicated 1.50x, unlimited 2.00x" in line
    assert "40% of it" in line
    # One more and one fewer; the last came too late for both runs to have answered it.
    assert summary["grpo_8b.rose.misses_added"] == 0.0
    assert "grpo_8b.ceiling_dedicated.slo_missed" not in summary
    del runs["ceiling_dedicated"]
    assert "no ceiling" in table(conclude({"cells": {"grpo_8b": {"0": runs}}, "draws": {}}))[0]
