"""What a rehearsal of ``gpu_check.py`` has in place of a GPU: a stand-in for the driver, and three stages that go wrong as stages do
on a machine that nobody can look at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.gpu.common import REHEARSAL_PAGES, Figures, keep


class StandIn:
    """One device of the driver's stand-in, for the stages and the peers of a rehearsal.

    Args:
        folder: Of its memory's books and its log; of this call alone.
    """

    def __init__(self, folder: Path) -> None:
        from tests.coserve.fakecuda import Device

        self._device = Device(folder, pages=REHEARSAL_PAGES)
        self._env = self._device.env()

    def env(self) -> dict[str, str]:
        """What a process needs to find it."""
        return self._env

    def broken_rules(self) -> list[str]:
        """Rules of the driver that a process has broken since the last look."""
        broken = self._device.broken_rules()
        self._device.log.unlink(missing_ok=True)
        return broken


def hangs() -> Figures:
    """Has a figure, then waits for ever; so does a child in a session of its own."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    keep({"child": child.pid})
    print("waiting for a child that does not end", flush=True)
    child.wait()
    return {}


def dies() -> Figures:
    """Says why on stdout, as vLLM does, and dies of a signal."""
    keep({"steps": 7})
    print("the reason is on stdout", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def prints() -> Figures:
    """Has its answer, and goes on printing: a thread that is no daemon keeps the process."""

    def talk() -> None:
        while True:
            print('{"state": "failed", "reason": "a log line that looks like an answer"}', flush=True)
            time.sleep(0.2)

    threading.Thread(target=talk).start()
    return {"answer": 42}
