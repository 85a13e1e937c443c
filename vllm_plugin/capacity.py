"""Which chunks of KV blocks an engine may use: the balloon.

A *chunk* is the smallest run of block ids whose memory is whole pages.  An *inflated* chunk is taken
out of vLLM's block pool, so its memory can be given back; allocation then fails naturally and
vLLM's own preemption takes over.

Decides nothing about *how many* chunks: callers (serving and rollout side) do.  Decides *which*: chunks
whose blocks are all free, those without cached prefixes first.

Invariants (:meth:`check`): an inflated chunk has every block with reference count 1 owned here, and no block is both in
the balloon and in the free queue.  vLLM's null block (block 0) is never touched; only the rollout side takes chunk 0,
when it gives back everything and steps no more.

Engine thread only; nothing here blocks.  Cost: O(blocks of the chunks looked at), and at most
``budget_s`` per call, because it runs between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm_plugin import compat

SLICE_S = 0.0005
"""Longest time one call may take from the step path."""


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
        self._cursor = self.num_chunks - 1

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
        compat.drop_prefixes(self._pool, ids)
        taken: list[int] = []
        try:
            for block_id in ids:
                compat.take_block(self._pool, block_id)  # all are free: nobody holds a block of this chunk
                taken.append(block_id)
        except BaseException:
            compat.give_blocks(self._pool, taken)
            raise
        self.inflated.add(chunk)
        return True

    def inflate_free(
        self, count: int, *, budget_s: float = SLICE_S, taken: list[int] | None = None
    ) -> list[int]:
        """Take up to ``count`` unused chunks (never chunk 0), those without cached prefixes first; the ids taken.

        Stops at ``budget_s``: call again at the next step for the rest.  ``taken`` receives the ids as they are taken, so
        that a caller who survives an exception knows of them.
        """
        until = time.monotonic() + budget_s
        taken = [] if taken is None else taken
        cached: list[int] = []
        blocks = self._pool.blocks
        for _ in range(self.num_chunks - 1):
            if len(taken) >= count or time.monotonic() > until:
                break
            chunk, self._cursor = self._cursor, self._cursor - 1 if self._cursor > 1 else self.num_chunks - 1
            if chunk in self.inflated or self.active_blocks(chunk):
                continue
            if any(blocks[i].block_hash is not None for i in self.blocks_of(chunk)):
                cached.append(chunk)
            elif self.inflate(chunk):
                taken.append(chunk)
        for chunk in cached:
            if len(taken) >= count or time.monotonic() > until:
                break
            if self.inflate(chunk):
                taken.append(chunk)
        return taken

    def deflate(self, chunks: Iterable[int]) -> int:
        """Hand chunks back to the pool (their memory must be mapped on all ranks); how many."""
        count = 0
        for chunk in chunks:
            if chunk in self.inflated:
                self.inflated.discard(chunk)
                compat.give_blocks(self._pool, self._owned(chunk))
                count += 1
        return count

    def cheapest_victims(self, count: int) -> list[int]:
        """Up to ``count`` usable chunks that requests hold, fewest active blocks first."""
        load = [
            (len(self.active_blocks(chunk)), chunk)
            for chunk in range(1, self.num_chunks)
            if chunk not in self.inflated
        ]
        return [chunk for _, chunk in sorted(load)[:count]]

    def check(self) -> None:
        """Assert the invariants of the module docstring; for tests and the idle-time check."""
        blocks = self._pool.blocks
        free = {block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()}
        for chunk in self.inflated:
            for block_id in self._owned(chunk):
                assert blocks[block_id].ref_cnt == 1, f"block {block_id} of chunk {chunk} is shared"
                assert block_id not in free, f"block {block_id} is in the balloon and free"
                assert blocks[block_id].block_hash is None, f"block {block_id} in the balloon is cached"
