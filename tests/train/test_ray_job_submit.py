"""``ray job submit`` on a real cluster with its dashboard, which is what takes jobs in."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_launcher import free_port
from tests.train.ray_nodes import RUN, Machine, Node

pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("aiohttp_cors") is None, reason="needs pip install 'ray[default]'"
    ),
]


@pytest.fixture
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))  # short: Unix sockets live in it
    yield Machine(root)
    shutil.rmtree(root, ignore_errors=True)


def test_a_submitted_job_joins_the_cluster_that_took_it_in(machine: Machine) -> None:
    """Its table names no cluster."""
    port = free_port()
    dashboard = ("--include-dashboard=true", f"--dashboard-port={port}", "--dashboard-agent-listen-port=0")
    head = Node(machine, "--head", "--port=0", *dashboard)
    address = (machine.root / "ray" / "ray_current_cluster").read_text()
    script = machine.root / "run.py"
    script.write_text(RUN)
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit"),
                *("--address", f"http://127.0.0.1:{port}"),
                *("--runtime-env-json", json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})),
                *("--", sys.executable, str(script), json.dumps(machine.job())),
            ],
            env=machine.environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        head.stop()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (said,) = [line for line in done.stdout.splitlines() if line.startswith('{"joined"')]
    assert json.loads(said)["joined"] == address
