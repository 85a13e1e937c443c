"""Provisioning on the turn book: tell the policy what workers and jobs do, and say which worker belongs to which job.

The daemon, the simulator and the benchmarks call :meth:`Assigner.step` about once a second and feed what it answers to the same
turn book.  A worker that no job wants is *parked* (the empty name): it takes no turn.

Pure; decides nothing itself (``rose.policy.provisioning`` does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rose.policy import provisioning as pv
from rose.policy.turn_events import WorkerAssigned
from rose.policy.turns import TurnBook
from rose.policy.worker import Health, Tier, Worker

MAX_JOBS = 256
"""Names come from clients: beyond this many live jobs, new ones get no device until one ends."""
_LEAST_SPEED = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one job may hold, and its weight where jobs compete."""

    n_dedicated: int
    n_harvested: int
    n_borrowed: int = 0
    weight: float = 1.0


@dataclass(kw_only=True, slots=True)
class Assigner:
    """Args:
    book: Whose fleet and jobs these are.
    share_of: Of a job, by name.
    job_idle_s: A job without a turn for this long gives its devices back.
    """

    book: TurnBook
    policy: pv.Provisioning
    share_of: Callable[[str], Share]
    job_idle_s: float = 120.0
    _told: dict[str, pv.JobSeen] = field(default_factory=lambda: dict[str, pv.JobSeen]())
    _busy_s: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """When a job last had a turn."""
    _models: dict[str, str] = field(default_factory=lambda: dict[str, str]())

    def step(self, at_s: float, switch_s: Mapping[str, float]) -> list[pv.Action]:
        """What the policy decides on the book as it is now; ``switch_s``: by worker, as measured."""
        actions = self._hosts(at_s, switch_s)
        actions += self._jobs(at_s)
        return actions + self.policy.handle(pv.Tick(at_s=at_s))

    def assignments(self, at_s: float) -> list[WorkerAssigned]:
        """What has to be told to the book, so that it does as the policy has decided."""
        hosts, events = self.policy.hosts, list[WorkerAssigned]()
        for worker in self.book.fleet:
            job = (hosts[worker.worker_id].job or "") if worker.worker_id in hosts else ""
            if worker.job != job:
                events.append(WorkerAssigned(at_s=at_s, worker_id=worker.worker_id, job=job))
        return events

    def _hosts(self, at_s: float, switch_s: Mapping[str, float]) -> list[pv.Action]:
        actions: list[pv.Action] = []
        living = {worker.worker_id: worker for worker in self.book.fleet if worker.health is not Health.DEAD}
        for name in [name for name in self.policy.hosts if name not in living]:
            actions += self.policy.handle(pv.HostGone(at_s=at_s, host=name))
        for name, worker in living.items():
            event = pv.HostSeen(
                at_s=at_s,
                host=name,
                tier=worker.tier,
                serving_use=worker.serving_use,
                reclaim_rate=worker.reclaim_rate,
                switch_s=switch_s.get(name),
                model=worker.model,
                run=worker.run,
                speed=self._speed(worker),
                left_s=worker.until_s - at_s,
            )
            actions += self.policy.handle(event)
        return actions

    def _speed(self, worker: Worker) -> float:
        """Of a dedicated worker's, by what was learned of both."""
        if worker.tier is Tier.DEDICATED:
            return 1.0
        base = self.book.fleet.tier_speed[Tier.DEDICATED]
        return max(_LEAST_SPEED, min(1.0, base.token_s / worker.speed.token_s))

    def _jobs(self, at_s: float) -> list[pv.Action]:
        book, actions = self.book, list[pv.Action]()
        speed = book.fleet.tier_speed[Tier.DEDICATED]
        deadlines: dict[str, float] = {}
        for turn in book.turns.values():
            spec = turn.spec
            if spec.job not in self._models:
                self._models[spec.job] = spec.model
            if spec.deadline_at_s is not None:
                left_s = max(0.0, spec.deadline_at_s - at_s)
                deadlines[spec.job] = min(left_s, deadlines.get(spec.job, math.inf))
        for job, num_turns in list(book.num_running.items()):
            if not job:
                continue  # requests of no trajectory: no trainer waits for them, and nobody says when they end
            if job not in self._busy_s:
                if len(self._busy_s) >= MAX_JOBS:
                    continue
                self._busy_s[job] = at_s
            if num_turns:
                self._busy_s[job] = at_s
            elif at_s - self._busy_s[job] >= self.job_idle_s:
                actions += self._gone(job, at_s)
                continue
            share = self.share_of(job)
            seen = pv.JobSeen(
                at_s=at_s,
                job=job,
                n_dedicated=share.n_dedicated,
                n_harvested=share.n_harvested,
                n_borrowed=share.n_borrowed,
                weight=share.weight,
                model=self._models.get(job, ""),
                run=book.runs.get(job, ""),
            )
            told = self._told.get(job)
            if told is None or _facts(told) != _facts(seen):
                self._told[job] = seen
                actions += self.policy.handle(seen)
            load = pv.LoadSeen(
                at_s=at_s,
                job=job,
                num_turns=num_turns,
                token_s=speed.token_s,
                crowd_s=speed.crowd_s,
                slots=book.fleet.params.cap_dedicated,
                deadline_s=deadlines.get(job, math.inf),
            )
            actions += self.policy.handle(load)
        return actions

    def _gone(self, job: str, at_s: float) -> list[pv.Action]:
        del self._busy_s[job]
        self._models.pop(job, None)
        self.book.forget_job(job)
        if self._told.pop(job, None) is None:
            return []
        return self.policy.handle(pv.JobGone(at_s=at_s, job=job))


def _facts(seen: pv.JobSeen) -> tuple[object, ...]:
    return seen.n_dedicated, seen.n_harvested, seen.n_borrowed, seen.weight, seen.model, seen.run
