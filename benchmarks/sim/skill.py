#!/usr/bin/env python
"""Does the simulator tell policies apart?   Its skill over predictors that know nothing, on differences between live arms.

    python benchmarks/sim/skill.py --calibrate A.json --policy-profile P.json --test CODE.json --test CONV.json --test MULTITURN.json --trace CSV --json F

Calibration, simulation and live files are those of ``benchmarks/sim/sim_predict.py``.  A *difference* is the logarithm of one arm's figure over
another's, of one workload: of production's first token and time between tokens (P50 and P99), each arm over production alone and over each other arm; of the
harvested share, each arm over each other.  Only pairs with an arm whose steps take turns (``*_serial``, what a GPU's two engines do) are judged.

**Null predictors.**  ``as_alone``: no difference, whatever the arms.  ``constant``: of each figure, the mean of all live differences of the *other*
workloads; it has seen live runs of the same policies, which the simulator has not.

**Skill** over a null: 1 - sum of squared errors of the simulator / that of the null, over all differences.  Its 95 % interval: a bootstrap over the
segments of each workload (1,000 draws, seed 0), for the live figures are as uncertain as that.

**Bar**, written before the first run: the lower end is above 0 over both.  The files are the newest runs that have such arms, and all three of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.report import Report  # noqa: E402
from benchmarks.sim.sim_predict import ALONE, SYSTEMS, Live, calibrate, predict, read_live  # noqa: E402
from rose.coserve.step_profile import load_profile  # noqa: E402
from rose.errors import RoseError  # noqa: E402
from rose.evaluation.statistics import percentile  # noqa: E402

LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
HARVEST = "harvested_share"
DRAWS = 1000

Figures = Mapping[str, Mapping[str, float]]
"""Arm -> figure -> value."""
Key = tuple[str, str, str]
"""Figure, arm, the arm that it is over."""


def differences(rows: Figures) -> dict[Key, float]:
    """Of every pair with an arm whose steps take turns; a figure that is not there, or is nothing, has none."""
    found: dict[Key, float] = {}
    arms = [arm for arm in SYSTEMS if arm in rows]
    for over, arm in itertools.combinations(["alone", *arms], 2):
        if "serial" not in arm + over:
            continue
        for figure in (*LATENCIES, HARVEST):
            mine, its = rows[arm].get(figure, 0.0), rows[over].get(figure, 0.0)
            if mine > 0 and its > 0 and math.isfinite(mine) and math.isfinite(its):
                found[figure, arm, over] = math.log(mine / its)
    return found


def skills(live: Sequence[Mapping[Key, float]], guesses: Sequence[Mapping[Key, float]]) -> dict[str, float]:
    """Over each null, of all workloads together.

    Args:
        live, guesses: One mapping per workload.
    """
    errors = {"simulator": 0.0, "as_alone": 0.0, "constant": 0.0}
    for number, (seen, made) in enumerate(zip(live, guesses, strict=True)):
        others = [row for index, row in enumerate(live) if index != number]
        for key, value in seen.items():
            if key not in made:
                continue
            same = [other for row in others for (figure, _, _), other in row.items() if figure == key[0]]
            constant = float(np.mean(same)) if same else 0.0
            errors["simulator"] += (made[key] - value) ** 2
            errors["as_alone"] += value**2
            errors["constant"] += (constant - value) ** 2
    return {null: 1.0 - errors["simulator"] / errors[null] for null in ("as_alone", "constant")}


class Segments:
    """Live figures of any choice of a run's segments.

    Args:
        busy: Share of production's time that it is busy alone; the same in every choice.
    """

    def __init__(self, live: Live) -> None:
        self.num = len(live.segments)
        self._arms = [arm for arm in SYSTEMS if any(block["arm"] == arm for block in live.blocks)]
        self._ttft: dict[tuple[str, int], list[float]] = {}
        self._tpot: dict[tuple[str, int], list[float]] = {}
        for arm, segment, _, ttft_s, end_s, tokens, _ in live.samples:
            name = "alone" if arm in ALONE else arm
            self._ttft.setdefault((name, segment), []).append(ttft_s)
            if tokens > 1:
                self._tpot.setdefault((name, segment), []).append((end_s - ttft_s) / (tokens - 1))
        self._decoded: dict[tuple[str, int], tuple[float, float]] = {}
        numbers = sorted({block["segment"] for block in live.blocks if block["arm"] in self._arms})
        for block in live.blocks:
            if block["arm"] in self._arms:
                counters = block["counters"]
                self._decoded[block["arm"], numbers.index(block["segment"])] = (
                    counters["decoded"],
                    counters["seconds"],
                )

    def figures(self, chosen: Sequence[int]) -> dict[str, dict[str, float]]:
        rows: dict[str, dict[str, float]] = {}
        for arm in ("alone", *self._arms):
            ttft = [value for segment in chosen for value in self._ttft.get((arm, segment), ())]
            tpot = [value for segment in chosen for value in self._tpot.get((arm, segment), ())]
            rows[arm] = {
                "ttft_p50_ms": percentile(ttft, 0.5),
                "ttft_p99_ms": percentile(ttft, 0.99),
                "tpot_p50_ms": percentile(tpot, 0.5),
                "tpot_p99_ms": percentile(tpot, 0.99),
            }
            parts = [self._decoded[arm, segment] for segment in chosen if (arm, segment) in self._decoded]
            if parts:  # rates of one run: what both are divided by is the same
                rows[arm][HARVEST] = sum(part[0] for part in parts) / sum(part[1] for part in parts)
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibrate", type=Path, required=True, metavar="A.json")
    parser.add_argument("--test", action="append", required=True, type=Path, metavar="FILE")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="repeatable")
    parser.add_argument(
        "--policy-profile", type=Path, help="what `rose profile` measured of the rollout engine"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report("skill")
    try:
        policy = load_profile(args.policy_profile) if args.policy_profile else None
        found = calibrate(read_live(args.calibrate, args.trace), policy)
        lives = [read_live(path, args.trace) for path in args.test]
        guesses = [differences(predict(live, found)) for live in lives]
    except RoseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    segments = [Segments(live) for live in lives]
    live = [differences(one.figures(range(one.num))) for one in segments]
    rng = np.random.default_rng(0)
    draws = [
        skills([differences(one.figures(rng.integers(0, one.num, one.num))) for one in segments], guesses)
        for _ in range(DRAWS)
    ]
    summary: dict[str, Any] = {
        "differences": sum(len(set(a) & set(b)) for a, b in zip(live, guesses, strict=True))
    }
    for null, value in skills(live, guesses).items():
        values = [draw[null] for draw in draws]
        summary[f"over_{null}"] = round(value, 3)
        summary[f"over_{null}_low"] = round(float(np.quantile(values, 0.025)), 3)
        summary[f"over_{null}_high"] = round(float(np.quantile(values, 0.975)), 3)
    for figure in (*LATENCIES, HARVEST):
        parts = [
            [{key: value for key, value in row.items() if key[0] == figure} for row in rows]
            for rows in (live, guesses)
        ]
        for null, value in skills(parts[0], parts[1]).items():
            summary[f"{figure}.over_{null}"] = round(value, 3)
    summary["meets_bar"] = all(summary[f"over_{null}_low"] > 0 for null in ("as_alone", "constant"))
    rows = [
        {"workload": one.name, "figure": key[0], "arm": key[1], "over": key[2], "live": round(seen[key], 4), "simulated": round(made[key], 4)}
        for one, seen, made in zip(lives, live, guesses, strict=True)
        for key in seen
        if key in made
    ]  # fmt: skip
    report.table(
        ("workload", "figure", "arm", "over", "live", "simulated"), [tuple(row.values()) for row in rows]
    )
    report.finish(summary, {"differences": rows, "tests": [path.name for path in args.test]}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
