"""Log-probs and entropies of sampled tokens from hidden states, without ever holding a row of logits per token.

A part of 16,384 tokens at a vocabulary of 152,000 has 2.5 billion logits: 10 GB in fp32, and a log-softmax with its
gradient holds several times that.  :func:`token_log_probs` meets the output layer a chunk of tokens at a time, forward and
backward: of every token it keeps its hidden state, its normaliser and its entropy, and the backward pass computes the chunk's
logits once more.  Memory is that of one chunk beside inputs and gradients; work is one product more than without chunks.

The distribution is the one that the engine sampled from: its temperature and its restriction to allowed tokens come before the
normalisation, as in :func:`rose.train.loss.restricted_log_softmax`, which is the reference.

Shapes: ``N`` sampled tokens, ``D`` hidden size, ``V`` vocabulary, ``K`` distinct restrictions, ``C`` tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_LOGITS = 2**25
"""Logits of one chunk: 128 MiB in fp32, of which about three copies are alive at once."""
FORBIDDEN = -1e30
"""Logit of a token that was not allowed: its probability is 0, and 0 times it is 0, which would not be so of minus infinity."""


def token_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    *,
    targets_N: Tensor,
    temperature_N: Tensor,
    allowed_KV: Tensor | None,
    allowed_index_N: Tensor,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies in nats, ``[N]`` each, at least fp32; differentiable in the first three.

    Args:
        hidden_ND: What the output layer is given.
        weight_VD: Its weight.
        bias_V: Its bias, where it has one.
        targets_N: The sampled tokens; where there is a restriction, it allows them.
        temperature_N: Sampling temperature of each token, > 0.
        allowed_KV: One boolean row per distinct restriction, or None when nothing is restricted.
        allowed_index_N: Row of ``allowed_KV`` of each token; -1 = unrestricted.
        chunk_logits: Bounds the logits that are there at once; a chunk has at least one token.
    """
    return _ChunkedLogProbs.apply(
        hidden_ND, weight_VD, bias_V, targets_N, temperature_N, allowed_KV, allowed_index_N, chunk_logits
    )  # pyright: ignore[reportReturnType]


class _ChunkedLogProbs(torch.autograd.Function):
    """Derivatives by the scaled logit ``z_v``, with ``p`` its probability and ``H`` the entropy:
    of the target's log-prob ``[v = target] - p_v``, of the entropy ``-p_v (log p_v + H)``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N: Tensor,
        allowed_KV: Tensor | None,
        allowed_index_N: Tensor,
        chunk_logits: int,
    ) -> tuple[Tensor, Tensor]:
        size = max(1, chunk_logits // weight_VD.shape[0])
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        normaliser_N, log_prob_N, entropy_N = (
            torch.empty(hidden_ND.shape[0], dtype=dtype, device=hidden_ND.device) for _ in range(3)
        )
        for start in range(0, hidden_ND.shape[0], size):
            part = slice(start, start + size)
            scaled_CV = _scaled_logits(
                hidden_ND[part],
                weight_VD,
                bias_V,
                temperature_N[part],
                allowed_KV,
                allowed_index_N[part],
                dtype,
            )
            normaliser_C = torch.logsumexp(scaled_CV, dim=-1)
            normaliser_N[part] = normaliser_C
            log_prob_N[part] = scaled_CV.gather(1, targets_N[part].unsqueeze(1)).squeeze(1) - normaliser_C
            probability_CV = torch.exp(scaled_CV - normaliser_C.unsqueeze(1))
            entropy_N[part] = normaliser_C - probability_CV.mul_(scaled_CV).sum(-1)
            del scaled_CV, probability_CV
        ctx.save_for_backward(
            hidden_ND,
            weight_VD,
            bias_V,
            targets_N,
            temperature_N,
            allowed_KV,
            allowed_index_N,
            normaliser_N,
            entropy_N,
        )
        ctx.size = size
        ctx.set_materialize_grads(False)  # whoever has no entropy bonus pays nothing for it
        return log_prob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        by_log_prob_N, by_entropy_N = grads
        hidden_ND, weight_VD, bias_V, targets_N, temperature_N, allowed_KV, allowed_index_N = (
            ctx.saved_tensors[:7]
        )
        normaliser_N, entropy_N = ctx.saved_tensors[7:]
        if by_log_prob_N is None and by_entropy_N is None:
            return (None,) * 8
        dtype = normaliser_N.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Chunks add up in fp32: a sum of many bf16 numbers would be rounded at each of them.
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if wants_bias and bias_V is not None else None
        for start in range(0, hidden_ND.shape[0], ctx.size):
            part = slice(start, start + ctx.size)
            scaled_CV = _scaled_logits(
                hidden_ND[part],
                weight_VD,
                bias_V,
                temperature_N[part],
                allowed_KV,
                allowed_index_N[part],
                dtype,
            )
            scaled_CV.sub_(normaliser_N[part].unsqueeze(1))  # log-probs from here on
            grad_CV = torch.exp(scaled_CV)
            if by_entropy_N is None:
                assert by_log_prob_N is not None
                grad_CV.mul_(-by_log_prob_N[part].unsqueeze(1))
            else:
                # -p (g + (log p + H) h), g and h being what comes from above
                scaled_CV.add_(entropy_N[part].unsqueeze(1)).mul_(by_entropy_N[part].unsqueeze(1))
                if by_log_prob_N is not None:
                    scaled_CV.add_(by_log_prob_N[part].unsqueeze(1))
                grad_CV.mul_(scaled_CV).neg_()
            del scaled_CV
            if by_log_prob_N is not None:
                own_C1 = targets_N[part].unsqueeze(1)
                grad_CV.scatter_add_(1, own_C1, by_log_prob_N[part].unsqueeze(1))
            grad_CV.div_(temperature_N[part].to(dtype).unsqueeze(1))
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            product_CV = grad_CV.to(weight_VD.dtype)
            del grad_CV
            if grad_hidden_ND is not None:
                grad_hidden_ND[part] = product_CV @ weight_VD
            if grad_weight_VD is not None:
                if dtype == weight_VD.dtype:
                    grad_weight_VD.addmm_(product_CV.T, hidden_ND[part])
                else:
                    grad_weight_VD += product_CV.T @ hidden_ND[part]
            del product_CV
        return (
            grad_hidden_ND,
            None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
            *(None,) * 5,
        )


def _scaled_logits(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    temperature_C: Tensor,
    allowed_KV: Tensor | None,
    allowed_index_C: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Logits over temperature ``[C, V]``; those of forbidden tokens are :data:`FORBIDDEN`."""
    scaled_CV = functional.linear(hidden_CD, weight_VD, bias_V).to(dtype)
    scaled_CV.div_(temperature_C.to(dtype).unsqueeze(1))
    if allowed_KV is not None:
        forbidden_CV = ~allowed_KV[allowed_index_C.clamp(min=0)] & (allowed_index_C >= 0).unsqueeze(1)
        scaled_CV.masked_fill_(forbidden_CV, FORBIDDEN)
    return scaled_CV
