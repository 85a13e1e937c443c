"""One notifier for many reasons: a background thread sleeps until any shared file changes or its engine notifies.

The kernel can wait on one futex word per call in the portable interface, so each watched file has a
thread that sleeps on its word and notifies.  :meth:`Notifier.notify` never blocks (``SimpleQueue.put`` takes no
lock a waiter may hold), so the step path may call it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

from rose.coserve.ledger import RecordReader
from rose.errors import LedgerError

logger = logging.getLogger("vllm.rose")

LOOK_AGAIN_S = 1.0
"""A watched file may be replaced by a new writer; the watcher then opens the new one at its next look.  So it does where there is
no file yet: the waiter's own heartbeat finds that sooner, and a look every 20 ms, as it was, took the interpreter from
production's engine fifty times a second for as long as no rollout engine was there."""


class Notifier:
    """Wake-ups for one background thread, merged."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopping = False

    def notify(self) -> None:
        """Wake the waiter.  Any thread; never blocks."""
        if self._queue.empty():
            self._queue.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until notified; False when ``timeout_s`` is over.  Clears what has come so far."""
        try:
            self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return False
        while not self._queue.empty():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        return True

    def watch(self, reader: RecordReader[Any], name: str) -> None:
        """Notify whenever ``reader``'s file changes.  ``reader`` belongs to the watcher from now on."""
        threading.Thread(target=self._follow, args=(reader,), name=f"rose-watch-{name}", daemon=True).start()

    def _follow(self, reader: RecordReader[Any]) -> None:
        seen = 0
        while not self._stopping:
            try:
                if reader.wait(seen, LOOK_AGAIN_S, missing_s=LOOK_AGAIN_S):
                    # The word is read before notifying: a change after it makes the next wait return at once, one
                    # before it is seen by whoever is woken.  None is lost.
                    seen = reader.word()
                    self.notify()
            except LedgerError as error:  # damaged or replaced: the waiter reads it itself and decides
                logger.debug("ROSE watch: %s", error)
                self.notify()
                time.sleep(LOOK_AGAIN_S)

    def stop(self) -> None:
        self._stopping = True
        self.notify()
