"""SIGKILL of an engine and of the scheduler under a train loop, in the middle of its steps; each is a process of its own.

Environment actors, reward workers, trainer and driver: ``test_async.py``, ``test_loop.py``, ``test_faults.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.auth import Tokens, bearer
from rose.proc import free_port
from rose.testing.fake_engine import serve_engine
from rose.testing.fake_node import FakeNode
from rose.testing.toy_recipe import TOY_RECIPE
from rose.train import checkpoint as checkpoints
from rose.train.loop import train_with
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from tests.engine_launcher import Forked, fork_piped
from tests.scheduler.processes import Daemon
from tests.train.file_publisher import RUN, file_publisher
from tests.train.local_actors import LocalActors
from tests.train.world import TorchEngine, keep_up

pytestmark = pytest.mark.timeout(300)

NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 6, 2, 4


class Deployment:
    """The scheduler as its own process; engine ``d`` in this one, engine ``h`` in its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.versions = folder / "versions"
        self.daemon = Daemon(folder)
        self.tokens = Tokens.generate()
        self.tokens.save(folder / "tokens.toml")
        self._engine: Forked | None = None
        self._engine_port = free_port()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[aiohttp.ClientSession]:
        self.versions.mkdir()
        await self.daemon.start()
        async with aiohttp.ClientSession(headers=bearer(self.tokens.environment)) as session:
            engine = TorchEngine(self.model, self.versions, seed=0)
            runner, url = await serve_engine(engine)
            node = FakeNode(session, self.daemon.url, self.tokens.node, engine, url, worker_id="d")
            await node.register()
            beats = asyncio.create_task(keep_up(node, engine, self.versions))
            await self.start_engine()
            try:
                yield session
            finally:
                beats.cancel()
                await asyncio.gather(beats, return_exceptions=True)
                await self.kill_engine()
                await self.daemon.end()
                await runner.cleanup()

    async def start_engine(self) -> None:
        spec = {
            "model": str(self.model),
            "versions": str(self.versions),
            "seed": 1,
            "token_file": str(self.folder / "tokens.toml"),
            "scheduler": self.daemon.url,
            "worker_id": "h",
            "tier": "harvested",
            "port": self._engine_port,
        }
        path = self.folder / "engine.json"
        path.write_text(json.dumps(spec))
        self._engine, said = await asyncio.to_thread(
            fork_piped, "tests.train.engine_process", [str(path)], os.environ
        )
        with said:
            assert (await asyncio.to_thread(said.readline)).startswith("ready ")

    async def kill_engine(self) -> None:
        assert self._engine is not None
        self._engine.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._engine.wait)


@pytest.mark.parametrize("mode", [pytest.param("synchronous", marks=pytest.mark.conformance), "asynchronous"])
async def test_the_job_goes_on_and_applies_each_trajectory_once(
    tmp_path: Path, policy_model: Path, mode: str
) -> None:
    deployment = Deployment(tmp_path, policy_model)
    records: list[Mapping[str, Any]] = []
    killed: list[str] = []

    async with deployment.running() as session:
        url = deployment.daemon.url

        async def when(worker_id: str, step: int) -> None:
            """Until ``step`` is under way and the worker has a turn of it."""
            while True:
                async with session.get(f"{url}/workers") as response:
                    workers = (await response.json())["workers"]
                inflight = {worker["worker_id"]: worker["inflight"] for worker in workers}
                if sum("event" not in record for record in records) >= step and inflight.get(worker_id):
                    return
                await asyncio.sleep(0.005)

        async def kill() -> None:
            await when("h", 1)
            await deployment.kill_engine()
            killed.append("engine")
            again = asyncio.create_task(deployment.start_engine())  # the run does not wait for it
            await when("d", 3)
            await deployment.daemon.end(signal.SIGKILL)
            killed.append("scheduler")
            await deployment.daemon.start()
            await again

        config = TrainConfig.model_validate(
            {
                "job": RUN,
                "model": str(policy_model),
                "output_dir": str(tmp_path / "out"),
                "num_steps": NUM_STEPS,
                "scheduler": {"url": url, "retry_s": 60.0},
                "weights": {"directory": str(deployment.versions)},
                "rollout": {
                    "mode": mode,
                    "alpha": 2,
                    "num_groups": NUM_GROUPS,
                    "group_size": GROUP_SIZE,
                },
                "env": {"settings": {"num_maps": 4}},
                "trainer": {**TOY_RECIPE, "keep_checkpoints": 100},
                "log": {"tensorboard": False},
            }
        )
        actors = LocalActors(config, deployment.tokens, Parts(make_publisher=file_publisher))
        killer = asyncio.create_task(kill())
        try:
            result = await train_with(actors, records.append)
            await killer
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)
            await actors.close()
        async with session.get(f"{url}/status") as response:
            states = (await response.json())["trajectories"]

    assert killed == ["engine", "scheduler"]
    # Nobody who holds weights or episodes died, so nobody began anew.
    assert (result.num_steps, result.attempt, result.num_restarts) == (NUM_STEPS, 1, 0)
    newest, _ = checkpoints.load_latest(config.output_dir / "checkpoints")
    assert newest is not None
    consumed = [newest.consumed[step] for step in range(NUM_STEPS)]
    assert [len(ids) for ids in consumed] == [NUM_GROUPS * GROUP_SIZE] * NUM_STEPS
    assert len(set(newest.consumed_ids)) == NUM_STEPS * NUM_GROUPS * GROUP_SIZE == states["consumed"]
    assert not states.get("leased")
    if mode == "synchronous":  # one version per step: what was lost and played again is of the same weights
        steps = [record for record in records if "event" not in record]
        assert all(record["lag_max"] == 0 and record["logprob_diff_max"] < 1e-3 for record in steps)
