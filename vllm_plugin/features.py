"""Which rows of the compatibility table (``rose.policy.compat``) an engine's configuration touches.

Reads a ``VllmConfig`` and the environment, changes nothing.  A field that is gone or new enough to be unknown must end in
a refusal, not in a guess: missing attributes raise, and the caller refuses.

Callers: :mod:`vllm_plugin.compat`, tests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

PLAIN_KV_DTYPES = ("auto", "bfloat16", "float16", "half", "float32")
ONE_HOST_EXECUTORS = ("mp", "uni", None)
Device = Literal["cpu", "cuda", "other"]


def features(
    config: Any, *, device: Device, stock_worker: str, env: Mapping[str, str] | None = None
) -> list[str]:
    """Names of table rows, the most telling first; always at least one.

    Args:
        config: ``VllmConfig``.
        device: vLLM's platform.
        stock_worker: Worker class that vLLM itself would use on this platform.
        env: Environment of the process; None = ours.
    """
    env = os.environ if env is None else env
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    worker_cls, scheduler_cls = parallel.worker_cls, config.scheduler_config.scheduler_cls
    found = {
        "other_device": device == "other",
        "gpu": device == "cuda",
        "mig": "MIG-" in env.get("CUDA_VISIBLE_DEVICES", ""),
        "kv_connector": config.kv_transfer_config is not None or cache.kv_offloading_size is not None,
        "encoder_connector": config.ec_transfer_config is not None,
        "data_parallel": parallel.data_parallel_size > 1,
        "expert_parallel": parallel.enable_expert_parallel or parallel.enable_eplb,
        "pipeline_parallel": parallel.pipeline_parallel_size > 1,
        "context_parallel": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "speculative": config.speculative_config is not None,
        "lora": config.lora_config is not None,
        "hybrid": model.is_hybrid or model.is_attention_free,
        "encoder_decoder": model.is_encoder_decoder,
        "multimodal": model.is_multimodal_model,
        "pooling": model.runner_type != "generate",
        "fp8_kv": cache.cache_dtype not in PLAIN_KV_DTYPES,
        "sleep_mode": model.enable_sleep_mode or model.enable_cumem_allocator or _expandable_segments(env),
        "rust_frontend": env.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0", "false", "False"),
        "api_servers": parallel._api_process_count > 1,
        "other_scheduler": scheduler_cls is not None or worker_cls != stock_worker,
        "multi_host": parallel.nnodes > 1 or parallel.distributed_executor_backend not in ONE_HOST_EXECUTORS,
        "unlisted": _unlisted(config),
        "tensor_parallel": parallel.tensor_parallel_size > 1,
    }  # fmt: skip
    return [name for name, present in found.items() if present] or ["decoder"]


def _expandable_segments(env: Mapping[str, str]) -> bool:
    """torch's own use of CUDA's virtual memory."""
    settings = ",".join(env.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def _unlisted(config: Any) -> bool:
    """Features that vLLM can switch on and the table does not speak of."""
    parallel, model = config.parallel_config, config.model_config
    return bool(
        model.is_diffusion
        or parallel.enable_dbo
        or parallel.enable_elastic_ep
        or config.cache_config.kv_sharing_fast_prefill
        or config.diffusion_config is not None
        or config.engram_config is not None
        or config.watermark_config is not None
    )
