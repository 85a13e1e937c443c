"""Which episodes a step still needs, from what the scheduler has.

It makes a step repeatable: after the death of an actor, the driver or the scheduler, finished episodes are kept, those that nobody
runs any more are cancelled, and only the rest is started.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from rose.train.envs.base import Task
from rose.train.mix import TaskMix


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupState:
    """A group in the scheduler that no trainer has taken yet."""

    group_id: str
    group_size: int
    task: Task
    num_finished: int
    task_kind: str = ""
    """Name of its task in a job of several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """Episodes that one group still needs."""

    group_id: str
    group_size: int
    task: Task
    num_missing: int
    num_redundant: int = 0
    """Episodes beyond those, of which the slowest are dropped."""
    task_kind: str = ""
    prefill_per_decode: float | None = None
    """As measured of this task; for the scheduler."""


def plan_groups(
    *,
    waiting: Sequence[GroupState],
    mix: TaskMix,
    step: int,
    first_task: int | None,
    attempt: int,
    num_groups: int,
    group_size: int,
    num_redundant: int = 0,
    first_index: int = 0,
    ratios: Mapping[str, float] | None = None,
) -> list[GroupPlan]:
    """Episodes to start so that ``num_groups`` groups are complete.

    Args:
        waiting: Groups that no trainer has taken, complete or not.
        mix: The tasks of the job; steps walk through them in order.
        first_task: Where in ``mix`` this step begins.  None: of a refill, whose tasks are drawn beside that order.
        num_groups: Groups wanted now, complete ones among ``waiting`` included.
        first_index: Above the numbers of what this step has launched before, and of its own groups (a refill launches new ones).
        ratios: New prompt tokens per sampled one, by task.

    Groups begun before come first, or their finished episodes would be lost.  A new group's name holds
    the attempt, because a step that is repeated after a roll-back must not meet its earlier groups.  Its
    number is the lowest that none of the step's has, of whatever attempt: the number is the task's.
    """
    ratios = ratios or {}
    plans = [
        replace(plan_of(group), num_redundant=num_redundant, prefill_per_decode=ratios.get(group.task_kind))
        for group in waiting
        if group.num_finished < group.group_size
    ]
    num_begun = len(waiting)
    taken = {_number(group.group_id, step) for group in waiting}
    index = first_index
    while num_begun < num_groups:
        group_id = f"{attempt}-{step:06d}-{index:04d}"
        if index not in taken:
            if first_task is None:
                task_kind, task = mix.drawn(step, index)
            else:
                task_kind, task = mix.at(first_task + index)
            plans.append(
                GroupPlan(
                    group_id=group_id,
                    group_size=group_size,
                    task=task,
                    num_missing=group_size,
                    num_redundant=num_redundant,
                    task_kind=task_kind,
                    prefill_per_decode=ratios.get(task_kind),
                )
            )
            num_begun += 1
        index += 1
    return plans


class TaskOrder:
    """Where each step of a synchronous run begins in the order of its tasks.

    A step that takes what a refill has left over begins fewer groups of its own than ``num_groups``; what it does not begin is the next step's.  So the
    order of all groups but refills is that of a run without refills, and no place in it is left out for ever.

    Group ``i`` of a step has the place ``first(step) + i``, in each attempt; refills have numbers from ``num_groups`` on.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._first = {0: 0}
        """By step, as far as it is known."""

    def note(self, record: Mapping[str, Any]) -> None:
        """A step of a driver before this one, as ``metrics.jsonl`` has it."""
        if isinstance(told := record.get("next_task"), int):
            self._first[record["step"] + 1] = told

    def first(self, step: int) -> int:
        if step not in self._first:
            known = max(one for one in self._first if one <= step)
            self._first[step] = self._first[known] + (step - known) * self._num_groups
        return self._first[step]

    def begin(self, step: int, waiting: Sequence[GroupState]) -> int:
        """Where ``step`` begins; ``waiting``: the groups that it finds, of which those that it did not name itself take places of its own."""
        first = self.first(step)
        named = {number for group in waiting if (number := _number(group.group_id, step)) is not None}
        held = {number for number in named if number < self._num_groups}
        # As `plan_groups` numbers what it begins.
        free = (number for number in count() if number not in held)
        begun = held | set(islice(free, max(0, self._num_groups - len(waiting))))
        num_begun = next(number for number in count() if number not in begun)
        if len(named) > len(held):
            # Its refills began when all of its own had been played: those that are not there have failed, or were dropped.
            num_begun = max(begun, default=-1) + 1
        # A step that is taken again finds what later ones had begun: that is not begun again.
        self._first[step + 1] = max(self._first.get(step + 1, 0), first + num_begun)
        return first


def _number(group_id: str, step: int) -> int | None:
    """Of a group that any attempt has named for ``step``; None of another."""
    match group_id.split("-"):
        case [_, its_step, number] if its_step == f"{step:06d}" and number.isdecimal():
            return int(number)
        case _:
            return None


def num_named(plans: Sequence[GroupPlan], *, attempt: int, step: int) -> int:
    """Above the numbers of all groups among ``plans`` that :func:`plan_groups` named for this step of this attempt."""
    prefix = f"{attempt}-{step:06d}-"
    names = (plan.group_id for plan in plans)
    return max((1 + int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)), default=0)


def plan_of(group: GroupState) -> GroupPlan:
    """What a group that was begun still needs."""
    return GroupPlan(
        group_id=group.group_id,
        group_size=group.group_size,
        task=group.task,
        num_missing=group.group_size - group.num_finished,
        task_kind=group.task_kind,
    )


def split_plans(plans: Sequence[GroupPlan], num_managers: int) -> list[list[GroupPlan]]:
    """Whole groups to managers in turn, the largest first."""
    ordered = sorted(plans, key=lambda plan: -plan.num_missing)
    return [list(ordered[start::num_managers]) for start in range(num_managers)]
