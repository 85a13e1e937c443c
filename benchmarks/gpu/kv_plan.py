"""The KV cache of Qwen2.5-7B as an engine's plan cuts it, for stages that move memory and have no engine."""

from __future__ import annotations

from rose.coserve.pages import KvGeometry, Range
from rose.units import PAGE_BYTES
from vllm_plugin.memory import MAP_SLICE_CHUNKS

LAYERS = 28
BLOCK_BYTES = 2 * 16 * 4 * 128 * 2
"""Of one layer: keys and values of 16 tokens, 4 heads of 128, bf16."""
CHUNK_BLOCKS = PAGE_BYTES // BLOCK_BYTES
CHUNK_BYTES = LAYERS * PAGE_BYTES


class KvPlan:
    """A cache of which half is lent: the upper chunks, side by side, as engines choose them.

    Attributes:
        size: Of the cache's addresses, bytes.
        lent_bytes: ``num_bytes`` in whole chunks.
        going: Ranges of what is lent: an engine gives it up with one call.
        coming: The same slice by slice: an engine takes it one call after the other.
    """

    def __init__(self, num_bytes: int) -> None:
        num_chunks = -(-num_bytes // CHUNK_BYTES)
        num_blocks = 2 * num_chunks * CHUNK_BLOCKS
        layer_bytes = num_blocks * BLOCK_BYTES
        geometry = KvGeometry(num_blocks, [(0, BLOCK_BYTES, layer_bytes, LAYERS, BLOCK_BYTES)])

        def ranges(first: int, last: int) -> list[Range]:
            return geometry.ranges(range(first * CHUNK_BLOCKS, last * CHUNK_BLOCKS))

        self.size = geometry.total_bytes
        self.lent_bytes = num_chunks * CHUNK_BYTES
        self.going = ranges(num_chunks, 2 * num_chunks)
        self.coming = [
            ranges(first, min(first + MAP_SLICE_CHUNKS, 2 * num_chunks))
            for first in range(num_chunks, 2 * num_chunks, MAP_SLICE_CHUNKS)
        ]
