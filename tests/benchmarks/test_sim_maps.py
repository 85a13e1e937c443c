"""The maps: a seed that did not end is not left out of what a point says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sim import sim_maps
from benchmarks.sim.sim_maps import conclude, run_point
from rose.sim.scenario import Scenario
from rose.sim.world import simulate
from tests.sim.test_world import tiny

Rows = dict[str, dict[str, Any]]


def rows_of(*steps_s: float | None) -> Rows:
    """One row a seed."""
    return {str(seed): {"step_s": step_s, "slo_missed": 0.01} for seed, step_s in enumerate(steps_s)}


def test_a_point_where_rose_did_not_end_in_every_seed_has_no_gain() -> None:
    fixed = rows_of(300.0, 301.0, 302.0)
    data = {
        "map.serving_load.4.0": {"fixed_sync": fixed, "rose": rows_of(270.0, 271.0, 272.0)},
        "map.serving_load.8.0": {"fixed_sync": fixed, "rose": rows_of(270.0, None, 272.0)},
    }

    summary = conclude(data)

    assert not [key for key in summary if key.startswith("map.serving_load.8.0.rose.gain_over_fixed")]
    assert summary["map.serving_load.8.0.rose.not_ended"] == 1
    assert summary["map.serving_load.not_ended_at"] == "8.0"
    assert "map.serving_load.open_at" not in summary
    assert (summary["map.serving_load.pays_at"], summary["map.serving_load.4.0.rose.not_ended"]) == ("4.0", 0)


def test_an_ablation_that_did_not_end_in_every_seed_has_no_time_over_rose() -> None:
    data = {
        "ablation.cell": {
            "fixed_sync": rows_of(300.0, 301.0),
            "rose": rows_of(270.0, 271.0),
            "rose-cost": rows_of(280.0, None),
        }
    }

    summary = conclude(data)

    assert not [key for key in summary if key.startswith("ablation.cell.rose-cost.time_over_rose")]
    assert summary["ablation.cell.rose-cost.not_ended"] == 1
    assert summary["ablation.cell.rose.gain_over_fixed"] > 1


@pytest.mark.parametrize("ended", [1, 2])
def test_a_run_has_a_step_time_where_all_its_steps_ended(monkeypatch: pytest.MonkeyPatch, ended: int) -> None:
    """What the first step took is not what a step takes where the second one hung."""
    whole = tiny(num_steps=2, duration_s=7200.0)
    first, second = simulate(whole, "fixed_sync").steps
    limit_s = second.end_s + 1.0 if ended == 2 else (first.end_s + second.end_s) / 2

    def scenario_of(changes: tuple[str, ...], seed: int) -> Scenario:
        return whole.model_copy(update={"duration_s": limit_s})

    monkeypatch.setattr(sim_maps, "scenario_of", scenario_of)

    assert (run_point((), "fixed_sync", whole.seed)["step_s"] is None) is (ended == 1)
