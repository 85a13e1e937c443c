"""What a plan rests on that nobody has measured: each with a low and a high value, and how to measure it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rose.sim.scenario import Scenario
from rose.sim.traffic import Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """Something that the figures rest on and nobody has measured here."""

    name: str
    """For people."""
    low: str
    high: str
    low_changes: Mapping[str, Any]
    """Dotted setting of the scenario -> value; ``*setting`` multiplies; ``load`` multiplies production's requests."""
    high_changes: Mapping[str, Any]
    measure: str
    """How to replace it by a measurement."""
    is_risky: bool
    """Whether production feels it: then its ends are judged at the busiest stretch too."""


_PROFILE = "measure step times on one GPU of the fleet: `rose profile`, then serving.profile and job.profile"
_JOB = "take the lengths from your job's own trajectories: `rose traj ls`, then [job]"


def assumptions(scenario: Scenario, traffic: Traffic) -> list[Assumption]:
    """Those that matter for this fleet; what was measured is none."""
    found: list[Assumption] = []

    def add(
        name: str,
        setting: str,
        low: float,
        high: float,
        measure: str,
        *,
        times: bool = False,
        risky: bool = False,
    ) -> None:
        key, word = (f"*{setting}", "x ") if times else (setting, "")
        found.append(
            Assumption(
                name=name,
                low=f"{word}{low:g}",
                high=f"{word}{high:g}",
                low_changes={key: low},
                high_changes={key: high},
                measure=measure,
                is_risky=risky,
            )
        )

    if scenario.serving.profile is None or scenario.job.profile is None:
        add("share of peak FLOPs that prompts reach", "efficiency.compute", 0.35, 0.65, _PROFILE, risky=True)
        add("share of memory bandwidth that decoding reaches", "efficiency.bandwidth", 0.5, 0.85, _PROFILE)
        # Published decode steps on one GPU are about as short as this, see docs/simulator.md.
        found.append(
            Assumption(
                name="what a decode step takes beside its reading",
                low="nothing",
                high="2 ms more",
                low_changes={"efficiency.decode_hidden": 1.0, "efficiency.step_overhead_s": 0.0},
                high_changes={"efficiency.step_overhead_s": scenario.efficiency.step_overhead_s + 0.002},
                measure=_PROFILE,
                is_risky=False,
            )
        )
    overlap = "compare both engines' steps alone and together on one GPU: `python benchmarks/gpu_check.py`"
    add("overlap of two engines on a GPU", "efficiency.overlap", 0.0, 0.4, overlap, risky=True)
    if traffic.knows_engines:
        load = "watch a longer stretch, and the next release of your product"
        add("production's traffic grows or shrinks", "load", 0.7, 1.3, load, times=True, risky=True)
    else:
        load = "say how many engines served this traffic: --engines N"
        add("traffic per engine", "load", 0.5, 2.0, load, times=True, risky=True)
    if not traffic.knows_bursts:
        bursts = "scrape every 15 s, or log arrival times for an hour and use --trace"
        add(
            "bursts between two scrapes (deviation of a second's rate)",
            "serving.noise",
            0.0,
            1.0,
            bursts,
            risky=True,
        )
    if traffic.hit_share is None or traffic.hit_share > 0.05:
        prompts = (
            "log prompt lengths without the cached part; the prefix cache of production is not simulated"
        )
        add("production's prompt lengths", "prompts", 0.6, 1.3, prompts, times=True)
    add("tokens that a turn samples", "job.output_median", 0.5, 2.0, _JOB, times=True)
    add("tokens of an observation", "job.observation_median", 0.5, 2.0, _JOB, times=True)
    running = "count your job's concurrent trajectories: batch x group size, over all engines"
    add("trajectories under way per engine", "cells.in_flight_per_engine", 0.5, 2.0, running, times=True)
    add(
        "GB per GPU for activations and graphs",
        "fleet.reserve_gb",
        2.0,
        8.0,
        "`rose doctor --config node.toml`",
    )
    return found


def changed(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """With other settings; ``*table.key`` multiplies, and keeps whole numbers whole."""
    for name, value in changes.items():
        table, _, key = name.lstrip("*").partition(".")
        section = getattr(scenario, table)
        if name.startswith("*"):
            old = getattr(section, key)
            value = max(1, round(old * value)) if isinstance(old, int) else old * value
        scenario = scenario.model_copy(update={table: section.model_copy(update={key: value})})
    return scenario
