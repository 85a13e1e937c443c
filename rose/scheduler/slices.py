"""Long work on the event loop, a slice at a time: whatever else waits there waits for one slice, not for all of it.

A thread would not do: it and the loop would change books under each other's hands, and take the interpreter from each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

import msgspec

SLICE_S = 0.002
"""Between two turns of the event loop."""
Item = TypeVar("Item")
_encode = msgspec.json.Encoder().encode


class Slices:
    """Of one piece of work: what it does with each item counts."""

    def __init__(self) -> None:
        self._until_s = time.perf_counter() + SLICE_S

    async def over(self, items: Iterable[Item]) -> AsyncIterator[Item]:
        """``items``, with a pause wherever a slice is over.  What others may change in one is not to be iterated but copied."""
        for item in items:
            if time.perf_counter() >= self._until_s:
                await asyncio.sleep(0)
                self._until_s = time.perf_counter() + SLICE_S
            yield item

    async def json_list(self, items: Iterable[object]) -> msgspec.Raw:
        """``items``, each made when its turn comes, as a JSON list."""
        return msgspec.Raw(b"[" + b",".join([_encode(item) async for item in self.over(items)]) + b"]")
