"""Run one stage below a guard, with a limit, and end it with everything that it has started.

Its answer comes through a file, never through what it prints; what it prints goes to a file by itself, so nothing is lost with us.
The guard (``rose.proc``) ends the stage and all below it also when we are killed: no stage runs beside the next call's.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import ROOT
from benchmarks.gpu.record import cut_off, read_answer
from rose.errors import RoseError
from rose.proc import Child, ProcSpec
from rose.proc_guard import PR_SET_CHILD_SUBREAPER

ENDS_S = 10.0
"""A stage that has answered may take so long to end; vLLM's shutdown is some seconds."""
KILL_S = 10.0
"""Longest wait for killed processes: one that hangs in the driver must not take the rest of the time along."""
DUMP_S = 1.0
"""For the stacks of all threads of a stage that hangs, which go to its log."""
_LOOK_S = 0.05


class Runner:
    """Runs stages one at a time.  A process that loses its parent below us becomes ours, so that none is forgotten."""

    def __init__(self) -> None:
        self.stopping = False
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has said so
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
        spec = ProcSpec(
            name="stage", argv=tuple(command), env=dict(env), log_path=running / "log.txt", cwd=ROOT
        )
        try:
            child = Child.start(spec)
        except (RoseError, OSError) as error:
            return {**cut_off(running, f"could not be started: {error}"), "seconds": 0.0, "limit_s": limit_s}
        try:
            ended = self._wait(child, running, began_s + limit_s)
        finally:
            try:
                child.kill(KILL_S)
            except RoseError as error:
                print(f"  {error}", file=sys.stderr, flush=True)
        answer = read_answer(running)
        if answer is None:
            reason = f"not done after {limit_s:.0f} s" if ended is None else ended
            answer = cut_off(running, "the call was ended" if self.stopping else reason)
            answer["interrupted"] = self.stopping
        seconds = round(time.monotonic() - began_s, 1)
        return {**answer, "seconds": seconds, "limit_s": limit_s, "process": ended or "was ended by us"}

    def _wait(self, child: Child, running: Path, until_s: float) -> str | None:
        """How it ended; None: not by itself."""
        answered = False
        while time.monotonic() < until_s and not self.stopping:
            code = child.returncode()
            if code is not None:
                return _how(code)
            time.sleep(_LOOK_S)
            if not answered and (running / "answer.json").exists():
                answered, until_s = True, min(until_s, time.monotonic() + ENDS_S)
        if not answered:
            try:
                child.signal(signal.SIGUSR1)  # faulthandler writes where every thread is
            except (RoseError, ProcessLookupError):
                return None
            until_s = time.monotonic() + DUMP_S
            while child.returncode() is None and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
        return None


def _how(code: int) -> str:
    if code > 128 and code - 128 in set(signal.Signals):
        return f"died of {signal.Signals(code - 128).name}"
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
