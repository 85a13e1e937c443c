"""How fast serving's demand for KV pages has grown: what a loan must leave it.

Demand is what requests hold *and* what serving asks for beyond that: use alone cannot grow past the memory
that is left, so it would call a burst small just where a loan made it wait.

Callers: ``rose.policy.lending``.
"""

from __future__ import annotations

from collections import deque

_NUM_BUCKETS = 32


class PeakGrowth:
    """The most that demand rose within a short horizon, over a long window; both times in seconds.

    Remembers by buckets of ``window_s / 32``, so memory is constant and a peak is kept for the window and at
    most one bucket more.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / _NUM_BUCKETS
        self._recent: deque[tuple[float, int]] = deque(maxlen=1024)
        self._buckets: deque[tuple[float, int]] = deque(maxlen=_NUM_BUCKETS + 1)

    def add(self, at_s: float, demand_pages: int, horizon_s: float) -> None:
        """Demand is ``demand_pages`` now; compare it with the least of the last ``horizon_s``."""
        while len(self._recent) > 1 and self._recent[1][0] <= at_s - horizon_s:
            self._recent.popleft()
        self._recent.append((at_s, demand_pages))
        growth = demand_pages - min(pages for _, pages in self._recent)
        if self._buckets and at_s - self._buckets[-1][0] < self._bucket_s:
            start_s, most = self._buckets[-1]
            self._buckets[-1] = (start_s, max(most, growth))
        else:
            self._buckets.append((at_s, growth))

    def forget_recent(self) -> None:
        """What comes next does not continue what was before: a restart is no burst."""
        self._recent.clear()

    def peak_pages(self, now_s: float) -> int:
        oldest_s = now_s - self._window_s
        return max(
            (pages for start_s, pages in self._buckets if start_s + self._bucket_s >= oldest_s), default=0
        )
