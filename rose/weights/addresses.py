"""Which of several relays to ask: the first that answers, and the first again once it may be back.

Addresses are in order of preference: the nearest relay first, then its parent, then the root.  Decides only; time is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

FIRST_AWAY_S, LAST_AWAY_S = 2.0, 60.0


class Preference(Generic[T]):
    """Args:
    addresses: At least one, the preferred first.
    """

    def __init__(self, addresses: Sequence[T]) -> None:
        self.all = list(addresses)
        self._away_until_s = dict.fromkeys(range(len(self.all)), 0.0)
        self._away_s = dict.fromkeys(range(len(self.all)), 0.0)

    def current(self, now_s: float) -> int:
        """Number of the address to ask: the first that has not failed lately, else the one that failed longest ago."""
        for number, until_s in self._away_until_s.items():
            if until_s <= now_s:
                return number
        return min(self._away_until_s, key=lambda number: self._away_until_s[number])

    def failed(self, number: int, now_s: float) -> None:
        """It did not answer: the others are asked for a while, twice as long each time, a minute at most."""
        if self._away_until_s[number] > now_s:
            return  # of many who ask at once, all hear it
        self._away_s[number] = min(LAST_AWAY_S, max(FIRST_AWAY_S, 2 * self._away_s[number]))
        self._away_until_s[number] = now_s + self._away_s[number]

    def answered(self, number: int) -> None:
        self._away_s[number] = self._away_until_s[number] = 0.0
