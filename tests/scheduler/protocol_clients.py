"""What tests of the three protocols share: things for a model to say, and clients that say what they were answered in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai

from tests.scheduler.conftest import World
from tests.scheduler.speaker import Speaker, Speech

if TYPE_CHECKING:
    import anthropic  # two seconds, of which only who has such a client needs to know

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
CALLING = Speech(
    reasoning="Hm.", calls=[("look", '{"at": "x",  "n": 1}')], content="", streamed_content="\n\n"
)
BOTH = Speech(
    reasoning="Hm.", content="Let me see.", calls=[("look", '{"at": "x"}'), ("look", '{"at": "y"}')]
)
CUT = Speech(content="<tool_call>{", streamed_content="", streamed_calls=[("look", '{"at": "x", "n')])
PLAIN = Speech(content="\n\nIt is there. ")
SPEECHES = {"calling": CALLING, "both": BOTH, "cut": CUT, "plain": PLAIN}


async def started(world: World, speech: Speech) -> str:
    await world.start()
    await world.add("a", kind=Speaker, says=lambda token_ids: speech)
    return await world.trajectory()


def line(world: World, session: str) -> list[tuple[int | None, str | None]]:
    return [(turn.parent, turn.fork) for turn in world.scheduler.store.trajectories[session].turns]


ONE_LINE = [(None, None), (0, None), (1, None)]

FUNCTION: dict[str, Any] = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}


async def respond(api: openai.AsyncOpenAI, *, streamed: bool, **fields: Any) -> Any:
    request: dict[str, Any] = {
        "model": "gpt-5",
        "max_output_tokens": 8,
        "tools": [FUNCTION],
        "instructions": "Be brief.",
        **fields,
    }
    if not streamed:
        return await api.responses.create(**request)
    async with api.responses.stream(**request) as stream:
        last = None
        async for event in stream:
            last = event
    assert last is not None
    if last.type == "response.incomplete":
        return last.response
    return await stream.get_final_response()


async def converse(api: anthropic.AsyncAnthropic, *, streamed: bool, **fields: Any) -> Any:
    request: dict[str, Any] = {
        "model": "claude-opus-4-6",
        "max_tokens": 8,
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
        **fields,
    }
    if not streamed:
        return await api.messages.create(**request)
    async with api.messages.stream(**request) as stream:
        return await stream.get_final_message()


def as_codex_keeps_it(item: dict[str, Any]) -> dict[str, Any]:
    """Its history has no ids, and of reasoning no text: codex-rs/protocol/src/models.rs, ``ResponseItem``."""
    dropped = {"id", "status"} | ({"content"} if item["type"] == "reasoning" else set())
    kept = {field: value for field, value in item.items() if field not in dropped}
    if kept["type"] == "message":
        kept["content"] = [{"type": "output_text", "text": part["text"]} for part in kept["content"]]
    return kept
