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
from tests.train.world import World, running_world

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


AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")
"""As far as the kernel keeps a name."""


class Driver:
    """A run in a process of its own, whose Ray has its files in ``place``."""

    def __init__(self, world: World, place: Path, **changes: Any) -> None:
        self.errors = world.root / "stderr"
        table = job_table(world, **SMALL, **changes, ray={"temp_dir": str(place)})
        (world.root / "job.json").write_text(json.dumps(table))
        world.tokens.save(world.root / "tokens.toml")
        command = [sys.executable, "-m", "tests.train.ray_world", str(world.root / "job.json")]
        with self.errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, str(world.root / "tokens.toml")], stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def says(self, *, step: int | None = None, event: str | None = None) -> None:
        """Until it has said that this step is done, or that this has happened."""
        wanted = {"event": event} if step is None else {"step": step, "event": None}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if wanted.items() <= json.loads(line).items():
                return
        raise AssertionError(self.errors.read_text()[-3000:])

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.mark.parametrize("victim", ["raylet", pytest.param("gcs_server", marks=pytest.mark.conformance)])
def test_a_driver_killed_in_mid_step_goes_on_where_it_stopped_and_one_whose_ray_is_killed_says_so(
    tmp_path: Path, policy_model: Path, short_tmp: Path, victim: str
) -> None:
    """Of each driver's episodes ten begin: the first is killed in the middle of the second step, and the other, which goes on with that, when it
    cannot end the third.

    Ray does not outlive the first.  Its two agents, which work for nobody, may first try for a minute to tell the dead of the death.
    """
    env = {
        "kind": "tests.train.ray_world:gated",
        "settings": {"path": str(tmp_path / "never"), "num_free": 10},
        "step_timeout_s": 600.0,
    }
    with running_world(tmp_path, policy_model) as world:
        assert world.scheduler is not None
        book = world.scheduler.store.book
        first = Driver(world, short_tmp / "a", num_steps=10_000, env=env)
        first.says(step=0)
        eventually(lambda: book.counts("loop").get("finished") == 2, "two episodes of the second step")
        names = {process: process.name() for process in first.children()}
        agents = [process for process, name in names.items() if name.startswith(AGENTS)]
        assert len(agents) == 2
        first.process.send_signal(signal.SIGKILL)
        first.process.communicate()
        gone([process for process in names if process not in agents])

        second = Driver(world, short_tmp / "b", num_steps=10_000, env=env)
        second.says(step=1)
        second.says(event="rollout")
        children = second.children()
        (process,) = [each for each in ray_processes(short_tmp / "b") if each.name() == victim]
        process.kill()
        second.process.communicate(timeout=240)
        gone(children)
        gone(agents)
        consumed = book.counts("loop").get("consumed")

    assert "RunInterrupted: ray: a process of its Ray cluster was killed" in second.errors.read_text()
    newest, passed_over = checkpoints.load_latest(tmp_path / "out" / "checkpoints")
    assert newest is not None
    assert (newest.step, newest.attempt, passed_over) == (2, 2, [])
    assert [len(newest.consumed[step]) for step in range(2)] == [8] * 2
    assert len(set(newest.consumed_ids)) == 16 == consumed


class FailingTrainer(TorchTrainer):
    """Of the rank that the job's seed names: its third step fails before the others are done with theirs."""

    def step(self, samples: Sequence[TrainingSequence], **told: Any) -> TrainReport:
        if self.step_index == 2 and dist.get_rank() == self.params.seed:
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
def test_a_rank_that_dies_costs_an_attempt_and_an_error_of_one_is_told_as_what_it_is(
    tmp_path: Path, policy_model: Path, short_tmp: Path, rank: int, told: str
) -> None:
    """Nobody is replaced for the error: no rank is lost, and to begin anew would only bring it again."""
    assassin, died = Assassin({0: "TrainRank"}, mid_step=False), list[Any]()

    def progress(record: Mapping[str, Any]) -> None:
        died.extend([record] if record.get("event") == "actor_died" else [])
        assassin(record)

    with running_world(tmp_path, policy_model) as world:
        changes = {
            "trainer": {"num_ranks": 2, "fine_tuning_steps": 0},
            "ray": {"temp_dir": str(short_tmp / "a")},
            "eval": {"every_steps": 1, "num_tasks": 2, "background": True},
            "seed": rank,
        }
        config = TrainConfig.model_validate(job_table(world, num_steps=4, **SMALL, **changes))
        parts = Parts(make_publisher=file_publisher, make_trainer=failing_trainer)
        with pytest.raises(TrainError, match=f"{told}made-up shapes cannot be multiplied"):
            run_training(config, world.tokens, progress=progress, parts=parts)
        assert world.scheduler is not None
        consumed = world.scheduler.store.book.counts("loop").get("consumed")

    assert len(died) == 1
    # Each evaluation is of its step's weights; the rank dies when the first has been told, in the middle of the next step.
    assert [record["eval"]["version"] for record in assassin.records] == ["1.1", "2.2"]
    # Log-probs of engine and trainer agree: what two ranks published is what they compute with.
    assert all(record["logprob_diff_max"] < 1e-3 for record in assassin.records)
    newest, _ = checkpoints.load_latest(config.output_dir / "checkpoints")
    assert newest is not None
    assert (newest.step, newest.attempt) == (2, 2)
    assert len(set(newest.consumed_ids)) == 16 == consumed
