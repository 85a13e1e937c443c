"""Shared memory that killed programs leave in ``/dev/shm``, and who may remove it.

Python's multiprocessing and vLLM name segments there and unlink them when they end.  A tree of processes that is killed
cannot, and the memory stays until somebody removes the names.  Two ways to know what may go:

- :class:`EngineSegments`: what the processes of an engine were seen to map while it lived, written down so that the agent after
  a killed one knows it too.  For a machine that others use as well: the node agent.
- :class:`SharedMemorySweep`: what appeared inside a ``with`` block.  For a run that starts every program itself.

Both remove a file only if :func:`remove_unused` allows it.  It must be a regular file of our user, its name must match
:data:`NAME`, it must be the file that was seen (same inode), and no process that we may inspect may have it mapped or open.
Removing a file deletes its name; a process that still has it keeps its memory.

A segment that was made after the last look before a kill is not known, and stays.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rose.errors import LedgerError
from rose.private_dir import require_own

SHARED_MEMORY = Path("/dev/shm")
MAX_SEGMENTS = 4096
_MAX_FILE_BYTES = 1 << 20
NAME = re.compile(r"(psm_|sem\.mp-|vllm_dist_)[^/\0\n]{1,200}")
"""What Python's multiprocessing names segments and semaphores, and vLLM the buffers of its CPU ranks."""
_OTHERS_MAY_OPEN = 0o066
_TRY_AGAIN_S = 10.0

logger = logging.getLogger("rose.shared_memory")


def segments(folder: Path = SHARED_MEMORY) -> dict[str, int]:
    """Name and inode of every segment of ours."""
    found: dict[str, int] = {}
    try:
        names = [name for name in os.listdir(folder) if NAME.fullmatch(name)]
    except OSError:
        return found  # no such folder: nothing is there
    for name in names:
        info = _ours(folder / name)
        if info is not None:
            found[name] = info.st_ino
    return found


def mapped_segments(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> dict[str, int]:
    """Name and inode of the segments of ours that the processes map."""
    there = os.path.realpath(os.fsencode(folder)) + b"/"
    seen: set[tuple[str, int]] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        except OSError:
            continue  # it has just ended
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(there):
                seen.add((os.fsdecode(fields[5][len(there) :]), int(fields[4])))
    # A name that was given away since, or unlinked ("... (deleted)"), is not what they map.
    now = segments(folder) if seen else {}
    return {name: inode for name, inode in seen if now.get(name) == inode}


def remove_unused(candidates: Mapping[str, int], folder: Path = SHARED_MEMORY) -> dict[str, int]:
    """Unlink those of ``candidates`` (name and inode) that nobody uses; the ones that stay because somebody does."""
    now = segments(folder)
    there = {name: inode for name, inode in candidates.items() if now.get(name) == inode}
    if not there:
        return {}
    used, all_seen = _in_use()
    kept: dict[str, int] = {}
    for name, inode in there.items():
        info = _ours(folder / name)
        if info is None or info.st_ino != inode:
            continue  # gone meanwhile, or another's now
        in_use = (info.st_dev, inode) in used or (name, inode) in used
        if in_use or (not all_seen and info.st_mode & _OTHERS_MAY_OPEN):
            kept[name] = inode
            continue
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: %s", folder / name, error.strerror)
    return kept


def _ours(path: Path) -> os.stat_result | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return info if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() else None


def _in_use() -> tuple[set[tuple[int | str, int]], bool]:
    """What some process maps or holds open, as (device, inode) and as (name, inode); False: there are processes that hide theirs.

    Both, because a mapping may show another device number than the file has (overlays); an inode alone names a file in each
    of many file systems.
    """
    used: set[tuple[int | str, int]] = set()
    all_seen = True
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for line in (process / "maps").read_bytes().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) > 5 and fields[4] != b"0":
                    major, _, minor = fields[3].partition(b":")
                    inode = int(fields[4])
                    used.add((os.makedev(int(major, 16), int(minor, 16)), inode))
                    used.add((os.fsdecode(fields[5].rpartition(b"/")[2]), inode))
            for link in (process / "fd").iterdir():
                try:
                    info = link.stat()
                except OSError:
                    continue  # closed meanwhile, or nothing that has an inode
                used.add((info.st_dev, info.st_ino))
        except PermissionError:
            all_seen = False
        except OSError:
            continue  # ended meanwhile
    return used, all_seen


class SharedMemorySweep:
    """Removes the segments that appeared inside the ``with`` block and that nobody uses after it.

    Enter it before, and leave it after every process of the run.
    """

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._before: dict[str, int] = {}

    def __enter__(self) -> SharedMemorySweep:
        self._before = segments(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        now = segments(self._folder)
        remove_unused(
            {name: inode for name, inode in now.items() if self._before.get(name) != inode}, self._folder
        )


class EngineSegments:
    """The segments of one engine after the other, under one supervisor.

    Life: :meth:`begin` before each start, :meth:`note` now and then while it lives, :meth:`end` when its whole tree is gone, and
    :meth:`note` of nothing as long as something is :attr:`left`.
    A supervisor that was killed leaves ``path``; the next one's :meth:`begin` goes on from it.  Segments that were there before
    the start are never the engine's.

    Args:
        path: Where they are written down (mode 0600, in a private directory); removed when there are none.

    Thread-safe; every call reads ``/proc``, so none belongs on an event loop.  Never raises: what cannot be written down is
    said in the log, and is then known to this process alone.
    """

    def __init__(self, path: Path, folder: Path = SHARED_MEMORY) -> None:
        self._path, self._folder = path, folder
        self._lock = threading.Lock()
        self._before: dict[str, int] = {}
        self._living: dict[str, int] = {}
        self._dead: dict[str, int] = {}
        self._written: dict[str, int] | None = None
        self._tried_s = 0.0
        self._trouble = ""
        self.num_removed = 0

    def begin(self) -> None:
        """An engine is about to start: what is known belongs to dead ones."""
        with self._lock:
            self._sweep()
            self._before = segments(self._folder)

    def note(self, pids: Iterable[int]) -> None:
        """Look at what the processes of the living engine map."""
        found = mapped_segments(pids, self._folder)
        with self._lock:
            for name, inode in found.items():
                if self._before.get(name) != inode and len(self._living) < MAX_SEGMENTS:
                    self._living[name] = inode
            if self._dead and time.monotonic() - self._tried_s > _TRY_AGAIN_S:
                self._remove_dead()  # something used them still when their engine was gone
            self._write()

    @property
    def left(self) -> bool:
        """Is there something of a dead engine, because somebody used it still?"""
        return bool(self._dead)

    def end(self) -> None:
        """The engine's tree is gone: remove what it left."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        if self._written is None:
            self._dead |= self._read()
        self._dead |= self._living
        self._living = {}
        self._remove_dead()
        self._write()

    def _remove_dead(self) -> None:
        self._tried_s = time.monotonic()
        if not self._dead:
            return
        there = segments(self._folder)
        kept = remove_unused(self._dead, self._folder)
        removed = {name for name, inode in self._dead.items() if there.get(name) == inode} - kept.keys()
        if removed:
            self.num_removed += len(removed)
            logger.info("removed %d shared-memory segments of a dead engine", len(removed))
        self._dead = kept

    def _read(self) -> dict[str, int]:
        """What an agent before us wrote down; nothing where it cannot be understood."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                require_own(descriptor, self._path)
                table: Any = json.loads(file.read(_MAX_FILE_BYTES))
            return {
                name: inode for name, inode in table.items() if NAME.fullmatch(name) and type(inode) is int
            }
        except FileNotFoundError:
            return {}
        except (OSError, LedgerError, ValueError, AttributeError, RecursionError) as error:
            logger.warning("%s: %s", self._path, error)
            return {}

    def _write(self) -> None:
        known = self._dead | self._living
        if known == self._written and (not known or self._path.exists()):  # else its directory was deleted
            return
        try:
            if not known:
                self._path.unlink(missing_ok=True)
            else:
                half = self._path.with_name(f".{self._path.name}")
                descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    json.dump(known, file)
                half.replace(self._path)
            self._trouble = ""
        except OSError as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                logger.warning("%s: %s", self._path, error.strerror)
        self._written = known
