"""HTTP/1.1 over bare asyncio protocols: a load generator and an upstream cheap enough not to be what is measured.

Only for benchmarks: keep-alive, ``Content-Length`` or chunked answers, no redirects, no TLS.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Client(asyncio.Protocol):
    """One connection, one request at a time.  ``on_data`` sees body bytes as they come."""

    num_reads = 0
    """Of all connections: whoever waits for answers sees by it that they still come."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left: int | None = None
        self._headers_done = False
        self._chunked = False
        self._status = 0
        self._done: asyncio.Future[tuple[int, bytes]] | None = None
        self._body: list[bytes] = []
        self._lost = False
        self.on_data: Callable[[bytes], None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("closed before the answer was whole"))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send raw bytes; ``(status, body)``.

        Raises:
            ConnectionError: The other side closed, now or since the last answer.
        """
        if self._lost or self._transport.is_closing():
            raise ConnectionError("closed since the last answer")  # nothing would ever come
        self._buffer, self._headers_done, self._body = b"", False, []
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        Client.num_reads += 1
        if not self._headers_done:
            self._buffer += data
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._buffer[:end].lower(), self._buffer[end + 4 :]
            self._status = int(head[9:12])
            self._headers_done = True
            self._chunked = b"transfer-encoding: chunked" in head
            at = head.find(b"content-length:")
            self._left = 0 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])
        if data:
            self._body.append(data)
            if self.on_data is not None:
                self.on_data(data)
        if self._chunked:
            tail = data if len(data) >= 5 else b"".join(self._body[-2:])
            finished = tail.endswith(b"0\r\n\r\n")
        else:
            self._left = (self._left or 0) - len(data)
            finished = self._left <= 0
        if finished and self._done is not None and not self._done.done():
            self._done.set_result((self._status, b"".join(self._body)))


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


def request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    return ("\r\n".join([*lines, f"Content-Length: {len(body)}"]) + "\r\n\r\n").encode() + body


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


class Upstream(asyncio.Protocol):
    """Prepared answers by path; a streamed generate request gets one event per ``period_s``."""

    answers: dict[str, bytes]
    chunks: list[bytes]
    period_s: float
    delay_s: float

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._buffer[:end]
            lower = head.lower()
            at = lower.find(b"content-length:")
            size = 0 if at < 0 else int(lower[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._buffer = self._buffer[end + 4 + size :]
            path = head.split(b" ", 2)[1].decode()
            if path == "/inference/v1/generate" and b'"stream":true' in body:
                self._transport.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                self._next_chunk(0, time.monotonic())
            else:
                kind = f"{path}?stream" if b'"stream":true' in body and "derender" in path else path
                reply = self.answers.get(kind, self.answers["*"])
                if path == "/inference/v1/generate" and self.delay_s:
                    asyncio.get_running_loop().call_later(self.delay_s, self._transport.write, reply)
                else:
                    self._transport.write(reply)

    def _next_chunk(self, index: int, begun_s: float) -> None:
        if self._transport.is_closing():
            return
        data = self.chunks[index]
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))
        if index + 1 == len(self.chunks):
            self._transport.write(b"0\r\n\r\n")
            return
        due_s = begun_s + (index + 1) * self.period_s
        asyncio.get_running_loop().call_at(due_s, self._next_chunk, index + 1, begun_s)
