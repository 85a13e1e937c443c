"""Cells: small exact fleets, at a load, for a few minutes.  What a large fleet does is read off them.

A cell keeps its engines busy (a fixed number of trajectories in flight, asynchronous training without a limit), so its rates
are *capacities*: tokens per second that a serving or dedicated engine samples at that load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rose.sim.arrivals import Arrivals, Floats, make_arrivals
from rose.sim.scenario import Scenario
from rose.sim.summary import count_missed
from rose.sim.world import SimResult, simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """Rates are per engine; ``load`` is requests per second and serving engine."""

    load: float
    num_dedicated: int
    num_serving: int
    dedicated_tokens_s: float
    harvested_tokens_s: float
    missed: int
    requests: int
    """Answered, or late without an answer when the cell ended: those of which it is told whether they ``missed`` a limit."""
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    cuts_per_min: float
    lent_share: float
    serving_kv: float
    """Share of its KV memory that production's requests hold, on average."""
    late: Mapping[int, float]
    """See :class:`rose.sim.world.SimResult`; likewise the next."""
    arrived_s: Floats
    duration_s: float
    serving_busy: float
    """Share of the time in which a serving engine's steps ran."""
    serving_own: float
    """Share that they would have taken with the device to themselves: rollouts beside them make steps longer."""

    @property
    def slo_missed(self) -> float:
        return self.missed / self.requests if self.requests else 0.0


def cell_scenario(
    scenario: Scenario, load: float, seed: int, *, serving: int = 0, dedicated: int = 0
) -> Scenario:
    """The cell of ``scenario`` at ``load``; sizes default to those of its ``cells`` table."""
    cells, fleet = scenario.cells, scenario.fleet
    serving, dedicated = serving or cells.serving, dedicated or cells.dedicated
    change = {
        "serving": serving,
        "dedicated": dedicated,
        "trainers": fleet.trainers,
        "spot": min(fleet.spot, serving),
    }
    return scenario.model_copy(
        update={
            "mode": "exact",
            "seed": seed,
            "duration_s": cells.warm_s + cells.seconds,
            "num_steps": None,
            "trajectories_in_flight": max(
                scenario.job.group_size, cells.in_flight_per_engine * (serving + dedicated)
            ),
            "fleet": fleet.model_copy(update=change),
            # The daily swing is in the load already.
            "serving": scenario.serving.model_copy(update={"requests_per_s": load, "daily_swing": 0.0}),
        }
    )


def run_cell(
    scenario: Scenario,
    system: str,
    load: float,
    seed: int,
    *,
    serving: int = 0,
    dedicated: int = 0,
    arrivals: Arrivals | None = None,
) -> CellResult:
    """One cell; ``system`` keeps its mechanisms but trains asynchronously.

    Args:
        arrivals: Production's requests; None = the scenario's trace or generator at ``load``.
    """
    config = cell_scenario(scenario, load, seed, serving=serving, dedicated=dedicated)
    warm_s = scenario.cells.warm_s
    if arrivals is None:
        arrivals = make_arrivals(config.serving, config.fleet.serving, config.duration_s, seed)
    run = simulate(config, system, arrivals=arrivals, asynchronous=True)
    return measure(run, load, warm_s)


def run_dedicated(scenario: Scenario, seed: int, engines: int) -> CellResult:
    """The cell's job, with all its trajectories, on dedicated engines only."""
    config = cell_scenario(scenario, 1e-3, seed)
    fleet = config.fleet.model_copy(update={"serving": 0, "dedicated": engines})
    config = config.model_copy(update={"fleet": fleet})
    return measure(simulate(config, "rose", asynchronous=True), 0.0, scenario.cells.warm_s)


def measure(run: SimResult, load: float, warm_s: float) -> CellResult:
    """What happened after ``warm_s``."""
    fleet = run.scenario.fleet
    warm = [sample for sample in run.samples if sample.at_s >= warm_s]
    before = warm[0] if warm else None
    first = before.sampled if before is not None else (0, 0)
    last = (run.counters.sampled["dedicated"], run.counters.sampled["harvested"])
    begin_s = before.at_s if before is not None else 0.0
    ttft = [(at, value) for at, value in run.ttft_s if at >= warm_s]
    tpot = [(at, value) for at, value in run.tpot_s if at >= warm_s]
    missed, requests = count_missed(run, warm_s)
    return CellResult(
        load=load,
        num_dedicated=fleet.dedicated,
        num_serving=fleet.serving,
        dedicated_tokens_s=(last[0] - first[0]) / (run.duration_s - begin_s) / max(1, fleet.dedicated),
        harvested_tokens_s=(last[1] - first[1]) / (run.duration_s - begin_s) / max(1, fleet.serving),
        missed=missed,
        requests=requests,
        ttft_s=tuple(value for _, value in ttft),
        tpot_s=tuple(value for _, value in tpot),
        cuts_per_min=run.counters.cuts / run.duration_s * 60.0 / max(1, fleet.serving),
        lent_share=float(np.mean([sample.lent_share for sample in run.samples])) if run.samples else 0.0,
        serving_kv=float(np.mean([sample.serving_kv for sample in warm])) if warm else 0.0,
        late=run.late,
        arrived_s=run.arrived_s,
        duration_s=run.duration_s,
        serving_busy=run.busy["serving"] / run.duration_s / max(1, fleet.serving),
        serving_own=run.busy["serving_own"] / run.duration_s / max(1, fleet.serving),
    )
