"""The simulator itself: time and memory at full size, the error of fleet mode, the cost of determinism.

    python benchmarks/sim/sim.py --json sim.json                 # all parts, about ten minutes
    python benchmarks/sim/sim.py --quick                         # about a minute: two minutes of the hour, shorter cells
    python benchmarks/sim/sim.py --part exact --json sim.json    # one part; the others keep their figures in the file

``exact``: 256 serving and 64 dedicated engines, 3,000 trajectories in flight, one hour (limit: 3 minutes of CPU since 2026-11-29, 5 before; 4 GB, one core), by the Python sources;
``exact_compiled``: the same by the build of ``make compiled``, where there is one.
``fleet``: 4,096 and 1,024 engines, 24 hours (limit: 10 minutes).  ``error``: fleet mode against an exact run of 64 engines.
``repeat``: ten runs of one seed, in ten interpreters.  Times are of this process's CPU, so a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.report import Report  # noqa: E402
from rose.sim.cells import run_cell  # noqa: E402
from rose.sim.fleet import simulate_fleet  # noqa: E402
from rose.sim.scenario_file import load_scenario  # noqa: E402
from rose.sim.world import simulate  # noqa: E402

SCENARIOS = ROOT / "examples" / "scenarios"
PARTS = ("repeat", "error", "fleet", "exact", "exact_compiled")
CELL_SEED, TRUTH_SEED = 17, 99
ERROR_LOADS = (0.3, 0.7)
"""Requests per second and engine at which fleet mode is compared with 64 engines."""


def exact(report: Report, quick: bool) -> dict[str, Any]:
    return in_an_interpreter("exact", "0", quick)


def exact_compiled(report: Report, quick: bool) -> dict[str, Any]:
    """Nothing where there is no build that fits."""
    env = {**os.environ, "ROSE_COMPILED": "1"}
    if subprocess.run(
        [sys.executable, "-c", "import rose.policy.turns"], env=env, cwd=ROOT, check=False
    ).returncode:
        print("exact_compiled: left out, for there is no build that fits (make compiled)")
        return {}
    return in_an_interpreter("exact_compiled", "1", quick)


def in_an_interpreter(part: str, compiled: str, quick: bool) -> dict[str, Any]:
    """The hour in a process of its own, whose policies are the Python sources (``0``) or the build (``1``)."""
    done = subprocess.run(
        [sys.executable, __file__, "--hour", *(["--quick"] if quick else [])],
        env={**os.environ, "ROSE_COMPILED": compiled},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {f"{part}.{name}": value for name, value in json.loads(done.stdout).items()}


def hour(quick: bool) -> dict[str, Any]:
    report = Report("sim")
    changes = ["duration_s=120.0"] if quick else []
    scenario = load_scenario(SCENARIOS / "exact_scale.toml", changes)
    began = time.monotonic()
    run = simulate(
        scenario, "rose_async", progress=lambda share: report.progress("the hour", int(share * 100), 100)
    )
    return {
        "simulated_s": run.duration_s,
        "cpu_s": round(run.cpu_s, 1),
        "wall_s": round(time.monotonic() - began, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "turns": run.counters.turns,
        "requests": len(run.ttft_s),
        "engine_steps": run.num_steps,
        "events": run.num_events,
    }


def fleet(report: Report, quick: bool) -> dict[str, Any]:
    changes = ["cells.loads=2", "cells.seconds=30.0", "cells.warm_s=30.0"] if quick else []
    scenario = load_scenario(SCENARIOS / "fleet.toml", changes)
    began = time.process_time()
    result = simulate_fleet(
        scenario, scenario.systems, progress=lambda share: report.progress("fleet", int(share * 100), 100)
    )
    found: dict[str, Any] = {
        "fleet.cpu_s": round(time.process_time() - began, 1),
        "fleet.simulated_h": scenario.duration_s / 3600,
    }
    for system in result.systems:
        for key in (
            "trained_tokens_per_s",
            "harvested_share",
            "worth_dedicated_engines",
            "slo_missed",
            "ttft_p99_ms",
        ):
            value = system.summary[key]
            found[f"fleet.{system.name}.{key}"] = round(value, 5) if math.isfinite(value) else None
    return found


def error(report: Report, quick: bool) -> dict[str, Any]:
    """Rates interpolated between cells, against 51 + 13 engines simulated exactly at loads no cell was run at."""
    changes = ["cells.loads=2", "cells.seconds=60.0", "cells.warm_s=60.0"]
    if quick:
        changes[1:] = ["cells.seconds=30.0", "cells.warm_s=30.0"]
    scenario = load_scenario(SCENARIOS / "fleet.toml", changes)
    base, swing = scenario.serving.requests_per_s, scenario.serving.daily_swing
    low, high = base * (1 - swing), base * (1 + swing)
    cells = [run_cell(scenario, "rose", load, CELL_SEED) for load in (low, (low + high) / 2, high)]
    found: dict[str, Any] = {}
    worst = 0.0
    for index, load in enumerate(ERROR_LOADS):
        report.progress("error", index, len(ERROR_LOADS))
        truth = run_cell(scenario, "rose", load, TRUTH_SEED, serving=51, dedicated=13)
        left = max(i for i in (0, 1) if cells[i].load <= load)
        share = (load - cells[left].load) / (cells[left + 1].load - cells[left].load)
        for name, weight in (("dedicated_tokens_s", 13), ("harvested_tokens_s", 51)):
            guess = (1 - share) * getattr(cells[left], name) + share * getattr(cells[left + 1], name)
            found[f"error.load_{load}.{name}.exact"] = round(getattr(truth, name) * weight, 1)
            found[f"error.load_{load}.{name}.fleet"] = round(guess * weight, 1)
        total = truth.dedicated_tokens_s * 13 + truth.harvested_tokens_s * 51
        guess = sum(
            found[f"error.load_{load}.{n}.fleet"] for n in ("dedicated_tokens_s", "harvested_tokens_s")
        )
        found[f"error.load_{load}.total"] = round(abs(guess / total - 1), 4)
        worst = max(worst, abs(guess / total - 1))
    found["error.worst"] = round(worst, 4)
    return found


def repeat(report: Report, quick: bool) -> dict[str, Any]:
    """Runs of one seed, each in an interpreter of its own, whose hashes are its own too."""
    digests: set[str] = set()
    script = (
        "import sys; from pathlib import Path; from rose.sim.scenario_file import load_scenario; "
        "from rose.sim.world import simulate; "
        "print(simulate(load_scenario(Path(sys.argv[1]), ['num_steps=1']), 'rose', digest=True).digest)"
    )
    runs = 3 if quick else 10
    for number in range(runs):
        report.progress("repeat", number, runs)
        done = subprocess.run(
            [sys.executable, "-c", script, str(SCENARIOS / "small.toml")],
            env={**os.environ, "PYTHONHASHSEED": str(number), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    return {"repeat.runs": runs, "repeat.distinct_journals": len(digests)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--hour", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hour:
        print(json.dumps(hour(args.quick)))
        return
    report = Report("sim")
    summary: dict[str, Any] = {}
    if args.json is not None and args.json.exists() and args.part:
        summary = json.loads(args.json.read_text())["summary"]
    makers = {
        "exact": exact,
        "exact_compiled": exact_compiled,
        "fleet": fleet,
        "error": error,
        "repeat": repeat,
    }
    for part in PARTS:
        if not args.part or part in args.part:
            summary = {key: value for key, value in summary.items() if not key.startswith(f"{part}.")}
            summary.update(makers[part](report, args.quick))
    # The scenarios' own, and those of ``error``.
    scenarios = [load_scenario(SCENARIOS / f"{name}.toml") for name in ("exact_scale", "fleet", "small")]
    seeds = sorted({CELL_SEED, TRUTH_SEED, *(scenario.seed for scenario in scenarios)})
    report.finish(summary, {"quick": args.quick, "seeds": seeds}, args.json)


if __name__ == "__main__":
    main()
