"""The rollout engine's book: what it may hold, and how it grows and shrinks.

The background thread of the rollout engine's core owns it.  Its door is :meth:`RolloutBook.handle`, once a round and in this order
(:mod:`rose.policy.coserving.events`)::

    RolloutLooked    -> chunks that steps may use; pages to say in the lease, growth included; where nothing grows, marks
    AllowedAgain     -> where something grows, *after* the numbers of production were read once more: pages and marks
    MarksWritten

Behind it are the steps that who plays both sides calls one by one (the explorer, the simulator).

Chunks that are in use and no longer allowed are the engine thread's to give up (it ends requests); it finds the number in
``allowed_chunks`` of its shell.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rose.policy.coserving.chunks import ChunkBook
from rose.policy.coserving.events import (
    AllowedAgain,
    MarksWritten,
    Report,
    Reserve,
    RolloutAction,
    RolloutEvent,
    RolloutLooked,
    Use,
)
from rose.policy.coserving.runs import fewest_runs
from rose.policy.lending import DEAD_AFTER_S
from rose.policy.lending_events import Mode, Phase


class RolloutBook:
    """See the module."""

    def __init__(self, num_chunks: int, chunk_pages: int) -> None:
        self.chunks = ChunkBook(num_chunks, used=False)
        self.chunk_pages = chunk_pages
        self._growth = 0
        self._lease_pages = 0

    def handle(self, event: RolloutEvent) -> list[RolloutAction]:
        """Take one event; what has to be done, in order.

        Raises:
            PolicyError: A chunk was released that was not in use, or a report is of another number of chunks.
        """
        match event:
            case RolloutLooked():
                self.released(event.released)
                usable = self.settle(event.reports)
                self.shrink(event.allowed_chunks)
                self._growth = growth = self.growth(event.allowed_chunks)
                self._lease_pages = pages = self.lease_pages(growth)
                return [
                    *([Use(chunks=tuple(usable))] if usable else ()),
                    Reserve(pages=pages, growing=growth > 0),
                    *([] if growth else self.chunks.mark()),
                ]
            case AllowedAgain():
                self.grow(self._growth, event.allowed_chunks)
                self._growth = 0
                self._lease_pages = pages = self.lease_pages()
                return [Reserve(pages=pages), *self.chunks.mark()]
            case MarksWritten():
                self.chunks.published()
                return []

    def chunks_of(self, pages: int) -> int:
        """How many chunks fit ``pages``, of those that there are."""
        return min(pages // self.chunk_pages, self.chunks.num_chunks)

    def owes(self, allowed_chunks: int) -> bool:
        """Are more chunks in use than may be?  They are the engine thread's to give up."""
        return self.chunks.num_used > allowed_chunks

    def released(self, chunks: Iterable[tuple[int, int]]) -> None:
        """``(chunk, last step that may touch it)`` of each chunk that left the block pool."""
        for chunk, step in chunks:
            self.chunks.release(chunk, step)

    def settle(self, reports: Sequence[Report]) -> list[int]:
        """What the ranks have acknowledged; the chunks to hand to the block pool."""
        return self.chunks.settle(reports)

    def shrink(self, allowed_chunks: int) -> None:
        """Chunks on their way in that are no longer allowed go straight out again."""
        chunks = self.chunks
        over = chunks.num_used + chunks.num_coming - allowed_chunks
        if over > 0 and chunks.num_coming:
            chunks.give_up(chunks.coming()[-over:])

    def growth(self, allowed_chunks: int) -> int:
        """How many chunks there is room for, beyond all whose memory may be there."""
        return max(0, allowed_chunks - self.chunks.num_held)

    def grow(self, growth: int, allowed_chunks: int) -> None:
        """Want what was announced, as far as it is still allowed."""
        growth = min(growth, allowed_chunks - self.chunks.num_held)
        if growth > 0:
            gone = self.chunks.gone()
            # The chunk of vLLM's null block comes first: no step goes without it.
            null = gone[:1] if gone[:1] == [0] else []
            self.chunks.take(null + fewest_runs(gone[len(null) :], growth - len(null)))

    def lease_pages(self, growth: int = 0) -> int:
        """What the lease has to say: all whose memory may be there, and what is announced."""
        return (self.chunks.num_held + growth) * self.chunk_pages

    def snapshot(self) -> tuple[object, ...]:
        """All of the book as a value; equal books have equal ones."""
        return (*self.chunks.snapshot(), self._growth, self._lease_pages)

    def check(self, lease_pages: int | None = None) -> None:
        """Assert that the lease (None: as last answered) covers what is held."""
        self.chunks.check()
        lease_pages = self._lease_pages if lease_pages is None else lease_pages
        assert lease_pages >= self.chunks.num_held * self.chunk_pages, "held without having said so"


def allowed_pages(
    *,
    mode: int,
    lend_pages: int,
    has_serving: bool | int,
    serving_phase: int,
    serving_alive: bool,
    serving_total: int,
    serving_reserved: int,
    serving_needed: int,
    node_age_s: float,
    serving_age_s: float,
    dead_after_s: float = DEAD_AFTER_S,
    compute_only: bool = False,
) -> tuple[int, str]:
    """What the rollout engine may hold now, by what the shared files say, and why.

    It asks nobody: with a dead agent, or a serving engine that is dead, silent or starting, the
    answer is 0.  A claim counts before the agent has seen it.  Without serving the loan is the only limit, and where one lives all the same
    it is 0.

    Args:
        has_serving: By the agent's word.
        serving_alive: By the files; asked for whatever the agent says.
        serving_reserved: Pages that serving holds, or that nobody else may take any more.
        serving_needed: Pages that it must come to hold; 0 when it claims none.
        node_age_s: Seconds since the agent's heartbeat; ``inf`` when there is no file or no writer.
        serving_age_s: The same of ``serving.lease``.
    """
    if not node_age_s <= dead_after_s:  # so that NaN counts as dead
        return 0, "node agent is silent"
    if mode != Mode.ON:
        return 0, "mode is observe" if mode == Mode.OBSERVE else "mode is off"
    lend = max(0, lend_pages)
    if not has_serving:
        if serving_alive:  # it does not look at who was not told of it, and would claim in vain
            return 0, "production lives here, and the agent has no [serving]"
        return lend, "no serving on this device"
    if not serving_alive:
        return 0, "serving is not there"
    if serving_phase != Phase.READY:
        return 0, "serving is starting" if serving_phase == Phase.STARTING else "serving does not share"
    if not serving_age_s <= dead_after_s:
        return 0, "serving is silent"
    if compute_only:
        return lend, "compute only: a fixed budget"
    claims = serving_needed > max(0, serving_reserved)
    left = max(0, serving_total - max(0, serving_reserved, serving_needed))
    if lend <= left:
        return lend, "the loan"
    return left, "serving claims pages" if claims else "serving still holds them"
