"""A trainer killed in the middle of a checkpoint: what it called durable is there, whole, and of the right step."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rose.train import checkpoint as checkpoints
from rose.train.trainer import TorchTrainer
from tests.engine_launcher import Forked, fork_module, fork_piped, free_port
from tests.train.writer_main import PARAMS, samples


@pytest.mark.parametrize(("word", "step"), [("begun", 1), ("staged", 3), ("durable", 3)])
def test_what_was_durable_survives_a_kill(policy_model: Path, tmp_path: Path, word: str, step: int) -> None:
    durable = 0
    argv = [str(policy_model), str(tmp_path)]
    process, output = fork_piped("tests.train.writer_main", argv, os.environ)
    with output:
        for line in output:
            said, number = line.split()
            if said == "durable":
                durable = int(number)
            if (said, int(number)) == (word, step):
                break
            if word == "staged" and said == "begun" and int(number) == step:
                target = tmp_path / checkpoints.name_of(step, 1)
                while not target.exists() and not list(tmp_path.glob(".writing-*/*.safetensors")):
                    assert process.poll() is None
                break
        process.send_signal(signal.SIGKILL)
        process.wait()

    newest, passed_over = checkpoints.load_latest(tmp_path)
    assert passed_over == []
    if durable:
        assert newest is not None
        assert newest.step >= durable
    if newest is None:
        return
    assert newest.consumed_ids == [f"t{one}" for one in range(newest.step)]

    steady, resumed = (TorchTrainer(policy_model, PARAMS) for _ in range(2))
    for one in range(newest.step):
        steady.step(samples(one))
    resumed.restore(newest)
    for left, right in zip(steady.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(left, right)
    resumed.save(tmp_path, attempt=2, version=newest.step, consumed=newest.consumed, keep=2)
    assert not list(tmp_path.glob(".writing-*"))


class TwoRanks:
    """``tests/train/ranks_writer.py`` on two ranks, until they end.

    Args:
        at: Of each rank, the instant of its death while one checkpoint is written (:class:`tests.train.fuse.Fuse`).
    """

    def __init__(
        self, model: Path, folder: Path, name: str, how: str, at: tuple[str, str] = ("never", "never")
    ) -> None:
        self.checkpoints = folder / "checkpoints"
        port, ranks = str(free_port()), list[Forked]()
        outs = [folder / f"{name}-{rank}.out" for rank in range(2)]
        logs = [folder / f"{name}-{rank}.log" for rank in range(2)]
        for rank in range(2):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            argv = [str(model), str(self.checkpoints), how, at[rank]]
            ranks.append(fork_module("tests.train.ranks_writer", argv, env, {1: outs[rank], 2: logs[rank]}))
        try:
            self.codes = [process.wait(150) for process in ranks]
        finally:
            for process in ranks:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self.errors = "\n".join(log.read_text()[-2000:] for log in logs)
        self.said = [[json.loads(line) for line in out.read_text().splitlines()] for out in outs]

    def last(self, word: str, rank: int = 0) -> Any:
        return [told[word] for told in self.said[rank] if word in told][-1:]

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the newest checkpoint, its moments too, by file."""
        newest, passed_over = checkpoints.load_latest(self.checkpoints)
        assert newest is not None
        assert newest.path is not None
        assert passed_over == []
        assert (newest.step, newest.consumed_ids) == (3, ["t0", "t1", "t2"])
        files = sorted(newest.path.glob("*.safetensors"))
        return {f"{file.name}/{name}": one for file in files for name, one in load_file(file).items()}


@pytest.fixture(scope="module")
def undisturbed(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TwoRanks]:
    """By how the checkpoints are written."""
    found: dict[str, TwoRanks] = {}
    for how in ("waiting", "background"):
        found[how] = TwoRanks(policy_model, tmp_path_factory.mktemp(how), "whole", how)
        assert found[how].codes == [0, 0], found[how].errors
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("at", "how"),
    [
        (("open state.json", "never"), "waiting"),
        (("os.rename .writing-", "never"), "background"),
        (("shutil.rmtree /step-", "never"), "waiting"),
        (("never", "open shard-"), "background"),
        (("never", "fsync"), "waiting"),
        (("seeded", "seeded"), "background"),
    ],
)
def test_two_ranks_killed_in_one_checkpoint_go_on_from_the_newest_whole_one(
    undisturbed: dict[str, TwoRanks], policy_model: Path, tmp_path: Path, at: tuple[str, str], how: str
) -> None:
    """What they come to then is to the bit what they would have come to."""
    whole, rng = undisturbed[how], random.Random(0)
    if at[0] == "seeded":
        first, second = (str(rng.randint(1, whole.last("num_events", rank)[0])) for rank in range(2))
        at = first, second
    killed = TwoRanks(policy_model, tmp_path, "killed", how, at)
    assert -signal.SIGKILL in [killed.codes[rank] for rank in range(2) if at[rank] != "never"], killed.errors
    assert 0 not in killed.codes

    again = TwoRanks(policy_model, tmp_path, "again", how)
    assert again.codes == [0, 0], again.errors
    for rank in range(2):
        (step,) = again.last("from", rank)
        assert step >= max([0, *killed.last("durable")])
        assert again.last("ids", rank) == [[f"t{one}" for one in range(step)]]
        assert again.last("passed_over", rank) == [[]]
    assert not list(again.checkpoints.glob(".writing-*"))
    expected, found = whole.weights(), again.weights()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
