"""Send an object, or a part of it, from its file to a socket: by sendfile, also while the file still grows.

Sendfile copies in the kernel, without Python's lock, so threads of one process send on several cores.  In a trial they sent no less than
processes that share a port, which would have to share heads, counts and pulls as well.  A thread never waits for a
reader: what does not fit into the socket is sent on when there is room again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from aiohttp import hdrs, web

from rose.errors import RequestError, RoseError

_log = logging.getLogger(__name__)
OBJECT_TYPE = "application/octet-stream"
_SMALL_BYTES = 256 << 10  # not worth a thread
_TURN_BYTES = 16 << 20  # of one reader, before another's turn
_MOST_THREADS = 8


class Source:
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

    async def send(self, request: web.Request, source: Source) -> web.StreamResponse:
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
