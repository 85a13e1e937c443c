"""What requests leave behind: nothing that only a garbage collection could free, since the daemon hardly ever makes a full one."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from rose.auth import bearer
from rose.scheduler import cli
from rose.testing.fake_engine import Fault
from tests.scheduler.conftest import World, user

NUM_REQUESTS = 20
CONNECTION = ("_SelectorSocketTransport", "dict", "method", "socket", "TransportSocket")


class Collector:
    """Collects by hand, and says what there was to collect."""

    def begin(self) -> None:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)

    def found(self) -> Counter[str]:
        gc.collect()
        return Counter(type(each).__qualname__ for each in gc.garbage)


@pytest.fixture
def collector(only_new_garbage: None) -> Iterator[Collector]:
    gc.disable()
    yield Collector()
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


async def generate(world: World, number: int) -> None:
    name = await world.trajectory()
    body = {"token_ids": [5, 6, 7 + number], "sampling_params": {"max_tokens": 5}}
    await world.ok("POST", "/rose/v1/generate", body, headers={"X-Session-ID": name})
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1.0})


async def chat(world: World, number: int) -> None:
    await world.chat(None, [user(f"x{number}")], max_tokens=4)


async def stream(world: World, number: int) -> None:
    body = {"messages": [user(f"y{number}")], "max_tokens": 4, "stream": True}
    url, headers = f"{world.url}/v1/chat/completions", bearer(world.tokens.agent)
    async with world.session.post(url, json=body, headers=headers) as response:
        await response.read()


async def refused(world: World, number: int) -> None:
    assert (await world.call("POST", "/v1/chat/completions", {"messages": number}))[0] == 400


async def cut(world: World, number: int) -> None:
    for engine in world.engines.values():
        engine.faults.extend([Fault(kind="reclaim", after=1)])
    await chat(world, number)
    for engine in world.engines.values():
        engine.faults.clear()


async def cancelled(world: World, number: int) -> None:
    """The turn under way ends in an error, and its client hears of it."""
    for engine in world.engines.values():
        engine.hold = asyncio.Event()
    name = await world.trajectory()
    asked = asyncio.create_task(
        world.call(
            "POST",
            "/v1/chat/completions",
            {"messages": [user(f"z{number}")], "max_tokens": 4},
            headers={"X-Session-ID": name},
        )
    )
    await world.until(lambda: any(engine._running for engine in world.engines.values()))
    await world.call("DELETE", f"/rose/v1/trajectories/{name}")
    assert (await asked)[0] == 410
    for engine in world.engines.values():
        assert engine.hold is not None
        engine.hold.set()
        engine.hold = None
    await world.until(lambda: not any(engine._running for engine in world.engines.values()))


async def heartbeat(world: World, number: int) -> None:
    await world.nodes["a"].beat()


@pytest.mark.parametrize(
    "ask", [generate, chat, stream, refused, cut, heartbeat], ids=lambda ask: ask.__name__
)
async def test_a_request_leaves_no_cycle(world: World, collector: Collector, ask: Any) -> None:
    await world.start()
    await world.add("a", mean_tokens=1000)
    await world.add("b", mean_tokens=1000, tier="harvested")
    for number in range(3):
        await ask(world, number)  # what is made once
    await world.until(lambda: not world.scheduler.inflight._running)
    collector.begin()
    for number in range(3, 3 + NUM_REQUESTS):
        await ask(world, number)
    await world.until(lambda: not world.scheduler.inflight._running)
    found = collector.found()
    ended = found["_SelectorSocketTransport"]
    assert ended < NUM_REQUESTS  # a cut may end its connection
    # Such a connection is a cycle of the event loop's own.
    found.subtract(dict.fromkeys(CONNECTION, ended))
    assert found.total() < NUM_REQUESTS, found  # less than one object for each


async def test_a_turn_that_is_cancelled_keeps_nothing_of_what_it_held(
    world: World, collector: Collector
) -> None:
    """Its connection to the engine is cut, which leaves a cycle of the event loop's own; its tokens are not in it."""
    await world.start()
    await world.add("a")
    await cancelled(world, 0)
    collector.begin()
    for number in range(NUM_REQUESTS):
        await cancelled(world, 1 + number)
    await world.until(lambda: not world.scheduler.inflight._running)
    found = collector.found()
    assert not found.keys() & {
        "Inflight",
        "TurnHandle",
        "Turn",
        "Prompt",
        "TurnRequest",
        "Gone",
        "traceback",
        "frame",
    }, found


async def test_a_client_that_leaves_costs_little_until_a_collection(
    world: World, collector: Collector
) -> None:
    """A cancelled handler's traceback may refer to itself: rare, and small."""
    await world.start(timeouts={"detach_s": 0.0})
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    url, headers = f"{world.url}/rose/v1/generate", bearer(world.tokens.agent)
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 5}}
    timeout = aiohttp.ClientTimeout(total=0.05)
    for round_ in range(2):
        collector.begin()
        for _ in range(NUM_REQUESTS):
            with pytest.raises(TimeoutError):
                async with world.session.post(url, json=body, headers=headers, timeout=timeout):
                    pass
        await world.until(lambda: not world.scheduler.inflight._running)
        found = collector.found()
        print(found)
        assert round_ == 0 or sum(found.values()) < 100 * NUM_REQUESTS, found


def test_what_outlives_two_looks_is_looked_at_no_more() -> None:
    before = gc.get_freeze_count()
    try:
        cli._settle("stop", {"generation": 0})
        assert gc.get_freeze_count() == before
        cli._settle("stop", {"generation": 1})
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
