"""What a stage of gpu_check lacks is known before it starts: in the dry run, and in the real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu import common, ready, stages
from benchmarks.gpu.record import Record

ON_A_GPU = {"gpu": lambda: None, "driver": lambda: None, "kernels": lambda: None, "plugin": lambda: None}


@pytest.fixture(autouse=True)
def on_a_machine_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (ready, common):
        monkeypatch.setattr(where, "NEEDS", {**common.NEEDS, **ON_A_GPU})
    for name in (common.ALLOW_MPS, common.REHEARSE):
        monkeypatch.setenv(name, "0")


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """This machine has all but ``package``."""
    monkeypatch.setattr(
        ready, "_import", lambda names: {package: f"{package} is not installed"} if package in names else {}
    )
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("package", ["cryptography", "blake3"])
@pytest.mark.parametrize(
    "stage", [*stages.REPEATS, "table_green", "activation", "weights", "train", "train_4b"]
)
def test_keys_and_digests_are_needed_where_weights_or_tokens_are(
    monkeypatch: pytest.MonkeyPatch, package: str, stage: str
) -> None:
    without(monkeypatch, package)
    assert f"{package} is not installed" in ready.lacking({stage: stages.STAGES[stage]})[stage]


@pytest.mark.parametrize("package", ["vllm", "aiohttp", "blake3"])
def test_the_contracts_tests_need_what_their_folders_import(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    without(monkeypatch, package)
    lacks = ready.lacking({name: stages.STAGES[name] for name in ("contract", "vmm")})
    assert any(package in why.lower() for why in lacks["contract"])
    assert lacks["vmm"] == []


@pytest.mark.parametrize("stage", ["train", "table_1"])
def test_a_real_run_leaves_out_what_lacks_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    """It would fail minutes later, twice."""
    without(monkeypatch, "cryptography")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--stage", stage, "--out", str(tmp_path)])
    gpu_check.main()
    assert f"{stage}: skipped: cryptography is not installed" in capsys.readouterr().out
    assert Record(tmp_path, rehearsal=False, look=True).attempts == []


def test_a_dry_run_fails_for_any_stage_that_lacks_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu_check.py", "--dry-run", "--stage", "train", "--stage", "mps", "--out", str(tmp_path)],
    )
    monkeypatch.setattr(ready, "_import", lambda names: {})
    assert gpu_check.main() == 0
    without(monkeypatch, "cryptography")
    assert gpu_check.main() == 1


@pytest.mark.parametrize(("state", "graphs"), [(None, "0"), ("failed", "0"), ("done", "1")])
def test_production_beside_an_engine_has_graphs_where_they_have_been_seen_to_run(
    tmp_path: Path, state: str | None, graphs: str
) -> None:
    """A table takes most of a call; it must not fail for what is only asked behind it."""
    record = Record(tmp_path, rehearsal=False)
    record.begin(60.0, {})
    if state is not None:
        record.start("engine_graphs")
        record.end({"stage": "engine_graphs", "state": state, "figures": {}})
    assert gpu_check._stage_env(record, tmp_path)[common.GRAPHS] == graphs


def test_repeats_with_and_without_graphs_are_not_pooled(tmp_path: Path) -> None:
    record = Record(tmp_path, rehearsal=False)
    record.begin(60.0, {})
    for name, eager in (("table_1", True), ("table_2", False)):
        record.start(name)
        traffic = {"workload": "burst", "rate_hz": 0.3, "production_eager": eager}
        record.end({"stage": name, "state": "done", "figures": {"p99_ttft_ratio": 1.0}, "details": traffic})
    flat = record.summary()
    assert "table.p99_ttft_ratio" not in flat
    assert "differ in workload, rate or graphs" in flat["table.not_pooled"]
