"""Which device works for which job: one job per device, where it gains most, for as long as it gains.

A *host* is a device that could run a rollout engine: dedicated, borrowed from a trainer for a time, or a share of a serving GPU.
A *job* may hold up to ``n_dedicated``, ``n_borrowed`` and ``n_harvested`` of them.

**Gain.**  With ``n`` turns on ``k`` engines a job samples ``rate(n, k)`` tokens a second: an engine that has ``m`` turns makes
``m / (token_s + m * crowd_s)``, and no turn is on two engines.  One more host shortens what is to be done by the share
``1 - rate(n, k) / rate(n, k + 1)``; that share of ``hold_s`` (how long a demand is believed to last, or production to leave the
host alone, or its owner to leave it, or the job to sample, whichever is shorter), times the job's weight, is the host's gain in
seconds.  So a long queue gains much, and a tail of a few long turns gains nothing: where the engines have room for every turn, no
harvested one is added.  A job that will miss its deadline counts for more, in proportion to its delay, up to ``most_urgent`` times.

- **Activate** a host where the gain is above ``gain_factor`` times the cost of the switch.  The cost is the time of the host's last commit of
  weights and, unless it has a copy of the job's policy, of its last pull.  A measurement counts for less as it ages, so that one slow
  switch does not exclude a host for good.  A host that has the job's weights already, or whose job needs none, costs ``least_s``.
- **Adopt**: a host that registers with a job's weights works for that job at once, so a restarted scheduler finds its fleet as it was.
  A host with the weights of an unknown job is left alone for ``rest_s``: that job may be about to come back.
- **Which host**: dedicated first, then borrowed; then one that has the job's weights, or a copy of them, the lowest recent KV use of production
  (the paper's rule), the fewest reclaims.  A serving GPU that is nearly full, or will be before the switch has paid, is no candidate.
- **Which job** first: the one that has used the fewest device-seconds per weight.  A share that its job does not use goes to another job.
- **Phases.**  Jobs that roll out and train in turn are known by what they do (``rose.policy.phases``).  With ``phases``, one that is about to sample again gets idle
  hosts in time for the switch, and two that fit take turns on their hosts (``rose.policy.pairing``).
- **Away** is a job whose trainer has no batch and that has had no turn for three times its longest pause so far (``job_idle_s`` while none
  is known).  It holds no host, and no other job waits for it.  What was learned of it and what it has used are kept, but its absence
  earns it no priority.
- **Move** a host from one job to another where the one gains more than the other loses, the switch included; or where the
  other has had more than its share by ``unfair_s``.
- **Release** a host
  - that has gained next to nothing for ``idle_s``;
  - that its production or its owner needs;
  - to which the job's weights did not come within ``arrive_s`` (it is not sent to that run again for a while, longer each time);
  - whose job is gone, or was given a lower cap.
- **Hysteresis**: a host works for a job for at least ``min_active_s``, and rests for ``rest_s`` after a release.  Keeping a host takes much
  less gain than activating one.  A job keeps its last dedicated host, unless another job has none and this one has no turn or has used
  more than its share.

Invariants, checked by :meth:`Provisioning.check`: a host works for at most one job, of its own model, and while it is lent; no job
holds more of a tier than its cap; what is held is known.

One door, :meth:`Provisioning.handle`.  Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from rose.errors import PolicyError
from rose.policy.pairing import Pairing
from rose.policy.phases import Phases
from rose.policy.provisioning_events import (
    Action,
    Activate,
    Adopt,
    DecideNow,
    Event,
    HostGone,
    HostSeen,
    JobGone,
    JobSeen,
    LoadSeen,
    Release,
)
from rose.policy.provisioning_hosts import MAX_REFUSED, Host, ProvisioningParams
from rose.policy.worker import Tier


@dataclass(kw_only=True, slots=True)
class Job:
    job: str
    caps: dict[Tier, int]
    weight: float
    model: str = ""
    run: str = ""
    used_s: float = 0.0
    """Device-seconds held so far."""
    hosts: dict[str, Host] = field(default_factory=lambda: dict[str, Host]())
    """That work for it."""
    num: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    """Of these by tier."""
    speed: float = 0.0
    """Of these together."""
    loads: deque[LoadSeen] = field(default_factory=lambda: deque[LoadSeen]())
    phases: Phases = field(default_factory=Phases)
    is_next: bool = False
    """It is about to sample again."""
    urgency: float = 1.0
    busy_s: float = math.inf
    """When it last had a turn or a batch; of one that an older log knows, not yet."""
    is_away: bool = False
    ahead_s: float = 0.0
    """Of the neediest by so many device-seconds, when it went away."""

    @property
    def num_turns(self) -> float:
        seen = sum(load.num_turns for load in self.loads) / len(self.loads) if self.loads else 0.0
        return max(seen, self.phases.num_turns) if self.is_next else seen

    @property
    def open_engines(self) -> tuple[float, float]:
        """Its part of what is everybody's: how many, and their speed."""
        return (self.loads[-1].num_open, self.loads[-1].open_speed) if self.loads else (0.0, 0.0)

    def rate(self, num_engines: float, speed: float) -> float:
        """Tokens a second that its turns make on so many engines with this speed together."""
        turns = self.num_turns
        if not turns or not num_engines:
            return 0.0
        last, used = self.loads[-1], min(num_engines, turns)
        each = min(turns / used, float(last.slots))
        return speed * (used / num_engines) * each / (last.token_s + each * last.crowd_s)


@dataclass(kw_only=True, slots=True)
class Provisioning:
    params: ProvisioningParams = field(default_factory=ProvisioningParams)
    hosts: dict[str, Host] = field(default_factory=lambda: dict[str, Host]())
    jobs: dict[str, Job] = field(default_factory=lambda: dict[str, Job]())
    pairing: Pairing = field(default_factory=Pairing)
    _now_s: float = -math.inf

    def handle(self, event: Event) -> list[Action]:
        """Raises:
        PolicyError: Time went back, or the event names an unknown job; nothing was changed.
        """
        if event.at_s < self._now_s:
            raise PolicyError(f"{event.at_s} s after {self._now_s} s: time went back", field="at_s")
        if isinstance(event, LoadSeen | JobGone) and event.job not in self.jobs:
            raise PolicyError(f"job {event.job} is unknown", field="job")
        self._account(event.at_s)
        match event:
            case HostSeen():
                return self._seen(event)
            case HostGone():
                gone = self.hosts.pop(event.host, None)
                if gone is not None and gone.job is not None:
                    self._part(gone)
                return []
            case JobSeen():
                return self._job(event)
            case JobGone():
                actions: list[Action] = []
                actions.extend(self._release(h, event.at_s, "job_gone") for h in self._held(event.job))
                del self.jobs[event.job]
                self._pair()
                return actions
            case LoadSeen():
                job = self.jobs[event.job]
                job.loads.append(event)
                while len(job.loads) > self.params.num_loads:
                    job.loads.popleft()
                job.phases.saw(event.at_s, event.num_turns, self._speed_of(event.job))
                if event.num_turns or event.is_training:
                    job.busy_s = event.at_s
                    if job.is_away:
                        job.is_away = False
                        job.used_s = self._least_used_s(job) + job.ahead_s
                return []
            case DecideNow():
                for job in self.jobs.values():  # sums of floats drift
                    job.speed = math.fsum(host.speed for host in job.hosts.values())
                left = self._leave(event.at_s)
                adopted = self._adopt(event.at_s)
                self._look_ahead(event.at_s)
                return [*left, *adopted, *self._shrink(event.at_s), *self._grow(event.at_s)]
            case _:
                assert_never(event)

    def held(self, job: str, tier: Tier | None = None) -> list[str]:
        """Hosts that work for ``job``, by name."""
        return [host.host for host in self._held(job) if tier in (None, host.tier)]

    def wanted(self, job: str) -> int:
        """Dedicated engines that would pay for this job's demand, whether they are there or not."""
        found, facts = 0, self.jobs[job]
        least = self.params.gain_factor * self.params.switch_s / self.params.hold_s
        while found < facts.num_turns:
            more = facts.rate(found + 1.0, found + 1.0)
            if (more - facts.rate(float(found), float(found))) / more * facts.weight <= least:
                break
            found += 1
        return found

    # --- what is known ---------------------------------------------------------------------------------

    def _seen(self, event: HostSeen) -> list[Action]:
        host = self.hosts.get(event.host)
        actions: list[Action] = []
        if host is not None and host.job is not None and (host.tier, host.model) != (event.tier, event.model):
            actions.append(self._release(host, event.at_s, "cap"))
        if host is None or host.tier is not event.tier:
            host = self.hosts[event.host] = Host(
                host=event.host,
                tier=event.tier,
                serving_use=event.serving_use,
                first_s=event.at_s,
                seen_s=event.at_s,
            )
        spent_s = event.at_s - host.seen_s
        if spent_s > 0:
            slope = (event.serving_use - host.serving_use) / spent_s
            host.use_per_s += (1.0 - math.exp(-spent_s / self.params.trend_s)) * (slope - host.use_per_s)
        host.seen_s = event.at_s
        if host.job is not None:
            self.jobs[host.job].speed += event.speed - host.speed
        host.model, host.run, host.speed = event.model, event.run, event.speed
        host.serving_use, host.reclaim_rate = event.serving_use, event.reclaim_rate
        host.left_s = event.left_s
        host.measured(event)
        host.refused.pop(event.run, None)
        if host.left_s <= 0 and host.job is not None:
            actions.append(self._release(host, event.at_s, "returned"))
            host.since_s = -math.inf  # lent again, it may be taken at once
        if event.serving_use < self.params.full_fraction:
            host.full_since_s = None
        elif host.full_since_s is None:
            host.full_since_s = event.at_s
        return actions

    def _job(self, event: JobSeen) -> list[Action]:
        caps = {
            Tier.DEDICATED: event.n_dedicated,
            Tier.HARVESTED: event.n_harvested,
            Tier.BORROWED: event.n_borrowed,
        }
        if min(caps.values()) < 0 or event.weight <= 0:
            raise PolicyError("caps must be 0 or more, and the weight above 0", field="job")
        job = self.jobs.get(event.job)
        if job is None:
            job = Job(job=event.job, caps=caps, weight=event.weight, busy_s=event.at_s)
            job.used_s = self._least_used_s(job)
            self.jobs[event.job] = job
        job.caps, job.weight, job.model, job.run = caps, event.weight, event.model, event.run
        held = self._held(event.job)
        over = [host for host in held if host.model != job.model]
        for tier, cap in caps.items():
            over += [host for host in held if host.tier is tier and host not in over][cap:]
        return [self._release(host, event.at_s, "cap") for host in over]

    def _least_used_s(self, job: Job) -> float:
        """Level with the neediest of the others: who comes gets its share, not everybody's past."""
        others = [one for one in self.jobs.values() if one is not job and not one.is_away]
        alone_s = max(0.0, job.used_s - job.ahead_s) / job.weight
        return min((one.used_s / one.weight for one in others), default=alone_s) * job.weight

    def _account(self, at_s: float) -> None:
        if math.isfinite(self._now_s):
            for host in self.hosts.values():
                if host.job is not None:
                    self.jobs[host.job].used_s += at_s - self._now_s
        self._now_s = at_s

    # --- what is expected ------------------------------------------------------------------------------

    def _speed_of(self, job: str) -> float:
        facts = self.jobs[job]
        return facts.speed + facts.open_engines[1]

    def _phases(self) -> Mapping[str, Phases]:
        return {name: job.phases for name, job in self.jobs.items() if not job.is_away}

    def _pair(self) -> None:
        def speed(job: str, partner: str) -> float:
            """With its own dedicated hosts, and all others that the two have or could take."""
            return sum(
                host.speed
                for host in self.hosts.values()
                if host.job == job
                or (
                    (host.job in (partner, None) and host.tier is not Tier.DEDICATED)
                    and host.model == self.jobs[job].model
                )
            )

        if self.params.phases:
            self.pairing.match(self._phases(), {name: job.model for name, job in self.jobs.items()}, speed)

    def _look_ahead(self, at_s: float) -> None:
        self._pair()
        for job in self.jobs.values():
            phases, load = job.phases, job.loads[-1] if job.loads else None
            left_s = phases.left_s(at_s, self._speed_of(job.job))
            waits = not phases.is_sampling and not job.is_away
            job.is_next = (
                self.params.phases and waits and left_s is not None and left_s <= self.params.switch_s
            )
            job.urgency = 1.0
            if load is not None and phases.is_sampling and left_s is not None and load.deadline_s < left_s:
                job.urgency = min(self.params.most_urgent, left_s / max(load.deadline_s, 1e-9))

    def _lasts_s(self, job: Job, at_s: float) -> float:
        """How long the demand of now is believed to last."""
        if not job.phases.is_sampling or not self.params.phases:
            return self.params.hold_s
        left_s = job.phases.left_s(at_s, self._speed_of(job.job))
        return self.params.hold_s if left_s is None else min(self.params.hold_s, left_s)

    # --- deciding --------------------------------------------------------------------------------------

    def _leave(self, at_s: float) -> list[Action]:
        """Jobs that are away give back what they have."""
        actions: list[Action] = []
        for job in self.jobs.values():
            if job.is_away:
                continue
            known_s = job.phases.gone_after_s
            if at_s - job.busy_s > (self.params.job_idle_s if known_s is None else known_s):
                job.ahead_s = 0.0
                job.ahead_s = max(0.0, job.used_s - self._least_used_s(job))
                job.is_away = True
                actions.extend(self._release(host, at_s, "job_gone") for host in self._held(job.job))
        return actions

    def _shrink(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        params = self.params
        for host in sorted(self.hosts.values(), key=lambda h: (-h.serving_use, h.host)):
            if host.job is None:
                continue
            job = self.jobs[host.job]
            if self._is_without(job, host, at_s):
                host.refuse(job.run, at_s, params)
                actions.append(self._release(host, at_s, "no_weights"))
                continue
            if self._loss_s(job, host) > params.gain_factor * params.least_s:
                host.worth_s = at_s
            if at_s - host.since_s < params.min_active_s:
                continue
            full = host.full_since_s is not None and at_s - host.full_since_s >= params.min_active_s
            if full:
                actions.append(self._release(host, at_s, "pressure"))
            elif at_s - max(host.worth_s, host.since_s) >= params.idle_s and self._may_spare(host):
                actions.append(self._release(host, at_s, "idle"))
        return actions

    def _is_without(self, job: Job, host: Host, at_s: float) -> bool:
        """It has waited for its job's weights too long to count on them."""
        if not job.run or host.run == job.run:
            host.without_s = None
            return False
        if host.without_s is None:
            host.without_s = at_s
        grace_s = max(self.params.arrive_s, 2.0 * host.cost_s(job.run, at_s, self.params))
        return at_s - host.without_s >= grace_s

    def _adopt(self, at_s: float) -> list[Action]:
        """Hosts that nobody has ever had here work for the job whose weights they have."""
        actions: list[Action] = []
        for host in self.hosts.values():
            if host.job is not None or host.since_s > -math.inf or not host.run or host.left_s <= 0:
                continue
            found = [
                job
                for job in self.jobs.values()
                if not job.is_away
                and job.run == host.run
                and host.model == job.model
                and job.num[host.tier] < job.caps[host.tier]
            ]
            if found:
                job = min(found, key=_share)
                # Another may have it at once, if that is worth it.
                self._join(job, host, at_s - self.params.min_active_s)
                host.worth_s = at_s
                actions.append(Adopt(host=host.host, job=job.job))
        return actions

    def _grow(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        runs = {job.run for job in self.jobs.values()} | {""}
        for job in sorted(self.jobs.values(), key=_share):
            if job.is_away:  # what it last said of its turns is of before
                continue
            # One host a tick and job: the next report already counts on it.
            free = [
                host
                for host in self.hosts.values()
                if host.job is None
                and at_s - host.since_s >= self.params.rest_s
                and (host.run in runs or at_s - host.first_s >= self.params.rest_s)
                and self._may_take(job, host)
                and self._has_turn(job, host)
            ]
            free.sort(
                key=lambda h, run=job.run: (
                    _FIRST.index(h.tier), h.warmth(run), h.serving_use, h.reclaim_rate, h.host,
                )
            )  # fmt: skip
            found = next((host for host in free if self._net_s(job, host) > 0), None)
            if found is None:
                found, reason = self._other_s_host(job, at_s)
                if found is None:
                    continue
                actions.append(self._release(found, at_s, reason))
            actions.append(Activate(host=found.host, job=job.job, gain_s=self._net_s(job, found)))
            self._join(job, found, at_s)
        return actions

    def _other_s_host(self, job: Job, at_s: float) -> tuple[Host | None, str]:
        """A host that another job has, and why this one should have it: the gain, or the other's share."""
        best: tuple[float, str, Host, str] | None = None
        for host in self.hosts.values():
            if host.job in (None, job.job) or at_s - host.since_s < self.params.min_active_s:
                continue
            if not self._may_take(job, host):
                continue
            net_s = self._net_s(job, host)
            if net_s <= 0 or not self._has_turn(job, host):
                continue
            other = self.jobs[host.job]
            loss_s = self._loss_s(other, host)
            is_ahead = _share(other)[0] - _share(job)[0] > self.params.unfair_s
            if not self._may_spare(host) and (job.num[Tier.DEDICATED] or (loss_s > 0 and not is_ahead)):
                continue
            value_s, reason = net_s - loss_s, "value"
            if self.pairing.partner_of.get(job.job) == other.job:
                # It is this one's turn: the other's comes when this one trains.
                value_s, reason = net_s, "turn" if value_s <= 0 else "value"
            if value_s <= 0:
                if not is_ahead:
                    continue
                reason = "fair_share"
            if best is None or (value_s, host.host) > best[:2]:
                best = (value_s, host.host, host, reason)
        return (None, "") if best is None else best[2:]

    def _has_turn(self, job: Job, host: Host) -> bool:
        """It is its turn to have such a host; or its partner, whose turn it is, would gain nothing with it."""
        if self.pairing.has_turn(job.job, self._phases()):
            return True
        partner = self.jobs[self.pairing.partner_of[job.job]]
        if host.job == partner.job:
            return self._loss_s(partner, host) <= 0
        return not self._may_take(partner, host) or self._net_s(partner, host) <= 0

    def _may_take(self, job: Job, host: Host) -> bool:
        return (
            host.model == job.model
            and host.serving_use < self.params.full_fraction
            and job.num[host.tier] < job.caps[host.tier]
            and not host.is_refused(job.run, self._now_s)
        )

    def _net_s(self, job: Job, host: Host) -> float:
        """What a host that a job has not would gain it, less what it must at least."""
        before, after = self._rates(job, host)
        if after <= 0:
            return -math.inf
        params = self.params
        growth = max(host.use_per_s, 1e-9)
        left_s = max(0.0, (params.full_fraction - host.serving_use) / growth)
        cost_s = host.cost_s(job.run, self._now_s, params)
        lasts_s = self._lasts_s(job, self._now_s)
        gain_s = job.weight * job.urgency * max(0.0, min(lasts_s, left_s, host.left_s) - cost_s)
        gain_s *= 1.0 - before / after
        return gain_s - params.gain_factor * cost_s

    def _loss_s(self, job: Job, host: Host) -> float:
        """What a job would lose with a host that it has."""
        before, after = self._rates(job, host)
        if after <= 0:
            return 0.0
        return (1.0 - before / after) * job.weight * job.urgency * self._lasts_s(job, self._now_s)

    def _rates(self, job: Job, host: Host) -> tuple[float, float]:
        """Of a job without and with a host."""
        count, speed = job.open_engines
        count, speed = count + len(job.hosts), speed + job.speed
        if host.host in job.hosts:
            count, speed = count - 1, max(0.0, speed - host.speed)
        return job.rate(count, speed), job.rate(count + 1, speed + host.speed)

    def _may_spare(self, host: Host) -> bool:
        """A job's last dedicated device stays: it is what finishes the work when every GPU is taken back."""
        if host.tier is not Tier.DEDICATED or host.job is None:
            return True
        return self.jobs[host.job].num[Tier.DEDICATED] > 1

    def _held(self, job: str) -> list[Host]:
        facts = self.jobs.get(job)
        return [] if facts is None else sorted(facts.hosts.values(), key=lambda h: (h.since_s, h.host))

    def _join(self, job: Job, host: Host, since_s: float) -> None:
        host.job, host.since_s = job.job, since_s
        host.without_s = since_s if job.run and host.run != job.run else None
        job.hosts[host.host] = host
        job.num[host.tier] += 1
        job.speed += host.speed

    def _part(self, host: Host) -> None:
        assert host.job is not None
        job = self.jobs[host.job]
        del job.hosts[host.host]
        job.num[host.tier] -= 1
        job.speed -= host.speed
        host.job, host.without_s = None, None

    def _release(self, host: Host, at_s: float, reason: str) -> Release:
        assert host.job is not None
        action = Release(host=host.host, job=host.job, reason=reason)
        self._part(host)
        host.since_s = at_s
        return action

    def check(self) -> None:
        """Assert the invariants of the module docstring."""
        for host in self.hosts.values():
            assert host.job is None or self.jobs[host.job].model == host.model
            assert host.job is None or host.left_s > 0
            assert host.job is None or self.jobs[host.job].hosts.get(host.host) is host
            assert len(host.refused) <= MAX_REFUSED
        for job in self.jobs.values():
            for tier, cap in job.caps.items():
                assert len(self.held(job.job, tier)) == job.num[tier] <= cap
            assert job.used_s >= 0
            assert not job.hosts or not job.is_away
            assert all(
                self.hosts.get(name) is host and host.job == job.job for name, host in job.hosts.items()
            )
            assert abs(job.speed - sum(host.speed for host in job.hosts.values())) < 1e-6
        self.pairing.check(self.jobs)


_FIRST = (Tier.DEDICATED, Tier.BORROWED, Tier.HARVESTED)
"""Which device is taken, of several that would gain a job something."""


def _share(job: Job) -> tuple[float, str]:
    return job.used_s / job.weight, job.job
