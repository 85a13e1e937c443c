"""Environments and trainers to rose-scheduler: trajectories, batches, versions; and ``/admin/settings``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rose.wire.types import Count, Name, Positive, RunName, Seconds, ShortName, VersionPart, VersionText

MIN_RATIO = 1e-6
"""Of new prompt tokens to sampled ones; the inverse of the largest."""
MAX_DEADLINE_S = 604_800.0
USUAL_FOUND = 10_000
"""Trajectories of a listing that names no ``limit``."""
MOST_FOUND = 1_000_000
StaleRule = Literal["wait", "mask", "cancel"]
RoutingName = Literal["cost", "paper", "sticky_least_loaded", "round_robin", "random"]


class _Body(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


Metadata = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
"""What one may search by."""
SideChannel = Literal["routed_experts"]
Reward = Annotated[float, Meta(ge=-1e30, le=1e30)]


class NewTrajectory(_Body):
    """``POST /rose/v1/trajectories``."""

    job: Name
    group_id: Name | None = None
    group_size: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """None: 1."""
    task: Any = None
    sampling: dict[str, Any] | None = None
    """For all its turns."""
    task_kind: Name | None = None
    prefill_per_decode: Annotated[float, Meta(ge=MIN_RATIO, le=1 / MIN_RATIO)] | None = None
    deadline_s: Annotated[float, Meta(ge=0.001, le=MAX_DEADLINE_S)] | None = None
    metadata: Metadata | None = None
    record: Annotated[list[SideChannel], Meta(max_length=8)] | None = None
    """What else of its turns is recorded."""
    train_side_requests: bool | None = None
    """True: what is only taken for a request beside the task, and not said to be one, is a turn like others.  None: false."""


class Finish(_Body):
    """``POST /rose/v1/trajectories/{id}/finish``: it takes no more turns.  Without a reward it waits for its score."""

    reward: Reward | None = None
    success: bool | None = None
    info: Any = None


class Scored(_Body):
    """A turn, or the branch that ends with it."""

    turn: Count | ShortName
    """Its number, or its id: ``rose.ids`` of the answer."""
    reward: Reward


class Score(_Body):
    """``POST /rose/v1/trajectories/{id}/score``: any of these, as often as one likes until it is finished."""

    reward: Reward | None = None
    """Of the whole."""
    success: bool | None = None
    info: Any = None
    turns: Annotated[list[Scored], Meta(max_length=65_536)] = []
    branches: Annotated[list[Scored], Meta(max_length=65_536)] = []


class Lease(_Body):
    """``PUT /rose/v1/batches/{id}``: whole groups."""

    job: Name
    num_groups: Positive
    # A list: msgspec 0.22 crashes in the garbage collector on a union that has a tuple of a fixed length.
    version: VersionText | Annotated[list[VersionPart], Meta(min_length=2, max_length=2)]
    """Of the weights that will train on it."""
    ttl_s: Annotated[float, Meta(ge=0.001)] | None = None
    wait_s: Seconds | None = None
    alpha: Count | None = None
    on_stale: StaleRule | None = None
    prompts: Literal["suffix", "whole"] | None = None
    consumer: Name | None = None
    run: RunName | None = None
    """Whose weights will train on it: refused where the job is a run's, and this is another or left out; so are :class:`Ack`,
    :class:`Resume` and :class:`NewVersion`."""


class Ack(_Body):
    """``POST /rose/v1/batches/{id}/ack``: trained on."""

    step: Count
    attempt: VersionPart
    run: RunName | None = None


class Resume(_Body):
    """``POST /rose/v1/jobs/{job}/resume``: a trainer starts anew."""

    attempt: VersionPart
    consumed: list[str]
    """Trajectories that it has been trained on."""
    run: RunName | None = None
    """Under which name it publishes."""
    consumer: Name | None = None
    afresh: bool | None = None
    """It goes on from nothing: what was sampled for the job so far and no trainer has is given up."""


class NewVersion(_Body):
    """``POST /rose/v1/versions``."""

    job: Name
    attempt: VersionPart
    version: VersionPart
    run: RunName | None = None
    """Under which name the weights are published: only engines that follow it sample for the job from now on."""
    alpha: Count | None = None
    on_stale: StaleRule | None = None


class Settings(_Body):
    """``POST /admin/settings``."""

    policy: RoutingName | None = None
    cap_dedicated: Positive | None = None
    cap_harvested: Positive | None = None
    max_running: Positive | None = None
