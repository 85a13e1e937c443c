"""How much a trajectory still has to generate, from those of its job and kind of task that ended and from those that still run.

The estimate for one that has made ``t`` tokens is the mean of ``T - t`` over all with ``T > t``: with a heavy tail, the longer it has run
the longer it will.  In a step whose trajectories begin together the short ones end first, and the mean over those that ended says
that nobody has much left, just while it matters who has.  So whoever still runs counts as well: as one of whom no more is known than that it
is longer than what it has made (product-limit estimate, Kaplan and Meier 1958).  Where nobody has ended beyond, a trajectory is expected to make as
much again.  Lengths are kept in bins a quarter of an octave wide; old ones fade.  Until :data:`MIN_SAMPLES` have ended, nothing is predicted.

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
_MAX_HISTORIES = 256


def _bin(num_tokens: int) -> int:
    return 0 if num_tokens < 1 else 1 + int(_BINS_PER_OCTAVE * math.log2(num_tokens))


@dataclass(kw_only=True, slots=True)
class _Lengths:
    """By bin: how many ended and their tokens, and how many run that have made so much."""

    num: list[float] = field(default_factory=lambda: list[float]())
    tokens: list[float] = field(default_factory=lambda: list[float]())
    total: float = 0.0
    running: list[int] = field(default_factory=lambda: list[int]())
    _whole: list[float] = field(default_factory=lambda: list[float]())
    """By bin: expected whole length of one that reaches it; empty: to be computed."""

    def add(self, num_tokens: int) -> None:
        """One ended."""
        at = self._bin_of(num_tokens)
        self.num[at] += 1
        self.tokens[at] += num_tokens
        self.total += 1
        if self.total > _FADE_AT:
            self.num = [count / 2 for count in self.num]
            self.tokens = [count / 2 for count in self.tokens]
            self.total /= 2

    def has_made(self, num_tokens: int, more: int) -> None:
        """``more`` that run have made so much; below 0: no longer, or run no longer."""
        at = self._bin_of(num_tokens)
        self.running[at] = max(0, self.running[at] + more)  # of a history that was forgotten meanwhile

    def beyond(self, num_tokens: int) -> float:
        """Mean of what is left after ``num_tokens``; beyond all that was seen, as much again."""
        if not self._whole:
            self._whole = self._estimate()
        at = _bin(num_tokens) + 1
        return max(self._whole[at] - num_tokens if at < len(self._whole) else float(num_tokens), 1.0)

    def _bin_of(self, num_tokens: int) -> int:
        at, self._whole = _bin(num_tokens), []
        while len(self.num) <= at:
            self.num.append(0.0)
            self.tokens.append(0.0)
        while len(self.running) < len(self.num):
            self.running.append(0)
        return at

    def _estimate(self) -> list[float]:
        count = len(self.num)
        whole = [0.0] * count
        reach = 2.0 * 2.0 ** (count / _BINS_PER_OCTAVE)  # as much again as the last bin ends with
        ended = beyond = 0.0
        for at in range(count - 1, -1, -1):
            ended += self.num[at]
            # Who runs within a bin has not got through it yet, so it says nothing of who ends there.
            if ended:
                share = self.num[at] / (ended + beyond)
                mean = self.tokens[at] / self.num[at] if self.num[at] else 0.0
                reach = share * mean + (1.0 - share) * reach
            whole[at] = reach
            beyond += self.running[at] if at < len(self.running) else 0
        return whole


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
        before = self._made.pop(trajectory_id, (history, 0))
        self._runs(before, -1)
        now = self._made[trajectory_id] = (history, before[1] + num_tokens)
        self._runs(now, 1)
        if len(self._made) > self.max_entries:
            self._runs(self._made.popitem(last=False)[1], -1)

    def has_begun(self, trajectory_id: str) -> bool:
        """Has a turn of it ended?"""
        return trajectory_id in self._made

    def closed(self, trajectory_id: str) -> None:
        """It ended, whether finished or cancelled: a cancelled one was at least this long."""
        made = self._made.pop(trajectory_id, ("", 0))
        self._runs(made, -1)
        history, num_tokens = made
        if num_tokens:
            self._jobs[history].add(num_tokens)
            self._jobs.move_to_end(history)

    def _runs(self, made: tuple[str, int], more: int) -> None:
        history, num_tokens = made
        if not num_tokens:
            return
        lengths = self._jobs.get(history)
        if lengths is None and more < 0:
            return
        if lengths is None:
            lengths = self._jobs[history] = _Lengths()
            if len(self._jobs) > _MAX_HISTORIES:
                self._jobs.popitem(last=False)
        lengths.has_made(num_tokens, more)

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
