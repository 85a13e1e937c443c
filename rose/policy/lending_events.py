"""What the lending policy hears and answers: events in, actions out (see :mod:`rose.policy.lending`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

ALL_PAGES = 1 << 40
"""More than any device has: the loan on a device without serving."""


class Mode(IntEnum):
    """What is asked of a device."""

    OFF = 0
    """Nothing is lent, no rollout step runs."""
    OBSERVE = 1
    """Measure and report what could be harvested; touch nothing."""
    ON = 2


class Phase(IntEnum):
    """Where an engine is in its life."""

    ABSENT = 0
    STARTING = 1
    """Before and while it sizes its memory: the peer must hold nothing."""
    READY = 2
    OFF = 3
    """Alive, but it does not share: fail-open after an error, or switched off."""


# --- events ---


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeSet:
    """The operator decided, or the agent started."""

    at_s: float
    mode: int
    floor_pages: int = 0
    """Never lent."""
    max_lend_pages: int = ALL_PAGES
    has_serving: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingReported:
    """What ``serving.lease`` and ``serving.board`` say.  ``alive``: lock held and heartbeat fresh."""

    at_s: float
    alive: bool
    phase: int
    total_pages: int
    reserved_pages: int
    used_pages: int
    needed_pages: int = 0
    pressure_seq: int = 0
    compute_only: bool = False
    """It keeps its memory; the rollout engine has a fixed budget of its own, ``max_lend_pages``."""
    queried_tokens: int = 0
    """Of all prompts so far, as vLLM counts the queries of its prefix cache; 0 = it does not count."""
    lost_tokens: int = 0
    """Of these, how many a cache of the whole device would have had and the one beside the loan had not."""
    cold_pages: int = 0
    """How many more pages such a cache would fill now."""
    chunk_pages: int = 1
    """It lends whole chunks of so many pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutReported:
    """What ``rollout.lease`` says.  Of a dead engine core ``reserved_pages`` is what its workers still have, whatever it wrote."""

    at_s: float
    alive: bool
    phase: int
    reserved_pages: int
    wanted_pages: int = 0
    """What it could use; 0 = it does not say."""
    reclaim_seq: int = 0
    step_s: float = 0.0
    """Its longest step lately; 0 = none."""
    exit_s: float = 0.0
    """The longest that an engine of this device lately took from its kill until nothing of it was left; 0 = none was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RlStepStarted:
    """A new RL step began.  Only :class:`rose.policy.baselines.PaperLending` cares."""

    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed, and this is what the device has free by its own word.

    None: it was not asked (no reserve is given either), or it did not answer.
    """

    at_s: float
    device_free_bytes: int | None = None
    device_reserve_bytes: int = 0
    """What must stay free for what is not KV memory: production's kernels and activations, other programs."""


Event = ModeSet | ServingReported | RolloutReported | RlStepStarted | Tick

# --- actions ---


@dataclass(frozen=True, kw_only=True, slots=True)
class SetLend:
    """The loan is now ``pages``.  A target, so sending it again is safe."""

    pages: int
    deadline_s: float | None
    """Until then the rollout engine must hold no more; None when it already holds no more, or when production has room enough without.
    Said again, with a deadline, once it has not."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KillRollout:
    """A cut was not obeyed in time.  Repeated until the pages are back."""

    reason: str


Action = SetLend | KillRollout
