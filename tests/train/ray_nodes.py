"""Real Ray clusters of several nodes on this machine, and jobs on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rose.train import checkpoint as checkpoints
from tests.plugin.stand_in import eventually
from tests.train.ray_world import job_table
from tests.train.world import World

RUN = """
import json, os, subprocess, sys
from pathlib import Path

import psutil

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
        seen["programs"] = [" ".join(one.cmdline()) for one in psutil.Process().children(recursive=True)]
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


DEATHS = {"RAY_health_check_period_ms": "500"}
"""A node that refuses five connections in a row is dead: after seconds, where Ray's own setting is 3 s between two."""


class Node:
    """A ``ray start`` that stays in the foreground; what it has started ends with it.

    Args:
        beside: Command line that the node's is the end of.
    """

    def __init__(
        self,
        machine: Machine,
        *arguments: str,
        num_cpus: int = 1,
        beside: Sequence[str] = (),
    ) -> None:
        command = [*beside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
        command += [f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--disable-usage-stats"]
        command += ["--include-log-monitor=false"]
        # Where Ray says last of all that a head is there, and clients look for one.
        self._address = machine.root / "ray" / "ray_current_cluster" if "--head" in arguments else None
        self.log = machine.root / f"node-{len(list(machine.root.glob('node-*.log')))}.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=machine.environment(**DEATHS), stdout=out, stderr=subprocess.STDOUT
            )
        eventually(self._started, "the start of a Ray node", timeout_s=240)

    def _started(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        if self._address is not None and not (self._address.exists() and self._address.read_text()):
            return False
        return "Ray runtime started" in self.log.read_text()

    def kill(self) -> None:
        """As a machine that is switched off."""
        for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
            process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def alone_on_its_disk(folder: Path) -> list[str]:
    """Begins a command for which ``folder`` is its own, as on a local disk; nobody may do that everywhere."""
    own = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    return [*own, "sh", "-ec", 'mount -t tmpfs none "$0"; exec "$@"', str(folder)]


HEAD = ("--head", "--port=0", "--include-dashboard=false", "--no-monitor")


def driver(
    machine: Machine, world: World, head: str, *arguments: str, **changes: Any
) -> subprocess.Popen[str]:
    """A job on the cluster at ``head``; one line of JSON for each step and event."""
    table = job_table(world, log={"tensorboard": False}, **changes)
    (world.root / "job.json").write_text(json.dumps(table))
    world.tokens.save(world.root / "tokens.toml")
    command = [sys.executable, "-m", "tests.train.ray_world", str(world.root / "job.json")]
    return subprocess.Popen(
        [*command, str(world.root / "tokens.toml"), *arguments],
        env=machine.environment(RAY_ADDRESS=head),
        stdout=subprocess.PIPE,
        stderr=(world.root / "stderr").open("w"),
        text=True,
    )


def assert_applied_once(world: World, *, num_steps: int) -> checkpoints.Checkpoint:
    """Eight trajectories in each step, none of them twice, and none that the scheduler handed out is anywhere else; the newest checkpoint."""
    assert world.scheduler is not None
    counts = world.scheduler.store.book.counts("loop")
    newest, passed_over = checkpoints.load_latest(world.root / "out" / "checkpoints")
    assert newest is not None
    assert passed_over == []
    assert {step: len(ids) for step, ids in newest.consumed.items()} == dict.fromkeys(range(num_steps), 8)
    assert len(set(newest.consumed_ids)) == 8 * num_steps
    assert (counts["consumed"], counts["leased"]) == (8 * num_steps, 0)
    return newest
