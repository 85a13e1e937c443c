"""Which routing policy finishes trajectories soonest: the real policy code in a small deterministic world.

``cost`` was tuned on workloads A and B (``--tune``).  C and D, other fleets and other shapes of work, are
only for judging.  Each policy sees the same trajectories, production traffic and failures for a seed.

    python benchmarks/scheduling/policies.py --json policies.json      # C and D, 20 seeds, three churn rates
    python benchmarks/scheduling/policies.py --tune                    # settings of `cost` on A and B
    python benchmarks/scheduling/policies.py --quick                   # 3 seeds

Intervals are 95 % of the mean over seeds; differences are paired by seed.  Every place where the default
policy is worse than another is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import Report
from benchmarks.scheduling.fluid_world import EngineSpec, Outcome, Workload, World
from rose.evaluation.statistics import mean_interval
from rose.policy.fleet import FleetParams
from rose.policy.routing import POLICY_NAMES, CostParams, CostPolicy, RoutingPolicy, make_policy
from rose.policy.worker import Tier
from rose.scheduler.scheduler_config import SchedulerConfig

CHURN_PER_MIN = (0.1, 1.0, 4.0)
"""Memory cuts per harvested worker and minute; a tenth of that are deaths."""
SAME_CAPS = "paper, same caps"
"""The paper's order under the caps of the other policies: its own 16 per GPU is half of what it does."""
ROUTERS = (*POLICY_NAMES, SAME_CAPS)
METRICS = ("mean_s", "p90_s", "recomputed", "idle")
OWN = EngineSpec(tier=Tier.DEDICATED)
SHARED = EngineSpec(
    tier=Tier.HARVESTED, quiet_share=0.7, busy_share=0.1, quiet_s=25.0, busy_s=8.0, kv_tokens=200_000
)
SLOW = EngineSpec(
    tier=Tier.HARVESTED, quiet_share=0.5, busy_share=0.02, quiet_s=40.0, busy_s=15.0, kv_tokens=150_000
)
UNEVEN = tuple(
    EngineSpec(
        tier=Tier.HARVESTED,
        step_s=0.012 + 0.004 * index,
        quiet_share=0.9 - 0.1 * index,
        busy_share=0.15,
        quiet_s=15.0 + 5.0 * index,
        busy_s=6.0,
        kv_tokens=120_000 + 60_000 * index,
    )
    for index in range(5)
)
WORKLOADS = {
    "A": Workload(  # short games: small prompts, many turns, quick tools
        name="A",
        engines=(*(OWN,) * 2, *(SHARED,) * 6),
        concurrency=192,
        total=384,
        group=8,
        turns=(8.0, 30),
        prompt=(600.0, 0.2),
        suffix=(80.0, 0.3),
        output=(60.0, 0.6),
        tool_s=(0.2, 0.5),
    ),
    "B": Workload(  # repositories: long contexts, slow tools with a long tail
        name="B",
        engines=(*(OWN,) * 2, *(SHARED,) * 4),
        concurrency=96,
        total=192,
        group=8,
        turns=(14.0, 40),
        prompt=(4000.0, 0.4),
        suffix=(700.0, 1.0),
        output=(180.0, 0.9),
        tool_s=(3.0, 1.2),
    ),
    "C": Workload(  # mathematics: few turns, outputs with a heavy tail
        name="C",
        engines=(*(OWN,) * 4, *(SLOW,) * 6),
        concurrency=192,
        total=384,
        group=16,
        turns=(1.6, 4),
        prompt=(300.0, 0.5),
        suffix=(150.0, 0.5),
        output=(700.0, 1.1),
        tool_s=(1.0, 0.8),
    ),
    "D": Workload(  # web search: tools return much to read; an uneven fleet with one dedicated worker
        name="D",
        engines=(OWN, *UNEVEN),
        concurrency=96,
        total=192,
        group=4,
        turns=(7.0, 20),
        prompt=(1500.0, 0.3),
        suffix=(2500.0, 0.8),
        output=(120.0, 0.7),
        tool_s=(1.5, 1.0),
    ),
}


def fleet_params(policy: str) -> FleetParams:
    """The caps that the daemon has by default; for ``paper`` the paper's 16 per GPU."""
    caps = SchedulerConfig()
    if policy == "paper":
        return FleetParams(cap_dedicated=16, cap_harvested=16)
    return FleetParams(cap_dedicated=caps.cap_dedicated, cap_harvested=caps.cap_harvested)


def judge(
    names: Iterable[str], seeds: int, churns: Iterable[float], report: Report, cache: Path | None
) -> dict[tuple[str, float, str], list[Outcome]]:
    """Every run, in any order of seeds; ``cache`` holds finished ones, so that a stopped judgement goes on."""
    cases = [(load, churn, policy) for load in names for churn in churns for policy in ROUTERS]
    known: dict[tuple[Any, ...], Outcome] = {}
    if cache is not None and cache.exists():
        for line in cache.read_text().splitlines():
            *key, outcome = json.loads(line)
            known[tuple(key)] = Outcome(**outcome)
    outcomes: dict[tuple[str, float, str], list[Outcome]] = {case: [] for case in cases}
    for seed in range(seeds):
        for number, (load, churn, policy) in enumerate(cases):
            key = (load, churn, policy, seed)
            if key not in known:
                router = make_policy(policy.partition(",")[0], random.Random(seed))
                known[key] = World(WORKLOADS[load], router, seed, churn, fleet_params(policy)).run()
                if cache is not None:
                    with cache.open("a") as file:
                        file.write(json.dumps([*key, dataclasses.asdict(known[key])]) + "\n")
            outcomes[(load, churn, policy)].append(known[key])
            report.progress(f"seed {seed}", seed * len(cases) + number + 1, len(cases) * seeds)
    return outcomes


def tune(report: Report, seeds: int) -> None:
    """One setting at a time around the default, on A and B, against ``sticky_least_loaded``."""
    base = CostParams()
    options: dict[str, tuple[float, ...]] = {
        "social": (0.0, 0.5, 1.0),
        "social_read": (0.0, 0.5, 1.0),
        "hysteresis": (0.0, 0.3, 1.0),
        "horizon_turns": (1.0, 2.0, 4.0, 8.0, 16.0),
        "risk": (0.0, 1.0, 3.0),
        "fade_s": (10.0, 30.0, 120.0),
        "gated_s": (0.2, 0.5, 2.0),
        "floor_s": (0.0, 0.02, 0.2),
    }
    tried = {("default", 0.0): base}
    for name, values in options.items():
        for value in values:
            if value != getattr(base, name):
                fields = {key: getattr(base, key) for key in options} | {name: value}
                tried[(name, value)] = CostParams(**fields)

    def score(make: Callable[[random.Random], RoutingPolicy]) -> list[Outcome]:
        return [
            World(WORKLOADS[load], make(random.Random(seed)), seed, churn, fleet_params("cost")).run()
            for load in "AB"
            for churn in (0.5, 3.0)
            for seed in range(100, 100 + seeds)
        ]

    against = score(lambda rng: make_policy("sticky_least_loaded", rng))
    rows: list[tuple[Any, ...]] = []
    for number, ((name, value), params) in enumerate(tried.items()):
        mine = score(lambda rng, params=params: CostPolicy(rng=rng, params=params))
        report.progress(f"{name} = {value}", number + 1, len(tried))
        ratios = [
            statistics.geometric_mean(
                [
                    getattr(a, metric) / max(getattr(b, metric), 1e-9)
                    for a, b in zip(mine, against, strict=True)
                ]
            )
            for metric in ("mean_s", "p90_s", "makespan_s")
        ]
        rows.append((name, value, *(round(ratio, 4) for ratio in ratios)))
    report.table(("setting", "value", "mean", "p90", "makespan"), rows, title="cost / sticky_least_loaded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="3 seeds")
    parser.add_argument("--tune", action="store_true", help="settings of cost on A and B")
    parser.add_argument("--cache", type=Path, help="keep finished runs here, and go on from them")
    parser.add_argument("--workloads", default="CD", help="which to judge on")
    arguments = parser.parse_args()
    seeds = 3 if arguments.quick else arguments.seeds
    report = Report("policies")
    if arguments.tune:
        tune(report, min(seeds, 5))
        return
    default = SchedulerConfig().policy
    outcomes = judge(arguments.workloads, seeds, CHURN_PER_MIN, report, arguments.cache)
    rows: list[tuple[Any, ...]] = []
    details: list[dict[str, Any]] = []
    losses: list[str] = []
    wins = ties = 0
    for (load, churn, policy), runs in outcomes.items():
        case: dict[str, Any] = {"workload": load, "churn_per_min": churn, "policy": policy}
        cells: list[str] = []
        for metric in METRICS:
            mean, half = mean_interval([float(getattr(run, metric)) for run in runs])
            case[metric], case[f"{metric}_ci95"] = round(mean, 4), round(half, 4)
            cells.append(f"{mean:.3g} ± {half:.2g}")
        case["harvested"] = round(statistics.fmean(run.harvested for run in runs), 3)
        case["failed"] = sum(run.num_failed for run in runs)
        rows.append((load, churn, policy, *cells, case["harvested"], case["failed"]))
        details.append(case)
        if policy == default:
            continue
        for metric in METRICS:
            pairs = zip(outcomes[(load, churn, default)], runs, strict=True)
            worse, half = mean_interval([float(getattr(a, metric) - getattr(b, metric)) for a, b in pairs])
            if worse > half:
                other = statistics.fmean(getattr(run, metric) for run in runs)
                losses.append(
                    f"{load} at {churn} cuts/min: {metric} of {default} is {worse:.3g} ± {half:.2g} above "
                    f"{policy}'s {other:.4g}"
                )
            elif worse < -half:
                wins += 1
            else:
                ties += 1
    header = (
        "load",
        "cuts/min",
        "policy",
        "mean s",
        "p90 s",
        "recomputed/1000",
        "idle share",
        "harv.",
        "failed",
    )
    report.table(header, rows)
    print(f"{default} (default): {wins} better, {ties} not to tell, {len(losses)} worse:")
    for text in losses:
        print(f"  loss: {text}")

    def ratio(metric: str, policy: str, other: str) -> float:
        cases = sorted({(load, churn) for load, churn, _ in outcomes})
        return round(
            statistics.geometric_mean(
                statistics.fmean(getattr(run, metric) for run in outcomes[(*case, policy)])
                / statistics.fmean(getattr(run, metric) for run in outcomes[(*case, other)])
                for case in cases
            ),
            4,
        )

    summary: dict[str, Any] = {"default": default, "better": wins, "not_to_tell": ties, "worse": len(losses)}
    for other in ROUTERS:
        if other != "cost":
            name = other.replace(", ", "_").replace(" ", "_")
            summary[f"cost_over_{name}_mean"] = ratio("mean_s", "cost", other)
            summary[f"cost_over_{name}_p90"] = ratio("p90_s", "cost", other)
    report.finish(summary, {"cases": details, "losses": losses, "seeds": seeds}, arguments.json)


if __name__ == "__main__":
    main()
