"""The report: what is written, what it says when things went wrong, and that it needs nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rose.demo.page import render_html
from rose.demo.report import write_report
from rose.demo.result import SUMMARY_KEYS, DemoResult, ProductionLatency, Reclaim, steps_gain, summarize
from rose.evaluation.charts import bytes_axis, linear_axis, log_axis, nice_ticks
from rose.units import format_bytes
from tests.demo.sample import SLO, sample_result


@pytest.fixture(scope="module")
def result() -> DemoResult:
    return sample_result()


@pytest.fixture(scope="module")
def empty() -> DemoResult:
    """A run that ended before anything was measured."""
    return DemoResult(
        seed=0,
        complete=False,
        seconds_total=3.0,
        traffic_source="generator",
        busiest_second_ratio=6.0,
        phases=[],
        latency=ProductionLatency(slo=SLO, arms={}, ratios={}),
        production_requests=0,
        production_errors=0,
        error_examples=[],
        steps=[],
        tiers={},
        reclaim=Reclaim(),
    )


class Checker(HTMLParser):
    """Collects text, and fails on tags that do not nest."""

    VOID = frozenset({"meta", "br", "link", "img", "path", "rect", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style", "title"}:
            self.text.append(data)


def text_of(page: str) -> str:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return " ".join(" ".join(checker.text).split())


def test_summary_is_flat_and_has_exactly_the_promised_keys(result: DemoResult, tmp_path: Path) -> None:
    json_path, _ = write_report(result, tmp_path / "out" / "demo")

    document = json.loads(json_path.read_text())

    assert tuple(document["summary"]) == SUMMARY_KEYS
    assert all(isinstance(value, int | float) for value in document["summary"].values())
    assert document["details"]["steps"][0]["tiers"]["dedicated"]["num_turns"] == 780


def test_summary_takes_first_and_last_step_sums_bytes_and_counts_turns(result: DemoResult) -> None:
    summary = summarize(result)

    assert summary["success_rate_first"] == result.steps[0].success_rate
    assert summary["success_rate_last"] == result.steps[-1].success_rate
    assert summary["weight_bytes_dense"] == 20 * 1_900_000
    assert summary["weight_bytes_sent"] == 1_900_000 + 19 * 61_000
    assert summary["sent_over_dense"] == pytest.approx((1_900_000 + 19 * 61_000) / (20 * 1_900_000), abs=1e-4)
    assert summary["harvested_turn_share"] == round(5_100 / 14_900, 4)
    assert summary["resumed_turns"] == 31
    assert (summary["resumed_turns_seen"], summary["resumed_with_8_tokens_each_side"]) == (3, 2)


def test_a_run_cut_short_still_has_all_keys_with_null_for_what_is_unknown(
    empty: DemoResult, tmp_path: Path
) -> None:
    json_path, html_path = write_report(empty, tmp_path)

    summary = json.loads(json_path.read_text())["summary"]
    assert tuple(summary) == SUMMARY_KEYS
    assert summary["p99_ttft_ratio"] is None
    assert summary["success_rate_last"] is None
    text = text_of(html_path.read_text())
    assert "This run was cut short" in text
    assert "Not shown: no RL step was finished." in text


def test_page_takes_nothing_from_the_network_and_runs_no_script(result: DemoResult) -> None:
    page = render_html(result)

    assert not re.search(r"https?://|<script|<link|<img|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page


def test_page_nests_and_says_the_figures_of_the_summary(result: DemoResult) -> None:
    summary, text = summarize(result), text_of(render_html(result))

    assert f"{summary['success_rate_first']:.0%} → {summary['success_rate_last']:.0%}" in text
    assert f"{summary['p99_ttft_ratio']:.2f}x" in text
    assert f"A/A noise {summary['aa_itl_ratio']:.2f}x" in text
    assert format_bytes(summary["weight_bytes_sent"] or 0) in text


def test_the_gain_is_the_mean_over_pairs_with_student_s_interval(result: DemoResult) -> None:
    """Logarithms of 10/8 and 12/8: mean 0.314, standard deviation 0.129, and t = 12.706 with one degree of freedom."""
    gain = steps_gain(result.blocks)

    assert gain is not None
    assert gain.num_pairs == 2
    assert gain.value == pytest.approx(math.sqrt(10 / 8 * 12 / 8))
    half = 12.706 * (math.log(12 / 8) - math.log(10 / 8)) / 2
    assert gain.low == pytest.approx(gain.value / math.exp(half))
    assert gain.high == pytest.approx(gain.value * math.exp(half))
    assert (summarize(result)["steps_per_minute_off"], summarize(result)["steps_per_minute_on"]) == (
        12.0,
        16.5,
    )


def test_a_pair_that_is_not_whole_gives_no_gain(result: DemoResult) -> None:
    assert steps_gain(result.blocks[:3]) is None
    assert steps_gain(result.blocks[1:3]) is None


def test_the_resumed_turn_is_shown_token_by_token_with_the_place_of_its_cut(result: DemoResult) -> None:
    page = render_html(result)
    turn = page[page.index('<div class="tokens">') :].partition("</div>")[0]

    assert turn.count('class="token s-harvested"') == 12
    assert turn.count('class="token s-dedicated"') == 13
    before, cut, after = turn.partition("goes on elsewhere: from harvested to dedicated")
    assert cut
    assert (before.count('class="token '), after.count('class="token ')) == (12, 13)
    assert "&lt;up&gt;" in turn
    assert "<pre>FF\n@G</pre>" in page


def test_without_a_resumed_turn_the_page_says_so(empty: DemoResult) -> None:
    assert "Not shown: no turn was seen that lost its engine with tokens." in text_of(render_html(empty))


def test_failed_requests_lead_the_page_and_are_listed() -> None:
    page = render_html(sample_result(num_errors=2))

    assert "<b>2 failed.</b>" in page
    assert '<div class="tile bad">' in page


def test_text_from_other_processes_is_escaped() -> None:
    result = sample_result(num_errors=1)
    hostile = dataclasses.replace(result.events[0], text="<script>alert(1)</script>", kind="<i>")
    page = render_html(
        dataclasses.replace(
            result, events=[hostile, *result.events], settings={"<b>": "$verdict & </dl>"}, machine={}
        )
    )

    assert "<script>" not in page
    assert "HTTP 503: &lt;busy&gt;" in page
    assert "$verdict &amp; &lt;/dl&gt;" in page
    text_of(page)


def test_every_class_a_chart_uses_has_a_colour(result: DemoResult) -> None:
    page = render_html(result)
    used = set(re.findall(r"s-([a-z]+)", page.partition("</style>")[2]))
    defined = set(re.findall(r"\.s-([a-z]+) \{ --c:", page))

    assert used <= defined


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 37.0), (3.0, 3.0), (0.0, 12345.0), (0.0, 0.004)])
def test_ticks_are_round_rising_and_inside(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)

    assert ticks == sorted(set(ticks))
    assert all(low <= tick <= high for tick in ticks)
    assert 1 <= len(ticks) <= 7


@pytest.mark.parametrize(("low", "high"), [(0.001, 0.5), (0.02, 0.021), (1.0, 1e6)])
def test_axes_cover_their_values(low: float, high: float) -> None:
    for axis in (log_axis(low, high, str), linear_axis(high, str), bytes_axis(low * 1e6, high * 1e6, str)):
        assert axis.ticks[-1] == axis.high
        assert axis.low < axis.high
    assert log_axis(low, high, str).low <= low * 1.001
    assert linear_axis(high, str).high >= high
