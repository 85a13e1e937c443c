"""Two jobs with one model name on one fleet: devices switched to and fro, scheduler and nodes killed, and no token of the wrong run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rose.auth import Tokens, bearer
from rose.decisions.log import logs, replay
from rose.proc import free_port
from rose.testing.fake_engine import FakeEngine, PrefixModel, serve_engine
from rose.testing.fake_node import FakeNode
from rose.weights import statehash
from tests.scheduler.audit import Client
from tests.scheduler.processes import Daemon

RUNS = {"job-a": "run-a", "job-b": "run-b"}
VERSIONS = {"run-a": 5, "run-b": 3}
"""Numbers overlap: what is new enough for one job is so for the other, by its number."""
NUM_ENGINES, NUM_SWITCHES = 3, 50
NUM_ROUNDS = 15
"""At least, for every third one has a kill."""
TOKEN_S, MAX_TOKENS = 0.004, 24
SETTINGS = (
    "cap_dedicated=2",
    "timeouts.backoff_s=0.05",
    'provisioning.mode="on"',
    "provisioning.period_s=0.05",
    "provisioning.gain_factor=0.1",
    "provisioning.switch_s=0.05",
    "provisioning.min_active_s=0.1",
    "provisioning.rest_s=0.0",
    "provisioning.idle_s=5.0",
)


def weights_of(run: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.random.default_rng(list(run.encode())).integers(0, 2**32, 256, dtype=np.uint32)


def hash_of(run: str) -> int:
    """State hash of the run's policy; one set of weights each, whatever their version."""
    return statehash.hash_bits(weights_of(run))


class PolicyEngine(FakeEngine):
    """Draws each token from the weights that it has in that moment, by their state hash."""

    def __init__(self) -> None:
        super().__init__(token_s=TOKEN_S)
        self.weights = weights_of("")
        self.num_switches = 0

    def load(self, run: str, version: str) -> None:
        self.num_switches += run != self.weights_run
        self.switch(run, version)
        self.weights = weights_of(run)

    def _sample(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Any:
        state = self._model.state(prompt)
        while True:
            token, logprob = drawn(self._model, state, statehash.hash_bits(self.weights))
            state = self._model.state([token], state)
            yield token, logprob


def drawn(model: PrefixModel, state: int, policy: int) -> tuple[int, float]:
    token, logprob, _ = model.step(state ^ (policy & 0xFFFF_FFFF), None, may_end=False)
    return token, logprob


class Host:
    """An engine with a node that does as the scheduler says; comes back under its name after it was killed."""

    def __init__(self, name: str, session: aiohttp.ClientSession, url: str, token: str, seed: int) -> None:
        self.name, self._session, self._url, self._token = name, session, url, token
        self._rng = random.Random(seed)
        self.num_switches = 0
        self._task: asyncio.Task[None] | None = None
        self._port = free_port()

    async def start(self) -> None:
        self.engine = PolicyEngine()
        self.runner, url = await serve_engine(self.engine, self._port)
        self.node = FakeNode(
            self._session, self._url, self._token, self.engine, url, worker_id=self.name, tier="harvested"
        )
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        node, engine = self.node, self.engine
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if not await node.beat():
                    await node.register()
                    await node.beat()
                answer = node.answer
                if answer is not None and answer.run is not None and answer.run != engine.weights_run:
                    await asyncio.sleep(self._rng.uniform(0.0, 0.03))  # other weights take their time
                    engine.load(answer.run, f"1.{VERSIONS[answer.run]}")
            await asyncio.sleep(self._rng.uniform(0.01, 0.05))

    async def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self.num_switches += self.engine.num_switches
            self.engine.num_switches = 0
            await self.runner.cleanup()


async def play(client: Client, job: str, number: int) -> str:
    """A trajectory of two turns; whoever does not answer is asked again."""
    body = {"job": job, "group_id": f"{job}-{number}", "group_size": 1}
    name = (await client.post("/rose/v1/trajectories", body, {"Idempotency-Key": f"{job}-{number}"}))["id"]
    prompt = [10 + number % 50, 11, 12]
    for turn in range(2):
        sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
        answer = await client.post(
            "/rose/v1/generate",
            {"token_ids": prompt, "sampling_params": sampling, "stream": False},
            {"X-Session-ID": name, "X-ROSE-Turn": str(turn)},
        )
        prompt = [*prompt, *answer["token_ids"], 13]
    await client.finish(name, float(number))
    return name


async def burst(client: Client, job: str, first: int, count: int) -> list[str]:
    return list(await asyncio.gather(*(play(client, job, first + number) for number in range(count))))


async def publish(client: Client, job: str) -> None:
    run = RUNS[job]
    body = {"job": job, "attempt": 1, "version": VERSIONS[run], "run": run}
    await client.trainer("/rose/v1/versions", body)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_no_token_is_of_another_run_though_devices_change_runs_fifty_times(tmp_path: Path) -> None:
    tokens = Tokens.generate()
    tokens.save(tmp_path / "tokens.toml")
    daemon = Daemon(tmp_path, *SETTINGS)
    url = await daemon.start()
    async with contextlib.AsyncExitStack() as ends:
        session = await ends.enter_async_context(aiohttp.ClientSession())
        ends.push_async_callback(daemon.end)
        client = Client(session, url, tokens)
        hosts = [Host(f"n{at}", session, url, tokens.node, at) for at in range(NUM_ENGINES)]
        for host in hosts:
            await host.start()
            ends.push_async_callback(host.kill)
        for job in RUNS:
            await publish(client, job)

        names: dict[str, list[str]] = {job: [] for job in RUNS}
        kills = iter((hosts[0], daemon, hosts[1], daemon, hosts[2]))
        rounds = 0
        running: list[asyncio.Task[list[str]]] = []
        while (
            rounds < NUM_ROUNDS
            or sum(host.num_switches + host.engine.num_switches for host in hosts) < NUM_SWITCHES
        ):
            job = list(RUNS)[rounds % 2]
            running.append(asyncio.create_task(burst(client, job, 100 * rounds, 16), name=job))
            await asyncio.sleep(0.3)  # the next job begins in the middle of this one's turns
            if rounds % 3 == 2 and (victim := next(kills, None)) is not None:
                await (victim.end() if isinstance(victim, Daemon) else victim.kill())
                await victim.start()
            if len(running) > 1:
                done = running.pop(0)
                names[done.get_name()] += await done
            rounds += 1
            assert rounds < 200, "devices hardly change their runs"
        for task in running:
            names[task.get_name()] += await task

        found: Counter[str] = Counter()
        for job, mine in names.items():
            for name in mine:
                headers = bearer(tokens.trainer)
                async with session.get(f"{url}/rose/v1/trajectories/{name}", headers=headers) as response:
                    trace = await response.json()
                for turn in trace["turns"]:
                    check(turn, RUNS[job], hosts[0].engine, found)
        assert next(kills, None) is None
        assert found["moved"] > 10, "turns were moved in the middle"
        assert found["tokens"] == 2 * MAX_TOKENS * sum(map(len, names.values()))
    decided: Counter[str] = Counter()
    lives = logs(tmp_path / "journal", "provisioning")
    for life in lives:
        replayed = replay(life)
        assert replayed.difference is None, replayed.difference
        decided += replayed.num_actions
    assert len(lives) == 3  # two kills of the scheduler
    assert decided["Activate"] >= 12


def check(turn: dict[str, Any], run: str, engine: PolicyEngine, found: Counter[str]) -> None:
    """Each token is the one that the run's weights draw after those before it."""
    segments = turn["segments"]
    assert {segment["run"] for segment in segments} == {run}
    assert {version for version, _, _ in turn["versions"]} == {f"1.{VERSIONS[run]}"}
    state = engine._model.state(turn["prompt_token_ids"])
    for token in turn["token_ids"]:
        assert token == drawn(engine._model, state, hash_of(run))[0], f"not drawn from the weights of {run}"
        state = engine._model.state([token], state)
    found["tokens"] += len(turn["token_ids"])
    found["moved"] += len(segments) > 1
