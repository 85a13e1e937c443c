"""Production's book: what is lent, what is wanted back, and what the peer still has of it.

The background thread of production's engine core owns it.  Its door is :meth:`ServingBook.handle`, once a round and in this order
(:mod:`rose.policy.coserving.events`)::

    ServingLooked    -> chunks that steps may use again; pages to say in the lease, *before* the peer's number is read
    PeerCounted      -> marks for what that number leaves
    MarksWritten

Behind it are the steps that who plays both sides calls one by one (the explorer, the simulator): :meth:`~ServingBook.released`,
:meth:`~ServingBook.settle`, :meth:`~ServingBook.resize`, :meth:`~ServingBook.take`, ``chunks.published``.

Nothing here waits for the peer: what it does not give back is asked for again in the next round, and after
:data:`STRANDED_AFTER_S` without progress it is called stranded: nothing more is lent until all of it is back.

Pure: no I/O, no clock.  Times are seconds on one monotonic clock; pages are of 2 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rose.policy.coserving.chunks import ChunkBook
from rose.policy.coserving.events import (
    MarksWritten,
    PeerCounted,
    Report,
    Reserve,
    ServingAction,
    ServingEvent,
    ServingLooked,
    Stranded,
    Use,
)
from rose.policy.coserving.runs import fewest_runs
from rose.policy.lending_events import Mode

NODE_DEAD_S = 3.0
"""Node agent silent for longer: nothing is lent any more."""
STRANDED_AFTER_S = 3.0
"""Pages that are wanted back and have not become fewer for so long: their holder neither obeys nor dies.  Nobody can take
pages from a process that stands still; production has to get along with what it has until it goes on or is killed."""


class ServingBook:
    """See the module.

    Args:
        num_chunks: Of production's KV memory; chunk 0 (vLLM's null block) is never lent, which the engine thread sees to.
        chunk_pages: Pages of each.
        away: Chunks that it started without, as the peer held their pages: nobody lent them, and they are wanted back like a loan.

    Attributes:
        stranded: Wanted back for too long; see :data:`STRANDED_AFTER_S`.
    """

    def __init__(self, num_chunks: int, chunk_pages: int, away: Iterable[int] = ()) -> None:
        self.chunks = ChunkBook(num_chunks, used=True, away=away)
        self.chunk_pages = chunk_pages
        self.stranded = False
        self._back = 0
        self._missing = 0
        self._missing_since_s = 0.0
        self._lease_pages = self.chunks.num_held * chunk_pages

    def handle(self, event: ServingEvent) -> list[ServingAction]:
        """Take one event; what has to be done, in order.

        Raises:
            PolicyError: A chunk was released that was not in use, or a report is of another number of chunks.
        """
        match event:
            case ServingLooked():
                self.released(event.released)
                usable = self.settle(event.reports)
                pages = self.resize(
                    target_chunks=event.target_chunks,
                    claim_chunks=event.claim_chunks,
                    retained_pages=event.retained_pages,
                )
                self._lease_pages = pages
                return [*([Use(chunks=tuple(usable))] if usable else ()), Reserve(pages=pages)]
            case PeerCounted():
                was_stranded = self.stranded
                self.take(event.at_s, event.pages)
                changed = self.stranded != was_stranded
                return [
                    *([Stranded(pages=self.stranded_pages)] if changed else ()),
                    *self.chunks.mark(),
                ]
            case MarksWritten():
                self.chunks.published()
                return []

    @property
    def total_pages(self) -> int:
        return self.chunks.num_chunks * self.chunk_pages

    @property
    def lease_pages(self) -> int:
        """What the lease has to say, as last answered."""
        return self._lease_pages

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

    def may_lend(self, target_chunks: int) -> int:
        """Of ``target_chunks``: nothing more is lent to who does not give back."""
        return 0 if self.stranded else target_chunks

    def missing_from(self, target_chunks: int) -> int:
        """What of a loan is not out yet, and not on its way back either."""
        return max(0, self.may_lend(target_chunks) - self.num_lent - self.chunks.num_coming)

    def is_watched(self, *, peer_lives: bool, may_run: bool) -> bool:
        """Is there anybody who steers by production's steps: a rollout engine that may run, or that owes memory?"""
        return peer_lives and (may_run or self.num_lent + self.chunks.num_coming > 0)

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
        back = max(self.num_lent - self.may_lend(target_chunks), claim_chunks - chunks.num_coming)
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
        if missing and (missing < self._missing or not self._missing):
            self._missing_since_s = now_s
        self._missing = missing
        if not missing:
            self.stranded = False
        elif now_s - self._missing_since_s >= STRANDED_AFTER_S:
            self.stranded = True

    def snapshot(self) -> tuple[object, ...]:
        """All of the book as a value; equal books have equal ones."""
        return (
            *self.chunks.snapshot(),
            *(self.stranded, self._back, self._missing, self._missing_since_s, self._lease_pages),
        )

    def check(self, lease_pages: int | None = None) -> None:
        """Assert that the lease (None: as last answered) covers what is held."""
        self.chunks.check()
        lease_pages = self._lease_pages if lease_pages is None else lease_pages
        assert lease_pages >= self.chunks.num_held * self.chunk_pages, "held without having said so"


def chunks_at_start(num_chunks: int, chunk_pages: int, peer_pages: int) -> int:
    """With how many chunks production starts beside a peer that does not let go of ``peer_pages``.

    Chunk 0 is always among them: it holds vLLM's null block, was never lent, and no step goes without it.
    """
    return max(1, num_chunks - -(-peer_pages // chunk_pages))


def lendable_chunks(
    *,
    mode: int,
    lend_pages: int,
    floor_pages: int = 0,
    node_age_s: float,
    num_chunks: int,
    chunk_pages: int,
) -> int:
    """What production may lend now, by what the agent says; nothing when it is silent.

    Args:
        lend_pages: The loan that it asks for.
        floor_pages: Never lent.  Chunk 0 holds vLLM's null block and is never lent either.
        node_age_s: Seconds since the agent's heartbeat.
    """
    if mode != Mode.ON or not node_age_s <= NODE_DEAD_S:  # so that NaN counts as dead
        return 0
    kept_pages = max(floor_pages, chunk_pages)
    return max(0, min(lend_pages, num_chunks * chunk_pages - kept_pages)) // chunk_pages
