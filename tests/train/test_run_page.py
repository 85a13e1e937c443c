"""The page of a run: what it draws, of which steps, and what a hostile name does to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rose.train.logs import open_logs, scalars_of
from rose.train.run_page import EVERY_S, MAX_POINTS, RunPage
from rose.train.train_config import TrainConfig

PART = {"num_episodes": 4, "success_rate": 0.5}


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": 1, "sampled_success_rate": 0.25, "reward_mean": 0.25} | more


def evaluated(step: int, training: float = 0.875) -> dict[str, Any]:
    gap = training - 0.5
    recent = {"num_versions": 3, "success_rate": 0.5, "training_success_rate": training, "gap": gap}
    told = {**PART, "training": PART | {"success_rate": training}, "gap": gap, "recent": recent}
    return record(step, eval=told)


def page(tmp_path: Path, **more: Any) -> RunPage:
    return RunPage(tmp_path / "run.html", "lake", 10, {"Model": "/m"}, **more)


def titles(text: str) -> list[str]:
    return re.findall(r'aria-label="([^"]*)"', text)


def test_the_averages_over_the_last_versions_and_the_gap_stand_at_the_top(tmp_path: Path) -> None:
    one = page(tmp_path)
    for step in range(3):
        one.remember(step, scalars_of(evaluated(step)))
    one.remember(3, scalars_of(record(3)))  # the newest evaluation stands, if the newest step has none
    text = one.render()
    tiles = re.findall(
        r'class="label">([^<]*)</div><div class="value">([^<]*)</div><div class="note">([^<]*)<', text
    )
    over = "mean of the last 3 evaluated versions"
    assert tiles[1:] == [("Held out", "0.50", over), ("Training tasks", "0.88", over), ("Gap", "+0.38", over)]
    assert "4 of 10 steps, attempt 1" in text
    assert titles(text) == ["Success", "Gap", "Reward"]


def test_a_chart_without_numbers_is_left_out(tmp_path: Path) -> None:
    one = page(tmp_path)
    one.remember(0, scalars_of(record(0, entropy=float("nan"))))
    assert titles(one.render()) == ["Success", "Reward"]
    assert titles(page(tmp_path).render()) == []


def test_what_a_death_has_undone_is_not_on_it(tmp_path: Path) -> None:
    one = page(tmp_path)
    for step, reward in ((0, 0.1), (1, 0.2), (2, 0.3), (1, 0.7)):
        one.remember(step, scalars_of(record(step, reward_mean=reward)))
    drawn = re.findall(r"reward: ([0-9.]+) at (\d+)", one.render())
    assert drawn == [("0.1", "1"), ("0.7", "2")]


def test_a_long_run_is_drawn_by_the_means_of_neighbours(tmp_path: Path) -> None:
    one = page(tmp_path)
    for step in range(10 * MAX_POINTS):
        one.remember(step, scalars_of(record(step, reward_mean=step % 2)))
    line = re.search(r'd="M([^"]*)"><title>reward<', one.render())
    assert line is not None
    heights = {point.split()[1] for point in line[1].split("L")}
    assert (line[1].count("L") + 1, len(heights)) == (MAX_POINTS, 1)


def test_names_are_text(tmp_path: Path) -> None:
    one = RunPage(tmp_path / "run.html", "<script>", 1, {"<b>": "<img src=x>"})
    text = one.render()
    assert not re.search(r"<script|<img|<b>", text)


def test_it_is_written_every_few_seconds_and_at_the_end(tmp_path: Path) -> None:
    now = [100.0]
    one = page(tmp_path, clock=lambda: now[0])
    found: list[str] = []
    for step in range(4):
        one.write(step, scalars_of(record(step)))
        found.append(re.findall(r"(\d+) of 10 steps", (tmp_path / "run.html").read_text())[0])
        now[0] += EVERY_S * 0.6
    assert found == ["1", "1", "3", "3"]
    assert "http-equiv" in (tmp_path / "run.html").read_text()
    one.close(failed=False)
    assert "4 of 10 steps" in (tmp_path / "run.html").read_text()
    assert "http-equiv" not in (tmp_path / "run.html").read_text()  # nothing more comes


def test_the_next_driver_draws_on(tmp_path: Path) -> None:
    table = {
        "model": tmp_path,
        "weights": {"directory": tmp_path},
        "output_dir": tmp_path / "out",
        "trainer": {"learning_rate": 1e-3},
        "log": {"tensorboard": False},
    }
    config = TrainConfig.model_validate(table)
    for session in ([0, 1, 2], [2, 3]):
        with open_logs(config) as logs:
            for step in session:
                logs.write(record(step, reward_mean=0.1 * len(session)))
    text = (tmp_path / "out" / "run.html").read_text()
    assert re.findall(r"reward: ([0-9.]+) at (\d+)", text) == [
        ("0.3", "1"),
        ("0.3", "2"),
        ("0.2", "3"),
        ("0.2", "4"),
    ]
