"""How much a trajectory still has to generate, from the trajectories of its job and kind of task that ended.

The estimate for one that has made ``t`` tokens is the mean of ``T - t`` over the ended ones with ``T > t``: with
a heavy tail, the longer it has run the longer it will.  Lengths are kept in bins a quarter of an octave wide; old
ones fade.  Until :data:`MIN_SAMPLES` have ended, nothing is predicted.

:meth:`Remaining.rank` says where an estimate stands among the recent ones: 1 is the longest.  That is what queue
order and tail pinning use, because it needs no unit.

Pure; bounded in size.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

MIN_SAMPLES = 50
_BINS_PER_OCTAVE = 4
_FADE_AT = 2000
"""Beyond so many ended trajectories all counts are halved: the policy learns, and lengths drift."""
_NUM_RECENT = 256


def _bin(num_tokens: int) -> int:
    return 0 if num_tokens < 1 else 1 + int(_BINS_PER_OCTAVE * math.log2(num_tokens))


@dataclass(kw_only=True, slots=True)
class _Lengths:
    num: list[float] = field(default_factory=lambda: list[float]())
    tokens: list[float] = field(default_factory=lambda: list[float]())
    total: float = 0.0

    def add(self, num_tokens: int) -> None:
        at = _bin(num_tokens)
        while len(self.num) <= at:
            self.num.append(0.0)
            self.tokens.append(0.0)
        self.num[at] += 1
        self.tokens[at] += num_tokens
        self.total += 1
        if self.total > _FADE_AT:
            self.num = [count / 2 for count in self.num]
            self.tokens = [count / 2 for count in self.tokens]
            self.total /= 2

    def beyond(self, num_tokens: int) -> float:
        """Mean of what is left after ``num_tokens``; beyond all that was seen, as much again."""
        at = _bin(num_tokens) + 1
        count = sum(self.num[at:])
        return max(sum(self.tokens[at:]) / count - num_tokens, 1.0) if count else max(float(num_tokens), 1.0)


@dataclass(kw_only=True, slots=True)
class Remaining:
    """Args:
    max_entries: Trajectories remembered; the oldest are forgotten first.
    """

    max_entries: int = 200_000
    _jobs: OrderedDict[str, _Lengths] = field(default_factory=lambda: OrderedDict[str, _Lengths]())
    _made: OrderedDict[str, tuple[str, int]] = field(
        default_factory=lambda: OrderedDict[str, tuple[str, int]]()
    )
    _recent: deque[float] = field(default_factory=lambda: deque[float]())
    _sorted: list[float] = field(default_factory=lambda: list[float]())

    def made(self, trajectory_id: str, history: str, num_tokens: int) -> None:
        """A turn of it ended with so many tokens."""
        before = self._made.pop(trajectory_id, (history, 0))[1]
        self._made[trajectory_id] = (history, before + num_tokens)
        if len(self._made) > self.max_entries:
            self._made.popitem(last=False)

    def closed(self, trajectory_id: str) -> None:
        """It ended, whether finished or cancelled: a cancelled one was at least this long."""
        history, num_tokens = self._made.pop(trajectory_id, ("", 0))
        if num_tokens:
            self._jobs.setdefault(history, _Lengths()).add(num_tokens)
            self._jobs.move_to_end(history)
            if len(self._jobs) > 256:
                self._jobs.popitem(last=False)

    def tokens(self, trajectory_id: str, history: str) -> float | None:
        """Expected further tokens, this turn's included; None while its kind has no history."""
        lengths = self._jobs.get(history)
        if lengths is None or lengths.total < MIN_SAMPLES:
            return None
        return lengths.beyond(self._made.get(trajectory_id, (history, 0))[1])

    def rank(self, trajectory_id: str, history: str) -> float:
        """Share of recent estimates that are smaller, in [0, 1]; 0 without an estimate.  Notes this one."""
        estimate = self.tokens(trajectory_id, history)
        if estimate is None:
            return 0.0
        below = bisect.bisect_left(self._sorted, estimate)
        rank = below / len(self._sorted) if self._sorted else 0.0
        bisect.insort(self._sorted, estimate)
        self._recent.append(estimate)
        if len(self._recent) > _NUM_RECENT:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        return rank
