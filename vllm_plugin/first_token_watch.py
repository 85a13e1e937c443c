"""Which first tokens of production came late: noted on the step path, counted by the background thread.

At the end of a step the engine thread looks only at those that have begun and had no token yet, and notes who has one now, and when; to count
them there as well, and to look for who waits too long, took a third of what all hooks cost.  The count is that of
:class:`~rose.policy.coserving.first_tokens.FirstTokens`, with the times at which steps ended.  It is behind by a round at most, a quarter of a second; who
reads it (:class:`rose.policy.watch.SloGuard`) looks over seconds.

Times are of the monotonic clock.  vLLM stamps a request's arrival by the wall clock, in its server's process: that is read once, when the
request comes to us, for the time it has taken until then.  A step of the wall clock later makes nobody late, and no deadline later.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rose.policy.coserving.first_tokens import FirstTokens
from rose.units import NS_PER_S
from vllm_plugin import internals

MOST_BEHIND = 4096
"""Arrivals, and steps with first tokens, that wait for a round; of more, the oldest are forgotten and not counted."""
LOOKED_AT = 256
"""Late requests in one round; the next rounds go on with the others."""
_ARRIVED = "rose_arrived"
"""Noted on vLLM's request: its stamp of the arrival, and the monotonic clock's nanoseconds of that moment."""


def arrival_ns(request: Any) -> int:
    """When a request arrived, by the monotonic clock; of one that came while nothing was promised, or of a session's turn that is not its
    latest, by how far the wall clock is from it now.  Any thread."""
    stamped_s, at_ns = getattr(request, _ARRIVED, (None, 0))
    if stamped_s == request.arrival_time:
        return at_ns
    return time.monotonic_ns() - int((time.time() - request.arrival_time) * NS_PER_S)


class FirstTokenWatch:
    """See the module.

    Args:
        book: Of this engine, the background thread's.
    """

    def __init__(self, scheduler: Any, book: FirstTokens) -> None:
        self._scheduler, self._book = scheduler, book
        self._starting: list[str] = []
        """Engine thread: who has been in a step that has ended, and has had no token yet: whose prompts take several."""
        self._noted: deque[tuple[Any, float]] = deque(maxlen=MOST_BEHIND)
        """In the order in which it happened: a request's id and arrival; those whose first tokens came, and when."""
        self._asked: set[str] = set()
        """Background thread: who was gone, or had a token that no step had told of, in the last look."""

    # ------------------------------------------------------------------ engine thread

    def arrived(self, request: Any) -> None:
        """A request, or a session's next turn, has arrived."""
        name, stamped_s = request.request_id, request.arrival_time
        at_s = time.monotonic() - max(0.0, time.time() - stamped_s)
        # A session's next turn becomes one of the request that is there.
        setattr(self._scheduler.requests.get(name, request), _ARRIVED, (stamped_s, int(at_s * NS_PER_S)))
        self._noted.append((name, at_s))

    def ended(self, output: Any) -> None:
        """The step that was put together as ``output`` has ended."""
        starting = self._starting
        if output.scheduled_new_reqs:
            starting = starting + internals.started(output)
        if not starting:
            return
        requests = self._scheduler.requests
        still: list[str] = []
        came: list[str] = []
        for one in starting:
            request = requests.get(one)
            (came if request is None or request.num_output_tokens else still).append(one)
        self._starting = still
        if came:
            self._noted.append((came, time.monotonic()))

    def off(self) -> None:
        """Nothing is promised any more."""
        self._starting = []

    # ------------------------------------------------------------------ background thread

    def look(self, promised_s: float) -> bool:
        """Once a round: which have come, and who has waited longer than ``promised_s``, 0 where nothing is promised; whether more are late."""
        book, now_s = self._book, time.monotonic()
        before = book.num_late
        for _ in range(len(self._noted)):
            who, at_s = self._noted.popleft()
            if isinstance(who, str):
                book.arrived(who, at_s)
            else:
                book.came(who, at_s, promised_s)
        requests, asked = self._scheduler.requests, set()
        for _ in range(min(LOOKED_AT, len(book))):
            late = book.overdue(now_s, promised_s)
            if late is None:
                break
            request = requests.get(late)
            if request is None or request.num_output_tokens:
                # The step that brought its token may be ending just now, and not have noted it: looked at again in the next round.
                if late in self._asked:
                    book.ended(late)
                else:
                    asked.add(late)
                    book.waits_for_others(late)
            elif internals.is_blocked(self._scheduler, request):
                book.waits_for_others(late)
            else:
                book.late(late)
        self._asked = asked
        return book.num_late > before
