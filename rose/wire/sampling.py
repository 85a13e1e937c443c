"""What a request may say about sampling: each field's type and bounds, whichever protocol brings it.

vLLM refuses the same, in words about its own classes; here the field that the client sent is named, before anything is rendered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rose.wire.reading import check

Tokens = Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(max_length=65_536)]
Texts = Annotated[list[str], Meta(max_length=4096)]
_Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Sampling(Struct, kw_only=True):
    """Of every protocol.  None: not said."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=65_536)] | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Tokens | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class Chat(Sampling, kw_only=True):
    """Of a chat completion, into which the other protocols' conversations are made."""

    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None


class Completion(Sampling, kw_only=True):
    """Of ``/v1/completions``."""

    logprobs: Annotated[int, Meta(ge=0)] | None = None
    stream: bool | None = None


class Generated(Sampling, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params`` of ``/rose/v1/generate``."""

    logprobs: Annotated[int, Meta(ge=0)] | None = None
    n: Literal[1] | None = None
    detokenize: bool | None = None


class EngineGenerated(Generated, kw_only=True, forbid_unknown_fields=True):
    """Of ``/inference/v1/generate``: of other tokens than the sampled one no log-prob is recorded."""

    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None


class OfTrajectory(Sampling, kw_only=True, forbid_unknown_fields=True):
    """``sampling`` of a trajectory: it wins over what its turns say."""

    chat_template_kwargs: dict[str, Any] | None = None


def check_sampling(values: Mapping[str, Any], kind: type[Sampling], prefix: str = "") -> None:
    """Validate sampling parameters against ``kind``.

    Raises:
        RequestError: A field has a wrong type or value, or is unknown and ``kind`` forbids unknown fields.
    """
    check(kind, values, prefix)
