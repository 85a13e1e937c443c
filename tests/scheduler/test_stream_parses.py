"""What a streamed turn sends to be parsed: its prompt once, and nothing is said twice or left out when its parse is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from rose.policy.turn_events import TurnEnded, TurnState
from rose.scheduler.dispatch import TurnHandle
from rose.scheduler.http import errors_middleware, read_object
from rose.scheduler.parses import Parsed, Piece, StreamParse, joined
from rose.scheduler.protocols.chat import ChatRequest
from rose.scheduler.stops import StopMatcher, cut_at_stop
from rose.scheduler.streams import stream_job
from rose.testing.fake_engine import FakeEngine
from tests.scheduler.conftest import World, user

PARSE = ("/rose/parse", "/rose/parse/close")
DERENDER = ("/v1/chat/completions/derender", "/v1/completions/derender")


def parse_of(
    world: World, prompt: Sequence[int], *, chat: bool = True, min_tokens: int = 0, **wanted: Any
) -> StreamParse:
    request: dict[str, Any] = {"model": "policy", **wanted}
    request |= {"messages": [user("x" * len(prompt))]} if chat else {"prompt": "x"}
    return StreamParse(
        world.scheduler.renderer, request, chat=chat, turn_id="t", prompt_ids=prompt, min_tokens=min_tokens
    )


def letters(engine: FakeEngine, text: str) -> list[int]:
    return engine.tokenizer.encode(text)


def sent(engine: FakeEngine, paths: Sequence[str]) -> int:
    return sum(engine.bytes_in[path] for path in paths)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_a_turn_of_a_hundred_tokens_sends_its_prompt_of_60k_once(world: World, chat: bool) -> None:
    """Measured: 29 MB by vLLM's stateless route; the prompt and its messages are 0.3 MB."""
    await world.start()
    plugin = await world.add("plugin", max_model_len=70_000)
    prompt = [100 + at % 50 for at in range(60_000)]
    tokens = letters(plugin, "abcdefghij" * 10)
    parse = parse_of(world, prompt, chat=chat)
    for at, token in enumerate(tokens):
        reason = "length" if at + 1 == len(tokens) else None
        await parse.feed(Piece(token_ids=[token], finish_reason=reason))
    after = sent(plugin, PARSE)
    await world.kill("plugin")
    plain = await world.add("plain", max_model_len=70_000, plugin=False)
    await world.until(
        lambda: not any(w.worker_id == "plugin" and w.may_take_turns for w in world.scheduler.book.fleet)
    )
    parse = parse_of(world, prompt, chat=chat)
    for at, token in enumerate(tokens):
        reason = "length" if at + 1 == len(tokens) else None
        await parse.feed(Piece(token_ids=[token], finish_reason=reason))
    before = sent(plain, DERENDER)
    request = 60_000 if chat else 0
    assert before > 100 * (len(prompt) * 4 + request)
    assert after < len(prompt) * 4 + request + 100 * 400


async def text_of(
    world: World, parse: StreamParse, tokens: list[int], *, lose_at: int = -1, lose: Any = None
) -> tuple[str, str | None]:
    said: dict[str, Any] = {}
    for at in range(0, len(tokens), 3):
        if at // 3 == lose_at:
            await lose()
        last = at + 3 >= len(tokens)
        parsed = await parse.feed(
            Piece(token_ids=tokens[at : at + 3], finish_reason="length" if last else None)
        )
        said = joined(said, parsed.delta)
        if parsed.stop is not None:
            return said.get("content", ""), parsed.stop
    return said.get("content", ""), None


@pytest.mark.parametrize("lose_at", [1, 3, 5])
@pytest.mark.parametrize("second", ["same", "plugin", "plain"])
@pytest.mark.parametrize("first", ["plugin", "plain"])
async def test_a_lost_parse_goes_on_elsewhere(world: World, first: str, second: str, lose_at: int) -> None:
    await world.start()
    engine = await world.add("one", plugin=first == "plugin")

    async def lose() -> None:
        if second == "same":
            engine.open_parses.clear()  # as an engine does that needs the room
        else:
            await world.add("two", plugin=second == "plugin")
            await world.kill("one")

    tokens = letters(engine, "one, two, three four.")
    parse = parse_of(world, [5, 6, 7], stop=["no such"])
    assert await text_of(world, parse, tokens, lose_at=lose_at, lose=lose) == ("one, two, three four.", None)
    assert not any(left.open_parses for left in world.engines.values() if left is not engine)


@pytest.mark.parametrize("plugin", [True, False], ids=["plugin", "plain"])
async def test_a_stop_string_that_no_engine_saw_is_found(world: World, plugin: bool) -> None:
    await world.start()
    engine = await world.add("a", plugin=plugin)
    tokens = letters(engine, "one, two, three")
    assert await text_of(world, parse_of(world, [5], stop=["tw", "zz"]), tokens) == ("one, ", "tw")
    shown = parse_of(world, [5], stop=["tw", "zz"], include_stop_str_in_output=True)
    assert await text_of(world, shown, tokens) == ("one, tw", "tw")


async def test_an_engine_that_has_no_room_for_another_parse_is_asked_the_other_way(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    engine.max_parses = 0
    answer = await text_of(world, parse_of(world, [5]), letters(engine, "one, two"))
    assert answer == ("one, two", None)
    assert sent(engine, DERENDER) > 0
    engine.max_parses = 1  # and the next stream finds it again
    engine.bytes_in.clear()
    await text_of(world, parse_of(world, [5]), letters(engine, "one, two"))
    assert sent(engine, DERENDER) == 0


@pytest.mark.parametrize("how", ["ends", "hangs up", "is cancelled"])
async def test_no_stream_leaves_a_parse_open(world: World, how: str) -> None:
    await world.start()
    engine = await world.add("a", token_s=0.002, mean_tokens=10_000)
    session = await world.trajectory()
    body = {"model": "policy", "messages": [user("hi")], "stream": True, "max_tokens": 60, "n": 2}
    headers = {"Authorization": f"Bearer {world.tokens.agent}", "X-Session-ID": session}
    url = f"{world.url}/v1/chat/completions"
    async with world.session.post(url, json=body, headers=headers) as response:
        assert (await response.content.readline()).startswith(b"data: ")
        assert engine.open_parses
        if how == "ends":
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        elif how == "is cancelled":
            await world.ok("DELETE", f"/rose/v1/trajectories/{session}")
    await world.until(lambda: not engine.open_parses)


@pytest.mark.parametrize(
    ("stop", "min_tokens", "shown"),
    [
        pytest.param("ef", 4, "abcd", id="in the piece that reaches the least length"),
        pytest.param("ef", 5, "abcd", id="across the least length"),
        pytest.param("ef", 6, "abcdefghij", id="before the least length"),
        pytest.param("ij", 10, "abcdefghij", id="the end comes at the least length"),
    ],
)
async def test_a_stop_string_counts_from_the_least_length_on_however_tokens_come(
    world: World, stop: str, min_tokens: int, shown: str
) -> None:
    """vLLM looks for it in the text that the token after ``min_tokens`` completes; a busy engine sends many at once."""
    await world.start()
    engine = await world.add("plain", plugin=False)
    parse = parse_of(world, [1], stop=[stop], min_tokens=min_tokens)

    text, found = await text_of(world, parse, letters(engine, "abcdefghij"))

    assert (text, found) == (shown, stop if len(shown) < 10 else None)


def test_a_stop_string_inside_held_text_that_does_not_count_is_none() -> None:
    matcher = StopMatcher(["aab", "a"], keep=False)

    shown = matcher.feed("aa", counts=False) + matcher.feed("c") + matcher.feed("ad")

    assert (shown, matcher.matched) == ("aac", "a")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("ab\n\n", "ab"), ("a\nb\n\n\n", "a\nb"), ("ab", "ab"), ("\n", "")],
)
def test_a_token_of_several_stop_strings_is_cut_at_the_first_of_them(text: str, shown: str) -> None:
    assert cut_at_stop(text, "\n", min_tokens=3, keep=False) == shown


async def test_a_choice_that_fails_ends_the_others_before_the_error_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another one wrote later went out before the next answer on the connection."""
    handles = [TurnHandle(turn_id=f"t-{index}", prompt_ids=[1], sampling_params={}) for index in range(2)]
    handles[1].tokens, handles[1].logprobs = [5], [0.0]
    asked, answer = asyncio.Event(), asyncio.Event()

    async def feed(parse: StreamParse, piece: Piece) -> Parsed:
        asked.set()
        await answer.wait()
        return Parsed(delta={"content": "text of the first request"})

    monkeypatch.setattr(StreamParse, "feed", feed)
    monkeypatch.setattr(StreamParse, "close", lambda parse: None)

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await read_object(request)
        if not body.get("stream"):
            return web.json_response({"answer": "to the second request"})
        inflight = SimpleNamespace(
            task=asyncio.ensure_future(asyncio.Event().wait()),
            started=asyncio.Event(),
            handles=handles,
            is_waiting_too_long=False,
        )
        inflight.started.set()
        try:
            return await stream_job(
                request,
                cast(Any, inflight),
                sent=ChatRequest(body),
                body=body,
                chat=True,
                renderer=cast(Any, None),
                dispatcher=cast(Any, None),
                on_delivery=lambda handle, message: None,
                keepalive_s=15.0,
            )
        finally:
            inflight.task.cancel()

    app = web.Application(middlewares=[errors_middleware])
    app.router.add_post("/", chat)
    one = aiohttp.TCPConnector(limit=1)
    soon = aiohttp.ClientTimeout(total=30.0)
    async with TestClient(TestServer(app), connector=one, timeout=soon) as client:
        asking = {"messages": [user("hi")], "n": 2, "stream": True}
        first = asyncio.ensure_future(client.post("/", json=asking))
        await asked.wait()
        for handle in handles:
            ended = TurnEnded(
                turn_id=handle.turn_id,
                outcome=TurnState.CANCELLED,
                reason="redundant",
                result=cast(Any, None),
            )
            handle.done.set_result(ended)
            handle.notify()
        async with await first as response:
            assert response.status == 410
            await response.read()
        answer.set()
        for _ in range(5):
            await asyncio.sleep(0)
        async with client.post("/", json={"messages": [user("hi")]}) as response:
            assert await response.json() == {"answer": "to the second request"}
