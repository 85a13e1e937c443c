"""The paper's cells: the search, what stands beside a gain, and what meets the bar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sim_paper
from benchmarks.sim.paper_cells import (
    ARMS,
    BATCHES,
    CAPS,
    CELLS,
    TENSOR_PARALLEL,
    Cell,
    Setting,
    coordinates,
    scenario_of,
    start_of,
)
from benchmarks.sim_paper import Book, conclude, conclude_cell, search, table

CELL = Cell(job="grpo_8b", batch=256, busy="quiet")
SEEDS = (0, 1, 2)
Rows = dict[str, dict[str, Any]]


def result(step_s: float | None, late: list[int] | None = None, end_s: float = 300.0) -> dict[str, Any]:
    return {
        "step_s": step_s,
        "cpu_s": 1.0,
        "busy": 0.2,
        "slo_missed": 0.001,
        "ttft_p99_ms": 300.0,
        "tpot_p99_ms": 100.0,
        "end_s": end_s,
        "late": [[number, 10.0 * number] for number in late or []],
    }


def rows_of(rose_s: float, late: list[int] | None = None, seeds: tuple[int, ...] = SEEDS) -> Rows:
    """A cell whose ceiling is 1.5x, and ``paper`` a loss."""
    plain = {"fixed": 300.0, "paper": 330.0, "rose": rose_s, "ceiling": 200.0}
    steps = {**plain, "unlimited": 150.0, **{f"{arm}_tail": step_s / 1.2 for arm, step_s in plain.items()}}
    return {
        f"{arm}/{seed}": result(step_s * (1 + 0.01 * seed), late if arm == "rose" else [])
        for arm, step_s in steps.items()
        for seed in seeds
    }


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One a second, so that nothing is drawn."""

    class Arrived:
        at_s = tuple(float(at) for at in range(7200))

    monkeypatch.setattr(sim_paper, "arrivals_of", lambda cell, seed: Arrived)
    return None


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_arm_of_every_cell_has_its_gpus_its_batch_and_its_search(cell: Cell) -> None:
    for arm, what in ARMS.items():
        for system in what.systems:
            scenario, name = scenario_of(cell, arm, start_of(cell, arm, system), 0)
            fleet, job = scenario.fleet, scenario.job
            assert name == system
            assert job.num_groups * job.group_size == cell.batch
            gpus = fleet.dedicated * fleet.rollout_gpus + fleet.serving * fleet.serving_gpus
            if what.unlimited:
                assert fleet.dedicated >= cell.batch
            else:
                assert gpus == {"8b": 24, "32b": 48}[cell.size]
            assert (fleet.serving > 0) == what.serving
            names = [name for name, _ in coordinates(cell, arm, system)]
            assert names[0] == "tensor_parallel"
            # Who harvests has no lever that who does not lacks, but for those of harvesting.
            assert ("longest_first_s" in names) == (what.levers and system in ("fixed_ours", "rose"))
    assert BATCHES[cell.batch] * 16 == cell.batch


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_dedicated_engines_of_a_wide_search_still_use_all_gpus(cell: Cell) -> None:
    for value in dict(coordinates(cell, "fixed", "fixed_sync"))["tensor_parallel"]:
        setting = Setting(system="fixed_sync", tensor_parallel=int(value))
        fleet = scenario_of(cell, "fixed", setting, 0)[0].fleet
        assert fleet.dedicated * fleet.rollout_gpus == {"8b": 8, "32b": 16}[cell.size]


def test_the_search_goes_along_each_coordinate_once_and_keeps_the_best() -> None:
    asked: list[Setting] = []

    def steps_s(tried: list[Setting]) -> list[float]:
        asked.extend(tried)
        return [abs(setting.tensor_parallel - 4) + abs(setting.cap - 64) + 100.0 for setting in tried]

    best, took_s = search(CELL, "fixed", "fixed_sync", steps_s)

    assert (best.tensor_parallel, best.cap, took_s) == (4, 64, 100.0)
    assert len({setting.key for setting in asked}) == len(TENSOR_PARALLEL["8b"]) + len(CAPS) - 1


def test_a_tie_leaves_what_was_there() -> None:
    best, _ = search(CELL, "rose", "rose", lambda tried: [1.0] * len(tried))
    assert best == start_of(CELL, "rose", "rose")


def test_a_gain_stands_beside_its_ceiling_and_is_judged_by_the_written_bar() -> None:
    found = conclude_cell(CELL, rows_of(210.0), SEEDS)

    assert found["rose.gain"] == pytest.approx(300 / 210, abs=1e-3)
    assert found["ceiling.gain"] == pytest.approx(1.5)
    assert found["rose.reached"] == pytest.approx((300 / 210 - 1) / 0.5, abs=1e-3)
    assert found["rose.over_paper"] == pytest.approx(330 / 210, abs=1e-3)
    assert found["rose.meets_bar"]
    assert found["paper.gain_high"] < 1


@pytest.mark.parametrize(
    ("rose_s", "late", "why"),
    [(310.0, [], "a loss"), (250.0, [], "too little of the ceiling"), (210.0, [3, 4, 5], "added misses")],
)
def test_what_misses_any_part_of_the_bar_misses_it(rose_s: float, late: list[int], why: str) -> None:
    assert not conclude_cell(CELL, rows_of(rose_s, late), SEEDS)["rose.meets_bar"], why


def test_the_tail_engine_is_judged_over_a_job_with_streamed_steps_too() -> None:
    runs = rows_of(210.0)
    for seed in SEEDS:
        runs[f"fixed_tail/{seed}"]["step_s"] = 240.0
        runs[f"ceiling_tail/{seed}"]["step_s"] = 192.0
        runs[f"rose_tail/{seed}"]["step_s"] = 200.0
        runs[f"paper_tail/{seed}"]["step_s"] = 250.0
    found = conclude_cell(CELL, runs, SEEDS)

    assert found["rose_tail.gain"] == pytest.approx(1.2)
    assert found["ceiling_tail.gain"] == pytest.approx(1.25)
    assert found["rose_tail.reached"] == pytest.approx(0.8)
    assert found["rose_tail.over_paper"] == pytest.approx(1.25)
    assert found["rose_tail.over_plain"] == pytest.approx(1.01 * 1.5, abs=1e-3)
    assert not found["rose_tail.meets_bar"]


def test_misses_are_counted_request_by_request_over_the_window_that_all_arms_have() -> None:
    runs = rows_of(210.0, [1, 2, 23])
    runs["fixed/0"]["late"] = [[2, 20.0], [4, 40.0]]
    runs["paper/0"]["end_s"] = 290.0  # the window ends a minute before: 230 s, and request 23 comes then

    found = sim_paper.added_misses(CELL, runs, "rose", 0)

    assert found == pytest.approx((1 - 1) / 230)
    assert sim_paper.added_misses(CELL, runs, "rose", 1) == pytest.approx(3 / 240)


def test_an_arm_whose_steps_do_not_end_has_no_gain_and_does_not_meet_the_bar() -> None:
    runs = rows_of(210.0)
    runs["rose/1"]["step_s"] = None
    found = conclude_cell(CELL, runs, SEEDS)

    assert "rose.gain" not in found
    assert not found["rose.meets_bar"]


def test_only_cells_with_all_seeds_are_concluded_and_the_table_has_a_line_for_each_arm() -> None:
    runs = rows_of(210.0, seeds=sim_paper.SEEDS)
    data = {"cells": {CELL.name: {"runs": dict(runs), "settings": {}}}}
    lines = table(conclude(data), {CELL.name: {}})

    assert sum(line.startswith(f"| {CELL.name}") for line in lines) == 4
    assert any("1.43x (1.43-1.43)" in line and "1.50x; 2.00x" in line and "| met |" in line for line in lines)
    assert any(line.startswith("Best: ") and "beyond" in line for line in lines)
    del data["cells"][CELL.name]["runs"][f"rose/{sim_paper.SEEDS[-1]}"]
    assert conclude(data) == {}


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    made: list[str] = []
    stopped: list[bool] = []

    def run(cell: Cell, arm: str, setting: Setting, seed: int) -> dict[str, Any]:
        if len(made) == 19 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        made.append(f"{arm}/{setting.key}/{seed}")
        return result(100.0 + len(arm))

    monkeypatch.setattr(sim_paper, "run", run)
    book = Book(path, 1e9)
    with pytest.raises(KeyboardInterrupt):
        sim_paper.run_cell(book, CELL)
    book.save()
    first = list(made)
    made.clear()
    sim_paper.run_cell(Book(path, 1e9), CELL)

    assert len(first) == 19
    assert not set(first) & set(made)
    assert len(json.loads(path.read_text())["details"]["cells"][CELL.name]["runs"]) == len(ARMS) * 14


def test_a_fleet_that_cannot_exist_is_out_and_not_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(job="grpo_32b", batch=256, busy="quiet")
    found = sim_paper.run(cell, "fixed", Setting(system="fixed_sync", tensor_parallel=1), 0)

    assert found["step_s"] is None
    assert "do not fit" in found["why"]
