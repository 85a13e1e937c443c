"""``rose plan`` as a user starts it: what it refuses, asks for, and writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rose.cli import app
from rose.errors import ConfigError, RoseError
from rose.sim.plan_cli import load, of_fleet
from rose.sim.scenario import Scenario
from rose.sim.traffic import generated
from tests.sim.prometheus_server import BEGIN_S, scrape

ROOT = Path(__file__).parents[2]


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
        (("--set", "cells.seconds=1e9"), "cells.seconds"),
        (("--set", "fleet.dedicated=16"), r"--set: fleet.dedicated.*no effect.*cells.dedicated"),
    ],
)
def test_what_is_wrong_is_named_with_its_option(arguments: tuple[str, ...], match: str) -> None:
    with pytest.raises(RoseError, match=match):
        run(*arguments)()


@pytest.mark.parametrize("kind", ["--trace", "--scrapes"])
def test_whose_size_nobody_named_is_asked_for(tmp_path: Path, kind: str) -> None:
    """A plan for 64 engines came of any trace."""
    path = tmp_path / "mine"
    if kind == "--trace":
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01 00:00:00,5,5\n2023-01-01 00:00:10,5,5\n"
        )
    else:
        pages = [f"# scraped {at_s}\n{scrape(at_s)}" for at_s in (BEGIN_S, BEGIN_S + 60)]
        path.write_text(re.sub(r"(?m)^vllm:num_requests_running.*\n", "", "".join(pages)))

    with pytest.raises(ConfigError, match=r"mine: .*how many engines.*--engines N.*fleet.serving=N"):
        run(kind, str(path), "--out", str(tmp_path))()


def test_a_size_that_somebody_named_is_planned_for(tmp_path: Path) -> None:
    scenario = Scenario.model_validate({"name": "small", "fleet": {"serving": 16}})
    traffic = replace(generated(4, scenario.serving), is_measured=True, knows_engines=False)

    assert of_fleet(scenario, traffic, None, is_named=True).fleet.serving == 16
    assert of_fleet(scenario, traffic, 4, is_named=False).fleet.serving == 4
    file = tmp_path / "fleet.toml"
    for content, options, expected in (
        ("name = 'x'\n[fleet]\nserving = 3\n", [], True),
        ("name = 'x'\n", [], False),
        ("name = 'x'\n", ["fleet.serving=3"], True),
        ("", ["fleet.serving=3"], True),
        ("", ["fleet.device=h200"], False),
    ):
        file.write_text(content)
        assert load(file if content else None, options)[1] is expected


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_place_that_nothing_can_be_written_to_is_refused_before_anything_is_read(
    tmp_path: Path, out: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        run("--trace", str(tmp_path / "none.csv"), "--out", str(tmp_path / out))()


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
        "cells.seconds=62",
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

    for words in ("--prometheus", "--scrapes", "--trace", "# scraped $(date +%s)", "some minutes", "Exit 0"):
        assert words in said
