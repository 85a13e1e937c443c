"""Ray as its users run it, on real clusters: what a private one leaves behind, which one is joined.

What happens on the machine, in this order: a run on a private cluster; `ray start --head`; everything else.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.train.build import trainer_params
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer
from tests.plugin.stand_in import eventually
from tests.train.mortal import tries_of
from tests.train.ray_nodes import HEAD, Machine, Node, alone_on_its_disk, assert_applied_once, driver
from tests.train.ray_world import SHORT_LAKES
from tests.train.world import running_world

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))  # short: Unix sockets live in it
    yield Machine(root)
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def private_run(machine: Machine) -> dict[str, Any]:
    """What a run on a private cluster saw; the first thing that happens on the machine."""
    return seen(machine.run(machine.job(), "look"))


def test_a_private_cluster_leaves_nothing_in_the_home_folder(
    machine: Machine, private_run: dict[str, Any]
) -> None:
    assert list(machine.home.iterdir()) == []
    assert private_run["restored"]


def test_a_private_cluster_has_a_token_of_its_own_for_as_long_as_it_lives(
    private_run: dict[str, Any],
) -> None:
    assert private_run["modes"] == ["0o600", "0o700"]
    assert private_run["removed"]


def test_a_private_cluster_refuses_who_has_no_token(private_run: dict[str, Any]) -> None:
    assert private_run["address"].startswith("127.0.0.1:")
    assert "Unauthenticated" in private_run["stranger"] or "AuthToken" in private_run["stranger"]


def test_a_private_cluster_starts_no_program_that_nobody_asks(private_run: dict[str, Any]) -> None:
    """On few cores they take longer to start than the rest of it."""
    assert any("raylet" in one for one in private_run["programs"])
    for name in ("dashboard.py", "monitor.py", "log_monitor.py"):
        assert not [one for one in private_run["programs"] if f"/{name} " in one]


@pytest.fixture(scope="module")
def head(machine: Machine, private_run: dict[str, Any]) -> Iterator[str]:
    """The address of a cluster of one CPU, started where a run had a private one."""
    node = Node(machine, *HEAD)
    yield (machine.root / "ray" / "ray_current_cluster").read_text()
    node.stop()


def seen(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_cluster_that_runs_here_is_joined_and_stays(machine: Machine, head: str) -> None:
    assert seen(machine.run(machine.job()))["joined"] == head
    assert seen(machine.run(machine.job(address="auto")))["joined"] == head


def test_a_cluster_that_the_environment_names_is_joined(machine: Machine, head: str, tmp_path: Path) -> None:
    """As for a driver of ``ray job submit``, on which nothing else tells of the cluster."""
    found = seen(machine.run(machine.job(), RAY_ADDRESS=head, RAY_TMPDIR=str(tmp_path)))
    assert found["joined"] == head
    assert found["restored"]


def test_who_insists_on_a_private_cluster_gets_one_beside_it(machine: Machine, head: str) -> None:
    found = seen(machine.run(machine.job(address="local"), RAY_ADDRESS=head))
    assert found["joined"] is None
    assert found["address"] != head


def test_a_cluster_too_small_for_the_job_says_what_is_missing(
    machine: Machine, head: str, tmp_path: Path, policy_model: Path
) -> None:
    with running_world(tmp_path, policy_model) as world:
        job = driver(machine, world, head, env={"num_managers": 2}, ray={"address": "auto"})
        job.communicate(timeout=360)
    said = (tmp_path / "stderr").read_text()
    assert job.returncode == 1
    assert "the cluster has 1 CPUs on 1 nodes, 1 of them free; the job's actors want 3" in said
    assert "without room: 2 x environment manager (add nodes" in said


def test_a_job_that_waits_goes_on_when_nodes_come_and_when_one_dies(
    machine: Machine, head: str, tmp_path: Path, policy_model: Path
) -> None:
    """It takes no third step before the node is dead, on which some of its actors are: the other had not yet come when they found room."""
    gate = tmp_path / "gate"
    small = {
        "rollout": {"num_groups": 2, "group_size": 4},
        "env": {
            "kind": "tests.train.ray_world:gated",
            "num_managers": 2,
            "settings": {"path": str(gate)},
            "step_timeout_s": 600.0,
        },
    }
    settings = {"address": "auto", "when_too_small": "wait"}
    nodes: list[Node] = []
    with running_world(tmp_path, policy_model) as world:
        job = driver(machine, world, head, num_steps=4, ray=settings, **small)
        try:
            eventually(
                lambda: "waiting for room" in (tmp_path / "stderr").read_text(), "its word", timeout_s=240
            )
            nodes = [Node(machine, f"--address={head}", num_cpus=2) for _ in range(2)]
            assert job.stdout is not None
            told: list[dict[str, Any]] = []
            for line in job.stdout:
                if not line.startswith("{"):
                    continue  # Ray has its say too
                told.append(json.loads(line))
                if told[-1] == {"step": 0, "event": None} and nodes[0].process.poll() is None:
                    nodes[0].kill()
                    gate.touch()
            job.wait(360)
        finally:
            job.kill()
            for node in nodes[1:]:
                node.stop()
        assert job.returncode == 0, (tmp_path / "stderr").read_text()
        assert_applied_once(world, num_steps=4)
    assert "actor_died" in [one["event"] for one in told]
    assert {one["step"] for one in told} >= {0, 1, 2, 3}


@pytest.fixture(scope="module")
def small_nodes(machine: Machine, head: str) -> Iterator[Path]:
    """With the head's, three nodes of one CPU: two ranks are on two of them.  Given: a folder of which each has its own, as a local disk."""
    apart = machine.root / "apart"
    apart.mkdir()
    beside = alone_on_its_disk(apart)
    if subprocess.run([*beside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    with ExitStack() as nodes:
        for _ in range(2):
            nodes.callback(Node(machine, f"--address={head}", beside=beside).stop)
        yield apart


def test_ranks_of_which_each_has_an_output_folder_of_its_own_are_refused(
    machine: Machine, head: str, small_nodes: Path, tmp_path: Path, policy_model: Path
) -> None:
    """Before they load the model.  Their checkpoints would be whole by their hashes, and half of one."""
    with running_world(tmp_path, policy_model) as world:
        changes = {"output_dir": str(small_nodes), "trainer": {"num_ranks": 2}, "ray": {"address": "auto"}}
        job = driver(machine, world, head, **changes)
        job.communicate(timeout=360)
    said = (tmp_path / "stderr").read_text()
    assert job.returncode == 1
    assert f"output_dir: {small_nodes} of rank 1, on " in said
    assert ", is not that of rank 0, on " in said
    assert "(put it on storage that all nodes share)" in said
    assert not list(small_nodes.rglob(".shared-*"))


@pytest.mark.parametrize(
    ("trainer", "num_deaths"),
    [
        ("killed_in_a_step", 1),
        pytest.param("killed_in_a_step_and_a_checkpoint", 2, marks=pytest.mark.conformance),
    ],
)
def test_two_ranks_on_two_nodes_learn_as_one_does_and_one_that_is_lost_costs_no_sample(
    machine: Machine,
    head: str,
    small_nodes: Path,
    tmp_path: Path,
    policy_model: Path,
    trainer: str,
    num_deaths: int,
) -> None:
    """It is killed in the middle of a step, whose first update it has made; the other way, too, in the middle of a checkpoint."""
    whole = tmp_path / "model"
    shutil.copytree(policy_model, whole)
    for name, file in ((file.name, file) for file in policy_model.glob("*.safetensors")):
        save_file({key: one.float() for key, one in load_file(file).items()}, whole / name, {"format": "pt"})
    changes = {
        "rollout": {"num_groups": 2, "group_size": 4},
        "env": {"num_managers": 1, "settings": SHORT_LAKES},
        "trainer": {
            "num_ranks": 2,
            "fine_tuning_steps": 0,
            "policy_dtype": "float32",
            "stream_groups": "off",
        },
        "ray": {"address": "auto"},
    }
    with running_world(tmp_path, whole) as world:
        job = driver(machine, world, head, f"tests.train.mortal:{trainer}", num_steps=3, **changes)
        out, _ = job.communicate(timeout=500)
        assert job.returncode == 0, (tmp_path / "stderr").read_text()
        newest = assert_applied_once(world, num_steps=3)
        table = json.loads((tmp_path / "job.json").read_text())

    events = [json.loads(line)["event"] for line in out.splitlines() if line.startswith("{")]
    assert (events.count("actor_died"), newest.attempt) == (num_deaths, 1 + num_deaths)
    nodes = [(tmp_path / f"nodes-{rank}").read_text().splitlines() for rank in range(2)]
    assert [first != second for first, second in zip(*nodes, strict=True)] == [True] * (1 + num_deaths)
    tries = [tries_of(tmp_path, step) for step in range(3)]
    assert [len(one) for one in tries] == [1, 1 + num_deaths, 1]
    for step, told in enumerate(tries):
        # What was leased and not made durable is leased again, and nothing else.
        assert [{sample.trajectory_id for sample in one} for one in told] == [
            set(newest.consumed[step])
        ] * len(told)
    config = TrainConfig.model_validate(table)
    one_rank, two_ranks = (TorchTrainer(whole, trainer_params(config)) for _ in range(2))
    for step, told in enumerate(tries):
        one_rank.step(told[-1], learning_rate=config.learning_rate_at(step))
    two_ranks.restore(newest)
    for left, right in zip(one_rank.masters, two_ranks.masters, strict=True):
        assert torch.allclose(left, right, atol=2e-5)
