"""An actor does not outlive its node of Ray, whoever else lives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rose.train.cluster import ray_processes
from tests.plugin.stand_in import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

DRIVER = """
import json, os, sys
import ray
from rose.train.fate import with_its_node
from rose.train.ray_private import on_loopback, without_helpers

class Worker:
    def __init__(self, text, *, more):
        self.told = text + more

    async def about(self):
        return os.getpid(), type(self).__name__, self.told

with on_loopback(), without_helpers():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000,
             _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1])
worker = ray.remote(with_its_node(Worker)).remote("a", more="b")
print(json.dumps(ray.get(worker.about.remote())), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def driver(short_tmp: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", DRIVER, str(short_tmp / "r")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_an_actor_ends_with_its_node_while_driver_and_head_live(
    driver: subprocess.Popen[str], short_tmp: Path
) -> None:
    assert driver.stdout is not None
    pid, name, told = json.loads(driver.stdout.readline())
    assert (name, told) == ("Worker", "ab")
    worker = psutil.Process(pid)
    (node,) = [one for one in ray_processes(short_tmp / "r") if one.name() == "raylet"]
    assert worker.ppid() == node.pid
    node.kill()
    eventually(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "its end")
    assert driver.poll() is None
    assert any(one.name() == "gcs_server" for one in ray_processes(short_tmp / "r"))
