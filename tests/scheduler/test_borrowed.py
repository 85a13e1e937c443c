"""Borrowed engines behind a whole scheduler: turns run there while they are lent, and leave with their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rose.testing.fake_engine import FakeEngine
from tests.scheduler.conftest import PROMPT, World, generate

LENT = {"timeouts": {"device_return_s": 30.0}}
"""More than a slow machine needs to answer: what is not back by then is left behind."""


class Counting(FakeEngine):
    """Counts the tokens that it samples."""

    num_sampled = 0

    def _sample(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
        for sampled in super()._sample(prompt, params):
            self.num_sampled += 1
            yield sampled


async def lend(world: World, name: str, lent_s: float | None) -> None:
    world.nodes[name].lent_s = lent_s
    assert await world.nodes[name].beat()


async def test_a_turn_leaves_a_borrowed_engine_before_the_device_goes_back_with_all_its_tokens(
    world: World,
) -> None:
    """The engine answers at once, not in a stream: what it has made is in its answer alone."""
    await world.start(**LENT)
    engine = await world.add("b", tier="borrowed", kind=Counting, mean_tokens=10_000, token_s=0.02)
    assert isinstance(engine, Counting)
    running = asyncio.create_task(generate(world))
    await world.until(lambda: world.scheduler.book.queue)
    assert not engine.requests  # nobody has said for how long it is lent
    await lend(world, "b", 600.0)
    await world.until(lambda: engine.num_sampled > 3)
    await lend(world, "b", 20.0)
    await world.until(lambda: "generate-tokens" in "".join(engine.aborted))
    other = await world.add("d", mean_tokens=10_000)

    answer = await running

    assert answer["token_ids"] == other.greedy(PROMPT, {"max_tokens": 40})[0]
    assert [(one["worker"], one["tier"]) for one in answer["segments"]] == [
        ("b", "borrowed"),
        ("d", "dedicated"),
    ]
    assert answer["segments"][0]["n"] >= 3  # the last that was sampled may not be out yet
    status = await world.ok("GET", "/status")
    assert status["reroutes"] == {"returned": 1}
    assert status["tokens"]["by_tier"]["borrowed"] == answer["segments"][0]["n"]
    (told,) = [worker for worker in status["workers"] if worker["worker_id"] == "b"]
    assert 0.0 <= told["lent_s"] <= 20.0
    async with world.session.get(f"{world.url}/metrics") as response:
        text = await response.text()
    assert 'rose_workers{state="ready",tier="borrowed"} 1.0' in text
    assert "rose_borrowed_seconds " in text


async def test_a_borrowed_engine_that_vanishes_costs_no_turn(world: World) -> None:
    await world.start(**LENT)
    engine = await world.add("b", tier="borrowed", kind=Counting, mean_tokens=10_000, token_s=0.02)
    assert isinstance(engine, Counting)
    await lend(world, "b", 600.0)
    running = asyncio.create_task(generate(world, max_tokens=400))  # it is not over before the kill
    await world.until(lambda: engine.num_sampled > 3)
    other = await world.add("d", mean_tokens=10_000)
    await world.kill("b")
    answer = await running
    assert answer["token_ids"] == other.greedy(PROMPT, {"max_tokens": 400})[0]
    assert answer["segments"][-1]["worker"] == "d"


async def test_an_agent_may_keep_its_turns_off_borrowed_devices(world: World) -> None:
    await world.start(**LENT)
    engine = await world.add("b", tier="borrowed")
    await lend(world, "b", 600.0)
    await world.add("d")
    headers = {"X-ROSE-Tier": "dedicated"}
    for _ in range(4):
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
        answer = await world.ok("POST", "/rose/v1/generate", body, headers=headers)
        assert answer["segments"][0]["worker"] == "d"
    assert not engine.requests
