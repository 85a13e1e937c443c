"""The verdict on a lever: paid where its gain's interval is above 1, and production misses no more."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sim import levers
from benchmarks.sim.levers import levers_of
from benchmarks.sim.paper_cells import CELLS, Cell, Setting, scenario_of

CELL = next(cell for cell in CELLS if cell.name == "grpo_8b_256_quiet")


def rows(late: dict[str, int], step_s: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Step times by ``system/lever``, 100 s where not said; so many late requests, none where not said."""
    found: dict[str, dict[str, Any]] = {}
    for seed in levers.SEEDS:
        for lever in levers.LEVERS:
            for system in levers.SYSTEMS:
                key = levers.key_of(system, lever)
                found[f"{key}/{seed}"] = {
                    "step_s": step_s.get(key, 100.0) + 0.01 * seed,
                    "end_s": 300.0,
                    "length": 3000.0 if lever == "surplus" else 4000.0,
                    "short_length": 0.8 if lever == "batching" else 1.0,
                    "tpot_p99_ms": 50.0 if lever == "rounds" else 20.0,
                    "late": [(number, 10.0) for number in range(late.get(key, 0))],
                }
    return found


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    late = {"rose/stops": 400, "rose/none": 1}
    took = {"rose/none": 80.0, "rose/streamed": 70.0, "rose/stops": 70.0, "fixed/streamed": 90.0}
    took |= {"rose/longer": 60.0, "rose/batching": 50.0, "rose/surplus": 40.0}
    return levers.conclude({CELL.name: rows(late, took)})


def told(summary: dict[str, Any], name: str) -> Any:
    return summary[f"{CELL.name}.{name}"]


def test_a_lever_that_shortens_steps_pays_and_says_what_is_left_of_harvesting(
    summary: dict[str, Any],
) -> None:
    assert told(summary, "streamed.pays_on_rose")
    assert told(summary, "streamed.pays_on_fixed")
    assert told(summary, "none.harvest") == pytest.approx(102.065 / 82.065, abs=1e-3)
    assert told(summary, "streamed.harvest") == pytest.approx(92.065 / 72.065, abs=1e-3)
    assert told(summary, "streamed.over_tuned") == pytest.approx(102.065 / 72.065, abs=1e-3)


def test_one_that_changes_nothing_does_not_pay(summary: dict[str, Any]) -> None:
    assert told(summary, "longest.fixed_gain") == 1.0
    assert not told(summary, "longest.pays_on_fixed")


def test_one_that_costs_production_does_not_pay(summary: dict[str, Any]) -> None:
    assert told(summary, "stops.rose_gain_low") > 1
    assert told(summary, "stops.misses_added_high") > levers.MOST_ADDED
    assert not told(summary, "stops.pays_on_rose")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_wide_engines_are_made_of_the_job_s_own_gpus(cell: Cell) -> None:
    setting = Setting(system="rose", tensor_parallel=8)
    scenario, _ = scenario_of(cell, "rose", setting, 1000)
    before, fleet = scenario.fleet, levers.with_lever(scenario, "wide").fleet
    gpus = before.dedicated * before.rollout_gpus
    assert fleet.dedicated * fleet.rollout_gpus + fleet.wide * fleet.wide_gpus == gpus
    assert fleet.wide_gpus == gpus // 2 > fleet.rollout_gpus
    assert fleet.dedicated > 0


def test_short_and_long_rounds_are_compared_with_as_many_steps_and_say_whom_they_train_on(
    summary: dict[str, Any],
) -> None:
    assert told(summary, "batching.rose_gain") == pytest.approx(62.065 / 52.065, abs=1e-3)
    assert told(summary, "batching.length") == 1.0
    assert told(summary, "batching.short_length") == 0.8
    assert told(summary, "batching.pays_on_rose")
    assert told(summary, "surplus.rose_gain_low") > 1
    assert not told(summary, "surplus.pays_on_rose")  # it trains on less
    assert f"{CELL.name}.longer.rose_gain" not in summary
    scenario, _ = scenario_of(CELL, "rose", Setting(system="rose", tensor_parallel=8), 1000)
    assert levers.with_lever(scenario, "batching").num_steps == 6
    assert levers.with_lever(scenario, "none").num_steps == 2


def test_dapo_has_no_short_and_long_rounds() -> None:
    dapo = next(cell for cell in CELLS if cell.job == "dapo_8b")
    assert set(levers_of(CELL)) - set(levers_of(dapo)) == {"longer", "batching", "surplus"}


def test_what_a_lever_costs_production_s_tokens_stands_beside_it(summary: dict[str, Any]) -> None:
    assert told(summary, "none.tpot_p99_ms") == 20.0
    assert told(summary, "rounds.tpot_p99_ms") == 50.0


def test_a_cell_that_is_not_whole_says_nothing() -> None:
    part = rows({}, {})
    del part[f"rose/all/{levers.SEEDS[-1]}"]
    assert levers.conclude({CELL.name: part}) == {}
