"""What the train loop itself costs, and what harvested engines bring to it.

    python benchmarks/training/train.py --json FILE                  # all parts, about twenty minutes
    python benchmarks/training/train.py --part control               # 2,000 environments: turns per CPU second, memory, event-loop lag
    python benchmarks/training/train.py --part throughput            # tokens per second on engines that only take time
    python benchmarks/training/train.py --part stale                 # on_stale = wait, mask, cancel on runs that truly learn
    python benchmarks/training/train.py --quick                      # 300 environments, and three short arms
    rose profile --config node.toml --out p.json; python benchmarks/training/train.py --profile p.json    # your engine's step times

In the first two parts no engine computes, and in none a GPU is used: step times come from the model that ``rose profile`` fits, with the coefficients of
``benchmarks.training.engines.Steps`` or of a profile.  What is measured is scheduler, environment managers and loops, which
are the real ones.  See ``benchmarks/training/control.py``, ``throughput.py`` and ``stale.py`` for what exactly.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.arms import end_all
from benchmarks.lib.report import Report
from benchmarks.training import control, stale, throughput
from benchmarks.training.engines import Steps
from rose.coserve.step_profile import COEFFICIENTS, load_profile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--part", choices=["all", "control", "throughput", "stale"], default="all")
    parser.add_argument("--quick", action="store_true", help="smaller, and once; about two minutes")
    parser.add_argument("--repeats", type=int, default=1, help="of everything; medians")
    parser.add_argument("--seeds", type=int, default=3, help="of the comparison of staleness rules")
    parser.add_argument("--environments", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0, help="window of each control-path run")
    parser.add_argument(
        "--steps", type=int, help="counted per throughput arm; more for fewer surprises (default 4)"
    )
    parser.add_argument("--profile", type=Path, help="step times of `rose profile`")
    parser.add_argument("--only", help="throughput arms to run now, comma-separated (NAME or NAME:REPEAT)")
    parser.add_argument("--cache", type=Path, help="keep finished throughput arms here, and go on from them")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, end_all)
    report = Report("train")
    setting, rules = throughput.Setting(), stale.Setting()
    if args.quick:
        args.environments, args.seconds, args.repeats, args.seeds = 300, 5.0, 1, 1
        rules = dataclasses.replace(rules, num_steps=3)
        setting = dataclasses.replace(setting, num_steps=1, num_groups=4)
    if args.steps is not None:
        setting = dataclasses.replace(setting, num_steps=args.steps)
    if args.profile is not None:
        profile = load_profile(args.profile)
        steps = Steps(**{name: getattr(profile, name) for name in COEFFICIENTS})
        setting = dataclasses.replace(setting, steps=steps)
    found: dict[str, Any] = {}
    if args.part in ("all", "control"):
        with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
            found["control"] = control.measure(
                Path(folder), args.environments, args.seconds, args.repeats, report
            )
    if args.part in ("all", "throughput"):
        only = args.only.split(",") if args.only else throughput.GAIN_ARMS if args.quick else None
        told = throughput.measure(setting, args.repeats, only, args.cache, report)
        if told is None:
            print("arms are left; run again without --only for the result")
            return
        found["throughput"] = told
    if args.part in ("all", "stale"):
        found["stale"] = stale.measure(rules, range(args.seeds), report)
    summary = {f"{part}_{key}": value for part, one in found.items() for key, value in one["summary"].items()}
    report.finish(summary, {part: one["details"] for part, one in found.items()}, args.json)


if __name__ == "__main__":
    main()
