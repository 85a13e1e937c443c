"""The maps: a seed that did not end is not left out of what a point says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.sim import sim_maps
from benchmarks.sim.sim_maps import conclude, run_point
from rose.sim.arrivals import Arrivals
from rose.sim.scenario import Scenario
from rose.sim.summary import SETTLE_S
from rose.sim.world import SimResult, simulate
from tests.sim.test_world import tiny

Rows = dict[str, dict[str, Any]]


def rows_of(*steps_s: float | None) -> Rows:
    """One row a seed."""
    row = {"slo_missed": 0.01, "misses": {"num": 100, "added": 2, "mended": 1}}
    return {str(seed): {**row, "step_s": step_s} for seed, step_s in enumerate(steps_s)}


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


def test_misses_are_added_request_by_request_over_the_time_of_both_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ROSE's run is shorter, and what is late in the rest of the other one is no credit to it."""
    runs = {}

    def simulated(scenario: Scenario, system: str, *, arrivals: Arrivals) -> SimResult:
        run = runs[system] = simulate(scenario, system, arrivals=arrivals)
        late = {1: 1.0, 2: 2.0} if system == "rose" else {1: 1.0, 900: run.duration_s - 1.0}
        return replace(run, late=late)

    monkeypatch.setattr(sim_maps, "simulate", simulated)
    monkeypatch.setattr(sim_maps, "scenario_of", lambda *_: tiny(num_steps=8, duration_s=7200.0))

    alone = run_point((), "fixed_sync", 0)
    rose = run_point((), "rose", 0, alone)
    summary = conclude(
        {"map.model.m": {"fixed_sync": {"0": alone} | {"1": alone}, "rose": {"0": rose, "1": rose}}}
    )

    end_s = min(run.duration_s for run in runs.values()) - SETTLE_S
    num = sum(at_s < end_s for at_s in runs["rose"].arrived_s)
    assert num > 100
    assert rose["misses"] == {"num": num, "added": 1, "mended": 0}
    assert summary["map.model.m.rose.misses_added"] == pytest.approx(1 / num, abs=1e-5)


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
