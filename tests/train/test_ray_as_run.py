"""Ray as its users run it, on real clusters: what a private one leaves behind."""

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

import pytest

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RUN = """
import json, os, subprocess, sys
from pathlib import Path
from rose.train.cluster import private_ray
from rose.train.config import TrainConfig

STRANGER = '''
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)
'''

def mine():
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}

config, before, seen = TrainConfig.model_validate(json.loads(sys.argv[1])), mine(), {}
with private_ray(config):
    import ray
    context = ray.get_runtime_context()
    seen["address"] = context.gcs_address
    seen["inside"] = ray.get(ray.remote(mine).remote())
    path = seen["inside"].get("RAY_AUTH_TOKEN_PATH")
    seen["token"] = path and [oct(os.stat(path).st_mode & 0o777), oct(os.stat(Path(path).parent).st_mode & 0o777)]
    stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", STRANGER, context.gcs_address]
    seen["stranger"] = subprocess.run(command, env=stranger, capture_output=True, text=True).stderr
seen["restored"] = mine() == before
seen["removed"] = path is None or not os.path.exists(path)
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
            "ray": ray_settings,
        }

    def run(self, table: dict[str, Any], **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", RUN, json.dumps(table)],
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))  # short: Unix sockets live in it
    yield Machine(root)
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def private_run(machine: Machine) -> dict[str, Any]:
    """What a run on a private cluster saw; the first thing that happens on the machine."""
    done = machine.run(machine.job())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_private_cluster_leaves_nothing_in_the_home_folder(
    machine: Machine, private_run: dict[str, Any]
) -> None:
    assert list(machine.home.iterdir()) == []
    assert private_run["restored"]


def test_a_private_cluster_has_a_token_of_its_own_for_as_long_as_it_lives(
    private_run: dict[str, Any],
) -> None:
    assert private_run["token"] == ["0o600", "0o700"]
    assert private_run["removed"]


def test_a_private_cluster_refuses_who_has_no_token(private_run: dict[str, Any]) -> None:
    assert private_run["address"].startswith("127.0.0.1:")
    assert "Unauthenticated" in private_run["stranger"] or "AuthToken" in private_run["stranger"]
