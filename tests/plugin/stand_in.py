"""Stand-ins at the shared files: a production engine and a node agent that say what a test wants.

The rollout engine under test cannot tell them from the real ones: it knows both only through these files.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from rose.coserve.ledger import RecordWriter
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState, Phase, ServingBoard, ServingLease

S = 1_000_000_000
BEAT_S = 0.2
R = TypeVar("R")


class Beating(Generic[R]):
    """A shared record whose owner lives: its last word stands, with a fresh heartbeat every 0.2 s.  No beat wakes a reader."""

    def __init__(self, writer: RecordWriter[R]) -> None:
        self._writer = writer
        self._record: R | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def write(self, record: R) -> None:
        """Say ``record`` from now on; its heartbeat is the clock's."""
        with self._lock:
            self._record = record
            self._put(record)

    def wake(self) -> None:
        self._writer.wake()

    def close(self) -> None:
        """Nothing is being written when this returns."""
        self._stop.set()
        self._thread.join()
        self._writer.close()

    def __enter__(self) -> Beating[R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, record: Any) -> None:
        self._writer.write(dataclasses.replace(record, heartbeat_ns=time.monotonic_ns()))

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with self._lock:
                if self._record is not None:
                    self._put(self._record)


class Host:
    """Node agent and production of one device; beats every 0.2 s until told otherwise.

    ``set(...)`` changes any field of the three records at once and wakes the readers.
    """

    def __init__(self, path: Path, *, total_pages: int = 64, has_serving: bool = True) -> None:
        self.dir = NodeDir(path)
        self._node_writer = self.dir.node_writer()
        self._lease_writer = self.dir.serving_lease_writer() if has_serving else None
        self._board_writer = self.dir.serving_board_writer() if has_serving else None
        self.node = NodeState(mode=Mode.ON, epoch=1, has_serving=int(has_serving))
        self.lease = ServingLease(phase=Phase.READY, total_pages=total_pages, reserved_pages=total_pages)
        self.board = ServingBoard()
        self._lock = threading.Lock()
        self._node_beats = self._serving_beats = True
        self._stop = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def set(self, *, node: dict[str, int] | None = None, **fields: int) -> None:
        """Change ``node`` fields by mapping, lease and board fields by name."""
        with self._lock:
            if node:
                self.node = dataclasses.replace(self.node, **node, epoch=self.node.epoch + 1)
            for name, value in fields.items():
                if hasattr(self.lease, name):
                    self.lease = dataclasses.replace(self.lease, **{name: value})
                else:
                    self.board = dataclasses.replace(self.board, **{name: value})
        self._write()

    def lend(self, pages: int) -> None:
        """The agent asks for ``pages`` and production gives them."""
        self.set(node={"lend_pages": pages}, reserved_pages=self.lease.total_pages - pages)

    def silence(self, *, node: bool = False, serving: bool = False) -> None:
        """Stop one heartbeat; nothing is being written when this returns."""
        with self._lock:
            self._node_beats, self._serving_beats = not node, not serving

    def _write(self) -> None:
        with self._lock:
            now_ns = time.monotonic_ns()
            if self._node_beats:
                self._node_writer.write(dataclasses.replace(self.node, heartbeat_ns=now_ns))
                self._node_writer.wake()
            if self._serving_beats and self._lease_writer is not None and self._board_writer is not None:
                self._lease_writer.write(dataclasses.replace(self.lease, heartbeat_ns=now_ns))
                self._board_writer.write(dataclasses.replace(self.board, written_ns=now_ns))
                self._lease_writer.wake()
                self._board_writer.wake()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._write()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for writer in (self._node_writer, self._lease_writer, self._board_writer):
            if writer is not None:
                writer.close()


def eventually(probe: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """First true value of ``probe``; an assertion that names ``what`` when there is none in time."""
    until = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.02)
