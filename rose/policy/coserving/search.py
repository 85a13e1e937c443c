"""Whether it is worth looking for more chunks to lend: what the last look through the block pool came to.

A look costs the engine thread up to half a millisecond before a step, and an idle engine has to be woken for one.  Where it has
found nothing, nothing changes until blocks come free, another offer is made, or some seconds have passed.

The engine thread looks (:meth:`LoanSearch.looked`, :meth:`LoanSearch.freed`), the background thread asks
(:meth:`LoanSearch.may_find_more`).  What it asks is one attribute, written in one go.

Pure: no I/O, no clock.
"""

from __future__ import annotations

ROUND_S = 5.0
"""What a look through the pool found is out of date then: blocks have been freed and cached since."""
Offer = tuple[int, ...] | None
"""Cached chunks that may be lent; None: any."""


class LoanSearch:
    """See the module.

    Attributes:
        none_left: When a look has seen everything there was, and what it was offered; None: none has, or blocks have come free since.
        goes_on: The last look ran out of its time before it had found enough or seen everything.
    """

    def __init__(self) -> None:
        self.goes_on = False
        self.none_left: tuple[float, Offer] | None = None

    def looked(self, at_s: float, offered: Offer, *, num_missing: int, none_left: bool) -> None:
        """A look has ended.

        Args:
            offered: What it was allowed to take of cached chunks.
            num_missing: Chunks that it was to find and did not.
            none_left: It has seen everything there is.
        """
        self.none_left = (at_s, offered) if none_left else None
        self.goes_on = num_missing > 0 and not none_left

    def freed(self) -> None:
        """Blocks have come free since."""
        self.none_left = None

    def may_find_more(self, at_s: float, offered: Offer) -> bool:
        """Would a look with this offer see anything that the last one did not?"""
        found = self.none_left
        if found is None:
            return True
        looked_s, then_offered = found
        return at_s - looked_s >= ROUND_S or offered != then_offered
