"""The entry point to :class:`~rose.policy.coserving.loans.LoanBook` and, where an operator asks for it, the decision log of what changes a loan.

Files, bounds and variables are those of :mod:`vllm_plugin.protocol_log`.  Written down is a decision that differs from the last one of its kind.
Background thread only; the engine thread leaves scalars in ``StepBook.decided``, which is None where no log is kept.
"""

from __future__ import annotations

from collections import deque

from rose.policy.coserving.loans import (
    AgentSaid,
    ClaimBack,
    Lend,
    LoanAction,
    LoanBook,
    LoanEvent,
    MoreWanted,
    WorthSearch,
    of_step,
)
from rose.policy.coserving.search import LoanSearch, Offer
from rose.policy.coserving.steps import StepBook
from vllm_plugin.protocol_log import Flushed, open_log

MAX_BEHIND = 4096
"""Decisions of steps between two rounds; of more the log leaves out what led to the last."""


class LoanLog:
    """See the module.

    Args:
        steps: The engine thread's.
    """

    def __init__(self, book: LoanBook, steps: StepBook) -> None:
        self._book = book
        self._said: dict[type[LoanEvent], LoanAction] = {}
        self._noted: deque[tuple[int, ...]] = deque(maxlen=MAX_BEHIND)
        log = open_log("loans", book)
        self._log = Flushed(log) if log is not None else None
        if log is not None:
            steps.decided = self._noted

    def lendable(self, event: AgentSaid) -> int:
        """Chunks that may be lent now."""
        action = self._decide(event)
        assert isinstance(action, Lend)
        return action.chunks

    def may_find_more(self, at_s: float, offered: Offer, search: LoanSearch) -> bool:
        """Is it worth looking for more of a loan?"""
        looked_s, looked_offered = search.none_left or (None, None)
        event = MoreWanted(at_s=at_s, offered=offered, looked_s=looked_s, looked_offered=looked_offered)
        action = self._decide(event)
        assert isinstance(action, WorthSearch)
        return action.worth_it

    def _decide(self, event: AgentSaid | MoreWanted) -> LoanAction:
        (action,) = self._book.handle(event)
        if self._log is not None and self._said.get(type(event)) != action:
            self._said[type(event)] = action
            self._log.record(event, [action])
        return action

    def round(self) -> None:
        """Write down what steps have decided since."""
        log, noted = self._log, self._noted
        if log is None:
            return
        waiting = len(noted)
        if waiting == MAX_BEHIND:
            found = [of_step(noted.popleft()) for _ in range(waiting)]
            claims = [action for _, action in found if isinstance(action, ClaimBack)]
            if claims:
                self._book.goes_on_at(claims[-1])
            log.roll()
        else:
            for _ in range(waiting):
                event, action = of_step(noted.popleft())
                # Of the copy: it has to stand where the next file begins.  What is written down is what the step did.
                self._book.handle(event)
                log.record(event, [action])
        log.tick()

    def close(self) -> None:
        self.round()
        if self._log is not None:
            self._log.close()
