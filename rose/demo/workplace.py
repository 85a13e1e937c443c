"""The private directory of one run, which leaves nothing behind.

One run = one directory ``rose-demo-XXXXXXXX`` (0700) under a tmpfs.  Its owner holds a lock on ``owner.lock``
as long as it lives.  A run that was killed cannot clean up: the next one removes what has a free lock.

What the *programs* of a run leave is another matter: ``rose.shared_memory``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from rose.errors import ConfigError

PREFIX = "rose-demo-"
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
