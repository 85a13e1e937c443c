"""Folders of tiny models of every shape that the compatibility table speaks of: a configuration and a tokenizer, no weights.

For configuration-only tests, and with ``--load-format=dummy`` for real engines on the CPU (vLLM's dummy weights are seeded).
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from tests.tiny_model import VOCAB_SIZE, write_tokenizer

WINDOW = 128
"""Tokens of every sliding window and attention chunk here."""
IMAGE_TOKEN, IMAGE_SIZE, PATCH_SIZE = 9, 112, 14
"""An image is a square of so many pixels, and 64 tokens."""

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


_LATENT: dict[str, Any] = {
    "head_dim": 64,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "v_head_dim": 32,
}
"""DeepSeek's attention, experts and sizes: what its two shapes have in common."""

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
        tie_word_embeddings=False,  # vLLM's has a head of its own, whatever is said here
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
        **_LATENT,
        first_k_dense_replace=2,
        topk_method="greedy",
        tie_word_embeddings=False,  # as "gpt_oss"
    ),
    # One layer, and one that drafts: a block of the two is as large as two of "mla".
    "mtp": _shape(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_LATENT,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        num_hidden_layers=1,
        num_nextn_predict_layers=1,
        scoring_func="sigmoid",
        tie_word_embeddings=False,
        topk_method="noaux_tc",
    ),
    "qwen3_next": _shape(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        decoder_sparse_step=1,
        hidden_size=128,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_value_head_dim=64,
        mlp_only_layers=[],
        moe_intermediate_size=64,
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        shared_expert_intermediate_size=64,
        tie_word_embeddings=False,  # vLLM's model has no other way
    ),
    "granite": _shape(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        attention_multiplier=0.17,
        hidden_size=128,
        layer_types=["mamba"] * 3 + ["attention"],
        mamba_chunk_size=64,
        mamba_d_conv=4,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_n_heads=4,
        num_experts_per_tok=0,
        num_hidden_layers=4,
        num_local_experts=0,
        position_embedding_type="rope",
        shared_intermediate_size=160,
    ),
    "lfm2": _shape(
        "Lfm2ForCausalLM",
        "lfm2",
        block_auto_adjust_ff_dim=False,
        block_dim=128,
        block_ff_dim=160,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=32,
        conv_L_cache=3,
        conv_bias=False,
        conv_dim=128,
        hidden_size=128,
        layer_types=["conv", "conv", "full_attention", "conv"],
        norm_eps=1e-5,
        num_hidden_layers=4,
    ),
    "mamba2": _shape(
        "Mamba2ForCausalLM",
        "mamba2",
        _COMMON,
        chunk_size=64,
        conv_kernel=4,
        expand=2,
        head_dim=64,
        hidden_size=128,
        intermediate_size=256,
        layer_norm_epsilon=1e-5,
        n_groups=1,
        num_heads=4,
        num_hidden_layers=2,
        state_size=32,
        tie_word_embeddings=True,
        use_bias=False,
        use_conv_bias=True,
    ),
    "jamba": _shape(
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
    "idefics3": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": IMAGE_TOKEN,
        "scale_factor": 1,
        "text_config": _shape("LlamaForCausalLM", "llama", tie_word_embeddings=False),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 64,
            "image_size": IMAGE_SIZE,
            "intermediate_size": 96,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": PATCH_SIZE,
        },
    },
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


SHAPE_ARGS: dict[str, tuple[str, ...]] = {"granite": ("--no-enable-prefix-caching",)}
"""Without which vLLM's CPU build does not answer: it stores no Mamba-2 state in mid-prompt."""


def write_shape(folder: Path, name: str) -> Path:
    """Write ``config.json`` and a tokenizer for the shape ``name``; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    write_tokenizer(folder, VOCAB_SIZE)
    if "image_token_id" in SHAPES[name]:
        _write_image_processor(folder)
    return folder


def _write_image_processor(folder: Path) -> None:
    """Beside a tokenizer, in which the image's words take the place of others."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    ours = dict(enumerate(names, IMAGE_TOKEN))
    words: dict[str, int] = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {ours.get(number, word): number for word, number in words.items()}
    added = tokenizer["added_tokens"]
    added += [added[0] | {"id": number, "content": word} for number, word in ours.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    image = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": IMAGE_SIZE},
        "max_image_size": {"longest_edge": IMAGE_SIZE},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": (IMAGE_SIZE // PATCH_SIZE) ** 2}
    (folder / "processor_config.json").write_text(json.dumps(processor))


def image_url(seed: int) -> str:
    """A seeded image of coarse squares, as a request carries it."""
    import numpy
    from PIL import Image

    squares = numpy.random.default_rng(seed).integers(0, 256, (4, 4, 3))
    side = IMAGE_SIZE // 4
    file = io.BytesIO()
    Image.fromarray(squares.repeat(side, 0).repeat(side, 1).astype("uint8")).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def write_weights(folder: Path, *, std: float = 0.1, seed: int = 0) -> None:
    """Weights beside a shape's ``config.json``, large enough that what comes first in a prompt reaches its last token.

    Layers that draft (``num_nextn_predict_layers``) are decoder layers with a projection of what they read; transformers has no such model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    ours = (folder / "config.json").read_bytes()
    config = AutoConfig.from_pretrained(folder)
    parts = [getattr(config, name) for name in ("text_config", "vision_config") if hasattr(config, name)]
    for one in (config, *parts):
        one.initializer_range = std
    kind = AutoModelForImageTextToText if parts else AutoModelForCausalLM
    first, drafting = (
        config.get_text_config().num_hidden_layers,
        getattr(config, "num_nextn_predict_layers", 0),
    )
    if drafting:
        config.num_hidden_layers += drafting
    kind.from_config(config, dtype=torch.float32).to(torch.bfloat16).save_pretrained(folder)
    if drafting:
        _let_draft(folder / "model.safetensors", range(first, first + drafting), std)
    (folder / "config.json").write_bytes(ours)


def _let_draft(path: Path, layers: range, std: float) -> None:
    """Add what DeepSeek's checkpoints have of a layer that drafts: norms and a projection of its two inputs, the embedding and the head again."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    norm = weights["model.norm.weight"]
    for number in layers:
        name = f"model.layers.{number}"
        weights |= {f"{name}.{one}.weight": norm.clone() for one in ("enorm", "hnorm", "shared_head.norm")}
        weights[f"{name}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{name}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
        weights[f"{name}.eh_proj.weight"] = (torch.randn(len(norm), 2 * len(norm)) * std).to(norm.dtype)
    save_file(weights, path, {"format": "pt"})
