"""What the two books hear and answer, for whoever drives them through one door, and for the decision log that replays them.

Pages are of 2 MiB, times seconds on one monotonic clock.  Events in their order within a round:

- production: :class:`ServingLooked`, then, when its lease says what was answered, :class:`PeerCounted`;
- rollout engine: :class:`RolloutLooked`, then, when its lease says so and production's numbers were read once more,
  :class:`AllowedAgain`;
- both: :class:`MarksWritten`, where a :class:`Mark` was answered and has been written.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank's pager says: by which generation of marks it acts, and the state of each chunk (one byte each)."""

    generation: int
    states: bytes


# --- events ---


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingLooked:
    """Production's core has read what its workers and the agent say."""

    at_s: float
    """When it began to."""
    released: tuple[tuple[int, int], ...]
    """Of each chunk that left the block pool, its number and the last step that may touch it."""
    reports: tuple[Report, ...]
    """One of each rank."""
    target_chunks: int
    """What may be lent now."""
    claim_chunks: int
    """What requests wait for, beyond what is usable."""
    retained_pages: int = 0
    """What a rank keeps of memory that it has unmapped: nobody else can have it yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerCounted:
    """What the rollout engine holds, read after the lease was written."""

    at_s: float
    pages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLooked:
    """The rollout engine's core has read everything."""

    at_s: float
    """When it began to."""
    released: tuple[tuple[int, int], ...]
    reports: tuple[Report, ...]
    allowed_chunks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowedAgain:
    """What it may hold, read after the lease announced a growth."""

    at_s: float
    allowed_chunks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MarksWritten:
    """The pagers can read the marks."""


ServingEvent = ServingLooked | PeerCounted | MarksWritten
RolloutEvent = RolloutLooked | AllowedAgain | MarksWritten

# --- actions ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Steps may use these chunks: hand them to the block pool."""

    chunks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """Say in the lease that so many pages are held, before anything else is read."""

    pages: int
    growing: bool = False
    """Rollout engine: some of them are announced only; read production's numbers once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Write these marks, one byte per chunk, under this generation."""

    generation: int
    after_step: int
    marks: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Stranded:
    """So many pages are not given back by anybody; 0: they have come."""

    pages: int


ServingAction = Use | Reserve | Mark | Stranded
RolloutAction = Use | Reserve | Mark
