"""Who reads which version, and until when: a lease costs the same however many there are.

:class:`LeaseBook` is the rule, pure: time is an argument.  :class:`LeaseLog` is the book of one run in a folder that
several processes may have open: each lease is one line at the end of a file, and everybody reads the lines that he has not
seen.  The file is written anew, with what still counts, once most of it does not.

A lease is not synced to the disk: it outlives its process, not the machine, and a reader that loses it may at worst have to
take a newer version.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import heapq
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rose.errors import CapacityError, ConfigError, RequestError
from rose.lineage import WeightVersion

MAX_LEASE_S = 3600.0
MAX_LEASES = 1 << 20
"""Of one book: what a caller can make us keep in memory, about 300 MB.  No limit of a fleet."""
_SPARE_ROWS = 1024


class LeaseBook:
    """Versions that are held.  Every call takes constant time, but for logarithms.

    Args:
        most: Holders at a time.
    """

    def __init__(self, most: int = MAX_LEASES) -> None:
        self._most = most
        self._held: dict[tuple[str, str], tuple[WeightVersion, float]] = {}
        self._counts: dict[str, dict[WeightVersion, int]] = {}
        self._due: list[tuple[float, str, str]] = []
        """By expiry; what was renewed since has a second entry, and this one is passed over."""
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self, run_id: str, holder: str, version: WeightVersion | None, until_s: float, now_s: float
    ) -> None:
        """``holder`` holds ``version`` until ``until_s``, instead of what it held before; None lets go.

        Raises:
            CapacityError: As many as fit are held.
        """
        self._expire(now_s)
        key = (run_id, holder)
        if version is None:
            self._drop(key)
            return
        if key not in self._held and len(self._held) >= self._most:
            raise CapacityError(f"{self._most} leases are held", field="holder")
        self._drop(key)
        if until_s <= now_s:
            return
        self._held[key] = (version, until_s)
        counts = self._counts.setdefault(run_id, {})
        counts[version] = counts.get(version, 0) + 1
        heapq.heappush(self._due, (until_s, run_id, holder))
        if len(self._due) > 2 * len(self._held) + _SPARE_ROWS:
            self._due = [(until, *name) for name, (_, until) in self._held.items()]
            heapq.heapify(self._due)

    def held(self, run_id: str, now_s: float) -> list[WeightVersion]:
        """Versions of a run that somebody holds, sorted."""
        self._expire(now_s)
        return sorted(self._counts.get(run_id, ()))

    def rows(self) -> Iterator[tuple[str, str, WeightVersion, float]]:
        """Run, holder, version, expiry of all that are held."""
        for (run_id, holder), (version, until_s) in self._held.items():
            yield run_id, holder, version, until_s

    def _expire(self, now_s: float) -> None:
        went_back = now_s < self._now_s - MAX_LEASE_S
        self._now_s = now_s
        while self._due and self._due[0][0] <= now_s:
            until_s, run_id, holder = heapq.heappop(self._due)
            if self._held.get((run_id, holder), (None, 0.0))[1] == until_s:
                self._drop((run_id, holder))
        if went_back:  # or a clock that was wrong once would hold objects for ever
            for key in [key for key, (_, until) in self._held.items() if until > now_s + 2 * MAX_LEASE_S]:
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        found = self._held.pop(key, None)
        if found is None:
            return
        counts = self._counts[key[0]]
        counts[found[0]] -= 1
        if not counts[found[0]]:
            del counts[found[0]]
        if not counts:
            del self._counts[key[0]]


class LeaseLog:
    """The leases of one run in ``folder``, which is there.  Not thread-safe; safe for several processes.

    Times are of the wall clock: other processes read them.
    """

    def __init__(self, folder: Path, most: int = MAX_LEASES) -> None:
        self._path, self._lock_path = folder / "leases.log", folder / "leases.lock"
        self._most = most
        self._forget()

    def hold(self, holder: str, version: WeightVersion | None, until_s: float, now_s: float) -> None:
        """See :meth:`LeaseBook.hold`.  Raises CapacityError (507) when the disk is full."""
        with self._file(now_s) as descriptor:
            self._book.hold("", holder, version, until_s, now_s)
            # A writer that was killed may have left half a line.
            line = (b"\n" if self._torn else b"") + _line(holder, version, until_s)
            self._torn = True
            if os.write(descriptor, line) != len(line):
                raise CapacityError("cannot be written: the disk is full", status=507, field=self._path.name)
            self._torn = False
            self._offset += len(line)
            self._num_rows += 1
            if self._num_rows > 2 * len(self._book) + _SPARE_ROWS:
                self._write_anew()

    def held(self, now_s: float) -> list[WeightVersion]:
        """See :meth:`LeaseBook.held`."""
        with self._file(now_s):
            return self._book.held("", now_s)

    @contextlib.contextmanager
    def _file(self, now_s: float) -> Iterator[int]:
        """The log, open and ours alone, and the book as it says."""
        try:
            with self._lock_path.open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    self._follow(descriptor, now_s)
                    yield descriptor
                finally:
                    os.close(descriptor)
        except OSError as error:
            self._forget()
            raise CapacityError(
                f"cannot be written: {error.strerror}", status=507, field=self._path.name
            ) from error

    def _forget(self) -> None:
        self._book = LeaseBook(self._most)
        self._inode, self._offset, self._num_rows = -1, 0, 0
        self._torn = False

    def _follow(self, descriptor: int, now_s: float) -> None:
        """Read what others have written since."""
        found = os.fstat(descriptor)
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._forget()
            self._inode = found.st_ino
        data = b""
        while self._offset + len(data) < found.st_size:
            more = os.pread(descriptor, found.st_size - self._offset - len(data), self._offset + len(data))
            if not more:
                break
            data += more
        if not data:
            return
        lines = data.split(b"\n")
        self._offset += len(data)
        self._torn = bool(lines.pop())
        for line in lines:
            self._num_rows += 1
            try:
                holder, text, until_s = msgspec.json.decode(line, type=tuple[str, str | None, float])
                version = None if text is None else WeightVersion.parse(text)
                # A lease from the far future is a clock that went back.
                if until_s <= now_s + 2 * MAX_LEASE_S:
                    self._book.hold("", holder, version, until_s, now_s)
            except (msgspec.DecodeError, RequestError, CapacityError):
                continue

    def _write_anew(self) -> None:
        temporary = self._path.with_suffix(".new")
        rows = [_line(holder, version, until_s) for _, holder, version, until_s in self._book.rows()]
        temporary.write_bytes(b"".join(rows))
        os.replace(temporary, self._path)
        found = self._path.stat()
        self._inode, self._offset, self._num_rows, self._torn = found.st_ino, found.st_size, len(rows), False


def holder_name(directory: Path) -> str:
    """What a directory's subscribers are called, all of them: a restarted one replaces the lease of the one before.

    Drawn once and kept in the directory, with its place: neither another machine's nor a copied directory has it.
    """
    path = directory / "holder"
    try:
        if not path.exists():
            path.write_text(secrets.token_hex(16))
        text = path.read_text()[:64]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be used: {error}", field="directory") from error
    place = f"{text} {socket.gethostname()} {directory}"
    return hashlib.blake2b(place.encode(), digest_size=12).hexdigest()


def _line(holder: str, version: WeightVersion | None, until_s: float) -> bytes:
    return msgspec.json.encode((holder, None if version is None else str(version), until_s)) + b"\n"
