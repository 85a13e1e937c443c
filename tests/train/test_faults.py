"""Killed drivers and killed ranks: the job goes on from its checkpoint, and each trajectory is applied once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from rose.errors import TrainError
from rose.train import checkpoint as checkpoints
from rose.train.batch import TrainingSequence
from rose.train.build import trainer_params
from rose.train.cluster import ray_processes
from rose.train.loop import run_training
from rose.train.protocol import TrainReport
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer
from rose.train.workers import Parts
from tests.plugin.stand_in import eventually
from tests.train.file_publisher import file_publisher
from tests.train.ray_world import Assassin, job_table
from tests.train.world import running_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def gone(processes: list[psutil.Process]) -> None:
    """They end, on crowded cores after minutes; what their new parent has not yet collected has ended too."""

    def alive(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    try:
        eventually(lambda: not any(map(alive, processes)), "the end of Ray's processes", timeout_s=240)
    except AssertionError as error:
        left = [str(process) for process in processes if alive(process)]
        raise AssertionError(f"{error}: {left}") from None


SMALL: dict[str, Any] = {"rollout": {"num_groups": 2, "group_size": 4}, "log": {"tensorboard": False}}


def test_a_driver_killed_in_mid_step_goes_on_where_it_stopped(
    tmp_path: Path, policy_model: Path, short_tmp: Path
) -> None:
    with running_world(tmp_path, policy_model) as world:
        table = job_table(world, num_steps=3, **SMALL, ray={"temp_dir": str(short_tmp / "a")})
        (tmp_path / "job.json").write_text(json.dumps(table))
        world.tokens.save(tmp_path / "tokens.toml")
        command = [sys.executable, "-m", "tests.train.ray_world", str(tmp_path / "job.json")]
        driver = subprocess.Popen(
            [*command, str(tmp_path / "tokens.toml")], stdout=subprocess.PIPE, text=True
        )
        assert driver.stdout is not None
        for line in driver.stdout:
            if json.loads(line)["step"] == 0:
                break
        children = psutil.Process(driver.pid).children(recursive=True)
        for line in driver.stdout:
            if json.loads(line)["event"] == "rollout":
                break
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        gone(children)  # Ray does not outlive it

        table["ray"] = {"address": "local", "temp_dir": str(short_tmp / "b")}
        result = run_training(
            TrainConfig.model_validate(table), world.tokens, parts=Parts(make_publisher=file_publisher)
        )
        assert world.scheduler is not None
        consumed = world.scheduler.store.book.counts("loop").get("consumed")

    assert (result.num_steps, result.attempt) == (3, 2)
    newest, _ = checkpoints.load_latest(Path(table["output_dir"]) / "checkpoints")
    assert newest is not None
    assert [len(newest.consumed[step]) for step in range(3)] == [8] * 3
    assert len(set(newest.consumed_ids)) == 24 == consumed


@pytest.mark.parametrize("victim", ["raylet", pytest.param("gcs_server", marks=pytest.mark.conformance)])
def test_a_driver_whose_ray_cluster_is_killed_ends_and_says_so(
    tmp_path: Path, policy_model: Path, short_tmp: Path, victim: str
) -> None:
    with running_world(tmp_path, policy_model) as world, (tmp_path / "stderr").open("w") as stderr:
        table = job_table(world, num_steps=10_000, **SMALL, ray={"temp_dir": str(short_tmp / "a")})
        (tmp_path / "job.json").write_text(json.dumps(table))
        world.tokens.save(tmp_path / "tokens.toml")
        command = [sys.executable, "-m", "tests.train.ray_world", str(tmp_path / "job.json")]
        driver = subprocess.Popen(
            [*command, str(tmp_path / "tokens.toml")], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        assert driver.stdout is not None
        for line in driver.stdout:
            if json.loads(line)["step"] == 0:
                break
        else:
            raise AssertionError((tmp_path / "stderr").read_text()[-3000:])
        children = psutil.Process(driver.pid).children(recursive=True)
        (process,) = [each for each in ray_processes(short_tmp / "a") if each.name() == victim]
        process.kill()
        driver.communicate(timeout=240)
        gone(children)

    assert "RunInterrupted: ray: a process of its Ray cluster was killed" in (tmp_path / "stderr").read_text()


class FailingTrainer(TorchTrainer):
    """Of the rank that the job's seed names: its second step fails before the others are done with theirs."""

    def step(self, samples: Sequence[TrainingSequence], **told: Any) -> TrainReport:
        if self.step_index == 1 and dist.get_rank() == self.params.seed:
            raise RuntimeError("made-up shapes cannot be multiplied")
        return super().step(samples, **told)


def failing_trainer(config: TrainConfig) -> FailingTrainer:
    return FailingTrainer(config.model, trainer_params(config))


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        pytest.param(0, "an actor failed: RuntimeError: ", marks=pytest.mark.conformance),
        (1, "rank 1: RuntimeError: "),
    ],
)
def test_an_error_of_one_rank_is_told_as_what_it_is_and_nobody_is_replaced(
    tmp_path: Path, policy_model: Path, short_tmp: Path, rank: int, told: str
) -> None:
    """No rank is lost: to begin anew would only bring the same error again."""
    events: list[Mapping[str, Any]] = []
    with running_world(tmp_path, policy_model) as world:
        changes = {"trainer": {"num_ranks": 2, "fine_tuning_steps": 0}, "seed": rank}
        ray = {"temp_dir": str(short_tmp / "a")}
        config = TrainConfig.model_validate(job_table(world, num_steps=3, **SMALL, **changes, ray=ray))
        parts = Parts(make_publisher=file_publisher, make_trainer=failing_trainer)
        with pytest.raises(TrainError, match=f"{told}made-up shapes cannot be multiplied"):
            run_training(config, world.tokens, progress=events.append, parts=parts)
    assert not [event for event in events if event.get("event") == "actor_died"]


def test_a_rank_that_dies_costs_an_attempt_and_two_ranks_learn_as_one(
    tmp_path: Path, policy_model: Path, short_tmp: Path
) -> None:
    assassin = Assassin({0: "TrainRank"}, mid_step=False)
    with running_world(tmp_path, policy_model) as world:
        changes = {
            "trainer": {"num_ranks": 2, "fine_tuning_steps": 0},
            "ray": {"temp_dir": str(short_tmp / "a")},
            "eval": {"every_steps": 1, "num_tasks": 2, "background": True},
        }
        config = TrainConfig.model_validate(job_table(world, num_steps=2, **SMALL, **changes))

        result = run_training(
            config, world.tokens, progress=assassin, parts=Parts(make_publisher=file_publisher)
        )

    assert (result.num_steps, result.attempt) == (2, 2)
    # Each evaluation is of its step's weights; the rank dies when the first has been told, in the middle of the next step.
    assert [record["eval"]["version"] for record in assassin.records] == ["1.1", "2.2"]
    # Log-probs of engine and trainer agree: what two ranks published is what they compute with.
    assert all(record["logprob_diff_max"] < 1e-3 for record in assassin.records)
    newest, _ = checkpoints.load_latest(config.output_dir / "checkpoints")
    assert newest is not None
    assert len(set(newest.consumed_ids)) == 16
