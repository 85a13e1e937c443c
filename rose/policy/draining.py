"""Does a job drain: do the trajectories that run end without new ones beginning?

A synchronous step begins all its trajectories at once and ends with the last of them.  From then on each that ends leaves its engine
with one turn less for good, so what placement believes of an engine's load lasts, and a move to a faster one pays for all the turns
that are left.  A job that begins trajectories all the time (asynchronous training, DAPO's groups until enough of them teach) fills
every place again; there a move pays for the next few turns at most.

A job drains once more turns have come, since the last that began a trajectory, than it has turns under way: each of its trajectories
has then gone on about once.  Counts alone, so it asks nobody what algorithm trains.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

LEAST_TURNS = 8
"""A job of one or two trajectories tells nothing by one turn."""


class Draining:
    """Args:
    num_running: Turns by job that have not ended; owned by the turn book.
    """

    def __init__(self, num_running: Mapping[str, int]) -> None:
        self._num_running = num_running
        self._since_first: Counter[str] = Counter()

    def submitted(self, job: str, *, begins: bool) -> None:
        """A turn came; ``begins``: the first of its trajectory."""
        self._since_first[job] = 0 if begins else self._since_first[job] + 1

    def forget(self, job: str) -> None:
        self._since_first.pop(job, None)

    def drains(self, job: str) -> bool:
        return self._since_first[job] > max(LEAST_TURNS, self._num_running.get(job, 0))
