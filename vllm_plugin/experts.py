"""A mixture of experts computed from weights as the checkpoint has them: for rollout engines on CPU.

vLLM's CPU build packs experts after loading for its grouped kernel, in an order that differs between instruction
sets; a weight update would find nothing to write to.  Here each expert that has tokens is two plain products, as in
the reference implementations.  An operator of its own, so that a compiled model does not look inside.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


@torch.library.custom_op("rose::plain_experts", mutates_args=("output",))
def plain_experts(
    output: torch.Tensor,
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    weigh: bool,
) -> None:
    """``output[t] = sum over k of weights[t, k] * expert[ids[t, k]](hidden[t])``, added up in float32.

    Args:
        output: ``[tokens, hidden]``, overwritten.
        hidden: ``[tokens, hidden]``.
        w13: ``[experts, 2 * inner, hidden]``: gate above up.
        w2: ``[experts, hidden, inner]``.
        weights: ``[tokens, k]``.
        ids: ``[tokens, k]``; an id outside the experts held is passed over.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``, of the gate.
        weigh: False where the weights are in ``hidden`` already.
    """
    total = torch.zeros(output.shape, dtype=torch.float32)
    inner = w2.shape[2]
    for expert in ids.unique().tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        rows, places = torch.where(ids == expert)
        both = F.linear(hidden[rows], w13[expert], None if bias13 is None else bias13[expert])
        gate, up = both[:, :inner], both[:, inner:]
        if activation == "silu":
            gate = F.silu(gate)
        else:
            gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
        made = F.linear(gate * up, w2[expert], None if bias2 is None else bias2[expert]).float()
        total.index_add_(0, rows, made * weights[rows, places, None] if weigh else made)
    output.copy_(total)


@plain_experts.register_fake
def _(*args: object) -> None:
    """Makes nothing: the caller gives the output."""
