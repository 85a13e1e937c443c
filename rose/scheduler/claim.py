"""Who may write a journal's folder: the holder of its newest epoch.

An *epoch* is a file ``epoch-N`` in the folder, which its owner holds with a kernel's lock (``flock``) for as long as it lives.
The lock goes with the process, so that a dead owner is known at once; one that is alive and does not move (stopped, swapped
out) keeps its lock, and is known by the file's time, which a living owner sets every quarter of a second (:meth:`Claim.beat`).

Whoever takes over makes ``epoch-N+1``, by a link, which one process alone can make; the owner of ``epoch-N`` is *fenced* from
that moment, whether it lives or not.  It looks behind each of its writes (:meth:`Claim.holds`): what it wrote before the new
epoch began is read by the successor, and for anything later its look comes after the link, so that it promises nothing.
The files themselves are kept apart as well: a successor goes on in the same file only when all who could write it are dead
(:attr:`Claim.is_alone`), else in a new one under its own epoch.

What this rests on: a link that is exclusive, and names and locks that all processes see at once.  File systems of one kernel
have that.  On a network file system names are cached for seconds, and an owner that was cut off would go on promising, so
a stand-by refuses any that is not in :data:`COHERENT`; on one host it guards against the death of a process, not of the host.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rose.errors import ConfigError
from rose.mounts import file_system

COHERENT = ("btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs")
BEAT_S = 0.2
_NAME = re.compile(r"epoch-([0-9]{1,18})\Z")
_MAX_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOwner:
    """Of the newest epoch, as others see it."""

    epoch: int
    is_locked: bool
    beat: int
    """Changes while it lives."""
    url: str
    """Where it answers; empty before it does."""


class Claim:
    """An epoch that is ours.  Closed, it is free for the next."""

    def __init__(self, directory: Path, descriptor: int, epoch: int, *, is_alone: bool) -> None:
        self.epoch = epoch
        self.is_alone = is_alone
        """Whoever had an earlier epoch is dead."""
        self._directory = directory
        self._descriptor = descriptor
        self._successor = os.fspath(directory / f"epoch-{epoch + 1}")
        self._beaten_at_s = float("-inf")

    @classmethod
    def take(cls, directory: Path, *, over: int | None = None) -> Claim | None:
        """The next epoch, or None where another is active or was first.

        Args:
            over: An epoch whose owner may be alive, and is fenced.
        """
        known = _epochs(directory)
        newest = known[-1] if known else 0
        living = [epoch for epoch in known if _is_locked(directory / f"epoch-{epoch}")]
        if newest in living and newest != over:
            return None
        name = directory / f".epoch-{secrets.token_hex(8)}"
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        ours = directory / f"epoch-{newest + 1}"
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(name, ours)
        except FileExistsError:
            os.close(descriptor)
            return None
        finally:
            name.unlink()
        if _epochs(directory)[-1] != newest + 1:  # several came and went since we looked
            ours.unlink()
            os.close(descriptor)
            return None
        return cls(directory, descriptor, newest + 1, is_alone=not living)

    def holds(self) -> bool:
        """Nobody has taken over.  Two looks, of a microsecond each.

        Of our successor's file and ours, ours goes first (:meth:`forget_earlier`): as long as it is there, the other's
        absence means that it never was.
        """
        try:
            os.stat(self._successor)
        except FileNotFoundError:
            return os.fstat(self._descriptor).st_nlink > 0
        except OSError:
            return False
        return False

    def beat(self) -> None:
        """We live.  Called often; now and then it does something."""
        now_s = time.monotonic()
        if now_s >= self._beaten_at_s + BEAT_S:
            self._beaten_at_s = now_s
            os.utime(self._descriptor)

    def announce(self, url: str) -> None:
        """Where we answer, for those who ask a stand-by."""
        data = msgspec.json.encode({"url": url})
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))

    def rise_above(self, epoch: int) -> None:
        """Take a higher number where the journal has seen ours already: it was brought here without its folder's epochs."""
        if epoch < self.epoch:
            return
        ours = self._directory / f"epoch-{self.epoch}"
        risen = self._directory / f"epoch-{epoch + 1}"
        os.link(ours, risen)
        ours.unlink()
        self.epoch, self._successor = epoch + 1, os.fspath(self._directory / f"epoch-{epoch + 2}")

    def forget_earlier(self) -> None:
        """Remove earlier epochs, oldest first.  Only when nothing that their owners hold open is ours to write."""
        for epoch in _epochs(self._directory):
            if epoch < self.epoch:
                (self._directory / f"epoch-{epoch}").unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def owner_of(directory: Path) -> EpochOwner | None:
    """Of the newest epoch; None where there never was one."""
    known = _epochs(directory)
    if not known:
        return None
    path = directory / f"epoch-{known[-1]}"
    try:
        is_locked = _is_locked(path)
        beat = path.stat().st_mtime_ns
        said = msgspec.json.decode(path.read_bytes()[:_MAX_BYTES] or b"{}", type=dict[str, str])
    except FileNotFoundError:
        return owner_of(directory)  # a newer one has begun meanwhile
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = {}  # caught while it was written
    return EpochOwner(epoch=known[-1], is_locked=is_locked, beat=beat, url=said.get("url", ""))


def check_shared(directory: Path) -> None:
    """Raises:
    ConfigError: A stand-by would not be safe here.
    """
    kind = file_system(directory)
    if kind not in COHERENT:
        raise ConfigError(
            f"a stand-by has not been tried on a file system of kind '{kind}', where one that was cut off may not see that "
            "another has taken over",
            field="journal",
            fix=f"name a folder on one of {', '.join(COHERENT)}, or start without --standby",
        )


def _epochs(directory: Path) -> list[int]:
    found = [_NAME.match(entry.name) for entry in os.scandir(directory)]
    return sorted(int(name[1]) for name in found if name is not None)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
