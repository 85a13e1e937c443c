"""A store of weights in a folder; the rules that it keeps are those of :mod:`rose.weights.store`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rose.errors import CapacityError, ConfigError, Conflict, NotFound, RequestError, SectionCorrupt, TooLarge
from rose.lineage import WeightVersion
from rose.weights import manifest
from rose.weights.leases import MAX_LEASE_S, LeaseLog
from rose.weights.manifest import MAX_OBJECT_BYTES, Head, check_key, check_run_id
from rose.weights.store import (
    MAX_HEAD_BYTES,
    Buffer,
    ObjectStat,
    WakesReaders,
    check_lease,
    check_move,
    check_prefix,
    check_range,
)

MAX_HEADLESS_RUNS = 1024
"""Runs that have leases and no head: a lease may come before the first head, and whoever may read may name any run."""


class Upload:
    """An object on its way into a :class:`FileStore`: ``write`` pieces, ``commit``, and in any case ``discard``.

    The object appears, whole, in ``commit`` and nowhere else.
    """

    def __init__(
        self, store: FileStore, key: str, target: Path, temporary: Path, nbytes: int, durable: bool
    ) -> None:
        self._store, self._key, self._target, self._temporary = store, key, target, temporary
        self.path = temporary
        self._nbytes, self._durable = nbytes, durable
        self._committed = self._discarded = False
        self._file: BinaryIO | None = None

    def write(self, data: Buffer) -> None:
        """Append a piece, which readers of ``path`` see at once; raises CapacityError when the disk is full."""
        with self._disk():
            if self._file is None:
                self._file = self._temporary.open("xb")
            self._file.write(data)
            self._file.flush()

    def commit(self) -> None:
        """Raises Conflict when the key exists by now, RequestError when the size is not the announced one."""
        self.write(b"")
        assert self._file is not None
        with self._disk():
            written = self._file.tell()
            if written != self._nbytes:
                raise RequestError(f"{written} bytes came, {self._nbytes} were announced", field=self._key)
            if self._durable:
                os.fsync(self._file.fileno())
            _link(self._temporary, self._target)
            self._committed = True
            if self._durable:
                _sync_folder(self._target.parent)

    def discard(self) -> None:
        """Drop the temporary file, and the space taken unless committed.  Safe to call twice."""
        if self._discarded:
            return
        self._discarded = True
        if self._file is not None:
            self._file.close()
            self._temporary.unlink(missing_ok=True)
        if not self._committed:
            self._store.forget_bytes(self._nbytes)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise Conflict("exists", field=self._key) from None
        except NotADirectoryError:
            raise Conflict("a part of this key is itself an object", field=self._key) from None
        except OSError as error:
            raise CapacityError(
                f"cannot be written: {error.strerror}", status=507, field=self._key
            ) from error


class FileStore(WakesReaders):
    """A store in a folder, safe for several processes on one machine or one POSIX file system.

    Args:
        directory: Created if missing.  ``objects/`` mirrors the keys, ``runs/R/`` holds head and leases
            (:mod:`rose.weights.leases`).
        max_object_bytes: Limit of one object.
        max_total_bytes: Limit of all objects together; None for the disk's own.
        durable: fsync files and folders.  False only where a restart of the machine may lose them (tmpfs).
    """

    _look_s = 0.05

    def __init__(
        self,
        directory: Path | str,
        *,
        max_object_bytes: int = MAX_OBJECT_BYTES,
        max_total_bytes: int | None = None,
        durable: bool = True,
    ) -> None:
        super().__init__()
        self.directory = Path(directory).resolve()
        self.max_object_bytes = max_object_bytes
        self._max_total_bytes = max_total_bytes
        self._durable = durable
        self._objects = self.directory / "objects"
        self._runs = self.directory / "runs"
        self._temporary = self.directory / "tmp"
        for folder in (self._objects, self._runs, self._temporary):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{folder} cannot be made: {error.strerror}", field="directory") from error
        self._leases: dict[str, LeaseLog] = {}
        self._lease_lock = threading.Lock()
        self._total_bytes = 0
        for path in self.paths():
            with contextlib.suppress(FileNotFoundError):  # another process deletes
                self._total_bytes += path.stat().st_size

    @property
    def total_bytes(self) -> int:
        """Bytes of objects, as counted by this process."""
        return self._total_bytes

    def remove_temporaries(self) -> None:
        """Drop what writers that died left behind.  Only for the sole owner of the folder (the relay)."""
        for path in self._temporary.iterdir():
            path.unlink(missing_ok=True)

    # -- objects

    def paths(self) -> Iterator[Path]:
        """Of all objects."""
        return _files_below(self._objects)

    def key_of(self, path: Path) -> str:
        """Of the object at ``path``; the other way round of :meth:`path_of`."""
        return path.relative_to(self._objects).as_posix()

    def path_of(self, key: str) -> Path:
        """Where ``key`` lives; raises NotFound unless it is a plain file there."""
        path = self._objects / check_key(key)
        if not path.is_file() or path.is_symlink():
            raise NotFound("no such object", field=key)
        return path

    def put_new(self, key: str, data: Buffer) -> None:
        upload = self.begin(key, len(data))
        try:
            upload.write(data)
            upload.commit()
        finally:
            upload.discard()

    def begin(self, key: str, nbytes: int) -> Upload:
        """Start writing an object of ``nbytes`` in pieces.  The caller ends it with ``discard``, always."""
        target = self._objects / check_key(key)
        if nbytes > self.max_object_bytes:
            raise TooLarge(f"{nbytes} bytes, at most {self.max_object_bytes}", field=key)
        if target.exists():
            raise Conflict("exists", field=key)
        with self._changed:
            total = self._total_bytes + nbytes
            if self._max_total_bytes is not None and total > self._max_total_bytes:
                raise CapacityError(
                    f"store is full: {total} bytes, at most {self._max_total_bytes}", status=507
                )
            self._total_bytes = total
        return Upload(self, key, target, self._temporary / secrets.token_hex(12), nbytes, self._durable)

    def forget_bytes(self, nbytes: int) -> None:
        """Take ``nbytes`` out of the count of stored bytes."""
        with self._changed:
            self._total_bytes -= nbytes

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        with self.open(key) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > max_bytes:
                raise TooLarge(f"{nbytes} bytes, at most {max_bytes}", field=key)
            return file.read()

    def get_range(self, key: str, offset: int, nbytes: int) -> bytes:
        with self.open(key) as file:
            check_range(key, offset, nbytes, os.fstat(file.fileno()).st_size)
            file.seek(offset)
            return file.read(nbytes)

    def open(self, key: str) -> BinaryIO:
        """For reading, for as long as the caller likes; raises NotFound."""
        try:
            return self.path_of(key).open("rb")
        except FileNotFoundError:  # deleted in between
            raise NotFound("no such object", field=key) from None

    def stat(self, key: str) -> ObjectStat:
        return ObjectStat(nbytes=self.path_of(key).stat().st_size)

    def distrust(self, key: str) -> None:
        check_key(key)  # there is one copy

    def list(self, prefix: str) -> list[str]:
        root = self._objects / check_prefix(prefix)[:-1]
        return sorted(self.key_of(path) for path in _files_below(root) if not path.is_symlink())

    def delete(self, key: str) -> bool:
        try:
            path = self.path_of(key)
            nbytes = path.stat().st_size
            path.unlink()
        except (NotFound, FileNotFoundError):
            return False
        self.forget_bytes(nbytes)
        with contextlib.suppress(OSError):  # an empty version folder goes too; one in use stays
            path.parent.rmdir()
        return True

    # -- heads

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        folder = self._run_folder(head.run_id)
        with self._changed, _locked(folder / "lock"):
            if check_move(self.believed_head(head.run_id), head, expected):
                self._replace(folder / "head.json", manifest.encode(head))
                self._changed.notify_all()

    def get_head(self, run_id: str) -> Head | None:
        path = self._runs / check_run_id(run_id) / "head.json"
        try:
            with path.open("rb") as file:
                data = file.read(MAX_HEAD_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return manifest.decode_head(data, run_id)

    def runs(self) -> list[str]:
        return sorted(path.parent.name for path in self._runs.glob("*/head.json"))

    def believed_head(self, run_id: str) -> Head | None:
        """:meth:`get_head`, and None for one that is not believed or, by who knows signatures, cannot be read."""
        try:
            return self.believed(self.get_head(run_id))
        except SectionCorrupt:
            if self.believes is None:
                raise
            return None

    # -- leases

    def lease(self, run_id: str, holder: str, version: WeightVersion | None, ttl_s: float) -> None:
        check_lease(run_id, holder, ttl_s)
        now_s = time.time()
        with self._lease_lock:
            if not (self._runs / run_id).is_dir():
                if version is None:
                    return
                self._leases.pop(run_id, None)  # another process made room
                self._check_headless(run_id, now_s)
            self._lease_log(run_id).hold(holder, version, now_s + ttl_s, now_s)

    def leases(self, run_id: str) -> list[WeightVersion]:
        if not (self._runs / check_run_id(run_id)).is_dir():
            return []
        with self._lease_lock:
            return self._lease_log(run_id).held(time.time())

    def _check_headless(self, run_id: str, now_s: float) -> None:
        """Raises CapacityError where no new run may be named by a lease."""
        headless = [path for path in self._runs.iterdir() if not (path / "head.json").exists()]
        if len(headless) < MAX_HEADLESS_RUNS:
            return
        over = [path for path in headless if _is_over(path, now_s)]
        for path in over:
            self._leases.pop(path.name, None)
            for name in ("leases.log", "leases.lock"):
                (path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # of a run that a publisher is about to begin
                path.rmdir()
        if len(headless) - len(over) >= MAX_HEADLESS_RUNS:
            raise CapacityError(
                f"{run_id!r} has no head yet, nor have {MAX_HEADLESS_RUNS} other runs with leases",
                status=429,
                field="run_id",
            )

    def _lease_log(self, run_id: str) -> LeaseLog:
        log = self._leases.get(run_id)
        if log is None:
            log = self._leases[run_id] = LeaseLog(self._run_folder(run_id))
        return log

    def _run_folder(self, run_id: str) -> Path:
        folder = self._runs / check_run_id(run_id)
        folder.mkdir(exist_ok=True)
        return folder

    def _replace(self, path: Path, data: bytes) -> None:
        temporary = self._temporary / secrets.token_hex(12)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                if self._durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            if self._durable:
                _sync_folder(path.parent)
        except OSError as error:
            raise CapacityError(
                f"cannot be written: {error.strerror}", status=507, field=path.name
            ) from error
        finally:
            temporary.unlink(missing_ok=True)


def _is_over(folder: Path, now_s: float) -> bool:
    """Whether the last lease of a run was written so long ago that none can be held any more."""
    try:
        return (folder / "leases.log").stat().st_mtime < now_s - MAX_LEASE_S
    except OSError:
        return False


def _files_below(folder: Path) -> Iterator[Path]:
    """Also while another process deletes: a folder that goes meanwhile has none."""
    for parent, _, names in os.walk(folder):
        yield from (path for path in (Path(parent, name) for name in names) if path.is_file())


def _link(temporary: Path, target: Path) -> None:
    """Atomic, and fails if the key exists: a rename would replace it."""
    for attempt in range(3):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError from None
        try:
            os.link(temporary, target)
            return
        except FileNotFoundError:  # a delete took the emptied folder away in between
            if attempt == 2:
                raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
