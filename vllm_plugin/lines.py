"""The release lines of vLLM that ROSE runs on, and all that differs between them: no other file asks which vLLM is installed.

A production engine may be of any of them, with what has run there (:data:`TRIED`).  A rollout engine is of the newest alone: its log-probs and the text of its turns come in another
form before.  Both may share a device though they are of different lines, each from an environment of its own: what they
share are our files.

``import vllm`` happens inside functions.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from rose.policy.compat import Support, row
from vllm_plugin.roles import ENV_ALLOW_UNMEASURED

LINES: dict[str, tuple[str, ...]] = {"serving": ("0.31", "0.32"), "rollout": ("0.32",)}
"""By the role of the engine."""
TRIED: dict[str, frozenset[str]] = {
    "0.31": frozenset(
        {
            "api_servers",
            "data_parallel",
            "decoder",
            "fp8_kv",
            "kv_groups",
            "logits_processors",
            "lora",
            "mla",
            "multimodal",
            "pipeline_parallel",
            "prompt_embeds",
            "sliding_window",
            "speculative",
            "tensor_parallel",
            "weight_formats",
        }
    )
}
"""By line: rows of the compatibility table (``rose.policy.compat``) whose tests on real engines, those of `make lines`, have passed on it.  A line
that is not here has run all of them; what is missing here is refused on that line, unless ``ROSE_ALLOW_UNMEASURED=1`` says otherwise."""

ONLY: dict[str, tuple[str, ...]] = {
    "vllm.entrypoints.launchers.cli_args:propagate_flash_late_interaction": ("0.32",),
}
"""Names that :mod:`vllm_plugin.selfcheck` looks for in these lines only (``module:name`` or ``module:class:name``)."""

FIELDS: dict[str, frozenset[str]] = {
    "0.31": frozenset(
        {
            "cache_config.user_specified_mamba_block_size",
            "parallel_config.sd_worker_cls",
            "compilation_config.pass_config.enable_sp",
            "compilation_config.pass_config.fuse_gemm_comms",
            "compilation_config.pass_config.sp_min_token_num",
            "kv_cache_spec.storage_block_size",
        }
    ),
    "0.32": frozenset(
        {
            "cache_config.cache_hit_alignment_tokens",
            "cache_config.hash_block_size",
            "parallel_config.enable_hc_sp",
            "parallel_config.enable_shm_tensor_arena",
            "parallel_config.eplb_config.enable_migration_batching",
            "attention_config.sparse_mla_prefill_workspace_factor",
            "attention_config.tokenspeed_mla_min_split_kv",
            "compilation_config.cudagraph_decoder_replay",
            "compilation_config.decoder_replay_cudagraph_capture_sizes",
            "compilation_config.decoder_replay_trim_threshold",
            "kernel_config.enable_rocm_segmented_attn_autotune",
            "logging_config.formatter",
            "model_config.sleep_mode_offload_cudagraph",
            "observability_config.custom_histogram_buckets",
            "kv_cache_config.cache_hit_alignment_tokens",
            "kv_cache_config.hash_block_size",
        }
    ),
}
"""Fields of the allowlist (``rose.policy.engine_fields``) that this line alone has."""


@functools.cache
def line_of(version: str) -> str | None:
    """The supported release line of a version, be it a release, a post-release or a pre-release; None: of none."""
    from packaging.version import InvalidVersion, Version  # vLLM needs it, too

    try:
        found = Version(version)
    except InvalidVersion:  # what vLLM calls itself when its build knew no tag
        return None
    for line in sorted({one for lines in LINES.values() for one in lines}):
        if (found.epoch, found.release[:2]) == (0, Version(line).release):
            return line
    return None


def installed() -> str | None:
    """The supported line of the vLLM of this process."""
    import vllm

    return line_of(vllm.__version__)


def foreign_fields() -> frozenset[str]:
    """Fields of the allowlist that the installed line has not."""
    line = installed()
    return frozenset().union(*(fields for other, fields in FIELDS.items() if other != line))


def problem(role: str) -> str | None:
    """Why an engine of this role does not run on this vLLM, if its line is no supported one."""
    import vllm

    lines, line = LINES[role], installed()
    if line not in lines:
        return (
            f"vLLM {vllm.__version__} is not of a line that role {role} is supported on ({', '.join(lines)})"
        )
    return None


def untried(found: Mapping[str, str]) -> dict[str, str]:
    """The row ``untried_line`` if one of these rows is allowed on the newest line and has not run on the installed one.

    As they, with what it was found by; none where the operator has said that what nobody tried may run.
    """
    line = installed()
    if line not in TRIED or os.environ.get(ENV_ALLOW_UNMEASURED) == "1":
        return {}
    for name, says in found.items():
        if name not in TRIED[line] and row(name).serving is not Support.REFUSED:
            return {"untried_line": f"vLLM {line}, {says}"}
    return {}


def has(name: str) -> bool:
    """Is this name of :data:`ONLY` one that the installed line is to have?  A line that is not supported is asked for all of them."""
    only = ONLY.get(name)
    return only is None or installed() in (None, *only)


def engine_args_of(args: Any) -> Any:
    """``AsyncEngineArgs`` as ``vllm serve`` makes them of its arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    made = AsyncEngineArgs.from_cli_args(args)
    if has("vllm.entrypoints.launchers.cli_args:propagate_flash_late_interaction"):
        from vllm.entrypoints.launchers.cli_args import propagate_flash_late_interaction

        propagate_flash_late_interaction(args, made)
    return made


def hash_tokens(kv_cache_config: Any) -> int | None:
    """Tokens of each hash in the prefix cache, where the engine core says so; None: they are a block's.

    0.31 does not say, and has no other unless ``cache_config.prefix_match_unit`` asks for it, which is a row of its own.
    """
    return None if installed() == "0.31" else kv_cache_config.hash_block_size


def queues_that_start(scheduler: Any) -> Iterable[Any]:
    """The requests that vLLM would start next, in their order, under the pause that is in force."""
    from vllm.v1.core.sched.interface import PauseState

    paused = scheduler.pause_state
    if paused == PauseState.UNPAUSED:
        return itertools.chain(scheduler.kv_holding_waiting, scheduler.waiting)
    # Who holds blocks already is let in while new requests are kept out, from 0.32 on.
    if paused == PauseState.PAUSED_ALL or installed() == "0.31":
        return ()
    return scheduler.kv_holding_waiting
