"""Shared files: whole records or none, one writer, wake-ups; over real processes."""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose.coserve.kernel import _SYS_FUTEX
from rose.coserve.ledger import RecordReader
from rose.coserve.node_dir import NodeDir
from rose.coserve.record_layout import MAX_EXTRA_BYTES, VERSION
from rose.coserve.records import (
    ChunkState,
    Mode,
    NodeState,
    Phase,
    RankState,
    RolloutLease,
    ServingBoard,
)
from rose.errors import LedgerError

FUTEX_PRIVATE = 128
WORD_AT = 1024
"""Where the sequence word lies: see the layout in the module."""


@pytest.fixture
def node(tmp_path: Path) -> NodeDir:
    return NodeDir(tmp_path / "node")


def spawn(code: str, *args: object, stdin: int | None = None) -> subprocess.Popen[str]:
    """Run ``code`` in another process; it may print lines to us."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def writing(node: NodeDir) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes boards as fast as it can; all fields of a record are equal."""
    process = spawn(
        """
        import sys
        from rose.coserve.node_dir import NodeDir; from rose.coserve.records import ServingBoard
        writer = NodeDir(sys.argv[1]).serving_board_writer()
        names = ServingBoard.__dataclass_fields__
        boards = [ServingBoard(**dict.fromkeys(names, n)) for n in range(64)]
        writer.write(boards[0])
        print("up", flush=True)
        while True:
            for board in boards:
                writer.write(board)
        """,
        node.path,
    )
    assert line(process) == "up"
    yield process
    process.kill()
    process.communicate()


def values(board: ServingBoard) -> set[int]:
    return {getattr(board, name) for name in ServingBoard.__dataclass_fields__}


def test_a_first_record_is_there_from_the_files_first_moment(
    node: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is written the file of the writer before stands; so a process killed in between leaves one of both."""
    rename, seen = os.rename, []

    def renamed(*args: object, **kwargs: object) -> None:
        rename(*args, **kwargs)  # type: ignore[arg-type]
        seen.append(node.node().read())

    node.node_writer(NodeState(epoch=7)).close()
    monkeypatch.setattr(os, "rename", renamed)
    writer = node.node_writer(NodeState(epoch=8))
    assert seen == [NodeState(epoch=8)]

    writer.write(NodeState(epoch=9))
    assert node.node().read() == NodeState(epoch=9)
    writer.close()


def test_a_first_record_that_is_no_record_leaves_what_was_there(node: NodeDir) -> None:
    node.node_writer(NodeState(epoch=7)).close()
    with pytest.raises(LedgerError, match="bad field"):
        node.node_writer(NodeState(epoch=1 << 70))
    assert node.node().read() == NodeState(epoch=7)


def test_a_record_comes_back_as_it_was_written(node: NodeDir) -> None:
    writer, reader = node.serving_board_writer(), node.serving_board()
    assert reader.read() is None
    board = ServingBoard(step=3, busy=True, ttft_deadline_ns=2**62, needed_pages=-1)
    for step in range(5):
        writer.write(ServingBoard(step=step))
        assert reader.read() == ServingBoard(step=step)
    writer.write(board)
    assert reader.read() == board


def test_a_missing_file_reads_as_none_and_not_alive(node: NodeDir) -> None:
    reader = node.rollout_lease()
    assert (reader.read(), reader.alive(), reader.word(), reader.extra) == (None, False, 0, b"")
    assert not node.path.exists()


def test_files_are_private(node: NodeDir) -> None:
    old = os.umask(0)
    try:
        node.node_writer()
    finally:
        os.umask(old)
    assert stat.S_IMODE(node.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((node.path / "node.state").stat().st_mode) == 0o600
    assert [path.name for path in node.path.iterdir()] == ["node.state"]


def test_a_directory_that_anyone_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(LedgerError, match="has mode 0777: it is open to others"):
        NodeDir(tmp_path / "open").node_writer()


def test_no_reader_sees_a_torn_record_under_a_writer_at_full_speed(
    node: NodeDir, writing: subprocess.Popen[str]
) -> None:
    reader, seen = node.serving_board(), set[int]()
    begun_s = time.monotonic()
    # On one shared core the writer runs only while this does not: a second may show few of its records.
    while time.monotonic() < begun_s + 1.0 or (len(seen) <= 10 and time.monotonic() < begun_s + 60.0):
        board = reader.read()
        assert board is not None
        assert len(values(board)) == 1
        seen |= values(board)
    assert len(seen) > 10


@pytest.mark.parametrize("seed", range(8))
def test_a_writer_killed_mid_write_leaves_the_last_whole_record(node: NodeDir, seed: int) -> None:
    process = spawn(
        """
        import sys
        from rose.coserve.node_dir import NodeDir; from rose.coserve.records import ServingBoard
        writer = NodeDir(sys.argv[1]).serving_board_writer()
        names = ServingBoard.__dataclass_fields__
        boards = [ServingBoard(**dict.fromkeys(names, n)) for n in range(64)]
        writer.write(boards[0])
        print("up", flush=True)
        while True:
            for board in boards:
                writer.write(board)
        """,
        node.path,
    )
    assert line(process) == "up"
    reader = node.serving_board()
    assert reader.alive()
    until_s = time.monotonic() + random.Random(seed).uniform(0.0, 0.05)
    while time.monotonic() < until_s:
        assert len(values(reader.read() or ServingBoard())) == 1
    process.kill()
    process.communicate()
    assert not reader.alive()
    board = reader.read()
    assert board is not None
    assert len(values(board)) == 1
    with node.serving_board_writer() as writer:  # and the next one takes over
        assert reader.read() is None
        writer.write(ServingBoard(step=1))
        assert reader.read() == ServingBoard(step=1)


def test_a_stopped_writer_does_not_stop_readers_and_counts_as_alive(
    node: NodeDir, writing: subprocess.Popen[str]
) -> None:
    reader = node.serving_board()
    for _ in range(20):
        writing.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writing.pid, os.WSTOPPED | os.WNOWAIT)
        board = reader.read()
        assert board is not None
        assert len(values(board)) == 1
        assert reader.alive()
        writing.send_signal(signal.SIGCONT)


def test_a_second_writer_is_refused_while_the_first_lives(
    node: NodeDir, writing: subprocess.Popen[str]
) -> None:
    with pytest.raises(LedgerError, match=r"serving\.board: another live process writes it"):
        node.serving_board_writer()
    writing.kill()
    writing.wait()
    node.serving_board_writer().close()


def test_of_writers_that_start_together_exactly_one_wins(node: NodeDir) -> None:
    code = """
    import sys
    from rose.coserve.node_dir import NodeDir
    from rose.errors import LedgerError
    try:
        writer = NodeDir(sys.argv[1]).node_writer()
        print("won", flush=True)
    except LedgerError:
        print("lost", flush=True)
    sys.stdin.read()
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(node.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    try:
        assert sorted(line(process) for process in processes) == ["lost"] * 5 + ["won"]
    finally:
        for process in processes:
            process.communicate()
    assert [path.name for path in node.path.iterdir()] == ["node.state"]


def test_readers_that_ask_all_the_time_keep_no_writer_out(node: NodeDir) -> None:
    node.node_writer().close()
    stop = threading.Event()

    def ask() -> None:
        reader = node.node()
        while not stop.is_set():
            reader.alive()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            node.node_writer().close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_forked_child_neither_keeps_the_file_alive_nor_writes_it(node: NodeDir) -> None:
    writer, reader = node.node_writer(), node.node()
    writer.write(NodeState(epoch=1))
    answer, hold = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold[1])
        try:
            writer.write(NodeState(epoch=2))
        except LedgerError:
            os.write(answer[1], b"refused")
        os.read(hold[0], 1)
        os._exit(0)
    try:
        assert os.read(answer[0], 16) == b"refused"
        writer.close()
        assert not reader.alive()
        assert reader.read() == NodeState(epoch=1)
    finally:
        os.close(hold[1])
        os.waitpid(child, 0)


def test_wake_in_another_process_ends_a_wait(node: NodeDir) -> None:
    process = spawn(
        """
        import sys
        from rose.coserve.node_dir import NodeDir; from rose.coserve.records import NodeState
        writer = NodeDir(sys.argv[1]).node_writer()
        writer.write(NodeState(epoch=1))
        print("up", flush=True)
        while True:
            # Woken without a change of the word: the sleeper must come back all the same.
            writer.wake()
        """,
        node.path,
    )
    try:
        assert line(process) == "up"
        reader = node.node()
        started_s = time.monotonic()
        assert reader.wait(reader.word(), 30.0)
        assert time.monotonic() - started_s < 10.0
    finally:
        process.kill()
        process.communicate()


def test_a_wait_sleeps_in_the_kernel_until_the_write(node: NodeDir) -> None:
    writer, reader = node.node_writer(), node.node()
    writer.write(NodeState(epoch=1))
    word = reader.word()
    woken: list[tuple[bool, float]] = []

    def sleep() -> None:
        result = reader.wait(word, 30.0)
        woken.append((result, time.thread_time()))

    thread = threading.Thread(target=sleep)
    thread.start()
    until_asleep(thread)
    writer.write(NodeState(epoch=2))
    writer.wake()
    thread.join(20.0)
    ((result, cpu_s),) = woken
    assert result
    assert cpu_s < 0.1


def until_asleep(thread: threading.Thread) -> None:
    """Until the kernel says that ``thread`` sleeps on a futex that processes share; who waits for the interpreter sleeps on a private one."""
    call = Path(f"/proc/self/task/{thread.native_id}/syscall")
    until_s = time.monotonic() + 20.0
    while True:
        number, *arguments = call.read_text().split()
        if number == str(_SYS_FUTEX) and not int(arguments[1], 16) & FUTEX_PRIVATE:
            return
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_wait_returns_at_once_when_the_word_differs_and_false_at_its_end(node: NodeDir) -> None:
    writer, reader = node.node_writer(), node.node()
    writer.write(NodeState())
    word = reader.word()
    assert reader.wait(word + 1, 30.0)
    assert not reader.wait(word, 0.05)
    writer.write(NodeState())
    assert reader.wait(word, 30.0)


def test_a_missing_file_is_looked_for_as_seldom_as_asked(
    node: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr("rose.coserve.ledger.time", clock)
    assert not node.serving_lease().wait(0, 12.0, missing_s=5.0)
    assert slept == [5.0, 5.0, 2.0]


def test_a_wait_on_a_killed_writer_ends_when_the_file_gets_a_new_one(
    node: NodeDir, writing: subprocess.Popen[str]
) -> None:
    writing.kill()
    writing.wait()
    reader = node.serving_board()
    word, results = reader.word(), list[bool]()
    thread = threading.Thread(target=lambda: results.append(reader.wait(word, 30.0)))
    thread.start()
    until_asleep(thread)
    node.serving_board_writer()
    thread.join(20.0)
    assert results == [True]


def test_a_reader_follows_a_new_writer_and_its_incarnation(node: NodeDir) -> None:
    reader = node.rollout_lease()
    with node.rollout_lease_writer() as writer:
        writer.write(RolloutLease(steps=7))
        assert reader.read() == RolloutLease(steps=7)
        first = reader.incarnation
    assert not reader.alive()
    assert reader.read() == RolloutLease(steps=7)  # what it said last stays readable
    with node.rollout_lease_writer():
        assert reader.read() is None
        assert reader.alive()
        assert reader.incarnation != first


def test_extra_bytes_are_shared(node: NodeDir) -> None:
    writer, reader = node.rank_writer("rollout", 1, 5), node.rank("rollout", 1, 5)
    writer.extra[3] = 1
    writer.write(RankState(resident_pages=9))
    assert reader.extra == b"\0\0\0\1\0"
    assert node.rank("rollout", 1).extra == b"\0\0\0\1\0"  # any size
    assert node.ranks("rollout") == [1]
    with pytest.raises(LedgerError, match="has 5 extra bytes, expected 6"):
        node.rank("rollout", 1, 6).read()


def damage_truncate(data: bytearray) -> bytearray:
    return data[:-1]


def damage_empty(data: bytearray) -> bytearray:
    return data[:0]


def damage_magic(data: bytearray) -> bytearray:
    return bytearray(b"NOTROSE\n") + data[8:]


def damage_header(data: bytearray) -> bytearray:
    data[20] ^= 1
    return data


def damage_garbage(data: bytearray) -> bytearray:
    return bytearray(random.Random(1).randbytes(len(data)))


def damage_record(data: bytearray) -> bytearray:
    for at in range(64, WORD_AT):  # both slots
        data[at] ^= 1
    return data


def damage_word(data: bytearray) -> bytearray:
    data[WORD_AT] ^= 4
    return data


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, "bytes, its header says"),
        (damage_empty, "not a ledger file, or truncated"),
        (damage_magic, "not a ledger file, or truncated"),
        (damage_header, "header checksum is wrong"),
        (damage_garbage, "not a ledger file, or truncated"),
        (damage_record, "torn, or written by a process that does not own it"),
        (damage_word, "torn, or written by a process that does not own it"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_a_new_writer_replaces_it(
    node: NodeDir, damage: object, message: str
) -> None:
    with node.node_writer() as writer:
        writer.write(NodeState(mode=Mode.ON))
    path = node.path / "node.state"
    path.write_bytes(damage(bytearray(path.read_bytes())))  # type: ignore[operator]
    with pytest.raises(LedgerError, match=rf"node\.state.*{message}"):
        node.node().read()
    with node.node_writer() as writer:
        writer.write(NodeState(mode=Mode.OBSERVE))
        assert node.node().read() == NodeState(mode=Mode.OBSERVE)


def test_a_file_of_another_version_or_record_is_refused(
    node: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node.node_writer() as writer:
        writer.write(NodeState())
    with pytest.raises(LedgerError, match="another kind of record"):
        RecordReader(node.path / "node.state", ServingBoard).read()
    monkeypatch.setattr("rose.coserve.record_layout.VERSION", VERSION + 1)
    with pytest.raises(LedgerError, match=f"ledger version {VERSION}, this program speaks {VERSION + 1}"):
        node.node().read()


def test_a_truncation_under_a_reader_is_an_error_and_no_crash(node: NodeDir) -> None:
    with node.node_writer() as writer:
        writer.write(NodeState())
        reader = node.node()
        assert reader.read() is not None
        os.truncate(node.path / "node.state", 100)
        with pytest.raises(LedgerError, match="changed its size"):
            reader.read()


def test_the_writer_notices_that_a_stranger_wrote(node: NodeDir) -> None:
    with node.node_writer() as writer:
        assert writer.intact()
        writer.write(NodeState(lend_pages=5))
        assert writer.intact()
        with (node.path / "node.state").open("r+b") as file:
            file.seek(64)
            rest = bytearray(file.read())
            file.seek(64)
            file.write(bytes(byte ^ 0xFF for byte in rest))
        assert not writer.intact()


def test_a_record_that_does_not_fit_is_refused_and_the_last_one_stands(node: NodeDir) -> None:
    with node.node_writer() as writer:
        writer.write(NodeState(epoch=1))
        for bad in (NodeState(epoch=2**63), NodeState(epoch="x")):  # type: ignore[arg-type]
            with pytest.raises(LedgerError, match=r"node\.state: a record has a bad field"):
                writer.write(bad)
        assert node.node().read() == NodeState(epoch=1)
        assert writer.intact()
    with pytest.raises(LedgerError, match="not its writer"):
        writer.write(NodeState())


def test_sizes_and_names_are_bounded(node: NodeDir) -> None:
    with pytest.raises(LedgerError, match="extra bytes, at most"):
        node.chunks_writer("serving", MAX_EXTRA_BYTES + 1)
    with pytest.raises(LedgerError, match="rank: 64 is not in"):
        node.rank("serving", 64)
    with pytest.raises(LedgerError, match=r"role: '\.\./x' is neither"):
        node.chunks("../x")  # type: ignore[arg-type]


def test_links_and_special_files_are_refused(node: NodeDir, tmp_path: Path) -> None:
    node.path.mkdir(mode=0o700)
    (node.path / "node.state").symlink_to(tmp_path / "target")
    with pytest.raises(LedgerError, match=r"node\.state"):
        node.node_writer()
    with pytest.raises(LedgerError, match=r"node\.state"):
        node.node().read()
    os.mkfifo(node.path / "serving.board")
    with pytest.raises(LedgerError, match="not a regular file"):
        node.serving_board().read()


def test_remove_takes_dead_files_and_leaves_living_ones(node: NodeDir) -> None:
    living = node.serving_lease_writer()
    node.node_writer().close()
    node.chunks_writer("rollout", 4).close()
    node.rank_writer("rollout", 0, 4).close()
    (node.path / ".rollout.lease.0011aabb").touch()  # its writer was killed while it was being made
    assert node.remove() == ["serving.lease"]
    assert [path.name for path in node.path.iterdir()] == ["serving.lease"]
    living.close()
    assert node.remove() == []
    assert not node.path.exists()


def test_the_number_of_records_may_wrap_around(node: NodeDir) -> None:
    with node.chunks_writer("serving", 1) as writer:
        writer._number = 0xFFFFFFFD  # pyright: ignore[reportPrivateUsage]
        reader = node.chunks("serving", 1)
        for generation in range(6):
            writer.write(ChunkState(generation=generation))
            assert reader.word() != 0
            assert reader.read() == ChunkState(generation=generation)


def test_a_write_waits_for_nothing_and_keeps_the_interpreter() -> None:
    """Production's engine thread must not get the interpreter back a switch interval later.  (Extra bytes are not its.)

    On a tmpfs, where node directories are: a disk may be busy.  And the kernel may make a page wait, once; what a write does, it does each time.
    """
    counted, stop = [0], threading.Event()
    before = after = (0, 0)

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)  # gives the interpreter away, and wants it back at once

    thread = threading.Thread(target=count)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody is interrupted any more: who loses the interpreter gave it away
    try:
        with (
            tempfile.TemporaryDirectory(prefix="rose-test-", dir="/dev/shm") as folder,
            NodeDir(folder).rank_writer("serving", 0, 0) as writer,
        ):
            writer.write(RankState())
            thread.start()
            while not counted[0]:
                time.sleep(0)
            for _ in range(5):
                before = counted[0], resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
                for number in range(1000):
                    writer.put(*[number] * len(fields(RankState)))
                    writer.wake()
                after = counted[0], resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
                if after == before:
                    break
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        thread.join()
    assert after == before


@pytest.mark.parametrize("name", ["board", "chunks"])
@pytest.mark.parametrize("size", [0, 100, 100_000])
def test_a_file_cut_off_under_its_writer_is_seen_by_it_and_mended(
    node: NodeDir, name: str, size: int
) -> None:
    """A writer that touched a mapping of it would die of SIGBUS, and production with it."""
    code = """
    import sys
    from rose.coserve.node_dir import NodeDir; from rose.coserve.records import ChunkState, ServingBoard
    node = NodeDir(sys.argv[1])
    board = sys.argv[2] == "board"
    writer = node.serving_board_writer() if board else node.chunks_writer("serving", 8000)
    record = ServingBoard(step=1) if board else ChunkState(generation=1)
    writer.extra[:] = b"\\1" * len(writer.extra)
    writer.write(record)
    print("up", flush=True)
    for line in sys.stdin:
        if line == "write\\n":
            print(writer.intact(), flush=True)
            writer.write(record)
            writer.wake()
        else:
            print(writer.mend(), writer.mend(), writer.intact(), flush=True)
    """
    process = spawn(code, node.path, name, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert line(process) == "up"
    reader = node.serving_board() if name == "board" else node.chunks("serving")
    before = reader.read(), reader.extra
    os.truncate(node.path / f"serving.{name}", size)
    with pytest.raises(LedgerError, match="changed its size"):
        reader.read()
    print("write", file=process.stdin, flush=True)
    assert line(process) == "False"
    print("mend", file=process.stdin, flush=True)
    assert line(process).endswith("False True")  # nothing is left to mend
    newcomer = node.serving_board() if name == "board" else node.chunks("serving")
    assert (reader.read(), reader.extra) == (newcomer.read(), newcomer.extra) == before
    process.communicate()
    assert process.returncode == 0


def test_enumerations_keep_their_numbers() -> None:
    """They are in files that two versions of ROSE may share for a moment."""
    assert [int(mode) for mode in Mode] == [0, 1, 2]
    assert [int(phase) for phase in Phase] == [0, 1, 2, 3]
