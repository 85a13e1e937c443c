"""Small books over production's reports: what could be harvested, how long a step takes at least, broken promises.

:class:`Harvestable` is what ``mode = observe`` is for: time-weighted, since it was last cleared.  :class:`SloGuard` says when
harvesting has to end by itself, :class:`StepFloor` which promise nobody could keep.  None decides about memory.

Pure: time arrives as ``at_s``.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rose.errors import ConfigError

_LONGEST_GAP_S = 5.0
"""A longer silence is not counted as time with the last value: nobody saw it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What could have been lent, in pages, and how much of the time production computed."""

    seconds: float
    mean_pages: float
    least_pages: int
    most_pages: int
    busy_fraction: float


class Harvestable:
    """Feed with :meth:`see` at every look."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._last: tuple[float, int, float] | None = None
        self._seconds = self._page_seconds = self._busy_s = 0.0
        self._owed_s = 0.0
        """Of steps that are over: what has not been counted, because a step is told when it ends and may be longer than many looks."""
        self._least, self._most = 0, 0

    def see(self, at_s: float, pages: int, busy_s: float) -> None:
        """``pages`` could be lent now; ``busy_s`` is production's running sum of step lengths.

        A time or a sum that went backwards (production restarted) begins a new stretch.
        """
        if self._last is not None:
            then_s, then_pages, then_busy_s = self._last
            gap_s = at_s - then_s
            if 0 < gap_s <= _LONGEST_GAP_S and busy_s >= then_busy_s:
                self._seconds += gap_s
                self._page_seconds += gap_s * then_pages
                self._owed_s += busy_s - then_busy_s
                counted_s = min(gap_s, self._owed_s)
                self._busy_s += counted_s
                self._owed_s -= counted_s
            else:
                self._owed_s = 0.0
        fresh = self._last is None
        self._least = pages if fresh else min(self._least, pages)
        self._most = pages if fresh else max(self._most, pages)
        self._last = (at_s, pages, busy_s)

    def report(self) -> Observed | None:
        """None before anything was seen for a while."""
        if self._seconds <= 0:
            return None
        return Observed(
            seconds=self._seconds,
            mean_pages=self._page_seconds / self._seconds,
            least_pages=self._least,
            most_pages=self._most,
            busy_fraction=min(1.0, self._busy_s / self._seconds),
        )


class SloGuard:
    """Trips after ``max_breaches`` within ``window_s``, counted only while something was lent; 0 = never trips.

    Raises:
        ConfigError: A value out of range.
    """

    def __init__(self, max_breaches: int, window_s: float) -> None:
        if max_breaches < 0:
            raise ConfigError(f"{max_breaches} is negative", field="max_slo_breaches")
        if not 0 < window_s < math.inf:
            raise ConfigError(f"{window_s} is not a positive number", field="slo_window_s")
        self._most, self._window_s = max_breaches, window_s
        self._seen: int | None = None
        self._breaches: deque[tuple[float, int]] = deque()
        self.total = 0

    def see(self, at_s: float, breaches: int, lent: bool) -> bool:
        """``breaches`` is production's running count.  True: harvesting must end now."""
        new = 0 if self._seen is None or breaches < self._seen else breaches - self._seen
        self._seen = breaches
        if new and lent:
            self._breaches.append((at_s, new))
            self.total += new
        while self._breaches and self._breaches[0][0] < at_s - self._window_s:
            self._breaches.popleft()
        return self._most > 0 and sum(count for _, count in self._breaches) >= self._most

    def forgive(self) -> None:
        """An operator switched harvesting on again."""
        self._breaches.clear()


class StepFloor:
    """The shortest steps that production has been seen to make while it had requests: no promise can be below."""

    _MOST = 512
    _FEWEST = 64

    def __init__(self) -> None:
        self._last_step = -1
        self._lengths_s: deque[float] = deque(maxlen=self._MOST)

    def see(self, step: int, step_s: float, running: int) -> None:
        """One look at the board; the same step is counted once."""
        if step != self._last_step and running > 0 and step_s > 0:
            self._lengths_s.append(step_s)
        self._last_step = step

    @property
    def floor_s(self) -> float | None:
        """The fifth percentile of the last steps; None before enough were seen."""
        if len(self._lengths_s) < self._FEWEST:
            return None
        return sorted(self._lengths_s)[len(self._lengths_s) // 20]
