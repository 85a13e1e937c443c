"""Speak to rollout engines: vLLM's token-in, token-out route and its render and derender routes.

Everything an engine says is checked here before it is believed; what is left is typed.  Every way an engine
can fail becomes one :class:`EngineFailure` whose ``kind`` tells the turn book what to do about it.  The
engine's token never appears in a message.
"""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, cast

import msgspec

from rose.auth import bearer
from rose.errors import EngineError, RequestError
from rose.lineage import Lineage
from rose.policy.turn_events import Span
from rose.scheduler.ids import MAX_TOKEN_ID
from rose.wire.pool import (
    AnswerTooLarge,
    Exchange,
    HttpTarget,
    PeerLost,
    PendingRequest,
    Pool,
    encode_headers,
)

NO_HEADERS: Mapping[str, str] = {}
PROBE_S = 1.0
MAX_PROBE_BYTES = 65536
MAX_ANSWER_BYTES = 512 * 2**20
"""No engine answer is larger: 128k tokens with 20 alternatives each are about 200 MiB."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Of tokens.  JSON has numbers that neither the books nor their logs can hold."""
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[dict[str, Any]] = []


class _Entries(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: _Count
    end: _Count


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: _TokenId | str | None = None
    weight_versions: list[_VersionSpan] | None = None
    routed_experts: str | None = None


class _PlainChoice(_Choice):
    logprobs: _Logprobs | None = None


class _DetailedChoice(_Choice):
    """Details of log-probs are wanted by few turns, and cost as much as all the rest."""

    logprobs: _Entries | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Context(msgspec.Struct):
    kv_mixed: bool | None = None


class _KvParams(msgspec.Struct):
    rose: _Context | None = None
    """Set by our plug-in in answers that come at once; a stream has no such field."""


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    kv_transfer_params: _KvParams | None = None


class _PlainAnswer(_Answer, kw_only=True):
    choices: list[_PlainChoice]


class _DetailedAnswer(_Answer, kw_only=True):
    choices: list[_DetailedChoice]


_decode_plain = msgspec.json.Decoder(_PlainAnswer).decode
_decode_detailed = msgspec.json.Decoder(_DetailedAnswer).decode
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
    run: str | None = None
    """Whose weights sampled it, by the engine's own stamps; None: it stamps none of ours."""
    num_cached_tokens: int | None = None
    kv_mixed: bool | None = None
    routed_experts: bytes | None = None
    """Of the whole request, as the engine packs them (``.npy``); with the last piece, where it returns them."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where an engine is.  ``token`` is hidden from ``repr``."""

    worker_id: str
    url: str
    token: str | None = None
    vocab_size: int | None = None
    logprobs_mode: str | None = None
    """vLLM's ``--logprobs-mode``; None: it did not say."""
    host: str = ""
    """Its node's, by the node's own word; "": it did not say."""

    def __repr__(self) -> str:
        return f"Endpoint({self.worker_id}, {self.url})"

    @cached_property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers if self.token is None else headers | bearer(self.token)

    @cached_property
    def target(self) -> HttpTarget:
        """Raises:
        ValueError: The URL or the token cannot be sent.
        """
        return HttpTarget.of(self.url, self.headers)


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
    connect_s, attempt_s, render_s: Time limits.
    """

    def __init__(self, *, connect_s: float, attempt_s: float, render_s: float) -> None:
        self._pool = Pool(connect_s=connect_s)
        self._attempt_s = attempt_s
        self._render_s = render_s

    def close(self) -> None:
        self._pool.close()

    async def generate(
        self,
        engine: Endpoint,
        body: dict[str, Any],
        headers: Mapping[str, str] = NO_HEADERS,
        *,
        entries: bool = False,
    ) -> Output:
        """Run one attempt whose answer comes at once; ``entries`` keeps the log-probs' details.

        Raises:
            EngineFailure: No terminal piece came.
        """
        with _failures(engine):
            async with self._generation(engine, body, headers) as connection:
                data = await connection.whole()
        return _whole(engine, connection.status, data, entries)

    def ask(
        self,
        engine: Endpoint,
        body: dict[str, Any],
        headers: Mapping[str, str] = NO_HEADERS,
        *,
        done: Callable[[Output | EngineFailure], None],
        entries: bool = False,
    ) -> PendingRequest | None:
        """The same over a connection that is open already, without a task that waits: ``done`` is called once, from the event loop.

        Returns:
            None where no connection is free, or the engine cannot be asked: :meth:`generate` says why.
        """

        def ended(status: int, data: bytes, error: Exception | None) -> None:
            try:
                with _failures(engine):
                    if error is not None:
                        raise error
                found: Output | EngineFailure = _whole(engine, status, data, entries)
            except EngineFailure as failure:
                found = failure
            done(found)

        try:
            target, more = engine.target, encode_headers(headers) if headers else b""
        except ValueError:
            return None
        return self._pool.ask(
            target,
            "POST",
            "/inference/v1/generate",
            _encode(body),
            timeout_s=self._attempt_s,
            max_bytes=MAX_ANSWER_BYTES,
            done=ended,
            headers=more,
        )

    async def stream(
        self,
        engine: Endpoint,
        body: dict[str, Any],
        headers: Mapping[str, str] = NO_HEADERS,
        *,
        entries: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """Run one attempt; yields its output as it comes, the terminal piece last.

        Raises:
            EngineFailure: No terminal piece came; what was yielded before is good.
        """
        with _failures(engine):
            async with self._generation(engine, body, headers) as connection:
                if await connection.begun() != 200:
                    raise _refusal(engine, connection.status, await connection.whole())
                last: Output | None = None
                buffer = b""
                try:
                    while part := await connection.read():
                        payloads, buffer = _events(buffer + part if buffer else part)
                        for payload in payloads:
                            if payload == b"[DONE]":
                                connection.leave()
                                break
                            output = _parse(engine, payload, entries)
                            if last is not None:
                                # The usage comes after the last token.
                                if output is not None and output.num_cached_tokens is not None:
                                    last = replace(last, num_cached_tokens=output.num_cached_tokens)
                            elif output is not None and output.finish_reason is not None:
                                last = output
                            elif output is not None and output.token_ids:
                                yield output
                        if connection.left:
                            break
                except (PeerLost, AnswerTooLarge, TimeoutError):
                    if last is None:
                        raise
                if last is not None:
                    yield last
                    return
                raise EngineFailure(
                    f"worker {engine.worker_id} ended its stream without a finish reason", kind="lost"
                )

    def _generation(self, engine: Endpoint, body: dict[str, Any], headers: Mapping[str, str]) -> Exchange:
        return self._pool.request(
            engine.target,
            "POST",
            "/inference/v1/generate",
            _encode(body),
            timeout_s=self._attempt_s,
            max_bytes=MAX_ANSWER_BYTES,
            headers=encode_headers(headers) if headers else b"",
        )

    async def abort(self, engine: Endpoint, request_id: str) -> None:
        """Best effort; vLLM prefixes the ids of this route, and an unknown id is no error there."""
        body = _encode({"request_ids": [f"generate-tokens-{request_id}"]})
        # Without an answer it is dead, or frees the request when it sees our connection closed.
        await self._status(engine, "POST", "/inference/v1/abort_requests", body)

    async def is_alive(self, engine: Endpoint) -> bool:
        return await self._status(engine, "GET", "/health", b"") == 200

    async def _status(self, engine: Endpoint, method: str, path: str, body: bytes) -> int | None:
        """None without an answer in a second."""
        try:
            async with self._pool.request(
                engine.target, method, path, body, timeout_s=PROBE_S, max_bytes=MAX_PROBE_BYTES
            ) as connection:
                await connection.whole()
                return connection.status
        except (PeerLost, AnswerTooLarge, TimeoutError, ValueError):
            return None

    async def call(self, engine: Endpoint, path: str, body: Any) -> bytes:
        """POST to a render or derender route.

        Raises:
            RequestError: The engine refuses the request itself (4xx); its message and field are passed on.
            EngineFailure: Anything else.
        """
        with _failures(engine):
            async with self._pool.request(
                engine.target,
                "POST",
                path,
                body if isinstance(body, bytes) else _encode(body),
                timeout_s=self._render_s,
                max_bytes=MAX_ANSWER_BYTES,
            ) as connection:
                data = await connection.whole()
                if connection.status == 200:
                    return data
                raise _refusal(engine, connection.status, data)


class _failures:
    """Everything a connection can do to us, as one failure; cheaper than a generator's context."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Endpoint) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        worker = f"worker {self._engine.worker_id}"
        if isinstance(error, TimeoutError):
            raise EngineFailure(f"{worker} did not answer in time", kind="lost") from error
        if isinstance(error, PeerLost):
            raise EngineFailure(f"{worker} {error}", kind="lost", unreachable=True) from error
        if isinstance(error, AnswerTooLarge):
            raise EngineFailure(f"{worker} sent too much: {error}", kind="bad") from error
        if isinstance(error, ValueError):
            raise EngineFailure(f"{worker} cannot be asked: {error}", kind="lost") from error


_NO_ROOM = "max_tokens must be at least 1, got 0"
"""vLLM 0.32 of a prompt of exactly the context length: it has cut our limit, at least 1, down to the room that is left."""
_TOO_LONG = ("context length", "max_model_len", "maximum model length", _NO_ROOM)


def is_too_long(message: str) -> bool:
    """Whether an engine refuses a prompt for its length: it says so in words only."""
    return any(words in message for words in _TOO_LONG)


def refused_request(failure: EngineFailure) -> RequestError | None:
    """The 4xx that is the client's to see, or None when the fault is not theirs."""
    if failure.kind != "data":
        return None
    message, long = failure.message, is_too_long(failure.message)
    if message.startswith(_NO_ROOM):
        message = (
            f"the prompt fills the context length, which leaves no room for a token of output ({message})"
        )
    status = 404 if failure.http_status == 404 else 400
    return RequestError(
        message,
        field="messages" if long else None,
        status=status,
        code="context_length_exceeded" if long else "model_not_found" if status == 404 else "invalid_request",
    )


def _refusal(engine: Endpoint, status: int, data: bytes) -> EngineFailure:
    text = "refused the request"
    try:
        answer = msgspec.json.decode(data[:65536] or b"{}")
        error = answer.get("error", answer) if isinstance(answer, dict) else {}
        if isinstance(error, dict) and isinstance(error.get("message") or error.get("detail"), str):
            text = " ".join((error.get("message") or error["detail"]).split())[:500]
    except (msgspec.DecodeError, RecursionError):
        pass  # the status alone tells enough
    if status in (429, 503):
        kind = "busy"
    elif status in (400, 413, 422) or (status == 404 and "model" in text):
        kind = "data"
    else:
        kind = "lost"  # 401, 403, 404 of the route, 5xx: this worker cannot serve us, another may
    message = text if kind == "data" else f"worker {engine.worker_id} answered {status}: {text}"
    return EngineFailure(message, kind=kind, status=status)


def _events(buffer: bytes) -> tuple[list[bytes], bytes]:
    """Data of the whole server-sent events in ``buffer``, and what follows the last of them.

    Raises:
        AnswerTooLarge: An event without end.
    """
    *blocks, rest = buffer.split(b"\n\n")
    if len(rest) > MAX_ANSWER_BYTES:
        raise AnswerTooLarge("an event")
    found = [line[5:].strip() for block in blocks for line in block.split(b"\n") if line.startswith(b"data:")]
    return found, rest


def _parse(engine: Endpoint, payload: bytes, want_entries: bool) -> Output | None:
    """Decode and check one answer or chunk; None for one that says nothing."""
    entries: Sequence[TokenLogprob | _Logprob] = ()
    try:
        answer = _decode_detailed(payload) if want_entries else _decode_plain(payload)
        num_cached = None
        if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
            num_cached = answer.usage.prompt_tokens_details.cached_tokens
        if not answer.choices:
            if num_cached is None:
                return None
            return Output(token_ids=(), logprobs=(), entries=[], num_cached_tokens=num_cached)
        if len(answer.choices) != 1:
            raise EngineFailure(f"worker {engine.worker_id} sent {len(answer.choices)} choices", kind="bad")
        choice = answer.choices[0]
        if choice.logprobs is not None:
            entries = choice.logprobs.content or ()
    except (msgspec.DecodeError, RecursionError) as error:
        text = payload[:200].decode("utf-8", "replace")
        kind = "lost" if '"error"' in text else "bad"
        raise EngineFailure(f"worker {engine.worker_id} sent nonsense: {error}", kind=kind) from error
    context = None if answer.kv_transfer_params is None else answer.kv_transfer_params.rose
    token_ids = tuple(choice.token_ids or ())
    limit = MAX_TOKEN_ID if engine.vocab_size is None else engine.vocab_size - 1
    if token_ids and (min(token_ids) < 0 or max(token_ids) > limit):
        raise EngineFailure(f"worker {engine.worker_id} sent a token id out of range", kind="bad")
    if len(entries) != len(token_ids):
        raise EngineFailure(
            f"worker {engine.worker_id} sent {len(entries)} log-probs for {len(token_ids)} tokens", kind="bad"
        )
    logprobs = tuple([entry.logprob for entry in entries])
    versions, run = _stamps(engine, choice.weight_versions) if choice.weight_versions else ((), None)
    # One that is not finite makes the sum so; the other way round it is worth a look.
    if not math.isfinite(sum(logprobs)) and not all(map(math.isfinite, logprobs)):
        raise EngineFailure(f"worker {engine.worker_id} sent a log-prob that is not a number", kind="bad")
    return Output(
        token_ids=token_ids,
        logprobs=logprobs,
        entries=cast("list[TokenLogprob]", entries) if want_entries else [],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        versions=versions,
        run=run,
        num_cached_tokens=num_cached,
        kv_mixed=None if context is None else context.kv_mixed,
        routed_experts=_unpacked(engine, choice.routed_experts) if choice.routed_experts else None,
    )


def _whole(engine: Endpoint, status: int, data: bytes, entries: bool) -> Output:
    """An answer that came at once.

    Raises:
        EngineFailure: It is a refusal, or none.
    """
    if status != 200:
        raise _refusal(engine, status, data)
    output = _parse(engine, data, entries)
    if output is None or output.finish_reason is None:
        raise EngineFailure(f"worker {engine.worker_id} sent no choice", kind="bad")
    return output


def _unpacked(engine: Endpoint, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise EngineFailure(f"worker {engine.worker_id} sent no base64", kind="bad") from error


def _stamps(engine: Endpoint, versions: list[_VersionSpan]) -> tuple[tuple[Span, ...], str | None]:
    """The engine's version stamps, and whose weights they name; none if its labels are not ours (a plain vLLM).

    Raises:
        EngineFailure: They name several runs.
    """
    try:
        stamps = [(_lineage(span.version), span) for span in versions]
    except RequestError:
        return (), None
    runs = {lineage.run for lineage, _ in stamps}
    if len(runs) > 1:
        raise EngineFailure(
            f"worker {engine.worker_id} sampled one answer from runs {', '.join(sorted(runs))}", kind="run"
        )
    return tuple(
        [
            Span(version=lineage.version.pair, start=span.start, num_tokens=span.end - span.start)
            for lineage, span in stamps
        ]
    ), runs.pop()


_lineage = lru_cache(maxsize=256)(Lineage.parse)
