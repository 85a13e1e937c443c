"""Advantages and the policy-gradient loss, with its three policies named.

===========  =================================================================================
behaviour    the engine that sampled the token; its log-probs came with the turn
proximal     the trainer's weights when the step began; recomputed once per step
current      the weights that the optimiser is changing now
===========  =================================================================================

Per sampled token, with ``A`` the advantage of its trajectory::

    ratio  = current / proximal
    pg     = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    weight = min(proximal / behaviour, truncation)           # a constant: no gradient flows through it
    loss   = sum(weight * pg) / num_tokens                   # token-level: long trajectories weigh more

The PPO ratio is taken against *proximal*, so that clipping measures how far this step has moved, and
nothing else; the difference between engine and trainer (other kernels, an older version) is corrected by
the truncated weight.  Log-probs of all three are those of the distribution that was sampled: the
engine's temperature and its restriction to allowed tokens are applied before the normalisation, by
:func:`restricted_log_softmax`.

Shapes: ``N`` = sampled tokens of a minibatch (already selected, so there is no mask here), ``V`` =
vocabulary.  Pure functions; float32 or float64.  Callers: ``rose.train.trainer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.errors import TrainError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossParams:
    """Clip ranges and the truncation of the proximal/behaviour correction."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    """Wider than ``clip_low``: unlikely good tokens may gain probability faster than they lose it (DAPO)."""
    truncation: float = 2.0
    entropy_weight: float = 0.0
    """Bonus for entropy: keeps a task that was never solved yet from losing its exploration to those that were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossStats:
    """Sums over the tokens of a minibatch, so that minibatches add up."""

    num_tokens: int
    num_clipped: int
    entropy_sum: float


def group_advantages(
    rewards: Mapping[str, float], groups: Mapping[str, str], *, scale: bool = True, epsilon: float = 1e-6
) -> dict[str, float]:
    """GRPO: reward less the group's mean, over the group's standard deviation.

    Args:
        rewards: Reward of each trajectory id.
        groups: Group of each trajectory id; the same keys.
        scale: Divide by the standard deviation.  A group of equal rewards has advantage 0 either way.
        epsilon: A deviation below this counts as none.

    Raises:
        TrainError: A reward is not finite, or a trajectory has no group.
    """
    members: dict[str, list[str]] = {}
    for trajectory_id, reward in rewards.items():
        if trajectory_id not in groups:
            raise TrainError(f"trajectory {trajectory_id} has no group", field="group_id")
        if not -1e9 < reward < 1e9:  # also refuses NaN
            raise TrainError(f"reward {reward} of trajectory {trajectory_id} is out of range", field="reward")
        members.setdefault(groups[trajectory_id], []).append(trajectory_id)
    advantages: dict[str, float] = {}
    for ids in members.values():
        values = [rewards[trajectory_id] for trajectory_id in ids]
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
        divisor = deviation if scale else 1.0
        for trajectory_id, value in zip(ids, values, strict=True):
            advantages[trajectory_id] = (value - mean) / divisor if deviation > epsilon else 0.0
    return advantages


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


def policy_loss(
    *,
    current_N: Tensor,
    proximal_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    num_tokens: int,
    params: LossParams,
) -> tuple[Tensor, int]:
    """The loss of the module's docstring, and how many tokens the clip held back.

    ``num_tokens`` is the divisor; it exceeds ``N`` when a minibatch is computed in several parts.
    """
    ratio = torch.exp(current_N - proximal_N)
    clipped = ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    weight = torch.exp(proximal_N - behaviour_N).clamp(max=params.truncation).detach()
    loss_N = -torch.minimum(ratio * advantage_N, clipped * advantage_N)
    held_back = (clipped * advantage_N < ratio * advantage_N).sum()
    return (weight * loss_N).sum() / num_tokens, int(held_back)


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
