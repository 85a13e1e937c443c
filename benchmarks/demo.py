"""The main job with several seeds: what `rose demo` finds, run by run.

    python benchmarks/demo.py --seeds 0,1,2 --json benchmarks/results/demo.json

Each run takes about seven minutes and wants the machine for itself: its P99s are those of some hundred requests.  Keys: ``seedN.KEY``
for each key of the demo's own summary, ``seedN.success_rise``, and ``median.KEY`` over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Report

MEDIANS = (
    "success_rise",
    "harvested_turn_share",
    "p99_ttft_ratio",
    "p99_itl_ratio",
    "aa_ttft_ratio",
    "aa_itl_ratio",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo-seeds"), help="one folder per seed goes there"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report("demo")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    found: dict[int, dict[str, Any]] = {}
    for seed in seeds:
        folder = args.out / f"seed{seed}"
        command = [sys.executable, "-m", "rose.cli", "demo", "--seed", str(seed), "--out", str(folder)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
        document = json.loads((folder / "report.json").read_text())
        summary = document["summary"]
        summary["success_rise"] = summary["success_rate_last"] - summary["success_rate_first"]
        found[seed] = {"summary": summary, "ratios": document["details"]["latency"]["ratios"]}
    flat = {f"seed{seed}.{key}": value for seed in seeds for key, value in found[seed]["summary"].items()}
    for key in MEDIANS:
        flat[f"median.{key}"] = statistics.median(found[seed]["summary"][key] for seed in seeds)
    report.finish(flat, {str(seed): found[seed]["ratios"] for seed in seeds}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
