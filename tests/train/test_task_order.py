"""The order of the tasks of a synchronous run over deaths in the middle of a step: each place is played, and none twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rose.train.mix import TaskMix
from rose.train.plan import GroupPlan, GroupState, TaskOrder, num_named, plan_groups

NUM_GROUPS, GROUP_SIZE, STEP = 4, 2, 5
MIX = TaskMix({"": [{"n": number} for number in range(1000)]})


def begin(
    order: TaskOrder, waiting: Sequence[GroupState], *, attempt: int, step: int = STEP
) -> list[GroupPlan]:
    return plan_groups(
        waiting=waiting,
        mix=MIX,
        step=step,
        first_task=order.begin(step, waiting),
        attempt=attempt,
        num_groups=NUM_GROUPS,
        group_size=GROUP_SIZE,
    )


def refill(waiting: Sequence[GroupState], wanted: int, *, attempt: int, named: int) -> list[GroupPlan]:
    return plan_groups(
        waiting=waiting,
        mix=MIX,
        step=STEP,
        first_task=None,
        attempt=attempt,
        num_groups=wanted,
        group_size=GROUP_SIZE,
        first_index=max(NUM_GROUPS, named),
    )


def held(plans: Sequence[GroupPlan], which: Sequence[int], *, num_finished: int = 1) -> list[GroupState]:
    """What of them a scheduler still has after a death."""
    return [
        GroupState(
            group_id=plans[one].group_id,
            group_size=GROUP_SIZE,
            task=plans[one].task,
            num_finished=num_finished,
        )
        for one in which
    ]


def places(groups: Sequence[GroupPlan | GroupState]) -> list[int]:
    return sorted(group.task["n"] for group in groups)


@pytest.mark.parametrize("survived", [[], [0, 2], [1, 3], [3], [0, 1, 2, 3]])
@pytest.mark.parametrize("num_left", [0, 1])
def test_a_death_in_mid_step_leaves_no_place_out_and_plays_none_twice(
    survived: list[int], num_left: int
) -> None:
    """Also where the step takes groups that the one before left over."""
    order = TaskOrder(NUM_GROUPS)
    left = [
        GroupState(group_id=f"1-000004-{4 + one:04d}", group_size=GROUP_SIZE, task={"n": -1}, num_finished=2)
        for one in range(num_left)
    ]
    first = begin(order, left, attempt=1)
    assert places(first) == [20, 21, 22, 23][: 4 - num_left]
    waiting = left + held(first, [one for one in survived if one < len(first)])
    again = TaskOrder(NUM_GROUPS)
    again.note({"step": STEP - 1, "next_task": 20})  # the driver died too
    second = begin(again, waiting, attempt=2)
    assert places(second) == places(first)  # the half of it goes on, the rest begins
    assert len({plan.group_id for plan in second}) == len(second)
    assert places(begin(again, [], attempt=2, step=STEP + 1)) == list(range(24 - num_left, 28 - num_left))


def test_where_more_waits_than_before_a_place_that_nobody_holds_is_the_next_steps() -> None:
    """A group that an earlier driver had given up, say, is taken for what was left over."""
    first = begin(TaskOrder(NUM_GROUPS), [], attempt=1)
    left = GroupState(group_id="1-000004-0001", group_size=GROUP_SIZE, task={"n": -1}, num_finished=2)
    order = TaskOrder(NUM_GROUPS)
    second = begin(order, [left, *held(first, [0, 3])], attempt=2)
    assert places(second) == [20, 21, 23]
    assert places(begin(order, [], attempt=2, step=STEP + 1))[0] == 22


@pytest.mark.parametrize("survived", [[0, 1, 2, 3], [0, 2, 3]])
def test_a_death_in_a_refill_begins_nothing_of_the_next_step_twice(survived: list[int]) -> None:
    """By then all of the step's own groups had been played; one whose episodes kept failing is not there any more."""
    first = begin(TaskOrder(NUM_GROUPS), [], attempt=1)
    more = refill([], 2, attempt=1, named=NUM_GROUPS)  # the trainer has the others
    order = TaskOrder(NUM_GROUPS)
    waiting = [*held(first, survived, num_finished=2), *held(more, [0, 1])]
    second = begin(order, waiting, attempt=2)
    assert sorted(plan.group_id for plan in second) == sorted(plan.group_id for plan in more)
    assert places(begin(order, [], attempt=2, step=STEP + 1)) == [24, 25, 26, 27]


def test_a_refill_draws_no_task_that_one_of_an_earlier_attempt_has_drawn() -> None:
    more = refill([], 2, attempt=1, named=NUM_GROUPS)
    again = refill(held(more, [0, 1], num_finished=2), 4, attempt=2, named=NUM_GROUPS)
    assert [plan.group_id for plan in again] == ["2-000005-0006", "2-000005-0007"]
    assert [plan.task for plan in again] == [MIX.drawn(STEP, number)[1] for number in (6, 7)]


def test_only_numbers_of_this_step_are_taken() -> None:
    names = ["1-000004-0000", "1-000005-x", "mine", "1-000005-0001-0002"]
    waiting = [GroupState(group_id=name, group_size=GROUP_SIZE, task={}, num_finished=2) for name in names]
    order = TaskOrder(NUM_GROUPS)
    assert begin(order, waiting, attempt=1) == []
    assert places(begin(order, [], attempt=1, step=STEP + 1)) == [20, 21, 22, 23]
    assert num_named(begin(TaskOrder(NUM_GROUPS), waiting[:1], attempt=1), attempt=1, step=STEP) == 3
