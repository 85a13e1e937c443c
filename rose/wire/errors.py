"""Every refusal of a daemon, in OpenAI's shape; written and read here for all of them.  Anthropic's clients get theirs.

::

    {"error": {"message": ..., "type": ..., "param": field, "code": ..., "reason"?: why it is gone}}

``message`` ends with what to do about it, in brackets, where there is something.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rose.errors import (
    CapacityError,
    Conflict,
    EngineError,
    Gone,
    NotFound,
    RequestError,
    RoseError,
    TooLarge,
    Unauthorized,
)

MAX_MESSAGE_CHARS = 1000
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
NO_RETRY = {"x-should-retry": "false"}
"""The OpenAI client retries 409 and 5xx by itself; some would only fail again."""
NOT_ACTIVE = "not_active"
"""Code of a 503: another rose-scheduler answers now, or does soon."""
_BY_STATUS: dict[int, type[RequestError]] = {
    401: Unauthorized,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: Conflict,
}


def error_body(error: RoseError, status: int | None = None) -> dict[str, Any]:
    """The body of a refusal.

    Args:
        status: Other than the error's own.
    """
    status = error.status if status is None else status
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    body = {"message": _message(error), "type": kind, "param": error.field, "code": error.code}
    if isinstance(error, Gone) and error.reason:
        body["reason"] = error.reason
    return {"error": body}


def _message(error: RoseError) -> str:
    """What is wrong, and the fix where there is one."""
    message = error.message if error.fix is None else f"{error.message} ({error.fix})"
    return " ".join(message.split())[:MAX_MESSAGE_CHARS]


def anthropic_error_body(error: RoseError) -> dict[str, Any]:
    """The body of a refusal in Anthropic's shape, with the fields of ours beside its own."""
    said = error_body(error)["error"]
    kind = _ANTHROPIC_TYPES.get(error.status)
    said["type"] = kind or ("invalid_request_error" if 400 <= error.status < 500 else "api_error")
    return {"type": "error", "error": said}


def error_headers(error: RoseError) -> dict[str, str]:
    """What tells a client whether to ask again, and when."""
    if isinstance(error, CapacityError):
        if error.retry_after_s is None:
            return dict(NO_RETRY)
        return {"Retry-After": str(max(1, min(120, round(error.retry_after_s))))}
    return dict(NO_RETRY) if error.status in (409, 410, 422) or isinstance(error, EngineError) else {}


def error_data(error: RoseError) -> dict[str, Any]:
    """An error as plain data, for an answer that is no HTTP body: of an engine's collective call."""
    return {
        "code": error.code,
        "status": error.status,
        "message": _message(error)[:500],
        "field": error.field,
    }


class Refusal(msgspec.Struct, kw_only=True):
    """What a body says; bounded, empty where it says nothing."""

    message: str = ""
    field: str | None = None
    code: str | None = None
    reason: str = ""


def read_refusal(body: bytes | bytearray | dict[str, Any] | None) -> Refusal:
    """An error's body.  Anything is read; what is not in our shape says nothing."""
    if isinstance(body, bytes | bytearray):
        try:
            body = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return Refusal()
    said = body.get("error") if isinstance(body, dict) else None
    if not isinstance(said, dict):
        return Refusal()

    def text(name: str, most: int) -> str | None:
        value = said.get(name)
        return value[:most] if isinstance(value, str) else None

    return Refusal(
        message=text("message", MAX_MESSAGE_CHARS) or "",
        field=text("param", 300),
        code=text("code", 64),
        reason=text("reason", 64) or "",
    )


def error_of(
    status: int, body: bytes | bytearray | dict[str, Any] | None, retry_after: str | None = None
) -> RoseError:
    """The error tree's name for an HTTP error of one of our daemons."""
    said = read_refusal(body)
    message, field, code = said.message or f"HTTP {status}", said.field, said.code
    if status in (429, 503, 504, 507):
        return CapacityError(
            message,
            status=status,
            code=code or "no_capacity",
            retry_after_s=None if status == 504 else seconds(retry_after),
            field=field,
        )
    if status >= 500:
        return EngineError(message, field=field)
    if status == 410:
        return Gone(message, field=field, code=code, reason=said.reason)
    return _BY_STATUS.get(status, RequestError)(message, field=field, status=status, code=code)


def seconds(text: str | None) -> float:
    """A ``Retry-After`` in seconds, 1 where there is none or it is a date."""
    try:
        return min(max(float(text or 1.0), 0.0), 120.0)
    except ValueError:
        return 1.0
