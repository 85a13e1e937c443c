"""A lease that is written when it says something new, or to show that its writer lives.

Each engine wakes when the other's lease changes.  Unconditional writes would therefore trigger each other for ever, on
production's core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rose.coserve.ledger import RecordWriter
from rose.units import NS_PER_S

R = TypeVar("R")
_EARLY = 0.8
"""Of a heartbeat: the thread that writes it may wake a little before its time."""


class ToldLease(Generic[R]):
    """See the module.  One thread.

    Args:
        file: Its file, which this closes.
        heartbeat_s: It is written as often as this where it says nothing new.
    """

    def __init__(self, file: RecordWriter[R], heartbeat_s: float) -> None:
        self.file = file
        self._early_ns = heartbeat_s * _EARLY * NS_PER_S
        self._news: tuple[int, ...] = ()
        self._said_ns = 0

    def say(self, news: tuple[int, ...], record: Callable[[int], R]) -> None:
        """Write ``record(now_ns)`` if it is time; wake who waits if ``news`` are others than they were.

        Raises:
            LedgerError: It cannot be written.
        """
        now_ns = time.monotonic_ns()
        changed = news != self._news
        if not changed and now_ns - self._said_ns < self._early_ns:
            return
        self._news, self._said_ns = news, now_ns
        self.file.write(record(now_ns))
        if changed:
            self.file.wake()

    def close(self) -> None:
        self.file.close()
