"""Episodes through the real scheduler: which are started, what is recorded, and what a failure costs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError, NotFound, TrainError, Unauthorized
from rose.testing.fake_engine import Fault
from rose.train.batch import samples_of
from rose.train.client import SchedulerClient
from rose.train.envs.base import Observation
from rose.train.envs.frozenlake import FrozenLakeFamily, FrozenLakeParams
from rose.train.plan import GroupPlan
from rose.train.rollout import EpisodeParams, EpisodeRunner, pause_before, single_token_ids
from rose.wire import samples
from rose.wire.addresses import Addresses
from tests.train.ray_world import Wrapper
from tests.train.world import World, running_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path_factory.mktemp("world"), policy_model) as world:
        yield world


def client_of(world: World, **changes: Any) -> SchedulerClient:
    return SchedulerClient(
        world.url,
        environment_token=world.tokens.environment,
        trainer_token=world.tokens.trainer,
        **{"retry_s": 0.0} | changes,
    )


def runner_of(
    world: World, client: SchedulerClient, family: Any, *, job: str, **changes: Any
) -> EpisodeRunner:
    params = {
        "job": job,
        "model": "policy",
        "temperature": 0.9,
        "max_tokens": 1,
        "concurrency": 64,
        "step_timeout_s": 5.0,
        "max_retries": 1,
    }
    allowed = single_token_ids(world.model_path, family.allowed_texts)
    return EpisodeRunner(client, family, EpisodeParams(**params | changes), allowed)  # type: ignore[arg-type]


def group(family: Any, *, size: int = 4) -> GroupPlan:
    return GroupPlan(group_id="g", group_size=size, task=family.tasks()[0], num_missing=size)


async def test_a_group_becomes_a_batch_whose_log_probs_are_the_engines(world: World) -> None:
    """The whole way of a token: engine -> gateway -> trace -> tensors, compared with the model that sampled it."""
    from rose.train.trainer import TorchTrainer, TrainerParams

    family = FrozenLakeFamily(FrozenLakeParams())
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job="whole").run([group(family)])
        leased = await client.lease(job="whole", num_groups=1, attempt=0, version=0, ttl_s=60, wait_s=0)

    assert leased is not None
    trajectories = leased[1]
    assert (report.num_episodes, len(trajectories)) == (4, 4)
    assert report.num_turns == sum(len(one["turns"]) for one in trajectories)
    samples = [s for one in trajectories for s in samples_of(one, vocab_size=320, max_tokens=1024)]
    assert len(samples) == 4  # no conversation forked
    trainer = TorchTrainer(world.model_path, TrainerParams(learning_rate=1e-3))
    for sample, found in zip(samples, trainer.log_probs(samples), strict=True):
        assert sample.temperatures[0] == 0.9
        assert found.tolist() == pytest.approx(list(sample.logprobs), abs=1e-4)


async def test_episodes_are_drawn_from_the_models_own_distribution(world: World) -> None:
    """Whatever sampling settings its folder has for requests that name none."""
    family = FrozenLakeFamily(FrozenLakeParams())
    for engine in world.engines:
        engine.generation_config = {"top_p": 0.8, "top_k": 20, "presence_penalty": 0.5}
    async with client_of(world) as client:
        await runner_of(world, client, family, job="own").run([group(family)])
        leased = await client.lease(job="own", num_groups=1, attempt=0, version=0, ttl_s=60, wait_s=0)
    for engine in world.engines:
        engine.generation_config = {}
    assert leased is not None
    turns = [turn for one in leased[1] for turn in one["turns"]]
    assert {tuple(turn["constraints"]) for turn in turns} == {("allowed_token_ids",)}


class Endless(FrozenLakeFamily):
    """Environments that never answer; ``playing`` is set when ``count`` of them are at it."""

    def __init__(self, count: int) -> None:
        super().__init__(FrozenLakeParams())
        self.playing = asyncio.Event()
        self._left = count

    def make(self) -> Any:
        inner, family = super().make(), self

        class Environment:
            async def reset(self, task: Any) -> Observation:
                return await inner.reset(task)

            async def step(self, text: str) -> Observation:
                family._left -= 1
                if family._left == 0:
                    family.playing.set()
                return await asyncio.Future()

            async def close(self) -> None: ...

        return Environment()


async def test_stopping_a_runner_ends_its_episodes_in_the_scheduler_too(world: World) -> None:
    family = Endless(4)
    async with client_of(world) as client:
        runner = runner_of(world, client, family, job="stopped", step_timeout_s=60.0)
        running = asyncio.create_task(runner.run([group(family)]))
        await family.playing.wait()
        await runner.stop()
        report = await running
    assert world.scheduler is not None
    assert report.num_episodes == 0
    assert world.scheduler.store.book.counts("stopped") == {"cancelled": 4}


async def test_trajectories_are_let_go_even_where_everything_is_cancelled_at_once(world: World) -> None:
    """As at the end of an event loop: an episode is cancelled, and again by the group that it belongs to."""
    family = Endless(4)
    before = asyncio.all_tasks()
    async with client_of(world) as client:
        runner = runner_of(world, client, family, job="all-at-once", step_timeout_s=60.0)
        running = asyncio.create_task(runner.run([group(family)]))
        await family.playing.wait()
        for task in asyncio.all_tasks() - before:
            task.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.close()
        assert asyncio.all_tasks() == before
    assert world.scheduler is not None
    assert world.scheduler.store.book.counts("all-at-once") == {"cancelled": 4}


async def test_a_scheduler_that_is_away_does_not_hold_up_the_end_of_a_run(world: World) -> None:
    family = Endless(2)
    before = asyncio.all_tasks()
    async with client_of(world, retry_s=600.0) as client:
        runner = runner_of(world, client, family, job="away", step_timeout_s=60.0)
        running = asyncio.create_task(runner.run([group(family, size=2)]))
        await family.playing.wait()
        client._addresses = Addresses("http://127.0.0.1:9")  # nobody listens there
        await runner.close(timeout_s=0.05)
        await asyncio.gather(running, return_exceptions=True)
        assert asyncio.all_tasks() == before
    with pytest.raises(TrainError, match="closed"):
        await client.list_trajectories(job="away", state="running")


async def test_of_many_trajectories_none_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted after a restart is listed: a large job has more than a listing shows that names no limit."""
    monkeypatch.setattr(samples, "USUAL_FOUND", 1)
    async with client_of(world) as client:
        for _ in range(2):
            await client.create_trajectory(job="large", group_id="g", group_size=2, task={})
        assert len(await client.list_trajectories(job="large", state="running")) == 2


async def test_a_failing_environment_costs_its_episode_and_is_tried_again(world: World) -> None:
    class Flaky(FrozenLakeFamily):
        num_made = 0

        def make(self) -> Any:
            self.num_made += 1
            return Broken() if self.num_made == 1 else super().make()

    class Broken:
        async def reset(self, task: Any) -> Observation:
            raise KeyError("no such sandbox")

        async def step(self, text: str) -> Observation:
            raise AssertionError

        async def close(self) -> None:
            raise RuntimeError("and it does not close either")

    family = Flaky(FrozenLakeParams())
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job="flaky").run([group(family, size=2)])
        assert (report.num_episodes, report.num_retries) == (2, 1)
        assert len(await client.list_trajectories(job="flaky", state="finished")) == 2
        assert len(await client.list_trajectories(job="flaky", state="cancelled")) == 1


class Talker:
    """An environment that never ends by itself, and says ``num_chars`` a turn."""

    def __init__(self, num_chars: int) -> None:
        self._num_chars = num_chars

    async def reset(self, task: Any) -> Observation:
        return await self.step("")

    async def step(self, text: str) -> Observation:
        return Observation(messages=({"role": "user", "content": "S" * self._num_chars},), reward=0.25)

    async def close(self) -> None: ...


async def test_an_episode_that_outgrows_the_context_ends_there_and_says_so(world: World) -> None:
    class Long(FrozenLakeFamily):
        def make(self) -> Any:
            return Talker(300)

    family = Long(FrozenLakeParams())
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job="long").run([group(family, size=2)])
        leased = await client.lease(job="long", num_groups=1, attempt=0, version=0, ttl_s=60, wait_s=0)
    assert (report.num_episodes, report.failures) == (2, ())
    assert leased is not None
    for one in leased[1]:
        assert len(one["turns"]) >= 2
        assert (one["reward"], one["success"]) == (0.25, False)
        assert one["info"]["truncated"] is True


async def test_a_task_whose_first_prompt_does_not_fit_is_given_up_not_paid(world: World) -> None:
    class TooLong(FrozenLakeFamily):
        def make(self) -> Any:
            return Talker(3000)

    family = TooLong(FrozenLakeParams())
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job="first").run([group(family, size=2)])
        assert await client.list_trajectories(job="first", state="finished") == []
    assert report.num_episodes == 0
    assert "first prompt" in report.failures[0][1]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_gives_its_group_up_and_is_never_reported(
    world: World, reward: float
) -> None:
    class Poor(FrozenLakeFamily):
        def make(self) -> Any:
            return self

        async def reset(self, task: Any) -> Observation:
            return Observation(done=True, reward=reward)

        async def close(self) -> None:
            pass

    family = Poor(FrozenLakeParams())
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job=f"poor-{reward}").run([group(family, size=1)])
        assert report.num_episodes == 0
        ((name, why),) = report.failures
        assert name == "g"
        assert why == f"reward failed 2 times: reward {reward} is not finite"
        assert await client.list_trajectories(job=f"poor-{reward}", state="finished") == []


async def test_what_the_scheduler_refuses_costs_its_episode_and_not_the_others(world: World) -> None:
    class Undecodable(FrozenLakeFamily):
        """Its first episode says something that is no UTF-8: the output of a tool, read as such output is read."""

        num_made = 0

        def make(self) -> Any:
            self.num_made += 1
            inner, is_odd = super().make(), self.num_made == 1

            class Episode(Wrapper):
                async def reset(self, task: Any) -> Observation:
                    said = await inner.reset(task)
                    text = os.fsdecode(b"\x80")
                    return Observation(messages=({"role": "user", "content": text},)) if is_odd else said

            return Episode(inner)

    family = Undecodable(FrozenLakeParams())
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job="undecodable").run([group(family, size=3)])
        assert len(await client.list_trajectories(job="undecodable", state="cancelled")) == 1
    assert (report.num_episodes, report.num_retries, report.failures) == (3, 1, ())
    assert report.causes == {"refused": 1}


async def test_an_info_that_is_too_large_gives_its_group_up_and_not_the_run(world: World) -> None:
    class Verbose(FrozenLakeFamily):
        def make(self) -> Any:
            return self

        async def reset(self, task: Any) -> Observation:
            return Observation(done=True, reward=1.0, info={"log": "x" * 2**20})

        async def close(self) -> None:
            pass

    family = Verbose(FrozenLakeParams())
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job="verbose").run([group(family, size=1)])
    assert report.causes == {"refused": 2}
    assert "info" in report.failures[0][1]


async def test_an_episode_that_takes_more_turns_than_the_scheduler_records_ends_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Long(FrozenLakeFamily):
        def make(self) -> Any:
            return Talker(1)

    assert world.scheduler is not None
    monkeypatch.setattr(world.scheduler.inflight, "max_turns", 3)
    family = Long(FrozenLakeParams())
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job="endless").run([group(family, size=1)])
        leased = await client.lease(job="endless", num_groups=1, attempt=0, version=0, ttl_s=60, wait_s=0)
    assert (report.num_episodes, report.causes) == (1, {})
    assert leased is not None
    assert [(len(one["turns"]), one["info"]["truncated"]) for one in leased[1]] == [(3, True)]


def test_pauses_grow_up_to_a_minute() -> None:
    assert [pause_before(retry, 1.0, 1.0) for retry in range(1, 6)] == [1.0, 4.0, 16.0, 60.0, 60.0]
    assert pause_before(2, 1.0, 0.5) == 2.0


async def test_an_episode_pauses_before_each_new_try(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an outage of seconds does not spend all tries of all episodes at once."""

    class Away(FrozenLakeFamily):
        def make(self) -> Any:
            raise ConnectionError("no sandbox is free")

    asked: list[tuple[int, float]] = []

    def pause(retry: int, first_s: float, jitter: float) -> float:
        asked.append((retry, first_s))
        assert 0.5 <= jitter <= 1.5
        return 0.0

    monkeypatch.setattr("rose.train.rollout.pause_before", pause)
    family = Away(FrozenLakeParams())
    async with client_of(world) as client:
        runner = runner_of(world, client, family, job="pausing", max_retries=4, retry_pause_s=7.0)
        report = await runner.run([group(family, size=1)])
    assert report.causes == {"environment": 5}
    assert asked == [(1, 7.0), (2, 7.0), (3, 7.0), (4, 7.0)]


async def test_an_environment_that_hangs_is_given_up(world: World) -> None:
    class Hanging(FrozenLakeFamily):
        def make(self) -> Any:
            return self

        async def reset(self, task: Any) -> Observation:
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            pass

    family = Hanging(FrozenLakeParams())
    async with client_of(world) as client:
        runner = runner_of(world, client, family, job="hang", step_timeout_s=0.01, max_retries=0)
        report = await runner.run([group(family, size=1)])
        assert "no answer within 0.01 s" in report.failures[0][1]


async def test_one_group_that_fails_leaves_the_others_alone(world: World) -> None:
    class HalfBroken(FrozenLakeFamily):
        def make(self) -> Any:
            outer = super().make()

            class One(Wrapper):
                async def reset(self, task: Any) -> Observation:
                    if task.get("broken"):
                        raise ConnectionError("sandbox is gone")
                    return await outer.reset(task)

            return One(outer)

    family = HalfBroken(FrozenLakeParams())
    good = group(family)
    bad = replace(good, group_id="bad", task={**good.task, "broken": True})
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job="half").run([good, bad])
        assert (report.num_episodes, [name for name, _ in report.failures]) == (4, ["bad"])
        assert await client.list_trajectories(job="half", state="running") == []
        leased = await client.lease(job="half", num_groups=1, attempt=0, version=0, ttl_s=60, wait_s=0)
        assert leased is not None
        assert {one["group_id"] for one in leased[1]} == {"g"}


async def test_redundant_episodes_free_a_group_of_its_straggler(world: World) -> None:
    """One episode of five never ends; four are wanted."""

    class Stuck(FrozenLakeFamily):
        num_made = 0

        def make(self) -> Any:
            self.num_made += 1
            return Sleeper() if self.num_made == 1 else super().make()

    class Sleeper:
        async def reset(self, task: Any) -> Observation:
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            pass

    family = Stuck(FrozenLakeParams())
    async with client_of(world) as client:
        runner = runner_of(world, client, family, job="stuck", step_timeout_s=600)
        report = await runner.run([replace(group(family), num_redundant=1)])
        assert (report.num_episodes, report.num_dropped, report.failures) == (4, 1, ())
        assert len(await client.list_trajectories(job="stuck", state="finished")) == 4
        assert await client.list_trajectories(job="stuck", state="running") == []


async def test_a_trajectory_that_the_scheduler_cancels_is_played_again_and_counted(world: World) -> None:
    """As when an operator deletes it: 410 at its next turn."""
    async with client_of(world) as client:

        class Unlucky(FrozenLakeFamily):
            num_made = 0

            def make(self) -> Any:
                self.num_made += 1
                return Cancelled() if self.num_made == 1 else super().make()

        class Cancelled(Talker):
            def __init__(self) -> None:
                super().__init__(4)

            async def step(self, text: str) -> Observation:
                if text:
                    for one in await client.list_trajectories(job="unlucky", state="running"):
                        await client.cancel(one["id"])
                return await super().step(text)

        family = Unlucky(FrozenLakeParams())
        runner = runner_of(world, client, family, job="unlucky", max_retries=2)
        report = await runner.run([group(family, size=1), replace(group(family, size=1), group_id="h")])
        assert (report.num_episodes, report.failures) == (2, ())
        assert report.causes["cancelled"] == report.num_retries >= 1

        family.num_made = -(10**6)
        runner._params = replace(runner._params, max_retries=0)
        family.make = Cancelled  # type: ignore[method-assign]
        failed = await runner.run([replace(group(family, size=1), group_id="never")])
    assert failed.failures[0][0] == "never"
    assert failed.failures[0][1].startswith("cancelled failed 1 times: ")


async def test_a_group_that_grew_too_old_while_it_was_played_is_no_failure_and_not_played_again(
    world: World,
) -> None:
    """Its trajectories are told at their next turn; members that wait for a slot never begin."""
    async with client_of(world) as client:

        class Slow(FrozenLakeFamily):
            num_made = 0

            def make(self) -> Any:
                self.num_made += 1
                return Outrun()

        class Outrun(Talker):
            def __init__(self) -> None:
                super().__init__(4)

            async def step(self, text: str) -> Observation:
                if text:  # ten steps are taken while this environment thinks
                    await client.set_version(job="slow", attempt=0, version=10, alpha=1, on_stale="cancel")
                return await super().step(text)

        family = Slow(FrozenLakeParams())
        runner = runner_of(world, client, family, job="slow", concurrency=2)
        report = await runner.run([group(family)])
        assert (report.num_stale_groups, report.num_episodes, report.failures) == (1, 0, ())
        assert (report.num_retries, report.causes) == (0, {})
        assert family.num_made == 2
        assert world.scheduler is not None
        assert await client.list_trajectories(job="slow", state="running") == []
        assert world.scheduler.store.book.counts("slow")["stale"] == 2


async def test_a_turn_that_the_engines_failed_costs_its_episode_and_not_the_run(world: World) -> None:
    family = FrozenLakeFamily(FrozenLakeParams())
    for engine in world.engines:  # more than a turn's budget of nonsense answers
        engine.faults.extend([Fault(kind="garbage")] * 3)
    try:
        async with client_of(world) as client:
            runner = runner_of(world, client, family, job="failing", max_retries=4)
            report = await runner.run([group(family, size=1)])
    finally:
        for engine in world.engines:
            engine.faults.clear()
    assert (report.num_episodes, report.failures) == (1, ())
    assert report.causes == {"engine": report.num_retries}
    assert report.num_retries >= 1


async def test_held_out_episodes_are_scored_and_left_to_no_trainer(world: World) -> None:
    family = FrozenLakeFamily(FrozenLakeParams(num_maps=2))
    tasks = family.held_out_tasks(3)
    async with client_of(world) as client:
        runner = runner_of(world, client, family, job="unused", temperature=0.0)
        scores = await runner.evaluate(tasks, job="held-out", part="held_out", episodes_per_task=2)
        assert sorted(score.task_index for score in scores) == [0, 0, 1, 1, 2, 2]
        by_task = {
            score.task_index: {one.num_turns for one in scores if one.task_index == score.task_index}
            for score in scores
        }
        assert all(len(turns) == 1 for turns in by_task.values())  # greedy: both episodes of a task are one
        assert {version for score in scores for version in score.versions} == {world.engines[0].version}
        for state in ("running", "finished"):
            assert await client.list_trajectories(job="held-out", state=state) == []


@pytest.mark.parametrize(
    ("reward", "why"),
    [(2.0, "outside env.reward_range"), (float("nan"), "not finite"), (None, "no Python float")],
)
async def test_a_failed_reward_is_played_again_and_never_a_zero(world: World, reward: Any, why: str) -> None:
    class Judge:
        num_calls = 0

        async def score(self, task: Any, messages: Any, final: Observation) -> Any:
            self.num_calls += 1
            return reward if self.num_calls == 1 else 0.75

    family = FrozenLakeFamily(FrozenLakeParams())
    job = f"judged-{reward}"
    async with client_of(world) as client:
        runner = runner_of(world, client, family, job=job, reward_range=(0.0, 1.0))
        runner._rewarder = Judge()
        report = await runner.run([group(family, size=2)])
        assert report.num_retries == 1
        leased = await client.lease(job=job, num_groups=1, attempt=0, version=0, ttl_s=60, wait_s=0)
        assert leased is not None
        assert [one["reward"] for one in leased[1]] == [0.75, 0.75]

        runner._rewarder = Broken(reward)
        failed = await runner.run([replace(group(family, size=2), group_id="failed")])
        assert failed.num_episodes == 0
        assert why in failed.failures[0][1]
        assert await client.list_trajectories(job=job, state="finished") == []


class Broken:
    def __init__(self, reward: Any) -> None:
        self._reward = reward

    async def score(self, task: Any, messages: Any, final: Observation) -> Any:
        return self._reward


async def test_errors_of_the_scheduler_keep_their_names(world: World) -> None:
    async with client_of(world) as client:
        with pytest.raises(NotFound) as caught:
            await client.finish("t-none", reward=0.0, success=False, info={})
        assert caught.value.code == "unknown_session"
        assert await client.lease(job="none", num_groups=1, attempt=0, version=0, ttl_s=60, wait_s=0) is None
    async with SchedulerClient(world.url, environment_token="x" * 20, retry_s=0.0) as stranger:
        with pytest.raises(Unauthorized) as refused:
            await stranger.create_trajectory(job="j", group_id="g", group_size=2, task={})
        assert "x" * 20 not in str(refused.value)
        with pytest.raises(TrainError, match="no trainer token"):
            await stranger.ack("b", step=0, attempt=0)


def test_answers_must_be_single_tokens_of_the_model(policy_model: Path, tmp_path: Path) -> None:
    assert len(set(single_token_ids(policy_model, ["left", "down", "right", "up"]))) == 4
    with pytest.raises(ConfigError, match="'sideways' is 8 tokens"):
        single_token_ids(policy_model, ["left", "sideways"])
    with pytest.raises(ConfigError, match=r"no readable tokenizer\.json"):
        single_token_ids(tmp_path, ["left"])
