"""Short and long rounds in a run: what is begun again, what a restart knows, and that no prompt is trained on twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.train.check import check_job
from rose.train.mix import TaskMix
from rose.train.plan import GroupPlan, GroupState
from rose.train.tail_rounds import TailRounds
from rose.train.train_config import RolloutSettings, TrainConfig
from tests.train.local_run import assert_applied_once, consumed_of, run
from tests.train.ray_world import SHORT_LAKES, job_table
from tests.train.world import World, running_world

SETTINGS = RolloutSettings.model_validate(
    {"num_groups": 2, "group_size": 2, "tail_batching": {"extra_groups": 1}}
)
MIX = TaskMix({"lake": [{"map": number} for number in range(100)]})
WHERE: dict[str, Any] = {"attempt": 1, "ratios": {}}


def rounds(step: int = 0, records: Any = ()) -> TailRounds:
    made = TailRounds(SETTINGS, MIX)
    made.go_on(step, records)
    return made


def complete(*plans: GroupPlan) -> list[GroupState]:
    return [
        GroupState(
            group_id=one.group_id, group_size=2, task=one.task, num_finished=2, task_kind=one.task_kind
        )
        for one in plans
    ]


def prompts(plans: list[GroupPlan]) -> list[int]:
    return [one.task["map"] for one in plans]


def test_what_was_slow_begins_again_and_what_was_complete_is_in_the_next_batch() -> None:
    tail = rounds()
    first = tail.begin([], step=0, **WHERE)
    assert prompts(first) == [0, 1, 2]
    told = tail.end([first[0].group_id, first[2].group_id], 10.0, 4)
    assert (told["is_long"], told["num_put_by"], told["length_ratio"]) == (0, 1, 1.0)
    second = tail.begin([], step=1, **WHERE)
    assert prompts(second) == [3, 4, 5]
    told = tail.end([second[0].group_id, second[1].group_id], 20.0, 4)
    assert told["length_ratio"] == pytest.approx(20 / 15)
    # The third was complete a moment too late: one slow prompt waits, and room for one more is left.
    third = tail.begin(complete(second[2]), step=2, **WHERE)
    assert prompts(third) == [1]
    assert third[0].group_id not in {one.group_id for one in (*first, *second)}
    told = tail.end([second[2].group_id, third[0].group_id], 30.0, 4)
    assert (told["is_long"], told["num_again"], told["num_put_by"]) == (1, 1, 0)


def test_a_later_driver_goes_on_with_what_was_put_by_and_what_was_complete() -> None:
    tail = rounds()
    first = tail.begin([], step=0, **WHERE)
    told = tail.end([first[0].group_id, first[1].group_id], 1.0, 4)
    records = [{"step": 0, "tail_batching": json.loads(json.dumps(told))}]
    for waiting, begun in (([], [3, 4, 5]), (complete(first[2]), [3, 4])):
        again = rounds(1, records)
        assert prompts(again.begin(waiting, step=1, **{**WHERE, "attempt": 2})) == begun
        assert again.end([], 1.0, 4)["put_by"] == ([] if waiting else [2])
    assert prompts(rounds(5).begin([], step=5, **WHERE)) == [10, 11, 12], "a run that had none before"


def test_what_was_put_by_outlives_a_driver_that_died_before_its_steps_line() -> None:
    tail = rounds()
    first = tail.begin([], step=0, **WHERE)
    told = tail.end([first[0].group_id, first[1].group_id], 1.0, 4)
    records: list[dict[str, Any]] = [
        {"step": 0, "tail_batching": json.loads(json.dumps(told))},
        {"step": 1, "restored": True},
    ]
    again = rounds(2, records)
    assert prompts(again.begin([], step=2, **{**WHERE, "attempt": 2})) == [3, 4, 5]
    assert again.end([], 1.0, 4)["put_by"] == [2]


def test_a_step_that_is_taken_again_ends_what_the_ones_after_it_had_put_by() -> None:
    def record(step: int, prompt: int) -> dict[str, Any]:
        told = {"next_prompt": prompt, "put_by": [], "begun": {}}
        return {"step": step, "tail_batching": told}

    records = [record(0, 10), record(1, 20), record(2, 30), record(1, 25)]
    assert prompts(rounds(3, [*records, {"step": 2, "restored": True}]).begin([], step=3, **WHERE))[0] == 25
    assert prompts(rounds(3, [*records, record(2, 35)]).begin([], step=3, **WHERE))[0] == 35


def test_a_group_whose_episodes_keep_failing_is_no_slow_one() -> None:
    tail = rounds()
    first = tail.begin([], step=0, **WHERE)
    tail.failed(first[1].group_id)
    assert prompts(tail.more(1, step=0, **WHERE)) == [3]
    assert sorted(tail.end([first[0].group_id], 1.0, 2)["begun"].values()) == [2, 3]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"mode": "asynchronous"}}, "synchronous"),
        ({"trainer": {"dynamic_sampling": {"enabled": True}}}, "dynamic sampling"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    policy_model: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with running_world(tmp_path, policy_model) as world:
        table = job_table(world, **changes)
        table["rollout"] = {**table["rollout"], "tail_batching": {"extra_groups": 1}}
        with pytest.raises(ConfigError, match=said) as caught:
            check_job(TrainConfig.model_validate(table))
    assert caught.value.field == "rollout.tail_batching.extra_groups"


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


@pytest.mark.timeout(300)
@pytest.mark.parametrize("streamed", ["off", "gradients"])
async def test_a_run_in_short_and_long_rounds_trains_each_prompt_once(world: World, streamed: str) -> None:
    """Environments have stragglers; a manager dies on the way, and the trainer."""
    script, config, result = await run(
        world,
        {1: "kill_manager", 3: "kill_trainer"},
        num_steps=7,
        rollout={"num_groups": 2, "group_size": 2, "on_stale": "mask", "tail_batching": {"extra_groups": 2}},
        trainer={
            "stream_groups": streamed,
            "num_epochs": 1,
            "minibatch_sequences": 64,
            "fine_tuning_steps": 0,
            "dynamic_sampling": {"enabled": False},
        },
        env={"settings": {**SHORT_LAKES, "num_maps": 64}, "latency": {"median_s": 0.01, "sigma": 2.0}},
    )
    assert (result.num_steps, result.num_restarts) == (7, 2)
    assert {step: len(ids) for step, ids in consumed_of(config).items()} == dict.fromkeys(range(7), 4)
    assert_applied_once(world, config)
    told = [record["tail_batching"] for record in script.records]
    assert {one["is_long"] for one in told} == {0, 1}
    assert all("group_ids" not in record for record in script.records)
    assert world.scheduler is not None
    store = world.scheduler.store
    played = Counter(
        json.dumps(store.trajectories[name].trace("")["task"], sort_keys=True)
        for ids in consumed_of(config).values()
        for name in ids
    )
    assert set(played.values()) == {2}, "a group's members each, of one group for each prompt"
    assert not [name for name in store.trajectories if store.state(name)[0] == "running"]
