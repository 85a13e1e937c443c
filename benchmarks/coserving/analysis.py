"""From requests and counters to the table of arms, the ratios with their intervals, and the verdict.  Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.coserving.plan import ALONE_1, ALONE_2, SOLO, Schedule
from rose.evaluation.arms import Ratio, RequestLatency, Slo, arm_stats, ratio
from rose.evaluation.statistics import percentile

BAR_RATIO = 1.05
BAR_SHARE = 0.85
NOISE_MARGIN = 0.02
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRecord:
    """Counters over one block's lead-free window."""

    arm: str
    segment: int
    run: int
    number: int
    """Of the block in its run; -1 for rollouts alone."""
    counters: Mapping[str, float]


def label(
    samples: Sequence[RequestLatency], schedule: Schedule, measured: Collection[int]
) -> list[RequestLatency]:
    """Requests of the blocks with these numbers, with their arm as phase and their pair as index."""
    block_of = [number for number, block in enumerate(schedule.blocks) for _ in range(block.count)]
    return [
        replace(sample, phase=schedule.blocks[block_of[sample.index]].arm, index=schedule.keys[sample.index])
        for sample in samples
        if sample.index < len(block_of) and block_of[sample.index] in measured
    ]


def _total(blocks: Sequence[BlockRecord], name: str) -> float:
    return sum(block.counters[name] for block in blocks)


def _rate(blocks: Sequence[BlockRecord], name: str) -> float | None:
    seconds = _total(blocks, "seconds")
    return _total(blocks, name) / seconds if seconds > 0 else None


def _share(
    mine: Sequence[BlockRecord], alone: Sequence[BlockRecord], solo: Sequence[BlockRecord]
) -> float | None:
    """Rollout tokens/s over those that the idle part of the core could make."""
    rate, busy, most = _rate(mine, "decoded"), _rate(alone, "serving_busy_s"), _rate(solo, "decoded")
    return None if rate is None or busy is None or not most or busy >= 1.0 else rate / (most * (1.0 - busy))


def _interval(*groups: Sequence[BlockRecord]) -> list[float] | None:
    """95 % bootstrap interval of the share, over blocks of each kind."""
    if not all(groups):
        return None
    rng = random.Random(0)
    draws = (_share(*(rng.choices(group, k=len(group)) for group in groups)) for _ in range(RESAMPLES))
    found = sorted(draw for draw in draws if draw is not None)
    if not found:
        return None
    return [found[int(0.025 * len(found))], found[min(len(found) - 1, int(0.975 * len(found)))]]


def _hit_rate(blocks: Sequence[BlockRecord]) -> float | None:
    queries = _total(blocks, "prefix_queries")
    return _total(blocks, "prefix_hits") / queries if queries else None


def analyse(
    samples: Sequence[RequestLatency], blocks: Sequence[BlockRecord], slo: Slo, arms: Sequence[str]
) -> dict[str, Any]:
    """``{"arms": {name: row}, "summary": {...}}``; a figure that could not be measured is None."""
    by_arm = {arm: [s for s in samples if s.phase == arm] for arm in arms}
    blocks_of = {arm: [b for b in blocks if b.arm == arm] for arm in (*arms, SOLO)}
    alone = by_arm[ALONE_1] + by_arm[ALONE_2]
    alone_blocks = blocks_of[ALONE_1] + blocks_of[ALONE_2]
    busy = _rate(alone_blocks, "serving_busy_s")
    steps = _total(alone_blocks, "serving_steps")
    step_ms = 1e3 * _total(alone_blocks, "serving_busy_s") / steps if steps else None
    solo_rate = _rate(blocks_of[SOLO], "decoded")
    alone_hits = _hit_rate(alone_blocks)
    violations_alone = sum(sample.violates(slo) for sample in alone) / 2

    rows: dict[str, dict[str, Any]] = {}
    for arm in arms:
        rate = _rate(blocks_of[arm], "decoded")
        hits = _hit_rate(blocks_of[arm])
        above, below = (
            (by_arm[arm], alone) if arm not in (ALONE_1, ALONE_2) else (by_arm[arm], by_arm[ALONE_1])
        )
        row: dict[str, Any] = {**asdict(arm_stats(by_arm[arm], slo)), "rollout_tokens_per_s": rate}
        tpot_s = [s.tpot_s for s in by_arm[arm] if s.error is None and s.num_tokens > 1]
        row["tpot_p99_s"] = percentile(tpot_s, 0.99) if tpot_s else None
        for metric in ("ttft", "itl", "stall"):
            for name, fraction in (("p50", 0.5), ("p99", 0.99)):
                row[f"{metric}_{name}_ratio"] = _ratio(ratio(above, below, metric, fraction))
        row["extra_violations"] = row["num_violations"] - violations_alone
        row["harvested_share"] = _share(blocks_of[arm], alone_blocks, blocks_of[SOLO])
        row["harvested_interval"] = _interval(blocks_of[arm], alone_blocks, blocks_of[SOLO])
        row["hit_rate"] = hits
        row["hit_rate_delta"] = hits - alone_hits if hits is not None and alone_hits is not None else None
        row["cut_requests"] = _total(blocks_of[arm], "cut_requests")
        row["engine_kills"] = _total(blocks_of[arm], "kills")
        rows[arm] = row
    summary = _summary(rows)
    summary |= {
        "serving_busy_fraction": busy,
        "serving_step_ms": step_ms,
        "solo_rollout_tokens_per_s": solo_rate,
        "violations_alone": violations_alone,
        "num_pairs": len({s.index for s in alone}),
    }
    return {"arms": rows, "summary": summary}


def _summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    noise = {m: rows[ALONE_2][f"{m}_p99_ratio"] for m in ("ttft", "itl")}
    summary: dict[str, Any] = {
        "aa_ratio": _value(noise["ttft"]),
        "aa_itl_ratio": _value(noise["itl"]),
    }
    for arm, row in rows.items():
        if arm in (ALONE_1, ALONE_2):
            continue
        suffix = "" if arm == "rose" else f"_{arm}"
        for metric in ("ttft", "itl"):
            found = row[f"{metric}_p99_ratio"]
            summary[f"p99_{metric}_ratio{suffix}"] = _value(found)
            summary[f"p99_{metric}_ratio_high{suffix}"] = found["high"] if found else None
        for name in ("extra_violations", "harvested_share", "hit_rate_delta"):
            summary[f"{name}{suffix}"] = row[name]
        low, high = row["harvested_interval"] or (None, None)
        summary[f"harvested_share_low{suffix}"], summary[f"harvested_share_high{suffix}"] = low, high
    if "rose" in rows:
        summary["bar_met"] = verdict(rows["rose"], noise)
    return summary


def verdict(row: Mapping[str, Any], noise: Mapping[str, Mapping[str, float] | None]) -> bool:
    """The bar: both P99 ratios' upper bounds, no added violation, and the harvested share."""
    for metric in ("ttft", "itl"):
        found, limit = row[f"{metric}_p99_ratio"], noise[metric]
        if found is None or limit is None or found["high"] > max(BAR_RATIO, limit["high"] + NOISE_MARGIN):
            return False
    share = row["harvested_share"]
    return row["extra_violations"] <= 0 and share is not None and share >= BAR_SHARE


def _ratio(found: Ratio | None) -> dict[str, float] | None:
    return None if found is None else asdict(found)


def _value(found: Mapping[str, float] | None) -> float | None:
    return None if found is None else found["value"]
