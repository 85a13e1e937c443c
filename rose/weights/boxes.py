"""Boxes: which elements of a tensor a piece covers, in flat row-major indices of the whole tensor.

A box is ``run`` consecutive elements, repeated every ``stride``: rows of a matrix (one run), or a slice of its
columns (one run per row).  That is enough for every way in which trainers cut tensors: FSDP by rows, tensor
parallelism by rows or columns, experts by either, and both at once.  Elements of a box are numbered in the order
of their flat indices.

The boxes of one tensor share one stride (that of the cut dimension), so :func:`problem` can prove in
``n log n`` that they overlap nowhere and, together, are the whole.

Pure arithmetic.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import WeightsError
from rose.weights import statehash
from rose.weights.statehash import Bits

MAX_SPAN = 1 << 32
"""From the first element of a strided box to its last: positions are 32-bit.  Publishers cut there."""

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """``num_elements`` of a tensor: runs of ``run``, the first at ``start``, each ``stride`` after the last.

    A contiguous box has one run; its stride means nothing and is 0.
    """

    start: int
    num_elements: int
    run: int
    stride: int

    @classmethod
    def flat(cls, start: int, num_elements: int) -> Box:
        """A contiguous box."""
        return cls(start, num_elements, num_elements, 0)

    @property
    def contiguous(self) -> bool:
        return self.run == self.num_elements

    @property
    def num_runs(self) -> int:
        return self.num_elements // self.run if self.run else 0

    @property
    def span(self) -> int:
        """From the first element to one past the last."""
        return self.num_elements if self.contiguous else (self.num_runs - 1) * self.stride + self.run

    @property
    def end(self) -> int:
        return self.start + self.span


def of_slice(shape: Sequence[int], offset: Sequence[int], extent: Sequence[int]) -> list[Box]:
    """The boxes of ``tensor[offset : offset + extent]`` in all dimensions, in the slice's own row-major order.

    Raises:
        WeightsError: The slice does not lie in the shape.
    """
    if not len(shape) == len(offset) == len(extent):
        raise WeightsError(f"{len(offset)} offsets and {len(extent)} extents for shape {tuple(shape)}")
    if any(o < 0 or e < 0 or o + e > n for n, o, e in zip(shape, offset, extent, strict=True)):
        raise WeightsError(f"{tuple(extent)} at {tuple(offset)} is not inside {tuple(shape)}")
    if math.prod(extent) == 0:
        return []
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = sum(o * s for o, s in zip(offset, strides, strict=True))
    # From the right: whole dimensions join the run, the first cut one ends it.
    run, dim = 1, len(shape)
    while dim > 0 and run == strides[dim - 1]:
        dim -= 1
        run *= extent[dim]
    if dim == 0:
        return [Box.flat(start, run)]
    # Next: whole dimensions join the repetition, as long as one stride reaches from run to run.
    stride, count = strides[dim - 1], extent[dim - 1]
    dim -= 1
    while dim > 0 and extent[dim] == shape[dim]:
        dim -= 1
        count *= extent[dim]
    boxes: list[Box] = []
    for outer in itertools.product(*(range(n) for n in extent[:dim])):
        first = start + sum(i * s for i, s in zip(outer, strides[:dim], strict=True))
        boxes.append(Box.flat(first, run) if count == 1 else Box(first, run * count, run, stride))
    return boxes


def cut(box: Box, limit: int) -> Iterator[tuple[int, Box]]:
    """Pieces of at most ``limit`` elements: ``(where it begins inside the box, piece)``, in order."""
    if box.contiguous:
        for begin in range(0, box.num_elements, limit):
            yield begin, Box.flat(box.start + begin, min(limit, box.num_elements - begin))
        return
    runs = max(1, min(limit // box.run, (MAX_SPAN - box.run) // box.stride + 1))
    for first in range(0, box.num_runs, runs):
        count = min(runs, box.num_runs - first)
        begin, start = first * box.run, box.start + first * box.stride
        if count > 1:
            yield begin, Box(start, count * box.run, box.run, box.stride)
        else:
            for inner, piece in cut(Box.flat(start, box.run), limit):
                yield begin + inner, piece


def positions(box: Box, index: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Where elements of the box lie, counted from its start; increasing where ``index`` is."""
    if box.contiguous:
        return index
    row, column = np.divmod(index, np.uint32(box.run))
    return row * np.uint32(box.stride) + column


def view(box: Box, tensor: NDArray[Any]) -> NDArray[Any]:
    """The box inside the flat tensor, ``[runs, run]``; writing to it writes to the tensor."""
    if box.contiguous:
        return tensor[box.start : box.end].reshape(1, -1)
    width = tensor.itemsize
    return np.lib.stride_tricks.as_strided(
        tensor[box.start : box.end], (box.num_runs, box.run), (box.stride * width, width)
    )


def hash_bits(box: Box, bits: Bits) -> int:
    """State hash of the box, whose elements are ``bits`` in the box's own order."""
    if box.contiguous:
        return statehash.hash_bits(bits, start=box.start)
    total = 0
    rows = max(1, _CHUNK_ELEMENTS // box.run)
    inner = np.arange(box.run, dtype=np.int64)
    for first in range(0, box.num_runs, rows):
        outer = np.arange(first, min(first + rows, box.num_runs), dtype=np.int64) * box.stride
        index = (outer[:, None] + inner[None, :]).reshape(-1)
        part = bits[first * box.run : first * box.run + index.size]
        total = statehash.add(total, statehash.hash_at(index, part, start=box.start))
    return total


def problem(boxes: Sequence[Box], num_elements: int, *, complete: bool) -> str | None:
    """What is wrong with a division of a tensor into ``boxes``; None when nothing is.

    Args:
        complete: They must be the whole tensor, not only lie apart inside it.
    """
    for box in boxes:
        if not (box.start >= 0 and box.num_elements >= 1 and box.end <= num_elements):
            return f"a piece at {box.start} reaches outside the tensor"
        if not box.contiguous and not (
            1 <= box.run < box.stride
            and box.num_elements % box.run == 0
            and box.start % box.stride + box.run <= box.stride
            and box.span <= MAX_SPAN
        ):
            return f"the piece at {box.start} is no slice: runs of {box.run} every {box.stride}"
    strides = {box.stride for box in boxes if not box.contiguous}
    if len(strides) > 1:
        return f"pieces are cut along different dimensions: strides {sorted(strides)}"
    if _overlap(boxes, max(strides, default=0)):
        return "pieces overlap"
    missing = num_elements - sum(box.num_elements for box in boxes)
    return f"{missing} elements are in no piece" if complete and missing else None


def _overlap(boxes: Sequence[Box], stride: int) -> bool:
    if not stride:
        ordered = sorted(boxes)
        return any(a.end > b.start for a, b in itertools.pairwise(ordered))
    # On a grid of rows of one stride each box is one rectangle, a contiguous one up to three: sweep the rows.
    events: list[tuple[int, int, int, int]] = []
    for box in boxes:
        for top, bottom, left, right in _rectangles(box, stride):
            events.append((bottom, 0, left, right))  # 0 sorts the end of one before the start of the next
            events.append((top, 1, left, right))
    events.sort()
    active: list[tuple[int, int]] = []
    for _, begins, left, right in events:
        place = bisect.bisect_left(active, (left, right))
        if not begins:
            del active[place]
            continue
        if place and active[place - 1][1] > left:
            return True
        if place < len(active) and active[place][0] < right:
            return True
        active.insert(place, (left, right))
    return False


def _rectangles(box: Box, stride: int) -> Iterator[tuple[int, int, int, int]]:
    """(top, bottom, left, right) on the grid; bottoms and rights are exclusive."""
    top, left = divmod(box.start, stride)
    if not box.contiguous:
        yield top, top + box.num_runs, left, left + box.run
        return
    bottom, right = divmod(box.end, stride)
    if top == bottom:
        yield top, top + 1, left, right
        return
    if left:
        yield top, top + 1, left, stride
        top += 1
    if top < bottom:
        yield top, bottom, 0, stride
    if right:
        yield bottom, bottom + 1, 0, right
