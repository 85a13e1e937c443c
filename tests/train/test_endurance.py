"""What a run of weeks meets and must not end of, on the real scheduler and engines that run the policy, without Ray."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.errors import TrainError
from rose.scheduler.records import FinishRecord
from rose.train.build import trainer_params
from rose.train.client import SchedulerClient
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer
from rose.train.workers import Parts
from tests.train.file_publisher import RUN, file_publisher
from tests.train.local_actors import LocalActors
from tests.train.local_run import SMALL, assert_applied_once, run
from tests.train.ray_world import job_table
from tests.train.world import World, running_world

pytestmark = pytest.mark.timeout(300)

FAILS_AT_ONCE = {"max_retries": 0}


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_a_task_that_always_fails_is_begun_twice_at_most_and_costs_only_itself(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("rose.train.workers.LEASE_WAIT_S", 0.1)
    crews: list[LocalActors] = []
    env = {"kind": "tests.train.ray_world:first_task_fails", **FAILS_AT_ONCE, "max_failed_groups": 6}
    script, config, _ = await run(
        world, {}, prepare=crews.append, num_steps=8, env=env, rollout={**SMALL, "mode": mode, "alpha": 2}
    )
    assert [record["step"] for record in script.records] == list(range(8))
    failed = crews[0].given_up
    assert len(failed) >= 2  # the task came round again, under other names
    assert max(failed.values()) <= 2
    assert sum(record["num_failed_groups"] for record in script.records) <= sum(failed.values())
    assert_applied_once(world, config)


def test_failed_groups_of_long_ago_are_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.train.actors.MAX_REMEMBERED", 2)
    actors = LocalActors(TrainConfig.model_validate(job_table(world)), world.tokens, None)
    for name in ("a", "a", "b", "c"):
        actors.gave_up(name)
    assert dict(actors.given_up) == {"b": 1, "c": 1}


async def test_held_out_episodes_that_fail_cost_their_evaluation_alone(world: World) -> None:
    env = {"kind": "tests.train.ray_world:held_out_fails", **FAILS_AT_ONCE}
    script, _, result = await run(
        world, {}, num_steps=2, env=env, eval={"every_steps": 1, "at_end": True, "num_tasks": 2}
    )
    assert [("eval" in record, record["step"]) for record in script.records] == [(False, 0), (False, 1)]
    assert all("its sandbox does not start" in record["eval_error"] for record in script.records)
    assert (result.num_steps, result.num_restarts, result.success_held_out) == (2, 0, None)


async def test_leases_that_run_out_before_the_acknowledgement_apply_nothing_twice(world: World) -> None:
    scheduler = {"url": world.url, "retry_s": 20.0, "lease_ttl_s": 0.01}
    trainer = {
        "algorithm": "dapo",
        "keep_checkpoints": 100,
    }  # later leases of a step find out that earlier ones are over
    script, config, result = await run(world, {}, num_steps=3, scheduler=scheduler, trainer=trainer)
    assert max(record["num_leases"] for record in script.records) > 1
    assert (result.num_steps, result.num_restarts) == (3, 0)
    assert_applied_once(world, config)


class SlowTrainer(TorchTrainer):
    """Its first step waits to be let go on."""

    may_go_on, has_begun = threading.Event(), threading.Event()

    def step(self, *arguments: Any, **named: Any) -> Any:
        type(self).has_begun.set()
        assert type(self).may_go_on.wait(250)
        return super().step(*arguments, **named)


def slow_trainer(config: TrainConfig) -> SlowTrainer:
    return SlowTrainer(config.model, trainer_params(config))


async def test_a_step_that_its_driver_lost_touch_with_ends_before_the_next_begins(world: World) -> None:
    config = TrainConfig.model_validate(job_table(world, rollout=SMALL, log={"tensorboard": False}))
    actors = LocalActors(
        config, world.tokens, Parts(make_trainer=slow_trainer, make_publisher=file_publisher)
    )
    SlowTrainer.may_go_on.clear()
    SlowTrainer.has_begun.clear()
    try:
        await actors.ensure()
        for _ in range(2):  # enough for two steps
            await _play(actors, config)
        lost = asyncio.create_task(actors.train())
        await asyncio.to_thread(SlowTrainer.has_begun.wait, 250)
        handed_back = asyncio.create_task(actors.ensure())
        again = asyncio.create_task(actors.train())
        for _ in range(100):  # neither may get anywhere
            await asyncio.sleep(0)
        assert not handed_back.done()
        SlowTrainer.may_go_on.set()
        await handed_back
        records = [await lost, await again]
        assert [record["step"] for record in records] == [0, 1]
    finally:
        SlowTrainer.may_go_on.set()
        await actors.stop_episodes()
        await actors.close()
    assert_applied_once(world, config)


class SlowDisk(TorchTrainer):
    """Its checkpoints are not durable before it is told so."""

    may_be_durable = threading.Event()

    def finish_save(self) -> None:
        assert type(self).may_be_durable.wait(250)
        super().finish_save()


def trainer_on_slow_disk(config: TrainConfig) -> SlowDisk:
    return SlowDisk(config.model, trainer_params(config))


async def test_a_lease_that_is_gone_when_a_slow_checkpoint_is_durable_costs_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then leases of all steps of two checkpoints are open, and none of them may be trained on again."""
    lost: list[str] = []
    ack = SchedulerClient.ack

    async def too_late(client: SchedulerClient, batch_id: str, **said: Any) -> None:
        if not lost:
            lost.append(batch_id)
            await client.give_back(batch_id)
        await ack(client, batch_id, **said)

    def prepare(actors: LocalActors) -> None:
        monkeypatch.setattr(actors, "let_be_durable", SlowDisk.may_be_durable.set, raising=False)

    monkeypatch.setattr(SchedulerClient, "ack", too_late)
    SlowDisk.may_be_durable.clear()
    trainer = {"checkpoint_every": 6, "background_checkpoints": True}
    parts = Parts(make_trainer=trainer_on_slow_disk, make_publisher=file_publisher)
    _, config, result = await run(
        world, {10: "let_be_durable"}, parts=parts, prepare=prepare, num_steps=14, trainer=trainer
    )
    assert lost
    assert (result.num_steps, result.num_restarts) == (14, 0)
    assert_applied_once(world, config)


async def _play(actors: LocalActors, config: TrainConfig) -> None:
    from rose.train.plan import plan_groups

    num_ready = await actors.num_ready()
    plans = plan_groups(
        waiting=(),
        mix=actors.mix,
        step=0,
        first_task=num_ready,
        attempt=actors.attempt,
        num_groups=config.rollout.num_groups,
        group_size=config.rollout.group_size,
        first_index=num_ready,
    )
    await actors.run([plans])


@pytest.mark.parametrize(("last_step", "checkpoint_every"), [(2, 1), (0, 5)])
async def test_a_trainer_that_comes_back_to_an_empty_folder_does_not_begin_anew(
    world: World, last_step: int, checkpoint_every: int
) -> None:
    """Restarted on a node that does not share the folder: its steps would be gone without a word, and what waits given up."""
    assert world.scheduler is not None
    store = world.scheduler.store

    async def leave_a_group() -> None:
        for reward in range(SMALL["group_size"]):
            size = SMALL["group_size"]
            name = store.create(job=RUN, group_id="waits", group_size=size, task={}, sampling={})
            store.finish(FinishRecord(id=name, reward=float(reward)))

    def prepare(actors: LocalActors) -> None:
        kill = actors.kill_trainer

        def kill_and_wipe() -> None:
            kill()
            shutil.rmtree(actors.config.output_dir / "checkpoints")
            world.call(leave_a_group())

        actors.kill_trainer = kill_and_wipe  # type: ignore[method-assign]

    told = rf"output_dir: .*no checkpoint, where {last_step + 1} steps had been taken"
    trainer = {"checkpoint_every": checkpoint_every}
    with pytest.raises(TrainError, match=told):
        await run(world, {last_step: "kill_trainer"}, prepare=prepare, num_steps=8, trainer=trainer)
    assert "waits" in store.book.ready[RUN]
    assert store.book.attempts[RUN, ""] == 1


async def test_a_synchronous_refill_leaves_nothing_over_where_nothing_old_may_be_used(world: World) -> None:
    rollout = {"num_groups": 3, "group_size": 4, "alpha": 0}
    script, config, _ = await run(
        world, {}, num_steps=4, rollout=rollout, trainer={"algorithm": "dapo", "keep_checkpoints": 100}
    )
    assert sum(record["num_leases"] for record in script.records) > 4  # there were refills
    assert [record["lag_max"] for record in script.records] == [0] * 4
    assert_applied_once(world, config)
