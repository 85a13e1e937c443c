"""The entry point to an engine's book of chunks and, where an operator asks for it, the decision log of every event.

``ROSE_DECISIONS`` names the directory, ``ROSE_DECISIONS_NAME`` whose logs they are where engines of several devices share it, and
``ROSE_DECISIONS_MAX_BYTES`` and ``_MAX_FILES`` bound them; the node agent sets all four for its engine from ``[decisions]``.  ``rose replay``
reads what lies there.  A round that changes nothing is not written down: the book is the same without it.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.policy.coserving.events import Reserve
from vllm_plugin.roles import (
    ENV_DECISIONS,
    ENV_DECISIONS_MAX_BYTES,
    ENV_DECISIONS_MAX_FILES,
    ENV_DECISIONS_NAME,
)

if TYPE_CHECKING:
    from rose.decisions.log import DecisionLog

logger = logging.getLogger("vllm.rose")

FLUSH_EVERY_S = 1.0
"""A killed engine loses at most this much of its log."""
MAX_BYTES = 64 * 2**20
MAX_FILES = 4
"""Where nobody says otherwise."""


class Flushed:
    """A log that is written now and then."""

    def __init__(self, log: DecisionLog) -> None:
        self.record, self.roll, self.close = log.record, log.roll, log.close
        self._log, self._flushed_s = log, 0.0

    def tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._flushed_s >= FLUSH_EVERY_S:
            self._flushed_s = now_s
            self._log.flush()


class ProtocolLog:
    """See the module.

    Args:
        role: ``serving`` or ``rollout``.
        book: That engine's.
    """

    def __init__(self, role: str, book: Any) -> None:
        self._book = book
        self._before: object = None
        log = open_log(role, book)
        self._log = Flushed(log) if log is not None else None

    def handle(self, event: Any) -> list[Any]:
        """One event through the door; what has to be done, in order."""
        actions = self._book.handle(event)
        if self._log is not None:
            after = self._book.snapshot()
            if after != self._before or any(type(action) is not Reserve for action in actions):
                self._before = after
                self._log.record(event, actions)
            self._log.tick()
        return actions

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def open_log(role: str, book: Any) -> DecisionLog | None:
    """The log that an operator has asked for; None: nobody has, or it cannot be begun."""
    folder = os.environ.get(ENV_DECISIONS)
    if not folder:
        return None
    try:
        return _open(folder, role, book)
    except Exception as error:  # noqa: BLE001  # no log is no reason not to serve
        logger.error("ROSE: no decision log: %r", error)
        return None


def _open(folder: str, role: str, book: Any) -> DecisionLog:
    # Here: nothing of it is loaded into an engine whose operator has not asked for it.
    from rose.decisions.event_format import FORMATS
    from rose.decisions.log import DecisionLog

    env = os.environ
    log = DecisionLog(
        Path(folder),
        "-".join(part for part in (role, env.get(ENV_DECISIONS_NAME)) if part),
        FORMATS[role],
        book,
        max_bytes=int(env.get(ENV_DECISIONS_MAX_BYTES) or MAX_BYTES),
        max_files=int(env.get(ENV_DECISIONS_MAX_FILES) or MAX_FILES),
    )
    log.roll()
    return log
