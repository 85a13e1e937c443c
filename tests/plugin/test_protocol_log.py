"""What engines write down of their books' doors is enough to answer it again, and what real engines could not have done is found in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.policy.coserving import live_logs
from tests.policy.coserving.device import Device
from vllm_plugin import protocol_log
from vllm_plugin.protocol_log import ProtocolLog

CHUNKS = 24


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A device whose engines keep logs, after a while; ``break_it`` is called half-way."""
    monkeypatch.setenv("ROSE_DECISIONS", str(tmp_path / "logs"))

    def run(break_it: Callable[[Device], None] = lambda device: None) -> Path:
        device = Device(CHUNKS, 11)
        doors = [ProtocolLog(name, getattr(device, name).book) for name in ("serving", "rollout")]
        device.serving.door, device.rollout.door = doors
        device.run(400)
        break_it(device)
        for _ in range(800):
            device._change()
            for part in (device._serve, device._roll, device._page, device._page):
                part()
                device.at_s += device.rng.random()
        for door in doors:
            door.close()
        return tmp_path / "logs"

    return run


def test_the_logs_of_a_device_replay_and_agree_with_the_model(logged: Callable[..., Path]) -> None:
    looked = live_logs.check(logged(), total_pages=CHUNKS, chunk_pages=1)
    assert min(looked.values()) > 20, looked


def peer_miscounted(device: Device) -> None:
    handle = device.serving.door.handle

    def miscounts(event: Any) -> Any:
        if type(event).__name__ == "PeerCounted":
            event = type(event)(at_s=event.at_s, pages=event.pages + CHUNKS)
        return handle(event)

    device.serving.door.handle = miscounts


def too_much_allowed(device: Device) -> None:
    device._may_hold = lambda: CHUNKS  # type: ignore[method-assign]


def mapped_unasked(device: Device) -> None:
    look = device.serving.pager.look

    def maps(*args: Any) -> None:
        look(*args)
        report = device.serving.pager.report
        device.serving.pager.report = type(report)(report.generation, b"\1" * CHUNKS)

    device.serving.pager.look = maps  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (peer_miscounted, "the peer said one of"),
        (too_much_allowed, "production said one of"),
        (mapped_unasked, "is mapped, and nobody wants it"),
    ],
)
def test_what_the_model_excludes_is_found_in_a_log(
    logged: Callable[..., Path], break_it: Callable[[Device], None], match: str
) -> None:
    with pytest.raises(live_logs.Wrong, match=match):
        live_logs.check(logged(break_it), total_pages=CHUNKS, chunk_pages=1)


def test_a_round_that_changes_nothing_is_not_written_down(logged: Callable[..., Path]) -> None:
    def rest(device: Device) -> None:
        device.lend = device.claim = 0
        device._change = lambda: None  # type: ignore[method-assign]

    folder = logged(rest)
    (life,) = live_logs.lives(folder, "serving")
    asked = [event for event, _ in life.events if hasattr(event, "target_chunks")]
    assert len(asked) < 400


def test_engines_that_share_a_directory_keep_to_their_own_files_and_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_DECISIONS", str(tmp_path))
    monkeypatch.setenv("ROSE_DECISIONS_MAX_BYTES", "2000")
    monkeypatch.setenv("ROSE_DECISIONS_MAX_FILES", "2")
    monkeypatch.setattr(protocol_log, "FLUSH_EVERY_S", 0.0)
    for name in ("n0", "n1", "n1"):
        monkeypatch.setenv("ROSE_DECISIONS_NAME", name)
        device = Device(CHUNKS, 1)
        device.rollout.door = ProtocolLog("rollout", device.rollout.book)
        device.run(50 if name == "n0" else 1500)
        device.rollout.door.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert "rollout-n0-1.rose" in names, "another node's"
    own = [name for name in names if name.startswith("rollout-n1-")]
    assert len(own) == 2
    assert "rollout-n1-1.rose" not in own
    assert all((tmp_path / name).stat().st_size < 20_000 for name in own)


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_DECISIONS", raising=False)
    monkeypatch.chdir(tmp_path)
    device = Device(CHUNKS, 1)
    device.serving.door = ProtocolLog("serving", device.serving.book)
    device.run(50)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_begun_is_no_reason_not_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROSE_DECISIONS", str(tmp_path))
    monkeypatch.setattr(protocol_log, "_open", lambda *_: 1 / 0)
    monkeypatch.setattr(logging.getLogger("vllm.rose"), "propagate", True)
    device = Device(CHUNKS, 1)
    device.serving.door = ProtocolLog("serving", device.serving.book)
    device.run(50)
    assert "no decision log" in caplog.text
