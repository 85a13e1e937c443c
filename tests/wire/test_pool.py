"""Connections to engines: what may be used again, what a hostile or broken peer can do, what a cancel means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from rose.scheduler.engine import Endpoint, EngineClient, EngineFailure
from rose.wire import pool as pools
from rose.wire.pool import AnswerTooLarge, HttpTarget, PeerLost, Pool, encode_headers


@pytest.fixture(
    params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"], scope="module"
)
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return request.param()  # what most tests run on, and what the daemon runs on


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Peer:
    """Plays back bytes: ``script(number of the connection, request)`` -> parts; None closes, "stay" says nothing."""

    def __init__(self, script: Callable[[int, bytes], list[Any]]) -> None:
        self.script = script
        self.num_connections = 0
        self.num_closed = 0
        self.requests: list[bytes] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        number = self.num_connections
        self._writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                request = head + await reader.readexactly(size)
                self.requests.append(request)
                for part in self.script(number, request):
                    if part is None:
                        writer.close()
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)  # each part is a read of its own, if the kernel likes
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self.num_closed += 1
            writer.close()

    def close(self) -> None:
        self.server.close()
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool(connect_s=60.0)
    yield made
    made.close()


async def ask(pool: Pool, url: str, body: bytes = b"{}", **kwargs: Any) -> tuple[int, bytes]:
    kwargs = {"timeout_s": 60.0, "max_bytes": 1000, **kwargs}
    async with pool.request(HttpTarget.of(url, {}), "POST", "/x", body, **kwargs) as connection:
        data = await connection.whole()
        return connection.status, data


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([OK], True),
        ([OK[:3], OK[3:20], OK[20:]], True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], True),
        (
            [
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n",
                b"1\r\nk\r\n",
                b"0\r\n\r\n",
            ],
            True,
        ),
        ([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"], False),
        ([b"HTTP/1.1 200 OK\r\n\r\nok", None], False),
        ([OK + OK], False),
        ([b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"], False),
    ],
    ids=["whole", "pieces", "interim", "chunked", "close", "until_closed", "two_answers", "http10"],
)
async def test_an_answer_is_read_and_its_connection_used_again_only_if_it_may(
    pool: Pool, parts: list[Any], kept: bool
) -> None:
    peer = Peer(lambda number, request: parts)
    url = await peer.start()
    assert await ask(pool, url) == (200, b"ok")
    assert await ask(pool, url) == (200, b"ok")
    assert peer.num_connections == (1 if kept else 2)
    peer.close()


@pytest.mark.parametrize(
    "parts",
    [
        [None],
        [OK[:-1], None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", None],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok"],
        [b"SSH-2.0-OpenSSH_9.6\r\n"],
        [b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"],
    ],
    ids=["silent", "short_body", "short_chunk", "two_lengths", "no_http", "upgrade"],
)
async def test_a_broken_answer_is_a_lost_peer(pool: Pool, parts: list[Any]) -> None:
    peer = Peer(lambda number, request: parts)
    with pytest.raises(PeerLost):
        await ask(pool, await peer.start())
    await until(lambda: pool.num_connections == 0)
    peer.close()


@pytest.mark.parametrize(
    "parts",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"x" * 5000],
        [b"HTTP/1.1 200 OK\r\n\r\n", *([b"x" * 600] * 5)],
        [b"HTTP/1.1 200 OK\r\nX-A: ", *([b"a" * 60_000] * 5)],
        [b"HTTP/1.1 200 OK\r\n", *([b"X-A: " + b"a" * 6000 + b"\r\n"] * 50)],
    ],
    ids=["length", "no_length", "endless_header", "many_headers"],
)
async def test_an_answer_is_bounded(pool: Pool, parts: list[Any]) -> None:
    peer = Peer(lambda number, request: parts)
    with pytest.raises(AnswerTooLarge):
        await ask(pool, await peer.start())
    await until(lambda: pool.num_connections == 0)
    peer.close()


async def test_a_stream_may_be_longer_than_the_bound_when_it_is_read(pool: Pool) -> None:
    chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    peer = Peer(
        lambda number, request: [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            *([chunk] * 50),
            b"0\r\n\r\n",
        ]
    )
    target = HttpTarget.of(await peer.start(), {})
    size = 0
    async with pool.request(target, "POST", "/x", b"", timeout_s=60, max_bytes=10_000) as connection:
        assert await connection.begun() == 200
        while part := await connection.read():
            size += len(part)
            await asyncio.sleep(0)
    assert size == 50_000
    peer.close()


async def test_a_stream_that_nobody_reads_makes_its_peer_wait(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "_PAUSE_BYTES", 100_000)
    chunk = b"2710\r\n" + b"x" * 10_000 + b"\r\n"
    peer = Peer(
        lambda number, request: [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            *([chunk] * 3000),
            b"0\r\n\r\n",
        ]
    )
    target = HttpTarget.of(await peer.start(), {})
    async with pool.request(target, "POST", "/x", b"", timeout_s=100, max_bytes=2**26) as connection:
        size = len(await connection.read())
        await until(lambda: not connection.transport.is_reading())
        while part := await connection.read():
            assert len(part) < 1_000_000
            size += len(part)
    assert size == 30_000_000
    peer.close()


async def test_the_end_of_a_stream_that_was_left_frees_its_connection(pool: Pool) -> None:
    peer = Peer(
        lambda number, request: [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ndone\r\n",
            b"0\r\n\r\n",
        ]
    )
    url = await peer.start()
    for _ in range(3):
        async with pool.request(
            HttpTarget.of(url, {}), "POST", "/x", b"", timeout_s=60, max_bytes=1000
        ) as connection:
            await connection.read()
            connection.leave()
        await until(lambda connection=connection: connection.complete)
    assert peer.num_connections == 1
    peer.close()


async def test_an_end_that_does_not_come_closes_the_connection(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "IDLE_S", 0.02)
    peer = Peer(
        lambda number, request: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ndone\r\n"]
    )
    target = HttpTarget.of(await peer.start(), {})
    async with pool.request(target, "POST", "/x", b"", timeout_s=60, max_bytes=1000) as connection:
        await connection.read()
        connection.leave()
    await until(lambda: pool.num_connections == 0)
    peer.close()


async def test_bytes_that_nobody_asked_for_are_no_answer_to_the_next_request(pool: Pool) -> None:
    peer = Peer(lambda number, request: [OK, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"])
    url = await peer.start()
    assert await ask(pool, url) == (200, b"ok")
    await until(lambda: pool.num_connections == 0)
    assert await ask(pool, url) == (200, b"ok")
    peer.close()


async def test_an_old_connection_is_not_used_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "IDLE_S", 0.0)
    peer = Peer(lambda number, request: [OK])
    url = await peer.start()
    for _ in range(3):
        await ask(pool, url)
    assert peer.num_connections == 3
    await until(lambda: pool.num_connections <= 1)
    peer.close()


async def test_requests_at_once_have_connections_of_their_own(pool: Pool) -> None:
    peer = Peer(lambda number, request: [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n%2d" % number])
    url = await peer.start()
    answers = await asyncio.gather(*(ask(pool, url) for _ in range(8)))
    assert sorted(int(data) for _, data in answers) == list(range(1, 9))
    peer.close()


async def test_a_cancelled_request_closes_its_connection(pool: Pool) -> None:
    peer = Peer(lambda number, request: [])
    url = await peer.start()
    task = asyncio.create_task(ask(pool, url))
    await until(lambda: len(peer.requests) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: peer.num_closed == 1)
    peer.close()


async def test_a_request_out_of_time_closes_its_connection(pool: Pool) -> None:
    peer = Peer(lambda number, request: [])
    with pytest.raises(TimeoutError):
        await ask(pool, await peer.start(), timeout_s=0.02)
    await until(lambda: peer.num_closed == 1)
    peer.close()


async def test_nobody_listens(pool: Pool) -> None:
    peer = Peer(lambda number, request: [])
    url = await peer.start()
    peer.close()
    await peer.server.wait_closed()
    with pytest.raises(PeerLost):
        await ask(pool, url)


async def test_what_is_sent(pool: Pool) -> None:
    peer = Peer(lambda number, request: [OK])
    url = await peer.start()
    target = HttpTarget.of(url + "/base path/", {"Authorization": "Bearer t"})
    body = b"x" * 100_000
    async with pool.request(
        target, "POST", "/x", body, timeout_s=60, max_bytes=10, headers=encode_headers({"traceparent": "00"})
    ) as connection:
        await connection.whole()
    head, _, sent = peer.requests[0].partition(b"\r\n\r\n")
    assert sent == body
    assert head.split(b"\r\n") == [
        b"POST /base%20path/x HTTP/1.1",
        b"Content-Length: 100000",
        b"Host: " + url.removeprefix("http://").encode(),
        b"Authorization: Bearer t",
        b"traceparent: 00",
    ]
    peer.close()


@pytest.mark.parametrize("url", ["ftp://h:1", "http://", "http://h:99999", "http://h:x", "h:80"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - urllib's own messages among them
        HttpTarget.of(url, {})


@pytest.mark.parametrize("value", ["a\r\nX-B: c", "a\nb", "a\rb", "a\0b"])
def test_a_header_cannot_add_lines(value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        encode_headers({"X-A": value, "X-C": "d"})


async def test_an_engine_that_cannot_be_asked_is_lost_and_not_our_fault() -> None:
    client = EngineClient(connect_s=1, attempt_s=1, render_s=1)
    engine = Endpoint(worker_id="w", url="http://127.0.0.1:1", token="a\r\nb")
    with pytest.raises(EngineFailure, match="cannot be asked") as caught:
        await client.call(engine, "/x", b"{}")
    assert caught.value.kind == "lost"
    assert not await client.is_alive(engine)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - any condition, not one event
            await asyncio.sleep(0)


async def test_a_closed_pool_begins_nothing(pool: Pool) -> None:
    peer = Peer(lambda number, request: [OK])
    url = await peer.start()
    assert await ask(pool, url) == (200, b"ok")
    connecting = asyncio.create_task(ask(pool, url.replace("127.0.0.1", "localhost")))
    await asyncio.sleep(0)
    pool.close()
    for asked in (connecting, ask(pool, url)):
        with pytest.raises(PeerLost):
            await asked
    async with asyncio.timeout(60):
        while pool.num_connections:  # noqa: ASYNC110 - in this process
            await asyncio.sleep(0)
    peer.close()


# --- without a task that waits ----------------------------------------------------------------------------


class Asking:
    """:meth:`Pool.ask` over a connection that was used before; what it was told."""

    def __init__(self, pool: Pool, url: str) -> None:
        self.pool, self.target = pool, HttpTarget.of(url, {})
        self.told: asyncio.Queue[tuple[int, bytes, Exception | None]] = asyncio.Queue()

    def ask(self, timeout_s: float = 60.0, max_bytes: int = 1000) -> Any:
        return self.pool.ask(
            self.target,
            "POST",
            "/x",
            b"{}",
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            done=lambda *found: self.told.put_nowait(found),
        )


async def asking(pool: Pool, parts: list[Any]) -> tuple[Peer, Asking]:
    """A peer that answers once as it should, and then with ``parts``."""
    peer = Peer(lambda number, request: [OK] if len(peer.requests) == 1 else parts)
    url = await peer.start()
    made = Asking(pool, url)
    assert made.ask() is None  # no connection yet
    assert await ask(pool, url) == (200, b"ok")
    return peer, made


async def test_an_open_connection_answers_without_a_task(pool: Pool) -> None:
    peer, made = await asking(pool, [OK[:3], OK[3:20], OK[20:]])
    for _ in range(3):
        assert made.ask() is not None
        assert await made.told.get() == (200, b"ok", None)
    assert (peer.num_connections, len(peer.requests)) == (1, 4)
    peer.close()


async def test_whoever_is_told_may_ask_again_at_once(pool: Pool) -> None:
    peer, made = await asking(pool, [OK])
    again: list[Any] = []
    first = pool.ask(
        made.target,
        "POST",
        "/x",
        b"{}",
        timeout_s=60.0,
        max_bytes=1000,
        done=lambda *_: again.append(made.ask()),
    )
    assert first is not None
    assert await made.told.get() == (200, b"ok", None)
    assert peer.num_connections == 1
    peer.close()


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([None], PeerLost),
        ([OK[:-1], None], PeerLost),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], PeerLost),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"x" * 5000], AnswerTooLarge),
        (["stay"], TimeoutError),
    ],
    ids=["silent", "short_body", "no_http", "too_large", "late"],
)
async def test_what_goes_wrong_is_told_once(pool: Pool, parts: list[Any], error: type[Exception]) -> None:
    stays = parts == ["stay"]
    peer, made = await asking(pool, [b""] if stays else parts)
    made.ask(timeout_s=0.05 if stays else 60.0)
    _, _, found = await made.told.get()
    assert isinstance(found, error)
    await until(lambda: pool.num_connections == 0)
    assert made.told.empty()
    peer.close()


async def test_an_answer_that_ends_with_its_connection_is_whole(pool: Pool) -> None:
    peer, made = await asking(pool, [b"HTTP/1.1 200 OK\r\n\r\nok", None])
    made.ask()
    assert await made.told.get() == (200, b"ok", None)
    await until(lambda: pool.num_connections == 0)
    peer.close()


async def test_nobody_is_told_of_what_was_cancelled(pool: Pool) -> None:
    peer, made = await asking(pool, [b""])
    asked = made.ask()
    asked.cancel()
    asked.cancel()
    await until(lambda: pool.num_connections == 0)
    await until(lambda: peer.num_closed == 1)
    assert made.told.empty()
    peer.close()


async def test_a_closed_pool_tells_who_waits(pool: Pool) -> None:
    peer, made = await asking(pool, [b""])
    made.ask()
    pool.close()
    assert isinstance((await made.told.get())[2], PeerLost)
    assert made.ask() is None
    peer.close()
