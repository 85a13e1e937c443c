"""Where the rollout engine's output goes, and how much of it is kept: the file, and the one before it.

The engine writes it by itself, appending, for as long as it lives; so what is too long is copied away and cut off under it.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path

from rose.coserve.node_config import NodeConfig, cache_directory

MAX_BYTES = 8 << 20
"""Of each of the two."""
logger = logging.getLogger("rose.node")


class EngineLog:
    """The log of a node's engines, one after the other.  Blocking calls.

    Args:
        config: Says where; where it does not, it is in the user's cache folder, for the node directory is memory.
        max_bytes: Of the file, and as much of the one before it (``PATH.1``).
    """

    def __init__(self, config: NodeConfig, max_bytes: int = MAX_BYTES) -> None:
        self._given = config.engine.log_path
        self._max_bytes = max_bytes
        self.path = self._given or cache_directory() / "logs" / f"{config.node_id}-engine.log"

    def begin(self) -> Path | None:
        """An engine is about to start: where it writes.  None: nobody named a place and ours cannot be written, which is no reason to start none."""
        if self.is_full():
            self.roll()
        if self._given is not None:
            return self._given
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            logger.warning(
                "the rollout engine's output is thrown away: %s: %s (set engine.log_path)",
                self.path,
                error.strerror,
            )
            return None
        return self.path

    def is_full(self) -> bool:
        try:
            info = self.path.stat()
        except OSError:
            return False
        return stat.S_ISREG(info.st_mode) and info.st_size > self._max_bytes

    def roll(self) -> None:
        """What is there becomes the one before; the engine goes on in an empty one.  What it writes in that moment is lost."""
        before = self.path.with_name(f"{self.path.name}.1")
        try:
            with self.path.open("rb") as file:
                file.seek(-min(self._max_bytes, file.seek(0, os.SEEK_END)), os.SEEK_END)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                with open(os.open(before, flags, 0o600), "wb") as copy:
                    shutil.copyfileobj(file, copy)
        except OSError as error:  # the bound holds all the same
            logger.warning("%s: %s", before, error.strerror)
        try:
            os.truncate(self.path, 0)
        except OSError as error:
            logger.warning("%s: %s", self.path, error.strerror)
