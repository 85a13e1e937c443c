"""Which jobs take turns on the same devices: one samples while the other trains.

Two jobs that want the same devices at the same time and get half of them each both sample for twice as long and then both train,
while all devices stand idle.  Where one waits for the other once, they alternate from then on: each has all devices while it samples,
and its waiting falls into its training (the round-robin groups of RollMux).

- **Pairs.**  Jobs of one model that have been seen to alternate (``rose.policy.phases``), and whose phases of sampling fit one after
  the other into the longer of their two cycles.  Of all such pairs the one that leaves the devices idle least is made first.  A
  pair stays until one of the two is gone, or they do not fit any more by a fifth.
- **Whose turn it is.**  Of a pair that both sample, the one that began first; until it has done twice its usual work, so that the other
  is not kept waiting by one that does not end.  The other gets what the first would not gain anything with.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rose.policy.phases import Phases

MOST_LOAD = 1.0
LOAD_TO_PART = 1.2
PATIENCE = 2.0

Speed = Callable[[str, str], float]
"""Of all engines that the first job would have while it samples and the second, its partner, trains."""


@dataclass(kw_only=True, slots=True)
class Pairing:
    """Call :meth:`match` now and then."""

    partner_of: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Both ways."""

    def match(self, phases: Mapping[str, Phases], models: Mapping[str, str], speed: Speed) -> None:
        """Make pairs of these jobs, and part those that do not fit any more.

        Args:
            models: Of each job.
        """
        for one, other in list(self.partner_of.items()):
            fits = one in phases and other in phases and models[one] == models[other]
            if not fits or _load(one, other, phases, speed) > LOAD_TO_PART:
                self.partner_of.pop(one, None)
                self.partner_of.pop(other, None)
        free = sorted(job for job in phases if job not in self.partner_of and phases[job].alternates)
        found = [
            (_load(one, other, phases, speed), one, other)
            for at, one in enumerate(free)
            for other in free[at + 1 :]
            if models[one] == models[other]
        ]
        for load, one, other in sorted(found, key=lambda each: (-each[0], *each[1:])):
            if load <= MOST_LOAD and one not in self.partner_of and other not in self.partner_of:
                self.partner_of[one], self.partner_of[other] = other, one

    def has_turn(self, job: str, phases: Mapping[str, Phases]) -> bool:
        """Whether ``job`` may have the devices that it shares with its partner; a job without one always may."""
        other = self.partner_of.get(job)
        return other is None or not _comes_first(phases[other], phases[job], tie=other < job)

    def check(self, jobs: Iterable[str]) -> None:
        """Pairs are of two known jobs, nobody is in two, and of two jobs at least one has its turn."""
        known = set(jobs)
        for one, other in self.partner_of.items():
            assert one != other
            assert self.partner_of[other] == one
            assert {one, other} <= known


def _load(one: str, other: str, phases: Mapping[str, Phases], speed: Speed) -> float:
    """Share of the longer cycle in which one of the two samples, where they take turns; above 1 it becomes longer."""
    mine, its = phases[one], phases[other]
    mine_s = mine.usual_work / max(speed(one, other), 1e-9)
    its_s = its.usual_work / max(speed(other, one), 1e-9)
    return (mine_s + its_s) / max(mine_s + mine.usual_away_s, its_s + its.usual_away_s, 1e-9)


def _comes_first(mine: Phases, its: Phases, *, tie: bool) -> bool:
    """The first of the two samples and has had less than twice its usual work, and the second does not sample, began later, or has."""
    if not mine.is_sampling or mine.since_s is None or mine.done > PATIENCE * mine.usual_work:
        return False
    if not its.is_sampling or its.since_s is None or its.done > PATIENCE * its.usual_work:
        return True
    return mine.since_s < its.since_s or (mine.since_s == its.since_s and tie)
