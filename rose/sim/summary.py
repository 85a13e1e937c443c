"""Numbers of one run, and ratios between runs.  Flat: names with units, values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rose.evaluation.statistics import percentile
from rose.sim.arrivals import Floats
from rose.sim.world import SimResult

Number = float | int | None
Row = dict[str, Number]

COLUMNS: dict[str, str] = {
    "steps": "RL steps that ended",
    "step_s": "seconds per RL step",
    "rollout_s": "of it until the batch is complete",
    "train_s": "of it training",
    "weights_s": "of it until dedicated engines have the new weights",
    "tail_s": "from 75 % of the batch's trajectories to the batch",
    "tokens_per_s": "tokens trained on per second of the run",
    "trajectories_per_h": "trajectories trained on per hour",
    "harvested_share": "sampled tokens that came from engines the job does not own",
    "gpu_hours_per_step": "GPU hours paid for by the job, per step (of several jobs each pays its part)",
    "relay_gb_per_step": "GB through the weight relay, per step",
    "allocation_overhead": "share of bought engine time before it could sample",
    "ttft_p50_ms": "production's time to first token, median",
    "ttft_p99_ms": "the same, 99th percentile",
    "tpot_p50_ms": "production's time per output token, median",
    "tpot_p99_ms": "the same, 99th percentile",
    "slo_missed": "share of production requests over either limit, those included that still wait for too long at the end",
    "cuts": "loans cut while in use",
    "requeued": "turns that moved to another engine",
    "recomputed_share": "prompt tokens computed again after a move, of all computed",
    "cached_share": "prompt tokens found in a prefix cache",
    "lost_tokens": "sampled and thrown away",
    "kills": "rollout engines killed for a late cut",
}


def missing_steps(run: SimResult) -> str:
    """What of its steps did not end within the duration, in words; empty where all did, or none was asked for but by the duration.

    The steps that ended are the quicker ones, so a mean over them says too little of such a run.
    """
    num, asked = len(run.steps), run.scenario.num_steps
    if not num:
        return "no step ended"
    return f"{num} of {asked} steps ended" if asked is not None and num < asked else ""


def summarize(run: SimResult) -> Row:
    """One row; None = nothing was measured.  ``step_s`` is of the steps that ended (:func:`missing_steps`)."""
    steps, counters = run.steps, run.counters
    num = len(steps)
    span_s = steps[-1].end_s - steps[0].start_s if num else math.nan
    tokens = sum(step.tokens for step in steps)
    sampled = sum(counters.sampled.values())
    ttft = np.array([value for _, value in run.ttft_s])
    tpot = np.array([value for _, value in run.tpot_s])
    missed = _missed(run)
    prompts = counters.prefilled + counters.cached
    row: dict[str, float] = {
        "steps": num,
        "step_s": span_s / num if num else math.nan,
        "rollout_s": _mean([step.ready_s - step.start_s for step in steps]),
        "train_s": _mean([step.trained_s - step.ready_s for step in steps]),
        "weights_s": _mean([step.end_s - step.trained_s for step in steps]),
        "tail_s": _mean([step.tail_s for step in steps]),
        "tokens_per_s": tokens / span_s if num else math.nan,
        "trajectories_per_h": sum(step.trajectories for step in steps) / span_s * 3600 if num else math.nan,
        "harvested_share": counters.sampled["harvested"] / sampled if sampled else math.nan,
        "gpu_hours_per_step": run.billed_gpu_s / run.scenario.num_jobs / 3600 / run.duration_s * span_s / num
        if num
        else math.nan,
        "relay_gb_per_step": run.relay_bytes / 1e9 / num if num else math.nan,
        "allocation_overhead": run.wasted_s / run.allocated_s if run.allocated_s else 0.0,
        "ttft_p50_ms": percentile(ttft, 0.50) * 1e3,
        "ttft_p99_ms": percentile(ttft, 0.99) * 1e3,
        "tpot_p50_ms": percentile(tpot, 0.50) * 1e3,
        "tpot_p99_ms": percentile(tpot, 0.99) * 1e3,
        "slo_missed": missed,
        "cuts": counters.cuts,
        "requeued": counters.requeued,
        "recomputed_share": counters.recomputed / counters.prefilled if counters.prefilled else 0.0,
        "cached_share": counters.cached / prompts if prompts else 0.0,
        "lost_tokens": counters.lost,
        "kills": counters.kills,
    }
    assert list(row) == list(COLUMNS)
    return {name: (round(value, 6) if math.isfinite(value) else None) for name, value in row.items()}


def percentiles_over_time(
    values: Sequence[tuple[float, float]], duration_s: float, fraction: float, num_windows: int = 24
) -> list[tuple[float, float]]:
    """(middle of the window, percentile) where a window has at least 20 values."""
    if not values:
        return []
    data = np.array(values)
    width_s = duration_s / num_windows
    index = np.minimum((data[:, 0] / width_s).astype(int), num_windows - 1)
    points: list[tuple[float, float]] = []
    for window in range(num_windows):
        chosen = data[index == window, 1]
        if len(chosen) >= 20:
            points.append(((window + 0.5) * width_s, percentile(chosen, fraction)))
    return points


SETTLE_S = 60.0
"""Requests of the last minute of the shorter run are not judged: in one of them they may not have been answered yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Misses:
    """Production's requests of one window, each beside itself with no rollouts on its engine."""

    num: int
    """Requests that came in the window."""
    added: int
    """Late beside rollouts, in time alone."""
    mended: int
    """Late alone, in time beside rollouts: they shared their steps with others."""

    @property
    def share(self) -> float | None:
        """Late beside rollouts less late alone, of all; None without a request."""
        return (self.added - self.mended) / self.num if self.num else None

    @property
    def low(self) -> float | None:
        """Lower 95 % end of :attr:`share`."""
        if not self.num:
            return None
        return (self.added - self.mended - 1.96 * math.sqrt(self.added + self.mended)) / self.num

    @property
    def high(self) -> float | None:
        """Upper 95 % end of :attr:`share`: requests are taken for independent, and of none seen at most 3 can be meant."""
        if not self.num:
            return None
        more = 1.96 * math.sqrt(self.added + self.mended)
        return min(1.0, (self.added - self.mended + max(3.0, more)) / self.num)

    def __add__(self, other: Misses) -> Misses:
        return Misses(
            num=self.num + other.num, added=self.added + other.added, mended=self.mended + other.mended
        )


def compare_misses(
    late: Mapping[int, float],
    alone: Mapping[int, float],
    arrived_s: Sequence[float] | Floats,
    end_s: float,
    begin_s: float = 0.0,
) -> Misses:
    """Request by request, over one window.

    Args:
        late, alone: Number -> arrival of the requests that missed a limit (``SimResult.late``), with and without rollouts.
        arrived_s: Of all requests.
        end_s: Of the shorter of the two runs.
        begin_s: Requests before it are not judged.
    """
    until_s = end_s - SETTLE_S
    with_rollouts = {number for number, at_s in late.items() if begin_s <= at_s < until_s}
    without = {number for number, at_s in alone.items() if begin_s <= at_s < until_s}
    first, last = np.searchsorted(np.asarray(arrived_s, dtype=float), [begin_s, max(begin_s, until_s)])
    return Misses(
        num=int(last - first),
        added=len(with_rollouts - without),
        mended=len(without - with_rollouts),
    )


def added_misses(runs: Sequence[SimResult]) -> dict[str, float | None]:
    """By system: share of production's requests that its rollouts make late, each request beside itself in a run without rollouts on its
    device, over the time of both; None without such a run, of that run, or where the time is too short."""
    alone = next((run for run in runs if run.system.extra != "harvest"), None)
    found: dict[str, float | None] = {}
    for run in runs:
        name, harvests = run.system.name, run.system.extra == "harvest"
        if alone is None or not harvests:
            found[name] = None
            continue
        end_s = min(run.duration_s, alone.duration_s)
        found[name] = compare_misses(run.late, alone.late, run.arrived_s, end_s).share
    return found


def _missed(run: SimResult) -> float:
    late, told = count_missed(run)
    return late / told if told else math.nan


def count_missed(run: SimResult, begin_s: float = 0.0) -> tuple[int, int]:
    """Of the requests that came from ``begin_s`` on: how many missed a limit, and of how many that is told.

    That is of those that were answered, and of those that had waited for too long already when the run ended: where requests pile up
    these are the late ones, and to leave them out would make the worse of two runs look better.
    """
    late = sum(at_s >= begin_s for at_s in run.late.values())
    unanswered = sum(at_s >= begin_s for at_s in run.late_unanswered.values())
    return late, sum(at_s >= begin_s for at_s, _ in run.ttft_s) + unanswered


def _mean(values: list[float]) -> float:
    good = [value for value in values if math.isfinite(value)]
    return sum(good) / len(good) if good else math.nan
