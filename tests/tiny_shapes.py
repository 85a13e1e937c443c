"""Folders of tiny models of every shape that the compatibility table speaks of: a configuration and a tokenizer, no weights.

For configuration-only tests, and with ``--load-format=dummy`` for real engines on the CPU (vLLM's dummy weights are seeded).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny_model import VOCAB_SIZE, write_tokenizer

WINDOW = 128
"""Tokens of every sliding window and attention chunk here."""

_COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
}
_DECODER: dict[str, Any] = _COMMON | {
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def _shape(
    architecture: str, model_type: str, base: dict[str, Any] = _DECODER, **more: Any
) -> dict[str, Any]:
    return base | {"architectures": [architecture], "model_type": model_type} | more


SHAPES: dict[str, dict[str, Any]] = {
    "llama": _shape("LlamaForCausalLM", "llama"),
    "qwen3": _shape("Qwen3ForCausalLM", "qwen3"),
    "moe": _shape(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=160,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "gemma3": _shape(
        "Gemma3ForCausalLM",
        "gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        num_hidden_layers=6,
        query_pre_attn_scalar=32,
        rope_local_base_freq=10000.0,
        sliding_window=WINDOW,
    ),
    "gpt_oss": _shape(
        "GptOssForCausalLM",
        "gpt_oss",
        hidden_size=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_local_experts=4,
        rope_scaling=None,
        sliding_window=WINDOW,
    ),
    "sliding": _shape("MistralForCausalLM", "mistral", sliding_window=WINDOW),
    "chunked": _shape(
        "Llama4ForCausalLM",
        "llama4_text",
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=160,
        no_rope_layers=[1, 0],
        num_experts_per_tok=1,
        num_local_experts=2,
    ),
    "mla": _shape(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        first_k_dense_replace=2,
        head_dim=64,
        kv_lora_rank=512,
        moe_intermediate_size=32,
        n_group=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        num_key_value_heads=4,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        routed_scaling_factor=1.0,
        topk_group=1,
        topk_method="greedy",
        v_head_dim=32,
    ),
    "hybrid": _shape(
        "JambaForCausalLM",
        "jamba",
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        hidden_size=128,
        mamba_conv_bias=True,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_dt_rank=8,
        mamba_expand=2,
        mamba_proj_bias=False,
        num_experts=2,
        num_experts_per_tok=1,
        use_mamba_kernels=False,
    ),
    "mamba": _shape(
        "MambaForCausalLM",
        "mamba",
        _COMMON,
        conv_kernel=4,
        expand=2,
        hidden_size=64,
        intermediate_size=128,
        layer_norm_epsilon=1e-5,
        num_hidden_layers=2,
        state_size=16,
        time_step_rank=4,
        use_bias=False,
        use_conv_bias=True,
    ),
    "encoder_decoder": _shape(
        "BartForConditionalGeneration",
        "bart",
        _COMMON,
        d_model=128,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        decoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        encoder_layers=1,
        max_position_embeddings=128,
    ),
    "multimodal": {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "encoder_layers": 1,
            "num_mel_bins": 80,
        },
        "audio_token_index": 9,
        "text_config": _shape("Qwen2ForCausalLM", "qwen2"),
        "torch_dtype": "bfloat16",
    },
    "pooling": _shape(
        "BertModel",
        "bert",
        _COMMON,
        hidden_size=128,
        intermediate_size=64,
        max_position_embeddings=512,
        num_attention_heads=4,
        num_hidden_layers=2,
        type_vocab_size=2,
    ),
}


def write_shape(folder: Path, name: str) -> Path:
    """Write ``config.json`` and a tokenizer for the shape ``name``; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    write_tokenizer(folder, VOCAB_SIZE)
    return folder
