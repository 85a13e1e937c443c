"""One rollout worker as the scheduler believes it to be: an engine, what it said last, and what was learned of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from rose.lineage import Version
from rose.policy.concurrency import Concurrency
from rose.policy.pace import Pace
from rose.policy.speed import Speed


class Tier(StrEnum):
    DEDICATED = "dedicated"
    """A GPU that the RL job owns."""
    HARVESTED = "harvested"
    """A share of a serving GPU; can be taken back at any moment."""
    BORROWED = "borrowed"
    """A training GPU that its trainer does not need until a time that it names."""


class Health(StrEnum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    DEAD = "dead"


class LendingState(StrEnum):
    OPEN = "open"
    PRESSURE = "pressure"
    FROZEN = "frozen"


class Duty(StrEnum):
    ACTIVE = "active"
    CORDONED = "cordoned"
    DRAINING = "draining"


@dataclass(kw_only=True, slots=True)
class Worker:
    """One engine as we believe it to be.  Changed only through :class:`Fleet` and the turn book."""

    worker_id: str
    incarnation: str
    tier: Tier
    model: str
    max_model_len: int
    cap: int
    registered_at_s: float
    heard_at_s: float
    health: Health = Health.JOINING
    lending: LendingState = LendingState.OPEN
    duty: Duty = Duty.ACTIVE
    has_own_cap: bool = False
    """Registered with a cap, so a change of the default leaves it."""
    for_tail: bool = False
    """The first choice for the longest trajectories."""
    max_num_seqs: int | None = None
    """What its engine runs at once, where it says so; ``cap`` is never above."""
    limit: Concurrency | None = None
    """Adapts the cap to what the engine says; None: the cap is fixed."""
    serving_use: float = 0.0
    """Recent share of the device's KV memory that production uses."""
    until_s: float = math.inf
    """When its owner has a borrowed device back; infinitely long ago until its node has said.  Of others: never."""
    job: str | None = None
    """The only job it works for; None: any."""
    version: Version | None = None
    run: str = ""
    """The run whose weights these are; empty where its node follows none, or its engine is ``unstamped``."""
    unstamped: bool = False
    """Its last whole answer did not say whose weights had sampled it."""
    seq: int = -1
    kv_budget_tokens: int | None = None
    kv_used_tokens: int | None = None
    running: int = 0
    waiting: int = 0
    """Requests that its engine has not begun."""
    num_preemptions: int = 0
    """Requests that its engine put back for want of KV memory, since its start."""
    gated: bool = False
    slack_s: float | None = None
    reclaim_seq: int = 0
    kv_epoch: int = 0
    """Grows whenever cached prefixes of this engine are gone (cut, new weights)."""
    inflight: int = 0
    reserved_tokens: int = 0
    admitted_tokens: int = 0
    """Tokens ever sent here; the measure by which an old prefix ages out of the engine's cache."""
    load_s: float = 0.0
    """Integral of ``inflight`` over time, up to ``load_at_s``: gives the mean load of any interval."""
    load_at_s: float = 0.0
    speed: Speed = field(default_factory=Speed)
    pace: Pace = field(default_factory=Pace)
    reclaim_rate: float = 0.0
    reclaimed_at_s: float | None = None
    failures_in_a_row: int = 0
    """Requests that failed since the last that did not; probes do not count."""
    rests_until_s: float | None = None
    """Takes no new turn until then."""
    facts: tuple[str | None, Version | None, str, bool, float, float] | None = None
    load: tuple[bool, int, int, int] | None = None
    """What the table (``rose.policy.packed``) has of it: job, version, run, whether production's promises hold, reclaim rate, end;
    and whether it is open, its room in tokens, turns in flight, free slots.  None: not there yet."""

    @property
    def slots(self) -> int:
        """Turns it may run at once now."""
        return self.cap if self.limit is None else min(self.cap, self.limit.slots)

    def load_until(self, at_s: float) -> float:
        return self.load_s + self.inflight * (at_s - self.load_at_s)

    @property
    def may_take_turns(self) -> bool:
        return (
            self.health is Health.READY
            and self.duty is Duty.ACTIVE
            and self.lending is not LendingState.PRESSURE
            and self.rests_until_s is None
        )

    @property
    def serving_holds_slo(self) -> bool:
        """True unless the engine says that production leaves no slack now."""
        return not self.gated and (self.slack_s is None or self.slack_s > 0)
