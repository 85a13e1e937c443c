"""Fleet mode: cells stand for the fleet, and say so in engines and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.sim.fleet import simulate_fleet, write_fleet_report
from rose.sim.scenario import Scenario
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
