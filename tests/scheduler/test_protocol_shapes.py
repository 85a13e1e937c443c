"""What the three protocols send and receive, event by event and field by field."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from jiter import from_json

from rose.auth import bearer
from rose.errors import RequestError
from rose.scheduler.protocols.anthropic_messages import MessagesRequest, readable
from rose.scheduler.protocols.responses import ResponsesRequest
from tests.scheduler.conftest import World, user
from tests.scheduler.protocol_clients import (
    BOTH,
    FUNCTION,
    ONE_LINE,
    PARAMETERS,
    PLAIN,
    as_codex_keeps_it,
    converse,
    line,
    respond,
    started,
)
from tests.scheduler.speaker import Speech


async def events_of(
    world: World, path: str, session: str, body: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    headers = {**bearer(world.tokens.key_of(session)), "Content-Type": "application/json"}
    async with world.session.post(
        world.url + path, json={**body, "stream": True}, headers=headers
    ) as response:
        assert response.status == 200, await response.text()
        text = (await response.read()).decode()
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][0] == found[-1][1]["type"]
    return found


async def test_the_events_of_a_response(world: World) -> None:
    session = await started(world, BOTH)
    events = await events_of(world, "/v1/responses", session, {"input": "go", "tools": [FUNCTION]})
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *call,
        *call,
        "response.completed",
    ]
    done = [event for name, event in events if name == "response.output_item.done"]
    response = events[-1][1]["response"]
    assert response["output"] == [event["item"] for event in done]
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [item["arguments"] for item in response["output"][2:]] == ['{"at": "x"}', '{"at": "y"}']
    assert response["id"] == events[0][1]["response"]["id"]
    assert response["status"] == "completed"
    assert response["rose"]["turn"] == 0


async def test_the_events_of_a_message(world: World) -> None:
    session = await started(world, BOTH)
    body = {
        "max_tokens": 100,
        "messages": [user("go")],
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
    }
    events = await events_of(world, "/v1/messages", session, body)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in events] == [
        "message_start",
        *[block[0], block[1], *block[1:]],  # thinking, and its signature
        *block,
        *block,
        *block,
        "message_delta",
        "message_stop",
    ]
    starts = [event["content_block"] for name, event in events if name == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert [event["index"] for name, event in events if name == "content_block_stop"] == [0, 1, 2, 3]
    assert starts[2]["input"] == {}
    last = events[-2][1]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    turn = world.scheduler.store.trajectories[session].turns[0]
    assert last["usage"]["output_tokens"] == len(turn.token_ids) // 4
    assert events[0][1]["message"]["usage"]["input_tokens"] == len(turn.suffix_ids) // 4


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_turn_that_its_limit_cut_says_so(
    world: World, openai_client: Any, claude: Any, streamed: bool
) -> None:
    session = await started(world, Speech(content="It is"))
    world.engines["a"]._model._mean_tokens = 10**9
    answer = await respond(openai_client(session), streamed=streamed, input="go", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[-1].status == "incomplete"
    message = await converse(claude(session), streamed=streamed, messages=[user("go")], max_tokens=3)
    assert message.stop_reason == "max_tokens"


async def test_a_stop_string_is_named(world: World, claude: Any) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory()
    ids, _, _ = engine.greedy(engine.tokenizer.chat({"messages": [user("go")]}), {"max_tokens": 40})
    stop = engine.tokenizer.decode(ids[3:4]).strip()
    message = await claude(session).messages.create(
        model="x", max_tokens=40, messages=[user("go")], stop_sequences=[stop]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


async def test_refusals_come_in_the_shape_of_their_protocol(
    world: World, openai_client: Any, claude: Any
) -> None:
    import anthropic

    session = await started(world, PLAIN)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        await claude(session).messages.create(
            model="x", max_tokens=8, messages=[{"role": "user", "content": [image]}]
        )
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == "messages[0].content[0]"
    with pytest.raises(anthropic.AuthenticationError):
        await anthropic.AsyncAnthropic(base_url=world.url, api_key="no", max_retries=0).messages.create(
            model="x", max_tokens=8, messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(openai.BadRequestError) as too_much:
        await openai_client(session).responses.create(model="x", input="go", max_output_tokens=-1)
    assert too_much.value.param == "max_output_tokens"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
        ({"input": "x", "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": "x", "text": {"format": {"type": "odd"}}}, "text.format.type"),
    ],
)
async def test_what_responses_have_not_is_refused_by_its_field(
    world: World, fields: dict[str, Any], field: str
) -> None:
    session = await started(world, PLAIN)
    status, answer = await world.call("POST", f"/s/{session}/v1/responses", fields)
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_reference"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "odd", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user("x"), {"role": "assistant", "content": "The"}]}, "messages"),
        ({"messages": []}, "messages"),
        (
            {"messages": [user("x")], "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools[0].type",
        ),
        ({"messages": [user("x")], "tool_choice": {"type": "odd"}}, "tool_choice.type"),
        ({"messages": [user("x")], "system": [{"type": "image"}]}, "system[0]"),
        ({"messages": [user("x")], "max_tokens": 0}, "max_tokens"),
        ({"messages": 7}, "messages"),
    ],
)
async def test_what_messages_have_not_is_refused_by_its_field(
    world: World, fields: dict[str, Any], field: str
) -> None:
    session = await started(world, PLAIN)
    status, answer = await world.call("POST", f"/s/{session}/v1/messages", fields)
    assert (status, answer["type"], answer["error"]["param"]) == (400, "error", field)


async def test_tools_that_nobody_here_runs_are_left_out_and_named(
    world: World, openai_client: Any, claude: Any
) -> None:
    session = await started(world, PLAIN)
    engine = world.engines["a"]
    answer = await respond(
        openai_client(session), streamed=False, input="go", tools=[{"type": "web_search"}, FUNCTION]
    )
    assert answer.model_extra["rose"]["left_out"] == ["web_search"]
    message = await claude(session).messages.create(
        model="x",
        max_tokens=8,
        messages=[user("go")],
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    )
    assert message.model_extra["rose"]["left_out"] == ["web_search_20250305"]
    assert len(engine.requests) == 2


# --- one custom tool -------------------------------------------------------------------------------------

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_custom_tool_is_called_with_text(world: World, openai_client: Any, streamed: bool) -> None:
    text = '*** Begin Patch\n"x"\n*** End Patch'
    arguments = json.dumps({"input": text})
    session = await started(world, Speech(calls=[("apply_patch", arguments)]))
    api = openai_client(session)
    items: list[Any] = [user("go")]
    for _ in range(2):
        answer = await respond(api, streamed=streamed, input=items, tools=[PATCH])
        (call,) = answer.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", text)
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
        items = [*items, as_codex_keeps_it(call.model_dump(exclude_none=True)), output]
    assert line(world, session) == ONE_LINE[:2]


def test_a_custom_tools_grammar_is_told_to_the_model() -> None:
    (tool,) = ResponsesRequest({"input": "x", "tools": [PATCH]}, None).body["tools"]
    assert tool["function"]["name"] == "apply_patch"
    assert "Edits files." in tool["function"]["description"]
    assert "start: /.+/" in tool["function"]["description"]


# --- tools of a namespace ----------------------------------------------------------------------------------

AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [
        {
            "type": "function",
            "name": "wait",
            "description": "Waits.",
            "parameters": PARAMETERS,
            "strict": False,
        },
        {**PATCH, "name": "tell"},
    ],
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_call_says_which_tool_of_which_namespace(
    world: World, openai_client: Any, streamed: bool
) -> None:
    calls = [("agents__wait", '{"at": "x"}'), ("agents__tell", '{"input": "go"}'), ("look", "{}")]
    session = await started(world, Speech(calls=calls))
    items: list[Any] = [user("go")]
    for _ in range(2):
        answer = await respond(
            openai_client(session), streamed=streamed, input=items, tools=[AGENTS, FUNCTION]
        )
        assert [(call.type, call.namespace, call.name) for call in answer.output] == [
            ("function_call", "agents", "wait"),
            ("custom_tool_call", "agents", "tell"),
            ("function_call", None, "look"),
        ]
        items += [as_codex_keeps_it(call.model_dump(exclude_none=True)) for call in answer.output]
        items += [
            {"type": f"{call.type}_output", "call_id": call.call_id, "output": "done"}
            for call in answer.output
        ]
    assert line(world, session) == ONE_LINE[:2]


def test_a_model_knows_the_tools_of_a_namespace_by_one_name() -> None:
    asked = ResponsesRequest({"input": "x", "tools": [AGENTS, {"type": "web_search"}]}, None)
    first, second = (tool["function"] for tool in asked.body["tools"])
    assert (first["name"], first["description"]) == ("agents__wait", "Sub-agents.\n\nWaits.")
    assert first["parameters"] == PARAMETERS
    assert (second["name"], second["parameters"]["required"]) == ("agents__tell", ["input"])
    for odd in ({**AGENTS, "tools": None}, {**AGENTS, "name": None}, {**AGENTS, "tools": [AGENTS]}):
        with pytest.raises(RequestError) as caught:
            ResponsesRequest({"input": "x", "tools": [odd]}, None)
        assert (caught.value.field or "").startswith("tools[0].")


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['{"at": "x\\n\\"y", "n": [1, {"a": true}], "z": null}', "{}", '{"a": {"b": [[]]}}']
)
def test_cut_arguments_are_read_as_the_anthropic_client_reads_them(text: str) -> None:
    for size in range(len(text) + 1):
        part = text[:size]
        if not part:
            assert readable(part) == {}
            continue
        assert readable(part) == from_json(part.encode(), partial_mode=True), part


def test_arguments_that_are_no_object_are_read_as_far_as_they_are_one() -> None:
    assert readable("[1, 2]") == {}
    assert readable('{"a": 1, oops}') == {"a": 1}
    assert readable("{" + '"a": [' * 50_000) == {}


@pytest.mark.parametrize(
    ("system", "read"),
    [
        ("x-anthropic-billing-header: cch=1;\nYou are.", "You are."),
        ([{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}], None),
        ("Say x-anthropic-billing-header: cch=1;", "Say x-anthropic-billing-header: cch=1;"),
        ("", None),
    ],
)
def test_the_line_of_one_request_is_cut_off_the_system_prompt(system: Any, read: str | None) -> None:
    asked = MessagesRequest({"system": system, "messages": [user("x")]})
    assert asked.body["messages"] == [
        *([{"role": "system", "content": read}] if read else []),
        user("x"),
    ]


def test_results_of_tools_keep_their_place_between_texts() -> None:
    content = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "c2"},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    asked = MessagesRequest({"messages": [user("x"), {"role": "user", "content": content}]})
    assert asked.body["messages"][1:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


@pytest.mark.parametrize(
    ("content", "is_error", "read"),
    [
        ("no such file", True, "Error: no such file"),
        ("no such file", False, "no such file"),
        ("no such file", None, "no such file"),
        (
            [{"type": "text", "text": "exit code 1"}, {"type": "text", "text": "x"}],
            True,
            "Error: exit code 1\nx",
        ),
        (None, True, "Error: "),
        ("Error: no such file", True, "Error: no such file"),
        ("\nerror TS1: no", True, "\nerror TS1: no"),
        ("Errors: 0", True, "Error: Errors: 0"),
        ("<tool_use_error>cancelled</tool_use_error>", True, "<tool_use_error>cancelled</tool_use_error>"),
    ],
)
def test_the_model_reads_that_a_tool_failed(content: Any, is_error: Any, read: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content, "is_error": is_error}
    asked = MessagesRequest({"messages": [{"role": "user", "content": [result]}]})
    assert asked.body["messages"] == [{"role": "tool", "tool_call_id": "c1", "content": read}]


def test_a_failure_is_true_or_false() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "x", "is_error": "yes"}
    with pytest.raises(RequestError, match="true or false") as caught:
        MessagesRequest({"messages": [{"role": "user", "content": [result]}]})
    assert caught.value.field == "messages[0].content[0].is_error"


@pytest.mark.parametrize("protocol", ["responses", "messages"])
def test_many_small_pieces_are_one_answer_at_no_more_than_their_length(protocol: str) -> None:
    """Put together one by one, these would be copied a hundred thousand times."""
    num, text = 100_000, "x" * 200
    if protocol == "responses":
        items = [{"role": "assistant", "content": text}, {"type": "reasoning", "summary": [{"text": text}]}]
        body = ResponsesRequest({"input": items * (num // 2)}, None).body
    else:
        blocks = [{"type": "text", "text": text}, {"type": "thinking", "thinking": text}]
        said = {"role": "assistant", "content": blocks * (num // 2)}
        body = MessagesRequest({"messages": [said, user("x")]}).body
    said = body["messages"][0]
    assert len(said["content"]) == len(said["reasoning"]) == num // 2 * len(text)


# --- besides turns ---------------------------------------------------------------------------------------


async def test_tokens_are_counted_as_the_next_turn_would_have_them(
    world: World, openai_client: Any, claude: Any
) -> None:
    session = await started(world, PLAIN)
    api = claude(session)
    messages: list[Any] = [user("go")]
    for _ in range(2):
        counted = await api.messages.count_tokens(model="x", messages=messages)
        answer = await api.messages.create(model="x", max_tokens=8, messages=messages)
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        messages += [{"role": "assistant", "content": answer.content[0].text}, user("on")]
    counted = await openai_client(session).responses.input_tokens.count(model="x", input=messages)
    assert (
        counted.input_tokens == (await api.messages.count_tokens(model="x", messages=messages)).input_tokens
    )


async def test_models_are_listed_and_described_to_either_client(
    world: World, openai_client: Any, claude: Any
) -> None:
    session = await started(world, PLAIN)
    for client in (openai_client(session), claude(session)):
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError):
        await openai_client(session).models.retrieve("org/other")


async def test_tokenize_and_health_are_vllms(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    assert (await world.ok("GET", "/health"))["status"] == "ok"
    body = {"model": "policy", "messages": [user("hello")], "return_token_strs": True}
    answer = await world.ok("POST", "/tokenize", body)
    assert answer["tokens"] == engine.tokenizer.chat({"messages": [user("hello")]})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == engine.max_model_len
    assert (await world.ok("POST", "/tokenize", {"prompt": "hello"}))["count"] > 0
    status, refused = await world.call("POST", "/tokenize", {"prompt": ["hello"]})
    assert (status, refused["error"]["param"]) == (400, "prompt")


# --- sampling --------------------------------------------------------------------------------------------

SAMPLING: dict[str, Any] = {
    "top_k": 5, "min_p": 0.1, "seed": 3, "stop_token_ids": [7], "min_tokens": 2, "ignore_eos": True,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1.0},
    "bad_words": ["no"], "allowed_token_ids": [1, 2], "structured_outputs": {"choice": ["a"]}, "thinking_token_budget": 4,
    "skip_special_tokens": False, "include_stop_str_in_output": True,
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING)
def test_how_a_turn_is_sampled_is_the_same_in_every_protocol(name: str) -> None:
    given = {name: SAMPLING[name]}
    assert MessagesRequest({"messages": [user("x")], **given}).body[name] == SAMPLING[name]
    assert ResponsesRequest({"input": "x", **given}, None).body[name] == SAMPLING[name]


@pytest.mark.parametrize("asked", [2, 0, "1"])
def test_several_answers_where_a_protocol_has_one_are_refused(asked: Any) -> None:
    with pytest.raises(RequestError, match="n: "):
        MessagesRequest({"messages": [user("x")], "n": asked})
    with pytest.raises(RequestError, match="n: "):
        ResponsesRequest({"input": "x", "n": asked}, None)
    assert "n" not in ResponsesRequest({"input": "x", "n": 1}, None).body
