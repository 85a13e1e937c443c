"""A whole plan in one answer: it is followed from the start, and paid on the goal alone."""

from __future__ import annotations

import pytest

from rose.errors import TrainError
from rose.train.envs.frozenlake import ACTIONS
from rose.train.envs.frozenlake_plan import follow, shortest_plan, start_of
from rose.train.envs.registry import make_family

BOARD = ["FFFF", "SHFH", "FFFH", "HFFG"]
LEFT, DOWN, RIGHT, UP = range(4)


def words(plan: list[int]) -> str:
    return "".join(ACTIONS[move] for move in plan)


async def play(text: str) -> object:
    env = make_family("frozenlake_plan", {"size": 4}).make()
    first = await env.reset({"env": "frozenlake", "map": BOARD})
    assert first.messages[0]["content"] == "FFFF\n@HFH\nFFFH\nHFFG"
    return await env.step(text)


async def test_a_good_plan_is_paid_after_one_turn() -> None:
    last = await play(words(shortest_plan(BOARD)))
    assert (last.done, last.success, last.reward, last.info) == (True, True, 1.0, {"moves": 5})  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("plan", "moves"),
    [
        ([RIGHT] * 16, 1),  # into the hole
        ([LEFT] * 16, 16),  # against the edge until moves run out
        ([DOWN] * 6, 1),  # no move for the cell that it comes to
        ([], 0),
    ],
)
async def test_a_plan_that_does_not_reach_the_goal_is_not_paid(plan: list[int], moves: int) -> None:
    last = await play(words(plan) + " and nonsense")
    assert (last.done, last.reward, last.info["moves"]) == (True, 0.0, moves)  # type: ignore[attr-defined]


def test_the_shortest_plan_leads_to_the_goal_from_every_start_of_every_lake() -> None:
    settings = {"size": 5, "num_maps": 64, "max_start_distance": 8}
    for task in make_family("frozenlake_plan", settings).tasks():
        moves, reached = follow(task["map"], shortest_plan(task["map"]))
        assert reached
        assert 2 <= moves <= 8
        assert task["map"][start_of(task["map"]) // 5][start_of(task["map"]) % 5] == "S"


async def test_a_second_answer_and_a_foreign_task_are_errors() -> None:
    env = make_family("frozenlake_plan", {"size": 4}).make()
    with pytest.raises(TrainError, match=r"task\.map"):
        await env.reset({"env": "frozenlake", "map": BOARD[:3]})
    with pytest.raises(TrainError, match="reset"):
        await env.step("left")
