"""What is left of a rollout engine ends when its guard has, whoever else is still there to end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rose.proc import Child, ProcSpec
from rose.proc_guard import ENV_GUARD_PROCESS
from tests.coserve.test_proc import alive, until

HERE = os.stat("/proc/self/ns/pid").st_ino
PART = "import signal; from vllm_plugin.orphans import end_with_guard; end_with_guard(); print('lives', flush=True); signal.pause()"
TOLD = "path = pathlib.Path(sys.argv[1]); part = path.with_suffix('.part'); part.write_text(str(core)); part.rename(path); signal.pause()"
API_SERVERS = {
    "spawned": "import pathlib, subprocess, sys, signal;"
    "process = subprocess.Popen([sys.executable, '-c', sys.argv[2]], stdout=subprocess.PIPE);"
    "process.stdout.readline(); core = process.pid;" + TOLD,
    "forked": "import os, pathlib, sys, signal; from vllm_plugin.orphans import end_with_guard; end_with_guard();"
    "core = os.fork(); core or signal.pause();" + TOLD,
}


@pytest.mark.parametrize("how", API_SERVERS)
def test_a_core_whose_guard_is_killed_ends_and_nobody_has_to_see_it(tmp_path: Path, how: str) -> None:
    told = tmp_path / "core"
    code = API_SERVERS[how]
    child = Child.start(ProcSpec(name="engine", argv=(sys.executable, "-c", code, str(told), PART)))
    until(told.exists)
    core = int(told.read_text())
    assert alive(core)

    os.kill(child.guard_pid, signal.SIGKILL)

    until(lambda: not alive(core))
    child.kill()


@pytest.mark.parametrize("named", ["another's number", "nobody's number"])
def test_a_core_that_begins_after_its_guard_has_ended_ends(named: str) -> None:
    if named == "another's number":
        guard = f"{os.getpid()}:1:{HERE}"
    else:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        guard = f"{gone.pid}:1:{HERE}"
    done = subprocess.run(
        [sys.executable, "-c", PART],
        env=os.environ | {ENV_GUARD_PROCESS: guard},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize(
    "named", ["", "1", "no number", f"{os.getpid()}:1:1"], ids=["none", "other", "text", "another namespace"]
)
def test_an_engine_without_a_guard_that_it_can_name_lives(named: str) -> None:
    """``ROSE_GUARD`` is another variable: released memory shows nothing."""
    environment = os.environ | {ENV_GUARD_PROCESS: named, "ROSE_GUARD": "1"}
    with subprocess.Popen([sys.executable, "-c", PART], env=environment, stdout=subprocess.PIPE) as part:
        assert part.stdout is not None
        assert part.stdout.readline() == b"lives\n"
        assert part.poll() is None
        part.kill()
