"""How many versions a sample may lag, from step to step: as few as keep the trainer busy, and none that the mismatch of engine and trainer forbids.

After each step :class:`AdaptiveAlpha` is told the mismatch (KL of what was trained on, in nats a token) and which share of the step the trainer waited, and
answers with the bound for the next one:

- a mismatch above its target halves the bound, whatever the trainer waits;
- a trainer that waits longer than its target raises it by one, where a mismatch that grows with the square of the lag would still be on target;
- a trainer that hardly waits (a quarter of the target) lowers it by one: samples would be old for nothing.

All three look at the means over the last ``window`` steps, and not before what is trained on was begun under the present bound.  Raising and lowering for
waiting wait twice as long after each change of direction, up to ``MAX_HOLD`` steps more, so that a job between two bounds does not go back and forth;
lowering for mismatch never does.

*Two bounds.*  ``alpha`` is for what is begun.  ``accepted`` is what counts as too old: it follows a lowered ``alpha`` only when everything that was begun
under the older one could be trained on, so that lowering throws nothing away.

Does not decide what becomes of a sample that is too old (``rose.policy.samples``).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

AlphaCause = Literal["settling", "hold", "mismatch", "idle", "fresher"]
"""Why a bound is what it is: not known yet, nothing to do, lowered for mismatch, raised for waiting, lowered for want of waiting."""
CHANGES: tuple[AlphaCause, ...] = ("mismatch", "idle", "fresher")

MAX_HOLD = 64
"""Steps, of the time between a change and one in the other direction that is not for mismatch; beyond what every change waits."""
FRESHER_BELOW = 0.25
"""Of the target: waiting that is as good as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaParams:
    """``least`` and ``most`` bound the bound; targets are means over ``window`` steps."""

    least: int = 1
    most: int = 8
    kl_target: float = 0.01
    """Nats per token."""
    idle_target: float = 0.1
    """Share of a step that the trainer waits."""
    window: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTaken:
    """What a step measured.  NaN: it did not."""

    mismatch_kl: float
    idle: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaDecision:
    """Bounds of the next step."""

    alpha: int
    accepted: int
    cause: AlphaCause


class AdaptiveAlpha:
    """See the module's docstring.

    Args:
        alpha: To begin with.
        accepted: What of before may be left over and is not too old; None = as ``alpha``.
    """

    def __init__(self, params: AlphaParams, alpha: int, accepted: int | None = None) -> None:
        self._params = params
        self._alpha = min(max(alpha, params.least), params.most)
        before = max(self._alpha, min(accepted or 0, params.most))
        self._past = deque([before] * params.most, maxlen=params.most)
        """Bounds of the steps so far, the newest first."""
        self._settled_in = self._alpha + 1
        """Steps until what is trained on was begun under the present bound."""
        self._held_for = 0
        """Steps from then on."""
        self._direction = 0
        self._hold = params.window
        self._measured: deque[StepTaken] = deque(maxlen=params.window)
        self.num_changes: dict[AlphaCause, int] = dict.fromkeys(CHANGES, 0)

    @property
    def alpha(self) -> int:
        """For what is begun now."""
        return self._alpha

    @property
    def accepted(self) -> int:
        """Beyond which a sample is too old now: nothing that was begun within its bound, and not yet due then."""
        due = (lag for lag, alpha in enumerate(self._past, start=1) if lag <= alpha)
        return max(self._alpha, *due, 0)

    def handle(self, event: StepTaken) -> AlphaDecision:
        """A step was taken under the bounds of the last decision; those of the next one."""
        self._past.appendleft(self._alpha)
        if self._settled_in:
            self._settled_in -= 1
            return self._decided("settling")
        self._held_for += 1
        if not (math.isnan(event.mismatch_kl) or math.isnan(event.idle)):
            self._measured.append(event)
        if len(self._measured) < self._params.window:
            return self._decided("settling")
        cause, alpha = self._wanted()
        if alpha == self._alpha:
            return self._decided("hold")
        self._change(alpha, cause)
        return self._decided(cause)

    def _wanted(self) -> tuple[AlphaCause, int]:
        params, alpha = self._params, self._alpha
        mismatch_kl = _mean([one.mismatch_kl for one in self._measured])
        idle = _mean([one.idle for one in self._measured])
        if mismatch_kl > params.kl_target:
            return "mismatch", max(params.least, alpha // 2)
        rise, fall = idle > params.idle_target, idle <= FRESHER_BELOW * params.idle_target
        if not (rise or fall) or not self._may_turn(1 if rise else -1):
            return "hold", alpha
        if fall:
            return "fresher", max(params.least, alpha - 1)
        if mismatch_kl * ((alpha + 2) / (alpha + 1)) ** 2 > params.kl_target:
            return "hold", alpha
        return "idle", min(params.most, alpha + 1)

    def _may_turn(self, direction: int) -> bool:
        return direction == self._direction or self._held_for >= self._hold

    def _change(self, alpha: int, cause: AlphaCause) -> None:
        direction = 1 if alpha > self._alpha else -1
        if self._direction and direction != self._direction:
            self._hold = min(2 * self._hold, self._params.window + MAX_HOLD)
        self._direction = direction
        self._settled_in = max(alpha, self._alpha) + 1
        self._held_for = 0
        self._alpha = alpha
        self._measured.clear()
        self.num_changes[cause] += 1

    def _decided(self, cause: AlphaCause) -> AlphaDecision:
        return AlphaDecision(alpha=self._alpha, accepted=self.accepted, cause=cause)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
