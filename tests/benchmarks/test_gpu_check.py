"""gpu_check without a GPU: what it says, how it resumes, and how raw numbers become figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu_check
from benchmarks.gpu import common, device, figures, models, stages
from benchmarks.gpu.record import Record
from rose.coserve.cuda_pages import CudaPagePool
from rose.errors import LedgerError
from rose.units import PAGE_BYTES
from tests.coserve.memory_driver import MemoryDriver

GIB = 1 << 30
SCRIPT = Path(gpu_check.__file__)
pytestmark = pytest.mark.timeout(300)  # four processes after the other; 20 s of a core that is free
WITHOUT_GPU = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=200, check=False
    )


@WITHOUT_GPU
def test_a_dry_run_says_of_every_stage_why_it_would_not_run_and_writes_nothing(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path / "out"))
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(stages.STAGES)
    assert all(line.endswith("no NVIDIA GPU here") for line in lines)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])


@WITHOUT_GPU
def test_a_run_that_measured_nothing_is_no_success(tmp_path: Path) -> None:
    done = run("--stage", "vmm", "--out", str(tmp_path / "out"))
    assert done.returncode == 3
    assert done.stdout == "Nothing was measured and nothing was written: no NVIDIA GPU here.\n"
    assert list(tmp_path.iterdir()) == []


def test_every_stage_is_listed_and_is_a_function_with_a_contract() -> None:
    import importlib

    for stage in stages.table(rehearse=True).values():
        module = importlib.import_module(f"benchmarks.gpu.{stage.module}")
        assert getattr(module, stage.name).__doc__
        assert stage.what
        assert stage.needs_s <= stage.limit_s


def test_the_parts_of_a_table_are_its_repeats_on_the_rung_that_is_chosen() -> None:
    assert [stages.STAGES[name].argument for name in stages.REPEATS] == [1, 2, 3]


def test_each_call_of_ten_minutes_has_room_for_the_longest_stage() -> None:
    assert max(stage.needs_s for stage in stages.STAGES.values()) <= gpu_check.UNTIL_S - gpu_check.CLOSE_S


# --- bad stages, through the program itself


class Rehearsal:
    """One call with the three stages that go wrong and a good one, and a second call on the same folder."""

    def __init__(self, folder: Path) -> None:
        names = ("hangs", "dies", "prints", "vmm")
        self.folder = folder
        self.first = run(
            "--rehearse", "--until", "90", "--out", str(folder), *(f"--stage={name}" for name in names)
        )
        self.document = json.loads((folder / gpu_check.FILE).read_text())
        self.log = (folder / "log-01.txt").read_text()
        self.second = run("--rehearse", "--until", "90", "--out", str(folder), "--stage", "dies")

    def attempt(self, stage: str) -> dict[str, Any]:
        (found,) = (one for one in self.document["details"]["attempts"] if one["stage"] == stage)
        return found


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    return Rehearsal(tmp_path_factory.mktemp("rehearsal") / "out")


def test_a_stage_that_hangs_keeps_its_figures_and_says_where_it_stood(rehearsal: Rehearsal) -> None:
    found = rehearsal.attempt("hangs")
    assert (found["state"], found["reason"]) == ("partial", "not done after 3 s")
    assert "rehearsal.py" in found["tail"]
    assert "in hangs" in found["tail"]


def test_nothing_of_a_stage_that_hangs_is_left_whatever_its_session(rehearsal: Rehearsal) -> None:
    assert not psutil.pid_exists(rehearsal.attempt("hangs")["figures"]["child"])


def test_a_stage_that_dies_keeps_its_figures_its_reason_and_what_it_printed(rehearsal: Rehearsal) -> None:
    found = rehearsal.attempt("dies")
    assert (found["state"], found["figures"], found["reason"]) == ("partial", {"steps": 7}, "died of SIGSEGV")
    assert "the reason is on stdout" in found["tail"]
    assert "the reason is on stdout" in rehearsal.log


def test_a_stage_that_prints_behind_its_answer_and_does_not_end_loses_nothing(rehearsal: Rehearsal) -> None:
    found = rehearsal.attempt("prints")
    assert (found["state"], found["figures"]) == ("done", {"answer": 42})
    assert found["process"] == "was ended by us"
    assert "a log line that looks like an answer" in rehearsal.log


@WITHOUT_GPU
def test_a_good_stage_behind_them_has_its_figures_from_the_drivers_stand_in(rehearsal: Rehearsal) -> None:
    found = rehearsal.attempt("vmm")
    assert (found["state"], found.get("broken")) == ("done", None), found
    assert found["figures"]["map_us_per_page_2mib_ranged_p50"] > 0


def test_a_rehearsal_whose_bad_stages_ended_as_they_should_is_a_success(rehearsal: Rehearsal) -> None:
    assert rehearsal.first.returncode == 0, rehearsal.first.stdout + rehearsal.first.stderr


def test_what_to_run_next_is_said(rehearsal: Rehearsal) -> None:
    assert rehearsal.first.stdout.splitlines()[-1] == (
        f"Next: python benchmarks/gpu_check.py --rehearse --until 90 --out {rehearsal.folder}"
    )


def test_a_later_call_adds_to_what_is_there(rehearsal: Rehearsal) -> None:
    later = json.loads((rehearsal.folder / gpu_check.FILE).read_text())["details"]
    before = rehearsal.document["details"]
    assert later["attempts"][:-1] == before["attempts"]
    assert (later["attempts"][-1]["stage"], later["attempts"][-1]["call"]) == ("dies", 2)
    assert [call["number"] for call in later["calls"]] == [1, 2]
    assert (rehearsal.folder / "log-01.txt").read_text() == rehearsal.log
    assert "the reason is on stdout" in (rehearsal.folder / "log-02.txt").read_text()


def test_a_rehearsal_is_never_put_among_measurements(rehearsal: Rehearsal) -> None:
    with pytest.raises(SystemExit, match="holds a rehearsal"):
        Record(rehearsal.folder, rehearsal=False)


def test_a_stage_that_does_not_fit_is_not_started(tmp_path: Path) -> None:
    done = run("--rehearse", "--until", "7", "--out", str(tmp_path / "out"), "--stage", "hangs")
    assert "hangs: not now: it needs 3 s" in done.stdout
    assert json.loads((tmp_path / "out" / gpu_check.FILE).read_text())["details"]["attempts"] == []


def test_a_call_that_is_ended_from_outside_ends_its_stage_and_writes_it_down(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path / "out"), "--stage", "prints"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        answer = tmp_path / "out" / "running" / "answer.json"
        until_s = time.monotonic() + 60
        while not answer.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 130
    (found,) = json.loads((tmp_path / "out" / gpu_check.FILE).read_text())["details"]["attempts"]
    assert (found["stage"], found["figures"]) == ("prints", {"answer": 42})


# --- the folder


def attempt(stage: str, state: str = "done", **figures: Any) -> dict[str, Any]:
    return {"stage": stage, "state": state, "figures": figures}


def recorded(folder: Path, *attempts: dict[str, Any]) -> Record:
    record = Record(folder, rehearsal=False)
    record.begin(60.0, {})
    for one in attempts:
        record.start(one["stage"])
        record.end(one)
    return record


def test_what_is_done_is_not_done_again_and_what_was_tried_in_vain_comes_last(tmp_path: Path) -> None:
    recorded(tmp_path, attempt("machine"), attempt("vmm", "failed"), attempt("kill", "skipped"))
    order = gpu_check._order(stages.STAGES, Record(tmp_path, rehearsal=False))
    assert {"machine", "kill"}.isdisjoint(order)
    assert order[-1] == "vmm"
    assert set(order) | {"machine", "kill"} == set(stages.STAGES)


def test_a_stage_is_not_tried_for_ever(tmp_path: Path) -> None:
    record = recorded(tmp_path, attempt("vmm", "failed"), attempt("vmm", "partial", x=1))
    assert not record.is_left("vmm")


def test_a_later_attempt_in_vain_does_not_hide_an_earlier_result(tmp_path: Path) -> None:
    record = recorded(
        tmp_path, attempt("vmm", x=1), attempt("vmm", "failed"), attempt("kill", "partial", y=2), attempt("kill", "failed")
    )  # fmt: skip
    assert record.best()["vmm"]["figures"] == {"x": 1}
    assert record.best()["kill"]["figures"] == {"y": 2}


def test_what_a_call_that_was_killed_left_is_taken_over_with_its_log(tmp_path: Path) -> None:
    record = recorded(tmp_path)
    running = record.start("engine")
    (running / "partial.json").write_text('{"start_s": 61.5}')
    (running / "log.txt").write_text("INFO engine is up")
    found = Record(tmp_path, rehearsal=False)
    (one,) = found.attempts
    assert (one["stage"], one["state"], one["figures"]) == ("engine", "partial", {"start_s": 61.5})
    assert one["reason"] == "the call was cut off"
    assert "INFO engine is up" in (tmp_path / "log-01.txt").read_text()
    assert not running.exists()


def test_an_answer_that_a_call_had_no_time_to_write_down_counts(tmp_path: Path) -> None:
    record = recorded(tmp_path)
    (record.start("kill") / "answer.json").write_text('{"state": "done", "figures": {"z": 3}}')
    assert Record(tmp_path, rehearsal=False).best()["kill"]["figures"] == {"z": 3}


def test_a_log_without_end_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    record = recorded(tmp_path)
    (record.start("engine") / "log.txt").write_bytes(b"first" + bytes(3 << 20) + b"last")
    record.end(attempt("engine", "failed"))
    text = (tmp_path / "log-01.txt").read_bytes()
    assert b"first" in text
    assert b"last" in text
    assert b"bytes left out" in text
    assert len(text) < 2.1 * (1 << 20)


def test_the_logs_of_what_a_stage_started_go_behind_its_own_however_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = recorded(tmp_path)
    running = record.start("table_1")
    monkeypatch.setenv(common.PARTIAL, str(running / "partial.json"))
    (common.logs_folder() / "production.log").write_bytes(b"begin" + bytes(1 << 20) + b"CUDA error")
    record.end(attempt("table_1", "failed"))
    text = (tmp_path / "log-01.txt").read_bytes()
    assert b"--- production.log\nbegin" in text
    assert text.endswith(b"CUDA error")
    assert len(text) < 0.3 * (1 << 20)


def test_folders_stay_few_files(tmp_path: Path) -> None:
    recorded(tmp_path, *(attempt(name) for name in stages.STAGES))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_check.json", "log-01.txt"]


def test_another_programs_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / gpu_check.FILE).write_text('{"summary": {}}')
    with pytest.raises(SystemExit, match="no result of this program"):
        Record(tmp_path, rehearsal=False)


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


ANSWERS = [[5, 6], [7, 8]]


def lent(**answers: Any) -> dict[str, Any]:
    tokens = dict.fromkeys(("alone", "again", "lend", "take_back"), ANSWERS)
    return figures.lending(
        {"before": 10 * GIB, "lent": 14 * GIB, "after": 10 * GIB},
        4 * GIB // PAGE_BYTES,
        {"lend": 0.5, "take_back": 0.2},
        {**tokens, **answers},
    )


def test_lending_is_what_the_device_says_was_free() -> None:
    found = lent()
    assert (found["free_rose_share"], found["free_came_back_share"]) == (1.0, 1.0)
    assert found["take_back_ms_per_gib"] == pytest.approx(50.0)
    assert (found["control_same_tokens"], found["same_tokens"]) == (True, True)
    assert (found["requests"], found["distinct_answers"]) == (2, 2)


@pytest.mark.parametrize("which", ["lend", "take_back"])
def test_tokens_that_differ_while_memory_moved_are_told(which: str) -> None:
    assert lent(**{which: [[5, 6], [7, 9]]})["same_tokens"] is False


def test_an_engine_that_differs_from_itself_proves_nothing_about_lending() -> None:
    found = lent(again=[[5, 6], [7, 9]], lend=[[5, 6], [7, 9]])
    assert (found["control_same_tokens"], found["same_tokens"]) == (False, None)


def test_updates_are_told_by_kind_and_not_proved_by_one_that_was_not() -> None:
    def row(kind: str, seconds: float, proved: bool = True) -> dict[str, Any]:
        return {
            "kind": kind, "bytes_sent": 10, "bytes_dense": 2_000_000_000, "pause_s": seconds / 10, "acknowledged_s": seconds,
            "proved": proved,
        }  # fmt: skip

    found = figures.updates([row("anchor", 4.0), row("delta", 1.0), row("delta", 3.0), row("delta", 2.0)])
    assert (found["versions"], found["all_proved"]) == (4, True)
    assert (found["whole_acknowledged_s"], found["delta_acknowledged_s"], found["delta_pause_s"]) == (
        4.0,
        2.0,
        0.2,
    )
    assert found["whole_acknowledged_s_per_gb"] == 2.0
    assert not figures.updates([row("anchor", 1.0), row("delta", 1.0, proved=False)])["all_proved"]


def test_the_codecs_speed_is_of_new_weights_and_its_payload_is_counted_in_bits() -> None:
    found = figures.codec("dense", 500_000_000, 2**28 + 1, 7_000_000, 0.5, 0.25, 2.0)
    assert (found["dense_encode_gb_s"], found["dense_apply_gb_s"], found["dense_cpu_encode_gb_s"]) == (
        2.0,
        4.0,
        0.5,
    )
    assert found["dense_over_2_31_bits"]
    assert not figures.codec("x", 1, 2**28, 1, 1.0, 1.0, 1.0)["x_over_2_31_bits"]


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


def test_the_summary_holds_every_figure_flat_and_the_table_of_whole_repeats_only(tmp_path: Path) -> None:
    record = recorded(
        tmp_path,
        attempt("vmm", "partial", x=1.0),
        attempt("table_1", **repeat(1.0, 1.0)),
        attempt("table_2", "partial", **repeat(9.0, 9.0)),
    )
    flat = record.summary()
    assert (flat["vmm.x"], flat["vmm.state"], flat["table_2.p99_ttft_ratio"]) == (1.0, "partial", 9.0)
    assert (flat["table.repeats"], flat["table.p99_ttft_ratio"]) == (1, 1.0)
    assert json.loads((tmp_path / gpu_check.FILE).read_text())["summary"] == flat


# --- the tests marked gpu, on a machine that lacks what pyproject.toml configures

LACKS = ("-p", "no:asyncio", "-p", "no:timeout", "-p", "no:hypothesispytest")


def collected(*options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *LACKS,
        *options,
        "--collect-only",
        "-m",
        "gpu",
        *device.CONTRACT,
    ]
    return subprocess.run(
        command, cwd=common.ROOT, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip


def test_the_tests_marked_gpu_are_found_without_the_plugins_of_this_project() -> None:
    done = collected("-c", str(device.PYTEST_INI), "--rootdir", str(common.ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    for file in device.CONTRACT:
        assert f"{file}::" in done.stdout


def junit(*cases: tuple[str, str, str]) -> str:
    tests = "".join(
        f'<testcase classname="{file}" name="{name}">{body}</testcase>' for file, name, body in cases
    )
    return f"<testsuites><testsuite>{tests}</testsuite></testsuites>"


SKIPPED, FAILED = '<skipped message="no device"/>', '<failure message="no"/>'


def test_a_contract_is_the_tests_that_passed_and_the_names_of_those_that_did_not_run() -> None:
    report = junit(
        ("tests.a.test_x", "one", ""), ("tests.a.test_x", "two[y]", SKIPPED), ("tests.test_z", "three", "")
    )
    assert figures.contract(report, ["tests/a/test_x.py", "tests/test_z.py"]) == {
        "passed": 2,
        "skipped": 1,
        "skipped_names": ["tests.a.test_x::two[y]"],
    }


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (junit(), "no test ran of tests/test_z.py"),
        (junit(("tests.test_z", "one", SKIPPED)), "no test ran of tests/test_z.py"),
        (junit(("tests.test_z", "one", ""), ("tests.test_z", "two", FAILED)), "1 tests failed: tests.test_z::two"),
        (junit(("tests.test_zz", "one", "")), "no test ran of tests/test_z.py"),
    ],
)  # fmt: skip
def test_a_contract_that_ran_no_test_is_not_kept(report: str, reason: str) -> None:
    with pytest.raises(LedgerError, match=reason):
        figures.contract(report, ["tests/test_z.py"])


# --- a load that did not run is no load


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryDriver:
    driver = MemoryDriver(capacity_pages=4096)
    monkeypatch.setattr(common, "pool", lambda **settings: CudaPagePool(driver=driver, **settings))
    return driver


HERE = common.Place(None, "cpu", 32 * PAGE_BYTES, 1)


def test_what_was_moved_beside_the_steps_is_told(memory: MemoryDriver) -> None:
    with common.moving_here(HERE) as moved:
        at_first = moved()

        def steps() -> list[float]:
            while moved() == at_first:
                time.sleep(0.001)
            return [1.0]

        found, rate = common.beside(moved, steps)
    assert found == [1.0]
    assert rate > 0
    told = figures.load(rate, HERE.gib)
    assert told["load_gib_s"] == pytest.approx(rate / GIB)
    assert told["load_met"] is (rate >= 0.9 * HERE.gib)


def test_a_mover_that_can_map_nothing_fails_its_stage(memory: MemoryDriver) -> None:
    memory.fail_at = {"create": 1}
    with pytest.raises(LedgerError, match="OUT_OF_MEMORY"), common.moving_here(HERE):
        pytest.fail("the steps must not begin")


def test_a_mover_that_dies_while_the_steps_run_fails_its_stage(memory: MemoryDriver) -> None:
    def steps() -> None:
        memory.capacity = 0
        for thread in threading.enumerate():
            if isinstance(thread, common.Background):
                thread.join(30)

    with pytest.raises(LedgerError, match="free on the device"), common.moving_here(HERE):
        steps()


def test_steps_beside_nothing_are_not_kept() -> None:
    with pytest.raises(LedgerError, match="nothing ran beside"):
        common.beside(lambda: 7, lambda: [1.0])


@WITHOUT_GPU
def test_a_peer_that_cannot_move_memory_did_not_start() -> None:
    with pytest.raises(LedgerError, match="'traffic' did not start"):
        common.Peer("traffic", GIB)


@pytest.fixture
def dead_peer(monkeypatch: pytest.MonkeyPatch) -> common.Peer:
    monkeypatch.setenv(common.REHEARSE, "1")
    peer = common.Peer("decode")
    assert peer.count() >= 0
    os.kill(peer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
    return peer


def test_a_peer_that_dies_is_noticed_at_its_next_answer_and_at_the_end(dead_peer: common.Peer) -> None:
    with pytest.raises(LedgerError, match="'decode' has died"):
        dead_peer.count()
    with pytest.raises(LedgerError, match="'decode' has died"), dead_peer:
        pass


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
    plan.split, plan.rung = coserve.Split.of(139 * GIB), "green-context"
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
    assert node.engine.compute_rung == "green-context"
    assert (node.device.kind, node.device.gpu) == ("gpu", 3)
    assert node.engine.command[:3] == ("taskset", "--cpu-list", "6,7,8,9,10,11")
    assert f"--kv-cache-memory-bytes={plan.split.rollout_kv_bytes}" in node.engine.args
    assert "--enforce-eager" in node.engine.args
    assert node.weights is None
