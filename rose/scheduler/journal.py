"""The scheduler's memory across restarts: one append-only file of typed, checked frames.

A frame (``rose.frames``) holds msgpack.  :meth:`Journal.append` hands the frame to the kernel
before it returns, so that killing this process loses nothing; :meth:`Journal.commit` returns when the disk
has it, and many callers share one ``fdatasync``.  Answers that promise durability (finish, lease,
acknowledge) wait for it.

A torn last frame (power loss, full disk) is cut off at the next start; a bad frame *before* the tail, which is any that a good one
follows, is an error, because what follows it cannot be trusted, and is not to be lost.  A write that fails part-way is undone, and the journal
refuses further records until the process starts again: a scheduler that cannot remember must not promise.

One process writes a directory's journal: the one that holds its newest epoch (``rose.scheduler.claim``).  :meth:`Journal.append` looks,
behind each write, whether that is still so.  Others may follow what it writes (:meth:`Journal.follow`).  The file is ``journal.rose``; one
that took over from a process that may still be alive goes on in a file of its own, ``journal.EPOCH.rose``, and the highest counts.

Not thread-safe; owned by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rose.errors import CapacityError, ConfigError, LedgerError
from rose.frames import FRAME, MAX_RECORD_BYTES, frame
from rose.scheduler.claim import Claim
from rose.scheduler.records import Record
from rose.scheduler.slices import Slices
from rose.wire.errors import NOT_ACTIVE

MAGIC = b"ROSEJRN1"
_RELEASE_BYTES = 64 * 2**20
_READ_BYTES = 4 * 2**20
"""Of a file that another writes, at a time."""
_TAG = b"\xa4type"
"""What names a record's kind, in each one: the first key of its map."""
_MAP_BYTES = (1, 3)
"""Of a map's head: with up to 15 fields, and with more."""
_SCANNED_BYTES = 4 * 2**30
"""Looked at behind a bad frame: seconds."""
_NAME = re.compile(r"journal(?:\.([0-9]{1,18}))?\.rose\Z")

_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Record] = msgspec.msgpack.Decoder(Record).decode


class Replaced(Exception):
    """The file that was followed is not the journal any more: it was compacted, or another took over."""


class Journal:
    """Args:
    directory: Created if missing.
    follows: Read what another process writes, until :meth:`take_over`.

    Raises:
        ConfigError: Another process holds the directory, or it cannot be written.
    """

    def __init__(self, directory: Path, *, follows: bool = False) -> None:
        self.directory = directory
        self.path = directory / "journal.rose"
        self.claim: Claim | None = None
        self._file = -1
        self._size = 0
        self._broken: str | None = None
        self._fenced: CapacityError | None = None
        self._unsafe: CapacityError | None = None
        """The disk failed: nothing that it had not by then can be promised, however well it does later."""
        self._written = 0
        self._synced = 0
        self._syncing: asyncio.Task[Any] | None = None
        self._tail: list[bytes] | None = None
        """Frames appended since a compaction began, for its file."""
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            claim = None if follows else Claim.take(directory)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be used: {error.strerror}", field="journal") from error
        if claim is not None:
            self.take_over(claim)
        elif not follows:
            raise ConfigError(
                f"{directory} is in use by another rose-scheduler",
                field="journal",
                fix="choose another --journal, or stand by for it with --standby",
            )

    def take_over(self, claim: Claim) -> None:
        """From now on this process writes; what it has followed so far need not be read again."""
        self.claim = claim
        if not claim.is_alone:
            # Another may be alive that has it open.  Nothing of ours goes in there.
            number = max([claim.epoch, *(1 + _number(path) for path in _journals(self.directory))])
            self.path = self.directory / f"journal.{number}.rose"

    @property
    def must_move(self) -> bool:
        """What was read is in a file that is not ours: :meth:`compact` is to come before anything is appended."""
        return self._file < 0

    @property
    def size_bytes(self) -> int:
        return self._size

    @property
    def is_compacting(self) -> bool:
        return self._tail is not None

    @property
    def healthy(self) -> bool:
        return self._broken is None

    def follow(self) -> Iterator[Record]:
        """Each record that was written since the last call.

        Raises:
            Replaced: Begin anew, with another journal.
            LedgerError: Not our file.
        """
        newest = _newest(self.directory)
        if self._file < 0:
            if newest is None:
                return
            try:
                self._file = os.open(newest, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise Replaced from None
        elif not self._is_open(newest):
            raise Replaced
        if self._size == 0:
            magic = os.pread(self._file, len(MAGIC), 0)
            if len(magic) < len(MAGIC):
                return
            self._check(magic)
            self._size = len(MAGIC)
        data = b""
        while True:
            # Never mapped: a file that another process cuts off would end this one.
            more = os.pread(self._file, _READ_BYTES, self._size + len(data))
            data += more
            at = 0
            while True:
                end, record = _read_frame(data, at)
                if record is None:
                    break
                self._size += end - at
                at = end
                yield record
            data = data[at:]
            if len(more) < _READ_BYTES:
                return

    def recover(self) -> Iterator[Record]:
        """Each record in order, from where :meth:`follow` ended; then the torn tail, if any, is cut and the file is open for appending.

        The file is mapped, and given back as it is read: a restart needs memory for the state, not for the
        history.

        Raises:
            Replaced: It is not the file that was followed.
            LedgerError: Not our file, or damaged before its tail.
        """
        assert self.claim is not None
        if not self.claim.is_alone:
            yield from map(self._alive, self.follow())
            if self._file >= 0:
                rest = os.pread(self._file, 2 * MAX_RECORD_BYTES, self._size)
                if _later_frame(rest, 0):
                    raise LedgerError(f"{self.path.name} is damaged at byte {self._size}", field="journal")
                os.close(self._file)
            self._file = -1
            return
        newest = _newest(self.directory)
        if self._file >= 0:
            if not self._is_open(newest):
                raise Replaced
            os.close(self._file)
        self.path = newest or self.path
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        magic = os.pread(self._file, len(MAGIC), 0)
        if size < len(MAGIC) and MAGIC.startswith(magic):
            self._truncate(0)
            self._write(MAGIC)
        else:
            self._check(magic)
            at = max(len(MAGIC), self._size)
            released = at // mmap.PAGESIZE * mmap.PAGESIZE
            with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as data:
                while at < size:
                    end, record = _read_frame(data, at)
                    if record is None:
                        if _later_frame(data, at):
                            raise LedgerError(f"{self.path.name} is damaged at byte {at}", field="journal")
                        break
                    yield self._alive(record)
                    at = end
                    if at - released > _RELEASE_BYTES:
                        whole = (at - released) // mmap.PAGESIZE * mmap.PAGESIZE
                        data.madvise(mmap.MADV_DONTNEED, released, whole)
                        released += whole
            self._truncate(at)
        self._forget_earlier()

    def _is_open(self, path: Path | None) -> bool:
        try:
            return path is not None and os.path.samestat(os.stat(path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _check(self, magic: bytes) -> None:
        if magic != MAGIC:
            raise LedgerError(f"{self.path.name} is not a journal of this version", field="journal")

    def _alive(self, record: Record) -> Record:
        """Others see that we work, and do not hang."""
        self.beat()
        return record

    def _forget_earlier(self) -> None:
        """What ours takes the place of; it is whole, and on disk."""
        assert self.claim is not None
        for path in _journals(self.directory):
            if path == self.path:
                break  # what comes behind it is a successor's, who fenced us
            path.unlink(missing_ok=True)
        self.claim.forget_earlier()

    def append(self, record: Record) -> None:
        """Give ``record`` to the kernel.

        Raises:
            CapacityError: The journal cannot be written; nothing was recorded.
        """
        self.append_framed(framed(record))

    def append_framed(self, data: bytes) -> None:
        """The same of a record that is :func:`framed`."""
        if self._fenced is not None:
            raise self._fenced
        if self._broken is not None:
            raise self._read_only()
        try:
            self._write(data)
        except OSError as error:
            self._broken = error.strerror or "write failed"
            try:
                self._truncate(self._size)
            except OSError:
                pass  # the torn tail is cut at the next start
            raise CapacityError(
                f"the journal cannot be written: {self._broken}", retry_after_s=None
            ) from error
        if self._tail is not None:
            self._tail.append(data)
        self.check_ours()

    def _read_only(self) -> CapacityError:
        return CapacityError(f"the journal is read-only: {self._broken}", retry_after_s=None)

    def check_ours(self) -> None:
        """Raises:
        CapacityError: Another has taken over.
        """
        if not self.is_ours():
            assert self._fenced is not None
            raise self._fenced

    def is_ours(self) -> bool:
        """Nobody has taken over; once somebody has, nothing is written any more."""
        if self._fenced is None and (self.claim is None or not self.claim.holds()):
            self._broken = "another rose-scheduler has taken over"
            self._fenced = CapacityError(self._broken, code=NOT_ACTIVE)
        return self._fenced is None

    def beat(self) -> None:
        """We live; see :meth:`~rose.scheduler.claim.Claim.beat`."""
        assert self.claim is not None
        self.claim.beat()

    async def commit(self) -> None:
        """Return when everything appended so far is on disk.

        Raises:
            CapacityError: It is not, and nobody can say what a power loss would leave of it; or a record was refused before, which memory
                may hold all the same.
        """
        if self._file >= 0:  # closed, there is nothing of ours left to look at
            self.check_ours()
        if self._broken is not None:
            raise self._unsafe or self._read_only()
        goal = self._written
        while self._synced < goal:
            if self._unsafe is not None:
                raise self._unsafe
            if self._syncing is None:
                self._syncing = asyncio.create_task(self._sync())
            await asyncio.shield(self._syncing)

    async def _sync(self) -> None:
        goal = self._written
        try:
            await asyncio.to_thread(os.fdatasync, self._file)
        except OSError as error:
            # The kernel may have dropped the pages, and the next fsync then says that all is well.
            self._disk_failed(error)
            assert self._unsafe is not None
            raise self._unsafe from error
        finally:
            if self._syncing is asyncio.current_task():  # else a compaction waits for us, and commits for it
                self._syncing = None
        self._synced = max(self._synced, goal)

    def _disk_failed(self, error: OSError) -> None:
        self._broken = self._broken or error.strerror or "fsync failed"
        self._unsafe = CapacityError(f"the journal cannot be written: {self._broken}", retry_after_s=None)

    def compact(self, records: Iterable[Record]) -> None:
        """Replace the file by ``records``, atomically.  Blocks; for a process that does not serve yet.

        Raises:
            OSError, CapacityError: The successor cannot be written; the file is as it was.
        """
        with self._fresh() as file:
            for record in map(self._alive, records):
                file.write(framed(record))
            file.flush()
            os.fsync(file.fileno())
            self._swap(file)
        self._synced = self._written
        self._forget_earlier()

    async def compact_beside(self, records: Iterable[Record]) -> None:
        """The same while others append: what they write meanwhile goes into the file as ever, and into its successor.

        Args:
            records: What all before this call amounts to; taken little by little.

        Raises:
            OSError, CapacityError: The successor cannot be written; the file is as it was.
        """
        self._tail = []
        try:
            with self._fresh() as file:
                async for record in Slices().over(records):
                    file.write(framed(record))
                await self._flush(file)  # nearly all of it, while others may still commit
                ended = self._syncing = asyncio.create_task(self._end_compaction(file, self._syncing))
                error = await asyncio.shield(ended)
                if error is not None:
                    raise error
        finally:
            self._tail = None

    async def _end_compaction(self, file: BinaryIO, syncing: asyncio.Task[Any] | None) -> OSError | None:
        """Commits wait for this: whatever comes while the disk works was promised to nobody yet."""
        if syncing is not None:
            await asyncio.wait([syncing])
        goal = self._written
        try:
            await self._flush(file)
            file.writelines(self._tail or ())
            file.flush()
            self._swap(file)
        except OSError as error:
            return error
        finally:
            self._syncing = None
        self._synced = goal
        return None

    async def _flush(self, file: BinaryIO) -> None:
        if self._tail:
            file.writelines(self._tail)
            self._tail.clear()
        file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[BinaryIO]:
        """The successor of the file; gone again if it does not become it."""
        path = self.path.with_suffix(".new")
        try:
            with open(path, "wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(MAGIC)
                yield file
        except Exception:
            path.unlink(missing_ok=True)  # a full disk needs the room for what comes
            raise

    def _swap(self, fresh: BinaryIO) -> None:
        """From now on ``fresh`` is the file.

        Raises:
            OSError: The file is as it was; or it is ``fresh``, but a power loss may bring the old one back, and nothing is written any more.
        """
        # Whatever may fail comes before the name changes: what is written afterwards must go where a restart looks.
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            file = os.open(fresh.name, os.O_RDWR | os.O_CLOEXEC)
            try:
                size = os.lseek(file, 0, os.SEEK_END)
                os.replace(fresh.name, self.path)
            except BaseException:
                os.close(file)
                raise
            earlier, self._file, self._size = self._file, file, size
            if earlier >= 0:
                with contextlib.suppress(
                    OSError
                ):  # its number is free all the same, and nobody reads it again
                    os.close(earlier)
            try:
                os.fsync(directory)
            except OSError as error:
                self._disk_failed(error)
                raise
        finally:
            os.close(directory)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        if self.claim is not None:
            self.claim.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._size += len(data)
        self._written += 1

    def _truncate(self, size: int) -> None:
        os.ftruncate(self._file, size)
        os.lseek(self._file, size, os.SEEK_SET)
        self._size = size


def framed(record: Record) -> bytes:
    """``record`` as it lies in the file.

    Raises:
        CapacityError: It would be no record to a reader.
    """
    payload = _encode(record)
    if len(payload) > MAX_RECORD_BYTES:
        kind = type(record).__name__
        raise CapacityError(f"a record is too large for the journal ({kind})", retry_after_s=None)
    return frame(payload)


def _number(path: Path) -> int:
    name = _NAME.match(path.name)
    return -1 if name is None else int(name[1] or 0)


def _journals(directory: Path) -> list[Path]:
    """Oldest first."""
    return sorted((path for path in directory.iterdir() if _number(path) >= 0), key=_number)


def _newest(directory: Path) -> Path | None:
    return max(_journals(directory), key=_number, default=None)


def _read_frame(data: bytes | mmap.mmap, at: int) -> tuple[int, Record | None]:
    start = at + FRAME.size
    if start > len(data):
        return at, None
    length, crc = FRAME.unpack_from(data, at)
    payload = data[start : start + length]
    if length > MAX_RECORD_BYTES or len(payload) < length or zlib.crc32(payload) != crc:
        return at, None
    try:
        return start + length, _decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return at, None


def _later_frame(data: bytes | mmap.mmap, at: int) -> bool:
    """Is the bad frame at ``at`` followed by a good one?  Then it is damage, not a torn tail.

    What its own length says is not asked: that may be what is damaged.  A client's text can look like the beginning of any number of
    frames; where it does, and they cannot all be looked at, it is damage too, and nothing is cut.
    """
    left, tag = _SCANNED_BYTES, at
    while (tag := data.find(_TAG, tag + 1)) >= 0:
        for head in _MAP_BYTES:
            start = tag - head - FRAME.size
            if start <= at:
                continue
            length, _ = FRAME.unpack_from(data, start)
            if length > MAX_RECORD_BYTES or start + FRAME.size + length > len(data):
                continue
            left -= length
            if left < 0 or _read_frame(data, start)[1] is not None:
                return True
    return False
