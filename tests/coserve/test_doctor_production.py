"""``rose doctor`` and production: one that lives in the directory already would make a second plain vLLM; what it leaves of a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rose.config import validate
from rose.coserve import doctor, host_checks
from rose.coserve.free_memory import GpuMemory
from rose.coserve.host_checks import Level
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Phase, RolloutLease, ServingLease


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


# --- what production leaves of a GPU


class Gpu(GpuMemory):
    """Boundary: NVML.  80 GiB, of which ``free`` are."""

    free = 79 << 30

    def __init__(self, index: int) -> None:
        pass

    def free_bytes(self) -> int:
        return self.free

    def total_bytes(self) -> int:
        return 80 << 30


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeConfig:
    """On a GPU, with a policy of 10 GiB."""
    monkeypatch.setattr(doctor, "GpuMemory", Gpu)
    policy = tmp_path / "policy"
    policy.mkdir()
    with open(policy / "model.safetensors", "wb") as file:
        file.truncate(10 << 30)
    engine = {
        "model": str(policy),
        "max_model_len": 512,
        "port": 8001,
        "command": [sys.executable, "-m", "vllm", "serve"],
    }
    table = {
        "node_id": "a",
        "dir": str(tmp_path / "n"),
        "serving": {},
        "engine": engine,
        "device": {"kind": "gpu"},
    }
    return validate(NodeConfig, table)


def production(share: float | None) -> dict[str, Any]:
    return {
        "support": "elastic",
        "problem": "",
        "rows": [],
        "fix": "",
        "total_pages": 64,
        "memory_share": share,
    }


def fits(config: NodeConfig, asked: dict[str, Any] | None) -> tuple[Level, str] | None:
    """The line on the policy's size; None: it fits."""
    found = [
        one
        for one in doctor.rollout_plan(config, asked)[1]
        if "policy of" in one.says or "judged" in one.says
    ]
    return (found[0].level, found[0].says) if found else None


@pytest.mark.parametrize(("share", "is_enough"), [(0.92, False), (0.5, True)])
def test_before_production_runs_its_share_of_the_gpu_is_taken_off(
    config: NodeConfig, share: float, is_enough: bool
) -> None:
    """All of it is free now; not when production has started."""
    line = fits(config, production(share))
    assert (line is None) == is_enough
    if line is not None:
        assert line[0] is Level.FAIL
        assert "production leaves" in line[1]


def test_beside_production_that_is_ready_what_is_free_counts(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NodeDir(config.dir).serving_lease_writer() as lease:
        lease.write(ServingLease(phase=Phase.READY))
        assert fits(config, production(0.99)) is None
        monkeypatch.setattr(Gpu, "free", 8 << 30)
        line = fits(config, production(0.1))
    assert line is not None
    assert line[0] is Level.FAIL


def test_beside_an_engine_that_runs_the_policys_own_weights_are_not_missed(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gpu, "free", 4 << 30)
    node_dir = NodeDir(config.dir)
    with node_dir.serving_lease_writer() as lease, node_dir.rollout_lease_writer() as rollout:
        lease.write(ServingLease(phase=Phase.READY))
        rollout.write(RolloutLease(phase=Phase.READY))
        assert fits(config, production(0.7)) == (
            Level.OK,
            "whether it fits beside production was not judged: it runs already",
        )


@pytest.mark.parametrize("asked", [None, production(None)])
def test_where_nobody_says_what_production_takes_it_is_not_judged(
    config: NodeConfig, asked: dict[str, Any] | None
) -> None:
    line = fits(config, asked)
    assert line is not None
    assert (line[0], "not judged" in line[1]) == (Level.OK, True)
