"""Fleet mode: cells stand for the fleet, and say so in engines and tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rose.sim.fleet import simulate_fleet, write_fleet_report
from rose.sim.scenario import Scenario
from rose.sim.worth import time_left
from tests.sim.test_world import TINY, tiny

CELLS = {"serving": 2, "dedicated": 1, "warm_s": 5.0, "seconds": 15.0, "loads": 2, "in_flight_per_engine": 4}


def fleet_of(serving: int, dedicated: int) -> Scenario:
    fleet = {**TINY["fleet"], "serving": serving, "dedicated": dedicated, "trainers": 10_000}
    return tiny(mode="fleet", cells=CELLS, fleet=fleet, duration_s=7200.0, job={"group_size": 4})


def test_a_fleet_twice_as_large_samples_twice_as_much_and_harvests_the_same_share(tmp_path: Path) -> None:
    small, large = (simulate_fleet(fleet_of(200 * n, 50 * n), ("rose",)).systems[0].summary for n in (1, 2))

    assert large["sampled_tokens_per_s"] == pytest.approx(2 * small["sampled_tokens_per_s"])
    assert large["harvested_share"] == pytest.approx(small["harvested_share"])
    assert 0 < small["harvested_share"] < 1


def test_a_fleet_s_rates_lie_between_those_of_its_cells(tmp_path: Path) -> None:
    result = simulate_fleet(fleet_of(200, 50), ("rose",))

    system = result.systems[0]
    rates = [cell.dedicated_tokens_s * 50 for cell in system.cells]
    assert min(rates) - 1e-6 <= min(system.dedicated_tokens_s)
    assert max(system.dedicated_tokens_s) <= max(rates) + 1e-6
    paths = write_fleet_report(result, tmp_path)
    assert "<svg" in paths[1].read_text()


@pytest.fixture
def at_one_load() -> Scenario:
    scenario = fleet_of(200, 50)
    flat = scenario.serving.model_copy(update={"requests_per_s": 1.0, "daily_swing": 0.0})
    return scenario.model_copy(update={"serving": flat})


def test_a_harvest_is_worth_the_dedicated_engines_that_sample_as_much(at_one_load: Scenario) -> None:
    """Not its tokens over a dedicated engine's rate beside it, whose batches the rollouts elsewhere make small: by that ``paper`` would be
    worth more than ROSE, and more than the time that production leaves, though it samples less in all."""
    cells = at_one_load.cells.model_copy(update={"in_flight_per_engine": 48})
    loaded = at_one_load.model_copy(update={"cells": cells})

    fixed, paper, rose = simulate_fleet(loaded, ("fixed_async", "paper", "rose")).systems

    worths = [system.summary["worth_dedicated_engines"] for system in (fixed, paper, rose)]
    assert paper.summary["sampled_tokens_per_s"] < rose.summary["sampled_tokens_per_s"]
    assert 0.0 == worths[0] < worths[1] < worths[2]
    for system, worth in zip((paper, rose), worths[1:], strict=True):
        assert worth <= 200 * time_left(loaded, system.cells[0].serving_own)


def test_a_harvest_s_worth_is_not_told_where_the_job_does_not_load_the_fleet(at_one_load: Scenario) -> None:
    result = simulate_fleet(at_one_load, ("rose",))

    assert math.isnan(result.systems[0].summary["worth_dedicated_engines"])
    assert "worth not told" in result.text
