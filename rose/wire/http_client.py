"""How ROSE's programs ask each other over HTTP: whole answers, bounded in time and size.

No proxy, redirect or setting of the environment: a token is for the host that it is sent to.  Apart from it stand turns
(``rose.wire.pool``), weights (``rose.weights.http_store``) and production's traffic in the demo; each says why.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import httpx

from rose.errors import EngineError

KEEP_S = 4.0
"""Uvicorn, and so vLLM, closes what was quiet for 5 s."""
BROKEN = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError)
"""What a request may raise where no answer came, time limits included."""

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request, and a heartbeat is two a second


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes


def open_client(headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A client without time limits of its own: each call has one.

    Args:
        headers: Of every request, on top of what HTTP needs.
    """
    return httpx.AsyncClient(
        headers={"Accept-Encoding": "identity", **(headers or {})},
        timeout=None,
        trust_env=False,
        verify=_certificates(),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_S),
    )


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


async def ask(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    body: bytes | None = None,
    *,
    timeout_s: float,
    max_bytes: int,
    field: str,
    what: str = "",
) -> HttpAnswer:
    """One request; whatever status the answer has.

    Args:
        body: JSON.
        timeout_s: For all of it.
        field, what: Who is asked, for messages; and what for.

    Raises:
        EngineError: No whole answer in time, or one longer than ``max_bytes``.
    """
    headers = {} if body is None else {"Content-Type": "application/json"}
    try:
        async with asyncio.timeout(timeout_s):
            async with client.stream(method, url, content=body, headers=headers) as response:
                data = bytearray()
                async for piece in response.aiter_raw():  # not decoded: a small body stays small
                    data += piece
                    if len(data) > max_bytes:
                        raise EngineError(f"{what}answer is longer than {max_bytes} bytes", field=field)
                return HttpAnswer(status=response.status_code, body=bytes(data))
    except BROKEN as error:  # TimeoutError is an OSError
        raise EngineError(f"{what}no answer ({type(error).__name__})", field=field) from error
