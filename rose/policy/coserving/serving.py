"""Production's book: what is lent, what is wanted back, and what the peer still has of it.

The background thread of production's engine core owns it and calls, once a round and in this order::

    released()            what the engine thread has taken out of the block pool since
    settle(reports)       -> chunks that steps may use again
    resize(...)           -> pages to say in the lease, *before* the peer's number is read
    take(peer_pages)      marks what that number leaves
    chunks.published()    once the marks have been written, if ``chunks.changed``

Nothing here waits for the peer: what it does not give back is asked for again in the next round, and after
:data:`STRANDED_AFTER_S` without progress it is called stranded: nothing more is lent until all of it is back.

Pure: no I/O, no clock.  Times are seconds on one monotonic clock; pages are of 2 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rose.policy.coserving.chunks import ChunkBook, Report
from rose.policy.coserving.runs import fewest_runs

STRANDED_AFTER_S = 3.0
"""Pages that are wanted back and have not become fewer for so long: their holder neither obeys nor dies.  Nobody can take
pages from a process that stands still; production has to get along with what it has until it goes on or is killed."""


class ServingBook:
    """See the module.

    Args:
        num_chunks: Of production's KV memory; chunk 0 (vLLM's null block) is never lent, which the engine thread sees to.
        chunk_pages: Pages of each.

    Attributes:
        stranded: Wanted back for too long; see :data:`STRANDED_AFTER_S`.
    """

    def __init__(self, num_chunks: int, chunk_pages: int) -> None:
        self.chunks = ChunkBook(num_chunks, used=True)
        self.chunk_pages = chunk_pages
        self.stranded = False
        self._back = 0
        self._missing = 0
        self._missing_since_s = 0.0

    @property
    def total_pages(self) -> int:
        return self.chunks.num_chunks * self.chunk_pages

    @property
    def num_lent(self) -> int:
        """Chunks out of production's use that nobody has asked back yet."""
        return self.chunks.num_leaving + self.chunks.num_gone

    @property
    def missing_pages(self) -> int:
        """Wanted back, and still the peer's."""
        return self._missing * self.chunk_pages

    @property
    def stranded_pages(self) -> int:
        return self.missing_pages if self.stranded else 0

    def released(self, chunks: Iterable[tuple[int, int]]) -> None:
        """``(chunk, last step that may touch it)`` of each chunk that left the block pool."""
        for chunk, step in chunks:
            self.chunks.release(chunk, step)

    def settle(self, reports: Sequence[Report]) -> list[int]:
        """What the ranks have acknowledged; the chunks to hand back to the block pool."""
        return self.chunks.settle(reports)

    def resize(self, *, target_chunks: int, claim_chunks: int, retained_pages: int = 0) -> int:
        """Decide how many chunks come back; the pages that the lease has to say from now on.

        Args:
            target_chunks: What may be lent now.
            claim_chunks: What requests wait for, beyond what is usable.
            retained_pages: What a rank keeps of memory it has unmapped: nobody else can have it yet.
        """
        chunks = self.chunks
        back = max(self.num_lent - (0 if self.stranded else target_chunks), claim_chunks - chunks.num_coming)
        back = max(0, min(back, self.num_lent))
        # Not unmapped yet, so still ours: no need to ask anybody.
        still_here = chunks.leaving()[:back]
        chunks.take(still_here)
        self._back = back - len(still_here)
        away = (chunks.num_gone - self._back) * self.chunk_pages
        return self.total_pages - max(0, away - (retained_pages if chunks.num_gone else 0))

    def take(self, now_s: float, peer_pages: int) -> None:
        """Want back as much as the peer, which holds ``peer_pages``, does not hold."""
        room = self.chunks.num_gone - -(-peer_pages // self.chunk_pages)
        taken = max(0, min(self._back, room))
        if taken:
            self.chunks.take(fewest_runs(self.chunks.gone(), taken))
        missing = self._back - taken
        if not missing or missing < self._missing or not self._missing:
            self._missing_since_s = now_s
        self._missing = missing
        if not missing:
            self.stranded = False
        elif now_s - self._missing_since_s >= STRANDED_AFTER_S:
            self.stranded = True

    def check(self, lease_pages: int) -> None:
        """Assert that the lease covers what is held; for tests and the explorer."""
        self.chunks.check()
        assert lease_pages >= self.chunks.num_held * self.chunk_pages, "held without having said so"
