"""Bounds on what peers can hold of this process: bytes of bodies, requests per second, connections and their patience.

:meth:`Guard.middleware` stands in front of every route; :meth:`Guard.sweep` is called every second or so.

- A body is read within ``read_s`` and counted while its request lives; above ``max_intake_bytes`` in all, new bodies are
  refused with 429 before they are read.
- A peer (an address) has a bucket of ``2 * requests_per_s`` requests; an empty one answers 429 with ``Retry-After``.
- A connection that has not sent one whole request after ``read_s``, and any above ``max_connections``, is closed.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence

from aiohttp import web

from rose.errors import CapacityError, RequestError, TooLarge
from rose.scheduler.config import Limits
from rose.scheduler.http import Handler

_MAX_PEERS = 4096
_SMALL_BYTES = 64 * 1024
"""Bodies this small are not worth counting when they say their size."""


class Guard:
    """Args:
    limits: Bounds.
    read_s: Patience for a request's bytes.
    """

    def __init__(self, limits: Limits, *, read_s: float) -> None:
        self._limits = limits
        self._read_s = read_s
        self._intake_bytes = 0
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Peer -> (tokens left, when counted)."""
        self._served: set[object] = set()
        """Connections that have sent a whole request head; held until the next sweep sees them gone."""
        self._first_seen_s: dict[object, float] = {}
        self.num_refused = 0

    @property
    def intake_bytes(self) -> int:
        return self._intake_bytes

    async def serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Run ``handler`` inside the bounds.

        Raises:
            TooLarge, CapacityError, RequestError: Refused.
        """
        self._served.add(request.protocol)
        self._take_token(request)
        if not request.body_exists:
            return await handler(request)
        size = request.content_length
        if size is not None and size > self._limits.max_body_bytes:
            raise TooLarge(f"the body exceeds {self._limits.max_body_bytes} bytes", field="body")
        # A chunked body may grow to the limit.
        reserved = self._limits.max_body_bytes if size is None else size
        if reserved > _SMALL_BYTES and self._intake_bytes + reserved > self._limits.max_intake_bytes:
            self.num_refused += 1
            raise CapacityError("too many large requests at once", status=429, code="queue_full")
        self._intake_bytes += reserved
        try:
            try:
                async with asyncio.timeout(self._read_s):
                    await request.read()  # kept by aiohttp for whoever reads it again
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

    def sweep(self, connections: Sequence[web.RequestHandler], now_s: float) -> int:
        """Close connections that only hold a place; returns how many."""
        here = set(connections)
        self._served &= here
        self._first_seen_s = {key: seen_s for key, seen_s in self._first_seen_s.items() if key in here}
        closed = 0
        room = self._limits.max_connections
        for connection in connections:
            seen_s = self._first_seen_s.setdefault(connection, now_s)
            room -= 1
            if connection not in self._served and (now_s - seen_s > self._read_s or room < 0):
                connection.force_close()
                closed += 1
        return closed

    def _take_token(self, request: web.Request) -> None:
        rate = self._limits.requests_per_s
        if rate is None:
            return
        peer = request.remote or ""
        now_s = asyncio.get_running_loop().time()
        left, at_s = self._buckets.pop(peer, (2 * rate, now_s))
        left = min(2 * rate, left + (now_s - at_s) * rate)
        self._buckets[peer] = (max(0.0, left - 1), now_s)
        if len(self._buckets) > _MAX_PEERS:
            self._buckets.popitem(last=False)
        if left < 1:
            self.num_refused += 1
            raise CapacityError(
                "too many requests from this address",
                status=429,
                code="rate_limited",
                retry_after_s=math.ceil((1 - left) / rate),
            )
