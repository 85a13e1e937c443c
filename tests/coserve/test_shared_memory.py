"""What a killed engine leaves in /dev/shm goes, and nothing else does.  Real processes, real segments."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from rose.coserve.engine import SEGMENTS_FILE
from rose.shared_memory import SHARED_MEMORY, EngineSegments, mapped_segments, remove_unused, segments
from tests.coserve.conftest import Device, alive, ready, until
from tests.coserve.test_node_program import start_program

OWNER = """
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
made = [SharedMemory(name=name, create=True, size=4096) for name in sys.argv[1:]]
for each in made:
    resource_tracker.unregister("/" + each.name, "shared_memory")
print("up", flush=True)
sys.stdin.read()
"""


def name() -> str:
    return f"psm_{secrets.token_hex(6)}"


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Four names; whatever bears them afterwards is removed."""
    names = [name() for _ in range(4)]
    yield names
    for each in names:
        (SHARED_MEMORY / each).unlink(missing_ok=True)


def start_owner(names: list[str]) -> subprocess.Popen[str]:
    """A session of processes that made the segments, and whose tracker would not tidy up."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    return owner


def kill_session(owner: subprocess.Popen[str]) -> None:
    os.killpg(owner.pid, signal.SIGKILL)
    owner.communicate()


def is_there(name: str) -> bool:
    return (SHARED_MEMORY / name).exists()


def test_segments_of_a_killed_engine_go_and_those_that_a_living_process_maps_stay(
    names: list[str], tmp_path: Path
) -> None:
    left, shared, before, strangers = names
    (SHARED_MEMORY / before).write_bytes(b"x")
    book = EngineSegments(tmp_path / "book")
    book.begin()
    owner = start_owner([left, shared])
    (SHARED_MEMORY / strangers).write_bytes(b"x")
    book.note([owner.pid])
    peer = SharedMemory(name=shared)
    resource_tracker.unregister(f"/{shared}", "shared_memory")  # attaching registers it, too
    try:
        kill_session(owner)
        assert is_there(left)  # nobody else tidies up
        book.end()
        assert [is_there(each) for each in names] == [False, True, True, True]
        assert json.loads((tmp_path / "book").read_text()).keys() == {shared}
    finally:
        peer.close()

    book.end()
    assert not is_there(shared)
    assert not (tmp_path / "book").exists()
    assert book.num_removed == 2


def test_the_supervisor_after_a_killed_one_knows_what_its_engine_had(
    names: list[str], tmp_path: Path
) -> None:
    first = EngineSegments(tmp_path / "book")
    first.begin()
    owner = start_owner(names[:1])
    first.note([owner.pid])
    second = EngineSegments(tmp_path / "book")
    second.begin()
    assert is_there(names[0])  # that engine still lives

    kill_session(owner)
    second.end()
    assert not is_there(names[0])


def test_a_book_that_was_deleted_with_its_directory_is_made_anew(
    names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "n"
    folder.mkdir()
    first = EngineSegments(folder / "book")
    first.begin()
    owner = start_owner(names[:1])
    first.note([owner.pid])
    shutil.rmtree(folder)
    first.note([owner.pid])
    first.note([owner.pid])
    assert len(caplog.records) == 1  # said once
    folder.mkdir()
    first.note([owner.pid])
    kill_session(owner)
    EngineSegments(folder / "book").begin()
    assert not is_there(names[0])


def test_another_segment_under_the_same_name_stays(names: list[str], tmp_path: Path) -> None:
    book = EngineSegments(tmp_path / "book")
    book.begin()
    owner = start_owner(names[:1])
    book.note([owner.pid])
    kill_session(owner)
    first = (SHARED_MEMORY / names[0]).rename(SHARED_MEMORY / names[1])
    (SHARED_MEMORY / names[0]).write_bytes(b"x")
    book.end()
    assert is_there(names[0])
    assert first.exists()  # renamed: nobody wrote this name down


def test_what_was_there_before_the_engine_is_not_the_engines(names: list[str], tmp_path: Path) -> None:
    owner = start_owner(names[:1])
    book = EngineSegments(tmp_path / "book")
    book.begin()
    book.note([owner.pid])
    kill_session(owner)
    book.end()
    assert is_there(names[0])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"../psm_x": 1}', '{"psm_x": "1"}', '{"passwd": 1}', "[" * 100_000],
)
def test_a_book_that_a_stranger_wrote_names_nothing(text: str, names: list[str], tmp_path: Path) -> None:
    (SHARED_MEMORY / names[0]).write_bytes(b"x")
    (tmp_path / "book").write_text(text)
    book = EngineSegments(tmp_path / "book")
    book.begin()
    assert is_there(names[0])
    assert book.num_removed == 0


def test_only_our_own_regular_files_of_known_names_are_removed(names: list[str], tmp_path: Path) -> None:
    (SHARED_MEMORY / names[0]).write_bytes(b"x")
    (SHARED_MEMORY / names[1]).symlink_to(SHARED_MEMORY / names[0])
    other = SHARED_MEMORY / f"rose-test-{names[2]}"
    other.write_bytes(b"x")
    try:
        candidates = {path.name: path.lstat().st_ino for path in (other, SHARED_MEMORY / names[1])}
        assert remove_unused(candidates) == {}
        assert other.exists()
        assert is_there(names[1])
        assert not candidates.keys() & segments().keys()
    finally:
        other.unlink()


def test_mapped_segments_names_what_a_process_maps_and_no_longer_what_was_unlinked(names: list[str]) -> None:
    owner = start_owner(names[:2])
    try:
        assert mapped_segments([owner.pid]).keys() == set(names[:2])
        (SHARED_MEMORY / names[0]).unlink()
        assert mapped_segments([owner.pid]).keys() == {names[1]}
    finally:
        kill_session(owner)
    assert mapped_segments([owner.pid]) == {}


async def _noted(device: Device) -> str:
    """The engine's segment, once it is written down."""
    await until(lambda: device.report_path.exists() and "segment" in device.report_path.read_text())
    segment = device.report()["segment"]
    book = device.dir / SEGMENTS_FILE
    await until(lambda: book.exists() and segment in book.read_text(), "the segment is written down")
    return segment


async def test_an_agent_sweeps_after_its_engine_was_killed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.coserve.engine._NOTE_STARTING_S", 0.02)
    device.produce()
    agent = device.agent("segments")
    await ready(device, agent)
    segment = await _noted(device)
    device.report_path.unlink()
    await agent.engine.kill("a test")
    await until(lambda: not is_there(segment), "the segment is gone")
    await until(device.report_path.exists, "the next engine")
    second = await _noted(device)
    assert second != segment
    assert is_there(second)
    assert agent.status()["engine"]["segments_removed"] == 1
    await device.stop_agents()
    assert not is_there(second)
    assert not (device.dir / SEGMENTS_FILE).exists()


async def test_the_agent_after_a_killed_one_sweeps_what_both_left(device: Device) -> None:
    device.produce()
    process = await start_program(device, "segments")
    try:
        segment = await _noted(device)
        pid = device.report()["pid"]
    finally:
        process.kill()
        await process.wait()
    await until(lambda: not alive(pid), "the engine died with its agent")
    assert is_there(segment)
    agent = device.agent()
    await ready(device, agent)
    assert not is_there(segment)
