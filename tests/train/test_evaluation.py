"""Evaluations of whole runs: on which weights, beside what, and what a death costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.train.actors import Actors
from rose.train.check import check_job
from rose.train.client import SchedulerClient
from rose.train.train_config import TrainConfig
from tests.train.local_actors import LocalActors
from tests.train.local_run import SMALL, assert_applied_once, run
from tests.train.ray_world import job_table
from tests.train.world import World, running_world

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


async def test_an_evaluation_reports_the_version_it_was_pinned_to(world: World) -> None:
    evaluation = {"every_steps": 1, "num_tasks": 3}
    script, _, result = await run(
        world, {}, num_steps=2, eval=evaluation, rollout={**SMALL, "mode": "asynchronous"}
    )
    found = [record["eval"] for record in script.records]
    assert [(one["version"], one["num_episodes"]) for one in found] == [("1.1", 3), ("1.2", 3)]
    assert result.success_held_out == found[-1]["success_rate"]


async def test_held_out_episodes_are_played_beside_the_next_steps_on_the_same_weights(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps these evaluations would never end: but for the last one they wait for the next step's episodes to begin."""
    rolling, evaluate, play = asyncio.Event(), Actors.evaluate, Actors.run

    async def evaluating(self: Actors) -> dict[str, Any]:
        rolling.clear()
        if self.step < 3:
            await rolling.wait()
        return await evaluate(self)

    async def playing(self: Actors, plans: Any) -> Any:
        rolling.set()
        return await play(self, plans)

    monkeypatch.setattr(Actors, "evaluate", evaluating)
    monkeypatch.setattr(Actors, "run", playing)
    evaluation = {"every_steps": 1, "num_tasks": 3, "background": True}
    script, config, result = await run(world, {}, num_steps=3, eval=evaluation)
    found = [
        (record["step"], record["eval"]["version"], record["eval"]["num_episodes"])
        for record in script.records
    ]
    assert found == [(0, "1.1", 3), (1, "1.2", 3), (2, "1.3", 3)]
    assert result.success_held_out == script.records[-1]["eval"]["success_rate"]
    assert_applied_once(world, config)


@pytest.mark.parametrize("victim", ["kill_manager", "kill_trainer"])
async def test_a_death_costs_the_evaluation_in_the_background_and_no_line(
    world: World, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    evaluate, play = Actors.evaluate, Actors.run

    async def hanging(self: Actors) -> dict[str, Any]:
        if self.step == 1:
            await asyncio.Event().wait()
        return await evaluate(self)

    async def dying(self: Actors, plans: Any) -> Any:
        if self.step == 1 and not self.num_restarts:
            getattr(self, victim)()
            await self.survey()  # hears of a manager's death
            await self.train()  # of a trainer's
        return await play(self, plans)

    monkeypatch.setattr(Actors, "evaluate", hanging)
    monkeypatch.setattr(Actors, "run", dying)
    evaluation = {"every_steps": 1, "num_tasks": 3, "background": True}
    script, config, result = await run(world, {}, num_steps=3, eval=evaluation)
    assert [(record["step"], "eval" in record) for record in script.records] == [
        (0, False),
        (1, True),
        (2, True),
    ]
    lines = (config.output_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert (result.num_steps, result.num_restarts) == (3, 1)
    assert_applied_once(world, config)


async def test_training_and_held_out_tasks_are_played_greedily_and_sampled_by_one_version(
    world: World,
) -> None:
    """And the next driver's means go on with what the first one found."""
    evaluation = {
        "every_steps": 1,
        "num_tasks": 3,
        "num_training_tasks": 2,
        "sampled_episodes": 2,
        "average_over": 2,
        "background": True,
    }
    played: dict[str, set[str]] = {}

    def prepare(actors: LocalActors) -> None:
        tasks = {part.name: [task for _, task in drawn] for part, drawn in actors._eval_tasks.items()}
        played.update({name: {json.dumps(task) for task in drawn} for name, drawn in tasks.items()})

    first, _, _ = await run(world, {}, prepare=prepare, num_steps=2, eval=evaluation)
    told = first.records[-1]["eval"]
    assert told["version"] == "1.2"
    counts = {name: told[name]["num_episodes"] for name in ("training", "sampled", "sampled_training")}
    assert (told["num_episodes"], counts) == (3, {"training": 2, "sampled": 6, "sampled_training": 4})
    assert told["gap"] == told["training"]["success_rate"] - told["success_rate"]
    assert played["training"] == played["sampled_training"]
    assert not played["training"] & played["held_out"]
    again, _, _ = await run(world, {}, num_steps=3, eval=evaluation)
    (one,) = (record["eval"] for record in again.records)
    assert one["version"] == "2.3"
    assert one["recent"]["num_versions"] == 2
    assert one["recent"]["gap"] == pytest.approx((told["gap"] + one["gap"]) / 2)


async def test_what_a_killed_driver_left_of_an_evaluation_ends_with_the_next(
    tmp_path: Path, policy_model: Path
) -> None:
    """And what is begun after that goes on, also when a manager has died; as does another job of that name beside a job that evaluates nothing."""
    with running_world(tmp_path, policy_model, num_engines=0) as world:
        token = world.tokens.environment
        async with SchedulerClient(world.url, environment_token=token) as client:

            async def begun(group_id: str) -> str:
                one = await client.create_trajectory(
                    job="lake-eval", group_id=group_id, group_size=4096, task={}
                )
                return one.id

            async def running() -> list[str]:
                return [one["id"] for one in await client.list_trajectories(job="lake-eval", state="running")]

            left = await begun("held_out--0")
            for evaluation, stays in (({}, True), ({"at_end": True}, False)):
                config = TrainConfig.model_validate(job_table(world, job="lake", eval=evaluation))
                actors = LocalActors(config, world.tokens, None)
                actors._managers[0] = actors._make_manager(0)
                assert await actors.survey() == []
                assert (left in await running()) == stays
            own = await begun("held_out--1")
            actors._managers[0] = actors._make_manager(0)
            assert await actors.survey() == []
            assert await running() == [own]
            await actors.close()


def test_an_asynchronous_run_has_no_weights_that_stand_still_for_an_evaluation(world: World) -> None:
    changes = {"rollout": {**SMALL, "mode": "asynchronous"}, "eval": {"at_end": True, "background": True}}
    config = TrainConfig.model_validate(job_table(world, **changes))
    with pytest.raises(ConfigError, match=r"eval\.background: is for synchronous runs"):
        check_job(config)
