"""What goes to the boards, and that a board that breaks does not end a run."""

from __future__ import annotations

import errno
import json
import re
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.train.logs import BackgroundSink, Logs, open_logs, parameters_of, scalars_of
from rose.train.metrics import MetricsFile, lengths_by_quantile, rewards_by_quantile
from rose.train.train_config import TrainConfig
from tests.engine_launcher import free_port
from tests.plugin.stand_in import eventually
from tests.train.traces import trajectory, turn

RECORD: dict[str, Any] = {
    "step": 3,
    "success_rate": 0.5,
    "entropy": 1.25,
    "train_s": 2,
    "tiers": {"harvested": {"turns": 7, "tokens": 9}},
    "reward_by_length": [0.1, 0.9],
    "discards_by_length": {"stale": [0, 1, 0, 3]},
    "eval": {
        "version": "1.4",
        "success_rate": 0.75,
        "gap": 0.25,
        "tasks": {"training": {"success_rate": 0.5}},
        "training": {"success_rate": 1.0},
        "recent": {"num_versions": 2},
    },
    "update": {"kind": "delta", "bytes_sent": 123},
    "version": "1.4",
}


def config(tmp_path: Path, **log: Any) -> TrainConfig:
    table = {
        "model": tmp_path,
        "weights": {"directory": tmp_path},
        "output_dir": tmp_path / "out",
        "trainer": {"learning_rate": 1e-3},
        "log": log,
    }
    return TrainConfig.model_validate(table)


def test_numbers_go_to_their_group_and_text_stays_behind() -> None:
    assert scalars_of(RECORD) == {
        "reward/success_rate": 0.5,
        "policy/entropy": 1.25,
        "time/train_s": 2.0,
        "tier/harvested_turns": 7.0,
        "tier/harvested_tokens": 9.0,
        "reward_by_length/quarter_1": 0.1,
        "reward_by_length/quarter_2": 0.9,
        "discards/stale_quarter_1": 0.0,
        "discards/stale_quarter_2": 1.0,
        "discards/stale_quarter_3": 0.0,
        "discards/stale_quarter_4": 3.0,
        "eval/success_rate": 0.75,
        "eval/gap": 0.25,
        "eval/training_success_rate": 0.5,  # of a task of that name
        "eval_training/success_rate": 1.0,
        "eval_recent/num_versions": 2.0,
        "update/bytes_sent": 123.0,
    }


def test_a_board_that_breaks_is_switched_off_and_the_lines_go_on(tmp_path: Path) -> None:
    class Broken:
        num_calls = 0

        def write(self, step: int, scalars: Any) -> None:
            self.num_calls += 1
            raise OSError("disk full")

        def close(self, *, failed: bool) -> None:
            raise OSError("disk full")

    broken = Broken()
    logs = Logs(MetricsFile(tmp_path / "metrics.jsonl"), [broken])
    logs.write(RECORD)
    logs.write(RECORD | {"step": 4})
    logs.close()
    assert broken.num_calls == 1
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 4]


def written_in_time(logs: Logs, steps: range, *, done_s: float = 60.0) -> bool:
    """Whether so many steps can be written and the sinks closed at all; what hangs is left behind."""

    def write() -> None:
        for step in steps:
            logs.write(RECORD | {"step": step})
        logs.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(done_s)
    return not thread.is_alive()


def test_a_full_disk_under_tensorboard_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library's own thread ends at the first error, and its queue, of ten numbers, blocks whoever brings another, unless it tells first."""
    from tensorboardX.record_writer import RecordWriter

    def full(self: RecordWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    with open_logs(config(tmp_path, page=False)) as logs:
        assert written_in_time(logs, range(30))
    (told,) = [text for text in caplog.messages if "TensorBoardSink" in text]
    assert re.match("TensorBoardSink is switched off: (it hangs, and 10 steps wait|.*No space left)", told)
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 30


class Hanging:
    """As a server that does not answer."""

    def __init__(self) -> None:
        self.began, self.let_go = threading.Event(), threading.Event()

    def write(self, step: int, scalars: Any) -> None:
        self.began.set()
        self.let_go.wait()

    def close(self, *, failed: bool) -> None:
        pass


def test_the_end_of_a_run_does_not_wait_for_a_board_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging()
    board = BackgroundSink(hanging, max_behind=100, close_s=0.01)
    board.write(0, {})
    assert hanging.began.wait(60.0)
    assert written_in_time(Logs(MetricsFile(tmp_path / "metrics.jsonl"), [board]), range(1, 3))
    hanging.let_go.set()
    assert "Hanging did not close: 3 calls were not made within 0.01 s" in caplog.text


def test_a_board_that_hangs_is_switched_off_when_too_many_steps_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging()
    board = BackgroundSink(hanging, max_behind=2)
    board.write(0, {})
    assert hanging.began.wait(60.0)
    assert written_in_time(Logs(MetricsFile(tmp_path / "metrics.jsonl"), [board]), range(1, 6))
    hanging.let_go.set()
    assert caplog.messages == ["Hanging is switched off: it hangs, and 2 steps wait for it"]


def test_what_a_board_says_in_its_own_thread_switches_it_off(tmp_path: Path) -> None:
    class Broken:
        num_calls = 0

        def write(self, step: int, scalars: Any) -> None:
            self.num_calls += 1
            raise OSError("disk full")

        def close(self, *, failed: bool) -> None:
            pass

    broken = Broken()
    board = BackgroundSink(broken, max_behind=10)
    board.write(1, {})
    with pytest.raises(OSError, match="disk full"):
        board.close(failed=False)
    with pytest.raises(OSError, match="disk full"):
        board.write(2, {})
    assert broken.num_calls == 1


def test_tensorboard_files_are_written_unless_switched_off(tmp_path: Path) -> None:
    with open_logs(config(tmp_path)) as logs:
        logs.write(RECORD)
    (events,) = (tmp_path / "out" / "tensorboard").iterdir()
    assert b"eval/success_rate" in events.read_bytes()
    with open_logs(config(tmp_path / "b", tensorboard=False, page=False)) as logs:
        logs.write(RECORD)
    assert [path.name for path in (tmp_path / "b" / "out").iterdir()] == ["metrics.jsonl"]


def events_of(folder: Path) -> list[Any]:
    """What TensorBoard's own reader finds, file by file in the order of their names."""
    from tensorboardX.proto import event_pb2

    make: Any = getattr(event_pb2, "Event")  # noqa: B009 - made when it is imported: no stub knows it
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:  # length, its check sum, the event, its check sum
            (length,) = struct.unpack("<Q", data[:8])
            found.append(make.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_steps_that_are_taken_again_replace_those_that_ended_with_their_attempt(tmp_path: Path) -> None:
    """In one driver (its trainer died) and in the next.  TensorBoard drops what stands from the step of a start on."""
    for session in ([0, 1, 2], [1, 2, 3, 2], [2, 3]):
        with open_logs(config(tmp_path)) as logs:
            for step in session:
                logs.write(RECORD | {"step": step})
    curve: list[int] = []
    for event in events_of(tmp_path / "out" / "tensorboard"):
        if event.HasField("session_log"):
            curve = [step for step in curve if step < event.step]
        curve += [event.step for value in event.summary.value if value.tag == "policy/entropy"]
    assert curve == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("package", "setting", "fix"),
    [
        ("wandb", "wandb_project", "pip install wandb"),
        ("mlflow", "mlflow_experiment", r"pip install '\.\[mlflow\]' from a checkout of ROSE"),
    ],
)
def test_a_board_that_was_asked_for_by_name_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, setting: str, fix: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    expected = rf"log\.{setting}: {package} is not installed \({fix}\)"
    with pytest.raises(ConfigError, match=expected), open_logs(config(tmp_path, **{setting: "p"})):
        pass


def test_boards_are_told_every_setting_but_what_may_be_secret(tmp_path: Path) -> None:
    table = config(tmp_path).model_dump() | {
        "reward": {"kind": "endpoint", "settings": {"url": "http://x", "token": "s3cret"}},
        "tasks": [{"name": "maths", "kind": "math_tools", "settings": {"key": "s3cret"}}],
        "env": {},
        "weights": {"directory": "/mnt/s3cret"},
        "ray": {"address": "s3cret:6379"},
        "scheduler": {"url": "http://user:s3cret@host:1"},
        "trainer": {"learning_rate": 1e-3, "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}},
    }
    del table["reward"]
    told = parameters_of(TrainConfig.model_validate(table))
    assert told["trainer.learning_rate"] == 1e-3
    assert told["trainer.lora.targets.1"] == "v_proj"
    assert told["tasks.0.kind"] == "math_tools"
    assert told["rollout.alpha"] is None
    assert "s3cret" not in str(told)


def test_mlflow_gets_parameters_and_every_steps_numbers_and_goes_on_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library itself, on files."""
    pytest.importorskip("mlflow", reason="needs pip install '.[mlflow]' from a checkout of ROSE")
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    job = config(tmp_path, mlflow_experiment="lakes", mlflow_uri=uri, tensorboard=False)
    with open_logs(job) as logs:
        logs.write(RECORD | {"step": 3, "attempt": 1})
        logs.write(RECORD | {"step": 4, "attempt": 1})
    longer = job.model_copy(update={"num_steps": 99})

    def fails() -> None:
        with open_logs(longer) as logs:
            logs.write(RECORD | {"step": 4, "attempt": 2, "entropy": 2.5})
            raise RuntimeError("made up")

    with pytest.raises(RuntimeError, match="made up"):
        fails()

    client: Any = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("lakes").experiment_id])
    assert run.info.run_name == "rose"
    assert run.info.status == "FAILED"
    assert run.data.params["trainer.learning_rate"] == "0.001"
    assert run.data.params["num_steps"] == "20"
    assert run.data.tags["changed.num_steps"] == "99"
    history = client.get_metric_history(run.info.run_id, "policy/entropy")
    assert [(one.step, one.value) for one in history] == [(3, 1.25), (4, 1.25), (4, 2.5)]
    assert run.data.metrics["eval/success_rate"] == 0.75
    with open_logs(job):
        pass
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


def test_a_tracking_server_that_cannot_be_reached_is_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs pip install '.[mlflow]' from a checkout of ROSE")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    job = config(tmp_path, mlflow_experiment="lakes", mlflow_uri=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"log\.mlflow_uri: MLflow"), open_logs(job):
        pass


def test_weights_and_biases_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself, offline: its run file holds them."""
    pytest.importorskip("wandb", reason="needs pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with open_logs(config(tmp_path, wandb_project="p", tensorboard=False)) as logs:
        # W&B ignores what is given to it under a step number lower than its last.
        for attempt, step, entropy in ((1, 3, 0.1234), (1, 4, 0.2345), (2, 3, 0.3456), (2, 4, 0.4567)):
            logs.write(RECORD | {"step": step, "attempt": attempt, "entropy": entropy})
        assert len(logs._sinks) == 1
    (run,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    expected = (b"eval/success_rate", b"0.1234", b"0.2345", b"0.3456", b"0.4567")
    # A process of the library's writes it, and may still when `finish` has returned.
    eventually(lambda: all(part in run.read_bytes() for part in expected), "what was logged")


def test_each_output_folder_has_its_own_run_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of one name, and one of them goes on."""
    ids: list[str] = []

    def init(**told: Any) -> SimpleNamespace:
        ids.append(told["id"])
        return SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda **_: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for folder in ("one", "other", "one"):
        with open_logs(config(tmp_path / folder, wandb_project="p", tensorboard=False)):
            pass
    assert ids[0] == ids[2] != ids[1]


def test_rewards_and_lengths_by_quarter_of_length() -> None:
    traces = [
        trajectory([turn([1], [2] * length)], id=f"t{length}", reward=float(length))
        for length in (4, 1, 3, 2)
    ]
    assert rewards_by_quantile(traces) == [1.0, 2.0, 3.0, 4.0]
    assert lengths_by_quantile([*traces, trajectory([turn([1], [2] * 9)], id="t9")]) == [1, 2, 3, 4, 9]
    assert rewards_by_quantile(traces[:1]) == [4.0]
    assert lengths_by_quantile([]) == []
