"""``rose plan``: what is recommended, what it is worth, what it says, and how it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from rose.cli import app
from rose.errors import ConfigError, RoseError
from rose.sim.metrics_source import read_scrapes, traffic_of
from rose.sim.plan import (
    HEADROOMS,
    WINDOWS,
    Cell,
    Plan,
    Pool,
    Task,
    altered,
    assumptions,
    changed,
    make_plan,
    recommend,
    swings_of,
)
from rose.sim.plan_page import document, measure_next, render, text, write_plan
from rose.sim.scenario import Scenario
from rose.sim.summary import Misses, compare_misses
from rose.sim.traffic import generated
from tests.sim.prometheus_server import BEGIN_S, SPAN_S, scrape

SMALL = {
    "name": "small",
    "fleet": {"dedicated": 1, "serving": 16, "trainers": 100},
    "job": {"group_size": 4},
    "cells": {"serving": 2, "dedicated": 1, "warm_s": 5.0, "seconds": 80.0, "in_flight_per_engine": 4},
}
ROOT = Path(__file__).parents[2]


def small(**changes: object) -> Scenario:
    return Scenario.model_validate({**SMALL, **changes})


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of an hour of scrapes of two engines, a fleet of 16."""
    path = tmp_path_factory.mktemp("scrapes") / "<b>day.prom"
    path.write_text(
        "".join(f"# scraped {at_s}\n{scrape(at_s)}" for at_s in range(BEGIN_S, BEGIN_S + SPAN_S + 1, 60))
    )
    scenario = small()
    return make_plan(scenario, traffic_of(read_scrapes(path), None, scenario.serving), price=2.0, workers=1)


def cell(window: str, headroom: float, worth: float, late: int) -> Cell:
    return Cell(
        window=window,
        headroom=headroom,
        load=0.5,
        worth=worth,
        tokens_s=100.0,
        misses=Misses(num=1000, added=late, mended=0),
        ttft_p99_ms=200.0,
        alone_ttft_p99_ms=180.0,
        tpot_p99_ms=20.0,
        alone_tpot_p99_ms=15.0,
        cuts_per_min=0.1,
        busy=0.2,
    )


@pytest.mark.parametrize(
    ("worth", "late", "expected"),
    [
        ((9.0, 8.0, 6.0, 4.0), (20, 0, 0, 0), (0.1, True)),  # the most of what is safe
        ((9.0, 9.0, 8.95, 4.0), (0, 0, 0, 0), (0.2, True)),  # among equals the largest
        ((9.0, 8.0, 6.0, 4.0), (40, 30, 20, 10), (0.3, False)),  # none is safe: the safest
    ],
)
def test_the_recommended_headroom(
    worth: tuple[float, ...], late: tuple[int, ...], expected: tuple[float, bool]
) -> None:
    cells = [cell("mean", *row) for row in zip(HEADROOMS, worth, late, strict=True)]
    assert recommend(cells) == expected


def test_a_headroom_of_which_nothing_was_judged_is_not_safe() -> None:
    judged = [cell("busy", headroom, 1.0, 5) for headroom in HEADROOMS]
    none = [replace(each, misses=Misses(num=0, added=0, mended=0)) for each in judged]

    assert recommend(none) == (max(HEADROOMS), False)
    assert recommend([*judged[:3], none[3]]) == (max(HEADROOMS[:3]), False)
    night = [replace(each, window="quiet") for each in none]  # no request came then; the busiest had some
    assert recommend([*night, cell("busy", 0.1, 1.0, 0)]) == (0.1, True)


def test_no_request_judged_is_said_and_is_no_zero(plan: Plan) -> None:
    none = Misses(num=0, added=0, mended=0)
    blind = replace(
        plan,
        safe=False,
        judged=tuple(replace(each, misses=none) for each in plan.judged),
        swings=tuple(replace(each, low_added=None, high_added=None) for each in plan.swings),
    )

    assert "production: no request judged" in text(blind)
    assert "no request was judged" in text(blind)
    page = render(blind)
    assert "no request judged" in page
    assert "0.000%" not in page
    assert "None of them adds" not in page


@pytest.mark.parametrize("seconds", [60.0, 10.0])
def test_cells_too_short_to_judge_a_request_are_refused(seconds: float) -> None:
    scenario = small(cells={**SMALL["cells"], "seconds": seconds})

    with pytest.raises(ConfigError, match=r"cells.seconds.*60"):
        make_plan(scenario, generated(16, scenario.serving), workers=1)


def test_assumptions_of_a_plan_that_is_worth_nothing_have_no_gpus(plan: Plan) -> None:
    varied = [swing.assumption for swing in plan.swings[:2]]
    ends = [(0.0, None), (0.5, 0.1), (None, None), (0.2, None)]

    assert [(one.low_gpus, one.high_gpus) for one in swings_of(varied, ends, 0.0, 3.0)] == [(None, None)] * 2
    scaled = swings_of(varied, ends, 0.5, 3.0)
    assert [(one.low_gpus, one.high_gpus) for one in scaled] == [(0.0, 3.0), (None, pytest.approx(1.2))]


def test_the_money_is_the_gpus_times_the_hours_times_the_price(plan: Plan) -> None:
    summary = document(plan)["summary"]

    assert (
        0 < summary["gpus_mean"] < 16 * 1.05
    )  # an engine that serves too is not worth more than one that does not
    assert summary["gpu_hours_per_month"] == pytest.approx(summary["gpus_mean"] * 730)
    assert summary["money_per_month"] == pytest.approx(summary["gpu_hours_per_month"] * 2.0)
    assert summary["gpus_low"] <= summary["gpus_mean"] <= summary["gpus_high"]
    tokens_s = sum(each.tokens_s for each in plan.judged) / 3
    assert summary["sampled_tokens_per_day"] == pytest.approx(tokens_s * 16 * 86400, rel=0.3)


def test_worth_over_time_lies_between_that_of_the_stretches(plan: Plan) -> None:
    worth = [each.worth * 16 for each in plan.judged]

    assert min(worth) - 1e-9 <= plan.gpus.min() <= plan.gpus.max() <= max(worth) + 1e-9
    assert [each.window for each in plan.judged] == list(WINDOWS)
    assert plan.judged[0].load < plan.judged[2].load


def test_every_end_of_every_assumption_is_another_simulation(plan: Plan) -> None:
    varied = assumptions(plan.scenario, plan.traffic)

    assert {swing.assumption.name for swing in plan.swings} == {one.name for one in varied}
    assert any("between two scrapes" in one.name for one in varied)
    moved = [swing for swing in plan.swings if swing.low_gpus != swing.high_gpus]
    assert len(moved) >= len(varied) - 2
    widths = [swing.width for swing in plan.swings]
    assert widths == sorted(widths, reverse=True)


def test_each_end_of_an_assumption_changes_what_it_names() -> None:
    """A misspelt setting would be a bar of length nothing."""
    scenario, traffic = small(), generated(16, small().serving)
    for one in assumptions(scenario, replace(traffic, knows_bursts=False)):
        for changes in (one.low_changes, one.high_changes):
            settings = {name: value for name, value in changes.items() if "." in name}
            assert not settings or changed(scenario, settings) != scenario, one.name


def test_a_plan_is_the_same_on_one_core_and_on_two() -> None:
    scenario = small()
    traffic = generated(16, scenario.serving)
    tasks = [
        altered(Task(scenario=scenario, traffic=traffic, system="rose", start_s=0.0, seed=1), change)
        for change in ({}, {"load": 2.0}, {"prompts": 0.5}, {"efficiency.overlap": 0.4})
    ]
    counted: list[int] = []
    both = []
    for workers in (1, 2):
        with Pool(workers) as pool:
            both.append(pool.run(tasks, lambda: counted.append(1)))

    assert len(counted) == 8
    one, two = ([each and each.harvested_tokens_s for each in results] for results in both)
    assert one == two
    assert len(set(one)) == 4


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core there are no workers")
def test_workers_end_when_the_command_is_killed(tmp_path: Path) -> None:
    """SIGKILL, in the middle: nothing of it may go on computing."""
    program = subprocess.Popen(
        [sys.executable, "-m", "rose.cli", "plan", "--out", str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    parent = psutil.Process(program.pid)
    workers: list[psutil.Process] = []
    while not workers and program.poll() is None:
        workers = [
            each for each in parent.children(recursive=True) if "spawn_main" in " ".join(each.cmdline())
        ]
    assert workers
    program.kill()
    program.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)

    assert not alive


def test_an_assumption_under_which_nothing_runs_is_shown_as_such() -> None:
    scenario = small()
    task = Task(
        scenario=scenario, traffic=generated(16, scenario.serving), system="rose", start_s=0.0, seed=1
    )
    full = altered(task, {"fleet.reserve_gb": 79.0})

    assert Pool(1).run([full], lambda: None) == [None]
    with pytest.raises(ConfigError, match="do not fit"):
        Pool(1).run([full], lambda: None, required=True)


def test_the_page_says_it_all_and_fetches_nothing(plan: Plan, tmp_path: Path) -> None:
    paths = write_plan(plan, tmp_path)
    page = paths[0].read_text()

    class Checked(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe")
            assert not any(name in ("src", "href") for name, _ in attrs)

    Checked().feed(page)
    assert "<b>day" not in page  # a file's name is text
    assert "&lt;b&gt;day.prom" in page
    assert page.count("<svg") == 4
    for words in ("What to measure next", "Which assumptions matter", "a month", "observe", "GPU h"):
        assert words in page
    assert json.loads(paths[1].read_text())["summary"]["is_safe"] == plan.safe
    assert not re.search(r"\bnan\b|\binf\b", page)


def test_the_terminal_says_worth_money_risk_and_what_it_rests_on(plan: Plan) -> None:
    said = text(plan)

    for words in ("dedicated GPUs", "a month", "at 2 a GPU hour", "of requests more", "not measured", "P99"):
        assert words in said


def test_what_to_measure_names_the_widest_assumption_and_a_short_trace(plan: Plan) -> None:
    lines = measure_next(plan)

    assert "a whole day" in lines[0]
    assert any(plan.swings[0].assumption.name in line for line in lines)
    assert any("rose profile" in line for line in lines)
    assert "observe" in lines[-1]


def test_no_safe_headroom_is_said_at_the_top(plan: Plan) -> None:
    unsafe = replace(plan, safe=False)

    assert "warning" in text(unsafe)
    assert "No headroom that was tried" in render(unsafe)


def test_time_without_data_is_said_at_the_top(plan: Plan) -> None:
    assert "there is data of" not in text(plan) + render(plan)
    outage = replace(plan, traffic=replace(plan.traffic, covered=0.25))

    for said in (text(outage), render(outage)):
        assert "there is data of 25% of the 4.0 hours that were read" in said
    assert document(outage)["details"]["traffic"]["covered"] == 0.25


def test_added_misses_have_an_upper_end() -> None:
    assert Misses(num=0, added=0, mended=0).high is None
    assert Misses(num=3000, added=0, mended=0).high == pytest.approx(0.001)
    assert Misses(num=10_000, added=60, mended=40).high == pytest.approx((20 + 19.6) / 10_000)
    late = {1: 5.0, 2: 50.0, 3: 90.0}
    assert compare_misses(late, {}, [5.0, 50.0, 90.0], 200.0, 10.0) == Misses(num=2, added=2, mended=0)


# --- the command -----------------------------------------------------------------------------------------


def run(*arguments: str) -> Callable[[], object]:
    return lambda: CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--trace", "a", "--scrapes", "b"), "--scrapes: --scrapes and --trace exclude|exclude each other"),
        (("--engines", "0"), "--engines: must be 1"),
        (("--gpu-hour-price", "nan"), "--gpu-hour-price"),
        (("--gpu-hour-price", "-1"), "--gpu-hour-price"),
        (("--match", 'job="x"'), "--match: is for --prometheus"),
        (("--trace", "/none.csv"), "/none.csv: does not exist"),
        (("--scrapes", "/none.prom"), "/none.prom: does not exist"),
        (("--prometheus", "ftp://x"), "--prometheus: is no http"),
        (("--prometheus", "http://x", "--end", "yesterday"), "--end: 'yesterday'"),
        (("--prometheus", "http://x", "--prometheus-token-file", "/none"), "--prometheus-token-file"),
        (("--prometheus", "http://127.0.0.1:1"), "--prometheus: .*no answer"),
        (("--set", "fleet.device=h900"), "--set: fleet.device.*not a known device"),
        (("--scenario", "/none.toml"), "/none.toml.*does not exist"),
    ],
)
def test_what_is_wrong_is_named_with_its_option(arguments: tuple[str, ...], match: str) -> None:
    with pytest.raises(RoseError, match=match):
        run(*arguments)()


def test_a_token_file_must_hold_a_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content in (b"", b"a b", b"x" * 20_000, b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="holds no token"):
            run("--prometheus", "http://127.0.0.1:1", "--prometheus-token-file", str(path))()


def test_the_command_reads_a_trace_and_prints_what_it_wrote(tmp_path: Path) -> None:
    """As a user starts it: other processes, both cores."""
    rows = [f"2023-11-16 18:{n // 60:02d}:{n % 60:02d},{100 + n},20" for n in range(0, 1800, 2)]
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    settings = [
        "cells.serving=2",
        "cells.dedicated=1",
        "cells.warm_s=5",
        "cells.seconds=80",
        "cells.in_flight_per_engine=4",
    ]
    command = [
        sys.executable,
        "-m",
        "rose.cli",
        "plan",
        "--trace",
        str(tmp_path / "t.csv"),
        "--engines",
        "4",
        "--json",
    ]
    command += ["--out", str(tmp_path / "out"), *(word for each in settings for word in ("--set", each))]

    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)

    printed = json.loads(done.stdout)
    assert printed == json.loads((tmp_path / "out" / "plan.json").read_text())
    assert printed["details"]["traffic"]["num_engines"] == 4
    assert printed["details"]["scenario"]["fleet"]["serving"] == 4
    assert (tmp_path / "out" / "plan.html").exists()


def test_the_help_shows_each_source_and_the_loop_that_makes_a_file() -> None:
    said = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).stdout

    for words in ("--prometheus", "--scrapes", "--trace", "# scraped $(date +%s)", "minute or two", "Exit 0"):
        assert words in said
