"""Three stages that go wrong as stages do on a machine that nobody can look at: part of every rehearsal of ``gpu_check.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from benchmarks.gpu.common import Figures, keep


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
