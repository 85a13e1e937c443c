"""The compiled loops that find changed elements in an engine's memory, or in the host copy, and write there.

As in :mod:`rose.weights.kernels` they trust their arguments and allocate nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rose.weights.jit import compiled


@compiled
def increases(index: Any) -> Any:
    """Is each of ``index`` larger than the one before it?"""
    wrong = 0
    for k in range(1, index.size):
        wrong += index[k] <= index[k - 1]
    return wrong == 0


@compiled
def locate(index: Any, shape: Any, src: Any, dst: Any, start: Any, positions: Any, places: Any) -> Any:
    """Which of ``index`` (less ``start`` at least 0) lie in a box, and where: ``positions`` in ``index``, and ``places``.  Both
    have room for all; returns how many there are, -1 where ``index`` does not increase.

    The box has an element at ``c . src`` for each ``c`` below ``shape``, whose place is ``c . dst``; strides fall, and each spans the axes
    behind it.  Neighbours share all coordinates but the last, so there is one division for each stretch of those.
    """
    last = shape.size - 1
    step, room = src[last], shape[last]
    begin, end, base = np.int64(0), np.int64(-1), np.int64(0)
    inside = False
    found = 0
    before = np.int64(-1)
    for k in range(index.size):
        rest = np.int64(index[k]) - start
        if rest <= before:
            return -1
        before = rest
        if rest >= end:
            inside, base, begin, end = True, np.int64(0), np.int64(0), np.int64(1) << 62
            for axis in range(last):
                coordinate = (rest - begin) // src[axis]
                begin += coordinate * src[axis]
                base += coordinate * dst[axis]
                inside &= coordinate < shape[axis]
                end = min(end, begin + src[axis])  # a last row may end before its stride does
        if inside:
            coordinate = rest - begin
            if step != 1:
                whole = coordinate // step
                if whole * step != coordinate:
                    continue
                coordinate = whole
            if coordinate < room:
                positions[found] = k
                places[found] = base + coordinate * dst[last]
                found += 1
    return found


@compiled
def scatter(bits: Any, idx: Any, values: Any) -> None:
    for k in range(idx.size):
        bits[idx[k]] = values[k]


@compiled
def put(bits: Any, idx: Any, values: Any) -> Any:
    """:func:`scatter`, and whether ``bits[idx]`` are ``values`` then.

    Each piece is read back while its lines are near: a second pass over everything would double the time.
    """
    differs = np.int64(0)
    for first in range(0, idx.size, 1024):
        last = min(first + 1024, idx.size)
        for k in range(first, last):
            bits[idx[k]] = values[k]
        for k in range(first, last):
            differs |= np.int64(bits[idx[k]] ^ values[k])
    return differs == 0
