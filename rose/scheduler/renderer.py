"""Reach render and parse routes on whichever engine can answer, and read what they say.

Whole chat answers are parsed by our endpoint plugin (``vllm_plugin/parses.py``) where an engine has it, else by vLLM's derender
route; streams are in ``rose.scheduler.parses``.

A sidecar (``render_url``) is asked first when there is one; else dedicated workers before harvested ones.
A worker that fails is skipped for this call; the client's own mistakes (4xx) pass through.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rose.errors import EngineError
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.engine import Endpoint, EngineClient, EngineFailure, TokenLogprob, refused_request
from rose.scheduler.http import encode
from rose.scheduler.stops import cut_at_stop, visible_ids

MAX_TRIES = 4
MAX_PLAIN = 4096
T = TypeVar("T")


class Renderer:
    """Args:
    max_wait_s: How long a call waits for a worker to come up.
    sidecar: A render server without a device, or None.
    """

    def __init__(
        self, dispatcher: Dispatcher, engines: EngineClient, *, max_wait_s: float, sidecar: str | None
    ) -> None:
        self._dispatcher = dispatcher
        self._engines = engines
        self._max_wait_s = max_wait_s
        self._plain: OrderedDict[tuple[str, str | None], None] = OrderedDict()
        """Engines without our plugin: their parsing keeps nothing between calls."""
        self._closing: set[asyncio.Task[None]] = set()
        self._sidecar = None if sidecar is None else Endpoint(worker_id="render", url=sidecar.rstrip("/"))

    async def call(self, path: str, model: str | None, body: bytes) -> bytes:
        """POST ``body``.

        Raises:
            RequestError: The engine refuses the request itself.
            EngineError: Several engines failed.
            CapacityError: No engine came up in time.
        """
        return await self.somewhere(path, model, lambda engine: self._engines.call(engine, path, body))

    async def somewhere(self, what: str, model: str | None, ask: Callable[[Endpoint], Awaitable[T]]) -> T:
        """``ask`` an engine that can render and parse, another one where it fails; raises as :meth:`call`."""
        tried: set[str] = set()
        failure: EngineFailure | None = None
        for attempt in range(MAX_TRIES):
            if self._sidecar is not None and attempt == 0:
                engine = self._sidecar
            else:
                engine = await self._dispatcher.helper(model, tried, self._max_wait_s)
            try:
                return await ask(engine)
            except EngineFailure as error:
                refused = refused_request(error)
                if refused is not None:
                    raise refused from error
                failure = error
                tried.add(engine.worker_id)
        raise EngineError(f"no engine could answer {what}: {failure}")

    async def ask_plugin(self, engine: Endpoint, path: str, body: Any) -> dict[str, Any] | None:
        """POST to a route of our endpoint plugin; None where the engine has none.

        Raises:
            EngineFailure, EngineError: As :meth:`EngineClient.call`; an answer that is no object.
        """
        name = (engine.url, engine.token)  # a token is made for one start of an engine
        if name in self._plain:
            return None
        try:
            return read_object(await self._engines.call(engine, path, body))
        except EngineFailure as error:
            if error.http_status != 404:
                raise
            self._plain[name] = None
            while len(self._plain) > MAX_PLAIN:
                self._plain.popitem(last=False)
            return None

    def close_parse(self, engine: Endpoint, name: str) -> None:
        """Have a parse closed, soon; best effort: an engine forgets those that nobody feeds."""

        async def close() -> None:
            with contextlib.suppress(EngineError):
                await self._engines.call(engine, "/rose/parse/close", {"parses": [name]})

        task = asyncio.get_running_loop().create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def derender_chunk(
        self,
        engine: Endpoint,
        request: Mapping[str, Any],
        *,
        chat: bool,
        turn_id: str,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: str | int | None,
        entries: Sequence[TokenLogprob] | None,
        state: Any,
    ) -> tuple[dict[str, Any], Any]:
        """One streamed piece by vLLM's own route: ``(choice, state for the next piece)``.

        Raises:
            EngineFailure, EngineError: As :meth:`EngineClient.call`; an answer without a chunk.
        """
        choice = {
            "index": 0,
            "token_ids": token_ids,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "logprobs": None if entries is None else {"content": entries},
        }
        body = {
            "stream": True,
            "model": request.get("model"),
            "generate_chunk": {"request_id": turn_id, "choices": [choice]},
            "stream_state": state,
            "prompt_tokens": len(prompt_ids),
            # A parser settles its first state from the whole prompt; plain decoding reads a few ids.
            "prompt_token_ids": prompt_ids,
            "chat_request" if chat else "completion_request": request,
        }
        path = "/v1/chat/completions/derender" if chat else "/v1/completions/derender"
        answer = read_object(await self._engines.call(engine, path, body))
        choices = (answer.get("chunk") or {}).get("choices")
        if not isinstance(choices, list) or not all(isinstance(item, dict) for item in choices):
            raise EngineError("the derender route answered no chunk")
        return (choices[0] if choices else {"delta": {}}), answer.get("stream_state")

    async def chat_choice(
        self,
        request: Mapping[str, Any],
        *,
        min_tokens: int,
        turn_id: str,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: str,
        stop_reason: str | int | None,
        entries: Sequence[TokenLogprob] | None,
    ) -> tuple[dict[str, Any], int | None]:
        """The message that these tokens are, and how many of them are reasoning: None where the engine cannot tell.

        Args:
            min_tokens: No stop string ends the turn before.
        """
        body = {
            "source": source_of("chat", request, prompt_ids, min_tokens),
            "token_ids": token_ids,
            "logprobs": None if entries is None else {"content": entries},
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

        async def ask(engine: Endpoint) -> tuple[dict[str, Any], int | None]:
            answer = await self.ask_plugin(engine, "/rose/parse/whole", body)
            if answer is not None:
                message, count = answer.get("message"), answer.get("reasoning_tokens")
                if not isinstance(message, dict) or not isinstance(count, int | None):
                    raise EngineFailure(f"worker {engine.worker_id} sent no message", kind="bad")
                return {"message": message, "logprobs": answer.get("logprobs")}, count
            return await self._derendered(
                engine,
                request,
                min_tokens,
                turn_id,
                prompt_ids,
                token_ids,
                finish_reason,
                stop_reason,
                entries,
            ), None

        choice, count = await self.somewhere("/rose/parse/whole", request.get("model"), ask)
        return {"index": 0, **choice, "stop_reason": stop_reason}, count

    async def _derendered(
        self,
        engine: Endpoint,
        request: Mapping[str, Any],
        min_tokens: int,
        turn_id: str,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: str,
        stop_reason: str | int | None,
        entries: Sequence[TokenLogprob] | None,
    ) -> dict[str, Any]:
        """By vLLM's own route, which parses the whole text: what follows a stop string is cut afterwards."""
        keep = bool(request.get("include_stop_str_in_output"))
        shown = visible_ids(token_ids, finish_reason, stop_reason, keep=keep)
        if not shown:
            return {"message": {"role": "assistant", "content": ""}, "logprobs": None}
        body = {
            "model": request.get("model"),
            "generate_response": _generate_response(
                turn_id, prompt_ids, shown, finish_reason, stop_reason, entries
            ),
            "prompt_tokens": len(prompt_ids),
            "chat_request": request,
        }
        choice = _first_choice(await self._engines.call(engine, "/v1/chat/completions/derender", body))
        message = choice.get("message")
        if not isinstance(message, dict):
            raise EngineError("the derender route answered no message")
        if isinstance(stop_reason, str):
            # The turn ended there, so it stands in what was said last.
            for name in ("content", "reasoning"):
                if isinstance(message.get(name), str) and stop_reason in message[name]:
                    message[name] = cut_at_stop(message[name], stop_reason, min_tokens=min_tokens, keep=keep)
                    break
        return {"message": message, "logprobs": choice.get("logprobs")}

    async def derender_completion(
        self,
        request: Mapping[str, Any],
        *,
        turn_id: str,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: str,
        stop_reason: str | int | None,
        entries: Sequence[TokenLogprob] | None,
    ) -> dict[str, Any]:
        body = {
            "model": request.get("model"),
            "generate_responses": [
                _generate_response(turn_id, prompt_ids, token_ids, finish_reason, stop_reason, entries)
            ],
            "prompt_tokens": [len(prompt_ids)],
            "completion_request": request,
        }
        answer = await self.call("/v1/completions/derender", request.get("model"), encode(body))
        return _first_choice(answer)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, as log-probs of a completion would show it."""
        if not token_ids:
            return []
        entries = [TokenLogprob(token_id=token, logprob=0.0) for token in token_ids]
        choice = await self.derender_completion(
            {"prompt": [token_ids[0]], "logprobs": 0},
            turn_id="view",
            prompt_ids=[],
            token_ids=token_ids,
            finish_reason="stop",
            stop_reason=None,
            entries=entries,
        )
        texts = (choice.get("logprobs") or {}).get("tokens")
        if not isinstance(texts, list) or len(texts) != len(token_ids):
            raise EngineError("the derender route answered no token texts")
        return texts


def source_of(
    kind: str, request: Mapping[str, Any], prompt_ids: Sequence[int], min_tokens: int
) -> dict[str, Any]:
    """What our plugin parses a turn by."""
    return {"kind": kind, "request": request, "prompt_token_ids": prompt_ids, "min_tokens": min_tokens}


def _generate_response(
    turn_id: str,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    finish_reason: str,
    stop_reason: str | int | None,
    entries: Sequence[TokenLogprob] | None,
) -> dict[str, Any]:
    return {
        "request_id": turn_id,
        "prompt_token_ids": prompt_ids,
        "choices": [
            {
                "index": 0,
                "token_ids": token_ids,
                "finish_reason": finish_reason,
                "stop_reason": stop_reason,
                "logprobs": None if entries is None else {"content": entries},
            }
        ],
    }


def read_object(answer: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineError(f"the derender route answered nonsense: {error}") from error
    if not isinstance(value, dict):
        raise EngineError("the derender route answered no object")
    return value


def _first_choice(answer: bytes) -> dict[str, Any]:
    choices = read_object(answer).get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineError("the derender route answered no choice")
    return choices[0]
