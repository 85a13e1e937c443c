"""How fast each worker is, learned from the attempts it finished.

An attempt that made ``n`` tokens beside ``c`` other turns (mean over its time), after reading ``p`` prompt
tokens that were not cached, took about::

    seconds = n * token_s + n * c * crowd_s + p * prefill_s

Each coefficient is corrected by its share in the prediction (a multiplicative gradient step on the logarithm
of the time).  So all stay positive, short and long turns count alike, and what the traffic does not show is
left alone: with short prompts ``prefill_s`` cannot drift to zero, which would make every prefix worthless.

The first attempts of a new machine tell how fast it is more than how its prices compare, so they correct all three alike, less and less, and as far as
the shares would.  Else
what the traffic hardly shows keeps its first guess: nearly every turn finds its prompt in the cache, and on an engine of eight H100 the
price of reading one stayed 20 times too high, so that turns waited on slow engines beside an empty fast one.

Learning is slow on purpose.  A harvested worker's speed follows production's bursts, and a turn that ran through a burst ends, and is
learned from, when the burst is nearly over.  A fast estimate would slow down after the burst and recover too late.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_RATE = 0.05
"""About the last 20 attempts count; so much of an error goes by share, and what a new machine's first attempts count beyond it, to all alike."""
_MAX_LOG_ERROR = 2.0
"""One attempt that hung must not undo what a hundred taught."""


@dataclass(kw_only=True, slots=True)
class Speed:
    """Coefficients in seconds: per token, per token and companion, per uncached prompt token.

    The first values are of no machine; only their order matters until something was measured.
    """

    token_s: float = 0.02
    crowd_s: float = 0.0005
    prefill_s: float = 0.0001
    num_observed: int = 0
    observed_at_s: float = 0.0

    def observe(self, *, at_s: float, seconds: float, num_new: int, crowd: float, num_prefilled: int) -> None:
        """Learn from one finished attempt."""
        parts = (num_new * self.token_s, num_new * crowd * self.crowd_s, num_prefilled * self.prefill_s)
        expected = sum(parts)
        if expected <= 0 or seconds <= 0:
            return
        error = min(max(math.log(seconds / expected), -_MAX_LOG_ERROR), _MAX_LOG_ERROR)
        # As far as the shares by themselves would have corrected the prediction.
        alike = max(0.0, 1.0 / (2.0 + self.num_observed) - _RATE) * error
        alike *= sum(part * part for part in parts) / (expected * expected)
        by_share = _RATE * error / expected
        self.token_s *= math.exp(alike + by_share * parts[0])
        self.crowd_s *= math.exp(alike + by_share * parts[1])
        self.prefill_s *= math.exp(alike + by_share * parts[2])
        self.num_observed += 1
        self.observed_at_s = at_s

    def coefficients(self) -> tuple[float, float, float]:
        return self.token_s, self.crowd_s, self.prefill_s

    def copy_of(self, at_s: float) -> Speed:
        """A new worker's first guess: what its tier is like."""
        return Speed(token_s=self.token_s, crowd_s=self.crowd_s, prefill_s=self.prefill_s, observed_at_s=at_s)
