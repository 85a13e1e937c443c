"""The whole of an RL update in one file: float64, one turn at a time, no batching, no padding, nothing of ``rose.train``.

Slow and plain on purpose.  A turn is computed from its own prompt and sampled ids, not from the joined conversation, so a
mistake in the joining, in the mask or in the shift by one shows as another loss.  Written from the papers' formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Names and meaning as in the trainer's settings."""

    baseline: str = "mean"
    scale: str = "group"
    objective: str = "clip"
    ratio: str = "token"
    aggregation: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    truncation: float = 2.0
    entropy_weight: float = 0.0
    kl_weight: float = 0.0
    kl_kind: str = "k3"
    overlong_max: int = 0
    overlong_buffer: int = 1


def turn_log_probs(model: Any, turn: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the tokens sampled in one turn."""
    prompt, sampled = turn["prompt_token_ids"], turn["token_ids"]
    sampling = turn.get("sampling") or {}
    logits = model(input_ids=torch.tensor([[*prompt, *sampled]])).logits[0]
    log_probs, entropies = [], []
    for offset, token in enumerate(sampled):
        row = logits[len(prompt) + offset - 1] / (sampling.get("temperature") or 1.0)
        allowed = sampling.get("allowed_token_ids") or range(row.numel())
        restricted = torch.log_softmax(row[list(allowed)], dim=0)
        log_probs.append(restricted[list(allowed).index(token)])
        entropies.append(-(restricted.exp() * restricted).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def advantages(
    trajectories: Sequence[Mapping[str, Any]], rewards: Sequence[float], recipe: Recipe
) -> list[float]:
    found = []
    middle = sum(rewards) / len(rewards)
    of_batch = math.sqrt(sum((one - middle) ** 2 for one in rewards) / len(rewards))
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        group = [
            other_reward
            for other, other_reward in zip(trajectories, rewards, strict=True)
            if other["group_id"] == trajectory["group_id"]
        ]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((one - mean) ** 2 for one in group) / len(group))
        if std < 1e-6:
            found.append(0.0)
            continue
        against = mean if recipe.baseline == "mean" else (sum(group) - reward) / (len(group) - 1)
        found.append((reward - against) / {"group": std, "batch": of_batch, "none": 1.0}[recipe.scale])
    return found


def policy_of(model: Any, trajectories: Sequence[Mapping[str, Any]]) -> list[tuple[Tensor, Tensor]]:
    """Log-probs and entropies of each trajectory's sampled tokens under a float64 model."""
    found = []
    for trajectory in trajectories:
        parts = [turn_log_probs(model, turn) for turn in trajectory["turns"] if turn["token_ids"]]
        found.append((torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])))
    return found


def loss_of(
    trajectories: Sequence[Mapping[str, Any]],
    *,
    current: Sequence[tuple[Tensor, Tensor]],
    proximal: Sequence[tuple[Tensor, Tensor]],
    reference: Sequence[tuple[Tensor, Tensor]],
    recipe: Recipe,
) -> Tensor:
    """Loss of one update on all of ``trajectories`` (where conversations fork: with ratios of tokens); differentiable in ``current``.

    Args:
        current, proximal, reference: From :func:`policy_of`.
    """
    old = [log_probs.detach() for log_probs, _ in proximal]
    start = [log_probs.detach() for log_probs, _ in reference]
    rewards = []
    for one, old_T, start_T in zip(trajectories, old, start, strict=True):
        reward = one["reward"]
        if recipe.overlong_max:
            over = len(old_T) - (recipe.overlong_max - recipe.overlong_buffer)
            reward -= min(max(over / recipe.overlong_buffer, 0.0), 1.0)
        if recipe.kl_kind == "reward":
            reward -= recipe.kl_weight * float((old_T - start_T).sum())
        rewards.append(reward)
    weights = advantages(trajectories, rewards, recipe)
    per_trajectory = []
    for index, one in enumerate(trajectories):
        new_T, entropy_T = current[index]
        behaviour = [value for turn in one["turns"] for value in turn["logprobs"]]
        terms = []
        for new, before, began, sampled, entropy in zip(
            new_T, old[index], start[index], behaviour, entropy_T, strict=True
        ):
            ratio = torch.exp(new - before if recipe.ratio == "token" else (new_T - old[index]).mean())
            clipped = torch.clip(ratio, 1 - recipe.clip_low, 1 + recipe.clip_high)
            if recipe.objective == "clip":
                term = -torch.min(ratio * weights[index], clipped * weights[index])
            else:
                term = -weights[index] * new * (clipped.detach() if recipe.objective == "cispo" else 1.0)
            term = min(math.exp(before - sampled), recipe.truncation) * term
            delta = began - new
            if recipe.kl_kind == "k2":
                term = term + recipe.kl_weight * delta**2 / 2
            elif recipe.kl_kind == "k3":
                term = term + recipe.kl_weight * (torch.exp(delta) - delta - 1)
            terms.append(term - recipe.entropy_weight * entropy)
        per_trajectory.append(torch.stack(terms))
    if recipe.aggregation == "sum":
        return torch.cat(per_trajectory).sum() / len(per_trajectory)
    if recipe.aggregation == "token":
        return torch.cat(per_trajectory).sum() / sum(len(terms) for terms in per_trajectory)
    return torch.stack([terms.mean() for terms in per_trajectory]).mean()
