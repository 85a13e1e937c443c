"""Workers of ``rose plan``: they end with the command, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rose.errors import ConfigError
from rose.sim.cells import CellResult
from rose.sim.plan_pool import ProcessPool

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Stub:
    """A cell that no fleet can have, at once or long after."""

    is_endless: bool

    def run(self) -> CellResult:
        if self.is_endless:
            threading.Event().wait(120)
        raise ConfigError("nothing fits", field="fleet")


def is_worker(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # of those that come and go
        return False


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core there are no workers")
def test_workers_end_when_the_command_is_killed(tmp_path: Path) -> None:
    """SIGKILL, in the middle: nothing of it may go on computing."""
    program = subprocess.Popen(
        [sys.executable, "-m", "rose.cli", "plan", "--out", str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    parent = psutil.Process(program.pid)
    workers: list[psutil.Process] = []
    while not workers and program.poll() is None:
        workers = [each for each in parent.children(recursive=True) if is_worker(each)]
    assert workers
    program.kill()
    program.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)

    assert not alive


@pytest.mark.timeout(60)
def test_an_interrupt_does_not_wait_for_what_is_being_computed() -> None:
    """Ctrl-C was answered when the cells under way had ended."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ProcessPool(2) as pool:
        pool.run([Stub(False), Stub(True), Stub(True)], interrupt)

    assert not any(is_worker(each) for each in psutil.Process().children(recursive=True))
