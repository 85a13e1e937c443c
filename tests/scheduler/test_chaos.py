"""500 trajectories while hosts, wires and the scheduler itself are killed, stopped and cut: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.auth import Tokens
from rose.testing.fake_engine import FakeEngine
from tests.scheduler.audit import Client, lease_all, token_accounts
from tests.scheduler.conftest import user
from tests.scheduler.processes import Daemon, FakeHost

NUM_TRAJECTORIES = 500
NUM_TURNS = 2
MAX_TOKENS = 24
TOKEN_S = 0.02
CUTS_PER_MIN = 100
MAX_RESTARTS = 3
"""Of the scheduler: each holds everybody up for as long as Python takes to start."""
ACTS = {"kill": 3, "stop": 2, "partition": 2, "tear": 3, "silence": 2, "slow": 3, "scheduler": 2}


class Chaos:
    """Hurts the world until told to stop, by a seeded plan: a storm of memory cuts beside one act after another.

    kill: SIGKILL of a host, engine and node; another starts under its name.  stop: SIGSTOP for long enough to be suspected.
    partition: nothing gets through to a host or from it, then all of it at once.  tear: its connections are reset.
    silence: only its heartbeats are held up.  slow: its next turns take twenty times as long.  scheduler: SIGKILL.
    """

    def __init__(
        self, seed: int, daemon: Daemon, hosts: list[FakeHost], session: aiohttp.ClientSession
    ) -> None:
        self.rng = random.Random(seed)
        self.daemon = daemon
        self.hosts = hosts
        self.session = session
        self.acts: Counter[str] = Counter()
        self.num_cuts = 0
        self.seconds = 0.0

    async def run(self) -> None:
        first = list(ACTS)  # each happens, however fast the turns are
        while True:
            act = first.pop() if first else self.rng.choices(list(ACTS), list(ACTS.values()))[0]
            if act == "scheduler" and self.acts[act] >= MAX_RESTARTS:
                continue
            self.acts[act] += 1
            await getattr(self, act)(self.rng.choice(self.hosts))
            await asyncio.sleep(self.rng.uniform(0.0, 0.4))

    async def storm(self) -> None:
        """Production takes the memory of one harvested host after another, :data:`CUTS_PER_MIN` times a minute."""
        rng = random.Random(self.rng.random())
        harvested = [host for host in self.hosts if host.tier == "harvested"]
        begun_s = time.monotonic()
        while True:
            seconds = time.monotonic() - begun_s
            while self.num_cuts < seconds * CUTS_PER_MIN / 60:
                self.num_cuts += 1
                await self._tell(rng.choice(harvested), "reclaim", None)
            self.seconds = seconds
            await asyncio.sleep(0.05)

    async def kill(self, host: FakeHost) -> None:
        await host.kill()
        await host.start(self.daemon.url)

    async def stop(self, host: FakeHost) -> None:
        host.signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        host.signal(signal.SIGCONT)

    async def partition(self, host: FakeHost) -> None:
        host.down.hold()
        host.up.hold()
        await asyncio.sleep(2.5)
        host.down.let_go()
        host.up.let_go()

    async def tear(self, host: FakeHost) -> None:
        host.down.tear()

    async def silence(self, host: FakeHost) -> None:
        host.up.hold()
        await asyncio.sleep(2.5)
        host.up.let_go()

    async def slow(self, host: FakeHost) -> None:
        faults = [{"kind": "slow", "after": self.rng.randrange(MAX_TOKENS)} for _ in range(4)]
        await self._tell(host, "faults", faults)

    async def scheduler(self, _: FakeHost) -> None:
        await self.daemon.end()
        await self.daemon.start()

    async def _tell(self, host: FakeHost, what: str, body: Any) -> None:
        """A host that is down or stopped does not hear it."""
        timeout = aiohttp.ClientTimeout(total=0.3)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self.session.post(f"{host.url}/fake/{what}", json=body, timeout=timeout):
                pass


async def play(client: Client, slots: asyncio.Semaphore, number: int) -> str:
    async with slots:
        name = await client.create(number)
        messages: list[Any] = [user(f"task {number}")]
        for turn in range(NUM_TURNS):
            body = {"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS}
            headers = {"X-Session-ID": name, "X-ROSE-Turn": str(turn)}
            answer = await client.post("/v1/chat/completions", body, headers)
            messages += [answer["choices"][0]["message"], user("next")]
        await client.finish(name, number)
        return name


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_500_trajectories_survive_kills_stops_cuts_and_restarts(tmp_path: Path) -> None:
    tokens = Tokens.generate()
    tokens.save(tmp_path / "tokens.toml")
    daemon = Daemon(tmp_path)
    url = await daemon.start()
    safe = FakeHost(tmp_path, "own", "dedicated", token_s=TOKEN_S)  # while it lives, nothing may fail
    hurt = [FakeHost(tmp_path, f"h{index}", "harvested", token_s=TOKEN_S) for index in range(3)]
    hurt.append(FakeHost(tmp_path, "d1", "dedicated", token_s=TOKEN_S))
    async with contextlib.AsyncExitStack() as ends:
        ends.push_async_callback(daemon.end)
        for host in (safe, *hurt):
            ends.push_async_callback(host.end)
            await host.start(url)
        connector = aiohttp.TCPConnector(limit=0)
        session = await ends.enter_async_context(aiohttp.ClientSession(connector=connector))
        client, slots = Client(session, url, tokens), asyncio.Semaphore(32)
        chaos = Chaos(7, daemon, hurt, session)
        hurting = [asyncio.create_task(chaos.run()), asyncio.create_task(chaos.storm())]
        try:
            # Any answer but 200 and 503 fails here: no FAILED(infra), no FAILED(deadline), no lost trajectory.
            names = await asyncio.gather(*(play(client, slots, number) for number in range(NUM_TRAJECTORIES)))
        finally:
            for task in hurting:
                task.cancel()
            ended = await asyncio.gather(*hurting, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
        assert set(chaos.acts) == set(ACTS)  # it did hurt
        assert chaos.num_cuts >= chaos.seconds * CUTS_PER_MIN / 60
        if daemon.process is None or daemon.process.returncode is not None:
            await daemon.start()  # the last restart was interrupted
        model = FakeEngine()

        async def undisturbed(prompt: list[int]) -> list[int]:
            return model.greedy(prompt, {"max_tokens": MAX_TOKENS})[0]

        turns = await lease_all(client, names, num_turns=NUM_TURNS, undisturbed=undisturbed)
        assert sum(len(turn["segments"]) > 1 for turn in turns) > 0  # some did move in the middle
        assert await daemon.end(signal.SIGTERM) == 0
    accounts = token_accounts(tmp_path / "journal")
    for account in accounts:
        assert account["arrived"] == account["kept"] + account["fenced"]
    assert accounts[-1]["open"] == 0  # of a scheduler that was not killed
    total = sum(accounts, Counter())
    print(
        f"{chaos.seconds:.0f} s, {chaos.num_cuts} cuts, {dict(chaos.acts)}; tokens: {dict(total)}, of them in turns that ran "
        f"when the scheduler was killed: {sum(account['open'] for account in accounts)}"
    )
