"""What it gains to move running turns away from slow harvested engines: the real turn book in the small world of ``policies.py``.

    python benchmarks/scheduling/migration.py --tune                   # settings, on workloads A and B
    python benchmarks/scheduling/migration.py --json migration.json    # C and D, which it was not tuned on

Written down before C and D were run: seeds 0 to 19, three rates of failure, the default policy with and without migration on the same
trajectories, production and failures; the setting is the one that ``--tune`` (seeds 100 to 104) has at the shortest makespan with a
mean no longer than without.  It becomes the default if, of the ratios with over without, paired by seed (geometric mean over the six
cases, 95 % interval over seeds): makespan's upper end is below 1, and mean's and p90's upper ends are at most 1.01.

That was met by the form of today, which takes every delay for one that goes on; in the demo it also moves turns that lack two tokens.  A second
form (commit 73d8ed0: what a turn lost token by token it loses on those that are left) was judged by the same bar, with the same setting, on
seeds 20 to 39 (``--first-seed 20``), which nothing had run on.  It missed, and is gone.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import Report
from benchmarks.scheduling.fluid_world import Outcome, World
from benchmarks.scheduling.policies import CHURN_PER_MIN, WORKLOADS, fleet_params
from rose.evaluation.statistics import mean_interval
from rose.policy.routing import make_policy
from rose.policy.turn_events import TurnParams
from rose.scheduler.scheduler_config import SchedulerConfig

METRICS = ("makespan_s", "mean_s", "p90_s")
RATIOS = (1.0, 1.5, 2.0, 3.0)
MARGINS_S = (0.25, 1.0)
TUNED_ON, TUNE_SEEDS, TUNE_CHURN = "AB", range(100, 105), (0.5, 3.0)
JUDGED_ON, SEEDS = "CD", 20


def run(load: str, churn: float, seed: int, migrate_ratio: float, margin_s: float = 0.25) -> Outcome:
    policy = SchedulerConfig().policy
    params = TurnParams(max_queued=10**6, migrate_ratio=migrate_ratio, migrate_margin_s=margin_s)
    router = make_policy(policy, random.Random(seed))
    return World(WORKLOADS[load], router, seed, churn, fleet_params(policy), params).run()


def gains(
    with_it: list[list[Outcome]], without: list[list[Outcome]]
) -> dict[str, tuple[float, float, float]]:
    """By metric: geometric mean over the cases of with / without, and its 95 % interval over seeds.

    Args:
        with_it: ``[seed][case]``; ``without`` alike.
    """
    found: dict[str, tuple[float, float, float]] = {}
    for metric in METRICS:
        logs = [
            sum(math.log(getattr(a, metric) / getattr(b, metric)) for a, b in zip(mine, theirs, strict=True))
            / len(mine)
            for mine, theirs in zip(with_it, without, strict=True)
        ]
        mean, half = mean_interval(logs)
        found[metric] = (math.exp(mean), math.exp(mean - half), math.exp(mean + half))
    return found


def tune(report: Report) -> None:
    cases = [(load, churn) for load in TUNED_ON for churn in TUNE_CHURN]
    without = [[run(*case, seed, 0.0) for case in cases] for seed in TUNE_SEEDS]
    rows: list[tuple[Any, ...]] = []
    settings = [(ratio, margin_s) for ratio in RATIOS for margin_s in MARGINS_S]
    for number, (ratio, margin_s) in enumerate(settings):
        mine = [[run(*case, seed, ratio, margin_s) for case in cases] for seed in TUNE_SEEDS]
        report.progress(f"ratio {ratio}, margin {margin_s} s", number + 1, len(settings))
        rows.append((ratio, margin_s, *(round(value[0], 4) for value in gains(mine, without).values())))
    report.table(("ratio", "margin s", *METRICS), rows, title="with / without, on A and B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--tune", action="store_true", help="settings, on A and B")
    parser.add_argument("--quick", action="store_true", help="2 seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ratio", type=float, default=TurnParams().migrate_ratio or 1.5)
    parser.add_argument("--margin-s", type=float, default=TurnParams().migrate_margin_s)
    arguments = parser.parse_args()
    report = Report("migration")
    if arguments.tune:
        tune(report)
        return
    seeds = 2 if arguments.quick else SEEDS
    cases = [(load, churn) for load in JUDGED_ON for churn in CHURN_PER_MIN]
    mine: list[list[Outcome]] = []
    without: list[list[Outcome]] = []
    for seed in range(arguments.first_seed, arguments.first_seed + seeds):
        without.append([run(*case, seed, 0.0) for case in cases])
        mine.append([run(*case, seed, arguments.ratio, arguments.margin_s) for case in cases])
        report.progress(f"seed {seed}", len(mine), seeds)
    overall = gains(mine, without)
    rows: list[tuple[Any, ...]] = []
    for at, (load, churn) in enumerate(cases):
        each = gains([[seed[at]] for seed in mine], [[seed[at]] for seed in without])
        rows.append((load, churn, *(f"{x:.3f} ({low:.3f}-{high:.3f})" for x, low, high in each.values())))
    rows.append(("all", "", *(f"{x:.3f} ({low:.3f}-{high:.3f})" for x, low, high in overall.values())))
    report.table(("load", "cuts/min", *METRICS), rows, title="with / without migration")
    bar_met = overall["makespan_s"][2] < 1.0 and max(overall["mean_s"][2], overall["p90_s"][2]) <= 1.01
    summary: dict[str, Any] = {"bar_met": bar_met, "ratio": arguments.ratio, "margin_s": arguments.margin_s}
    for metric, (value, low, high) in overall.items():
        name = metric.removesuffix("_s")
        summary |= {f"{name}": round(value, 4), f"{name}_low": round(low, 4), f"{name}_high": round(high, 4)}
    details = {
        "cases": [list(map(str, row)) for row in rows],
        "seeds": seeds,
        "first_seed": arguments.first_seed,
    }
    report.finish(summary, details, arguments.json)


if __name__ == "__main__":
    main()
