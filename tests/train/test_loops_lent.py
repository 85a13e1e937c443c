"""The trainer's device, lent to a rollout engine while rollouts run: whole runs on the real scheduler and a real node agent, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.agent import NodeAgent
from rose.errors import ConfigError, TrainError
from rose.train.check import check_job
from rose.train.device_loan import DeviceLoan
from rose.train.loop import train_with
from rose.train.train_config import LendSettings, TrainConfig
from rose.train.workers import Parts, TrainWorker
from tests.coserve.conftest import Device, until
from tests.train.file_publisher import file_publisher
from tests.train.local_actors import LocalActors
from tests.train.local_run import SMALL, Script, run
from tests.train.ray_world import job_table
from tests.train.world import World, running_world

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


@pytest.fixture
async def lender(world: World, tmp_path: Path) -> AsyncIterator[Device]:
    """A node agent of a borrowed device, with the world's tokens."""
    device = Device(tmp_path / "device")
    device.tokens = world.tokens
    device.agent(serving=None, borrowed=True)
    await until(lambda: (device.dir / "agent.sock").exists())
    yield device
    await device.close()


async def test_the_trainers_device_is_an_engines_while_it_waits_and_its_own_while_it_trains(
    world: World, lender: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    (agent, _), train, lend = lender.agents[0], TrainWorker.train, NodeAgent.lend

    async def training(self: TrainWorker, *arguments: Any, **named: Any) -> Any:
        said.append(f"train, {max(0, lender.resident_pages())} pages held")
        return await train(self, *arguments, **named)

    def lending(self: NodeAgent, seconds: float) -> None:
        said.append("lend" if seconds else "back")
        lend(self, seconds)

    monkeypatch.setattr(TrainWorker, "train", training)
    monkeypatch.setattr(NodeAgent, "lend", lending)

    # Not through run(): what the agent does meanwhile is none of the loop's tasks.
    changes = {"num_steps": 3, "rollout": {**SMALL, "mode": "synchronous"}, "log": {"tensorboard": False}}
    table = job_table(world, **changes, lend={"node_dir": str(lender.dir)})
    config = TrainConfig.model_validate(table)
    actors = LocalActors(config, world.tokens, Parts(make_publisher=file_publisher))
    script = Script(actors, {})
    try:
        result = await train_with(actors, script)
    finally:
        await actors.close()

    assert result.num_steps == 3
    assert said == ["lend", "back", "train, 0 pages held"] * 3
    assert all(0 < record["lent_s"] <= record["step_s"] for record in script.records)
    assert agent.engine.num_starts == 1
    assert agent.lent_s == 0.0


async def test_a_loan_ends_with_its_run_even_where_the_rollouts_fail(lender: Device) -> None:
    (agent, _) = lender.agents[0]
    loan = DeviceLoan(LendSettings(node_dir=lender.dir), lender.tokens)

    async def rollouts() -> None:
        async with loan.lent():
            await until(lambda: (agent.lent_s or 0.0) > 0)
            raise TrainError("all episodes failed")

    with pytest.raises(TrainError):
        await rollouts()
    assert agent.lent_s == 0.0


async def test_a_node_agent_that_is_gone_costs_the_run_nothing_but_its_help(
    world: World, lender: Device, caplog: pytest.LogCaptureFixture
) -> None:
    await lender.stop_agents()
    script, _, result = await run(
        world, {}, num_steps=2, rollout={**SMALL, "mode": "synchronous"}, lend={"node_dir": str(lender.dir)}
    )
    assert result.num_steps == 2
    assert [record["lent_s"] for record in script.records] == [0.0, 0.0]
    said = [one.getMessage() for one in caplog.records if "cannot be lent" in one.getMessage()]
    assert len(said) == 1  # and not at every try


async def test_what_cannot_be_lent_is_said_before_anything_starts(world: World, lender: Device) -> None:
    await asyncio.to_thread(DeviceLoan(LendSettings(node_dir=lender.dir), world.tokens).check)
    lender.agents[0][0].config = lender.agents[0][0].config.model_copy(update={"borrowed": False})
    with pytest.raises(ConfigError, match="has its device to itself") as refused:
        await asyncio.to_thread(DeviceLoan(LendSettings(node_dir=lender.dir), world.tokens).check)
    assert refused.value.field == "lend.node_dir"
    with pytest.raises(ConfigError, match="no node agent answers"):
        DeviceLoan(LendSettings(node_dir=lender.dir / "other"), world.tokens).check()
    table = job_table(world, rollout={**SMALL, "mode": "asynchronous"}, lend={"node_dir": str(lender.dir)})
    with pytest.raises(ConfigError, match="is for synchronous runs"):
        check_job(TrainConfig.model_validate(table))
