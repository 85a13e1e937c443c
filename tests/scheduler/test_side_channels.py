"""Routing to experts beside the tokens: every position once, whatever became of the turn's engines."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from rose.testing.fake_engine import Fault, expert_of
from tests.scheduler.conftest import World, user


async def conversation(world: World, session: str, *, num_turns: int, **fields: Any) -> dict[str, Any]:
    messages: list[Any] = [user("go")]
    for _ in range(num_turns):
        answer = await world.chat(session, messages, max_tokens=12, **fields)
        messages += [answer["choices"][0]["message"], user("on")]
    return await world.ok("GET", f"/rose/v1/trajectories/{session}")


def rows_of(trace: dict[str, Any]) -> list[int | None]:
    """By position; each attempt's are cut off where the next one's begin."""
    parts = [
        (part["start"], base64.b64decode(part["npy"]))
        for turn in trace["turns"]
        for part in turn["routed_experts"]
    ]
    rows: list[int | None] = []
    for start, data in parts:
        assert start <= len(rows), "a gap"
        del rows[start:]
        rows += data
    return rows


@pytest.mark.parametrize(
    "faults", [[], [Fault(kind="reclaim", after=5)], [Fault(kind="reset", after=5)], [Fault(kind="reclaim")]]
)
async def test_every_position_is_recorded_whatever_became_of_its_engine(
    world: World, faults: list[Fault]
) -> None:
    await world.start()
    for name in ("a", "b"):
        engine = await world.add(name, routed_experts=True, mean_tokens=10_000)
        engine.faults.extend(faults)
    session = await world.trajectory(record=["routed_experts"])
    trace = await conversation(world, session, num_turns=3)
    last = trace["turns"][-1]
    ids = last["prompt_token_ids"] + last["token_ids"]
    assert [turn["parent"] for turn in trace["turns"]] == [None, 0, 1]
    assert rows_of(trace) == [expert_of(token) for token in ids[:-1]]


async def test_what_the_parent_has_is_not_asked_for_again(world: World) -> None:
    await world.start()
    engine = await world.add("a", routed_experts=True)
    session = await world.trajectory(record=["routed_experts"])
    trace = await conversation(world, session, num_turns=2)
    first = trace["turns"][0]
    held = len(first["prompt_token_ids"]) + len(first["token_ids"])
    starts = [request["sampling_params"]["routed_experts_prompt_start"] for request in engine.requests]
    assert starts == [0, held - 1]


async def test_an_engine_that_returns_none_is_refused_by_name(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory(record=["routed_experts"])
    body = {"messages": [user("go")], "max_tokens": 4}
    status, refused = await world.call("POST", f"/s/{session}/v1/chat/completions", body)
    assert status == 400
    assert "--enable-return-routed-experts" in refused["error"]["message"]
    assert (await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"] == []


async def test_nobody_else_is_asked_for_it(world: World) -> None:
    await world.start()
    engine = await world.add("a", routed_experts=True)
    trace = await conversation(world, await world.trajectory(), num_turns=1)
    assert "routed_experts" not in trace["turns"][0]
    assert "routed_experts_prompt_start" not in engine.requests[0]["sampling_params"]


async def test_a_side_channel_that_is_not_known_is_refused(world: World) -> None:
    await world.start()
    body = {"job": "job", "record": ["hidden_states"]}
    status, refused = await world.call("POST", "/rose/v1/trajectories", body)
    assert (status, refused["error"]["param"]) == (400, "record[0]")


async def test_the_routing_outlives_a_restart_and_counts_as_bytes(world: World) -> None:
    await world.start()
    await world.add("a", routed_experts=True)
    session = await world.trajectory(record=["routed_experts"])
    before = await conversation(world, session, num_turns=2)
    held = world.scheduler.store.held_bytes("job")
    await world.scheduler.stop(drain_s=0)
    await world.start()
    after = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    assert rows_of(after) == rows_of(before)
    assert world.scheduler.store.held_bytes("job") == held
