"""A rollout engine without a model, for tests, benchmarks and trying things out.

Speaks the routes that ``rose-scheduler`` uses of vLLM 0.32 with ``--enable-scale-out``
(``/inference/v1/generate``, ``abort_requests``, render, derender, ``/health``, ``/v1/models``) and the parse routes of our
plug-in, in their shapes.  Its "model" is a deterministic function of the token prefix, so a turn that was cut and continued
elsewhere must give the same tokens as one that was not: any loss, repeat or re-encoding shows at once.

It can be told to misbehave, per request, in order (:class:`Fault`; over HTTP: ``POST /fake/faults``), and that production
takes its memory back: all that runs then ends with what it has (``POST /fake/reclaim``).

``python -m rose.testing.fake_node`` starts one as a process of its own (:mod:`rose.testing.fake_node`).
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rose.policy.stop_reasons import OTHER_RUN, RECLAIMED
from rose.testing.fake_text import FakeText, _error, _json, encode
from rose.testing.toy_tokenizer import Tokenizer, ToyTokenizer
from rose.wire.turns import ASKED_RUN

SLOW_FACTOR = 20
_P = 2_147_483_647
_A = 48_271


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """How one generate request goes wrong, after ``after`` tokens.

    ``kind``: ``reclaim`` (abort with our stop reason), ``abort`` (a native abort), ``reset`` (the
    connection breaks), ``stall`` (silence), ``slow`` (:data:`SLOW_FACTOR` times the time per token from there on), ``error``
    (HTTP ``status``), ``garbage`` (an answer that is no answer), ``exit`` (the process ends).
    """

    kind: str
    after: int = 0
    status: int = 500


def expert_of(token: int) -> int:
    """Where a fake engine's only layer sends a token."""
    return token % 251


class PrefixModel:
    """Next token and log-prob from all tokens before it.

    Args:
        word_ids: What it may sample.
        eos_id: Ends a turn, about once in ``mean_tokens``.
    """

    def __init__(self, word_ids: Sequence[int], eos_id: int, mean_tokens: int) -> None:
        self._word_ids = word_ids
        self._eos_id = eos_id
        self._mean_tokens = mean_tokens

    def state(self, token_ids: Sequence[int], state: int = 1) -> int:
        """After ``token_ids``, which come after ``state``."""
        for token in token_ids:
            state = (state * _A + token + 1) % _P
        return state

    def step(self, state: int, allowed: Sequence[int] | None, *, may_end: bool) -> tuple[int, float, int]:
        """``(token, log-prob, next state)``."""
        mixed = (state * 69_621 + 12_345) % _P
        logprob = -((mixed >> 3) % 4096) / 2048
        if allowed:
            token = allowed[(mixed >> 7) % len(allowed)]
        elif may_end and (mixed >> 5) % self._mean_tokens == 0:
            token = self._eos_id
        else:
            token = self._word_ids[(mixed >> 7) % len(self._word_ids)]
        return token, logprob, (state * _A + token + 1) % _P


class FakeEngine(FakeText):
    """Args:
    tokenizer: :class:`ToyTokenizer` by default.
    model: Served name.
    token_s: Time per token; 0 answers at once.
    mean_tokens: Mean length of a turn that ends by itself.
    report_versions: Stamp tokens with :attr:`version`, as an engine with our plug-in does.
    plugin: It has the parse routes of our plug-in.
    routed_experts: Return which expert each token went to: a byte for each, in place of an array.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None = None,
        model: str = "policy",
        max_model_len: int = 4096,
        token_s: float = 0.0,
        mean_tokens: int = 24,
        version: str = "0.0",
        report_versions: bool = True,
        token: str | None = None,
        plugin: bool = True,
        routed_experts: bool = False,
    ) -> None:
        super().__init__(tokenizer or ToyTokenizer())
        self.model = model
        self.max_model_len = max_model_len
        self.token_s = token_s
        self.version = version
        self.report_versions = report_versions
        self.weights_run = ""
        """Whose its weights are; it refuses requests that ask for another run, as an engine with our plug-in does."""
        self.num_refused = 0
        self.kv_mixed: bool | None = None
        """What answers that come at once say of their context; None: nothing."""
        self.generation_config: dict[str, Any] = {}
        """Sampling settings of the model's folder, for requests that name none."""
        self.logprobs_mode: str | None = None
        """What its node says of it."""
        self.faults: deque[Fault] = deque()
        self.requests: deque[dict[str, Any]] = deque(maxlen=4096)
        """Bodies of generate requests, newest last."""
        self.trace_parents: deque[str | None] = deque(maxlen=4096)
        self.aborted: list[str] = []
        self.num_renders = 0
        self.bytes_in: Counter[str] = Counter()
        """Of request bodies, by path."""
        self.num_running = 0
        self.num_reclaims = 0
        self.num_decoded = 0
        self.hold: asyncio.Event | None = None
        """When set, generation waits for it before the first token."""
        self._token = token
        self._has_plugin = plugin
        self._returns_routing = routed_experts
        self._running: dict[str, asyncio.Event] = {}
        self._ended: dict[str, tuple[str, str]] = {}
        """Requests that the engine itself ends: its stop reason, and what had sampled them."""
        self._model = PrefixModel(self.tokenizer.word_ids, self.tokenizer.eos_id, mean_tokens)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_post("/v1/completions/render", self._render_completion)
        app.router.add_post("/v1/chat/completions/derender", self._derender_chat)
        app.router.add_post("/v1/completions/derender", self._derender_completion)
        if self._has_plugin:
            app.router.add_post("/rose/parse", self._parse)
            app.router.add_post("/rose/parse/whole", self._parse_whole)
            app.router.add_post("/rose/parse/close", self._parse_close)
        app.router.add_post("/fake/faults", self._set_faults)
        app.router.add_post("/fake/reclaim", self._reclaim)
        return app

    # --- the model -------------------------------------------------------------------------------------

    def greedy(self, prompt: Sequence[int], params: Mapping[str, Any]) -> tuple[list[int], str, str | None]:
        """What an uninterrupted turn gives: ``(tokens, finish reason, stop string)``."""
        tokens: list[int] = []
        for token, _ in self._sample(prompt, params):
            tokens.append(token)
            reason, stop = self._finished(tokens, params)
            if reason is not None:
                return tokens, reason, stop
        raise AssertionError("unreachable: a turn has a limit")

    def _sample(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Any:
        state, count = self._model.state(prompt), 0
        allowed = params.get("allowed_token_ids")
        while True:
            may_end = count >= (params.get("min_tokens") or 0) and not params.get("ignore_eos")
            token, logprob, state = self._model.step(state, allowed, may_end=may_end)
            count += 1
            yield token, logprob

    def _finished(self, tokens: list[int], params: Mapping[str, Any]) -> tuple[str | None, str | None]:
        stops = params.get("stop") or []
        if stops:
            text = self.tokenizer.decode(tokens)
            for stop in [stops] if isinstance(stops, str) else stops:
                if stop in text:
                    return "stop", stop
        if tokens[-1] == self.tokenizer.eos_id:
            return "stop", None
        return ("length", None) if len(tokens) >= params.get("max_tokens", 16) else (None, None)

    # --- generate --------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.trace_parents.append(request.headers.get("traceparent"))
        params = body["sampling_params"]
        if len(body["token_ids"]) + params.get("max_tokens", 16) > self.max_model_len:
            return _error(400, f"exceeds the maximum context length of {self.max_model_len} tokens")
        if (params.get("min_tokens") or 0) > params.get("max_tokens", 16):
            return _least_above_most(params)
        fault = self.faults.popleft() if self.faults else None
        if self.refuses(params):
            fault = Fault(kind="other_run")
        if fault is not None and fault.kind == "error":
            return _error(fault.status, "told to fail")
        if fault is not None and fault.kind == "garbage":
            return web.Response(body=b'{"choices": "none"}', content_type="application/json")
        self.num_running += 1
        try:
            if body.get("stream"):
                return await self._streamed(request, body, fault)
            tokens: list[int] = []
            entries: list[dict[str, Any]] = []
            reason: str | None = None
            stop: str | None = None
            async for token, logprob, finish, why in self._run(request, body, fault):
                if token is not None:
                    tokens.append(token)
                    entries.append(_entry(token, logprob, params))
                if finish is not None:
                    reason, stop = finish, why
            return _json(
                {
                    "request_id": f"generate-tokens-{body['request_id']}",
                    "choices": [
                        self._choice(body, tokens, entries, reason, stop, len(tokens))
                        | self._routing(body, tokens)
                    ],
                    "usage": self._usage(body, len(tokens)),
                    "kv_transfer_params": None
                    if self.kv_mixed is None
                    else {"rose": {"prefix_version": self.version, "kv_mixed": self.kv_mixed}},
                }
            )
        finally:
            self.num_running -= 1
            self._running.pop(body["request_id"], None)
            self._ended.pop(body["request_id"], None)

    async def _streamed(
        self, request: web.Request, body: dict[str, Any], fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        sampled: list[int] = []
        async for token, logprob, finish, why in self._run(request, body, fault):
            count += token is not None
            tokens = [] if token is None else [token]
            entries = [] if token is None else [_entry(token, logprob, body["sampling_params"])]
            sampled += tokens
            choice = self._choice(body, tokens, entries, finish, why, count if finish is not None else None)
            if finish is not None:
                choice |= self._routing(body, sampled)
            await response.write(b"data: " + encode({"request_id": "r", "choices": [choice]}) + b"\n\n")
        usage = {"request_id": "r", "choices": [], "usage": self._usage(body, count)}
        await response.write(b"data: " + encode(usage) + b"\n\ndata: [DONE]\n\n")
        return response

    async def _run(
        self, request: web.Request, body: dict[str, Any], fault: Fault | None
    ) -> AsyncIterator[tuple[int | None, float, str | None, str | None]]:
        params = body["sampling_params"]
        aborted = self._running[body["request_id"]] = asyncio.Event()
        if self.hold is not None:
            await self.hold.wait()
        tokens: list[int] = []
        pace_s = self.token_s
        for token, logprob in self._sample(body["token_ids"], params):
            if fault is not None and len(tokens) >= fault.after:
                match fault.kind:
                    case "reclaim":
                        yield None, 0.0, "abort", RECLAIMED
                        return
                    case "other_run":
                        yield None, 0.0, "abort", OTHER_RUN
                        return
                    case "abort":
                        yield None, 0.0, "abort", None
                        return
                    case "reset":
                        assert request.transport is not None
                        request.transport.abort()
                        await asyncio.sleep(3600)  # this handler is cancelled with its connection
                    case "stall":
                        await aborted.wait()
                    case "slow":
                        pace_s = SLOW_FACTOR * self.token_s
                    case "exit":
                        os._exit(1)
                    case _:
                        raise ValueError(fault.kind)
            if pace_s:
                await asyncio.sleep(pace_s)
            if aborted.is_set():
                stop, _ = self._ended.get(body["request_id"], (None, ""))
                yield None, 0.0, "abort", stop
                return
            tokens.append(token)
            self.num_decoded += 1
            reason, stop = self._finished(tokens, params)
            yield token, logprob, reason, stop
            if reason is not None:
                return

    def _choice(
        self,
        body: dict[str, Any],
        tokens: list[int],
        entries: list[dict[str, Any]],
        finish: str | None,
        stop: str | None,
        num_total: int | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {"content": entries},
            "finish_reason": finish,
            "stop_reason": stop,
            "weight_versions": None,
        }
        if num_total and self.report_versions:
            _, label = self._ended.get(body["request_id"], ("", self.label))
            choice["weight_versions"] = [{"version": label, "start": 0, "end": num_total}]
        return choice

    def _routing(self, body: dict[str, Any], sampled: list[int]) -> dict[str, Any]:
        if not self._returns_routing:
            return {}
        start = body["sampling_params"].get("routed_experts_prompt_start", 0)
        rows = bytes(expert_of(token) for token in [*body["token_ids"], *sampled][start:-1])
        return {"routed_experts": base64.b64encode(rows).decode()}

    def _usage(self, body: dict[str, Any], num_new: int) -> dict[str, Any]:
        num_prompt = len(body["token_ids"])
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    async def _abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            self.aborted.append(name)
            running = self._running.get(name.removeprefix("generate-tokens-"))
            if running is not None:
                running.set()
        return web.Response()

    # --- render ---------------------------------------------------------------------------

    async def _render_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_renders += 1
        if body.get("model") not in (None, self.model):
            return _error(404, f"The model `{body['model']}` does not exist.")
        try:
            token_ids = self.tokenizer.chat(body)
        except Exception as error:  # noqa: BLE001 - a template may raise anything; the client wrote the input
            return _error(400, f"cannot render: {error}")
        return self._rendered(
            body,
            token_ids,
            logprobs=body.get("top_logprobs") if body.get("logprobs") else None,
            features=_features(body, token_ids),
        )

    async def _render_completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_renders += 1
        prompt = body["prompt"]
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return self._rendered(body, token_ids, logprobs=body.get("logprobs"), many=True)

    def _rendered(
        self,
        body: dict[str, Any],
        token_ids: list[int],
        *,
        logprobs: int | None,
        features: dict[str, Any] | None = None,
        many: bool = False,
    ) -> web.Response:
        room = self.max_model_len - len(token_ids)
        if room < 0:
            return _error(400, f"exceeds the maximum context length of {self.max_model_len} tokens")
        if room < 1:  # as vLLM has it, which cuts the limit down to what is left before it looks at it
            return _error(400, f"max_tokens must be at least 1, got {room}.")
        body = self.generation_config | body
        if (body.get("min_tokens") or 0) > body.get("max_tokens", 16):
            return _least_above_most(body)
        stop = body.get("stop")
        params = {
            "n": 1,
            "temperature": body.get("temperature", 1.0),
            "top_p": body.get("top_p", 1.0),
            "seed": body.get("seed"),
            "presence_penalty": body.get("presence_penalty", 0.0),
            "stop": [stop] if isinstance(stop, str) else stop or [],
            "max_tokens": body.get("max_tokens", 16),
            "min_tokens": body.get("min_tokens", 0),
            "ignore_eos": body.get("ignore_eos", False),
            "logprobs": logprobs,
            "allowed_token_ids": body.get("allowed_token_ids"),
            **_constraints(body),
            "skip_clone": True,
            "output_kind": 2,
        }
        rendered = {
            "request_id": "rendered",
            "token_ids": token_ids,
            "features": features,
            "sampling_params": params,
            "model": self.model,
        }
        return _json([rendered] if many else rendered)

    # --- the rest --------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": self.model, "max_model_len": self.max_model_len}]})

    async def _set_faults(self, request: web.Request) -> web.Response:
        self.faults.extend(msgspec.convert(await request.json(), list[Fault]))
        return web.Response()

    async def _reclaim(self, request: web.Request) -> web.Response:
        self.num_reclaims += 1
        return _json({"cut": self._end_all(RECLAIMED)})

    @property
    def label(self) -> str:
        """What its tokens are stamped with."""
        return f"{self.weights_run}@{self.version}" if self.weights_run else self.version

    def refuses(self, params: Mapping[str, Any]) -> bool:
        """Does the request ask for weights of another run?"""
        refused = (params.get("extra_args") or {}).get(ASKED_RUN, self.weights_run) != self.weights_run
        self.num_refused += refused
        return refused

    def switch(self, run: str, version: str) -> None:
        """Put weights of a run in place; where it is another, what runs ends with its tokens."""
        if run != self.weights_run:
            self._end_all(OTHER_RUN)
        self.weights_run, self.version = run, version

    def _end_all(self, stop_reason: str) -> int:
        self._ended.update(dict.fromkeys(self._running, (stop_reason, self.label)))
        for running in self._running.values():
            running.set()
        return len(self._running)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.bytes_in[request.path] += request.content_length or 0
        given = request.headers.get("Authorization")
        if self._token is not None and request.path != "/health" and given != f"Bearer {self._token}":
            return _error(401, "Unauthorized")
        return await handler(request)


def _entry(token: int, logprob: float, params: Mapping[str, Any]) -> dict[str, Any]:
    others = [
        {"token_id": abs(token - rank - 1), "logprob": logprob - rank / 8, "rank": rank + 1}
        for rank in range(params.get("logprobs") or 0)
    ]
    # As vLLM, whose list begins with the sampled token where nothing else was asked for.
    top = others or [{"token_id": token, "logprob": logprob, "rank": 1}]
    return {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": top}


def _features(body: Mapping[str, Any], token_ids: Sequence[int]) -> dict[str, Any] | None:
    """What a multimodal model's render route says of the images in a prompt."""
    contents = [message.get("content") for message in body["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    count = sum(part.get("type") == "image_url" for part in parts)
    if not count:
        return None
    where = [{"offset": len(token_ids) - 1 - at, "length": 1} for at in range(count)]
    return {
        "mm_hashes": {"image": [f"h{at}" for at in range(count)]},
        "mm_placeholders": {"image": where},
        "kwargs_data": {"image": ["AAAA"] * count},
    }


def _constraints(body: Mapping[str, Any]) -> dict[str, Any]:
    """Constraints on sampling that vLLM would apply to this request, such as the grammar of a requested response format."""
    found = {name: body[name] for name in ("top_k", "bad_words", "logit_bias") if name in body}
    form, choice = body.get("response_format") or {}, body.get("tool_choice")
    if form.get("type", "text") != "text" or choice not in (None, "auto", "none"):
        found["structured_outputs"] = {"json": {}}
    return found


def _least_above_most(params: Mapping[str, Any]) -> web.Response:
    most, least = params.get("max_tokens", 16), params["min_tokens"]
    return _error(400, f"min_tokens must be less than or equal to max_tokens={most}, got {least}.")


async def serve_engine(engine: FakeEngine, port: int = 0) -> tuple[web.AppRunner, str]:
    """Start an engine on a free port of this machine; returns its runner and URL."""
    runner = web.AppRunner(engine.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"
