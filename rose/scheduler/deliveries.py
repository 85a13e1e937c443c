"""Which answers of a trajectory have reached their client, as far as we can tell.

A client that asks again with nothing but a retry header does not say which of several equal requests it repeats.  An answer
is named by its first turn.  It is *open* until its last byte was handed to the network; an open one that nobody is being
sent is the first that a retry may have.  One that left whole may still be lost on the way: a retry may have it once for
every time that its client says to have asked before.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping

RETRY_HEADERS: Mapping[str, int] = {"x-stainless-retry-count": 0, "x-envoy-attempt-count": 1}
"""Header -> what it says of a first attempt."""

_MAX_CONNECTIONS = 4096
_MAX_RETRIES = 1_000_000


def retry_count(headers: Mapping[str, str]) -> int:
    """How often the client, or a proxy for it, says to have asked before."""
    for name, first in RETRY_HEADERS.items():
        text = headers.get(name, "")
        if text.isascii() and text.isdigit() and len(text) <= 9:
            return max(0, min(int(text) - first, _MAX_RETRIES))
    return 0


class Deliveries:
    """Of one trajectory."""

    __slots__ = ("_open", "_retries")

    def __init__(self) -> None:
        self._open: dict[int, bool] = {}
        """Answers that have not left whole; whether one is being sent."""
        self._retries: dict[int, int] = {}
        """The retry that an answer was last sent to, where it was one."""

    def add(self, turn: int, retry: int) -> None:
        """A new answer, for a client that had asked ``retry`` times before."""
        self._open[turn] = False
        if retry:
            self._retries[turn] = retry

    def begin(self, turn: int, retry: int) -> None:
        self._open[turn] = True
        if retry:
            self._retries[turn] = max(retry, self.retry(turn))

    def end(self, turn: int, retry: int) -> None:
        """It has left whole."""
        self._open.pop(turn, None)
        if retry:
            self._retries[turn] = max(retry, self.retry(turn))

    def fail(self, turn: int) -> None:
        """It did not."""
        if turn in self._open:
            self._open[turn] = False

    def retry(self, turn: int) -> int:
        return self._retries.get(turn, 0)

    def is_open(self, turn: int) -> bool:
        return turn in self._open

    def is_free(self, turn: int) -> bool:
        """Open, and nobody is being sent it."""
        return self._open.get(turn) is False

    def ended(self, turns: Iterable[int]) -> list[tuple[int, int]]:
        """Those of ``turns`` that left whole, with the retry that they were sent to."""
        return [(turn, self.retry(turn)) for turn in turns if turn not in self._open]


class Connections:
    """Over which connections the last answers left: one that is closed since is the likelier to be lost."""

    def __init__(self) -> None:
        self._by_answer: OrderedDict[tuple[str, int], weakref.ref[asyncio.BaseTransport]] = OrderedDict()

    def add(self, trajectory_id: str, turn: int, transport: asyncio.BaseTransport | None) -> None:
        if transport is not None:
            self._by_answer[trajectory_id, turn] = weakref.ref(transport)
            if len(self._by_answer) > _MAX_CONNECTIONS:
                self._by_answer.popitem(last=False)

    def is_closed(self, trajectory_id: str, turn: int) -> bool:
        reference = self._by_answer.get((trajectory_id, turn))
        transport = None if reference is None else reference()
        return transport is None or transport.is_closing()
