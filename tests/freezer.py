"""Groups of processes that the kernel can freeze, as ``docker pause`` does: cgroup v1's freezer, and cgroup v2."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

Version = Literal["v1", "v2"]
_ROOT = Path("/sys/fs/cgroup")


class Freezer:
    """One group of its own."""

    def __init__(self, version: Version, directory: Path) -> None:
        self.version, self.directory = version, directory
        self._file = directory / ("freezer.state" if version == "v1" else "cgroup.freeze")

    def join(self, pid: int) -> None:
        (self.directory / "cgroup.procs").write_text(str(pid))

    def freeze(self) -> None:
        """Returns when everything in it stands still."""
        self._file.write_text("FROZEN" if self.version == "v1" else "1")
        until_s = time.monotonic() + 30.0
        while not self._frozen():
            assert time.monotonic() < until_s, "it does not freeze"
            time.sleep(0.01)

    def thaw(self) -> None:
        self._file.write_text("THAWED" if self.version == "v1" else "0")

    def _frozen(self) -> bool:
        if self.version == "v1":
            return self._file.read_text().strip() == "FROZEN"
        return "frozen 1" in (self.directory / "cgroup.events").read_text()

    def command(self, *argv: str) -> list[str]:
        """A command that runs ``argv`` in it from the first instruction."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.directory / "cgroup.procs"), *argv]


@contextmanager
def freezer(version: Version) -> Iterator[Freezer]:
    """A group for the time of a test; skips it where this machine gives none."""
    with found_freezer(version) as group:
        if group is None:
            pytest.skip(f"no cgroup {version} that we may freeze here")
        yield group


@contextmanager
def found_freezer(version: Version) -> Iterator[Freezer | None]:
    """A group for as long as it is needed; None where this machine gives none.  What is left in it then is killed."""
    places = [_ROOT / "freezer"] if version == "v1" else [_ROOT / "unified", _ROOT]
    name = f"rose-test-{os.getpid()}-{secrets.token_hex(3)}"
    for place in places:
        directory = place / name
        try:
            directory.mkdir()
        except OSError:
            continue
        group = Freezer(version, directory)
        if not group._file.exists():
            directory.rmdir()
            continue
        try:
            yield group
        finally:
            group.thaw()
            for pid in (directory / "cgroup.procs").read_text().split():
                subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
            until_s = time.monotonic() + 60.0  # the dying of the idle class take their time on a busy core
            while (directory / "cgroup.procs").read_text() and time.monotonic() < until_s:
                time.sleep(0.01)
            directory.rmdir()
        return
    yield None
