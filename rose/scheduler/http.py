"""What every route shares: bodies in, errors out, roles, request ids.

All input is hostile.  A body is bounded, and read as what :mod:`rose.wire` says that it is; errors name the field.  Every error
leaves as one line in OpenAI's shape (:mod:`rose.wire.errors`).
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web

from rose.auth import Tokens
from rose.errors import PolicyError, RequestError, RoseError, TooLarge
from rose.scheduler.front import SENT, NotHere, ShortRequest
from rose.wire.errors import anthropic_error_body, error_body, error_headers
from rose.wire.reading import Reports, read, read_struct

log = logging.getLogger("rose.scheduler")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
encode = msgspec.json.Encoder().encode

REQUEST_ID = web.RequestKey("rose_request_id", str)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}\Z")
_ANTHROPIC = re.compile(r"/v1/messages(?:/count_tokens)?\Z")
MAX_NAME_CHARS = 256
"""Of a name that a client gives."""
KEY_OF = web.RequestKey("rose_key_of", str)
"""The trajectory whose key a request came with."""
BY_KEY = "trajectory"
"""Stands among a route's roles: bearers of a trajectory's key, who may name no other trajectory."""
S = TypeVar("S", bound=msgspec.Struct)


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    data = body if isinstance(body, bytes) else encode(body)
    return web.Response(body=data, status=status, content_type="application/json", headers=headers)


async def send_json(
    request: web.Request, body: bytes, *, headers: dict[str, str] | None = None
) -> web.Response:
    """Hand all of ``body`` to the network; whoever asked may still lose it.

    Raises:
        ConnectionError: The client has gone.
    """
    if isinstance(request, ShortRequest):
        said = {"Content-Type": "application/json", **(headers or {}), "X-Request-Id": request[REQUEST_ID]}
        await cast("ShortRequest", request).protocol.send(200, said, body)
        return cast("web.Response", SENT)
    response = json_response(body, headers=headers)
    response.headers["X-Request-Id"] = request[REQUEST_ID]
    await response.prepare(request)
    await response.write_eof()
    response.body = None  # aiohttp holds an answer until its connection's next request
    return response


def needs_server(request: web.Request) -> None:
    """Its answer is no plain one, and nothing has begun: let aiohttp have it, if it has not.

    Raises:
        NotHere: It goes there, from its first byte.
    """
    if isinstance(request, ShortRequest):
        raise NotHere


def error_response(request: web.Request, error: RoseError) -> web.Response:
    """In the shape of the protocol that was asked in."""
    body = anthropic_error_body if _ANTHROPIC.search(request.path) else error_body
    return json_response(body(error), status=error.status, headers=error_headers(error))


@web.middleware
async def errors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into one error object, once; echo the request's id."""
    given = request.headers.get("X-Request-Id", "")
    request_id = given if _REQUEST_ID.match(given) else secrets.token_hex(8)
    request[REQUEST_ID] = request_id
    try:
        response = await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        reason = error.reason.lower()
        refusal = RequestError(reason, status=error.status, code=reason.replace(" ", "_"))
        response = error_response(request, refusal)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except PolicyError as error:
        log.error("request %s: refused by the books: %s", request_id, error)
        response = error_response(request, error)
    except RoseError as error:
        response = error_response(request, error)
    except (ConnectionError, NotHere):
        raise
    except Exception:
        log.exception("request %s: %s %s", request_id, request.method, request.path)
        response = error_response(request, RoseError("an internal error; the log has the details"))
    if not response.prepared:
        response.headers["X-Request-Id"] = request_id
    return response


def requires(tokens: Tokens, *roles: str) -> Callable[[Handler], Handler]:
    """Only bearers of these roles get through."""
    by_token = tuple(role for role in roles if role != BY_KEY)

    def wrap(handler: Handler) -> Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            authorization = request.headers.get("Authorization")
            if authorization is None and BY_KEY in roles and "x-api-key" in request.headers:
                authorization = f"Bearer {request.headers['x-api-key']}"  # Anthropic's clients
            name = tokens.trajectory_of(authorization) if BY_KEY in roles else None
            if name is None:
                tokens.check(authorization, *by_token)
            else:
                request[KEY_OF] = name
            return await handler(request)

        return checked

    return wrap


async def read_body(request: web.Request) -> bytes:
    """Raises:
    TooLarge: Over the limit.
    """
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise TooLarge(f"the body exceeds {request.client_max_size} bytes", field="body") from None


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RequestError: Not JSON, not UTF-8, nested too deeply, not an object.
        TooLarge: Over the limit.
    """
    value = read_struct(await read_body(request), msgspec.json.decode)
    if not isinstance(value, dict):
        raise RequestError("must be a JSON object", field="body")
    return value


async def read_report(request: web.Request, kind: type[S], reports: Reports) -> S:
    """The body as what a node reports; raises as :func:`read_wire`."""
    return reports.read(kind, await read_body(request))


async def read_wire(request: web.Request, kind: type[S]) -> S:
    """The body as what the route takes.

    Raises:
        RequestError: It is not that.
        TooLarge: Over the limit.
    """
    return read(kind, await read_body(request))


_TRACE = re.compile(r"00-(?P<trace>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-(?P<flags>[0-9a-f]{2})\Z")


def trace_context(
    traceparent: str | None, tracestate: str | None, *, is_traced: bool = False
) -> dict[str, str]:
    """W3C trace context to pass on: the caller's trace, a span of ours as the parent; empty without a valid one.

    Args:
        is_traced: Spans of ours are made of it: the caller's own.
    """
    given = None if traceparent is None else _TRACE.match(traceparent)
    if traceparent is None or given is None:
        return {}
    ours = f"00-{given['trace']}-{secrets.token_hex(8)}-{given['flags']}"
    passed = {"traceparent": traceparent if is_traced else ours}
    if tracestate and len(tracestate) <= 512 and tracestate.isprintable() and tracestate.isascii():
        passed["tracestate"] = tracestate
    return passed


def whole_number(text: str, *, field: str, least: int, most: int, unit: str = "") -> int:
    """A number in a header or a query.

    Raises:
        RequestError: It is none, or out of bounds.
    """
    # As many digits as it may have, first: Python refuses to read thousands, and makes no float of hundreds.
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not digits or not least <= int(text) <= most:
        raise RequestError(f"must be a whole number{unit} from {least} to {most}", field=field)
    return int(text)


def name_in(headers: Mapping[str, str], field: str) -> str:
    """What a client calls something in a header; empty: it does not.  Names are kept and repeated, so they are text: a byte that is
    no UTF-8 comes from the parser as half a character, which neither a journal nor an answer can hold.

    Raises:
        RequestError: Too long, or no printable text.
    """
    name = headers.get(field, "")
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise RequestError(f"must be at most {MAX_NAME_CHARS} printable characters, in UTF-8", field=field)
    return name


def check_token_ids(value: Any, *, field: str, vocab_size: int | None, most: int = 2**21) -> list[int]:
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise RequestError(f"must be a list of 1 to {most} token ids", field=field)
    if set(map(type, value)) != {int}:
        raise RequestError("must hold whole numbers only", field=field)
    limit = 2**32 if vocab_size is None else vocab_size
    if min(value) < 0 or max(value) >= limit:
        raise RequestError(f"token ids must lie in 0..{limit - 1}", field=field)
    return value


def bounded_json(value: Any, *, field: str, max_bytes: int) -> Any:
    """``value`` if its JSON is small enough to keep, and fits the journal."""
    if len(encode(value)) > max_bytes:
        raise TooLarge(f"exceeds {max_bytes} bytes of JSON", field=field)
    check_storable(value, field=field)
    return value


def check_storable(value: Any, *, field: str) -> None:
    """JSON has numbers that the journal has not."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise RequestError("holds a whole number of more than 64 bits", field=field) from None
