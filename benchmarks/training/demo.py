"""The main job with several seeds: what `rose demo` finds, run by run.

    python benchmarks/training/demo.py --seeds 0,1,2 --json benchmarks/results/training/demo/DATE.json
    python benchmarks/training/demo.py --reports out/demo --commit HASH --json FILE     # of runs that were made before; runs nothing

Each run takes about seven minutes and wants the machine for itself: its P99s are those of some hundred requests.  Keys: ``seedN.KEY``
for each key of the demo's own summary, ``seedN.success_rise``, ``median.KEY`` over the seeds, and ``pooled.steps_gain``: steps per minute with
harvesting on over off, over the pairs of blocks of all seeds together, with its 95 % interval.

Bar, for each of the seeds 0, 1 and 2, once each: ``success_rate_last`` at least 0.9, ``resumed_with_8_tokens_each_side`` above 0, ``sent_over_dense``
below 0.3, ``seconds_total`` below 420; and of all three together (since 2026-11-23): the lower end of ``pooled.steps_gain`` above 1.  The gain of one seed
is of three pairs, so its interval says little.

``seedN.alone.KEY`` and ``seedN.shared.KEY``: the RL job's steps in blocks with harvesting off (the dedicated engine alone on core 1, which
trains too) and in blocks with it on (with the harvested engine beside production on core 0): medians of where a step's time goes, and turns
per second of rollout.  Steps that lie across the border of a block are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import Report
from rose.demo.result import MeasuredBlock, steps_gain

MEDIANS = (
    "success_rise",
    "success_rate_last",
    "steps_gain",
    "sent_over_dense",
    "resumed_with_8_tokens_each_side",
    "harvested_turn_share",
    "p99_ttft_ratio",
    "p99_itl_ratio",
    "aa_ttft_ratio",
    "aa_itl_ratio",
    "rollout_gain",
    "step_gain",
)


PARTS = ("rollout", "train", "publish")


def steps_of(details: Mapping[str, Any]) -> dict[str, float]:
    """Figures of the steps of each kind of block, and of both."""
    found: dict[str, float] = {}
    for name, harvesting in (("alone", False), ("shared", True)):
        windows = [
            (one["start_s"], one["end_s"]) for one in details["blocks"] if one["harvesting"] == harvesting
        ]
        steps = [
            one
            for one in details["steps"]
            if any(start_s <= one["start_s"] and one["end_s"] <= end_s for start_s, end_s in windows)
        ]
        whole_s = [one["end_s"] - one["start_s"] for one in steps]
        found[f"{name}.num_steps"] = len(steps)
        found[f"{name}.step_s"] = statistics.median(whole_s)
        for part in PARTS:
            found[f"{name}.{part}_s"] = statistics.median(one[f"{part}_s"] for one in steps)
        found[f"{name}.other_s"] = statistics.median(
            whole - sum(one[f"{part}_s"] for part in PARTS) for whole, one in zip(whole_s, steps, strict=True)
        )
        rollout_s = sum(one["rollout_s"] for one in steps)
        turns = {
            tier: sum(one["tiers"][tier]["num_turns"] for one in steps) for tier in ("dedicated", "harvested")
        }
        for tier, count in turns.items():
            found[f"{name}.{tier}_turns_per_s"] = count / rollout_s
        found[f"{name}.turns_per_s"] = sum(turns.values()) / rollout_s
        found[f"{name}.turns_per_step"] = sum(turns.values()) / len(steps)
    found["rollout_gain"] = found["shared.turns_per_s"] / found["alone.turns_per_s"]
    found["step_gain"] = found["alone.step_s"] / found["shared.step_s"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo-seeds"), help="one folder per seed goes there"
    )
    parser.add_argument("--resume", action="store_true", help="leave out seeds whose report is there already")
    parser.add_argument("--reports", type=Path, nargs="+", help="folders with a report.json each")
    parser.add_argument("--commit", help="of the code that made them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report("demo")
    found: dict[int, dict[str, Any]] = {}
    pairs: list[MeasuredBlock] = []
    for folder in args.reports or run(args.out, [int(seed) for seed in args.seeds.split(",")], args.resume):
        document = json.loads((folder / "report.json").read_text())
        summary, details = document["summary"], document["details"]
        summary["success_rise"] = summary["success_rate_last"] - summary["success_rate_first"]
        pairs += whole_pairs(details["blocks"])
        found[details["seed"]] = {
            "summary": {**summary, **steps_of(details)},
            "ratios": details["latency"]["ratios"],
        }
    flat = {
        f"seed{seed}.{key}": value for seed, one in found.items() for key, value in one["summary"].items()
    }
    for key in MEDIANS:
        flat[f"median.{key}"] = statistics.median(one["summary"][key] for one in found.values())
    if (gain := steps_gain(pairs)) is not None:
        flat["pooled.steps_gain"], flat["pooled.num_pairs"] = gain.value, gain.num_pairs
        flat["pooled.steps_gain_low"], flat["pooled.steps_gain_high"] = gain.low, gain.high
    ratios: dict[str, Any] = {str(seed): one["ratios"] for seed, one in found.items()}
    if args.reports:
        ratios["commit_of_the_runs"] = args.commit
    report.finish(flat, ratios, args.json)
    return 0


def whole_pairs(blocks: Sequence[Mapping[str, Any]]) -> list[MeasuredBlock]:
    """Blocks of a report two by two; a last one whose partner the job did not live to see is left out."""
    whole = blocks[: len(blocks) // 2 * 2]
    return [
        MeasuredBlock(
            **{name: one[name] for name in ("harvesting", "start_s", "end_s", "num_steps")},
            tiers={},
        )
        for one in whole
    ]


def run(out: Path, seeds: Sequence[int], resume: bool) -> Iterator[Path]:
    """Run the demo with each seed; the folders of their reports."""
    for seed in seeds:
        folder = out / f"seed{seed}"
        if resume and (folder / "report.json").exists():
            yield folder
            continue
        command = [sys.executable, "-m", "rose.cli", "demo", "--seed", str(seed), "--out", str(folder)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
        yield folder


if __name__ == "__main__":
    raise SystemExit(main())
