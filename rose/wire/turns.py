"""Agents to rose-scheduler, where they speak in tokens: ``POST /rose/v1/generate``."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

ASKED_RUN = "rose_run"
"""In ``sampling_params.extra_args`` of what goes on to an engine: it refuses the request where its weights are another run's."""


class Generate(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of ``token_ids`` and ``token_ids_b64``."""

    token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(max_length=2**21)] = []
    token_ids_b64: str | None = None
    """Little-endian 32-bit numbers."""
    sampling_params: dict[str, Any] | None = None
    """vLLM's."""
    model: str | None = None
    session_id: str | None = None
    stream: bool = False
