"""Arms of ``benchmarks.scheduling.provisioning`` against the clock: a real ``rose-scheduler`` process, engines that take time and no CPU.

**World.**  Two jobs with a run each and one model name.  A job repeats: roll out a step, lease it as a trainer does, train 10 to 30 s, acknowledge.  A
step has 4 groups of 8 trajectories (median; log-normal, sigma 0.6), each with 3 turns (geometric mean) of 80 new tokens (median).  Each job has a
dedicated engine (``benchmarks.training.engines.TimedEngine``: chunked prefill, KV memory and prefix cache, over HTTP); four more are
harvested: production is busy a quarter of the time (2.5 s in 10), takes half of the memory back then and leaves a tenth of the device; and every
:data:`DIES_S` on average one of them dies and is back, without weights, after :data:`AWAY_S`.  An engine that is told to have another run needs
:data:`SWITCH_S`, and what ran there ends with its tokens.

All times are a quarter of those of the world in virtual time, and so are those of the policy (:data:`SETTINGS`: a quarter of its defaults).

``python -m benchmarks.scheduling.provisioning --live`` runs the arms of each seed, several at a time, and makes the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.scheduling.fluid_world import draw
from benchmarks.training.engines import Bursts, EngineSpec, Steps, TimedEngine
from rose.auth import Tokens
from rose.policy.stop_reasons import OTHER_RUN
from rose.testing.fake_engine import serve_engine
from rose.testing.fake_node import FakeNode
from tests.scheduler.audit import Client
from tests.scheduler.processes import Daemon

JOBS = ("a", "b")
NUM_HARVESTED = 4
DURATION_S = 200.0
SWITCH_S = 0.75
DIES_S, AWAY_S = 100.0, 5.0
CONCURRENCY, GROUP_SIZE = 64, 8
BUSY_USE, QUIET_USE = 0.85, 0.3
STEPS = Steps(base_s=0.010, decode_s=0.002)
BURSTS = Bursts(quiet_share=0.9, busy_share=0.1, quiet_s=7.5, busy_s=2.5)
VERSION = "1.0"
SETTINGS = (
    "cap_dedicated=256",
    "cap_harvested=256",
    "provisioning.default.n_dedicated=1",
    "provisioning.period_s=0.25",
    "provisioning.hold_s=15.0",
    "provisioning.switch_s=1.25",
    "provisioning.arrive_s=30.0",
    "provisioning.idle_s=7.5",
    "provisioning.min_active_s=5.0",
    "provisioning.rest_s=2.5",
    "provisioning.job_idle_s=30.0",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """``split``: harvested engines of each job; None: provisioning decides."""

    name: str
    split: tuple[int, int] | None


ARMS = (
    Arm(name="never", split=(0, 0)),
    *(Arm(name=f"static-{n}", split=(n, NUM_HARVESTED - n)) for n in range(NUM_HARVESTED + 1)),
    Arm(name="policy", split=None),
)


class SwitchedEngine(TimedEngine):
    """A timed engine that may be given another run's weights."""

    def load(self, run: str) -> None:
        if run != self.weights_run:
            for key in list(self._turns):
                self._stop(key, OTHER_RUN)
            self.batch.drop_cache()
            self._prefixes.clear()
        self.weights_run, self.version = run, VERSION


class Host:
    """An engine and a node that does as the scheduler says; a harvested one has production beside it, and dies now and then.

    Args:
        own: The run that its configuration names.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        token: str,
        name: str,
        own: str,
        harvested: bool,
        seed: int,
    ) -> None:
        self._session, self._url, self._token = session, url, token
        self.name, self.own, self._harvested = name, own, harvested
        self._rng = random.Random(f"{name}/{seed}")
        self.num_switches = 0
        self.lost_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            life = self._rng.expovariate(1 / DIES_S) if self._harvested else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(life):
                    await self._live()
            await asyncio.sleep(AWAY_S)

    async def _live(self) -> None:
        tier = "harvested" if self._harvested else "dedicated"
        bursts = BURSTS if self._harvested else None
        spec = EngineSpec(
            name=self.name, tier=tier, steps=STEPS, bursts=bursts, seed=self._rng.randrange(1 << 30)
        )
        engine = SwitchedEngine(spec)
        runner, url = await serve_engine(engine)
        node = FakeNode(self._session, self._url, self._token, engine, url, worker_id=self.name, tier=tier)
        node.kv_budget_tokens = spec.kv_tokens
        tasks = [asyncio.create_task(engine.run())]
        if self._harvested:
            tasks.append(asyncio.create_task(engine.live_with_production(node)))
        try:
            await self._serve(engine, node)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.lost_s += engine.lost_s
            await runner.cleanup()

    async def _serve(self, engine: SwitchedEngine, node: FakeNode) -> None:
        """Heartbeats four times a second, and the weights of whichever run is wanted."""
        loading: asyncio.Task[None] | None = None
        wanted = self.own
        try:
            while True:
                if self._harvested:
                    node.serving_use = BUSY_USE if node.gated else QUIET_USE
                    node.slack_s = -0.1 if node.gated else 0.1
                if not await node.beat():
                    await node.register()
                    continue
                assert node.answer is not None
                wanted = node.answer.run or (self.own if node.answer.own_run else wanted)
                if wanted != engine.weights_run and (loading is None or loading.done()):
                    loading = asyncio.create_task(self._load(engine, wanted))
                await asyncio.sleep(0.25)
        finally:
            if loading is not None:
                loading.cancel()

    async def _load(self, engine: SwitchedEngine, run: str) -> None:
        await asyncio.sleep(SWITCH_S)
        self.num_switches += bool(engine.weights_run)
        engine.load(run)


class Job:
    """Rolls out and trains in turn, until cancelled."""

    def __init__(self, name: str, client: Client, seed: int) -> None:
        self.name, self._client, self._seed = name, client, seed
        self.tokens = self.steps = self.failed = 0
        self.rollouts: list[float] = []
        """Seconds of each step's, of steps whose rollouts have ended."""

    async def run(self) -> None:
        rng = random.Random(f"{self.name}/{self._seed}/steps")
        await self._client.trainer(
            "/rose/v1/versions", {"job": self.name, "attempt": 1, "version": 0, "run": self.name}
        )
        await asyncio.sleep(0.0 if self.name == JOBS[0] else 11.0)
        while True:
            num_groups = max(2, round(draw(rng, (4.0, 0.6))))
            slots, began_s = asyncio.Semaphore(CONCURRENCY), time.monotonic()
            await asyncio.gather(*(self._play(slots, number) for number in range(GROUP_SIZE * num_groups)))
            self.rollouts.append(time.monotonic() - began_s)
            lease = {
                "job": self.name,
                "run": self.name,
                "num_groups": num_groups,
                "version": [1, 0],
                "ttl_s": 600,
            }
            batch = await self._client.trainer("/rose/v1/batches/lease", lease)
            await asyncio.sleep(rng.uniform(10.0, 30.0))
            self.steps += 1
            ack = {"step": self.steps, "attempt": 1, "run": self.name}
            await self._client.trainer(f"/rose/v1/batches/{batch['batch_id']}/ack", ack)

    async def _play(self, slots: asyncio.Semaphore, number: int) -> None:
        """A trajectory; the same in every arm, whatever else happens."""
        place = f"{self.name}-{self.steps}-{number}"
        group = f"{self.name}-{self.steps}-{number // GROUP_SIZE}"
        rng, prompts = random.Random(f"{place}/{self._seed}"), random.Random(f"{group}/{self._seed}")
        async with slots:
            body = {"job": self.name, "group_id": group, "group_size": GROUP_SIZE}
            name = (await self._client.post("/rose/v1/trajectories", body, {"Idempotency-Key": place}))["id"]
            tokens = [prompts.randrange(10, 200) for _ in range(round(draw(prompts, (150.0, 0.5))))]
            turn = 0
            while turn == 0 or (turn < 8 and rng.random() > 1 / 3):
                sampling = {"max_tokens": min(round(draw(rng, (80.0, 0.6))), 400), "ignore_eos": True}
                answer = await self._client.post(
                    "/rose/v1/generate",
                    {"token_ids": tokens, "sampling_params": sampling},
                    {"X-Session-ID": name, "X-ROSE-Turn": str(turn)},
                )
                if any(segment["run"] != self.name for segment in answer["segments"]):
                    raise AssertionError(f"{name}, turn {turn}: {answer['segments']}")
                self.tokens += len(answer["token_ids"])
                self.failed += len(answer["token_ids"]) != sampling["max_tokens"]
                tokens = [*tokens, *answer["token_ids"], *(rng.randrange(10, 200) for _ in range(40))]
                turn += 1
                await asyncio.sleep(draw(rng, (0.5, 0.8), 0.0))
            await self._client.finish(name, rng.random())


async def _measure(arm: Arm, seed: int, folder: Path) -> dict[str, Any]:
    tokens = Tokens.generate()
    tokens.save(folder / "tokens.toml")
    mode = "on" if arm.split is None else "off"
    daemon = Daemon(folder, f'provisioning.mode="{mode}"', f"seed={seed}", *SETTINGS, policy="cost")
    owners = [job for job, count in zip(JOBS, arm.split or (2, 2), strict=True) for _ in range(count)]
    async with contextlib.AsyncExitStack() as ends:
        url = await daemon.start()
        ends.push_async_callback(daemon.end)
        connector = aiohttp.TCPConnector(limit=0)
        session = await ends.enter_async_context(aiohttp.ClientSession(connector=connector))
        client = Client(session, url, tokens)
        hosts = [Host(session, url, tokens.node, f"d{job}", job, False, seed) for job in JOBS]
        hosts += [
            Host(session, url, tokens.node, f"h{number}", job, True, seed)
            for number, job in enumerate(owners)
        ]
        jobs = [Job(job, client, seed) for job in JOBS]
        running = [asyncio.create_task(each.run()) for each in (*hosts, *jobs)]
        began_s = time.monotonic()
        done, _ = await asyncio.wait(running, timeout=DURATION_S, return_when=asyncio.FIRST_COMPLETED)
        found: dict[str, Any] = {
            "tokens": {job.name: job.tokens for job in jobs},
            "steps": {job.name: job.steps for job in jobs},
            "rollouts": {job.name: list(job.rollouts) for job in jobs},
            "switches_per_hour": 3600.0 * sum(host.num_switches for host in hosts) / DURATION_S,
            "failed": sum(job.failed for job in jobs),
            "seconds": time.monotonic() - began_s,
        }
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in done:
            task.result()
        found["late_share"] = sum(host.lost_s for host in hosts) / (len(hosts) * DURATION_S)
    return found


def measure(case: tuple[Arm, int]) -> dict[str, Any]:
    """One arm on one seed; takes :data:`DURATION_S`."""
    with tempfile.TemporaryDirectory(prefix="rose-live-") as folder:
        return asyncio.run(_measure(*case, Path(folder)))
