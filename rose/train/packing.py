"""Sequences one behind the other in one row, instead of each in a row of its own padded to the longest.

A packed forward pass is given ids ``[1, S]`` and position ids ``[1, S]`` that begin anew with every sequence, and no mask: ``transformers`` finds the
sequences by their positions.  What it makes of them depends on the attention (``attn_implementation`` in the model's ``config.json``; SDPA where it says nothing):

- **SDPA**: a dense mask ``[S, S]``, block-diagonal and causal.  It is booleans once, and every layer's call makes a copy of it in the type of
  the products, which is kept for the backward pass: at ``S`` = 16,384 these are 256 MiB, and 1 GiB a layer in fp32 or 512 MiB in bf16, on CPUs as on
  GPUs.  With it no kernel skips what is masked: a layer computes ``S^2`` scores a head where padded sequences have half the square of their own length
  each.  A row of several sequences therefore ends at :data:`MASKED_ROW_TOKENS`; a sequence alone in its row has no mask.
- **Flash** (2 and 3): lengths go to the kernel for sequences of unequal length; no mask, no score between two sequences.
- **Eager** holds the scores of the row for every head, and is refused; so is what nobody has tried.

A model whose layers carry a state along, or do not look at positions, lets a token see the sequence before its own, without an error: Qwen3-Next's
linear attention, and gpt-oss, whose masks leave positions out.  So only models of which a test shows that packed equals padded are taken
(``tests/train/test_packing.py``), and what the kernels of this very machine make of a row is looked at once, at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.errors import ConfigError
from rose.train.batch import Minibatch, TrainingSequence, make_minibatch

PACKED_MODELS = frozenset(
    {
        "deepseek_v3",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
"""``model_type`` of the models of which a test shows it."""
_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions that do not depend on what else is in the row; ``dynamic`` and ``longrope`` do."""
_VARLEN = frozenset({"flash_attention_2", "flash_attention_3"})
MASKED_ROW_TOKENS = 2048
"""Of a row with a dense mask: 16 MiB a layer in fp32."""
_LEAK = 0.1
"""Of what a token of its own sequence changes; a neighbour's changes nothing, but for rounding where products are shared out among experts."""


def row_tokens(config: Any, model_path: Path) -> int | None:
    """The most tokens of a packed row of several sequences; None = as many as a part has.

    Args:
        config: Of the model as it was loaded.

    Raises:
        ConfigError: The model, its attention or its positions are not among those that were shown to compute a packed row as they do a padded one.
    """
    reason = _refusal(config)
    if reason:
        raise ConfigError(
            f"{model_path} ({config.model_type}) {reason}",
            field="trainer.packing",
            fix="leave trainer.packing off",
        )
    return None if config._attn_implementation in _VARLEN else MASKED_ROW_TOKENS


def _refusal(config: Any) -> str:
    layers = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if layers:
        return f"has layers of another kind than attention ({', '.join(sorted(layers))}): what they carry along would go from a sequence into the next"
    if config.model_type not in PACKED_MODELS:
        return "has not been shown to compute packed sequences as it computes padded ones"
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [rotary] if "rope_type" in rotary else [one for one in rotary.values() if isinstance(one, dict)]
    rotations = {one.get("rope_type", "default") for one in kinds} - _ROTATIONS
    if rotations:
        return f"scales positions by the longest sequence of a row (rope_type {', '.join(sorted(rotations))})"
    attention = config._attn_implementation
    if attention != "sdpa" and attention not in _VARLEN:
        return (
            f"computes attention by {attention!r}, for which packed sequences are not meant or were not tried"
        )
    return ""


def pack_by_length(
    indices: Iterable[int],
    lengths: Sequence[int],
    owners: Sequence[int],
    *,
    max_tokens: int,
    max_row_tokens: int | None = None,
) -> list[list[int]]:
    """Cut samples into parts, of which each rank packs its own into one row; every index comes once, short sequences first.

    Args:
        lengths: Tokens, by index.
        owners: The rank that computes each, by index.
        max_tokens: Of a part.
        max_row_tokens: Of one rank's row in it.  Either is passed by a sequence that is longer by itself, and alone then in its row or its part.
    """
    parts: list[list[int]] = []
    rows: dict[int, int] = {}
    for index in sorted(indices, key=lambda index: (lengths[index], index)):
        length, own = lengths[index], rows.get(owners[index], 0)
        full = sum(rows.values()) + length > max_tokens
        if not parts or full or (own and max_row_tokens is not None and own + length > max_row_tokens):
            parts.append([])
            rows, own = {}, 0
        parts[-1].append(index)
        rows[owners[index]] = own + length
    return parts


@torch.no_grad()
def check_rows(
    log_probs: Callable[[Minibatch], tuple[Tensor, Tensor]], vocab_size: int, model_path: Path
) -> None:
    """Look at a row of two short sequences: whether what is said of the second depends on the first.  All ranks.

    Args:
        log_probs: Of a minibatch on the CPU.

    Raises:
        ConfigError: It does.
    """
    neighbour, own = [2, 3, 4, 5, 6], [7, 8, 9, 10]
    plain, beside_another, of_another = (
        log_probs(
            make_minibatch(
                [_made_of(left, vocab_size), _made_of(right, vocab_size)], vocab_size=vocab_size, packed=True
            )
        )[0][-1]
        for left, right in ((neighbour, own), ([11, *neighbour[1:]], own), (neighbour, [11, *own[1:]]))
    )
    leak, teeth = (float((one - plain).abs()) for one in (beside_another, of_another))
    if not leak <= _LEAK * teeth:
        raise ConfigError(
            f"{model_path}: the attention that is installed here lets a packed sequence see the one before it",
            field="trainer.packing",
            fix="leave trainer.packing off",
        )


def _made_of(ids: Sequence[int], vocab_size: int) -> TrainingSequence:
    """One whose last token was sampled."""
    return TrainingSequence(
        trajectory_id="-",
        group_id="-",
        reward=0.0,
        token_ids=tuple(one % vocab_size for one in ids),
        positions=(len(ids) - 1,),
        logprobs=(0.0,),
        temperatures=(1.0,),
        allowed=(None,),
    )
