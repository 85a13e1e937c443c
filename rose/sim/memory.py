"""KV memory that two simulated engines share, moved by the books that move it live, between pagers that obey at once.

Time is not in here, nor are requests: :mod:`rose.sim.device` says what production uses and waits for, makes the rollout
engine give up turns where it has to (:attr:`SharedMemory.keep_chunks`), and asks again at its next step boundary.  What is claimed, lent,
taken back and held is the answer of :class:`~rose.policy.coserving.steps.StepBook`,
:class:`~rose.policy.coserving.serving.ServingBook`, :class:`~rose.policy.coserving.rollout.RolloutBook` and
:func:`~rose.policy.coserving.rollout.allowed_pages`, in the order in which the plugin asks them.

Memory is cut into :data:`NUM_CHUNKS` chunks; what is left over belongs to production.  Blocks are pages here.
"""

from __future__ import annotations

from rose.policy.coserving.chunks import ChunkBook
from rose.policy.coserving.events import Report
from rose.policy.coserving.rollout import RolloutBook, allowed_pages
from rose.policy.coserving.serving import ServingBook, lendable_chunks
from rose.policy.coserving.steps import StepBook
from rose.policy.lending_events import Mode, Phase

NUM_CHUNKS = 256
"""An 8B model's 48 GB of keys and values have 300 to 700."""


class SharedMemory:
    """See the module.

    Attributes:
        reserved_pages: What production's lease says.
    """

    def __init__(self, total_pages: int) -> None:
        self.chunk_pages = max(1, total_pages // NUM_CHUNKS)
        self.num_chunks = total_pages // self.chunk_pages
        self.total_pages = total_pages
        self._rest_pages = total_pages - self.num_chunks * self.chunk_pages
        self.steps = StepBook(total_pages, self.chunk_pages)
        self.serving = ServingBook(self.num_chunks, self.chunk_pages)
        self.rollout = RolloutBook(self.num_chunks, self.chunk_pages)
        self.reserved_pages = total_pages
        self._settled_at = 0
        """The loan for which all is as it should be; -1: for none."""

    @property
    def usable_pages(self) -> int:
        """Of production's steps."""
        return self.serving.chunks.num_used * self.chunk_pages + self._rest_pages

    @property
    def held_pages(self) -> int:
        """What the rollout engine's lease says."""
        return self.rollout.lease_pages()

    @property
    def rollout_pages(self) -> int:
        """Of rollout steps."""
        return self.rollout.chunks.num_used * self.chunk_pages

    @property
    def needed_pages(self) -> int:
        """What production must come to hold while it claims memory, else 0."""
        num_used = self.serving.chunks.num_used
        return self.steps.needed_chunks(num_used) * self.chunk_pages + (
            self._rest_pages if self.steps.claim_chunks else 0
        )

    @property
    def may_claim(self) -> bool:
        """Is there anything that production could claim, or does it?"""
        return self.serving.chunks.num_used < self.num_chunks or self.steps.claim_chunks > 0

    def claim(self, *, used_pages: int, waiting_pages: int) -> bool:
        """Before a step: whether production claims more than it did."""
        before = self.steps.claim_chunks
        self.steps.claim(
            lent_chunks=self.steps.claimable(self.num_chunks - self.serving.chunks.num_used),
            free_blocks=max(0, self.usable_pages - used_pages),
            waiting_blocks=waiting_pages,
        )
        return self.steps.claim_chunks > before

    def is_settled(self, lend_pages: int) -> bool:
        """Would a round change nothing?"""
        return lend_pages == self._settled_at and not self.steps.claim_chunks

    def serve(self, now_s: float, *, lend_pages: int, used_pages: int) -> None:
        """Production's round: lend what is free, take back what is wanted and no longer held."""
        book, chunks = self.serving, self.serving.chunks
        target = self._target(lend_pages)
        more = self.steps.to_lend(target, self.num_chunks - chunks.num_used)
        if more > 0:
            more = min(more, (self.usable_pages - used_pages) // self.chunk_pages)
            used = [chunk for chunk in range(1, self.num_chunks) if chunks.marks[chunk]]
            book.released((chunk, 0) for chunk in used[-more:] if more > 0)
        self._settle(chunks)
        book.resize(target_chunks=target, claim_chunks=self.steps.claim_chunks)
        book.take(now_s, self.held_pages)
        self._settle(chunks)
        self.reserved_pages = self._rest_pages + book.resize(
            target_chunks=target, claim_chunks=self.steps.claim_chunks
        )

    def keep_chunks(self, lend_pages: int) -> int:
        """What the rollout engine may hold by what is said now."""
        pages, _ = allowed_pages(
            mode=Mode.ON,
            lend_pages=lend_pages,
            has_serving=True,
            serving_phase=Phase.READY,
            serving_alive=True,
            serving_total=self.total_pages,
            serving_reserved=self.reserved_pages,
            serving_needed=self.needed_pages,
            node_age_s=0.0,
            serving_age_s=0.0,
        )
        return self.rollout.chunks_of(pages)

    def follow(self, keep: int) -> bool:
        """The rollout engine's round; its turns fit ``keep`` chunks by now.  Whether it gave anything up."""
        book, chunks = self.rollout, self.rollout.chunks
        over = chunks.num_used - keep
        if over > 0:
            used = [chunk for chunk in range(self.num_chunks) if chunks.marks[chunk]]
            book.released((chunk, 0) for chunk in used[-over:])
        self._settle(chunks)
        growth = book.growth(keep)
        if growth:
            book.grow(growth, keep)
            self._settle(chunks)
        return over > 0

    def rest(self, lend_pages: int) -> None:
        """Both sides have had their round."""
        lent = self.num_chunks - self.serving.chunks.num_used
        held = self.rollout.chunks.num_used
        done = lent == held == self._target(lend_pages) and not self.steps.claim_chunks
        self._settled_at = lend_pages if done else -1

    def end(self) -> None:
        """The rollout engine is dead, and its memory with it."""
        self.rollout = RolloutBook(self.num_chunks, self.chunk_pages)
        self._settled_at = -1

    def check(self) -> None:
        """Assert what always holds: nothing is held that was not said, and nothing is said twice."""
        self.serving.check(self.reserved_pages - self._rest_pages)
        self.rollout.check(self.held_pages)
        held = self.serving.chunks.num_held + self.rollout.chunks.num_held
        assert held <= self.num_chunks, f"{held} of {self.num_chunks} chunks"

    def _target(self, lend_pages: int) -> int:
        return lendable_chunks(
            mode=Mode.ON,
            lend_pages=lend_pages,
            node_age_s=0.0,
            num_chunks=self.num_chunks,
            chunk_pages=self.chunk_pages,
        )

    def _settle(self, chunks: ChunkBook) -> None:
        """The pagers read the marks, obey and report."""
        if chunks.changed:
            chunks.published()
            chunks.settle([Report(chunks.generation, bytes(chunks.marks))])
