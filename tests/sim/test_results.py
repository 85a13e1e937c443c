"""Figures that people read come from result files, and reports stand alone."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.figures import figures
from benchmarks.lib import evidence
from benchmarks.lib.claims import CLAIMS, Claim
from benchmarks.run import FIGURES, RESULTS, committed_results, render, sections, seeds_of, wrong_rows
from rose.cli import app
from rose.errors import ConfigError
from rose.sim.report import COLUMNS, chrome_trace, document, write_reports
from rose.sim.report import render as render_page
from rose.sim.summary import Misses, summarize
from rose.sim.world import simulate
from tests.sim.test_world import tiny

ROOT = Path(__file__).parents[2]


def test_the_results_page_has_every_figure_of_every_file() -> None:
    page = render(committed_results())

    for path in committed_results():
        assert f"## {path.relative_to(RESULTS)}\n" in page
        for _, summary in sections(path):
            assert all(
                f"| {key} |" in page for key, value in summary.items() if not isinstance(value, dict | list)
            )


def test_the_figures_show_what_the_result_files_say() -> None:
    drawn = figures(committed_results())

    assert {path.name: path.read_text() for path in FIGURES.iterdir()} == drawn
    assert drawn


def test_every_committed_result_file_has_a_summary() -> None:
    for path in committed_results():
        assert any(summary for _, summary in sections(path)), path


def test_every_number_of_the_evidence_is_in_a_result_file() -> None:
    assert wrong_rows(evidence.DOCUMENT.read_text()) == []


def test_the_evidence_is_of_the_newest_runs_or_of_all() -> None:
    if not evidence.has_history():
        pytest.skip("without its history a repository does not know which run is the newest")
    text = evidence.DOCUMENT.read_text()

    assert text == evidence.render(text, evidence.tables(evidence.all_runs(committed_results())))


def run_of(file: str, time: int, **summary: float) -> evidence.Run:
    return evidence.Run(benchmark="b", file=file, commit="0123456", time=time, summary=summary)


def test_a_newer_run_displaces_a_better_one() -> None:
    runs = [
        run_of("good.json", 1, gain=2.0),
        run_of("bad.json", 2, gain=0.5),
        run_of("other.json", 3, else_=9.0),
    ]
    claim = Claim(text="gain", benchmark="b", keys=("gain",), form="{:.1f}x", bar=(0, ">=", 1.0))

    assert evidence.lines_of(claim, runs) == ["| gain | 0.5x | `bad.json:b.gain` | >= 1: **missed** |"]
    every = dataclasses.replace(claim, every=True)
    assert [line.split(" | ")[1] for line in evidence.lines_of(every, runs)] == ["2.0x", "0.5x"]


@pytest.mark.parametrize(
    ("figures_", "said"),
    [
        ((1.22, 1.21, 1.23), "impossible: above 1"),
        ((1.22, None, None), "impossible: above 1"),
        ((0.97, 0.68, 1.41), "empty interval"),
        ((0.86, 0.77, 0.96), "0.86 (0.77 to 0.96)"),
        ((0.86, None, None), "0.86, no interval"),
    ],
)
def test_a_harvested_share_that_cannot_be_is_not_quoted(
    figures_: tuple[float, float | None, float | None], said: str
) -> None:
    share, low, high = figures_
    summary = {
        "num_pairs": 8, "p99_ttft_ratio": 1.1, "p99_ttft_ratio_high": 1.1, "aa_ratio": 1.0, "p99_itl_ratio": 1.1,
        "p99_itl_ratio_high": 1.2, "aa_itl_ratio": 1.0, "extra_violations": 0.0, "bar_met": False,
        "harvested_share": share, "harvested_share_low": low, "harvested_share_high": high,
    }  # fmt: skip
    run = evidence.Run(benchmark="coserve", file="a.json", commit="0123456", time=1, summary=summary)

    cells = evidence.coserving([run])[0].split(" | ")

    assert cells[-2] == said
    assert cells[3] == "1.10x (no interval)"
    assert cells[5] == "1.10x (to 1.20x)"


def coserve_run(**summary: float | bool) -> evidence.Run:
    return evidence.Run(
        benchmark="coserve", file="a.json", commit="0123456", time=1,
        summary={
            "num_pairs": 8, "p99_ttft_ratio": 1.1, "p99_ttft_ratio_high": 1.1, "aa_ratio": 1.0, "p99_itl_ratio": 1.1,
            "p99_itl_ratio_high": 1.2, "aa_itl_ratio": 1.0, "extra_violations": 0.0, "bar_met": False,
            "harvested_share": 0.9, "used_share": 0.9, **summary,
        },
    )  # fmt: skip


def test_the_readme_counts_the_bar_that_it_links_to() -> None:
    """Not each file's own, which has a margin on the noise; one without the paper's way was not judged by it."""
    runs = [
        coserve_run(bar_met=True, judged_met=False),
        coserve_run(bar_met=False, judged_met=True),
        coserve_run(bar_met=True, judged_met=False),
        coserve_run(bar_met=True),
    ]

    assert "#what-co-serving-is-judged-by) met by 1 of 3 runs)" in evidence.headlines(runs)


@pytest.mark.parametrize(("added", "said"), [(0.5, "0.5"), (0.0, "0"), (-1.5, "-1.5"), (7.0, "7")])
def test_half_a_violation_is_not_none(added: float, said: str) -> None:
    assert evidence.coserving([coserve_run(extra_violations=added)])[0].split(" | ")[-3] == said


def test_a_claim_is_of_a_plain_production_and_every_kind_has_its_row() -> None:
    plain = evidence.Run(
        benchmark="overhead", file="a.json", commit="0123456", time=1, summary={"hook_p99_us": 60.0}
    )
    lora = dataclasses.replace(
        plain, file="b.json", time=2, summary={"hook_p99_us": 90.0, "limit_met": False}, production="lora"
    )
    claim = Claim(text="hooks", benchmark="overhead", keys=("hook_p99_us",), form="{:.0f} us")

    assert evidence.lines_of(claim, [plain, lora]) == ["| hooks | 60 us | `a.json:overhead.hook_p99_us` |  |"]
    assert [row.split(" | ")[1:3] for row in evidence.overheads([plain, lora])] == [
        ["plain", "60 us"],
        ["lora", "90 us"],
    ]
    assert evidence.overheads([lora])[0].endswith("| **not met**, says nothing |")


def test_result_files_name_the_commit_that_they_ran() -> None:
    for path in committed_results():
        commits = evidence.commits_of(path)
        assert commits, path
        assert all(re.fullmatch(r"[0-9a-f]{7,40}", commit) for commit in commits), path


def test_commits_named_in_result_files_exist() -> None:
    """Six files name commits that were lost; the page says so, and no file joins them."""
    named = {commit for path in committed_results() for commit in evidence.commits_of(path)}
    if not evidence.has_history():
        pytest.skip("without its history a repository does not know its commits")

    assert {commit for commit in named if not evidence.commit_exists(commit)} == evidence.LOST
    text = evidence.DOCUMENT.read_text().partition(evidence.BEGIN)[0]
    for path in committed_results():
        for commit in evidence.commits_of(path) & evidence.LOST:
            assert f"`{commit}`" in text
            assert f"`{path.relative_to(RESULTS)}`" in text


def test_the_readme_s_figures_are_those_of_all_runs() -> None:
    text = evidence.README.read_text()

    assert text == evidence.render(text, evidence.headlines(evidence.all_runs(committed_results())))


def test_the_readme_is_short() -> None:
    lines = evidence.README.read_text().splitlines()

    assert len(lines) < 150
    assert max(map(len, lines)) <= 200


def test_what_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", evidence.README.read_text())

    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize(
    ("row", "good"),
    [
        ("| gain | 1.31x | `a.json:sim.gain` |", True),
        ("| gain | 1.3x, 25 % | `a.json:sim.gain` `a.json:sim.share` |", True),
        ("| gain | 1.32x | `a.json:sim.gain` |", False),
        ("| gain | 1.31x | `a.json:sim.other` |", False),
        ("| gain | 1.31x | `b.json:sim.gain` |", False),
        ("| gain | 1.31x | measured once |", False),
        ("| gain | much | `a.json:sim.gain` |", False),
        ("| gain | 26 % | `a.json:sim.share` |", False),
    ],
)
def test_a_number_without_its_figure_is_found(tmp_path: Path, row: str, good: bool) -> None:
    result = {"schema": 1, "benchmarks": {"sim": {"summary": {"gain": 1.3071, "share": 0.25}}}}
    (tmp_path / "a.json").write_text(json.dumps(result))
    text = (
        f"# X\n\n## Evidence\n\n| claim | value | source |\n|---|---|---|\n{row}\n\n## Next\n| a | 9 | b |\n"
    )

    assert wrong_rows(text, tmp_path) == ([] if good else [row])


def test_the_seeds_of_a_run_are_found_wherever_its_details_name_them() -> None:
    details = {"settings": {"seed": 3}, "runs": [{"seed": 0}, {"seed": 1, "other": 9}], "seeds": [7, 3]}

    assert seeds_of(details) == [0, 1, 3, 7]
    assert seeds_of({"seed": "none", "seeds": 20}) == seeds_of(None) == []


def test_reports_agree_with_each_other_and_fetch_nothing(tmp_path: Path) -> None:
    runs = [simulate(tiny(), name) for name in ("fixed_sync", "rose")]

    write_reports(runs, tmp_path, None)

    page = (tmp_path / "sim.html").read_text()
    assert "<svg" in page
    assert "src=" not in page
    assert "href=" not in page
    rows = list(csv.DictReader((tmp_path / "sim.csv").open()))
    summary = json.loads((tmp_path / "sim.json").read_text())["summary"]
    assert [row["system"] for row in rows] == ["fixed_sync", "rose"]
    for row in rows:
        for key in COLUMNS:
            assert float(row[key] or "nan") == pytest.approx(
                summary[f"{row['system']}.{key}"] if row[key] else float("nan"), nan_ok=True
            )
    assert summary["fixed_sync.speedup"] == 1.0


@pytest.mark.parametrize(("duration_s", "ended"), [(5.0, "no step ended"), (40.0, "of 50 steps ended")])
def test_no_gain_is_told_of_a_run_whose_steps_did_not_all_end(duration_s: float, ended: str) -> None:
    scenario = tiny().model_copy(update={"duration_s": duration_s, "num_steps": 50})
    runs = [simulate(scenario, name) for name in ("fixed_sync", "rose")]

    told = document(runs)

    assert [told["summary"][f"{name}.speedup"] for name in ("fixed_sync", "rose")] == [None, None]
    assert all(ended in told["details"]["missing_steps"][name] for name in ("fixed_sync", "rose"))
    assert ended in render_page(runs)


def test_steps_bounded_by_the_duration_alone_lack_none() -> None:
    scenario = tiny().model_copy(update={"num_steps": None})
    runs = [simulate(scenario, name) for name in ("fixed_sync", "rose")]

    told = document(runs)

    assert told["details"]["missing_steps"] == {}
    assert told["summary"]["rose.speedup"] > 0


def test_each_of_several_jobs_pays_its_part() -> None:
    one, two = (summarize(simulate(tiny(num_jobs=num), "fixed_sync"))["gpu_hours_per_step"] for num in (1, 2))
    assert one is not None
    assert two == pytest.approx(one, rel=0.1)


def test_so_few_requests_bound_no_more_than_all_of_them() -> None:
    assert Misses(num=1, added=0, mended=0).high == 1.0
    assert Misses(num=3000, added=0, mended=0).high == pytest.approx(0.001)


def test_the_chrome_trace_keeps_to_its_window() -> None:
    run = simulate(tiny(), "rose")
    whole, part = chrome_trace([run], None), chrome_trace([run], (10.0, 20.0))

    times = [event["ts"] / 1e6 for event in part["traceEvents"] if event["ph"] == "C"]
    assert times
    assert min(times) >= 10.0
    assert max(times) <= 20.0
    assert len(part["traceEvents"]) < len(whole["traceEvents"])


def test_the_command_compares_systems_and_writes_its_reports(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'name = "s"\nduration_s = 120.0\nnum_steps = 1\n[fleet]\ndedicated = 1\nserving = 2\n'
        "[job]\nnum_groups = 1\ngroup_size = 4\n"
    )
    command = ["sim", "--scenario", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out"), "--check"]

    result = CliRunner().invoke(app, command, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    assert "fixed_sync" in result.output
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["sim.csv", "sim.html", "sim.json", "trace.json"]


def test_a_journal_of_several_systems_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('name = "s"\n')
    command = ["sim", "--scenario", str(tmp_path / "s.toml"), "--journal", str(tmp_path / "j")]

    with pytest.raises(ConfigError, match="single system"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_a_window_behind_the_end_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('name = "s"\nduration_s = 120.0\n')

    with pytest.raises(
        ConfigError, match=r"--window: 200:300 begins behind the end of the run.*within 0:120"
    ):
        CliRunner().invoke(
            app,
            ["sim", "--scenario", str(tmp_path / "s.toml"), "--window", "200:300"],
            catch_exceptions=False,
        )


def test_a_run_that_was_summed_up_later_is_of_the_code_that_was_measured() -> None:
    path = evidence.RESULTS / "training" / "demo-moving-turns" / "2026-11-22.json"
    (run,) = evidence.all_runs([path])
    assert run.commit == "3e8a912"
    assert evidence.commits_of(path) == {"3e8a912", "ca4222d"}


def test_each_claim_has_a_run() -> None:
    runs = evidence.all_runs(committed_results())
    assert [claim.text for claim in CLAIMS if not evidence.lines_of(claim, runs)] == []


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(
        'name = "s"\nduration_s = 120.0\nnum_steps = 1\nbaseline = "fixed_sync"\n[fleet]\ndedicated = 1\nserving = 2\n'
        "[job]\nnum_groups = 1\ngroup_size = 4\n"
    )
    return path


@pytest.mark.parametrize("is_file", [True, False])
def test_a_place_that_cannot_be_written_to_is_refused_before_anything_runs(
    small: Path, tmp_path: Path, is_file: bool
) -> None:
    place = tmp_path / "out"
    place.write_text("")
    out = place if is_file else place / "below"

    with pytest.raises(ConfigError, match="cannot be made") as refused:
        CliRunner().invoke(app, ["sim", "--scenario", str(small), "--out", str(out)], catch_exceptions=False)
    assert refused.value.field == "--out"


def test_systems_that_do_not_run_need_no_engine_and_a_baseline_that_is_left_out_is_said(
    small: Path, tmp_path: Path
) -> None:
    command = ["sim", "--scenario", str(small), "--set", "fleet.dedicated=0", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(
        app, [*command, "--system", "rose", "--system", "paper"], catch_exceptions=False
    )

    assert result.exit_code == 0, result.output
    assert "compared with rose: the scenario's baseline, fixed_sync, is not among" in result.stderr


@pytest.mark.parametrize("option", [("--journal", "j"), ("--window", "0:5"), ("--check",)])
def test_what_a_fleet_has_none_of_is_refused(small: Path, tmp_path: Path, option: tuple[str, ...]) -> None:
    command = [
        "sim",
        "--scenario",
        str(small),
        "--set",
        "mode=fleet",
        "--system",
        "rose",
        "--out",
        str(tmp_path / "o"),
    ]
    with pytest.raises(ConfigError, match="none of a fleet") as refused:
        CliRunner().invoke(app, [*command, *option], catch_exceptions=False)
    assert refused.value.field == option[0]
