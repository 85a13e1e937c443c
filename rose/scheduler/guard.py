"""Bounds on what peers can hold of this process: bytes of bodies, requests per second, connections and their patience.

:meth:`Guard.serve` stands in front of every route; :meth:`Guard.sweep` is called at every tick.

- A body is read within ``read_s`` and counted while its request lives; above ``max_intake_bytes`` in all, new bodies are
  refused with 429 before they are read.
- A peer (an address) has a bucket of ``2 * requests_per_s`` requests; an empty one answers 429 with ``Retry-After``.
  Heartbeats and probes are not counted: a busy agent must not make the workers of its host look dead.
- A connection is *quiet* from its opening, or from the end of a request, to the next whole request head.  One that
  stays quiet for ``read_s`` before its first request, or ``IDLE_S`` after one, is closed.  Above ``max_connections``
  the quiet ones go first, longest first, so that idle connections cannot keep others out.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web

from rose.errors import CapacityError, RequestError, TooLarge
from rose.scheduler.http import Handler
from rose.scheduler.scheduler_config import Limits

IDLE_S = 75.0
"""Longer than the usual clients keep an idle connection themselves."""
_MAX_PEERS = 4096
_SMALL_BYTES = 64 * 1024
"""Bodies this small are not worth counting when they say their size."""
_UNCOUNTED = ("/workers", "/healthz", "/readyz", "/metrics")


class ServerConnection(Protocol):
    """aiohttp's, or one that came the short way."""

    def force_close(self) -> bool | None:
        """False: it stays."""
        ...


class Guard:
    """Args:
    limits: Bounds.
    read_s: Patience for a request's bytes.
    on_refused: Told which bound refused a request.
    """

    def __init__(
        self, limits: Limits, *, read_s: float, on_refused: Callable[[str], None] = lambda bound: None
    ) -> None:
        self._on_refused = on_refused
        self._limits = limits
        self._read_s = read_s
        self._intake_bytes = 0
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Peer -> (tokens left, when counted)."""
        self._busy: set[object] = set()
        """Connections with a request that is being served."""
        self._quiet: dict[object, tuple[bool, float]] = {}
        """The others: (has been served before, quiet since)."""

    @property
    def intake_bytes(self) -> int:
        return self._intake_bytes

    async def serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Run ``handler`` inside the bounds.

        Raises:
            TooLarge, CapacityError, RequestError: Refused.
        """
        connection = request.protocol
        self._busy.add(connection)
        try:
            self._take_token(request)
            return await self._bounded(request, handler)
        finally:
            self._busy.discard(connection)
            self._quiet[connection] = (True, asyncio.get_running_loop().time())

    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.body_exists:
            return await handler(request)
        size = request.content_length
        if size is not None and size > self._limits.max_body_bytes:
            raise TooLarge(f"the body exceeds {self._limits.max_body_bytes} bytes", field="body")
        # A chunked body may grow to the limit.
        reserved = self._limits.max_body_bytes if size is None else size
        if reserved > _SMALL_BYTES and self._intake_bytes + reserved > self._limits.max_intake_bytes:
            self._on_refused("intake")
            raise CapacityError("too many large requests at once", status=429, code="queue_full")
        self._intake_bytes += reserved
        try:
            try:
                # Kept by aiohttp for whoever reads it again.  Small bodies come with their head; the time limit would
                # cost more than the reading.
                if request.content.is_eof():
                    await request.read()
                else:
                    async with asyncio.timeout(self._read_s):
                        await request.read()
            except TimeoutError:
                # Not 408, which clients retry at once.
                raise RequestError(
                    f"the body did not arrive within {self._read_s:g} s", field="body", code="slow_body"
                ) from None
            except web.HTTPRequestEntityTooLarge:
                raise TooLarge(
                    f"the body exceeds {self._limits.max_body_bytes} bytes", field="body"
                ) from None
            return await handler(request)
        finally:
            self._intake_bytes -= reserved

    def sweep(self, connections: Sequence[ServerConnection]) -> int:
        """Close connections that only hold a place; returns how many."""
        now_s = asyncio.get_running_loop().time()
        here = set(connections)
        self._quiet = {key: state for key, state in self._quiet.items() if key in here}
        quiet = [
            (*self._quiet.setdefault(connection, (False, now_s)), connection)
            for connection in connections
            if connection not in self._busy
        ]
        quiet.sort(key=lambda each: each[:2])
        num_closed = 0
        for served, since_s, connection in quiet:
            too_many = len(connections) - num_closed > self._limits.max_connections
            if too_many or now_s - since_s > (IDLE_S if served else self._read_s):
                num_closed += connection.force_close() is not False
        return num_closed

    def _take_token(self, request: web.Request) -> None:
        rate = self._limits.requests_per_s
        if rate is None or request.path.startswith(_UNCOUNTED):
            return
        peer = request.remote or ""
        now_s = asyncio.get_running_loop().time()
        left, at_s = self._buckets.pop(peer, (2 * rate, now_s))
        left = min(2 * rate, left + (now_s - at_s) * rate)
        self._buckets[peer] = (max(0.0, left - 1), now_s)
        if len(self._buckets) > _MAX_PEERS:
            self._buckets.popitem(last=False)
        if left < 1:
            self._on_refused("rate")
            raise CapacityError(
                "too many requests from this address",
                status=429,
                code="rate_limited",
                retry_after_s=math.ceil((1 - left) / rate),
            )
