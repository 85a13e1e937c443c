"""Requests of an agent program beside its task: marked, counted, not trained on; sub-agents stay turns like others."""

from __future__ import annotations

from typing import Any

import pytest

from rose.train.batch import samples_of
from tests.scheduler.conftest import World, user

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TITLE: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Write a title."}, user("go")],
    "response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "object"}}},
}
PROBE: dict[str, Any] = {"messages": [user("quota")], "max_tokens": 1}
CRITIC: dict[str, Any] = {"messages": [{"role": "system", "content": "Judge."}, user("this")]}
EXPLORER: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Explore."}, user("there")],
    "tools": [TOOL],
}


async def asked(world: World, session: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    named = {"X-Session-ID": session, **{name.replace("_", "-"): value for name, value in headers.items()}}
    body = {"max_tokens": 4, **body}
    return (await world.ok("POST", "/v1/chat/completions", body, headers=named))["choices"][0]["message"]


async def worked(world: World, session: str) -> None:
    """Two turns of the agent itself."""
    messages = [user("go")]
    for _ in range(2):
        messages = [
            *messages,
            await asked(world, session, {"messages": messages, "tools": [TOOL]}),
            user("on"),
        ]


async def turns_of(world: World, session: str) -> list[tuple[bool, str | None]]:
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    (listed,) = (await world.ok("GET", "/rose/v1/trajectories"))["trajectories"]
    assert listed["num_side_turns"] == sum(turn["side"] for turn in trace["turns"])
    limits = {"vocab_size": 2**20, "max_tokens": 2**20}
    trained = samples_of(trace | {"reward": 1.0}, **limits, constrained="train")
    num_trained = sum(len(sequence.positions) for sequence in trained)
    assert num_trained == sum(len(turn["token_ids"]) for turn in trace["turns"] if not turn["side"])
    return [(turn["side"], turn["fork"]) for turn in trace["turns"]]


@pytest.fixture
async def session(world: World) -> str:
    await world.start()
    await world.add("a", mean_tokens=200)
    return await world.trajectory()


@pytest.mark.parametrize("body", [TITLE, PROBE], ids=["title", "probe"])
async def test_what_comes_first_is_no_turn_and_makes_no_fork(
    world: World, session: str, body: dict[str, Any]
) -> None:
    await asked(world, session, body)
    await worked(world, session)
    assert await turns_of(world, session) == [(True, None), (False, None), (False, None)]


@pytest.mark.parametrize("body", [TITLE, PROBE], ids=["title", "probe"])
async def test_what_comes_between_turns_is_no_turn(world: World, session: str, body: dict[str, Any]) -> None:
    await worked(world, session)
    await asked(world, session, body)
    assert await turns_of(world, session) == [(False, None), (False, None), (True, "side")]


@pytest.mark.parametrize(
    ("body", "fork"), [(CRITIC, "context"), (EXPLORER, "history")], ids=["without tools", "with tools"]
)
async def test_a_sub_agent_is_a_branch(world: World, session: str, body: dict[str, Any], fork: str) -> None:
    await worked(world, session)
    await asked(world, session, body)
    assert await turns_of(world, session) == [(False, None), (False, None), (False, fork)]


@pytest.mark.parametrize("body", [TITLE, PROBE], ids=["formed", "one token"])
async def test_where_nobody_has_tools_an_answer_of_any_form_is_the_task(
    world: World, session: str, body: dict[str, Any]
) -> None:
    await asked(world, session, body)
    await asked(world, session, {**body, "messages": [user("other")]})
    assert await turns_of(world, session) == [(False, None), (False, "history")]


async def test_what_is_continued_is_no_side_request(world: World, session: str) -> None:
    await worked(world, session)
    answer = await asked(world, session, TITLE)
    assert (await turns_of(world, session))[-1] == (True, "side")
    await asked(world, session, {**TITLE, "messages": [*TITLE["messages"], answer, user("shorter")]})
    assert await turns_of(world, session) == [(False, None), (False, None), (False, "side"), (False, None)]


async def test_who_says_what_it_is_is_believed(world: World, session: str) -> None:
    await worked(world, session)
    await asked(world, session, CRITIC, X_ROSE_Side="yes")
    await asked(world, session, TITLE, X_ROSE_Side="no")
    assert [turn for turn, _ in await turns_of(world, session)] == [False, False, True, False]
    headers = {"X-Session-ID": session, "X-ROSE-Side": "maybe"}
    status, answer = await world.call("POST", "/v1/chat/completions", PROBE, headers=headers)
    assert (status, answer["error"]["param"]) == (400, "X-ROSE-Side")


async def test_tokens_may_be_said_to_be_beside_the_task(world: World, session: str) -> None:
    headers = {"X-Session-ID": session, "X-ROSE-Side": "yes"}
    await world.ok("POST", "/rose/v1/generate", {"token_ids": [10, 11]}, headers=headers)
    assert await turns_of(world, session) == [(True, None)]


async def test_an_environment_may_train_on_what_is_only_taken_for_one(world: World) -> None:
    await world.start()
    await world.add("a", mean_tokens=200)
    session = await world.trajectory(train_side_requests=True)
    await worked(world, session)
    await asked(world, session, TITLE)
    await asked(world, session, CRITIC, X_ROSE_Side="yes")
    assert [turn for turn, _ in await turns_of(world, session)] == [False, False, False, True]


async def test_a_restart_and_a_batch_know_them(world: World, session: str) -> None:
    await asked(world, session, TITLE)
    await worked(world, session)
    before = await turns_of(world, session)
    await world.scheduler.stop(drain_s=0)
    await world.start()
    assert await turns_of(world, session) == before
    await world.ok("POST", f"/rose/v1/trajectories/{session}/finish", {"reward": 1.0})
    body = {"job": "job", "num_groups": 1, "version": "0.0"}
    batch = await world.ok("PUT", "/rose/v1/batches/b", body, role="trainer")
    assert [turn["side"] for turn in batch["trajectories"][0]["turns"]] == [True, False, False]
