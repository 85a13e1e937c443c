"""Requests for turns: ``/v1/chat/completions``, ``/v1/responses``, ``/v1/messages``, ``/v1/completions`` and SGLang's ``/generate``.

A request is: prompt (``rose.scheduler.prompts``), one turn per choice (``rose.scheduler.inflight``), answer
parsed by an engine, journal, answer.  The first three are one kind of request in three protocols, the others another in two
(``rose.scheduler.protocols``); this module builds each kind; streaming is in ``rose.scheduler.streams``, and what has no text in
``rose.scheduler.token_api``.

A trajectory is named by the path ``/s/{id}/v1/...``, the header ``X-Session-ID`` (``X-SMG-Routing-Key``) or
the body's ``session_id``, in this order, or by its own key, which names no other; a request without one is served and forgotten.  A trajectory's own
``sampling`` wins over what the agent sends: the trainer must know the distribution it trains on.  A request
of a trajectory may name any model (agents carry foreign model names in their code) as long as one model is
served.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from rose.errors import RequestError
from rose.scheduler import side
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.http import (
    check_token_ids,
    encode,
    needs_server,
    read_body,
    read_object,
    send_json,
)
from rose.scheduler.inflight import InflightRequests
from rose.scheduler.inflight_request import Finished, Inflight, Replay, TurnRequest
from rose.scheduler.kept import Kept
from rose.scheduler.messages import call_id, chain, context_digest
from rose.scheduler.prompts import NOT_RENDERED, Prompt, Prompts
from rose.scheduler.protocols import ProtocolRequest, named_as
from rose.scheduler.protocols.anthropic_messages import MessagesRequest
from rose.scheduler.protocols.chat import ChatRequest
from rose.scheduler.protocols.responses import ResponsesRequest
from rose.scheduler.protocols.sglang import SGLangRequest
from rose.scheduler.renderer import Renderer
from rose.scheduler.replays import finished_before
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.scheduler.stops import chat_finish, cut_at_stop, visible_ids
from rose.scheduler.streams import replay_stream, stream_job, wants_logprobs
from rose.scheduler.trajectory import Trajectory
from rose.scheduler.turn_requests import TurnRequests, said
from rose.scheduler.turn_runs import TurnRuns, answer_headers
from rose.wire.reading import read
from rose.wire.sampling import Chat, Completion, check_sampling
from rose.wire.turns import SGLangGenerate

Read = Callable[[dict[str, Any], Trajectory | None], ProtocolRequest]


class OpenAIRoutes:
    """The agent's routes.  Holds no state of its own."""

    def __init__(
        self,
        config: SchedulerConfig,
        dispatcher: Dispatcher,
        inflight: InflightRequests,
        turns: TurnRuns,
        prompts: Prompts,
        renderer: Renderer,
        requests: TurnRequests,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._inflight = inflight
        self._turns = turns
        self._prompts = prompts
        self._renderer = renderer
        self._requests = requests

    # --- routes ----------------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._converse(request, lambda body, _: ChatRequest(body))

    async def responses(self, request: web.Request) -> web.StreamResponse:
        return await self._converse(request, ResponsesRequest)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        return await self._converse(request, lambda body, _: MessagesRequest(body))

    async def _converse(self, request: web.Request, read: Read) -> web.StreamResponse:
        """A turn of a conversation, in any protocol."""
        body = await read_object(request)
        trajectory = self._requests.trajectory(request, body.get("session_id"))
        sent = read(body, trajectory)
        with named_as(sent.names):
            return await self._chat(request, sent, trajectory)

    async def _chat(
        self, request: web.Request, sent: ProtocolRequest, trajectory: Trajectory | None
    ) -> web.StreamResponse:
        self._requests.check_messages(sent.body)
        check_sampling(sent.body, Chat)
        asks = side.kind_of(sent.body)
        sent.body = body = self._requests.with_sampling(sent.body, trajectory)
        num_choices = self._requests.num_choices(body)
        model = await self._requests.model(body.get("model"), trajectory)
        body["model"] = model
        asked = self._requests.turn_request(request, said(body), trajectory)

        want = wants_logprobs(body)

        async def parsed(done: list[Finished]) -> tuple[list[dict[str, Any]], list[int | None]]:
            found = [await self._chat_choice(body, item, entries=want) for item in done]
            return [choice for choice, _ in found], [count for _, count in found]

        async def work(inflight: Inflight) -> bytes:
            inflight.asks = asked.side or asks
            prompt = await self._prompts.chat(trajectory, body)
            kept = None if trajectory is None else Kept.of(sent, prompt, trajectory)
            params = self._requests.params(prompt.sampling_params, body, len(prompt.token_ids), model)
            done = await self._turns.run(inflight, [(prompt, params)] * num_choices, body, model)
            choices, counts = await parsed(done)
            self._inflight.next_turns(inflight, done)
            answer = self._answer(body, done, choices, "chat.completion", counts)
            messages = [choice["message"] for choice in choices]
            self._inflight.record(inflight, done, kind="chat", messages=messages, kept=kept)
            return answer

        async def again(done: list[Finished]) -> bytes:
            choices, counts = await parsed(done)
            return self._answer(body, done, choices, "chat.completion", counts)

        return await self._serve(request, sent, asked, work, again, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await read_object(request)
        for field in ("echo", "suffix", "use_beam_search", "prompt_logprobs", "prompt_embeds"):
            if body.get(field):
                raise RequestError("is not supported here", field=field)
        check_sampling(body, Completion)
        trajectory = self._requests.trajectory(request, body.get("session_id"))
        return await self._complete(request, ChatRequest(body, text=True), trajectory)

    async def sglang(self, request: web.Request) -> web.StreamResponse:
        """A completion as SGLang has it."""
        asked = read(SGLangGenerate, await read_body(request))
        sent = SGLangRequest(asked)
        trajectory = self._requests.trajectory(request, asked.session_id)
        with named_as(sent.names):
            return await self._complete(request, sent, trajectory, exact=True)

    async def _complete(
        self,
        request: web.Request,
        sent: ProtocolRequest,
        trajectory: Trajectory | None,
        *,
        exact: bool = False,
    ) -> web.StreamResponse:
        """Text or tokens in, text out, in any protocol.

        Args:
            exact: Its answer has the tokens as they were sampled, too.
        """
        sent.body = body = self._requests.with_sampling(sent.body, trajectory)
        num_choices = self._requests.num_choices(body)
        prompts = self._raw_prompts(body)
        model = await self._requests.model(body.get("model"), trajectory)
        body["model"] = model
        body.setdefault("max_tokens", 16)  # OpenAI's default for this route
        asked = self._requests.turn_request(request, said(body), trajectory)
        for prompt in prompts:
            if isinstance(prompt, list):
                check_token_ids(prompt, field="prompt", vocab_size=self._requests.vocab_size(model))

        want = wants_logprobs(body)

        async def parsed(done: list[Finished]) -> list[dict[str, Any]]:
            choices = [await self._completion_choice(body, item, entries=want) for item in done]
            return (
                [choice | exactly(item) for choice, item in zip(choices, done, strict=True)]
                if exact
                else choices
            )

        async def work(inflight: Inflight) -> bytes:
            plan: list[tuple[Prompt, dict[str, Any]]] = []
            for raw in prompts:
                rendered = await self._prompts.render_completion(body, raw)
                prompt = self._turns.raw_prompt(trajectory, rendered.token_ids, rendered.sampling_params)
                params = self._requests.params(prompt.sampling_params, body, len(prompt.token_ids), model)
                plan.extend([(prompt, params)] * num_choices)
            done = await self._turns.run(inflight, plan, body, model)
            choices = await parsed(done)
            self._inflight.next_turns(inflight, done)
            answer = self._answer(body, done, choices, "text_completion")
            self._inflight.record(inflight, done, kind="completion")
            return answer

        async def again(done: list[Finished]) -> bytes:
            return self._answer(body, done, await parsed(done), "text_completion")

        return await self._serve(request, sent, asked, work, again, chat=False)

    # --- running ---------------------------------------------------------------------------------------

    async def _serve(
        self,
        request: web.Request,
        sent: ProtocolRequest,
        asked: TurnRequest,
        work: Callable[[Inflight], Awaitable[bytes]],
        again: Callable[[list[Finished]], Awaitable[bytes]],
        *,
        chat: bool,
    ) -> web.StreamResponse:
        if sent.body.get("stream"):
            needs_server(request)
        found = self._inflight.start(asked, work)
        with self._inflight.delivering(asked, found) as left_whole:
            if isinstance(found, Replay):
                answer = found.answer or await again(finished_before(found))
                whole, message = sent.whole(answer)
                if message is not None:  # else it comes back as it was recorded
                    self._inflight.delivers_again(found, tip_base(sent.body), message)
                if sent.body.get("stream"):
                    response = await replay_stream(request, answer, sent)
                else:
                    response = await send_json(request, whole)
            elif not sent.body.get("stream"):
                answer, message = sent.whole(await found.wait())
                if message is not None:
                    self._inflight.delivers(found, found.handles[0], message)
                response = await send_json(request, answer, headers=answer_headers(found.finished))
            else:
                response = await stream_job(
                    request,
                    found,
                    sent=sent,
                    body=_engine_request(sent.body),
                    chat=chat,
                    renderer=self._renderer,
                    dispatcher=self._dispatcher,
                    on_delivery=functools.partial(self._inflight.delivers, found),
                    keepalive_s=self._config.timeouts.keepalive_s,
                )
            left_whole(request.transport)
            return response

    async def _chat_choice(
        self, body: dict[str, Any], done: Finished, *, entries: bool
    ) -> tuple[dict[str, Any], int | None]:
        """The choice, and how many of its tokens are reasoning."""
        handle, token_ids, reason = done.handle, done.ended.result.token_ids, done.ended.reason
        if not token_ids:
            message = {"role": "assistant", "content": ""}
            return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}, None
        choice, num_reasoning = await self._renderer.chat_choice(
            _engine_request(body),
            min_tokens=body.get("min_tokens") or 0,
            turn_id=handle.turn_id,
            prompt_ids=handle.prompt_ids,
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=done.ended.stop_reason,
            entries=handle.entries if entries else None,
        )
        calls = choice["message"].get("tool_calls") or ()
        for at, call in enumerate(calls):
            call["id"] = call_id(handle.turn_id, at, call["id"])
        choice["finish_reason"] = chat_finish(body, reason, called=bool(calls), streamed=False)
        return choice, num_reasoning

    async def _completion_choice(
        self, body: dict[str, Any], done: Finished, *, entries: bool
    ) -> dict[str, Any]:
        result, handle = done.ended.result, done.handle
        token_ids = _visible(body, done)
        if not token_ids:
            return {"index": 0, "text": "", "logprobs": None, "finish_reason": done.ended.reason}
        choice = await self._renderer.derender_completion(
            _engine_request(body) | {"prompt": handle.prompt_ids},
            turn_id=result.turn_id,
            prompt_ids=handle.prompt_ids,
            token_ids=token_ids,
            finish_reason=done.ended.reason,
            stop_reason=done.ended.stop_reason,
            entries=handle.entries if entries else None,
        )
        stop = done.ended.stop_reason
        if isinstance(stop, str) and isinstance(choice.get("text"), str):
            keep = bool(body.get("include_stop_str_in_output"))
            least = body.get("min_tokens") or 0
            choice["text"] = cut_at_stop(choice["text"], stop, min_tokens=least, keep=keep)
        return choice

    def _answer(
        self,
        body: Mapping[str, Any],
        done: list[Finished],
        choices: list[dict[str, Any]],
        kind: str,
        num_reasoning: Sequence[int | None] = (),
    ) -> bytes:
        for index, choice in enumerate(choices):
            choice["index"] = index
            if body.get("return_token_ids"):
                choice["token_ids"] = done[index].ended.result.token_ids
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        answer: dict[str, Any] = {
            "id": f"{prefix}-{done[0].ended.result.turn_id}",
            "object": kind,
            "created": done[0].created,
            "model": body["model"],
            "choices": choices,
            "usage": openai_usage(done, num_reasoning),
            "rose": rose_object(done),
        }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = done[0].prompt.token_ids
        return encode(answer)

    def _raw_prompts(self, body: dict[str, Any]) -> list[str | list[int]]:
        given = body.get("prompt")
        if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
            prompts: list[Any] = [given]
        elif isinstance(given, list) and given:
            prompts = given
        else:
            raise RequestError("must be text, token ids, or a list of these", field="prompt")
        if len(prompts) > self._config.limits.max_n:
            raise RequestError(f"at most {self._config.limits.max_n} prompts per request", field="prompt")
        if not all(prompt and isinstance(prompt, str | list) for prompt in prompts):
            raise RequestError("must be text, token ids, or a list of these, none empty", field="prompt")
        return prompts


def tip_base(body: Mapping[str, Any]) -> bytes:
    """Names the messages that an answer to this request answers."""
    return chain(context_digest(body), body["messages"])[-1]


def exactly(done: Finished) -> dict[str, Any]:
    """Of a choice: its tokens, and how it came about."""
    ended = done.ended
    spans = done.summary["versions"]
    return {
        "id": ended.result.turn_id,
        "token_ids": ended.result.token_ids,
        "token_logprobs": ended.result.logprobs,
        "stop_reason": ended.stop_reason,
        "cached_tokens": ended.result.num_cached_tokens,
        "version": spans[-1][0] if spans else None,
    }


def _visible(body: Mapping[str, Any], done: Finished) -> list[int]:
    ended = done.ended
    keep = bool(body.get("include_stop_str_in_output"))
    return visible_ids(ended.result.token_ids, ended.reason, ended.stop_reason, keep=keep)


def openai_usage(done: list[Finished], num_reasoning: Sequence[int | None] = ()) -> dict[str, Any]:
    """``num_reasoning``: of each choice, where its engine counts them."""
    prompts = {id(item.prompt): len(item.prompt.token_ids) for item in done}
    num_prompt = sum(prompts.values())
    num_new = sum(len(item.ended.result.token_ids) for item in done)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(item.summary["usage"]["cached"] for item in done)},
    }
    counts = [count for count in num_reasoning if count is not None]
    if counts:
        usage["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}
    return usage


def rose_object(done: list[Finished]) -> dict[str, Any]:
    """The extra object of our answers: where the tokens came from."""
    first = done[0]
    return {
        "turn": first.turn,
        "turns": [item.turn for item in done],
        "ids": [item.ended.result.turn_id for item in done],
        "worker": first.handle.worker_id,
        "tier": first.handle.tier,
        "fork": first.fork,
        **first.summary,
    }


def _engine_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The client's request as the derender route wants to see it."""
    return {key: value for key, value in body.items() if key not in NOT_RENDERED}
