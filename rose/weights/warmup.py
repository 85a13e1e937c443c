"""Compile every kernel once, so that later processes find them on disk: ``python -m rose.weights.warmup``.

Set-up calls it (about 20 s of one core, once); without it the first publish and the first update compile what they
need, which takes seconds in each process that starts at that time.
"""

from __future__ import annotations

import numpy as np

from rose.weights import codec, indexed, statehash
from rose.weights.source import round_to_bf16


def warm_up() -> None:
    """Run each kernel on small arrays of every type it is used with."""
    for dtype in ("u1", "u2", "u4"):
        old = np.zeros(100, dtype)
        new = old.copy()
        new[::7] += 1
        encoded = codec.encode(old, new)
        assert encoded is not None
        delta = codec.decode(encoded.data, old.size, old.dtype)
        codec.apply(old, delta)
        codec.difference(old, new)
        index = np.arange(100, dtype=np.int64)  # an engine's memory
        assert indexed.put(old, index, new)
    for dtype in ("u1", "u2", "u4"):
        bits = np.zeros(100, dtype)
        statehash.hash_bits(bits)
        for index in (np.arange(100, dtype=np.uint32), np.arange(100, dtype=np.int64)):
            statehash.hash_at(index, bits)
            statehash.delta_hash(index, bits, bits)
            axes, room = np.ones(2, np.int64), np.empty(100, np.int64)
            assert indexed.increases(index)
            assert indexed.locate(index, axes, axes, axes, 0, room, room) == 1
    round_to_bf16(np.zeros(4, np.float32))


if __name__ == "__main__":
    warm_up()
