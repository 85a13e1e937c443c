"""From rewards to advantages: who did better than the rest of its group, and by how much.

====================  ===============================================================================
``grpo``              ``(r - mean) / std`` of the group (Shao et al. 2024); ``scale=False`` leaves the
                      division out (Liu et al. 2025, "Dr. GRPO")
``rloo``              ``r -`` mean of the *other* members (Ahmadian et al. 2024): no bias, no scale
====================  ===============================================================================

DAPO (Yu et al. 2025) is ``grpo`` plus three things that are here or in ``rose.train.loss``: groups that teach
nothing are sampled again (:func:`uninformative_groups`), answers near the length limit are paid less
(:func:`overlong_penalty`), and the loss has a wider upper clip and is averaged over tokens.

Pure; plain floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rose.errors import TrainError

Estimator = Literal["grpo", "rloo"]

MAX_REWARD = 1e9
EQUAL_REWARDS = 1e-6
"""Rewards of a group closer than this are equal: their differences are rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongParams:
    """Soft punishment of length (DAPO, equation 13).  ``max_tokens`` 0 switches it off."""

    max_tokens: int = 0
    """Sampled tokens of a trajectory from which the whole penalty is due."""
    buffer_tokens: int = 1
    """The penalty grows from 0 to its whole over this many tokens before ``max_tokens``."""
    weight: float = 1.0


def group_advantages(
    rewards: Mapping[str, float],
    groups: Mapping[str, str],
    *,
    estimator: Estimator = "grpo",
    scale: bool = True,
) -> dict[str, float]:
    """Advantage of each trajectory id.

    Args:
        rewards: Reward of each trajectory id.
        groups: Group of each trajectory id; the same keys.
        scale: ``grpo`` only: divide by the standard deviation.

    A group of equal rewards has advantage 0, and so has a group of one.

    Raises:
        TrainError: A reward is not finite or out of range, or a trajectory has no group.
    """
    advantages: dict[str, float] = {}
    for ids in _members(rewards, groups).values():
        values = [rewards[trajectory_id] for trajectory_id in ids]
        count = len(values)
        mean = sum(values) / count
        deviation = (sum((value - mean) ** 2 for value in values) / count) ** 0.5
        if deviation <= EQUAL_REWARDS:
            factor = 0.0
        elif estimator == "rloo":
            factor = count / (count - 1)  # r - (n mean - r) / (n - 1)
        else:
            factor = 1.0 / deviation if scale else 1.0
        for trajectory_id, value in zip(ids, values, strict=True):
            advantages[trajectory_id] = (value - mean) * factor
    return advantages


def uninformative_groups(rewards: Mapping[str, float], groups: Mapping[str, str]) -> set[str]:
    """Groups whose rewards are all equal: their advantages are 0 and their gradient is none.

    Raises:
        TrainError: As :func:`group_advantages`.
    """
    found: set[str] = set()
    for group_id, ids in _members(rewards, groups).items():
        values = [rewards[trajectory_id] for trajectory_id in ids]
        if max(values) - min(values) <= EQUAL_REWARDS:
            found.add(group_id)
    return found


def overlong_penalty(num_tokens: int, params: OverlongParams) -> float:
    """What a trajectory of ``num_tokens`` sampled tokens loses: between ``-weight`` and 0."""
    if params.max_tokens == 0:
        return 0.0
    over = num_tokens - (params.max_tokens - params.buffer_tokens)
    return -params.weight * min(max(over / params.buffer_tokens, 0.0), 1.0)


def _members(rewards: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for trajectory_id, reward in rewards.items():
        if trajectory_id not in groups:
            raise TrainError(f"trajectory {trajectory_id} has no group", field="group_id")
        if not -MAX_REWARD < reward < MAX_REWARD:  # also refuses NaN
            raise TrainError(f"reward {reward} of trajectory {trajectory_id} is out of range", field="reward")
        members.setdefault(groups[trajectory_id], []).append(trajectory_id)
    return members
