"""Other users, and directories and volumes as they see them.  Needs root."""

from __future__ import annotations

import os
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STRANGER, ANOTHER = 54321, 54322
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def act_as(uid: int, deed: Callable[[], None]) -> None:
    """Run ``deed`` in a process of that user and group; an assertion that fails there fails here."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            deed()
        except BaseException:  # noqa: BLE001 - the last frame of a process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@contextmanager
def volume(path: Path, group: int, mode: int = 0o2777) -> Iterator[Path]:
    """An emptyDir as a pod with ``fsGroup`` finds it: root's, setgid, open to all, and mounted."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], check=True)
    try:
        os.chown(path, 0, group)
        path.chmod(mode)
        yield path
    finally:
        subprocess.run(["umount", path], check=True)
