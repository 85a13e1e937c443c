"""MPS: never unasked; and with it a client's work is ended before the client is killed, whoever kills it.

The control program is a stand-in on PATH: a real program that notes what it is asked, and who still lives at that moment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.coserve import mps
from rose.coserve.engine import RolloutEngine
from rose.coserve.node_config import NodeConfig
from rose.proc import Child, ProcSpec

ENGINE = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(worker.pid, flush=True)
time.sleep(600)
"""
CONTROL = """#!{python} -IS
import json, os, sys, time
state = {state!r}
clients = json.load(open(state + "/clients")) if os.path.exists(state + "/clients") else []
def alive(pid):
    try:
        return open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
command = sys.stdin.read().strip()
entry = {{"command": command, "alive": [p for p in clients if alive(p)], "pipe": os.environ.get("CUDA_MPS_PIPE_DIRECTORY")}}
with open(state + "/asked", "a") as file:
    file.write(json.dumps(entry) + "\\n")
if os.path.exists(state + "/hang"):
    time.sleep(600)
if os.path.exists(state + "/down"):
    print("Cannot find MPS control daemon process")
    sys.exit(1)
if command == "get_server_list":
    print(77)
elif command == "get_client_list 77":
    print("\\n".join(map(str, clients)))
"""


class Control:
    """The stand-in, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / mps.CONTROL
        self.program.write_text(CONTROL.format(python=sys.executable, state=str(folder)))
        self.program.chmod(0o700)

    def clients(self, pids: list[int]) -> None:
        (self.folder / "clients").write_text(json.dumps(pids))

    def asked(self) -> list[dict[str, Any]]:
        path = self.folder / "asked"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def terminated(self) -> list[tuple[str, list[int]]]:
        """Which client, and which clients lived then."""
        return [
            (entry["command"], sorted(entry["alive"]))
            for entry in self.asked()
            if entry["command"].startswith("terminate_client")
        ]


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(mps, "ASK_S", 60.0)  # the stand-in starts an interpreter
    return Control(folder)


def spec(control: Control, tmp_path: Path, **change: Any) -> ProcSpec:
    return ProcSpec(
        name="engine",
        argv=(sys.executable, "-c", ENGINE),
        log_path=tmp_path / "engine.log",
        before_kill=mps.before_kill(str(control.program)),
        # Generous, for a test on a loaded machine; how short it really is follows from the deadline.
        **{"before_kill_s": 20.0, **change},
    )


@pytest.fixture
def engine(control: Control, tmp_path: Path) -> Any:
    with Child.start(spec(control, tmp_path)) as child:
        until(lambda: child.log_tail().strip().isdigit())
        yield child


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition did not come true"
        time.sleep(0.01)


def tree(child: Child) -> list[int]:
    """The engine and its worker, which are MPS clients; the guard is none."""
    return sorted([child.pid, int(child.log_tail())])


def gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") and _state(pid) != "Z" for pid in pids)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_kill_ends_the_work_of_every_client_of_the_tree_first(engine: Child, control: Control) -> None:
    pids = tree(engine)
    control.clients([*pids, os.getpid()])  # production is a client too
    engine.kill()
    assert sorted(control.terminated()) == [
        (f"terminate_client 77 {pid}", sorted([*pids, os.getpid()])) for pid in sorted(pids, key=str)
    ]
    assert gone(pids)


def test_the_sentinels_kill_does_so_too(engine: Child, control: Control) -> None:
    pids = tree(engine)
    control.clients(pids)
    engine.signal(signal.SIGSTOP)
    os.kill(engine.guard_pid, signal.SIGUSR2)  # what the sentinel sends
    until(lambda: gone(pids))
    assert [alive for _, alive in control.terminated()] == [pids, pids]


def test_the_kill_after_a_dead_agent_does_so_too(control: Control, tmp_path: Path) -> None:
    agent = (
        "import json, sys, time; from rose.proc import Child, ProcSpec;"
        "s = json.loads(sys.argv[1]);"
        "c = Child.start(ProcSpec(name='e', argv=tuple(s['argv']), before_kill=tuple(s['before']), before_kill_s=20.0));"
        "print(c.pid, flush=True); time.sleep(600)"
    )
    given = json.dumps(
        {
            "argv": [sys.executable, "-c", "import time; time.sleep(600)"],
            "before": mps.before_kill(str(control.program)),
        }
    )
    process = subprocess.Popen([sys.executable, "-c", agent, given], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        pid = int(process.stdout.readline())
        control.clients([pid])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    until(lambda: gone([pid]))
    assert control.terminated() == [(f"terminate_client 77 {pid}", [pid])]


def test_a_control_program_that_hangs_delays_the_kill_by_its_limit_and_no_more(
    control: Control, tmp_path: Path
) -> None:
    (control.folder / "hang").touch()
    child = Child.start(spec(control, tmp_path, before_kill_s=0.2))
    until(lambda: child.log_tail().strip().isdigit())
    pids = tree(child)
    control.clients(pids)
    child.kill()
    assert gone(pids)
    assert control.terminated() == []


@pytest.mark.parametrize("trouble", ["missing", "down"])
def test_a_kill_needs_no_control_program(engine: Child, control: Control, trouble: str) -> None:
    pids = tree(engine)
    if trouble == "missing":
        control.program.unlink()
    else:
        (control.folder / "down").touch()
    engine.kill()
    assert gone(pids)


# --- who is a client at all


def node(tmp_path: Path, **engine: Any) -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "node_id": "n",
            "dir": str(tmp_path / "node"),
            "engine": {"model": "m", "max_model_len": 512, **engine},
        }
    )


def test_without_the_operators_word_a_running_daemon_is_neither_asked_nor_joined(
    tmp_path: Path, control: Control
) -> None:
    config = node(tmp_path)
    assert mps.find_control(config) is None
    assert control.asked() == []
    environment = mps.environment(config, None)
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "node" / "no-mps")
    assert environment["ROSE_ALLOW_MPS"] is None
    assert mps.before_kill(None) == ()


def test_with_it_the_engine_is_a_client_below_normal_priority_on_its_share(
    tmp_path: Path, control: Control
) -> None:
    config = node(tmp_path, allow_mps=True, sm_share=0.3, mps_pipe_directory="/run/mps")
    found = mps.find_control(config)
    assert found == str(control.program)
    assert control.asked() == [{"command": "get_server_list", "alive": [], "pipe": "/run/mps"}]
    assert mps.environment(config, found) == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "ROSE_ALLOW_MPS": "1",
    }


def test_a_green_context_that_was_asked_for_takes_its_share_of_the_whole_device(
    tmp_path: Path, control: Control
) -> None:
    config = node(tmp_path, allow_mps=True, sm_share=0.3, compute_rung="green-context")
    environment = mps.environment(config, mps.find_control(config))
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"
    spec = RolloutEngine(config)._spec()
    assert (spec.env["ROSE_COMPUTE_RUNG"], spec.env["ROSE_SM_SHARE"]) == ("green-context", "0.3")


def test_an_engine_beside_mps_is_started_as_its_client_and_killed_in_its_order(
    tmp_path: Path, control: Control
) -> None:
    engine = RolloutEngine(node(tmp_path, allow_mps=True, allow_unmeasured=True))
    engine._mps_control = mps.find_control(engine.config)
    made = engine._spec()
    assert made.env["ROSE_ALLOW_MPS"] == made.env["ROSE_ALLOW_UNMEASURED"] == "1"
    assert made.before_kill[-1] == str(control.program)
    alone = RolloutEngine(node(tmp_path))._spec()
    assert alone.before_kill == ()
    assert alone.env["ROSE_ALLOW_UNMEASURED"] is None
    assert alone.env["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "node" / "no-mps")


async def test_on_a_gpu_the_rung_in_status_is_the_engines_own_word(
    tmp_path: Path, engine: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = RolloutEngine(node(tmp_path))
    agents._child = engine
    assert agents.describe()["ladder"]["rung"] in ("budget", "idle-share")
    rung = {"rung": "green-context", "reason": "the driver splits its SMs", "serialise": False, "sms": 64}

    async def status(*_: Any, **__: Any) -> dict[str, Any]:
        return {"scheduler": {"ladder": rung}}

    monkeypatch.setattr(agents, "call", status)
    await agents.refresh_status()
    assert agents.describe()["ladder"] == rung


@pytest.mark.parametrize("trouble", ["missing", "down"])
def test_without_a_daemon_that_answers_there_is_no_mps(
    tmp_path: Path, control: Control, trouble: str
) -> None:
    if trouble == "missing":
        control.program.unlink()
    else:
        (control.folder / "down").touch()
    assert mps.find_control(node(tmp_path, allow_mps=True)) is None
