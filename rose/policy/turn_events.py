"""The vocabulary of the turn book: what the world tells it (events) and what it asks for (actions).

Every event carries ``at_s``.  An attempt is named by ``(turn_id, attempt)``: a result that names any other
attempt than the live one is *fenced*, that is dropped and counted, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rose.lineage import Version
from rose.policy.worker import Duty, Tier

HOLDS = {
    "capacity": "all engines that may take it (by model, job, run and weights) are full",
    "memory": "the engines with a free slot have no KV memory for a context that long now",
    "closed": "the engines that may take it take no turn now: they start, are silent, rest after failures, are cordoned, or production has "
    "its memory back (GET /workers)",
    "job": "no engine works for this job",
    "model": "no engine serves this model with a context that long",
    "tier": "no dedicated engine is there",
    "pinned": "it was cut too often, and waits for a dedicated engine",
    "run": "no engine follows the run that trains this job: see run_id in the nodes' [weights]",
    "weights": "no engine has the job's newest weights yet",
    "ends": "the engines with room go back to their owners before it is expected to end",
    "backoff": "the engines that could take it have just failed it",
    "policy": "the routing policy keeps it waiting for a better engine",
}
"""Why a turn waits, in words."""


class TurnState(StrEnum):
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    DECODING = "decoding"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


LIVE = (TurnState.DISPATCHED, TurnState.DECODING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens ``[start, start + num_tokens)`` of a turn came from this attempt."""

    worker_id: str
    tier: Tier
    attempt: int
    start: int
    num_tokens: int
    run: str = ""
    """Whose weights sampled them; empty where the worker does not name a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Tokens ``[start, start + num_tokens)`` of a turn were sampled by this weight version."""

    version: Version
    start: int
    num_tokens: int


# --- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRegistered:
    at_s: float
    worker_id: str
    incarnation: str
    tier: Tier
    model: str
    max_model_len: int
    cap: int | None = None
    max_num_seqs: int | None = None
    for_tail: bool = False
    """The first choice for the longest trajectories (``TurnParams.tail_fraction``): it runs over more GPUs than other dedicated ones, say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHeartbeat:
    at_s: float
    worker_id: str
    incarnation: str
    seq: int
    version: Version | None
    state: str
    kv_budget_tokens: int | None = None
    kv_used_tokens: int | None = None
    running: int = 0
    gated: bool = False
    reclaim_seq: int = 0
    slack_s: float | None = None
    serving_use: float = 0.0
    """Share of the device's KV memory that production uses now."""
    waiting: int = 0
    """Requests that the engine has not begun."""
    num_preemptions: int = 0
    """Requests that the engine itself put back for want of KV room, since its start."""
    run: str = ""
    """Whose weights are in force: the run that published them; empty where the node follows none."""
    lent_s: float | None = None
    """How much longer a borrowed device is lent, from now; None where it is not, or its node does not say."""
    decoded_tokens: int | None = None
    """Tokens that the engine has sampled since it started; None: nobody counts them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLost:
    """Reset, refused, exited or removed; ``incarnation`` None means whichever is registered."""

    at_s: float
    worker_id: str
    reason: str
    incarnation: str | None = None
    forget: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDuty:
    at_s: float
    worker_id: str
    duty: Duty


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerAssigned:
    """From now on this worker runs turns of ``job`` only; None: of any job; the empty name: of none."""

    at_s: float
    worker_id: str
    job: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRequired:
    """The trainer of ``job`` published ``version``: workers below it take no new turn of this job.

    ``run``: under which name it publishes.  Workers with weights of another run, or of none, take no turn of this job at all: a
    version number says nothing across runs.  Empty: it does not say.
    """

    at_s: float
    job: str
    version: Version
    run: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockTicked:
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSubmitted:
    """``resumable`` False: state cannot cross engines (seed, penalties, grammar); a cut restarts it."""

    at_s: float
    turn_id: str
    trajectory_id: str
    job: str
    model: str
    num_prompt_tokens: int
    max_tokens: int
    group_id: str | None = None
    resumable: bool = True
    streamed: bool = False
    """To its client, who cannot take back what it has read."""
    streamed_here: bool = False
    """To the scheduler, whatever its client gets."""
    min_version: Version | None = None
    dedicated_only: bool = False
    deadline_at_s: float | None = None
    task_kind: str = ""
    """A job's tasks differ in length; what is learned of one kind is not told of another."""
    prefill_per_decode: float | None = None
    """New prompt tokens per sampled token, as the trainer measured them: the first guess of a kind's output."""
    run: str = ""
    """Whose weights sampled its trajectory so far; empty: nobody's yet, or of no name.  Counts where its job has named none."""
    only_at: str = ""
    """The one worker that may take it: it is a copy of a turn that runs elsewhere (``rose.policy.copies``)."""
    num_copied: int = 0
    """The last of its prompt's tokens, which that turn has sampled."""

    @property
    def shows_tokens(self) -> bool:
        """Its tokens arrive as they are sampled, so that a stall is seen."""
        return self.streamed or self.streamed_here

    @property
    def history(self) -> str:
        """Under which name lengths are learned."""
        return f"{self.job}/{self.task_kind}" if self.task_kind else self.job


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensArrived:
    """More output of a live attempt; ``logprobs`` is as long as ``token_ids`` or empty."""

    at_s: float
    turn_id: str
    attempt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded:
    """The engine's terminal answer with its last tokens, as in :class:`TokensArrived`.

    ``versions`` are spans over all of this attempt's own tokens, if the engine reports them.  ``kv_mixed``: its context held keys
    and values of other weights than its newest tokens; None if the engine did not say.  ``run``: the run whose weights sampled the
    tokens, as the engine stamped them; it overrides what the scheduler believed.  None: the engine does not stamp, and no job that
    names a run may keep the tokens.
    """

    at_s: float
    turn_id: str
    attempt: int
    finish_reason: str
    stop_reason: str | int | None = None
    num_cached_tokens: int | None = None
    versions: tuple[Span, ...] = ()
    kv_mixed: bool | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    run: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFailed:
    """``kind``: lost (connection, 5xx), busy (429/503), bad (nonsense answer), data (deterministic 4xx), run (its tokens are of
    several runs' weights)."""

    at_s: float
    turn_id: str
    attempt: int
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnCancelled:
    at_s: float
    turn_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnStopped:
    """A stop string was found across the seam of two attempts, where no engine could see it."""

    at_s: float
    turn_id: str
    stop_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientGone:
    at_s: float
    turn_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientBack:
    at_s: float
    turn_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryClosed:
    """Finished or cancelled: its affinity is released."""

    at_s: float
    trajectory_id: str


Event = (
    WorkerRegistered
    | WorkerHeartbeat
    | WorkerLost
    | WorkerDuty
    | WorkerAssigned
    | VersionRequired
    | ClockTicked
    | TurnSubmitted
    | TokensArrived
    | AttemptEnded
    | AttemptFailed
    | TurnCancelled
    | TurnStopped
    | ClientGone
    | ClientBack
    | TrajectoryClosed
)


# --- actions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Send the prompt and the first ``num_kept_tokens`` of output to ``worker_id``."""

    turn_id: str
    attempt: int
    worker_id: str
    num_kept_tokens: int
    max_tokens: int
    affinity: str
    queued_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortAttempt:
    """Stop this attempt in the engine, best effort; its results are already fenced."""

    turn_id: str
    attempt: int
    worker_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopAttempt:
    """Ask the engine to end this attempt with the tokens that it has.  It is live until its answer comes, whatever that is."""

    turn_id: str
    attempt: int
    worker_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensKept:
    """The arrived tokens now belong to the turn, from ``start`` on."""

    turn_id: str
    attempt: int
    start: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensDropped:
    """A turn that cannot be resumed starts again from its prompt."""

    turn_id: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Requeued:
    """``reason``: reclaim, abort, lost, suspect, silent, restarted, busy, bad, stall, drain, run, returned, migrate."""

    turn_id: str
    worker_id: str
    reason: str
    num_kept_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fenced:
    """A late result of an attempt that is not live was dropped."""

    turn_id: str
    attempt: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerUnavailable:
    """Waited ``max_queue_s``: answer 503.  The turn keeps its place; a retry rejoins it.

    ``hold``: the first thing that keeps it from every worker, a key of :data:`HOLDS`.
    """

    turn_id: str
    waited_s: float
    hold: str = "capacity"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnResult:
    """What a turn ended with; a plain copy, the book has forgotten the turn."""

    turn_id: str
    trajectory_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]
    num_attempts: int
    num_reclaims: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    submitted_at_s: float
    first_dispatch_at_s: float | None
    first_token_at_s: float | None
    ended_at_s: float
    kv_mixed: bool | None = None
    """Some attempt's context held keys and values of other weights than its newest tokens; None: one that made
    tokens did not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEnded:
    """``outcome`` DONE: ``reason`` is the finish reason.  CANCELLED, FAILED: why, and ``message``."""

    turn_id: str
    outcome: TurnState
    reason: str
    result: TurnResult
    stop_reason: str | int | None = None
    message: str = ""


Action = (
    Dispatch
    | AbortAttempt
    | TokensKept
    | TokensDropped
    | Requeued
    | Fenced
    | AnswerUnavailable
    | TurnEnded
    | StopAttempt
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnParams:
    """Bounds of a turn's life.  Reclaims cost no failure budget, so they have a bound of their own."""

    max_queue_s: float = 300.0
    max_queued: int = 4096
    detach_s: float = 30.0
    """How long a turn runs on after its client went away; the OpenAI SDK retries within about 8 s."""
    infra_budget: int = 5
    data_budget: int = 2
    pin_after_reclaims: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 8.0
    stall_s: float = 30.0
    """No token for this long on a streamed attempt whose engine is not gated: moved elsewhere."""
    expected_tokens: int = 256
    """Output assumed before a job has history; also what is reserved of the KV budget."""
    expected_ewma: float = 0.05
    max_affinity_entries: int = 200_000
    longest_first_s: float = 0.0
    """A turn of the trajectory with the longest predicted rest is queued as if it were this much older; the
    shortest not at all.  So nobody is overtaken by a turn that came more than this later.  0: by age alone."""
    oldest_first_s: float = 0.0
    """How much of the age of its group counts for a turn, at most.  Groups then end in about the order of their start, before
    their first tokens are old.  0: each turn by its own age."""
    oldest_first_share: float = 1.0
    """A turn is queued as if it had come earlier by this share of its group's age.  At 1 the oldest group always goes first, and
    groups that began together are served one after the other; below, a turn is overtaken only for a time in proportion to the
    difference in age."""
    affine_wait_s: float = 0.0
    """While there are more waiting turns than open workers, a turn whose prefix is cached on a worker waits up to this long for a slot
    there, but never longer than a prefill of that prefix would take.  0: off."""
    migrate_ratio: float = 0.0
    """A running turn of a harvested worker goes on at a dedicated one with room when its rest takes more than this many times as long
    where it is (``rose.policy.migration``).  0: turns stay where they are."""
    migrate_margin_s: float = 0.25
    """And so much longer on top: what asking and placing take."""
    tail_fraction: float = 0.0
    """Turns of this share of trajectories, those with the longest predicted rest, take a worker ``for_tail`` when one is
    free, else a dedicated one.  0: off."""
    alarm_horizon_s: float = 60.0
    """A turn is looked at this often even when nothing is due: keeps the list of alarms short."""
    min_alarm_s: float = 0.25
    forget_dead_s: float = 600.0
    """A dead worker stays visible this long, then leaves the book."""
