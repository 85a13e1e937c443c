"""A scheduler in front of one real engine, which it sees as two workers: each is behind a door that can break a turn's connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
from aiohttp import web

from rose.auth import Tokens
from rose.scheduler.app import Scheduler
from rose.scheduler.scheduler_config import SchedulerConfig
from tests.engine_launcher import EngineServer

if TYPE_CHECKING:
    import anthropic


class Door:
    """A plain proxy to the engine that can hang up."""

    def __init__(self, engine: EngineServer) -> None:
        self.engine = engine
        self.num_bytes: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()
        self.lose_parse_at: int | None = None
        """After so many calls of the parse route, lose what the next one is for, once."""
        self.lose_how = ""
        """With one set, tokens pass one by one: the next when what came before was parsed."""
        self.num_lost = 0
        self._parsed = asyncio.Event()
        self.doors = [self]
        """Of one scheduler: what came through one may be parsed behind another."""
        self.cut_after: int | None = None
        """Break the next turn's connection after so many tokens."""
        self.cut_each_after: int | None = None
        """Break that of each turn's first try."""
        self.num_cuts = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.num_bytes[request.path] += len(body)
        self.num_calls[request.path] += 1
        if request.path == "/rose/parse":
            for door in self.doors:
                door._parsed.set()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.engine.node_token}"}
        if request.path == "/rose/parse" and self.lose_parse_at is not None:
            self.lose_parse_at -= 1
            if self.lose_parse_at < 0:
                self.lose_parse_at = None
                self.num_lost += 1
                if self.lose_how == "broken":
                    assert request.transport is not None
                    request.transport.abort()
                    return web.Response()
                names = json.dumps({"parses": [json.loads(body)["parse"]]})
                async with self.session.post(
                    f"{self.engine.url}/rose/parse/close", data=names, headers=headers
                ) as closed:
                    assert closed.status == 200
        async with self.session.request(
            request.method, self.engine.url + request.path_qs, data=body, headers=headers
        ) as upstream:
            cut, self.cut_after = self.cut_after, None if "generate" in request.path else self.cut_after
            if "generate" in request.path and json.loads(body)["request_id"].endswith("-1"):
                cut = cut if self.cut_each_after is None else self.cut_each_after
            if "generate" not in request.path or upstream.content_type != "text/event-stream":
                return web.Response(
                    body=await upstream.read(), status=upstream.status, content_type=upstream.content_type
                )
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            count, has_passed = 0, False
            async for line in upstream.content:
                if line.startswith(b"data: {"):
                    # Tokens, not events: a busy engine puts several into one, which may be the first, and then goes through.
                    choices = json.loads(line[6:])["choices"]
                    count += sum(len(choice["token_ids"] or ()) for choice in choices)
                    may_cut = has_passed or any(choice["finish_reason"] for choice in choices)
                    has_passed = True
                    if cut is not None and count > cut and may_cut:
                        self.num_cuts += 1
                        assert request.transport is not None
                        request.transport.abort()
                        return response
                self._parsed.clear()
                await response.write(line)
                if self.lose_how and line.startswith(b"data: {"):
                    with contextlib.suppress(
                        TimeoutError
                    ):  # what ends a stream is parsed with what came before
                        await asyncio.wait_for(self._parsed.wait(), 0.2)
            return response

    async def open(self) -> str:
        self.session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def close(self) -> None:
        await self.runner.cleanup()
        await self.session.close()


class Gateway:
    def __init__(self, scheduler: Scheduler, doors: list[Door], tokens: Tokens, engine: EngineServer) -> None:
        self.scheduler, self.doors, self.tokens, self.engine = scheduler, doors, tokens, engine
        self.url = scheduler.url

    def ours(self, path: str = "", **kwargs: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}{path}/v1", api_key=self.tokens.agent, **kwargs)

    def claude(self, path: str = "") -> anthropic.AsyncAnthropic:
        """Anthropic's client of ours; its retries off, since a test breaks connections itself."""
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url + path, api_key=self.tokens.agent, max_retries=0)

    def their_claude(self) -> anthropic.AsyncAnthropic:
        import anthropic

        token = self.engine.node_token
        return anthropic.AsyncAnthropic(base_url=self.engine.url, auth_token=token, max_retries=0)

    def theirs(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.engine.url}/v1", api_key=self.engine.node_token)

    def cut(self, after: int) -> None:
        """Break the next turn's connection, whichever door it takes."""
        for door in self.doors:
            door.cut_after, door.num_cuts = after, 0

    @property
    def num_cuts(self) -> int:
        return sum(door.num_cuts for door in self.doors)


def scripted_engine(folder: Path, role: str) -> Any:
    """A server with the model that says what it is told to.

    Args:
        folder: Where its weights are written.
        role: ``rollout``: with our plug-in.  ``stock``: vLLM as it is installed.
    """
    from tests.plugin.weights_server import dedicated
    from tests.scheduler.script_model import write_script_model

    write_script_model(folder)
    args = (
        "--enable-scale-out",
        "--logprobs-mode=processed_logprobs",
        "--reasoning-parser=qwen3",
        "--tool-call-parser=hermes",
        "--enable-auto-tool-choice",
        "--max-model-len=1024",
        "--served-model-name=policy",
        "--enable-prompt-tokens-details",
    )
    if role == "rollout":
        return dedicated(folder, env={}, args=args, start_timeout_s=300)
    return EngineServer(folder, args=args, start_timeout_s=300)


@asynccontextmanager
async def gateway_to(engine: EngineServer, journal: Path, tokens: Tokens) -> AsyncIterator[Gateway]:
    doors = [Door(engine), Door(engine)]
    for door in doors:
        door.doors = doors
    workers = [
        {"worker_id": f"w{at}", "url": await door.open(), "model": "policy", "max_model_len": 1024}
        for at, door in enumerate(doors)
    ]
    settings = {
        "port": 0,
        "workers": workers,
        "stream_upstream": True,
        "policy": "round_robin",
        "timeouts": {"tick_s": 0.02, "backoff_s": 0.05},
    }
    scheduler = Scheduler(SchedulerConfig.model_validate(settings), tokens, journal)
    await scheduler.start()
    try:
        async with asyncio.timeout(60):
            while sum(worker.may_take_turns for worker in scheduler.book.fleet) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield Gateway(scheduler, doors, tokens, engine)
    finally:
        await scheduler.stop(drain_s=0)
        for door in doors:
            await door.close()


def sampled_once(gateway: Gateway, name: str, num_turns: int) -> None:
    """One line: each turn continues the one before it, and each sampled token stands in it once."""
    trajectory = gateway.scheduler.store.trajectories[name]
    turns = trajectory.turns
    parents = [(None, None), *((at, None) for at in range(num_turns - 1))]
    assert [(turn.parent, turn.fork) for turn in turns] == parents
    last = trajectory.trace_turn(turns[-1])
    ids = last["prompt_token_ids"] + last["token_ids"]
    assert [turn for _, _, turn in last["sampled"]] == list(range(num_turns))
    for start, count, turn in last["sampled"]:
        assert ids[start : start + count] == trajectory.trace_turn(turns[turn])["token_ids"]
    assert all(turn.attempts >= 2 for turn in turns), "every turn was cut"
