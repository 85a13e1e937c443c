"""The private directory of one run, which leaves nothing behind.

One run = one directory ``rose-demo-XXXXXXXX`` (0700) under a tmpfs.  Its owner holds a lock on ``owner.lock``
as long as it lives.  A run that was killed cannot clean up: the next one removes what has a free lock.

:class:`SharedMemorySweep` removes what the *programs* of a run leave: a vLLM server that is ended hard,
which includes its own shutdown, forgets hundreds of megabytes of shared memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from rose.errors import ConfigError

PREFIX = "rose-demo-"
SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIXES = ("psm_", "sem.mp-")
"""What Python's multiprocessing names its segments and semaphores; vLLM's processes talk through them."""
_LOCK = "owner.lock"


def default_parent() -> Path:
    """/dev/shm where it can be written (no shared file then touches a disk), else the temporary directory."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class Workplace:
    """A context manager; ``path`` is valid inside.

    Raises:
        ConfigError: The parent cannot be written.
    """

    def __init__(self, parent: Path | None = None, *, keep: bool = False) -> None:
        self._parent = parent or default_parent()
        self._keep = keep
        self._lock = -1
        self.path = Path()

    def __enter__(self) -> Workplace:
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            sweep(self._parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{self._parent}: {error.strerror}", field="run_directory") from error
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def folder(self, name: str) -> Path:
        """A directory inside, made 0700."""
        path = self.path / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path


def sweep(parent: Path) -> list[Path]:
    """Remove what killed runs of ours left under ``parent``; returns what was removed."""
    removed: list[Path] = []
    for path in parent.glob(f"{PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # being made this moment, being removed by another sweep, or none of ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        finally:
            os.close(lock)
    return removed


class SharedMemorySweep:
    """Removes shared-memory segments that appeared inside the ``with`` block and that nobody uses after it.

    Enter it before, and leave it after every process of the run.  A segment stays when it was there
    before, belongs to another user, or is mapped or open in any process that we can see into.
    """

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._before: set[str] = set()

    def __enter__(self) -> SharedMemorySweep:
        self._before = {path.name for path in self._segments()}
        return self

    def __exit__(self, *_: object) -> None:
        new = {path: path.stat().st_ino for path in self._segments() if path.name not in self._before}
        if not new:
            return
        used = _inodes_in_use()
        for path, inode in new.items():
            if inode not in used:
                path.unlink(missing_ok=True)

    def _segments(self) -> list[Path]:
        try:
            found = [path for path in self._folder.iterdir() if path.name.startswith(SEGMENT_PREFIXES)]
            return [path for path in found if path.is_file() and path.stat().st_uid == os.getuid()]
        except OSError:
            return []  # no such folder, or one vanished this moment: what is left stays


def _inodes_in_use() -> set[int]:
    """Inodes that some process maps or holds open."""
    used: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
            used.update(int(fields[4]) for line in lines if len(fields := line.split(maxsplit=5)) > 5)
            used.update(link.stat().st_ino for link in (process / "fd").iterdir() if link.exists())
        except OSError:
            continue  # ended meanwhile, or another user's: such a process cannot hold a file of mode 0600
    return used
