"""Read what every request for turns says, whichever protocol it came in: which trajectory, which model, how it repeats, sampling."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from rose.errors import CapacityError, NotFound, RequestError, Unauthorized
from rose.lineage import format_version, parse_version
from rose.scheduler import side
from rose.scheduler.deliveries import retry_count
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.http import (
    KEY_OF,
    REQUEST_ID,
    check_storable,
    encode,
    name_in,
    trace_context,
    whole_number,
)
from rose.scheduler.inflight_request import TurnRequest
from rose.scheduler.protocols import no_media
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.scheduler.store import TrajectoryStore
from rose.scheduler.trajectory import Trajectory
from rose.wire.samples import MAX_DEADLINE_S


class TurnRequests:
    """Holds no state of its own."""

    def __init__(
        self,
        config: SchedulerConfig,
        store: TrajectoryStore,
        dispatcher: Dispatcher,
        *,
        is_traced: bool = False,
    ) -> None:
        self._is_traced = is_traced
        self._config = config
        self._store = store
        self._dispatcher = dispatcher

    def trajectory(self, request: web.Request, session_id: Any) -> Trajectory | None:
        name = session_of(request, session_id)
        return None if name is None else self._store.open(name)

    def turn_request(self, request: web.Request, said: bytes, trajectory: Trajectory | None) -> TurnRequest:
        """A turn as its client asked for it.

        Args:
            said: The part of the body that a retry repeats byte for byte.  With the headers that constrain the answer it identifies the request.

        Raises:
            RequestError: A header has a bad value.
        """
        headers = request.headers
        deadline_ms = headers.get("X-ROSE-Deadline-Ms")
        minimum = headers.get("X-ROSE-Min-Version")
        tier = headers.get("X-ROSE-Tier", "any")
        if tier not in ("any", "dedicated"):
            raise RequestError("must be any or dedicated", field="X-ROSE-Tier")
        turn_key, key = name_in(headers, "X-ROSE-Turn"), name_in(headers, "Idempotency-Key")
        least = None if minimum is None else parse_version(minimum, "X-ROSE-Min-Version")
        beside = side.said(headers.get(side.HEADER))
        named = hashlib.sha256(
            request.path.rsplit("/", 1)[-1].encode()
        )  # the CPU's own: twice blake2's speed
        named.update(said)
        # A deadline is not of these: it says when the client stops waiting, and a retry has less time left.
        if tier != "any" or least is not None or beside:
            named.update(f"{tier} {'' if least is None else format_version(least)} {beside}".encode())
        return TurnRequest(
            request_id=request[REQUEST_ID],
            trajectory=trajectory,
            digest=named.hexdigest()[:32],
            turn_key=turn_key,
            idempotency_key=key,
            retry=retry_count(headers),
            dedicated_only=tier == "dedicated",
            min_version=least,
            deadline_s=None if deadline_ms is None else _deadline_s(deadline_ms),
            side=beside,
            trace_headers=trace_context(
                headers.get("traceparent"), headers.get("tracestate"), is_traced=self._is_traced
            ),
        )

    def check_messages(self, body: dict[str, Any]) -> None:
        messages = body.get("messages")
        limit = self._config.limits.max_messages
        if not isinstance(messages, list) or not 1 <= len(messages) <= limit:
            raise RequestError(f"must be a list of 1 to {limit} messages", field="messages")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise RequestError("must be an object with a role", field=f"messages[{index}]")
            content = message.get("content")
            if content is None and message["role"] in ("tool", "function"):
                messages[index] = {**message, "content": ""}  # what a tool that returns nothing sends
            elif isinstance(content, list):
                _check_parts(content, f"messages[{index}].content")
            elif content is not None and not isinstance(content, str):
                raise RequestError("must be text, or a list of parts", field=f"messages[{index}].content")

    def num_choices(self, body: dict[str, Any]) -> int:
        best_of = body.get("best_of")
        if best_of not in (None, 1, body.get("n")):
            raise RequestError("is not supported here", field="best_of")
        most, n = self._config.limits.max_n, body.get("n")
        if n is None:
            return 1
        if type(n) is not int or not 1 <= n <= most:
            raise RequestError(f"must be a whole number from 1 to {most}", field="n")
        return n

    def with_sampling(self, body: dict[str, Any], trajectory: Trajectory | None) -> dict[str, Any]:
        if trajectory is None:
            return dict(body)
        merged = {**body, **trajectory.created.sampling}
        if "max_tokens" in trajectory.created.sampling:
            merged.pop("max_completion_tokens", None)
        return merged

    async def model(self, asked: Any, trajectory: Trajectory | None) -> str:
        if asked is not None and not isinstance(asked, str):
            raise RequestError("must be text", field="model")
        models = self._dispatcher.models()
        if not any(model.alive for model in models.values()):
            await self._dispatcher.helper(None, set(), self._config.timeouts.max_queue_s)
            models = self._dispatcher.models()
        if asked is not None and asked in models and models[asked].alive:
            return asked
        alive = [name for name, model in models.items() if model.alive]
        if len(alive) == 1 and (asked is None or trajectory is not None):
            return alive[0]
        if asked is None:
            raise RequestError(f"is required: {', '.join(sorted(alive))}", field="model")
        raise NotFound(f"model '{asked[:64]}' is not served", field="model", code="model_not_found")

    def params(
        self,
        rendered: Mapping[str, Any],
        body: Mapping[str, Any],
        num_prompt: int,
        model: str,
        prefix: str = "",
    ) -> dict[str, Any]:
        """Sampling parameters for the engine: one choice, log-probs always, a limit that fits."""
        limit = self.max_model_len(model)
        room = limit - num_prompt
        if room < 1:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, the context length is {limit}",
                field="messages" if "messages" in body else "prompt" if "prompt" in body else "token_ids",
                code="context_length_exceeded",
            )
        name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        asked = body.get(name)
        if asked is not None and (type(asked) is not int or asked < 1):
            raise RequestError("must be a whole number from 1", field=prefix + name)
        seed = body.get("seed")
        if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
            raise RequestError("must be a whole number of 64 bits", field=prefix + "seed")
        params = dict(rendered)
        params.pop("max_completion_tokens", None)
        params["n"] = 1
        most = params["max_tokens"] = room if asked is None else min(asked, room)
        least = body.get("min_tokens")
        if least is not None:
            if type(least) is not int or not 0 <= least <= most:
                raise RequestError(
                    f"must be a whole number from 0 to max_tokens, here at most {most}",
                    field=prefix + "min_tokens",
                )
            params["min_tokens"] = least
        logprobs = params.get("logprobs")
        params["logprobs"] = logprobs if type(logprobs) is int and logprobs > 0 else 0
        check_storable(params, field=prefix.rstrip(".") or "body")
        return params

    def max_model_len(self, model: str) -> int:
        served = self._dispatcher.models().get(model)
        if served is None:
            raise CapacityError("no worker serves this model now")
        return served.max_model_len

    def vocab_size(self, model: str) -> int | None:
        served = self._dispatcher.models().get(model)
        return None if served is None else served.vocab_size


_MEDIA = ("image", "audio", "video", "file")


def _check_parts(parts: list[Any], field: str) -> None:
    for at, part in enumerate(parts):
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            raise RequestError("must be an object with a type, or text", field=f"{field}[{at}]")
        kind = str(part.get("type"))
        if any(each in kind for each in _MEDIA):
            raise no_media(kind[:64], f"{field}[{at}]")


def _deadline_s(text: str) -> float:
    most = round(MAX_DEADLINE_S * 1e3)
    return whole_number(text, field="X-ROSE-Deadline-Ms", least=1, most=most, unit=" of milliseconds") / 1e3


def session_of(request: web.Request, session_id: Any) -> str | None:
    """The trajectory that a request names, by whichever way; ``session_id`` is its body's.

    Raises:
        RequestError: No text, or too long.
        Unauthorized: It came with the key of another.
    """
    name = (
        (request.match_info.get("session") if request.path.startswith("/s/") else None)
        or name_in(request.headers, "X-Session-ID")
        or name_in(request.headers, "X-SMG-Routing-Key")
        or session_id
    )
    if name is not None and not isinstance(name, str):
        raise RequestError("must be text", field="session_id")
    own = request.get(KEY_OF)
    if own is not None and name not in (None, own):
        raise Unauthorized("this is the key of another trajectory", field="Authorization")
    return own or name


def said(body: Mapping[str, Any]) -> bytes:
    """The request but for how its answer is delivered: what a retry repeats."""
    return encode({k: v for k, v in body.items() if k not in ("stream", "stream_options")})
