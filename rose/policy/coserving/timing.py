"""When production's work must start at the latest, so that its promises are kept, and when one is broken: one formula, live and
simulated.

The board's two deadlines (:class:`rose.policy.admission.BoardView`) are the earliest :func:`latest_start` over production's requests.  What
goes in is each engine's own: its step times, and how many prompt tokens fit one of its steps.  Times and lengths of one unit, on any one
clock.  Called on production's step path: scalars in, a scalar out.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf
from typing import TypeVar

Time = TypeVar("Time", int, float)
"""Whole nanoseconds stay whole."""
AHEAD_S = 1.0
"""A stamp may be so far ahead of a clock that was read before it was written."""


def age_s(at_s: float, now_s: float) -> float:
    """Seconds since a heartbeat; infinite for one from the future, which is as wrong as one from long ago (a disk keeps the stamp of the boot before)."""
    return now_s - at_s if at_s - now_s <= AHEAD_S else inf


def latest_start(since: Time, promised: Time, work: Time) -> Time:
    """Until when work has to begin that takes so long.

    Args:
        since: A first token counts from the request's arrival, a next one from the one before.
        promised: So long it may take from then on.
    """
    return since + promised - work


def is_late(took: float, promised: float) -> bool:
    """Is this a broken promise?  0: nothing is promised."""
    return 0 < promised < took


def prompt_work_s(
    tokens: float,
    *,
    chunk_tokens: float,
    decode_step_s: float,
    prefill_token_s: float,
    attention_s: float = 0.0,
    encoder_s: float = 0.0,
    more_steps: int = 0,
) -> float:
    """How long a prompt takes to its first token, once its first step starts.

    It is read in steps of at most ``chunk_tokens``, and each of them is also a step of the requests that decode meanwhile.

    Args:
        tokens: Of the prompt, not computed yet.
        chunk_tokens: Prompt tokens that fit one step beside those decodes.
        decode_step_s: A step that has those decodes and nothing else.
        prefill_token_s: What each prompt token adds.
        attention_s: What the whole prompt takes beyond that to look back at itself, where that is known apart.
        encoder_s: What an encoder takes for its images and the like.
        more_steps: That it takes beyond those.
    """
    steps = ceil(tokens / chunk_tokens) + more_steps
    return steps * decode_step_s + tokens * prefill_token_s + attention_s + encoder_s


def encoder_steps(items: Iterable[int], budget: int) -> int:
    """In how many steps an encoder gets through ``items``, in their order: each is so many tokens and is encoded in one step, and a step
    encodes at most ``budget`` of them.
    """
    steps, left = 0, 0
    for tokens in items:
        if tokens > left or not steps:
            steps, left = steps + 1, budget
        left -= tokens
    return steps
