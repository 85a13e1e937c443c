"""A job that has run before begins in an empty folder: what of the life before it gives up, and what a death on the way leaves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.errors import Conflict, TrainError
from rose.train.build import trainer_params
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer
from rose.train.workers import Parts, TrainWorker
from tests.train.file_publisher import file_publisher
from tests.train.local_run import consumed_of, run
from tests.train.test_rollout import client_of
from tests.train.world import World, running_world

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


async def play(world: World, config: TrainConfig, group: str) -> set[str]:
    """A whole group of another life, which waits for a trainer."""
    async with client_of(world) as client:
        names: set[str] = set()
        for reward in range(config.rollout.group_size):
            one = await client.create_trajectory(
                job=config.job, group_id=group, group_size=config.rollout.group_size, task={}
            )
            await client.finish(one.id, reward=float(reward), success=False, info={})
            names.add(one.id)
        return names


class DiesUnpublished:
    """A publisher of which the first ``num_deaths`` end before anything of theirs is a version."""

    num_deaths = 0

    def __init__(self, config: TrainConfig, tokens: Any, module: Any, attempt: int) -> None:
        self._inner = file_publisher(config, tokens, module, attempt)

    def publish(self, version: int, **told: Any) -> Any:
        if DiesUnpublished.num_deaths > 0:
            DiesUnpublished.num_deaths -= 1
            raise TrainError("killed during the upload")
        return self._inner.publish(version, **told)


@pytest.mark.parametrize("num_deaths", [1, 2])
async def test_starts_that_died_before_they_published_can_be_wiped_away(
    world: World, num_deaths: int
) -> None:
    """The scheduler has heard of their attempts, and neither a version nor the folder tells of them."""
    _, config, _ = await run(world, {}, num_steps=1)
    shutil.rmtree(config.output_dir)
    DiesUnpublished.num_deaths = num_deaths
    for _ in range(num_deaths):
        with pytest.raises(TrainError, match="killed during the upload"):
            await run(world, {}, num_steps=1, parts=Parts(make_publisher=DiesUnpublished))
    shutil.rmtree(config.output_dir)
    _, config, result = await run(world, {}, num_steps=1)
    assert (result.num_steps, result.attempt) == (1, 2 + num_deaths)
    assert len(consumed_of(config)[0]) == 8


@pytest.mark.parametrize("is_wiped", [False, True])
@pytest.mark.parametrize("dies_in", ["_save", "_publish"])
async def test_a_death_at_the_start_lets_nothing_of_the_life_before_through(
    world: World, monkeypatch: pytest.MonkeyPatch, dies_in: str, is_wiped: bool
) -> None:
    """Before its attempt is claimed, all is done again; behind that, it has been done."""
    _, config, _ = await run(world, {}, num_steps=1)
    shutil.rmtree(config.output_dir)
    old = await play(world, config, "old")

    async def dies(*_: Any) -> None:
        raise TrainError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(TrainWorker, dies_in, dies)
        with pytest.raises(TrainError, match="killed"):
            await run(world, {}, num_steps=1)
    if is_wiped:
        shutil.rmtree(config.output_dir)
    _, config, result = await run(world, {}, num_steps=1)
    assert result.num_steps == 1
    assert not old & set(consumed_of(config)[0])


class Meanwhile(TorchTrainer):
    """Another life of the job still samples, and asks for a batch, while the first checkpoint is written."""

    world: World
    config: TrainConfig
    sampled: set[str]
    refused: str

    def save(self, *arguments: Any, **named: Any) -> None:
        if not self.sampled:
            asyncio.run(self._live_on())
        super().save(*arguments, **named)

    async def _live_on(self) -> None:
        kind = type(self)
        async with client_of(self.world) as client:
            for group in ("meanwhile", "beside it"):
                kind.sampled = self.sampled | await play(self.world, self.config, group)
            with pytest.raises(Conflict) as caught:
                await client.lease(
                    job=self.config.job, num_groups=1, attempt=1, version=1, ttl_s=60.0, wait_s=0.0, name="b",
                    run=self.config.run_id,
                )  # fmt: skip
            kind.refused = str(caught.value)


def meanwhile_trainer(config: TrainConfig) -> TorchTrainer:
    return Meanwhile(config.model, trainer_params(config))


async def test_a_driver_of_before_that_still_lives_gets_and_gives_nothing_while_the_first_checkpoint_is_written(
    world: World,
) -> None:
    _, config, _ = await run(world, {}, num_steps=1)
    shutil.rmtree(config.output_dir)
    Meanwhile.world, Meanwhile.config, Meanwhile.sampled, Meanwhile.refused = world, config, set(), ""
    parts = Parts(make_trainer=meanwhile_trainer, make_publisher=file_publisher)
    _, config, _ = await run(world, {}, num_steps=1, parts=parts)
    assert "attempt 1 was replaced by 2" in Meanwhile.refused
    assert len(Meanwhile.sampled) == 8
    assert not Meanwhile.sampled & set(consumed_of(config)[0])
    assert world.scheduler is not None
    assert world.scheduler.store.book.counts(config.job)["finished"] == 0
