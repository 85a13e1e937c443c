"""When production's work must start at the latest, so that its promises are kept: one formula, live and simulated.

``promised - work``: the board's two deadlines (:class:`rose.policy.admission.BoardView`) are the earliest of these over production's
requests.  Times and lengths in seconds, on any one clock.  Called on production's step path: scalars in, a scalar out.
"""

from __future__ import annotations

from math import ceil


def prompt_work_s(
    tokens: float, *, chunk_tokens: float, decode_step_s: float, prefill_token_s: float
) -> float:
    """How long a prompt takes to its first token, once its first step starts.

    It is read in steps of at most ``chunk_tokens``, and each of them is also a step of the requests that decode meanwhile.

    Args:
        tokens: Of the prompt, not computed yet.
        chunk_tokens: Prompt tokens that fit one step beside those decodes.
        decode_step_s: A step that has those decodes and nothing else.
        prefill_token_s: What each prompt token adds.
    """
    return ceil(tokens / chunk_tokens) * decode_step_s + tokens * prefill_token_s
