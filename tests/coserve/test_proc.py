"""Child processes: what they get, how they are waited for, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rose.errors import ConfigError, EngineError
from rose.proc import Child, ProcSpec, free_port, require_free_port
from tests.coserve.conftest import needs_ipv6

SLEEPER = "import time; time.sleep(600)"
# Its grandchild has a session of its own and a parent that ended: out of reach of sessions and groups.
ESCAPING = """
import subprocess, sys, time
middle = '''
import subprocess, sys
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
null = subprocess.DEVNULL
print(subprocess.Popen(sleeper, start_new_session=True, stdout=null, stderr=null).pid)
'''
pid = subprocess.run([sys.executable, "-c", middle], capture_output=True, text=True).stdout
with open(sys.argv[1], "w") as file:
    file.write(pid)
time.sleep(600)
"""
WITH_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""
DEAF_AND_STOPPED = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.raise_signal(signal.SIGSTOP)
time.sleep(600)
"""


def python(name: str, code: str, *args: str, **spec: Any) -> ProcSpec:
    return ProcSpec(name=name, argv=(sys.executable, "-c", code, *args), **spec)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition did not come true"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_child_gets_cores_class_nice_environment_and_log(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        "import os; print(sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0) == os.SCHED_IDLE,"
        "os.nice(0), os.environ['GIVEN'], 'TAKEN' in os.environ, flush=True)"
    )
    os.environ["TAKEN"] = "1"
    try:
        child = Child.start(
            python(
                "c",
                code,
                cores=(core,),
                sched="idle",
                nice=3,
                env={"GIVEN": "x", "TAKEN": None},
                log_path=tmp_path / "c.log",
            )
        )
    finally:
        del os.environ["TAKEN"]
    until(lambda: child.returncode() is not None)
    child.terminate()
    assert child.returncode() == 0
    assert child.log_tail() == f"[{core}] True 3 x False"
    assert (tmp_path / "c.log").stat().st_mode & 0o777 == 0o600


def test_terminate_leaves_nothing_even_of_processes_that_hid_in_another_session(tmp_path: Path) -> None:
    child = Child.start(python("c", ESCAPING, str(tmp_path / "pid")))
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    hidden = int((tmp_path / "pid").read_text())
    assert alive(hidden)
    pids = [p.pid for p in child.processes()]
    assert hidden in pids

    child.terminate(grace_s=5.0)

    assert not [pid for pid in pids if alive(pid)]
    assert child.processes() == []


def test_when_the_supervisor_is_killed_the_whole_tree_dies(tmp_path: Path) -> None:
    supervisor = (
        "import sys, time; from rose.proc import Child, ProcSpec;"
        "c = Child.start(ProcSpec(name='c', argv=tuple(sys.argv[1:])));"
        "print(c.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", supervisor, sys.executable, "-c", ESCAPING, str(tmp_path / "pid")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        child = int(process.stdout.readline())
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        hidden = int((tmp_path / "pid").read_text())
        assert alive(child)
        assert alive(hidden)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

    until(lambda: not alive(child) and not alive(hidden))


def test_the_child_survives_the_end_of_the_thread_that_started_it() -> None:
    import threading

    started: list[Child] = []
    thread = threading.Thread(target=lambda: started.append(Child.start(python("c", SLEEPER))))
    thread.start()
    thread.join()
    (child,) = started
    pid = child.pid
    # The guard has taken the thread's death signal when it answers the next one.
    child.signal(signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    assert child.returncode() is None
    child.kill()
    assert not alive(pid)


def test_when_the_guard_is_killed_the_child_dies_and_kill_finds_the_rest() -> None:
    child = Child.start(python("c", WITH_CHILD))
    until(lambda: len(child.processes()) == 3)
    pids = [p.pid for p in child.processes()]
    os.kill(child.guard_pid, signal.SIGKILL)
    until(lambda: child.returncode() is not None)
    child.kill()
    assert not [pid for pid in pids if alive(pid)]


def test_a_stopped_child_that_ignores_sigterm_is_killed() -> None:
    child = Child.start(python("c", DEAF_AND_STOPPED))
    pid = child.pid
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    child.terminate(grace_s=0.2)
    assert not alive(pid)
    assert child.returncode() == 128 + signal.SIGKILL


def test_sigterm_lets_the_child_end_by_itself(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7));"
        "print('up', flush=True); time.sleep(600)"
    )
    child = Child.start(python("c", code, log_path=tmp_path / "log"))
    child.wait_ready(lambda: child.log_tail() == "up", 20.0)
    child.terminate(grace_s=20.0)
    assert child.returncode() == 7


def test_waiting_for_a_child_that_dies_fails_fast_with_its_last_words(tmp_path: Path) -> None:
    child = Child.start(
        python("engine", "import sys; sys.exit('model folder is missing')", log_path=tmp_path / "e.log")
    )
    started_s = time.monotonic()
    with pytest.raises(
        EngineError, match=r"engine: ended with 1 before it was ready(.|\n)*model folder is missing"
    ):
        child.wait_ready("http://127.0.0.1:1/health", timeout_s=60.0)
    assert time.monotonic() - started_s < 20.0
    child.terminate()


DIES_AS_VLLM = """
import sys
worker = "(VllmWorker-0 pid=3782) ERROR 11-28 10:41:07 [multiproc_executor.py:953] "
print("(APIServer pid=3488) WARNING 11-28 10:38:16 [utils.py:255] Found ulimit, as with OSError: [Errno 24]")
print(worker + "WorkerProc failed to start.")
print(worker + "Traceback (most recent call last):")
print(worker + '  File "cpu_worker.py", line 83, in __init__')
print(worker + "    raise ValueError(")
print(worker + "ValueError: Available memory on node 0 (9.07/14.96 GiB) is less than desired")
core = "(EngineCore pid=3649) ERROR 11-28 10:41:13 [core.py:1510] "
print(core + "Traceback (most recent call last):")
for number in range(130):
    print(core + f'  File "core.py", line {number}, in run')
print(core + "RuntimeError: worker failed")
print("Traceback (most recent call last):")
for number in range(30):
    print(f'  File "utils.py", line {number}, in wait_for_engine_startup')
sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
"""


def test_what_a_child_died_of_is_named_also_where_it_stands_far_above_the_end(tmp_path: Path) -> None:
    log = tmp_path / "e.log"
    log.write_text("Traceback (most recent call last):\nKeyError: 'of the start before'\n")
    child = Child.start(python("engine", DIES_AS_VLLM, log_path=log))
    with pytest.raises(EngineError) as caught:
        child.wait_ready("http://127.0.0.1:1/health", timeout_s=60.0)
    child.terminate()
    first, *tail = str(caught.value).splitlines()
    assert first == (
        "engine: ended with 1 before it was ready; its first error: ValueError: Available memory on node 0 "
        f"(9.07/14.96 GiB) is less than desired; the end of {log}:"
    )
    assert tail[-1].startswith("RuntimeError: Engine core initialization failed")


async def test_who_is_cancelled_while_it_ends_a_tree_is_over_when_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = Child.start(python("c", SLEEPER))
    terminate, begun, go_on = child.terminate, threading.Event(), threading.Event()

    def slowly(grace_s: float) -> None:
        begun.set()
        go_on.wait()
        terminate(grace_s)

    monkeypatch.setattr(child, "terminate", slowly)
    ending = asyncio.create_task(child.terminate_async())
    await asyncio.to_thread(begun.wait)
    ending.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    early = ending.done()
    go_on.set()
    assert not early
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert not child.processes()


def test_a_free_port_is_none_that_the_kernel_gives_to_others_meanwhile() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(20)]
    assert max(ports) < first
    assert len(set(ports)) > 15
    with socket.socket() as one:
        one.bind(("127.0.0.1", ports[0]))


async def test_waiting_takes_an_url_and_reports_progress() -> None:
    port = free_port()
    code = (
        "import http.server, sys; H = http.server.BaseHTTPRequestHandler;"
        "H.do_GET = lambda s: (s.send_response(200), s.end_headers());"
        "H.log_message = lambda *a: None;"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    )
    seen: list[float] = []
    child = Child.start(python("c", code, str(port)))
    took_s = await child.wait_ready_async(f"http://127.0.0.1:{port}/", 20.0, seen.append)
    assert seen == sorted(seen)
    assert 0 < len(seen) <= took_s / 0.1 + 1
    with pytest.raises(ConfigError, match=f"engine.port: port {port} is taken"):
        require_free_port(port, "engine.port")
    await child.terminate_async(0.0)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "0.0.0.0", "", "localhost"),
        *(pytest.param(host, marks=needs_ipv6) for host in ("::1", "::")),
    ],
)
def test_a_free_port_is_free_and_a_taken_one_taken_on_every_kind_of_address(host: str) -> None:
    require_free_port(free_port(), "engine.port", host)
    six = ":" in host
    with socket.create_server((host, 0), family=socket.AF_INET6 if six else socket.AF_INET) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"engine.port: port {port} is taken"):
            require_free_port(port, "engine.port", host)


@needs_ipv6
def test_a_port_that_somebody_has_on_the_loopback_is_taken_on_every_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            require_free_port(port, "engine.port", "::")


def test_an_address_that_is_not_this_hosts_is_not_called_a_taken_port() -> None:
    with pytest.raises(ConfigError, match=r"port 8100 cannot be .* '192\.0\.2\.1': Cannot assign"):
        require_free_port(8100, "engine.port", "192.0.2.1")


def test_waiting_is_over_at_the_timeout() -> None:
    with Child.start(python("slow", SLEEPER)) as child:
        with pytest.raises(EngineError, match="slow: not ready after 0 s"):
            child.wait_ready(lambda: False, timeout_s=0.2)
        child.kill()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ProcSpec(name="engine", argv=("no-such-program",)), "engine.argv: 'no-such-program'"),
        (ProcSpec(name="engine", argv=(sys.executable,), cores=(4096,)), r"engine.cores: cores \[4096\]"),
        (ProcSpec(name="engine", argv=(sys.executable,), log_path=Path("/proc/x/y")), "engine.log_path"),
        (ProcSpec(name="engine", argv=(sys.executable,), cwd=Path("/no/such")), "engine: cannot be started"),
    ],
)
def test_what_cannot_start_is_a_config_error_that_names_the_field(spec: ProcSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Child.start(spec)


def test_environment_values_do_not_show_in_repr() -> None:
    assert "s3cret" not in repr(ProcSpec(name="c", argv=("true",), env={"TOKEN": "s3cret"}))
