"""Which turn a message list continues: by what was delivered, in whichever form, and told apart where answers are alike."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from rose.auth import Tokens, bearer
from rose.scheduler.messages import call_id
from rose.testing.fake_engine import serve_engine
from rose.testing.fake_node import FakeNode
from tests.scheduler.audit import Client
from tests.scheduler.conftest import World, user
from tests.scheduler.processes import Daemon
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
    return await spoken_by(world.url, world.tokens, session, messages, streamed=streamed, **fields)


async def spoken_by(
    url: str, tokens: Tokens, session: str, messages: list[Any], *, streamed: bool, **fields: Any
) -> dict[str, Any]:
    request: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 8, **fields}
    async with openai.AsyncOpenAI(base_url=f"{url}/s/{session}/v1", api_key=tokens.agent) as api:
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
    node.report_to(world.url)
    await node.register()
    await node.beat()
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
    await spoken(world, session, [user("go"), message, tool], streamed=True, tools=[TOOL])
    turns = world.scheduler.store.trajectories[session].turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None)]


async def test_a_stream_is_continued_after_a_kill_right_behind_its_end(tmp_path: Path) -> None:
    """Its form is with the kernel before its last piece leaves, as the turn is before its first: a kill takes neither."""
    tokens = Tokens.generate()
    tokens.save(tmp_path / "tokens.toml")
    daemon = Daemon(tmp_path)
    engine = Speaker(lambda token_ids: CUT)
    runner, engine_url = await serve_engine(engine)
    async with contextlib.AsyncExitStack() as ends:
        ends.push_async_callback(runner.cleanup)
        url = await daemon.start()
        ends.push_async_callback(daemon.end)
        session = await ends.enter_async_context(aiohttp.ClientSession())
        node = FakeNode(session, url, tokens.node, engine, engine_url, worker_id="a")
        name = await Client(session, url, tokens).create(0)
        messages: list[Any] = [user("go")]
        for _ in range(3):
            await node.register()
            await node.beat()
            message = await spoken_by(url, tokens, name, messages, streamed=True, tools=[TOOL])
            await daemon.end(signal.SIGKILL)
            await daemon.start()
            called = message["tool_calls"][0]["id"]
            messages += [message, {"role": "tool", "tool_call_id": called, "content": "x"}]
        trace = f"{url}/rose/v1/trajectories/{name}"
        async with session.get(trace, headers=bearer(tokens.environment)) as response:
            turns = (await response.json())["turns"]
        assert [(turn["parent"], turn["fork"]) for turn in turns] == [(None, None), (0, None), (1, None)]


def thinker(token_ids: list[int]) -> Speech:
    """Every answer says the same, for reasons of its own."""
    return Speech(content="ok", reasoning=f"\nbecause of {token_ids}\n")


def caller(token_ids: list[int]) -> Speech:
    return Speech(calls=[("look", '{"at": "x"}')])


def plain(token_ids: list[int]) -> Speech:
    return Speech(content="ok")


async def siblings(world: World, says: Any, **fields: Any) -> tuple[str, Any]:
    """A trajectory whose first request has three answers, alike to look at."""
    await world.start()
    await world.add("a", kind=Varied, says=says)
    session = await world.trajectory()
    return session, await world.chat(session, [user("go")], max_tokens=8, n=3, tools=[TOOL], **fields)


class Varied(Speaker):
    """Samples other tokens each time, as an engine does; the answers of one request included."""

    def _sample(self, prompt: Any, params: Any) -> Any:
        return super()._sample([*prompt, len(self.requests), self.num_sampled()], params)

    def num_sampled(self) -> int:
        self._count = getattr(self, "_count", 0) + 1
        return self._count


def parents(world: World, session: str) -> list[tuple[int | None, str | None]]:
    return [(turn.parent, turn.fork) for turn in world.scheduler.store.trajectories[session].turns]


@pytest.mark.parametrize("chosen", [0, 1, 2])
@pytest.mark.parametrize("says", [thinker, caller])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_answers_alike_are_told_apart_by_reasoning_and_by_the_ids_of_their_calls(
    world: World, says: Any, chosen: int, name: str
) -> None:
    session, answer = await siblings(world, says)
    message = answer["choices"][chosen]["message"]
    message[name] = message.pop("reasoning")
    await world.chat(session, [user("go"), message, user("on")], max_tokens=8, tools=[TOOL])
    assert parents(world, session)[3] == (chosen, None)


@pytest.mark.parametrize("chosen", [0, 1, 2])
async def test_answers_alike_are_told_apart_by_an_id_that_comes_back(world: World, chosen: int) -> None:
    session, answer = await siblings(world, plain)
    message = answer["choices"][chosen]["message"] | {"id": answer["rose"]["ids"][chosen]}
    await world.chat(session, [user("go"), message, user("on")], max_tokens=8, tools=[TOOL])
    assert parents(world, session)[3] == (chosen, None)


async def test_the_id_of_an_answer_with_several_choices_names_none_of_them(world: World) -> None:
    session, answer = await siblings(world, plain)
    message = answer["choices"][1]["message"] | {"id": answer["id"]}
    await world.chat(session, [user("go"), message, user("on")], max_tokens=8, tools=[TOOL])
    assert parents(world, session)[3] == (None, "ambiguous")


async def test_the_id_of_an_answer_with_one_choice_names_it(world: World) -> None:
    await world.start()
    await world.add("a", kind=Varied, says=plain)
    session = await world.trajectory()
    answers = [await world.chat(session, [user("go")], max_tokens=8) for _ in range(3)]
    for at in (1, 0, 2):
        message = answers[at]["choices"][0]["message"] | {"id": answers[at]["id"]}
        await world.chat(session, [user("go"), message, user("on")], max_tokens=8)
    assert [parent for parent, _ in parents(world, session)[3:]] == [1, 0, 2]


async def test_answers_that_cannot_be_told_apart_fork_and_say_why(world: World) -> None:
    session, answer = await siblings(world, thinker)
    message = answer["choices"][1]["message"]
    del message["reasoning"]
    again = await world.chat(session, [user("go"), message, user("on")], max_tokens=8, tools=[TOOL])
    assert again["rose"]["fork"] == "ambiguous"
    assert parents(world, session)[3] == (None, "ambiguous")


async def test_equal_tokens_need_not_be_told_apart(world: World) -> None:
    await world.start()
    await world.add("a", kind=Speaker, says=plain)  # samples the same each time
    session = await world.trajectory()
    answer = await world.chat(session, [user("go")], max_tokens=8, n=3)
    for choice in answer["choices"]:
        await world.chat(session, [user("go"), choice["message"], user("on")], max_tokens=8)
    # Whichever it was: the tokens are the same, and each is continued once.
    assert parents(world, session)[3:] == [(0, None), (1, None), (2, None)]


@pytest.mark.parametrize("chosen", [0, 1, 2])
async def test_branches_alike_stay_apart_to_their_ends(world: World, chosen: int) -> None:
    """Each turn of each branch says the same; the reasoning of an earlier answer alone tells them apart."""
    session, answer = await siblings(world, thinker)
    lines = []
    for choice in answer["choices"]:
        messages = [user("go"), choice["message"], user("on")]
        after = await world.chat(session, messages, max_tokens=8, tools=[TOOL])
        lines.append([*messages, {"role": "assistant", "content": "ok"}, user("and on")])
        assert after["choices"][0]["message"]["content"] == "ok"
    await world.chat(session, lines[chosen], max_tokens=8, tools=[TOOL])
    assert parents(world, session)[6] == (3 + chosen, None)


@pytest.mark.parametrize("chosen", [0, 1, 2])
async def test_streamed_answers_alike_are_told_apart(world: World, chosen: int) -> None:
    await world.start()
    await world.add("a", kind=Varied, says=thinker)
    session = await world.trajectory()
    said = [
        await spoken(world, session, [user("go")], streamed=True, tools=[TOOL], max_tokens=8)
        for _ in range(3)
    ]
    await world.chat(session, [user("go"), said[chosen], user("on")], max_tokens=8, tools=[TOOL])
    assert parents(world, session)[3] == (chosen, None)


async def test_a_call_has_one_id_in_each_form_of_its_answer(world: World) -> None:
    await world.start()
    await world.add("a", kind=Speaker, says=caller)
    session = await world.trajectory()
    said = [
        (await spoken(world, session, [user("go")], streamed=streamed, tools=[TOOL]))["tool_calls"][0]["id"]
        for streamed in (False, True)
    ]
    names = [turn.id for turn in world.scheduler.store.trajectories[session].turns]
    assert said == [call_id(name, 0, said[0]) for name in names]
    assert said[0] != said[1]


@pytest.mark.parametrize(
    ("drawn", "kept"),
    [
        ("chatcmpl-tool-0123456789abcdef", False),
        ("0123456789abcdef0123456789abcdef", False),
        ("aB3dE6gH9", False),  # templates of Mistral want nine letters or digits
        ("functions.look:0", True),  # a model's own word, which its template shows again
    ],
)
def test_only_ids_that_were_drawn_are_replaced(drawn: str, kept: bool) -> None:
    made = call_id("n-1", 0, drawn)
    assert (made == drawn) is kept
    assert made == call_id("n-1", 0, made)
    assert kept or made != call_id("n-1", 1, drawn)
    assert len(drawn) != 9 or (len(made) == 9 and made.isalnum())


@pytest.mark.parametrize("calls", [7, {"id": "x"}, [7, {"id": 7}], "x"])
async def test_evidence_that_is_no_evidence_is_no_error(world: World, calls: Any) -> None:
    session, answer = await siblings(world, plain)
    message = answer["choices"][0]["message"] | {"tool_calls": calls, "id": 7, "reasoning": [7]}
    asked = {
        "model": "policy",
        "messages": [user("go"), message, user("on")],
        "max_tokens": 8,
        "tools": [TOOL],
    }
    status, _ = await world.call("POST", "/v1/chat/completions", asked, headers={"X-Session-ID": session})
    assert status in (200, 400)
