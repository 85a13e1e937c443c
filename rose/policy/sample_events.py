"""The vocabulary of the sample book: what the world tells it (events) and what it asks for (actions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rose.lineage import Version

# --- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryCreated:
    """``floor``: no token of it will be of an older version, because no worker below takes a turn of its job any more."""

    trajectory_id: str
    job: str
    group_id: str
    group_size: int
    floor: Version | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnAdded:
    """A running trajectory has one more turn.  ``versions``, ``num_tokens`` (sampled) and ``runs`` are of all its turns."""

    trajectory_id: str
    versions: tuple[Version, ...]
    """Of its sampled tokens: as :func:`~rose.policy.staleness.ends` has them."""
    num_tokens: int
    runs: tuple[str, ...] = ()
    """Whose weights sampled them, where an engine said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryFinished:
    """``versions`` as with :class:`TurnAdded`.  ``filter_equal`` as the job's was when it finished: a replay must not depend on
    today's settings."""

    trajectory_id: str
    versions: tuple[Version, ...]
    reward: float = 0.0
    filter_equal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryCancelled:
    trajectory_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupForsaken:
    """No trainer has what of this group has finished, none is to have it, and nobody plays the rest of it."""

    job: str
    group_id: str
    reason: str = "unleased"
    """None came for it in time; or ``afresh``: one begins the job anew, and wants nothing of before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionPublished:
    """A trainer asks for no batch of its job at an older version any more.

    ``live``: of trajectories with a turn under way, a version whose step their oldest token is surely not above.
    """

    job: str
    version: Version
    alpha: int | None = None
    """This and ``on_stale``: None = as the job's."""
    on_stale: str | None = None
    live: Mapping[str, Version] = field(default_factory=lambda: dict[str, Version]())


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAsked:
    """``batch_id`` is named by the trainer: asking again gives the same batch."""

    at_s: float
    batch_id: str
    job: str
    num_groups: int
    version: Version
    ttl_s: float
    alpha: int | None = None
    """This and ``on_stale``: None = as the job's."""
    on_stale: str | None = None
    consumer: str = ""
    """Which of the job's trainers asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRestored:
    """Replay of a lease that was granted before a restart, and of groups that were dropped as stale."""

    at_s: float
    batch_id: str
    job: str
    group_ids: tuple[str, ...]
    stale_group_ids: tuple[str, ...]
    ttl_s: float
    consumer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchExpired:
    batch_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReturned:
    """Its trainer does not want it.  Nothing is ever leased under its name again."""

    batch_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAcked:
    batch_id: str
    step: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResumed:
    """A trainer started again: its open leases return, except what its checkpoint has consumed.  Those of the job's other
    consumers stay."""

    job: str
    attempt: int
    consumed: tuple[str, ...]
    consumer: str = ""


Event = (
    TrajectoryCreated
    | TurnAdded
    | TrajectoryFinished
    | TrajectoryCancelled
    | GroupForsaken
    | VersionPublished
    | BatchAsked
    | BatchRestored
    | BatchExpired
    | BatchReturned
    | BatchAcked
    | JobResumed
)

# --- actions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReady:
    job: str
    group_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Discard:
    """These trajectories will not be trained on: stop their turns."""

    trajectory_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Leased:
    batch_id: str
    group_ids: tuple[str, ...]
    trajectory_ids: tuple[str, ...]
    stale_ids: tuple[str, ...]
    stale_group_ids: tuple[str, ...]
    is_new: bool = True
    """Else it was leased already, and has been asked for again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumed:
    """Their tokens may be forgotten."""

    trajectory_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """These groups can be leased again."""

    batch_id: str
    job: str
    group_ids: tuple[str, ...]


Action = GroupReady | Discard | Leased | Consumed | Returned
