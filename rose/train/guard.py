"""What keeps one step of training from doing harm.

A policy that has learned its tasks collapses like this: nearly all groups have equal rewards, so a batch teaches through one or two
failures; one failure among sixteen episodes has an advantage of -3.9; its minibatch has several times the gradient that the
optimiser has become used to, AdamW's step follows it, and with more epochs the policy runs on in that direction, far from the
weights that sampled the batch.  Each part of the guard stops one link of it:

- a batch of too few groups with unequal rewards changes nothing (:meth:`StepGuard.is_starved`);
- a gradient is clipped at what is usual for the job (:meth:`StepGuard.grad_limit`);
- a step ends when the policy has moved ``kl_target`` away from where the step began (:meth:`StepGuard.has_gone_far`).

(The fourth, the bound of the loss of tokens with negative advantage, is ``LossParams.dual_clip``.)

Pure.  Its state, the last gradient norms, is part of the checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardParams:
    """Everything off: the bare formula.  A job's defaults are ``rose.train.trainer_settings.GuardSettings``."""

    kl_target: float = 0.0
    """Nats a token; 0 = off."""
    min_informative: int = 0
    """Groups with unequal rewards that a batch needs; 0 = off."""
    grad_quantile: float = 0.0
    """Of the last ``grad_window`` norms; 0 = off."""
    grad_window: int = 64


class StepGuard:
    """See the module's docstring."""

    def __init__(self, params: GuardParams) -> None:
        self.params = params
        self._norms: deque[float] = deque(maxlen=params.grad_window)

    @property
    def norms(self) -> tuple[float, ...]:
        """Gradient norms of the last updates, before clipping; the oldest first."""
        return tuple(self._norms)

    def restore(self, norms: Iterable[float]) -> None:
        self._norms.clear()
        self._norms.extend(norms)

    def is_starved(self, num_informative: int) -> bool:
        """Whether too few groups of a batch have unequal rewards to be learned from."""
        return num_informative < self.params.min_informative

    def has_gone_far(self, kl: float) -> bool:
        """Whether the step has moved the policy too far: no further update."""
        return 0.0 < self.params.kl_target < kl

    def grad_limit(self, max_norm: float) -> float:
        """What the next gradient is clipped at."""
        if not self.params.grad_quantile or 4 * len(self._norms) < self.params.grad_window:
            return max_norm
        ordered = sorted(self._norms)
        return min(max_norm, ordered[round(self.params.grad_quantile * (len(ordered) - 1))])

    def saw(self, norm: float) -> None:
        """An update was made of a gradient of this norm."""
        self._norms.append(norm)
