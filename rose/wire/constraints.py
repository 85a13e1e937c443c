"""What a token is drawn under besides the model and its temperature: the scheduler records it, and a trainer has to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # A grammar: response_format, a forced tool_choice and strict tools become this.
    "structured_outputs": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "thinking_token_budget": (None, -1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
"""vLLM's sampling parameters that change which tokens may be drawn or how likely, and the values under which they change nothing."""


def constraints_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of those that are in force."""
    return tuple(name for name, neutral in _NEUTRAL.items() if params.get(name) not in neutral)
