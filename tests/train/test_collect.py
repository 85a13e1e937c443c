"""Which groups a step takes: dynamic sampling, staleness, rounds."""

from __future__ import annotations

from typing import Any

import pytest

from rose.errors import RequestError, TrainError
from rose.train.collect import Acceptance, Collected, CollectParams, lag_of
from rose.train.envs.base import MAX_REWARD
from tests.train.traces import trajectory, turn


def group(name: str, rewards: list[float], version: str = "1.5") -> list[dict[str, Any]]:
    turns = [turn([1], [2], versions=[[version, 0, 1]])]
    return [
        trajectory(turns, id=f"{name}{index}", group_id=name, reward=reward)
        for index, reward in enumerate(rewards)
    ]


def collected(**changes: Any) -> Collected:
    defaults = {"num_groups": 2, "alpha": 1, "dynamic_sampling": True, "max_rounds": 3}
    return Collected(CollectParams(**(defaults | changes)))


def test_dull_groups_are_consumed_but_replaced_by_whole_new_groups() -> None:
    step = collected()
    assert step.add("b1", group("a", [1, 1]) + group("b", [0, 1]), (1, 5)) == (1, 2)
    assert step.num_missing == 1
    assert step.add("b2", group("c", [1, 0]), (1, 5)) == (1, 1)
    assert step.num_missing == 0
    assert [one["id"] for one in step.trajectories] == ["b0", "b1", "c0", "c1"]
    assert step.ids == ("b0", "b1", "c0", "c1", "a0", "a1")  # the dull ones are used up too
    assert step.batch_ids == ["b1", "b2"]


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    step = collected(dynamic_sampling=False)
    step.add("b1", group("a", [1, 1]) + group("b", [0, 0]), (1, 5))
    assert (step.num_missing, len(step.trajectories)) == (0, 4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_group_in_which_nothing_was_sampled_is_replaced_too(dynamic: bool) -> None:
    step = collected(dynamic_sampling=dynamic)
    over = [trajectory([], id=f"o{index}", group_id="o", reward=float(index)) for index in range(2)]
    assert step.add("b1", over + group("b", [0, 1]), (1, 5)) == (1, 2)
    assert (step.num_missing, step.ids) == (1, ("b0", "b1", "o0", "o1"))


def test_rounds_are_capped_and_a_step_of_dull_groups_alone_measures_them() -> None:
    step = collected()
    for index in range(3):
        assert step.num_missing == 2
        step.add(f"b{index}", group(f"g{index}", [1, 1]), (1, 5))
    assert step.num_missing == 0
    assert len(step.trajectories) == 6


@pytest.mark.parametrize(
    ("version", "stale"), [("1.5", False), ("1.4", False), ("1.3", True), ("0.5", False), ("0.7", True)]
)
def test_what_is_older_than_alpha_is_marked_and_not_trained(version: str, stale: bool) -> None:
    step = collected(num_groups=1)
    step.add("b", group("a", [0, 1], version=version), (1, 5))
    assert [one.get("stale") is True for one in step.trajectories] == [stale, stale]


def test_the_oldest_token_decides() -> None:
    turns = [
        turn([1], [2, 3], versions=[["1.5", 0, 1], ["1.2", 1, 1]]),
        turn([1], [2], versions=[["1.6", 0, 1]]),
    ]
    assert lag_of(trajectory(turns), (1, 6)) == 4
    assert lag_of(trajectory([turn([1], [2])]), (1, 6)) == 0
    with pytest.raises(RequestError):
        lag_of(trajectory([turn([1], [2], versions=[["new", 0, 1]])]), (1, 6))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reward": None}, "reward"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": 10**400}, "reward"),
        ({"id": ""}, "id"),
        ({"group_id": 5}, "group_id"),
    ],
)
def test_a_leased_trajectory_that_cannot_be_used_is_named(changes: dict[str, Any], field: str) -> None:
    step = collected()
    with pytest.raises(TrainError) as caught:
        step.add("b", [group("a", [0, 1])[0] | changes], (1, 5))
    assert caught.value.field == field
    assert step.batch_ids == []  # nothing was taken in


def test_one_malformed_trajectory_is_set_aside_by_itself_and_consumed() -> None:
    step = collected()
    batch = [*group("a", [0, 1]), *group("b", [1, 0])]
    batch[1] = batch[1] | {"reward": float("nan")}

    def check(one: dict[str, Any]) -> None:
        if one["id"] == batch[2]["id"]:
            raise TrainError("sampled with top_p", field="sampling.top_p")

    step.add("b1", batch, (1, 5), check)

    assert [one["id"] for one in step.trajectories] == [batch[0]["id"], batch[3]["id"]]
    assert list(step.malformed) == [batch[1]["id"], batch[2]["id"]]
    assert "top_p" in step.malformed[batch[2]["id"]]
    assert sorted(step.ids) == sorted(one["id"] for one in batch)
    with pytest.raises(TrainError, match="4 of 6 trajectories cannot be trained on, the first: ") as caught:
        step.add("b2", [one | {"reward": None} for one in group("c", [0, 1])], (1, 5))
    assert caught.value.field == "reward"
    assert step.batch_ids == ["b1"]
    step.clear()
    assert (step.malformed, step.num_seen) == ({}, 0)


@pytest.mark.parametrize("reward", [-5e9, 1.0001e9, 1e30])
def test_a_reward_beyond_the_range_costs_its_own_trajectory(reward: float) -> None:
    """A scheduler takes larger ones, of other trainers' environments: raised later, it would end every run that leases the batch."""
    step = collected()
    batch = [*group("a", [0, reward]), *group("b", [1, 0])]
    step.add("b1", batch, (1, 5))
    assert list(step.malformed) == [batch[1]["id"]]
    assert "out of range" in step.malformed[batch[1]["id"]]
    assert [one["id"] for one in step.trajectories] == [batch[2]["id"], batch[3]["id"]]
    assert sorted(step.ids) == sorted(one["id"] for one in batch)


def test_the_ends_of_the_range_of_rewards_are_in_it() -> None:
    """As in ``env.reward_range``, which may be all of it."""
    step = collected()
    step.add("b1", [*group("a", [-MAX_REWARD, MAX_REWARD]), *group("b", [0, 1])], (1, 5))
    assert (step.malformed, step.num_informative) == ({}, 2)


def test_a_refill_launches_what_the_acceptance_makes_likely_to_suffice() -> None:
    acceptance = Acceptance(weight=0.5)
    assert acceptance.to_launch(3) == 3
    acceptance.observe(0, 8)
    assert (acceptance.rate, acceptance.to_launch(3)) == (0.5, 6)
    for _ in range(10):
        acceptance.observe(0, 8)
    assert acceptance.to_launch(3) == 12  # bounded, however poor
    acceptance.observe(0, 0)
    assert acceptance.rate < 0.01


def test_a_starved_step_waits_for_groups_with_unequal_rewards_and_keeps_what_it_has() -> None:
    step = collected(dynamic_sampling=False, min_informative=2, starved_rounds=3)
    step.add("b1", group("a", [1, 1]) + group("b", [0, 1]), (1, 5))
    assert (step.num_missing, step.num_starving) == (1, 1)
    step.add("b2", group("c", [1, 1]), (1, 5))
    assert step.num_missing == 1
    assert step.num_leases_starved == 2
    step.add("b3", group("d", [1, 0]), (1, 5))
    assert (step.num_missing, len(step.trajectories), step.num_leases_starved) == (0, 8, 2)
    step.clear()
    assert (step.num_informative, step.num_leases_starved) == (0, 0)


def test_a_starved_step_does_not_wait_for_ever() -> None:
    step = collected(dynamic_sampling=False, min_informative=2, starved_rounds=2)
    step.add("b1", group("a", [1, 1]) + group("b", [0, 0]), (1, 5))
    step.add("b2", group("c", [1, 1]), (1, 5))
    assert (step.num_missing, step.num_leases_starved) == (0, 2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_starved_step_waits_for_its_own_number_of_rounds(dynamic: bool) -> None:
    step = collected(dynamic_sampling=dynamic, min_informative=1, max_rounds=2, starved_rounds=5)
    while step.num_missing:
        step.add(f"b{step.num_rounds}", group(f"g{step.num_rounds}", [1, 1]), (1, 5))
    assert step.num_rounds == 5
