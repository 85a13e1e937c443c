"""Every process of a rollout engine ends when the guard of its tree has: then nobody else may be left who would end it.

As soon as it gets to run: in the idle class of a core that production keeps wholly busy that is when production leaves some of it, for
nobody is there to lift it.  A process that was stopped ends when it goes on.

Guard, node agent and sentinel each end an engine that is nobody's.  All three can be killed within moments, and what is left of the engine by then would hold
memory and its lease for ever, which keeps every later engine of the device out.
"""

from __future__ import annotations

import os
import signal
import threading

from rose.proc_guard import ENV_GUARD_PROCESS
from rose.proc_tree import ProcessHandle, began

_watches = False
"""Whether a thread does, in this process: a fork of ours has none of our threads, and its own is begun as it is forked."""


def end_with_guard() -> None:
    """End this process, now or later, by SIGKILL when its guard is no more.  An engine that was started without one has nobody to ask for.

    Idempotent.  Whoever is forked from here does the same: vLLM forks its cores and workers, and loads no plugin in a fork of a process
    that has loaded them.
    """
    global _watches
    if not _watches and _named() is not None:
        _watches = True
        os.register_at_fork(after_in_child=_watch)
        _watch()


def _watch() -> None:
    named = _named()
    if named is None:
        return
    pid, ticks = named
    try:
        guard = ProcessHandle(pid)
    except ProcessLookupError:
        _end()
        return
    if began(pid) != ticks:  # another's number by now
        _end()
    threading.Thread(target=_wait_for, args=(guard,), name="rose-guard", daemon=True).start()


def _named() -> tuple[int, str] | None:
    """Number of the guard, and when it began; None: there is none, or its number means nothing where we are."""
    pid, _, rest = os.environ.get(ENV_GUARD_PROCESS, "").partition(":")
    ticks, _, namespace = rest.partition(":")
    if not pid.isdigit() or int(pid) < 1 or namespace != str(os.stat("/proc/self/ns/pid").st_ino):
        return None
    return int(pid), ticks


def _wait_for(guard: ProcessHandle) -> None:
    guard.wait()
    _end()


def _end() -> None:
    os.write(2, b"rose: the guard of this rollout engine has ended: so do we\n")
    # What a shutdown would wait for (other ranks, a core that is stopped) may never come.
    os.kill(os.getpid(), signal.SIGKILL)
