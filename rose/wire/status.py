"""What rose-scheduler shows of itself: ``/status``, the events of its dashboard, and a day of samples.

Typed and described as :mod:`rose.wire.answers`.  Times that end in ``at_s``, and those of spans and marks, are seconds of the scheduler's
own clock, which is monotonic and means nothing outside it; ``now`` of :class:`History` tells what it shows.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from rose.wire.answers import TurnSegment, TurnTiming, TurnUsage, WorkerStatus


class ProvisioningStatus(TypedDict):
    """Which job has which engines."""

    mode: Literal["off", "observe", "on"]
    """``observe``: decide and log, change nothing."""
    wanted: dict[str, int]
    """Job -> dedicated engines that would pay for its demand."""
    held: dict[str, int]
    """Job -> engines that it has, or in mode ``observe`` would have; one that serves every job counts for each."""
    decisions: dict[str, int]
    """Kind of decision -> how many so far."""
    partners: dict[str, str]
    """Job -> the job that it takes turns with on the same engines."""


class TurnCounts(TypedDict):
    """Turns: the first two now, the others since this process began."""

    running: int
    """On an engine."""
    queued: int
    """Waiting for one."""
    done: int
    failed: int
    """Ended without an answer."""
    cancelled: int
    """Given up by the client, or with their trajectory."""
    by_tier: dict[str, int]
    """Tier of the engine that finished it -> turns that are done."""


class TokenCounts(TypedDict):
    """Tokens since this process began; a kind that has not occurred is left out."""

    by_tier: dict[str, int]
    """Tier -> tokens that its engines sampled, of turns that have ended."""
    prompt: NotRequired[int]
    """Of prompts."""
    cached: NotRequired[int]
    """Of prompts, found in an engine's prefix cache."""
    generated: NotRequired[int]
    """Sampled."""
    recomputed: NotRequired[int]
    """Computed a second time because their turn moved to another engine."""
    discarded: NotRequired[int]
    """Sampled for a turn that was cancelled, failed, or began again."""
    fenced: NotRequired[int]
    """Of late answers that belonged to an attempt already given up."""


class LatencyStatus(TypedDict):
    """A latency of production beside its objective."""

    p99_s: float
    """Of its recent requests, in seconds."""
    slo_s: float
    """The objective, in seconds."""


class QueueStatus(TypedDict):
    """Turns that wait for an engine."""

    depth: int
    """How many."""
    held: dict[str, int]
    """Reason -> turns that wait for it."""
    held_by_job: dict[str, dict[str, int]]
    """Job -> the same of its turns."""
    oldest_s: float
    """Since the longest-waiting turn was asked for, in seconds."""


class StuckTurn(TypedDict):
    """One of the oldest turns that have not ended."""

    turn_id: str
    trajectory: str | None
    """None: it belongs to none."""
    state: str
    """``queued``, ``dispatched`` (no token yet) or ``decoding``."""
    hold: str | None
    """Why it waits; None: it runs."""
    worker: str | None
    """The engine that runs it; None: none does."""
    age_s: float
    """Since it was asked for, in seconds."""
    num_tokens: int
    """Sampled so far."""


class EndedTurn(TypedDict):
    """A turn that is done."""

    turn_id: str
    trajectory: str | None
    """None: the turn belongs to no trajectory."""
    turn: int | None
    """Its number in the trajectory."""
    finish_reason: str
    """As OpenAI's: ``stop``, ``length``, ..."""
    versions: list[tuple[str, int, int]]
    """``[weight version, first token, tokens]``."""
    kv_mixed: bool | None
    """Did its context hold keys and values of other weights than its newest tokens?  None: an engine did not say."""
    segments: list[TurnSegment]
    """Which engine sampled which tokens."""
    usage: TurnUsage
    timing: TurnTiming


class SchedulerStatus(TypedDict):
    """What runs, and where.  Counts begin with this process, but for those of trajectories and batches."""

    uptime_s: float
    """Since it began."""
    draining: bool
    """It is being stopped, and takes no new turn."""
    workers: list[WorkerStatus]
    """All engines."""
    provisioning: ProvisioningStatus
    turns: TurnCounts
    tokens: TokenCounts
    reroutes: dict[str, int]
    """Reason -> turns that were sent to another engine."""
    resumed_turns: int
    """Done turns that lost an engine on the way."""
    continued_turns: int
    """Those of them that had tokens by then, and went on from them."""
    serving_p99: dict[str, LatencyStatus]
    """``ttft`` and ``tpot`` of the serving engine that is nearest to breaking its objective, or farthest beyond it."""
    fenced_results: int
    """Late answers that were dropped: their attempt had been given up."""
    duplicate_requests: int
    """Requests that joined a turn which was already running."""
    forks: dict[str, int]
    """Reason -> histories that did not continue what was recorded, and began a new branch."""
    queue: QueueStatus
    trajectories: dict[str, int]
    """State -> trajectories."""
    groups_ready: dict[str, int]
    """Job -> complete groups that no trainer has leased."""
    batches_leased: int
    """That trainers have and did not acknowledge."""
    batches_acked: int
    """Acknowledged ones that it remembers."""
    dropped_stale: int
    """Trajectories that were given up as too old to train on."""
    dropped_unleased: int
    """Trajectories that had finished and that no trainer leased."""
    discards: dict[str, dict[str, list[int]]]
    """Job -> cause -> discarded trajectories, by quarter of all lengths, shortest first."""
    versions: dict[str, str]
    """Job -> newest weight version that its trainer stated."""
    attempts: dict[str, int]
    """Job -> highest attempt that a trainer of it has resumed under: the next is above this one, whether it published anything or not."""
    held_bytes: dict[str, int]
    """Job -> bytes that its trajectories hold in memory."""
    journal_bytes: int
    """Size of the journal's file."""
    recovered_records: int
    """Records of the journal that this process began with."""
    stuck: list[StuckTurn]
    """The 20 oldest turns that have not ended."""
    last_turns: list[EndedTurn]
    """The 50 latest that are done."""


class DashboardSample(TypedDict):
    """A second of the dashboard's curves."""

    t: float
    """When, in seconds of the scheduler's clock."""
    flight: dict[str, int]
    """Tier -> turns on its engines."""
    queued: int
    """Turns that wait for an engine."""
    done: int
    """Turns since this process began."""
    finished: int
    """Trajectories that have their reward, since this process began."""
    queue_s: tuple[float, float] | None
    """P50 and P99 of how long the latest turns waited for an engine, in seconds; None: there were none."""
    reroute_s: tuple[float, float] | None
    """The same, from the loss of an engine to the next token."""
    tokens: tuple[int, int, int, int, int]
    """Prompt, cached, recomputed, discarded, generated, since this process began."""
    slack_s: float | None
    """The least of any serving engine, in seconds."""
    gated: int
    """Engines whose steps wait for production."""
    serving_use: float | None
    """Share of its KV memory that production uses, from 0 to 1, mean of its engines."""
    broken: int
    """Breaches of production's objectives, since this process began."""
    p99: dict[str, tuple[float, float]]
    """``ttft`` and ``tpot`` -> P99 and objective, in seconds, of the worst serving engine."""


TurnSpan = tuple[int, str, str, str, int, float, float | None, str]
"""An attempt at a turn: number, engine, tier, trajectory, attempt, start, end (None: it runs), how it ended (empty: it runs)."""
WorkerMark = tuple[float, str, str]
"""When, engine, what happened to it."""
StepMark = tuple[float, str, str, int]
"""When a trainer stated new weights, job, version, trajectories finished by then."""


class WatchHistory(TypedDict):
    """The first event: ``history``."""

    samples: list[DashboardSample]
    """The last 15 minutes, one a second."""
    spans: list[TurnSpan]
    """Each a :data:`TurnSpan`."""
    marks: list[WorkerMark]
    """Each a :data:`WorkerMark`."""
    steps: list[StepMark]
    """Each a :data:`StepMark`."""


class WatchNow(TypedDict):
    """Every later event, once a second: ``now``."""

    status: SchedulerStatus
    sample: DashboardSample | None
    """The latest; None: there is none yet."""
    spans: list[TurnSpan]
    """Those that have begun or ended since the event before."""
    marks: list[WorkerMark]
    """The last 100."""
    steps: list[StepMark]
    """The last two."""
    staleness: list[tuple[int, int]]
    """How many versions behind its consumer a leased trajectory was, and how many trajectories were that."""


LearningRow = tuple[float, int, float, float | None]
"""Half a minute of a job: start, trajectories finished, their mean reward, share of successes (None: nobody said)."""


class History(TypedDict):
    """A day, kept in memory: a restart begins anew."""

    now: float
    """On the scheduler's clock, in seconds."""
    hours: list[DashboardSample]
    """One for each 30 seconds."""
    jobs: dict[str, list[LearningRow]]
    """Job -> half minutes in which a trajectory of it finished."""
