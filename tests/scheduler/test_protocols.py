"""One conversation in three protocols, as their clients hold it: it stays one line of tokens, and is known again."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.scheduler.conftest import World, user
from tests.scheduler.protocol_clients import (
    CALLING,
    ONE_LINE,
    PLAIN,
    SPEECHES,
    as_codex_keeps_it,
    converse,
    line,
    respond,
    started,
)
from tests.scheduler.speaker import Speech


@pytest.mark.parametrize("speech", SPEECHES)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", ["items", "codex", "previous_response_id"])
async def test_responses_stay_one_line_of_tokens(
    world: World, openai_client: Any, speech: str, streamed: bool, way: str
) -> None:
    session = await started(world, SPEECHES[speech])
    api = openai_client(session)
    items: list[Any] = [{"role": "developer", "content": "No jokes."}, {"role": "user", "content": "go"}]
    earlier: dict[str, Any] = {}
    for _ in range(3):
        answer = await respond(api, streamed=streamed, input=items, **earlier)
        said = [item.model_dump(exclude_none=True) for item in answer.output]
        after: list[Any] = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
            for item in said
            if item["type"] == "function_call"
        ] or [{"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
        if way == "previous_response_id":
            items, earlier = after, {"previous_response_id": answer.id}
        else:
            if way == "codex":
                said = [as_codex_keeps_it(item) for item in said]
            items = [*items, *said, *after]
    assert line(world, session) == ONE_LINE


@pytest.mark.parametrize("speech", SPEECHES)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", ["as it was", "without thinking", "trimmed"])
async def test_messages_stay_one_line_of_tokens(
    world: World, claude: Any, speech: str, streamed: bool, way: str
) -> None:
    session = await started(world, SPEECHES[speech])
    api = claude(session)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for number in range(3):
        # As Claude Code: a line of this request alone in front, a cache mark at the end of what there is.
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cch={number};"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ]
        marked = [*messages[:-1], with_mark(messages[-1])]
        answer = await converse(api, streamed=streamed, system=system, messages=marked)
        said = [block.model_dump(exclude_none=True) for block in answer.content]
        if way != "as it was":
            said = [block for block in said if block["type"] != "thinking"]
        if way == "trimmed":
            said = [
                {**block, "text": block["text"].strip()} if block["type"] == "text" else block
                for block in said
                if block.get("text", "x").strip()
            ]
        calls = [block["id"] for block in said if block["type"] == "tool_use"]
        after: list[Any] = [
            {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": "x"}]}
            for call in calls
        ]
        after.append({"type": "text", "text": "<system-reminder>on</system-reminder>"})
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": after}]
    assert line(world, session) == ONE_LINE


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_arguments_that_are_no_object_do_not_end_the_conversation(
    world: World, claude: Any, streamed: bool
) -> None:
    session = await started(world, Speech(calls=[("look", '"at')]))
    messages: list[Any] = [user("go")]
    for _ in range(2):
        answer = await converse(claude(session), streamed=streamed, messages=messages)
        (call,) = answer.content
        assert (call.type, call.input) == ("tool_use", {})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "what?"}
        said = {"role": "assistant", "content": [call.model_dump(exclude_none=True)]}
        messages += [said, {"role": "user", "content": [result]}]
    assert line(world, session) == ONE_LINE[:2]


def with_mark(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    blocks: list[dict[str, Any]] = (
        [{"type": "text", "text": content}] if isinstance(content, str) else [dict(b) for b in content]
    )
    blocks[-1]["cache_control"] = {"type": "ephemeral"}
    return {**message, "content": blocks}


async def test_one_conversation_goes_through_all_three_protocols(
    world: World, openai_client: Any, claude: Any
) -> None:
    session = await started(world, Speech(content="ok", reasoning="Hm."))
    system = {"role": "system", "content": "Be brief."}
    await world.chat(session, [system, user("one")], max_tokens=8)
    items = [user("one"), {"role": "assistant", "content": "ok"}, user("two")]
    await openai_client(session).responses.create(
        model="policy", instructions="Be brief.", input=items, max_output_tokens=8
    )
    messages = [*items, {"role": "assistant", "content": "ok"}, user("three")]
    await claude(session).messages.create(model="policy", system="Be brief.", messages=messages, max_tokens=8)
    assert line(world, session) == ONE_LINE


@pytest.mark.parametrize("protocol", ["responses", "messages"])
async def test_a_compacted_history_forks_and_says_why(
    world: World, openai_client: Any, claude: Any, protocol: str
) -> None:
    session = await started(world, PLAIN)

    async def ask(messages: list[Any]) -> Any:
        if protocol == "messages":
            return await claude(session).messages.create(model="x", max_tokens=8, messages=messages)
        return await openai_client(session).responses.create(model="x", max_output_tokens=8, input=messages)

    await ask([user("go")])
    answer = await ask([user("Summary of what was: nothing."), user("go on")])
    assert answer.model_extra["rose"]["fork"] == "history"
    assert line(world, session) == [(None, None), (None, "history")]


# --- what earlier answers are known by -------------------------------------------------------------------


async def test_an_earlier_response_is_known_after_a_restart(world: World, openai_client: Any) -> None:
    session = await started(world, CALLING)
    answer = await respond(openai_client(session), streamed=True, input="go")
    await world.scheduler.stop(drain_s=0)
    await world.start(journal={"compact_bytes": 1})  # read, and written anew
    await world.scheduler.stop(drain_s=0)
    await world.start()
    node = world.nodes["a"]
    node.report_to(world.url)
    await node.register()
    await node.beat()
    (call,) = [item for item in answer.output if item.type == "function_call"]
    output = [{"type": "function_call_output", "call_id": call.call_id, "output": "x"}]
    api = openai_client(session)
    await respond(api, streamed=True, input=output, previous_response_id=answer.id)
    assert line(world, session) == ONE_LINE[:2]


async def test_other_instructions_behind_an_earlier_response_are_another_history(
    world: World, openai_client: Any
) -> None:
    session = await started(world, PLAIN)
    api = openai_client(session)
    first = await respond(api, streamed=False, input="go")
    second = await respond(
        api, streamed=False, input="on", instructions="Be long.", previous_response_id=first.id
    )
    assert second.model_extra["rose"]["fork"] == "history"
    # All of it is in the prompt nevertheless.
    await respond(api, streamed=False, input="on", instructions="Be long.", previous_response_id=second.id)
    assert line(world, session) == [(None, None), (None, "history"), (1, None)]
    engine = world.engines["a"]
    prompts = [engine.tokenizer.decode(request["token_ids"]) for request in engine.requests]
    assert ["go" in prompts[1], "Be long." in prompts[1], "Be brief." in prompts[1]] == [True, True, False]


@pytest.mark.parametrize("why", ["unknown", "not stored", "another trajectory's", "no trajectory"])
async def test_a_response_that_is_not_known_is_refused_by_name(
    world: World, openai_client: Any, why: str
) -> None:
    session = await started(world, PLAIN)
    api = openai_client(session)
    name = "resp_n-0000000000000000"
    if why != "unknown":
        name = (await respond(api, streamed=False, input="go", store=why != "not stored")).id
    if why == "another trajectory's":
        api = openai_client(await world.trajectory())
    if why == "no trajectory":
        api = openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=world.tokens.agent, max_retries=0)
    with pytest.raises(openai.NotFoundError) as refused:
        await respond(api, streamed=False, input="on", previous_response_id=name, model="policy")
    assert (refused.value.code, refused.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


async def test_messages_are_kept_once_and_only_where_asked(world: World, openai_client: Any) -> None:
    session = await started(world, PLAIN)
    api = openai_client(session)
    items: list[Any] = [user("go " * 200)]
    for store in (True, True, True, False):
        answer = await respond(api, streamed=False, input=items, store=store)
        items = [*items, *(item.model_dump() for item in answer.output), user("on")]
    turns = world.scheduler.store.trajectories[session].turns
    assert [turn.messages_of for turn in turns] == [None, 0, 1, None]
    sizes = [len(turn.messages) for turn in turns]
    assert sizes[0] > 600
    assert 0 < sizes[1] < 300
    assert 0 < sizes[2] < 300
    assert sizes[3] == 0


@pytest.mark.parametrize("chosen", [0, 1, 2])
@pytest.mark.parametrize("protocol", ["responses", "messages"])
async def test_what_comes_back_says_which_of_equal_answers_it_was(
    world: World, openai_client: Any, claude: Any, protocol: str, chosen: int
) -> None:
    from tests.scheduler.test_tips import Varied

    await world.start()
    await world.add("a", kind=Varied, says=lambda token_ids: Speech(content="ok", reasoning="Hm."))
    session = await world.trajectory()
    go = [user("go")]
    if protocol == "messages":
        api = claude(session)
        answers = [await converse(api, streamed=False, messages=go) for _ in range(3)]
        said = [block.model_dump(exclude_none=True) for block in answers[chosen].content]
        back = [*go, {"role": "assistant", "content": said}, user("on")]
        await converse(api, streamed=False, messages=back)
    else:
        api = openai_client(session)
        answers = [await respond(api, streamed=False, input=go) for _ in range(3)]
        said = [item.model_dump(exclude_none=True) for item in answers[chosen].output]
        await respond(api, streamed=False, input=[*go, *said, user("on")])
    assert line(world, session)[3] == (chosen, None)
