"""``rose doctor`` and a node directory that a living production has already: a second command of the same ROSE_DIR would run as plain vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rose.coserve import doctor, host_checks
from rose.coserve.host_checks import Level
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Phase, ServingLease


@pytest.mark.parametrize("core", ["", "dp1"])
def test_a_living_production_in_the_directory_is_found(tmp_path: Path, core: str) -> None:
    path = tmp_path / "n"
    for name in ("dp0", "dp1") if core else ():
        NodeDir(path / name).node_writer().close()
    assert host_checks.check_production(path) == []
    with NodeDir(path / core).serving_lease_writer() as lease:
        lease.write(ServingLease(phase=Phase.READY))
        (check,) = host_checks.check_production(path)
    assert check.level is Level.WARN
    assert check.says.startswith(f"{path / core}: a production engine lives there already (ready)")
    assert "another ROSE_DIR" in check.fix
    assert host_checks.check_production(path) == []


def test_an_agent_without_serving_where_production_lives_is_found(tmp_path: Path) -> None:
    path = tmp_path / "n"
    assert host_checks.check_dedicated(path, "") == []
    assert host_checks.check_dedicated(path, str(tmp_path / "other")) == []
    (check,) = host_checks.check_dedicated(path, f"{tmp_path}/./n")
    assert check.level is Level.FAIL
    assert "no [serving]" in check.says
    with NodeDir(path).serving_lease_writer() as lease:
        lease.write(ServingLease(phase=Phase.READY))
        (check,) = host_checks.check_dedicated(path, "")
    assert check.level is Level.FAIL
    assert "a production engine lives there" in check.says
    assert "[serving]" in check.fix
    assert host_checks.check_dedicated(path, "") == []


def test_the_doctor_refuses_a_node_without_serving_that_is_where_production_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "rollout_plan", lambda *_: (None, []))
    config = tmp_path / "node.toml"
    config.write_text(f'dir = "{tmp_path / "n"}"\n[engine]\nmodel = "policy"\nmax_model_len = 512\n')
    with NodeDir(tmp_path / "n").serving_lease_writer() as lease:
        lease.write(ServingLease(phase=Phase.READY))
        found = doctor.examine(config, [])
    assert not found["ok"]
    assert any("no [serving]" in one["says"] for one in found["checks"])


def test_a_directory_that_cannot_be_used_has_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o755)
    assert host_checks.check_production(path) == []


def test_it_is_looked_for_where_the_command_would_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(*_: Any) -> dict[str, Any]:
        """Boundary: vLLM is not asked."""
        return {"support": None, "problem": "", "rows": [], "fix": ""}

    monkeypatch.setattr(doctor, "ask_engine", nobody)
    words = [f"ROSE_DIR={tmp_path / 'n'}", sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "m"]

    def found() -> list[str]:
        return [one["says"] for one in doctor.examine(None, words)["checks"] if "already" in one["says"]]

    with NodeDir(tmp_path / "n").serving_lease_writer() as lease:
        lease.write(ServingLease(phase=Phase.STARTING))
        (says,) = found()
    assert "(starting)" in says
    assert found() == []
