"""The train loop of one throughput arm: real loops, environment managers, leases and checkpoints; a trainer that sleeps.

``python -m benchmarks.training.driver SPEC.json`` runs :func:`rose.train.loop.train_with` with its workers in this process (the
actors without Ray that the tests use), and writes a line per step.  Stand-ins, each at a protocol of the loop:

- :class:`PacedTrainer` is a :class:`rose.train.protocol.Trainer` whose step takes a fixed time, and where told so a time for each token, be it in the step or before.
- :class:`HeadPublisher` is a :class:`rose.train.workers.Publisher` that writes the version's name to the file that the timed
  engines watch.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.training.probe import Probe
from rose.auth import Tokens
from rose.train.batch import TrainingSequence
from rose.train.checkpoint import Checkpoint, save
from rose.train.loop import train_with
from rose.train.protocol import TrainReport
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from tests.train.local_actors import LocalActors

VOCAB, MAX_TOKENS = 512, 16_384


class PacedTrainer:
    """Takes ``step_s`` for any batch and ``token_s`` for each token that it had not begun with, and remembers how many steps it took.

    Args:
        record: File for what each step was given, one line a step: the parts in the order in which they came.
    """

    vocab_size = VOCAB
    max_tokens = MAX_TOKENS

    def __init__(self, step_s: float, token_s: float = 0.0, record: Path | None = None) -> None:
        self._step_s = step_s
        self._token_s = token_s
        self._record = record
        self._begun: list[list[TrainingSequence]] = []
        self._step_index = 0
        self.module = torch.nn.Linear(1, 1)

    @property
    def step_index(self) -> int:
        return self._step_index

    def step(
        self,
        samples: Sequence[TrainingSequence],
        *,
        learning_rate: float | None = None,
        single_update: bool = False,
    ) -> TrainReport:
        started_s = time.monotonic()
        known = {one.trajectory_id for part in self._begun for one in part}
        self.begin([one for one in samples if one.trajectory_id not in known])
        if self._record is not None:
            with self._record.open("a") as file:
                file.write(json.dumps([[asdict(one) for one in part] for part in self._begun if part]) + "\n")
        self._begun.clear()
        time.sleep(self._step_s)
        self._step_index += 1
        return TrainReport(
            num_sequences=len(samples),
            # Only what it would learn from: what came too late is measured and left out.
            num_tokens=sum(len(sample.positions) for sample in samples if not sample.masked),
            num_trained_sequences=sum(not sample.masked for sample in samples),
            num_updates=1,
            learning_rate=learning_rate or 0.0,
            loss=0.0,
            entropy=0.0,
            clip_fraction=0.0,
            grad_norm=0.0,
            ess=1.0,
            truncated_weight_fraction=0.0,
            kl_reference=0.0,
            mismatch_kl=0.0,
            ratio_p99=1.0,
            logprob_diff_max=0.0,
            seconds=time.monotonic() - started_s,
        )

    def begin(self, samples: Sequence[TrainingSequence]) -> None:
        self._begun.append(list(samples))
        time.sleep(self._token_s * sum(len(one.positions) for one in samples if not one.masked))

    def forget(self) -> None:
        self._begun.clear()

    def save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        weights = {name: value.detach() for name, value in self.module.named_parameters()}
        made = Checkpoint(
            step=self._step_index,
            attempt=attempt,
            version=version,
            consumed=dict(consumed),
            shuffle_state=(),
            weights=weights,
        )
        save(made, directory, keep=keep)

    def restore(self, checkpoint: Checkpoint) -> None:
        self._step_index = checkpoint.step

    def export(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)


class HeadPublisher:
    def __init__(self, head: Path, attempt: int) -> None:
        self._head, self._attempt = head, attempt

    def publish(self, version: int, *, step: int | None = None, lr: float | None = None) -> Any:
        part = self._head.with_suffix(".part")
        part.write_text(f"{self._attempt}.{version}")
        os.replace(part, self._head)
        return Published()


@dataclass(frozen=True)
class Published:
    kind: str = "delta"
    bytes_dense: int = 0
    bytes_sent: int = 0
    density: float = 0.0


async def run(spec: dict[str, Any]) -> None:
    config = TrainConfig.model_validate(spec["job"])
    tokens = Tokens.load(Path(spec["token_file"]))
    parts = Parts(
        make_trainer=lambda _: PacedTrainer(
            spec["train_s"],
            spec.get("token_s", 0.0),
            Path(spec["record_file"]) if spec.get("record_file") else None,
        ),
        make_publisher=lambda _config, _tokens, _module, attempt: HeadPublisher(
            Path(spec["head_file"]), attempt
        ),
    )
    actors = LocalActors(config, tokens, parts)
    probe = asyncio.create_task(Probe(Path(spec["probe_file"])).run())
    print("ready driver:0", flush=True)
    try:
        await train_with(actors, lambda record: None)
    finally:
        probe.cancel()
        await actors.close()


if __name__ == "__main__":
    uvloop.run(run(json.loads(Path(sys.argv[1]).read_text())))
