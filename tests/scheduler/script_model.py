"""A real Qwen3 checkpoint that says what it is told to: reasoning, a tool call, then an answer.

Each token's embedding is its own unit vector and the output matrix maps it to the token that follows, so greedy
decoding walks a chain.  One attention head with equal weights everywhere carries "a tool result was seen" and picks the
answer over the call after ``</think>``.  Nothing is special to vLLM: it loads, batches and samples it like any model.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.scheduler.chat_templates import QWEN3, byte_tokenizer

THINK = ["\nThe user wants the weather;", " I must look it up: ", "é", ".\n"]
CALL = ['\n{"name": "get_weather", ', '"arguments": ', '{"city": "Zürich", ', '"days": 3}', "}\n"]
ANSWER = ["It will be ", "☀", " with 21 degrees", " in Zürich", ", three days long", "."]
BREAK = "\n\n"
LOGIT = 0.5
"""Of the next token before the final norm scales it by sqrt(hidden size): it is likely, not certain."""


def write_script_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # A lone character that is not ASCII stays bytes: its tokens have no text of their own.
    pieces = [piece for piece in (*THINK, *CALL, *ANSWER, BREAK) if len(piece) > 1 or piece.isascii()]
    tokenizer = byte_tokenizer(QWEN3, "<|im_end|>", vocab_size=264, pieces=pieces)
    tokenizer.save_pretrained(folder)

    def ids(*texts: str) -> list[int]:
        return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]

    thinking = ids("<think>", *THINK, "</think>")
    calling = ids(BREAK, "<tool_call>", *CALL, "</tool_call>", "<|im_end|>")
    answering = ids(*ANSWER, "<|im_end|>")
    newline, seen = ids("\n")[0], ids("<tool_response>")[0]
    num_tokens = len(tokenizer)
    hidden = (num_tokens + 64) // 32 * 32
    flag = hidden - 1

    output = torch.zeros(num_tokens, hidden)
    for chain in ([newline, *thinking, *calling], [*answering]):
        assert len(set(chain)) == len(chain), "each token of a chain has one successor"
        for here, after in itertools.pairwise(chain):
            output[after, here] = LOGIT
    output[answering[0], thinking[-1]] = 0.9 * LOGIT
    output[answering[0], flag] = LOGIT

    size = 32
    value = torch.zeros(size, hidden)
    value[0, seen] = 1.0
    carry = torch.zeros(hidden, size)
    carry[flag, 0] = 3.0  # between 57 and 560 tokens of context the flag decides the branch and nothing else
    layer = "model.layers.0"
    weights = {
        "model.embed_tokens.weight": torch.eye(hidden)[:num_tokens],
        "lm_head.weight": output,
        "model.norm.weight": torch.ones(hidden),
        f"{layer}.input_layernorm.weight": torch.ones(hidden),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}.self_attn.q_proj.weight": torch.zeros(size, hidden),
        f"{layer}.self_attn.k_proj.weight": torch.zeros(size, hidden),
        f"{layer}.self_attn.v_proj.weight": value,
        f"{layer}.self_attn.o_proj.weight": carry,
        f"{layer}.self_attn.q_norm.weight": torch.ones(size),
        f"{layer}.self_attn.k_norm.weight": torch.ones(size),
        f"{layer}.mlp.gate_proj.weight": torch.zeros(size, hidden),
        f"{layer}.mlp.up_proj.weight": torch.zeros(size, hidden),
        f"{layer}.mlp.down_proj.weight": torch.zeros(hidden, size),
    }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "eos_token_id": ids("<|im_end|>")[0],
        "head_dim": size,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": size,
        "max_position_embeddings": 2048,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": num_tokens,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()},
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
