"""Several nodes that go by one name: which of them has it, and what the others last said.

A node file that is copied from host to host without a look gives two nodes one ``node_id``.  The one that has the name keeps it for as long as
it is heard; another one, known by its address or its host, is refused.  Of two at one address on one host nothing tells the second from an engine that was
started again, so it takes the name; but no engine comes back to an incarnation that it has left, so the first is refused from then on.

What a node without the name says of itself counts all the same (:meth:`Namesakes.strangers`): it may hold production's memory.  One that is known to be
elsewhere and falls silent while it holds some is remembered for as long as a registered one would be, or until an engine comes up where it was.

Pure: no I/O, no clock.  Times are seconds on one clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Said = TypeVar("Said")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """Where an engine is: its address, and its host by the node's own word ("": it did not say)."""

    url: str
    host: str = ""

    def is_other_than(self, other: NodePlace) -> bool:
        are_both_known = bool(self.host and other.host)
        return self.url != other.url or (are_both_known and self.host != other.host)

    def __str__(self) -> str:
        return f"{self.url} (host {self.host})" if self.host else self.url


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who has a name: incarnation, last heartbeat, and where."""

    incarnation: str
    heard_s: float
    place: NodePlace


@dataclass(kw_only=True, slots=True)
class Stranger(Generic[Said]):
    """One that goes by a name that another has, or that nobody has yet.

    Attributes:
        place: Where it says it is; None: it has not tried to register.
        said: Its last heartbeat; None: it has sent none.
        may_hold: By that heartbeat it has memory of production's, or cannot tell.
        is_elsewhere: It is another one than who has the name, and no engine that was started again since.
    """

    heard_s: float
    place: NodePlace | None = None
    said: Said | None = None
    may_hold: bool = False
    is_elsewhere: bool = False
    num_refusals: int = 0


class Namesakes(Generic[Said]):
    """See the module.

    Args:
        fresh_s: One that was heard within this time lives.
        remember_s: So long one counts that is elsewhere and last said that it may hold memory.
        most: Strangers, and incarnations that were left, that are remembered; beyond it the oldest of them is forgotten.
    """

    def __init__(self, *, fresh_s: float, remember_s: float, most: int) -> None:
        self.fresh_s = fresh_s
        self._remember_s = remember_s
        self._most = most
        self._strangers: dict[tuple[str, str], Stranger[Said]] = {}
        self._left: dict[tuple[str, str], NodePlace | None] = {}
        """Incarnations that had the name before another one came, and where, if that was not where the other one is."""

    def num_refusals(
        self, at_s: float, name: str, incarnation: str, place: NodePlace, holder: Holder | None
    ) -> int:
        """How often this one was refused the name on end, now included, for ``holder`` has it and lives; 0: it may have it."""
        self._came_up(incarnation, place)
        if holder is None or holder.incarnation == incarnation:
            return 0
        is_other = place.is_other_than(holder.place) or (name, incarnation) in self._left
        if not is_other or at_s - holder.heard_s >= self.fresh_s:
            self._left.pop((name, incarnation), None)
            self._left[name, holder.incarnation] = holder.place if is_other else None
            if len(self._left) > self._most:
                del self._left[next(iter(self._left))]
            return 0
        stranger = self._note(at_s, name, incarnation)
        stranger.place, stranger.is_elsewhere = place, True
        stranger.num_refusals += 1
        return stranger.num_refusals

    def heard(self, at_s: float, name: str, incarnation: str, said: Said, *, may_hold: bool) -> None:
        """One that has not the name has spoken."""
        stranger = self._note(at_s, name, incarnation)
        stranger.said, stranger.may_hold = said, may_hold
        if (place := self._left.get((name, incarnation))) is not None:
            stranger.place, stranger.is_elsewhere = place, True

    def has_the_name(self, name: str, incarnation: str) -> None:
        """This one is no stranger any more."""
        self._strangers.pop((name, incarnation), None)

    def strangers(self, at_s: float) -> Iterator[tuple[str, Stranger[Said]]]:
        """Those that count, by name."""
        for name, incarnation in sorted(self._strangers):
            stranger = self._strangers[name, incarnation]
            if self._counts(at_s, stranger):
                yield name, stranger

    def forget_silent(self, at_s: float) -> None:
        silent = [key for key, one in self._strangers.items() if not self._counts(at_s, one)]
        for key in silent:
            del self._strangers[key]

    def _counts(self, at_s: float, stranger: Stranger[Said]) -> bool:
        holds = stranger.is_elsewhere and stranger.may_hold
        return at_s - stranger.heard_s < (self._remember_s if holds else self.fresh_s)

    def _came_up(self, incarnation: str, place: NodePlace) -> None:
        """Whoever was at this place before, under whatever name, is gone."""
        gone = [key for key, one in self._strangers.items() if one.place == place and key[1] != incarnation]
        for key in gone:
            del self._strangers[key]

    def _note(self, at_s: float, name: str, incarnation: str) -> Stranger[Said]:
        """Who spoke last stands last."""
        stranger = self._strangers.pop((name, incarnation), None) or Stranger[Said](heard_s=at_s)
        stranger.heard_s = at_s
        self._strangers[name, incarnation] = stranger
        if len(self._strangers) > self._most:
            del self._strangers[next(iter(self._strangers))]
        return stranger
