"""The processes below a guard (``rose.proc_guard``), for whoever has to see, lift or end them: its supervisor, and the sentinel.

A process that was killed is *dying* until its memory is free, and for that each of its threads has to run.  In the idle
class of a busy core it does not: 700 MiB were not free after 40 s.  So the dying are lifted to a normal share.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

from rose.proc_share import IdleShare

_EXITING = 0x4
"""``PF_EXITING`` of the flags in ``/proc/PID/stat``."""
_KILLED = 1 << (signal.SIGKILL - 1)
GUARD_S = 0.1
"""What a guard needs to kill its tree; then others do it."""


def processes_below(guard_pid: int, *, guard_ended: bool) -> list[psutil.Process]:
    """Everything of a guard's tree that is alive, the guard too.

    Args:
        guard_ended: What is left then no longer hangs below it, but carries its session; a number is not given out again
            while a session has it.
    """
    if guard_ended:
        found = [p for p in psutil.process_iter() if _session_of(p.pid) == guard_pid]
    else:
        try:
            guard = psutil.Process(guard_pid)
            found = [guard, *guard.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
    return [p for p in found if _lives(p)]


def set_class(processes: Iterable[psutil.Process], normal: bool) -> bool:
    """Move every thread to the normal class, or to the idle class; False when the kernel does not let us."""
    for process in processes:
        try:
            threads = os.listdir(f"/proc/{process.pid}/task")
        except OSError:  # it has just ended
            continue
        for thread in threads:
            try:
                policy = os.SCHED_OTHER if normal else os.SCHED_IDLE
                os.sched_setscheduler(int(thread), policy, os.sched_param(0))
            except ProcessLookupError:
                continue
            except PermissionError:
                return False
    return True


def is_dying(pid: int) -> bool:
    """Was it killed, or is it ending, and has memory yet?  All of its threads have to go before that is free."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [_thread_ends(thread) for thread in threads]
    except OSError:  # it is gone
        return False
    return all(ends for ends, _ in states) and not all(ended for _, ended in states)


def _thread_ends(thread: Path) -> tuple[bool, bool]:
    """``(it ends or has ended, it has ended)``."""
    # "pid (command) state ppid pgrp session tty tpgid flags ...", where the command may contain anything
    fields = (thread / "stat").read_text().rpartition(")")[2].split()
    ended = fields[0] in "ZX"
    if ended or int(fields[6]) & _EXITING:
        return True, ended
    for line in (thread / "status").read_text().splitlines():
        if line.startswith("SigPnd:"):
            return bool(int(line.split()[1], 16) & _KILLED), False
    return False, False


class GuardedTree:
    """A guard's tree for one who is not its parent.

    Args:
        share: How it yields.
        guard_s: What the guard gets to kill it; then it is done from here, for a guard may be stopped.

    Raises:
        ProcessLookupError: There is no such guard (any more).
    """

    def __init__(self, guard_pid: int, share: IdleShare, guard_s: float) -> None:
        self._guard_pid, self._share, self._guard_s = guard_pid, share, guard_s
        self._guard = ProcessHandle(guard_pid)
        self._began = began(guard_pid)

    def ended(self) -> bool:
        """Is nothing of it left?  Cheap while its guard lives."""
        return not self._guard.alive() and not self.processes()

    def processes(self) -> list[psutil.Process]:
        if self._guard.alive():
            return processes_below(self._guard_pid, guard_ended=False)
        if began(self._guard_pid) not in (self._began, None):
            return []  # the number is another's, so nothing of the old session was left when it was given out
        return processes_below(self._guard_pid, guard_ended=True)

    def dying(self) -> bool:
        """Is any of them?"""
        return any(is_dying(process.pid) for process in self.processes())

    def lift(self, on: bool) -> bool:
        """Give it a normal share of its cores, or take it away; False when the kernel does not let us (now)."""
        member = self._guard_pid
        if (
            self._share.rung == "autogroup" and not self._guard.alive()
        ):  # its session's share, by any of its members
            member = next((process.pid for process in self.processes()), member)
        return self._share.lift(on, member, lambda normal: set_class(self.processes(), normal))

    def kill(self) -> None:
        """SIGKILL for all of it, after a normal share.  The guard does it where it can: it knows what has to be done before."""
        self.lift(True)
        for number in (signal.SIGUSR2, signal.SIGCONT):
            self._guard.send(number)
        if self._guard.alive() and self._guard.ended_within(self._guard_s):
            return
        left = self.processes()
        # The guard last: while it lives, orphans come to it and so stay in the tree.
        for process in [p for p in left if p.pid != self._guard_pid] or left:
            try:
                process.kill()
            except psutil.Error:
                pass


class ProcessHandle:
    """One process, whatever becomes of its number.

    Raises:
        ProcessLookupError: There is none.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def alive(self) -> bool:
        return not self.ended_within(0.0)

    def ended_within(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(timeout_s * 1e3))

    def wait(self) -> None:
        """Until it has ended."""
        self._poll.poll()

    def send(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            pass


def _lives(process: psutil.Process) -> bool:
    try:
        if not process.is_running():
            return False
        # A process whose first thread has ended reads as a zombie while the others have its memory yet.
        return process.status() != psutil.STATUS_ZOMBIE or is_dying(process.pid)
    except psutil.NoSuchProcess:
        return False


def began(pid: int) -> str | None:
    """When process ``pid`` was started, in the kernel's ticks; None: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1
