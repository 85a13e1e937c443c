"""Which groups a step begins where short and long rounds take turns (tail batching, after RollPacker).

A synchronous step ends with its longest trajectories.  A *short* round begins more groups than its batch takes, and more members than a group has, and takes what is
complete first.  Groups that were not are put by, and begin anew once there are enough of them for a batch: in a *long* round, which begins no more than it takes, and
waits for all.  So the longest wait for each other and not everybody for them.

**Lengths.**  With more groups alone no sample is favoured: each group is trained on, whole, if not in the order in which it came; over the rounds from one long one to
the next the lengths are those of the job.  Within a round they are not: a short round's update sees short groups, a long round's long ones.  With more members than a
group has, those that end first are taken, which are the shorter ones, and the longer are never trained on: a bias of the gradient, as long as it is on.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rose.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """Groups that a step begins: those ``again`` that were put by, and ``num_new`` others, each with so many members more than it takes."""

    again: tuple[int, ...]
    num_new: int
    extra_members: int

    @property
    def is_long(self) -> bool:
        return bool(self.again)


@dataclass(kw_only=True, slots=True)
class TailBatching:
    """Args:
        num_groups: Of a batch.
        extra_groups: That a short round begins beyond them, 1 or more; without any no group would ever be put by.
        extra_members: That each group of a short round has more than it takes.
        patience: Rounds after which a group that was put by begins in a long round although too few others wait with it, which new ones
            then fill up; 0: it waits for as long as that takes.

    Raises:
        ConfigError: A value out of range.
    """

    num_groups: int
    extra_groups: int
    extra_members: int = 0
    patience: int = 0
    put_by: deque[int] = field(default_factory=lambda: deque[int]())
    """Groups for a long round, the oldest first."""
    _rounds: deque[int] = field(default_factory=lambda: deque[int]())
    """In which round each of them was put by."""
    _round: int = 0

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ConfigError(f"{self.num_groups} is below 1", field="num_groups")
        if self.extra_groups < 1:
            raise ConfigError(f"{self.extra_groups} is below 1", field="extra_groups")
        if self.extra_members < 0:
            raise ConfigError(f"{self.extra_members} is below 0", field="extra_members")
        if self.patience < 0:
            raise ConfigError(f"{self.patience} is below 0", field="patience")

    def begin(self, num_complete: int = 0) -> RoundPlan:
        """The next step begins; a long round takes its groups from those that were put by.

        Args:
            num_complete: Groups that are complete already and will be in its batch: a short round may have completed more than it took.
        """
        self._round += 1
        room = max(0, self.num_groups - num_complete)
        if not room:
            return RoundPlan(again=(), num_new=0, extra_members=0)
        if len(self.put_by) < room and not self._is_late:
            return RoundPlan(again=(), num_new=room + self.extra_groups, extra_members=self.extra_members)
        again = tuple(self.put_by.popleft() for _ in range(min(room, len(self.put_by))))
        for _ in again:
            self._rounds.popleft()
        return RoundPlan(again=again, num_new=room - len(again), extra_members=0)

    def end(self, unfinished: Iterable[int]) -> None:
        """The step's batch is complete; these groups of it were not."""
        for group in unfinished:
            self.put_by.append(group)
            self._rounds.append(self._round)

    @property
    def _is_late(self) -> bool:
        return bool(self.patience and self._rounds) and self._round - self._rounds[0] > self.patience
