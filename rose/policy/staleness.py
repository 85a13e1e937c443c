"""How far behind the weights a sample may be.

Versions are those of one run (``rose.lineage``): samples of another are no older or newer, but of another policy, and are
kept apart before anything here is asked.

Does not decide what happens to a stale sample (``rose.policy.samples``).
"""

from __future__ import annotations

from collections.abc import Iterable

from rose.lineage import Version


def lag(consuming: Version, sampled: Version) -> int:
    """Versions between a sample and the trainer that takes it.

    Within one attempt this is the plain difference, never below 0.  Across attempts both numbers are
    steps of the same schedule, so the distance counts in either direction: a sample of a *later* step
    of an abandoned attempt is just as far from the weights being trained.
    """
    if consuming[0] == sampled[0]:
        return max(0, consuming[1] - sampled[1])
    return abs(consuming[1] - sampled[1])


def set_back(version: Version, earlier: Version) -> int:
    """Steps by which an attempt is below what an earlier one had reached: it began anew from an older checkpoint, or from none."""
    return max(0, earlier[1] - version[1]) if version[0] > earlier[0] else 0


def is_spent(newest: Version, sampled: Version, alpha: int) -> bool:
    """Whether a sample is too old for a trainer at ``newest`` and will be for each later version.

    A sample of a *later* step of an abandoned attempt is not: the schedule is still to get there.
    """
    return newest[1] - sampled[1] > alpha


def ends(sampled: Iterable[Version]) -> tuple[Version, ...]:
    """The first and the last step of each attempt in ``sampled``: all that is to be known of them here.

    The first of an attempt is the oldest of it, and which attempt's is the oldest of all depends on the trainer; the last one of an abandoned
    attempt may be as far away in the other direction.
    """
    steps: dict[int, tuple[int, int]] = {}
    for attempt, step in sampled:
        first, last = steps.get(attempt, (step, step))
        steps[attempt] = (min(first, step), max(last, step))
    return tuple((attempt, step) for attempt in sorted(steps) for step in dict.fromkeys(steps[attempt]))


def worst_lag(consuming: Version, sampled: Iterable[Version]) -> int:
    """The lag of the stalest of ``sampled``; 0 when there is none."""
    return max((lag(consuming, version) for version in sampled), default=0)
