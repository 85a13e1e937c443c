"""The policy-gradient loss, with its policies named.

===========  =================================================================================
behaviour    the engine that sampled the token; its log-probs came with the turn
proximal     the trainer's weights when the step began; recomputed once per step
current      the weights that the optimiser is changing now
reference    the weights that training began with; only where a KL penalty is asked for
===========  =================================================================================

Per sampled token, with ``A`` the advantage of its trajectory::

    ratio  = current / proximal                              # or the geometric mean of its sequence's (``sequence``)
    clip:       pg = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
                     where A < 0, no more than -dual_clip * A (Ye et al. 2020)
    cispo:      pg = -clip(ratio, 1 - clip_low, 1 + clip_high) * A * log current      # no gradient through the clip
    reinforce:  pg = -A * log current
    weight = min(proximal / behaviour, truncation)           # a constant: no gradient flows through it
    loss   = sum(share * (weight * pg + kl_weight * kl))

``share`` is what a token counts.  ``token`` aggregation: ``1 / num_tokens``, so long trajectories weigh more; ``sequence``:
``1 / (num_episodes * tokens of its episode)``; ``sum``: ``1 / (num_episodes * sum_tokens)``, with a constant.  Which of these
a published recipe takes is in ``rose.train.recipes``.  An episode whose conversation forked is several sequences, and weighs what one does: of each
sequence as much as it has of the episode's tokens.  (Ratios and corrections of a *sequence* are each branch's own.)

The ratio is taken against *proximal*, so that clipping measures how far this step has moved, and
nothing else; the difference between engine and trainer (other kernels, an older version) is corrected by
``weight``, of each token or of its sequence as a whole (the product of its tokens'), which is either truncated or, where it is
out of bounds, masked (0).  It does not weigh the KL penalty, which is between two policies of the trainer.  Log-probs of all policies are those
of the distribution that was sampled: the engine's temperature and its restriction to allowed tokens are applied before the
normalisation (``rose.train.logprobs``; :func:`restricted_log_softmax` is its reference).

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

from rose.train.recipes import Aggregation, Correction, KLKind, Objective, Ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class LossParams:
    """See the module's docstring."""

    objective: Objective = "clip"
    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Wider than ``clip_low``: unlikely good tokens may gain probability faster than they lose it (DAPO)."""
    dual_clip: float | None = None
    """Bounds the loss of a token of negative advantage whose ratio has grown; above 1."""
    correction: Correction = "token_truncate"
    truncation: float = 2.0
    """Upper bound of the proximal/behaviour ratio: above it the weight is cut to it, or masked."""
    truncation_low: float = 0.0
    """Below it the weight is masked, where masks were chosen."""
    entropy_weight: float = 0.0
    """Bonus for entropy: keeps a task that was never solved yet from losing its exploration to those that were."""
    aggregation: Aggregation = "token"
    sum_tokens: int = 1
    """Of ``sum`` aggregation: the constant that stands for the tokens of a sequence."""
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


def undivided_shares(episodes: Sequence[int], aggregation: Aggregation, sum_tokens: int = 1) -> list[float]:
    """Share of one token of each sequence, but for what depends on the whole minibatch: the sum of the loss is divided by :func:`share_divisor` at the end.

    But for ``sum``, the shares of all tokens of the minibatch then add up to 1.

    Args:
        episodes: Sampled tokens of the episode that each sequence is of, all of its branches together; each > 0.
        sum_tokens: See :class:`LossParams`.
    """
    if aggregation == "token":
        return [1.0] * len(episodes)
    return [1.0 / (sum_tokens if aggregation == "sum" else length) for length in episodes]


def share_divisor(lengths: Sequence[int], episodes: Sequence[int], aggregation: Aggregation) -> float:
    """What the loss of a minibatch is divided by: its tokens, or its episodes, of which a minibatch may have parts.

    Args:
        lengths: Sampled tokens of each sequence of the whole minibatch, all ranks and parts together.
        episodes: As of :func:`undivided_shares`.
    """
    if aggregation == "token":
        return float(sum(lengths))
    return sum(length / whole for length, whole in zip(lengths, episodes, strict=True))


def policy_loss(
    *,
    current_N: Tensor,
    proximal_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    share_N: Tensor,
    sequence_N: Tensor,
    params: LossParams,
    reference_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of the module's docstring, and how many tokens the clip held back.

    Parts of a minibatch add up.

    Args:
        sequence_N: Number of the sequence that a token is of; all tokens of a sequence are in one part.
    """
    log_ratio_N = current_N - proximal_N
    if params.ratio == "sequence":
        counts_S = _sums(torch.ones_like(log_ratio_N), sequence_N)
        log_ratio_N = (_sums(log_ratio_N, sequence_N) / counts_S)[sequence_N]
    ratio_N = torch.exp(log_ratio_N)
    clipped_N = ratio_N.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    if params.objective == "clip":
        gain_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
        held_N = clipped_N * advantage_N < ratio_N * advantage_N
        if params.dual_clip is not None:
            floor_N = params.dual_clip * advantage_N
            too_far_N = (advantage_N < 0.0) & (gain_N < floor_N)
            gain_N, held_N = torch.where(too_far_N, floor_N, gain_N), held_N | too_far_N
    elif params.objective == "cispo":
        gain_N = clipped_N.detach() * advantage_N * current_N
        held_N = clipped_N != ratio_N
    else:
        gain_N = advantage_N * current_N
        held_N = torch.zeros_like(advantage_N, dtype=torch.bool)
    weight_N = correction(behaviour_N, proximal_N, sequence_N, params)
    loss_N = -weight_N * gain_N
    if reference_N is not None and params.kl_weight > 0.0 and params.kl_kind != "reward":
        loss_N = loss_N + params.kl_weight * kl_estimate(current_N, reference_N, params.kl_kind)
    return (share_N * loss_N).sum(), held_N.sum()


def correction(behaviour_N: Tensor, proximal_N: Tensor, sequence_N: Tensor, params: LossParams) -> Tensor:
    """Importance weights proximal/behaviour ``[N]``, truncated or masked; constants."""
    if params.correction == "none":
        return torch.ones_like(behaviour_N)
    ratio_N = _mismatch_ratio(behaviour_N, proximal_N, sequence_N, params)
    if params.correction.endswith("truncate"):
        return ratio_N.clamp(max=params.truncation)
    return torch.where(_inside(ratio_N, params), ratio_N, torch.zeros_like(ratio_N))


def outside_fraction(
    behaviour_N: Tensor, proximal_N: Tensor, sequence_N: Tensor, params: LossParams
) -> float:
    """Share of tokens whose weight was truncated or masked."""
    if params.correction == "none" or behaviour_N.numel() == 0:
        return 0.0
    ratio_N = _mismatch_ratio(behaviour_N, proximal_N, sequence_N, params)
    return float((~_inside(ratio_N, params)).float().mean())


def _mismatch_ratio(
    behaviour_N: Tensor, proximal_N: Tensor, sequence_N: Tensor, params: LossParams
) -> Tensor:
    log_ratio_N = (proximal_N - behaviour_N).detach()
    if params.correction.startswith("sequence"):
        log_ratio_N = _sums(log_ratio_N, sequence_N)[sequence_N]
    return torch.exp(log_ratio_N)


def _inside(ratio_N: Tensor, params: LossParams) -> Tensor:
    low = params.truncation_low if params.correction.endswith("mask") else 0.0
    return (ratio_N >= low) & (ratio_N <= params.truncation)


def _sums(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Of each sequence's tokens, ``[S]``."""
    num_sequences = int(sequence_N.max()) + 1 if sequence_N.numel() else 0
    return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)


def kl_estimate(current_N: Tensor, reference_N: Tensor, kind: Literal["k2", "k3"]) -> Tensor:
    """KL(current || reference) token by token ``[N]``; never negative."""
    delta = reference_N - current_N
    return 0.5 * delta.square() if kind == "k2" else delta.exp() - delta - 1.0


def effective_sample_size(weights: Tensor) -> float:
    """Kish's effective sample size of importance weights, as a fraction of their number: 1 when all are equal, 0 when all are 0."""
    if weights.numel() == 0:
        return 1.0
    weights = weights.double()
    squares = float(weights.square().sum())
    return float(weights.sum().square()) / (squares * weights.numel()) if squares else 0.0


MAX_MISMATCH = 300.0
"""Nats by which engine and trainer differ from which on their ratio is told as that of as many."""


def mismatch(behaviour_N: Tensor, proximal_N: Tensor) -> dict[str, float]:
    """How far engine and trainer are apart on the sampled tokens, when they should be equal.

    ``mismatch_kl`` is the k3 estimate of KL(behaviour || proximal), never negative;
    ``ratio_p99`` the 99th percentile of proximal/behaviour; ``logprob_diff_max`` the largest difference.
    """
    if behaviour_N.numel() == 0:
        return {"mismatch_kl": 0.0, "ratio_p99": 1.0, "logprob_diff_max": 0.0}
    delta = (proximal_N - behaviour_N).double()
    ratio = delta.clamp(max=MAX_MISMATCH).exp()  # an infinite one is no JSON, and has no mean
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
