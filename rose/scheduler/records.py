"""What the journal holds: one type per thing that is remembered.

A record is msgpack under its tag.  Fields that came later have defaults, so that older journals are read.
"""

from __future__ import annotations

from typing import Any

import msgspec

# ``gc=False``: plain data refers to nothing that refers back, and there are as many of them as there were turns; a
# full collection that looked at each would hold up every stream meanwhile.


class TurnRecord(msgspec.Struct, tag="turn", frozen=True, gc=False, omit_defaults=True):
    """A finished turn.  What its answer said is not in it: that follows from the ids.

    ``suffix_ids`` are the prompt ids after the parent's prompt and output (the whole prompt when ``parent``
    is None); all ids are little-endian u32, log-probs little-endian f64.  ``tip`` names the message lists
    that end with this turn's answer, ``thoughts`` its reasoning, 16 bytes for each form in which it was delivered;
    ``digest`` the request, for a client that asks again.
    """

    trajectory_id: str
    turn: int
    kind: str
    suffix_ids: bytes
    token_ids: bytes
    logprobs: bytes
    finish_reason: str
    versions: list[tuple[str, int, int]]
    segments: list[dict[str, Any]]
    usage: dict[str, int]
    timing: dict[str, float]
    sampling: dict[str, Any]
    parent: int | None = None
    fork: str | None = None
    stop_reason: str | int | None = None
    tip: bytes = b""
    context: bytes = b""
    digest: str = ""
    turn_key: str = ""
    kv_mixed: bool | None = None
    """Its context held keys and values of other weights than its newest tokens; None: an engine did not say."""
    id: str = ""
    """Of this answer alone, on the wire."""
    choice: int = 0
    num_choices: int = 1
    """Of its request: turns one after the other."""
    thoughts: bytes = b""
    prompt_of: int | None = None
    """An earlier choice of its request that began with the same prompt: ``suffix_ids`` are in that record alone."""
    created: int = 0
    """Of its answer, in Unix seconds."""
    attempts: int = 1
    """Engine requests that it took."""
    key: str = ""
    """``Idempotency-Key`` of its request."""
    retry: int = 0
    """How often its client said to have asked before."""
    messages: bytes = b""
    """Messages that it added to those of turn ``messages_of`` (all, where that is None), and its answer, as msgpack: for a client that
    names an earlier answer and does not send it again.  Empty: its client does not."""
    messages_of: int | None = None
    asks: str = ""
    """See :mod:`rose.scheduler.side`."""
    constraints: tuple[str, ...] = ()
    """See :mod:`rose.wire.constraints`."""
    routed_experts: list[tuple[int, bytes]] = []
    """``(first position, .npy bytes)``: see :class:`~rose.scheduler.dispatch.TurnHandle`."""


def packed(value: Any) -> msgspec.Raw:
    """A client's value as bytes: as objects it could take sixty times as much.  Equal values give equal bytes."""
    return msgspec.Raw(msgspec.msgpack.encode(value, order="deterministic"))


def unpacked(value: msgspec.Raw) -> Any:
    return msgspec.msgpack.decode(value)


NOTHING = packed(None)


class FormRecord(msgspec.Struct, tag="form", frozen=True, gc=False):
    """A turn's answer was delivered in another form, too: a stream's."""

    trajectory_id: str
    turn: int
    tip: bytes
    thoughts: bytes = b""


class DeliveredRecord(msgspec.Struct, tag="delivered", frozen=True, gc=False):
    """Answers that left whole: ``(first turn, retry that it was sent to)``."""

    trajectory_id: str
    answers: list[tuple[int, int]]


class CreateRecord(msgspec.Struct, tag="create", frozen=True, gc=False, omit_defaults=True):
    id: str
    job: str
    group_id: str
    group_size: int
    created_at: float
    task: msgspec.Raw = NOTHING
    """See :func:`packed`."""
    sampling: dict[str, Any] = {}
    key: str = ""
    """``Idempotency-Key`` of the creation."""
    task_kind: str = ""
    prefill_per_decode: float | None = None
    floor: str = ""
    """Version that its job required then; empty where none."""
    deadline_at: float | None = None
    """Seconds since 1970; None: none."""
    metadata: dict[str, str] = {}
    record: list[str] = []
    """Side channels of its turns."""
    trains_side: bool = False
    """What is only taken for a side request is a turn like others."""


class ScoreRecord(msgspec.Struct, tag="score", frozen=True, gc=False, omit_defaults=True):
    """Rewards before the end: of turns, of branches by their last turn, and what the whole is to be finished with."""

    id: str
    reward: float | None = None
    success: bool | None = None
    info: msgspec.Raw = NOTHING
    turns: list[tuple[int, float]] = []
    branches: list[tuple[int, float]] = []


class CloseRecord(msgspec.Struct, tag="close", frozen=True, gc=False):
    """It takes no more turns, and waits for its reward."""

    id: str


class FinishRecord(msgspec.Struct, tag="finish", frozen=True, gc=False, omit_defaults=True):
    id: str
    reward: float
    success: bool | None = None
    info: msgspec.Raw = NOTHING
    filter_equal: bool = False
    """The job filtered groups without a difference in reward when this one finished."""


class CancelRecord(msgspec.Struct, tag="cancel", frozen=True, gc=False):
    id: str
    reason: str


class LeaseRecord(msgspec.Struct, tag="lease", frozen=True, gc=False):
    batch_id: str
    job: str
    group_ids: list[str]
    stale_group_ids: list[str]
    ttl_s: float
    consumer: str = ""
    stale_ids: list[str] = []
    """Trajectories that were handed out marked."""


class RenewRecord(msgspec.Struct, tag="renew", frozen=True, gc=False):
    """A batch was asked for again, for longer than ever before.  No other renewal is recorded: they are many, and a reader counts
    from when it takes over."""

    batch_id: str
    ttl_s: float


class ExpireRecord(msgspec.Struct, tag="expire", frozen=True, gc=False):
    batch_id: str


class UnleasedRecord(msgspec.Struct, tag="unleased", frozen=True, gc=False):
    """A group that waited, given up."""

    job: str
    group_id: str
    reason: str = "unleased"
    """No trainer came for it; or ``afresh``: one began the job anew."""


class ReturnRecord(msgspec.Struct, tag="return", frozen=True, gc=False):
    """A batch that its trainer gave back."""

    batch_id: str


class ReturnedRecord(msgspec.Struct, tag="returned", frozen=True, gc=False):
    """Names of batches given back before a compaction: nothing is leased under them again."""

    batch_ids: list[str]


class AckRecord(msgspec.Struct, tag="ack", frozen=True, gc=False):
    batch_id: str
    step: int
    attempt: int


class AckedRecord(msgspec.Struct, tag="acked", frozen=True, gc=False):
    """Batches acknowledged before a compaction: the answer to a repeated acknowledgement."""

    batches: list[tuple[str, int, int]]


class ExpiredRecord(msgspec.Struct, tag="expired", frozen=True, gc=False):
    """Batches whose time ran out before a compaction, ``(batch_id, job, group_ids, ttl_s)``: they may still be acknowledged."""

    batches: list[tuple[str, str, list[str], float]]
    consumers: dict[str, str] = {}
    """Of batches that have one."""


class ResumeRecord(msgspec.Struct, tag="resume", frozen=True, gc=False):
    job: str
    attempt: int
    consumed: list[str]
    consumer: str = ""


class EpochRecord(msgspec.Struct, tag="epoch", frozen=True, gc=False):
    """Who wrote what follows."""

    epoch: int


class VersionRecord(msgspec.Struct, tag="version", frozen=True, gc=False):
    job: str
    attempt: int
    version: int
    run: str = ""
    """Under which name its trainer publishes weights."""


Record = (
    TurnRecord
    | FormRecord
    | DeliveredRecord
    | CreateRecord
    | ScoreRecord
    | CloseRecord
    | FinishRecord
    | CancelRecord
    | LeaseRecord
    | RenewRecord
    | ExpireRecord
    | ReturnRecord
    | UnleasedRecord
    | ReturnedRecord
    | AckRecord
    | AckedRecord
    | ExpiredRecord
    | ResumeRecord
    | VersionRecord
    | EpochRecord
)
