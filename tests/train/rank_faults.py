"""One of two ranks to which something happens: ``python -m tests.train.rank_faults ends|disk|builds|meets HOW ARGUMENT``, told which one by the
variables of a launcher of torch programs.  It prints what it made of it."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from rose.errors import TrainError
from rose.train import checkpoint as checkpoints
from rose.train import ranks
from rose.train.build import torch_trainer
from rose.train.ranks import tells_of_a_lost_rank
from rose.train.train_config import TrainConfig

RANK = int(os.environ["RANK"])


def another_ends(how: str, seconds: float) -> None:
    """The second is killed, or hangs, between two sums."""
    dist.init_process_group("gloo")
    sums = torch.ones(3)
    dist.all_reduce(sums)
    _set_pg_timeout(timedelta(seconds=seconds))  # they have met: how long they took to start does not count
    if RANK == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 1:  # until the test has heard of the other
        signal.pause()
    try:
        dist.all_reduce(sums)
    except RuntimeError as error:
        print(tells_of_a_lost_rank(error), flush=True)


def slow_disk(how: str, folder: Path) -> None:
    """A checkpoint, of which one of them writes, hashes or reads its part slowly; or (``apart``) each has its own disk."""
    dist.init_process_group("gloo")
    if how.startswith("apart"):
        folder = folder / f"disk-{RANK}"
    clock: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(3))
    _set_pg_timeout(timedelta(seconds=1))  # they have met: how long they took to start does not count
    slow = {"written": "_writer", "read": "_reader"}.get(how, "_digest")
    if how == "refused":
        checkpoints.MAX_JSON_BYTES = 1000
    work, slow_rank = getattr(checkpoints, slow), [int(how in ("written", "read"))]

    def slowly(*arguments: Any) -> Any:
        """For longer than a step may take: as long as a message that nobody sends is waited for."""
        if RANK in slow_rank:
            slow_rank.clear()
            try:
                dist.recv(torch.zeros(1), src=1 - RANK, group=clock)
            except RuntimeError:
                pass
        return work(*arguments)

    setattr(checkpoints, slow, slowly)

    def at(step: int) -> checkpoints.Checkpoint:
        state = random.Random(0).getstate()
        weights = {name: torch.full((4,), float(step)) for name in "vw"}  # one is the second rank's to write
        return checkpoints.Checkpoint(
            step=step, attempt=1, version=step, consumed={}, shuffle_state=state, weights=weights
        )

    try:
        if how == "of the one before":
            writer = checkpoints.BackgroundWriter()
            writer.begin(at(1), folder)
            writer.begin(at(2), folder)
            writer.finish()
        elif how == "apart in the background":
            writer = checkpoints.BackgroundWriter()
            writer.begin(at(2), folder)
            writer.finish()
        else:
            path = checkpoints.save(at(2), folder)
            if how == "read":
                checkpoints.read_into({"weights/w": torch.zeros(4)}, path)
        print("done", flush=True)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what is asked for
        print(str(error).splitlines()[0], flush=True)


def two_rank_job(folder: Path) -> TrainConfig:
    table = {
        "job": "j",
        "model": str(folder / "model"),
        "output_dir": str(folder / "out"),
        "scheduler": {"url": "http://127.0.0.1:1"},
        "weights": {"directory": str(folder / "versions")},
        "trainer": {"learning_rate": 1e-3, "num_ranks": 2},
    }
    return TrainConfig.model_validate(table)


class Told(ranks.RankedTrainer):
    """Whose other rank is no actor: it reads in a file where they meet."""

    def __init__(self, config: TrainConfig, make_trainer: ranks.MakeTrainer) -> None:
        def tell(host: str, port: int) -> None:
            (config.output_dir / "new").write_text(f"{host} {port}")
            (config.output_dir / "new").rename(config.output_dir / "meet")

        sees, join = SimpleNamespace(remote=lambda _: None), SimpleNamespace(remote=tell)
        super().__init__(config, make_trainer, [SimpleNamespace(sees=sees, join=join)])

    def _wait(self, calls: Sequence[Any]) -> list[Any]:
        return [(True, "")]

    def _watch(self) -> None:
        """Ray knows nothing of it."""


def builds(how: str, folder: Path) -> None:
    """The model, of which the second is killed before it begins, or has no folder of it."""
    config = two_rank_job(folder)

    def make(config: TrainConfig) -> Any:
        if RANK == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if RANK == 1:
            config = config.model_copy(update={"model": folder / "none"})
        return torch_trainer(config)

    if RANK == 1:
        while not (config.output_dir / "meet").exists():
            time.sleep(0.02)
        host, port = (config.output_dir / "meet").read_text().split()
        ranks.TrainRank(config, make, 1).join(host, int(port))
    try:
        Told(config, make)
    except TrainError as error:
        print(error, flush=True)


def meets(place: str, own: str) -> None:
    """The other, at the first one's ``place``, on machines of which each goes by its ``own`` address."""
    host, port = place.split(":")
    ranks.JOIN_TIMEOUT_S = 60.0
    sums = torch.ones(1)
    try:
        listener = None
        if RANK == 0:
            listener = socket.socket()
            listener.bind((host, int(port)))
        ranks._join(two_rank_job(Path("/none")), RANK, host, int(port), own, listener)
        dist.all_reduce(sums)
        print(float(sums), flush=True)
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)


if __name__ == "__main__":
    what, how, argument = sys.argv[1:]
    if what == "ends":
        another_ends(how, float(argument))
    elif what == "meets":
        meets(how, argument)
    elif what == "builds":
        builds(how, Path(argument))
    else:
        slow_disk(how, Path(argument))
    os._exit(0)  # gloo's threads may abort an interpreter that ends
