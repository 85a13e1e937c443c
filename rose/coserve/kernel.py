"""Three services of the Linux kernel that the ledger stands on: futexes, open-file locks, and writes that keep the GIL.

A *futex* is a word of a shared mapping that a process can sleep on until another wakes it.  An *open-file
lock* (``F_OFD``) belongs to the open file, ends with its last descriptor, and can be queried without being
taken.

``os.pwrite`` and ``os.pread`` release the interpreter lock around the call.  On serving's step path another thread may then take it, and
the engine thread gets it back up to one switch interval (5 ms) later.  :func:`bound_write`, :func:`bound_read` and
:meth:`FutexWord.wake` keep the lock.  They are short: the first two copy a few bytes of a page that is in memory, the third only makes
waiting processes runnable.  Their arguments are built once, and they do not read errno (a write that fails is repeated with
``os.pwrite``, which reports why).  Building arguments and reading errno were most of a call's cost between two steps, with cold caches.

Standard library only; x86-64 and arm64.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Callable
from typing import Any

from rose.errors import LedgerError

_libc = ctypes.CDLL(None, use_errno=True)
_holding_gil = ctypes.PyDLL(None)
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the waiters are other processes
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


_int, _size = ctypes.c_int, ctypes.c_size_t
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, _size, _int, _int, _int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, _size]
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_int,
]
_holding_gil.syscall.restype = ctypes.c_long
_holding_gil.pwrite.restype = ctypes.c_ssize_t
_holding_gil.pread.restype = ctypes.c_ssize_t


def bound_write(descriptor: int, address: int, length: int, offset: int) -> Callable[[], None]:
    """A call that copies ``length`` bytes at ``address`` into the file at ``offset`` and keeps the interpreter lock.

    The call raises OSError when not all of it was written.
    """
    pwrite = _holding_gil.pwrite
    arguments = _arguments(descriptor, address, length, offset)

    def write() -> None:
        if (
            pwrite(*arguments) != length
            and os.pwrite(descriptor, ctypes.string_at(address, length), offset) != length
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return write


def bound_read(descriptor: int, address: int, length: int, offset: int) -> Callable[[], int]:
    """A call that copies at most ``length`` bytes of the file at ``offset`` to ``address`` and keeps the interpreter lock.

    It answers how many there were; -1 is an error.  Only for files on tmpfs: on a disk it may wait, and everybody with it.
    """
    pread = _holding_gil.pread
    arguments = _arguments(descriptor, address, length, offset)
    return lambda: pread(*arguments)


def _arguments(descriptor: int, address: int, length: int, offset: int) -> tuple[Any, ...]:
    """Of pread and pwrite, as a call takes them without making anything."""
    return (
        _int.from_param(descriptor),
        ctypes.c_void_p.from_param(address),
        _size.from_param(length),
        ctypes.c_long.from_param(offset),
    )


def futex_wait(address: int, word: int, timeout_s: float) -> bool:
    """Sleep while the word at ``address`` is ``word``; other threads run meanwhile.

    Returns:
        True: woken, interrupted, or the word differs.  False: the time is over.
    """
    whole = int(timeout_s)
    limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
    result = _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAIT, word, ctypes.byref(limit), None, 0)
    return not (result == -1 and ctypes.get_errno() == errno.ETIMEDOUT)


class FutexWord:
    """A read-only mapping of a file's first page, for the address of the word at ``offset``."""

    def __init__(self, descriptor: int, offset: int) -> None:
        address = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise LedgerError(f"cannot be mapped: {os.strerror(ctypes.get_errno())}")
        self._start: int | None = address
        self.address: int = address + offset
        self._wake = _holding_gil.syscall
        self._arguments = (
            ctypes.c_long.from_param(_SYS_FUTEX),
            ctypes.c_void_p.from_param(self.address),
            _int.from_param(_FUTEX_WAKE),
            _int.from_param(_EVERYBODY),
            ctypes.c_void_p.from_param(0),  # no time-out; None would not be a C argument
            ctypes.c_void_p.from_param(0),
            _int.from_param(0),
        )

    def wake(self) -> None:
        """Wake everybody who sleeps on the word; nothing happens where the file has been cut off there, or after ``close``."""
        self._wake(*self._arguments)

    def close(self) -> None:
        if self._start is not None:
            _libc.munmap(self._start, mmap.PAGESIZE)
            self._start = None

    def __del__(self) -> None:
        if getattr(self, "_start", None) is not None:
            self.close()

    def __enter__(self) -> FutexWord:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_FLOCK = struct.Struct("@hhqqi4x")  # struct flock, 64-bit Linux: type, whence, start, length, pid (0: OFD)


WRITER, SUCCESSOR = 0, 1
"""The two locked bytes of a file: ``WRITER`` is held by the process that writes it, ``SUCCESSOR`` by one that is about to replace it.

They are two bytes so that a reader who asks whether the writer lives does not see its successor's lock instead, and take a dead
process's last record for current.
"""


def take_lock(descriptor: int, kind: int = WRITER) -> bool:
    """Take the exclusive lock of the open file; False if another open file has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, kind, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock_holders(path: str | os.PathLike[str]) -> list[int]:
    """Processes that hold the writer's lock of a file, as far as this one may look (``/proc/PID/fdinfo``).  For a message: it looks at every
    process.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        wanted = os.stat(path)
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                for number in os.listdir(f"/proc/{pid}/fd"):
                    there = os.stat(f"/proc/{pid}/fd/{number}")
                    if (there.st_dev, there.st_ino) != (wanted.st_dev, wanted.st_ino):
                        continue
                    with open(f"/proc/{pid}/fdinfo/{number}") as text:
                        if any(line.startswith("lock:") and " WRITE " in line for line in text):
                            found.append(int(pid))
                            break
    return sorted(found)


def is_locked(descriptor: int) -> bool:
    """Does another open file hold the writer's lock?  Takes nothing."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, WRITER, 1, 0))
    return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK
