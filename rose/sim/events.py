"""Time and order: the event queue, and the journal that proves that two runs were the same.

Events at one moment happen in the order in which they were scheduled, so a seed gives one run.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rose.errors import ConfigError

Handler = Callable[[float, Any], None]


class EventQueue:
    """``at`` schedules ``handler(now_s, argument)``; ``run`` calls them in order of time."""

    __slots__ = ("_heap", "_number", "now_s", "num_events")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Handler, Any]] = []
        self._number = 0
        self.now_s = 0.0
        self.num_events = 0

    def at(self, at_s: float, handler: Handler, argument: Any = None) -> None:
        """``at_s`` before now happens now: time never goes back."""
        self._number += 1
        heapq.heappush(
            self._heap, (at_s if at_s > self.now_s else self.now_s, self._number, handler, argument)
        )

    def run(self, until_s: float, stop: Callable[[], bool] | None = None, every: int = 4096) -> None:
        """Until the queue is empty, the next event is after ``until_s``, or ``stop()`` (asked now and then)."""
        heap = self._heap
        pop = heapq.heappop
        count = 0
        while heap:
            if heap[0][0] > until_s:
                self.now_s = until_s
                break
            now_s, _, handler, argument = pop(heap)
            self.now_s = now_s
            handler(now_s, argument)
            count += 1
            if stop is not None and count % every == 0 and stop():
                break
        self.num_events += count


class EventDigest:
    """One line per decision: kept as a running digest, and in a file when one is asked for."""

    def __init__(self, path: Path | None = None, *, digest: bool = True) -> None:
        self._hash = hashlib.sha256() if digest or path is not None else None
        self._file: IO[bytes] | None = None
        self.num_lines = 0
        if path is not None:
            try:
                self._file = path.open("wb")
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror}", field="--journal") from error

    @property
    def enabled(self) -> bool:
        return self._hash is not None

    def write(self, at_s: float, *words: object) -> None:
        if self._hash is None:
            return
        line = f"{at_s!r} {' '.join(map(str, words))}\n".encode()
        self._hash.update(line)
        self.num_lines += 1
        if self._file is not None:
            self._file.write(line)

    def close(self) -> str:
        """The digest of every line, or '' when there was none."""
        if self._file is not None:
            self._file.close()
            self._file = None
        return self._hash.hexdigest() if self._hash is not None else ""
