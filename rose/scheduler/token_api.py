"""Requests for turns in tokens alone: ``/rose/v1/generate``, and vLLM's ``/inference/v1/generate`` for clients that know that one.

Nothing is rendered and nothing parsed; else they are requests for turns as all others (``rose.scheduler.openai_api``).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from rose.errors import RequestError
from rose.scheduler.http import REQUEST_ID, check_token_ids, encode, needs_server, read_body, send_json
from rose.scheduler.ids import unpack_ids
from rose.scheduler.inflight import InflightRequests
from rose.scheduler.inflight_request import Finished, Inflight, Replay
from rose.scheduler.replays import finished_before
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.scheduler.streams import replay_tokens, stream_tokens
from rose.scheduler.turn_requests import TurnRequests
from rose.scheduler.turn_runs import TurnRuns, answer_headers
from rose.wire.reading import read
from rose.wire.sampling import EngineGenerated, Generated, check_sampling
from rose.wire.turns import EngineGenerate, Generate


class TokenRoutes:
    """Holds no state of its own."""

    def __init__(
        self, config: SchedulerConfig, inflight: InflightRequests, turns: TurnRuns, requests: TurnRequests
    ) -> None:
        self._config = config
        self._inflight = inflight
        self._turns = turns
        self._requests = requests

    async def generate(self, request: web.Request) -> web.StreamResponse:
        data = await read_body(request)
        body = read(Generate, data)
        token_ids, field = body.token_ids, "token_ids"
        if body.token_ids_b64 is not None:
            token_ids, field = _from_base64(body.token_ids_b64), "token_ids_b64"
        if not token_ids:
            raise RequestError("must be a list of token ids", field=field)
        check_sampling(body.sampling_params or {}, Generated, "sampling_params.")
        return await self._serve(request, data, body, token_ids, lambda answer: answer, field=field)

    async def engine_generate(self, request: web.Request) -> web.StreamResponse:
        """As vLLM has it: one choice, with the log-prob of each of its tokens."""
        data = await read_body(request)
        body = read(EngineGenerate, data)
        check_sampling(body.sampling_params, EngineGenerated, "sampling_params.")
        name = body.request_id or request[REQUEST_ID]
        asks = body.sampling_params.get("logprobs") is not None

        def as_the_engine_says(answer: bytes) -> bytes:
            return encode(_engine_answer(msgspec.json.decode(answer), name, logprobs=asks))

        return await self._serve(request, data, body, body.token_ids, as_the_engine_says)

    async def _serve(
        self,
        request: web.Request,
        data: bytes,
        body: Generate | EngineGenerate,
        token_ids: list[int],
        said: Callable[[bytes], bytes],
        *,
        field: str = "token_ids",
    ) -> web.StreamResponse:
        """One turn.

        Args:
            said: The answer as this client reads it, from ROSE's own.
        """
        trajectory = self._requests.trajectory(request, getattr(body, "session_id", None))
        model = await self._requests.model(body.model, trajectory)
        check_token_ids(token_ids, field=field, vocab_size=self._requests.vocab_size(model))
        given = self._requests.with_sampling(body.sampling_params or {}, trajectory)
        given.pop("chat_template_kwargs", None)  # of the trajectory's chat turns
        given.pop("n", None)
        params = self._requests.params(given, given, len(token_ids), model, prefix="sampling_params.")
        asked = self._requests.turn_request(request, data, trajectory)
        if body.stream:
            needs_server(request)

        async def work(inflight: Inflight) -> bytes:
            prompt = self._turns.raw_prompt(trajectory, token_ids, params)
            (done,) = await self._turns.run(inflight, [(prompt, params)], {"stream": body.stream}, model)
            self._inflight.next_turns(inflight, [done])
            self._inflight.record(inflight, [done], kind="generate")
            return _tokens(done)

        found = self._inflight.start(asked, work)
        with self._inflight.delivering(asked, found) as left_whole:
            if isinstance(found, Replay):
                answer = found.answer or _tokens(*finished_before(found))
                if body.stream:
                    response = await replay_tokens(request, answer)
                else:
                    response = await send_json(request, said(answer))
            elif not body.stream:
                answer = said(await found.wait())
                response = await send_json(request, answer, headers=answer_headers(found.finished))
            else:
                response = await stream_tokens(request, found, keepalive_s=self._config.timeouts.keepalive_s)
            left_whole(request.transport)
            return response


def _tokens(done: Finished) -> bytes:
    """The answer of ``/rose/v1/generate``."""
    return encode(
        {
            "token_ids": done.ended.result.token_ids,
            "logprobs": done.ended.result.logprobs,
            "finish_reason": done.ended.reason,
            "stop_reason": done.ended.stop_reason,
            "turn": done.turn,
            **done.summary,
        }
    )


def _engine_answer(answer: dict[str, Any], request_id: str, *, logprobs: bool) -> dict[str, Any]:
    """vLLM's, where a token has no text and is called by its number."""
    token_ids = answer["token_ids"]
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, answer["logprobs"], strict=True)
    ]
    usage = answer["usage"]
    return {
        "request_id": request_id,
        "choices": [
            {
                "index": 0,
                "token_ids": token_ids,
                "logprobs": {"content": content} if logprobs else None,
                "finish_reason": answer["finish_reason"],
                "stop_reason": answer["stop_reason"],
            }
        ],
        "usage": {
            "prompt_tokens": usage["prompt"],
            "completion_tokens": len(token_ids),
            "total_tokens": usage["prompt"] + len(token_ids),
            "prompt_tokens_details": {"cached_tokens": usage["cached"]},
        },
        "rose": {k: v for k, v in answer.items() if k not in ("token_ids", "logprobs")},
    }


def _from_base64(text: Any) -> list[int]:
    if not isinstance(text, str):
        raise RequestError("must be base64 text", field="token_ids_b64")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError("is not base64", field="token_ids_b64") from error
    if len(data) % 4:
        raise RequestError("must hold whole little-endian u32 values", field="token_ids_b64")
    return unpack_ids(data)
