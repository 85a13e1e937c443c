"""The policy-gradient loss, with its policies named.

===========  =================================================================================
behaviour    the engine that sampled the token; its log-probs came with the turn
proximal     the trainer's weights when the step began; recomputed once per step
current      the weights that the optimiser is changing now
reference    the weights that training began with; only where a KL penalty is asked for
===========  =================================================================================

Per sampled token, with ``A`` the advantage of its trajectory::

    ratio  = current / proximal
    pg     = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    weight = min(proximal / behaviour, truncation)           # a constant: no gradient flows through it
    loss   = sum(share * weight * (pg + kl_weight * kl))

``share`` is what a token counts.  ``token`` aggregation (DAPO): ``1 / num_tokens``, so long trajectories weigh
more; ``sequence`` aggregation (GRPO as published): ``1 / (num_sequences * tokens of its sequence)``.

The PPO ratio is taken against *proximal*, so that clipping measures how far this step has moved, and
nothing else; the difference between engine and trainer (other kernels, an older version) is corrected by
the truncated weight.  Log-probs of all policies are those of the distribution that was sampled: the
engine's temperature and its restriction to allowed tokens are applied before the normalisation, by
:func:`restricted_log_softmax`.

``kl`` estimates KL(current || reference) on the sampled token (Schulman, "Approximating KL divergence"), with
``d = reference - current``: ``k2 = d^2 / 2``, ``k3 = exp(d) - d - 1``.  The third kind, ``reward``, is no term of
the loss: ``rose.train.trainer`` takes ``kl_weight * sum(proximal - reference)`` off the trajectory's reward.

Shapes: ``N`` = sampled tokens of a minibatch (already selected, so there is no mask here), ``V`` =
vocabulary.  Pure functions; float32 or float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence"]
KLKind = Literal["k2", "k3", "reward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossParams:
    """Clip ranges and the truncation of the proximal/behaviour correction."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    """Wider than ``clip_low``: unlikely good tokens may gain probability faster than they lose it (DAPO)."""
    truncation: float = 2.0
    entropy_weight: float = 0.0
    """Bonus for entropy: keeps a task that was never solved yet from losing its exploration to those that were."""
    aggregation: Aggregation = "token"
    kl_weight: float = 0.0
    kl_kind: KLKind = "k3"


def restricted_log_softmax(
    logits_NV: Tensor, temperature_N: Tensor, allowed_KV: Tensor | None, allowed_index_N: Tensor
) -> Tensor:
    """Log-probs ``[N, V]`` of what the engine sampled from; ``-inf`` for tokens that were not allowed.

    Args:
        logits_NV: The model's logits.
        temperature_N: Sampling temperature of each token, > 0.
        allowed_KV: One boolean row per distinct restriction, or None when nothing is restricted.
        allowed_index_N: Row of ``allowed_KV`` of each token; -1 = unrestricted.
    """
    scaled = logits_NV / temperature_N.unsqueeze(-1)
    if allowed_KV is not None:
        restricted = allowed_index_N >= 0
        forbidden = ~allowed_KV[allowed_index_N.clamp(min=0)] & restricted.unsqueeze(-1)
        scaled = scaled.masked_fill(forbidden, float("-inf"))
    return torch.log_softmax(scaled, dim=-1)


def entropy(log_probs_NV: Tensor) -> Tensor:
    """Entropy ``[N]`` in nats; forbidden tokens (``-inf``) count 0."""
    finite_NV = log_probs_NV.masked_fill(
        log_probs_NV == float("-inf"), 0.0
    )  # 0 * -inf, and its gradient, is NaN
    return -(log_probs_NV.exp() * finite_NV).sum(-1)


def token_shares(lengths: Sequence[int], aggregation: Aggregation) -> list[float]:
    """Share of one token of each sequence, so that the shares of all tokens of the minibatch add up to 1.

    Args:
        lengths: Sampled tokens per sequence of the whole minibatch, all ranks and parts together; each > 0.
    """
    if aggregation == "token":
        return [1.0 / sum(lengths)] * len(lengths)
    return [1.0 / (len(lengths) * length) for length in lengths]


def policy_loss(
    *,
    current_N: Tensor,
    proximal_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    share_N: Tensor,
    params: LossParams,
    reference_N: Tensor | None = None,
) -> tuple[Tensor, int]:
    """The loss of the module's docstring, and how many tokens the clip held back.

    Parts of a minibatch add up: shares are of the whole.
    """
    ratio = torch.exp(current_N - proximal_N)
    clipped = ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    weight = correction(behaviour_N, proximal_N, params.truncation)
    loss_N = -torch.minimum(ratio * advantage_N, clipped * advantage_N)
    held_back = (clipped * advantage_N < ratio * advantage_N).sum()
    if reference_N is not None and params.kl_weight > 0.0 and params.kl_kind != "reward":
        loss_N = loss_N + params.kl_weight * kl_estimate(current_N, reference_N, params.kl_kind)
    return (share_N * weight * loss_N).sum(), int(held_back)


def correction(behaviour_N: Tensor, proximal_N: Tensor, truncation: float) -> Tensor:
    """Truncated importance weights proximal/behaviour ``[N]``; constants."""
    return torch.exp(proximal_N - behaviour_N).clamp(max=truncation).detach()


def kl_estimate(current_N: Tensor, reference_N: Tensor, kind: Literal["k2", "k3"]) -> Tensor:
    """KL(current || reference) token by token ``[N]``; never negative."""
    delta = reference_N - current_N
    return 0.5 * delta.square() if kind == "k2" else delta.exp() - delta - 1.0


def effective_sample_size(weights: Tensor) -> float:
    """Kish's effective sample size of importance weights, as a fraction of their number: 1 when all are equal."""
    if weights.numel() == 0:
        return 1.0
    weights = weights.double()
    return float(weights.sum().square() / (weights.square().sum() * weights.numel()))


def mismatch(behaviour_N: Tensor, proximal_N: Tensor) -> dict[str, float]:
    """How far engine and trainer are apart on the sampled tokens, when they should be equal.

    ``mismatch_kl`` is the k3 estimate of KL(behaviour || proximal), never negative;
    ``ratio_p99`` the 99th percentile of proximal/behaviour; ``logprob_diff_max`` the largest difference.
    """
    if behaviour_N.numel() == 0:
        return {"mismatch_kl": 0.0, "ratio_p99": 1.0, "logprob_diff_max": 0.0}
    delta = (proximal_N - behaviour_N).double()
    ratio = delta.exp()
    rank = max(0, min(ratio.numel() - 1, round(0.99 * (ratio.numel() - 1))))
    return {
        "mismatch_kl": float((ratio - 1.0 - delta).mean()),
        "ratio_p99": float(ratio.sort().values[rank]),
        "logprob_diff_max": float(delta.abs().max()),
    }


def distinct_restrictions(
    restrictions: Sequence[tuple[int, ...] | None], vocab_size: int
) -> tuple[Tensor | None, list[int]]:
    """Number the distinct restrictions: the rows for :func:`restricted_log_softmax`, and each one's row."""
    rows: dict[tuple[int, ...], int] = {}
    index = [-1 if allowed is None else rows.setdefault(allowed, len(rows)) for allowed in restrictions]
    if not rows:
        return None, index
    allowed_KV = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for allowed, row in rows.items():
        allowed_KV[row, list(allowed)] = True
    return allowed_KV, index
