"""What rose-scheduler answers to environments, trainers, operators and pages: JSON objects, built as such.

Handlers are typed by these, ``/openapi.json`` describes them, and ``tests/scheduler/test_answers.py`` reads what the daemon sends
as what it says.  Answers to nodes, which programs of two ages exchange, are :mod:`rose.wire.workers`; a turn's are OpenAI's and Anthropic's.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class Empty(TypedDict):
    """It is done, and there is nothing to say."""


class TrajectoryKey(TypedDict):
    """A trajectory that was begun."""

    id: str
    """Of the trajectory."""
    key: str
    """A bearer token; it chats in this trajectory and does nothing else."""


class TrajectoryEnded(TypedDict):
    """What became of a trajectory."""

    id: str
    """Of the trajectory."""
    state: str
    """As in :class:`TrajectoryTrace`."""
    reason: str
    """Why it is in it; empty: nothing special."""


class TrajectorySummary(TypedDict):
    """A trajectory in a list."""

    id: str
    """Of the trajectory."""
    job: str
    """Whose samples it makes."""
    group_id: str
    """All trajectories of one prompt share it."""
    state: str
    """``running``, ``unscored`` (it ended without a reward), ``finished``, ``leased``, ``consumed`` (trained on), ``filtered``, ``cancelled`` or ``stale``."""
    reason: str
    """Why; empty: nothing special."""
    reward: float | None
    """None: it has none yet."""
    success: bool | None
    """None: nobody said."""
    created_at: float
    """When it was begun."""
    num_turns: int
    """Those that are done."""
    num_tokens: int
    """Sampled, in all turns."""
    num_side_turns: int
    """Of the turns: requests beside the task, not trained on."""
    metadata: dict[str, str]
    """As it was begun with."""


class TrajectoryList(TypedDict):
    """Those that were asked for."""

    trajectories: list[TrajectorySummary]


class GroupSummary(TypedDict):
    """A group in a list."""

    job: str
    group_id: str
    group_size: int
    """Trajectories that it takes to be complete."""
    states: dict[str, int]
    """State -> how many of its trajectories are in it."""
    rewards: list[float]
    """Of those that have one."""
    metadata: dict[str, str]
    """What all of them have in common."""


class GroupList(TypedDict):
    """Those with a trajectory that was asked for."""

    groups: list[GroupSummary]


class TurnSegment(TypedDict):
    """``n`` tokens of a turn, that one engine sampled in one attempt."""

    worker: str
    """The engine."""
    tier: str
    """``dedicated``, ``harvested`` or ``borrowed``."""
    attempt: int
    """1 for the first engine of the turn."""
    start: int
    """Its first token, counted in the turn's output."""
    n: int
    """Tokens."""
    run: NotRequired[str]
    """Whose weights sampled them."""
    logprobs_mode: NotRequired[str]
    """vLLM's ``--logprobs-mode`` of the engine."""


class RoutedExperts(TypedDict):
    """Which experts a span of positions was routed to."""

    start: int
    """First position."""
    npy: str
    """A ``.npy`` file in base64."""


class TurnUsage(TypedDict):
    """Tokens of one turn."""

    prompt: int
    cached: int
    """Of the prompt, found in the first engine's prefix cache."""
    generated: int
    recomputed: int
    """Computed a second time because it moved."""


class TurnTiming(TypedDict):
    """Of one turn, from when it was asked for, in milliseconds."""

    queue_ms: float
    """Until an engine took it."""
    ttft_ms: float
    """Until its first token."""
    total_ms: float
    """Until its end."""


class TurnTrace(TypedDict):
    """A turn as it is recorded."""

    turn: int
    """Its number in the trajectory, from 0."""
    kind: str
    """The protocol that asked for it, such as ``chat``."""
    parent: int | None
    """The turn that it continues; None: it begins a branch."""
    fork: str | None
    """Why it begins a branch though the trajectory had turns; None: it does not."""
    side: bool
    """A request beside the task, not trained on."""
    prompt_token_ids: NotRequired[list[int]]
    """The whole prompt."""
    sampled: NotRequired[list[list[int]]]
    """Parts of the prompt that earlier turns sampled: ``[start, tokens, turn]``."""
    suffix_token_ids: NotRequired[list[int]]
    """With ``prompts: "suffix"``: the prompt without what ``parent`` holds."""
    num_prompt_tokens: NotRequired[int]
    """With ``prompts: "suffix"``: length of the whole prompt."""
    token_ids: list[int]
    """What was sampled."""
    logprobs: list[float]
    """One for each of ``token_ids``."""
    finish_reason: str
    """As OpenAI's: ``stop``, ``length``, ..."""
    stop_reason: str | int | None
    """The stop text or token that ended it; None: none did."""
    versions: list[tuple[str, int, int]]
    """``[weight version, start, tokens]``, of the output."""
    kv_mixed: bool | None
    """Did its context hold keys and values of other weights than its newest tokens?  None: an engine did not say."""
    segments: list[TurnSegment]
    """Which engine sampled which tokens."""
    usage: TurnUsage
    timing: TurnTiming
    sampling: dict[str, Any]
    """Parameters that it was drawn with."""
    constraints: tuple[str, ...]
    """Names of what restricted the choice of tokens, such as a grammar."""
    id: str
    """Its id, as its answer had it."""
    reward: float | None
    """Of this turn; None: none was given."""
    branch_reward: float | None
    """Of the branch that it ends; None: none was given."""
    routed_experts: NotRequired[list[RoutedExperts]]
    """Where recorded: which experts each position was routed to."""


class TrajectoryTrace(TypedDict):
    """A trajectory, with every token of every turn."""

    id: str
    job: str
    group_id: str
    group_size: int
    """Trajectories that complete its group."""
    task: Any
    """As it was begun with."""
    task_kind: str
    """For routing: tasks of one kind have turns of similar length."""
    metadata: dict[str, str]
    """As it was begun with."""
    sampling: dict[str, Any]
    """Parameters of all its turns."""
    created_at: float
    """When it was begun."""
    deadline_at: float | None
    """When it is cancelled, in Unix seconds; None: never."""
    state: str
    """``running``, ``unscored`` (it ended without a reward), ``finished``, ``leased``, ``consumed`` (trained on), ``filtered``, ``cancelled`` or ``stale``."""
    reason: str
    """Why; empty: nothing special."""
    stale: bool
    """Older than its job allows."""
    reward: float | None
    """None: it has none yet."""
    success: bool | None
    """None: nobody said."""
    info: Any
    """What its environment said at its end."""
    turns: list[TurnTrace]
    branches: list[int]
    """The last turn of each branch."""


class BranchToken(TypedDict):
    """A token of a branch; what was not sampled has no more than its id and text."""

    id: int
    sampled: bool
    """False: part of a prompt, and nothing else is known of it."""
    text: str | None
    """None: no engine could be asked."""
    turn: NotRequired[int]
    """That sampled it."""
    logprob: NotRequired[float]
    """Of it, as the engine reported it."""
    version: NotRequired[str]
    """Of the weights."""
    worker: NotRequired[str]
    """The engine."""
    tier: NotRequired[str]
    """Of the engine."""
    attempt: NotRequired[int]
    """1 for the first engine of the turn."""


class Branch(TypedDict):
    """One branch, token by token."""

    id: str
    """Of the trajectory."""
    turn: int | None
    """The last one of the branch; None: there is none yet."""
    branches: list[int]
    """The last turn of each branch."""
    tokens: list[BranchToken]
    """All of the branch, in order."""


class LeasedBatch(TypedDict):
    """Whole groups to train on."""

    batch_id: str
    """For its ``ack``."""
    trajectories: list[TrajectoryTrace]


class ResumedJob(TypedDict):
    """What a restarted trainer finds."""

    returned_groups: int
    """That can be leased again."""
    consumed: int
    """Trajectories that were trained on, and do not come back."""
    dropped_groups: int
    """That waited, given up for who begins afresh."""
    cancelled: int
    """Trajectories that still ran, ended for the same reason."""


class RequiredVersion(TypedDict):
    """No engine with weights older than ``version`` takes a turn of ``job`` from now on."""

    job: str
    version: str
    """The oldest that takes a turn from now on."""
    warning: NotRequired[str]
    """What that may lose."""


class WorkerDutyStatus(TypedDict):
    """Does an engine take new turns?"""

    worker_id: str
    duty: str
    """``active``, ``draining`` or ``cordoned``."""


class WorkerStatus(TypedDict):
    """An engine.  No token, no address."""

    worker_id: str
    tier: str
    """``dedicated``, ``harvested`` or ``borrowed``."""
    model: str
    health: str
    """``joining``, ``ready``, ``suspect`` or ``dead``, by its heartbeats."""
    lending: str
    """``pressure``: production takes memory back; ``frozen``: it has, since the trainer's last step; else ``open``."""
    duty: str
    """``active``, ``draining`` or ``cordoned``."""
    incarnation: str
    """Another one after each start of the engine."""
    version: str | None
    """Of its weights; None: none yet."""
    run: str
    """Whose weights they are."""
    refused: str
    """Why it gets no turns of jobs that name a run; empty: it may."""
    job: str | None
    """The one that it works for; None: any."""
    lent_s: float | None
    """Until its owner takes a borrowed device back; None: it is not borrowed."""
    inflight: int
    """Turns that it was sent and that have not ended."""
    cap: int
    """The most of these."""
    reserved_tokens: int
    """KV memory that those turns may come to need."""
    kv_budget_tokens: int | None
    """KV memory that it has; None: it did not say."""
    kv_used_tokens: int | None
    """Of it in use; None: it did not say."""
    running: int
    """Requests in its steps, by its own word."""
    waiting: int
    """Requests in its own queue."""
    num_preemptions: int
    """That it made itself for want of KV memory, since it started."""
    gated: bool
    """No step runs now, for production's sake."""
    resting: bool
    """Its requests fail, and it gets none for a while."""
    slack_s: float | None
    """How much longer production's next step can wait; None: nobody said."""
    reclaim_seq: int
    """How often it gave memory back with turns in it."""
    silent_s: float
    """Since its last heartbeat."""
    max_model_len: int
    """Longest prompt and output together, in tokens."""


class WorkerList(TypedDict):
    """All engines."""

    workers: list[WorkerStatus]


class FleetNode(TypedDict):
    """A node by its last heartbeat."""

    node: str
    unregistered: bool
    """It was heard, and has not this name: another node of the same ``node_id``, most likely."""
    at: str
    """Where it says it is, if it was refused the name; else empty."""
    group: str
    """Of the fleet's switch."""
    ordered: Literal["off", "on"]
    """What the fleet's switch has it do."""
    held: bool | None
    """Does it lend nothing for the fleet's sake?  None: it knows no such order."""
    mode: str | None
    """Its own operator's; None: it did not say."""
    held_pages: int | None
    """That its rollout engine holds; None: it did not say."""
    silent_s: float
    """Since its last heartbeat."""
    skipped: bool
    """The last release did not wait for it: it was silent when its stage began, and ever since."""
    ttft_p99_s: float | None
    """Production's, to the first token; None: unknown."""
    slo_ttft_s: float | None
    """Its objective; None: there is none."""
    tpot_p99_s: float | None
    """Production's, between tokens; None: unknown."""
    slo_tpot_s: float | None
    """Its objective; None: there is none."""
    late: str
    """Which objective production misses, in words; empty: none."""


class FleetRelease(TypedDict):
    """Groups that are switched on one stage after the other."""

    stages: list[list[str]]
    """Groups that are switched on together, stage after stage."""
    stage: int
    """Which one is on trial, from 0."""
    left_s: float
    """Of its trial."""


class FleetStatus(TypedDict):
    """Who harvests."""

    all_held: bool
    """The whole fleet is switched off."""
    held: dict[str, bool]
    """Group -> is it switched off?"""
    release: FleetRelease | None
    """None: none is under way."""
    taken_back: str
    """Why the last release ended early; empty: it did not."""
    nodes: list[FleetNode]


class SettingsNow(TypedDict):
    """What is in force."""

    policy: str
    """How engines are chosen for turns."""
    cap_dedicated: int
    """Turns at once on a dedicated engine."""
    cap_harvested: int
    """Turns at once on a harvested one."""
    max_running: int
    """Turns at once, those that wait included."""


class SettingsChanged(TypedDict):
    """What the request changed."""

    changed: dict[str, list[Any]]
    """Name -> ``[old, new]``."""


class HealthStatus(TypedDict):
    """It runs."""

    status: str
    """``ok``."""


class ReadyStatus(TypedDict):
    """May it be sent turns?  If not, the status is 503, with the same body."""

    status: str
    """``ok`` or ``not ready``."""
    problems: list[str]
    """Why it takes no turns."""
