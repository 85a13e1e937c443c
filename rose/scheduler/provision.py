"""Carry out provisioning: tell the policy what workers and jobs do, and give workers to jobs as it says.

A job's backlog in seconds is its waiting turns over the rate at which its turns end.  A worker that no job
wants is parked: it takes no turn, and its node is told (``active: false`` in the heartbeat's answer).

Decides nothing; that is ``rose.policy.provisioning``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field

from rose.policy import provisioning as pv
from rose.policy.worker import Health
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.scheduler_config import JobShare, ProvisioningConfig

log = logging.getLogger("rose.scheduler")

_RATE_EWMA = 0.2
_MAX_JOBS = 256
"""Names come from clients: beyond this many live jobs, new ones get no device until one ends."""


@dataclass(kw_only=True, slots=True)
class _Flow:
    """How fast a job's turns end."""

    seen_s: float
    num_done: int = 0
    rate_hz: float = 0.0


@dataclass(kw_only=True, slots=True)
class Provisioner:
    """``step()`` now and then; does something once per ``period_s``."""

    config: ProvisioningConfig
    dispatcher: Dispatcher
    policy: pv.Provisioning
    _flows: dict[str, _Flow] = field(default_factory=lambda: dict[str, _Flow]())
    _shares: dict[str, JobShare] = field(default_factory=lambda: dict[str, JobShare]())
    _stepped_s: float = -math.inf

    @classmethod
    def make(cls, config: ProvisioningConfig, dispatcher: Dispatcher) -> Provisioner:
        params = pv.ProvisioningParams(
            gain_factor=config.gain_factor,
            switch_s=config.switch_s,
            idle_s=config.idle_s,
            min_active_s=config.min_active_s,
            rest_s=config.rest_s,
        )
        return cls(config=config, dispatcher=dispatcher, policy=pv.Provisioning(params=params))

    def step(self) -> None:
        at_s = self.dispatcher.now_s()
        if not self.config.enabled or at_s < self._stepped_s + self.config.period_s:
            return
        period_s, self._stepped_s = at_s - self._stepped_s, at_s
        self._hosts(at_s)
        actions = self._jobs(at_s, period_s)
        actions += self.policy.handle(pv.Tick(at_s=at_s))
        for action in actions:
            match action:
                case pv.Activate():
                    log.info("worker %s works for job %s now", action.host, action.job)
                    self._assign(action.host, action.job)
                case pv.Release():
                    log.info("worker %s leaves job %s (%s)", action.host, action.job, action.reason)
                    self._assign(action.host, "")

    def _hosts(self, at_s: float) -> None:
        fleet = self.dispatcher.book.fleet
        living = {w.worker_id: w for w in fleet if w.health is not Health.DEAD}
        for name in [name for name in self.policy.hosts if name not in living]:
            self.policy.handle(pv.HostGone(at_s=at_s, host=name))
        for name, worker in living.items():
            self.policy.handle(
                pv.HostSeen(
                    at_s=at_s,
                    host=name,
                    tier=worker.tier,
                    serving_use=worker.serving_use,
                    reclaim_rate=worker.reclaim_rate,
                    busy=worker.inflight > 0,
                )
            )
            held_by = self.policy.hosts[name].job
            if worker.job != (held_by or ""):
                self._assign(name, held_by or "")

    def _jobs(self, at_s: float, period_s: float) -> list[pv.Action]:
        book, actions = self.dispatcher.book, list[pv.Action]()
        queued = Counter(book.turns[turn_id].spec.job for _, turn_id in book.queue)
        for job, num_running in list(book.num_running.items()):
            flow = self._flows.get(job)
            if flow is None:
                if len(self._flows) >= _MAX_JOBS:
                    continue
                flow = self._flows[job] = _Flow(seen_s=at_s)
            share = self.config.jobs.get(job, self.config.default)
            if self._shares.get(job) != share:
                self._shares[job] = share
                actions += self.policy.handle(
                    pv.JobSeen(
                        at_s=at_s,
                        job=job,
                        n_dedicated=share.n_dedicated,
                        n_harvested=share.n_harvested,
                        weight=share.weight,
                    )
                )
            num_done, flow.num_done = book.num_done[job] - flow.num_done, book.num_done[job]
            if math.isfinite(period_s):
                flow.rate_hz += _RATE_EWMA * (num_done / period_s - flow.rate_hz)
            if num_running:
                flow.seen_s = at_s
            elif at_s - flow.seen_s >= self.config.job_idle_s:
                actions += self.policy.handle(pv.JobGone(at_s=at_s, job=job))
                del self._flows[job], self._shares[job]
                book.forget_job(job)
                continue
            waiting = queued[job]
            backlog_s = 0.0 if not waiting else waiting / flow.rate_hz if flow.rate_hz > 0 else math.inf
            self.policy.handle(pv.BacklogSeen(at_s=at_s, job=job, backlog_s=backlog_s))
        return actions

    def _assign(self, worker_id: str, job: str) -> None:
        if worker_id in self.dispatcher.book.fleet.workers:
            self.dispatcher.assign(worker_id, job)
