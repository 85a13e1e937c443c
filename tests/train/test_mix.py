"""Which task a group plays, and what a job of several tasks may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rose.config import validate
from rose.errors import ConfigError
from rose.train.check import check_job
from rose.train.env_manager import family_of
from rose.train.metrics import prefill_per_decode, trajectory_metrics
from rose.train.mix import TaskMix, TaskShapes
from rose.train.train_config import TrainConfig

TASKS = {"a": [{"n": 0}, {"n": 1}], "b": [{"n": 2}], "c": [{"n": 3}, {"n": 4}, {"n": 5}]}


def test_every_stretch_of_groups_is_mixed_as_the_weights_say() -> None:
    weights = {"a": 5.0, "b": 1.0, "c": 2.0}
    mix = TaskMix(TASKS, weights)
    names = [mix.at(index)[0] for index in range(400)]
    for length in range(1, 401):
        for name, weight in weights.items():
            assert abs(names[:length].count(name) - length * weight / 8.0) < 1.0
    assert names.count("a") == 250


def test_a_task_is_walked_through_in_order_and_a_restart_goes_on_where_it_was() -> None:
    mix = TaskMix(TASKS, {"a": 1.0, "b": 1.0, "c": 1.0})
    whole = [mix.at(index) for index in range(30)]
    for name, tasks in TASKS.items():
        own = [task for drawn, task in whole if drawn == name]
        assert own == [tasks[index % len(tasks)] for index in range(10)]
    assert TaskMix(TASKS, {"a": 1.0, "b": 1.0, "c": 1.0}).at(17) == whole[17]


def test_a_job_of_one_task_walks_through_it() -> None:
    mix = TaskMix({"": TASKS["c"]})
    assert [mix.at(index) for index in (0, 1, 2, 3, 10**12)] == [
        ("", {"n": n}) for n in (3, 4, 5, 3, 3 + 10**12 % 3)
    ]


def turn(number: int, prompt: int, sampled: int, parent: int | None) -> dict[str, Any]:
    return {
        "turn": number,
        "parent": parent,
        "prompt_token_ids": [0] * prompt,
        "token_ids": [0] * sampled,
        "finish_reason": "stop",
    }


def test_the_ratio_counts_new_prompt_tokens_once() -> None:
    # 10 new and 4 sampled, then 6 new (20 - 14) and 2 sampled; a fork of the second that shares only the first.
    grown = {"turns": [turn(0, 10, 4, None), turn(1, 20, 2, 0), turn(2, 16, 2, 0)]}
    assert prefill_per_decode([grown]) == (10 + 6 + 2) / 8
    assert prefill_per_decode([{"turns": []}]) == 0.0


def test_metrics_are_told_per_task_and_the_ratio_follows_them_slowly() -> None:
    def one(kind: str, prompt: int, reward: float) -> dict[str, Any]:
        told = {"reward": reward, "success": reward > 0, "turns": [turn(0, prompt, 2, None)]}
        return told | {"task_kind": kind}

    shapes = TaskShapes()
    record = trajectory_metrics([one("a", 10, 1.0), one("a", 10, 0.0), one("b", 2, 1.0)], version=(1, 0))
    assert {name: task["success_rate"] for name, task in record["tasks"].items()} == {"a": 0.5, "b": 1.0}
    shapes.observe(record)
    assert shapes.ratios == {"a": 5.0, "b": 1.0}
    shapes.observe(trajectory_metrics([one("a", 20, 1.0)], version=(1, 0)))
    assert shapes.ratios == {"a": pytest.approx(5.0 + 0.3 * 5.0), "b": 1.0}

    alone = trajectory_metrics([one("", 6, 1.0)], version=(1, 0))
    assert "tasks" not in alone
    shapes.observe(alone)
    assert shapes.ratios[""] == 3.0


LAKE = {"name": "lake", "kind": "frozenlake", "weight": 3.0, "max_tokens": 1}
MATHS = {"name": "maths", "kind": "math_tools", "reward": {"kind": "exact_match"}, "reward_range": [0, 1]}


def job(**changes: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "weights": {"directory": "w"},
        "trainer": {"learning_rate": 1e-6},
        "tasks": [LAKE, MATHS],
    } | changes


def test_what_a_task_leaves_open_is_the_jobs() -> None:
    config = validate(TrainConfig, job(rollout={"max_tokens": 64}, env={"step_timeout_s": 7.0}))
    lake, maths = config.all_tasks
    assert (lake.max_tokens, maths.max_tokens) == (1, 64)
    assert (lake.step_timeout_s, maths.step_timeout_s) == (7.0, 7.0)
    assert (lake.reward_range, maths.reward_range) == ((-1e6, 1e6), (0.0, 1.0))
    assert (lake.reward.kind, maths.reward.kind) == ("environment", "exact_match")
    assert config.alpha == 4  # one of them thinks aloud
    assert validate(TrainConfig, job(tasks=[LAKE])).alpha == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": [LAKE, LAKE]}, "tasks need different names"),
        ({"tasks": [LAKE, MATHS | {"reward_range": [0, 2e9]}]}, "both within"),
        ({"env": {"kind": "frozenlake"}}, r"env\.kind is each task's own"),
        ({"reward": {"kind": "exact_match"}}, r"reward\.kind is each task's own"),
        ({"tasks": [LAKE | {"weight": 0}]}, r"tasks\.0\.weight"),
        ({"tasks": [LAKE | {"wieght": 1}]}, r"wieght"),
    ],
)
def test_a_mistake_in_the_tasks_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(TrainConfig, job(**changes))


def test_a_task_that_cannot_be_is_named_before_anything_starts(tmp_path: Path, policy_model: Path) -> None:
    wrong = job(tasks=[LAKE, MATHS | {"settings": {"num_term": 3}}])
    with pytest.raises(ConfigError, match="num_term") as caught:
        family_of(validate(TrainConfig, wrong).all_tasks[1])
    assert caught.value.field == "tasks.maths.settings"

    (tmp_path / "three.jsonl").write_text('{"question": "1 + 1", "answer": 2}\n')
    settings = {"path": str(tmp_path / "three.jsonl"), "held_out_fraction": 0.0}
    one = job(
        model=str(policy_model),
        tasks=[LAKE, MATHS | {"settings": settings}],
        eval={"at_end": True},
        rollout={"max_tokens": 8},
    )
    with pytest.raises(ConfigError, match="no held-out tasks") as caught:
        check_job(validate(TrainConfig, one))
    assert caught.value.field == "tasks.maths"
