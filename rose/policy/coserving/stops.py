"""When a rollout step that is under way stops between two layers, and when it goes on.

Admission (:mod:`rose.policy.admission`) keeps a step from starting that production would have to wait for; about a request that arrives while
one is under way it can do nothing.  Where steps take turns, such a step makes a prompt late that needs nearly all of its limit alone.  So
the step *stops* at its next layer while production owes a first token, and goes on in place from there: its keys, values and activations stay
where they are, nothing is computed again, and its requests notice a longer step.

It does not wait for ever.  Memory goes back only between two steps, so a step goes on to its end as soon as anybody wants any back; so it
does when production is gone, and when it has waited for as long as a prompt may take altogether.

Pure: no I/O, no clock.  Times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_WAIT_S = 2.0
"""Of one step, together, however long a first token may take."""
QUICK_S = 0.002
"""A stop is as quick as it is meant to be within so long of production's word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What the shared files say while a step stands between two layers."""

    serving_alive: bool
    owes_first: bool
    """A request of production's waits for its first token."""
    wanted_back: bool
    """Production claims memory, or the loan is less than what this engine holds."""


def longest_wait_s(slo_ttft_s: float) -> float:
    """Of one step; 0 where production promises nothing."""
    return min(max(0.0, slo_ttft_s), MAX_WAIT_S)


def must_wait(scene: Scene, waited_s: float, limit_s: float) -> bool:
    """Does the step stay where it is?  ``waited_s``: at all its stops so far."""
    return scene.serving_alive and scene.owes_first and not scene.wanted_back and waited_s < limit_s
