"""``rose plan``: what is recommended, what it is worth, and what it says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rose.errors import ConfigError
from rose.sim.metrics_source import read_scrapes, traffic_of
from rose.sim.plan import (
    FRESH,
    HEADROOMS,
    WINDOWS,
    CapacityPlan,
    PlanCell,
    RiskVerdict,
    Task,
    altered,
    make_plan,
    recommend,
    swings_of,
    verdict_of,
)
from rose.sim.plan_assumptions import assumptions, changed
from rose.sim.plan_page import render, write_plan
from rose.sim.plan_pool import ProcessPool
from rose.sim.plan_words import document, far_off, measure_next, text
from rose.sim.scenario import Scenario
from rose.sim.summary import Misses, compare_misses
from rose.sim.traffic import from_trace, generated
from rose.sim.worth import Yardstick
from tests.sim.prometheus_server import BEGIN_S, SPAN_S, scrape

SMALL = {
    "name": "small",
    "fleet": {"dedicated": 1, "serving": 16, "trainers": 100},
    "job": {"group_size": 4},
    "cells": {"serving": 2, "dedicated": 1, "warm_s": 5.0, "seconds": 68.0, "in_flight_per_engine": 16},
}


def small(**changes: object) -> Scenario:
    return Scenario.model_validate({**SMALL, **changes})


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> CapacityPlan:
    """Of an hour of scrapes of two engines, a fleet of 16; judged on some hundred requests."""
    path = tmp_path_factory.mktemp("scrapes") / "<b>day.prom"
    path.write_text(
        "".join(f"# scraped {at_s}\n{scrape(at_s)}" for at_s in range(BEGIN_S, BEGIN_S + SPAN_S + 1, 60))
    )
    scenario = small()
    return make_plan(scenario, traffic_of(read_scrapes(path), None, scenario.serving), price=2.0, workers=1)


@pytest.fixture(scope="module")
def plan(few: CapacityPlan) -> CapacityPlan:
    """The same, as if enough requests had shown it safe."""
    return replace(few, verdict=RiskVerdict.SAFE)


def cell(window: str, headroom: float, worth: float, late: int) -> PlanCell:
    return PlanCell(
        window=window,
        headroom=headroom,
        load=0.5,
        worth=worth,
        most=0.9,
        tokens_s=100.0,
        misses=Misses(num=1000, added=late, mended=0),
        ttft_p99_ms=200.0,
        alone_ttft_p99_ms=180.0,
        tpot_p99_ms=20.0,
        alone_tpot_p99_ms=15.0,
        cuts_per_min=0.1,
        alone_kv=0.1,
        busy=0.2,
        own=0.15,
        alone_missed=0.0,
    )


@pytest.mark.parametrize(
    ("worth", "late", "expected"),
    [
        ((9.0, 8.0, 6.0, 4.0), (20, 0, 0, 0), 0.1),  # the most of what is safe
        ((9.0, 9.0, 8.95, 4.0), (0, 0, 0, 0), 0.2),  # among equals the largest
        ((9.0, 8.0, 6.0, 4.0), (40, 30, 20, 10), 0.3),  # none is safe: the safest
    ],
)
def test_the_recommended_headroom(worth: tuple[float, ...], late: tuple[int, ...], expected: float) -> None:
    cells = [cell("mean", *row) for row in zip(HEADROOMS, worth, late, strict=True)]
    assert recommend(cells) == expected


def test_a_headroom_of_which_nothing_was_judged_is_not_safe() -> None:
    judged = [cell("busy", headroom, 1.0, 5) for headroom in HEADROOMS]
    none = [replace(each, misses=Misses(num=0, added=0, mended=0)) for each in judged]

    assert recommend(none) == max(HEADROOMS)
    assert recommend([*judged[:3], none[3]]) == max(HEADROOMS[:3])
    assert verdict_of(none) is RiskVerdict.UNCLEAR
    night = [replace(each, window="quiet") for each in none]  # no request came then; the busiest had some
    assert recommend([*night, cell("busy", 0.1, 1.0, 0)]) == 0.1
    assert verdict_of([night[0], cell("busy", 0.1, 1.0, 0)]) is RiskVerdict.SAFE


@pytest.mark.parametrize(
    ("num", "added", "mended", "expected"),
    [
        (3000, 0, 0, RiskVerdict.SAFE),
        (3000, 5, 3, RiskVerdict.SAFE),
        (100, 1, 0, RiskVerdict.UNCLEAR),  # one of a hundred is above the limit, and may be chance
        (100, 0, 0, RiskVerdict.UNCLEAR),  # so few cannot show one in a thousand
        (3000, 5, 0, RiskVerdict.UNCLEAR),
        (3000, 30, 2, RiskVerdict.UNSAFE),
        (100, 20, 0, RiskVerdict.UNSAFE),
    ],
)
def test_the_verdict_is_of_the_requests_that_were_judged(
    num: int, added: int, mended: int, expected: RiskVerdict
) -> None:
    misses = Misses(num=num, added=added, mended=mended)
    judged = [replace(cell("mean", 0.1, 1.0, 0), misses=misses)]

    assert verdict_of(judged) is expected
    if expected is RiskVerdict.UNSAFE:  # however safe the other stretches are
        assert verdict_of([*judged, cell("quiet", 0.1, 1.0, 0)] * 3) is RiskVerdict.UNSAFE


def test_draws_from_a_handful_of_requests_are_no_verdict(plan: CapacityPlan, tmp_path: Path) -> None:
    """Two rows of a trace were drawn from until 3,000 requests were judged, and lending them was safe and worth a sum."""
    judged = [replace(cell("mean", 0.1, 1.0, 0), misses=Misses(num=3000, added=0, mended=0))]
    assert verdict_of(judged) is RiskVerdict.SAFE
    assert verdict_of(judged, is_too_little=True) is RiskVerdict.UNCLEAR
    unsafe = [replace(judged[0], misses=Misses(num=3000, added=30, mended=2))]
    assert verdict_of(unsafe, is_too_little=True) is RiskVerdict.UNSAFE

    rows = "2026-11-20 00:00:01,1453,169\n2026-11-20 00:00:03,1221,118\n"
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    handful = from_trace(tmp_path / "t.csv", 4, plan.scenario.serving)
    told = replace(plan, verdict=RiskVerdict.UNCLEAR, traffic=handful)
    assert "2 requests of 3 s were read" in text(told)
    assert measure_next(told)[0].startswith("a longer stretch")
    assert not any("cells.seconds=" in line for line in measure_next(told))


def test_a_fleet_too_small_for_all_trajectories_is_explained(plan: CapacityPlan) -> None:
    crowded = Yardstick(engines=(1, 2, 3), tokens_s=(1000.0, 3200.0, 4800.0))

    assert "On 1 engine not all trajectories find room" in render(replace(plan, yardstick=crowded))
    even = Yardstick(engines=(1, 2, 3), tokens_s=(1000.0, 1900.0, 2700.0))
    assert "find room" not in render(replace(plan, yardstick=even))


def test_where_no_assumption_can_be_told_no_range_is_stated(plan: CapacityPlan) -> None:
    """A range of 0.6 to 0.6 looked like certainty, where all ten assumptions had no value at either end."""
    blind = replace(plan, swings=tuple(replace(each, low_gpus=None, high_gpus=None) for each in plan.swings))

    assert blind.range_gpus is None
    assert plan.lends
    assert "how much hangs on the assumptions cannot be told" in text(blind)
    assert "how much hangs on the assumptions cannot be told" in render(blind)
    assert document(blind)["summary"]["gpus_low"] is None


def test_no_request_judged_is_said_and_is_no_zero(plan: CapacityPlan) -> None:
    none = Misses(num=0, added=0, mended=0)
    blind = replace(
        plan,
        verdict=RiskVerdict.UNCLEAR,
        judged=tuple(replace(each, misses=none) for each in plan.judged),
        swings=tuple(replace(each, low_added=None, high_added=None) for each in plan.swings),
    )

    assert "production: no request judged" in text(blind)
    assert "no request was judged" in text(blind)
    page = render(blind)
    assert "no request judged" in page
    assert "0.000%" not in page
    assert "None of them adds" not in page


def test_limits_that_production_alone_hardly_keeps_leave_nothing_to_judge(plan: CapacityPlan) -> None:
    """Nobody answers within a millisecond; rollouts could make none late, and lending was "safe" with a worth."""
    hopeless = tuple(
        replace(cell(window, 0.1, 1.0, 0), misses=Misses(num=3000, added=0, mended=0), alone_missed=0.999)
        for window in WINDOWS
    )
    assert verdict_of(hopeless) is RiskVerdict.UNCLEAR
    assert verdict_of([replace(each, alone_missed=0.6) for each in hopeless]) is RiskVerdict.SAFE

    late = replace(plan, verdict=RiskVerdict.UNCLEAR, judged=hopeless)
    for said in (text(late), render(late)):
        assert "y itself production answers 9 of 9,000 requests within its limits" in said
    assert measure_next(late)[0].startswith("your limits: by itself production misses 99.9%")
    assert not any("more requests" in line for line in measure_next(late))


@pytest.mark.parametrize("seconds", [60.0, 10.0])
def test_cells_too_short_to_judge_a_request_are_refused(seconds: float) -> None:
    scenario = small(cells={**SMALL["cells"], "seconds": seconds})

    with pytest.raises(ConfigError, match=r"cells.seconds.*60"):
        make_plan(scenario, generated(16, scenario.serving), workers=1)


def test_assumptions_of_a_plan_that_is_worth_nothing_have_no_gpus(plan: CapacityPlan) -> None:
    varied = [swing.assumption for swing in plan.swings[:2]]
    ends = [(0.0, None), (0.5, 0.1), (None, None), (0.2, None)]

    assert [(one.low_gpus, one.high_gpus) for one in swings_of(varied, ends, 0.0, 3.0, 16.0)] == [
        (None, None)
    ] * 2
    scaled = swings_of(varied, ends, 0.5, 3.0, 16.0)
    assert [(one.low_gpus, one.high_gpus) for one in scaled] == [(0.0, 3.0), (None, pytest.approx(1.2))]


def test_no_assumption_makes_more_gpus_than_production_has(plan: CapacityPlan) -> None:
    varied = [plan.swings[0].assumption]

    (found,) = swings_of(varied, [(0.1, None), (0.9, None)], 0.3, 3.0, 5.0)

    assert (found.low_gpus, found.high_gpus) == (pytest.approx(1.0), 5.0)


def test_what_half_a_cell_differs_by_is_said_and_less_is_not_worth_measuring(plan: CapacityPlan) -> None:
    mean = plan.judged[1].worth
    assert mean is not None
    swing = replace(plan.swings[-1], low_gpus=10.0, high_gpus=11.0)
    rough = replace(plan, half_worth=mean * 0.7, swings=(swing,))
    exact = replace(rough, half_worth=mean)

    assert rough.chance == pytest.approx(0.3)
    assert "30% off the whole one" in render(rough)
    assert not any(swing.assumption.name in line for line in measure_next(rough))
    assert any(swing.assumption.name in line for line in measure_next(exact))


def test_the_money_is_the_gpus_times_the_hours_times_the_price(plan: CapacityPlan) -> None:
    summary = document(plan)["summary"]

    assert 0 < summary["gpus_mean"] <= summary["gpus_most"] < 16
    assert summary["gpu_hours_per_month"] == pytest.approx(summary["gpus_mean"] * 730)
    assert summary["money_per_month"] == pytest.approx(summary["gpu_hours_per_month"] * 2.0)
    assert summary["gpus_low"] <= summary["gpus_mean"] <= summary["gpus_high"]
    tokens_s = sum(each.tokens_s for each in plan.judged) / 3
    assert summary["sampled_tokens_per_day"] == pytest.approx(tokens_s * 16 * 86400, rel=0.3)


def test_worth_over_time_lies_between_that_of_the_stretches(plan: CapacityPlan) -> None:
    worth = [(each.worth or 0.0) * 16 for each in plan.judged]

    assert plan.gpus is not None
    assert min(worth) - 1e-9 <= plan.gpus.min() <= plan.gpus.max() <= max(worth) + 1e-9
    assert [each.window for each in plan.judged] == list(WINDOWS)
    assert plan.judged[0].load < plan.judged[2].load


def test_every_end_of_every_assumption_is_another_simulation(plan: CapacityPlan) -> None:
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
        with ProcessPool(workers) as pool:
            both.append(pool.run(tasks, lambda: counted.append(1)))

    assert len(counted) == 8
    one, two = ([each and each.harvested_tokens_s for each in results] for results in both)
    assert one == two
    assert len(set(one)) == 4


def test_an_assumption_under_which_nothing_runs_is_shown_as_such() -> None:
    scenario = small()
    task = Task(
        scenario=scenario, traffic=generated(16, scenario.serving), system="rose", start_s=0.0, seed=1
    )
    full = altered(task, {"fleet.reserve_gb": 79.0})

    assert ProcessPool(1).run([full], lambda: None) == [None]
    with pytest.raises(ConfigError, match="do not fit"):
        ProcessPool(1).run([full], lambda: None, required=True)


def test_the_page_says_it_all_and_fetches_nothing(plan: CapacityPlan, tmp_path: Path) -> None:
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
    assert json.loads(paths[1].read_text())["summary"]["is_recommended"]
    assert not re.search(r"\bnan\b|\binf\b", page)


def test_the_terminal_says_worth_money_risk_and_what_it_rests_on(plan: CapacityPlan) -> None:
    said = text(plan)

    for words in ("dedicated GPUs", "a month", "at $2 a GPU hour", "of requests more", "not measured", "P99"):
        assert words in said


def test_what_to_measure_names_the_widest_assumption_and_a_short_trace(plan: CapacityPlan) -> None:
    lines = measure_next(plan)

    assert "a whole day" in lines[0]
    assert any(plan.swings[0].assumption.name in line for line in lines)
    assert any("rose profile" in line for line in lines)
    assert "observe" in lines[-1]


@pytest.mark.parametrize("verdict", [RiskVerdict.UNSAFE, RiskVerdict.UNCLEAR])
def test_what_is_not_safe_is_not_recommended_and_has_no_worth(
    plan: CapacityPlan, verdict: RiskVerdict
) -> None:
    """A reader who takes one number from the page must not take one that production would pay for."""
    mean = f"{plan.mean_gpus:.1f}"
    assert mean in text(plan)
    assert mean in render(plan)

    other = replace(plan, verdict=verdict)
    said, page, summary = text(other), render(other), document(other)["summary"]

    assert "no worth is stated" in said
    assert "no worth is stated" in page
    for words in ("worth, on average", "GPU h<", "recommended", "can be harvested"):
        assert words not in page
    assert "dedicated GPUs on average" not in said
    assert summary["is_recommended"] is False
    for name in ("gpus_mean", "gpus_low", "gpus_high", "gpu_hours_per_month", "money_per_month"):
        assert summary[name] is None
    assert not re.search(r"\bnan\b|\binf\b|\bNone\b", page + said)


def test_few_requests_are_no_verdict_and_how_many_it_takes_is_said(few: CapacityPlan) -> None:
    assert few.fresh == FRESH[1]
    assert few.misses.num < 1000
    assert few.verdict is RiskVerdict.UNCLEAR
    assert "too few to show" in text(few)
    assert "--set cells.seconds=" in measure_next(few)[0]


def test_so_few_requests_that_no_cell_is_long_enough_are_given_no_length(few: CapacityPlan) -> None:
    one = replace(
        few,
        scenario=changed(few.scenario, {"cells.seconds": 3000.0}),
        judged=tuple(
            replace(each, misses=Misses(num=int(each.window == "busy"), added=0, mended=0))
            for each in few.judged
        ),
    )

    assert "cells.seconds=" not in measure_next(one)[0]
    assert "More traffic per engine" in measure_next(one)[0]


def test_no_late_request_among_too_few_is_not_shown_as_good(few: CapacityPlan, plan: CapacityPlan) -> None:
    none = replace(
        few, judged=tuple(replace(each, misses=Misses(num=9, added=0, mended=0)) for each in few.judged)
    )
    tile = '<div class="tile {}"><div class="label">limits missed that rollouts add'

    assert tile.format("") in render(none)
    assert tile.format("good") in render(replace(none, verdict=RiskVerdict.SAFE))


@pytest.mark.parametrize("most", [0.02, 0.11, 1.0, 110.0])
def test_each_tick_of_the_load_says_another_number(plan: CapacityPlan, most: float) -> None:
    """Of a quiet fleet four of five said 0.00 or 0.01."""
    quiet = replace(plan, load=plan.load * (most / plan.load.max()))

    chart = render(quiet).partition("Production over time")[2]
    ticks = re.findall(r'<text class="tick" x="56" [^>]*>([^<]*)<', chart.partition("</svg>")[0])

    assert len(ticks) > 3
    values = [float(tick) for tick in ticks]
    assert np.diff(values) == pytest.approx(values[-1] / (len(values) - 1))


def test_the_page_says_when_it_was(plan: CapacityPlan) -> None:
    assert "Begins 2023-11-14 22:13 UTC." in render(plan)


def test_a_worth_that_is_not_told_is_said_with_what_to_count(plan: CapacityPlan) -> None:
    flat = replace(plan.yardstick, tokens_s=tuple(1000.0 for _ in plan.yardstick.engines))
    untold = replace(
        plan,
        gpus=None,
        yardstick=flat,
        judged=tuple(replace(each, worth=None) for each in plan.judged),
        sweep=tuple(replace(each, worth=None) for each in plan.sweep),
        swings=tuple(replace(each, low_gpus=None, high_gpus=None) for each in plan.swings),
    )

    assert "worth is not told" in text(untold)
    assert "add 0% of what they would" in text(untold)
    assert "not told" in render(untold)
    assert any("cells.in_flight_per_engine" in line for line in measure_next(untold)[:2])
    assert document(untold)["summary"]["gpus_mean"] is None


def test_the_page_names_what_matters_most_and_how_worth_is_computed(plan: CapacityPlan) -> None:
    page = render(plan)

    assert "The assumption that matters most: " in page
    assert plan.swings[0].assumption.name in text(plan)
    assert "How worth is computed" in page
    assert f"{plan.most_gpus:.1f} GPUs" in page
    assert f"{plan.scenario.cells.in_flight_per_engine * 3} trajectories" in page


def test_what_a_stretch_is_worth_is_the_first_that_is_said_of_it(plan: CapacityPlan) -> None:
    assert "<th>stretch</th><th>worth, dedicated engines per engine</th>" in render(plan)


def test_a_fleet_that_nobody_named_is_this_fleet(plan: CapacityPlan) -> None:
    unnamed, named = (
        replace(plan, scenario=plan.scenario.model_copy(update={"name": name})) for name in ("fleet", "eu-1")
    )

    assert "<h1>What this fleet can lend" in render(unnamed)
    assert "<h1>What eu-1 can lend" in render(named)


def test_limits_that_production_misses_alone_are_asked_for_first(plan: CapacityPlan) -> None:
    late = replace(plan, judged=tuple(replace(each, alone_missed=0.07) for each in plan.judged))

    assert "by itself production misses 7.0%" in measure_next(late)[0]


def test_a_request_s_mean_per_token_is_compared_and_the_time_between_two_tokens_is_not(
    plan: CapacityPlan,
) -> None:
    made = max(each.alone_tpot_p99_ms for each in plan.judged)
    same = replace(
        plan, traffic=replace(plan.traffic, kv_use=None, observed_ms={"tpot_p99": made, "itl_p99": 9 * made})
    )
    slow = replace(
        plan, traffic=replace(plan.traffic, kv_use=None, observed_ms={"tpot_p99": 9 * made, "itl_p99": made})
    )

    assert far_off(same) == []
    assert "your P99 of the mean per output token" in far_off(slow)[0]
    assert f"{9 * made:.0f} ms as read; steps are simulated, but" in render(same)


def test_memory_that_production_has_in_use_is_compared(plan: CapacityPlan) -> None:
    """A fleet that was read 85 % full was lent as if it were as empty as the simulated one."""
    made = next(each.alone_kv for each in plan.judged if each.window == "mean")
    assert 0 < made < 0.2
    same, full = (
        replace(plan, traffic=replace(plan.traffic, observed_ms={}, kv_use=(use, use)))
        for use in (made, 0.85)
    )

    assert far_off(same) == []
    assert "85% of its KV memory in use" in far_off(full)[0]
    for said in (text(full), render(full)):
        assert "less can be lent than is simulated" in said
    assert "less can be lent" not in text(same)
    assert f"{made:.0%} simulated without rollouts" in render(same)


def test_a_trace_that_does_not_name_its_engines_is_warned_of(plan: CapacityPlan) -> None:
    blind = replace(plan, traffic=replace(plan.traffic, knows_engines=False))

    for said in (text(blind), render(blind)):
        assert "othing says how many engines served this traffic" in said
        assert "the 16 of [fleet] serving are planned for, with 0.5 requests a second each" in said
    assert "--engines" in measure_next(blind)[0]


def test_time_without_data_is_said_at_the_top(plan: CapacityPlan) -> None:
    assert "there is data of" not in text(plan) + render(plan)
    outage = replace(plan, traffic=replace(plan.traffic, covered=0.25))

    for said in (text(outage), render(outage)):
        assert "there is data of 25% of the 4.0 hours that were read" in said
    assert document(outage)["details"]["traffic"]["covered"] == 0.25


def test_a_long_time_without_a_request_is_said_at_the_top(plan: CapacityPlan) -> None:
    hole = replace(plan, traffic=replace(plan.traffic, silence_s=(3600.0, 7200.0)))

    for said in (text(hole), render(hole)):
        assert "o request came for 2.0 hours, 60 minutes after the first; this is counted as quiet" in said
    assert "counted as quiet" not in text(plan)
    assert document(hole)["details"]["traffic"]["silence_s"] == (3600.0, 7200.0)


def test_restarts_are_said_at_the_top(plan: CapacityPlan) -> None:
    some = replace(plan, traffic=replace(plan.traffic, restarts=2))

    for said in (text(some), render(some)):
        assert "ervers were started again, 2 times" in said
    assert "started again" not in text(plan)
    assert document(some)["details"]["traffic"]["restarts"] == 2


def test_added_misses_have_an_upper_end() -> None:
    assert Misses(num=0, added=0, mended=0).high is None
    assert Misses(num=3000, added=0, mended=0).high == pytest.approx(0.001)
    assert Misses(num=10_000, added=60, mended=40).high == pytest.approx((20 + 19.6) / 10_000)
    late = {1: 5.0, 2: 50.0, 3: 90.0}
    assert compare_misses(late, {}, [5.0, 50.0, 90.0], 200.0, 10.0) == Misses(num=2, added=2, mended=0)
