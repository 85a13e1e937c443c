"""The paper's setting: simulated beside published, and how often the sign of a gain holds.

    python benchmarks/sim_paper.py --json benchmarks/results/sim/sim_paper/DATE.json [--draws 200] [--only grpo_8b]

Four cells (examples/scenarios/paper/), three seeds each; then draws in which the ten main assumptions are varied by up to 30 %,
at a quarter of each cell's size and one step.  A claim is that a sign holds in 90 % of the draws.  A cell takes no further draw once
its three answers are known: the rest of the draws could not change them, or an exact binomial interval leaves 90 % out at one of
five looks, each of 99 %, so that an answer is wrong in at most one of twenty cases.  Results are kept in FILE as they come: start it
again and it goes on.

Beside each gain stands what the cell can show at most: its *ceiling* with the harvestable GPUs fully dedicated to rollouts, the faster of
ROSE's placement and the fixed system's, and with an engine for each trajectory.  Misses that rollouts add are counted request by request
against the fixed system's run, over the window that both have.
The assumptions are in the scenarios and in docs/simulator.md, and were committed before the first run of this program.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rose.sim.arrivals import Arrivals, make_arrivals
from rose.sim.scenario import Scenario
from rose.sim.scenario_file import load_scenario
from rose.sim.summary import compare_misses, summarize
from rose.sim.world import simulate

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.lib.report import machine  # noqa: E402

CELLS = ("grpo_8b", "grpo_32b", "dapo_8b", "dapo_32b")
PUBLISHED = {"grpo_8b": 1.31, "grpo_32b": 1.46, "dapo_8b": 1.42, "dapo_32b": 3.31}
"""Step-time gain of the paper's system over its fixed baseline (arXiv 2605.06534)."""
SEEDS = (0, 1, 2)
VARIED = (
    "efficiency.compute",
    "efficiency.bandwidth",
    "efficiency.overlap",
    "serving.requests_per_s",
    "serving.burst_factor",
    "job.output_median",
    "job.observation_median",
    "job.turns_median",
    "job.env_median_s",
    "links.host_path_gb_s",
)
RIVALS = {
    # system: (metric, published low, published high, source)
    "spot": ("allocation_overhead", 0.068, 0.073, "arXiv 2605.06534, RLBoost+"),
    "serverless": ("allocation_overhead", 0.15, 0.26, "arXiv 2605.06534, serverless baseline"),
    "fixed_async": ("speedup", 2.77, 2.77, "arXiv 2505.24298 (AReaL), up to, over synchronous"),
    "trainers": ("speedup", 2.17, 2.79, "PEARL, over fixed-resource ROLL"),
    "paper": ("speedup", 1.31, 3.31, "arXiv 2605.06534, per cell"),
}
TOLERANCE = 0.25
SHARE = 0.9
"""Of the draws in which a sign must hold."""
LOOKS = (26, 52, 104, 152, 200)
"""Numbers of draws at which the interval is looked at: 52 wins of 52 are the first that leave 90 % out."""
LOOK_ERROR = 0.01
PAIRS = (("rose", "fixed_sync"), ("paper", "fixed_sync"), ("rose", "paper"))
FIRST = ("fixed_sync", "rose", "paper")
CEILINGS = {
    # name: (systems, of which the fastest counts)
    "ceiling_dedicated": ("fixed_sync", "rose"),
    "ceiling_unlimited": ("fixed_sync",),
}
REST = ("fixed_async", "trainers", "spot", "serverless", "static", "rose-cost")


def quarter(scenario: Scenario) -> Scenario:
    """A quarter of the cell: same ratios, one step."""
    fleet = scenario.fleet
    change = {
        name: max(1, getattr(fleet, name) // 4) for name in ("dedicated", "serving", "trainers", "spot")
    }
    job = scenario.job.model_copy(update={"num_groups": max(1, scenario.job.num_groups // 4)})
    return scenario.model_copy(update={"fleet": fleet.model_copy(update=change), "job": job, "num_steps": 1})


def draw(cell: str, number: int) -> Scenario:
    rng = random.Random(f"{cell}-{number}")
    base = load_scenario(ROOT / f"examples/scenarios/paper/{cell}.toml")
    changes = [f"seed={1000 + number}"]
    for name in VARIED:
        table, key = name.split(".")
        value = getattr(getattr(base, table), key) * rng.uniform(0.7, 1.3)
        changes.append(f"{name}={value!r}")
    return quarter(load_scenario(ROOT / f"examples/scenarios/paper/{cell}.toml", changes))


def cell_scenario(cell: str, seed: int) -> Scenario:
    return load_scenario(ROOT / f"examples/scenarios/paper/{cell}.toml", [f"seed={seed}"])


@functools.cache
def arrivals_of(cell: str, seed: int) -> Arrivals:
    scenario = cell_scenario(cell, seed)
    return make_arrivals(scenario.serving, scenario.fleet.serving, scenario.duration_s, seed)


def ceiling_scenario(scenario: Scenario, name: str) -> Scenario:
    """The same job with no serving beside it: on all GPUs of the cell, or with an engine for every trajectory it can have under way."""
    fleet, job = scenario.fleet, scenario.job
    dedicated = fleet.dedicated + fleet.serving * fleet.serving_gpus // fleet.rollout_gpus
    if name == "ceiling_unlimited":
        # DAPO begins as many groups as its share of usable ones calls for.
        share = job.keep_low if job.algorithm == "dapo" else 1.0
        dedicated = math.ceil(job.num_groups / share) * job.group_size
    change = {"dedicated": dedicated, "serving": 0}
    return scenario.model_copy(update={"fleet": fleet.model_copy(update=change), "heartbeat_s": 1.0})


def run_cell(cell: str, seed: int, system: str) -> dict[str, Any]:
    scenario = cell_scenario(cell, seed)
    if system in CEILINGS:
        rows = [run_row(ceiling_scenario(scenario, system), name, None) for name in CEILINGS[system]]
        ended = [row for row in rows if row["step_s"] is not None] or rows
        return min(ended, key=lambda row: row["step_s"] or math.inf)
    return run_row(scenario, system, arrivals_of(cell, seed))


def run_row(scenario: Scenario, system: str, arrivals: Arrivals | None) -> dict[str, Any]:
    run = simulate(scenario, system, arrivals=arrivals)
    late = sorted((number, round(at_s, 6)) for number, at_s in run.late.items())
    return {
        **summarize(run),
        "system": system,
        "cpu_s": round(run.cpu_s, 1),
        "end_s": run.duration_s,
        "late": late,
    }


def run_draw(cell: str, number: int) -> dict[str, Any]:
    scenario = draw(cell, number)
    arrivals = make_arrivals(scenario.serving, scenario.fleet.serving, 1800.0, scenario.seed)
    rows: dict[str, Any] = {}
    for name in ("fixed_sync", "paper", "rose"):
        row = summarize(simulate(scenario.model_copy(update={"duration_s": 1800.0}), name, arrivals=arrivals))
        rows[name] = {"step_s": row["step_s"], "slo_missed": row["slo_missed"]}
    return rows


def is_faster(row: dict[str, Any], name: str, other: str) -> bool:
    """A step that did not end within the run is slower than any that did; of two that did not, none is faster."""
    mine, its = row[name]["step_s"], row[other]["step_s"]
    return mine is not None and (its is None or mine < its)


@functools.cache
def interval(won: int, num: int, error: float = 0.05) -> tuple[float, float]:
    """Clopper and Pearson's for the chance of a win."""

    def tail(chance: float, low: int, high: int) -> float:
        return math.fsum(
            math.comb(num, k) * chance**k * (1 - chance) ** (num - k) for k in range(low, high + 1)
        )

    def solve(rises: bool, low: int, high: int) -> float:
        a, b = 0.0, 1.0
        for _ in range(50):
            middle = (a + b) / 2
            if (tail(middle, low, high) > error / 2) == rises:
                b = middle
            else:
                a = middle
        return (a + b) / 2

    return (
        solve(True, won, num) if won else 0.0,
        solve(False, 0, won) if won < num else 1.0,
    )


def verdict(rows: list[dict[str, Any]], name: str, other: str, num_draws: int) -> tuple[bool | None, int]:
    """Whether the sign holds in 90 % of ``num_draws``, and after how many of ``rows`` that was known; (None, all) while it is not."""
    needed = math.ceil(SHARE * num_draws - 1e-9)
    won = 0
    for number, row in enumerate(rows, 1):
        won += is_faster(row, name, other)
        if won >= needed:
            return True, number
        if number - won > num_draws - needed:
            return False, number
        if number in LOOKS:
            low, high = interval(won, number, LOOK_ERROR)
            if low > SHARE or high < SHARE:
                return low > SHARE, number
    return None, len(rows)


def conclude(data: dict[str, Any], num_draws: int = 200) -> dict[str, Any]:
    """The flat summary."""
    summary: dict[str, Any] = {}
    for cell in CELLS:
        runs = data["cells"].get(cell, {})
        if runs:
            for system in dict.fromkeys(name for seed in runs.values() for name in seed):
                gains = [
                    seed["fixed_sync"]["step_s"] / seed[system]["step_s"]
                    for seed in runs.values()
                    if system in seed and seed["fixed_sync"]["step_s"] and seed[system]["step_s"]
                ]
                rows = {number: seed[system] for number, seed in runs.items() if system in seed}
                missed = [row["slo_missed"] for row in rows.values() if row["slo_missed"] is not None]
                if gains:
                    summary[f"{cell}.{system}.gain"] = round(float(np.mean(gains)), 3)
                    summary[f"{cell}.{system}.gain_low"] = round(min(gains), 3)
                    summary[f"{cell}.{system}.gain_high"] = round(max(gains), 3)
                    summary[f"{cell}.{system}.seeds"] = len(gains)
                if missed:
                    summary[f"{cell}.{system}.slo_missed"] = round(float(np.mean(missed)), 5)
                added = [added_misses(cell, number, row, runs[number]) for number, row in rows.items()]
                known = [share for share in added if share is not None]
                if known and system != "fixed_sync":
                    summary[f"{cell}.{system}.misses_added"] = round(float(np.mean(known)), 6)
            fixed = [seed["fixed_sync"] for seed in runs.values() if seed["fixed_sync"]["step_s"]]
            if fixed:
                share = float(np.mean([row["rollout_s"] / row["step_s"] for row in fixed]))
                summary[f"{cell}.rollout_share_fixed"] = round(share, 3)
        summary[f"{cell}.published_gain"] = PUBLISHED[cell]
        drawn = data["draws"].get(cell, {})
        rows = [drawn[number] for number in sorted(drawn, key=int)]
        draws = [d for d in rows if all(r["step_s"] for r in d.values())]
        if draws:
            for name, other in PAIRS:
                won = [d[other]["step_s"] / d[name]["step_s"] for d in draws]
                key = f"{cell}.draws.{name}_over_{other}"
                holds, after = verdict(rows, name, other, num_draws)
                summary[f"{key}.holds"] = "not decided" if holds is None else holds
                summary[f"{key}.decided_after"] = after
                wins = sum(is_faster(row, name, other) for row in rows)
                summary[f"{key}.share_won"] = round(wins / len(rows), 4)
                low, high = interval(wins, len(rows))
                summary[f"{key}.share_won_low"], summary[f"{key}.share_won_high"] = (
                    round(low, 4),
                    round(high, 4),
                )
                summary[f"{key}.p5"] = round(float(np.percentile(won, 5)), 3)
                summary[f"{key}.p50"] = round(float(np.percentile(won, 50)), 3)
                summary[f"{key}.p95"] = round(float(np.percentile(won, 95)), 3)
            more = [d["rose"]["slo_missed"] - d["paper"]["slo_missed"] for d in draws]
            summary[f"{cell}.draws.rose_minus_paper.slo_missed"] = round(float(np.mean(more)), 6)
            summary[f"{cell}.draws.num"] = len(rows)
            summary[f"{cell}.draws.unfinished"] = len(rows) - len(draws)
    summary.update(rivals(data))
    return summary


def added_misses(cell: str, seed: str, row: dict[str, Any], runs: dict[str, Any]) -> float | None:
    """Of all requests; None for an older row, which does not name them, and where nothing serves."""
    alone = runs["fixed_sync"]
    if row["slo_missed"] is None or "late" not in row or "late" not in alone:
        return None
    end_s = min(row["end_s"], alone["end_s"])
    return compare_misses(
        dict(row["late"]), dict(alone["late"]), arrivals_of(cell, int(seed)).at_s, end_s
    ).share


def table(summary: dict[str, Any]) -> list[str]:
    """Each gain beside the ceilings of its cell, and the part of what can be gained that it is."""
    lines: list[str] = []
    for cell in CELLS:
        tops = {name: summary.get(f"{cell}.{name}.gain") for name in CEILINGS}
        said = ", ".join(
            f"{name.removeprefix('ceiling_')} {top:.2f}x" for name, top in tops.items() if top is not None
        )
        for key in summary:
            name = key.removeprefix(f"{cell}.").removesuffix(".gain")
            if key != f"{cell}.{name}.gain" or name in ("fixed_sync", *CEILINGS):
                continue
            gain, top = summary[key], tops["ceiling_dedicated"]
            part = f"{(gain - 1) / (top - 1):5.0%} of it" if top is not None and top > 1 else "no ceiling"
            added = summary.get(f"{cell}.{name}.misses_added")
            misses = "" if added is None else f"; misses added {added:+.3%}"
            low, high = summary[f"{key}_low"], summary[f"{key}_high"]
            lines.append(
                f"{cell:9} {name:12} {gain:.2f}x ({low:.2f}-{high:.2f}); ceiling: {said or 'not run'}; {part}{misses}"
            )
    return lines


def rivals(data: dict[str, Any]) -> dict[str, Any]:
    """Each rival against a published number that nothing here was fitted to."""
    found: dict[str, Any] = {}
    for system, (metric, low, high, _) in RIVALS.items():
        if system == "paper":
            continue
        values = []
        for runs in data["cells"].values():
            for seed in runs.values():
                row = seed.get(system)
                if row is None or row["step_s"] is None:
                    continue
                if metric != "speedup":
                    values.append(row[metric])
                elif seed["fixed_sync"]["step_s"]:
                    values.append(seed["fixed_sync"]["step_s"] / row["step_s"])
        if values:
            # "up to": the best cell is what such a number speaks of.
            value = max(values) if metric == "speedup" else float(np.mean(values))
            error = 0.0 if low <= value <= high else min(abs(value / low - 1), abs(value / high - 1))
            found[f"rival.{system}.simulated"] = round(value, 4)
            found[f"rival.{system}.published_low"] = low
            found[f"rival.{system}.published_high"] = high
            found[f"rival.{system}.error"] = round(error, 4)
            found[f"rival.{system}.valid"] = error <= TOLERANCE
    return found


def save(path: Path, data: dict[str, Any]) -> None:
    document = {
        "schema": 1,
        "benchmark": "sim_paper",
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
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--only", choices=CELLS)
    parser.add_argument("--part", choices=("cells", "draws"), help="only this one")
    parser.add_argument(
        "--system", action="append", help="only these and fixed_sync in the cells; repeatable"
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after this long; start again to go on"
    )
    args = parser.parse_args()
    data: dict[str, Any] = {"cells": {}, "draws": {}}
    if args.json.exists():
        details = json.loads(args.json.read_text())["details"]
        data = {"cells": details["cells"], "draws": details["draws"]}
    began = time.monotonic()
    cells = [args.only] if args.only else list(CELLS)
    # What the goal speaks of first; a seed of every cell before the next seed.
    for chosen, seed in itertools.product(
        (FIRST, tuple(CEILINGS), REST) if args.part != "draws" else (), SEEDS
    ):
        for cell in cells:
            done = data["cells"].setdefault(cell, {}).setdefault(str(seed), {})
            for system in chosen:
                wanted = not args.system or system in args.system or system == "fixed_sync"
                if wanted and system not in done and time.monotonic() - began < args.seconds:
                    done[system] = run_cell(cell, seed, system)
                    save(args.json, data)
                    print(f"{cell} seed {seed} {system}: {done[system]['cpu_s']} s", flush=True)
            if not done:
                del data["cells"][cell][str(seed)]
    for number in range(args.draws if args.part != "cells" else 0):
        for cell in cells:
            drawn = data["draws"].setdefault(cell, {})
            rows = [drawn[known] for known in sorted(drawn, key=int)]
            if str(number) in drawn or time.monotonic() - began >= args.seconds:
                continue
            if any(verdict(rows, *pair, args.draws)[0] is None for pair in PAIRS):
                drawn[str(number)] = run_draw(cell, number)
                save(args.json, data)
        if number % 10 == 9:
            print(f"draw {number + 1} of {args.draws}", flush=True)
    save(args.json, data)
    summary = conclude(data)
    for key, value in summary.items():
        print(f"{key:56} {value}")
    print("\n".join(table(summary)))


if __name__ == "__main__":
    main()
