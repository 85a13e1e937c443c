"""A SIGKILL in the middle of what a process does with files: the same words, the same instant."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

EVENTS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.scandir",
    "os.listdir",
    "shutil.rmtree",
)


class Fuse:
    """While it is lit, looks at what this process does with a checkpoint's files, each before it happens, and kills the process at one of them.

    Looked at is to open, make, rename, list and remove what is below a checkpoint's folder or one that is being written, and every fsync.

    Args:
        at: The how many-th, from 1; or the first of a kind with a word in the path, ``open state.json``; ``fsync``; or ``never``.
    """

    def __init__(self, at: str) -> None:
        self.num_seen = 0
        self.is_lit = False
        self._at = at
        sys.addaudithook(self._see)
        sync = os.fsync

        def looked_at(file: Any) -> None:
            self._look("fsync", "")
            sync(file)

        os.fsync = looked_at

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and any(part in str(arguments[0]) for part in ("/.writing-", "/step-")):
            self._look(event, str(arguments[0]))

    def _look(self, event: str, path: str) -> None:
        if self.is_lit:
            self.num_seen += 1
            kind, _, word = self._at.partition(" ")
            if self._at == str(self.num_seen) or (event == kind and word in path):
                os.kill(os.getpid(), signal.SIGKILL)
