"""Of ``test_checkpoint_kills.py``: takes steps and writes a checkpoint of each in the background, and says what it has come to."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rose.train.batch import TrainingSequence, samples_of
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.train.traces import random_batch

PARAMS = TrainerParams(learning_rate=1e-3, minibatch_sequences=8, num_epochs=1)


def samples(step: int) -> list[TrainingSequence]:
    batch = random_batch(step, num_groups=1)
    return [one for trace in batch for one in samples_of(trace, vocab_size=320, max_tokens=1024)]


def main(model_path: Path, directory: Path) -> None:
    torch.set_num_threads(1)
    trainer = TorchTrainer(model_path, PARAMS)
    trainer.step(samples(0))
    while True:
        step = trainer.step_index
        consumed = {one: (f"t{one}",) for one in range(step)}
        trainer.begin_save(directory, attempt=1, version=step, consumed=consumed, keep=2)
        print("begun", step, flush=True)
        trainer.step(samples(step))
        trainer.finish_save()
        print("durable", step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
