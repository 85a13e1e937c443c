"""A host as provisioning believes it to be, what it costs to have it work for a job, and the settings of both.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rose.policy.provisioning_events import HostSeen
from rose.policy.worker import Tier

MAX_REFUSED = 64
"""Runs that a host remembers not to have got."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisioningParams:
    gain_factor: float = 1.5
    """Expected gain over switch cost that an activation must have."""
    hold_s: float = 60.0
    """How long the demand of now is believed to last."""
    switch_s: float = 5.0
    """Pull and commit together, where a host has not measured its own."""
    least_s: float = 1.0
    """What any activation costs; and a commit, where a host has not measured its own."""
    believe_s: float = 600.0
    """A measured cost counts for exp(-1) of itself after so long, and what is usual for the rest."""
    arrive_s: float = 120.0
    """How long a host may take to get the weights of its job, or twice what that is expected to cost."""
    again_s: float = 60.0
    """So long a host whose weights did not come is not ordered to the same run; twice as long after each further time."""
    most_again_s: float = 1800.0
    idle_s: float = 30.0
    min_active_s: float = 20.0
    rest_s: float = 10.0
    num_loads: int = 3
    """Reports whose mean counts, so that one spike does nothing."""
    full_fraction: float = 0.8
    """Serving KV use at which a GPU is no longer taken; and released from, if it stays there."""
    trend_s: float = 30.0
    """Over which the growth of production's use is smoothed."""
    most_urgent: float = 4.0
    job_idle_s: float = 120.0
    """A job without a turn or a batch for so long is away, where its phases do not say how long it may be."""
    phases: bool = False
    """Heed what was learned of a job's phases: look ahead, and take turns where two jobs fit."""
    unfair_s: float = 60.0
    """Device-seconds per weight by which a job must be ahead before a device is taken from it."""


@dataclass(kw_only=True, slots=True)
class Host:
    host: str
    tier: Tier
    model: str = ""
    run: str = ""
    speed: float = 1.0
    serving_use: float = 0.0
    left_s: float = math.inf
    use_per_s: float = 0.0
    """How fast production's use grows."""
    first_s: float = 0.0
    """When it was first seen."""
    seen_s: float = 0.0
    reclaim_rate: float = 0.0
    copies: tuple[str, ...] = ()
    num_switches: int = 0
    pull_s: float | None = None
    pulled_s: float = -math.inf
    """When that was measured."""
    commit_s: float | None = None
    committed_s: float = -math.inf
    job: str | None = None
    since_s: float = -math.inf
    """Of the last activation or release."""
    without_s: float | None = None
    """Since when it works for a job whose weights it has not."""
    refused: dict[str, tuple[int, float]] = field(default_factory=lambda: dict[str, tuple[int, float]]())
    """Runs whose weights did not come: how many times, and until when they are not asked for."""
    worth_s: float = 0.0
    """When it last gained its job something."""
    full_since_s: float | None = None

    def measured(self, event: HostSeen) -> None:
        """Take over what the host has measured, which may be nothing: it has started again."""
        is_new = event.num_switches != self.num_switches
        if event.pull_s != self.pull_s:
            self.pull_s, self.pulled_s = event.pull_s, event.at_s
        if is_new or event.commit_s != self.commit_s:
            self.commit_s, self.committed_s = event.commit_s, event.at_s
        self.num_switches, self.copies = event.num_switches, event.copies

    def cost_s(self, run: str, at_s: float, params: ProvisioningParams) -> float:
        """What it costs to have it work for a job of this run; empty: of a job that asks for no weights."""
        if not run or self.run == run:
            return params.least_s
        cost_s = _believed(self.commit_s, at_s - self.committed_s, params.least_s, params)
        if run not in self.copies:
            usual_s = max(0.0, params.switch_s - params.least_s)
            cost_s += _believed(self.pull_s, at_s - self.pulled_s, usual_s, params)
        return max(params.least_s, cost_s)

    def warmth(self, run: str) -> int:
        """0: it has these weights, or none are asked for; 1: a copy of them; 2: nothing."""
        return 0 if not run or self.run == run else 1 if run in self.copies else 2

    def is_refused(self, run: str, at_s: float) -> bool:
        return bool(run) and run in self.refused and at_s < self.refused[run][1]

    def refuse(self, run: str, at_s: float, params: ProvisioningParams) -> None:
        """These weights did not come."""
        times = self.refused.pop(run, (0, 0.0))[0]
        if len(self.refused) >= MAX_REFUSED:
            del self.refused[min(self.refused, key=lambda name: (self.refused[name][1], name))]
        wait_s = min(params.most_again_s, params.again_s * 2.0 ** min(times, 32))
        self.refused[run] = (times + 1, at_s + wait_s)


def _believed(found_s: float | None, age_s: float, usual_s: float, params: ProvisioningParams) -> float:
    """A measured time between what it was and what is usual, by its age."""
    if found_s is None:
        return usual_s
    return usual_s + (found_s - usual_s) * math.exp(-max(0.0, age_s) / params.believe_s)
