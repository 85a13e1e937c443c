"""Which of production's requests wait for their first token, and how many of them waited longer than promised.

Each request counts at most once, whoever stands before it in the queue: when its limit passes while it still waits, else when its first
token comes.  The first is sooner, and it is true of a request whose client gives up as well: who looks at the count wants to stop
what makes production late, not to hear of it when it is over.  A limit is looked at when steps end, so both are the same number: every request
whose first token comes, or would have come, later than :func:`~rose.policy.coserving.timing.is_late` allows.

What a request waits for that no step can give it (a grammar, its client) counts as well, but only when its first token comes.

On production's step path: scalars in and out, and a look costs the same however many wait.

Pure: no I/O, no clock.  Times are seconds on one monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rose.policy.coserving.timing import is_late


class FirstTokens:
    """See the module.

    Attributes:
        num_late: Promises of a first token that were broken so far.
    """

    def __init__(self) -> None:
        self.num_late = 0
        self._owed: OrderedDict[str, float] = OrderedDict()
        """When each arrived that is not known to be late, nearly in that order; one that ended meanwhile leaves when its limit has passed."""

    def __len__(self) -> int:
        return len(self._owed)

    def arrived(self, request_id: str, at_s: float) -> None:
        """A request, or the next turn of a session, waits for its first token from now on.

        One that waits already waits on: what a session sends meanwhile does not begin its time anew.  A session's next turn that
        comes while the turn before it is still being answered is not counted.
        """
        self._owed.setdefault(request_id, at_s)

    def came(self, request_ids: Iterable[str], at_s: float, promised_s: float) -> None:
        """Their first tokens have come, or they ended without one."""
        forget = self._owed.pop
        # Nearly always nobody is late, which the oldest of them tells: one call for all of them.
        arrived_s = [at for one in request_ids if (at := forget(one, None)) is not None]
        if arrived_s and is_late(at_s - min(arrived_s), promised_s):
            self.num_late += sum(is_late(at_s - at, promised_s) for at in arrived_s)

    def overdue(self, at_s: float, promised_s: float) -> str | None:
        """Who has waited longest, if longer than promised: one of the three methods below is told what became of it."""
        if not promised_s:  # any more
            self._owed.clear()
        for request_id, arrived_s in self._owed.items():
            return request_id if is_late(at_s - arrived_s, promised_s) else None
        return None

    def late(self, request_id: str) -> None:
        """It still waits."""
        del self._owed[request_id]
        self.num_late += 1

    def ended(self, request_id: str) -> None:
        """It is gone, and was not late when it went."""
        del self._owed[request_id]

    def waits_for_others(self, request_id: str) -> None:
        """No step can help it: it is looked at again behind the others."""
        self._owed.move_to_end(request_id)
