"""Which first tokens of production came late: told on the step path, worked out by the background thread.

Once a step the engine thread notes two references; to look at each request there took a third of what all hooks cost.  The count is that
of :class:`~rose.policy.coserving.first_tokens.FirstTokens`, with the times at which steps ended.  It is behind by a round at most; who reads
it (:class:`rose.policy.watch.SloGuard`) looks over seconds.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rose.policy.coserving.first_tokens import FirstTokens
from vllm_plugin import internals

MOST_BEHIND = 4096
"""Arrivals and steps that wait for a round; of more, the oldest are forgotten: whoever came with them is not counted."""
LOOKED_AT = 256
"""Late requests in one round; the next rounds go on with the others."""


class FirstTokenWatch:
    """See the module.

    Args:
        book: Of this engine, the background thread's.
    """

    def __init__(self, scheduler: Any, book: FirstTokens) -> None:
        self._scheduler, self._book = scheduler, book
        self._arrived: deque[tuple[str, float]] = deque(maxlen=MOST_BEHIND)
        self._ended: deque[tuple[Any, float]] = deque(maxlen=MOST_BEHIND)
        self._reading: dict[str, int] = {}
        """Who has been in a step that did not reach the end of its prompt, and the tokens of the prompt."""

    # ------------------------------------------------------------------ engine thread

    def arrived(self, request: Any) -> None:
        """A request, or a session's next turn, has arrived."""
        self._arrived.append((request.request_id, request.arrival_time))

    def ended(self, output: Any) -> None:
        """The step that was put together as ``output`` has ended."""
        self._ended.append((output, time.time()))

    # ------------------------------------------------------------------ background thread

    def look(self, promised_s: float) -> None:
        """Once a round: which have come, and who has waited longer than ``promised_s``, 0 where nothing is promised."""
        book, now_s = self._book, time.time()
        # In this order: who is in a step that has ended by now has arrived before it.
        num_ended = len(self._ended)
        for _ in range(len(self._arrived)):
            book.arrived(*self._arrived.popleft())
        for _ in range(num_ended):
            output, at_s = self._ended.popleft()
            book.came(internals.read_to_the_end(output, self._reading), at_s, promised_s)
        requests = self._scheduler.requests
        for _ in range(LOOKED_AT):
            late = book.overdue(now_s, promised_s)
            if late is None:
                return
            request = requests.get(late)
            if request is None or request.num_output_tokens:
                book.ended(late)
                self._reading.pop(late, None)
            elif internals.is_blocked(self._scheduler, request):
                book.waits_for_others(late)
            else:
                book.late(late)
