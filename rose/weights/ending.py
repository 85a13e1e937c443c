"""What a program that ends does with a publish in the background: it finishes it, and is short with a relay that does not answer.

Threads of :func:`begin` are waited for once the program's own code is over, after Ctrl-C too.  A store that answers has all the time
that it needs.  One that is away has :data:`PATIENCE_S` from then on: whoever wants more waits for the publish before.

A pool of ``concurrent.futures`` is no place for such work: it takes none any more once the program's own code is over, and is waited for before
anybody could say so.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 2.0
_changed = threading.Condition()
_num_running = 0
_over = threading.Event()
_over_at_s = 0.0


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """``work`` in a thread of its own, which the program's end waits for."""
    global _num_running
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        global _num_running
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks is told
            future.set_exception(error)
        finally:
            with _changed:
                _num_running -= 1
                _changed.notify_all()

    with _changed:
        _num_running += 1
    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def bounded(until_s: float) -> float:
    """How long to go on trying, where it would be ``until_s``."""
    return min(until_s, _over_at_s + PATIENCE_S) if _over.is_set() else until_s


def _end() -> None:
    global _over_at_s
    _over_at_s = time.monotonic()
    _over.set()
    with _changed:
        _changed.wait_for(lambda: _num_running == 0)


def _forked() -> None:
    """Of a child: its parent's threads are not here."""
    global _changed, _num_running
    _changed, _num_running = threading.Condition(), 0


atexit.register(_end)
os.register_at_fork(after_in_child=_forked)
