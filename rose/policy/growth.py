"""What serving's demand for KV pages has been lately: what a loan must leave it.

Demand is what requests hold *and* what serving asks for beyond that: use alone cannot grow past the memory
that is left, so it would call a burst small just where a loan made it wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable

_NUM_BUCKETS = 32
_MAX_RISES = 32
"""Of a bucket."""
_MAX_ANSWERS = 8


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

    @property
    def window_s(self) -> float:
        return self._window_s

    @property
    def buckets(self) -> Iterable[tuple[float, int]]:
        """Start of each and its largest number, the oldest first."""
        return self._buckets

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
    """The most that demand rose within any short time, over a long window; times in seconds.

    Demand is a staircase: it is what it was told until it is told again.  A rise is kept with the time that it took, so that the
    question may be asked for any horizon, also one that is known only later: of each bucket those rises that none within less time reached.
    """

    _most: WindowMax | None = None
    """Of a decision log from before rises had a time."""

    def __init__(self, window_s: float) -> None:
        self._begin(window_s)

    def _begin(self, window_s: float) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / _NUM_BUCKETS
        self._recent: deque[tuple[float, int]] = deque()
        """Demand of before and until when it was so, where it was lower than ever after; the older, the lower."""
        self._now: int | None = None
        """Demand since the latest report."""
        self._rises: deque[tuple[float, list[tuple[float, int]]]] = deque(maxlen=_NUM_BUCKETS + 1)
        """Start of a bucket, and ``(took, pages)`` of its rises, both ascending."""
        self._answers: dict[float, tuple[float, int]] = {}
        """By horizon: start of the latest bucket that holds the largest rise, and that rise."""

    def add(self, at_s: float, demand_pages: int, longest_s: float) -> None:
        """Demand is ``demand_pages`` from now on; rises that took ``longest_s`` or more are not looked for."""
        recent, before = self._recent, self._now
        if before is not None:
            while recent and recent[-1][1] >= before:
                recent.pop()
            recent.append((at_s, before))
        while recent and recent[0][0] <= at_s - longest_s:
            recent.popleft()
        self._now = demand_pages
        rises = self._rises
        if not rises or at_s - rises[-1][0] >= self._bucket_s:
            if len(rises) == rises.maxlen:
                self._answers.clear()
            rises.append((at_s, []))
        known = rises[-1][1]
        grown = False
        for until_s, pages in reversed(recent):
            if pages < demand_pages:
                grown = _keep(known, at_s - until_s, demand_pages - pages) or grown
        if grown:
            self._answers.clear()

    def forget_recent(self) -> None:
        """What comes next does not continue what was before: a restart is no burst."""
        self._recent.clear()
        self._now = None

    def peak_pages(self, now_s: float, horizon_s: float) -> int:
        """The most that demand rose within less than ``horizon_s``."""
        return self._answer(now_s, horizon_s)[1]

    def forgotten_s(self, now_s: float, horizon_s: float) -> float:
        """When that will be forgotten; a smaller one may follow it.  Infinite where there was none."""
        return self._answer(now_s, horizon_s)[0] + self._bucket_s + self._window_s

    def upgrade(self) -> None:
        """Complete the state of an older decision log, whose rises were within a horizon, whatever that was: here within any."""
        old, self._most = self._most, None
        if old is not None:
            self._begin(old.window_s)
            self._rises.extend(
                (start_s, [(0.0, pages)] if pages > 0 else []) for start_s, pages in old.buckets
            )

    def _answer(self, now_s: float, horizon_s: float) -> tuple[float, int]:
        found = self._answers.get(horizon_s)
        oldest_s = now_s - self._window_s - self._bucket_s
        if found is None or found[0] < oldest_s:
            start_s, most = math.inf, 0
            for at_s, rises in self._rises:
                if at_s < oldest_s:
                    continue
                place = bisect_left(rises, (horizon_s, 0))
                if place and rises[place - 1][1] >= max(1, most):
                    start_s, most = at_s, rises[place - 1][1]
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            found = self._answers[horizon_s] = (start_s, most)
        return found


def _keep(rises: list[tuple[float, int]], took_s: float, pages: int) -> bool:
    """Add one to those of a bucket, unless as much was reached in as little time; whether it was added."""
    place = bisect_right(rises, (took_s, math.inf))
    if place and rises[place - 1][1] >= pages:
        return False
    end = place
    while end < len(rises) and rises[end][1] <= pages:
        end += 1
    while place and rises[place - 1][0] == took_s:
        place -= 1
    rises[place:end] = [(took_s, pages)]
    if len(rises) > _MAX_RISES:
        # The two that are nearest become the larger within the shorter time, to serving's side.
        gap = min(range(len(rises) - 1), key=lambda at: rises[at + 1][1] - rises[at][1])
        rises[gap : gap + 2] = [(rises[gap][0], rises[gap + 1][1])]
    return True
