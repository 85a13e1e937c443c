"""What published formulas are compared on: answers with rewards, and what the trainer's own functions make of them, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rose.config import validate
from rose.train.advantages import group_advantages
from rose.train.build import trainer_params
from rose.train.loss import policy_loss, share_divisor, undivided_shares
from rose.train.train_config import TrainConfig

Array = Any

BUDGET = 8
"""Most tokens of an answer."""


@dataclass(frozen=True)
class Answers:
    """Log-probs by answer; rewards and groups of the answers."""

    current: list[Array]
    proximal: list[Array]
    reference: list[Array]
    behaviour: list[Array]
    rewards: Array
    groups: Array

    @property
    def sizes(self) -> list[int]:
        return [one.size for one in self.current]


REWARDS = (1, 0, 0, 0, 0.3, 0.9, 0.1, 0.4, 1, 1, 1, 0)
"""Of three questions with four answers each."""


def answers(seed: int, *, rewards: Sequence[float] = REWARDS, drift: float = 0.4) -> Answers:
    """Made by chance.

    Args:
        drift: Standard deviation of what an update has changed the log-probs by, in nats.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, BUDGET + 1, size=len(rewards))
    proximal = [-rng.uniform(0.05, 3.0, size) for size in lengths]
    return Answers(
        current=[one + rng.normal(0.0, drift, one.size) for one in proximal],
        proximal=proximal,
        reference=[one + rng.normal(0.0, 0.3, one.size) for one in proximal],
        behaviour=[one + rng.normal(0.0, 0.6, one.size) for one in proximal],
        rewards=np.array(rewards, dtype=np.float64),
        groups=np.repeat(np.arange(len(rewards) // 4), 4),
    )


Found = tuple[float, list[Array]]
"""Loss, and its derivative by each answer's current log-probs."""


def job(**trainer: Any) -> TrainConfig:
    return validate(
        TrainConfig,
        {
            "model": "m",
            "weights": {"directory": "w"},
            "rollout": {"max_tokens": BUDGET},
            "trainer": {"learning_rate": 1e-6, "guard": {"dual_clip": 0.0}, **trainer},
        },
    )


def our_advantages(made: Answers, config: TrainConfig) -> Array:
    params = trainer_params(config)
    rewards = {str(index): float(reward) for index, reward in enumerate(made.rewards)}
    if params.loss.kl_kind == "reward":
        for index, (old, start) in enumerate(zip(made.proximal, made.reference, strict=True)):
            rewards[str(index)] -= params.loss.kl_weight * float((old - start).sum())
    found = group_advantages(
        rewards,
        {str(index): str(group) for index, group in enumerate(made.groups)},
        baseline=params.baseline,
        scale=params.scale_advantages,
    )
    return np.array([found[str(index)] for index in range(made.rewards.size)])


def our_loss(made: Answers, config: TrainConfig, advantages: Array, *, engine_differs: bool = False) -> Found:
    params = trainer_params(config).loss
    sizes = made.sizes

    def tokens(values: list[Array]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values))

    undivided = undivided_shares(sizes, params.aggregation, params.sum_tokens)
    shares = [share / share_divisor(sizes, sizes, params.aggregation) for share in undivided]
    sequence_N = torch.repeat_interleave(torch.tensor(sizes))
    current_N = tokens(made.current).requires_grad_()
    loss, _ = policy_loss(
        current_N=current_N,
        proximal_N=tokens(made.proximal),
        behaviour_N=tokens(made.behaviour if engine_differs else made.proximal),
        advantage_N=torch.from_numpy(advantages)[sequence_N],
        share_N=torch.tensor(shares, dtype=torch.float64)[sequence_N],
        sequence_N=sequence_N,
        params=params,
        reference_N=tokens(made.reference),
    )
    loss.backward()
    assert current_N.grad is not None
    return float(loss.detach()), [part.numpy() for part in current_N.grad.split(sizes)]


def ours(made: Answers, config: TrainConfig, *, engine_differs: bool = False) -> Found:
    """Loss and gradient through what the trainer computes with, from the rewards on."""
    return our_loss(made, config, our_advantages(made, config), engine_differs=engine_differs)
