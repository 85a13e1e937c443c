"""The clients that production has in the fault matrix and the cycles."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from tests.pair.load import ASKED_PROMPTS, Answer, Load


class Asked(Load):
    """Boundary: what a client asks is noted instead of sent."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("m", lambda: "http://127.0.0.1:1", random.Random(0))
        self.expected = [""] * ASKED_PROMPTS
        self.count = 0
        self._error = error

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        self.count += 1
        if self._error is not None:
            raise self._error
        return Answer(began_s=0.0)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._for_ever(client)) for client in range(2)]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_clients_that_may_go_on_and_are_stopped_at_once_ask_nothing() -> None:
    async with Asked() as load:
        load.start()
        await turns()
        load.go_on()
        await load.pause()
        await turns()
        assert load.count == 0
        load.go_on()
        await turns()
        assert load.count == 2


async def test_a_client_that_ends_by_itself_is_an_error() -> None:
    load = Asked(AssertionError("no production"))
    await load.__aenter__()
    load.start()
    load.go_on()
    await turns()
    with pytest.raises(AssertionError, match="no production"):
        await load.__aexit__()
