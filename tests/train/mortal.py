"""A trainer of two ranks of which the second is lost: killed in the middle of a step, and of a checkpoint, or silent with its whole node in the
middle of a step.  Actors import it by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch.distributed as dist

from rose.train.batch import TrainingSequence
from rose.train.build import trainer_params
from rose.train.protocol import TrainReport
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer
from tests.train.fuse import Fuse

LOST_IN = 1
"""The step in which the rank is lost, or in whose checkpoint."""


class MortalTrainer(TorchTrainer):
    """Says on which node it is, and keeps what it trains on, each try of a step by itself, beside the output folder.

    Args:
        deaths: ``step`` and ``checkpoint``, in which the rank is killed, or ``silence``; each once.
    """

    def __init__(self, config: TrainConfig, *deaths: str) -> None:
        import ray

        super().__init__(config.model, trainer_params(config))
        self._deaths, self._is_first = deaths, dist.get_rank() == 0
        self._folder = folder = config.output_dir.parent
        self._num_updates = 0
        with (folder / f"nodes-{dist.get_rank()}").open("a") as file:
            file.write(f"{ray.get_runtime_context().get_node_id()}\n")

    def step(self, samples: Sequence[TrainingSequence], **told: Any) -> TrainReport:
        self._num_updates = 0
        if self._is_first:
            name = f"step-{self.step_index}-{len(tries_of(self._folder, self.step_index))}.json"
            (self._folder / name).write_bytes(msgspec.json.encode(list(samples)))
        return super().step(samples, **told)

    def _update(self, limit: float) -> float:
        self._num_updates += 1
        if self._num_updates == 2 and self.step_index == LOST_IN:  # the first has been made
            if self._is_to_die("step"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._is_to_die("silence"):
                node = next(one for one in psutil.Process().parents() if one.name() == "raylet")
                node.suspend()
                psutil.Process().suspend()
        return super()._update(limit)

    def save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        if version == LOST_IN + 1 and self._is_to_die("checkpoint"):
            Fuse("fsync").is_lit = True  # its part is written, and nobody knows
        super().save(directory, attempt=attempt, version=version, consumed=consumed, keep=keep)

    def _is_to_die(self, where: str) -> bool:
        """The second rank, once."""
        mark = self._folder / f"died-in-{where}"
        if self._is_first or where not in self._deaths or mark.exists():
            return False
        mark.touch()
        return True


def tries_of(folder: Path, step: int) -> list[list[TrainingSequence]]:
    """What each try of a step was told, the first one first."""
    files = sorted(folder.glob(f"step-{step}-*.json"))
    return [msgspec.json.decode(file.read_bytes(), type=list[TrainingSequence]) for file in files]


def killed_in_a_step(config: TrainConfig) -> MortalTrainer:
    return MortalTrainer(config, "step")


def killed_in_a_step_and_a_checkpoint(config: TrainConfig) -> MortalTrainer:
    return MortalTrainer(config, "step", "checkpoint")


def silent_trainer(config: TrainConfig) -> MortalTrainer:
    return MortalTrainer(config, "silence")
