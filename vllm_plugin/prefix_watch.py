"""What production's requests use of its prefix cache, told to the book that says which cached chunks may be lent.

The engine thread leaves each step's output here, one append; the background thread reads from it which blocks a prompt found
and which it was given (:class:`~rose.policy.coserving.prefixes.PrefixBook`), and offers the chunks that may go.

It does so from the engine's start, whether anybody wants to lend or not: what a cache gives is known after some hundred prompts, and who says ``on``
should not have to wait for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from rose.policy.coserving.prefixes import PrefixBook
from vllm_plugin import internals
from vllm_plugin.ghost import GhostCache
from vllm_plugin.memory import ChunkPlan

OFFER_EVERY_S = 5.0
"""An offer looks at thousands of blocks, with the interpreter's lock."""
MOST_BEHIND = 4096
"""Steps that wait to be looked at; older ones are forgotten, and with them what they found and asked for alike."""
_FULL = 0.75
"""Of the device's blocks: some hold the beginnings of blocks, which are no prefixes yet."""
_AT_A_TIME = 16
"""Steps, before the interpreter's lock is given up for who waits for it: some tenth of a millisecond."""


class PrefixWatch:
    """See the module.

    Args:
        pool: vLLM's ``BlockPool``; it may do without a prefix cache.
        plan: Of production's KV memory.
        block_tokens: Of one block.
        ghost: Of the same pool.
        learns: False: nothing of this memory is ever lent.

    Attributes:
        offered: Cached chunks that may be lent, the cheapest first; None where no bound is asked for: any of them.
        num_kept: Chunks that are asked for and not offered: what lies in them may be asked for again.
    """

    def __init__(
        self, pool: Any, plan: ChunkPlan, block_tokens: int, ghost: GhostCache, *, learns: bool
    ) -> None:
        self._pool, self._block_tokens, self._ghost = pool, block_tokens, ghost
        self.offered: tuple[int, ...] | None = None
        self.num_kept = 0
        self._outputs: deque[Any] = deque(maxlen=MOST_BEHIND)
        """None: the whole cache was reset."""
        learns = learns and pool.enable_caching
        self._book = PrefixBook(plan.num_chunks, plan.chunk_blocks, block_tokens) if learns else None
        self._offered_s = 0.0

    # ------------------------------------------------------------------ engine thread

    def note(self, output: Any) -> None:
        """A step has been put together."""
        if self._book is not None:
            self._outputs.append(output)

    def clear(self) -> None:
        """The whole cache was reset."""
        self.note(None)

    # ------------------------------------------------------------------ background thread

    def look(self, max_loss: float, *, released: Iterable[int], short: int) -> None:
        """Once a round, before anything more is lent.

        Args:
            max_loss: The part of what prompts ask for that loans may cost; 0 or 1: there is no bound.
            released: Chunks that have left the block pool since.
            short: How many more may be lent.
        """
        book = self._book
        if book is None:
            return
        for number in range(len(self._outputs)):
            self._read(book, self._outputs.popleft())
            if number % _AT_A_TIME == 0:
                time.sleep(0)
        for chunk in released:
            book.gone(chunk)
        book.lost(self._ghost.lost_tokens)
        num_keys, pool = len(self._ghost), self._pool
        full = num_keys + internals.num_cached(pool) >= _FULL * pool.num_gpu_blocks
        book.remember(num_keys, self._ghost.num_forgotten, is_full=full)
        now_s = time.monotonic()
        if not 0.0 < max_loss < 1.0:
            self.offered = None
        elif short <= 0:
            self.offered = ()
        elif now_s - self._offered_s < OFFER_EVERY_S:
            self.offered = book.offered  # less what has been used or taken since
        else:
            self._offered_s = now_s
            self.offered = book.offer(max_loss)
        self.num_kept = 0 if self.offered is None else max(0, short - len(self.offered))

    def _read(self, book: PrefixBook, output: Any) -> None:
        if output is None:
            book.clear()
            return
        for num_tokens, blocks, num_found in internals.new_prompts(output, self._block_tokens):
            book.ask(num_tokens, blocks, num_found)
        for blocks in internals.grown_by(output):
            book.use(blocks)
