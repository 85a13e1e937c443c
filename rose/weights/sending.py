"""Send an object, or a part of it, from its file to a socket: by sendfile, also while the file still grows.

Sendfile copies in the kernel, without Python's lock, so threads of one process send on several cores.  In a trial they sent no less than
processes that share a port, which would have to share heads, counts and pulls as well.  A thread never waits for a
reader: what does not fit into the socket is sent on when there is room again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from aiohttp import hdrs, web

from rose.errors import RequestError, RoseError

_log = logging.getLogger(__name__)
OBJECT_TYPE = "application/octet-stream"
_SMALL_BYTES = 256 << 10  # not worth a thread
_TURN_BYTES = 16 << 20  # of one reader, before another's turn
_MOST_THREADS = 8
_WAKE_BYTES, _WAKE_S = 1 << 20, 0.02


class Arriving:
    """An object on its way into a file, for those who read it meanwhile.  In the event loop only."""

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self.path: Path | None = None
        self.committed = False
        self._done = self._told = 0
        self._told_at_s = 0.0
        self._error: RoseError | None = None
        self._moved = asyncio.Event()

    def begun(self, nbytes: int, path: Path) -> None:
        self.nbytes, self.path = nbytes, path
        self._wake()

    def arrived(self, count: int) -> None:
        self._done += count
        now_s = time.monotonic()
        # Hundreds of readers that are woken for each piece cost more than what they are sent.
        much = self._done - self._told >= _WAKE_BYTES or now_s - self._told_at_s >= _WAKE_S
        if much or self._done == self.nbytes:
            self._told, self._told_at_s = self._done, now_s
            self._wake()

    def failed(self, error: RoseError) -> None:
        self._error = error
        self._wake()

    async def source(self) -> OpenObject:
        """To send from; raises what went wrong, or FileNotFoundError where it has just come to its end."""
        while self.nbytes is None or self.path is None:
            await self._more()
        return OpenObject(self.path.open("rb"), self.nbytes, self.beyond)

    async def beyond(self, position: int) -> int:
        """Bytes that are there, once it is more than ``position``; raises what went wrong."""
        while self._done <= position:
            await self._more()
        return self._done

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        await self._moved.wait()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


class OpenObject:
    """An open object.

    Args:
        nbytes: Of the whole object.
        beyond: Waits until more than so many bytes are there, and says how many; None: all are.
    """

    def __init__(
        self, file: BinaryIO, nbytes: int, beyond: Callable[[int], Awaitable[int]] | None = None
    ) -> None:
        self.file, self.nbytes = file, nbytes
        self._beyond = beyond

    async def beyond(self, position: int) -> int:
        """How many bytes are there, once it is more than ``position``.  Raises what keeps the others from coming."""
        return self.nbytes if self._beyond is None else await self._beyond(position)


class Sender:
    """Args:
    num_threads: That send; None: as many as there are cores, eight at most.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        count = min(_MOST_THREADS, len(os.sched_getaffinity(0))) if num_threads is None else num_threads
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="rose-send")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def send(self, request: web.Request, source: OpenObject) -> web.StreamResponse:
        """Answer a GET with the source, or the range of it that is asked for; closes the file.

        Raises:
            RequestError: 416, there is no such range.  Nothing has been sent then.
        """
        with source.file:
            start, end, is_part = _range(request, source.nbytes)
            response = web.StreamResponse(
                status=206 if is_part else 200,
                headers={hdrs.CONTENT_TYPE: OBJECT_TYPE, hdrs.ACCEPT_RANGES: "bytes"},
            )
            response.content_length = end - start
            if is_part:
                response.headers[hdrs.CONTENT_RANGE] = f"bytes {start}-{end - 1}/{source.nbytes}"
            await response.prepare(request)
            transport = request.transport
            try:
                while start < end:
                    there = min(await source.beyond(start), end)
                    if transport is None or transport.is_closing():
                        return response  # the reader went away
                    await self._send(transport, source.file, start, there)
                    start = there
                await response.write_eof()
            except (OSError, RoseError) as error:
                # A reader that is still there sees a broken connection, and goes on from here, at this relay or another.
                _log.info("%s: %s", request.path, error)
                if transport is not None:
                    transport.abort()
            return response

    async def _send(self, transport: asyncio.Transport, file: BinaryIO, start: int, end: int) -> None:
        loop = asyncio.get_running_loop()
        sock = transport.get_extra_info("socket")
        # What is still to be written goes first, and what is encrypted is not the kernel's to send.
        if (
            end - start < _SMALL_BYTES
            or sock is None
            or transport.get_write_buffer_size()
            or transport.get_extra_info("sslcontext")
        ):
            await loop.sendfile(transport, file, start, end - start)
            return
        descriptor = os.dup(sock.fileno())  # the transport may close its own under a thread
        try:
            while start < end:
                sent = await self._push(descriptor, file.fileno(), start, min(_TURN_BYTES, end - start))
                start += sent
                if transport.is_closing():
                    raise ConnectionResetError("the reader went away")
                if not sent:
                    await _writable(descriptor)
        finally:
            os.close(descriptor)

    async def _push(self, descriptor: int, file: int, start: int, nbytes: int) -> int:
        future = asyncio.get_running_loop().run_in_executor(
            self._threads, _sendfile, descriptor, file, start, nbytes
        )
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])  # no descriptor is closed under it
            raise


def _sendfile(descriptor: int, file: int, start: int, nbytes: int) -> int:
    """Bytes sent, 0 where the socket has no room.  Raises OSError, also where the file ends before."""
    try:
        sent = os.sendfile(descriptor, file, start, nbytes)
    except BlockingIOError:
        return 0
    if not sent:
        raise OSError("the file is shorter than it was")
    return sent


async def _writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(descriptor)


def _range(request: web.Request, nbytes: int) -> tuple[int, int, bool]:
    """First byte, the one after the last, and whether a part was asked for."""
    try:
        wanted = request.http_range
    except ValueError:
        raise RequestError("is not a range", field="Range", status=416) from None
    if wanted.start is None:
        return 0, nbytes, False
    start = wanted.start if wanted.start >= 0 else max(0, nbytes + wanted.start)
    end = nbytes if wanted.stop is None else min(wanted.stop, nbytes)
    if start >= end:
        raise RequestError(f"is not within {nbytes} bytes", field="Range", status=416)
    return start, end, True
