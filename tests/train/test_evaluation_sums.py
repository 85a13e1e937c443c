"""What an evaluation says: pass@k against every way to draw k episodes, whose episodes are counted together, gaps, and means over versions."""

from __future__ import annotations

import itertools
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rose.train.evaluation import EvalEpisode, Recent, parts_of, pass_at_k, told_in_short, told_of
from rose.train.train_config import EvalSettings


@pytest.mark.parametrize("count", range(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_of_k_with_a_success(count: int) -> None:
    for num_successes, k in itertools.product(range(count + 1), range(1, count + 1)):
        episodes = [index < num_successes for index in range(count)]
        draws = [any(draw) for draw in itertools.combinations(episodes, k)]
        assert pass_at_k(count, num_successes, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_of_many_episodes_is_a_number_of_full_accuracy() -> None:
    """A quotient of two floats would overflow long before: these have 600 digits."""
    assert pass_at_k(2000, 0, 1000) == 0.0
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5, abs=1e-15)
    assert pass_at_k(2000, 1500, 1000) == 1.0


def score(task_index: int, success: bool, task_kind: str = "") -> EvalEpisode:
    return EvalEpisode(
        task_index=task_index,
        reward=float(success),
        success=success,
        num_turns=2,
        versions=("1.1",),
        task_kind=task_kind,
    )


def test_episodes_of_one_task_are_counted_together_and_those_of_no_other() -> None:
    """Managers number their tasks each from 0, and so do the tasks of a job."""
    first = [score(0, True, "a"), score(0, False, "a"), score(0, False, "b"), score(0, False, "b")]
    second = [score(0, True, "a"), score(0, True, "a"), score(1, False, "a"), score(1, True, "a")]
    found = told_of({"held_out": [first, second]}, (1, 2))
    assert found["success_rate"] == found["pass_at_1"] == 0.5
    assert found["pass_at_2"] == 0.75
    assert told_in_short(found) == "0.50 (pass@1 0.50; pass@2 0.75)"
    assert found["num_episodes"] == 8
    assert found["turns_mean"] == 2.0
    assert found["tasks"]["a"]["pass_at_2"] == 1.0
    assert found["tasks"]["b"]["pass_at_2"] == 0.0
    assert told_of({"held_out": [[score(0, True)]]}, ()) == {
        "num_episodes": 1,
        "success_rate": 1.0,
        "reward_mean": 1.0,
        "turns_mean": 2.0,
    }


def test_more_than_there_are_episodes_cannot_be_asked_for() -> None:
    assert EvalSettings(episodes_per_task=8, pass_at=(1, 8)).pass_at == (1, 8)
    assert EvalSettings(sampled_episodes=8, pass_at=(1, 8)).pass_at == (1, 8)
    with pytest.raises(
        ValidationError, match="pass_at 4 needs episodes_per_task or sampled_episodes of 4 at least"
    ):
        EvalSettings(episodes_per_task=2, pass_at=(1, 4))
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        EvalSettings(pass_at=(0,))


def test_an_evaluation_has_the_parts_that_are_asked_for() -> None:
    def asked(**settings: int) -> list[tuple[str, bool, float, int]]:
        parts = parts_of(EvalSettings.model_validate(settings), 0.7)
        return [(one.name, one.of_training, one.temperature, one.episodes_per_task) for one in parts]

    assert asked() == [("held_out", False, 0.0, 1)]
    assert asked(num_training_tasks=4) == [("held_out", False, 0.0, 1), ("training", True, 0.0, 1)]
    assert asked(sampled_episodes=8) == [("held_out", False, 0.0, 1), ("sampled", False, 0.7, 8)]
    assert asked(num_training_tasks=4, sampled_episodes=8)[2:] == [
        ("sampled", False, 0.7, 8),
        ("sampled_training", True, 0.7, 8),
    ]


def test_the_gap_is_training_less_held_out_of_episodes_played_alike() -> None:
    episodes = {
        "held_out": [[score(0, False), score(1, True)]],
        "training": [[score(0, True), score(1, True)]],
        "sampled": [[score(0, False), score(0, True), score(1, False), score(1, False)]],
        "sampled_training": [[score(0, True), score(0, False), score(1, True), score(1, False)]],
    }
    told = told_of(episodes, (2,))
    assert (told["success_rate"], told["training"]["success_rate"], told["gap"]) == (0.5, 1.0, 0.5)
    assert (told["sampled"]["success_rate"], told["sampled_gap"]) == (0.25, 0.25)
    assert "pass_at_2" not in told  # of one episode a task it would be no chance of anything
    assert (told["sampled"]["pass_at_2"], told["sampled_training"]["pass_at_2"]) == (0.5, 1.0)
    told["recent"] = {"num_versions": 3, "success_rate": 0.4, "gap": 0.55}
    assert told_in_short(told) == (
        "0.50 (training 1.00, gap +0.50; sampled 0.25, gap +0.25; last 3 versions 0.40, gap +0.55)"
    )


def evaluation(success: float, training: float | None = None, num_episodes: int = 8) -> dict[str, Any]:
    told: dict[str, Any] = {"num_episodes": num_episodes, "success_rate": success}
    if training is not None:
        told |= {"training": {"num_episodes": 4, "success_rate": training}, "gap": training - success}
    return told


@given(
    st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40),
    st.integers(1, 6),
)
def test_the_mean_is_over_the_last_versions_of_the_surviving_line(
    evaluated: list[tuple[int, float, float]], over: int
) -> None:
    """Steps go back where a death has undone some, and what was evaluated of these is no version of the run."""
    recent, line = Recent(over), dict[int, tuple[float, float]]()
    for step, success, training in evaluated:
        told = recent.add(step, evaluation(success, training))
        line = {one: row for one, row in line.items() if one < step} | {step: (success, training)}
        last = [line[one] for one in sorted(line)][-over:]
        # What was forgotten to make room does not come back when newer steps are undone.
        assert 1 <= told["num_versions"] <= len(last)
        counted = last[-int(told["num_versions"]) :]
        assert told["success_rate"] == pytest.approx(mean(row[0] for row in counted))
        assert told["training_success_rate"] == pytest.approx(mean(row[1] for row in counted))
        assert told["gap"] == pytest.approx(told["training_success_rate"] - told["success_rate"], abs=1e-9)


def test_a_line_without_deaths_counts_as_many_versions_as_it_may() -> None:
    recent = Recent(3)
    counts = [recent.add(step, evaluation(0.5))["num_versions"] for step in (4, 9, 14, 19)]
    assert counts == [1, 2, 3, 3]


def test_evaluations_of_something_else_are_not_averaged_with_it() -> None:
    recent = Recent(10)
    recent.add(0, evaluation(0.0))
    recent.add(1, evaluation(0.2, num_episodes=16))
    assert recent.add(2, evaluation(1.0)) == {"num_versions": 2, "success_rate": 0.5}
    assert recent.add(3, evaluation(0.5, training=1.0))["num_versions"] == 1
