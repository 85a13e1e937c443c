"""The phases of a job that rolls out and trains in turn, learned from how many turns it has.

A job *samples* while it has turns.  Short gaps are normal, while every agent waits for its tools: only after ``settle_s`` without a turn
does the *other* phase (training and the like) count, from the first moment without one.  The length of a sampling phase is counted in
seconds of one dedicated engine, because its duration depends on how many engines the job has; the other phase is counted in seconds.
The median of the last few counts.  Nothing is configured, and nothing is predicted for a job that has not been seen to alternate.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

SETTLE_S = 5.0
NUM_KEPT = 5
"""Phases of each kind that count: a job's demand changes from step to step."""
LEAST_KNOWN = 2
GONE_FACTOR = 3.0
"""A job that has been away so many times as long as it ever was does not come back."""


def _kept() -> deque[float]:
    return deque(maxlen=NUM_KEPT)


def _median(values: Iterable[float]) -> float:
    """``statistics`` would bring ``random`` into the policies."""
    found = sorted(values)
    return (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2


@dataclass(kw_only=True, slots=True)
class Phases:
    """Fed by :meth:`saw`, in order of time."""

    settle_s: float = SETTLE_S
    is_sampling: bool = False
    since_s: float | None = None
    """Of the phase that it is in; None until it has had its first turn."""
    work: deque[float] = field(default_factory=_kept)
    """Of phases of sampling that have ended: seconds of a dedicated engine."""
    away_s: deque[float] = field(default_factory=_kept)
    done: float = 0.0
    """Of this phase of sampling, in the same unit."""
    num_turns: float = 0.0
    """Mean over its last phase of sampling that has ended."""
    _last_s: float = 0.0
    _turns: int = 0
    _turns_s: float = 0.0
    """Integral of its turns over this phase."""
    _quiet_s: float | None = None
    """When it was first seen without a turn, while it samples."""

    def saw(self, at_s: float, num_turns: int, speed: float) -> None:
        """It has so many turns, waiting or under way; since the last time it had engines of this speed together."""
        spent_s = at_s - self._last_s
        self._turns_s += self._turns * spent_s
        if self.is_sampling and self._quiet_s is None:
            self.done += speed * spent_s
        self._last_s, self._turns = at_s, num_turns
        if num_turns:
            self._quiet_s = None
            if not self.is_sampling:
                if self.since_s is not None:
                    self.away_s.append(at_s - self.since_s)
                self._enter(at_s, sampling=True)
        elif self.is_sampling:
            if self._quiet_s is None:
                self._quiet_s = at_s
            if at_s - self._quiet_s >= self.settle_s:
                ended_s = self._quiet_s
                self.num_turns = self._turns_s / max(ended_s - (self.since_s or 0.0), 1e-9)
                self.work.append(self.done)
                self._enter(ended_s, sampling=False)

    def _enter(self, at_s: float, *, sampling: bool) -> None:
        self.is_sampling, self.since_s = sampling, at_s
        self._quiet_s, self._turns_s, self.done = None, 0.0, 0.0

    @property
    def alternates(self) -> bool:
        """It has been seen to, often enough to say what comes next."""
        return min(len(self.work), len(self.away_s)) >= LEAST_KNOWN

    @property
    def usual_work(self) -> float:
        """Of a job that alternates."""
        return _median(self.work)

    @property
    def usual_away_s(self) -> float:
        """Of a job that alternates."""
        return _median(self.away_s)

    def left_s(self, at_s: float, speed: float) -> float | None:
        """Until the phase that it is in is expected to end, with engines of this speed; one that is overdue, as soon as a quarter of its
        kind.  None: nobody knows."""
        if not self.alternates or self.since_s is None:
            return None
        if not self.is_sampling:
            left_s = self.since_s + self.usual_away_s - at_s
            return left_s if left_s > 0 else self.usual_away_s / 4
        left = self.usual_work - self.done
        return (left if left > 0 else self.usual_work / 4) / speed if speed > 0 else None

    @property
    def gone_after_s(self) -> float | None:
        """A job without a turn for longer has never been away nearly so long: its trainer is dead, or it is done.  None: nobody knows."""
        return GONE_FACTOR * max(*self.away_s, self.settle_s) if self.alternates else None
