"""Server-sent events for ``stream: true``.

The turn's tokens are read from its handle, parsed piece by piece (``rose.scheduler.parses``), and sent in OpenAI's chunk
shapes.  A stream never shows that its turn moved between engines.  It begins when
there is something to say, so an error before that is a plain HTTP error; afterwards it is an event.  While
a turn is held, a comment keeps the connection alive.

- A turn that cannot be continued elsewhere (seed, penalties, grammar) is buffered until it is done: what was shown
  could not be taken back.
- The last chunk leaves after the turn is in the journal, and carries the ``rose`` object.
- A client that comes back gets the stream from its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from rose.errors import RoseError
from rose.policy.turn_events import TurnState
from rose.scheduler.dispatch import Dispatcher, TurnHandle, no_worker, turn_error
from rose.scheduler.engine import TokenLogprob
from rose.scheduler.http import REQUEST_ID, encode
from rose.scheduler.inflight import Inflight, is_resumable
from rose.scheduler.messages import Deltas, call_id
from rose.scheduler.parses import Piece, StreamParse
from rose.scheduler.renderer import Renderer
from rose.scheduler.stops import chat_finish
from rose.wire.errors import error_body

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

Send = Callable[[dict[str, Any]], Awaitable[None]]


class _Events:
    """One client's event stream; begun by the first event."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers={**HEADERS, "X-Request-Id": request[REQUEST_ID]})
        self._lock = asyncio.Lock()

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        async with self._lock:  # several choices write to one response
            if not self.begun:
                await self.response.prepare(self._request)
            await self.response.write(data)

    async def event(self, value: Any) -> None:
        await self.send(b"data: " + (value if isinstance(value, bytes) else encode(value)) + b"\n\n")

    async def finish(self) -> web.StreamResponse:
        await self.event(b"[DONE]")
        await self.response.write_eof()
        return self.response


async def stream_job(
    request: web.Request,
    inflight: Inflight,
    *,
    body: Mapping[str, Any],
    include_usage: bool,
    chat: bool,
    renderer: Renderer,
    dispatcher: Dispatcher,
    on_delivery: Callable[[TurnHandle, dict[str, Any]], None],
    keepalive_s: float,
) -> web.StreamResponse:
    """Stream a request's answer to one client.

    Args:
        on_delivery: Told of each choice, before its last piece leaves, as which message its client has it.

    Raises:
        RoseError: Before the stream began.
    """
    assert inflight.task is not None
    events = _Events(request)
    try:
        while not inflight.started.is_set():
            try:
                await asyncio.wait_for(inflight.started.wait(), keepalive_s)
            except TimeoutError:
                await events.send(b": held\n\n")
        if not inflight.handles:
            inflight.task.result()  # raises what went wrong before the first turn
        created = int(time.time())
        prefix = "chatcmpl" if chat else "cmpl"
        base = {
            "id": f"{prefix}-{inflight.handles[0].turn_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": body.get("model"),
        }
        choices = [
            _Choice(
                index=index,
                inflight=inflight,
                handle=handle,
                base=base,
                body=body,
                chat=chat,
                renderer=renderer,
                dispatcher=dispatcher,
                events=events,
                keepalive_s=keepalive_s,
            )
            for index, handle in enumerate(inflight.handles)
        ]
        await asyncio.gather(*(choice.run() for choice in choices))
        answer = msgspec.json.decode(await inflight.wait())
        for choice in choices:
            if chat:
                on_delivery(choice.handle, choice.said.message())
        for choice in choices:
            finish_reason = answer["choices"][choice.index].get("finish_reason")
            await choice.send_last(finish_reason, answer["rose"])
        if include_usage:
            await events.event({**base, "choices": [], "usage": answer["usage"], "rose": answer["rose"]})
        return await events.finish()
    except RoseError as error:
        if not events.begun:
            raise
        await events.event(error_body(error))
        return await events.finish()


async def _progress(
    inflight: Inflight, handle: TurnHandle, events: _Events, keepalive_s: float
) -> AsyncGenerator[bool, None]:
    """Yields when there may be something new to show: whether the turn is done, which is the last time.

    Raises:
        RoseError: The turn failed, or waits for a worker too long.
    """
    changed = asyncio.Event()
    handle.watchers.append(changed)
    live = is_resumable(handle.sampling_params, streamed=True)
    try:
        while True:
            changed.clear()
            done = handle.done.done()
            if inflight.is_waiting_too_long and not done:
                raise no_worker(handle)
            if done and handle.done.result().outcome is not TurnState.DONE:
                raise turn_error(handle.done.result())
            if done or live:
                yield done
            if done:
                return
            try:
                await asyncio.wait_for(changed.wait(), keepalive_s)
            except TimeoutError:
                await events.send(b": held\n\n")
    finally:
        handle.watchers.remove(changed)


async def stream_tokens(
    request: web.Request, inflight: Inflight, *, keepalive_s: float
) -> web.StreamResponse:
    """``/rose/v1/generate`` as a stream: ``{token_ids, logprobs}`` as they come, then the whole answer without them.

    Raises:
        RoseError: Before the stream began.
    """
    assert inflight.task is not None
    events = _Events(request)
    try:
        await inflight.started.wait()
        if not inflight.handles:
            inflight.task.result()  # raises what went wrong before the turn
        handle = inflight.handles[0]
        sent = 0
        async with contextlib.aclosing(_progress(inflight, handle, events, keepalive_s)) as steps:
            async for _ in steps:
                if sent < len(handle.tokens):
                    piece = {"token_ids": handle.tokens[sent:], "logprobs": handle.logprobs[sent:]}
                    sent = len(handle.tokens)
                    await events.event(piece)
        await events.event(_without_tokens(await inflight.wait()))
        return await events.finish()
    except RoseError as error:
        if not events.begun:
            raise
        await events.event(error_body(error))
        return await events.finish()


async def replay_tokens(request: web.Request, stored: bytes) -> web.StreamResponse:
    """A stored answer of ``/rose/v1/generate`` as a stream of one piece."""
    events = _Events(request)
    answer = msgspec.json.decode(stored)
    await events.event({name: answer[name] for name in ("token_ids", "logprobs")})
    await events.event(_without_tokens(stored))
    return await events.finish()


def _without_tokens(answer: bytes) -> dict[str, Any]:
    return {k: v for k, v in msgspec.json.decode(answer).items() if k not in ("token_ids", "logprobs")}


class _Choice:
    """One choice of a stream."""

    def __init__(
        self,
        *,
        index: int,
        inflight: Inflight,
        handle: TurnHandle,
        base: Mapping[str, Any],
        body: Mapping[str, Any],
        chat: bool,
        renderer: Renderer,
        dispatcher: Dispatcher,
        events: _Events,
        keepalive_s: float,
    ) -> None:
        self.index = index
        self.handle = handle
        self.said = Deltas()
        self._request = inflight
        self._base = base
        self._body = body
        self._chat = chat
        self._dispatcher = dispatcher
        self._events = events
        self._keepalive_s = keepalive_s
        self._parse = StreamParse(
            renderer,
            body,
            chat=chat,
            turn_id=handle.turn_id,
            prompt_ids=handle.prompt_ids,
            min_tokens=handle.sampling_params.get("min_tokens") or 0,
        )
        self._role_sent = False
        self._called = False

    async def run(self) -> None:
        """Send all text; the finish is left to :meth:`send_last`."""
        handle = self.handle
        want_entries = wants_logprobs(self._body)
        sent = 0
        progress = _progress(self._request, handle, self._events, self._keepalive_s)
        try:
            async with contextlib.aclosing(progress) as steps:
                async for done in steps:
                    # Whatever piled up while the last piece was parsed goes out as one.
                    token_ids = handle.tokens[sent:]
                    entries = handle.entries[sent : sent + len(token_ids)] if want_entries else None
                    sent += len(token_ids)
                    if token_ids or (done and sent):
                        await self._piece(token_ids, entries, done=done)
        finally:
            self._parse.close()

    async def _piece(self, token_ids: list[int], entries: list[TokenLogprob] | None, *, done: bool) -> None:
        ended = self.handle.done.result() if done else None
        parsed = await self._parse.feed(
            Piece(
                token_ids=token_ids,
                entries=entries,
                finish_reason=None if ended is None else ended.reason,
                stop_reason=None if ended is None else ended.stop_reason,
            )
        )
        if self._chat:
            delta = _said(parsed.delta)
            self._called = self._called or "tool_calls" in delta
            if not self._role_sent:
                delta = {"role": "assistant", "content": "", **delta}
                self._role_sent = True
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    call["id"] = call_id(self.handle.turn_id, call["index"], call["id"])
            self.said.add(delta)
            out: dict[str, Any] = {"delta": delta}
            empty = not delta
        else:
            out = {"text": parsed.delta.get("text") or ""}
            empty = not out["text"]
        if not empty or parsed.logprobs:
            await self._chunk({**out, "logprobs": parsed.logprobs, "finish_reason": None})
        if parsed.stop is not None and not done:
            self._dispatcher.stop(self.handle.turn_id, parsed.stop)

    async def send_last(self, finish_reason: str, rose: Any) -> None:
        """Args:
        finish_reason: Of the whole answer; a stream that has begun a call says so whatever became of it.
        """
        last: dict[str, Any] = {"text": ""}
        if self._chat:
            last = {"delta": {} if self._role_sent else {"role": "assistant", "content": ""}}
            reason = self.handle.done.result().reason
            finish_reason = chat_finish(self._body, reason, called=self._called, streamed=True)
        await self._chunk({**last, "logprobs": None, "finish_reason": finish_reason}, rose=rose)

    async def _chunk(self, choice: dict[str, Any], rose: Any = None) -> None:
        value = {**self._base, "choices": [{"index": self.index, **choice}]}
        if rose is not None:
            value["rose"] = rose
        await self._events.event(value)


def _said(delta: Mapping[str, Any]) -> dict[str, Any]:
    """``delta`` without what it does not say: a null in a piece of a call would overwrite what an earlier piece said."""
    said = {field: value for field, value in delta.items() if value not in (None, "", [])}
    if "tool_calls" in said:
        said["tool_calls"] = [_without_nulls(call) for call in said["tool_calls"]]
    return said


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        field: _without_nulls(part) if isinstance(part, dict) else part
        for field, part in value.items()
        if part is not None
    }


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """A flag on chat, a count on completions, where 0 asks for the sampled token's own."""
    return body.get("logprobs") is not None and body["logprobs"] is not False


async def replay_stream(request: web.Request, stored: bytes, *, chat: bool) -> web.StreamResponse:
    """A stored answer as a stream of one chunk per choice."""
    answer = msgspec.json.decode(stored)
    events = _Events(request)
    base = {key: answer[key] for key in ("id", "created", "model")}
    base["object"] = "chat.completion.chunk" if chat else "text_completion"
    for choice in answer["choices"]:
        payload: dict[str, Any]
        if chat:
            delta = {k: v for k, v in choice["message"].items() if v not in (None, [])}
            for at, call in enumerate(delta.get("tool_calls", [])):
                call["index"] = at
            payload = {"delta": delta}
        else:
            payload = {"text": choice.get("text", "")}
        payload |= {"index": choice["index"], "finish_reason": choice.get("finish_reason")}
        await events.event({**base, "choices": [payload], "rose": answer.get("rose")})
    return await events.finish()
