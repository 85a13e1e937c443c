"""Mathematics with a tool, text games, datasets, latency: what the agent reads, what it is paid, what input cannot do."""

from __future__ import annotations

import asyncio
import json
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.errors import ConfigError, TrainError
from rose.train.dataset import load_tasks
from rose.train.envs.base import Observation, unusable
from rose.train.envs.delayed import EnvLatency
from rose.train.envs.frozenlake import FrozenLakeFamily, FrozenLakeParams
from rose.train.envs.math_tools import calculate
from rose.train.envs.registry import make_family

TASK = {"env": "math_tools", "question": "What is 12 * 7?", "answer": "84"}


async def play(env: Any, task: Any, texts: list[str]) -> list[Observation]:
    seen = [await env.reset(task)]
    seen.extend([await env.step(text) for text in texts])
    await env.close()
    return seen


async def test_the_calculator_is_asked_and_the_answer_is_paid() -> None:
    env = make_family("math_tools", {}).make()
    seen = await play(env, TASK, ["I need help. CALC 12*7", "ANSWER 84."])
    assert "What is 12 * 7?" in seen[0].messages[0]["content"]
    assert seen[1].messages[0]["content"] == "= 84"
    assert (seen[2].done, seen[2].reward, seen[2].success, seen[2].info["calls"]) == (True, 1.0, True, 1)


@pytest.mark.parametrize(
    ("texts", "reward", "truncated"),
    [
        (["ANSWER 168/2"], 1.0, False),
        (["ANSWER 83"], 0.0, False),
        (["ANSWER"], 0.0, False),
        (["hm", "CALC (", "CALC 1/0", "CALC 2"], 0.0, True),
    ],
)
async def test_wrong_answers_and_running_out_of_turns_pay_nothing(
    texts: list[str], reward: float, truncated: bool
) -> None:
    last = (await play(make_family("math_tools", {}).make(), TASK, texts))[-1]
    assert (last.done, last.reward, last.info["truncated"]) == (True, reward, truncated)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2*3", 7), ("(1+2)*3", 9), ("-4 + 1", -3), ("1/3 + 1/6", Fraction(1, 2)), ("2.5 * 4", 10)],
)
def test_the_calculator_computes_exactly(expression: str, value: Any) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "__import__('os').system('true')",
        "().__class__",
        "9**9**9**9",
        "1 if 1 else 2",
        "x",
        "'a' * 9",
        "True + 1",
        "1e400",
        "1/0",
        "+".join("1" * 101),
        "-" * 100 + "1",
        "*".join(["9999999999999999"] * 11),
        "1;2",
        "\x00",
        "1\n2",
    ],
)
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        calculate(expression)


def test_made_questions_are_right_different_and_held_out() -> None:
    family = make_family("math_tools", {"num_tasks": 20, "seed": 5})
    tasks, held_out = family.tasks(), family.held_out_tasks(10)
    assert tasks == make_family("math_tools", {"num_tasks": 20, "seed": 5}).tasks()
    questions = {task["question"] for task in [*tasks, *held_out]}
    assert len(questions) == 30
    for task in tasks:
        assert calculate(task["question"].removeprefix("What is ").removesuffix("?")) == Fraction(
            task["answer"]
        )


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines) + "\n")
    return path


def test_a_file_of_questions_is_split_into_training_and_held_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "q.jsonl", *({"question": f"q{n}?", "answer": n} for n in range(10)), "")
    family = make_family("math_tools", {"path": str(path), "held_out_fraction": 0.2})
    assert [task["question"] for task in family.tasks()] == [f"q{n}?" for n in range(8)]
    assert [task["question"] for task in family.held_out_tasks(5)] == ["q8?", "q9?"]


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        (["{"], ":1"),
        ([{"question": "q", "answer": 1}, "[]"], ":2"),
        ([{"question": "q"}], ":1.answer"),
        ([{"question": 5, "answer": 1}], ":1.question"),
        ([{"question": "q", "answer": True}], ":1.answer"),
        ([""], "path"),
        ([{"question": "q", "answer": "many"}], "path"),
        ([{"question": "q", "answer": "1e999999999"}], "path"),  # a power that takes minutes to compute
    ],
)
def test_a_bad_line_of_a_dataset_is_named(tmp_path: Path, lines: list[Any], field: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(ConfigError) as caught:
        make_family("math_tools", {"path": str(path)}).tasks()
    assert caught.value.field is not None
    assert caught.value.field.endswith(field)


def test_a_dataset_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tasks(tmp_path / "none.jsonl", {})


def test_a_saved_data_set_is_read_like_a_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs pip install datasets")
    rows = [{"question": f"q{n}?", "answer": n, "other": "x"} for n in range(10)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    family = make_family("math_tools", {"path": str(tmp_path / "saved"), "held_out_fraction": 0.2})
    assert [task["question"] for task in family.tasks()] == [f"q{n}?" for n in range(8)]
    assert [task["answer"] for task in family.held_out_tasks(5)] == ["8", "9"]

    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    splits.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ConfigError, match=r"several splits.*train"):
        load_tasks(tmp_path / "splits", {})
    with pytest.raises(ConfigError, match=r"saved:1\.answer"):
        load_tasks(tmp_path / "saved", {"answer": str})


def test_a_folder_that_is_no_data_set_is_named(tmp_path: Path) -> None:
    """With the library and without it."""
    with pytest.raises(
        ConfigError, match=r"env\.settings\.path: .*(no saved data set|datasets is not installed)"
    ):
        load_tasks(tmp_path, {})


def test_unseen_lakes_are_none_of_the_training_lakes() -> None:
    family = FrozenLakeFamily(FrozenLakeParams(num_maps=8))
    held_out = {tuple(task["map"]) for task in family.held_out_tasks(32)}
    assert len(held_out) == 32
    assert not held_out & {tuple(task["map"]) for task in family.tasks()}


def test_injected_latency_has_its_median_and_a_long_tail_and_is_the_same_every_time() -> None:
    latency = EnvLatency(median_s=0.1, sigma=1.0)
    drawn = sorted(latency.draw_s({"n": n}, 0) for n in range(400))
    assert drawn == sorted(EnvLatency(median_s=0.1, sigma=1.0).draw_s({"n": n}, 0) for n in range(400))
    assert 0.08 < drawn[200] < 0.125
    assert drawn[-4] > 5 * drawn[200]


async def test_a_delayed_environment_waits_and_is_otherwise_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    slow = make_family("math_tools", {}, EnvLatency(median_s=0.5, sigma=0.5))
    assert slow.tasks() == make_family("math_tools", {}).tasks()
    assert (await play(slow.make(), TASK, ["ANSWER 84"]))[-1].reward == 1.0
    assert len(slept) == 2
    assert all(seconds > 0 for seconds in slept)


def test_a_family_of_ones_own_is_imported_by_name() -> None:
    family = make_family("tests.train.test_environments:own_family", {"count": 3})
    assert len(family.tasks()) == 3
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_family("tests.train.test_environments:nothing", {})


def test_a_module_that_is_not_found_is_told_where_python_looks() -> None:
    """Beside job.toml it does not: a console script has no working directory on its path."""
    with pytest.raises(ConfigError, match="cannot be imported") as refused:
        make_family("no_such_module_of_mine:factory", {})
    assert refused.value.fix is not None
    assert "PYTHONPATH=FOLDER rose train" in refused.value.fix
    with pytest.raises(ConfigError, match="cannot be imported") as found:
        make_family("tests.train.test_environments:nothing", {})
    assert found.value.fix is None  # the module was found


@pytest.mark.parametrize("reward", [True, np.float32(1.0), np.int64(1), "1.0", None])
def test_a_reward_that_is_finite_and_no_float_is_not_called_infinite(reward: object) -> None:
    assert unusable(reward) == f"{reward!r} is no Python float: return float(...)"


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (1, None),
        (np.float64(0.5), None),
        (float("nan"), "nan is not finite"),
        pytest.param(10**400, "a whole number beyond every float is not finite", id="whole"),
    ],
)
def test_a_number_is_a_reward_where_it_is_finite(reward: object, why: str | None) -> None:
    assert unusable(reward) == why


def own_family(count: int) -> Any:
    return make_family("math_tools", {"num_tasks": count})


# --- text games ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def game() -> Any:
    pytest.importorskip("textworld", reason="needs pip install '.[textgame]' from a checkout of ROSE")
    return make_family("text_game", {"num_games": 2, "seed": 4})


async def test_a_text_game_is_won_by_its_own_walkthrough(game: Any) -> None:
    from rose.train.envs.text_game import _game

    task = game.tasks()[0]
    commands = _game(*task["shape"], task["seed"]).metadata["walkthrough"]
    seen = await play(game.make(), task, list(commands))
    assert (seen[-1].done, seen[-1].reward, seen[-1].success) == (True, 1.0, True)
    assert not any(one.done for one in seen[:-1])
    for observation, command in zip(seen, commands, strict=False):
        assert command in observation.messages[0]["content"]  # every needed command is offered


async def test_a_text_game_is_patient_with_nonsense_until_its_turns_run_out(game: Any) -> None:
    seen = await play(game.make(), game.tasks()[0], ["dance", "", "\n", *["look at the sky"] * 7])
    assert seen[1].messages[0]["content"].startswith("That is not possible.")
    assert (seen[-1].done, seen[-1].reward, seen[-1].info["illegal"], seen[-1].info["truncated"]) == (
        True,
        0.0,
        10,
        True,
    )


async def test_the_same_seed_is_the_same_game_and_foreign_tasks_are_refused(game: Any) -> None:
    first, second = game.tasks()
    shown = [(await play(game.make(), task, []))[0].messages[0]["content"] for task in (first, first, second)]
    assert shown[0] == shown[1] != shown[2]
    for task in ({"env": "chess"}, {"env": "text_game", "shape": [1], "seed": 1}):
        with pytest.raises(TrainError, match=r"^task\."):
            await game.make().reset(task)


async def test_the_example_of_the_guide_plays_an_episode() -> None:
    """As the page has it, word for word."""
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    text = next(block for block in page.split("```")[1::2] if block.startswith("python\n"))
    module: dict[str, Any] = {}
    exec(textwrap.dedent(text.removeprefix("python\n")), module)
    family = module["factory"](num_tasks=3)
    assert family.allowed_texts is None
    assert not [task for task in family.held_out_tasks(2) if task in family.tasks()]
    env = family.make()
    first = await env.reset(family.tasks()[1])
    assert (first.done, len(first.messages)) == (False, 1)
    assert (await env.step("banan")) == Observation(done=True, reward=1.0, success=True)
    await env.close()
