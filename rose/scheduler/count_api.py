"""What agents ask besides turns: which models there are, and how many tokens something is.

Token counts of a trajectory's next turn are those of the prompt that the turn would have, sampled ids included.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from rose.errors import CapacityError, NotFound, RequestError
from rose.scheduler.dispatch import Dispatcher, ServedModel
from rose.scheduler.http import json_response, read_object
from rose.scheduler.prompts import Prompts
from rose.scheduler.protocols import ProtocolRequest, named_as
from rose.scheduler.protocols.anthropic_messages import MessagesRequest
from rose.scheduler.protocols.responses import ResponsesRequest
from rose.scheduler.renderer import Renderer
from rose.scheduler.trajectory import Trajectory
from rose.scheduler.turn_requests import TurnRequests, session_of

MAX_RUNNING = 64
"""Counts at once: each is a rendered prompt in memory and work for an engine that has turns to run."""
MAX_WAITING = 256
_BEGINNING = datetime.datetime.fromtimestamp(0, datetime.UTC).isoformat().replace("+00:00", "Z")


class CountRoutes:
    def __init__(
        self, dispatcher: Dispatcher, prompts: Prompts, renderer: Renderer, requests: TurnRequests
    ) -> None:
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._renderer = renderer
        self._requests = requests
        self._places = asyncio.Semaphore(MAX_RUNNING)
        self._num_waiting = 0

    async def models(self, request: web.Request) -> web.Response:
        """One list for OpenAI's and Anthropic's clients."""
        session_of(request, None)
        served = sorted(self._dispatcher.models().items())
        data = [_described(name, model) for name, model in served if model.alive]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return json_response({"object": "list", "data": data, "has_more": False, **ends})

    async def model(self, request: web.Request) -> web.Response:
        session_of(request, None)
        name = request.match_info["model"]
        model = self._dispatcher.models().get(name)
        if model is None or not model.alive:
            raise NotFound(f"model '{name[:64]}' is not served", field="model", code="model_not_found")
        return json_response(_described(name, model))

    async def messages(self, request: web.Request) -> web.Response:
        """Anthropic's ``count_tokens``."""
        body = await read_object(request)
        trajectory = self._requests.trajectory(request, body.get("session_id"))
        return json_response({"input_tokens": await self._count(MessagesRequest(body), trajectory)})

    async def responses(self, request: web.Request) -> web.Response:
        """OpenAI's ``input_tokens``."""
        body = await read_object(request)
        trajectory = self._requests.trajectory(request, body.get("session_id"))
        count = await self._count(ResponsesRequest(body, trajectory), trajectory)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def tokenize(self, request: web.Request) -> web.Response:
        """As ``vllm serve`` has it: of text, or of messages by the model's template."""
        body = await read_object(request)
        trajectory = self._requests.trajectory(request, body.get("session_id"))
        model = await self._requests.model(body.get("model"), trajectory)
        asked = {name: value for name, value in body.items() if name != "return_token_strs"}
        async with self._place():
            if "messages" in body:
                self._requests.check_messages(asked)
                rendered = await self._prompts.render_chat({**asked, "model": model})
            elif isinstance(body.get("prompt"), str):
                rendered = await self._prompts.render_completion({**asked, "model": model}, body["prompt"])
            else:
                raise RequestError("must be text; or give messages", field="prompt")
            token_ids = rendered.token_ids
            strings = await self._renderer.token_texts(token_ids) if body.get("return_token_strs") else None
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": self._requests.max_model_len(model),
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    async def _count(self, sent: ProtocolRequest, trajectory: Trajectory | None) -> int:
        with named_as(sent.names):
            self._requests.check_messages(sent.body)
            body = self._requests.with_sampling(sent.body, trajectory)
            body["model"] = await self._requests.model(body.get("model"), trajectory)
            async with self._place():
                return len((await self._prompts.chat(trajectory, body)).token_ids)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Raises:
        CapacityError: 429, too many wait already.
        """
        if self._places.locked() and self._num_waiting >= MAX_WAITING:
            raise CapacityError("too many counts are asked for at once", status=429, code="queue_full")
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._places.release()


def _described(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "rose",
        "max_model_len": model.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": _BEGINNING,
    }
