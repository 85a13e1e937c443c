"""The ``node.toml`` of ``docs/operating.md`` as it stands, with real engines: nothing before ``on``, an engine that starts and serves with it,
and nothing again after.

Only what names this machine is given on the command line: the directory, the model's folder and the port.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rose.auth import Tokens
from rose.config import load_config
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir
from rose.node_client import ControlClient
from rose.proc import free_port
from rose.units import PAGE_BYTES
from tests.engine_launcher import EngineServer
from tests.tiny_model import write_tiny_model

POLL = 7  # x86-64
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()
PROMPT = list(range(5, 105))
READY_S = 240.0
"""An engine of the idle class starts when others leave it a core."""


def block_of_page(first_line: str) -> str:
    """The fenced block of the page that begins with ``first_line``."""
    blocks = [block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.S) if block.startswith(first_line)]
    assert len(blocks) == 1
    return blocks[0]


class Node:
    """``rose node run`` beside a real production engine."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder / "n"
        self.port = free_port()
        self.log_path = folder / "node.log"
        self._folder = folder
        model = folder / "policy"
        write_tiny_model(model, seed=3)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
        self.tokens = Tokens.generate()
        self.tokens.save(folder / "tokens.toml")
        settings = folder / "node.toml"
        settings.write_text(block_of_page("# node.toml"))
        here = {"dir": str(self.dir), "engine.model": str(model), "engine.port": self.port}
        self._argv = [sys.executable, "-m", "rose.cli", "node", "run", f"--config={settings}"]
        self._argv += [f"--set={name}={json.dumps(value)}" for name, value in here.items()]

    @contextlib.contextmanager
    def running(self) -> Iterator[ControlClient]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("ROSE_", "VLLM_"))}
        env |= {
            "ROSE_TOKEN_FILE": str(self._folder / "tokens.toml"),
            "XDG_CACHE_HOME": str(self._folder / "cache"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(self._argv, env=env, stdout=log, stderr=log)
        client = ControlClient(self.dir, self.tokens)
        try:
            self.until(lambda: self.dir.joinpath("agent.sock").exists(), "the agent answers")
            yield client
        finally:
            client.close()
            self.process.terminate()
            self.process.wait(60)

    def below(self) -> list[int]:
        """Processes that the agent has started."""
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            tail = self.log_path.read_text()[-3000:]
            assert self.process.poll() is None, f"the agent has ended\n{tail}"
            assert time.monotonic() < deadline_s, f"never: {what}\n{tail}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operating")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EngineServer]:
    (folder / "n").mkdir(mode=0o700)
    write_tiny_model(folder / "production")
    env = {"ROSE_DIR": str(folder / "n"), "ROSE_GUARD": "1"}
    with EngineServer(folder / "production", role="serving", env=env) as server:
        yield server


def complete(server: EngineServer) -> str:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    answer = server.post("/v1/completions", {"model": str(server.model_dir), **body})
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


def parks_meanwhile(server: EngineServer) -> bool:
    """Did production's worker, once it was at work, park between two messages of a request, where vLLM's spins for a second?"""
    forked = [process for process in server.processes() if "tests.engine_launcher" in process.cmdline()]
    _api, _core, worker = sorted(forked, key=lambda process: len(process.parents()))
    running = threading.Thread(target=complete, args=(server,))
    running.start()
    at_work = parked = False
    while running.is_alive():
        now = Path(f"/proc/{worker.pid}/syscall").read_text().split()[0] == str(POLL)
        at_work |= not now
        parked |= at_work and now and running.is_alive()
    running.join()
    return parked


def shared_memory_of(pid: int) -> list[Path]:
    """Segments of ``/dev/shm`` that a process has mapped and nobody has unlinked."""
    with contextlib.suppress(psutil.Error):
        paths = [Path(each.path) for each in psutil.Process(pid).memory_maps()]
        return [path for path in paths if path.parent == Path("/dev/shm") and path.exists()]
    return []


def test_the_pages_settings_are_settings_of_a_node(folder: Path) -> None:
    path = folder / "as-it-stands.toml"
    path.write_text(block_of_page("# node.toml"))
    assert load_config(NodeConfig, path).mode == "observe"


@pytest.mark.engine
@pytest.mark.conformance
@pytest.mark.timeout(500)
def test_observe_then_on_then_observe_then_off_leaves_nothing(server: EngineServer, folder: Path) -> None:
    node, files = Node(folder), NodeDir(folder / "n")
    alone = complete(server)
    with node.running() as client:
        node.until(lambda: client.status()["observed"] is not None, "what could be lent is reported")
        assert complete(server) == alone
        status = client.status()
        assert status["mode"] == "observe"
        assert status["lending"]["harvestable_pages"] > 0
        assert (status["engine"]["starts"], status["rollout"]["alive"]) == (0, False)
        assert node.below() == []
        assert not parks_meanwhile(server)

        client.set(mode="on", engine=True)
        node.until(lambda: client.status()["engine"]["state"] == "ready", "the engine is ready", READY_S)
        node.until(lambda: client.status()["rollout"]["resident_pages"] > 0, "memory is lent")
        status = client.status()
        assert status["engine"]["starts"] == 1
        argv = psutil.Process(status["engine"]["pid"]).cmdline()
        assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(
            status["serving"]["total_pages"] * PAGE_BYTES
        )
        assert complete(server) == alone
        node.until(lambda: parks_meanwhile(server), "production parks while it waits for its worker")
        segments = [path for pid in node.below() for path in shared_memory_of(pid)]
        assert segments

        client.set(mode="observe")
        node.until(lambda: node.below() == [], "the engine is gone")
        node.until(
            lambda: client.status()["serving"]["reserved_pages"] == status["serving"]["total_pages"],
            "all is back",
        )
        assert complete(server) == alone

        proof = client.off(30.0)
        assert proof["given_back"]
        assert node.below() == []
        node.until(lambda: not [path for path in segments if path.exists()], "its shared memory is gone")
    lease, rank = files.serving_lease().read(), files.rank("serving", 0).read()
    assert lease is not None
    assert rank is not None
    assert lease.lent_pages == 0
    assert rank.resident_pages == lease.total_pages
    assert complete(server) == alone
    assert sorted(path.name for path in (folder / "n").iterdir()) == [
        *("serving.board", "serving.chunks", "serving.lease", "serving.rank0")
    ]
