"""Decide how much of production's cold prefix cache may be lent: only what costs it less than one point of hit rate.

Memory that no request of production holds is seldom empty: it keeps prefixes that may be asked for again, and a loan makes the
cache smaller.  The caller counts two running totals, in prompt tokens: what production's prompts *queried*, and what they *lost*,
that is, would have found had nothing been lent.  Their ratio is the loss of hit rate, whatever traffic does meanwhile.

Main path: :meth:`ColdCache.see` takes the totals, how many pages are lent, and how many of these are *cold* (a prefix cache of the
whole device would fill them).  It answers how many pages may be lent now.

- Loss above ``max_loss_fraction``: half of the cold pages must come back.  The next verdict rests on what is counted from then on,
  which includes what is still missed of what was dropped before: that errs to production's side.
- Loss of at most half of that over a whole window: a step more may be lent.
- Fewer than ``min_tokens`` queried: no verdict.

Invariants, asserted by :meth:`ColdCache.check`: ``0 <= limit_pages <= num_pages``.  So while a loss goes on, nothing cold is lent
after ``log2(cold) + 1`` verdicts, and memory that no prefix would fill stays lent.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rose.errors import ConfigError, PolicyError

_SAMPLES_PER_WINDOW = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdCacheParams:
    """Raises ConfigError for a value out of range."""

    max_loss_fraction: float = 0.01
    """Of the tokens that prompts query: one point of hit rate."""
    window_s: float = 60.0
    min_tokens: int = 10_000
    """A loss of one point of fewer tokens is a prompt or two."""
    grow_fraction: float = 0.05
    """Of the device's pages: how much more may be lent after a window without loss."""

    def __post_init__(self) -> None:
        for name in ("max_loss_fraction", "grow_fraction"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{getattr(self, name)} is not in (0, 1]", field=name)
        if not 0.0 < self.window_s < math.inf:
            raise ConfigError(f"{self.window_s} is not a positive number", field="window_s")
        if self.min_tokens < 1:
            raise ConfigError(f"{self.min_tokens} is not positive", field="min_tokens")


class ColdCache:
    """The books of one serving engine of ``num_pages`` pages.

    Attributes:
        limit_pages: How many may be lent, cold or not.
        loss_fraction: Of the tokens queried in the window; None before there was a verdict.
    """

    def __init__(self, num_pages: int, params: ColdCacheParams | None = None) -> None:
        self.params = params or ColdCacheParams()
        self.num_pages = self.limit_pages = num_pages
        self.loss_fraction: float | None = None
        self._since_s = -math.inf
        """The last change of the limit: a verdict looks at nothing before it."""
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=_SAMPLES_PER_WINDOW + 2)
        self._last = (-math.inf, 0, 0)

    def see(
        self, at_s: float, *, queried_tokens: int, lost_tokens: int, lent_pages: int, cold_pages: int
    ) -> int:
        """Look once; how many pages may be lent now.

        Raises:
            PolicyError: Time or a total went backwards, or more is cold than lent.  Nothing has changed.
        """
        then_s, queried_before, lost_before = self._last
        if not at_s >= then_s:
            raise PolicyError(f"{at_s} s after {then_s} s", field="at_s")
        if queried_tokens < queried_before or lost_tokens < lost_before:
            raise PolicyError("a running total fell", field="queried_tokens or lost_tokens")
        if not 0 <= cold_pages <= lent_pages:
            raise PolicyError(f"{cold_pages} of {lent_pages} lent pages", field="cold_pages")
        self._last = (at_s, queried_tokens, lost_tokens)
        params, samples = self.params, self._samples
        if not samples:
            self._begin(at_s)
        elif at_s - samples[-1][0] >= params.window_s / _SAMPLES_PER_WINDOW:
            samples.append(self._last)
        while len(samples) > 1 and samples[1][0] <= at_s - params.window_s:
            samples.popleft()
        _, queried_then, lost_then = samples[0]
        queried = queried_tokens - queried_then
        if queried < params.min_tokens:
            return self.limit_pages
        self.loss_fraction = (lost_tokens - lost_then) / queried
        if self.loss_fraction > params.max_loss_fraction and lent_pages:
            self.limit_pages = min(self.limit_pages, lent_pages - cold_pages + cold_pages // 2)
            self._begin(at_s)
        elif (
            self.limit_pages < self.num_pages
            and at_s - self._since_s >= params.window_s
            and self.loss_fraction <= params.max_loss_fraction / 2
        ):
            step = math.ceil(params.grow_fraction * self.num_pages)
            self.limit_pages = min(self.num_pages, self.limit_pages + step)
            self._begin(at_s)
        return self.limit_pages

    def continues(self, *, num_pages: int, queried_tokens: int, lost_tokens: int) -> bool:
        """Are these the totals of the engine that was seen last?  One that started anew counts from nothing."""
        _, queried_before, lost_before = self._last
        return num_pages == self.num_pages and queried_tokens >= queried_before and lost_tokens >= lost_before

    def check(self) -> None:
        assert 0 <= self.limit_pages <= self.num_pages

    def _begin(self, at_s: float) -> None:
        self._since_s = at_s
        self._samples.clear()
        self._samples.append(self._last)
