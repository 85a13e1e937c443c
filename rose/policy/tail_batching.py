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

    Raises:
        ConfigError: A value out of range.
    """

    num_groups: int
    extra_groups: int
    extra_members: int = 0
    put_by: deque[int] = field(default_factory=lambda: deque[int]())
    """Groups for a long round, the oldest first."""

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ConfigError(f"{self.num_groups} is below 1", field="num_groups")
        if self.extra_groups < 1:
            raise ConfigError(f"{self.extra_groups} is below 1", field="extra_groups")
        if self.extra_members < 0:
            raise ConfigError(f"{self.extra_members} is below 0", field="extra_members")

    def begin(self) -> RoundPlan:
        """The next step begins; a long round takes its groups from those that were put by."""
        if len(self.put_by) < self.num_groups:
            return RoundPlan(
                again=(), num_new=self.num_groups + self.extra_groups, extra_members=self.extra_members
            )
        again = tuple(self.put_by.popleft() for _ in range(self.num_groups))
        return RoundPlan(again=again, num_new=0, extra_members=0)

    def end(self, unfinished: Iterable[int]) -> None:
        """The step's batch is complete; these groups of it were not."""
        self.put_by.extend(unfinished)
