"""Unmodified clients, a real ``vllm serve``: what the gateway answers is what vLLM answers for the same tokens.

One server for the file.  The gateway sees it as two workers, each behind a door that can break a turn's connection after
a number of events: the turn must go on through the other door and nobody may notice.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from rose.auth import Tokens
from tests.engine_launcher import EngineServer
from tests.scheduler.conftest import user
from tests.scheduler.frameworks import (  # noqa: F401 - collected here, where a server is
    test_langchain_openai,
    test_openai_agents,
    test_pydantic_ai,
)
from tests.scheduler.real_gateway import Gateway, gateway_to, sampled_once, scripted_engine

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of the coming days.",
        # Not in alphabetical order: the template writes it as it is sent.
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
QUESTION = user("What will the weather in Zürich be?")
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"days": 3, "city": "Zürich"}'},
}
AFTER_TOOL = [
    QUESTION,
    {"role": "assistant", "content": None, "reasoning": "I must look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "sunny, 21 degrees"},
]
REQUESTS: dict[str, dict[str, Any]] = {
    "reasoning, then a tool call": {"tools": [WEATHER]},
    "an answer after the tool": {"tools": [WEATHER], "messages": AFTER_TOOL},
    "no thinking": {"tools": [WEATHER], "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    "no tools": {},
    "cut inside the reasoning": {"tools": [WEATHER], "max_tokens": 3},
    "cut inside the call": {"tools": [WEATHER], "max_tokens": 11},
    "a stop string": {"tools": [WEATHER], "messages": AFTER_TOOL, "stop": ["in Z"]},
    "a stop string in the reasoning": {"tools": [WEATHER], "stop": ["look it"]},
    "a stop string that the reasoning shows": {
        "tools": [WEATHER],
        "stop": ["must", "no such"],
        "extra_body": {"include_stop_str_in_output": True},
    },
    "a stop string in the arguments": {"tools": [WEATHER], "stop": ["days"]},
    "a stop string that is markup": {"tools": [WEATHER], "stop": ["</think>"]},
    "a stop string too early": {
        "messages": AFTER_TOOL,
        "stop": ["user", "degrees"],
        "extra_body": {"min_tokens": 9},
    },
    "the end at once": {"messages": AFTER_TOOL, "stop": ["\n"]},
    "a call that must be": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 40},
    "a named call": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 40,
    },
    "tools that must not be used": {"tools": [WEATHER], "tool_choice": "none"},
    "two choices": {"messages": AFTER_TOOL, "n": 2, "temperature": 0.02},
    "log-probs": {"messages": AFTER_TOOL, "logprobs": True, "top_logprobs": 2},
}


@pytest.fixture(scope="module", params=["rollout"])
def engine(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[EngineServer]:
    """``rollout``: with our plug-in.  ``stock``: vLLM as it is installed."""
    with scripted_engine(tmp_path_factory.mktemp("script") / "policy", request.param) as server:
        yield server


BOTH = pytest.mark.parametrize("engine", ["rollout", "stock"], indirect=True)


@pytest.fixture
async def gateway(engine: EngineServer, tmp_path: Path, tokens: Tokens) -> AsyncIterator[Gateway]:
    async with gateway_to(engine, tmp_path, tokens) as made:
        yield made


Answer = list[dict[str, Any]]


HALF_A_MARK = re.compile(r"<(t(o(o(l(_(c(a(ll?)?)?)?)?)?)?)?)?$")
"""vLLM's own stream shows the start of a call as content where a stop string is held back (0.32); ours does not."""


async def whole(api: openai.AsyncOpenAI, **request: Any) -> Answer:
    answer = await api.chat.completions.create(**request)
    return [
        {
            "content": choice.message.content or "",
            "reasoning": getattr(choice.message, "reasoning", None) or "",
            "calls": [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []],  # type: ignore[union-attr]
            "finish": choice.finish_reason,
            "logprobs": _tokens(choice.logprobs),
        }
        for choice in answer.choices
    ]


async def streamed(api: openai.AsyncOpenAI, **request: Any) -> Answer:
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in await api.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            seen = choices.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": [], "finish": None, "logprobs": []}
            )
            assert seen["finish"] is None
            seen["content"] += choice.delta.content or ""
            seen["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(seen["calls"]):
                    assert call.id
                    seen["calls"].append((call.function.name, ""))
                name, arguments = seen["calls"][call.index]
                seen["calls"][call.index] = (name, arguments + (call.function.arguments or ""))
            seen["finish"] = choice.finish_reason
            seen["logprobs"] += _tokens(choice.logprobs)
    return [choices[index] for index in sorted(choices)]


def _tokens(logprobs: Any) -> list[tuple[str, int]]:
    content = (logprobs.content if logprobs is not None else None) or []
    return [(item.token, len(item.top_logprobs)) for item in content]


def request_of(name: str) -> dict[str, Any]:
    return {"model": "policy", "messages": [QUESTION], "temperature": 0.0, "max_tokens": 80, **REQUESTS[name]}


UNLIKE_STOCK = {
    # vLLM's derender routes parse text that nobody has cut, and its streaming one gives no log-probs.
    "a stop string in the arguments",
    "a stop string that is markup",
}


@BOTH
@pytest.mark.parametrize("name", REQUESTS)
async def test_answers_and_streams_equal_vllms_own(gateway: Gateway, name: str) -> None:
    has_plugin = gateway.engine.role == "rollout"
    if not has_plugin and name in UNLIKE_STOCK:
        pytest.skip("needs our plug-in: docs/endpoint.md says so")
    request = request_of(name)
    async with gateway.ours() as ours, gateway.theirs() as theirs:
        for read in (whole, streamed):
            expected = await read(theirs, **request)
            got = await read(ours, **request)
            if read is streamed:
                assert not any(HALF_A_MARK.search(choice["content"]) for choice in got)
                for choice in (*expected, *got):
                    if not has_plugin:
                        choice.pop("logprobs")
                    choice["content"] = HALF_A_MARK.sub("", choice["content"])
                    # A call cut before its arguments streams as "" or "{}", by how the tokens were batched.
                    choice["calls"] = [
                        (tool, "" if arguments == "{}" else arguments) for tool, arguments in choice["calls"]
                    ]
            assert got == expected, read.__name__


@pytest.mark.parametrize("name", ["reasoning, then a tool call", "cut inside the reasoning", "two choices"])
async def test_usage_counts_reasoning_as_vllm_does(gateway: Gateway, name: str) -> None:
    request = request_of(name)
    async with gateway.ours() as ours, gateway.theirs() as theirs:
        counts = []
        for api in (theirs, ours):
            usages = [(await api.chat.completions.create(**request)).usage]
            streamed_ = {**request, "stream": True, "stream_options": {"include_usage": True}}
            async for chunk in await api.chat.completions.create(**streamed_):
                usages += [chunk.usage] if chunk.usage else []
            counts.append(
                [(u.completion_tokens, u.completion_tokens_details.reasoning_tokens) for u in usages]
            )
    theirs_, ours_ = counts
    # vLLM's own streamed count misses a token that is part of a character when it comes alone (0.32).
    assert ours_ == [theirs_[0]] * 2
    assert ours_[0][1] > 0


@pytest.mark.parametrize("how", ["forgotten", "broken"])
@pytest.mark.parametrize(
    "name", ["reasoning, then a tool call", "an answer after the tool", "a stop string in the arguments"]
)
async def test_a_parse_that_is_lost_is_opened_again(gateway: Gateway, name: str, how: str) -> None:
    request = request_of(name)
    async with gateway.ours() as ours, gateway.theirs() as theirs:
        (expected,) = await streamed(theirs, **request)
        expected["content"] = HALF_A_MARK.sub("", expected["content"])
        for at in (1, 2, 5):
            for door in gateway.doors:
                door.lose_parse_at, door.lose_how = at, how
            (got,) = await streamed(ours, **request)
            assert got == expected
    for door in gateway.doors:
        door.lose_how = ""
    assert sum(door.num_lost for door in gateway.doors) >= 1


async def test_no_parse_is_left_open(gateway: Gateway) -> None:
    request = request_of("reasoning, then a tool call")

    def parses() -> dict[str, int]:
        return gateway.engine.get("/rose/status").json()["parses"]

    async with gateway.ours(max_retries=0) as ours:
        await streamed(ours, **request)
        # A client that hangs up, and a turn that runs out of time.
        stream = await ours.chat.completions.create(**request, stream=True)
        async for _ in stream:
            break
        await stream.close()
        with pytest.raises(openai.APIError, match="deadline"):
            async for _ in await ours.chat.completions.create(
                **{**request, "max_tokens": 900},
                stream=True,
                extra_body={"ignore_eos": True},
                extra_headers={"X-ROSE-Deadline-Ms": "300"},
            ):
                pass
    assert sum(door.num_calls["/rose/parse"] for door in gateway.doors) >= 3
    async with asyncio.timeout(30):
        while parses() != {"open": 0, "bytes": 0}:  # noqa: ASYNC110 - what happens in another process
            await asyncio.sleep(0.05)


async def test_the_script_exercises_what_it_should(gateway: Gateway) -> None:
    async with gateway.ours() as api:
        (first,) = await whole(api, **request_of("reasoning, then a tool call"))
        (second,) = await whole(api, **request_of("an answer after the tool"))
    assert first["calls"] == [("get_weather", '{"city": "Zürich", "days": 3}')]
    assert (first["finish"], first["content"].strip()) == ("tool_calls", "")
    assert "é" in first["reasoning"]
    assert second["content"].strip() == "It will be ☀ with 21 degrees in Zürich, three days long."


@pytest.mark.parametrize("after", [1, 4, 8, 12])
async def test_a_turn_that_moves_in_the_middle_answers_the_same(gateway: Gateway, after: int) -> None:
    request = request_of("reasoning, then a tool call")
    async with gateway.ours() as ours, gateway.theirs() as theirs:
        for read in (whole, streamed):
            expected = await read(theirs, **request)
            gateway.cut(after)
            got = await read(ours, **request)
            assert gateway.num_cuts >= 1
            assert got == expected or {**got[0], "logprobs": []} == {**expected[0], "logprobs": []}


FORM = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "object"}}}
DRAWN_UNDER: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"top_p": 1.0, "extra_body": {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}}, ()),
    (REQUESTS["no tools"], ()),
    (REQUESTS["reasoning, then a tool call"], ()),
    (REQUESTS["tools that must not be used"], ()),
    (REQUESTS["a call that must be"], ("structured_outputs",)),
    (REQUESTS["a named call"], ("structured_outputs",)),
    ({"response_format": FORM, "max_tokens": 8}, ("structured_outputs",)),
    ({"extra_body": {"bad_words": ["look"]}}, ("bad_words",)),
    ({"extra_body": {"min_tokens": 2, "top_k": 5}, "temperature": 0.5}, ("min_tokens", "top_k")),
]


async def test_what_vllm_draws_under_is_recorded(gateway: Gateway) -> None:
    store = gateway.scheduler.store
    name = store.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    async with gateway.ours(f"/s/{name}") as api:
        for fields, _ in DRAWN_UNDER:
            await whole(api, **{**request_of("no tools"), **fields})
    found = [turn.constraints for turn in store.trajectories[name].turns]
    assert found == [names for _, names in DRAWN_UNDER]


async def test_completions_equal_vllms_own(gateway: Gateway) -> None:
    request: dict[str, Any] = {
        "model": "policy",
        "prompt": ["It will be ", "ab"],
        "temperature": 0.0,
        "max_tokens": 6,
        "logprobs": 1,
    }
    async with gateway.ours() as ours, gateway.theirs() as theirs:
        answers = [await api.completions.create(**request) for api in (ours, theirs)]
        texts = []
        for api in (ours, theirs):
            pieces: dict[int, str] = {}
            async for chunk in await api.completions.create(**request, stream=True):
                for choice in chunk.choices:
                    pieces[choice.index] = pieces.get(choice.index, "") + choice.text
            texts.append(pieces)
    ours_, theirs_ = [[(c.text, c.finish_reason, c.logprobs.tokens) for c in a.choices] for a in answers]  # type: ignore[union-attr]
    assert ours_ == theirs_
    assert texts[0] == texts[1] == dict(enumerate(text for text, _, _ in ours_))
    assert answers[0].usage.total_tokens == answers[1].usage.total_tokens  # type: ignore[union-attr]


async def message_of(api: openai.AsyncOpenAI, *, streamed: bool, **request: Any) -> Any:
    if not streamed:
        return (await api.chat.completions.create(**request)).choices[0].message
    state = ChatCompletionStreamState()
    async for chunk in await api.chat.completions.create(**request, stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0].message


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_loop_over_moves_keeps_one_line_of_tokens(gateway: Gateway, streamed: bool) -> None:
    store = gateway.scheduler.store
    name = store.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    messages: list[Any] = [QUESTION]
    async with gateway.ours(f"/s/{name}") as api:
        for round_ in range(4):
            gateway.cut(3)
            message = await message_of(
                api,
                streamed=streamed,
                model="gpt-4o",
                messages=messages,
                tools=[WEATHER],
                temperature=0.0,
                max_tokens=80,
            )
            messages.append(message.model_dump(exclude={"reasoning"}))
            if message.tool_calls:
                call = message.tool_calls[0]
                arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
                messages[-1]["tool_calls"][0]["function"]["arguments"] = json.dumps(
                    arguments, sort_keys=True, indent=1
                )
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
            else:
                messages.append(user(f"and in {round_} days?"))
    turns = store.trajectories[name].turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None), (1, None), (2, None)]
    assert all(len(turn.segments) >= 2 for turn in turns)
    assert all(turn.usage["cached"] for turn in turns[1:])
    assert all(len(turn.logprobs) // 8 == len(turn.token_ids) // 4 for turn in turns)


RESPONSES_WEATHER: Any = {"type": "function", "strict": False, **WEATHER["function"]}
CLAUDES_WEATHER: Any = {
    "name": "get_weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}
CALLED: dict[str, dict[str, Any]] = {
    "by itself": {},
    "because it must": {"tool_choice": "required", "max_tokens": 40},
    "cut": {"max_tokens": 11},
    "no tools": {"tools": None},
}


async def respond(api: openai.AsyncOpenAI, *, streamed: bool, ours: bool = True, **request: Any) -> Any:
    """The response that OpenAI's client has in the end."""
    if not streamed:
        return await api.responses.create(**request)
    last: Any = None
    items: list[Any] = []
    async for event in await api.responses.create(**request, stream=True):
        last = event
        if event.type == "response.output_item.done":
            items.append(event.item)
    # Whatever was said item by item is what the end says; vLLM's own end has what another parse makes of it.
    if not ours:
        return last.response
    said = [item.model_dump(exclude={"id", "status"}) for item in items]
    assert said == [item.model_dump(exclude={"id", "status"}) for item in last.response.output]
    return last.response


async def converse(api: Any, *, streamed: bool, **request: Any) -> Any:
    """The message that Anthropic's client has in the end."""
    if not streamed:
        return await api.messages.create(**request)
    async with api.messages.stream(**request) as stream:
        return await stream.get_final_message()


def responses_request(name: str) -> dict[str, Any]:
    given = {"tools": [RESPONSES_WEATHER], "max_tokens": 80, **CALLED[name]}
    given["max_output_tokens"] = given.pop("max_tokens")
    if given["tools"] is None:
        del given["tools"]
    return {"model": "policy", "temperature": 0.0, **given}


def claudes_request(name: str) -> dict[str, Any]:
    given = {"tools": [CLAUDES_WEATHER], "max_tokens": 80, **CALLED[name]}
    if given.get("tool_choice"):
        given["tool_choice"] = {"type": "any"}
    if given["tools"] is None:
        del given["tools"]
    # The client has no argument for it any more; the route has.
    return {"model": "policy", "extra_body": {"temperature": 0.0}, **given}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CALLED)
async def test_responses_equal_vllms_own(gateway: Gateway, name: str, streamed: bool) -> None:
    request = {**responses_request(name), "input": [QUESTION], "store": False}
    async with gateway.ours() as ours, gateway.theirs() as theirs:
        expected = _items(await respond(theirs, streamed=streamed, ours=False, **request))
        got = _items(await respond(ours, streamed=streamed, **request))
    assert got == expected


def _items(response: Any) -> Any:
    found: list[Any] = []
    for item in response.output:
        if item.type == "function_call":
            # vLLM's parser (0.32) says either of a call that was cut before its arguments: by where its last piece ends.
            found.append((item.name, "" if item.arguments == "{}" else item.arguments))
        elif text := "".join(part.text for part in item.content).strip():
            found.append((item.type, text))
    cut = response.incomplete_details and response.incomplete_details.reason
    return found, response.status, cut, response.usage.output_tokens


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
# Without tools, and of a call that the limit cut, vLLM's own route (0.32) gives other answers whole than streamed, or none.
@pytest.mark.parametrize("name", ["by itself"])
async def test_messages_equal_vllms_own(gateway: Gateway, name: str, streamed: bool) -> None:
    request = {**claudes_request(name), "messages": [QUESTION]}
    async with gateway.claude() as ours, gateway.their_claude() as theirs:
        expected, got = [_blocks(await converse(api, streamed=streamed, **request)) for api in (theirs, ours)]
    assert got == expected


def _blocks(message: Any) -> Any:
    found = []
    for block in message.content:
        said = block.model_dump(exclude_none=True, exclude={"id", "signature"})
        if block.type != "text" or said["text"].strip():
            found.append(said)
    return found, message.stop_reason, message.usage.output_tokens


@pytest.mark.parametrize(
    ("way", "tool_choice", "streamed"),
    [
        ("items", "auto", False),
        ("previous_response_id", "required", True),
        *(
            pytest.param(*one, marks=pytest.mark.conformance)
            for one in [
                ("items", "auto", True),
                ("items", "required", False),
                ("items", "required", True),
                ("previous_response_id", "auto", False),
                ("previous_response_id", "auto", True),
                ("previous_response_id", "required", False),
            ]
        ),
    ],
)
async def test_responses_over_moves_keep_one_line_of_tokens(
    gateway: Gateway, streamed: bool, tool_choice: str, way: str
) -> None:
    name = gateway.scheduler.store.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    request = {**responses_request("by itself"), "tool_choice": tool_choice, "instructions": "Use tools."}
    items: list[Any] = [QUESTION]
    async with gateway.ours(f"/s/{name}") as api:
        for number in range(4):
            gateway.cut(3)
            response = await respond(api, streamed=streamed, **{**request, "input": items})
            said = [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item["call_id"] for item in said if item["type"] == "function_call"]
            after: list[Any] = [
                {"type": "function_call_output", "call_id": call, "output": "sunny"} for call in calls
            ] or [user(f"and in {number} days?")]
            if way == "items":
                items = [*items, *said, *after]
            else:
                items, request["previous_response_id"] = after, response.id
    sampled_once(gateway, name, 4)


@pytest.mark.parametrize(
    ("streamed", "tool_choice"),
    # What this model says when it must call is no whole JSON now and then, which the client refuses to read from a stream.
    [
        (True, "auto"),
        *(pytest.param(False, choice, marks=pytest.mark.conformance) for choice in ("auto", "any")),
    ],
)
async def test_messages_over_moves_keep_one_line_of_tokens(
    gateway: Gateway, streamed: bool, tool_choice: str
) -> None:
    name = gateway.scheduler.store.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    request = {**claudes_request("by itself"), "tool_choice": {"type": tool_choice}}
    messages: list[Any] = [QUESTION]
    async with gateway.claude(f"/s/{name}") as api:
        for number in range(4):
            gateway.cut(3)
            system: Any = [
                {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"},
                {"type": "text", "text": "Use tools.", "cache_control": {"type": "ephemeral"}},
            ]
            message = await converse(
                api, streamed=streamed, **{**request, "system": system, "messages": messages}
            )
            said = [block.model_dump(exclude_none=True) for block in message.content]
            calls = [block["id"] for block in said if block["type"] == "tool_use"]
            after: Any = [
                {"type": "tool_result", "tool_use_id": call, "content": "sunny"} for call in calls
            ] or f"and in {number} days?"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": after}]
    sampled_once(gateway, name, 4)


async def test_tokens_are_those_of_vllms_own_counts(gateway: Gateway) -> None:
    async with gateway.claude() as ours, gateway.their_claude() as theirs:
        counts = [
            await api.messages.count_tokens(
                model="policy",
                system="Use tools.",
                messages=[QUESTION],  # type: ignore[list-item]
                tools=[CLAUDES_WEATHER],
            )
            for api in (ours, theirs)
        ]
    assert counts[0].input_tokens == counts[1].input_tokens
    body = {"model": "policy", "messages": [QUESTION], "tools": [WEATHER]}
    answers = []
    async with aiohttp.ClientSession() as session:
        for url, token in (
            (gateway.url, gateway.tokens.agent),
            (gateway.engine.url, gateway.engine.node_token),
        ):
            headers = {"Authorization": f"Bearer {token}"}
            async with session.post(f"{url}/tokenize", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                answers.append(await response.json())
    assert answers[0]["tokens"] == answers[1]["tokens"]


class _FirstAnswerLost(httpx.HTTPTransport):
    """The network breaks after the server has answered."""

    num_lost = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if not self.num_lost:
            self.num_lost += 1
            response.read()
            response.close()
            raise httpx.ReadError("broken")
        return response


async def test_the_blocking_client_and_its_own_retry(gateway: Gateway) -> None:
    store = gateway.scheduler.store
    name = store.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    request = request_of("reasoning, then a tool call")
    async with gateway.theirs() as api:
        (expected,) = await whole(api, **request)

    def run() -> tuple[Any, str, int]:
        transport = _FirstAnswerLost()
        with openai.OpenAI(
            base_url=f"{gateway.url}/s/{name}/v1",
            api_key=gateway.tokens.agent,
            http_client=httpx.Client(transport=transport),
        ) as api:
            message = api.chat.completions.create(**request).choices[0].message
            thoughts = "".join(
                getattr(chunk.choices[0].delta, "reasoning", None) or ""
                for chunk in api.chat.completions.create(**request, stream=True)
                if chunk.choices
            )
        return message, thoughts, transport.num_lost

    message, thoughts, num_lost = await asyncio.to_thread(run)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert (num_lost, calls, message.reasoning) == (1, expected["calls"], expected["reasoning"])
    assert thoughts == expected["reasoning"]
    # The lost answer and its retry are one turn; the stream is another.
    assert len(store.trajectories[name].turns) == 2


async def test_an_agent_framework_runs_unmodified(gateway: Gateway) -> None:
    smolagents = pytest.importorskip("smolagents")
    store = gateway.scheduler.store
    name = store.create(
        job="j", group_id=None, group_size=1, task=None, sampling={"temperature": 0.0, "max_tokens": 80}
    )
    asked: list[tuple[str, int]] = []

    class Weather(smolagents.Tool):
        name = "get_weather"
        description = "The weather of the coming days."
        inputs = {  # noqa: RUF012 - the framework's own way
            "city": {"type": "string", "description": "where"},
            "days": {"type": "integer", "description": "how many"},
        }
        output_type = "string"

        def forward(self, city: str, days: int) -> str:
            asked.append((city, days))
            return "sunny"

    def run() -> None:
        model = smolagents.OpenAIModel(
            model_id="any-name",
            api_base=f"{gateway.url}/s/{name}/v1",
            api_key=gateway.tokens.agent,
            tool_choice="auto",
        )
        agent = smolagents.ToolCallingAgent(
            tools=[Weather()],
            model=model,
            max_steps=2,
            verbosity_level=0,
            prompt_templates={
                "system_prompt": "Use tools.",
                "planning": dict.fromkeys(
                    ("initial_plan", "update_plan_pre_messages", "update_plan_post_messages"), ""
                ),
                "managed_agent": {"task": "", "report": ""},
                "final_answer": {"pre_messages": "Answer.", "post_messages": "Now."},
            },
        )
        agent.run("What will the weather in Zürich be?")

    await asyncio.to_thread(run)
    assert asked == [("Zürich", 3)] * len(asked)
    assert asked
    turns = store.trajectories[name].turns
    assert len(turns) >= 2
    # This framework writes tool calls back as text of its own: a new history, and said to be one.
    assert {turn.fork for turn in turns} <= {None, "history", "context"}


async def test_the_pages_curl_lines_work(gateway: Gateway, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "endpoint.md").read_text()
    (script,) = re.findall(r"```bash\n(# With curl.*?)```", page, re.DOTALL)
    tokens = tmp_path / "tokens.toml"
    gateway.tokens.save(tokens)
    script = script.replace("http://127.0.0.1:8800", gateway.url)
    env = {"PATH": os.environ["PATH"], "ROSE_TOKEN_FILE": str(tokens)}
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-euo", "pipefail", "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"object":"chat.completion"' in done.stdout
    assert "data: [DONE]" in done.stdout
    assert '"reward":1.0' in done.stdout.replace(" ", "")


async def test_a_turn_past_its_deadline_is_aborted_in_the_real_engine(gateway: Gateway) -> None:

    async def running() -> float:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{gateway.engine.url}/metrics") as response,
        ):
            text = await response.text()
        return sum(
            float(v) for v in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
        )

    async with gateway.ours(max_retries=0) as api:
        with pytest.raises(openai.APIError, match="deadline"):
            async for _ in await api.chat.completions.create(
                model="policy",
                messages=[QUESTION],  # type: ignore[list-item]
                max_tokens=900,
                temperature=0.0,
                stream=True,
                extra_body={"ignore_eos": True},
                extra_headers={"X-ROSE-Deadline-Ms": "300"},
            ):
                pass
    async with asyncio.timeout(60):
        while await running():  # noqa: ASYNC110 - what happens in another process
            await asyncio.sleep(0.05)
    assert not gateway.scheduler.book.turns
