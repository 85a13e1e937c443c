"""Speak to rollout engines: vLLM's token-in, token-out route and its render and derender routes.

Everything an engine says is checked here before it is believed; what is left is typed.  Every way an engine
can fail becomes one :class:`EngineFailure` whose ``kind`` tells the turn book what to do about it.  The
engine's token never appears in a message.

Callers: ``rose.scheduler.dispatch`` (generate, abort), ``rose.scheduler.prompts`` and the routes (render,
derender).
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import aiohttp
import msgspec

from rose.auth import bearer
from rose.errors import EngineError, RequestError
from rose.policy.staleness import parse_version
from rose.policy.turn_events import Span
from rose.scheduler.ids import MAX_TOKEN_ID

NO_HEADERS: Mapping[str, str] = {}
MAX_ANSWER_BYTES = 512 * 2**20
"""No engine answer is larger: 128k tokens with 20 alternatives each are about 200 MiB."""


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[dict[str, Any]] = []


class _Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_VersionSpan] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A piece of an engine's answer; ``finish_reason`` is set on the last one."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    entries: list[TokenLogprob]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    versions: tuple[Span, ...] = ()
    num_cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where an engine is.  ``token`` is hidden from ``repr``."""

    worker_id: str
    url: str
    token: str | None = None
    vocab_size: int | None = None

    def __repr__(self) -> str:
        return f"Endpoint({self.worker_id}, {self.url})"

    @cached_property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers if self.token is None else headers | bearer(self.token)


class EngineFailure(EngineError):
    """``kind`` as in ``AttemptFailed``; ``unreachable`` when the connection itself was refused or broke."""

    def __init__(
        self, message: str, *, kind: str, unreachable: bool = False, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.unreachable = unreachable
        self.http_status = status


class EngineClient:
    """Args:
    session: With an unlimited connector; owned by the caller.
    connect_s, attempt_s, render_s: Time limits.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        connect_s: float,
        attempt_s: float,
        render_s: float,
    ) -> None:
        self._session = session
        self._generate_timeout = aiohttp.ClientTimeout(total=attempt_s, sock_connect=connect_s)
        self._render_timeout = aiohttp.ClientTimeout(total=render_s, sock_connect=connect_s)
        self._probe_timeout = aiohttp.ClientTimeout(total=1.0)

    async def generate(
        self, engine: Endpoint, body: dict[str, Any], headers: Mapping[str, str] = NO_HEADERS
    ) -> AsyncGenerator[Output, None]:
        """Run one attempt; yields its output, the terminal piece last.

        Raises:
            EngineFailure: No terminal piece came; what was yielded before is good.
        """
        url = f"{engine.url}/inference/v1/generate"
        try:
            async with self._session.post(
                url, data=_encode(body), headers={**engine.headers, **headers}, timeout=self._generate_timeout
            ) as response:
                if response.status != 200:
                    raise await _refusal(engine, response)
                if not body.get("stream"):
                    output = _parse(engine, await _read(response))
                    if output is None or output.finish_reason is None:
                        raise EngineFailure(f"worker {engine.worker_id} sent no choice", kind="bad")
                    yield output
                    return
                last: Output | None = None
                try:
                    async for payload in _events(response):
                        if payload == b"[DONE]":
                            break
                        output = _parse(engine, payload)
                        if last is not None:
                            # The usage comes after the last token, and the connection is good for another turn.
                            if output is not None and output.num_cached_tokens is not None:
                                last = replace(last, num_cached_tokens=output.num_cached_tokens)
                        elif output is not None and output.finish_reason is not None:
                            last = output
                        elif output is not None and output.token_ids:
                            yield output
                except (aiohttp.ClientError, TimeoutError):
                    if last is None:
                        raise
                if last is not None:
                    yield last
                    return
                raise EngineFailure(
                    f"worker {engine.worker_id} ended its stream without a finish reason", kind="lost"
                )
        except TimeoutError as error:
            raise EngineFailure(f"worker {engine.worker_id} did not answer in time", kind="lost") from error
        except aiohttp.ClientError as error:
            raise EngineFailure(
                f"worker {engine.worker_id}: {type(error).__name__}", kind="lost", unreachable=True
            ) from error

    async def abort(self, engine: Endpoint, request_id: str) -> None:
        """Best effort; vLLM prefixes the ids of this route, and an unknown id is no error there."""
        try:
            async with self._session.post(
                f"{engine.url}/inference/v1/abort_requests",
                data=_encode({"request_ids": [f"generate-tokens-{request_id}"]}),
                headers=engine.headers,
                timeout=self._probe_timeout,
            ) as response:
                await response.release()
        except (aiohttp.ClientError, TimeoutError):
            pass  # it is dead, or frees the request when it sees our connection closed

    async def is_alive(self, engine: Endpoint) -> bool:
        try:
            async with self._session.get(
                f"{engine.url}/health", headers=engine.headers, timeout=self._probe_timeout
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def call(self, engine: Endpoint, path: str, body: Any) -> bytes:
        """POST to a render or derender route.

        Raises:
            RequestError: The engine refuses the request itself (4xx); its message and field are passed on.
            EngineFailure: Anything else.
        """
        try:
            async with self._session.post(
                engine.url + path,
                data=body if isinstance(body, bytes) else _encode(body),
                headers=engine.headers,
                timeout=self._render_timeout,
            ) as response:
                if response.status == 200:
                    return await _read(response)
                raise await _refusal(engine, response)
        except TimeoutError as error:
            raise EngineFailure(f"worker {engine.worker_id} did not answer in time", kind="lost") from error
        except aiohttp.ClientError as error:
            raise EngineFailure(
                f"worker {engine.worker_id}: {type(error).__name__}", kind="lost", unreachable=True
            ) from error


def refused_request(failure: EngineFailure) -> RequestError | None:
    """The 4xx that is the client's to see, or None when the fault is not theirs."""
    if failure.kind != "data":
        return None
    message = failure.message
    long = "context length" in message or "max_model_len" in message or "maximum model length" in message
    status = 404 if failure.http_status == 404 else 400
    return RequestError(
        message,
        field="messages" if long else None,
        status=status,
        code="context_length_exceeded" if long else "model_not_found" if status == 404 else "invalid_request",
    )


async def _refusal(engine: Endpoint, response: aiohttp.ClientResponse) -> EngineFailure:
    text = "refused the request"
    try:
        answer = msgspec.json.decode((await response.content.read(65536)) or b"{}")
        error = answer.get("error", answer) if isinstance(answer, dict) else {}
        if isinstance(error, dict) and isinstance(error.get("message") or error.get("detail"), str):
            text = " ".join((error.get("message") or error["detail"]).split())[:500]
    except (msgspec.DecodeError, RecursionError, aiohttp.ClientError):
        pass  # the status alone tells enough
    status = response.status
    if status in (429, 503):
        kind = "busy"
    elif status in (400, 413, 422) or (status == 404 and "model" in text):
        kind = "data"
    else:
        kind = "lost"  # 401, 403, 404 of the route, 5xx: this worker cannot serve us, another may
    message = text if kind == "data" else f"worker {engine.worker_id} answered {status}: {text}"
    return EngineFailure(message, kind=kind, status=status)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    if response.content_length is not None and response.content_length > MAX_ANSWER_BYTES:
        raise EngineFailure("an engine's answer is too large", kind="bad")
    if response.content_length is not None:
        return await response.read()
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise EngineFailure("an engine's answer is too large", kind="bad")
        parts.append(part)
    return b"".join(parts)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Data of server-sent events."""
    buffer = b""
    async for part in response.content.iter_any():
        buffer += part
        *blocks, buffer = buffer.split(b"\n\n")
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b"data:"):
                    yield line[5:].strip()
        if len(buffer) > MAX_ANSWER_BYTES:
            raise EngineFailure("an engine's event is too large", kind="bad")


def _parse(engine: Endpoint, payload: bytes) -> Output | None:
    """Decode and check one answer or chunk; None for one that says nothing."""
    try:
        answer = _decode_answer(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        text = payload[:200].decode("utf-8", "replace")
        kind = "lost" if '"error"' in text else "bad"
        raise EngineFailure(f"worker {engine.worker_id} sent nonsense: {error}", kind=kind) from error
    details = answer.usage.prompt_tokens_details if answer.usage is not None else None
    num_cached = None if details is None else details.cached_tokens
    if not answer.choices:
        if num_cached is None:
            return None
        return Output(token_ids=(), logprobs=(), entries=[], num_cached_tokens=num_cached)
    if len(answer.choices) != 1:
        raise EngineFailure(f"worker {engine.worker_id} sent {len(answer.choices)} choices", kind="bad")
    choice = answer.choices[0]
    token_ids = tuple(choice.token_ids or ())
    limit = MAX_TOKEN_ID if engine.vocab_size is None else engine.vocab_size - 1
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= limit:
        raise EngineFailure(f"worker {engine.worker_id} sent a token id out of range", kind="bad")
    entries = (choice.logprobs.content if choice.logprobs is not None else None) or []
    if len(entries) != len(token_ids):
        raise EngineFailure(
            f"worker {engine.worker_id} sent {len(entries)} log-probs for {len(token_ids)} tokens", kind="bad"
        )
    logprobs = tuple([entry.logprob for entry in entries])
    if not all(map(math.isfinite, logprobs)):
        raise EngineFailure(f"worker {engine.worker_id} sent a log-prob that is not a number", kind="bad")
    return Output(
        token_ids=token_ids,
        logprobs=logprobs,
        entries=entries,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        versions=_spans(choice.weight_versions),
        num_cached_tokens=num_cached,
    )


def _spans(versions: list[_VersionSpan] | None) -> tuple[Span, ...]:
    """The engine's version stamps; none if it carries labels that are not ours (a plain vLLM)."""
    try:
        return tuple(
            Span(version=parse_version(span.version), start=span.start, num_tokens=span.end - span.start)
            for span in versions or ()
        )
    except RequestError:
        return ()
