"""How far turns have come on one engine, from its count of sampled tokens.

Where tokens are not streamed only the end of an attempt tells what it made.  Its engine's count, in the heartbeats, tells it before:
a decode step gives each running request one token, so what was sampled between two heartbeats, by the turns in flight, is how far
each of them came.

Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

_MAX_POINTS = 64


@dataclass(kw_only=True, slots=True)
class Pace:
    """Attributes:
    made: Tokens that a turn in flight here all the time would have made since the engine was registered.
    """

    made: float = 0.0
    _decoded: int | None = None
    _load_s: float = 0.0
    _points: list[tuple[float, float]] = field(default_factory=lambda: list[tuple[float, float]]())
    """(when, ``made``) of the latest heartbeats."""

    def heard(self, *, at_s: float, decoded: int | None, load_s: float) -> None:
        """A heartbeat.  ``decoded``: tokens that the engine has sampled since it started, None where nobody counts them; ``load_s``:
        integral of the turns in flight over time."""
        if decoded is None:
            self._decoded = None
            self._points.clear()
            return
        before, self._decoded = self._decoded, decoded
        turn_s, self._load_s = load_s - self._load_s, load_s
        if before is None or not self._points or decoded < before:
            self._points.clear()
        elif turn_s > 0:
            self.made += (decoded - before) / turn_s * (at_s - self._points[-1][0])
        self._points.append((at_s, self.made))
        del self._points[:-_MAX_POINTS]

    def since(self, at_s: float, made: float) -> float | None:
        """Tokens that a turn dispatched at ``at_s``, when :attr:`made` was ``made``, has made by the latest heartbeat; None where nobody
        counts, or nothing was heard since."""
        points = self._points
        if len(points) < 2 or points[-1][0] <= at_s:
            return None
        if points[0][0] < at_s:
            after = bisect_right(points, (at_s, math.inf))  # asked for each turn at each tick
            (from_s, low), (to_s, high) = points[after - 1], points[after]
            made = low + (high - low) * (at_s - from_s) / (to_s - from_s)
        return max(0.0, self.made - made)
