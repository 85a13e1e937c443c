"""Run one stage in a session of its own, with a limit, and end it with everything that it has started.

Its answer comes through a file, never through what it prints; what it prints goes to a file by itself, so nothing is lost with us.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.common import ROOT
from benchmarks.gpu.record import cut_off, read_answer

ENDS_S = 10.0
"""A stage that has answered may take so long to end; vLLM's shutdown is some seconds."""
KILL_S = 10.0
"""Longest wait for killed processes: one that hangs in the driver must not take the rest of the time along."""
DUMP_S = 1.0
"""For the stacks of all threads of a stage that hangs, which go to its log."""
_LOOK_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36


class Runner:
    """Runs stages one at a time.  A process that loses its parent below us becomes ours, so that none is forgotten."""

    def __init__(self) -> None:
        self.stopping = False
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: Any) -> None:
        self.stopping = True

    def run(
        self, command: Sequence[str], running: Path, env: Mapping[str, str], limit_s: float
    ) -> dict[str, Any]:
        """Until it has answered, ended, or used ``limit_s``; then nothing of it is left.

        Returns:
            Its answer, or what it had when it was cut off, with ``seconds`` and ``process``: how that ended.
        """
        began_s = time.monotonic()
        try:
            with (running / "log.txt").open("ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(env), cwd=ROOT,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            return {**cut_off(running, f"could not be started: {error}"), "seconds": 0.0, "limit_s": limit_s}
        try:
            ended = self._wait(process, running, began_s + limit_s)
        finally:
            end_tree(process)
        answer = read_answer(running)
        if answer is None:
            reason = f"not done after {limit_s:.0f} s" if ended is None else ended
            answer = cut_off(running, "the call was ended" if self.stopping else reason)
            answer["interrupted"] = self.stopping
        seconds = round(time.monotonic() - began_s, 1)
        return {**answer, "seconds": seconds, "limit_s": limit_s, "process": ended or "was ended by us"}

    def _wait(self, process: subprocess.Popen[bytes], running: Path, until_s: float) -> str | None:
        """How it ended; None: not by itself."""
        answered = False
        while time.monotonic() < until_s and not self.stopping:
            try:
                return _how(process.wait(_LOOK_S))
            except subprocess.TimeoutExpired:
                pass
            if not answered and (running / "answer.json").exists():
                answered, until_s = True, min(until_s, time.monotonic() + ENDS_S)
        if not answered:
            process.send_signal(signal.SIGUSR1)  # faulthandler writes where every thread is
            try:
                process.wait(DUMP_S)
            except subprocess.TimeoutExpired:
                pass
        return None


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill the stage, its session, and all that was started below it, whatever session that is in.

    The stage's orphans have become our children: nothing else of ours runs meanwhile.
    """
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    until_s = time.monotonic() + KILL_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < until_s:
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(children, timeout=0.5)
    process.poll()


def _how(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
