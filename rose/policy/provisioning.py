"""Which device works for which job: activate where it pays, release what idles, one job per device.

A *host* is a device that could run a rollout engine: dedicated, or a share of a serving GPU.  A *job* may hold
up to ``n_dedicated`` and ``n_harvested`` of them.

- **Activate** when the gain beats the cost: with ``n`` devices and a backlog of ``b`` seconds, one more saves
  about ``b / (n + 1)`` seconds; that must exceed ``gain_factor`` times the host's switch cost (activation and
  weight pull).  The backlog is a rolling mean of three reports, so one spike does nothing.
- **Which host**: dedicated first; of the serving ones the lowest recent KV use (the paper's rule), then the
  fewest reclaims.  A serving GPU that is nearly full is no candidate.
- **Which job** first: the one with the fewest device-seconds per weight.  A job that wants a device when none
  is free takes one from a job that has had more than its share.
- **Release** when a device has idled for ``idle_s``, when its serving use says that production needs it, when
  the job is gone or its cap was lowered.
- **Hysteresis**: an activated device is kept for ``min_active_s`` at least, a released one rests for
  ``rest_s``.  A job keeps its last dedicated device.

Invariants, checked by :meth:`Provisioning.check`: a host works for at most one job; no job holds more of a tier
than its cap; what is held is known.

One door, :meth:`Provisioning.handle`.  Pure.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from rose.errors import PolicyError
from rose.policy.worker import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisioningParams:
    gain_factor: float = 1.5
    """Expected gain over switch cost that an activation must have."""
    switch_s: float = 5.0
    """Activation and weight pull, where a host has not measured its own."""
    idle_s: float = 30.0
    min_active_s: float = 20.0
    rest_s: float = 10.0
    num_backlogs: int = 3
    full_fraction: float = 0.8
    """Serving KV use at which a GPU is no longer taken; and released from, if it stays there."""
    unfair_s: float = 60.0
    """Device-seconds per weight by which a job must be ahead before a device is taken from it."""


# --- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSeen:
    """A host reports.  ``serving_use`` is the recent share of KV memory that production uses, 0 where none
    runs; ``busy`` says that the job's turns run there now."""

    at_s: float
    host: str
    tier: Tier
    serving_use: float = 0.0
    reclaim_rate: float = 0.0
    busy: bool = False
    switch_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGone:
    at_s: float
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSeen:
    """A new job, or new caps and weight of a known one."""

    at_s: float
    job: str
    n_dedicated: int
    n_harvested: int
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobGone:
    at_s: float
    job: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BacklogSeen:
    """``backlog_s``: how long the job's waiting turns would take on what it holds; inf when it holds none."""

    at_s: float
    job: str
    backlog_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Decide now."""

    at_s: float


Event = HostSeen | HostGone | JobSeen | JobGone | BacklogSeen | Tick


@dataclass(frozen=True, kw_only=True, slots=True)
class Activate:
    host: str
    job: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """``reason``: idle, pressure, cap, job_gone, fair_share."""

    host: str
    job: str
    reason: str


Action = Activate | Release


@dataclass(kw_only=True, slots=True)
class Host:
    host: str
    tier: Tier
    serving_use: float = 0.0
    reclaim_rate: float = 0.0
    switch_s: float | None = None
    job: str | None = None
    since_s: float = -math.inf
    """Of the last activation or release."""
    busy_at_s: float = 0.0
    full_since_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Job:
    job: str
    caps: dict[Tier, int]
    weight: float
    used_s: float = 0.0
    """Device-seconds held so far."""
    backlogs: deque[float] = field(default_factory=lambda: deque[float]())


@dataclass(kw_only=True, slots=True)
class Provisioning:
    params: ProvisioningParams = field(default_factory=ProvisioningParams)
    hosts: dict[str, Host] = field(default_factory=lambda: dict[str, Host]())
    jobs: dict[str, Job] = field(default_factory=lambda: dict[str, Job]())
    _now_s: float = -math.inf

    def handle(self, event: Event) -> list[Action]:
        """Raises:
        PolicyError: Time went back, or the event names an unknown job; nothing was changed.
        """
        if event.at_s < self._now_s:
            raise PolicyError(f"{event.at_s} s after {self._now_s} s: time went back", field="at_s")
        if isinstance(event, BacklogSeen | JobGone) and event.job not in self.jobs:
            raise PolicyError(f"job {event.job} is unknown", field="job")
        self._account(event.at_s)
        match event:
            case HostSeen():
                self._seen(event)
                return []
            case HostGone():
                self.hosts.pop(event.host, None)
                return []
            case JobSeen():
                return self._job(event)
            case JobGone():
                actions: list[Action] = []
                actions.extend(self._release(h, event.at_s, "job_gone") for h in self._held(event.job))
                del self.jobs[event.job]
                return actions
            case BacklogSeen():
                backlogs = self.jobs[event.job].backlogs
                backlogs.append(max(event.backlog_s, 0.0))
                while len(backlogs) > self.params.num_backlogs:
                    backlogs.popleft()
                return []
            case Tick():
                return [*self._shrink(event.at_s), *self._grow(event.at_s)]
            case _:
                assert_never(event)

    def held(self, job: str, tier: Tier | None = None) -> list[str]:
        """Hosts that work for ``job``, by name."""
        return [host.host for host in self._held(job) if tier in (None, host.tier)]

    # --- what is known ---------------------------------------------------------------------------------

    def _seen(self, event: HostSeen) -> None:
        host = self.hosts.get(event.host)
        if host is None or host.tier is not event.tier:
            host = self.hosts[event.host] = Host(host=event.host, tier=event.tier, busy_at_s=event.at_s)
        host.serving_use, host.reclaim_rate = event.serving_use, event.reclaim_rate
        host.switch_s = event.switch_s
        if event.busy:
            host.busy_at_s = event.at_s
        if event.serving_use < self.params.full_fraction:
            host.full_since_s = None
        elif host.full_since_s is None:
            host.full_since_s = event.at_s

    def _job(self, event: JobSeen) -> list[Action]:
        if event.n_dedicated < 0 or event.n_harvested < 0 or event.weight <= 0:
            raise PolicyError("caps must be 0 or more, and the weight above 0", field="job")
        caps = {Tier.DEDICATED: event.n_dedicated, Tier.HARVESTED: event.n_harvested}
        job = self.jobs.get(event.job)
        if job is None:
            # Starts level with the neediest: a newcomer gets its share, not everybody's past.
            shares = [known.used_s / known.weight for known in self.jobs.values()]
            job = self.jobs[event.job] = Job(job=event.job, caps=caps, weight=event.weight)
            job.used_s = min(shares, default=0.0) * event.weight
        job.caps, job.weight = caps, event.weight
        actions: list[Action] = []
        for tier, cap in caps.items():
            over = [host for host in self._held(event.job) if host.tier is tier][cap:]
            actions.extend(self._release(host, event.at_s, "cap") for host in over)
        return actions

    def _account(self, at_s: float) -> None:
        if math.isfinite(self._now_s):
            for host in self.hosts.values():
                if host.job is not None:
                    self.jobs[host.job].used_s += at_s - self._now_s
        self._now_s = at_s

    # --- deciding --------------------------------------------------------------------------------------

    def _shrink(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        params = self.params
        for host in sorted(self.hosts.values(), key=lambda h: (-h.serving_use, h.host)):
            if host.job is None or at_s - host.since_s < params.min_active_s:
                continue
            full = host.full_since_s is not None and at_s - host.full_since_s >= params.min_active_s
            idle = at_s - max(host.busy_at_s, host.since_s) >= params.idle_s
            if full:
                actions.append(self._release(host, at_s, "pressure"))
            elif idle and not self._wants(self.jobs[host.job], host) and self._may_spare(host):
                actions.append(self._release(host, at_s, "idle"))
        return actions

    def _grow(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        free = [
            host
            for host in self.hosts.values()
            if host.job is None
            and host.serving_use < self.params.full_fraction
            and at_s - host.since_s >= self.params.rest_s
        ]
        free.sort(key=lambda h: (h.tier is not Tier.DEDICATED, h.serving_use, h.reclaim_rate, h.host))
        for job in sorted(self.jobs.values(), key=_share):
            host = next((h for h in free if self._has_room(job, h.tier) and self._wants(job, h)), None)
            if host is not None:
                free.remove(host)
                host.job, host.since_s = job.job, at_s
                actions.append(Activate(host=host.host, job=job.job))
                # One device a tick and job: the next backlog already counts on it.
            elif self.hosts and (taken := self._unfair(job, at_s)) is not None:
                actions.append(self._release(taken, at_s, "fair_share"))
        return actions

    def _wants(self, job: Job, host: Host) -> bool:
        """Would this host gain the job more than it costs to switch?"""
        if not job.backlogs:
            return False
        num_held = len(self._held(job.job)) - (host.job == job.job)
        backlog_s = sum(job.backlogs) / len(job.backlogs)
        switch_s = self.params.switch_s if host.switch_s is None else host.switch_s
        return backlog_s / (num_held + 1) > self.params.gain_factor * switch_s

    def _unfair(self, job: Job, at_s: float) -> Host | None:
        """A host of a job that has had more than its share, which ``job`` could use."""
        richest = max(self.jobs.values(), key=_share)
        if _share(richest)[0] - _share(job)[0] <= self.params.unfair_s:
            return None
        for host in reversed(self._held(richest.job)):
            if (
                at_s - host.since_s >= self.params.min_active_s
                and self._may_spare(host)
                and self._has_room(job, host.tier)
                and self._wants(job, host)
            ):
                return host
        return None

    def _has_room(self, job: Job, tier: Tier) -> bool:
        return len(self.held(job.job, tier)) < job.caps[tier]

    def _may_spare(self, host: Host) -> bool:
        """A job's last dedicated device stays: it is what finishes the work when every GPU is taken back."""
        if host.tier is not Tier.DEDICATED or host.job is None:
            return True
        return len(self.held(host.job, Tier.DEDICATED)) > 1

    def _held(self, job: str) -> list[Host]:
        return sorted((h for h in self.hosts.values() if h.job == job), key=lambda h: (h.since_s, h.host))

    def _release(self, host: Host, at_s: float, reason: str) -> Release:
        assert host.job is not None
        action = Release(host=host.host, job=host.job, reason=reason)
        host.job, host.since_s = None, at_s
        return action

    def check(self) -> None:
        """Assert the invariants of the module docstring."""
        for host in self.hosts.values():
            assert host.job is None or host.job in self.jobs
        for job in self.jobs.values():
            for tier, cap in job.caps.items():
                assert len(self.held(job.job, tier)) <= cap
            assert job.used_s >= 0


def _share(job: Job) -> tuple[float, str]:
    return job.used_s / job.weight, job.job
