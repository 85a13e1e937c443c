"""Provisioning on the turn book: tell the policy what workers and jobs do, and say which worker belongs to which job.

The daemon, the simulator and the benchmarks call :meth:`Assigner.step` about once a second and feed what it answers to the same
turn book.  Of workers that are everybody's (``rose.policy.contention``) the policy hears nothing.  One that it has a say over and no job
wants is *parked* (the empty name): it takes no turn.

Pure; decides nothing itself (``rose.policy.provisioning`` does).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rose.policy import provisioning_events as pe
from rose.policy.contention import open_to_all
from rose.policy.provisioning import Provisioning
from rose.policy.turn_events import WorkerAssigned
from rose.policy.turns import TurnBook
from rose.policy.worker import Health, Tier, Worker

MAX_JOBS = 256
"""Names come from clients: one more, and the job that has been away longest is forgotten; where none is, the new one gets no device."""
MAX_MODELS = 8
"""Of one job, whose turns are counted."""
_KEEP = 0.9
"""Of a count of turns, from one step to the next."""
_MARGIN = 1.5
"""So many times the turns of a job's model another one must have to become it."""
_LEAST_SPEED = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one job may hold, and its weight where jobs compete."""

    n_dedicated: int
    n_harvested: int
    n_borrowed: int = 0
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Switching:
    """What a worker's node says of changes of its run; see ``provisioning_events.HostSeen``."""

    pull_s: float | None = None
    commit_s: float | None = None
    num_switches: int = 0
    copies: tuple[str, ...] = ()


NOTHING_SAID = Switching()


@dataclass(kw_only=True, slots=True)
class JobModel:
    """Which base model a job's turns ask for: most of those of the last seconds, and not whichever came first."""

    name: str = ""
    _counts: dict[str, float] = field(default_factory=lambda: dict[str, float]())

    def saw(self, turns: Mapping[str, int]) -> None:
        """So many turns of each model are there now."""
        counts = {model: _KEEP * count for model, count in self._counts.items()}
        for model, count in turns.items():
            counts[model] = counts.get(model, 0.0) + count
        most = sorted(counts, key=lambda model: (-counts[model], model))[:MAX_MODELS]
        self._counts = {model: counts[model] for model in most}
        if most and counts[most[0]] > _MARGIN * counts.get(self.name, 0.0):
            self.name = most[0]


@dataclass(kw_only=True, slots=True)
class Assigner:
    """Args:
    book: Whose fleet and jobs these are.
    share_of: Of a job, by name.
    job_forget_s: So long after it gave its devices back, what was learned of a job is forgotten.
    is_training: Whether a trainer of this job has a batch.
    is_carried_out: False: nobody does what is decided; a device that a job would have is taken to get its weights.
    on_event: Told what the policy was told and answered.
    """

    book: TurnBook
    policy: Provisioning
    share_of: Callable[[str], Share]
    job_forget_s: float = 21_600.0
    is_training: Callable[[str], bool] = lambda job: False
    is_carried_out: bool = True
    on_event: Callable[[pe.Event, Sequence[pe.Action]], None] = lambda event, actions: None
    _told: dict[str, pe.JobSeen] = field(default_factory=lambda: dict[str, pe.JobSeen]())
    """Of jobs that are there."""
    _left_s: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """When those that are away went; longest ago first."""
    _models: dict[str, JobModel] = field(default_factory=lambda: dict[str, JobModel]())
    _open: set[str] = field(default_factory=lambda: set[str]())
    """Workers that are everybody's."""

    @property
    def jobs(self) -> list[str]:
        """Those that are there."""
        return list(self._told)

    def num_workers(self, job: str) -> int:
        """That work for this job, those that are everybody's included; or would, where nothing is carried out."""
        fleet, model = self.book.fleet.workers, self._told[job].model
        shared = sum(name in fleet and fleet[name].model == model for name in self._open)
        return len(self.policy.held(job)) + shared

    def step(self, at_s: float, switching: Mapping[str, Switching]) -> list[pe.Action]:
        """What the policy decides on the book as it is now.

        Args:
            switching: By worker.
        """
        actions = self._jobs(at_s)
        workers = [each for each in self.book.fleet if self._is_heard(each)]
        self._open = open_to_all(workers, self._told.values())
        actions += self._hosts(workers, at_s, switching)
        actions += self._loads(workers, at_s)
        actions += self._tell(pe.DecideNow(at_s=at_s))
        for job in [job for job in self._told if self.policy.jobs[job].is_away]:
            del self._told[job]
            self._left_s[job] = at_s
            self.book.forget_job(job)
        return actions

    def assignments(self, at_s: float) -> list[WorkerAssigned]:
        """What has to be told to the book, so that it does as the policy has decided."""
        hosts, events = self.policy.hosts, list[WorkerAssigned]()
        for worker in self.book.fleet:
            name = worker.worker_id
            if name not in hosts and name not in self._open:
                continue  # as it was
            job = None if name in self._open else hosts[name].job or ""
            if worker.job != job:
                events.append(WorkerAssigned(at_s=at_s, worker_id=name, job=job))
        return events

    def _is_heard(self, worker: Worker) -> bool:
        """What a worker has nobody knows before its engine is ready; until then it stays whose it was."""
        if worker.health is Health.JOINING:
            return worker.worker_id in self.policy.hosts
        return worker.health is not Health.DEAD

    def _tell(self, event: pe.Event) -> list[pe.Action]:
        actions = self.policy.handle(event)
        self.on_event(event, actions)
        return actions

    def _hosts(
        self, workers: Sequence[Worker], at_s: float, switching: Mapping[str, Switching]
    ) -> list[pe.Action]:
        actions: list[pe.Action] = []
        mine = {worker.worker_id: worker for worker in workers if worker.worker_id not in self._open}
        for name in [name for name in self.policy.hosts if name not in mine]:
            actions += self._tell(pe.HostGone(at_s=at_s, host=name))
        for name, worker in mine.items():
            said = switching.get(name, NOTHING_SAID)
            event = pe.HostSeen(
                at_s=at_s,
                host=name,
                tier=worker.tier,
                serving_use=worker.serving_use,
                reclaim_rate=worker.reclaim_rate,
                pull_s=said.pull_s,
                commit_s=said.commit_s,
                num_switches=said.num_switches,
                copies=said.copies,
                model=worker.model,
                run=worker.run,
                speed=self._speed(worker),
                left_s=worker.until_s - at_s,
            )
            known = self.policy.hosts.get(name)
            if not self.is_carried_out and known is not None and known.job is not None:
                event = replace(event, run=self.policy.jobs[known.job].run)
            actions += self._tell(event)
        return actions

    def _speed(self, worker: Worker) -> float:
        """Of a dedicated worker's, by what was learned of both."""
        if worker.tier is Tier.DEDICATED:
            return 1.0
        base = self.book.fleet.tier_speed[Tier.DEDICATED]
        return max(_LEAST_SPEED, min(1.0, base.token_s / worker.speed.token_s))

    def _jobs(self, at_s: float) -> list[pe.Action]:
        """Tell of jobs that are new, changed or gone."""
        book, actions = self.book, list[pe.Action]()
        for job in [job for job, left_s in self._left_s.items() if at_s - left_s >= self.job_forget_s]:
            actions += self._forget(job, at_s)
        turns: dict[str, dict[str, int]] = {}
        for turn in book.turns.values():
            of_job = turns.setdefault(turn.spec.job, {})
            of_job[turn.spec.model] = of_job.get(turn.spec.model, 0) + 1
        for job, num_turns in list(book.num_running.items()):
            if not job:
                continue  # requests of no trajectory: no trainer waits for them, and nobody says when they end
            if job not in self._models:
                if len(self._models) >= MAX_JOBS:
                    if not self._left_s:
                        continue
                    actions += self._forget(next(iter(self._left_s)), at_s)
                self._models[job] = JobModel()
            if num_turns:
                self._models[job].saw(turns.get(job, {}))
            self._left_s.pop(job, None)
            share = self.share_of(job)
            seen = pe.JobSeen(
                at_s=at_s,
                job=job,
                n_dedicated=share.n_dedicated,
                n_harvested=share.n_harvested,
                n_borrowed=share.n_borrowed,
                weight=share.weight,
                model=self._models[job].name,
                run=book.runs.get(job, ""),
            )
            told = self._told.get(job)
            if told is None or replace(told, at_s=at_s) != seen:
                self._told[job] = seen
                actions += self._tell(seen)
        return actions

    def _loads(self, workers: Sequence[Worker], at_s: float) -> list[pe.Action]:
        """Tell what the jobs have to do, and what they may do it on besides their own devices."""
        book, actions = self.book, list[pe.Action]()
        speed = book.fleet.tier_speed[Tier.DEDICATED]
        deadlines: dict[str, float] = {}
        for turn in book.turns.values():
            spec = turn.spec
            if spec.deadline_at_s is not None:
                left_s = max(0.0, spec.deadline_at_s - at_s)
                deadlines[spec.job] = min(left_s, deadlines.get(spec.job, math.inf))
        shared: dict[str, tuple[int, float]] = {}
        for worker in workers:
            if worker.worker_id in self._open and worker.may_take_turns:
                count, together = shared.get(worker.model, (0, 0.0))
                shared[worker.model] = count + 1, together + self._speed(worker)
        num_busy = Counter(told.model for job, told in self._told.items() if book.num_running[job])
        for job, told in self._told.items():
            count, together = shared.get(told.model, (0, 0.0))
            busy = num_busy[told.model] + (not book.num_running[job])
            actions += self._tell(
                pe.LoadSeen(
                    at_s=at_s,
                    job=job,
                    num_turns=book.num_running[job],
                    token_s=speed.token_s,
                    crowd_s=speed.crowd_s,
                    slots=book.fleet.params.cap_dedicated,
                    deadline_s=deadlines.get(job, math.inf),
                    num_open=count / busy,
                    open_speed=together / busy,
                    is_training=self.is_training(job),
                )
            )
        return actions

    def _forget(self, job: str, at_s: float) -> list[pe.Action]:
        del self._left_s[job], self._models[job]
        return self._tell(pe.JobGone(at_s=at_s, job=job))
