"""What the train loop needs from a trainer, and what a trainer tells of a step.  Bring your own by satisfying :class:`Trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rose.train.batch import TrainingSequence
from rose.train.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What a step did; means are over sampled tokens."""

    num_sequences: int
    num_tokens: int
    num_trained_sequences: int
    """Sequences that took part in the updates."""
    num_updates: int
    learning_rate: float
    """Mean over the updates; the guard may have lowered it."""
    loss: float
    entropy: float
    clip_fraction: float
    """Tokens whose gradient the clip stopped, of all tokens of all updates."""
    grad_norm: float
    """Before clipping; mean over the updates."""
    ess: float
    """Effective sample size of the truncated proximal/behaviour weights, as a fraction."""
    truncated_weight_fraction: float
    """Tokens whose proximal/behaviour ratio was above the truncation."""
    kl_reference: float
    """k3 estimate of KL(proximal || reference); 0 where there is no reference."""
    mismatch_kl: float
    ratio_p99: float
    logprob_diff_max: float
    seconds: float
    informative_fraction: float = 1.0
    """Of the groups: those whose rewards, before anything is taken off for length or KL, are unequal."""
    step_share: float = 1.0
    """Of a full step's way; less by the share of the groups that succeed as a whole.  What the guard multiplies the rate by."""
    update_kl: float = 0.0
    """Nats a token between the weights that the step began with and those that it ended with, on sequences of all groups; 0 where the guard does not
    measure it."""
    grad_limit: float = 0.0
    """What the last gradient was clipped at."""
    num_clipped_updates: int = 0
    num_shortened_updates: int = 0
    """Taken back in part or whole, because the policy had moved too far."""
    num_starved: int = 0
    """1 for a step that changed nothing because too few groups had unequal rewards."""
    num_overlong: int = 0
    """Sequences left out because they were cut."""
    num_begun_in_vain: int = 0
    """Sequences whose gradients had begun before the batch was complete, and were dropped because the step turned out to need others."""

    def to_dict(self) -> dict[str, Any]:
        """For the metrics file."""
        return asdict(self)


class Trainer(Protocol):
    """What the loop needs from a trainer."""

    vocab_size: int
    max_tokens: int
    """Longest sequence it takes."""

    @property
    def step_index(self) -> int:
        """Steps taken in this lineage."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The masters, under the checkpoint's tensor names: what a publisher reads, on several ranks each its own part."""
        ...

    def step(
        self,
        samples: Sequence[TrainingSequence],
        *,
        learning_rate: float | None = None,
        single_update: bool = False,
    ) -> TrainReport:
        """Take one RL step on ``samples``.

        Args:
            samples: Of one batch.  Of several ranks the first is given all of it, the others their share (:func:`rose.train.batch.share_of`).
            learning_rate: None: the configured one.
            single_update: One update on all samples, whatever the configured minibatches and epochs are.
        """
        ...

    def begin(self, samples: Sequence[TrainingSequence]) -> None:
        """Compute what can be of a step whose batch is not complete.  Only with ``trainer.stream_groups``.

        Args:
            samples: Whole groups, which the step will be given with the rest of its batch.
        """
        ...

    def forget(self) -> None:
        """What the step has begun with will not be its batch."""
        ...

    def save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        """Write everything needed to go on from here, as :func:`rose.train.checkpoint.save` does."""
        ...

    def begin_save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        """The same, but return when the next step may be taken.  Only with ``trainer.background_checkpoints``."""
        ...

    def finish_save(self) -> None:
        """Wait until what was begun is durable.  While a step is being taken, too."""
        ...

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from ``checkpoint``, as :func:`rose.train.checkpoint.load` gave it."""
        ...

    def export(self, target: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        ...
