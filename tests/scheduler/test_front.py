"""The short way in: what comes by it, what goes to aiohttp with its connection, and that both answer alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rose.scheduler import front
from tests.scheduler.conftest import PROMPT, World, user

GENERATE = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6}}


class Wire:
    """One connection, and answers as they are."""

    def __init__(self, world: World, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.world, self.reader, self.writer = world, reader, writer

    def request(
        self, path: str, body: Any, *headers: str, method: str = "POST", role: str = "agent"
    ) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        auth = f"Authorization: Bearer {getattr(self.world.tokens, role)}"
        lines = [f"{method} {path} HTTP/1.1", "Host: x", auth, *headers, f"Content-Length: {len(data)}"]
        return "\r\n".join([*lines, "", ""]).encode() + data

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            if head[0].split()[1] == "100":
                return await self.answer()
            if headers.get("transfer-encoding") == "chunked":
                data = await self.reader.readuntil(b"0\r\n\r\n")
            else:
                data = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, data

    async def ask(
        self, path: str, body: Any, *headers: str, **more: Any
    ) -> tuple[int, dict[str, str], bytes]:
        self.writer.write(self.request(path, body, *headers, **more))
        return await self.answer()


@pytest.fixture
async def wire(world: World) -> AsyncIterator[Wire]:
    await world.start()
    await world.add("a")
    host, port = world.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    yield Wire(world, reader, writer)
    writer.close()


def is_short(world: World) -> bool:
    """The one connection of a wire has not been handed over."""
    return bool(world.scheduler.front.connections)


async def test_turns_of_one_connection_come_the_short_way(wire: Wire, world: World) -> None:
    for _ in range(3):
        status, headers, data = await wire.ask("/rose/v1/generate", GENERATE, "X-Request-Id: mine")
        assert (status, headers["x-request-id"], headers["x-rose-worker"]) == (200, "mine", "a")
        assert headers["content-type"] == "application/json"
        assert len(json.loads(data)["token_ids"]) == 6
    assert is_short(world)


async def test_both_ways_give_one_answer(wire: Wire, world: World) -> None:
    bodies: list[tuple[str, Any]] = [
        ("/rose/v1/generate", GENERATE),
        ("/v1/chat/completions", {"model": "policy", "messages": [user("x")], "max_tokens": 4}),
        ("/rose/v1/generate", {"token_ids": []}),
        ("/rose/v1/generate", b"{"),
        ("/v1/chat/completions", {"model": "another", "messages": [user("x")]}),
    ]
    volatile = ("timing", "id", "created", "rose")

    def plain(data: bytes) -> Any:
        answer = json.loads(data)
        return {key: value for key, value in answer.items() if key not in volatile}

    short = [await wire.ask(path, body) for path, body in bodies]
    assert is_short(world)
    await wire.ask("/status", b"", method="GET", role="environment")
    assert not is_short(world)
    for (path, body), (status, headers, data) in zip(bodies, short, strict=True):
        again = await wire.ask(path, body)
        assert (again[0], plain(again[2])) == (status, plain(data))
        ours = set(headers) - {"server"}
        assert ours <= set(again[1])
        assert set(again[1]) - {"server"} == ours


@pytest.mark.parametrize(
    "headers",
    [["Transfer-Encoding: chunked"], ["Expect: 100-continue"], ["Connection: close"], ["X: " + "y" * 9000]],
    ids=["chunked", "expect", "close", "long"],
)
async def test_what_is_not_plain_is_aiohttps(wire: Wire, world: World, headers: list[str]) -> None:
    data = json.dumps(GENERATE).encode()
    lines = ["POST /rose/v1/generate HTTP/1.1", "Host: x", f"Authorization: Bearer {world.tokens.agent}"]
    body = data
    if headers[0].startswith("Transfer"):
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    else:
        headers = [*headers, f"Content-Length: {len(data)}"]
    wire.writer.write("\r\n".join([*lines, *headers, "", ""]).encode() + body)
    status, _, _ = await wire.answer()
    assert status == (400 if headers[0].startswith("X") else 200)
    assert not is_short(world)


@pytest.mark.parametrize("key", ['"stream"', '"\\u0073tream"'])
async def test_a_stream_goes_to_aiohttp_with_its_connection(wire: Wire, world: World, key: str) -> None:
    body = json.dumps(GENERATE)[:-1] + f", {key}: true}}"
    status, headers, data = await wire.ask("/rose/v1/generate", body.encode())
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    assert data.count(b"data: ") >= 2
    assert not is_short(world)
    assert world.scheduler.status.outcomes["done"] == 1
    # Later requests of this connection are answered all the same.
    assert (await wire.ask("/rose/v1/generate", GENERATE))[0] == 200


async def test_requests_in_one_packet_are_answered_in_order(wire: Wire, world: World) -> None:
    counts = [3, 5, 2]
    data = b"".join(
        wire.request("/rose/v1/generate", {**GENERATE, "sampling_params": {"max_tokens": count}})
        for count in counts
    )
    data += wire.request("/status", b"", method="GET", role="environment")
    wire.writer.write(data)
    for count in counts:
        assert len(json.loads((await wire.answer())[2])["token_ids"]) == count
    status, _, body = await wire.answer()
    assert (status, json.loads(body)["turns"]["done"]) == (200, 3)
    assert not is_short(world)


async def test_a_request_may_come_byte_by_byte(wire: Wire, world: World) -> None:
    for byte in wire.request("/rose/v1/generate", GENERATE):
        wire.writer.write(bytes([byte]))
        await wire.writer.drain()
        await asyncio.sleep(0)  # each byte is a read of its own, if the kernel likes
    assert (await wire.answer())[0] == 200
    assert is_short(world)


async def test_a_body_that_does_not_come_is_refused(wire: Wire, world: World) -> None:
    world.scheduler.front.read_s = world.scheduler.guard._read_s = 0.1
    wire.writer.write(wire.request("/rose/v1/generate", GENERATE)[:-5])
    status, _, data = await wire.answer()
    assert (status, json.loads(data)["error"]["code"]) == (400, "slow_body")
    assert not is_short(world)


@pytest.mark.parametrize("length", ["1000000000000".zfill(32), "5".zfill(21), "9" * 21, "9" * 5000])
async def test_a_length_of_many_digits_is_aiohttps(wire: Wire, world: World, length: str) -> None:
    lines = ["POST /rose/v1/generate HTTP/1.1", "Host: x", f"Content-Length: {length}", "", ""]
    wire.writer.write("\r\n".join(lines).encode() + b'{"a":')
    await world.until(lambda: not is_short(world))


async def test_what_waits_for_the_rest_of_a_body_is_bounded_whatever_the_head_says(
    wire: Wire, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front._Head, "body_bytes", lambda head: 10**12)
    world.scheduler.front.read_s = 60.0
    wire.writer.write(wire.request("/rose/v1/generate", b" " * (front.HEAD_BYTES + front.BODY_BYTES)))
    await world.until(lambda: not is_short(world))


async def test_a_slow_body_is_aiohttps_long_before_its_time_is_up(
    wire: Wire, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rate, its bytes and its patience are counted there."""
    monkeypatch.setattr(front, "WHOLE_S", 0.05)
    world.scheduler.front.read_s = 60.0
    data = wire.request("/rose/v1/generate", GENERATE)
    wire.writer.write(data[:-5])
    await world.until(lambda: not is_short(world))
    wire.writer.write(data[-5:])
    assert (await wire.answer())[0] == 200


async def test_a_body_on_its_way_is_not_counted_as_closed(wire: Wire, world: World) -> None:
    """There is one connection too many, and only one of the two may be closed."""
    world.scheduler.front.read_s = 60.0
    wire.writer.write(wire.request("/rose/v1/generate", GENERATE)[:-5])
    (busy,) = world.scheduler.front.connections
    await world.until(lambda: busy._end)
    host, port = world.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    await world.until(lambda: len(world.scheduler.front.connections) == 2)
    (idle,) = world.scheduler.front.connections - {busy}
    guard = world.scheduler.guard
    guard._limits = guard._limits.model_copy(update={"max_connections": 1})
    assert guard.sweep([busy, idle]) == 1
    assert await reader.read() == b""
    writer.close()


async def test_a_client_that_goes_is_seen(wire: Wire, world: World) -> None:
    engine = world.engines["a"]
    engine.hold = asyncio.Event()
    wire.writer.write(wire.request("/rose/v1/generate", GENERATE))
    await world.until(lambda: world.scheduler.book.turns)
    wire.writer.transport.abort()
    await world.until(
        lambda: all(turn.detached_at_s is not None for turn in world.scheduler.book.turns.values())
    )
    assert world.scheduler.book.turns  # it runs on for a retry to join
    engine.hold.set()


async def test_nobody_chats_without_a_token(wire: Wire, world: World) -> None:
    for headers in ("Authorization: Bearer wrong", "Authorization: Basic x"):
        lines = ["POST /rose/v1/generate HTTP/1.1", "Host: x", headers, "Content-Length: 2", "", ""]
        wire.writer.write("\r\n".join(lines).encode() + b"{}")
        status, _, data = await wire.answer()
        assert (status, json.loads(data)["error"]["param"]) == (401, "Authorization")
    assert is_short(world)


async def test_a_stop_ends_what_runs(wire: Wire, world: World) -> None:
    world.engines["a"].hold = asyncio.Event()
    wire.writer.write(wire.request("/rose/v1/generate", GENERATE))
    await world.until(lambda: world.scheduler.book.turns)
    await world.scheduler.stop(drain_s=0)
    async with asyncio.timeout(10):
        assert b"200 OK" not in await wire.reader.read()
    assert not world.scheduler.front.connections
    world.engines["a"].hold.set()


async def test_a_stop_lets_an_answer_leave_whole(wire: Wire, world: World) -> None:
    (connection,) = world.scheduler.front.connections
    connection.transport.set_write_buffer_limits(high=0)
    wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
    release = asyncio.Event()

    async def slow(request: front.ShortRequest) -> web.StreamResponse:
        await release.wait()  # as one that has an answer parsed again
        return web.Response(body=b"x" * 16_000_000)

    path = "/rose/v1/generate"
    world.scheduler.front.routes[f"POST {path} HTTP/1.1".encode()] = path, slow
    wire.writer.write(wire.request(path, GENERATE))
    await world.until(lambda: connection.task)
    stop = asyncio.create_task(world.scheduler.stop(drain_s=30))
    await world.until(lambda: world.scheduler.dispatcher.draining)
    release.set()
    await world.until(lambda: connection._full is not None or stop.done())
    wire.reader._transport.resume_reading()  # type: ignore[attr-defined]
    status, _, data = await wire.answer()
    assert (status, len(data)) == (200, 16_000_000)
    assert await wire.reader.read() == b""
    await stop
