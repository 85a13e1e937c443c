"""A whole scheduler in this process, with fake engines behind it, on free ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rose.auth import Tokens, bearer
from rose.scheduler.app import Scheduler
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.testing.fake_engine import FakeEngine, serve_engine
from rose.testing.fake_node import FakeNode

TURNS = (
    "/rose/v1/generate",
    "/inference/v1/generate",
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
"""These come the short way (``rose.scheduler.front``) on connections that ask for nothing else."""
FAST = {"timeouts": {"tick_s": 0.02, "drain_s": 2.0, "max_queue_s": 5.0, "backoff_s": 0.05}}


class World:
    """Scheduler, engines and a client of every role."""

    def __init__(self, tmp_path: Path, tokens: Tokens) -> None:
        self.tmp_path = tmp_path
        self.tokens = tokens
        self.engines: dict[str, FakeEngine] = {}
        self.nodes: dict[str, FakeNode] = {}
        self.runners: dict[str, web.AppRunner] = {}
        self.session: aiohttp.ClientSession
        self.turn_session: aiohttp.ClientSession
        self.scheduler: Scheduler
        self._beats: list[asyncio.Task[None]] = []

    async def start(self, **config: Any) -> None:
        settings = {**FAST, **config, "port": 0}
        settings["timeouts"] = {**FAST["timeouts"], **config.get("timeouts", {})}
        self.scheduler = Scheduler(
            SchedulerConfig.model_validate(settings), self.tokens, self.tmp_path / "journal"
        )
        await self.scheduler.start()

    @property
    def url(self) -> str:
        return self.scheduler.url

    async def add(self, name: str, *, tier: str = "dedicated", **engine: Any) -> FakeEngine:
        """An engine with a node that beats; ready for turns when this returns."""
        token = engine.pop("token", None)
        kind = engine.pop("kind", FakeEngine)
        made = kind(token=token, **engine)
        self.runners[name], url = await serve_engine(made)
        node = FakeNode(
            self.session,
            self.url,
            self.tokens.node,
            made,
            url,
            worker_id=name,
            tier=tier,
            period_s=0.05,
            engine_token=token,
        )
        self.engines[name], self.nodes[name] = made, node
        await node.register()
        assert await node.beat()
        self._beats.append(asyncio.create_task(node.run(), name=name))
        return made

    def silence(self, name: str) -> None:
        """Stop a node's heartbeats."""
        for task in self._beats:
            if task.get_name() == name:
                task.cancel()

    async def kill(self, name: str) -> None:
        """The engine's process is gone, as far as TCP can tell; its node says nothing."""
        self.silence(name)
        await self.runners.pop(name).cleanup()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        role: str = "environment",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and decoded JSON (None without a body)."""
        session = self.turn_session if path in TURNS else self.session
        async with session.request(
            method,
            self.url + path,
            json=body,
            headers={**bearer(getattr(self.tokens, role)), **(headers or {})},
        ) as response:
            data = await response.read()
            return response.status, (await response.json() if data else None)

    async def ok(self, method: str, path: str, body: Any = None, **kwargs: Any) -> Any:
        status, answer = await self.call(method, path, body, **kwargs)
        assert status == 200, answer
        return answer

    async def trajectory(self, **fields: Any) -> str:
        return (await self.ok("POST", "/rose/v1/trajectories", {"job": "job", **fields}))["id"]

    async def chat(self, session: str | None, messages: list[dict[str, Any]], **fields: Any) -> Any:
        headers = {"X-Session-ID": session} if session else {}
        body = {"model": "policy", "messages": messages, **fields}
        return await self.ok("POST", "/v1/chat/completions", body, headers=headers)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let the loop run until something is so; the test's timeout bounds it."""
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - any condition, not one event
                await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._beats:
            task.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        if hasattr(self, "scheduler"):
            await self.scheduler.stop(drain_s=0)
            self.scheduler.book.check()
            self.scheduler.store.book.check()
        for runner in self.runners.values():
            await runner.cleanup()


@pytest.fixture(scope="session")
def tokens() -> Tokens:
    return Tokens.generate()


@pytest.fixture
async def world(tmp_path: Path, tokens: Tokens) -> AsyncIterator[World]:
    """Nothing started yet: ``await world.start(...)``, ``await world.add("a")``."""
    world = World(tmp_path, tokens)
    async with aiohttp.ClientSession() as session, aiohttp.ClientSession() as turn_session:
        world.session, world.turn_session = session, turn_session
        yield world
        await world.close()


@pytest.fixture
async def openai_client(world: World) -> AsyncIterator[Callable[[str], Any]]:
    """OpenAI's client of a trajectory, by its key."""
    import openai

    made: list[openai.AsyncOpenAI] = []

    def client(session: str) -> openai.AsyncOpenAI:
        made.append(
            openai.AsyncOpenAI(
                base_url=f"{world.url}/v1", api_key=world.tokens.key_of(session), max_retries=0
            )
        )
        return made[-1]

    yield client
    for each in made:
        await each.close()


@pytest.fixture
async def claude(world: World) -> AsyncIterator[Callable[[str], Any]]:
    """Anthropic's, likewise."""
    import anthropic

    made: list[anthropic.AsyncAnthropic] = []

    def client(session: str) -> anthropic.AsyncAnthropic:
        made.append(
            anthropic.AsyncAnthropic(base_url=world.url, api_key=world.tokens.key_of(session), max_retries=0)
        )
        return made[-1]

    yield client
    for each in made:
        await each.close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


PROMPT = [10, 11, 12, 13]


async def generate(world: World, session: str | None = None, **params: Any) -> Any:
    headers = {"X-Session-ID": session} if session else {}
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 40, **params}}
    return await world.ok("POST", "/rose/v1/generate", body, headers=headers)
