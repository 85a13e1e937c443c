"""Which rows of the compatibility table (``rose.policy.compat``) an engine's configuration touches.

Walks every field of a ``VllmConfig`` (:func:`findings`) and, when vLLM has sized its cache, of a ``KVCacheConfig``
(:func:`kv_findings`), and looks each up in the allowlist (``rose.policy.engine_fields``).  Reads, changes nothing.  A field that is
not there is named and refused; an object that is not what it was raises, and the caller refuses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cached_property
from pathlib import PurePath
from typing import Any, Literal

from rose.errors import ConfigError
from rose.policy.compat import Support, judge, row, together
from rose.policy.engine_fields import KV_KINDS, Value, is_restricted, is_section, row_of_field
from vllm_plugin import lines
from vllm_plugin.kv_layout import kv_entries

Device = Literal["cpu", "cuda", "other"]
Front = Literal["http", "headless", "grpc"]
"""What takes the requests: no field of the configuration tells."""
Findings = dict[str, str]
"""Name of a row -> what was found: ``field = value``, or words.  Of several fields of a row the first."""

_ASKED = ("is_", "has_", "use_", "uses_", "requires_")
"""A model answers with properties of these names what it is; vLLM has no list of them."""
_ASKED_TOO = ("runner_type", "rswa_window", "attn_type")
_TEXT_AND_IMAGES = {"text_config", "vision_config"}
"""What the configuration of such a model is made of."""
_COMPRESSED = frozenset({"int-quantized"})
"""Formats of numbers in compressed-tensors that an engine of the tests has run with."""
_MTP = {"DeepSeekMTPModel"}
"""Models that draft with layers of their own and were tried."""
_LONGEST = 80


def findings(
    config: Any,
    *,
    device: Device,
    stock_worker: str,
    ours: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    front: Front = "http",
) -> Findings:
    """Rows that a configuration touches, those with the smallest numbers first and ``unlisted`` last; none for a plain decoder.

    Args:
        config: ``VllmConfig``.
        device: vLLM's platform.
        stock_worker: Worker class that vLLM itself would use on this platform.
        ours: Scheduler and worker classes that the plugin puts in their places.
        env: Environment of the process; None = ours.
        front: How the server was started; ``http``: or by a program of one's own.
    """
    env = os.environ if env is None else env
    parallel = config.parallel_config
    cores, local = parallel.data_parallel_size, parallel.data_parallel_size_local
    found: list[tuple[str, str]] = [
        (name, says)
        for name, says, present in (
            ("other_device", "the platform", device == "other"),
            ("gpu", "the platform", device == "cuda"),
            (
                "cuda_graphs",
                "model_config.enforce_eager = False",
                device == "cuda" and not config.model_config.enforce_eager,
            ),
            (
                "data_parallel_moe",
                f"parallel_config.data_parallel_size = {cores}",
                cores > 1 and config.model_config.is_moe,
            ),
            (
                "data_parallel_hosts",
                f"parallel_config.data_parallel_size_local = {local}",
                cores > 1 and not parallel.data_parallel_external_lb and local != cores,
            ),
            ("data_parallel_hosts", "--headless", front == "headless"),
            ("other_option", "--grpc", front == "grpc"),
            ("mig", "CUDA_VISIBLE_DEVICES", "MIG-" in env.get("CUDA_VISIBLE_DEVICES", "")),
            ("sleep_mode", "PYTORCH_ALLOC_CONF", _expandable_segments(env)),
            ("rust_frontend", "VLLM_USE_RUST_FRONTEND", _is_on(env.get("VLLM_USE_RUST_FRONTEND", "0"))),
        )
        if present
    ]
    places: dict[str, tuple[Value, ...]] = {
        "parallel_config.worker_cls": (stock_worker, *ours),
        "scheduler_config.scheduler_cls": ours,
    }
    found += _look(config, "", places)
    found += _model(config.model_config)
    parts = set(getattr(config.model_config.hf_config, "sub_configs", {}))
    if config.model_config.is_multimodal_model and parts != _TEXT_AND_IMAGES:
        found.append(
            ("modalities", f"model_config.hf_config of {', '.join(sorted(parts)) or 'unknown parts'}")
        )
    if config.model_config.quantization == "compressed-tensors":
        said = getattr(config.model_config.hf_config, "quantization_config", None)
        numbers = said.get("format") if isinstance(said, dict) else None
        if numbers not in _COMPRESSED:
            found.append(("quantized_weights", f"model_config.hf_config.quantization_config of {numbers}"))
    drafts = config.speculative_config
    if drafts is not None and drafts.method == "mtp":
        drafter = drafts.draft_model_config
        names = set(drafter.architectures) if drafter is not None else set[str]()
        if not names or names - _MTP:
            says = ", ".join(sorted(names)) or "an unknown model"
            found.append(("drafts", f"speculative_config.method = 'mtp', of {says}"))
    return _ordered(found)


def kv_findings(kv_cache_config: Any, piece_bytes: int, *, drafts: bool = False) -> Findings:
    """The same of a ``KVCacheConfig``: rows that only the real cache can answer for; none for one group of full attention that
    fills its allocation.

    ``piece_bytes``: in which pieces its memory would come and go.  ``drafts``: with speculative decoding.
    """
    groups = kv_cache_config.kv_cache_groups
    found = list(_look(kv_cache_config, "kv_cache_config", {}))
    for tensor in kv_cache_config.kv_cache_tensors:
        found += _look(tensor, "kv_cache_tensor", {})
    for group in groups:
        found += _look(group, "kv_cache_group", {})
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        because = KV_KINDS.get(kind, "unlisted")
        if kind == "MambaSpec":
            found.append(("hybrid", f"a group of {kind} of {plain(spec.mamba_type)}"))
            found += _look(spec, "state_spec", {})
        elif because is not None:
            found.append((because, f"a group of {kind}"))
        else:
            found += _look(spec, "kv_cache_spec", {})
    kinds = {type(group.kv_cache_spec).__name__ for group in groups}
    windows = [
        group.kv_cache_spec for group in groups if getattr(group.kv_cache_spec, "sliding_window", None)
    ]
    if windows and (len(kinds) == 1 or any(type(one).__name__ != "SlidingWindowSpec" for one in windows)):
        found = [one for one in found if one[0] != "sliding_window"]  # that row is of windows beside others
        found.append(
            ("kv_kind", f"a window of {windows[0].sliding_window} tokens, without a group of full attention")
        )
    if len(groups) != 1:
        found.append(("kv_groups", f"{len(groups)} groups: {_kinds(groups)}"))
        if "MLAAttentionSpec" in kinds:
            found.append(("kv_kind", "latents beside other groups"))
        met = together(("kv_groups", "speculative")) if drafts else []
        found += [(name, f"speculative_config, with {len(groups)} groups") for name in met]
    if judge("serving", (name for name, _ in found))[0] is Support.ELASTIC:
        hashed = lines.hash_tokens(kv_cache_config)
        if hashed is not None and any(hashed != group.kv_cache_spec.block_size for group in groups):
            found.append(("kv_option", f"kv_cache_config.hash_block_size = {hashed}"))
        try:
            kv_entries(kv_cache_config, piece_bytes)
        except ConfigError as error:
            found.append(("kv_layout", str(error)))
    return _ordered(found)


def _kinds(groups: Any) -> str:
    names = [type(group.kv_cache_spec).__name__ for group in groups]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _look(
    config: Any, section: str, also_allowed: Mapping[str, tuple[Value, ...]]
) -> Iterator[tuple[str, str]]:
    """``(row, field = value)`` of every field below ``config`` whose value is not allowed.

    Raises:
        TypeError: A configuration is not a dataclass any more.
    """
    for field in dataclasses.fields(config):
        path = f"{section}.{field.name}" if section else field.name
        value = getattr(config, field.name)
        if is_section(path) and value is not None and not isinstance(value, list):
            yield from _look(value, path, also_allowed)
            if not is_restricted(path):
                continue
        because = row_of_field(path, plain(value), also_allowed.get(path, ()))
        if because is not None:
            yield because, f"{path} = {shown(value, secret=because == 'unlisted' and _may_be_secret(path))}"


def _may_be_secret(path: str) -> bool:
    """A field that nobody knows, by its name: its value goes into no log."""
    return any(word in path.lower() for word in ("token", "key", "secret", "password", "credential"))


def _model(model: Any) -> Iterator[tuple[str, str]]:
    """The same of what the model says of itself."""
    for name in dir(type(model)):
        if name not in _ASKED_TOO and not name.startswith(_ASKED):
            continue
        if not isinstance(getattr(type(model), name), (property, cached_property)) and name not in _ASKED_TOO:
            continue
        path = f"model.{name}"
        if row_of_field(path, "<any>") is None:
            continue
        value = getattr(model, name)
        because = row_of_field(path, plain(value))
        if because is not None and not (because == "unlisted" and not value):
            yield because, f"{path} = {shown(value)}"


def plain(value: Any) -> Value:
    """A field's value as the allowlist speaks of it."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (dict, list, set, tuple)) and not value:
        return None
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return f"<{type(value).__name__}>"


def shown(value: Any, *, secret: bool = False) -> str:
    """For a person, short: a log line."""
    made = f"<{type(value).__name__}>" if secret else plain(value)
    text = repr(made) if isinstance(made, str) and not made.startswith("<") else str(made)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _ordered(found: list[tuple[str, str]]) -> Findings:
    order = sorted(
        found, key=lambda one: row(one[0]).number or 1 << 30
    )  # stable: of one row the first stays first
    first: Findings = {}
    for name, says in order:
        first.setdefault(name, says)
    return first


def _is_on(text: str) -> bool:
    return text not in ("", "0", "false", "False")


def _expandable_segments(env: Mapping[str, str]) -> bool:
    """torch's own use of CUDA's virtual memory."""
    settings = ",".join(env.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return "expandable_segments:true" in settings.replace(" ", "").lower()
