"""The ``openai`` package, unmodified, against the daemon: sync, async, streaming, its retries."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from rose.testing.fake_engine import Fault
from tests.scheduler.conftest import World, user


def client(world: World, session: str | None = None, **kwargs: Any) -> openai.AsyncOpenAI:
    headers = {"X-Session-ID": session} if session else None
    return openai.AsyncOpenAI(
        base_url=f"{world.url}/v1", api_key=world.tokens.agent, default_headers=headers, **kwargs
    )


async def collect(stream: Any) -> tuple[str, str | None, list[Any]]:
    """Text, finish reason and all chunks of a chat stream."""
    chunks = [chunk async for chunk in stream]
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    return "".join(parts), reasons[-1], chunks


async def test_sync_client_in_a_thread(world: World) -> None:
    await world.start()
    await world.add("a")

    def talk() -> Any:
        sync = openai.OpenAI(base_url=f"{world.url}/v1", api_key=world.tokens.agent)
        names = [model.id for model in sync.models.list()]
        answer = sync.chat.completions.create(model=names[0], messages=[user("hi")], max_tokens=8)  # type: ignore[list-item]
        text = sync.completions.create(model=names[0], prompt="abc", max_tokens=5)
        return names, answer, text

    names, answer, text = await asyncio.to_thread(talk)
    assert names == ["policy"]
    assert answer.usage.completion_tokens == 8 or answer.choices[0].finish_reason == "stop"
    assert answer.rose["segments"][0]["worker"] == "a"
    assert text.choices[0].text


async def test_streamed_text_equals_the_answer(world: World) -> None:
    await world.start()
    await world.add("a")
    async with client(world) as api:
        whole = await api.chat.completions.create(model="policy", messages=[user("hi")], max_tokens=40)  # type: ignore[list-item]
        stream = await api.chat.completions.create(
            model="policy",
            messages=[user("hi")],  # type: ignore[list-item]
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, reason, chunks = await collect(stream)
    assert text == whole.choices[0].message.content
    assert reason == whole.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert chunks[-2].rose["segments"][0]["worker"] == "a"


@pytest.mark.parametrize("kind", ["reclaim", "reset"])
async def test_a_stream_does_not_show_that_its_turn_moved(world: World, kind: str) -> None:
    await world.start(policy="round_robin")
    for name in ("a", "b"):
        await world.add(name, mean_tokens=10_000)
    async with client(world) as api:
        create = api.chat.completions.create
        whole = await create(model="policy", messages=[user("hi")], max_tokens=30)  # type: ignore[list-item]
        for engine in world.engines.values():
            engine.faults.append(Fault(kind=kind, after=9))
        stream = await create(model="policy", messages=[user("hi")], max_tokens=30, stream=True)  # type: ignore[list-item]
        text, reason, chunks = await collect(stream)
    assert text == whole.choices[0].message.content
    assert reason == "length"
    segments = chunks[-1].rose["segments"]
    assert [segment["n"] for segment in segments] == [9, 9, 12]


async def test_a_streamed_conversation_is_recorded_like_any_other(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    messages: list[Any] = [user("hi")]
    async with client(world, session) as api:
        for _ in range(3):
            stream = await api.chat.completions.create(
                model="policy", messages=messages, max_tokens=20, stream=True
            )
            text, _, _ = await collect(stream)
            messages += [{"role": "assistant", "content": text}, user("more")]
    turns = (await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"]
    assert [(turn["parent"], turn["fork"]) for turn in turns] == [(None, None), (0, None), (1, None)]


async def test_a_stop_string_across_a_cut_ends_the_stream(world: World) -> None:
    await world.start(policy="round_robin")
    for name in ("a", "b"):
        await world.add(name, mean_tokens=10_000, token_s=0.001)
    async with client(world) as api:
        create = api.chat.completions.create
        whole = await create(model="policy", messages=[user("hi")], max_tokens=40)  # type: ignore[list-item]
        text = whole.choices[0].message.content or ""
        stop = text[15:20]
        at = text.find(stop)
        # Cut inside the stop string: the second engine sees only its end.
        for engine in world.engines.values():
            engine.faults.append(Fault(kind="reclaim", after=at + 2))
        world.engines["b"].faults.clear()
        world.engines["a"].faults.clear()
        first = "a" if len(world.engines["a"].requests) < len(world.engines["b"].requests) else "b"
        world.engines[first].faults.append(Fault(kind="reclaim", after=at + 2))
        stream = await create(
            model="policy",
            messages=[user("hi")],  # type: ignore[list-item]
            max_tokens=40,
            stop=[stop],
            stream=True,
        )
        shown, reason, _ = await collect(stream)
    assert (shown, reason) == (text[:at], "stop")


async def test_streamed_choices_are_complete_and_separate(world: World) -> None:
    await world.start()
    await world.add("a")
    async with client(world) as api:
        stream = await api.chat.completions.create(
            model="policy",
            messages=[user("hi")],
            max_tokens=12,
            n=3,
            stream=True,  # type: ignore[list-item]
        )
        texts = {0: "", 1: "", 2: ""}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert len(set(texts.values())) == 1  # the fake model is a function of its prompt
    assert texts[0]


async def test_streamed_completions(world: World) -> None:
    await world.start()
    await world.add("a")
    async with client(world) as api:
        whole = await api.completions.create(model="policy", prompt="abc", max_tokens=12)
        stream = await api.completions.create(model="policy", prompt="abc", max_tokens=12, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert text == whole.choices[0].text


async def test_the_clients_own_retry_joins_its_turn(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    session = await world.trajectory()

    # Tries enough for a machine that answers none in time.
    async with client(world, session, timeout=0.3, max_retries=20) as api:
        call = asyncio.create_task(
            api.chat.completions.create(model="policy", messages=[user("hi")], max_tokens=8)  # type: ignore[list-item]
        )
        await world.until(lambda: world.scheduler.status.num_duplicates >= 1)
        engine.hold.set()
        answer = await call
    assert answer.rose["turn"] == 0  # type: ignore[attr-defined]
    assert len(engine.requests) == 1


async def test_errors_are_the_clients_exceptions(world: World) -> None:
    await world.start()
    await world.add("a")
    async with client(world, "ghost", max_retries=0) as api:
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="policy", messages=[user("hi")])  # type: ignore[list-item]
        assert missing.value.code == "unknown_session"
    async with client(world, max_retries=0) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model="policy", messages=[])
        assert bad.value.param == "messages"
    wrong = openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="wrong-wrong-wrong-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        await wrong.models.list()
    await wrong.close()


async def test_a_held_stream_is_kept_alive_by_comments(world: World) -> None:
    await world.start(timeouts={"keepalive_s": 0.05})
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    body = {"model": "policy", "messages": [user("hi")], "stream": True, "max_tokens": 4}
    async with world.session.post(
        f"{world.url}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {world.tokens.agent}"},
    ) as response:
        assert await response.content.readline() == b": held\n"
        engine.hold.set()
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_error_after_the_stream_began_is_an_event(world: World) -> None:
    await world.start(timeouts={"keepalive_s": 0.02})
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    session = await world.trajectory()
    async with client(world, session, max_retries=0) as api:
        stream = await api.chat.completions.create(
            model="policy",
            messages=[user("hi")],
            max_tokens=4,
            stream=True,  # type: ignore[list-item]
        )
        await world.ok("DELETE", f"/rose/v1/trajectories/{session}")
        with pytest.raises(openai.APIError, match="cancelled"):
            async for _ in stream:
                pass
