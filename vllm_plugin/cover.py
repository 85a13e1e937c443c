"""Which elements of a flat run do strided regions touch: none twice, and all that are needed?

Pure arithmetic on ``(shape, strides, offset)``; the proof part of :mod:`vllm_plugin.plan_recorder`.  Regions
without gaps, which is nearly all of them, are compared as intervals; any other makes it count element by
element.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

Region = tuple[Sequence[int], Sequence[int], int]
"""Shape, strides and offset of elements in a flat run."""


def cover(
    num_elements: int, regions: Sequence[Region], fills: Sequence[Region], needed: Sequence[Region]
) -> tuple[bool, bool]:
    """(two regions share an element, a needed element lies in no region and no fill)."""
    spans, filled, wanted = (_spans(each) for each in (regions, fills, needed))
    if spans is None or filled is None or wanted is None:
        return _cover_by_counting(num_elements, regions, fills, needed)
    spans.sort()
    twice = any(left[1] > right[0] for left, right in itertools.pairwise(spans))
    union: list[list[int]] = []
    for begin, end in sorted([*spans, *filled]):
        if union and begin <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([begin, end])
    hole = any(
        not any(begin <= first and last <= end for begin, end in union) for first, last in wanted
    )  # fmt: skip
    return twice, hole


def _spans(regions: Sequence[Region]) -> list[tuple[int, int]] | None:
    found = [span for region in regions if (span := span_of(region)) is not None]
    return found if len(found) == len(regions) else None


def _cover_by_counting(
    num_elements: int, regions: Sequence[Region], fills: Sequence[Region], needed: Sequence[Region]
) -> tuple[bool, bool]:
    count = torch.zeros(num_elements, dtype=torch.uint8)
    twice = False
    for shape, strides, offset in regions:
        view = count.as_strided(shape, strides, offset)
        twice = twice or bool(view.any())
        view.fill_(1)
    for shape, strides, offset in fills:
        count.as_strided(shape, strides, offset).fill_(1)
    hole = any(not bool(count.as_strided(shape, strides, offset).all()) for shape, strides, offset in needed)
    return twice, hole


def span_of(region: Region) -> tuple[int, int] | None:
    """``[begin, end)`` of a region without gaps; None for any other."""
    shape, strides, offset = region
    length = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda axis: (axis[1], axis[0])):
        if size == 1:
            continue
        if stride != length:
            return None
        length *= size
    return offset, offset + length


def is_nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Each stride spans all smaller ones: no element is touched twice."""
    span = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if stride < span:
            return False
        span = stride * (size - 1) + span
    return True
