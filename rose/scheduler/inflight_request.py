"""One client's request: who asked, its turns as they run, and what they ended with.

An :class:`Inflight` runs apart from the connection that asked for it.  A client that goes away and comes back joins it;
which request that is, is found in ``rose.scheduler.inflight``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rose.lineage import Version
from rose.policy import turn_events as te
from rose.scheduler.dispatch import Dispatcher, TurnHandle, no_worker
from rose.scheduler.prompts import Prompt
from rose.scheduler.trajectory import Trajectory, request_name


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """Who asked, and how to recognise that they ask again."""

    request_id: str
    trajectory: Trajectory | None
    digest: str
    turn_key: str = ""
    idempotency_key: str = ""
    retry: int = 0
    """How often the client says to have asked before."""
    dedicated_only: bool = False
    min_version: Version | None = None
    deadline_s: float | None = None
    side: str = ""
    """What the client says of it: :mod:`rose.scheduler.side`."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """W3C trace context for the engine."""

    @property
    def name(self) -> str:
        """What the client calls this request; turns have names in their trajectory only."""
        return request_name(self.idempotency_key, self.turn_key if self.trajectory is not None else "")


@dataclass(kw_only=True, slots=True)
class Finished:
    """A turn that is done and, in a trajectory, recorded."""

    ended: te.TurnEnded
    handle: TurnHandle
    prompt: Prompt
    turn: int | None
    fork: str | None
    created: int
    """In Unix seconds."""
    summary: dict[str, Any]


class Inflight:
    """A request in progress.  ``task`` gives the body of a non-streamed answer."""

    def __init__(self, dispatcher: Dispatcher, asked: TurnRequest, key: str) -> None:
        self.asked = asked
        self.key = key
        self.retry = asked.retry
        """Of the last client that joined."""
        self.asks = asked.side
        """What kind of request it is: :mod:`rose.scheduler.side`."""
        self.handles: list[TurnHandle] = []
        self.started: asyncio.Event = asyncio.Event()
        """All turns are submitted (or the request has failed): a stream may begin to watch them."""
        self.task: asyncio.Task[bytes] | None = None
        self.num_attached = 0
        self.finished: list[Finished] = []
        self.is_recorded = False
        self._dispatcher = dispatcher
        self.is_waiting_too_long = False
        self._waiters: list[asyncio.Future[None]] = []

    def add(self, handle: TurnHandle) -> None:
        self.handles.append(handle)
        handle.on_unavailable = self._give_up_for_now
        if self.num_attached == 0:
            self._dispatcher.detach(handle)

    @property
    def is_joinable(self) -> bool:
        """It runs, and none of its turns has failed or was cancelled, of which it may only hear next."""
        return (self.task is not None and not self.task.done()) and not any(
            handle.done.done() and handle.done.result().outcome is not te.TurnState.DONE
            for handle in self.handles
        )

    def attach(self) -> None:
        self.num_attached += 1
        if self.num_attached == 1:
            self.is_waiting_too_long = False
            for handle in self.handles:
                self._dispatcher.attach(handle)

    def detach(self) -> None:
        self.num_attached -= 1
        if self.num_attached == 0:
            for handle in self.handles:
                self._dispatcher.detach(handle)
        self.drop_ended()

    def drop_ended(self) -> None:
        """Drop the task of a job that has ended and that no client waits for: an error's traceback would keep all tokens of its turns alive."""
        if self.num_attached == 0 and self.task is not None and self.task.done():
            self.task = None

    async def wait(self) -> bytes:
        """The answer, on behalf of one attached client.

        Raises:
            CapacityError: 503, it waited too long; the turn keeps its place for a retry.
            RoseError: The request failed.
        """
        assert self.task is not None
        while not self.task.done() and not self.is_waiting_too_long:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
        if not self.task.done():
            raise no_worker(next(handle for handle in self.handles if not handle.done.done()))
        return self.task.result()

    def let_go(self) -> None:
        """Ended: no cycle keeps the turns' tokens for the next full collection."""
        for handle in self.handles:
            handle.on_unavailable = _nobody
        self._wake()

    def _give_up_for_now(self) -> None:
        self.is_waiting_too_long = True
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """An answer that was given before; of a trajectory, named by its first turn."""

    answer: bytes = b""
    """Of a request without a trajectory."""
    trajectory: Trajectory | None = None
    turn: int = 0


def _nobody() -> None:
    pass
