"""HTTP/1.1 for turns: kept connections, one request at a time on each, no more than scheduler and trainer need.

A turn is two small HTTP exchanges, the agent's with the scheduler and the scheduler's with the engine, and a general client costs more
CPU for one than all of the scheduler's own work on the turn.  The parser is llhttp (``httptools``); here are only the
connections: who may use which, for how long, and what it means when one breaks.

- A request that is cancelled or runs out of time closes its connection: that is how an engine learns of it.
- A connection is kept while both sides want it, and used again within :data:`IDLE_S`, less than servers wait.
- What a peer can make us hold is bounded: heads, bodies, and the part of a stream that nobody has read.
- No redirects, cookies, compression or proxies.  ``https`` is checked against the system's certificates.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote, urlsplit

import httptools

IDLE_S = 4.0
"""Uvicorn, and so vLLM, closes what was quiet for 5 s."""
MAX_HEAD_BYTES = 128 * 1024
_PAUSE_BYTES = 1024 * 1024
"""Of a stream that nobody reads; the peer waits then."""
_SMALL_BYTES = 64 * 1024
"""Up to here copying is cheaper than a second write."""
_REST_BYTES = 4096


class PeerLost(Exception):
    """The connection was refused, broke, or carried something that is no HTTP."""


class AnswerTooLarge(Exception):
    """The answer goes beyond the bound."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """Where requests for one base URL go; ``head`` is what all of them say.

    Raises (:meth:`of`):
        ValueError: Not a URL or header that can be sent.
    """

    key: tuple[str, int, bool]
    prefix: str
    head: bytes

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str]) -> HttpTarget:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be http://host:port")
        tls = parts.scheme == "https"
        place = parts.netloc.rpartition("@")[2]
        host = place if place.isascii() else place.encode("idna").decode()
        head = encode_headers({"Host": host, **headers})
        prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~-._")
        return cls((parts.hostname, parts.port or (443 if tls else 80), tls), prefix, head)


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Raises:
    ValueError: One would end its line.
    """
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers) or "\0" in text:
        raise ValueError("a header holds a line break")
    return text.encode()


class Connection(asyncio.Protocol):
    """One connection; of a pool.  Between :meth:`ask` and its end it belongs to one request."""

    __slots__ = (
        "_framed",
        "_head_bytes",
        "_left_bytes",
        "_parser",
        "_parts",
        "_paused",
        "_pool",
        "_streamed",
        "_unread_bytes",
        "_waiter",
        "complete",
        "ended",
        "error",
        "given_back",
        "idle_since_s",
        "key",
        "left",
        "retry_after",
        "reusable",
        "status",
        "transport",
    )

    def __init__(self, pool: Pool, key: tuple[str, int, bool]) -> None:
        self._pool = pool
        self.key = key
        self.transport: asyncio.Transport
        self.idle_since_s = 0.0
        self.reusable = True
        self.error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parser: Any = None
        self.complete = True
        self.ended: Callable[[Connection], None] | None = None
        """Told, once, that the whole answer is here or that nothing more will come; then nobody waits."""
        self.given_back = False
        """Its request is over, but the end of the answer is still to come."""

    # --- for the pool and the engine client ------------------------------------------------------------

    def ask(self, head: bytes, body: bytes, max_bytes: int) -> None:
        """Send one request; ``status`` and the body are then waited for."""
        self.status = 0
        self.retry_after: str | None = None
        self.complete = self.given_back = False
        self._parts: deque[bytes] = deque()
        self._framed = self._paused = self._streamed = self.left = False
        self._head_bytes = self._unread_bytes = 0
        self._left_bytes = max_bytes
        if len(body) <= _SMALL_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    async def whole(self) -> bytes:
        """The body, when all of it is here.

        Raises:
            PeerLost, AnswerTooLarge, TimeoutError
        """
        while not self.complete:
            await self._wait()
        return self.taken()

    def taken(self) -> bytes:
        """All that has come of the body."""
        parts = self._parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def begun(self) -> int:
        """The status, when the head is here.

        Raises:
            PeerLost, TimeoutError
        """
        while not self.status:
            await self._wait()
        return self.status

    async def read(self) -> bytes:
        """What has come of the body since the last call, waiting for some; empty at its end.

        Raises:
            PeerLost, AnswerTooLarge, TimeoutError
        """
        self._streamed = True
        parts = self._parts
        while not parts:
            if self.complete:
                return b""
            await self._wait()
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._left_bytes += len(data)  # a stream is bounded by what is unread, not by its length
        self._unread_bytes = 0
        if self._paused:
            self._paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()
        return data

    def leave(self) -> None:
        """The rest of a stream does not matter, but its end makes the connection good for another request."""
        self.left = True
        self._left_bytes = _REST_BYTES

    async def _wait(self) -> None:
        if self.error is not None:
            raise self.error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self.error is not None and not self._parts:
            raise self.error

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        if self.complete:
            return
        self.reusable = False
        self.error = self.error or error
        self._wake()
        self.transport.abort()
        self._tell()

    def give_up(self) -> None:
        """The end of an answer that was left did not come."""
        if self.given_back and not self.complete:
            self.fail(PeerLost("does not end its stream"))

    def run_out(self) -> None:
        self.fail(TimeoutError())

    def _tell(self) -> None:
        ended, self.ended = self.ended, None
        if ended is not None:
            ended(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- from the event loop ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if self.complete:
            # Nobody asked: whatever it is, it must not become the answer to the next request.
            self.reusable = False
            self.transport.abort()
            return
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(PeerLost(f"sent no HTTP: {error}"))
            return
        if not self.status and self._head_bytes > MAX_HEAD_BYTES:
            self.fail(AnswerTooLarge("the head of an answer"))
        elif self.error is not None:
            self.fail(self.error)
        elif self.complete:
            self._tell()  # not from inside the parser
        elif self._streamed and self._parts:
            self._wake()
            if self._unread_bytes > _PAUSE_BYTES and not self._paused and not self.complete:
                self._paused = True
                self.transport.pause_reading()

    def eof_received(self) -> None:
        # An answer without a length ends with its connection.
        if self.status and not self._framed and not self.complete:
            self.reusable = False
            self._end()
            self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._pool.lost(self)
        self.error = self.error or PeerLost("closed the connection")
        if not self.complete:
            self._wake()
            self._tell()
        self._parser = None  # each refers to the other

    # --- from the parser -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            self.reusable = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) in (14, 17) and name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif len(name) == 11 and name.lower() == b"retry-after":
            self.retry_after = value[:64].decode("latin-1")

    def on_headers_complete(self) -> None:
        if not self.complete:
            status = self._parser.get_status_code()
            if status >= 200:
                self.status = status
                self._wake()

    def on_body(self, data: bytes) -> None:
        if self.complete or self.error is not None:
            return
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            self.error = AnswerTooLarge("an answer")
        elif not self.left:
            self._parts.append(data)
            self._unread_bytes += len(data)

    def on_message_complete(self) -> None:
        if self.status and not self.complete and self.error is None:  # else an interim answer (1xx)
            if not self._parser.should_keep_alive():
                self.reusable = False
            self._end()

    def _end(self) -> None:
        self.complete = True
        self._wake()
        if self.given_back:
            self._pool.give_back(self)


class Pool:
    """Kept connections to any number of peers; unlimited in number, as the turns on them are bounded elsewhere.

    Args:
        connect_s: Time limit for a new connection.
    """

    def __init__(self, *, connect_s: float) -> None:
        self._connect_s = connect_s
        self._free: dict[tuple[str, int, bool], deque[Connection]] = {}
        self._all: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False

    @property
    def num_connections(self) -> int:
        return len(self._all)

    def request(
        self,
        target: HttpTarget,
        method: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        max_bytes: int,
        headers: bytes = b"",
    ) -> Exchange:
        """One request, as a context: leaving it early closes the connection."""
        line = f"{method} {target.prefix}{path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
        return Exchange(
            self, target.key, b"".join((line, target.head, headers, b"\r\n")), body, timeout_s, max_bytes
        )

    def ask(
        self,
        target: HttpTarget,
        method: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        max_bytes: int,
        done: Callable[[int, bytes, Exception | None], None],
        headers: bytes = b"",
    ) -> PendingRequest | None:
        """One request over a connection that is open already, without a task that waits for it.

        Args:
            done: Called once, from the event loop, with status and whole body, or with what went wrong
                (:class:`PeerLost`, :class:`AnswerTooLarge`, ``TimeoutError``).

        Returns:
            None where no connection is free: ask by :meth:`request`.
        """
        connection = None if self._is_closed else self._take_free(target.key)
        if connection is None:
            return None
        line = f"{method} {target.prefix}{path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
        connection.ask(b"".join((line, target.head, headers, b"\r\n")), body, max_bytes)
        return PendingRequest(self, connection, timeout_s, done)

    def _take_free(self, key: tuple[str, int, bool]) -> Connection | None:
        free = self._free.get(key)
        if free:
            limit_s = asyncio.get_running_loop().time() - IDLE_S
            while free:
                connection = free.pop()
                if connection.idle_since_s > limit_s and not connection.transport.is_closing():
                    return connection
                connection.transport.abort()
        return None

    async def take(self, key: tuple[str, int, bool]) -> Connection:
        """A connection that nobody else uses.

        Raises:
            PeerLost: Refused, or this pool is closed.
            TimeoutError: It took longer than ``connect_s``.
        """
        if self._is_closed:
            raise PeerLost("its pool is closed")
        connection = self._take_free(key)
        if connection is not None:
            return connection
        host, port, tls = key
        if tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self, key), host, port, ssl=self._tls if tls else None
                )
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerLost(f"cannot be reached: {error.strerror or type(error).__name__}") from error
        self._all.add(connection)
        if self._is_closed:  # meanwhile
            connection.transport.abort()
            raise PeerLost("its pool is closed")
        return connection

    def give_back(self, connection: Connection) -> None:
        """The request is over; one whose answer is not whole is closed."""
        loop = asyncio.get_running_loop()
        if not connection.complete and connection.left and connection.reusable and not connection.given_back:
            connection.given_back = True
            loop.call_later(IDLE_S, connection.give_up)
            return
        if not connection.complete or not connection.reusable or connection.transport.is_closing():
            connection.complete = True  # whatever still comes is nobody's
            connection.transport.abort()
            return
        now_s = connection.idle_since_s = loop.time()
        free = self._free.get(connection.key)
        if free is None:
            free = self._free[connection.key] = deque()
        free.append(connection)
        while free[0].idle_since_s < now_s - IDLE_S:
            free.popleft().transport.abort()

    def lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        free = self._free.get(connection.key)
        if free is not None:
            try:
                free.remove(connection)
            except ValueError:
                pass  # in use, or taken out before it was closed
            if not free:
                del self._free[connection.key]

    def close(self) -> None:
        """For good: what runs is cut off, and nothing is begun any more."""
        self._is_closed = True
        for connection in list(self._all):
            connection.transport.abort()


class PendingRequest:
    """A request under way; see :meth:`Pool.ask`."""

    __slots__ = ("_connection", "_done", "_pool", "_timer")

    def __init__(
        self,
        pool: Pool,
        connection: Connection,
        timeout_s: float,
        done: Callable[[int, bytes, Exception | None], None],
    ) -> None:
        self._pool = pool
        self._connection = connection
        self._done = done
        connection.ended = self._ended
        self._timer = asyncio.get_running_loop().call_later(timeout_s, connection.run_out)

    def _ended(self, connection: Connection) -> None:
        self._timer.cancel()
        error = None if connection.complete else connection.error
        status, body = connection.status, b"" if error is not None else connection.taken()
        self._pool.give_back(connection)  # before anybody asks for another
        self._done(status, body, error)

    def cancel(self) -> None:
        """Nobody wants the answer: the connection is closed, and nothing is called."""
        self._timer.cancel()
        if self._connection.ended is not None:
            self._connection.ended = None
            self._pool.give_back(self._connection)


class Exchange:
    """``async with pool.request(...) as connection:``"""

    __slots__ = ("_body", "_connection", "_head", "_key", "_max_bytes", "_pool", "_timeout_s", "_timer")

    def __init__(
        self,
        pool: Pool,
        key: tuple[str, int, bool],
        head: bytes,
        body: bytes,
        timeout_s: float,
        max_bytes: int,
    ) -> None:
        self._pool = pool
        self._key = key
        self._head = head
        self._body = body
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes

    async def __aenter__(self) -> Connection:
        connection = self._connection = await self._pool.take(self._key)
        connection.ask(self._head, self._body, self._max_bytes)
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, connection.run_out)
        return connection

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        self._pool.give_back(self._connection)
