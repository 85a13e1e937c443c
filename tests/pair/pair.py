"""Production, its node agent with the sentinel, and a rollout engine, all real and tiny, with load on both sides.

For programs and tests that do something to one of them and look what it costs production.  Who looks at memory is this process, at the
kernel's own figure (which pages of both KV allocations are present); who looks at production is its client: what it answers, and
how long it is silent.

The engines are vLLM's servers, forked from one import of vLLM instead of three; the agent is ``rose node run``, started again
when it dies, as a service manager does it.  It is a member of a cgroup of either kind that can be frozen, where this machine has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.coserving.rollouts import Registry, Trajectories
from rose.auth import ENV_TOKEN_FILE, Tokens
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import RolloutLease, ServingLease
from rose.errors import LedgerError, RoseError
from rose.node_client import ControlClient
from tests.engine_launcher import BASE_ENV, ROOT, SCRUBBED, SERVE_COMMAND, EngineServer, free_port
from tests.freezer import Freezer, Version, found_freezer
from tests.pair.load import Load
from tests.pair.memory import KV_BYTES, TOTAL_PAGES, Memory, writer_of
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

SHAPE: dict[str, Any] = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "head_size": 64}
"""4 KiB of KV memory per token: two dozen requests are most of the device."""
SEATS = 48
PRODUCTION_ARGS = (f"--kv-cache-memory-bytes={KV_BYTES}", f"--max-num-seqs={SEATS}")
NUM_TRAJECTORIES = 16
HELD_PAGES = 12
"""So much has the rollout engine before anything is done to anybody."""

CONFIG = """
node_id = "pair"
dir = "{dir}"
mode = "off"
[serving]
slo_ttft_ms = 60000
slo_tpot_ms = 60000
[engine]
model = "{model}"
command = {command}
args = ["--dtype=bfloat16", "--max-num-seqs=32"]
port = {port}
max_model_len = 512
log_path = "{log}"
restart_pause_s = 0.2
restart_window_s = 1.0
[lending]
grow_period_s = 0.05
cool_down_s = 0.2
growth_window_s = 1.0
use_window_s = 0.5
cut_window_s = 1.0
max_hit_rate_loss = 1.0
[scheduler]
url = "{registry}"
"""
"""Loans come back quickly, and dozens of bursts and deaths in a row do not make them smaller: else most of the time would be spent
waiting.  What is not changed is what is tried: deadlines, silences, and the engine's idle class."""


def write_production(folder: Path) -> None:
    """The model that production serves."""
    write_tiny_model(folder, seed=1, **SHAPE)


@dataclass
class Agent:
    """``rose node run``, started again when it dies."""

    command: list[str]
    env: dict[str, str]
    log_path: Path
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._start()
        threading.Thread(target=self._keep, daemon=True).start()

    def _start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, env=self.env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.starts += 1

    def _keep(self) -> None:
        while not self._stop.wait(0.1):
            if self._process is not None and self._process.poll() is not None:
                self._start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        self._stop.set()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair:
    """See the module; an async context manager that starts production, the agent and the load.

    Args:
        folder: For models and logs.
        seed: Of the load.
        args: Of production, added last.
        busy: Have clients ask production all the time.

    Attributes:
        dir: The node directory, in a small tmpfs of its own where this process may mount one.
        total_pages: Of production's KV memory.
    """

    def __init__(self, folder: Path, *, seed: int, args: Sequence[str] = (), busy: bool = True) -> None:
        self.folder = folder
        self.model = folder / "production"
        self._rng = random.Random(f"load {seed}")
        self._args, self._busy = [*PRODUCTION_ARGS, *args], busy
        self.freezers: dict[Version, Freezer] = {}
        self.server: EngineServer | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Pair:
        try:
            await self._enter()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _enter(self) -> None:
        enter = self._stack.enter_context
        self.folder.mkdir(parents=True, exist_ok=True)
        self.volume = enter(_volume())
        self.dir = self.volume / "n"
        self.dir.mkdir(mode=0o700)
        self.files = NodeDir(self.dir)
        write_production(self.model)
        write_tiny_model(self.folder / "policy", seed=2, **SHAPE)
        self.tokens = Tokens.generate()
        self.tokens.save(self.folder / "tokens.toml")
        for version in ("v1", "v2"):
            group = enter(found_freezer(version))
            if group is not None:
                self.freezers[version] = group
        self.registry = await self._stack.enter_async_context(Registry(free_port()))
        self._stack.callback(self._end_production)
        await asyncio.to_thread(self.start_production)
        self.load = await self._stack.enter_async_context(Load(str(self.model), lambda: self.url, self._rng))
        if self._busy:
            await self.load.learn()
        self.agent = Agent(self._agent_command(), self._agent_env(), self.folder / "agent.log")
        self._stack.callback(self.agent.close)
        self.agent.start()
        self._client = ControlClient(self.dir, self.tokens)
        self._stack.callback(self._client.close)
        self.memory = Memory(self.dir, self.production_pids, self.engine_pids)
        self._stack.callback(self.memory.close)
        self.rollouts = await self._stack.enter_async_context(
            Trajectories(self.registry, NUM_TRAJECTORIES, VOCAB_SIZE - 50, 7)
        )
        await self.until(lambda: self.status() is not None, "the agent answers")

    # -- production

    def start_production(self) -> None:
        """Start it, for the first time or again."""
        server = EngineServer(self.model, role="serving", env={"ROSE_DIR": str(self.dir)}, args=self._args)
        self.server = server.__enter__()

    def _end_production(self) -> None:
        if self.server is not None:
            log = self.server.log_path.read_bytes()
            self.server.__exit__()
            self.server = None
            with (self.folder / "production.log").open("ab") as kept:
                kept.write(log)

    async def become(self, model: Path, args: Sequence[str]) -> None:
        """Let production be another engine from now on.

        Raises:
            EngineStartError: It does not start; there is no production then.
        """
        self.model, self._args = model, [*PRODUCTION_ARGS, *args]
        await self.restart_production()

    async def restart_production(self, *, kill: bool = False) -> None:
        """End it as a service manager does, or by SIGKILL, and start it anew; nobody asks it anything meanwhile."""
        await self.load.pause()
        self.memory.forget_production()
        if kill:
            for pid in self.production_pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self._end_production)
        await asyncio.to_thread(self.start_production)
        self.load.go_on()

    @property
    def url(self) -> str:
        assert self.server is not None
        return self.server.url

    def production_pids(self) -> list[int]:
        return [one.pid for one in self.server.processes()] if self.server is not None else []

    # -- the agent's side

    def _agent_command(self) -> list[str]:
        settings = self.folder / "node.toml"
        settings.write_text(
            CONFIG.format(
                dir=self.dir,
                model=self.folder / "policy",
                command=json.dumps(list(SERVE_COMMAND)),
                port=free_port(),
                log=self.folder / "engine.log",
                registry=self.registry.url,
            )
        )
        command = [sys.executable, "-m", "rose.cli", "node", "run", f"--config={settings}"]
        for group in self.freezers.values():
            command = group.command(*command)
        return command

    def _agent_env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
        own = {ENV_TOKEN_FILE: str(self.folder / "tokens.toml"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        return env | BASE_ENV | own

    def engine_pids(self) -> list[int]:
        """Everything below the agent."""
        with contextlib.suppress(psutil.Error):
            return [one.pid for one in psutil.Process(self.agent.pid).children(recursive=True)]
        return []

    def pid_of(self, who: str) -> int | None:
        """``agent``, ``guard``, ``sentinel``, or of the rollout engine: ``engine`` (its API server), ``core``, ``worker``."""
        if who == "agent":
            return self.agent.pid
        below = self.engine_pids()
        if who == "sentinel":
            for pid in below:
                with contextlib.suppress(psutil.Error):
                    if "rose.coserve.sentinel" in psutil.Process(pid).cmdline():
                        return pid
            return None
        if who == "guard":
            core = self.pid_of("core")
            return None if core is None else os.getsid(core)
        if who == "engine":
            status = self.status()
            return None if status is None else status["engine"]["pid"]
        return writer_of(below, self.dir / {"core": "rollout.lease", "worker": "rollout.rank0"}[who])

    def status(self) -> dict[str, Any] | None:
        """The agent's; None where it does not answer."""
        try:
            return self._client.status()
        except RoseError:
            return None

    def set_mode(self, mode: str, **more: Any) -> bool:
        """Tell the agent (``rose node set``); False where it does not answer."""
        try:
            self._client.set(mode=mode, **more)
        except RoseError:
            return False
        return True

    def off(self) -> bool:
        """``rose node off``: did the agent hear it?  It says when the rollout engine holds nothing."""
        client = ControlClient(self.dir, self.tokens)  # of its own: the other may be waiting
        try:
            client.off(30.0)
        except RoseError:
            return False
        finally:
            client.close()
        return True

    def lease(self) -> ServingLease | None:
        with contextlib.suppress(LedgerError):
            return self.files.serving_lease().read()
        return None

    def rollout(self) -> RolloutLease | None:
        with contextlib.suppress(LedgerError):
            reader = self.files.rollout_lease()
            return reader.read() if reader.alive() else None
        return None

    def is_lent(self) -> bool:
        """Does a ready rollout engine hold what was lent to it?"""
        held, status = self.rollout(), self.status()
        return (
            held is not None
            and held.reserved_pages >= HELD_PAGES
            and status is not None
            and status["engine"]["state"] == "ready"
        )

    async def lend(self, timeout_s: float = 180.0) -> None:
        """Wait until memory is lent.  Clients rest meanwhile: beside those that never do a new engine of the idle class takes minutes
        to start.

        Raises:
            TimeoutError: It is not.
        """
        if await asyncio.to_thread(self.is_lent):
            return
        await self.load.pause()
        try:
            await self.until(self.is_lent, "memory is lent", timeout_s)
        finally:
            self.load.go_on()

    def all_back(self) -> bool:
        """Has production all of its memory, by the kernel's word?"""
        return self.memory.serving_pages >= TOTAL_PAGES

    async def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 180.0) -> float:
        """Seconds until ``condition`` is true.

        Raises:
            TimeoutError: It was not; names ``what`` and the end of the agent's log.
        """
        began_s = time.monotonic()
        while not await asyncio.to_thread(condition):
            if time.monotonic() - began_s > timeout_s:
                tail = self.agent.log_path.read_text(errors="replace")[-2000:]
                raise TimeoutError(f"never: {what}\n{tail}")
            await asyncio.sleep(0.02)
        return time.monotonic() - began_s


@contextlib.contextmanager
def _volume() -> Iterator[Path]:
    """A tmpfs of 4 MiB, so that it can be filled; a plain folder of ``/dev/shm`` where nobody may mount."""
    folder = Path(tempfile.mkdtemp(prefix="rose-pair-", dir="/dev/shm"))
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    ).returncode
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        subprocess.run(["rm", "-rf", str(folder)], check=False)
