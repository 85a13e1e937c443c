"""The train worker by itself: what it leases, trains on and names, told by a scheduler that does as the test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rose.auth import Tokens
from rose.train.protocol import TrainReport
from rose.train.train_config import TrainConfig
from rose.train.workers import TrainWorker
from tests.train.traces import trajectory, turn


class Scheduler:
    """Hands out what it is told to, in this order."""

    def __init__(self, batches: Sequence[list[dict[str, Any]]]) -> None:
        self._batches = deque(enumerate(batches))
        self.resumed: list[list[str]] = []

    async def lease(self, **_: Any) -> tuple[str, list[dict[str, Any]]]:
        number, batch = self._batches.popleft()
        return f"b{number}", batch

    async def resume(self, *, consumed: list[str], **_: Any) -> None:
        self.resumed.append(consumed)

    async def ack(self, *_: Any, **__: Any) -> None:
        pass

    async def set_version(self, **_: Any) -> None:
        pass

    async def discards(self, _: str) -> dict[str, list[int]]:
        return {}


class Trainer:
    """Notes what it is given."""

    vocab_size, max_tokens = 320, 64

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.num_saves = 0

    @property
    def step_index(self) -> int:
        return len(self.steps)

    def step(self, samples: Sequence[Any], **_: Any) -> TrainReport:
        self.steps.append([sample.trajectory_id for sample in samples])
        numbers = {name: 0 for name, one in TrainReport.__dataclass_fields__.items()}
        return TrainReport(**numbers)

    def save(self, *_: Any, **__: Any) -> None:
        self.num_saves += 1


def worker_of(tmp_path: Path, scheduler: Scheduler, **trainer: Any) -> tuple[TrainWorker, Trainer]:
    """One that has started, with one group of two a step."""
    config = TrainConfig.model_validate(
        {
            "model": str(tmp_path / "model"),
            "output_dir": str(tmp_path / "out"),
            "num_steps": 100,
            "weights": {"directory": str(tmp_path / "weights")},
            "rollout": {"num_groups": 1, "group_size": 2},
            "trainer": {"learning_rate": 1e-3, "algorithm": "grpo", "stream_groups": "off", **trainer},
        }
    )
    worker, made = TrainWorker(config, Tokens.generate()), Trainer()
    sent = SimpleNamespace(kind="delta", bytes_dense=1, bytes_sent=1, density=1.0)
    for name, value in {
        "_client": scheduler,
        "_trainer": made,
        "_publisher": SimpleNamespace(publish=lambda *_, **__: sent),
        "_attempt": 1,
    }.items():
        setattr(worker, name, value)
    return worker, made


def group(name: str, rewards: Sequence[float] = (0.0, 1.0)) -> list[dict[str, Any]]:
    turns = [turn([1], [2], versions=[["1.0", 0, 1]])]
    return [
        trajectory(turns, id=f"{name}{index}", group_id=name, reward=reward)
        for index, reward in enumerate(rewards)
    ]


async def test_what_was_trained_on_under_a_lease_that_ran_out_is_not_trained_on_again(tmp_path: Path) -> None:
    scheduler = Scheduler([group("a"), group("a"), group("b")])
    worker, trainer = worker_of(tmp_path, scheduler, checkpoint_every=8)
    await worker.train(1e-3)
    await worker.train(1e-3)
    assert trainer.steps == [["a0", "a1"], ["b0", "b1"]]
    assert scheduler.resumed == [["a0", "a1"]]
    assert trainer.num_saves == 1  # what is named is durable
