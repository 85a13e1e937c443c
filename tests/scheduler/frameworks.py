"""Agent frameworks as they come, each streamed and not, with every turn cut in the middle: no fork, each sampled token trained once.

Collected by ``test_real_clients``, whose server they share.  A conversation is played twice, through the gateway and with vLLM's own server,
and says the same.  One whose package is missing is skipped by name; ``pip install '.[dev]'`` has them all.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.scheduler.real_gateway import Gateway, sampled_once

QUESTION = "What will the weather in Zürich be?"
SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 80}
Said = list[Any]
"""Calls of the tool, and texts, in their order."""


def ways(*protocols: str, first: tuple[str, bool]) -> pytest.MarkDecorator:
    """``protocol`` and ``streamed``: ``first`` in ``make test``, which has each protocol once over all frameworks, the others in ``make conformance``."""
    every = [(protocol, streamed) for protocol in protocols for streamed in (False, True)]
    return pytest.mark.parametrize(
        ("protocol", "streamed"),
        [
            pytest.param(
                *way,
                id=f"{way[0]}-{'streamed' if way[1] else 'whole'}",
                marks=() if way == first else pytest.mark.conformance,
            )
            for way in every
        ],
    )


@asynccontextmanager
async def every_turn_is_cut(gateway: Gateway) -> AsyncIterator[str]:
    """The id of a trajectory whose turns all lose their connection after three tokens."""
    for door in gateway.doors:
        door.cut_each_after = 3
    try:
        yield gateway.scheduler.store.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    finally:
        for door in gateway.doors:
            door.cut_each_after = None


async def compare(gateway: Gateway, play: Callable[[str, str], Awaitable[Said]]) -> None:
    """``play`` says the same with us as with vLLM, in one line of tokens.

    Args:
        play: Gets the server's URL and an API key.
    """
    expected = await play(gateway.engine.url, gateway.engine.node_token)
    async with every_turn_is_cut(gateway) as name:
        said = await play(gateway.url, gateway.tokens.key_of(name))
    assert said == expected
    assert any(one == ("Zürich", 3) for one in said), "the tool was called"
    num_turns = len(gateway.scheduler.store.trajectories[name].turns)
    assert num_turns >= 3
    sampled_once(gateway, name, num_turns)


@ways("chat", "responses", first=("chat", True))
async def test_openai_agents(gateway: Gateway, streamed: bool, protocol: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    kind = agents.OpenAIResponsesModel if protocol == "responses" else agents.OpenAIChatCompletionsModel

    async def play(url: str, key: str) -> Said:
        said: Said = []

        @agents.function_tool
        def get_weather(city: str, days: int) -> str:
            """The weather of the coming days."""
            said.append((city, days))
            return "sunny"

        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
            agent = agents.Agent(
                name="weather",
                instructions="Use tools.",
                tools=[get_weather],
                model=kind(model="policy", openai_client=client),
                model_settings=agents.ModelSettings(**SETTINGS),
            )
            items: Any = QUESTION
            for _ in range(2):
                if streamed:
                    result = agents.Runner.run_streamed(agent, items, max_turns=4)
                    async for _event in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, items, max_turns=4)
                said.append(result.final_output.strip())
                items = [*result.to_input_list(), {"role": "user", "content": "and then?"}]
        return said

    await compare(gateway, play)


@ways("chat", "responses", first=("responses", False))
async def test_langchain_openai(gateway: Gateway, streamed: bool, protocol: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    messages_of = pytest.importorskip("langchain_core.messages")

    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of the coming days.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }

    async def play(url: str, key: str) -> Said:
        async with (
            openai.DefaultAsyncHttpxClient() as connections
        ):  # its own would be kept for the next test's loop
            return await converse(url, key, connections)

    async def converse(url: str, key: str, connections: Any) -> Said:
        model = langchain_openai.ChatOpenAI(
            model="policy",
            base_url=f"{url}/v1",
            api_key=key,
            use_responses_api=protocol == "responses",
            http_async_client=connections,
            **SETTINGS,
        ).bind_tools([tool])
        said: Said = []
        messages: list[Any] = [messages_of.HumanMessage(QUESTION)]
        for _ in range(4):
            if streamed:
                answer: Any = None
                async for chunk in model.astream(messages):
                    answer = chunk if answer is None else answer + chunk
            else:
                answer = await model.ainvoke(messages)
            messages.append(answer)
            said += [(call["args"]["city"], call["args"]["days"]) for call in answer.tool_calls]
            if text := _text_of(answer.content).strip():
                said.append(text)
            messages += [
                messages_of.ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls
            ] or [messages_of.HumanMessage("and then?")]
        return said

    await compare(gateway, play)


def _text_of(content: Any) -> str:
    """LangChain's content is a string, or of blocks."""
    if isinstance(content, str):
        return content
    return "".join(block.get("text", "") for block in content if block.get("type") == "text")


@ways("chat", "responses", "messages", first=("messages", True))
async def test_pydantic_ai(gateway: Gateway, streamed: bool, protocol: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")

    async def play(url: str, key: str) -> Said:
        said: Said = []
        agent = pydantic_ai.Agent(
            _model_of(protocol, url, key), instructions="Use tools.", model_settings=SETTINGS
        )

        @agent.tool_plain
        def get_weather(city: str, days: int) -> str:
            """The weather of the coming days."""
            said.append((city, days))
            return "sunny"

        async def listen(context: Any, events: Any) -> None:
            """With this the framework streams each turn; its ``run_stream`` ends the run at the first text, white space too."""
            async for _event in events:
                pass

        history: Any = None
        for question in (QUESTION, "and then?"):
            result = await agent.run(
                question, message_history=history, event_stream_handler=listen if streamed else None
            )
            said.append(result.output.strip())
            history = result.all_messages()
        return said

    await compare(gateway, play)


def _model_of(protocol: str, url: str, key: str) -> Any:
    vendor = "anthropic" if protocol == "messages" else "openai"
    models, providers = (
        importlib.import_module(f"pydantic_ai.{kind}.{vendor}") for kind in ("models", "providers")
    )
    if protocol == "messages":
        return models.AnthropicModel(
            "policy", provider=providers.AnthropicProvider(api_key=key, base_url=url)
        )
    kind = models.OpenAIResponsesModel if protocol == "responses" else models.OpenAIChatModel
    return kind("policy", provider=providers.OpenAIProvider(api_key=key, base_url=f"{url}/v1"))
