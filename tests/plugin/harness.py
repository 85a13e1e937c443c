"""vLLM's real scheduler in this process, without model, worker or server.

A rank file is written as the worker's pager would; steps are answered with made-up tokens.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import RankState
from vllm_plugin import compat

BLOCK_TOKENS = 128
NUM_BLOCKS = 512
ANY = 1 << 62
"""Generation of a report that stands whatever the marks say."""


def engine_config(model: Path, **more: Any) -> Any:
    """``VllmConfig`` of the CPU build for a tiny model; ``more``: other arguments of the engine's."""
    import vllm.plugins
    from vllm.engine.arg_utils import EngineArgs

    # The first configuration of a process loads the plugins: ours would patch this process, for every later test, by the role that
    # the environment has just now.
    vllm.plugins.plugins_loaded = True
    config = EngineArgs(
        model=str(model),
        max_model_len=512,
        max_num_seqs=64,
        enforce_eager=True,
        kv_cache_memory_bytes=32 << 20,
        dtype="bfloat16",
        **more,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    config.parallel_config.worker_cls = compat.CPU_WORKER  # as the plugin leaves an elastic configuration
    return config


def kv_cache_config(config: Any) -> Any:
    """One group of two layers, layer-outermost: 64 KiB per block, 16 chunks of 32 blocks, one page each."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    layers = ["layer.0", "layer.1"]
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=2 * NUM_BLOCKS * page, layers=layers, layer_stride=NUM_BLOCKS * page, block_stride=page
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )


def write_rank(node_dir: Path, role: str, *, mapped: bool, num_chunks: int = 16) -> Any:
    """A rank file with every chunk mapped or none; keep the writer alive."""
    writer = NodeDir(node_dir).rank_writer(role, 0, num_chunks)  # type: ignore[arg-type]
    writer.extra[:] = (b"\x01" if mapped else b"\x00") * num_chunks
    writer.write(RankState(generation=ANY, resident_pages=num_chunks if mapped else 0))
    return writer


def build(cls: Any, config: Any, cache: Any = None) -> Any:
    """A scheduler of class ``cls`` as ``EngineCore`` builds it; ``cache``: another ``KVCacheConfig``."""
    from vllm.v1.structured_output import StructuredOutputManager

    return cls(
        vllm_config=config,
        kv_cache_config=kv_cache_config(config) if cache is None else cache,
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=False,
        log_stats=True,
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


def request(
    request_id: str,
    num_tokens: int = 20,
    max_tokens: int = 4,
    adapter: int = 0,
    images: Sequence[tuple[int, int]] = (),
) -> Any:
    """``adapter``: number of its LoRA adapter; ``images``: where in its prompt each begins, and how many tokens it is."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=request_id,
        prompt_token_ids=[7] * num_tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        lora_request=LoRARequest(f"adapter {adapter}", adapter, "nowhere") if adapter else None,
        mm_features=[
            MultiModalFeatureSpec(None, "image", f"{request_id} {at}", PlaceholderRange(at, length))
            for at, length in images
        ],
    )


def give_encoder(scheduler: Any, budget: int, room: int | None = None) -> None:
    """As a multimodal model has one: ``budget`` tokens in a step, and a cache of as many or of ``room``."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    scheduler.max_num_encoder_input_tokens = budget
    scheduler.encoder_cache_manager = EncoderCacheManager(budget if room is None else room)
    if getattr(scheduler, "rose", None) is not None:
        scheduler.rose.hooks._encodes = budget > 0  # as it would have seen when it was made


def step(scheduler: Any) -> Any:
    """One engine step with a model that always says 9; the scheduler's output of ``schedule``."""
    output = scheduler.schedule()
    answer(scheduler, output)
    return output


def answer(scheduler: Any, output: Any) -> None:
    """The end of the step that ``schedule`` put together."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    sampled = []
    for request_id in ids:
        live = scheduler.requests[request_id]
        sampled.append([9] if live.num_computed_tokens >= live.num_tokens else [])
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled
        ),
    )


def engine() -> Any:
    """Boundary: of the engine core both sides use the input queue, the idle callbacks and the running flag only."""
    return SimpleNamespace(input_queue=queue.Queue(), _idle_state_callbacks=[], is_running=lambda: True)
