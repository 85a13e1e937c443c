"""Two jobs that roll out and train in turn, on shared devices and each on its fixed half: ``python -m benchmarks.scheduling.device_shares``.

The world of ``benchmarks.scheduling.provisioning``, in virtual time, its arm ``policy`` beside ``static-2`` (half of the harvested engines for each
job, for good), on the same seeds.  A step's demand is drawn by job and number, so the steps of one job are the same in both arms.

- ``rollout_over_half``: how long the rollouts of a step take, over those on the fixed half, geometric mean over the steps that ended in both; by seed, then its mean
  over seeds with a bootstrap interval (95 %).  Below 1: sharing is faster.
- ``held_share``: of the harvested engines' time, what each job has, what nobody has.

Reported, without a bar: that is ``provisioning.py``'s, on tokens.  ``details.shown`` has who had which engine in each second of the first seed, for the picture in
``docs/figures``.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import Report
from benchmarks.scheduling.provisioning import (
    ARMS,
    DURATION_S,
    JOBS,
    NUM_HARVESTED,
    SEEDS,
    Arm,
    SharedFleet,
    interval,
)
from rose.evaluation.charts import Axis, Lane, LaneBar, timeline
from rose.policy.worker import Tier

HALF = f"static-{NUM_HARVESTED // 2}"
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --muted: #66707e; --grid: #d9dee5; --page: #fff; --a: #2563a8; --b: #c2571a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --muted: #9aa5b3; --grid: #333c48; --page: #14181d; --a: #6fa8e6; --b: #f0935a; } }
.s-a { fill: var(--a); } .s-b { fill: var(--b); } .lane { fill: var(--ink); font-size: 13px; } .tick, .cap { fill: var(--muted); font-size: 11px; }
.base, .grid { stroke: var(--grid); fill: none; } .in { fill: var(--page); font-size: 11px; }
"""


class ShownFleet(SharedFleet):
    """Notes who has which harvested engine, and when steps begin and end."""

    def __init__(self, arm: Arm, seed: int) -> None:
        super().__init__(arm, seed)
        self.owners: dict[str, list[str]] = {
            name: [] for name, one in self.engines.items() if one.spec.tier is Tier.HARVESTED
        }
        """By engine, second by second; empty: nobody's."""
        self.rollouts: dict[str, list[tuple[float, float]]] = {name: [] for name in self.jobs}
        self._begun_s: dict[str, float] = {}

    def on_rollout(self, name: str, epoch: int) -> None:
        self._begun_s[name] = self.now_s
        super().on_rollout(name, epoch)

    def ended(self, action: Any) -> None:
        before = {name: job.step for name, job in self.jobs.items()}
        super().ended(action)
        for name, job in self.jobs.items():
            if job.step > before[name]:
                self.rollouts[name].append((self._begun_s[name], self.now_s))

    def on_provision(self, name: str, epoch: int) -> None:
        for engine, seen in self.owners.items():
            seen.append(self.book.fleet.workers[engine].job or "")
        super().on_provision(name, epoch)


def run(arm: Arm, seed: int) -> ShownFleet:
    fleet = ShownFleet(arm, seed)
    fleet.simulate()
    return fleet


def over_half(shared: ShownFleet, half: ShownFleet) -> float:
    """Logarithm of how much longer a step's rollouts take, mean over both jobs' steps that ended in both."""
    ratios = [
        math.log((end - begin) / (its_end - its_begin))
        for job in JOBS
        for (begin, end), (its_begin, its_end) in zip(shared.rollouts[job], half.rollouts[job], strict=False)
    ]
    return statistics.fmean(ratios)


def spans_of(owners: list[str]) -> list[tuple[str, int, int]]:
    """``(job, first second, one past the last)``; none for what is nobody's."""
    found: list[tuple[str, int, int]] = []
    for second, job in enumerate(owners):
        if found and found[-1][0] == job and found[-1][2] == second:
            found[-1] = (job, found[-1][1], second + 1)
        elif job:
            found.append((job, second, second + 1))
    return found


def picture(shown: dict[str, Any]) -> str:
    """SVG: a lane for each job's rollouts, and one for each harvested engine."""
    lanes = [
        Lane(
            name=f"job {job}",
            note="rolls out; between, it trains",
            spans=[LaneBar(start=begin, end=end, css=job, label="") for begin, end in shown["rollouts"][job]],
        )
        for job in JOBS
    ]
    lanes += [
        Lane(
            name=f"harvested engine {number}",
            note="whose it is",
            spans=[
                LaneBar(start=begin, end=end, css=job, label=job, title=f"job {job}, {begin} to {end} s")
                for job, begin, end in spans_of(owners)
            ],
        )
        for number, owners in enumerate(shown["owners"].values(), 1)
    ]
    ticks = [DURATION_S * part / 6 for part in range(6)]
    axis = Axis(low=0.0, high=DURATION_S, ticks=ticks, format=lambda value: f"{value:.0f} s")
    return timeline(
        lanes, axis, title="Four harvested engines between two jobs, simulated time", lane_height=30
    )


def main(
    seeds: Annotated[str, typer.Option(help="FIRST-LAST.")] = f"{SEEDS[0]}-{SEEDS[-1]}",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    """Two jobs that take turns on four devices, beside the same jobs with two devices each; some seconds a seed."""
    report = Report("device_shares")
    arms = {arm.name: arm for arm in ARMS}
    first, _, last = seeds.partition("-")
    wanted = range(int(first), int(last or first) + 1)
    logs: list[float] = []
    shown: dict[str, Any] = {}
    held: dict[str, float] = dict.fromkeys(JOBS, 0.0)
    for number, seed in enumerate(wanted, 1):
        shared, half = run(arms["policy"], seed), run(arms[HALF], seed)
        logs.append(over_half(shared, half))
        shown = shown or {"seed": seed, "owners": shared.owners, "rollouts": shared.rollouts}
        for job in JOBS:
            held[job] += shared.held_s[job] / (NUM_HARVESTED * DURATION_S * len(wanted))
        report.progress("seeds", number, len(wanted))
    found = interval(logs)
    figures = {
        "rollout_over_half": round(found["mean"], 4),
        "rollout_over_half_low": round(found["low"], 4),
        "rollout_over_half_high": round(found["high"], 4),
        **{f"held_share_{job}": round(share, 3) for job, share in held.items()},
        "held_share_nobody": round(1.0 - sum(held.values()), 3),
        "num_seeds": len(logs),
    }
    report.finish(
        figures,
        {"seeds": list(wanted), "by_seed": [math.exp(each) for each in logs], "shown": shown},
        json_path,
    )


if __name__ == "__main__":
    typer.run(main)
