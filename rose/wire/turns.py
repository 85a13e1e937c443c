"""Agents to rose-scheduler, where they speak in tokens: ``POST /rose/v1/generate``, and as two engines have it.

vLLM's ``/inference/v1/generate`` is what prime-rl's client asks for tokens, SGLang's ``/generate`` what slime's does.  Of both, what is
not here is refused by its name: nothing that a client asks for is left out silently.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rose.wire.sampling import Penalty, Texts, Tokens
from rose.wire.types import Share

ASKED_RUN = "rose_run"
"""In ``sampling_params.extra_args`` of what goes on to an engine: it refuses the request where its weights are another run's."""

Prompt = Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(max_length=2**21)]


class Generate(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of ``token_ids`` and ``token_ids_b64``."""

    token_ids: Prompt = []
    token_ids_b64: str | None = None
    """Little-endian 32-bit numbers."""
    sampling_params: dict[str, Any] | None = None
    """vLLM's."""
    model: str | None = None
    session_id: str | None = None
    stream: bool = False


class EngineGenerate(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``/inference/v1/generate``, as vLLM 0.32 has it."""

    token_ids: Annotated[Prompt, Meta(min_length=1)]
    sampling_params: dict[str, Any]
    model: str | None = None
    request_id: str | None = None
    """Comes back in the answer."""
    cache_salt: str | None = None
    """Not used: an engine keeps contexts of different weights apart by itself."""
    stream: Literal[False] | None = None


class SGLangSampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params`` of ``/generate``, with SGLang's defaults."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = 128
    """None: as many as the context holds."""
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=65_536)] | None = None
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    sampling_seed: int | None = None
    n: Annotated[int, Meta(ge=1)] | None = None


class SGLangGenerate(Struct, kw_only=True, forbid_unknown_fields=True):
    """``/generate``: one prompt, either text or its tokens."""

    text: Annotated[str, Meta(min_length=1)] | None = None
    input_ids: Annotated[Prompt, Meta(min_length=1)] | None = None
    sampling_params: SGLangSampling | None = None
    rid: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Comes back in the answer, as ``meta_info.id``."""
    session_id: str | None = None
    """The trajectory."""
    model: str | None = None
    """Where several are served, which SGLang does not do."""
    stream: bool = False
    return_logprob: bool | None = None
    """Of the sampled tokens."""
    logprob_start_len: Literal[-1] | None = None
    top_logprobs_num: Literal[0] | None = None
    return_text_in_logprobs: Literal[False] | None = None
