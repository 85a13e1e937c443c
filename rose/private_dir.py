"""A directory that nobody but its user can read or change: looked at when it is opened, and used by its descriptor from then on.

What is written there steers production: whoever can put a file in place of ours is the operator.  So :class:`PrivateDir` takes a
directory only if

- it is the effective user's, and has no bit for group or others (``0700``; setgid and sticky do no harm);
- no part of its path is a symbolic link;
- every directory above it is root's or that user's, and others may not write there, unless it is sticky (``/tmp``,
  ``/dev/shm``) or a *volume*: the root of a mount, owned by root, setgid, of one of our groups.  That is what
  Kubernetes makes of an ``emptyDir`` with ``fsGroup``, and nobody outside the pod sees it.

Files in it are the effective user's, regular, and without a bit for group or others (:func:`require_own`).  Callers look
them up with ``dir_fd``.  Where the name has come to lead to another directory, or to none, it is opened anew under the same rules.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from pathlib import Path

from rose.errors import LedgerError

_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY
_opened: weakref.WeakValueDictionary[str, PrivateDir] = weakref.WeakValueDictionary()


class PrivateDir:
    """One directory of this process; :func:`private_dir` gives the same one to all who ask for it.  Thread-safe."""

    def __init__(self, path: Path, others: int = _OTHERS) -> None:
        self.path = path
        self._others = others
        self._fd = -1
        self._identity = (0, 0)
        self._lock = threading.Lock()

    def fd(self) -> int:
        """Its descriptor, a number that stays the same for the life of this object.

        Where another directory is under the name, or none, it is opened anew.

        Raises:
            FileNotFoundError: There is no such directory.
            LedgerError: It, or one above it, is open to others, or cannot be opened.
        """
        try:
            return self._fd if self._is_named() else self._open(make=False)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise LedgerError(f"cannot be read: {error.strerror}", field=str(self.path)) from error

    def make(self) -> int:
        """:meth:`fd`, of a directory that is made (mode 0700, with those above it) where there is none.

        Raises:
            LedgerError: It cannot be made, or as for :meth:`fd`.
        """
        try:
            return self._fd if self._is_named() else self._open(make=True)
        except OSError as error:
            raise LedgerError(f"cannot be made or read: {error.strerror}", field=str(self.path)) from error

    def _is_named(self) -> bool:
        if self._fd < 0:
            return False
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == self._identity

    def _open(self, *, make: bool) -> int:
        with self._lock:
            if self._is_named():  # another thread was first
                return self._fd
            found = _open_checked(self.path, make=make, others=self._others)
            info = os.fstat(found)
            if self._fd < 0:
                self._fd = found
            else:  # the number is in other threads' hands
                os.dup2(found, self._fd, inheritable=False)
                os.close(found)
            self._identity = (info.st_dev, info.st_ino)
            return self._fd

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def private_dir(path: Path | str) -> PrivateDir:
    """The directory of that name.  Touches nothing yet."""
    name = os.path.abspath(path)
    found = _opened.get(name)
    return found if found is not None else _opened.setdefault(name, PrivateDir(Path(name)))


def own_dir(path: Path | str) -> PrivateDir:
    """The directory of that name, which others may look into and may not change: what listens there is ours.  For who writes nothing in it."""
    return PrivateDir(Path(os.path.abspath(path)), _OTHERS_WRITE)


def _forget_locks_after_fork() -> None:
    # One that another thread of the parent held is nobody's to release.
    for directory in list(_opened.values()):
        directory._lock = threading.Lock()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_forget_locks_after_fork)


def require_own(descriptor: int, path: Path | str) -> os.stat_result:
    """What is open there is a file of ours that nobody else may read or write.

    Raises:
        LedgerError: It is not.
    """
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        raise LedgerError("is not a regular file", field=str(path), fix="remove it")
    _require_private(info, str(path), "600")
    return info


def _open_checked(path: Path, *, make: bool, others: int) -> int:
    """A descriptor of ``path``, every step of the way looked at."""
    *parents, name = path.parts[1:] or ("",)
    at, here, device = os.open("/", _FLAGS | os.O_PATH), "/", 0
    try:
        for part in parents:
            device = _require_safe(at, here, device)
            below = _step(at, part, os.O_PATH, f"{here.rstrip('/')}/{part}", make=make)
            os.close(at)
            at, here = below, f"{here.rstrip('/')}/{part}"
        _require_safe(at, here, device)
        found = _step(at, name or ".", os.O_RDONLY, str(path), make=make)
    finally:
        os.close(at)
    try:
        _require_private(os.fstat(found), str(path), "700", others)
    except BaseException:
        os.close(found)
        raise
    return found


def _step(at: int, name: str, how: int, path: str, *, make: bool) -> int:
    for _ in range(2):
        try:
            return os.open(name, _FLAGS | how, dir_fd=at)
        except FileNotFoundError:
            if not make:
                raise
        except NotADirectoryError:
            link = stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
            raise LedgerError(
                "is a symbolic link" if link else "is not a directory",
                field=path,
                fix="name the directory itself, as `realpath` does" if link else None,
            ) from None
        except PermissionError:
            _require_private(os.stat(name, dir_fd=at, follow_symlinks=False), path, "700")  # says whose it is
            raise
        try:
            os.mkdir(name, 0o700, dir_fd=at)
        except FileExistsError:  # another process was first
            pass
    raise FileNotFoundError(2, os.strerror(2), path)


def _require_safe(descriptor: int, path: str, parent_device: int) -> int:
    """A directory above ours: nobody else can move what is in it.  Its device."""
    info = os.fstat(descriptor)
    if info.st_uid not in (0, os.geteuid()):
        raise LedgerError(
            f"belongs to user {info.st_uid}, who could move what is below it",
            field=path,
            fix="use a directory of your own",
        )
    mine = info.st_gid in {os.getegid(), *os.getgroups()}
    volume = info.st_dev != parent_device and info.st_uid == 0 and bool(info.st_mode & stat.S_ISGID) and mine
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX and not volume:
        raise LedgerError("others may write there", field=path, fix=f"chmod go-w {path}")
    return info.st_dev


def _require_private(info: os.stat_result, path: str, mode: str, others: int = _OTHERS) -> None:
    if info.st_uid != os.geteuid():
        raise LedgerError(
            f"belongs to user {info.st_uid}, and this program runs as {os.geteuid()}",
            field=path,
            fix="run everything of a device as one user, in a directory of its own",
        )
    if info.st_mode & others:
        fix = f"chmod {mode} {path}"
        if info.st_mode & stat.S_ISVTX:  # /tmp, /dev/shm: to close it would take it from everybody else
            fix = f"name a directory of its own below it, as {path}/rose"
        elif stat.S_ISDIR(info.st_mode):
            fix += " if nothing else uses it; else name a directory of its own below it"
        raise LedgerError(
            f"has mode {stat.S_IMODE(info.st_mode):04o}: it is open to others", field=path, fix=fix
        )
