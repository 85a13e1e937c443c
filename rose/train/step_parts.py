"""What a step holds while it is computed: who takes part, what was summed, and what had begun before its batch was complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rose.train.advantages import EQUAL_REWARDS, uninformative_groups
from rose.train.batch import Minibatch, TrainingSequence, make_minibatch

Key = tuple[str, int]
"""Trajectory and branch."""


def key_of(sample: TrainingSequence) -> Key:
    return sample.trajectory_id, sample.branch


@dataclass(slots=True)
class EarlyGradients:
    """What is known of the sequences that the step has begun with; see :meth:`rose.train.trainer.TorchTrainer.begin`."""

    proximal: dict[Key, Tensor] = field(default_factory=dict)
    reference: dict[Key, Tensor] = field(default_factory=dict)
    entropy_sum: float = 0.0
    advantages: dict[Key, float] = field(default_factory=dict)
    """Of the sequences whose gradients are in the masters'."""
    totals: Totals | None = None
    """Of those, on this rank, not divided; None where gradients do not begin early."""

    def is_of(self, samples: Sequence[TrainingSequence]) -> bool:
        """Whether it began with all of a batch, and with nothing else."""
        return self.proximal.keys() == {key_of(sample) for sample in samples}


@dataclass(frozen=True, slots=True)
class Chosen:
    """Indices of samples, and what was counted in choosing them."""

    taken: Sequence[int]
    """Have a place in a minibatch."""
    active: frozenset[int]
    """Are computed, and change the weights."""
    num_groups: int
    num_informative: int
    """Groups of unequal rewards of which an active sequence has an advantage."""
    num_solved: int
    """Groups of equal rewards, above the mean of the batch: they teach nothing, and have something to lose."""
    num_overlong: int


def chosen_of(
    samples: Sequence[TrainingSequence],
    advantages: Mapping[str, float],
    *,
    overlong_filtering: bool,
    idle_train: bool,
    count_idle: bool,
) -> Chosen:
    """What of ``samples`` takes part in the updates; of one group the same whatever others are there.

    Args:
        overlong_filtering: Leave out what was cut.
        idle_train: A token of advantage 0 has a gradient.
        count_idle: What has none takes its place in a minibatch all the same.
    """
    left = [index for index, sample in enumerate(samples) if not sample.masked]
    eligible = [index for index in left if not (overlong_filtering and samples[index].truncated)]
    teaching = [index for index in eligible if advantages[samples[index].trajectory_id] != 0.0]
    # By the task's own rewards: penalties of length or KL differ in every group, and say nothing of the task.
    rewards = {sample.trajectory_id: sample.reward for sample in samples}
    groups = {sample.trajectory_id: sample.group_id for sample in samples}
    equal = uninformative_groups(rewards, groups)
    above = sum(rewards.values()) / max(1, len(rewards)) + EQUAL_REWARDS
    active = eligible if idle_train else teaching
    return Chosen(
        taken=eligible if count_idle else active,
        active=frozenset(active),
        num_groups=len({sample.group_id for sample in samples}),
        num_informative=len({samples[index].group_id for index in teaching} - equal),
        num_solved=len({groups[name] for name, reward in rewards.items() if reward > above} & equal),
        num_overlong=len(left) - len(eligible),
    )


@dataclass(slots=True)
class Totals:
    """Sums over the parts of a minibatch, or over the updates of a step."""

    loss: float = 0.0
    num_held: int = 0
    num_tokens: int = 0
    num_updates: int = 0
    grad_norm: float = 0.0
    rate: float = 0.0
    share: float = 1.0
    update_kl: float = 0.0
    grad_limit: float = 0.0
    num_clipped: int = 0
    num_shortened: int = 0

    def plus(self, other: Totals) -> Totals:
        """What the two summed of one minibatch."""
        return Totals(
            loss=self.loss + other.loss,
            num_held=self.num_held + other.num_held,
            num_tokens=self.num_tokens + other.num_tokens,
        )

    def add_ranks(self, world_size: int) -> None:
        """Sum what each rank computed of a minibatch."""
        if world_size > 1:
            sums = torch.tensor([self.loss, self.num_held, self.num_tokens], dtype=torch.float64)
            dist.all_reduce(sums)
            self.loss, self.num_held, self.num_tokens = float(sums[0]), int(sums[1]), int(sums[2])


def stand_in() -> Minibatch:
    """One token, for a rank that has nothing to do while the others compute."""
    nothing = TrainingSequence(
        trajectory_id="-",
        group_id="-",
        reward=0.0,
        token_ids=(0, 0),
        positions=(1,),
        logprobs=(0.0,),
        temperatures=(1.0,),
        allowed=(None,),
    )
    return make_minibatch([nothing], vocab_size=1)
