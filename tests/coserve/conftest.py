"""A device for the node agent: production that writes the serving files, and an engine that is real but for its model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from typer.testing import CliRunner, Result

from rose.auth import Tokens
from rose.config import validate
from rose.coserve.agent import NodeAgent
from rose.coserve.cli import app as cli
from rose.coserve.host_checks import Check
from rose.coserve.links import WeightSource
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir
from rose.coserve.policies import PolicyCopies
from rose.coserve.records import Phase, ServingBoard, ServingLease
from rose.errors import EngineError
from rose.node_client import ControlClient
from rose.policy.compat import Support
from rose.proc import free_port
from rose.proc_share import lift_what_is_left

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
TOTAL_PAGES = 20
"""With a minimum headroom of 10 %: at most 18 lent, of which the fake engine uses 16."""
BY_DEFAULT: dict[str, Any] = {"sched": None}
"""Engine settings: the scheduling class is the agent's choice, beside production the idle one."""

_LOOPBACKS = Path("/proc/net/if_inet6")
needs_ipv6 = pytest.mark.skipif(
    not _LOOPBACKS.exists() or " lo\n" not in _LOOPBACKS.read_text(), reason="this machine has no IPv6"
)


async def until(condition: Callable[[], bool], what: str = "condition", timeout_s: float = 240.0) -> None:
    """Other processes have no event to wait for; this looks until they got there."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Production:
    """The serving engine's side of the files: lends what it is asked to, takes back what is free."""

    def __init__(self, path: Path) -> None:
        self._dir = NodeDir(path)
        self._lease = self._dir.serving_lease_writer()
        self._board = self._dir.serving_board_writer()
        self._node, self._peer = self._dir.node(), self._dir.rollout_lease()
        self.phase = Phase.READY
        self.support = Support.ELASTIC
        self.total_pages = TOTAL_PAGES
        self.used = 0
        self.needed = 0
        self.errors = 0
        self.overdrawn = 0
        """Looks at which the rollout engine's memory and what production had kept for itself were more than the device has."""
        self._rank, self._kept = self._dir.rank("rollout", 0), 0
        self.publish()
        self._task = asyncio.create_task(self._run())

    def publish(self) -> None:
        node = self._node.read()
        lend = node.lend_pages if node is not None and self._node.alive() else 0
        rank = self._rank.read()
        resident = rank.resident_pages if rank is not None and self._rank.alive() else 0
        self.overdrawn += self._kept + resident > TOTAL_PAGES
        # Smaller at once; larger only into pages that the peer does not have, nor came to have while this was said.
        reserved = max(TOTAL_PAGES - lend, 0)
        for _ in range(2):
            peer = self._peer.read()
            held = peer.reserved_pages if peer is not None and self._peer.alive() else 0
            reserved = min(reserved, TOTAL_PAGES - held)
            self._lease.write(
                ServingLease(
                    phase=self.phase,
                    support=self.support,
                    total_pages=self.total_pages,
                    reserved_pages=min(reserved, self.total_pages),
                    heartbeat_ns=time.monotonic_ns(),
                    errors=self.errors,
                )
            )
        self._kept = reserved
        self._board.write(
            ServingBoard(used_pages=self.used, needed_pages=self.needed, written_ns=time.monotonic_ns())
        )
        self._board.wake()

    async def _run(self) -> None:
        while True:
            self.publish()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._lease.close()
        self._board.close()


class Device:
    """One node directory with everything that a test may start on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dir = path / "n"
        self.tokens = Tokens.generate()
        self.token_file = path / "tokens.toml"
        self.tokens.save(self.token_file)
        self.report_path = path / "engine.json"
        self.log_path = path / "engine.log"
        self.production: Production | None = None
        self.agents: list[tuple[NodeAgent, asyncio.Task[None]]] = []

    def table(self, fake: str = "", **change: Any) -> dict[str, Any]:
        """Settings of the node agent, as in its TOML file."""
        engine = {
            "model": "policy",
            "command": [sys.executable, str(FAKE_ENGINE)],
            "port": free_port(),
            "max_model_len": 256,
            # Where others keep every core busy an engine of the idle class takes a minute to start: tests of who yields to whom say so.
            "sched": "normal",
            "env": {"FAKE_MODE": fake, "FAKE_REPORT": str(self.report_path)},
            "log_path": str(self.log_path),
            "stop_grace_s": 0.2,
            "restart_pause_s": 0.001,
            **change.pop("engine", {}),
        }
        lending = {
            # Not what most tests are about: those that are have their own.
            "reclaim_deadline_s": 30.0,
            "dead_after_s": 30.0,
            "grow_period_s": 0.05,
            "cool_down_s": 0.2,
            "growth_window_s": 1.0,
            "use_window_s": 0.01,
            "period_s": 0.02,
            **change.pop("lending", {}),
        }
        return {
            "node_id": "n0",
            "dir": str(self.dir),
            "token_file": str(self.token_file),
            "serving": {},
            "mode": "on",
            "engine": engine,
            "lending": lending,
            **change,
        }

    def agent(
        self,
        fake: str = "",
        source: WeightSource | PolicyCopies | None = None,
        changed_at_s: float = 0.0,
        **change: Any,
    ) -> NodeAgent:
        """Run a node agent on this loop until the test ends."""
        table = {k: v for k, v in self.table(fake, **change).items() if v is not None}
        agent = NodeAgent(validate(NodeConfig, table), self.tokens, source, changed_at_s)
        self.agents.append((agent, asyncio.create_task(agent.run())))
        return agent

    def produce(self) -> Production:
        self.production = Production(self.dir)
        return self.production

    def report(self) -> dict[str, Any]:
        """What the engine saw at its start."""
        return json.loads(self.report_path.read_text())

    def resident_pages(self) -> int:
        record = NodeDir(self.dir).rank("rollout", 0).read()
        return record.resident_pages if record is not None else -1

    async def stop_agents(self) -> None:
        for agent, task in self.agents:
            agent.stop()
            await asyncio.wait_for(task, 60.0)
        self.agents.clear()

    async def close(self) -> None:
        for agent, task in self.agents:
            agent.stop()
            await asyncio.gather(task, return_exceptions=True)
        if self.production is not None:
            await self.production.stop()


async def ready(device: Device, agent: object) -> None:
    await until(lambda: agent.engine.state == "ready", "engine ready")  # type: ignore[attr-defined]


async def ready_in_the_idle_class(device: Device, agent: NodeAgent, pages: int | None = None) -> None:
    """Wait for an engine of :data:`BY_DEFAULT`, which is of the idle class when this returns.

    It is started in that class, and has a normal share until it is up: where others keep every core busy its imports alone would take a
    minute.  Where only its threads yield they are left as they are: what it says of its own class is looked at.

    Args:
        pages: What it has been lent by then; None: nobody asks.
    """
    await until(lambda: agent.engine.running, "engine started")
    if agent.engine.describe()["idle_by"] != "class":
        await share_set(agent, "normal")
    await ready(device, agent)
    if pages is not None:
        await lent(device, pages)
    await share_set(agent, "idle")


async def share_set(agent: NodeAgent, sched: Literal["normal", "idle"]) -> None:
    """As ``rose node set --sched``, until the kernel lets us: it may ask for patience."""

    def is_set() -> bool:
        with suppress(EngineError):
            agent.engine.set_sched(sched)
        return agent.engine.sched == sched

    await until(is_set, f"a share that is {sched}")


def stop_sentinel(agent: NodeAgent) -> None:
    """What is killed from here on is killed by the agent, however late it is."""
    sentinel = agent.engine._sentinel
    assert sentinel is not None
    os.kill(sentinel.pid, signal.SIGSTOP)


async def lent(device: Device, pages: int) -> None:
    await until(
        lambda: device.resident_pages() == pages, f"{pages} pages resident, not {device.resident_pages()}"
    )


async def turned_on(device: Device, wait_s: float) -> Result:
    """``rose node on --wait``."""
    arguments = ["on", f"--dir={device.dir}", f"--token-file={device.token_file}", f"--wait={wait_s}"]
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments)


class control:
    """A client of the device's agent."""

    def __init__(self, device: Device) -> None:
        self._client = ControlClient(device.dir, device.tokens)

    async def __aenter__(self) -> ControlClient:
        return self._client

    async def __aexit__(self, *_: object) -> None:
        self._client.close()


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    device = Device(tmp_path)
    yield device
    await device.close()


@pytest.fixture
def left_group() -> Iterator[Path]:
    """The cgroup of a supervisor that is dead, with a process in it that is not; skips where this machine gives none."""
    made = subprocess.run(
        [sys.executable, "-c", "from rose.proc_share import idle_share; print(idle_share().directory or '')"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if not made:
        pytest.skip("this machine gives no cgroup of the idle class")
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            (Path(made) / "cgroup.procs").write_text(str(process.pid))
            yield Path(made)
        finally:
            process.kill()
    lift_what_is_left()
    assert not Path(made).exists()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """On the tmpfs where node directories are."""
    with tempfile.TemporaryDirectory(prefix="rose-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def on_scratch(scratch: Path, **more: Any) -> NodeConfig:
    """Settings of a node there."""
    engine = {"model": "policy", "max_model_len": 512, "port": free_port()} | more.pop("engine", {})
    return validate(NodeConfig, {"node_id": "a", "dir": str(scratch / "n"), "engine": engine} | more)


def only(found: list[Check]) -> Check:
    (one,) = found
    return one
