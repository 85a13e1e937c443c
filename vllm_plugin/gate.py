"""The gate of a rollout engine: does its next step fit production's slack, and with how many tokens.

With the gate closed vLLM's loop believes that it has no work and sleeps in its input queue: no ``schedule()`` call, no polling.  Both
threads of :mod:`vllm_plugin.rollout` ask, each with a reader of its own; the background thread opens, both close.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rose.coserve.ledger import RecordReader
from rose.coserve.records import ServingBoard
from rose.errors import LedgerError
from rose.policy.admission import BoardView, Demand, admit
from rose.units import NS_PER_S
from vllm_plugin import internals
from vllm_plugin.permit import Permit

PREFILL_LOOKED_AT = 16
"""Waiting requests whose prompts count as demand of the next step."""


def demand_of(running: Sequence[Any], waiting: Sequence[Any]) -> Demand:
    """What the next step would run.  A running request whose prompt is not computed yet wants the rest of it."""
    left = [request.num_tokens - request.num_computed_tokens for request in running]
    num_decodes = sum(tokens <= 1 for tokens in left)
    return Demand(
        num_decodes=num_decodes,
        prefill_tokens=sum(tokens for tokens in left if tokens > 1)
        + sum(request.num_tokens - request.num_computed_tokens for request in waiting),
        context_tokens=sum(request.num_computed_tokens for request in running),
    )


class Gate:
    """See the module.

    Args:
        model: Step times of this engine, as :mod:`vllm_plugin.step_log` learns them.

    Attributes:
        is_open: May vLLM's loop see its work?
        reason: Why a step may or may not start, as was found last.
        opened_by: ``event`` or ``timer``: who opened it last.
    """

    def __init__(self, scheduler: Any, permit: Permit, model: Any) -> None:
        self._scheduler, self._permit, self._model = scheduler, permit, model
        self.is_open = False
        self.reason = "starting"
        self.opened_by = "nobody"

    def tokens(self, board: RecordReader[ServingBoard]) -> int:
        """Tokens that the next step may have; 0: it may not start.

        Args:
            board: The calling thread's own reader.

        Raises:
            LedgerError: Without a board nothing says that production can spare anything.
        """
        scheduler = self._scheduler
        waiting = internals.waiting_requests(scheduler, PREFILL_LOOKED_AT)
        admission = admit(
            time.monotonic_ns() / NS_PER_S,
            board=self._view(board),
            model=self._model,
            params=self._permit.params,
            demand=demand_of(list(scheduler.running), waiting),
        )
        self.reason = admission.reason
        return admission.token_budget

    def next_step(self, board: RecordReader[ServingBoard], allowed_chunks: int) -> int:
        """Engine thread, of the step that is about to be put together: its tokens; with none the gate closes."""
        try:
            tokens = self.tokens(board) if allowed_chunks else 0
        except LedgerError as error:
            self.reason, tokens = str(error), 0
        if tokens == 0:
            self.is_open = False
        return tokens

    def look(self, board: RecordReader[ServingBoard], allowed_chunks: int, *, notified: bool) -> bool:
        """Background thread: close it, or open it where a step may start now; whether it has just opened, and vLLM's loop must be woken.

        Args:
            notified: An event has called for this look, not the timer.

        Raises:
            LedgerError: As :meth:`tokens`.
        """
        if not (allowed_chunks > 0 and self.tokens(board) > 0):
            self.is_open = False
        elif not self.is_open:
            self.opened_by = "event" if notified else "timer"
            self.is_open = True
            return True
        return False

    def _view(self, reader: RecordReader[ServingBoard]) -> BoardView:
        if not self._permit.has_serving:
            return BoardView(present=False)
        board = reader.read()
        if board is None:
            raise LedgerError("serving has no board", field=str(reader.path))
        return BoardView(
            busy=bool(board.busy),
            running=board.running,
            waiting=board.waiting,
            ttft_deadline_s=board.ttft_deadline_ns / NS_PER_S or None,
            tpot_deadline_s=board.tpot_deadline_ns / NS_PER_S or None,
            step_started_s=board.step_started_ns / NS_PER_S,
            step_s=board.step_ns / NS_PER_S,
        )
