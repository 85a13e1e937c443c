"""The short way in: requests for turns, without a general HTTP server in between.

A :class:`FrontConnection` reads requests for the routes that it was given when they are small, whole and plain, and runs their
handlers, behind the same checks in the same order as aiohttp would.  Everything else goes to aiohttp *with its connection*, from
the first byte of that request on: other routes, streams, bodies above :data:`BODY_BYTES`, chunked ones, ``Expect``, an
``HTTP/1.0`` client, whatever is wrong with the head.  So there is one HTTP server that says what a bad request is.

A handler that finds that it must stream raises :class:`NotHere` before it has begun anything.

Heads are read by llhttp (``httptools``), as the answers of engines are.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, ClassVar, cast

import httptools
from aiohttp import web
from multidict import CIMultiDict

from rose.wire.pool import encode_headers

log = logging.getLogger("rose.scheduler")

HEAD_BYTES = 8192
BODY_BYTES = 64 * 1024
"""Larger bodies are counted before they are read (``rose.scheduler.guard``); what a server costs is little beside them."""
WHOLE_S = 1.0
"""A body that takes longer to arrive is aiohttp's, where its rate, bytes and patience are counted."""
_DIGITS = 20
_STREAM = re.compile(rb'"stream"\s*:\s*true')
"""A guess, for which nothing need be read twice; :class:`NotHere` is the word of whoever has read it."""
_HAND_OVER = frozenset((b"transfer-encoding", b"expect", b"upgrade", b"content-encoding"))


class NotHere(Exception):
    """This request is for aiohttp; nothing was begun."""


class _Whole:
    """A body that has arrived."""

    @staticmethod
    def is_eof() -> bool:
        return True


class ShortRequest(dict[Any, Any]):
    """What handlers of these routes use of ``web.Request``; the mapping is for what they note on it."""

    __slots__ = ("_body", "content_length", "headers", "path", "protocol")

    method: ClassVar[str] = "POST"
    body_exists: ClassVar[bool] = True
    content: ClassVar[_Whole] = _Whole()

    def __init__(
        self, connection: FrontConnection, path: str, headers: CIMultiDict[str], body: bytes
    ) -> None:
        self.protocol = connection
        self.path = path
        self.headers = headers
        self.content_length = len(body)
        self._body = body

    async def read(self) -> bytes:
        return self._body

    @property
    def transport(self) -> asyncio.Transport:
        return self.protocol.transport

    @property
    def remote(self) -> str | None:
        peer = self.transport.get_extra_info("peername")
        return peer[0] if isinstance(peer, tuple) else None


class _Sent:
    """Stands for an answer that has left."""

    prepared = True


SENT = cast("web.StreamResponse", _Sent())
Run = Callable[[ShortRequest], Awaitable[web.StreamResponse]]


class Front:
    """Makes the protocol of each new connection.

    Args:
        server: aiohttp's, for everything else.
        routes: Handlers by path, checks included.
        read_s: Patience for a body; at most :data:`WHOLE_S` of it are spent here.
    """

    def __init__(self, server: web.Server, routes: Mapping[str, Run], *, read_s: float) -> None:
        self.server = server
        self.read_s = read_s
        self.routes = {f"POST {path} HTTP/1.1".encode(): (path, run) for path, run in routes.items()}
        self.connections: set[FrontConnection] = set()
        self.is_ending = False
        """Each connection ends with the answer that it waits for."""
        self._left: set[FrontConnection] = set()
        self._none_left = asyncio.Event()
        self._date = (0, b"")

    def __call__(self) -> FrontConnection:
        return FrontConnection(self)

    def date(self) -> bytes:
        now = int(time.time())
        if now != self._date[0]:
            self._date = (now, f"Date: {formatdate(now, usegmt=True)}\r\n".encode())
        return self._date[1]

    def forget(self, connection: FrontConnection) -> None:
        self.connections.discard(connection)
        self._left.discard(connection)
        if not self._left:
            self._none_left.set()

    async def drain(self, timeout_s: float) -> int:
        """Let answers leave, to the last byte, and close each connection behind its own; returns how many did not end."""
        self.is_ending = True
        self._left = set(self.connections)
        self._none_left.clear()
        for connection in list(self._left):
            connection.end()
        if self._left:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._none_left.wait()
            except TimeoutError:
                pass
        return len(self._left)

    async def close(self) -> None:
        """For good: what runs is cancelled."""
        tasks = [each.task for each in self.connections if each.task is not None]
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


class FrontConnection(asyncio.Protocol):
    """One connection, as long as it asks for nothing else."""

    __slots__ = (
        "_buffer",
        "_end",
        "_front",
        "_full",
        "_headers",
        "_is_lost",
        "_is_paused",
        "_late",
        "_route",
        "_start",
        "task",
        "transport",
    )

    def __init__(self, front: Front) -> None:
        self._front = front
        self.transport: asyncio.Transport
        self.task: asyncio.Task[None] | None = None
        self._buffer: bytes | bytearray = b""
        self._start = self._end = 0
        """Of the body of the first request in the buffer, once its head is here."""
        self._route: tuple[str, Run]
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._late: asyncio.TimerHandle | None = None
        self._full: asyncio.Future[None] | None = None
        """The peer reads too slowly: done when it has read on."""
        self._is_paused = False
        self._is_lost = False

    # --- from the event loop ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        own = transport.get_extra_info("socket")
        if own is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._front.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if not self._buffer:
            self._buffer = data  # nearly always whole
        elif isinstance(self._buffer, bytes):
            self._buffer = bytearray(self._buffer + data)
        else:
            self._buffer += data
        if self.task is None:
            self._look()
        elif len(self._buffer) > self._end + HEAD_BYTES + BODY_BYTES and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self._full = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._full is not None and not self._full.done():
            self._full.set_result(None)
        self._full = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._front.forget(self)
        self._wait_no_longer()
        if self._full is not None and not self._full.done():
            self._full.set_exception(exc or ConnectionResetError("the client has gone"))
            self._full.exception()  # whoever waits is told; nobody may
        if self.task is not None:
            self.task.cancel()  # a turn learns that nobody waits for it

    # --- one request -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Begin the first request in the buffer, once it is whole."""
        buffer = self._buffer
        if not self._end and not self._read_head(buffer):
            return
        if len(buffer) < self._end:
            if len(buffer) > HEAD_BYTES + BODY_BYTES:  # whatever was made of its head
                self._hand_over()
            elif self._late is None:
                wait_s = min(WHOLE_S, self._front.read_s)
                self._late = asyncio.get_running_loop().call_later(wait_s, self._hand_over)
            return
        self._wait_no_longer()
        path, run = self._route
        body = bytes(buffer[self._start : self._end])
        if b'"stream"' in body and _STREAM.search(body):
            self._hand_over()
            return
        request = ShortRequest(self, path, self._headers, body)
        self.task = asyncio.get_running_loop().create_task(self._serve(run, request))

    def _read_head(self, buffer: bytes | bytearray) -> bool:
        """Is the head here, and the request ours?  One that never will be is handed over."""
        line_end = buffer.find(b"\r\n")
        if line_end < 0:
            if not any((line + b"\r\n").startswith(bytes(buffer)) for line in self._front.routes):
                self._hand_over()
            return False
        route = self._front.routes.get(bytes(buffer[:line_end]))
        head_end = buffer.find(b"\r\n\r\n", line_end) + 4
        if route is None or (head_end < 4 and len(buffer) > HEAD_BYTES) or head_end > HEAD_BYTES:
            self._hand_over()
            return False
        if head_end < 4:
            return False
        head = _Head()
        try:
            httptools.HttpRequestParser(head).feed_data(bytes(buffer[:head_end]))
            length = head.body_bytes()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, NotHere, ValueError):
            self._hand_over()
            return False
        self._route, self._headers = route, head.headers
        self._start, self._end = head_end, head_end + length
        return True

    async def _serve(self, run: Run, request: ShortRequest) -> None:
        try:
            response = await run(request)
            if response is not SENT:
                answer = cast("web.Response", response)
                body = answer.body if isinstance(answer.body, bytes) else b""
                await self.send(answer.status, dict(answer.headers), body)
        except NotHere:
            self.task = None
            self._hand_over()
            return
        except ConnectionError:
            self.transport.abort()
        except (Exception, asyncio.CancelledError) as error:
            self.transport.abort()
            if isinstance(error, asyncio.CancelledError):
                raise
            log.exception("a request ended without an answer")
        self.task = None
        self._buffer = self._buffer[self._end :]
        self._start = self._end = 0
        if self._is_lost:
            return
        if self._front.is_ending:
            self.transport.close()
            return
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        if self._buffer:
            self._look()

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Hand an answer to the network; whoever asked may still lose it.

        Raises:
            ConnectionError: The client has gone.
            ValueError: A header cannot be sent.
        """
        transport = self.transport
        if self._is_lost or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        head = b"".join(
            (
                _STATUS_LINES.get(status) or _status_line(status),
                self._front.date(),
                encode_headers(headers),
                b"Content-Length: %d\r\n\r\n" % len(body),
            )
        )
        if len(body) <= BODY_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        if self._full is not None:
            await self._full

    # --- the other ways out ----------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """From here on aiohttp has this connection, from the first byte of the request that is no turn's."""
        self._wait_no_longer()
        self._front.forget(self)
        if self._is_lost or self.transport.is_closing():
            return
        transport, buffer = self.transport, self._buffer
        self._buffer = b""
        handler = self._front.server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        if self._is_paused:
            transport.resume_reading()
        if buffer:
            handler.data_received(bytes(buffer))

    def _wait_no_longer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def force_close(self) -> bool:
        """It only holds a place (``rose.scheduler.guard``).  One whose body is on its way does not, and stays: false."""
        if self._end and self.task is None:
            return False
        self.transport.close()
        return True

    def end(self) -> None:
        """Once what was asked is answered, and the answer has left."""
        if self.task is None:
            self._wait_no_longer()
            self.transport.close()

    def abort(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self.transport.abort()


class _Head:
    """What llhttp reads of one head."""

    __slots__ = ("_is_whole", "_length", "headers")

    def __init__(self) -> None:
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._length: bytes | None = None
        self._is_whole = False

    def on_headers_complete(self) -> None:
        self._is_whole = True

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name)
        if size in (6, 7, 10, 14, 16, 17):
            low = name.lower()
            if low == b"content-length":
                if self._length is not None:
                    raise NotHere
                self._length = value
            elif low in _HAND_OVER or (low == b"connection" and value.lower() != b"keep-alive"):
                raise NotHere
        self.headers.add(name.decode("latin-1"), value.strip(b" \t").decode("utf-8", "surrogateescape"))

    def body_bytes(self) -> int:
        """Raises:
        NotHere: It is not said, or too many.
        """
        digits = self._length
        if not self._is_whole or digits is None or len(digits) > _DIGITS or not digits.isdigit():
            raise NotHere
        length = int(digits)
        if not 0 < length <= BODY_BYTES:
            raise NotHere
        return length


def _status_line(status: int) -> bytes:
    try:
        words = HTTPStatus(status).phrase
    except ValueError:
        words = ""
    return f"HTTP/1.1 {status} {words}\r\n".encode()


_STATUS_LINES = {200: _status_line(200)}
