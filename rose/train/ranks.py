"""A trainer on several ranks: one process each, all of them taking every call alike.

Rank 0 lives in the train worker's process; the others are :class:`TrainRank` actors.  :class:`RankedTrainer` is a
:class:`~rose.train.protocol.Trainer`: it sends each call to the others and makes it itself, because the collectives
inside need everybody.

A rank that dies leaves the others waiting in a collective, with weights that may have been half updated.  Then rank 0
ends its process: the actors replaces all ranks, and the new ones go on from the checkpoint.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rose.auth import Tokens
from rose.errors import WeightsError
from rose.train.batch import TrainingSequence, in_order, share_of
from rose.train.checkpoint import Checkpoint
from rose.train.protocol import Trainer, TrainReport
from rose.train.train_config import TrainConfig

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0
"""For a rank to start, and for a collective to end: longer than any step between two collectives."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By device.  What is counted lies in host memory on either."""

MakeTrainer = Callable[[TrainConfig], Any]
MakePublisher = Callable[[TrainConfig, Tokens, Any, int], Any]


class TrainRank:
    """One rank beyond the first; an actor."""

    def __init__(self, config: TrainConfig, make_trainer: MakeTrainer, rank: int) -> None:
        self._config = config
        self._make_trainer = make_trainer
        self._rank = rank
        self._trainer: Any = None
        self._publisher: Any = None

    def pid(self) -> int:
        return os.getpid()

    def join(self, host: str, port: int) -> None:
        """Meet the others at ``host:port`` and build this rank's share of the model."""
        _join(self._config, self._rank, host, port)
        self._trainer = self._make_trainer(self._config)

    def open_publisher(self, make: MakePublisher, tokens: Tokens, attempt: int) -> None:
        """Build the publisher of this rank's part."""
        self._publisher = make(self._config, tokens, self._trainer.module, attempt)

    def call(self, name: str, *arguments: Any, of: str = "trainer", **named: Any) -> None:
        """Take the call that every rank takes; the answer is rank 0's to give."""
        owner = self._trainer if of == "trainer" else self._publisher
        getattr(owner, name)(*arguments, **named)


class RankedTrainer:
    """See the module's docstring.

    Args:
        ranks: Handles of the :class:`TrainRank` actors, rank 1 first.
    """

    def __init__(self, config: TrainConfig, make_trainer: MakeTrainer, ranks: Sequence[Any]) -> None:
        self._ranks = ranks
        host, port = _address()
        joining = [rank.join.remote(host, port) for rank in ranks]
        _join(config, 0, host, port)
        self._trainer: Trainer = make_trainer(config)
        self._publisher: Any = None
        self._config = config
        self._wait(joining)
        self.vocab_size = self._trainer.vocab_size
        self.max_tokens = self._trainer.max_tokens

    @property
    def step_index(self) -> int:
        return self._trainer.step_index

    @property
    def module(self) -> Any:
        return self._trainer.module

    def step(
        self,
        samples: Sequence[TrainingSequence],
        *,
        learning_rate: float | None = None,
        single_update: bool = False,
    ) -> TrainReport:
        told = {"learning_rate": learning_rate, "single_update": single_update}
        ordered, world_size = in_order(samples), 1 + len(self._ranks)
        calls = [
            rank.call.remote("step", share_of(ordered, number, world_size), **told)
            for number, rank in enumerate(self._ranks, start=1)
        ]
        answer = self._own(self._trainer, "step", ordered, **told)
        self._wait(calls)
        return answer

    def save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        self._all("save", directory, attempt=attempt, version=version, consumed=dict(consumed), keep=keep)

    def begin_save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        self._all(
            "begin_save", directory, attempt=attempt, version=version, consumed=dict(consumed), keep=keep
        )

    def finish_save(self) -> None:
        """Of all ranks' parts: the first completes what the others have written."""
        self._own(self._trainer, "finish_save")

    def restore(self, checkpoint: Checkpoint) -> None:
        self._all("restore", checkpoint)

    def export(self, target: Path) -> None:
        self._all("export", target)

    def open_publisher(self, make: MakePublisher, tokens: Tokens, attempt: int) -> RankedPublisher:
        """Publishers of all ranks, each of its own part."""
        theirs = replace(tokens, publish_key="")  # rank 0, this one, signs
        opening = [rank.open_publisher.remote(make, theirs, attempt) for rank in self._ranks]
        self._publisher = make(self._config, tokens, self._trainer.module, attempt)
        self._wait(opening)
        return RankedPublisher(self)

    def publish(self, version: int, **told: Any) -> Any:
        """With every rank's publisher; rank 0's report."""
        return self._all("publish", version, **told, of="publisher")

    def _all(self, name: str, *arguments: Any, of: str = "trainer", **named: Any) -> Any:
        calls = [rank.call.remote(name, *arguments, of=of, **named) for rank in self._ranks]
        answer = self._own(self._trainer if of == "trainer" else self._publisher, name, *arguments, **named)
        self._wait(calls)
        return answer

    def _own(self, owner: Any, name: str, *arguments: Any, **named: Any) -> Any:
        """The first rank's part of a call."""
        try:
            return getattr(owner, name)(*arguments, **named)
        except (RuntimeError, WeightsError) as error:
            if isinstance(error, WeightsError) and error.field != "ranks":
                raise
            # A collective failed.  What this rank holds now is not to be trusted.
            logger.exception("a rank is gone; ending, to go on from the checkpoint")
            os._exit(1)

    def _wait(self, calls: Sequence[Any]) -> None:
        import ray
        from ray.exceptions import RayActorError

        try:
            ray.get(list(calls))
        except RayActorError:
            logger.exception("a rank is gone; ending, to go on from the checkpoint")
            os._exit(1)


class RankedPublisher:
    """A :class:`rose.train.workers.Publisher`."""

    def __init__(self, trainer: RankedTrainer) -> None:
        self._trainer = trainer

    def publish(self, version: int, *, step: int | None = None, lr: float | None = None) -> Any:
        return self._trainer.publish(version, step=step, lr=lr)


def _join(config: TrainConfig, rank: int, host: str, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(config.trainer.num_threads)
    if config.trainer.device == "cuda":
        torch.cuda.set_device(0)  # Ray shows each rank its own device alone
    dist.init_process_group(
        BACKENDS[config.trainer.device],
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=config.trainer.num_ranks,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
    )


def _address() -> tuple[str, int]:
    """Where the ranks meet: this node's address as the cluster sees it, and a port that was free a moment ago."""
    import ray

    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]
