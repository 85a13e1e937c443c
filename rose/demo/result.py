"""What one run of the demo found: plain records between the orchestrator, which fills them, and the report.

Times are seconds from the start of the run.  ``None`` means not measured, and is shown as such; it is never
replaced by a number that looks good.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rose.evaluation.arms import ArmStats, Ratio, Slo
from rose.evaluation.statistics import mean_interval

DEDICATED = "dedicated"
HARVESTED = "harvested"
TIERS = (DEDICATED, HARVESTED)

ALONE_1, ALONE_2, SHARED = "alone_1", "alone_2", "shared"
"""The arms of the measured blocks.  The first two, without harvesting, differ in nothing: their ratio is the noise."""
SWITCH, REST = "switch", "rest"
"""Not measured: harvesting is being turned on or off; the blocks are over, the job is not."""
ARMS = (ALONE_1, ALONE_2, SHARED)
PHASE_NAMES: Mapping[str, str] = {
    "startup": "start-up",
    ALONE_1: "off",
    ALONE_2: "off",
    SWITCH: "",
    SHARED: "on",
    REST: "on",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficPhase:
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCount:
    """Turns and generated tokens that one tier delivered."""

    num_turns: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One RL step, as ``rose train`` measured it.  Bytes are of the update published at its end."""

    step: int
    start_s: float
    end_s: float
    success_rate: float
    lr: float
    tiers: Mapping[str, TierCount]
    rollout_s: float | None = None
    train_s: float | None = None
    publish_s: float | None = None
    entropy: float | None = None
    mismatch_kl: float | None = None
    update_kind: str | None = None
    bytes_dense: int | None = None
    bytes_sent: int | None = None
    density: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBlock:
    """One period of traffic with harvesting off or on."""

    harvesting: bool
    start_s: float
    end_s: float
    num_steps: float
    """RL steps, with the part of those that lie across its borders."""
    tiers: Mapping[str, TierCount]

    @property
    def steps_per_minute(self) -> float:
        return 60.0 * self.num_steps / (self.end_s - self.start_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """One sampled token of a turn: its text, log-prob, and who sampled it with which weights."""

    text: str
    logprob: float
    worker: str
    tier: str
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedTurn:
    """A turn that began at one engine and ended at another.  ``parts``: tokens that each sampled, in order."""

    trajectory_id: str
    prompt: str
    parts: tuple[int, ...]
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineEvent:
    """Something that happened at one moment.  ``kind``: pressure, cut, kill, restart, version, note."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A quantity over time, for the timeline: ``(at_s, value)``."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reclaim:
    """Memory and turns taken back from rollouts for production."""

    pressure_events: int = 0
    cuts: int = 0
    cut_requests: int = 0
    """Turns that were stopped for that, with the tokens they had."""
    resumed_turns: int = 0
    """Turns that lost their engine on the way and were finished by another."""
    continued_turns: int = 0
    """Those of them that had tokens already."""
    engine_kills: int = 0
    """Rollout engines that the node agent killed, for instance past the reclaim deadline."""
    kills: int = 0
    """Processes of the demo that died of a signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductionLatency:
    """Production in its three arms."""

    slo: Slo
    arms: Mapping[str, ArmStats]
    ratios: Mapping[str, Ratio | None]
    """``ttft_p50``, ``ttft_p99``, the same for ``itl`` and ``stall``: shared over alone; ``aa_*``: noise."""
    distributions: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    """Arm -> ``(ttft_s, itl_s)`` of all its requests, sorted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """One run, complete or cut short (``complete`` tells)."""

    seed: int
    complete: bool
    seconds_total: float
    traffic_source: str
    busiest_second_ratio: float
    phases: Sequence[TrafficPhase]
    latency: ProductionLatency
    production_requests: int
    """All of them, start-up and switching included: a failure between the arms is a failure too."""
    production_errors: int
    error_examples: Sequence[str]
    steps: Sequence[StepRecord]
    tiers: Mapping[str, TierCount]
    """From the first block to the end."""
    reclaim: Reclaim
    blocks: Sequence[MeasuredBlock] = ()
    resumed: Sequence[tuple[int, ...]] = ()
    """Of each turn that was looked at after it had moved: tokens that each engine sampled."""
    longest_resumed: ResumedTurn | None = None
    """The one whose cut lies nearest to its middle."""
    events: Sequence[TimelineEvent] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """``production`` (requests/s), ``dedicated``, ``harvested`` (tokens/s), ``lent`` (pages)."""
    machine: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


def harvested_share(tiers: Mapping[str, TierCount]) -> float | None:
    """Turns of the harvested tier over all turns; None when there were none."""
    total = sum(count.num_turns for count in tiers.values())
    return tiers.get(HARVESTED, TierCount()).num_turns / total if total else None


def shorter_side(parts: Sequence[int]) -> int:
    """Tokens on the shorter side of the cut that lies nearest to the middle; ``parts`` as in :class:`ResumedTurn`."""
    ends = accumulate(parts[:-1])
    return max((min(end, sum(parts) - end) for end in ends), default=0)


MIN_SIDE_TOKENS = 8
"""On either side of a cut: fewer say little about a turn that goes on."""


def shared_tiers(result: DemoResult) -> dict[str, TierCount]:
    """What each tier delivered in the blocks with harvesting."""
    blocks = [block for block in result.blocks if block.harvesting]
    return {
        tier: TierCount(
            num_turns=sum(block.tiers.get(tier, TierCount()).num_turns for block in blocks),
            num_tokens=sum(block.tiers.get(tier, TierCount()).num_tokens for block in blocks),
        )
        for tier in TIERS
    }


def steps_gain(blocks: Sequence[MeasuredBlock]) -> Ratio | None:
    """RL steps per minute with harvesting over without: the geometric mean over pairs of neighbouring blocks, with its 95 %
    interval by Student's t.  None without two whole pairs."""
    logs: list[float] = []
    for first, second in zip(blocks[::2], blocks[1::2], strict=False):
        on, off = (first, second) if first.harvesting else (second, first)
        if on.harvesting == off.harvesting or min(on.num_steps, off.num_steps) <= 0:
            return None
        logs.append(math.log(on.steps_per_minute / off.steps_per_minute))
    if len(logs) < 2:
        return None
    middle, half = mean_interval(logs)
    return Ratio(
        value=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half), num_pairs=len(logs)
    )


SUMMARY_KEYS = (
    "steps_per_minute_off",
    "steps_per_minute_on",
    "steps_gain",
    "steps_gain_low",
    "steps_gain_high",
    "success_rate_first",
    "success_rate_last",
    "production_requests",
    "production_errors",
    "harvested_turn_share",
    "p99_ttft_ratio",
    "p99_itl_ratio",
    "aa_ttft_ratio",
    "aa_itl_ratio",
    "weight_bytes_dense",
    "weight_bytes_sent",
    "sent_over_dense",
    "pressure_events",
    "cuts",
    "cut_requests",
    "resumed_turns",
    "resumed_turns_seen",
    "resumed_with_8_tokens_each_side",
    "seconds_total",
)


def summarize(result: DemoResult) -> dict[str, float | int | None]:
    """The flat summary.  Weight bytes are sums over the updates of all RL steps."""
    ratios = result.latency.ratios

    def value(name: str) -> float | None:
        found = ratios.get(name)
        return round(found.value, 4) if found else None

    sent = [step for step in result.steps if step.bytes_sent is not None]
    share = harvested_share(result.tiers)
    gain = steps_gain(result.blocks)
    dense_bytes, sent_bytes = (
        sum(getattr(step, name) or 0 for step in sent) for name in ("bytes_dense", "bytes_sent")
    )

    def rate(harvesting: bool) -> float | None:
        rates = [block.steps_per_minute for block in result.blocks if block.harvesting == harvesting]
        return round(statistics.fmean(rates), 2) if rates else None

    return {
        "steps_per_minute_off": rate(False),
        "steps_per_minute_on": rate(True),
        "steps_gain": round(gain.value, 3) if gain else None,
        "steps_gain_low": round(gain.low, 3) if gain else None,
        "steps_gain_high": round(gain.high, 3) if gain else None,
        "success_rate_first": result.steps[0].success_rate if result.steps else None,
        "success_rate_last": result.steps[-1].success_rate if result.steps else None,
        "production_requests": result.production_requests,
        "production_errors": result.production_errors,
        "harvested_turn_share": round(share, 4) if share is not None else None,
        "p99_ttft_ratio": value("ttft_p99"),
        "p99_itl_ratio": value("itl_p99"),
        "aa_ttft_ratio": value("aa_ttft_p99"),
        "aa_itl_ratio": value("aa_itl_p99"),
        "weight_bytes_dense": dense_bytes if sent else None,
        "weight_bytes_sent": sent_bytes if sent else None,
        "sent_over_dense": round(sent_bytes / dense_bytes, 4) if dense_bytes else None,
        "pressure_events": result.reclaim.pressure_events,
        "cuts": result.reclaim.cuts,
        "cut_requests": result.reclaim.cut_requests,
        "resumed_turns": result.reclaim.resumed_turns,
        "resumed_turns_seen": len(result.resumed),
        "resumed_with_8_tokens_each_side": sum(
            shorter_side(parts) >= MIN_SIDE_TOKENS for parts in result.resumed
        ),
        "seconds_total": round(result.seconds_total, 1),
    }
