"""``rose plan``: how many GPUs' worth of rollouts a fleet can lend, with which headroom, at what risk.  One page.

For three loads of the day (with a trace: its quietest, an average and its busiest stretch) and several headrooms, a cell of the fleet is simulated with ROSE, and the same cell, same requests,
without any rollouts.  Worth is in dedicated engines: harvested tokens over what a dedicated engine samples.  Risk is what
production loses against the cell without rollouts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from rose.evaluation.charts import Series, legend, line_chart, linear_axis
from rose.evaluation.statistics import percentile
from rose.sim.arrivals import trace_windows
from rose.sim.cells import CellResult, run_cell
from rose.sim.scenario import Scenario

HEADROOMS = (0.05, 0.1, 0.2, 0.3)
SAFE_EXTRA = 0.001
"""Recommended is the headroom that harvests most while at most this share more of production misses its limits."""
SAME_WORTH = 0.99
"""Of headrooms that harvest as much, but for this, the largest: memory that rollouts do not miss costs nothing to leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    hour: str
    headroom: float
    worth: float
    """Dedicated engines, of the whole fleet."""
    extra_missed: float
    ttft_p99_ms: float
    alone_ttft_p99_ms: float
    tpot_p99_ms: float
    alone_tpot_p99_ms: float
    cuts_per_min: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    scenario: Scenario
    cells: tuple[Cell, ...]
    headroom: float
    safe: bool

    def of(self, headroom: float) -> list[Cell]:
        return [cell for cell in self.cells if cell.headroom == headroom]

    @property
    def text(self) -> str:
        best = self.of(self.headroom)
        worth = [cell.worth for cell in best]
        lines = [
            f"{self.scenario.name}: {self.scenario.fleet.serving} serving engines on {self.scenario.fleet.device}",
            f"lend with min_headroom_fraction = {self.headroom:g}: rollouts worth {min(worth):.1f} to {max(worth):.1f} "
            f"dedicated engines ({np.mean(worth):.1f} on average over three loads)",
            "risk: up to "
            f"{max(cell.extra_missed for cell in best):.2%} of production requests more over their limits, "
            f"first-token P99 {max(cell.alone_ttft_p99_ms for cell in best):.0f} -> "
            f"{max(cell.ttft_p99_ms for cell in best):.0f} ms, per-token P99 "
            f"{max(cell.alone_tpot_p99_ms for cell in best):.0f} -> {max(cell.tpot_p99_ms for cell in best):.0f} ms",
        ]
        serving = self.scenario.serving
        if serving.trace is not None:
            lines.append(
                f"traffic: {serving.trace.name}, scaled to {serving.requests_per_s:g} requests per second and engine; "
                "its quietest, an average and its busiest stretch"
            )
        if not self.safe:
            lines.append(
                f"warning: no headroom tried keeps the extra misses under {SAFE_EXTRA:.1%}; the safest is shown"
            )
        lines.append("simulated, not measured: run a node in mode `observe` before you switch it on")
        return "\n".join(lines)


def make_plan(scenario: Scenario, progress: Callable[[float], None] = lambda share: None) -> Plan:
    """Three loads by four headrooms, and the same loads without rollouts.

    Args:
        progress: Told which share of the cells is done.
    """
    serving = scenario.serving
    moments = _moments(scenario)
    cells: list[Cell] = []
    for number, (hour, (load, start_s)) in enumerate(moments.items()):
        now = scenario.model_copy(
            update={"serving": serving.model_copy(update={"trace_start_s": serving.trace_start_s + start_s})}
        )
        alone = run_cell(now, "fixed_async", load, scenario.seed + number)
        for index, headroom in enumerate(HEADROOMS):
            progress((number + index / len(HEADROOMS)) / len(moments))
            config = now.model_copy(
                update={"lending": scenario.lending.model_copy(update={"min_headroom_fraction": headroom})}
            )
            with_rose = run_cell(config, "rose", load, scenario.seed + number)
            cells.append(_cell(scenario, hour, headroom, with_rose, alone))
    headroom, safe = recommend(cells)
    return Plan(scenario=scenario, cells=tuple(cells), headroom=headroom, safe=safe)


def recommend(cells: Sequence[Cell]) -> tuple[float, bool]:
    """The headroom to lend with, and whether it is safe; the safest where none is."""
    by_headroom = {headroom: [c for c in cells if c.headroom == headroom] for headroom in HEADROOMS}
    risk = {headroom: max(c.extra_missed for c in group) for headroom, group in by_headroom.items()}
    worth = {headroom: sum(c.worth for c in group) for headroom, group in by_headroom.items()}
    safe = [headroom for headroom in HEADROOMS if risk[headroom] <= SAFE_EXTRA]
    if not safe:
        return min(HEADROOMS, key=lambda headroom: risk[headroom]), False
    most = max(worth[headroom] for headroom in safe)
    return max(headroom for headroom in safe if worth[headroom] >= SAME_WORTH * most), True


def _moments(scenario: Scenario) -> dict[str, tuple[float, float]]:
    """Three moments of production: mean rate per engine, and where the trace begins.

    A trace has its own quiet and busy stretches, so its rate is one for all three; the generator's is its daily swing.
    """
    serving, cells = scenario.serving, scenario.cells
    rate = serving.requests_per_s
    if serving.trace is not None:
        starts = trace_windows(serving.trace, cells.warm_s + cells.seconds)
        return {hour: (rate, start_s) for hour, start_s in starts.items()}
    swing = serving.daily_swing
    loads = {"quiet": rate * (1.0 - swing), "mean": rate, "busy": rate * (1.0 + swing)}
    return {hour: (max(load, 1e-3), 0.0) for hour, load in loads.items()}


def _cell(scenario: Scenario, hour: str, headroom: float, rose: CellResult, alone: CellResult) -> Cell:
    per_engine = alone.dedicated_tokens_s or 1.0
    return Cell(
        hour=hour,
        headroom=headroom,
        worth=rose.harvested_tokens_s / per_engine * scenario.fleet.serving,
        extra_missed=max(0.0, rose.slo_missed - alone.slo_missed),
        ttft_p99_ms=percentile(rose.ttft_s, 0.99) * 1e3 if rose.ttft_s else 0.0,
        alone_ttft_p99_ms=percentile(alone.ttft_s, 0.99) * 1e3 if alone.ttft_s else 0.0,
        tpot_p99_ms=percentile(rose.tpot_s, 0.99) * 1e3 if rose.tpot_s else 0.0,
        alone_tpot_p99_ms=percentile(alone.tpot_s, 0.99) * 1e3 if alone.tpot_s else 0.0,
        cuts_per_min=rose.cuts_per_min,
    )


def write_plan(plan: Plan, directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    hours = list(dict.fromkeys(cell.hour for cell in plan.cells))
    colours = ("dedicated", "production", "harvested")
    worth = line_chart(
        [
            Series(
                name=hour,
                css=css,
                points=[(c.headroom * 100, c.worth) for c in plan.cells if c.hour == hour],
            )
            for hour, css in zip(hours, colours, strict=True)
        ],
        linear_axis(max(HEADROOMS) * 100, lambda value: f"{value:.0f} %", "headroom"),
        linear_axis(max(cell.worth for cell in plan.cells), lambda value: f"{value:.0f}"),
        title="Worth in dedicated engines",
    )
    rows = "".join(
        f"<tr><td>{cell.hour}, headroom {cell.headroom:.0%}</td><td>{cell.worth:.1f}</td><td>{cell.extra_missed:.2%}</td>"
        f"<td>{cell.alone_ttft_p99_ms:.0f} / {cell.ttft_p99_ms:.0f}</td>"
        f"<td>{cell.alone_tpot_p99_ms:.0f} / {cell.tpot_p99_ms:.0f}</td><td>{cell.cuts_per_min:.2f}</td></tr>"
        for cell in plan.cells
    )
    page = files("rose.demo").joinpath("report.html").read_text(encoding="utf-8")
    style = page[page.index("<style>") : page.index("</style>") + len("</style>")]
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>plan</title>{style}</head><body><main>'
        f"<h1>What {escape(plan.scenario.name)} can lend</h1>"
        + "".join(f'<p class="lead">{escape(line)}</p>' for line in plan.text.splitlines())
        + f"<section><h2>Worth, in dedicated engines</h2>{worth}{legend(list(zip(colours, hours, strict=True)))}</section>"
        "<section><table><tr><th></th><th>worth</th><th>misses, more</th><th>TTFT P99 ms, alone / with</th>"
        f"<th>TPOT P99 ms, alone / with</th><th>cuts per engine and minute</th></tr>{rows}</table></section>"
        "</main></body></html>\n"
    )
    data = {
        "schema": 1,
        "summary": {
            "headroom": plan.headroom,
            "safe": plan.safe,
            "worth_mean": float(np.mean([cell.worth for cell in plan.of(plan.headroom)])),
            "extra_missed": max(cell.extra_missed for cell in plan.of(plan.headroom)),
        },
        "details": {
            "cells": [
                {name: getattr(cell, name) for name in Cell.__dataclass_fields__} for cell in plan.cells
            ],
            "scenario": plan.scenario.model_dump(mode="json"),
        },
    }
    paths = [directory / "plan.html", directory / "plan.json"]
    for path, text in zip(paths, (html, json.dumps(data, indent=1) + "\n"), strict=True):
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    return paths
