"""What the protocols make of odd answers and odd requests: pieces in any order, cut arguments, none at all."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from aiohttp import web

from rose.scheduler import count_api
from rose.scheduler.protocols.anthropic_messages import MessagesRequest, readable
from rose.scheduler.protocols.responses import ResponsesRequest
from rose.testing.fake_engine import FakeEngine
from tests.scheduler.conftest import World, user
from tests.scheduler.speaker import Speaker, Speech

TURN = "n-0000000000000000"
ROSE = {"ids": [TURN]}
CHOICE = {"finish_reason": "stop", "stop_reason": None}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
ANSWER = {
    "choices": [CHOICE],
    "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 0}},
    "rose": ROSE,
    "created": 0,
    "model": "policy",
}


def piece(index: int, arguments: str, *, first: bool = False) -> dict[str, Any]:
    named = {"id": f"call-{index}", "type": "function"} if first else {}
    return {
        "index": index,
        **named,
        "function": {"arguments": arguments, **({"name": "look"} if first else {})},
    }


BROKEN = {
    "text between a call's pieces": [
        {"tool_calls": [piece(0, '{"at"', first=True)]},
        {"content": "\n"},
        {"tool_calls": [piece(0, ': "x"}')]},
        {"tool_calls": [piece(1, '{"at": "y"}', first=True)]},
    ],
    "text in the piece that ends a call": [
        {"tool_calls": [piece(0, '{"at"', first=True)]},
        {"content": "\n", "tool_calls": [piece(0, ': "x"}'), piece(1, '{"at": ', first=True)]},
        {"content": "", "tool_calls": [piece(1, '"y"}')]},
    ],
    "text behind all calls": [
        {"tool_calls": [piece(0, '{"at": "x"}', first=True), piece(1, '{"at": ', first=True)]},
        {"content": "\n"},
        {"tool_calls": [piece(1, '"y"}')]},
    ],
}


def events(data: Iterable[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event.split(b"\ndata: ")[1]) for event in data]


def streamed(form: Any, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    form.begin(TURN, 1, 0)
    found = [event for delta in deltas for event in events(form.piece(0, delta, None))]
    return found + events(form.end(ANSWER, ["stop"]))


@pytest.mark.parametrize("way", BROKEN)
def test_text_between_a_calls_pieces_leaves_the_call_whole_in_messages(way: str) -> None:
    form = MessagesRequest({"messages": [user("x")]}).stream()
    found = streamed(form, BROKEN[way])
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    calls = [(block["id"], block["name"]) for block in starts if block["type"] == "tool_use"]
    assert calls == [("call-0", "look"), ("call-1", "look")]
    message = form.message(0)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"at":"x"}', '{"at":"y"}']
    assert message["content"] == "\n"


@pytest.mark.parametrize("way", BROKEN)
def test_text_between_a_calls_pieces_leaves_the_call_whole_in_responses(way: str) -> None:
    form = ResponsesRequest({"input": "x"}, None).stream()
    (response,) = [
        event["response"] for event in streamed(form, BROKEN[way]) if event["type"] == "response.completed"
    ]
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert [(call["call_id"], call["name"]) for call in calls] == [("call-0", "look"), ("call-1", "look")]
    assert [json.loads(call["arguments"]) for call in calls] == [{"at": "x"}, {"at": "y"}]
    assert form.message(0)["content"] == "\n"


# --- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "read"),
    [('{"a": ' + "[" * 4000, {}), ('{"a": ' + "[" * 150 + "[]," * 4000, None)],
    ids=["deep", "long"],
)
def test_cut_arguments_cost_no_more_than_their_length(text: str, read: Any) -> None:
    """An end of its own for every bracket would be megabytes of brackets."""
    tracemalloc.start()
    found = readable(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * len(text) + 100_000
    assert found == read or (read is None and list(found) == ["a"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("javascript", [False, True], ids=["as it was", "as JavaScript has it"])
async def test_whole_numbers_with_a_point_come_back_as_the_same_history(
    world: World, stream: bool, javascript: bool
) -> None:
    arguments = '{"n": 1.0, "many": [2.0, 0.5], "far": 1e300}'
    await world.start()
    await world.add("a", kind=Speaker, says=lambda ids: Speech(calls=[("look", arguments)]))
    session = await world.trajectory()
    messages: list[Any] = [user("go")]
    for _ in range(2):
        body = {"max_tokens": 8, "messages": messages, "stream": stream}
        given = await answered(world, session, "messages", body)
        (call,) = given["content"]
        kept = {"n": 1, "many": [2, 0.5], "far": 1e300} if javascript else call["input"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "x"}
        messages += [
            {"role": "assistant", "content": [{**call, "input": kept}]},
            {"role": "user", "content": [result]},
        ]
    turns = world.scheduler.store.trajectories[session].turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None)]


async def answered(
    world: World, session: str, path: str, body: dict[str, Any], *, turn: str | None = None
) -> dict[str, Any]:
    """The answer as its client has it, of a stream put together from its events."""
    headers = {} if turn is None else {"X-ROSE-Turn": turn}
    if not body.get("stream"):
        return await world.ok("POST", f"/s/{session}/v1/{path}", body, headers=headers)
    headers["Authorization"] = f"Bearer {world.tokens.environment}"
    url = f"{world.url}/s/{session}/v1/{path}"
    async with world.session.post(url, json=body, headers=headers) as response:
        data = await response.read()
        assert response.status == 200, data
    found = events(event for event in data.split(b"\n\n") if event.startswith(b"event: "))
    if path == "responses":
        return found[-1]["response"]
    blocks: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"partial": ""})
        elif event["type"] == "content_block_delta":
            blocks[-1]["partial"] += event["delta"].get("partial_json", "")
    for block in blocks:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
    return {"content": blocks}


# --- answers of nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["responses", "messages"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_says_nothing_is_continued(world: World, path: str, stream: bool) -> None:
    await world.start()
    await world.add("a", kind=Speaker, says=lambda ids: Speech())
    session = await world.trajectory()
    history: list[Any] = [user("go")]
    for _ in range(2):
        fields = (
            {"max_output_tokens": 8, "input": history}
            if path == "responses"
            else {"max_tokens": 8, "messages": history}
        )
        given = await answered(world, session, path, {**fields, "stream": stream})
        if path == "responses":
            history += [*given["output"], user("on")]
        else:
            history += [{"role": "assistant", "content": given["content"]}, user("on")]
    turns = world.scheduler.store.trajectories[session].turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None)]


# --- answers that are asked for again ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["responses", "messages"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_only_its_repeat_delivers_is_continued(
    world: World, path: str, stream: bool
) -> None:
    """Its form is not what the model wrote: 1.0 is 1, and free text stands for a custom tool's arguments."""
    await world.start()
    call = ("look", '{"n": 1.0}') if path == "messages" else ("patch", "*** Begin Patch")
    engine = await world.add("a", kind=Speaker, says=lambda ids: Speech(calls=[call]))
    engine.hold = asyncio.Event()
    session = await world.trajectory()
    fields: dict[str, Any] = (
        {"max_tokens": 8, "messages": [user("go")]}
        if path == "messages"
        else {
            "max_output_tokens": 8,
            "input": [user("go")],
            "tools": [{"type": "custom", "name": "patch"}],
        }
    )
    fields["stream"] = stream
    asked = asyncio.create_task(answered(world, session, path, fields, turn="0"))
    await world.until(lambda: engine.num_running == 1)
    (running,) = world.scheduler.inflight._named.values()
    asked.cancel()
    await world.until(lambda: running.num_attached == 0)
    engine.hold.set()
    turns = world.scheduler.store.trajectories[session].turns
    await world.until(lambda: len(turns) == 1)
    given = await answered(world, session, path, fields, turn="0")
    assert len(turns) == 1
    if path == "messages":
        (said,) = given["content"]
        assert stream or said["input"] == {"n": 1}
        history = [{"role": "assistant", "content": [{**said, "input": {"n": 1}}]}]
        fields["messages"] += [*history, user("on")]
    else:
        fields["input"] += [*given["output"], user("on")]
    await answered(world, session, path, fields)
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None)]


# --- what is kept for previous_response_id -----------------------------------------------------------------


@pytest.mark.parametrize("first", ["instructions", "developer"])
async def test_a_system_message_that_became_a_message_is_kept(world: World, first: str) -> None:
    """To the model both are the same; instructions are not kept, and messages are."""
    await world.start()
    await world.add("a", kind=Speaker, says=lambda ids: Speech(content="ok"))
    session = await world.trajectory()
    rules = {"role": "developer", "content": "Be brief."}
    ways: list[dict[str, Any]] = [
        {"instructions": "Be brief.", "input": [user("go")]},
        {"input": [rules, user("go")]},
    ]
    given = await answered(world, session, "responses", ways[0 if first == "instructions" else 1])
    second = ways[1 if first == "instructions" else 0]
    second["input"] += [*given["output"], user("on")]
    given = await answered(world, session, "responses", second)
    third = {"input": "more", "previous_response_id": given["id"]}
    await answered(world, session, "responses", third)
    turns = world.scheduler.store.trajectories[session].turns
    held = [message["role"] for message in world.scheduler.store.trajectories[session].messages_of(2) or []]
    expected = ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert held == (["system", *expected] if first == "instructions" else expected)
    # What it names had the rules as a message, or as instructions, which are of one request.
    assert turns[1].parent == 0
    assert (turns[2].parent, turns[2].fork) == ((1, None) if first == "instructions" else (None, "history"))


# --- how many are counted at once --------------------------------------------------------------------------


class Slow(FakeEngine):
    """Renders when it may."""

    may_render: asyncio.Event

    async def _render_chat(self, request: web.Request) -> web.Response:
        await self.may_render.wait()
        return await super()._render_chat(request)


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize"])
async def test_counts_beyond_a_short_queue_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(count_api, "MAX_RUNNING", 2)
    monkeypatch.setattr(count_api, "MAX_WAITING", 2)
    await world.start()
    engine = await world.add("a", kind=Slow)
    assert isinstance(engine, Slow)
    engine.may_render = asyncio.Event()

    def count(at: int) -> asyncio.Task[tuple[int, Any]]:
        messages = [user(f"go {at}")]
        body = {"model": "policy", "input": messages} if "responses" in path else {"messages": messages}
        return asyncio.create_task(world.call("POST", path, {"model": "policy", **body}))

    asked = [count(at) for at in range(5)]
    await asyncio.wait(asked, timeout=10, return_when=asyncio.FIRST_COMPLETED)  # one is refused at once
    engine.may_render.set()
    statuses = [status for status, _ in await asyncio.gather(*asked)]
    assert sorted(statuses) == [200, 200, 200, 200, 429]


# --- hostile fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [[], {}, 7, None, True])
@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
async def test_an_odd_tool_choice_is_refused_by_its_field(world: World, path: str, odd: Any) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    body = {"max_tokens": 8, "messages": [user("x")], "tool_choice": {"type": odd}}
    status, answer = await world.call("POST", f"/s/{session}/v1/{path}", body)
    assert (status, answer["error"]["param"]) == (400, "tool_choice.type")
