"""A rollout engine's background thread, once a round: read the shared files, tell the book, do what it says, open or close the gate.

What is decided there is in :class:`~rose.policy.coserving.rollout.RolloutBook`, :mod:`vllm_plugin.permit` (how much may be held) and
:mod:`vllm_plugin.gate` (may a step start).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rose.coserve.ledger import RecordReader, RecordWriter
from rose.coserve.records import RolloutLease, ServingBoard
from rose.errors import LedgerError
from rose.policy.coserving.events import (
    AllowedAgain,
    Mark,
    MarksWritten,
    Reserve,
    RolloutEvent,
    RolloutLooked,
    Use,
)
from rose.policy.coserving.rollout import RolloutBook
from vllm_plugin import internals
from vllm_plugin.gate import Gate
from vllm_plugin.pager_channel import PagerChannel
from vllm_plugin.permit import Permit
from vllm_plugin.protocol_log import ProtocolLog
from vllm_plugin.rollout_steps import RolloutSteps
from vllm_plugin.seam import Seam

logger = logging.getLogger("vllm.rose")


class RolloutRounds:
    """See the module.  What it is made of is the side's (:class:`vllm_plugin.rollout.RolloutSide`).

    Args:
        publish: Says in the lease how many pages are held.
        board: This thread's own reader.
        flush: Called once a round: what the engine thread has logged and cannot wait for.
    """

    def __init__(
        self,
        *,
        seam: Seam,
        book: RolloutBook,
        hooks: RolloutSteps,
        permit: Permit,
        gate: Gate,
        board: RecordReader[ServingBoard],
        lease: RecordWriter[RolloutLease],
        pagers: PagerChannel,
        publish: Callable[[int], None],
        flush: Callable[[], None],
    ) -> None:
        self._seam, self._book, self._hooks = seam, book, hooks
        self._permit, self._gate, self._board = permit, gate, board
        self._lease, self._pagers, self._publish, self._flush = lease, pagers, publish, flush
        self._door = ProtocolLog("rollout", book)
        self._mended: set[Path] = set()

    def round(self, notified: bool) -> None:
        """Look at everything once and act.  ``notified``: an event called, not the timer."""
        book, seam, at_s = self._book, self._seam, time.monotonic()
        trouble = self._mend_files()
        reports, _ = self._pagers.reports()
        self._flush()
        pages, reason = self._permit.pages() if not trouble else (0, trouble)
        allowed = book.chunks_of(pages)
        released = seam.take_released(book.chunks, self._pagers)
        self._allow(allowed, reason)
        growing = self._tell(
            RolloutLooked(at_s=at_s, released=released, reports=reports, allowed_chunks=allowed)
        )
        if growing:
            # Announced first, production's numbers read second: production keeps its reservation, we step back.
            allowed_now = book.chunks_of(self._permit.pages()[0])
            self._tell(AllowedAgain(at_s=time.monotonic(), allowed_chunks=allowed_now))
        if seam.mapped or book.owes(allowed):
            seam.call_when_idle(self._hooks.idle)
        if self._gate.look(self._board, allowed, notified=notified):
            internals.wake(seam.engine)

    def _tell(self, event: RolloutEvent) -> bool:
        """Tell the book, and do what it says; whether the lease announces a growth now."""
        growing = False
        for action in self._door.handle(event):
            match action:
                case Use():
                    self._seam.mapped.extend(action.chunks)
                case Reserve():
                    growing = action.growing
                    self._publish(action.pages)
                case Mark():
                    self._pagers.write(action)
                    self._door.handle(MarksWritten())
        return growing

    def _mend_files(self) -> str:
        """A stranger's write, a file cut off or deleted, must not end the sharing: production would wait for a number for ever.

        Why nothing may be held, else "": who cannot be found by its name cannot be counted by a production that comes later.
        """
        for writer in (self._lease, self._pagers.marks):
            try:
                if writer.mend() and writer.path not in self._mended:
                    self._mended.add(writer.path)
                    logger.warning(
                        "ROSE: %s was deleted, cut off or written by another process; mended", writer.path
                    )
            except LedgerError as error:
                return f"shared files: {error}"
        return ""

    def _allow(self, chunks: int, reason: str) -> None:
        self._hooks.reason = reason
        self._seam.target_chunks = chunks
        if chunks == 0:
            self._gate.is_open = False

    def fail_closed(self, reason: str) -> None:
        """Nothing may be held.  Never raises: the thread that gives memory back must not end."""
        self._allow(0, reason)
        if self._book.owes(0) and self._seam.engine is not None:
            with suppress(Exception):
                # With the gate closed nothing else would give back what is held.
                self._seam.call_when_idle(self._hooks.idle)

    def close(self) -> None:
        self._door.close()
