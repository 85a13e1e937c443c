"""How fast each worker is, learned from the attempts it finished.

An attempt that made ``n`` tokens beside ``c`` other turns (mean over its time), after reading ``p`` prompt
tokens that were not cached, took about::

    seconds = n * token_s + n * c * crowd_s + p * prefill_s

Three unknowns per worker, by recursive least squares with forgetting: a harvested worker's speed follows
production's load.  What is learned fades back to what its tier is like when the worker is not used, or a
worker that was slow once would never be tried again.

Pure; callers: ``rose.policy.fleet``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_FORGET = 0.97
"""Weight of the past at each observation: about the last 30 attempts count."""
_SCALE = (1e-2, 1e-3, 2e-4)
"""Typical sizes of the three, so that the first variances are of order one."""
_FIRST_VARIANCE = 4.0
_MAX_VARIANCE = 1e4
"""Directions that traffic does not exercise would otherwise blow up as the past is forgotten."""

Vector = list[float]


def _identity() -> list[Vector]:
    return [[_FIRST_VARIANCE if i == j else 0.0 for j in range(3)] for i in range(3)]


@dataclass(kw_only=True, slots=True)
class Speed:
    """Coefficients in seconds: per token, per token and companion, per uncached prompt token."""

    token_s: float = 0.02
    crowd_s: float = 0.0005
    prefill_s: float = 0.0004
    num_observed: int = 0
    observed_at_s: float = 0.0
    _variance: list[Vector] = field(default_factory=_identity)

    def observe(self, *, at_s: float, seconds: float, num_new: int, crowd: float, num_prefilled: int) -> None:
        """Learn from one finished attempt.  Relative error counts, so that short turns count as much."""
        features = (num_new, num_new * max(crowd, 0.0), num_prefilled)
        expected = sum(c * f for c, f in zip(self.coefficients(), features, strict=True))
        norm = max(expected, seconds, 1e-6)
        x = [f * s / norm for f, s in zip(features, _SCALE, strict=True)]
        error = (seconds - expected) / norm
        p = self._variance
        px = [sum(p[i][j] * x[j] for j in range(3)) for i in range(3)]
        gain = _FORGET + sum(px[i] * x[i] for i in range(3))
        if not math.isfinite(gain) or gain <= 0:
            self._variance = _identity()
            return
        step = [value / gain * error for value in px]
        self._variance = [
            [
                min(max((p[i][j] - px[i] * px[j] / gain) / _FORGET, -_MAX_VARIANCE), _MAX_VARIANCE)
                for j in range(3)
            ]
            for i in range(3)
        ]
        # A coefficient below zero would make some load free, and draw everything to it.
        self.token_s = max(self.token_s + step[0] * _SCALE[0], 1e-6)
        self.crowd_s = max(self.crowd_s + step[1] * _SCALE[1], 0.0)
        self.prefill_s = max(self.prefill_s + step[2] * _SCALE[2], 0.0)
        self.num_observed += 1
        self.observed_at_s = at_s

    def coefficients(self) -> tuple[float, float, float]:
        return self.token_s, self.crowd_s, self.prefill_s

    def seconds(self, *, num_new: float, crowd: float, num_prefilled: float) -> float:
        return num_new * (self.token_s + crowd * self.crowd_s) + num_prefilled * self.prefill_s

    def copy_of(self, at_s: float) -> Speed:
        """A new worker's first guess: what its tier is like."""
        return Speed(
            token_s=self.token_s, crowd_s=self.crowd_s, prefill_s=self.prefill_s, observed_at_s=at_s
        )
