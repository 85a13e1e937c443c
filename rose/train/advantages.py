"""From rewards to advantages: who did better than the rest of its group, and by how much.

``(r - baseline) / scale``, where the baseline is the mean of the group or of the *other* members of it (Ahmadian et al. 2024:
no bias), and the scale the standard deviation of the group (Shao et al. 2024), that of the whole batch (Liu et al. 2025, "Lite
PPO"), or 1 (Liu et al. 2025, "Dr. GRPO").  Standard deviations are of what is there, without a correction for its number.

Also here: which groups teach nothing (:func:`uninformative_groups`), and what answers near the length limit lose
(:func:`overlong_penalty`), both of DAPO (Yu et al. 2025).

Pure; plain floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose.errors import TrainError
from rose.train.recipes import AdvantageScale, Baseline

MAX_SHAPED = 1e30
"""Of a reward (:data:`rose.train.envs.base.MAX_REWARD`) less what length and drift cost it: its square is a number still."""
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
    filtering: bool = False
    """Leave trajectories that were cut at a limit out of the update, whatever their reward; it still counts in their group."""


def group_advantages(
    rewards: Mapping[str, float],
    groups: Mapping[str, str],
    *,
    baseline: Baseline = "mean",
    scale: AdvantageScale = "group",
) -> dict[str, float]:
    """Advantage of each trajectory id.

    Args:
        rewards: Reward of each trajectory id.
        groups: Group of each trajectory id; the same keys.
        baseline: What a reward is compared with.
        scale: Whose standard deviation the difference is divided by.

    A group of equal rewards has advantage 0, and so has a group of one.

    Raises:
        TrainError: A reward is not finite or out of range, or a trajectory has no group.
    """
    advantages: dict[str, float] = {}
    members = _members(rewards, groups)
    of_batch = _deviation(list(rewards.values()))
    for ids in members.values():
        values = [rewards[trajectory_id] for trajectory_id in ids]
        count = len(values)
        mean = sum(values) / count
        deviation = _deviation(values)
        if deviation <= EQUAL_REWARDS:
            factor = 0.0
        else:
            factor = 1.0 / {"group": deviation, "batch": of_batch, "none": 1.0}[scale]
            if baseline == "others":
                factor *= count / (count - 1)  # r - (n mean - r) / (n - 1)
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


def _deviation(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


def _members(rewards: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for trajectory_id, reward in rewards.items():
        if trajectory_id not in groups:
            raise TrainError(f"trajectory {trajectory_id} has no group", field="group_id")
        if not -MAX_SHAPED <= reward <= MAX_SHAPED:  # also refuses NaN
            raise TrainError(f"reward {reward} of trajectory {trajectory_id} is out of range", field="reward")
        members.setdefault(groups[trajectory_id], []).append(trajectory_id)
    return members
