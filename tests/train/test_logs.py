"""What goes to the boards, and that a board that breaks does not end a run."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.train.logs import Logs, open_logs, scalars_of
from rose.train.metrics import MetricsFile, lengths_by_quantile, rewards_by_quantile
from rose.train.train_config import TrainConfig
from tests.train.traces import trajectory, turn

RECORD: dict[str, Any] = {
    "step": 3,
    "success_rate": 0.5,
    "entropy": 1.25,
    "train_s": 2,
    "tiers": {"harvested": {"turns": 7, "tokens": 9}},
    "reward_by_length": [0.1, 0.9],
    "discards_by_length": {"stale": [0, 1, 0, 3]},
    "eval": {"version": "1.4", "success_rate": 0.75},
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
        "update/bytes_sent": 123.0,
    }


def test_a_board_that_breaks_is_switched_off_and_the_lines_go_on(tmp_path: Path) -> None:
    class Broken:
        num_calls = 0

        def write(self, step: int, scalars: Any) -> None:
            self.num_calls += 1
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("disk full")

    broken = Broken()
    logs = Logs(MetricsFile(tmp_path / "metrics.jsonl"), [broken])
    logs.write(RECORD)
    logs.write(RECORD | {"step": 4})
    logs.close()
    assert broken.num_calls == 1
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 4]


def test_tensorboard_files_are_written_unless_switched_off(tmp_path: Path) -> None:
    with open_logs(config(tmp_path)) as logs:
        logs.write(RECORD)
    (events,) = (tmp_path / "out" / "tensorboard").iterdir()
    assert b"eval/success_rate" in events.read_bytes()
    with open_logs(config(tmp_path / "b", tensorboard=False)) as logs:
        logs.write(RECORD)
    assert [path.name for path in (tmp_path / "b" / "out").iterdir()] == ["metrics.jsonl"]


def events_of(folder: Path) -> list[Any]:
    """What TensorBoard's own reader finds, file by file in the order of their names."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:  # length, its check sum, the event, its check sum
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
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


def test_a_board_that_was_asked_for_by_name_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(ConfigError, match="wandb is not installed"),
        open_logs(config(tmp_path, wandb_project="p")),
    ):
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
    written = run.read_bytes()
    assert b"eval/success_rate" in written
    assert all(entropy in written for entropy in (b"0.1234", b"0.2345", b"0.3456", b"0.4567"))


def test_rewards_and_lengths_by_quarter_of_length() -> None:
    traces = [
        trajectory([turn([1], [2] * length)], id=f"t{length}", reward=float(length))
        for length in (4, 1, 3, 2)
    ]
    assert rewards_by_quantile(traces) == [1.0, 2.0, 3.0, 4.0]
    assert lengths_by_quantile([*traces, trajectory([turn([1], [2] * 9)], id="t9")]) == [1, 2, 3, 4, 9]
    assert rewards_by_quantile(traces[:1]) == [4.0]
    assert lengths_by_quantile([]) == []
