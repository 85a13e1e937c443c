"""Journal: what it promised is there after a kill, a torn write, a full disk."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.errors import CapacityError, ConfigError, LedgerError
from rose.scheduler.claim import Claim
from rose.scheduler.journal import Journal, framed
from rose.scheduler.records import AckRecord, CancelRecord, CreateRecord, Record, TurnRecord, packed


def reopen(directory: Path) -> tuple[Journal, list[Record]]:
    journal = Journal(directory)
    return journal, list(journal.recover())


def record(number: int) -> AckRecord:
    return AckRecord(batch_id=f"b{number}", step=number, attempt=1)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A journal of three records, closed."""
    journal, _ = reopen(tmp_path)
    for number in range(3):
        journal.append(record(number))
    journal.close()
    return tmp_path


def test_records_come_back_in_order(written: Path) -> None:
    journal, records = reopen(written)
    assert records == [record(0), record(1), record(2)]
    journal.close()


def test_a_torn_tail_is_cut_at_every_byte(written: Path) -> None:
    path = written / "journal.rose"
    data = path.read_bytes()
    sizes = []
    for cut in range(8, len(data)):
        path.write_bytes(data[:cut])
        journal, records = reopen(written)
        assert records == [record(n) for n in range(len(records))]
        journal.append(CancelRecord(id="x", reason="after"))
        journal.close()
        journal, again = reopen(written)
        assert again == [*records, CancelRecord(id="x", reason="after")]
        journal.close()
        sizes.append(len(records))
    assert set(sizes) == {0, 1, 2}


def test_damage_before_the_tail_is_an_error(written: Path) -> None:
    path = written / "journal.rose"
    data = bytearray(path.read_bytes())
    data[8 + 8 + 3] ^= 1  # inside the first record
    path.write_bytes(data)
    journal = Journal(written)
    with pytest.raises(LedgerError, match="damaged at byte 8"):
        list(journal.recover())
    journal.close()


@pytest.mark.parametrize("bit", range(1, 32, 5))
@pytest.mark.parametrize("number", [0, 58])
@pytest.mark.parametrize("way", ["recovered", "taken over"])
def test_a_damaged_length_before_the_tail_is_an_error(
    tmp_path: Path, bit: int, number: int, way: str
) -> None:
    journal, _ = reopen(tmp_path)
    ends = [journal.size_bytes]
    for each in range(60):
        journal.append(record(each))
        ends.append(journal.size_bytes)
    journal.close()
    path = tmp_path / "journal.rose"
    data = bytearray(path.read_bytes())
    data[ends[number] + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    if way == "recovered":
        journal = Journal(tmp_path)
    else:
        journal = Journal(tmp_path, follows=True)
        assert len(list(journal.follow())) == number
        claim = Claim.take(tmp_path)
        assert claim is not None
        claim.is_alone = False
        journal.take_over(claim)
    with pytest.raises(LedgerError, match=f"damaged at byte {ends[number]}"):
        list(journal.recover())
    journal.close()
    assert path.read_bytes() == data


TURN = TurnRecord(
    trajectory_id="t",
    turn=0,
    kind="chat",
    suffix_ids=bytes(4000),
    token_ids=bytes(400),
    logprobs=bytes(800),
    finish_reason="stop",
    versions=[],
    segments=[],
    usage={},
    timing={},
    sampling={},
)


def test_a_turn_behind_a_damaged_length_is_found(written: Path) -> None:
    path = written / "journal.rose"
    data = bytearray(path.read_bytes()[: 8 + len(framed(record(0)))] + framed(TURN))
    data[8 + 1] ^= 1
    path.write_bytes(data)
    journal = Journal(written)
    with pytest.raises(LedgerError, match="damaged at byte 8"):
        list(journal.recover())
    journal.close()


def test_a_torn_tail_full_of_a_clients_words_is_cut(written: Path) -> None:
    """They are what a record begins with, a length and all."""
    path = written / "journal.rose"
    data = path.read_bytes()
    task = [{"type": "turn", "text": "\x10\0\0\0abcd"} for _ in range(1000)]
    made = CreateRecord(id="t", job="j", group_id="g", group_size=1, created_at=0.0, task=packed(task))
    path.write_bytes(data + framed(made)[:-1])
    journal, records = reopen(written)
    assert len(records) == 3
    assert journal.size_bytes == len(data)
    journal.close()


def test_where_too_much_looks_like_a_record_nothing_is_cut(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.scheduler.journal._SCANNED_BYTES", 100)
    path = written / "journal.rose"
    data = path.read_bytes() + (b"\x10\0\0\0abcd\x81\xa4type" + bytes(16)) * 10
    path.write_bytes(data)
    journal = Journal(written)
    with pytest.raises(LedgerError, match="damaged"):
        list(journal.recover())
    journal.close()
    assert path.read_bytes() == data


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.rose").write_bytes(b"something else entirely")
    journal = Journal(tmp_path)
    with pytest.raises(LedgerError, match="not a journal"):
        list(journal.recover())
    journal.close()


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_a_full_disk_stops_promises_and_keeps_what_was_written(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = reopen(written)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 8:
            return real(descriptor, bytes(data)[:8])  # part of it, as a filling disk does
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CapacityError, match="No space left"):
        journal.append(record(9))
    monkeypatch.undo()
    assert not journal.healthy
    with pytest.raises(CapacityError, match="read-only"):
        journal.append(record(10))
    journal.close()
    journal, records = reopen(written)
    assert records == [record(0), record(1), record(2)]
    journal.close()


async def test_commit_waits_for_the_disk_and_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = reopen(tmp_path)
    calls: list[int] = []
    real = os.fdatasync

    def counted(descriptor: int) -> None:
        calls.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", counted)

    async def one(number: int) -> None:
        journal.append(record(number))
        await journal.commit()

    await asyncio.gather(*(one(number) for number in range(50)))
    assert 1 <= len(calls) <= 3
    await journal.commit()  # nothing new: nothing to wait for
    assert len(calls) <= 3
    journal.close()


def test_compaction_replaces_the_file(written: Path) -> None:
    journal, _ = reopen(written)
    journal.compact([record(2)])
    journal.append(record(3))
    journal.close()
    journal, records = reopen(written)
    assert records == [record(2), record(3)]
    assert (written / "journal.rose").stat().st_mode & 0o077 == 0
    journal.close()


async def test_what_is_appended_during_a_compaction_is_in_both_files(written: Path) -> None:
    journal, _ = reopen(written)
    seen: list[bytes] = []

    def slowly() -> Iterator[Record]:
        yield record(2)
        journal.append(record(3))  # before the old file is replaced
        seen.append((written / "journal.rose").read_bytes())
        yield record(20)

    await journal.compact_beside(slowly())
    assert not journal.is_compacting
    journal.append(record(4))
    await journal.commit()
    journal.close()
    journal, records = reopen(written)
    assert records == [record(2), record(20), record(3), record(4)]
    journal.close()
    (written / "journal.rose").write_bytes(seen[0])  # killed in the middle: as if it had not begun
    journal, records = reopen(written)
    assert records == [record(0), record(1), record(2), record(3)]
    journal.close()


async def test_commits_and_appends_go_on_while_a_compaction_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = reopen(tmp_path)
    real = os.replace
    promised: list[int] = []
    before: list[int] = []
    """How many were promised when the file was replaced."""

    def replace(source: str, target: Path) -> None:
        before.append(len(promised))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)

    async def one(first: int) -> None:
        for number in itertools.count(first, 10):
            journal.append(record(number))
            await journal.commit()
            promised.append(number)
            if before and len(promised) > before[0] + 20:
                return

    async def compact() -> None:
        await journal.compact_beside(record(-number) for number in range(1, 300))

    await asyncio.gather(compact(), *(one(number) for number in range(10)))
    journal.close()
    journal, records = reopen(tmp_path)
    assert records[:299] == [record(-number) for number in range(1, 300)]
    assert sorted(each.step for each in records[299:] if isinstance(each, AckRecord)) == sorted(promised)
    journal.close()


@pytest.mark.parametrize("beside", [False, True])
async def test_a_compaction_writes_no_record_that_a_start_would_not_read(
    written: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    monkeypatch.setattr("rose.scheduler.journal.MAX_RECORD_BYTES", 100)
    journal, _ = reopen(written)
    records = [record(2), CancelRecord(id="x", reason="y" * 100)]

    async def compact() -> None:
        if beside:
            await journal.compact_beside(records)
        else:
            journal.compact(records)

    with pytest.raises(CapacityError, match="too large"):
        await compact()
    assert list(written.glob("*.new")) == []
    assert not journal.is_compacting
    journal.append(record(3))
    journal.close()
    journal, found = reopen(written)
    assert found == [record(0), record(1), record(2), record(3)]
    journal.close()


async def test_a_compaction_without_room_leaves_the_file(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = reopen(written)

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        await journal.compact_beside([record(2)])
    assert list(written.parent.glob("*.new")) + list(written.glob("*.new")) == []
    journal.append(record(3))
    await journal.commit()
    journal.close()
    journal, records = reopen(written)
    assert records == [record(0), record(1), record(2), record(3)]
    journal.close()


async def compacted(journal: Journal, records: list[Record], *, beside: bool) -> None:
    if beside:
        await journal.compact_beside(records)
    else:
        journal.compact(records)


@pytest.mark.parametrize("beside", [False, True])
async def test_a_compaction_that_cannot_open_the_directory_leaves_the_file(
    written: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    journal, _ = reopen(written)
    real = os.open

    def no_more_files(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if Path(path) == written:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", no_more_files)
    with pytest.raises(OSError, match="Too many open files"):
        await compacted(journal, [record(2)], beside=beside)
    monkeypatch.undo()
    assert journal.healthy
    journal.append(record(3))  # where a restart looks for it
    await journal.commit()
    journal.close()
    journal, records = reopen(written)
    assert records == [record(0), record(1), record(2), record(3)]
    assert list(written.glob("*.new")) == []
    journal.close()


@pytest.mark.parametrize("beside", [False, True])
async def test_an_earlier_file_that_cannot_be_closed_well_is_left_behind(
    written: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    journal, _ = reopen(written)
    earlier, real = journal._file, os.close

    def failing(descriptor: int) -> None:
        real(descriptor)  # as Linux does: its number is free
        if descriptor == earlier:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "close", failing)
    await compacted(journal, [record(2)], beside=beside)
    monkeypatch.undo()
    assert journal.healthy
    journal.append(record(3))
    await journal.commit()
    journal.close()
    journal, records = reopen(written)
    assert records == [record(2), record(3)]
    journal.close()


@pytest.mark.parametrize("beside", [False, True])
async def test_a_swap_that_the_disk_may_forget_ends_all_promises(
    written: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    journal, _ = reopen(written)
    real = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        await compacted(journal, [record(2)], beside=beside)
    monkeypatch.undo()
    assert not journal.healthy
    with pytest.raises(CapacityError, match="Input/output error"):
        journal.append(record(3))
    journal.close()
    journal, records = reopen(written)
    assert records == [record(2)]
    journal.close()


async def test_what_the_disk_failed_to_take_is_never_promised_later(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = reopen(written)
    journal.append(record(3))

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(CapacityError, match="Input/output error"):
        await journal.commit()
    monkeypatch.undo()  # the kernel reports such an error once, and has dropped the pages
    with pytest.raises(CapacityError, match="Input/output error"):
        await journal.commit()
    journal.close()
