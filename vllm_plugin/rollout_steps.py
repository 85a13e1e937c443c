"""A rollout engine's thread around each step: does it start, with how many tokens, and in which chunks.

It obeys two answers of the background thread (:mod:`vllm_plugin.rollout_rounds`), how many chunks may be held and whether the gate is open,
and asks the gate once more itself.
"""

from __future__ import annotations

from typing import Any

from rose.coserve.node_dir import NodeDir
from vllm_plugin import internals
from vllm_plugin.capacity import Balloon
from vllm_plugin.cuts import Cuts
from vllm_plugin.gate import Gate
from vllm_plugin.layer_totals import LayerTotals
from vllm_plugin.permit import Permit
from vllm_plugin.seam import Seam
from vllm_plugin.step_tally import StepTally


class RolloutSteps:
    """See the module.  What it is made of is the side's (:class:`vllm_plugin.rollout.RolloutSide`).

    Attributes:
        num_schedules: Steps that vLLM was let put together, empty ones too: their numbers.
        reason: Why as many chunks may be held as may, for the log of a cut.
    """

    def __init__(
        self,
        scheduler: Any,
        directory: NodeDir,
        *,
        seam: Seam,
        balloon: Balloon,
        cuts: Cuts,
        gate: Gate,
        permit: Permit,
        tally: StepTally,
        layers: LayerTotals,
    ) -> None:
        self._scheduler = scheduler
        self._seam, self._balloon, self._cuts = seam, balloon, cuts
        self._gate, self._permit, self._tally, self._layers = gate, permit, tally, layers
        self._board = directory.serving_board()  # readers are one per thread
        self.num_schedules = 0
        self.reason = "starting"

    def gated(self) -> bool:
        """Does vLLM's loop have to believe that there is no work?"""
        engine = self._seam.engine
        if self._gate.is_open or engine is None:
            return False
        return not internals.is_paused(self._scheduler) and not internals.engine_is_stopping(engine)

    def before_schedule(self) -> int:
        """Obey; tokens that this step may schedule (0: none)."""
        self._balance()
        for request in internals.waiting_requests(self._scheduler, 1):
            # It was running, has outgrown the budget and was preempted: everybody behind it would wait for it.
            self._cuts.refuse_oversized(self._seam.engine, request)
        self.num_schedules += 1
        return self._gate.next_step(self._board, self._seam.target_chunks)

    def _balance(self) -> None:
        """Take mapped chunks into use; give up chunks that are no longer allowed."""
        seam, balloon = self._seam, self._balloon
        while seam.mapped:
            balloon.deflate((seam.mapped.popleft(),))
        if balloon.num_usable_chunks > seam.target_chunks:
            released = self._cuts.cut(seam.engine, seam.target_chunks, self.reason)
            seam.released.extend((chunk, self.num_schedules) for chunk in released)
            seam.notifier.notify()

    def after_add(self, request: Any) -> None:
        """A request has come in."""
        self._cuts.refuse_oversized(self._seam.engine, request)

    def after_schedule(self, output: Any) -> None:
        internals.stamp(output, self.num_schedules, self._permit.may_stop)
        self._tally.begin(output, self._scheduler.running)

    def after_update(self) -> None:
        self._tally.end(self._layers.stood_ns())

    def idle(self) -> None:
        """For an engine that makes no step, or must not."""
        self._balance()
        self._seam.notifier.notify()
