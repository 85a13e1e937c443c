"""Does a policy that is trained on harvested engines too learn as well as one that is not?  Paired seeds, two tasks.

    python benchmarks/training/learning.py --json FILE                     # five seeds, both tasks: about two hours on two cores
    python benchmarks/training/learning.py --json FILE --tasks frozenlake  # one of them
    python benchmarks/training/learning.py --json FILE --steps 2 --seeds 1 # to see that it runs
    python benchmarks/training/learning.py --json FILE --tasks frozenlake --fleets dedicated,uncut,harvested --evaluate-every 4
                                                                  # is it cuts or a second engine that makes a difference?
    python benchmarks/training/learning.py --json FILE --tasks frozenlake --set trainer.decay=linear
                                                                  # another job, in a file of its own

Each pair of runs has one seed, and so one start, one set of tasks and one job; one run has a dedicated engine alone, the other a
harvested one beside it, whose requests are cut every second.  FrozenLake begins with random weights, the arithmetic task with a
seeded supervised start (``benchmarks/training/warm_start.py``).  Runs are in the asynchronous loop, where the two fleets differ
most: more engines are further ahead of the trainer.  See ``benchmarks/training/small_runs.py`` for what stands in for what.

A finished run is written to FILE at once, and a run that is there already is not taken again: start it again to go on.  Beside
FILE, all curves over each other, as HTML.

Keys, by task: mean success of the first step, and of the last five, of both fleets; the mean difference of the latter in pairs
(harvested minus dedicated), the bounds of its 95 % interval (Student's t), and whether the lower one lies above -0.05.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import Report, write
from benchmarks.training import curves, small_runs
from benchmarks.training.warm_start import WarmStart, warm_start
from rose.config import apply_override
from rose.demo.models import POLICY, ensure_model
from rose.evaluation.statistics import mean_interval
from rose.testing.toy_recipe import TOY_RECIPE
from rose.train.env_manager import family_of
from rose.train.train_config import JobTask, TrainConfig

FLEETS = {"dedicated": (1, False), "harvested": (2, True), "uncut": (2, False)}
"""Engines, the first of which is dedicated, and whether the other's requests are cut.  The last is a control, run if asked for."""
LAST_STEPS = 5
BAR = -0.05
JOBS: dict[str, dict[str, Any]] = {
    "frozenlake": {
        "num_steps": 40,
        "env": {"kind": "frozenlake", "settings": {"num_maps": 8, "max_turns": 10}},
        "rollout": {"mode": "asynchronous", "alpha": 1, "num_groups": 8, "group_size": 16, "max_tokens": 1},
        "trainer": {**TOY_RECIPE, "keep_checkpoints": 1},
        "eval": {"at_end": True, "num_tasks": 32},
    },
    "maths": {
        "num_steps": 100,
        "env": {
            "kind": "math_tools",
            "settings": {"num_tasks": 32, "num_terms": 2, "max_number": 9, "max_turns": 2},
        },
        "rollout": {"mode": "asynchronous", "alpha": 1, "num_groups": 8, "group_size": 8, "max_tokens": 24},
        "trainer": {
            **TOY_RECIPE,
            "algorithm": "dapo",
            "learning_rate": 2e-4,
            "minibatch_sequences": 32,
            "entropy_weight": 0.0,
            "keep_checkpoints": 1,
        },
        "eval": {"at_end": True, "num_tasks": 32},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where results go, and what is gone on from")
    parser.add_argument("--html", type=Path, help="the curves; beside the other by default")
    parser.add_argument("--tasks", default="frozenlake,maths", help="comma-separated")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of runs per task")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, help="of each run, instead of the tasks' own numbers")
    parser.add_argument("--fleets", default="dedicated,harvested", help="comma-separated")
    parser.add_argument(
        "--evaluate-every", type=int, help="steps; held-out tasks are else played at the end alone"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the job, as rose train"
    )
    args = parser.parse_args()
    names, fleets = args.tasks.split(","), args.fleets.split(",")
    for option, given, known in (("--tasks", names, JOBS), ("--fleets", fleets, FLEETS)):
        for name in given:
            if name not in known:
                parser.error(f"{option}: '{name}' is not one of {', '.join(known)}")
    report = Report("learning")
    runs = earlier_runs(args.json)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        for seed in range(args.first, args.first + args.seeds):
            for task in names:
                job = JOBS[task] | ({} if args.steps is None else {"num_steps": args.steps})
                if args.evaluate_every is not None:
                    job |= {"eval": {**job["eval"], "every_steps": args.evaluate_every}}
                job = copy.deepcopy(job)
                for override in args.set:
                    apply_override(job, override)
                for fleet in fleets:
                    if find(runs, task, fleet, seed, job) is not None:
                        continue
                    runs.append(one_run(Path(folder), task, fleet, seed, job, report))
                    save(args.json, runs, args.steps, started_s)
    html = args.html or args.json.with_suffix(".html")
    html.write_text(curves.page([run for run in runs if is_of(run, args.steps)], BAR))
    summary = save(args.json, runs, args.steps, started_s)
    report.table(("key", "value"), summary.items(), title="learning")
    print(f"wrote {args.json} and {html}")


def save(path: Path, runs: Sequence[dict[str, Any]], steps: int | None, started_s: float) -> dict[str, Any]:
    summary = summarise(runs, steps)
    write(path, "learning", summary, {"runs": runs}, seconds=time.monotonic() - started_s)
    return summary


def earlier_runs(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["details"]["runs"] if path.exists() else []


def find(
    runs: Sequence[dict[str, Any]], task: str, fleet: str, seed: int, job: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The run that was taken before with the very same job."""
    same = (task, fleet, seed, dict(job))
    return next((run for run in runs if (run["task"], run["fleet"], run["seed"], run["job"]) == same), None)


def one_run(
    root: Path, task: str, fleet: str, seed: int, job: Mapping[str, Any], report: Report
) -> dict[str, Any]:
    model, warm = ensure_model(POLICY, seed=seed), None
    if task == "maths":
        target = root / f"warm-{seed}"
        marker = target / "warm.json"
        if not marker.exists():  # the pair shares it
            family = family_of(_task_of(job))
            told = warm_start(model, target, family, WarmStart(), seed=seed)
            marker.write_text(json.dumps(told))
            print(f"seed {seed} warm start: {told}", flush=True)
        model, warm = target, json.loads(marker.read_text())
    env = {**job["env"], "settings": {**job["env"]["settings"], "seed": seed}}

    def progress(record: Mapping[str, Any]) -> None:
        report.progress(f"{task}, {fleet}, seed {seed}", record["step"] + 1, job["num_steps"])

    num_engines, cut = FLEETS[fleet]
    found = small_runs.train(
        root / f"{task}-{fleet}-{seed}",
        model,
        {**job, "env": env},
        num_engines=num_engines,
        seed=seed,
        cut=cut,
        progress=progress,
    )
    records = found["records"]
    shares = [
        record["tiers"].get("harvested", {"tokens": 0})["tokens"]
        / max(1, sum(tier["tokens"] for tier in record["tiers"].values()))
        for record in records
    ]
    run = {
        "task": task,
        "fleet": fleet,
        "seed": seed,
        "job": dict(job),
        "warm_start": warm,
        "success": [round(record["sampled_success_rate"], 4) for record in records],
        "success_held_out": records[-1]["eval"]["success_rate"],
        "held_out": {
            record["step"]: record["eval"]["success_rate"] for record in records if "eval" in record
        },
        "harvested_share": round(statistics.fmean(shares), 3),
        "num_cuts": found["num_cuts"],
        "lag_max": max(record["lag_max"] for record in records),
        **{
            f"{name}_mean": round(statistics.fmean(record[name] for record in records), 5)
            for name in (
                "lag_mean",
                "num_stale",
                "num_stale_groups",
                "entropy",
                "ess",
                "clip_fraction",
                "mismatch_kl",
            )
        },
        "seconds": round(found["seconds"], 1),
    }
    print(
        f"{task} {fleet:9} seed {seed}: {run['success'][0]:.2f} -> {final(run):.2f} in {run['seconds']:.0f} s, "
        f"{run['harvested_share']:.0%} of its tokens harvested",
        flush=True,
    )
    return run


def _task_of(job: Mapping[str, Any]) -> JobTask:
    table = {**job, "model": "unused", "weights": {"directory": "unused"}}
    return TrainConfig.model_validate(table).all_tasks[0]


def is_of(run: Mapping[str, Any], steps: int | None) -> bool:
    """Whether a run is of these lengths: the file may hold shortened ones too."""
    return run["job"]["num_steps"] == (JOBS[run["task"]]["num_steps"] if steps is None else steps)


def final(run: Mapping[str, Any]) -> float:
    return statistics.fmean(run["success"][-LAST_STEPS:])


def summarise(runs: Sequence[dict[str, Any]], steps: int | None) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for task in JOBS:
        pairs: dict[int, dict[str, dict[str, Any]]] = {}
        for run in runs:
            if run["task"] == task and is_of(run, steps):
                pairs.setdefault(run["seed"], {})[run["fleet"]] = run
        whole = [pair for pair in pairs.values() if {"dedicated", "harvested"} <= set(pair)]
        if not whole:
            continue
        summary[f"{task}_pairs"] = len(whole)
        for fleet in [name for name in FLEETS if all(name in pair for pair in whole)]:
            mine = [pair[fleet] for pair in whole]
            summary[f"{task}_{fleet}_success_first"] = round(
                statistics.fmean(run["success"][0] for run in mine), 3
            )
            summary[f"{task}_{fleet}_success_last"] = round(statistics.fmean(map(final, mine)), 3)
            summary[f"{task}_{fleet}_success_held_out"] = round(
                statistics.fmean(run["success_held_out"] for run in mine), 3
            )
            summary[f"{task}_{fleet}_seconds_max"] = max(run["seconds"] for run in mine)
            summary |= held_out_gap(f"{task}_{fleet}", whole, fleet)
        gaps = [final(pair["harvested"]) - final(pair["dedicated"]) for pair in whole]
        mean, half = mean_interval(gaps)
        summary[f"{task}_difference"] = round(mean, 4)
        if len(gaps) > 1:
            low, high = mean - half, mean + half
            summary[f"{task}_difference_low"], summary[f"{task}_difference_high"] = (
                round(low, 4),
                round(high, 4),
            )
            summary[f"{task}_meets_bar"] = low > BAR
    return summary


def held_out(run: Mapping[str, Any]) -> float:
    """Mean success over the evaluations of the second half of a run: one policy's is noisy, from step to step."""
    values = [rate for step, rate in run["held_out"].items() if 2 * int(step) >= run["job"]["num_steps"]]
    return statistics.fmean(values)


def held_out_gap(name: str, pairs: Sequence[Mapping[str, Mapping[str, Any]]], fleet: str) -> dict[str, float]:
    """Of a fleet less the dedicated one, where runs were evaluated more than once."""
    if any(len(run.get("held_out", ())) < 2 for pair in pairs for run in pair.values()):
        return {}
    found = {f"{name}_held_out_mean": round(statistics.fmean(held_out(pair[fleet]) for pair in pairs), 3)}
    if fleet != "dedicated" and len(pairs) > 1:
        mean, half = mean_interval([held_out(pair[fleet]) - held_out(pair["dedicated"]) for pair in pairs])
        found |= {
            f"{name}_held_out_difference": round(mean, 4),
            f"{name}_held_out_difference_low": round(mean - half, 4),
            f"{name}_held_out_difference_high": round(mean + half, 4),
        }
    return found


if __name__ == "__main__":
    main()
