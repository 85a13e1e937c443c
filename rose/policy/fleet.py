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

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rose.lineage import Version
from rose.policy.borrowed import until_s
from rose.policy.concurrency import Concurrency
from rose.policy.packed import WorkerTable
from rose.policy.speed import Speed
from rose.policy.worker import Duty, Health, LendingState, Tier, Worker


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
    cap_harvested: int = 64
    """Concurrent turns per worker (of borrowed ones as of dedicated ones), and no more than its engine runs at once: a turn that waits in an engine cannot
    go elsewhere.  The paper caps harvested ones at 16 (32K context); here the advertised KV budget does that."""
    adaptive_cap: bool = False
    """Lower and raise the limit inside the cap by what heartbeats say (``rose.policy.concurrency``)."""
    rest_after_failures: int = 3
    """So many requests in a row that an engine fails, of whichever turns, and it takes none for a while: a wedged engine
    answers probes, and its node says that it is ready."""
    rest_s: float = 2.0
    """The first rest; doubled for every failure after it, until a request succeeds."""
    max_rest_s: float = 60.0
    drain_s: float = 2.0
    """So long before a borrowed device goes back, its turns are asked to leave."""
    reclaim_ewma_s: float = 60.0
    serving_ewma: float = 0.1
    """Of production's KV use: about the last five seconds of heartbeats."""


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
    changes: int = 0
    """Grows whenever a worker came, went, or changed its health."""
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
        max_num_seqs: int | None = None,
        for_tail: bool = False,
    ) -> list[WorkerDown]:
        """Add or replace a worker.  A new incarnation buries the old one; the same one changes nothing."""
        old = self.workers.get(worker_id)
        if old is not None and old.incarnation == incarnation and old.health is not Health.DEAD:
            old.heard_at_s = at_s
            return []
        own_cap = cap
        if cap is None:
            cap = self.params.cap_harvested if tier is Tier.HARVESTED else self.params.cap_dedicated
        cap = _at_most(cap, max_num_seqs)
        job = None if old is None else old.job  # the device keeps its job when its engine starts again
        worker = self.workers[worker_id] = Worker(
            worker_id=worker_id,
            incarnation=incarnation,
            tier=tier,
            model=model,
            max_model_len=max_model_len,
            cap=cap,
            limit=Concurrency.at_cap(cap) if self.params.adaptive_cap else None,
            has_own_cap=own_cap is not None,
            for_tail=for_tail,
            max_num_seqs=max_num_seqs,
            registered_at_s=at_s,
            heard_at_s=at_s,
            until_s=-math.inf if tier is Tier.BORROWED else math.inf,
            job=job,
            load_at_s=at_s,
            speed=self.tier_speed[tier].copy_of(at_s),
        )
        self.table.put(worker)
        self.changes += 1
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
        serving_use: float = 0.0,
        waiting: int = 0,
        num_preemptions: int = 0,
        run: str = "",
        lent_s: float | None = None,
        decoded_tokens: int | None = None,
    ) -> bool:
        """Update a worker; False when we do not know it (the node must register again)."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return False
        if seq <= worker.seq:
            return True  # reordered on the way: newer facts are already in the book
        worker.seq = seq
        worker.heard_at_s = at_s
        worker.until_s = until_s(worker, at_s, lent_s)
        if worker.unstamped:
            run = ""
        if (version, run) != (worker.version, worker.run):
            worker.version, worker.run = version, run
            worker.kv_epoch += 1
        if reclaim_seq > worker.reclaim_seq:
            worker.kv_epoch += 1
            worker.reclaim_seq = reclaim_seq
            worker.lending = LendingState.PRESSURE
            if (
                worker.job != "" and at_s < worker.until_s
            ):  # what goes back because somebody said so is no risk
                self._note_reclaim(worker, at_s)
        worker.kv_budget_tokens = kv_budget_tokens
        worker.kv_used_tokens = kv_used_tokens
        worker.running = running
        worker.waiting = waiting
        worker.num_preemptions = num_preemptions
        worker.pace.heard(at_s=at_s, decoded=decoded_tokens, load_s=worker.load_until(at_s))
        worker.gated = gated
        worker.slack_s = slack_s
        worker.serving_use += self.params.serving_ewma * (serving_use - worker.serving_use)
        if worker.limit is not None:
            kv_use = None
            if kv_budget_tokens and kv_used_tokens is not None:
                kv_use = kv_used_tokens / kv_budget_tokens
            worker.limit.heard(
                at_s=at_s,
                harvested=worker.tier is Tier.HARVESTED,
                kv_use=kv_use,
                inflight=worker.inflight,
                running=running,
                waiting=0 if gated else waiting,  # they wait for production, not for memory
                num_preemptions=num_preemptions,
            )
        inside = kv_budget_tokens is None or kv_used_tokens is None or kv_used_tokens <= kv_budget_tokens
        if worker.lending is LendingState.PRESSURE and inside:
            worker.lending = LendingState.FROZEN
        before = worker.health
        if state == "ready" and version is not None:
            worker.health = Health.READY
        elif worker.health is not Health.DEAD:
            worker.health = Health.JOINING
        self.changes += worker.health is not before
        self.table.sync(worker)
        return True

    def reclaimed(self, worker_id: str, at_s: float) -> None:
        """A turn came back cut before the heartbeat told us: forget what we thought was cached there."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.kv_epoch += 1
            self._note_reclaim(worker, at_s)
            self.table.sync(worker)

    def failed(self, worker: Worker, at_s: float) -> None:
        """The engine itself failed a request: no answer, an error, nonsense."""
        if worker.rests_until_s is not None:
            return  # sent before it was let rest
        worker.failures_in_a_row += 1
        beyond = worker.failures_in_a_row - self.params.rest_after_failures
        if beyond >= 0:
            rest_s = min(self.params.max_rest_s, self.params.rest_s * 2.0 ** min(beyond, 32))
            worker.rests_until_s = at_s + rest_s
            self.table.sync(worker)

    def unreachable(self, worker: Worker, at_s: float) -> None:
        """It takes no connections.  Its node may well go on saying that all is well."""
        worker.failures_in_a_row = max(worker.failures_in_a_row, self.params.rest_after_failures - 1)
        self.failed(worker, at_s)

    def answered(self, worker: Worker) -> None:
        """A request came to its end, or as far as production let it."""
        if worker.failures_in_a_row:
            worker.failures_in_a_row, worker.rests_until_s = 0, None
            if self.workers.get(worker.worker_id) is worker:
                self.table.sync(worker)

    def stamped(self, worker: Worker, run: str | None) -> None:
        """An answer of its engine said whose weights had sampled it; None: it did not, so what its node says of them is nothing."""
        worker.unstamped = run is None
        if run is None:
            worker.run = ""
            if self.workers.get(worker.worker_id) is worker:
                self.table.sync(worker)

    def thaw(self) -> None:
        """The trainer published a version: an RL step has passed, frozen budgets may grow again."""
        for worker in self.workers.values():
            if worker.lending is LendingState.FROZEN:
                worker.lending = LendingState.OPEN
                self.table.sync(worker)

    def set_duty(self, worker: Worker, duty: Duty) -> None:
        worker.duty = duty
        self.table.sync(worker)

    def set_cap(self, tier: Tier, cap: int) -> None:
        """A new default cap; a worker that named its own keeps it."""
        if tier is Tier.DEDICATED:
            self.params = replace(self.params, cap_dedicated=cap)
        else:
            self.params = replace(self.params, cap_harvested=cap)
        for worker in self.workers.values():
            if (worker.tier is Tier.HARVESTED) is (tier is Tier.HARVESTED) and not worker.has_own_cap:
                worker.cap = _at_most(cap, worker.max_num_seqs)
                if worker.limit is not None:
                    worker.limit.cap = worker.cap
                    worker.limit.limit = min(worker.limit.limit, float(worker.cap))
                self.table.sync(worker)

    def assign(self, worker: Worker, job: str | None) -> None:
        worker.job = job
        self.table.sync(worker)

    def forget(self, worker_id: str) -> None:
        if self.workers.pop(worker_id, None) is not None:
            self.changes += 1
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
        if worker.limit is not None:
            worker.limit.ended()
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
        self.changes += 1
        self.table.sync(worker)
        return [WorkerDown(worker_id=worker_id, reason=reason)]

    def tick(self, at_s: float) -> list[WorkerDown]:
        """Judge silence.  Call at least every ``suspect_s / 4``."""
        gap_s = 0.0 if self._ticked_at_s is None else at_s - self._ticked_at_s
        self._ticked_at_s = at_s
        if gap_s > self.params.clock_gap_s:
            for worker in self.workers.values():
                worker.heard_at_s = min(at_s, worker.heard_at_s + gap_s)
        for worker in self.workers.values():
            if worker.rests_until_s is not None and at_s >= worker.rests_until_s:
                worker.rests_until_s = None
                self.table.sync(worker)
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
                self.changes += 1
                self.table.sync(worker)
                down.append(WorkerDown(worker_id=worker.worker_id, reason="silent"))
            elif worker.health is Health.READY:
                worker.health = Health.SUSPECT
                self.changes += 1
                self.table.sync(worker)
                if worker.tier is not Tier.DEDICATED:
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
        self.table.set_tier(worker.tier.value, self.tier_speed[worker.tier])
        if self.workers.get(worker.worker_id) is worker:  # else it was replaced by a new incarnation
            self.table.sync_speed(worker)

    def _note_reclaim(self, worker: Worker, at_s: float) -> None:
        # A cut is told twice, by its turns and by the heartbeat; halving once is enough.
        if worker.limit is not None and at_s - (worker.reclaimed_at_s or -1e9) > 1.0:
            worker.limit.reclaimed()
        if worker.reclaimed_at_s is not None:
            since_s = max(at_s - worker.reclaimed_at_s, 0.1)
            keep = max(0.0, 1.0 - since_s / self.params.reclaim_ewma_s)
            worker.reclaim_rate = keep * worker.reclaim_rate + (1.0 - keep) / since_s
        worker.reclaimed_at_s = at_s

    def upgrade(self) -> None:
        """Complete the state of a decision log from before devices were borrowed."""
        for tier in Tier:
            self.tier_speed.setdefault(tier, Speed())

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())


def _at_most(cap: int, max_num_seqs: int | None) -> int:
    return cap if max_num_seqs is None else min(cap, max_num_seqs)
