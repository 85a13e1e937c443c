"""Reach vLLM's render and derender routes on whichever engine can answer, and read what they say.

A sidecar (``render_url``) is asked first when there is one; else dedicated workers before harvested ones.
A worker that fails is skipped for this call; the client's own mistakes (4xx) pass through.

Callers: ``rose.scheduler.prompts`` (render), ``rose.scheduler.openai_api`` and ``rose.scheduler.streams``
(derender).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rose.errors import EngineError
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.engine import Endpoint, EngineClient, EngineFailure, TokenLogprob, refused_request
from rose.scheduler.http import encode

MAX_TRIES = 4


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
        self._sidecar = None if sidecar is None else Endpoint(worker_id="render", url=sidecar.rstrip("/"))

    async def call(self, path: str, model: str | None, body: bytes) -> bytes:
        """POST ``body``.

        Raises:
            RequestError: The engine refuses the request itself.
            EngineError: Several engines failed.
            CapacityError: No engine came up in time.
        """
        tried: set[str] = set()
        failure: EngineFailure | None = None
        for attempt in range(MAX_TRIES):
            if self._sidecar is not None and attempt == 0:
                engine = self._sidecar
            else:
                engine = await self._dispatcher.helper(model, tried, self._max_wait_s)
            try:
                return await self._engines.call(engine, path, body)
            except EngineFailure as error:
                refused = refused_request(error)
                if refused is not None:
                    raise refused from error
                failure = error
                tried.add(engine.worker_id)
        raise EngineError(f"no engine could answer {path}: {failure}")

    async def derender_chat(
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
        """The OpenAI choice that these tokens are."""
        body = {
            "model": request.get("model"),
            "generate_response": _generate_response(
                turn_id, prompt_ids, token_ids, finish_reason, stop_reason, entries
            ),
            "prompt_tokens": len(prompt_ids),
            "chat_request": request,
        }
        answer = await self.call("/v1/chat/completions/derender", request.get("model"), encode(body))
        return _first_choice(answer)

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

    async def derender_chunk(
        self,
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
        """One streamed piece: ``(chunk, state for the next piece)``."""
        chunk: dict[str, Any] = {
            "request_id": turn_id,
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
        body = {
            "stream": True,
            "model": request.get("model"),
            "generate_chunk": chunk,
            "stream_state": state,
            "prompt_tokens": len(prompt_ids),
            # A parser settles its first state from the whole prompt; plain decoding reads a few ids.
            "prompt_token_ids": prompt_ids,
            "chat_request" if chat else "completion_request": request,
        }
        path = "/v1/chat/completions/derender" if chat else "/v1/completions/derender"
        answer = _object(await self.call(path, request.get("model"), encode(body)))
        piece = answer.get("chunk")
        if not isinstance(piece, dict) or not isinstance(piece.get("choices"), list):
            raise EngineError("the derender route answered no chunk")
        return piece, answer.get("stream_state")


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


def _object(answer: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineError(f"the derender route answered nonsense: {error}") from error
    if not isinstance(value, dict):
        raise EngineError("the derender route answered no object")
    return value


def _first_choice(answer: bytes) -> dict[str, Any]:
    choices = _object(answer).get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineError("the derender route answered no choice")
    return choices[0]
