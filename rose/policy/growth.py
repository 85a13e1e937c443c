"""What serving's demand for KV pages has been lately: what a loan must leave it.

Demand is what requests hold *and* what serving asks for beyond that: use alone cannot grow past the memory
that is left, so it would call a burst small just where a loan made it wait.

Callers: ``rose.policy.lending``.
"""

from __future__ import annotations

import math
from collections import deque

_NUM_BUCKETS = 32


class WindowMax:
    """The largest of the numbers of the last ``window_s`` seconds.

    Remembers by buckets of ``window_s / 32``, so memory is constant and a number is kept for the window and at
    most one bucket more.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / _NUM_BUCKETS
        self._buckets: deque[tuple[float, int]] = deque(maxlen=_NUM_BUCKETS + 1)
        self._answer: tuple[float, int] = (math.nan, 0)
        """The last answer of :meth:`at` and its moment: one decision asks several times."""

    def add(self, at_s: float, number: int) -> None:
        self._answer = (math.nan, 0)
        if self._buckets and at_s - self._buckets[-1][0] < self._bucket_s:
            start_s, most = self._buckets[-1]
            self._buckets[-1] = (start_s, max(most, number))
        else:
            self._buckets.append((at_s, number))

    def at(self, now_s: float) -> int:
        """0 where nothing was added."""
        asked_s, most = self._answer
        if asked_s != now_s:
            oldest_s, bucket_s = now_s - self._window_s, self._bucket_s
            most = max((most for at_s, most in self._buckets if at_s + bucket_s >= oldest_s), default=0)
            self._answer = (now_s, most)
        return most


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
