"""gpu_check without a GPU: what it says, how it resumes, and how raw numbers become figures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu import common, figures, models
from rose.units import PAGE_BYTES

GIB = 1 << 30
SCRIPT = Path(gpu_check.__file__)
WITHOUT_GPU = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@WITHOUT_GPU
def test_a_dry_run_names_every_stage_and_ends_with_one_clear_line(tmp_path: Path) -> None:
    done = run("--dry-run", "--json", str(tmp_path / "r.json"))
    *stages, last = done.stdout.splitlines()
    assert [line.split()[0] for line in stages] == list(gpu_check.STAGES)
    assert last == "Nothing was measured and nothing was written: no NVIDIA GPU here."
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])


@WITHOUT_GPU
def test_a_run_that_measured_nothing_is_no_success(tmp_path: Path) -> None:
    done = run("--stage", "vmm", "--json", str(tmp_path / "r.json"))
    assert done.returncode == 3
    assert len(done.stdout.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_every_stage_is_listed_and_is_a_function_with_a_contract() -> None:
    import importlib

    assert all(stage.what for stage in gpu_check.STAGES.values())
    for stage in gpu_check.STAGES.values():
        module = importlib.import_module(f"benchmarks.gpu.{stage.module}")
        assert getattr(module, stage.name).__doc__


@WITHOUT_GPU
def test_a_stage_that_finds_no_device_is_skipped_with_the_reason_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_check, "missing", lambda needs: None)
    answer = gpu_check._run("vmm")
    assert answer["state"] == "skipped"
    assert "cuda" in answer["reason"].lower()
    assert answer["seconds"] >= 0


def test_a_stage_that_is_cut_off_leaves_the_figures_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(name: str, env: dict[str, str], limit_s: float) -> dict[str, Any]:
        monkeypatch.setenv(common.PARTIAL, env[common.PARTIAL])
        common.keep({"start_s": 61.5})
        return {"state": "failed", "reason": f"not done after {limit_s:.0f} s"}

    monkeypatch.setattr(gpu_check, "missing", lambda needs: None)
    monkeypatch.setattr(gpu_check, "_ask", cut_off)
    answer = gpu_check._run("engine")
    assert (answer["state"], answer["figures"]) == ("partial", {"start_s": 61.5})
    assert "480 s" in answer["reason"]


def test_a_stage_over_its_limit_is_ended_with_everything_below_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "stage.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    answer = gpu_check._ask("vmm", {"PATH": "/usr/bin"}, 3.0)
    assert "not done after 3 s" in answer["reason"]
    child, until_s = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat"), time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < until_s, "it lives on"
        time.sleep(0.01)


def test_what_is_done_is_not_done_again() -> None:
    stages = {"machine": {"state": "done"}, "vmm": {"state": "partial"}, "kill": {"state": "skipped"}}
    left = gpu_check._left(stages)
    assert "machine" not in left
    assert {"vmm", "kill", "table_3"} <= set(left)
    assert left == [name for name in gpu_check.STAGES if name != "machine"]


def test_another_programs_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"summary": {}}')
    with pytest.raises(SystemExit, match="no result of this program"):
        gpu_check._saved(path)


@pytest.mark.parametrize(
    ("env", "found", "reason"),
    [
        ({}, None, "only with --allow-mps"),
        ({common.ALLOW_MPS: "1"}, None, "not on PATH"),
        ({common.ALLOW_MPS: "1"}, "/x", None),
    ],
)
def test_mps_is_behind_its_flag(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], found: str | None, reason: str | None
) -> None:
    monkeypatch.delenv(common.ALLOW_MPS, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shutil.which", lambda name: found)
    said = common.missing(("mps",))
    assert (said is None) if reason is None else (said is not None and reason in said)


# --- figures


def test_steps_are_told_against_the_first_arm_with_the_second_as_noise() -> None:
    arms = {
        "alone": [10.0] * 98 + [20.0] * 2,
        "again": [10.0] * 98 + [21.0] * 2,
        "loaded": [11.0] * 98 + [30.0] * 2,
    }
    found = figures.steps(arms)
    assert (found["alone_p50_ms"], found["alone_p99_ms"]) == (10.0, 20.0)
    assert found["aa_p99_ratio"] == pytest.approx(1.05)
    assert found["p99_ratio"] == pytest.approx(1.5)
    several = figures.steps({**arms, "more": [12.0] * 100})
    assert several["p99_ratio_loaded"] == pytest.approx(1.5)
    assert several["p99_ratio_more"] == pytest.approx(0.6)


def test_the_first_quarter_of_vmm_calls_only_fills_the_pool() -> None:
    mapped = [9000.0] * 4 + [320.0] * 12  # 16 pages a call
    found = figures.vmm({(2, "retained"): (mapped, [160.0] * 16, 16 * PAGE_BYTES)})
    assert found["map_us_per_page_2mib_retained_p99"] == 20.0
    assert found["unmap_us_per_page_2mib_retained_p50"] == 10.0


def test_a_handover_is_both_sides_per_gib() -> None:
    found = figures.handover([(20_000.0, 60_000.0), (24_000.0, 72_000.0), (20_000.0, 60_000.0)], 4 * GIB)
    assert found["usable_ms_per_gib_p50"] == 20.0
    assert found["usable_ms_per_gib_max"] == 24.0
    assert found["moonshot_20_ms_per_gib_met"]
    assert not figures.handover([(1.0, 90_000.0)], 4 * GIB)["moonshot_20_ms_per_gib_met"]


def test_the_slowest_kill_decides() -> None:
    assert figures.after_kill([0.2, 0.51]) == {"free_after_kill_s_max": 0.51, "limit_500_ms_met": False}


def test_lending_is_what_the_device_says_was_free() -> None:
    found = figures.lending(
        {"before": 10 * GIB, "lent": 14 * GIB, "after": 10 * GIB},
        4 * GIB // PAGE_BYTES,
        {"lend": 0.5, "take_back": 0.2},
        True,
    )
    assert (found["free_rose_share"], found["free_came_back_share"]) == (1.0, 1.0)
    assert found["take_back_ms_per_gib"] == pytest.approx(50.0)


def test_activation_counts_its_slowest_time() -> None:
    found = figures.activation(17 * GIB, [0.4, 0.5, 1.2], 0)
    assert (found["inactive_gib"], found["first_token_s_p50"], found["activation_1_s_met"]) == (
        17.0,
        0.5,
        False,
    )


def test_a_terminated_client_and_its_neighbour() -> None:
    found = figures.mps({"alone": [1.0], "again": [1.0], "loaded": [2.0]}, True, 0.1, True)
    assert (found["p99_ratio"], found["other_client_survived"], found["client_was_terminated"]) == (
        2.0,
        True,
        True,
    )


def repeat(ttft: float, itl: float, **more: Any) -> dict[str, Any]:
    return {"p99_ttft_ratio": ttft, "p99_itl_ratio": itl, "aa_ratio": 1.0, "bar_met": True, **more}


def test_the_table_is_the_median_of_its_repeats_with_the_spread_of_its_ratios() -> None:
    found = figures.table_1([repeat(1.02, 1.0), repeat(1.10, 1.01), repeat(1.04, 1.02, harvested_share=None)])
    assert found["repeats"] == 3
    assert (found["p99_ttft_ratio"], found["p99_ttft_ratio_min"], found["p99_ttft_ratio_max"]) == (
        1.04,
        1.02,
        1.10,
    )
    assert found["p99_cost_under_5_percent"]
    assert found["better_than_the_papers_best"]
    assert "bar_met" not in found
    worse = figures.table_1([repeat(1.20, 1.0)])
    assert not worse["p99_cost_under_5_percent"]
    assert not worse["better_than_the_papers_best"]


def test_a_figure_that_one_repeat_lacks_is_left_out_and_no_repeat_is_no_table() -> None:
    assert "harvested_share" not in figures.table_1(
        [repeat(1.0, 1.0, harvested_share=0.9), repeat(1.0, 1.0, harvested_share=None)]
    )
    assert figures.table_1([]) == {}


def test_the_summary_holds_every_figure_flat_and_the_table_of_whole_repeats_only() -> None:
    stages = {
        "vmm": {"state": "partial", "figures": {"x": 1.0}},
        "table_1": {"state": "done", "figures": repeat(1.0, 1.0)},
        "table_2": {"state": "partial", "figures": repeat(9.0, 9.0)},
    }
    flat = gpu_check.summary(stages)
    assert (flat["vmm.x"], flat["vmm.state"], flat["table_2.p99_ttft_ratio"]) == (1.0, "partial", 9.0)
    assert (flat["table.repeats"], flat["table.p99_ttft_ratio"]) == (1, 1.0)
    assert json.dumps(flat)


# --- shapes and how a device is planned


def test_the_shapes_are_those_of_the_real_models() -> None:
    assert models.PRODUCTION.num_parameters == pytest.approx(7.6e9, rel=0.01)
    assert models.POLICY.num_parameters == pytest.approx(8.2e9, rel=0.01)
    assert models.POLICY.bytes_per_token * 16 == 36 * 64 * 1024  # 64 KiB per block of 16 and layer
    assert models.PRODUCTION.bytes_per_token * 16 == 28 * 32 * 1024


def test_every_token_id_of_a_shape_has_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    models.write_folder(models.POLICY, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == models.POLICY.vocab_size
    last = models.POLICY.vocab_size - 1
    assert tokenizer.decode([7, last]) == f"t7 t{last}"
    assert tokenizer.encode("t7 t9").ids == [7, 9]


@pytest.mark.parametrize("total_gib", [79, 139])
def test_both_engines_fit_beside_each_other_with_a_reserve(total_gib: int) -> None:
    from benchmarks.gpu.coserve import RESERVE_BYTES, ROLLOUT_EXTRA_BYTES, Split

    split = Split.of(total_gib * GIB)
    assert (split.production + split.rollout) * total_gib <= total_gib - RESERVE_BYTES / GIB + 0.2
    assert split.rollout * total_gib * GIB >= models.POLICY.weight_bytes + ROLLOUT_EXTRA_BYTES - 0.1 * GIB
    assert split.rollout_kv_bytes > 20 * GIB


def test_a_device_too_small_for_both_is_refused() -> None:
    from benchmarks.gpu.coserve import Split
    from rose.errors import EngineError

    with pytest.raises(EngineError, match="too few for both"):
        Split.of(40 * GIB)


def test_each_engines_host_side_has_cores_of_its_own() -> None:
    from benchmarks.gpu.coserve import core_lists
    from rose.errors import EngineError

    assert [len(part) for part in core_lists(list(range(16)))] == [6, 6, 4]
    assert [len(part) for part in core_lists([3, 5, 7])] == [1, 1, 1]
    with pytest.raises(EngineError, match="3 are needed"):
        core_lists([0, 1])


def test_the_parts_are_started_as_a_gpu_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import coserve
    from rose.config import load_config
    from rose.coserve.config import NodeConfig
    from rose.demo.config import DemoConfig

    monkeypatch.setattr(coserve.os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(coserve.importlib.util, "find_spec", lambda name: object())
    plan = coserve.GpuPlan(config=DemoConfig(), cores=(12, 15), root=tmp_path, logs=tmp_path / "logs")
    plan.split = coserve.Split.of(139 * GIB)
    plan.prepare([])
    plan.make_models()
    production = plan.production().spec
    assert production.argv[1:4] == ("-m", "vllm.entrypoints.cli.main", "serve")
    assert "--enforce-eager" not in production.argv  # production keeps its graphs
    assert production.cores == tuple(range(6))
    assert {
        production.env[name] for name in ("ROSE_ROLE", "ROSE_ALLOW_UNMEASURED", "CUDA_VISIBLE_DEVICES")
    } == {
        "serving",
        "1",
        "3",
    }
    assert "OMP_NUM_THREADS" not in production.env
    plan.node()
    node = load_config(NodeConfig, tmp_path / "harvested.toml")
    assert node.engine.allow_unmeasured
    assert (node.device.kind, node.device.gpu) == ("gpu", 3)
    assert node.engine.command[:3] == ("taskset", "--cpu-list", "6,7,8,9,10,11")
    assert f"--kv-cache-memory-bytes={plan.split.rollout_kv_bytes}" in node.engine.args
    assert "--enforce-eager" in node.engine.args
    assert node.weights is None
