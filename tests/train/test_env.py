"""FrozenLake as a conversation: deterministic, honest about rewards, patient with nonsense."""

from __future__ import annotations

import pytest

from rose.errors import ConfigError, TrainError
from rose.train.envs.base import Observation
from rose.train.envs.frozenlake import ACTIONS, FrozenLakeFamily, FrozenLakeParams
from rose.train.envs.registry import make_family

LAKE = {"env": "frozenlake", "map": ["SFFF", "FHFH", "FFFH", "HFFG"], "seed": 0}


def family(**changes: object) -> FrozenLakeFamily:
    return FrozenLakeFamily(FrozenLakeParams(**changes))  # type: ignore[arg-type]


async def play(actions: list[str], **changes: object) -> tuple[list[str], Observation]:
    env = family(**changes).make()
    boards = [(await env.reset(LAKE)).messages[0]["content"]]
    last = Observation()
    for action in actions:
        last = await env.step(action)
        boards.extend(message["content"] for message in last.messages)
    await env.close()
    return boards, last


async def test_the_agent_sees_itself_move_and_is_paid_on_the_goal() -> None:
    boards, last = await play(["down", "down", "right", "down", "right", "right"])

    assert boards[0] == "@FFF\nFHFH\nFFFH\nHFFG"
    assert boards[1] == "SFFF\n@HFH\nFFFH\nHFFG"
    assert boards[-1] == "SFFF\nFHFH\nFFFH\nHF@G"
    assert (last.done, last.reward, last.success, last.info["turns"]) == (True, 1.0, True, 6)


async def test_a_hole_ends_the_episode_without_reward() -> None:
    _, last = await play(["right", "down"])
    assert (last.done, last.reward, last.success, last.info["truncated"]) == (True, 0.0, False, False)


async def test_turns_run_out_also_on_text_that_is_no_action() -> None:
    boards, last = await play(["dance", " LEFT ", "", "up up"], max_turns=4)
    assert boards == [boards[0]] * 4
    assert (last.done, last.reward, last.info["illegal"], last.info["truncated"]) == (True, 0.0, 3, True)


async def test_the_goal_on_the_last_turn_still_counts() -> None:
    _, last = await play(["down", "down", "right", "down", "right", "right"], max_turns=6)
    assert last.success


def test_tasks_depend_on_the_seed_alone_and_all_differ() -> None:
    first, again, other = (family(seed=seed).tasks() for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert len({tuple(task["map"]) for task in first}) == 8
    assert family(seed=3, num_maps=12).tasks()[:8] == list(first)


def test_every_start_is_within_the_allowed_distance_of_the_goal() -> None:
    for task in family(seed=1, num_maps=30, min_start_distance=2, max_start_distance=3).tasks():
        rows = task["map"]
        row = next(index for index, line in enumerate(rows) if "S" in line)
        goal, reached = (row, rows[row].index("S")), {}
        frontier = [(goal, 0)]
        for cell, moves in frontier:
            if cell in reached:
                continue
            reached[cell] = moves
            for step in ((1, 0), (-1, 0), (0, 1), (0, -1)):
                near = (cell[0] + step[0], cell[1] + step[1])
                if 0 <= near[0] < 4 and 0 <= near[1] < 4 and rows[near[0]][near[1]] != "H":
                    frontier.append((near, moves + 1))
        assert reached[3, 3] in (2, 3)


def test_more_maps_than_exist_is_a_clear_error() -> None:
    with pytest.raises(ConfigError) as caught:
        family(size=2, num_maps=50).tasks()
    assert caught.value.field == "env.num_maps"


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"env": "chess"},
        {"env": "frozenlake", "map": ["SF", "FG"]},
        {"env": "frozenlake", "map": ["SXFF"] * 4},
    ],
)
async def test_a_foreign_task_is_refused(task: dict[str, object]) -> None:
    with pytest.raises(TrainError, match=r"^task\."):
        await family().make().reset(task)


async def test_stepping_after_the_end_is_an_error() -> None:
    env = family().make()
    await env.reset(LAKE)
    await env.step("right")
    assert (await env.step("down")).done
    with pytest.raises(TrainError, match="after the end"):
        await env.step("down")


def test_unknown_kinds_and_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown environment 'chess'"):
        make_family("chess", {})
    with pytest.raises(ConfigError, match="num_map"):
        make_family("frozenlake", {"num_map": 3})
    assert make_family("frozenlake", {"num_maps": 3}).allowed_texts == ACTIONS
