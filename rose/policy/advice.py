"""What an operator can do about each row of the compatibility table (``rose.policy.compat``), in one line.

Pure.
"""

from __future__ import annotations

_FIXED_BUDGET = "nothing to change: set lending.max_lend_pages, the fixed budget of the rollouts beside it"
_NOT_QUANTISED = "take the policy's checkpoint that is not quantised"
_FULL_ATTENTION = "take a policy model with full attention in every layer"

_ADVICE: dict[str, str | tuple[str, str]] = {
    "unlisted": "leave it at its default, or ask for a row of its own in the table",
    "decoder": "",
    "tensor_parallel": "",
    "kv_connector": (
        "leave out --kv-transfer-config and --kv-offloading-size to lend memory too",
        "leave out --kv-transfer-config and --kv-offloading-size",
    ),
    "encoder_connector": "leave out --ec-transfer-config",
    "data_parallel": ("", "leave out --data-parallel-size: a node for each device"),
    "data_parallel_moe": "run without --data-parallel-size: a server and a ROSE_DIR for each device, behind a load balancer",
    "data_parallel_hosts": "run one host's engine cores under one command (--data-parallel-size alone), or a server for each device",
    "expert_parallel": "leave out --enable-expert-parallel and --enable-eplb",
    "pipeline_parallel": (
        "take --tensor-parallel-size in its place to lend memory too",
        "leave out --pipeline-parallel-size; --tensor-parallel-size is supported on one host",
    ),
    "context_parallel": "leave out --decode-context-parallel-size and --prefill-context-parallel-size",
    "lora": ("", "leave out --enable-lora"),
    "speculative": ("", "leave out --speculative-config"),
    "drafts": (
        "take the method ngram, draft_model, eagle, eagle3, or mtp with a DeepSeek V3 model, or leave out --speculative-config",
        "leave out --speculative-config",
    ),
    "hybrid": (_FIXED_BUDGET, _FULL_ATTENTION),
    "state_kind": ("nothing for this model: take one with attention in every layer", _FULL_ATTENTION),
    "encoder_decoder": "nothing for this model: take a decoder-only one",
    "multimodal": ("", "take a text-only policy model"),
    "modalities": "nothing for this model: take one of text, or of text and images, with inputs that are not embeddings",
    "pooling": "nothing for this model: take one that generates",
    "fp8_kv": ("", "give --kv-cache-dtype bfloat16"),
    "kv_quant": "give --kv-cache-dtype bfloat16",
    "mla": ("", "take a policy model without latent attention"),
    "api_servers": ("", "leave out --api-server-count"),
    "rust_frontend": "unset VLLM_USE_RUST_FRONTEND",
    "mig": "use a whole GPU",
    "sleep_mode": "leave out --enable-sleep-mode, and expandable_segments in PYTORCH_ALLOC_CONF",
    "untried_line": "run the newest line of vLLM that docs/compatibility.md names, or set ROSE_ALLOW_UNMEASURED=1",
    "unknown_version": "run the release line of vLLM that docs/compatibility.md names",
    "gpu": (
        "set ROSE_ALLOW_UNMEASURED=1 to run what nobody has measured",
        "engine.allow_unmeasured = true runs what nobody has measured",
    ),
    "other_scheduler": "leave out --scheduler-cls and --worker-cls",
    "multi_host": "run all ranks on one host: --distributed-executor-backend mp, without --nnodes",
    "small_cache": "give the engine more KV memory: --kv-cache-memory-bytes",
    "other_device": "nothing for this device: CUDA, or the CPU build of vLLM",
    "kv_groups": ("", _FULL_ATTENTION),
    "sliding_window": ("", _FULL_ATTENTION),
    "grouped_drafts": ("leave out --speculative-config to lend memory too", "leave out --speculative-config"),
    "kv_kind": (_FIXED_BUDGET, _FULL_ATTENTION),
    "kv_layout": (_FIXED_BUDGET, "report the geometry: it may be a row of its own"),
    "kv_option": ("leave it at its default to lend memory too", "leave it at its default"),
    "attention_backend": (
        "leave out --attention-backend to lend memory too",
        "leave out --attention-backend",
    ),
    "quantized_weights": (_FIXED_BUDGET, _NOT_QUANTISED),
    "weight_formats": ("", _NOT_QUANTISED),
    "priority": "leave out --scheduling-policy",
    "prompt_embeds": ("", "leave out --enable-prompt-embeds"),
    "logits_processors": ("", "leave out --logits-processors"),
    "other_option": "leave it at its default",
    "cuda_graphs": ("", "give it --enforce-eager, in engine.args"),
}


_DRAFT_OPTION = "speculative_config."
_QUANTISED_DRAFT = (
    "leave out quantization in --speculative-config, or where that is the model's own (mtp) all of it"
)


def advice(name: str, role: str, found: str = "") -> str:
    """What to do about the row ``name`` for an engine of ``role``; empty where there is nothing to do.

    ``found``: what of the configuration touches the row, ``field = value`` or words.

    Raises:
        KeyError: No such row.
    """
    if name == "drafts" and role == "serving" and found.startswith(_DRAFT_OPTION):
        option = found.removeprefix(_DRAFT_OPTION).partition(" = ")[0]
        if option == "quantization":
            return _QUANTISED_DRAFT
        if option != "method":
            return f"leave out {option} in --speculative-config"
    known = _ADVICE[name]
    return known if isinstance(known, str) else known[role == "rollout"]
