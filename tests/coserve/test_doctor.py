"""``rose doctor``: command lines taken apart, engines asked, and the whole table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rose.coserve import doctor
from rose.coserve.doctor import Command, engine_checks, interpreter_of, parse_command, rollout_plan
from rose.coserve.host_checks import Level
from rose.coserve.node_config import NodeConfig
from rose.errors import ConfigError
from tests.coserve.conftest import on_scratch, only

ROOT = Path(__file__).resolve().parents[2]


# --- command lines


@pytest.mark.parametrize(
    ("words", "args", "env"),
    [
        (["vllm", "serve", "M", "--port", "1"], ("M", "--port", "1"), {}),
        (
            ["ROSE_DIR=/dev/shm/a", "X=", "vllm", "serve", "M"],
            ("M",),
            {"ROSE_DIR": "/dev/shm/a", "X": ""},
        ),
        (["python3", "-m", "vllm.entrypoints.cli.main", "serve", "M"], ("M",), {}),
    ],
)
def test_a_command_line_is_taken_apart(words: list[str], args: tuple[str, ...], env: dict[str, str]) -> None:
    command = parse_command(words)
    assert (command.args, command.env) == (args, env)


@pytest.mark.parametrize("words", [["vllm"], ["serve", "M"], ["X=1"], ["vllm", "bench", "serve"]])
def test_what_is_no_server_is_wrong_usage(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="vllm serve MODEL"):
        parse_command(words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#!/opt/venv/bin/python3.11\nimport vllm\n", "/opt/venv/bin/python3.11"),
        ("#!/usr/bin/python3 -E\n", "/usr/bin/python3"),
        ("#! /usr/bin/python3 -s -E\n", "/usr/bin/python3"),
        ("#!/usr/bin/env python3\n", "python3"),
        ("#!/usr/bin/env -S python3 -s\n", "python3"),
        ("#!/usr/bin/env -Spython3 -s\n", "python3"),
        ("#!/usr/bin/env --split-string=python3 -s\n", "python3"),
        ("#!/usr/bin/env -vS -i -u python -C /opt A=python python3.11 -E\n", "python3.11"),
        ("#!/usr/bin/env -S\n", sys.executable),
        ("#!/bin/sh /opt/python3\n", sys.executable),
        ("#!\n", sys.executable),
        ("#!/bin/sh\n'''exec' /very/long/python3 \"$0\" \"$@\"\n' '''\n", "/very/long/python3"),
        ("#!/bin/bash\nexec something\n", sys.executable),
        ("\x7fELF", sys.executable),
    ],
)
def test_the_python_of_a_program_is_the_one_it_runs_in(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "vllm"
    path.write_text(text)
    path.chmod(0o755)
    assert interpreter_of(str(path)) == expected


@pytest.mark.parametrize(
    "python",
    ['"$(dirname -- "$(realpath -- "$0")")"/\'python3\'', '"$(dirname "$0")/python3"'],
)
def test_the_python_of_a_program_that_can_be_moved_lies_beside_it(tmp_path: Path, python: str) -> None:
    path = tmp_path / "vllm"
    path.write_text(f"#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n")
    path.chmod(0o755)
    assert interpreter_of(str(path)) == str(tmp_path / "python3")


@pytest.mark.parametrize("program", ["no-such-program-at-all", "/nowhere/bin/vllm", "/nowhere/bin/python3"])
def test_of_a_program_that_is_not_there_nobody_elses_vllm_is_asked(program: str) -> None:
    with pytest.raises(ConfigError, match=f"'{program}' is no program here"):
        interpreter_of(program)


# --- the rollout engine beside production


def word(support: str, pages: int | None = 24) -> dict[str, Any]:
    return {"support": support, "total_pages": pages, "rows": [], "problem": "", "fix": ""}


def test_the_rollout_engine_is_planned_as_the_agent_starts_it(scratch: Path) -> None:
    config = on_scratch(scratch, serving={}, engine={"command": [sys.executable, "-m", "vllm.x", "serve"]})
    plan, found = rollout_plan(config, word("elastic"))
    assert found == []
    assert plan is not None
    assert plan.args[0] == "policy"
    assert plan.args[plan.args.index("--kv-cache-memory-bytes") + 1] == str(48 << 20)
    assert plan.env["ROSE_DIR"] == str(config.dir)
    assert plan.env["ROSE_ALLOW_UNMEASURED"] is None


def test_beside_compute_only_production_it_needs_a_limit(scratch: Path) -> None:
    config = on_scratch(scratch, serving={}, engine={"command": [sys.executable, "-m", "vllm.x", "serve"]})
    check = only(rollout_plan(config, word("compute-only"))[1])
    assert (check.level, check.fix) == (Level.FAIL, "set lending.max_lend_pages")
    limited = config.model_copy(update={"lending": config.lending.model_copy(update={"max_lend_pages": 8})})
    assert rollout_plan(limited, word("compute-only"))[1] == []


def test_beside_refused_production_it_is_not_started(scratch: Path) -> None:
    config = on_scratch(scratch, serving={}, engine={"command": [sys.executable, "-m", "vllm.x", "serve"]})
    check = only(rollout_plan(config, word("refused"))[1])
    assert (check.level, check.says) == (Level.FAIL, "not started beside production that is refused")


def test_an_engines_lines_are_all_its_rows_and_what_could_be_lent_is_productions(scratch: Path) -> None:
    row = {"row": "x", "feature": "F", "found": "a = 1", "reason": "because", "predicted": False}
    rows = [row | {"support": "compute-only", "fix": "do"}, row | {"support": "refused", "fix": "[b]"}]
    answer = word("elastic") | {"lendable_pages": 23, "rows": [row | {"support": "elastic", "fix": ""}]}
    assert only(list(engine_checks("production engine", answer))).says.startswith(
        "elastic, at most 46.0 MiB of 48.0 MiB KV memory lent. F (a = 1): because"
    )
    assert "lent" not in only(list(engine_checks("rollout engine", answer))).says
    answer = word("compute-only") | {"rows": rows, "notes": ["so far"]}
    found = list(engine_checks("production engine", answer))
    assert [one.level for one in found] == [Level.WARN, Level.FAIL, Level.WARN]


def test_a_command_that_is_no_program_is_found(scratch: Path) -> None:
    plan, found = rollout_plan(on_scratch(scratch, engine={"command": ["no-such-vllm", "serve"]}), None)
    assert plan is None
    assert only(found).fix == "engine.command = its path"


# --- the whole


def test_an_engine_that_cannot_be_asked_is_a_line_and_not_a_traceback(tmp_path: Path) -> None:
    for python in ("/nonexistent/python", "/bin/false"):
        answer = doctor.ask_engine("serving", Command(python=python, args=("M",), env={}))
        check = only(list(engine_checks("production engine", answer)))
        assert (check.level, bool(check.fix)) == (Level.FAIL, True)


def test_what_production_inherits_is_not_told_to_the_engines_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "serving")
    monkeypatch.setenv("ROSE_TOKEN_FILE", "/secret")
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nenv > {tmp_path}/env\ncat > {tmp_path}/stdin\n")
    script.chmod(0o755)
    doctor.ask_engine("serving", Command(python=str(script), args=("--api-key", "k"), env={"A": "b"}))
    env = (tmp_path / "env").read_text().splitlines()
    assert "A=b" in env
    assert not [line for line in env if line.startswith(("ROSE_ROLE", "ROSE_TOKEN_FILE"))]
    assert json.loads((tmp_path / "stdin").read_text()) == [{"role": "serving", "args": ["--api-key", "k"]}]


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
    return subprocess.run(
        [sys.executable, "-m", "rose.cli", "doctor", *args],
        env=clean | {"PYTHONPATH": str(ROOT)} | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_without_anything_it_looks_at_the_host(scratch: Path) -> None:
    done = run("--json", ROSE_DIR=str(scratch / "n"))
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"], found["engines"]) == (0, True, {})
    assert {"kernel", "idle class", "node directory"} <= {one["name"] for one in found["checks"]}


def test_a_broken_node_toml_is_said_with_its_field_and_ends_with_one(scratch: Path) -> None:
    (scratch / "node.toml").write_text('node_id = "a"\ndir = "/dev/shm/x"\nmoed = "on"\n')
    done = run("--config", str(scratch / "node.toml"), "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (1, False)
    assert found["checks"][0] == {
        "level": "fail",
        "name": "node.toml",
        "says": "moed: unknown key",
        "fix": "did you mean 'mode'?",
    }


def test_wrong_usage_ends_with_two() -> None:
    assert run("--", "vllm", "bench").returncode == 2
    assert run("--no-such-option").returncode == 2


def test_a_server_that_is_no_program_is_said_to_be_that_and_ends_with_two() -> None:
    done = run("--", "/nowhere/bin/vllm", "serve", "M")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'/nowhere/bin/vllm' is no program here" in done.stderr


def test_the_worst_comes_first_and_what_to_do_is_whole(scratch: Path) -> None:
    (scratch / "n").mkdir(mode=0o700)
    (scratch / "n").chmod(0o755)
    done = run(ROSE_DIR=str(scratch / "n"), COLUMNS="300")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[1].split()[:3] == ["no", "node", "directory"]
    assert f"chmod 700 {scratch / 'n'}" in lines[1]
    assert "Traceback" not in done.stderr


def test_production_and_node_toml_that_name_two_directories_are_found(scratch: Path) -> None:
    (scratch / "node.toml").write_text(
        f'node_id = "a"\ndir = "{scratch}/n"\n[serving]\n[engine]\nmodel = "m"\nmax_model_len = 9\ncommand = ["none"]\n'
    )
    production = Command(python=sys.executable, args=(), env={"ROSE_DIR": str(scratch / "other")})
    config = doctor.load_config(NodeConfig, scratch / "node.toml")
    checks = [one for one in doctor._host(config, production, 1) if one.name == "node directory"]
    assert "neither would see the other" in checks[0].says


@pytest.mark.parametrize(
    ("words", "name", "word"),
    [
        (("ROSE_ROLE=servin", "ROSE_DIR=/n"), "ROSE_ROLE", "'servin' is not production's role"),
        (("ROSE_ROLE=rollout", "ROSE_DIR=/n"), "ROSE_ROLE", "'rollout' is not production's role"),
        (("ROSE_ROLE=serving",), "ROSE_DIR", "is not set"),
    ],
)
def test_variables_that_would_leave_production_without_rose_are_found(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], name: str, word: str
) -> None:
    monkeypatch.delenv("ROSE_DIR", raising=False)
    check = only(list(doctor._line(None, parse_command([*words, "python", "-m", "vllm", "serve", "m"]))))
    assert (check.level, check.name) == (Level.FAIL, name)
    assert word in check.says


def test_a_metrics_page_without_latencies_is_found(scratch: Path) -> None:
    """``rose fleet on --canary`` waited for ever, and the doctor had nothing to say."""
    (scratch / "node.toml").write_text(
        f'node_id = "a"\ndir = "{scratch}/n"\n[serving]\nmetrics_url = "http://127.0.0.1:1/metrics"\n[engine]\nmodel = "m"\nmax_model_len = 9\n'
    )
    config = doctor.load_config(NodeConfig, scratch / "node.toml")
    command = ["ROSE_ROLE=serving", "ROSE_DIR=/n", "python", "-m", "vllm", "serve", "m"]
    assert not list(doctor._line(config, parse_command(command)))
    check = only(list(doctor._line(config, parse_command([*command, "--disable-log-stats"]))))
    assert check.name == "serving.metrics_url"
