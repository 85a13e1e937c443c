"""A trainer that writes its checkpoints in the background, killed in the middle: what it called durable is there, whole, and of the right step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from rose.train import checkpoint as checkpoints
from rose.train.trainer import TorchTrainer
from tests.engine_launcher import fork_piped
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
