"""What each mechanism brings, and where harvesting stops paying.   (simulated)

    python benchmarks/sim/sim_maps.py --json sim_maps.json [--quick] [--seconds 200]

At a quarter of the paper's 8B GRPO cell, two steps, 14 seeds.  *Ablations*: step time of ROSE without a mechanism over ROSE
with it, in four settings: the cell, bursts that production takes without help, bursts that are too much for it alone, and a
memory-poor device.  *Maps*: gain of ROSE over the fixed system along one axis at a time, where it pays and where it loses.  Each
figure is the mean of the seeds' ratios with its 95 % interval (Student's t); where the interval contains 1 the answer is open.
A run has 2,400 s for its steps.  ``not_ended``: of the seeds, those whose run did not end them all; where a system of a ratio has such
a seed there is no ratio, since the mean of the others is of the seeds that went well, and of a map the value is under ``not_ended_at``.
``misses_added``: requests of production, each beside itself in the run of the fixed system, over the time of both (less the last minute): late with
rollouts less late without, of all; mean over the seeds and interval as above.
Results are kept in the file as they come: start it again and it goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.report import machine  # noqa: E402
from rose.evaluation.statistics import mean_interval  # noqa: E402
from rose.sim.arrivals import make_arrivals  # noqa: E402
from rose.sim.scenario import Scenario  # noqa: E402
from rose.sim.scenario_file import load_scenario  # noqa: E402
from rose.sim.summary import Misses, compare_misses, summarize  # noqa: E402
from rose.sim.world import simulate  # noqa: E402

CELL = ROOT / "examples/scenarios/paper/grpo_8b.toml"
LIMIT_S = 2400.0
NUM_SEEDS = 14
SCHEMA = 2
"""1: misses of each run by itself, and steps of runs that did not end both."""
ABLATED = (
    "rose-admission",
    "rose-lending",
    "rose-continuation",
    "rose-affinity",
    "rose-delta",
    "rose-cost",
    "paper",
)
SETTINGS: dict[str, tuple[str, ...]] = {
    "cell": (),
    "bursts": ("serving.burst_factor=10.0", "serving.burst_every_s=60.0"),
    "overload": ("serving.requests_per_s=1.5", "serving.burst_factor=20.0", "serving.burst_every_s=60.0"),
    "memory": ("fleet.memory_use=0.5", "serving.burst_factor=12.0"),
}
AXES: dict[str, tuple[str, tuple[float, ...]]] = {
    "serving_load": ("serving.requests_per_s", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
    "link_gbps": ("links.relay_gbps", (1.0, 5.0, 20.0, 200.0)),
    "env_s": ("job.env_median_s", (0.05, 1.0, 5.0, 20.0)),
    "dedicated": ("fleet.dedicated", (1, 2, 4, 8)),
}
MODELS = ("qwen3-0.6b", "qwen3-8b")


def points(quick: bool) -> list[tuple[str, tuple[str, ...], str]]:
    """(key, changes, system) of every run but for its seed."""
    found: list[tuple[str, tuple[str, ...], str]] = []
    for setting, changes in SETTINGS.items():
        found.extend((f"ablation.{setting}", changes, name) for name in ("fixed_sync", "rose", *ABLATED))
    for axis, (field, values) in AXES.items():
        for value in values[:: 3 if quick else 1]:
            found.extend(
                (f"map.{axis}.{value}", (f"{field}={value}",), name) for name in ("fixed_sync", "rose")
            )
    for model in MODELS:
        changes = (f"job.model='{model}'",)
        found.extend((f"map.model.{model}", changes, name) for name in ("fixed_sync", "rose"))
    return found


def quarter(scenario: Scenario) -> Scenario:
    """A quarter of the cell: same ratios, one step."""
    fleet = scenario.fleet
    change = {
        name: max(1, getattr(fleet, name) // 4) for name in ("dedicated", "serving", "trainers", "spot")
    }
    job = scenario.job.model_copy(update={"num_groups": max(1, scenario.job.num_groups // 4)})
    return scenario.model_copy(update={"fleet": fleet.model_copy(update=change), "job": job, "num_steps": 1})


def scenario_of(changes: tuple[str, ...], seed: int) -> Scenario:
    # An axis that sets the fleet must come after the fleet was quartered.
    fleet = [change for change in changes if change.startswith("fleet.dedicated")]
    rest = [change for change in changes if change not in fleet]
    small = quarter(load_scenario(CELL, [*rest, f"seed={seed}"]))
    if fleet:
        size = int(float(fleet[0].partition("=")[2]))
        small = small.model_copy(update={"fleet": small.fleet.model_copy(update={"dedicated": size})})
    return small.model_copy(update={"num_steps": 2, "duration_s": LIMIT_S})


def run_point(
    changes: tuple[str, ...], system: str, seed: int, alone: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One run.

    Args:
        alone: What this returned for the fixed system, whose rollouts are elsewhere; None = this is it.
    """
    scenario = scenario_of(changes, seed)
    arrivals = make_arrivals(scenario.serving, scenario.fleet.serving, scenario.duration_s, seed)
    run = simulate(scenario, system, arrivals=arrivals)
    row = summarize(run)
    found = {key: row[key] for key in ("slo_missed", "ttft_p99_ms", "harvested_share", "cuts", "requeued")}
    found["step_s"] = row["step_s"] if row["steps"] == scenario.num_steps else None
    if alone is None:
        late = sorted((number, round(at_s, 6)) for number, at_s in run.late.items())
        return {**found, "end_s": run.duration_s, "late": late}
    end_s = min(run.duration_s, alone["end_s"])
    return {**found, "misses": asdict(compare_misses(run.late, dict(alone["late"]), arrivals.at_s, end_s))}


def conclude(data: dict[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for key, systems in data.items():
        for system, seeds in systems.items():
            other = (
                "rose"
                if key.startswith("ablation") and system not in ("rose", "fixed_sync")
                else "fixed_sync"
            )
            summary[f"{key}.{system}.not_ended"] = sum(row["step_s"] is None for row in seeds.values())
            missed = [row["slo_missed"] for row in seeds.values()]
            summary[f"{key}.{system}.slo_missed"] = round(float(np.mean(missed)), 5)
            if system == "fixed_sync":
                continue
            added = [Misses(**row["misses"]).share or 0.0 for row in seeds.values()]
            if len(added) > 1:
                mean, half = mean_interval(added)
                name = f"{key}.{system}.misses_added"
                summary |= {
                    name: round(mean, 5),
                    f"{name}.low": round(mean - half, 5),
                    f"{name}.high": round(mean + half, 5),
                }
            if other not in systems:
                continue
            pairs = [(seeds[s]["step_s"], systems[other][s]["step_s"]) for s in seeds if s in systems[other]]
            if not pairs or any(None in pair for pair in pairs):
                continue
            ratios = [mine / its if other == "rose" else its / mine for mine, its in pairs]
            name = f"{key}.{system}.{'time_over_rose' if other == 'rose' else 'gain_over_fixed'}"
            mean, half = mean_interval(ratios)
            summary[name] = round(mean, 3)
            summary[f"{name}.seeds"] = len(ratios)
            if len(ratios) > 1:
                summary[f"{name}.low"], summary[f"{name}.high"] = round(mean - half, 3), round(mean + half, 3)
    for axis, (_, values) in AXES.items():
        answers: dict[str, list[str]] = {"pays": [], "open": [], "loses": [], "not_ended": []}
        for value in values:
            point = f"map.{axis}.{value}"
            name = f"{point}.rose.gain_over_fixed"
            if any(summary.get(f"{point}.{system}.not_ended") for system in ("rose", "fixed_sync")):
                answers["not_ended"].append(str(value))
            elif name in summary:
                low, high = summary.get(f"{name}.low", 0.0), summary.get(f"{name}.high", math.inf)
                answers["pays" if low > 1 else "loses" if high < 1 else "open"].append(str(value))
        summary |= {f"map.{axis}.{answer}_at": ", ".join(found) for answer, found in answers.items() if found}
    return summary


def save(path: Path | None, data: dict[str, Any]) -> None:
    if path is None:
        return
    document = {
        "schema": SCHEMA,
        "benchmark": "sim_maps",
        "summary": conclude(data),
        "details": data,
        "machine": machine(),
    }
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer points")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after this long; start again to go on"
    )
    parser.add_argument(
        "--only", default="", metavar="PREFIX", help="for example map.dedicated or ablation.bursts"
    )
    args = parser.parse_args()
    data: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        document = json.loads(args.json.read_text())
        if document["schema"] != SCHEMA:
            parser.error(f"{args.json} was begun by another version of this program: choose another file")
        data = document["details"]
    began = time.monotonic()
    for seed in range(1 if args.quick else NUM_SEEDS):
        for key, changes, system in points(args.quick):
            if not key.startswith(args.only):
                continue
            done = data.setdefault(key, {}).setdefault(system, {})
            if str(seed) in done or time.monotonic() - began > args.seconds:
                continue
            alone = None if system == "fixed_sync" else data[key]["fixed_sync"].get(str(seed))
            if system != "fixed_sync" and alone is None:
                continue
            done[str(seed)] = run_point(changes, system, seed, alone)
            save(args.json, data)
        print(f"seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    save(args.json, data)
    for key, value in conclude(data).items():
        print(f"{key:64} {value}")


if __name__ == "__main__":
    main()
