"""What rose-scheduler answers to environments, trainers, operators and pages: JSON objects, built as such.

Handlers are typed by these, ``/openapi.json`` describes them, and ``tests/scheduler/test_answers.py`` reads what the daemon sends
as what it says.  Answers to nodes, which programs of two ages exchange, are :mod:`rose.wire.workers`; a turn's are OpenAI's and Anthropic's.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class Nothing(TypedDict):
    """It is done, and there is nothing to say."""


class Begun(TypedDict):
    """A trajectory that was begun.  ``key`` chats in it and does nothing else."""

    id: str
    key: str


class Ended(TypedDict):
    """What became of a trajectory."""

    id: str
    state: str
    reason: str


class Listed(TypedDict):
    """A trajectory in a list.  ``created_at`` in Unix seconds; ``num_tokens`` were sampled, in all turns."""

    id: str
    job: str
    group_id: str
    state: str
    reason: str
    reward: float | None
    success: bool | None
    created_at: float
    num_turns: int
    num_tokens: int
    num_side_turns: int
    metadata: dict[str, str]


class Trajectories(TypedDict):
    """Those that were asked for."""

    trajectories: list[Listed]


class GroupListed(TypedDict):
    """``states``: how many of its trajectories are in which; ``metadata``: what they have in common."""

    job: str
    group_id: str
    group_size: int
    states: dict[str, int]
    rewards: list[float]
    metadata: dict[str, str]


class Groups(TypedDict):
    """Those with a trajectory that was asked for."""

    groups: list[GroupListed]


class Segment(TypedDict):
    """``n`` tokens of a turn, from ``start`` on, that one engine sampled in one attempt."""

    worker: str
    tier: str
    attempt: int
    start: int
    n: int
    run: NotRequired[str]
    logprobs_mode: NotRequired[str]


class Routed(TypedDict):
    """Routing to experts from position ``start`` on: a ``.npy`` file in base64."""

    start: int
    npy: str


class Turn(TypedDict):
    """A turn as it is recorded.  ``sampled`` spans are ``[start, tokens, turn]``, ``versions`` are ``[version, start, tokens]``."""

    turn: int
    kind: str
    parent: int | None
    fork: str | None
    side: bool
    prompt_token_ids: NotRequired[list[int]]
    sampled: NotRequired[list[list[int]]]
    suffix_token_ids: NotRequired[list[int]]
    num_prompt_tokens: NotRequired[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: str | int | None
    versions: list[tuple[str, int, int]]
    kv_mixed: bool | None
    segments: list[Segment]
    usage: dict[str, int]
    timing: dict[str, float]
    sampling: dict[str, Any]
    constraints: tuple[str, ...]
    id: str
    reward: float | None
    branch_reward: float | None
    routed_experts: NotRequired[list[Routed]]


class Trace(TypedDict):
    """A trajectory, with every token of every turn.  ``branches``: the last turn of each."""

    id: str
    job: str
    group_id: str
    group_size: int
    task: Any
    task_kind: str
    metadata: dict[str, str]
    sampling: dict[str, Any]
    created_at: float
    deadline_at: float | None
    state: str
    reason: str
    stale: bool
    reward: float | None
    success: bool | None
    info: Any
    turns: list[Turn]
    branches: list[int]


class Token(TypedDict):
    """A token of a branch; what was not sampled has no more than its id and text."""

    id: int
    sampled: bool
    text: str | None
    turn: NotRequired[int]
    logprob: NotRequired[float]
    version: NotRequired[str]
    worker: NotRequired[str]
    tier: NotRequired[str]
    attempt: NotRequired[int]


class Branch(TypedDict):
    """One branch, token by token.  ``turn``: its last one; None: there is none yet."""

    id: str
    turn: int | None
    branches: list[int]
    tokens: list[Token]


class Leased(TypedDict):
    """Whole groups to train on."""

    batch_id: str
    trajectories: list[Trace]


class Resumed(TypedDict):
    """How many groups wait again, and how many trajectories will not come back: they have been trained on."""

    returned_groups: int
    consumed: int


class Required(TypedDict):
    """No engine with weights older than ``version`` takes a turn of ``job`` from now on.  ``warning``: what that may lose."""

    job: str
    version: str
    warning: NotRequired[str]


class OnDuty(TypedDict):
    """Does an engine take new turns?"""

    worker_id: str
    duty: str


class WorkerStatus(TypedDict):
    """An engine.  No token, no address.  ``refused``: why it gets no turns of jobs that name a run; empty: it may."""

    worker_id: str
    tier: str
    model: str
    health: str
    lending: str
    duty: str
    incarnation: str
    version: str | None
    run: str
    refused: str
    job: str | None
    lent_s: float | None
    inflight: int
    cap: int
    reserved_tokens: int
    kv_budget_tokens: int | None
    kv_used_tokens: int | None
    running: int
    waiting: int
    num_preemptions: int
    gated: bool
    resting: bool
    slack_s: float | None
    reclaim_seq: int
    silent_s: float
    max_model_len: int


class Workers(TypedDict):
    """All engines."""

    workers: list[WorkerStatus]


class FleetNode(TypedDict):
    """A node by its last heartbeat.  ``late``: which promise production breaks, in words; empty: none."""

    node: str
    group: str
    ordered: Literal["off", "on"]
    held: bool | None
    mode: str | None
    held_pages: int | None
    silent_s: float
    ttft_p99_s: float | None
    slo_ttft_s: float | None
    tpot_p99_s: float | None
    slo_tpot_s: float | None
    late: str


class FleetRelease(TypedDict):
    """Groups that are switched on one stage after the other; ``left_s`` of this one."""

    stages: list[list[str]]
    stage: int
    left_s: float


class FleetStatus(TypedDict):
    """Who harvests.  ``taken_back``: why the last release ended early; empty: it did not."""

    all_held: bool
    held: dict[str, bool]
    release: FleetRelease | None
    taken_back: str
    nodes: list[FleetNode]


class SettingsNow(TypedDict):
    """What is in force."""

    policy: str
    cap_dedicated: int
    cap_harvested: int
    max_running: int


class SettingsChanged(TypedDict):
    """``[old, new]`` of each that is another now."""

    changed: dict[str, list[Any]]


class Health(TypedDict):
    """It runs."""

    status: str


class Ready(TypedDict):
    """May it be sent turns?  ``problems``: why not, also with 503."""

    status: str
    problems: list[str]
