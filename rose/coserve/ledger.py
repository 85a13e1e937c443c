"""Shared files between the processes of one device: one writer each, any number of readers, nobody waits.

What it decides: how a reader knows that it read a whole record, who is the writer, and whether that writer lives.  What it does not:
how a record lies in a file (``rose.coserve.record_layout``), what the numbers mean (``rose.coserve.records``) and who may hold
how much (``rose.policy``).

Invariants:

- **Whole or nothing.**  A writer fills the slot that is not current and sets the word, in one pwrite of less than a page
  in which the word comes last.  One that is stopped or killed half-way leaves the previous record readable, and readers
  never spin on it.  A reader accepts a slot only if its number is the word's and its checksum fits, so a write by anyone
  but the owner is an error, not a value.
- **One writer.**  It holds an exclusive advisory lock for as long as it lives (``F_OFD``: owned by the open
  file, so it works across containers, where pids mean nothing).  Readers *query* that lock and never take
  it: no reader can keep a writer out, however many poll.
- **A new writer makes a new file** and moves it over the old one, so a header never changes under a reader.
  Readers notice by inode, and are woken.
- **Deleting a file separates nobody.**  A reader that has opened a file goes on reading it for as long as its writer lives, even if
  the file, or its whole directory, is deleted.  The writer makes the file again under its name (``mend``), for readers that come later.
- **No process touches a mapping of a file.**  The writer keeps the file's bytes in its own memory and copies what
  changed with pwrite; readers copy with pread.  A file that someone truncates is an error (``intact``) and not a
  SIGBUS in production.  What is mapped, read-only, is the futex's page, and only the kernel looks at it.
- ``write`` is one short pwrite (two with extra bytes) and no lasting allocation; ``wake`` is one futex call.  Put
  the directory on tmpfs (``/dev/shm``, ``/run``): there a write is a copy in memory; on a disk it may wait for the disk.
  Why so, and what it costs: ``docs/decisions/0004-*.md``.

Standard library and ``rose.policy`` only.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from rose.coserve.kernel import (
    SUCCESSOR,
    FutexWord,
    bound_read,
    bound_write,
    futex_wait,
    is_locked,
    take_lock,
)
from rose.coserve.record_layout import (
    CRC_BYTES,
    EXTRA_AT,
    HEADER_BYTES,
    MAX_EXTRA_BYTES,
    MODE,
    U32,
    WORD_AT,
    layout_of,
)
from rose.errors import LedgerError
from rose.private_dir import private_dir, require_own

R = TypeVar("R")

_READ_RETRIES = 64
"""Needed only when the writer lapped the reader twice inside one copy; 64 in a row is corruption."""
_MISSING_FILE_WAIT_S = 0.02
"""There is no futex to sleep on before the file exists; only this start-up case looks again by itself."""

_writers: weakref.WeakSet[RecordWriter[Any]] = weakref.WeakSet()


def _forget_writers_after_fork() -> None:
    # A forked child shares the parent's open file and so its lock: kept open there, it would
    # make a dead parent look alive.  The child is not the writer.
    for writer in list(_writers):
        writer._abandon()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_forget_writers_after_fork)


class WriterLives(LedgerError):
    """Another live process is the file's writer."""


class RecordWriter(Generic[R]):
    """The one writer of a shared file, from construction to :meth:`close` or process death.

    Args:
        path: The file; made with mode 0600, its directory (:mod:`rose.private_dir`) with 0700.
        record_type: A frozen dataclass of ints.
        extra_bytes: Room behind the record, zeroed: :attr:`extra`.
        first: What the file says from the moment that it is there; None: nothing, until the first :meth:`write`.

    Attributes:
        extra: The bytes behind the record, in this process's own memory; :meth:`write` publishes them.

    Raises:
        LedgerError: Another live process writes this file, or the file cannot be made.

    Not thread-safe: one thread writes.  ``wake`` may be called from any thread.
    """

    def __init__(
        self, path: Path | str, record_type: type[R], extra_bytes: int = 0, first: R | None = None
    ) -> None:
        if not 0 <= extra_bytes <= MAX_EXTRA_BYTES:
            raise LedgerError(f"{extra_bytes} extra bytes, at most {MAX_EXTRA_BYTES}", field=str(path))
        self.path = Path(path)
        self.extra = memoryview(bytearray(extra_bytes))
        self._layout = layout = layout_of(record_type)
        self._number = 0
        # A random start: whoever waits on the previous writer's number must not find it again here.
        self._first = secrets.randbits(31) | 1
        self._image = bytearray(
            layout.header(extra_bytes, secrets.randbits(64)).ljust(EXTRA_AT + extra_bytes, b"\0")
        )
        self._pinned = ctypes.c_char.from_buffer(self._image)
        view = memoryview(self._image)
        heads = [layout.slots_at + slot * layout.slot_bytes for slot in (0, 1)]
        self._numbered_at = [at + CRC_BYTES for at in heads]
        self._numbered = [view[at + CRC_BYTES : at + layout.slot_size] for at in heads]
        self._checksums = [view[at : at + CRC_BYTES].cast("I") for at in heads]
        self._word = view[WORD_AT : WORD_AT + 4].cast("I")
        self._seen = bytearray(len(self._image) + 1)  # one more: a file that has grown is not ours either
        self._pinned_seen = ctypes.c_char.from_buffer(self._seen)
        self._lock_fd = -1
        if first is not None:
            self._number = self._pack(layout.values_of(first))
        self._own(*_create(self.path, self._image))
        _writers.add(self)

    def _own(self, futex: FutexWord, lock_fd: int) -> None:
        """Write into the open file ``lock_fd`` from now on."""
        info, start = os.fstat(lock_fd), self._layout.slots_at
        self._identity = (info.st_dev, info.st_ino)
        self._look = bound_read(lock_fd, ctypes.addressof(self._pinned_seen), len(self._seen), 0)
        address = ctypes.addressof(self._pinned) + start
        self._publish = bound_write(lock_fd, address, WORD_AT + 4 - start, start)
        self._futex, self._lock_fd = futex, lock_fd

    def write(self, record: R) -> None:
        """Publish ``record`` and :attr:`extra`.  A few microseconds; readers see it at their next look.

        Raises:
            LedgerError: A field is no 64-bit int, the writer is closed, or the file cannot be written.  The last record
                stands.
        """
        try:
            values = self._layout.values_of(record)
        except AttributeError as error:
            raise LedgerError(f"a record has a bad field: {error}", field=str(self.path)) from error
        self.put(*values)

    def put(self, *values: int) -> None:
        """:meth:`write` by the record's fields in their order, for a step path that has no time to make a record."""
        if self._lock_fd < 0:
            raise LedgerError("this process is not its writer", field=str(self.path))
        number = self._pack(values)
        try:
            if self.extra:
                self._image[EXTRA_AT:] = self.extra
                os.pwrite(self._lock_fd, self.extra, EXTRA_AT)
            self._publish()
        except OSError as error:
            raise LedgerError(f"cannot be written: {error.strerror}", field=str(self.path)) from error
        self._number = number

    def _pack(self, values: Sequence[int]) -> int:
        """Put the next record into our copy of the file; its number.

        Raises:
            LedgerError: As :meth:`write`.
        """
        number = (self._number + 1) & 0xFFFFFFFF if self._number else self._first
        if number == 0:
            number = 2  # 0 means "none yet", and 1 would be the slot that 0xFFFFFFFF used
        slot = number & 1
        try:
            self._layout.numbered.pack_into(self._image, self._numbered_at[slot], number, *values)
        except (struct.error, TypeError) as error:
            if self._lock_fd >= 0:
                # Our copy has half a record now and the file has none of it: they have to agree.
                length, at = self._layout.numbered.size, self._numbered_at[slot]
                self._numbered[slot][:] = os.pread(self._lock_fd, length, at).ljust(length, b"\0")
            raise LedgerError(f"a record has a bad field: {error}", field=str(self.path)) from error
        self._checksums[slot][0] = zlib.crc32(self._numbered[slot])
        self._word[0] = number
        return number

    def wake(self) -> None:
        """Wake everybody in :meth:`RecordReader.wait` on this file."""
        if self._lock_fd >= 0:
            self._futex.wake()

    def intact(self) -> bool:
        """Is the file still what this writer made it?  False: somebody else wrote into it or cut it off."""
        image = self._image
        return self._lock_fd >= 0 and self._look() == len(image) and self._seen.startswith(image)

    def named(self) -> bool:
        """Is the file still what its name leads to, and ours alone?  False: it was deleted, moved away, opened to others, or lies
        under another."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (there.st_dev, there.st_ino, there.st_mode) == (*self._identity, MODE)

    def replaced(self) -> bool:
        """Does another live process write the file that our name leads to?  Where nobody can look, nobody else is there either."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.path.name, flags, dir_fd=private_dir(self.path.parent).fd())
        except (OSError, LedgerError):
            return False
        try:
            there = os.fstat(descriptor)
            return (there.st_dev, there.st_ino) != self._identity and is_locked(descriptor)
        finally:
            os.close(descriptor)

    def mend(self) -> bool:
        """Put the file and its name back as this writer left them and wake its readers; True if anybody had changed either.

        The thread that writes.

        Raises:
            LedgerError: It cannot be put back (a full disk, another live writer under the name).  Readers that hold the
                file go on with it.
        """
        if self._lock_fd < 0:
            return False
        touched = not self.intact() or os.fstat(self._lock_fd).st_mode != MODE
        if touched:
            try:
                os.fchmod(self._lock_fd, stat.S_IMODE(MODE))
                os.ftruncate(self._lock_fd, len(self._image))
                os.pwrite(self._lock_fd, self._image, 0)
            except OSError as error:
                raise LedgerError(f"cannot be mended: {error.strerror}", field=str(self.path)) from error
            self.wake()
        lost = not self.named()
        if lost:
            old_fd, old_futex = self._lock_fd, self._futex
            self._own(*_create(self.path, self._image))
            os.close(old_fd)  # without its lock, readers leave it for the new one
            old_futex.wake()
            old_futex.close()
        return touched or lost

    def close(self) -> None:
        """Give up the file and wake its waiters.  The last record stays readable; ``alive`` is false."""
        if self._lock_fd < 0:
            return
        descriptor, self._lock_fd = self._lock_fd, -1
        os.close(descriptor)
        self._futex.wake()
        self._futex.close()
        _writers.discard(self)

    def _abandon(self) -> None:
        descriptor, self._lock_fd = self._lock_fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> RecordWriter[R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(path: Path, image: bytearray) -> tuple[FutexWord, int]:
    """Become the writer of ``path``, which says ``image`` then: ``(its futex, descriptor that holds the lock)``.

    The lock of an existing file is taken first, and held until ours is in its place: of two
    processes that start together one is refused.
    """
    directory = private_dir(path.parent)  # held: its descriptor is closed with it
    folder, name = directory.make(), path.name
    for _ in range(100):
        old = -1
        temporary = f".{name}.{secrets.token_hex(6)}"
        try:
            try:
                old = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            except FileNotFoundError:
                pass
            if old >= 0:  # whosever it is: nothing of it is read
                if not take_lock(old, SUCCESSOR) or is_locked(old):
                    raise WriterLives(
                        "another live process writes it",
                        field=str(path),
                        fix="one engine of a role and one node agent per device",
                    )
                if not _same_file(old, name, folder):
                    continue  # replaced between open and lock
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            lock_fd = os.open(temporary, flags, stat.S_IMODE(MODE), dir_fd=folder)
            try:
                take_lock(lock_fd)
                # Blocks are claimed now: a full disk is an error here, not in a later write.
                os.posix_fallocate(lock_fd, 0, len(image))
                os.pwrite(lock_fd, image, 0)
                # Mapped through its own open file: a mapping holds the open file it was made from, and that must not
                # keep the lock alive in a forked child.
                map_fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
                try:
                    futex = FutexWord(map_fd, WORD_AT)
                finally:
                    os.close(map_fd)
                if old >= 0:
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                    _wake_waiters_of(old)
                else:
                    os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                    os.unlink(temporary, dir_fd=folder)
            except FileExistsError:  # another process was first; look at its lock
                os.close(lock_fd)
                os.unlink(temporary, dir_fd=folder)
                continue
            except BaseException:
                os.close(lock_fd)
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            return futex, lock_fd
        except OSError as error:
            raise LedgerError(f"cannot be made: {error.strerror}", field=str(path)) from error
        finally:
            if old >= 0:
                os.close(old)
    raise LedgerError("is being replaced all the time", field=str(path))


def _same_file(descriptor: int, name: str, folder: int) -> bool:
    try:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _wake_waiters_of(descriptor: int) -> None:
    """Those who sleep on a file that was just replaced."""
    if os.fstat(descriptor).st_size >= EXTRA_AT:
        with FutexWord(descriptor, WORD_AT) as word:
            word.wake()


class RecordReader(Generic[R]):
    """Looks at a shared file, which may not exist yet, or may get a new writer at any time.

    ``extra_bytes=None`` accepts whatever size the file has.  Cheap to make; one per thread.
    """

    def __init__(self, path: Path | str, record_type: type[R], extra_bytes: int | None = 0) -> None:
        self.path = Path(path)
        self._path_text = str(path)
        self._folder, self._name = private_dir(self.path.parent), self.path.name
        self._record_type = record_type
        self._layout = layout_of(record_type)
        self._want_extra = extra_bytes
        self._extra_bytes = 0
        self._fd = -1
        self._identity = (0, 0)
        self._futex: FutexWord | None = None
        self.incarnation = 0

    def read(self) -> R | None:
        """The newest record, or None where there is no file or nothing was written yet.

        Raises:
            LedgerError: Torn beyond repair or written by a stranger, truncated, of another version, damaged.
        """
        if not self._refresh():
            return None
        layout = self._layout
        length = WORD_AT + 4 - layout.slots_at
        for _ in range(_READ_RETRIES):
            data = os.pread(self._fd, length, layout.slots_at)
            if len(data) < length:
                raise LedgerError("is truncated", field=self._path_text)
            number = U32.unpack_from(data, length - 4)[0]
            if number == 0:
                return None
            at = (number & 1) * layout.slot_bytes
            numbered = data[at + CRC_BYTES : at + layout.slot_size]
            slot_number, *values = layout.numbered.unpack(numbered)
            if slot_number == number and U32.unpack_from(data, at)[0] == zlib.crc32(numbered):
                return self._record_type(**dict(zip(layout.names, values, strict=True)))
        raise LedgerError(
            "record is torn, or written by a process that does not own it", field=self._path_text
        )

    def alive(self) -> bool:
        """Does a process live that writes this file?  Takes no lock itself."""
        return self._refresh() and is_locked(self._fd)

    def may_live(self) -> bool:
        """:meth:`alive`; of a file that cannot be read :meth:`is_written`."""
        try:
            return self.alive()
        except LedgerError:
            return self.is_written()

    def is_written(self) -> bool:
        """:meth:`alive`, of a file that cannot be read, too: of another version, damaged, open to others.

        Where even that cannot be asked (a file that we may not open) it counts as written.
        """
        if self._fd >= 0 and is_locked(self._fd):
            return True
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._name, flags, dir_fd=self._folder.fd())
        except FileNotFoundError:
            return False
        except (OSError, LedgerError):
            return True
        try:
            return is_locked(descriptor)
        finally:
            os.close(descriptor)

    def word(self) -> int:
        """Number of the newest record; changes with every write.  0: no file, or nothing written."""
        if not self._refresh():
            return 0
        data = os.pread(self._fd, 4, WORD_AT)
        return U32.unpack(data)[0] if len(data) == 4 else 0

    def wait(self, word: int, timeout_s: float, missing_s: float = _MISSING_FILE_WAIT_S) -> bool:
        """Sleep in the kernel until the word is no longer ``word`` or the writer calls ``wake``.

        Args:
            missing_s: Where there is no file there is no futex either: look again so often.

        Returns:
            True when woken or changed (also without reason: look again), False when ``timeout_s`` is over.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            if self.word() != word:
                return True
            if left_s <= 0:
                return False
            if self._fd < 0:
                time.sleep(min(left_s, missing_s))
                continue
            if self._futex is None:
                self._futex = FutexWord(self._fd, WORD_AT)
            return futex_wait(self._futex.address, word, left_s)

    @property
    def extra_bytes(self) -> int:
        """How many bytes are behind the record; 0 where there is no file."""
        return self._extra_bytes if self._refresh() else 0

    @property
    def extra(self) -> bytes:
        """A copy of the bytes behind the record; empty where there is no file."""
        if not self._refresh():
            return b""
        data = os.pread(self._fd, self._extra_bytes, EXTRA_AT)
        if len(data) != self._extra_bytes:
            raise LedgerError("is truncated", field=self._path_text)
        return data

    def close(self) -> None:
        if self._futex is not None:
            self._futex.close()
            self._futex = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._identity = (0, 0)

    def _refresh(self) -> bool:
        """Hold the file whose writer lives, or else the one that is at the path now; False where there is none.

        The inode we hold open cannot be given out again, so comparing it is enough.
        """
        there, missing = None, False
        try:
            there = os.stat(self._path_text, follow_symlinks=False)  # a hint: whose it is, `_open` looks at
        except FileNotFoundError:
            missing = True
        except OSError:
            pass  # `_open` says why
        if there is None or (there.st_dev, there.st_ino) != self._identity:
            if self._fd < 0 or not is_locked(self._fd):
                self.close()
                return not missing and self._open()
            there = os.fstat(self._fd)  # its name is gone, its writer is not
        if there.st_size != EXTRA_AT + self._extra_bytes:
            raise LedgerError("changed its size: truncated or overwritten", field=self._path_text)
        return True

    def others(self) -> RecordReader[R] | None:
        """Of two live writers, which only deleted files allow: a reader of the one under the name, where ours is another.

        Nobody can tell which of them is meant, so who counts what they hold has to count both.
        """
        if self._fd < 0 or not self._refresh():
            return None
        try:
            there = os.stat(self._path_text, follow_symlinks=False)
        except OSError:
            return None
        if (there.st_dev, there.st_ino) == self._identity:
            return None
        other = RecordReader(self.path, self._record_type, self._want_extra)
        return other if other.alive() else None

    def _open(self) -> bool:
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._name, flags, dir_fd=self._folder.fd())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise LedgerError(f"cannot be read: {error.strerror}", field=self._path_text) from error
        try:
            info = require_own(descriptor, self.path)
            self._extra_bytes, self.incarnation = self._layout.check_header(
                os.pread(descriptor, HEADER_BYTES, 0), info.st_size, self.path, self._want_extra
            )
        except BaseException:
            os.close(descriptor)
            raise
        self._fd = descriptor
        self._identity = (info.st_dev, info.st_ino)
        return True

    def __del__(self) -> None:
        try:
            self.close()
        except (AttributeError, OSError):  # half-built, or the interpreter is going down
            pass
