"""What decides on production's loans beside the book of chunks, behind one door, for the decision log that replays it.

The background thread asks two things of it in each round: what may be lent by the agent's word (:class:`AgentSaid`), and whether it is worth
looking for more (:class:`MoreWanted`).  What the engine thread decided meanwhile with its own
:class:`~rose.policy.coserving.steps.StepBook` is told afterwards, and decided a second time by a copy of that book.  The step path
notes scalars (``StepBook.decided``), and only of a decision that changes something; :func:`of_step` makes events of them here.

Pure: no I/O, no clock.  Times are seconds on one monotonic clock; pages are of 2 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.policy.coserving.search import LoanSearch
from rose.policy.coserving.serving import lendable_chunks
from rose.policy.coserving.steps import StepBook

# --- events ---


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSaid:
    """What ``node.state`` says; ``node_age_s``: since its heartbeat."""

    at_s: float
    mode: int
    lend_pages: int
    floor_pages: int
    node_age_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MoreWanted:
    """Not all that may be lent is out."""

    at_s: float
    offered: tuple[int, ...] | None
    """Cached chunks that may go; None: any."""
    looked_s: float | None
    """When a look found nothing left, and no block has come free since; None: no such look."""
    looked_offered: tuple[int, ...] | None
    """What that look was offered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksCounted:
    """The numbers before a step by which the claim became another one."""

    lent_chunks: int
    free_blocks: int
    waiting_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdrew:
    """Who asked is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoomSeen:
    """Before a step: some of a loan was not out yet, and nothing had come back."""

    target_chunks: int
    lent_chunks: int


LoanEvent = AgentSaid | MoreWanted | BlocksCounted | Withdrew | RoomSeen

# --- actions ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Lend:
    """So many chunks may be lent."""

    chunks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorthSearch:
    """Whether a look through the pool may find more."""

    worth_it: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimBack:
    """So many chunks must come back now; ``pressure_seq``: how often a claim has begun."""

    chunks: int
    pressure_seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """So many more may leave the block pool."""

    chunks: int


LoanAction = Lend | WorthSearch | ClaimBack | Take


class LoanBook:
    """See the module.

    Args:
        num_blocks: Of production's whole KV memory.
        chunk_blocks, chunk_pages: Of one chunk.
        num_chunks: All there are.
    """

    def __init__(self, num_blocks: int, chunk_blocks: int, num_chunks: int, chunk_pages: int) -> None:
        self.steps = StepBook(num_blocks, chunk_blocks)
        self._num_chunks, self._chunk_pages = num_chunks, chunk_pages

    def handle(self, event: LoanEvent) -> list[LoanAction]:
        """Take one event; what was decided by it."""
        steps = self.steps
        match event:
            case AgentSaid():
                chunks = lendable_chunks(
                    mode=event.mode,
                    lend_pages=event.lend_pages,
                    floor_pages=event.floor_pages,
                    node_age_s=event.node_age_s,
                    num_chunks=self._num_chunks,
                    chunk_pages=self._chunk_pages,
                )
                return [Lend(chunks=chunks)]
            case MoreWanted():
                search = LoanSearch()
                if event.looked_s is not None:
                    search.looked(event.looked_s, event.looked_offered, num_missing=0, none_left=True)
                return [WorthSearch(worth_it=search.may_find_more(event.at_s, event.offered))]
            case BlocksCounted():
                steps.claim(
                    lent_chunks=event.lent_chunks,
                    free_blocks=event.free_blocks,
                    waiting_blocks=event.waiting_blocks,
                )
                return [ClaimBack(chunks=steps.claim_chunks, pressure_seq=steps.pressure_seq)]
            case Withdrew():
                steps.withdraw()
                return [ClaimBack(chunks=steps.claim_chunks, pressure_seq=steps.pressure_seq)]
            case RoomSeen():
                return [Take(chunks=steps.to_lend(event.target_chunks, event.lent_chunks))]

    def goes_on_at(self, claim: ClaimBack) -> None:
        """What led there was not told."""
        steps = self.steps
        steps.claim_chunks, steps.pressure_seq = claim.chunks, claim.pressure_seq
        steps.under_pressure = claim.chunks > 0

    def check(self) -> None:
        """Assert what always holds."""
        assert self.steps.under_pressure == (self.steps.claim_chunks > 0)
        assert 0 <= self.steps.claim_chunks <= self._num_chunks


def of_step(noted: tuple[int, ...]) -> tuple[LoanEvent, LoanAction]:
    """What a step decided, by what ``StepBook.decided`` has of it: a claim (5 numbers), its end (2), or room that was seen (3)."""
    if len(noted) == 5:
        lent, free, waiting, chunks, pressure_seq = noted
        return (
            BlocksCounted(lent_chunks=lent, free_blocks=free, waiting_blocks=waiting),
            ClaimBack(chunks=chunks, pressure_seq=pressure_seq),
        )
    if len(noted) == 2:
        return Withdrew(), ClaimBack(chunks=noted[0], pressure_seq=noted[1])
    target, lent, taken = noted
    return RoomSeen(target_chunks=target, lent_chunks=lent), Take(chunks=taken)
