"""Write a tiny Qwen3-shaped checkpoint: real files, random weights, a word-level tokenizer.

:func:`write_tiny_model` gives a folder that ``vllm serve``, transformers and safetensors read; the same
arguments give the same bytes.  The defaults are awkward on purpose: a vocabulary that vLLM pads,
fewer key/value heads than heads, a head size that does not divide the hidden size.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 250  # padded to 256 by vLLM


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    num_layers: int = 2,
    hidden_size: int = 96,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    intermediate_size: int = 160,
    vocab_size: int = VOCAB_SIZE,
    num_experts: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """Write config, tokenizer and weights into ``folder``; return the weights by checkpoint name."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": head_size,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 2048,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocab_size,
    }
    if num_experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # 0.15 rather than 0.02: greedy tokens then depend on the weights and not on ties.
        return (torch.randn(rows, columns, generator=generator) * 0.15).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1 + torch.randn(size, generator=generator) * 0.1).to(dtype)

    weights = {"model.embed_tokens.weight": matrix(vocab_size, hidden_size)}
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": norm(hidden_size),
            f"{name}.self_attn.q_proj.weight": matrix(num_heads * head_size, hidden_size),
            f"{name}.self_attn.k_proj.weight": matrix(num_kv_heads * head_size, hidden_size),
            f"{name}.self_attn.v_proj.weight": matrix(num_kv_heads * head_size, hidden_size),
            f"{name}.self_attn.o_proj.weight": matrix(hidden_size, num_heads * head_size),
            f"{name}.self_attn.q_norm.weight": norm(head_size),
            f"{name}.self_attn.k_norm.weight": norm(head_size),
            f"{name}.post_attention_layernorm.weight": norm(hidden_size),
        }
        if num_experts:
            weights[f"{name}.mlp.gate.weight"] = matrix(num_experts, hidden_size)
        for mlp in [f"{name}.mlp.experts.{e}" for e in range(num_experts)] or [f"{name}.mlp"]:
            weights |= {
                f"{mlp}.gate_proj.weight": matrix(intermediate_size, hidden_size),
                f"{mlp}.up_proj.weight": matrix(intermediate_size, hidden_size),
                f"{mlp}.down_proj.weight": matrix(hidden_size, intermediate_size),
            }
    weights["model.norm.weight"] = norm(hidden_size)
    if not tied:
        weights["lm_head.weight"] = matrix(vocab_size, hidden_size)
    write_weights(folder, weights)
    write_tokenizer(folder, vocab_size)
    return weights


def write_tiny_adapter(
    folder: Path,
    *,
    seed: int,
    num_layers: int = 2,
    hidden_size: int = 96,
    num_heads: int = 4,
    head_size: int = 32,
    rank: int = 4,
) -> None:
    """Write a LoRA adapter, as PEFT does, for the query and output projections of a tiny model; the same arguments give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = num_heads * head_size
    shapes = {"q_proj": (hidden_size, inner), "o_proj": (inner, hidden_size)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(shapes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(num_layers):
        for name, (inputs, outputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(rank, inputs, generator=generator) * 0.15
            up = torch.randn(outputs, rank, generator=generator) * 0.15
            weights |= {
                f"{prefix}.lora_A.weight": down.to(torch.bfloat16),
                f"{prefix}.lora_B.weight": up.to(torch.bfloat16),
            }
    save_file(weights, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Replace the weights of a checkpoint folder."""
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of one word per id."""
    words = ["<unk>", "<bos>", "<eos>", "<user>", "<assistant>", "<system>"]
    words += [f"w{index}" for index in range(vocab_size - len(words))]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, word in enumerate(words[:6])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (
        "{% for message in messages %}<{{ message.role }}> {{ message.content }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    special = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
            | special
            | {"model_max_length": 2048}
        )
    )
