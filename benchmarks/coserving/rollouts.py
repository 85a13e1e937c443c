"""Rollout demand for one engine: as many multi-turn trajectories at once as asked for, closed loop, for ever.

:class:`Registry` is the scheduler's side of a node agent's registration, no more: it learns the engine's URL and token, and how much it may hold.
:class:`Trajectories` keeps the engine busy.  A turn that production's memory cost its place ends with the tokens it
has; it goes on from them at once, where there is room.

As with rose-scheduler no turn is sent for whose tokens the engine has no room by its latest heartbeat.  Sent all the same they are refused, each for some
milliseconds of the processor that the two engines share: without this rule 16 trajectories asked 80 times a second while nothing was lent, and
production had a fifth less of its core (``coserve-busy-code65-1-no-room``).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from rose.auth import bearer

NUM_TURNS = 3
PROMPT_TOKENS = 96
OBSERVATION_TOKENS = 32
OUTPUT_TOKENS = 48
RETRY_S = 0.2


class Registry:
    """Answers ``POST /workers`` and heartbeats; an async context manager.  Use ``url`` and ``worker``."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self.worker: dict[str, Any] | None = None
        self.ready = asyncio.Event()
        """The node's heartbeat says that its engine takes turns; rose-scheduler sends it none otherwise."""
        self.budget_tokens: int | None = None
        """What the engine may hold, by the latest heartbeat; None: it has not said."""
        self._sent_tokens = 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Registry:
        app = web.Application()
        app.router.add_post("/workers", self._register)
        app.router.add_post("/workers/{id}/heartbeat", self._heartbeat)
        app.router.add_delete("/workers/{id}", self._ok)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @asynccontextmanager
    async def room(self, num_tokens: int) -> AsyncIterator[dict[str, Any]]:
        """Wait until the engine takes turns and has room for one of so many tokens beside those that are there; the worker, as registered."""

        def fits() -> bool:
            budget = self.budget_tokens
            return self.ready.is_set() and (budget is None or self._sent_tokens + num_tokens <= budget)

        async with self._changed:
            await self._changed.wait_for(fits)
            self._sent_tokens += num_tokens
        try:
            assert (
                self.worker is not None
            )  # of an engine that nobody has registered no heartbeat says that it is ready
            yield self.worker
        finally:
            self._sent_tokens -= num_tokens
            async with self._changed:
                self._changed.notify_all()

    async def _register(self, request: web.Request) -> web.Response:
        self.worker = await request.json()
        return web.json_response({"known": True})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        beat = await request.json()
        if beat.get("state") == "ready":
            self.ready.set()
        else:
            self.ready.clear()
        self.budget_tokens = beat.get("kv_budget_tokens")
        async with self._changed:
            self._changed.notify_all()
        return web.json_response({"known": self.worker is not None})

    async def _ok(self, _: web.Request) -> web.Response:
        return web.json_response({})


class Trajectories:
    """``num`` trajectories at a time against the registry's worker; counts what they get."""

    def __init__(self, registry: Registry, num: int, vocab_size: int, seed: int) -> None:
        self._registry, self._num, self._vocab_size = registry, num, vocab_size
        self._rng = random.Random(seed)
        self._run_id = secrets.token_hex(4)
        self._ids = itertools.count()
        self.tokens = 0
        self.turns = 0
        self.cut = 0
        self.failed = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Trajectories:
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=600.0), connector=aiohttp.TCPConnector(limit=0)
        )
        self._tasks = [asyncio.create_task(self._for_ever()) for _ in range(self._num)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    def _random(self, num: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(num)]

    async def _for_ever(self) -> None:
        while True:
            context = self._random(PROMPT_TOKENS)
            for _ in range(NUM_TURNS):
                context += await self._turn(context)
                context += self._random(OBSERVATION_TOKENS)

    async def _turn(self, context: list[int]) -> list[int]:
        found: list[int] = []
        while len(found) < OUTPUT_TOKENS:
            async with self._registry.room(len(context) + OUTPUT_TOKENS) as worker:
                answer = await self._ask(worker, context + found, OUTPUT_TOKENS - len(found))
            if answer is None:
                await asyncio.sleep(RETRY_S)
                continue
            choice = answer["choices"][0]
            tokens = choice.get("token_ids") or []
            found += tokens
            self.tokens += len(tokens)
            if choice.get("finish_reason") == "abort":
                self.cut += 1
                if not tokens:  # no memory at all at this moment
                    await asyncio.sleep(RETRY_S)
        self.turns += 1
        return found

    async def _ask(self, worker: dict[str, Any], token_ids: list[int], num: int) -> dict[str, Any] | None:
        body = {
            "request_id": f"{self._run_id}-{next(self._ids)}",
            "token_ids": token_ids,
            "sampling_params": {"max_tokens": num, "temperature": 1.0, "ignore_eos": True},
        }
        url = f"{worker['url']}/inference/v1/generate"
        try:
            async with self._http.post(url, json=body, headers=bearer(worker["engine_token"])) as response:
                if response.status == 200:
                    return await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        self.failed += 1
        return None
