"""Chunks side by side: their memory comes and goes with the same calls of a driver."""

from __future__ import annotations

from collections.abc import Iterable


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """``(first, count)`` of each contiguous run of sorted numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


def fewest_runs(chunks: Iterable[int], count: int) -> list[int]:
    """``count`` of ``chunks`` (all, where there are no more) in as few runs of neighbours as can be, the lowest of equal ones.

    Memory of neighbours comes and goes with the same calls of the driver.
    """
    left = runs(sorted(chunks))
    chosen: list[int] = []
    while left and count > 0:
        # The smallest run that holds all the rest, so that long ones stay whole; else the longest there is.
        enough = [run for run in left if run[1] >= count]
        run = min(enough, key=_length) if enough else max(left, key=_length)
        left.remove(run)
        first, length = run
        chosen += range(first, first + min(length, count))
        count -= length
    return chosen


def _length(run: tuple[int, int]) -> int:
    return run[1]
