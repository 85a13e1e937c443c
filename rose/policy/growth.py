"""What serving's demand for KV pages has been lately: what a loan must leave it.

Demand is what requests hold *and* what serving asks for beyond that: use alone cannot grow past the memory
that is left, so it would call a burst small just where a loan made it wait.
"""

from __future__ import annotations

import math
from collections import deque

_NUM_BUCKETS = 32


class WindowMax:
    """The largest of the numbers of the last ``window_s`` seconds.

    Remembers by buckets of ``window_s / 32``, so memory is constant and a number is kept for the window and at
    most one bucket more.  The largest bucket is kept at hand, so all of them are looked at only when it grows too old.
    """

    _peak: tuple[float, int] = (math.nan, 0)
    """Start of the latest bucket that holds the largest number, and that number; NaN: not known."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / _NUM_BUCKETS
        self._buckets: deque[tuple[float, int]] = deque(maxlen=_NUM_BUCKETS + 1)

    def add(self, at_s: float, number: int) -> None:
        buckets = self._buckets
        start_s = at_s
        if buckets and at_s - buckets[-1][0] < self._bucket_s:
            start_s, most = buckets[-1]
            if number > most:
                buckets[-1] = (start_s, number)
        else:
            if len(buckets) == buckets.maxlen and buckets[0][0] == self._peak[0]:
                self._peak = (math.nan, 0)
            buckets.append((at_s, number))
        peak_s, peak = self._peak
        if number >= peak and not math.isnan(peak_s):
            self._peak = (start_s, number)

    def at(self, now_s: float) -> int:
        """0 where nothing was added."""
        oldest_s, bucket_s = now_s - self._window_s, self._bucket_s
        start_s, most = self._peak
        if not start_s + bucket_s >= oldest_s:
            start_s, most = math.nan, 0
            for at_s, number in self._buckets:
                if number >= most and at_s + bucket_s >= oldest_s:
                    start_s, most = at_s, number
            self._peak = (start_s, most)
        return most

    def forgotten_s(self, now_s: float) -> float:
        """When the largest number will be forgotten; a smaller one may follow it."""
        self.at(now_s)
        return self._peak[0] + self._bucket_s + self._window_s


class PeakGrowth:
    """The most that demand rose within a short horizon, over a long window; both times in seconds."""

    def __init__(self, window_s: float) -> None:
        self._recent: deque[tuple[float, int]] = deque(maxlen=1024)
        self._most = WindowMax(window_s)

    def add(self, at_s: float, demand_pages: int, horizon_s: float) -> None:
        """Demand is ``demand_pages`` now; compare it with the least of the last ``horizon_s``."""
        while len(self._recent) > 1 and self._recent[1][0] <= at_s - horizon_s:
            self._recent.popleft()
        self._recent.append((at_s, demand_pages))
        self._most.add(at_s, demand_pages - min(pages for _, pages in self._recent))

    def forget_recent(self) -> None:
        """What comes next does not continue what was before: a restart is no burst."""
        self._recent.clear()

    def peak_pages(self, now_s: float) -> int:
        return self._most.at(now_s)

    def forgotten_s(self, now_s: float) -> float:
        """When the peak will be forgotten; a smaller one may follow it."""
        return self._most.forgotten_s(now_s)
