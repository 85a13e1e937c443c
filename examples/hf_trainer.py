"""Train with Hugging Face's ``Trainer`` and publish its weights: one callback, and nothing of transformers is patched.

    rose tokens tokens.toml
    export ROSE_TOKEN_FILE=$PWD/tokens.toml
    rose relay --directory /dev/shm/weights --no-fsync &
    python examples/hf_trainer.py MODEL http://127.0.0.1:8470

MODEL is a Hugging Face folder; engines are started with the same.  Under ``torchrun`` every rank has the callback: each has a
copy of the model (DDP), and of every tensor one publishes it.  The data is random; put yours in its place.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from rose.auth import Tokens
from rose.weights.params import WeightsParams
from rose.weights.publisher import PublishReport, WeightPublisher
from rose.weights.ranks import TorchRanks
from rose.weights.store import ObjectStore
from rose.weights.stores import trainer_store


class PublishWeights(TrainerCallback):
    """Publishes version 0 (resumed: the step of the checkpoint) when training begins, then every so many steps and the last.

    The upload runs beside the next step; a failed one ends the training at the publish that follows.

    Args:
        attempt: One more at every start of the trainer, also when it resumes from a checkpoint.
        every: Steps between two versions; a version's number is its step.
    """

    def __init__(self, store: ObjectStore, run_id: str, attempt: int, *, every: int = 1) -> None:
        self._make = (store, run_id, attempt, WeightsParams(cast="BF16"))
        self._every = every
        self._publisher: WeightPublisher | None = None
        self._last: Future[PublishReport] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ranks = TorchRanks() if dist.is_initialized() else None
        self._publisher = WeightPublisher(kwargs["model"], *self._make, ranks=ranks)
        self._publish(state.global_step, state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            self._publish(state.global_step, state.is_world_process_zero)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wait(state.is_world_process_zero)
        if self._publisher is not None:
            self._publisher.close()

    def _publish(self, step: int, shows: bool) -> None:
        self._wait(shows)
        assert self._publisher is not None
        self._last = self._publisher.publish_async(step, step=step)  # returns once the copy is made

    def _wait(self, shows: bool) -> None:
        if self._last is not None:
            report = self._last.result()
            if shows:
                print(
                    f"{report.version} {report.kind} {report.bytes_sent} bytes, {report.density:.2%} changed"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("store", help="where versions go")
    parser.add_argument("--run-id", default="example", help="name of this lineage of weights")
    parser.add_argument("--attempt", type=int, default=1, help="one more at every restart of the trainer")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--every", type=int, default=1, help="steps between two versions")
    parser.add_argument("--unsigned", action="store_true", help="for a store that nobody else can write to")
    parser.add_argument("--output-dir", default="out/hf")
    args = parser.parse_args()
    signs = not args.unsigned and os.environ.get("RANK", "0") == "0"  # the others need no key
    needs = ["publish"] if args.store.startswith("http") else []
    needs += ["publish_key"] if signs else []
    store = trainer_store(args.store, Tokens.load(None, needs) if needs else None, signs=signs)

    # Masters in fp32: in bf16 most small updates would be lost in training.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokens_of = torch.randint(
        0, model.config.vocab_size, (64, 16), generator=torch.Generator().manual_seed(0)
    )
    trainer = Trainer(
        model=model,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens_of],  # type: ignore[arg-type]
        callbacks=[PublishWeights(store, args.run_id, args.attempt, every=args.every)],
        args=TrainingArguments(
            output_dir=args.output_dir,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    trainer.save_model()  # for the reader of this example to compare with
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
