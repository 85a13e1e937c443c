"""The doors of the two books: a device behind them conserves its memory, and all that was said replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.decisions.event_format import FORMATS
from rose.decisions.log import DecisionLog, replay
from rose.policy.coserving.events import Report, RolloutLooked, Stranded, Use
from rose.policy.coserving.rollout import RolloutBook
from rose.policy.coserving.serving import ServingBook
from tests.policy.coserving.device import Device


@pytest.mark.parametrize("seed", range(20))
def test_a_device_behind_the_doors_conserves_its_memory_and_comes_home(seed: int) -> None:
    device = Device(24, seed)
    device.run(1500)
    used = [action for _, actions in device.rollout.said for action in actions if isinstance(action, Use)]
    assert used  # something was lent
    device.lend = device.claim = 0
    device._change = lambda: None  # type: ignore[method-assign]
    device.run(2000)
    assert len(device.serving.pool) == 24
    assert not device.rollout.pool


def test_pages_that_nobody_gives_back_are_named_and_forgotten_when_they_come() -> None:
    device = Device(8, 0)
    device.lend = 7
    for _ in range(60):
        device._serve()
        device._roll()
        device._page()
    held = device.rollout.lease_pages
    assert held > 0
    device.lend = 0
    for _ in range(10):
        device._serve()
        device.at_s += 1.0
    assert device.serving.stranded_pages == held
    for _ in range(60):
        device._roll()
        device._page()
        device._serve()
    said = [a for _, actions in device.serving.said for a in actions if isinstance(a, Stranded)]
    assert [action.pages for action in said] == [held, 0]


@pytest.mark.parametrize(("role", "cls"), [("serving", ServingBook), ("rollout", RolloutBook)])
@pytest.mark.parametrize("from_event", [0, 200])
def test_what_a_device_said_replays_from_any_moment_on(
    tmp_path: Path, role: str, cls: type[ServingBook | RolloutBook], from_event: int
) -> None:
    book = cls(24, 1)
    device = Device(24, 5)
    device.run(1500)
    log = DecisionLog(tmp_path, role, FORMATS[role], book, max_bytes=1 << 30, max_files=1)
    events = [event for event, _ in getattr(device, role).said]
    for event in events[:from_event]:
        book.handle(event)  # type: ignore[arg-type]
    log.roll()
    for event in events[from_event:]:
        log.record(event, book.handle(event))  # type: ignore[arg-type]
    log.close()

    found = replay(tmp_path / f"{role}-1.rose")

    assert found.difference is None
    assert found.num_events == len(events) - from_event
    assert found.num_actions["Mark"] > 10


def test_a_book_that_would_answer_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(24, 5)
    device.run(600)
    book = ServingBook(24, 1)
    log = DecisionLog(tmp_path, "serving", FORMATS["serving"], book, max_bytes=1 << 30, max_files=1)
    log.roll()
    for event, _ in device.serving.said:
        log.record(event, book.handle(event))
    log.close()
    monkeypatch.setattr("rose.policy.coserving.serving.STRANDED_AFTER_S", -1.0)

    found = replay(tmp_path / "serving-1.rose")

    assert found.difference is not None
    assert "Stranded" in found.difference or "PeerCounted" in found.difference


def test_what_is_taken_beyond_the_last_word_of_the_lease_is_noticed() -> None:
    book = RolloutBook(8, 1)
    report = Report(0, bytes(8))
    book.handle(RolloutLooked(at_s=0.0, released=(), reports=(report,), allowed_chunks=2))
    book.check()
    book.grow(6, 6)
    with pytest.raises(AssertionError, match="held without having said so"):
        book.check()
