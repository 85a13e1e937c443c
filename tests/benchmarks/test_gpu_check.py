"""gpu_check without a GPU: bad stages through the program itself, and its folder."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu_check
from benchmarks.gpu import common, ready, stages
from benchmarks.gpu.record import Record, only_user
from benchmarks.gpu.rehearsal import StandIn
from benchmarks.lib.report import machine
from rose.errors import LedgerError

GIB = 1 << 30
SCRIPT = Path(gpu_check.__file__)
pytestmark = pytest.mark.timeout(600)  # four processes after the other; 20 s of a core that is free
WITHOUT_GPU = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


HASTY = """
import runpy, sys
from benchmarks.gpu import runner
runner.ENDS_S = 1.0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The program, which waits no ten seconds for a stage that has answered and does not end."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HASTY, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True, timeout=500, check=False)


@WITHOUT_GPU
def test_a_dry_run_says_of_every_stage_why_it_would_not_run_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(ready, "_import", lambda names: tried.extend(names) or {})  # the next test but one's
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry-run", "--out", str(tmp_path / "out")])
    for name in (common.ALLOW_MPS, common.REHEARSE):
        monkeypatch.setenv(name, "0")  # what the program makes of them is undone
    assert gpu_check.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(stages.STAGES)
    assert all("no NVIDIA GPU here" in line for line in lines)
    assert {"vllm", "torch"} <= set(tried)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--stage", "vnm"], "no stage 'vnm'"),
        (["--trace", "/no/such/trace.csv"], "/no/such/trace.csv"),
        *((["--until", value], "--until") for value in ("nan", "0", "inf")),
        *((["--rate", value], "--rate") for value in ("nan", "-1")),
    ],
)
@pytest.mark.parametrize("mode", ["--dry-run", "--list", "--rehearse"])
def test_what_was_mistyped_is_a_usage_error_in_every_mode(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    words: list[str],
    reason: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", mode, *words])
    with pytest.raises(SystemExit) as ended:
        gpu_check._arguments()
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_all_that_is_missing_is_told_also_what_only_a_stages_process_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("xxhash", "raise ModuleNotFoundError(name='xxhash')"),
        ("httpx", "import os; os._exit(3)"),
        ("uvloop", "1 / 0"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = ready._import(["xxhash", "json", "httpx", "uvloop", "no_such_package"])
    assert found == {
        "xxhash": "xxhash is not installed",
        "httpx": "importing httpx ended its process with 3",
        "uvloop": "uvloop cannot be imported: ZeroDivisionError: division by zero",
        "no_such_package": "no_such_package is not installed",
    }


def test_a_dry_run_tells_what_is_done_and_what_fits_and_leaves_the_folder_alone(tmp_path: Path) -> None:
    record = recorded(tmp_path, attempt("machine"))
    record.start("contract")
    look = Record(tmp_path, rehearsal=False, look=True)
    told = gpu_check._outlook(
        stages.STAGES, look, {name: ["no NVIDIA GPU here"] for name in ("machine", "vmm")}, 95.0, False
    )
    assert told["machine"] == "done"
    assert told["contract"] == "would run"
    assert told["vmm"] == "no NVIDIA GPU here"
    assert told["handover"] == "not in this call: it needs 40 s, 35 s are left"
    assert (tmp_path / "running").exists()


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


CALL = ("--rehearse", "--until", "240")
"""So that the good stage behind the bad ones still fits into it where cores are taken."""


class Rehearsal:
    """One call with the three stages that go wrong and a good one, and a second call on the same folder."""

    def __init__(self, folder: Path) -> None:
        names = ("hangs", "dies", "prints", "vmm")
        self.folder = folder
        self.first = run(*CALL, "--out", str(folder), *(f"--stage={name}" for name in names))
        self.document = json.loads((folder / gpu_check.FILE).read_text())
        self.log = (folder / "log-01.txt").read_text()
        self.second = run(*CALL, "--out", str(folder), "--stage", "dies")

    def attempt(self, stage: str) -> dict[str, Any]:
        (found,) = (one for one in self.document["details"]["attempts"] if one["stage"] == stage)
        return found


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    return Rehearsal(tmp_path_factory.mktemp("rehearsal") / "out")


def test_a_stage_that_hangs_keeps_its_figures_and_says_where_it_stood(rehearsal: Rehearsal) -> None:
    found = rehearsal.attempt("hangs")
    assert (found["state"], found["reason"]) == ("partial", "not done after 10 s")
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
        f"Next: python3 benchmarks/gpu_check.py {' '.join(CALL)} --out {rehearsal.folder}"
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_call_that_is_ended_from_outside_ends_its_stage_and_writes_it_down(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path / "out"), "--stage", "prints"]
    # As from a terminal: a suite that nohup started ignores it, and so would the program, on purpose.
    default = ["env", "--default-signal=HUP", *command]
    with subprocess.Popen(default, stdout=subprocess.PIPE, text=True) as process:
        answer = tmp_path / "out" / "running" / "answer.json"
        until_s = time.monotonic() + 60
        while not answer.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == 130
    (found,) = json.loads((tmp_path / "out" / gpu_check.FILE).read_text())["details"]["attempts"]
    assert (found["stage"], found["figures"]) == ("prints", {"answer": 42})


def test_a_call_that_is_killed_leaves_nothing_of_its_stage_whatever_its_session(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path / "out"), "--stage", "hangs"]
    partial = tmp_path / "out" / "running" / "partial.json"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until_s = time.monotonic() + 60
        while not partial.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        below = psutil.Process(process.pid).children(recursive=True)
        assert json.loads(partial.read_text())["child"] in [one.pid for one in below]
        process.kill()
    _, left = psutil.wait_procs(below, timeout=60)
    for one in left:
        one.kill()
    assert left == []


def test_two_calls_with_one_folder_are_refused_with_the_first_ones_number(tmp_path: Path) -> None:
    with only_user(tmp_path):
        done = run("--rehearse", "--stage", "dies", "--out", str(tmp_path))
    assert done.returncode == 1
    assert f"another call (pid {os.getpid()}) uses {tmp_path}" in done.stderr
    assert not (tmp_path / gpu_check.FILE).exists()
    with only_user(tmp_path):
        pass


def test_what_a_stage_put_into_shared_memory_goes_with_it_also_after_a_call_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = recorded(tmp_path)
    record.start("weights")
    monkeypatch.setenv(common.MEMORY, record.memory)
    folder = common.memory_folder()
    assert folder is not None
    (folder / "checkpoint").write_text("1.5 GB")
    Record(tmp_path, rehearsal=False)
    assert not folder.exists()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")
def test_a_rule_of_the_driver_that_was_broken_is_told_once(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path)
    code = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0); cuda.cuMemRelease(ctypes.c_uint64(7))"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **stand_in.env()}, timeout=60, check=True)
    assert stand_in.broken_rules()
    assert stand_in.broken_rules() == []


def test_a_stage_that_cannot_be_started_is_written_down(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from benchmarks.gpu.runner import Runner\n"
        "found = Runner().run(['/no/such/program'], pathlib.Path(sys.argv[1]), {}, 5.0)\n"
        "assert found['state'] == 'failed' and 'could not be started' in found['reason'], found"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=common.ROOT, timeout=60, check=True)


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
    assert "machine" not in order
    assert order[-2:] == ["vmm", "kill"]
    assert {*order, "machine"} == set(stages.STAGES)


def a_call(folder: Path, share: float) -> list[str]:
    """The stages of a call of 540 s in which each takes ``share`` of the seconds that it asks for, and one more to begin and end."""
    record, left_s = Record(folder, rehearsal=False), 540.0 - gpu_check.CLOSE_S
    record.begin(540.0, {})
    began: list[str] = []
    for name in gpu_check._order(stages.STAGES, record):
        if name != "mps" and gpu_check._needs_s(stages.STAGES[name], False) <= left_s:
            record.start(name)
            record.end(attempt(name))
            left_s -= share * stages.STAGES[name].needs_s + 1.0
            began.append(name)
    return began


@pytest.mark.parametrize("percent", range(85, 101, 3))
def test_the_first_table_is_in_the_second_of_three_calls(tmp_path: Path, percent: int) -> None:
    first, second = a_call(tmp_path, percent / 100), a_call(tmp_path, percent / 100)
    assert {"machine", "contract", "engine", "lend"} <= set(first)
    assert second[0] == "table_1"


def test_what_was_skipped_or_ended_with_its_call_has_not_used_up_a_try(tmp_path: Path) -> None:
    ended = attempt("vmm", "partial", x=1) | {"interrupted": True}
    record = recorded(tmp_path, *[attempt("kill", "skipped")] * 3, *[ended] * 3, attempt("vmm", "failed"))
    assert record.is_left("kill")
    assert record.is_left("vmm")


def test_a_driver_that_refuses_fails_its_stage_and_is_not_a_machine_that_lacks_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LedgerError("cuDevicePrimaryCtxRetain: OUT_OF_MEMORY")

    monkeypatch.setattr(common, "CudaPagePool", refuse)
    monkeypatch.setattr(common, "CudaDriver", refuse)
    for ask in (common.pool, common.driver):
        monkeypatch.setattr(common, "place", ask)
        found = gpu_check._answer(stages.Stage("common", "place", "", (), 1, 1))
        assert (found["state"], "OUT_OF_MEMORY" in found["reason"]) == ("failed", True)


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
    assert found.tries("engine") == 0
    assert "INFO engine is up" in (tmp_path / "log-01.txt").read_text()
    assert not running.exists()


def test_what_is_left_of_a_stage_that_is_written_down_already_is_no_second_attempt(tmp_path: Path) -> None:
    record = recorded(tmp_path)
    running = record.start("engine")
    shutil.copytree(running, tmp_path / "copied")
    record.end(attempt("engine", "failed"))
    shutil.move(tmp_path / "copied", running)
    found = Record(tmp_path, rehearsal=False)
    assert [one["state"] for one in found.attempts] == ["failed"]
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


def test_a_tree_without_git_has_the_commit_that_its_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no git there
    monkeypatch.setenv("ROSE_COMMIT", "abc1234")
    assert machine()["commit"] == "abc1234"


def document(attempts: str, calls: str = "[]") -> str:
    return f'{{"details": {{"rehearsal": false, "attempts": {attempts}, "calls": {calls}}}}}'


@pytest.mark.parametrize(
    "text",
    [
        '{"summary": {}}',
        '{"details": {"rehea',
        "[]",
        "\udcff",
        document("[{}]"),
        document("[7]"),
        document('[{"stage": "vmm", "state": "done", "figures": 3}]'),
        document('[{"stage": "vmm", "state": 1}]'),
        document("[]", "[{}]"),
        document("null"),
        document("{}"),
        document("[]", "{}"),
        document('[{"stage": "table_1", "state": "done", "details": [1]}]'),
    ],
)
def test_a_damaged_file_is_set_aside_and_the_call_goes_on(tmp_path: Path, text: str) -> None:
    path, raw = tmp_path / gpu_check.FILE, text.encode(errors="surrogateescape")
    for name in ("gpu_check.json.bad", "gpu_check.json.bad-2"):
        path.write_bytes(raw)
        assert Record(tmp_path, rehearsal=False).attempts == []
        assert (tmp_path / name).read_bytes() == raw
        assert not path.exists()


def test_a_full_disk_costs_the_log_before_the_figures_and_no_later_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recorded(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Record, "_keep_log", full)
        record.start("vmm")
        record.end(attempt("vmm", x=1))
        assert "No space left on device" in capsys.readouterr().out
        assert Record(tmp_path, rehearsal=False).best()["vmm"]["figures"] == {"x": 1}
        patch.setattr("benchmarks.gpu.record.write", full)
        record.start("kill")
        record.end(attempt("kill", y=2))
    record.start("fence")
    record.end(attempt("fence", z=3))
    assert set(Record(tmp_path, rehearsal=False).best()) == {"vmm", "kill", "fence"}


def test_a_call_says_what_it_goes_on_from(tmp_path: Path) -> None:
    assert Record(tmp_path, rehearsal=False).beginning() == "an empty folder: begins at the beginning"
    recorded(tmp_path, attempt("vmm"), attempt("kill", "failed"))
    assert Record(tmp_path, rehearsal=False).beginning() == "1 stages done in 1 earlier calls"


def test_the_next_command_is_the_same_call_again_whatever_its_folder_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "my trace.csv"
    trace.touch()
    flags = ["--allow-mps", "--trace", str(trace), "--rate", "0.25", "--until", "540"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *flags, "--out", str(tmp_path / "my out")])
    args = gpu_check._arguments()
    words = shlex.split(gpu_check._next(args))
    assert words[:2] == ["python3", "benchmarks/gpu_check.py"]
    monkeypatch.setattr(sys, "argv", words[1:])
    assert gpu_check._arguments() == args


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


def repeat(ttft: float, itl: float, **more: Any) -> dict[str, Any]:
    return {"p99_ttft_ratio": ttft, "p99_itl_ratio": itl, "aa_ratio": 1.0, "bar_met": True, **more}


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
    assert "table.not_pooled" not in flat
    assert json.loads((tmp_path / gpu_check.FILE).read_text())["summary"] == flat


@pytest.mark.parametrize(
    "other", [{"workload": "burst", "rate_hz": 1.0}, {"workload": "generated", "rate_hz": 2.0}]
)
def test_repeats_of_another_workload_or_rate_are_not_pooled(tmp_path: Path, other: dict[str, Any]) -> None:
    one = attempt("table_1", **repeat(1.0, 1.0)) | {"details": {"workload": "generated", "rate_hz": 1.0}}
    two = attempt("table_2", **repeat(9.0, 9.0)) | {"details": other}
    flat = recorded(tmp_path, one, two).summary()
    assert "table.p99_ttft_ratio" not in flat
    assert "differ in workload, rate or graphs" in flat["table.not_pooled"]
    assert flat["table_2.p99_ttft_ratio"] == 9.0
