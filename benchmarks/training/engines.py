"""Engines that take time and no CPU: the fake engine behind a step-latency model.

:class:`TimedEngine` answers with the fake engine's tokens, when a continuous batch would have: it runs the simulator's
:class:`rose.sim.engine.SimEngine` (chunked prefill, one token per request and step, KV memory, prefix cache) against the clock, with
steps as long as a :class:`rose.policy.admission.StepModel` says, the class that ``rose profile`` fits.  Steps are due at
computed instants: one that starts late by the machine's fault is not made longer, as long as it can catch up (``lost_s`` is what
could not).  A prompt's cached part is found by its content: the hash of a finished turn's tokens, looked up at every place.

A *harvested* engine shares its device with production that comes in bursts (:class:`Bursts`): outside them it has a share of
the step rate; when one begins, KV memory halves, the youngest requests that no longer fit are aborted with the reclaim
stop reason, and steps get rare.

``python -m benchmarks.training.engines SPEC.json``: all engines of a pool in one process, registered at a scheduler.  Versions
come as a file that names the newest one; it is live ``pull_s`` after it changed, and each engine then stands still for ``commit_s``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.training.probe import Probe
from rose.auth import Tokens
from rose.policy.admission import StepModel
from rose.policy.stop_reasons import OTHER_RUN, RECLAIMED
from rose.sim.engine import Request, SimEngine
from rose.testing.fake_engine import FakeEngine, serve_engine
from rose.testing.fake_node import FakeNode

MAX_LATE_S = 0.5
"""An engine further behind than this does not run after its schedule any more."""
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Coefficients of the step model in seconds, as ``rose profile`` writes them."""

    base_s: float = 0.020
    prefill_token_s: float = 0.00005
    decode_s: float = 0.0002
    context_token_s: float = 1e-7

    def model(self) -> StepModel:
        return StepModel(**asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bursts:
    """Production beside a harvested engine: it alternates between quiet and busy times, each within a fifth of its mean."""

    quiet_share: float = 0.8
    """Of the step rate that the engine would have alone."""
    busy_share: float = 0.2
    quiet_s: float = 6.0
    busy_s: float = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    name: str
    tier: str = "dedicated"
    steps: Steps | None = Steps()
    """None answers at once."""
    kv_tokens: int = 65_536
    chunk_tokens: int = 2048
    mean_tokens: int = 36
    bursts: Bursts | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """Everything that an engines process is told."""

    scheduler: str
    token_file: str
    probe_file: str
    head_file: str | None = None
    """Holds ``attempt.version``; None = nobody publishes."""
    run: str | None = None
    """Whose versions these are."""
    pull_s: float = 0.2
    commit_s: float = 0.05
    max_model_len: int = 16_384
    engines: list[EngineSpec] = field(default_factory=list)


@dataclass(slots=True)
class _Turn:
    tokens: list[int]
    logprobs: list[float]
    finish: str
    stop: str | None
    done: asyncio.Future[tuple[int, str, str | None]]
    """``(tokens delivered, finish reason, stop reason)``."""
    end_state: int
    spans: list[tuple[str, int]]
    """Versions and the token from which each held."""


class TimedEngine(FakeEngine):
    """See the module's docstring."""

    def __init__(self, spec: EngineSpec, *, max_model_len: int = 16_384) -> None:
        super().__init__(mean_tokens=spec.mean_tokens, max_model_len=max_model_len)
        assert spec.steps is not None
        self.spec = spec
        self.batch = SimEngine(spec.steps.model(), spec.chunk_tokens, spec.kv_tokens)
        self.share = 1.0 if spec.bursts is None else spec.bursts.quiet_share
        self.num_tokens = self.num_reused = self.num_prompt = self.num_steps = self.num_cut = 0
        self.busy_s = self.lost_s = 0.0
        self._turns: dict[str, _Turn] = {}
        self._prefixes: dict[int, int] = {}
        """State after a finished turn's tokens -> their number."""
        self._woken = asyncio.Event()
        self._pause_until_s = 0.0

    # --- as the scheduler sees it ----------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params, prompt, key = body["sampling_params"], body["token_ids"], body["request_id"]
        if body.get("stream"):
            return web.Response(status=400, text="a timed engine does not stream")
        if len(prompt) + params.get("max_tokens", 16) > self.max_model_len:
            text = f"exceeds the maximum context length of {self.max_model_len} tokens"
            error = {"error": {"message": text, "type": "BadRequestError", "param": None, "code": 400}}
            return web.json_response(error, status=400)
        if self.refuses(params):
            answer = {"choices": [self._choice(body, [], [], "abort", OTHER_RUN, None)]}
            return web.json_response({"request_id": f"generate-tokens-{key}", **answer})
        turn, request_ = self._begin(key, prompt, params)
        self.num_running += 1
        try:
            count, finish, stop = await turn.done
        finally:
            self.num_running -= 1
            self._turns.pop(key, None)
            self.batch.remove(key)  # where the client went away
        entries = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(turn.tokens[:count], turn.logprobs[:count], strict=True)
        ]
        choice = self._choice(body, turn.tokens[:count], entries, finish, stop, None)
        choice["weight_versions"] = _runs(turn.spans, count) or None
        usage = self._usage(body, count)
        usage["prompt_tokens_details"]["cached_tokens"] = request_.cached
        answer = {"request_id": f"generate-tokens-{key}", "choices": [choice], "usage": usage}
        return web.json_response(answer)

    def _begin(self, key: str, prompt: Sequence[int], params: Mapping[str, Any]) -> tuple[_Turn, Request]:
        state, found, cached = 1, 0, 0
        for place, token in enumerate(prompt, start=1):
            state = (state * 48_271 + token + 1) % 2_147_483_647  # as PrefixModel.state
            if self._prefixes.get(state) == place:
                found, cached = state, place
        tokens: list[int] = []
        logprobs: list[float] = []
        reason: str | None = None
        stop: str | None = None
        for token, logprob in self._sample(prompt, params):
            tokens.append(token)
            logprobs.append(logprob)
            state = (state * 48_271 + token + 1) % 2_147_483_647
            reason, stop = self._finished(tokens, params)
            if reason is not None:
                break
        assert reason is not None
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        turn = _Turn(tokens, logprobs, reason, stop, done, state, [(self.label, 0)])
        request = Request(
            key, len(prompt), len(tokens), time.monotonic(), trajectory=str(found) if cached else ""
        )
        self._turns[key] = turn
        self.batch.add(request)
        self._woken.set()
        return turn, request

    async def _abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            self.aborted.append(name)
            self._stop(name.removeprefix("generate-tokens-"), None)
        return web.Response()

    def _stop(self, key: str, stop: str | None) -> None:
        removed = self.batch.remove(key)
        turn = self._turns.get(key)
        if removed is not None and turn is not None and not turn.done.done():
            request, produced = removed
            turn.done.set_result((request.kept + produced, "abort", stop))

    # --- time ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take steps until cancelled."""
        batch, model = self.batch, self.batch.model
        due_s = time.monotonic()
        while True:
            if not batch.busy:
                self._woken.clear()
                await self._woken.wait()
                due_s = max(due_s, time.monotonic())
            batch.admit(batch.budget_tokens - batch.used_tokens)
            prefill, _ = batch.shape(batch.chunk_tokens)
            if not prefill and not batch.running:  # the first of the queue does not fit what the cut left
                await asyncio.sleep(0.05)
                due_s = time.monotonic()
                continue
            alone_s = model.predict(round(prefill), batch.running, round(batch.context_tokens))
            paused_s = max(0.0, self._pause_until_s - due_s)
            due_s += alone_s / self.share + paused_s
            now_s = time.monotonic()
            if now_s - due_s > MAX_LATE_S:
                self.lost_s += now_s - due_s
                due_s = now_s
            await asyncio.sleep(max(0.0, due_s - now_s))
            self.busy_s += alone_s / self.share
            self.num_steps += 1
            _, ended = batch.advance(1.0, prefill, 1.0)
            for request in ended:
                self._request_ended(request)
            while batch.used_tokens > batch.budget_tokens and batch.running > 1:
                batch.preempt()
            batch.evict_to(batch.budget_tokens - batch.used_tokens)

    def _request_ended(self, request: Request) -> None:
        turn = self._turns.get(request.key)
        if turn is None or turn.done.done():
            return
        self.num_tokens += len(turn.tokens)
        self.num_prompt += request.prompt - request.kept
        self.num_reused += request.cached
        length = request.prompt + request.target
        if len(self._prefixes) > 20_000:
            self._prefixes.clear()
        self._prefixes[turn.end_state] = length
        request.trajectory = str(turn.end_state)
        self.batch.keep(request, length)
        turn.done.set_result((len(turn.tokens), turn.finish, turn.stop))

    def commit(self, version: str, pause_s: float) -> None:
        """New weights: tokens from here on are theirs.  Prefixes stay, as with the ``salt`` of a running trajectory."""
        self.version = version
        self._pause_until_s = time.monotonic() + pause_s
        for key, turn in self._turns.items():
            request = self.batch.requests.get(key)
            if request is not None:
                turn.spans.append((self.label, request.kept + request.produced(self.batch.k)))

    async def live_with_production(self, node: FakeNode) -> None:
        """Bursts come and go; the node reports what its agent would."""
        bursts = self.spec.bursts
        assert bursts is not None
        rng = random.Random(self.spec.seed)
        whole = self.spec.kv_tokens
        while True:
            self.share, self.batch.budget_tokens, node.gated = bursts.quiet_share, whole, False
            node.kv_budget_tokens = whole
            await asyncio.sleep(bursts.quiet_s * rng.uniform(0.8, 1.2))
            self.share, self.batch.budget_tokens, node.gated = bursts.busy_share, whole // 2, True
            node.kv_budget_tokens = whole // 2
            node.reclaim_seq += 1
            self.batch.drop_cache()
            while self.batch.used_tokens > self.batch.budget_tokens:
                youngest = self.batch.youngest()
                if youngest is None:
                    break
                self.num_cut += 1
                self._stop(youngest.key, RECLAIMED)
            await asyncio.sleep(bursts.busy_s * rng.uniform(0.8, 1.2))


def _runs(spans: Sequence[tuple[str, int]], count: int) -> list[dict[str, Any]]:
    ends = [start for _, start in spans[1:]] + [count]
    return [
        {"version": version, "start": start, "end": min(end, count)}
        for (version, start), end in zip(spans, ends, strict=True)
        if min(end, count) > start
    ]


def to_json(spec: PoolSpec) -> str:
    return json.dumps(asdict(spec))


def from_json(text: str) -> PoolSpec:
    table = json.loads(text)
    engines = [
        EngineSpec(
            **{
                **one,
                "steps": Steps(**one["steps"]) if one["steps"] else None,
                "bursts": Bursts(**one["bursts"]) if one["bursts"] else None,
            }
        )
        for one in table.pop("engines")
    ]
    return PoolSpec(**table, engines=engines)


async def serve(spec: PoolSpec) -> None:
    """Run the pool until it is killed; prints ``ready``."""
    node_token = Tokens.load(Path(spec.token_file)).node
    engines: list[FakeEngine] = []
    nodes: list[FakeNode] = []
    running: list[asyncio.Task[None]] = []
    async with aiohttp.ClientSession() as session:
        for one in spec.engines:
            if one.steps is None:
                engine = FakeEngine(mean_tokens=one.mean_tokens, max_model_len=spec.max_model_len)
            else:
                engine = TimedEngine(one, max_model_len=spec.max_model_len)
                running.append(asyncio.create_task(engine.run()))
            _, url = await serve_engine(engine)
            node = FakeNode(
                session, spec.scheduler, node_token, engine, url, worker_id=one.name, tier=one.tier
            )
            engine.weights_run = spec.run or ""
            node.kv_budget_tokens = one.kv_tokens if one.steps is not None else None
            if isinstance(engine, TimedEngine) and one.bursts is not None:
                running.append(asyncio.create_task(engine.live_with_production(node)))
            await node.register()
            engines.append(engine)
            nodes.append(node)
            running.append(asyncio.create_task(node.run()))
        timed = [engine for engine in engines if isinstance(engine, TimedEngine)]

        def counters() -> dict[str, float]:
            names = ("num_tokens", "num_prompt", "num_reused", "num_steps", "num_cut", "busy_s", "lost_s")
            return {name: sum(getattr(engine, name) for engine in timed) for name in names}

        running.append(asyncio.create_task(Probe(Path(spec.probe_file), counters).run()))
        print("ready timed-engines:0", flush=True)
        head = ""
        while True:
            for task in running:
                if task.done():
                    task.result()
            if spec.head_file is None or not Path(spec.head_file).exists():
                await asyncio.sleep(POLL_S)
                continue
            newest = Path(spec.head_file).read_text()
            if newest == head:
                await asyncio.sleep(POLL_S)
                continue
            head = newest
            await asyncio.sleep(spec.pull_s)
            for engine, node in zip(engines, nodes, strict=True):
                if isinstance(engine, TimedEngine):
                    engine.commit(head, spec.commit_s)
                else:
                    engine.version = head
                await node.beat()  # a commit is told at once, not with the next heartbeat


if __name__ == "__main__":
    uvloop.run(serve(from_json(Path(sys.argv[1]).read_text())))
