"""500 trajectories while engines and the scheduler itself are killed, stopped and cut: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.auth import Tokens, bearer
from rose.decisions.log import logs, replay
from rose.scheduler.fake_engine import FakeEngine
from tests.scheduler.conftest import user
from tests.scheduler.test_restart import Daemon

NUM_TRAJECTORIES = 500
NUM_TURNS = 2
MAX_TOKENS = 10


class EngineProcess:
    """A fake engine with its node, in a process of its own; comes back under its name after a kill."""

    def __init__(self, folder: Path, name: str, tier: str) -> None:
        self.folder, self.name, self.tier = folder, name, tier
        self.url = ""
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, scheduler: str) -> None:
        arguments = ["--scheduler", scheduler, "--token-file", str(self.folder / "tokens.toml")]
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rose.scheduler.fake_engine", *arguments),
            *("--worker-id", self.name, "--tier", self.tier, "--token-s", "0.004"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        assert line.startswith("fake engine ready at "), line
        self.url = line.split()[-1]

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def end(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            await self.process.wait()


class Chaos:
    """Hurts the world, one seeded act after another, until told to stop."""

    def __init__(self, seed: int, daemon: Daemon, engines: list[EngineProcess], session: Any) -> None:
        self.rng = random.Random(seed)
        self.daemon = daemon
        self.engines = engines
        self.session = session
        self.acts: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        self.num_done = 0

    async def run(self) -> None:
        first = ["scheduler", "kill", "stop", "cut"]  # each happens, however fast the turns are
        while True:
            goal, waited = self.num_done + 6, 0
            while self.num_done < goal and waited < 100:
                await asyncio.sleep(0.01)
                waited += 1
            drawn = self.rng.choices(["cut", "kill", "stop", "scheduler"], [6, 2, 2, 1])[0]
            act = first.pop() if first else drawn
            if act == "scheduler" and self.acts[act] >= 3:
                continue
            self.acts[act] += 1
            await getattr(self, act)()

    async def cut(self, engine: EngineProcess | None = None) -> None:
        """Eight of the engine's next requests are cut in the middle."""
        engine = engine or self.rng.choice(self.engines)
        faults = [{"kind": "reclaim", "after": self.rng.randrange(1, MAX_TOKENS)} for _ in range(8)]
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self.session.post(
                f"{engine.url}/fake/faults", json=faults, timeout=aiohttp.ClientTimeout(total=0.5)
            ):
                pass

    async def kill(self) -> None:
        engine = self.rng.choice(self.engines)
        await engine.end()
        await engine.start(self.daemon.url)

    async def stop(self) -> None:
        """Long enough to be suspected."""
        engine = self.rng.choice(self.engines)
        engine.signal(signal.SIGSTOP)

        async def go_on() -> None:
            await asyncio.sleep(2.5)
            engine.signal(signal.SIGCONT)

        task = asyncio.create_task(go_on())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def scheduler(self) -> None:
        await self.daemon.end()
        await self.daemon.start()


class Agents:
    """Each plays its trajectories to the end, asking again as the OpenAI client does."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tokens: Tokens, chaos: Chaos) -> None:
        self.session, self.url, self.tokens, self.chaos = session, url, tokens, chaos
        self.refused: Counter[int] = Counter()
        self.slots = asyncio.Semaphore(48)

    async def post(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        for attempt in range(2000):
            retry = {"x-stainless-retry-count": str(attempt), **bearer(self.tokens.agent), **headers}
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.post(self.url + path, json=body, headers=retry) as response:
                    if response.status == 200:
                        return await response.json()
                    if response.status != 503:
                        self.refused[response.status] += 1
                        raise AssertionError(await response.text())
            await asyncio.sleep(0.05)
        raise AssertionError("never answered")

    async def play(self, number: int) -> str:
        async with self.slots:
            create = {"job": "job", "group_id": f"g{number // 2}", "group_size": 2}
            key = {"Idempotency-Key": f"create-{number}"}
            name = (await self.post("/rose/v1/trajectories", create, key))["id"]
            messages: list[Any] = [user(f"task {number}")]
            for turn in range(NUM_TURNS):
                body = {"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS}
                headers = {"X-Session-ID": name, "X-ROSE-Turn": str(turn)}
                answer = await self.post("/v1/chat/completions", body, headers)
                messages += [answer["choices"][0]["message"], user("next")]
            await self.post(f"/rose/v1/trajectories/{name}/finish", {"reward": number}, {})
            self.chaos.num_done += 1
            return name


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_500_trajectories_survive_kills_stops_cuts_and_restarts(tmp_path: Path) -> None:
    tokens = Tokens.generate()
    tokens.save(tmp_path / "tokens.toml")
    daemon = Daemon(tmp_path)
    url = await daemon.start()
    safe = EngineProcess(tmp_path, "own", "dedicated")  # while one dedicated worker lives, nothing may fail
    hurt = [EngineProcess(tmp_path, f"h{index}", "harvested") for index in range(3)]
    hurt.append(EngineProcess(tmp_path, "d1", "dedicated"))
    async with contextlib.AsyncExitStack() as ends:
        ends.push_async_callback(daemon.end)
        for engine in (safe, *hurt):
            ends.push_async_callback(engine.end)
            await engine.start(url)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            chaos = Chaos(7, daemon, hurt, session)
            agents = Agents(session, url, tokens, chaos)
            for engine in hurt:
                await chaos.cut(engine)  # before the first turn, so that some turns do move
            hurting = asyncio.create_task(chaos.run())
            try:
                names = await asyncio.gather(*(agents.play(number) for number in range(NUM_TRAJECTORIES)))
            finally:
                hurting.cancel()
                await asyncio.gather(hurting, *chaos.tasks, return_exceptions=True)
            assert set(chaos.acts) == {"cut", "kill", "stop", "scheduler"}  # it did hurt
            assert not agents.refused  # no FAILED(infra), no FAILED(deadline), no lost trajectory
            if daemon.process is None or daemon.process.returncode is not None:
                await daemon.start()  # the last restart was interrupted

            async def trainer(path: str, body: Any) -> Any:
                async with session.post(url + path, json=body, headers=bearer(tokens.trainer)) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

            lease = {"job": "job", "num_groups": NUM_TRAJECTORIES // 2, "version": [0, 0], "ttl_s": 600}
            batch = await trainer("/rose/v1/batches/lease", lease)
            assert sorted(item["id"] for item in batch["trajectories"]) == sorted(names)
            model = FakeEngine()
            num_moved = 0
            for item in batch["trajectories"]:
                assert [turn["parent"] for turn in item["turns"]] == [None, 0]
                for turn in item["turns"]:
                    expected, _, _ = model.greedy(turn["prompt_token_ids"], {"max_tokens": MAX_TOKENS})
                    assert turn["token_ids"] == expected  # none lost, none twice, across every cut
                    assert sum(segment["n"] for segment in turn["segments"]) == len(expected)
                    num_moved += len(turn["segments"]) > 1
            assert num_moved > 0
            await trainer(f"/rose/v1/batches/{batch['batch_id']}/ack", {"step": 1, "attempt": 0})
            async with session.get(f"{url}/status", headers=bearer(tokens.trainer)) as response:
                status = await response.json()
            # submitted = accepted + filtered + failed + cancelled + running
            assert {name: count for name, count in status["trajectories"].items() if count} == {
                "consumed": NUM_TRAJECTORIES
            }
        assert await daemon.end(signal.SIGTERM) == 0
    for path in logs(tmp_path / "journal"):  # what the killed schedulers decided comes out again
        assert replay(path).difference is None
