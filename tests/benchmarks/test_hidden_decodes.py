"""Judged cells beside themselves with shorter decode steps: what counts as coming out on the other side."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sim.paper_cells import CELLS, Setting
from benchmarks.sim_hidden_decodes import KINDS, RUN, SEEDS, conclude
from benchmarks.sim_paper import run

CELL = CELLS[0]


def rows(rose_hidden_s: float) -> dict[str, dict[str, Any]]:
    """A cell in which every step with hidden operations takes half as long, ROSE's too where ``rose_hidden_s`` is 75."""
    plain_s = {"fixed": 200.0, "paper": 180.0, "rose": 150.0, "ceiling": 100.0}
    took_s = {**plain_s, **{f"{arm}_tail": step_s for arm, step_s in plain_s.items()}}
    made: dict[str, dict[str, Any]] = {}
    for seed in SEEDS:
        for arm in RUN:
            for kind in KINDS:
                step_s = (
                    took_s[arm] if kind == "judged" else rose_hidden_s if arm == "rose" else took_s[arm] / 2
                )
                made[f"{kind}/{arm}/{seed}"] = {"step_s": step_s, "late": [], "end_s": 400.0, "busy": 0.2}
    return {CELL.name: made}


def test_a_cell_that_is_faster_in_all_arms_stays_on_its_side() -> None:
    found = conclude(rows(75.0))

    assert (found["cells"], found["other_side"]) == (1, 0)
    assert found[f"{CELL.name}.rose.gain_ratio"] == 1.0
    assert found[f"{CELL.name}.hidden.rose.reached"] == pytest.approx(0.333)


def test_what_changes_sides_is_named_by_arm() -> None:
    # 95 s: faster than fixed (100), slower than the paper's (90).
    assert conclude(rows(95.0))[f"{CELL.name}.other_side"] == "rose.over_paper"
    # 53 s: 0.89 of what the ceiling (50) adds.
    assert conclude(rows(53.0))[f"{CELL.name}.other_side"] == "rose.reached"


def test_a_cell_with_a_run_that_lacks_is_not_concluded() -> None:
    lacking = rows(75.0)
    del lacking[CELL.name][f"hidden/paper/{SEEDS[-1]}"]

    assert conclude(lacking) == {"cells": 0, "not_ended": 0, "other_side": 0}


def test_a_cell_with_a_run_that_does_not_end_is_counted_and_costs_no_other_its_result() -> None:
    endless = rows(75.0)
    endless[CELL.name][f"hidden/paper/{SEEDS[-1]}"] = {
        "step_s": None,
        "late": [],
        "end_s": 400.0,
        "busy": 0.2,
    }

    assert conclude(endless) == {"cells": 0, "not_ended": 1, "other_side": 0}


def test_hidden_operations_make_the_steps_of_a_job_shorter() -> None:
    setting = Setting(system="fixed_sync", tensor_parallel=8, cap=256)

    judged, hidden = (run(CELL, "ceiling", setting, SEEDS[0], efficiency) for efficiency in KINDS.values())

    assert hidden["step_s"] < judged["step_s"]
