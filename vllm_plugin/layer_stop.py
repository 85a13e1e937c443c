"""A rollout step that stops between two layers for production's prompts; off unless the node agent says so (``gate.stop_at_layers``).

Forward pre-hooks on the model's decoder layers, in the thread that runs the step: eager mode only, for a compiled or captured step runs no
Python between its layers.  On the host the parts of a layer are points as well, since a layer of a long chunk takes milliseconds.  At a point
the worker looks at production's board, at most every fifth of a millisecond and only where it has changed, and waits in place for as long as
:mod:`rose.policy.coserving.stops` says, asleep on the board's futex.

**Ranks.**  Rank 0 decides; it writes each point that it has passed, and no other rank passes a point before it has.  So all stand at the same one,
and none waits inside a collective call with its device busy.

**GPU.**  A stopped host does not stop kernels that are queued: :class:`LaunchAhead` keeps the host at most some layers before its
device.  It has not run on a GPU; the tests run it on the stand-in for the driver.

Whatever fails here switches the stops off for good and lets the step go on: it is then as long as it was without them.

No vLLM import.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rose.coserve.cuda_driver import Driver
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import LayerState, Mode
from rose.errors import LedgerError
from rose.policy.coserving.stops import MAX_WAIT_S, QUICK_S, Scene, longest_wait_s, must_wait
from rose.units import NS_PER_S

logger = logging.getLogger("vllm.rose")

LOOK_EVERY_NS = 200_000
"""Points that follow each other sooner share one look at the board."""
RECHECK_S = 0.01
"""A step that waits looks so often at the files whose change does not wake it: the agent's, and whether production lives."""
LEADER_S = MAX_WAIT_S + 1.0
"""Longest wait for rank 0; after it the ranks have lost each other, and stops are off."""
GONE = 1 << 62
"""As a step: no other rank waits for rank 0 any more."""


class LaunchAhead:
    """Keeps the host at most ``(ahead + 1) * every`` layers before its device: an event behind every ``every`` of them.

    Args:
        stream: That steps are launched on, at each call.
        pause_s: Between two looks at an event.
    """

    def __init__(
        self,
        driver: Driver,
        stream: Callable[[], int],
        *,
        every: int = 2,
        ahead: int = 2,
        pause_s: float = 5e-5,
    ) -> None:
        self._driver, self._stream, self._every, self._ahead = driver, stream, every, ahead
        self._pause_s = pause_s
        self._events: collections.deque[Any] = collections.deque()
        self._layers = 0

    def layer(self) -> None:
        """A layer is about to be launched; returns when the device is near enough.

        Raises:
            LedgerError: The driver's; what is left is for :meth:`drop`.
        """
        self._layers += 1
        if self._layers % self._every:
            return
        self._events.append(self._driver.record(self._stream()))
        while len(self._events) > self._ahead:
            while not self._driver.passed(self._events[0]):
                time.sleep(self._pause_s)
            self._driver.drop(self._events.popleft())

    def drop(self) -> None:
        """Let go of all events.  For good, or between two steps."""
        while self._events:
            self._driver.drop(self._events.popleft())


class LayerStop:
    """The stops of one rank.

    Args:
        rank, num_ranks: Of the engine's ranks, which run the same layers.
        ahead: On a GPU.
    """

    def __init__(self, node: NodeDir, rank: int, num_ranks: int, *, ahead: LaunchAhead | None = None) -> None:
        self._board, self._lease, self._node = node.serving_board(), node.rollout_lease(), node.node()
        self._leads, self._alone, self._ahead = rank == 0, num_ranks == 1, ahead
        self._writer = node.layers_writer() if self._leads else None
        self._leader = None if self._leads else node.layers()
        self._modules: list[Any] = []
        self._hooks: list[Any] = []
        self._broken = False
        self._on = False
        self._step = self._point = 0
        self._seen_word = 0
        self._looked_ns = 0
        self._waited_ns = 0
        self._limit_ns = 0
        """-1: not asked yet in this step."""
        self._begun_ns = self._written_ns = 0
        self._trouble = ""
        self._said = LayerState()
        if self._writer is not None:
            self._writer.write(self._said)

    def find(self, model: Any, kv_layers: Iterable[str]) -> None:
        """Take the decoder layers that hold these attention layers as points; on the host, every part of them too.

        Raises:
            LedgerError: A name that is none of the model's; nothing of ours is left open.
        """
        try:
            self._modules = self._points(model, kv_layers)
        except LedgerError:
            self.close()
            raise

    def _points(self, model: Any, kv_layers: Iterable[str]) -> list[Any]:
        found: dict[int, Any] = {}
        for name in kv_layers:
            words = name.split(".")
            number = next((i for i, word in enumerate(words) if word.isdigit()), None)
            if number is None:
                raise LedgerError("is in no numbered layer", field=name)
            try:
                layer = model.get_submodule(".".join(words[: number + 1]))
            except AttributeError as error:
                raise LedgerError("is no layer of the model", field=name) from error
            host = self._ahead is None
            leaves = [one for one in layer.modules() if not any(one.children())] if host else []
            found |= {id(one): one for one in (layer, *leaves)}
        return list(found.values())

    def begin(self, step: int, on: bool) -> None:
        """A step is about to run on this thread; ``on``: it may stop.  The same on every rank."""
        self._mend()
        on = on and not self._broken and bool(self._modules)
        if on != bool(self._hooks):
            self._hook(on)
        self._on = on
        if not on:
            return
        self._step, self._point, self._waited_ns, self._limit_ns = step, 0, 0, -1
        self._seen_word, self._begun_ns = 0, time.monotonic_ns()

    def close(self) -> None:
        """The engine ends; other ranks wait for nobody."""
        self._hook(False)
        self._on = False
        if self._ahead is not None:
            try:
                self._ahead.drop()
            except LedgerError as error:
                logger.warning("ROSE: events of the launch-ahead are left: %s", error)
        if self._writer is not None:
            self._tell(step=GONE)
            self._writer.close()
            self._writer = None

    def _mend(self) -> None:
        """Put the file back as it was: a stranger's write or a deleted name must not blind those who read it."""
        if self._writer is None:
            return
        try:
            if self._writer.mend():
                logger.warning(
                    "ROSE: %s was deleted, cut off or written over; it is there again", self._writer.path
                )
            self._trouble = ""
        except LedgerError as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                logger.error("ROSE: %s", error)

    def _hook(self, on: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [one.register_forward_pre_hook(self._at_point) for one in self._modules] if on else []

    def _at_point(self, module: Any, arguments: Any) -> None:
        if not self._on:
            return
        try:
            self._pass()
        except Exception as error:
            logger.exception("ROSE: rollout steps stop at no layer from now on: %r", error)
            self._broken, self._on = True, False  # the hooks go at the next step
            if self._writer is not None:
                self._tell(step=GONE)

    def _pass(self) -> None:
        self._point += 1
        if self._leader is not None:
            self._follow()
        else:
            now_ns = time.monotonic_ns()
            if now_ns - self._looked_ns >= LOOK_EVERY_NS:
                self._looked_ns = now_ns
                word = self._board.word()
                if word != self._seen_word:
                    self._stand(word)
            if not self._alone:
                self._tell(step=self._step, point=self._point)
        if self._ahead is not None:
            self._ahead.layer()

    def _follow(self) -> None:
        """Wait until rank 0 has passed this point."""
        assert self._leader is not None
        until_s = time.monotonic() + LEADER_S
        while True:
            word = self._leader.word()
            said = self._leader.read()
            if said is not None and (said.step, said.point) >= (self._step, self._point):
                return
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise LedgerError(f"rank 0 did not pass point {self._point}", field=f"step {self._step}")
            self._leader.wait(word, left_s)

    def _stand(self, word: int) -> None:
        """Stay here for as long as the policy says; ``word``: of the board as it is now."""
        begun_ns = time.monotonic_ns()
        stopped = gave_up = False
        while True:
            scene = self._scene()
            if self._limit_ns < 0 and scene.owes_first:
                self._limit_ns = self._longest_ns()
            waited_ns = self._waited_ns + time.monotonic_ns() - begun_ns if stopped else self._waited_ns
            if not must_wait(scene, waited_ns / NS_PER_S, self._limit_ns / NS_PER_S):
                gave_up = stopped and scene.owes_first
                break
            if not stopped:
                stopped = True
                self._stopped(begun_ns)
            left_s = (self._limit_ns - waited_ns) / NS_PER_S
            self._board.wait(word, min(RECHECK_S, left_s))
            word = self._board.word()
        self._seen_word = word
        if stopped:
            took_ns = time.monotonic_ns() - begun_ns
            self._waited_ns += took_ns
            self._tell(
                waiting=0, waited_ns=self._said.waited_ns + took_ns, given_up=self._said.given_up + gave_up
            )

    def _scene(self) -> Scene:
        board = self._board.read()
        if board is None or not board.owes_first:
            return Scene(serving_alive=board is not None, owes_first=False, wanted_back=False)
        node, lease = self._node.read(), self._lease.read()
        held = lease.reserved_pages if lease is not None else 0
        self._written_ns = board.written_ns
        return Scene(
            serving_alive=self._board.alive(),
            owes_first=True,
            wanted_back=board.needed_pages > 0
            or node is None
            or node.mode != Mode.ON
            or node.lend_pages < held,
        )

    def _longest_ns(self) -> int:
        node = self._node.read()
        return int(longest_wait_s(node.slo_ttft_ns / NS_PER_S) * NS_PER_S) if node is not None else 0

    def _stopped(self, at_ns: int) -> None:
        # A step that begins while a prompt waits is not late for what was said before it.
        late_ns = max(0, at_ns - max(self._written_ns, self._begun_ns))
        said = self._said
        self._tell(
            step=self._step,
            point=self._point - 1,
            waiting=1,
            stops=said.stops + 1,
            quick_stops=said.quick_stops + (late_ns <= QUICK_S * NS_PER_S),
            late_ns=said.late_ns + late_ns,
        )

    def _tell(self, **changed: int) -> None:
        assert self._writer is not None
        self._said = said = replace(self._said, **changed)
        self._writer.write(said)
        self._writer.wake()
