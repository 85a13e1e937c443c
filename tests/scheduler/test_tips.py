"""Which turn a message list continues: by what was delivered, in whichever form, and told apart where answers are alike."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.scheduler.conftest import World, user
from tests.scheduler.speaker import Speaker, Speech

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
CALLING = Speech(
    reasoning="Hm.", calls=[("look", '{"at": "x",  "n": 1}')], streamed_content="\n\n", streamed_calls=None
)
CUT = Speech(content="<tool_call>{", streamed_content="", streamed_calls=[("look", "")])
"""A call that the limit cut: text in a whole answer, the call's beginning in a stream."""
PADDED = Speech(content="\n\nIt is there. ")


async def spoken(
    world: World, session: str, messages: list[Any], *, streamed: bool, **fields: Any
) -> dict[str, Any]:
    """The message that the official client makes of the answer."""
    request: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 8, **fields}
    async with openai.AsyncOpenAI(base_url=f"{world.url}/s/{session}/v1", api_key=world.tokens.agent) as api:
        if not streamed:
            message = (await api.chat.completions.create(**request)).choices[0].message
            return message.model_dump(exclude_none=True)
        state = ChatCompletionStreamState()
        async for chunk in await api.chat.completions.create(**request, stream=True):
            state.handle_chunk(chunk)
        return state.current_completion_snapshot.choices[0].message.model_dump(exclude_none=True)


def exact(message: dict[str, Any]) -> dict[str, Any]:
    return message


def no_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {name: message[name] for name in ("role", "content", "tool_calls") if name in message}


def no_white_space(message: dict[str, Any]) -> dict[str, Any]:
    """As frameworks do that drop what has no letters, or trim it."""
    return no_reasoning(message) | {"content": (message.get("content") or "").strip() or None}


def no_leading_white_space(message: dict[str, Any]) -> dict[str, Any]:
    return no_reasoning(message) | {"content": (message.get("content") or "").lstrip() or None}


def parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """As frameworks do that keep arguments as objects and write them anew."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(json.loads(arguments))}}
        if (arguments := call["function"]["arguments"])
        else call
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("speech", [CALLING, CUT, PADDED], ids=["calling", "cut", "padded"])
@pytest.mark.parametrize(
    "echo", [exact, no_reasoning, no_white_space, no_leading_white_space, parsed_arguments]
)
async def test_what_was_delivered_is_continued_in_the_form_it_had(
    world: World, streamed: bool, speech: Speech, echo: Any
) -> None:
    await world.start()
    await world.add("a", kind=Speaker, says=lambda token_ids: speech)
    session = await world.trajectory()
    messages: list[Any] = [user("go")]
    for _ in range(3):
        message = await spoken(world, session, messages, streamed=streamed, tools=[TOOL])
        messages.append(echo(message))
        called = message.get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in called] or [
            user("more")
        ]
    turns = world.scheduler.store.trajectories[session].turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None), (1, None)]


async def test_a_stream_is_continued_after_a_restart(world: World) -> None:
    await world.start()
    await world.add("a", kind=Speaker, says=lambda token_ids: CALLING)
    session = await world.trajectory()
    message = await spoken(world, session, [user("go")], streamed=True, tools=[TOOL])
    await world.scheduler.stop(drain_s=0)
    await world.start(journal={"compact_bytes": 1})  # read, and written anew
    await world.scheduler.stop(drain_s=0)
    await world.start()
    node = world.nodes["a"]
    node._url = world.url
    await node.register()
    await node.beat()
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
    await spoken(world, session, [user("go"), message, tool], streamed=True, tools=[TOOL])
    turns = world.scheduler.store.trajectories[session].turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None)]
