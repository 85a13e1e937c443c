"""Model folders with the shapes of real models, without weights (``--load-format dummy`` makes them up) or with seeded ones.

The tokenizer is a word per token id, so that every id an engine can produce has a text: the completions route detokenises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """``bytes_per_token``: KV memory of one token, in bf16."""

    name: str
    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int

    @property
    def num_layer_parameters(self) -> int:
        """Of the matrices of all layers."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp)

    @property
    def num_parameters(self) -> int:
        return self.num_layer_parameters + 2 * self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        return 2 * self.num_parameters

    @property
    def bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_size


PRODUCTION = Shape(
    name="qwen2.5-7b", family="qwen2", hidden_size=3584, intermediate_size=18944, num_layers=28,
    num_heads=28, num_kv_heads=4, head_size=128, vocab_size=152064,
)  # fmt: skip
POLICY = Shape(
    name="qwen3-8b", family="qwen3", hidden_size=4096, intermediate_size=12288, num_layers=36,
    num_heads=32, num_kv_heads=8, head_size=128, vocab_size=151936,
)  # fmt: skip
SMALL = Shape(
    name="qwen3-0.6b", family="qwen3", hidden_size=1024, intermediate_size=3072, num_layers=28,
    num_heads=16, num_kv_heads=8, head_size=128, vocab_size=151936,
)  # fmt: skip
"""Of the stage that loads a checkpoint; untied, so 1.5 GB.  Those that train have it tied, as it is published."""
MEDIUM = Shape(
    name="qwen3-4b", family="qwen3", hidden_size=2560, intermediate_size=9728, num_layers=36,
    num_heads=32, num_kv_heads=8, head_size=128, vocab_size=151936,
)  # fmt: skip
"""Of a stage that trains; tied."""
TINY = Shape(
    name="tiny", family="qwen3", hidden_size=96, intermediate_size=160, num_layers=2,
    num_heads=4, num_kv_heads=2, head_size=32, vocab_size=6000,
)  # fmt: skip
"""Of rehearsals."""
_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_folder(shape: Shape, folder: Path) -> Path:
    """Config and tokenizer of ``shape`` in ``folder``; a few MB."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[shape.family]],
        "model_type": shape.family,
        "attention_bias": shape.family == "qwen2",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": 32768,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
    }
    special = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    words = ["<unk>", "<s>", "</s>", *(f"t{number}" for number in range(3, shape.vocab_size))]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": words[number], **special} for number in range(3)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_checkpoint(shape: Shape, folder: Path, *, seed: int) -> dict[str, Any]:
    """As :func:`write_folder`, with weights by ``seed`` (qwen3 only); the tensors by their names in the checkpoint, bf16."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.gpu.seeded import fill

    write_folder(shape, folder)
    weights: dict[str, Any] = {}
    for index, (name, size) in enumerate(_tensors(shape).items()):
        weights[name] = torch.empty(size, dtype=torch.bfloat16)
        fill(name, weights[name], seed, index)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, head = shape.hidden_size, shape.head_size
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}."
        found |= {
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}self_attn.q_proj.weight": (shape.num_heads * head, hidden),
            f"{name}self_attn.k_proj.weight": (shape.num_kv_heads * head, hidden),
            f"{name}self_attn.v_proj.weight": (shape.num_kv_heads * head, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, shape.num_heads * head),
            f"{name}self_attn.q_norm.weight": (head,),
            f"{name}self_attn.k_norm.weight": (head,),
            f"{name}post_attention_layernorm.weight": (hidden,),
            f"{name}mlp.gate_proj.weight": (shape.intermediate_size, hidden),
            f"{name}mlp.up_proj.weight": (shape.intermediate_size, hidden),
            f"{name}mlp.down_proj.weight": (hidden, shape.intermediate_size),
        }
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (shape.vocab_size, hidden)}
