"""The same request again: joined, replayed, or a new turn."""

from __future__ import annotations

import asyncio

from tests.scheduler.conftest import World, user


async def test_a_retry_after_the_answer_was_lost_gets_the_same_answer(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory()
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8}
    headers = {"X-Session-ID": session}
    first = await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    again = await world.ok(
        "POST", "/v1/chat/completions", body, headers={**headers, "x-stainless-retry-count": "1"}
    )
    assert again == first
    assert len(engine.requests) == 1


async def test_a_retry_while_the_turn_runs_joins_it(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    session = await world.trajectory()
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8}
    headers = {"X-Session-ID": session}
    first = asyncio.create_task(world.ok("POST", "/v1/chat/completions", body, headers=headers))
    await world.until(lambda: engine.num_running == 1)
    first.cancel()
    await world.until(
        lambda: (
            world.scheduler.book.turns
            and all(turn.detached_at_s is not None for turn in world.scheduler.book.turns.values())
        )
    )
    retry = asyncio.create_task(world.ok("POST", "/v1/chat/completions", body, headers=headers))
    await world.until(lambda: world.scheduler.status.num_duplicates == 1)
    engine.hold.set()
    assert (await retry)["rose"]["turn"] == 0
    assert len(engine.requests) == 1


async def test_an_equal_body_that_is_no_retry_is_a_new_turn(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory()
    for _ in range(2):
        await world.chat(session, [user("x")], max_tokens=8)
    assert len(engine.requests) == 2


async def test_one_turn_number_with_two_bodies_is_a_conflict(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    headers = {"X-Session-ID": session, "X-ROSE-Turn": "0"}
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8}
    first = await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    assert await world.ok("POST", "/v1/chat/completions", body, headers=headers) == first
    body["max_tokens"] = 9
    status, answer = await world.call("POST", "/v1/chat/completions", body, headers=headers)
    assert (status, answer["error"]["code"]) == (422, "turn_conflict")
