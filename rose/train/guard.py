"""What keeps one step of training from doing harm.

A policy that has learned its tasks collapses like this: nearly all groups have equal rewards, so a batch teaches through one or two
failures; one failure among sixteen episodes has an advantage of -3.9; AdamW divides by the size that gradients have *lately* had, so it
makes a full step of however little is left, and every weight goes the same way, because nothing in the batch speaks against it.  What the
policy loses by that are the tasks that it had learned, which are not in the loss at all.  Clipping does not help: AdamW's step does not depend on a
gradient's scale.  So each part of the guard bounds something else:

- a batch of too few groups with unequal rewards changes nothing (:meth:`StepGuard.is_starved`);
- a batch some of whose groups have nothing left but to lose moves the policy as far as the others count (:meth:`StepGuard.share_of`): where three groups of four succeed as a whole
  the gradient is a quarter as long, and a step that depended on its length would be, too.  The rate is multiplied by that share, and
  ``kl_target``, which grows with the square of the way, by its square;
- a gradient is clipped at what is usual for the job (:meth:`StepGuard.grad_limit`);
- a step moves the policy at most ``kl_target`` away from where the step began.  Of its ``n`` updates, the first ``i`` together may use ``i / n`` of
  that (:meth:`StepGuard.allowed`): without shares the first minibatches would use all of it up, and the step would follow their noise.
  The distance is measured *after* each update, on sequences of every group, also of groups whose equal rewards taught nothing.  An update
  that goes too far is halved until it does not (:meth:`StepGuard.smaller`): the line search of TRPO (Schulman et al. 2015), around the
  optimiser's step;
- a job whose updates keep going too far takes smaller ones, and larger ones again as there is room (:attr:`StepGuard.rate_factor`).

(The last, the bound of the loss of tokens with negative advantage, is ``LossParams.dual_clip``.)

Pure.  Its state, the last gradient norms and the factor of the rate, is part of the checkpoint.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_HALVINGS = 4
"""Of one update; one that is too large even then is taken back whole."""
RATE_DOWN = 1.5
"""Divides the rate after an update that went too far."""
RATE_UP = 1.1
"""Multiplies it after one that left room."""
ROOM = 0.5
"""Part of what is allowed below which there is room."""
MIN_RATE_FACTOR = 1.0 / 256.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardParams:
    """Everything off: the bare formula.  A job's defaults are ``rose.train.trainer_settings.GuardSettings``."""

    kl_target: float = 0.0
    """Nats a token; 0 = off."""
    adapt_rate: bool = False
    """Only where there is a ``kl_target``."""
    min_informative: int = 0
    """Groups with unequal rewards that a batch needs; 0 = off."""
    proportional: bool = False
    """Whether a step goes less far where groups can only lose by it."""
    grad_quantile: float = 0.0
    """Of the last ``grad_window`` norms; 0 = off."""
    grad_window: int = 64


class StepGuard:
    """See the module's docstring."""

    def __init__(self, params: GuardParams) -> None:
        self.params = params
        self._norms: deque[float] = deque(maxlen=params.grad_window)
        self._rate_factor = 1.0

    @property
    def norms(self) -> tuple[float, ...]:
        """Gradient norms of the last updates, before clipping; the oldest first."""
        return tuple(self._norms)

    @property
    def rate_factor(self) -> float:
        """Of the learning rate, for the next update; at most 1."""
        return self._rate_factor if self.params.adapt_rate and self.params.kl_target else 1.0

    def restore(self, norms: Iterable[float], rate_factor: float = 1.0) -> None:
        self._norms.clear()
        self._norms.extend(norms)
        self._rate_factor = min(1.0, max(MIN_RATE_FACTOR, rate_factor))

    def is_starved(self, num_informative: int) -> bool:
        """Whether too few groups of a batch have unequal rewards to be learned from."""
        return num_informative < self.params.min_informative

    def share_of(self, num_solved: int, num_groups: int) -> float:
        """What part of a full step's way a batch may go of whose groups so many can only lose by it."""
        return 1.0 - num_solved / num_groups if self.params.proportional else 1.0

    @property
    def measures(self) -> bool:
        """Whether it wants to know how far a step has moved the policy."""
        return self.params.kl_target > 0.0

    def allowed(self, done: int, total: int, share: float = 1.0) -> float:
        """How far, in nats a token, ``done`` of a step's ``total`` updates may have moved the policy.

        Args:
            share: Of a full step's way: nats grow with its square.
        """
        return self.params.kl_target * share * share * done / total

    def smaller(self, kept: float, kl: float, allowed: float) -> float:
        """What part of the last update is to be kept, of which ``kept`` is in the weights now: the same where the policy is near enough.

        Args:
            kl: Between the weights that the step began with and those of now.
        """
        if kl <= allowed:  # what is no number is too far
            return kept
        return 0.5 * kept if kept > 0.5**MAX_HALVINGS else 0.0

    def updated(self, kl: float, allowed: float, *, shortened: bool) -> None:
        """An update has ended at ``kl`` from where the step began; ``shortened``: it would have gone too far."""
        factor = self._rate_factor
        if shortened:
            factor /= RATE_DOWN
        elif kl < ROOM * allowed:
            factor *= RATE_UP
        self._rate_factor = min(1.0, max(MIN_RATE_FACTOR, factor))

    def grad_limit(self, max_norm: float) -> float:
        """What the next gradient is clipped at."""
        if not self.params.grad_quantile or 4 * len(self._norms) < self.params.grad_window:
            return max_norm
        ordered = sorted(self._norms)
        return min(max_norm, ordered[round(self.params.grad_quantile * (len(ordered) - 1))])

    def saw(self, norm: float) -> None:
        """An update was made of a gradient of this norm."""
        self._norms.append(norm)


def probe_of(groups: Sequence[str], size: int, seed: int) -> list[int]:
    """Which sequences of a batch tell how far the policy has moved: ``size`` of them, one of every group before a second of any.

    Args:
        groups: The group of each sequence.
        seed: Another step draws others.
    """
    order = list(range(len(groups)))
    random.Random(seed).shuffle(order)
    nth: dict[str, int] = {}
    rounds: list[tuple[int, int]] = []
    for place, index in enumerate(order):
        nth[groups[index]] = nth.get(groups[index], -1) + 1
        rounds.append((nth[groups[index]], place))
    chosen = sorted(range(len(order)), key=lambda place: rounds[place])[:size]
    return sorted(order[place] for place in chosen)
