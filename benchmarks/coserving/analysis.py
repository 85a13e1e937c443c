"""From requests and counters to the table of arms, the ratios with their intervals, and the verdict.  Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.coserving.plan import ALONE_1, ALONE_2, PAIRS_PER_SEGMENT, SOLO, Schedule
from rose.evaluation.arms import Ratio, RequestLatency, Slo, arm_stats, ratio
from rose.evaluation.statistics import percentile
from rose.policy.coserving.timing import is_late

BAR_RATIO = 1.05
BAR_SHARE = 0.85
NOISE_MARGIN = 0.02
RESAMPLES = 2000
RIVALS = {"rose": "paper", "rose_serial": "paper_serial"}
TIGHT = 0.8
"""Of its limit: a prompt that takes more of it alone has nothing left for a rollout step."""
SERIAL, STOPPED = "rose_serial", "rose_serial_layers"
BAR_TIGHT_SHARE = 0.01
BAR_TIGHT_FEWER = 0.5
BAR_TIGHT_LEAST = 10
BAR_STOP_TOKENS = 0.9
BAR_QUICK = 0.95


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


def unanswered(
    samples: Sequence[RequestLatency], schedule: Schedule, measured: Collection[int]
) -> dict[str, int]:
    """Arm -> how many of the requests of these blocks have no record, where there are such: nobody knows what became of them."""
    sent = Counter[str]()
    for number in measured:
        sent[schedule.blocks[number].arm] += schedule.blocks[number].count
    return dict(sent - Counter(sample.phase for sample in samples))


def _total(blocks: Sequence[BlockRecord], name: str) -> float:
    return sum(block.counters.get(name, 0.0) for block in blocks)  # runs of before know fewer


def busy_share(blocks: Sequence[BlockRecord]) -> float | None:
    """Of the time of these blocks, production's steps."""
    return _rate(blocks, "serving_busy_s")


def _rate(blocks: Sequence[BlockRecord], name: str) -> float | None:
    seconds = _total(blocks, "seconds")
    return _total(blocks, name) / seconds if seconds > 0 else None


def _share(
    mine: Sequence[BlockRecord], alone: Sequence[BlockRecord], solo: Sequence[BlockRecord]
) -> float | None:
    """Rollout tokens/s over those that the idle part of the core could make."""
    rate, busy, most = _rate(mine, "decoded"), busy_share(alone), _rate(solo, "decoded")
    return None if rate is None or busy is None or not most or busy >= 1.0 else rate / (most * (1.0 - busy))


def _used(mine: Sequence[BlockRecord]) -> float | None:
    """Of the core's time that production left, in the same blocks, what the rollout engine ran: by the kernel's count, so at most 1."""
    left = _total(mine, "seconds") - _total(mine, "serving_cpu_s")
    known = all("rollout_cpu_s" in block.counters for block in mine)
    return _total(mine, "rollout_cpu_s") / left if known and left > 0 else None


def _others(alone: Sequence[BlockRecord]) -> float | None:
    """Of the core's time while production serves alone, what neither engine ran and nobody left idle: the kernel and other programs."""
    if not alone or any("serving_cpu_s" not in block.counters for block in alone):
        return None
    known = sum(_total(alone, name) for name in ("idle_s", "serving_cpu_s", "rollout_cpu_s"))
    return max(0.0, 1.0 - known / _total(alone, "seconds"))


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


class Limits:
    """What was promised in each run.

    Args:
        slo: In all of them;
        ttft_s: but the first token in these, by the run's number.
    """

    def __init__(self, slo: Slo, ttft_s: Mapping[int, float] | None = None) -> None:
        self._slo, self._ttft_s = slo, ttft_s or {}

    def of(self, sample: RequestLatency) -> Slo:
        run = sample.index // (1000 * PAIRS_PER_SEGMENT)
        return replace(self._slo, ttft_s=self._ttft_s.get(run, self._slo.ttft_s))

    def misses(self, samples: Sequence[RequestLatency]) -> int:
        return sum(sample.violates(self.of(sample)) for sample in samples)


def _common(*arms: Sequence[RequestLatency]) -> list[list[RequestLatency]]:
    """Of each arm the requests that all of them have: a block that one left out is judged in none."""
    indices = set.intersection(*({sample.index for sample in arm} for arm in arms))
    return [[sample for sample in arm if sample.index in indices] for arm in arms]


def _tight(mine: Sequence[RequestLatency], alone: Sequence[RequestLatency], limits: Limits) -> dict[str, Any]:
    """What became of the prompts that ``alone`` needed more than ``TIGHT`` of their limit for."""
    before = {s.index: s for s in alone if s.error is None and s.ttft_s > TIGHT * limits.of(s).ttft_s}
    after = [sample for sample in mine if sample.index in before]
    late = [s for s in after if s.error is not None or is_late(s.ttft_s, limits.of(s).ttft_s)]
    late_alone = [s for s in after if is_late(before[s.index].ttft_s, limits.of(s).ttft_s)]
    added_s = sorted(s.ttft_s - before[s.index].ttft_s for s in after if s.error is None)
    return {
        "tight_requests": len(after),
        "tight_misses": len(late),
        "tight_added_misses": len(late) - len(late_alone),
        "tight_added_ttft_p50_s": added_s[len(added_s) // 2] if added_s else None,
        "tight_added_ttft_p95_s": added_s[max(0, -(-95 * len(added_s) // 100) - 1)] if added_s else None,
    }


def _stops(blocks: Sequence[BlockRecord]) -> dict[str, Any]:
    stops = _total(blocks, "stops")
    return {
        "stops": stops,
        "stops_quick_share": _total(blocks, "quick_stops") / stops if stops else None,
        "stops_late_ms": 1e3 * _total(blocks, "stops_late_s") / stops if stops else None,
        "stops_given_up": _total(blocks, "stops_given_up"),
        "stopped_share": _rate(blocks, "stopped_s"),
    }


def analyse(
    samples: Sequence[RequestLatency],
    blocks: Sequence[BlockRecord],
    slo: Slo,
    arms: Sequence[str],
    ttft_s: Mapping[int, float] | None = None,
    unanswered_by_arm: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """``{"arms": {name: row}, "summary": {...}}``; a figure that could not be measured is None.

    ``extra_violations`` and ``num_pairs`` are of the requests that the arm and both of production alone have.

    Args:
        ttft_s: First tokens that were promised otherwise than in ``slo``, by the run's number.
        unanswered_by_arm: See :func:`unanswered`; an arm that has any meets no bar.
    """
    limits = Limits(slo, ttft_s)
    by_arm = {arm: [s for s in samples if s.phase == arm] for arm in arms}
    blocks_of = {arm: [b for b in blocks if b.arm == arm] for arm in (*arms, SOLO)}
    alone = by_arm[ALONE_1] + by_arm[ALONE_2]
    alone_blocks = blocks_of[ALONE_1] + blocks_of[ALONE_2]
    busy = busy_share(alone_blocks)
    steps = _total(alone_blocks, "serving_steps")
    step_ms = 1e3 * _total(alone_blocks, "serving_busy_s") / steps if steps else None
    solo_rate = _rate(blocks_of[SOLO], "decoded")
    alone_hits = _hit_rate(alone_blocks)
    violations_alone = limits.misses(alone) / 2

    rows: dict[str, dict[str, Any]] = {}
    for arm in arms:
        rate = _rate(blocks_of[arm], "decoded")
        hits = _hit_rate(blocks_of[arm])
        above, below = (
            (by_arm[arm], alone) if arm not in (ALONE_1, ALONE_2) else (by_arm[arm], by_arm[ALONE_1])
        )
        row: dict[str, Any] = {**asdict(arm_stats(by_arm[arm], slo)), "rollout_tokens_per_s": rate}
        row["num_violations"] = limits.misses(by_arm[arm])
        row |= _tight(by_arm[arm], by_arm[ALONE_1], limits) | _stops(blocks_of[arm])
        tpot_s = [s.tpot_s for s in by_arm[arm] if s.error is None and s.num_tokens > 1]
        row["tpot_p99_s"] = percentile(tpot_s, 0.99) if tpot_s else None
        for metric in ("ttft", "itl", "stall"):
            for name, fraction in (("p50", 0.5), ("p99", 0.99)):
                row[f"{metric}_{name}_ratio"] = _ratio(ratio(above, below, metric, fraction))
        mine, *twice = _common(by_arm[arm], by_arm[ALONE_1], by_arm[ALONE_2])
        row["extra_violations"] = limits.misses(mine) - sum(map(limits.misses, twice)) / 2
        row["num_pairs"] = len({sample.index for sample in mine})
        row["unanswered"] = (unanswered_by_arm or {}).get(arm, 0)
        row["harvested_share"] = _share(blocks_of[arm], alone_blocks, blocks_of[SOLO])
        row["harvested_interval"] = _interval(blocks_of[arm], alone_blocks, blocks_of[SOLO])
        row["used_share"] = _used(blocks_of[arm])
        row["hit_rate"] = hits
        row["hit_rate_delta"] = hits - alone_hits if hits is not None and alone_hits is not None else None
        row["cut_requests"] = _total(blocks_of[arm], "cut_requests")
        row["engine_kills"] = _total(blocks_of[arm], "kills")
        rows[arm] = row
    for ours, theirs in RIVALS.items():
        if ours in rows and theirs in rows:
            rows[ours]["against_paper"] = against(
                rows[ours], rows[theirs], by_arm[ours], by_arm[theirs], limits
            )
    summary = _summary(rows)
    summary |= {
        "serving_busy_fraction": busy,
        "others_share": _others(alone_blocks),
        "serving_step_ms": step_ms,
        "solo_rollout_tokens_per_s": solo_rate,
        "violations_alone": violations_alone,
        "num_pairs": min(row["num_pairs"] for row in rows.values()),
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
        for name in ("extra_violations", "harvested_share", "used_share", "hit_rate_delta"):
            summary[f"{name}{suffix}"] = row[name]
        low, high = row["harvested_interval"] or (None, None)
        summary[f"harvested_share_low{suffix}"], summary[f"harvested_share_high{suffix}"] = low, high
    if "rose" in rows:
        summary["bar_met"] = verdict(rows["rose"], noise)
    for arm in RIVALS:
        if "against_paper" in rows.get(arm, {}):
            suffix = "" if arm == "rose" else f"_{arm}"
            summary |= {f"{name}{suffix}": value for name, value in rows[arm]["against_paper"].items()}
            summary[f"judged_met{suffix}"] = judged(rows[arm], noise)
    if SERIAL in rows and STOPPED in rows:
        summary |= _stop_summary(rows)
    return summary


def _stop_summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """With and without steps that stop at layers, where steps take turns."""
    without, with_stops, noise = rows[SERIAL], rows[STOPPED], rows[ALONE_2]
    tokens, before = with_stops["rollout_tokens_per_s"], without["rollout_tokens_per_s"]
    found = {
        "tight_requests": noise["tight_requests"],
        "tight_added_misses_aa": noise["tight_added_misses"],
        "tight_added_misses_without": without["tight_added_misses"],
        "tight_added_misses_with": with_stops["tight_added_misses"],
        "stops_quick_share": with_stops["stops_quick_share"],
        "stop_rollout_tokens_ratio": tokens / before if tokens is not None and before else None,
    }
    met = stop_verdict(found, with_stops["engine_kills"])
    return {**found, "stop_bar_met": met if met is None else met and not with_stops["unanswered"]}


def stop_verdict(found: Mapping[str, Any], kills: float) -> bool | None:
    """The bar of ``docs/gpu.md``, section "Stopping a step at a layer".  None: too few misses without it to tell."""
    ratio, quick, without = (
        found["stop_rollout_tokens_ratio"], found["stops_quick_share"], found["tight_added_misses_without"],
    )  # fmt: skip
    if without < BAR_TIGHT_LEAST or ratio is None or quick is None:
        return None
    noise = max(0, found["tight_added_misses_aa"]) + BAR_TIGHT_SHARE * found["tight_requests"]
    left = found["tight_added_misses_with"]
    return (
        left <= min(noise, BAR_TIGHT_FEWER * without)
        and ratio >= BAR_STOP_TOKENS
        and quick >= BAR_QUICK
        and kills == 0
    )


def against(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    our_samples: Sequence[RequestLatency],
    their_samples: Sequence[RequestLatency],
    limits: Limits,
) -> dict[str, Any]:
    """Ours beside the paper's way: P99 ratios over the same requests, and the figures in which one of both is ahead.

    Ahead is who has the interval of a ratio wholly on his side of 1, the intervals of harvested shares wholly above the other's, or
    fewer violations over the requests that both have.
    """
    ahead, behind, found = 0, 0, {}
    for metric in ("ttft", "itl"):
        row = _ratio(ratio(our_samples, their_samples, metric, 0.99))
        if row is not None:
            ahead, behind = ahead + (row["high"] < 1.0), behind + (row["low"] > 1.0)
        found[f"p99_{metric}_over_paper"] = _value(row)
        found[f"p99_{metric}_over_paper_low"] = row["low"] if row else None
        found[f"p99_{metric}_over_paper_high"] = row["high"] if row else None
    mine, its = ours["harvested_interval"], theirs["harvested_interval"]
    if mine and its:
        ahead, behind = ahead + (mine[0] > its[1]), behind + (mine[1] < its[0])
    our_misses, their_misses = map(limits.misses, _common(our_samples, their_samples))
    fewer = their_misses - our_misses
    ahead, behind = ahead + (fewer > 0), behind + (fewer < 0)
    return {**found, "ahead_of_paper_in": ahead, "behind_paper_in": behind}


def judged(row: Mapping[str, Any], noise: Mapping[str, Mapping[str, float] | None]) -> bool:
    """What docs/evidence.md says that co-serving is judged by: no margin on the noise, and every request answered."""
    if row["unanswered"]:
        return False
    for metric in ("ttft", "itl"):
        found, limit = row[f"{metric}_p99_ratio"], noise[metric]
        if found is None or limit is None or found["high"] > max(BAR_RATIO, limit["high"]):
            return False
    paper = row["against_paper"]
    return row["extra_violations"] <= 0 and paper["ahead_of_paper_in"] > 0 and paper["behind_paper_in"] == 0


def verdict(row: Mapping[str, Any], noise: Mapping[str, Mapping[str, float] | None]) -> bool:
    """The bar: both P99 ratios' upper bounds, no added violation, every request answered, and the harvested share."""
    if row["unanswered"]:
        return False
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
