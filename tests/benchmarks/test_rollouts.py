"""The rollout demand of co-serving benchmarks: a turn is sent where it has room, as rose-scheduler sends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from benchmarks.coserving.rollouts import Registry
from rose.proc import free_port


class Node:
    """What a node agent tells the registry."""

    def __init__(self, registry: Registry, http: aiohttp.ClientSession) -> None:
        self.registry, self._http = registry, http

    async def says(self, **beat: Any) -> None:
        async with self._http.post(f"{self.registry.url}/workers/a/heartbeat", json=beat) as answer:
            assert answer.status == 200


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with Registry(free_port()) as registry, aiohttp.ClientSession() as http:
        async with http.post(f"{registry.url}/workers", json={"url": "http://engine"}) as answer:
            assert answer.status == 200
        yield Node(registry, http)


async def enter(registry: Registry, num_tokens: int, leave: asyncio.Event) -> None:
    async with registry.room(num_tokens) as worker:
        assert worker == {"url": "http://engine"}
        await leave.wait()


async def settled(*tasks: asyncio.Task[None]) -> list[bool]:
    """Which of them are done, once nobody can go on."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_a_turn_waits_until_the_engine_is_ready_and_may_hold_it(node: Node) -> None:
    leave = asyncio.Event()
    leave.set()
    turn = asyncio.create_task(enter(node.registry, 100, leave))
    await node.says(state="starting")
    assert await settled(turn) == [False]
    await node.says(state="ready", kv_budget_tokens=0)
    assert await settled(turn) == [False]
    await node.says(state="ready", kv_budget_tokens=100)
    await asyncio.wait_for(turn, 10.0)


async def test_what_others_hold_is_not_given_twice(node: Node) -> None:
    await node.says(state="ready", kv_budget_tokens=250)
    leave = [asyncio.Event(), asyncio.Event(), asyncio.Event()]
    for last in leave[1:]:
        last.set()
    first = asyncio.create_task(enter(node.registry, 200, leave[0]))
    assert await settled(first) == [False]  # it is there
    second = asyncio.create_task(enter(node.registry, 100, leave[1]))
    third = asyncio.create_task(enter(node.registry, 50, leave[2]))
    assert await settled(second, third) == [False, True]
    leave[0].set()
    await asyncio.wait_for(second, 10.0)


async def test_an_engine_that_does_not_say_what_it_may_hold_takes_every_turn(node: Node) -> None:
    await node.says(state="ready")
    leave = asyncio.Event()
    leave.set()
    await asyncio.wait_for(enter(node.registry, 10**9, leave), 10.0)


async def test_a_turn_that_is_given_up_leaves_its_room(node: Node) -> None:
    await node.says(state="ready", kv_budget_tokens=100)
    given_up = asyncio.create_task(enter(node.registry, 100, asyncio.Event()))
    await settled(given_up)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    leave = asyncio.Event()
    leave.set()
    await asyncio.wait_for(enter(node.registry, 100, leave), 10.0)
