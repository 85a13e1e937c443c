"""Server-sent events for ``stream: true``.

The turn's tokens are read from its handle, parsed piece by piece (``rose.scheduler.parses``), and sent in the shapes of the client's
protocol (``rose.scheduler.protocols``).  A stream never shows that its turn moved between engines.  It begins when
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
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from rose.errors import RoseError
from rose.policy.turn_events import TurnState
from rose.scheduler.dispatch import Dispatcher, TurnHandle, no_worker, turn_error
from rose.scheduler.engine import TokenLogprob
from rose.scheduler.http import REQUEST_ID, encode
from rose.scheduler.inflight_request import Inflight
from rose.scheduler.messages import call_id
from rose.scheduler.parses import Piece, StreamParse
from rose.scheduler.protocols import ProtocolRequest, StreamForm
from rose.scheduler.recording import is_resumable
from rose.scheduler.renderer import Renderer
from rose.scheduler.stops import chat_finish
from rose.wire.errors import error_body

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

HELD = b": held\n\n"


class _Events:
    """One client's event stream; begun by the first event.

    Args:
        ping: What keeps it open, once it has begun.
    """

    def __init__(self, request: web.Request, ping: bytes = HELD) -> None:
        self._request = request
        self._ping = ping
        self.response = web.StreamResponse(headers={**HEADERS, "X-Request-Id": request[REQUEST_ID]})
        self._lock = asyncio.Lock()
        self.has_said = False
        """More than comments."""

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        async with self._lock:  # several choices write to one response
            if not self.begun:
                await self.response.prepare(self._request)
            await self.response.write(data)

    async def send_all(self, events: Iterable[bytes]) -> None:
        data = b"".join(events)
        if data:
            self.has_said = True
            await self.send(data)

    async def hold(self) -> None:
        """Nothing to say; a client that knows no event yet gets a comment."""
        await self.send(self._ping if self.has_said else HELD)

    async def event(self, value: Any) -> None:
        await self.send(b"data: " + (value if isinstance(value, bytes) else encode(value)) + b"\n\n")

    async def finish(self) -> web.StreamResponse:
        await self.response.write_eof()
        return self.response


async def stream_job(
    request: web.Request,
    inflight: Inflight,
    *,
    sent: ProtocolRequest,
    body: Mapping[str, Any],
    chat: bool,
    renderer: Renderer,
    dispatcher: Dispatcher,
    on_delivery: Callable[[TurnHandle, dict[str, Any]], None],
    keepalive_s: float,
) -> web.StreamResponse:
    """Stream a request to one client.

    Args:
        sent: What the client sent; says how.
        body: The request as an engine may see it.
        on_delivery: Told of each choice, before its last piece leaves, as which message its client has it.

    Raises:
        RoseError: Before the stream began.
    """
    assert inflight.task is not None
    form = sent.stream()
    events = _Events(request, form.ping)
    try:
        while not inflight.started.is_set():
            try:
                await asyncio.wait_for(inflight.started.wait(), keepalive_s)
            except TimeoutError:
                await events.hold()
        if inflight.task.done():
            inflight.task.result()  # raises what went wrong, such as before each turn was submitted
        first = inflight.handles[0]
        form.begin(first.turn_id, len(first.prompt_ids), int(time.time()))
        choices = [
            _Choice(
                index=index,
                inflight=inflight,
                handle=handle,
                form=form,
                body=body,
                chat=chat,
                renderer=renderer,
                dispatcher=dispatcher,
                events=events,
                keepalive_s=keepalive_s,
            )
            for index, handle in enumerate(inflight.handles)
        ]
        await _all_or_none([asyncio.ensure_future(choice.run()) for choice in choices])
        answer = msgspec.json.decode(await inflight.wait())
        last = list(form.end(answer, [choice.finish_reason(answer) for choice in choices]))
        if chat:
            for choice in choices:
                on_delivery(choice.handle, form.message(choice.index))
        await events.send_all(last)
        return await events.finish()
    except RoseError as error:
        if not events.begun:
            raise
        await events.send_all(form.failed(error))
        return await events.finish()


async def _all_or_none(choices: Sequence[asyncio.Future[None]]) -> None:
    """One that fails ends the others: whatever they wrote after its error would be read as the next answer on the connection."""
    try:
        await asyncio.gather(*choices)
    finally:
        for choice in choices:
            choice.cancel()
        await asyncio.gather(*choices, return_exceptions=True)


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
                await events.hold()
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
    except RoseError as error:
        if not events.begun:
            raise
        await events.event(error_body(error))
    await events.event(b"[DONE]")
    return await events.finish()


async def replay_tokens(request: web.Request, stored: bytes) -> web.StreamResponse:
    """A stored answer of ``/rose/v1/generate`` as a stream of one piece."""
    events = _Events(request)
    answer = msgspec.json.decode(stored)
    await events.event({name: answer[name] for name in ("token_ids", "logprobs")})
    await events.event(_without_tokens(stored))
    await events.event(b"[DONE]")
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
        form: StreamForm,
        body: Mapping[str, Any],
        chat: bool,
        renderer: Renderer,
        dispatcher: Dispatcher,
        events: _Events,
        keepalive_s: float,
    ) -> None:
        self.index = index
        self.handle = handle
        self._form = form
        self._request = inflight
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
        self._called = False
        self._num_parsed = 0

    async def run(self) -> None:
        """Send all text."""
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
        else:
            end = self._num_parsed = self._num_parsed + len(token_ids)
            logprobs = self.handle.logprobs[end - len(token_ids) : end]
            delta = {**parsed.delta, "token_ids": token_ids, "token_logprobs": logprobs}
        for call in delta.get("tool_calls", ()):
            self._called = True
            if "id" in call:
                call["id"] = call_id(self.handle.turn_id, call["index"], call["id"])
        await self._events.send_all(self._form.piece(self.index, delta, parsed.logprobs))
        if parsed.stop is not None and not done:
            self._dispatcher.stop(self.handle.turn_id, parsed.stop)

    def finish_reason(self, answer: Mapping[str, Any]) -> str:
        """A stream that has begun a call says so whatever became of it."""
        if not self._chat:
            return answer["choices"][self.index]["finish_reason"]
        reason = self.handle.done.result().reason
        return chat_finish(self._body, reason, called=self._called, streamed=True)


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


async def replay_stream(request: web.Request, stored: bytes, sent: ProtocolRequest) -> web.StreamResponse:
    """A stored answer as a stream of one piece per choice."""
    answer = msgspec.json.decode(stored)
    events, form = _Events(request), sent.stream()
    num_prompt = (answer.get("usage") or {}).get("prompt_tokens", 0)
    form.begin(answer["rose"]["ids"][0], num_prompt, answer["created"])
    for choice in answer["choices"]:
        message = choice.get("message")
        delta = choice if message is None else _said(message)
        for at, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = at
        await events.send_all(form.piece(choice["index"], delta, choice.get("logprobs")))
    await events.send_all(form.end(answer, [choice["finish_reason"] for choice in answer["choices"]]))
    return await events.finish()
