"""Which chunks of KV blocks an engine may use: the balloon.

A *chunk* is the smallest run of block ids whose memory is whole pages.  An *inflated* chunk is taken
out of vLLM's block pool, so its memory can be given back; allocation then fails naturally and
vLLM's own preemption takes over.

Decides nothing about *how many* chunks: callers (serving and rollout side) do.  Decides *which*: chunks whose blocks are all
free and hold no prefix, side by side where there is a choice (:func:`~rose.policy.coserving.runs.fewest_runs`); then cached ones, those that the caller offers
(production: :mod:`rose.policy.coserving.prefixes`) or in vLLM's own order of eviction; then, on the rollout side, those whose requests lose least.

Invariants (:meth:`check`): an inflated chunk has every block with reference count 1 owned here, and no block is both in
the balloon and in the free queue.  vLLM's null block (block 0) is never touched; only the rollout side takes chunk 0,
when it gives back everything and steps no more.

Engine thread only; nothing here blocks.  Cost: O(blocks of the chunks looked at), and at most
``budget_s`` per call, because it runs between two steps.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rose.policy.coserving.runs import fewest_runs
from rose.policy.coserving.search import ROUND_S
from vllm_plugin import internals

SLICE_S = 0.0005
"""Longest time one call may take from the step path."""
_LOOK_AHEAD = 2048
"""Free blocks whose place in vLLM's order of eviction is looked at, a tenth of a millisecond's worth: beyond them any is as good."""


class Balloon:
    """The balloon of one engine.

    Args:
        pool: vLLM's ``BlockPool``.
        chunk_blocks: Block ids per chunk.
    """

    def __init__(self, pool: Any, chunk_blocks: int) -> None:
        self._pool = pool
        self.chunk_blocks = chunk_blocks
        self.num_chunks = pool.num_gpu_blocks // chunk_blocks
        self.inflated: set[int] = set()
        self.exhausted = False
        """:meth:`inflate_free` was asked for more than there is; a later call finds more only where blocks were freed or offered."""
        self._cursor = self.num_chunks - 1
        self._round_s = -math.inf
        self._to_scan = 0
        """Chunks that this round has not seen yet."""
        self._missed = False
        """Blocks have come free behind the look of this round."""
        self._free: list[int] = []
        """Of those seen, the free ones without prefixes that have not been taken."""
        self._cached: list[int] = []
        """Of those seen, the free ones with prefixes: what is taken when no other is left."""

    def blocks_of(self, chunk: int) -> range:
        return range(chunk * self.chunk_blocks, (chunk + 1) * self.chunk_blocks)

    def _owned(self, chunk: int) -> range:
        """Blocks of ``chunk`` that the balloon may hold: all but the null block."""
        return range(1, self.chunk_blocks) if chunk == 0 else self.blocks_of(chunk)

    @property
    def num_usable_chunks(self) -> int:
        return self.num_chunks - len(self.inflated)

    @property
    def num_inflated_blocks(self) -> int:
        return len(self.inflated) * self.chunk_blocks - (0 in self.inflated)

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by requests (neither free, cached-free, null nor in the balloon)."""
        pool = self._pool
        return pool.num_gpu_blocks - pool.get_num_free_blocks() - 1 - self.num_inflated_blocks

    def active_blocks(self, chunk: int) -> list[int]:
        """Block ids of ``chunk`` that requests hold."""
        blocks = self._pool.blocks
        return [i for i in self.blocks_of(chunk) if blocks[i].ref_cnt > 0 and not blocks[i].is_null]

    def inflate(self, chunk: int) -> bool:
        """Take one chunk out of the pool; False (and nothing changed) when a block of it is in use."""
        if chunk in self.inflated or self.active_blocks(chunk):
            return False
        ids = self._owned(chunk)
        internals.drop_prefixes(self._pool, ids)
        taken: list[int] = []
        try:
            for block_id in ids:
                internals.take_block(self._pool, block_id)  # all are free: nobody holds a block of this chunk
                taken.append(block_id)
        except BaseException:
            internals.give_blocks(self._pool, taken)
            raise
        self.inflated.add(chunk)
        return True

    def inflate_free(
        self,
        count: int,
        *,
        budget_s: float = SLICE_S,
        taken: list[int] | None = None,
        cached: Sequence[int] | None = None,
    ) -> list[int]:
        """Take up to ``count`` unused chunks (never chunk 0), those without cached prefixes first; the ids taken.

        Stops at ``budget_s``: call again at the next step, and it goes on where it was; a large pool takes several
        calls to look through.  What half of it shows is chosen from.  ``taken`` receives the ids as they are taken, so that a
        caller who survives an exception knows of them.  ``cached``: of the chunks with prefixes only these may be taken, in this order.
        """
        now_s = time.monotonic()
        until_s = now_s + budget_s
        taken = [] if taken is None else taken
        self.exhausted = False
        looked = not (self._to_scan or self._free)
        if now_s - self._round_s > ROUND_S or (looked and (self._missed or not self._cached)):
            self._round_s, self._missed = now_s, False
            self._to_scan = self.num_chunks - 1
            self._free.clear()
            self._cached.clear()
        look_until_s = now_s + budget_s / 2
        while len(taken) < count and (self._to_scan or self._free):
            short = count - len(taken)
            self._look(look_until_s, short)
            # From the top, where vLLM's pool comes to last.
            for chunk in [-number for number in fewest_runs((-chunk for chunk in self._free), short)]:
                if time.monotonic() > until_s:
                    return taken
                self._free.remove(chunk)
                if self.inflate(chunk):
                    taken.append(chunk)
            if time.monotonic() > until_s:
                return taken
            look_until_s = until_s
        if not self._to_scan and not self._free:
            left = self._cached if cached is None else list(reversed(cached))
            while left and len(taken) < count and time.monotonic() <= until_s:
                chunk = left.pop()
                if self.inflate(chunk):
                    taken.append(chunk)
            self.exhausted = not left and len(taken) < count and not self._missed
        return taken

    def note_freed(self) -> None:
        """Blocks have come free: what has been looked through is worth another look."""
        self._missed = True

    def _look(self, until_s: float, count: int) -> None:
        """Go on looking through the pool for unused chunks, until time is out or a run of ``count`` was found."""
        blocks = self._pool.blocks
        length = 0
        while self._to_scan and length < count:
            if time.monotonic() > until_s:
                return
            self._to_scan -= 1
            chunk, self._cursor = self._cursor, self._cursor - 1 if self._cursor > 1 else self.num_chunks - 1
            length = 0 if chunk == self.num_chunks - 1 else length
            if chunk in self.inflated or self.active_blocks(chunk):
                length = 0
            elif any(blocks[i].block_hash is not None for i in self.blocks_of(chunk)):
                length = 0
                self._cached.append(chunk)
            else:
                length += 1
                self._free.append(chunk)
            if not self._to_scan:
                self._sort_cached()

    def deflate(self, chunks: Iterable[int]) -> int:
        """Hand chunks back to the pool (their memory must be mapped on all ranks); how many."""
        count = 0
        for chunk in chunks:
            if chunk in self.inflated:
                self.inflated.discard(chunk)
                internals.give_blocks(self._pool, self._owned(chunk))
                count += 1
        if count:
            self.note_freed()
        return count

    def reset_around(self, reset: Callable[[], bool]) -> bool:
        """vLLM's reset of its prefix cache demands an otherwise empty pool: let everything out, reset, take it in again.

        Raises:
            RuntimeError: Requests hold some of it; nothing ran since it was let out.
        """
        chunks = sorted(self.inflated)
        self.deflate(chunks)
        try:
            return bool(reset())
        finally:
            lost = [chunk for chunk in chunks if not self.inflate(chunk)]
            if lost:
                raise RuntimeError(f"chunks {lost} could not be taken back after a reset")

    def cheapest_victims(
        self, count: int, requests: Iterable[tuple[str, int, Iterable[int]]]
    ) -> tuple[list[int], list[str]]:
        """Up to ``count`` usable chunks (never chunk 0) for which requests lose least, and those requests.

        One chunk after the other, always the one whose requests have least to lose; a request that is lost already costs nothing more.

        Args:
            requests: ``(id, tokens to compute again, block ids)`` of everything that holds blocks.
        """
        names, tokens, chunks_of = [], [], []
        holders: dict[int, list[int]] = {}
        for index, (name, loses, ids) in enumerate(requests):
            names.append(name)
            tokens.append(loses)
            chunks_of.append({block_id // self.chunk_blocks for block_id in ids})
            for chunk in chunks_of[index]:
                holders.setdefault(chunk, []).append(index)
        usable = [chunk for chunk in range(1, self.num_chunks) if chunk not in self.inflated]
        cost = {chunk: sum(tokens[index] for index in holders.get(chunk, ())) for chunk in usable}
        heap = [(cost[chunk], chunk) for chunk in usable]
        heapq.heapify(heap)
        victims: list[int] = []
        lost: dict[int, None] = {}
        while heap and len(victims) < count:
            at_cost, chunk = heapq.heappop(heap)
            if at_cost != cost.get(chunk):
                continue  # it has become cheaper, and is there again at its new cost; or it is taken
            del cost[chunk]
            victims.append(chunk)
            for index in holders.get(chunk, ()):
                if index in lost:
                    continue
                lost[index] = None
                for other in chunks_of[index] & cost.keys():
                    cost[other] -= tokens[index]
                    heapq.heappush(heap, (cost[other], other))
        return victims, [names[index] for index in lost]

    def _sort_cached(self) -> None:
        """The chunk with most blocks among those that vLLM would evict next comes last: it is taken first."""
        old = Counter(
            block_id // self.chunk_blocks for block_id in internals.next_to_go(self._pool, _LOOK_AHEAD)
        )
        self._cached.sort(key=lambda chunk: old[chunk])

    def check(self) -> None:
        """Assert the invariants of the module docstring; for tests and the idle-time check."""
        blocks = self._pool.blocks
        free = {block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()}
        for chunk in self.inflated:
            for block_id in self._owned(chunk):
                assert blocks[block_id].ref_cnt == 1, f"block {block_id} of chunk {chunk} is shared"
                assert block_id not in free, f"block {block_id} is in the balloon and free"
                assert blocks[block_id].block_hash is None, f"block {block_id} in the balloon is cached"
