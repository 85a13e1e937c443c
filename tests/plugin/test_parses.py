"""Open parses are bounded, and none outlives its caller; what they parse is checked with the real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rose.errors import CapacityError, Conflict, Gone
from vllm_plugin.parses import TOKEN_BYTES, CloseBody, FeedBody, Parses, ParseSource, PieceBody

SOURCE = ParseSource(kind="chat", request={}, prompt_token_ids=[1, 2, 3])


class Count:
    """Says how many tokens it has seen."""

    def __init__(self, source: ParseSource) -> None:
        self.num_tokens = 0

    def feed(self, piece: PieceBody, sizes: Sequence[int]) -> dict[str, Any]:
        if 666 in piece.token_ids:
            raise ValueError("a parser's own")
        self.num_tokens += len(piece.token_ids)
        return {"seen": self.num_tokens, "sizes": list(sizes)}


class Rig:
    def __init__(self, **bounds: Any) -> None:
        self.now_s = 0.0
        self.gate: asyncio.Event | None = None
        self.parses = Parses(now_s=lambda: self.now_s, **bounds)

    async def run(self, work: Callable[[], Any]) -> Any:
        if self.gate is not None:
            await self.gate.wait()
        return work()

    async def open(self, name: str, token_ids: Sequence[int] = (7,), **fields: Any) -> dict[str, Any]:
        body = FeedBody(parse=name, at=0, token_ids=list(token_ids), open=SOURCE, **fields)
        return await self.parses.feed(body, 1000, Count, self.run)

    async def feed(
        self, name: str, at: int, token_ids: Sequence[int] = (7,), **fields: Any
    ) -> dict[str, Any]:
        body = FeedBody(parse=name, at=at, token_ids=list(token_ids), **fields)
        return await self.parses.feed(body, 100, Count, self.run)


async def test_a_parse_is_fed_until_its_last_piece() -> None:
    rig = Rig()
    assert await rig.open("a", [5, 6, 7], pieces=[1, 2]) == {"seen": 3, "sizes": [1, 2]}
    assert (await rig.feed("a", 3))["seen"] == 4
    assert rig.parses.num_bytes == 1000 + 4 * TOKEN_BYTES
    assert (await rig.feed("a", 4, finish_reason="stop"))["seen"] == 5
    assert (len(rig.parses), rig.parses.num_bytes) == (0, 0)
    with pytest.raises(Gone) as gone:
        await rig.feed("a", 5)
    assert gone.value.status == 410


@pytest.mark.parametrize("at", [0, 2])
async def test_a_piece_that_was_lost_or_comes_twice_is_not_taken(at: int) -> None:
    rig = Rig()
    await rig.open("a")
    with pytest.raises(Gone):
        await rig.feed("a", at)
    assert (len(rig.parses), rig.parses.num_bytes) == (0, 0)


async def test_no_more_than_so_many_are_open() -> None:
    rig = Rig(max_parses=2)
    await rig.open("a")
    await rig.open("b")
    with pytest.raises(CapacityError) as full:
        await rig.open("c")
    assert full.value.status == 429
    await rig.open("b")  # again, in its own place
    rig.parses.close(["a"])
    await rig.open("c")


async def test_their_bytes_are_bounded() -> None:
    rig = Rig(max_bytes=2500)
    await rig.open("a")
    await rig.open("b")
    with pytest.raises(CapacityError):
        await rig.open("c")
    await rig.feed("a", 1, finish_reason="length")
    await rig.open("c")


async def test_an_idle_one_is_forgotten_and_one_that_is_fed_is_not() -> None:
    rig = Rig(idle_s=10)
    await rig.open("a")
    rig.now_s = 6
    await rig.open("b")
    rig.now_s = 11
    await rig.feed("b", 1)
    assert len(rig.parses) == 1
    rig.now_s = 22
    rig.parses.sweep()
    assert (len(rig.parses), rig.parses.num_bytes) == (0, 0)


async def test_idle_ones_go_without_another_call() -> None:
    rig = Rig(idle_s=0.01)
    await rig.open("a")
    rig.now_s = 1.0
    async with asyncio.timeout(10):
        while len(rig.parses):  # noqa: ASYNC110 - its own timer
            await asyncio.sleep(0.005)


async def test_a_parser_that_fails_leaves_nothing() -> None:
    rig = Rig()
    await rig.open("a")
    with pytest.raises(ValueError, match="parser"):
        await rig.feed("a", 1, [666])
    with pytest.raises(ValueError, match="parser"):
        await rig.open("b", [666])
    assert (len(rig.parses), rig.parses.num_bytes) == (0, 0)


async def test_one_that_is_being_fed_is_not_fed_at_once() -> None:
    rig = Rig()
    await rig.open("a")
    rig.gate = asyncio.Event()
    first = asyncio.create_task(rig.feed("a", 1))
    await asyncio.sleep(0)
    with pytest.raises(Conflict):
        await rig.feed("a", 1)
    rig.gate.set()
    assert (await first)["seen"] == 2


@pytest.mark.parametrize("when", ["before", "during"])
async def test_one_that_is_closed_while_it_opens_leaves_nothing(when: str) -> None:
    rig = Rig()
    if when == "before":  # two requests of a caller that left, in the wrong order
        rig.parses.close(CloseBody(parses=["a"]).parses)
        with pytest.raises(Gone):
            await rig.open("a")
    else:
        rig.gate = asyncio.Event()
        opening = asyncio.create_task(rig.open("a"))
        await asyncio.sleep(0)
        rig.parses.close(["a"])
        rig.gate.set()
        await opening
    assert (len(rig.parses), rig.parses.num_bytes) == (0, 0)
