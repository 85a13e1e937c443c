"""What the two threads of an engine's side leave for each other: all that both of them touch.

The *engine thread* moves chunks between two steps, the *background thread* decides how many.  Each attribute has one writer, and is read in
one go; neither waits for the other.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from rose.policy.coserving.chunks import ChunkBook
from vllm_plugin import internals
from vllm_plugin.pager_channel import PagerChannel
from vllm_plugin.watch import Notifier


class Seam:
    """See the module.

    Attributes:
        engine: vLLM's engine core; None until it is built and about to enter its loop.
        failed: By either: what is mapped comes back, and nothing else is done any more (production).
        target_chunks: By the background thread: how many chunks may be lent (production), or held (rollout engine).
        stranded: By the background thread: what is lent does not come back (production).
        mapped: From the background thread: chunks that steps may use again.
        released: From the engine thread: each chunk that it took out of the block pool, and the last step scheduled before that.
        notifier: Wakes the background thread.
    """

    def __init__(self) -> None:
        self.engine: Any = None
        self.failed = False
        self.target_chunks = 0
        self.stranded = False
        self.mapped: collections.deque[int] = collections.deque()
        self.released: collections.deque[tuple[int, int]] = collections.deque()
        self.notifier = Notifier()
        self._asked = False

    def take_released(self, chunks: ChunkBook, pagers: PagerChannel) -> tuple[tuple[int, int], ...]:
        """What has been released since, for the book; the pagers know by now which steps may still touch it.  Background thread.

        Raises:
            LedgerError: The pagers cannot be told.  Nothing is taken.
        """
        waiting = len(self.released)
        if waiting:
            pagers.fence(max(chunks.after_step, self.released[waiting - 1][1]))
        return tuple(self.released.popleft() for _ in range(waiting))

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        """An idle or gated engine calls no ``schedule``: have its thread run ``callback`` once.  Background thread."""
        if not self._asked:
            self._asked = True
            internals.call_when_idle(self.engine, lambda: self._call(callback))

    def _call(self, callback: Callable[[], None]) -> None:
        self._asked = False
        callback()
