"""A fleet too large to simulate exactly: serving as a fluid, rollouts by sampled cells.

1. A few :mod:`rose.sim.cells` between the quietest and the busiest hour give rates per engine as a function of load.
2. Serving is its expected rate, minute by minute over the run; rates are read off by linear interpolation.
3. Sums over engines and minutes give tokens; training takes what it can; production's percentiles are those of the cells'
   requests, weighted by how much traffic the day has at each load.
4. What a harvest is worth is read off :mod:`rose.sim.worth`, load by load: dedicated engines that the job would need more, to sample as
   much.  Not what its tokens are over a dedicated engine's rate beside it: rollouts on other engines leave that one smaller batches.

Left out: steps of synchronous training (their tails do not scale by rates), and any effect of a fleet's size on routing.
``benchmarks/sim/sim.py`` states the error against an exact run of 64 devices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rose.evaluation.charts import Series, legend, line_chart, linear_axis
from rose.evaluation.page import whole_page, write_whole
from rose.sim.arrivals import daily
from rose.sim.cells import CellResult, run_cell, run_dedicated
from rose.sim.hardware import Hardware
from rose.sim.job import TRAIN_FLOPS_PER_PARAM
from rose.sim.scenario import Scenario
from rose.sim.systems import SYSTEMS
from rose.sim.workload import make_script
from rose.sim.worth import Yardstick, gpu_ratio, sizes, time_left, worth_of, yardstick_of

BIN_S = 60.0


@dataclass(kw_only=True, slots=True)
class FleetSystem:
    """One system over the whole run; lists are per minute."""

    name: str
    cells: list[CellResult]
    load: list[float]
    dedicated_tokens_s: list[float]
    harvested_tokens_s: list[float]
    summary: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """``worth_dedicated_engines`` counts engines of ``fleet.rollout_gpus`` each; NaN where the job does not load the fleet."""


@dataclass(kw_only=True, slots=True)
class FleetResult:
    scenario: Scenario
    systems: list[FleetSystem]

    @property
    def text(self) -> str:
        lines = [
            f"{self.scenario.name}: {self.scenario.duration_s / 3600:.1f} h, fluid serving, sampled cells"
        ]
        for system in self.systems:
            s = system.summary
            engines = s["worth_dedicated_engines"]
            worth = "not told" if math.isnan(engines) else f"{engines:,.0f} dedicated engines"
            lines.append(
                f"  {system.name:14} {s['trained_tokens_per_s']:12,.0f} trained tokens/s   "
                f"harvested {s['harvested_share']:5.1%}, worth {worth:23}   "
                f"TTFT P99 {s['ttft_p99_ms']:5.0f} ms   SLO missed {s['slo_missed']:.2%}"
            )
        if any(math.isnan(system.summary["worth_dedicated_engines"]) for system in self.systems):
            lines.append(
                "  worth is not told: the job does not load the fleet, so any number of engines looks equal "
                "(cells.in_flight_per_engine)"
            )
        return "\n".join(lines)


def simulate_fleet(
    scenario: Scenario, names: tuple[str, ...], progress: Callable[[float], None] | None = None
) -> FleetResult:
    """Cells for each system, then the fluid day."""
    times = np.arange(0.5 * BIN_S, scenario.duration_s, BIN_S)
    load = scenario.serving.requests_per_s * daily(scenario.serving, times)
    low, high = float(load.min()), float(load.max())
    num = scenario.cells.loads if high > low * 1.001 else 1
    points = np.linspace(low, high, num)
    dedicated_only = sizes(scenario)
    num_runs, done = len(points) * len(names) + len(dedicated_only), 0

    def ended(cell: CellResult) -> CellResult:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done / num_runs)
        return cell

    yardstick = yardstick_of(
        [ended(run_dedicated(scenario, scenario.seed, engines)) for engines in dedicated_only]
    )
    systems: list[FleetSystem] = []
    for name in names:
        cells = [
            ended(run_cell(scenario, name, float(point), scenario.seed + index))
            for index, point in enumerate(points)
        ]
        systems.append(_fluid(scenario, name, cells, load, yardstick))
    return FleetResult(scenario=scenario, systems=systems)


def _fluid(
    scenario: Scenario, name: str, cells: list[CellResult], load: Any, yardstick: Yardstick
) -> FleetSystem:
    fleet = scenario.fleet
    at = [cell.load for cell in cells]
    dedicated = fleet.dedicated * np.interp(load, at, [cell.dedicated_tokens_s for cell in cells])
    harvested = fleet.serving * np.interp(load, at, [cell.harvested_tokens_s for cell in cells])
    total = dedicated + harvested
    scripts = [make_script(scenario.job, scenario.seed, 1 << 20, member) for member in range(256)]
    sampled = sum(sum(script.outputs) for script in scripts)
    whole = sum(script.total_tokens for script in scripts)
    hardware = Hardware(scenario)
    gpu, model = hardware.gpu, hardware.policy_model
    train_tokens_s = (
        fleet.trainers * gpu.flops * scenario.efficiency.training / (TRAIN_FLOPS_PER_PARAM * model.num_params)
    )
    rolled_tokens_s = float(total.mean()) * whole / sampled
    # Each minute's requests come from the cells around its load: weights of the percentiles.
    weights = [float(np.interp(load, at, np.eye(len(at))[index]) @ load) for index in range(len(at))]
    missed = sum(weight * cell.slo_missed for weight, cell in zip(weights, cells, strict=True)) / sum(weights)
    worths = [_worth(scenario, cell, yardstick) for cell in cells]
    summary = {
        "sampled_tokens_per_s": float(total.mean()),
        "harvested_share": float(harvested.sum() / total.sum()) if total.sum() else 0.0,
        "worth_dedicated_engines": fleet.serving * float(np.interp(load, at, worths).mean()),
        "rolled_tokens_per_s": rolled_tokens_s,
        "trained_tokens_per_s": min(rolled_tokens_s, train_tokens_s),
        "training_bound": float(train_tokens_s < rolled_tokens_s),
        "steps_per_hour": min(rolled_tokens_s, train_tokens_s)
        / (whole / len(scripts) * scenario.job.num_groups * scenario.job.group_size)
        * 3600.0,
        "slo_missed": missed,
        "ttft_p99_ms": _weighted(cells, weights, 99.0, "ttft_s") * 1e3,
        "tpot_p99_ms": _weighted(cells, weights, 99.0, "tpot_s") * 1e3,
    }
    return FleetSystem(
        name=name,
        cells=cells,
        load=[float(value) for value in load],
        dedicated_tokens_s=[float(value) for value in dedicated],
        harvested_tokens_s=[float(value) for value in harvested],
        summary=summary,
    )


def _worth(scenario: Scenario, cell: CellResult, yardstick: Yardstick) -> float:
    """Dedicated engines a serving one; NaN where it is not told."""
    worth = worth_of(cell, yardstick)
    most = time_left(scenario, cell.serving_own) * gpu_ratio(scenario)
    return math.nan if worth is None else min(worth, most)


def _weighted(cells: list[CellResult], weights: list[float], q: float, name: str) -> float:
    values: list[float] = []
    shares: list[float] = []
    for cell, weight in zip(cells, weights, strict=True):
        data = getattr(cell, name)
        values.extend(data)
        shares.extend([weight / max(1, len(data))] * len(data))
    if not values:
        return math.nan
    order = np.argsort(values)
    cumulative = np.cumsum(np.array(shares)[order])
    index = int(np.searchsorted(cumulative, q / 100.0 * cumulative[-1]))
    return float(np.array(values)[order][min(index, len(values) - 1)])


def write_fleet_report(result: FleetResult, directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": 1,
        "summary": {
            f"{system.name}.{key}": round(value, 6) if math.isfinite(value) else None
            for system in result.systems
            for key, value in system.summary.items()
        },
        "details": {
            "scenario": result.scenario.model_dump(mode="json"),
            "cells": {
                system.name: [
                    {
                        "load": cell.load,
                        "dedicated_tokens_s": cell.dedicated_tokens_s,
                        "harvested_tokens_s": cell.harvested_tokens_s,
                        "slo_missed": cell.slo_missed,
                        "cuts_per_min": cell.cuts_per_min,
                    }
                    for cell in system.cells
                ]
                for system in result.systems
            },
        },
    }
    colours = ("production", "harvested", "dedicated", "policy", "lent", "pressure", "again")
    hours = result.scenario.duration_s / 3600.0
    most = max(
        d + h
        for system in result.systems
        for d, h in zip(system.dedicated_tokens_s, system.harvested_tokens_s, strict=True)
    )
    series = [
        Series(
            name=SYSTEMS[system.name].label,
            css=colours[index % len(colours)],
            points=[
                ((bin_index + 0.5) * BIN_S / 3600.0, d + h)
                for bin_index, (d, h) in enumerate(
                    zip(system.dedicated_tokens_s, system.harvested_tokens_s, strict=True)
                )
                if bin_index % 5 == 0
            ],
        )
        for index, system in enumerate(result.systems)
    ]
    chart = line_chart(
        series,
        linear_axis(hours, lambda value: f"{value:.0f}", "hours"),
        linear_axis(most, lambda value: f"{value / 1000:.0f}k"),
        title="Sampled tokens per second over the run",
        dots=False,
    )
    keys = [(colours[index % len(colours)], system.name) for index, system in enumerate(result.systems)]
    body = (
        f"<h1>{escape(result.scenario.title or result.scenario.name)}</h1>"
        '<p class="lead">Simulated: serving as a fluid, rollouts by sampled cells.</p>'
        f"<section><h2>Sampled tokens per second</h2>{chart}{legend(keys)}</section>"
        f"<section><pre>{escape(result.text)}</pre></section>"
    )
    html = whole_page(result.scenario.name, body)
    paths = [directory / "fleet.json", directory / "fleet.html"]
    for path, text in zip(paths, (json.dumps(data, indent=1) + "\n", html), strict=True):
        write_whole(path, text)
    return paths
