"""A model of random weights and batches without an engine: what steps of the trainer are measured on, of ``real_size`` and of the stage ``train``."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import Shape, write_folder
from rose.errors import TrainError
from rose.train.batch import TrainingSequence
from rose.train.trainer import TorchTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of a batch.  The longest sequence has ``prompt + sampled`` tokens, the shortest a ``spread``-th of them; in each as large a share is sampled."""

    groups: int
    group_size: int
    prompt: int
    sampled: int
    spread: float = 1.0

    def lengths(self, rng: random.Random) -> list[tuple[int, int]]:
        """Tokens of each sequence, and of its prompt."""
        longest, num = self.prompt + self.sampled, self.groups * self.group_size
        lengths = [max(2, round(longest * self.spread ** (-one / max(1, num - 1)))) for one in range(num)]
        rng.shuffle(lengths)
        return [(length, max(1, length * self.prompt // longest)) for length in lengths]


def write_model(shape: Shape, folder: Path, device: str = "cpu") -> None:
    """The shape's folder with random weights in bf16, drawn on ``device``; embeddings are tied, as in Qwen3-0.6B and Qwen3-4B."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_folder(shape, folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100GB")


def made_up(sizes: Sizes, vocab_size: int, *, seed: int) -> list[TrainingSequence]:
    """Groups of which half the rewards are 1."""
    rng = random.Random(seed)
    return [
        TrainingSequence(
            trajectory_id=f"t{group}-{one}",
            group_id=f"g{group}",
            reward=float(one % 2),
            token_ids=tuple(rng.randrange(3, vocab_size) for _ in range(length)),
            positions=tuple(range(prompt, length)),
            # About what a model of random weights gives each token.
            logprobs=(-math.log(vocab_size),) * (length - prompt),
            temperatures=(1.0,) * (length - prompt),
            allowed=(None,) * (length - prompt),
        )
        for index, (length, prompt) in enumerate(sizes.lengths(rng))
        for group, one in [divmod(index, sizes.group_size)]
    ]


def timed_step(trainer: TorchTrainer, batch: list[TrainingSequence]) -> float:
    """Seconds of one step, until the device has done it.

    Raises:
        TrainError: Its loss is not finite, or it updated nothing.
    """
    started_s = time.monotonic()
    told = trainer.step(batch)
    if trainer.params.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started_s
    if not math.isfinite(told.loss) or not told.num_updates:
        raise TrainError(f"loss {told.loss}, {told.num_updates} updates", field="step")
    return seconds
