"""The book of rollout workers: who is alive, who may take a turn, how much room each has.

Three axes per worker, because a worker whose lending is frozen can also be suspect:

- *health*  JOINING -> READY <-> SUSPECT -> DEAD.  READY needs a heartbeat of the registered incarnation that
  says ``ready`` and carries a weight version: a dead worker never comes back without confirming one.
- *lending* OPEN -> PRESSURE -> FROZEN -> OPEN (harvested only).  A reclaim (``reclaim_seq`` grew) is PRESSURE
  until use is back inside the budget, then FROZEN until the trainer's next version.
- *duty*    ACTIVE, CORDONED (finish what runs), DRAINING.

Limits are seconds of silence, not counts of missed heartbeats.  If most of the fleet falls silent in the same
moment, the likeliest fault is ours: nobody is demoted until ``mass_silence_hold_s``.  If our own clock jumps
(this process was stopped), the gap is not held against the workers.

Does not decide where a turn goes (``rose.policy.routing``) nor what happens to the turns of a dead worker
(``rose.policy.turns``, the only caller of the methods that change a worker).

Pure: no I/O, no clock; ``at_s`` comes with each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from rose.policy.packed import WorkerTable
from rose.policy.speed import Speed
from rose.policy.staleness import Version


class Tier(StrEnum):
    DEDICATED = "dedicated"
    """A GPU that the RL job owns."""
    HARVESTED = "harvested"
    """A share of a serving GPU; can be taken back at any moment."""


class Health(StrEnum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    DEAD = "dead"


class Lending(StrEnum):
    OPEN = "open"
    PRESSURE = "pressure"
    FROZEN = "frozen"


class Duty(StrEnum):
    ACTIVE = "active"
    CORDONED = "cordoned"
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetParams:
    suspect_s: float = 2.0
    """Silence after which a worker takes no new turn."""
    dead_s: float = 10.0
    """Silence after which its turns go elsewhere."""
    mass_silence_fraction: float = 0.3
    mass_silence_min_workers: int = 4
    """Below this fleet size one dead worker is already a third: the rule would only delay."""
    mass_silence_hold_s: float = 30.0
    clock_gap_s: float = 1.0
    """A longer gap between two ticks means that we were stopped, not the workers."""
    cap_dedicated: int = 64
    cap_harvested: int = 16
    """Concurrent turns per worker.  16 is the paper's cap at 32K context."""
    reclaim_ewma_s: float = 60.0


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
    lending: Lending = Lending.OPEN
    duty: Duty = Duty.ACTIVE
    version: Version | None = None
    seq: int = -1
    kv_budget_tokens: int | None = None
    kv_used_tokens: int | None = None
    running: int = 0
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
    reclaim_rate: float = 0.0
    reclaimed_at_s: float | None = None

    @property
    def slots(self) -> int:
        """Turns it may run at once now."""
        return self.cap

    def load_until(self, at_s: float) -> float:
        return self.load_s + self.inflight * (at_s - self.load_at_s)

    @property
    def may_take_turns(self) -> bool:
        return (
            self.health is Health.READY and self.duty is Duty.ACTIVE and self.lending is not Lending.PRESSURE
        )

    @property
    def serving_holds_slo(self) -> bool:
        """True unless the engine says that production leaves no slack now."""
        return not self.gated and (self.slack_s is None or self.slack_s > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDown:
    """The turns of this worker must move; ``fence`` False means only new work is withheld."""

    worker_id: str
    reason: str


@dataclass(kw_only=True, slots=True)
class Fleet:
    params: FleetParams = field(default_factory=FleetParams)
    workers: dict[str, Worker] = field(default_factory=lambda: dict[str, Worker]())
    table: WorkerTable = field(default_factory=WorkerTable)
    """The same workers as columns; kept in step by every method here."""
    tier_speed: dict[Tier, Speed] = field(default_factory=lambda: {tier: Speed() for tier in Tier})
    """What a worker of this tier is like; the first guess for a new one."""
    _ticked_at_s: float | None = None

    def register(
        self,
        *,
        at_s: float,
        worker_id: str,
        incarnation: str,
        tier: Tier,
        model: str,
        max_model_len: int,
        cap: int | None = None,
    ) -> list[WorkerDown]:
        """Add or replace a worker.  A new incarnation buries the old one; the same one changes nothing."""
        old = self.workers.get(worker_id)
        if old is not None and old.incarnation == incarnation and old.health is not Health.DEAD:
            old.heard_at_s = at_s
            return []
        default_cap = self.params.cap_dedicated if tier is Tier.DEDICATED else self.params.cap_harvested
        worker = self.workers[worker_id] = Worker(
            worker_id=worker_id,
            incarnation=incarnation,
            tier=tier,
            model=model,
            max_model_len=max_model_len,
            cap=default_cap if cap is None else cap,
            registered_at_s=at_s,
            heard_at_s=at_s,
            load_at_s=at_s,
            speed=self.tier_speed[tier].copy_of(at_s),
        )
        self.table.put(worker)
        return [] if old is None else [WorkerDown(worker_id=worker_id, reason="restarted")]

    def heartbeat(
        self,
        *,
        at_s: float,
        worker_id: str,
        incarnation: str,
        seq: int,
        version: Version | None,
        state: str,
        kv_budget_tokens: int | None,
        kv_used_tokens: int | None,
        running: int,
        gated: bool,
        reclaim_seq: int,
        slack_s: float | None,
    ) -> bool:
        """Update a worker; False when we do not know it (the node must register again)."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return False
        if seq <= worker.seq:
            return True  # reordered on the way: newer facts are already in the book
        worker.seq = seq
        worker.heard_at_s = at_s
        if version != worker.version:
            worker.version = version
            worker.kv_epoch += 1
        if reclaim_seq > worker.reclaim_seq:
            worker.kv_epoch += 1
            worker.reclaim_seq = reclaim_seq
            worker.lending = Lending.PRESSURE
            self._note_reclaim(worker, at_s)
        worker.kv_budget_tokens = kv_budget_tokens
        worker.kv_used_tokens = kv_used_tokens
        worker.running = running
        worker.gated = gated
        worker.slack_s = slack_s
        inside = kv_budget_tokens is None or kv_used_tokens is None or kv_used_tokens <= kv_budget_tokens
        if worker.lending is Lending.PRESSURE and inside:
            worker.lending = Lending.FROZEN
        if state == "ready" and version is not None:
            worker.health = Health.READY
        elif worker.health is not Health.DEAD:
            worker.health = Health.JOINING
        self.table.sync(worker)
        return True

    def reclaimed(self, worker_id: str, at_s: float) -> None:
        """A turn came back cut before the heartbeat told us: forget what we thought was cached there."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.kv_epoch += 1
            self._note_reclaim(worker, at_s)
            self.table.sync(worker)

    def thaw(self) -> None:
        """The trainer published a version: an RL step has passed, frozen budgets may grow again."""
        for worker in self.workers.values():
            if worker.lending is Lending.FROZEN:
                worker.lending = Lending.OPEN
                self.table.sync(worker)

    def set_duty(self, worker: Worker, duty: Duty) -> None:
        worker.duty = duty
        self.table.sync(worker)

    def forget(self, worker_id: str) -> None:
        if self.workers.pop(worker_id, None) is not None:
            self.table.remove(worker_id)

    def take(self, worker: Worker, *, at_s: float, reserved: int, admitted: int) -> None:
        """One more attempt runs on ``worker``."""
        self._account(worker, at_s)
        worker.inflight += 1
        worker.reserved_tokens += reserved
        worker.admitted_tokens += admitted
        self.table.sync_load(worker)

    def give_back(self, worker: Worker, *, at_s: float, reserved: int) -> None:
        """One attempt less."""
        self._account(worker, at_s)
        worker.inflight -= 1
        worker.reserved_tokens -= reserved
        if self.workers.get(worker.worker_id) is worker:  # else it was replaced by a new incarnation
            self.table.sync_load(worker)

    @staticmethod
    def _account(worker: Worker, at_s: float) -> None:
        worker.load_s, worker.load_at_s = worker.load_until(at_s), at_s

    def lost(self, worker_id: str, incarnation: str | None, reason: str) -> list[WorkerDown]:
        worker = self.workers.get(worker_id)
        if worker is None or (incarnation is not None and worker.incarnation != incarnation):
            return []
        if worker.health is Health.DEAD:
            return []
        worker.health = Health.DEAD
        worker.kv_epoch += 1
        self.table.sync(worker)
        return [WorkerDown(worker_id=worker_id, reason=reason)]

    def tick(self, at_s: float) -> list[WorkerDown]:
        """Judge silence.  Call at least every ``suspect_s / 4``."""
        gap_s = 0.0 if self._ticked_at_s is None else at_s - self._ticked_at_s
        self._ticked_at_s = at_s
        if gap_s > self.params.clock_gap_s:
            for worker in self.workers.values():
                worker.heard_at_s = min(at_s, worker.heard_at_s + gap_s)
        living = [worker for worker in self.workers.values() if worker.health is not Health.DEAD]
        silent = [worker for worker in living if at_s - worker.heard_at_s >= self.params.suspect_s]
        hold = len(living) >= self.params.mass_silence_min_workers and len(
            silent
        ) > self.params.mass_silence_fraction * len(living)
        down: list[WorkerDown] = []
        for worker in silent:
            silence_s = at_s - worker.heard_at_s
            if hold and silence_s < self.params.mass_silence_hold_s:
                continue
            if silence_s >= self.params.dead_s:
                worker.health = Health.DEAD
                worker.kv_epoch += 1
                self.table.sync(worker)
                down.append(WorkerDown(worker_id=worker.worker_id, reason="silent"))
            elif worker.health is Health.READY:
                worker.health = Health.SUSPECT
                self.table.sync(worker)
                if worker.tier is Tier.HARVESTED:
                    # The likeliest cause is a reclaim in progress; a dedicated worker is given until dead_s.
                    down.append(WorkerDown(worker_id=worker.worker_id, reason="suspect"))
        return down

    def served(
        self,
        worker: Worker,
        *,
        at_s: float,
        seconds: float,
        num_new: int,
        num_prefilled: int,
        load_s: float,
    ) -> None:
        """Learn the speed of a worker from one finished attempt.

        ``num_prefilled`` are prompt tokens that were not cached; ``load_s`` the worker's load integral over
        the attempt, itself included.
        """
        if num_new <= 0 or seconds <= 0:
            return
        crowd = max(load_s / seconds - 1.0, 0.0)
        for speed in (worker.speed, self.tier_speed[worker.tier]):
            speed.observe(
                at_s=at_s, seconds=seconds, num_new=num_new, crowd=crowd, num_prefilled=num_prefilled
            )
        self.table.set_tier(worker.tier is Tier.DEDICATED, self.tier_speed[worker.tier])
        self.table.sync(worker)

    def _note_reclaim(self, worker: Worker, at_s: float) -> None:
        if worker.reclaimed_at_s is not None:
            since_s = max(at_s - worker.reclaimed_at_s, 0.1)
            keep = max(0.0, 1.0 - since_s / self.params.reclaim_ewma_s)
            worker.reclaim_rate = keep * worker.reclaim_rate + (1.0 - keep) / since_s
        worker.reclaimed_at_s = at_s

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())
