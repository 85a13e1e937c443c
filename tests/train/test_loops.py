"""Both loops on the real scheduler and engines that run the policy, without Ray: what is consumed, and what survives."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rose.auth import Tokens
from rose.errors import CapacityError, TrainError
from rose.lineage import parse_version
from rose.policy.staleness import lag
from rose.testing.toy_recipe import UNGUARDED
from rose.train import checkpoint as checkpoints
from rose.train.build import make_publisher
from rose.train.cli import _line
from rose.train.client import SchedulerClient
from rose.train.metrics import MetricsFile, records_of, steps_without_a_line
from rose.train.publishing import published_attempt
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts, TrainWorker
from tests.train.file_publisher import file_publisher
from tests.train.local_actors import LocalActors
from tests.train.local_run import SMALL, assert_applied_once, consumed_of, run
from tests.train.ray_world import SHORT_LAKES
from tests.train.test_rollout import client_of
from tests.train.world import World, running_world

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_a_run_survives_the_death_of_each_worker_and_applies_each_trajectory_once(
    world: World, mode: str
) -> None:
    deeds = {0: "kill_manager", 2: "kill_trainer"}
    script, config, result = await run(world, deeds, num_steps=5, rollout={**SMALL, "mode": mode, "alpha": 2})

    assert (result.num_steps, result.attempt, result.num_restarts) == (5, 2, 2)
    assert [record["step"] for record in script.records] == list(range(5))
    assert {step: len(ids) for step, ids in consumed_of(config).items()} == dict.fromkeys(range(5), 8)
    assert_applied_once(world, config)
    if mode == "synchronous":
        assert all(record["lag_max"] == 0 for record in script.records)


@pytest.mark.parametrize(
    ("owner", "method", "is_done"),
    [
        pytest.param(TrainWorker, "_save", False, id="trained, no checkpoint"),
        pytest.param(TrainWorker, "_save", True, id="checkpoint, not acknowledged"),
        pytest.param(SchedulerClient, "ack", True, id="acknowledged, not published"),
        pytest.param(SchedulerClient, "set_version", False, id="published, nobody told"),
    ],
)
async def test_a_trainer_that_dies_between_two_promises_applies_each_trajectory_once(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, is_done: bool
) -> None:
    num_calls, original = 0, getattr(owner, method)

    def prepare(actors: LocalActors) -> None:
        async def dying(self: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 3 and not is_done:
                actors.kill_trainer()
                await asyncio.Event().wait()
            found = await original(self, *arguments, **named)
            if num_calls == 3:
                actors.kill_trainer()
                await asyncio.Event().wait()
            return found

        monkeypatch.setattr(owner, method, dying)

    rollout = {**SMALL, "mode": "asynchronous", "alpha": 2}
    _, config, result = await run(world, {}, prepare=prepare, num_steps=4, rollout=rollout)
    assert (result.num_steps, result.attempt, result.num_restarts) == (4, 2, 1)
    assert {step: len(ids) for step, ids in consumed_of(config).items()} == dict.fromkeys(range(4), 8)
    assert_applied_once(world, config)


async def test_no_token_beyond_alpha_is_trained_on_in_an_asynchronous_run(world: World) -> None:
    """Stragglers on purpose; judged by the tokens' own versions in the scheduler's traces."""
    alpha = 1
    script, config, _ = await run(
        world,
        {},
        num_steps=8,
        rollout={**SMALL, "mode": "asynchronous", "alpha": alpha},
        env={"settings": SHORT_LAKES, "latency": {"median_s": 0.01, "sigma": 2.0}},
    )

    assert world.scheduler is not None
    worst: list[int] = []
    for step, ids in consumed_of(config).items():
        over = 0
        for name in ids:
            trace = world.scheduler.store.trajectories[name].trace("", "")
            spans = [parse_version(span[0]) for turn in trace["turns"] for span in turn["versions"]]
            worst.append(max(lag((1, step), span) for span in spans))
            over += worst[-1] > alpha
        record = script.records[step]
        # Whatever is older was handed out by the scheduler, whose own bound is 4, and left out by the trainer.
        assert record["num_stale"] == over
        assert record["num_trained_sequences"] <= record["num_trajectories"] - over
        assert record["trained_lag_max"] <= alpha
    assert max(worst) >= 1  # it was asynchronous indeed
    assert_applied_once(world, config)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_under_wait_nothing_is_dropped_and_nothing_too_old(world: World, mode: str) -> None:
    """The same stragglers; judged by the tokens' own versions.  A worker dies on the way."""
    alpha = 1
    script, config, _ = await run(
        world,
        {2: "kill_manager"},
        num_steps=8 if mode == "asynchronous" else 4,
        rollout={**SMALL, "mode": mode, "alpha": alpha, "on_stale": "wait"},
        env={"settings": SHORT_LAKES, "latency": {"median_s": 0.01, "sigma": 2.0}},
    )
    assert world.scheduler is not None
    store = world.scheduler.store
    lags: list[int] = []
    for step, ids in consumed_of(config).items():
        for name in ids:
            spans = [
                span for turn in store.trajectories[name].trace("", "")["turns"] for span in turn["versions"]
            ]
            lags.extend(lag((1, step), parse_version(span[0])) for span in spans)
    assert max(lags) == (alpha if mode == "asynchronous" else 0)
    assert all(record["num_stale"] == 0 for record in script.records)
    assert "stale" not in store.book.discards.report(config.job)
    assert_applied_once(world, config)


async def test_under_cancel_the_scheduler_drops_at_the_bound_of_the_job(world: World) -> None:
    """One episode takes longer than all steps, however long these take."""
    script, config, _ = await run(
        world,
        {},
        num_steps=8,
        rollout={**SMALL, "mode": "asynchronous", "alpha": 1, "on_stale": "cancel"},
        env={
            "kind": "tests.train.ray_world:one_stuck",
            "step_timeout_s": 600.0,
            "latency": {"median_s": 0.02, "sigma": 2.0},
        },
    )
    assert world.scheduler is not None
    assert all(record["num_stale"] == 0 for record in script.records)
    store = world.scheduler.store
    assert sum(store.book.discards.report(config.job)["stale"]) > 0
    assert_applied_once(world, config)
    told = script.records[-1]["discards_by_length"]["stale"]
    assert 0 < sum(told) <= sum(store.book.discards.report(config.job)["stale"])


async def test_under_cancel_a_group_that_can_no_longer_be_used_is_left_in_the_middle(world: World) -> None:
    """One episode hangs in its environment after its first turn, for ever as far as this test can wait."""
    script, config, _ = await run(
        world,
        {},
        num_steps=8,
        rollout={**SMALL, "mode": "asynchronous", "alpha": 1, "on_stale": "cancel"},
        env={"kind": "tests.train.ray_world:one_stuck", "step_timeout_s": 600.0},
    )
    assert world.scheduler is not None
    store = world.scheduler.store
    unfinished = [
        name
        for name, sample in store.book.samples.items()
        if sample.reason == "stale" and store.trajectories[name].finish is None
    ]
    assert [len(store.trajectories[name].turns) for name in unfinished] == [1]
    assert sum(record["num_stale_groups"] for record in script.records) == 1
    assert sum(record["num_env_retries"] for record in script.records) == 0  # it was no failure
    assert_applied_once(world, config)


async def test_an_asynchronous_run_that_is_over_leaves_no_episode_to_the_engines(world: World) -> None:
    """Half of its groups can never end."""
    env = {"kind": "tests.train.ray_world:half_endless", "step_timeout_s": 600.0}
    rollout = {"num_groups": 1, "group_size": 4, "mode": "asynchronous", "alpha": 4}
    script, config, _ = await run(world, {}, num_steps=2, env=env, rollout=rollout)
    assert script.records[-1]["num_running_groups"] > 0
    assert world.scheduler is not None
    counts = world.scheduler.store.book.counts(config.job)
    assert (counts["running"], counts["cancelled"] >= 4) == (0, True)


async def test_dynamic_sampling_fills_the_batch_with_groups_that_teach(world: World) -> None:
    script, config, _ = await run(
        world, {1: "kill_manager"}, num_steps=3, trainer={"algorithm": "dapo", "keep_checkpoints": 100}
    )
    assert world.scheduler is not None
    book = world.scheduler.store
    refilled = 0
    for step, ids in consumed_of(config).items():
        groups: dict[str, set[float]] = {}
        successes: list[bool] = []
        for name in ids:
            trace = book.trajectories[name].trace("", "")
            successes.append(trace["success"])
            groups.setdefault(trace["group_id"], set()).add(trace["reward"])
        teaching = sum(len(rewards) > 1 for rewards in groups.values())
        record = script.records[step]
        assert teaching == SMALL["num_groups"] or record["num_leases"] >= 8
        assert record["num_filtered_groups"] == len(groups) - teaching
        assert record["sampled_success_rate"] == sum(successes) / len(successes)
        assert record["num_trajectories"] == teaching * SMALL["group_size"]
        refilled += record["num_leases"] > 1
    assert refilled  # the untrained policy does have dull groups
    assert_applied_once(world, config)


TWO_TASKS = [
    {"name": "lake", "kind": "frozenlake", "settings": SHORT_LAKES, "weight": 3.0, "max_tokens": 1},
    {
        "name": "maths",
        "kind": "math_tools",
        "settings": {"num_tasks": 8, "max_turns": 1},
        "reward": {"kind": "tests.train.ray_world:constant_reward"},
        "max_tokens": 3,
    },
]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_two_tasks_are_mixed_by_weight_scored_apart_and_known_to_the_scheduler(
    world: World, mode: str
) -> None:
    script, config, _ = await run(
        world,
        {0: "kill_manager"},
        num_steps=3,
        env={},
        tasks=TWO_TASKS,
        eval={"at_end": True, "num_tasks": 2, "episodes_per_task": 3, "pass_at": [1, 3], "temperature": 1.0},
        rollout={"num_groups": 4, "group_size": 2, "mode": mode},
    )
    assert world.scheduler is not None
    traces = [one.trace("", "") for one in world.scheduler.store.trajectories.values()]
    for trace in traces:
        assert trace["task_kind"] == {"frozenlake": "lake", "math_tools": "maths"}[trace["task"]["env"]]
        for turn in trace["turns"]:
            assert len(turn["token_ids"]) <= (1 if trace["task_kind"] == "lake" else 3)
    consumed = [name for ids in consumed_of(config).values() for name in ids]
    groups = {one["group_id"]: one["task_kind"] for one in traces if one["id"] in consumed}
    if mode == "synchronous":
        assert sorted(groups.values()) == ["lake"] * 9 + ["maths"] * 3
        assert all(record["tasks"]["lake"]["num_trajectories"] == 6 for record in script.records)
    for record in script.records:
        if "maths" in record["tasks"]:
            assert record["tasks"]["maths"]["reward_mean"] == 0.25  # the pool's, not the environment's
    # From the second step on the scheduler is told the ratio that the first one measured.
    told = {
        one.created.prefill_per_decode
        for one in world.scheduler.store.trajectories.values()
        if one.created.task_kind == "lake" and one.created.job == config.job
    }
    if mode == "synchronous":
        assert script.records[0]["tasks"]["lake"]["prefill_per_decode"] in told
    assert any(ratio is not None for ratio in told)
    held_out = script.records[-1]["eval"]
    assert {name: one["num_episodes"] for name, one in held_out["tasks"].items()} == {"lake": 6, "maths": 6}
    assert held_out["num_episodes"] == 12
    for found in (held_out, *held_out["tasks"].values()):
        assert found["pass_at_1"] == pytest.approx(found["success_rate"])
        assert found["pass_at_3"] >= found["pass_at_1"]


async def test_figures_beside_each_other_in_a_steps_line_are_of_the_same_episodes(world: World) -> None:
    """Of all that were sampled, also of groups that teach nothing and are set aside."""
    script, config, _ = await run(
        world,
        {},
        num_steps=1,
        env={},
        tasks=TWO_TASKS,
        rollout={"num_groups": 4, "group_size": 2},
        trainer={"algorithm": "dapo", "dynamic_sampling": {"max_rounds": 3}},
    )
    (record,) = script.records
    by_task = record["sampled_tasks"]
    assert by_task.keys() == {"lake", "maths"}
    assert by_task["maths"]["num_trajectories"] % 2 == 0
    assert sum(one["num_trajectories"] for one in by_task.values()) == len(consumed_of(config)[0])
    successes = sum(one["success_rate"] * one["num_trajectories"] for one in by_task.values())
    assert successes == pytest.approx(record["sampled_success_rate"] * len(consumed_of(config)[0]))
    lake, maths = (f"{by_task[name]['success_rate']:.2f}" for name in ("lake", "maths"))
    assert f"  success {record['sampled_success_rate']:.2f}  lake {lake}  maths {maths}" in _line(record, 1)
    # Whether any is set aside is chance: a sample in which none is may teach nothing at all, and is trained on as it is.
    aside = {**record, "num_filtered_groups": 1, "success_rate": 0.5}
    assert f"maths {maths}  (trained on 0.50)  " in _line(aside, 1)
    assert "trained on" not in _line({**aside, "num_filtered_groups": 0}, 1)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_an_environment_that_always_fails_ends_the_run_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("rose.train.workers.LEASE_WAIT_S", 0.1)
    with pytest.raises(TrainError, match=r"outside env\.reward_range") as caught:
        await run(
            world,
            {},
            env={
                "settings": SHORT_LAKES,
                "reward_range": (5.0, 6.0),
                "max_retries": 0,
                "max_failed_groups": 3,
            },
            rollout={**SMALL, "mode": mode},
        )
    assert caught.value.field == "env"


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_groups_in_which_nothing_was_sampled_are_consumed_and_replaced(world: World, mode: str) -> None:
    """Every other task is over before the first turn."""
    env = {"kind": "tests.train.ray_world:half_over"}
    script, config, _ = await run(world, {}, num_steps=2, env=env, rollout={**SMALL, "mode": mode})
    for record in script.records:
        assert record["num_trajectories"] == record["num_sequences"] == 8
        assert len(consumed_of(config)[record["step"]]) == 8 + 4 * record["num_filtered_groups"]
    assert sum(record["num_filtered_groups"] for record in script.records) >= 2
    assert_applied_once(world, config)


async def test_a_step_in_which_nothing_at_all_was_sampled_ends_the_run_by_name(world: World) -> None:
    env = {"kind": "tests.train.ray_world:all_over"}
    with pytest.raises(TrainError, match="at least one sampled token") as caught:
        await run(world, {}, num_steps=2, env=env)
    assert caught.value.field == "samples"


async def test_rewards_from_the_pool_are_what_is_trained_on(world: World) -> None:
    reward = {"kind": "tests.train.ray_world:reward_of_length"}
    _, config, _ = await run(world, {}, num_steps=1, reward=reward)
    assert world.scheduler is not None
    for name in consumed_of(config)[0]:
        trace = world.scheduler.store.trajectories[name].trace("", "")
        assert trace["reward"] == pytest.approx(1.0 / trace["info"]["turns"])
    lines = (config.output_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["num_failed_groups"] == 0


async def test_checkpoints_that_cannot_be_read_end_the_run_and_stay(world: World) -> None:
    """Beginning again from nothing would drop them, one by one, for what may be a disk's bad hour."""
    _, config, _ = await run(world, {}, num_steps=2)
    folders = sorted((config.output_dir / "checkpoints").iterdir())
    for folder in folders:
        (folder / "state.json").chmod(0)
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"")
    with pytest.raises(TrainError, match=r"none of 3 checkpoints can be read.*step-000002\.1") as caught:
        await run(world, {}, num_steps=4)
    assert caught.value.fix is not None
    assert sorted((config.output_dir / "checkpoints").iterdir()) == folders


async def test_a_wiped_output_folder_does_not_give_two_lives_one_name(world: World) -> None:
    _, config, first = await run(world, {}, num_steps=1)
    shutil.rmtree(config.output_dir)
    script, _, second = await run(world, {}, num_steps=1)
    assert (first.attempt, second.attempt) == (1, 2)  # the scheduler remembers
    assert script.records[0]["step"] == 0


async def test_who_begins_afresh_under_a_known_name_trains_on_nothing_of_the_life_before(
    world: World,
) -> None:
    """Its environment and its reward may have been others."""
    _, config, _ = await run(world, {}, num_steps=1)
    shutil.rmtree(config.output_dir)
    async with client_of(world) as client:
        old = [
            await client.create_trajectory(job=config.job, group_id="old", group_size=4, task={})
            for _ in range(4)
        ]
        for reward, name in enumerate(old):
            await client.finish(name.id, reward=float(reward), success=False, info={})
    await run(world, {}, num_steps=1)
    assert not {one.id for one in old} & set(consumed_of(config)[0])
    assert world.scheduler is not None
    assert world.scheduler.store.book.counts(config.job)["cancelled"] == 4


def test_the_attempt_that_published_last_counts_too(tmp_path: Path, policy_model: Path) -> None:
    table = {
        "model": policy_model,
        "weights": {"directory": tmp_path / "store"},
        "output_dir": tmp_path,
        "trainer": {"learning_rate": 1e-3},
    }
    config = TrainConfig.model_validate(table)
    tokens = Tokens.generate()
    assert published_attempt(config, tokens, make_publisher) == 0
    make_publisher(config, tokens, torch.nn.Linear(4, 4), 5).publish(0)
    assert published_attempt(config, tokens, make_publisher) == 5


class Unreachable:
    """A publisher whose store is away for the first ``num_failures`` calls."""

    num_failures = 0

    def __init__(self, config: TrainConfig, tokens: Tokens, module: Any, attempt: int) -> None:
        self._publisher = file_publisher(config, tokens, module, attempt)

    def publish(self, version: int, **told: Any) -> Any:
        if Unreachable.num_failures > 0:
            Unreachable.num_failures -= 1
            raise CapacityError("the relay cannot be reached", field="relay.url")
        return self._publisher.publish(version, **told)


async def test_a_store_that_is_away_for_a_while_does_not_end_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.train.publishing.PAUSE_S", 0.01)
    Unreachable.num_failures = 3
    script, config, _ = await run(world, {}, num_steps=2, parts=Parts(make_publisher=Unreachable))
    assert [record["step"] for record in script.records] == [0, 1]
    assert Unreachable.num_failures == 0
    assert_applied_once(world, config)

    Unreachable.num_failures = 10**6
    weights = {"directory": str(world.versions), "patience_s": 0.0}
    with pytest.raises(CapacityError, match="cannot be reached"):
        await run(world, {}, num_steps=3, parts=Parts(make_publisher=Unreachable), weights=weights)


class GoneAfterASecondCheckpoint:
    """Publishes, but for version 2 of the first attempt: the run ends between that checkpoint and its line."""

    def __init__(self, config: TrainConfig, tokens: Tokens, module: Any, attempt: int) -> None:
        self._inner, self._attempt = file_publisher(config, tokens, module, attempt), attempt

    def publish(self, version: int, **told: Any) -> Any:
        if (self._attempt, version) == (1, 2):
            raise TrainError("the driver is gone")
        return self._inner.publish(version, **told)


async def test_a_step_whose_line_was_lost_has_one_that_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts(make_publisher=GoneAfterASecondCheckpoint)
    with pytest.raises(TrainError, match="the driver is gone"):
        await run(world, {}, num_steps=3, parts=parts)
    script, config, _ = await run(world, {}, num_steps=3, parts=parts)
    assert [record["step"] for record in script.records] == [2]
    lines = list(records_of(config.output_dir / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1] == {"step": 1, "restored": True, "num_consumed": len(consumed_of(config)[1])}
    assert script.events == ["attempt", "restored"]
    assert "steps 2 " in caplog.text
    again, _, _ = await run(world, {}, num_steps=3, parts=parts)
    assert again.events == ["attempt"]  # once


def test_a_line_of_a_step_that_was_taken_again_is_no_line_of_that(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (0, 1, 2, 3):
        file.append({"step": step, "attempt": 1})
    file.append({"step": 1, "attempt": 2})  # went on from a checkpoint of step 0
    file.append({"step": 0, "restored": True})
    assert steps_without_a_line(tmp_path / "metrics.jsonl", 4) == [2, 3]
    assert steps_without_a_line(tmp_path / "none.jsonl", 2) == [0, 1]


async def test_a_damaged_checkpoint_is_passed_over_aloud(world: World) -> None:
    _, config, _ = await run(world, {}, num_steps=2)
    newest = config.output_dir / "checkpoints" / "step-000002.1"
    for file in newest.glob("*.safetensors"):
        file.write_bytes(b"")
    script, _, result = await run(world, {}, num_steps=2)
    assert [record["step"] for record in script.records] == [1]
    assert (result.num_steps, result.attempt) == (2, 2)
    shown = _line({"event": "attempt", "attempt": 2, "step": 1, "passed_over": [f"{newest}: x"]}, 2)
    assert shown.splitlines() == ["attempt 2 goes on at step 2", f"passed over: {newest}: x"]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_a_starved_step_samples_more_groups_and_a_hopeless_one_changes_nothing(
    world: World, mode: str
) -> None:
    """Every group is asked for unequal rewards: a policy at random does not give that, and after two leases the step is left as it is."""
    guard = {**UNGUARDED, "starved": "wait", "min_informative": 1.0, "max_rounds": 2}
    rollout = {**SMALL, "num_groups": 4, "mode": mode, "alpha": 2}
    script, config, result = await run(world, {}, num_steps=3, rollout=rollout, trainer={"guard": guard})

    assert result.num_steps == 3
    assert any(record["num_leases"] == 2 for record in script.records)
    for record in script.records:
        assert record["num_leases"] <= 2
        assert record["num_starved_leases"] <= record["num_leases"]
        assert record["num_starved"] == (record["num_starved_leases"] == record["num_leases"])
        assert (record["num_updates"] == 0) == record["num_starved"]
        assert record["num_sequences"] >= 16  # what was there first is kept
    assert_applied_once(world, config)


async def test_the_checkpoint_of_the_best_steps_is_kept(world: World) -> None:
    _, config, _ = await run(world, {}, num_steps=8, trainer={"keep_checkpoints": 1})
    folder = config.output_dir / "checkpoints"
    best = checkpoints.best_of(folder)
    assert best is not None
    kept = {path.name for path in folder.glob("step-*")}
    assert {best.name, "step-000008.1"} <= kept
    assert len(kept) <= 2


@pytest.mark.parametrize(
    ("played", "best"),
    [
        ({"every_steps": 5}, ("step-000005.1", 0.0, "held_out")),
        ({"at_end": True}, ("step-000005.1", 1.0, "sampled")),  # one figure alone chooses nothing
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_success_on_held_out_tasks_is_not_measured_by_that_of_batches(
    world: World, played: dict[str, Any], best: tuple[str, float, str]
) -> None:
    """Played worse than what was sampled."""
    env = {"kind": "tests.train.ray_world:by_heart"}
    script, config, _ = await run(world, {}, num_steps=6, env=env, eval={"num_tasks": 2, **played})
    assert script.records[-1]["sampled_success_rate"] == 1.0
    told = [record["eval"]["success_rate"] for record in script.records if "eval" in record]
    assert told == [0.0]
    noted = json.loads((config.output_dir / "checkpoints" / "best.json").read_text())
    assert (noted["checkpoint"], noted["success"], noted["measure"]) == best


async def test_the_best_checkpoint_is_exported_also_of_a_run_that_is_over(world: World) -> None:
    _, config, result = await run(world, {}, num_steps=2, export="best")
    folder = config.output_dir / "checkpoints"
    assert checkpoints.best_of(folder) is None  # too few steps to say
    assert result.exported == "the weights of step 2, the last: no checkpoint was noted as the best"

    (folder / "best.json").write_text('{"checkpoint": "step-000001.1", "success": 0.75}')
    _, _, result = await run(world, {}, num_steps=2, export="best")
    assert result.exported == "step-000001.1, the best (success 0.75)"
    exported = load_file(config.output_dir / "model" / "model.safetensors")
    masters = {f"weights/{name}": torch.empty(tensor.shape) for name, tensor in exported.items()}
    for name, equal in (("step-000001.1", True), ("step-000002.1", False)):
        checkpoints.read_into(masters, folder / name)
        same = [torch.equal(masters[f"weights/{one}"].bfloat16(), tensor) for one, tensor in exported.items()]
        assert all(same) == equal, name


# --- the trainer's device ---


@pytest.mark.parametrize(
    ("mode", "dies_after"),
    [
        ("synchronous", 1),
        ("asynchronous", 4),
        pytest.param("synchronous", 4, marks=pytest.mark.conformance),
        pytest.param("asynchronous", 1, marks=pytest.mark.conformance),
    ],
)
async def test_what_was_trained_since_the_last_checkpoint_is_trained_again_after_a_death(
    world: World, mode: str, dies_after: int
) -> None:
    """A checkpoint every three steps.  Nothing is lost, and in the surviving line nothing is applied twice."""
    rollout = {**SMALL, "mode": mode, "alpha": 4}
    script, config, result = await run(
        world, {dies_after: "kill_trainer"}, num_steps=7, rollout=rollout, trainer={"checkpoint_every": 3}
    )

    goes_on_at = (dies_after + 1) // 3 * 3
    taken = [record["step"] for record in script.records]
    assert taken == [*range(dies_after + 1), *range(goes_on_at, 7)]
    assert (result.num_steps, result.attempt) == (7, 2)
    folders = sorted(path.name for path in (config.output_dir / "checkpoints").glob("step-*"))
    assert all(int(name[5:11]) in (0, 3, 6, 7, goes_on_at) for name in folders)
    assert_applied_once(world, config)


@pytest.mark.parametrize("dies_after", [3, 5])
async def test_leases_wait_for_a_checkpoint_that_is_written_in_the_background(
    world: World, dies_after: int
) -> None:
    """What counts is what was durable at the death: that step, or the one a checkpoint before it."""
    settings = {"checkpoint_every": 2, "background_checkpoints": True}
    script, config, result = await run(world, {dies_after: "kill_trainer"}, num_steps=7, trainer=settings)

    taken = [record["step"] for record in script.records]
    begun = (dies_after + 1) // 2 * 2
    goes_on_at = taken[dies_after + 1]
    assert goes_on_at in (begun, max(0, begun - 2))
    assert taken == [*range(dies_after + 1), *range(goes_on_at, 7)]
    assert (result.num_steps, result.attempt) == (7, 2)
    newest, _ = checkpoints.load_latest(config.output_dir / "checkpoints")
    assert newest is not None
    assert newest.step == 7  # the last is waited for
    assert_applied_once(world, config)
