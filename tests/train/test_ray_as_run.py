"""Ray as its users run it, on real clusters: what a private one leaves behind, which one is joined.

What happens on the machine, in this order: a run on a private cluster; `ray start --head`; everything else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.plugin.stand_in import eventually
from tests.train.ray_world import job_table
from tests.train.world import World, running_world

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = """
import json, os, subprocess, sys
from pathlib import Path
from rose.train.cluster import ray_for
from rose.train.train_config import TrainConfig

STRANGER = '''
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)
'''

def mine():
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}

config, before, seen = TrainConfig.model_validate(json.loads(sys.argv[1])), mine(), {}
with ray_for(config) as cluster:
    import ray
    seen["joined"] = cluster and cluster.address
    context = ray.get_runtime_context()
    seen["address"] = context.gcs_address
    if cluster is None:
        seen["path"] = path = ray.get(ray.remote(mine).remote())["RAY_AUTH_TOKEN_PATH"]
        seen["modes"] = [oct(os.stat(name).st_mode & 0o777) for name in (path, Path(path).parent)]
    if "look" in sys.argv:
        stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        command = [sys.executable, "-c", STRANGER, context.gcs_address]
        seen["stranger"] = subprocess.run(command, env=stranger, capture_output=True, text=True).stderr
seen["restored"] = mine() == before
seen["removed"] = not os.path.exists(seen.get("path", "/"))
print(json.dumps(seen))
"""
"""One run's Ray, as a driver of its own."""


class Machine:
    """A user's home and a place for Ray's files, so that nothing of another Ray on this machine is met."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.home.mkdir()

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own = {"HOME": str(self.home), "RAY_TMPDIR": str(self.root), "RAY_USAGE_STATS_ENABLED": "0"}
        return {**kept, **own, **more}

    def job(self, **ray_settings: Any) -> dict[str, Any]:
        return {
            "job": "j",
            "model": str(self.root),
            "output_dir": str(self.root / "out"),
            "scheduler": {"url": "http://127.0.0.1:1"},
            "weights": {"directory": str(self.root / "versions")},
            "trainer": {"learning_rate": 1e-6},
            "ray": ray_settings,
        }

    def run(self, table: dict[str, Any], *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", RUN, json.dumps(table), *arguments],
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))  # short: Unix sockets live in it
    yield Machine(root)
    shutil.rmtree(root, ignore_errors=True)


DEATHS = {"RAY_health_check_period_ms": "500"}
"""A node that refuses five connections in a row is dead: after seconds, where Ray's own setting is 3 s between two."""


class Node:
    """A ``ray start`` that stays in the foreground; what it has started ends with it."""

    def __init__(self, machine: Machine, *arguments: str, num_cpus: int = 1) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
        command += [f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--disable-usage-stats"]
        self.log = machine.root / f"{'-'.join(arguments)}.log".replace("/", "")
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=machine.environment(**DEATHS), stdout=out, stderr=subprocess.STDOUT
            )
        eventually(self._started, "the start of a Ray node", timeout_s=240)

    def _started(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "Ray runtime started" in self.log.read_text()

    def kill(self) -> None:
        """As a machine that is switched off."""
        for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
            process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


HEAD = ("--head", "--port=0", "--include-dashboard=false")


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


def driver(machine: Machine, world: World, head: str, **changes: Any) -> subprocess.Popen[str]:
    """A job on the cluster at ``head``; one line of JSON for each step and event."""
    table = job_table(world, log={"tensorboard": False}, **changes)
    (world.root / "job.json").write_text(json.dumps(table))
    world.tokens.save(world.root / "tokens.toml")
    command = [sys.executable, "-m", "tests.train.ray_world", str(world.root / "job.json")]
    return subprocess.Popen(
        [*command, str(world.root / "tokens.toml")],
        env=machine.environment(RAY_ADDRESS=head),
        stdout=subprocess.PIPE,
        stderr=(world.root / "stderr").open("w"),
        text=True,
    )


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
    assert "actor_died" in [one["event"] for one in told]
    assert {one["step"] for one in told} >= {0, 1, 2, 3}
