"""What one run of the demo found: plain records between the orchestrator, which fills them, and the report.

Times are seconds from the start of the run.  ``None`` means not measured, and is shown as such; it is never
replaced by a number that looks good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rose.demo.measure import ArmStats, Ratio, Slo

DEDICATED = "dedicated"
HARVESTED = "harvested"
TIERS = (DEDICATED, HARVESTED)

ALONE_1, ALONE_2, SHARED = "alone_1", "alone_2", "shared"
"""The measured phases.  The first two differ in nothing: their ratio is the noise."""
ARMS = (ALONE_1, ALONE_2, SHARED)
PHASE_NAMES: Mapping[str, str] = {
    "startup": "start-up",
    ALONE_1: "alone",
    ALONE_2: "alone again",
    "switch": "switching on",
    SHARED: "shared",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCount:
    """Turns and generated tokens that one tier delivered."""

    num_turns: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
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
    fine_tuning: bool = False
    """Taken at the learning rate of real fine-tuning instead of the toy one."""
    entropy: float | None = None
    mismatch_kl: float | None = None
    update_kind: str | None = None
    bytes_dense: int | None = None
    bytes_sent: int | None = None
    density: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
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
    resumed_turns: int = 0
    """Turns that lost their engine on the way and were finished by another."""
    continued_turns: int = 0
    """Those of them that had tokens already."""
    engine_kills: int = 0
    """Rollout engines that the node agent killed, for instance past the reclaim deadline."""
    kills: int = 0
    """Processes of the demo that died of a signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
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
    phases: Sequence[Phase]
    latency: Latency
    production_requests: int
    """All of them, start-up and switching included: a failure between the arms is a failure too."""
    production_errors: int
    error_examples: Sequence[str]
    steps: Sequence[Step]
    tiers: Mapping[str, TierCount]
    """While production traffic ran, from the first measured phase to the last."""
    tiers_shared: Mapping[str, TierCount]
    """While harvesting was on."""
    reclaim: Reclaim
    events: Sequence[Event] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """``production`` (requests/s), ``dedicated``, ``harvested`` (tokens/s), ``lent`` (pages)."""
    machine: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    baseline_note: str = ""
    """What else ran while production was measured alone."""


def harvested_share(tiers: Mapping[str, TierCount]) -> float | None:
    """Turns of the harvested tier over all turns; None when there were none."""
    total = sum(count.num_turns for count in tiers.values())
    return tiers.get(HARVESTED, TierCount()).num_turns / total if total else None


SUMMARY_KEYS = (
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
    "resumed_turns",
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
    return {
        "success_rate_first": result.steps[0].success_rate if result.steps else None,
        "success_rate_last": result.steps[-1].success_rate if result.steps else None,
        "production_requests": result.production_requests,
        "production_errors": result.production_errors,
        "harvested_turn_share": round(share, 4) if share is not None else None,
        "p99_ttft_ratio": value("ttft_p99"),
        "p99_itl_ratio": value("itl_p99"),
        "aa_ttft_ratio": value("aa_ttft_p99"),
        "aa_itl_ratio": value("aa_itl_p99"),
        "weight_bytes_dense": sum(step.bytes_dense or 0 for step in sent) if sent else None,
        "weight_bytes_sent": sum(step.bytes_sent or 0 for step in sent) if sent else None,
        "resumed_turns": result.reclaim.resumed_turns,
        "seconds_total": round(result.seconds_total, 1),
    }
