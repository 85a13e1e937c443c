"""Which episodes a step starts, from what the scheduler has."""

from __future__ import annotations

from typing import Any

from rose.train.mix import TaskMix
from rose.train.plan import GroupPlan, GroupState, plan_groups, split_plans

TASKS: list[dict[str, Any]] = [{"n": 0}, {"n": 1}, {"n": 2}]


def plan(waiting: list[GroupState], *, step: int = 4, num_groups: int = 3) -> list[GroupPlan]:
    return plan_groups(
        waiting=waiting,
        mix=TaskMix({"": TASKS}),
        step=step,
        first_task=step * num_groups,
        attempt=2,
        num_groups=num_groups,
        group_size=8,
    )


def test_an_undisturbed_step_starts_all_groups_and_walks_through_the_tasks() -> None:
    first, second = plan([], step=0, num_groups=2), plan([], step=1, num_groups=2)
    assert [(one.task["n"], one.num_missing) for one in first + second] == [(0, 8), (1, 8), (2, 8), (0, 8)]
    assert len({one.group_id for one in first + second}) == 4


def test_groups_begun_before_are_completed_first_and_ready_ones_count() -> None:
    ready = GroupState(group_id="1-000004-0000", group_size=8, task=TASKS[0], num_finished=8)
    begun = GroupState(group_id="2-000004-0001", group_size=8, task=TASKS[1], num_finished=5)

    plans = plan([ready, begun])

    # The first task of the step is the ready one's, whichever attempt began it.
    assert [(one.group_id, one.num_missing) for one in plans] == [("2-000004-0001", 3), ("2-000004-0002", 8)]


def test_a_full_house_starts_nothing_but_what_is_half_done() -> None:
    waiting = [
        GroupState(group_id=f"g{index}", group_size=8, task=TASKS[0], num_finished=finished)
        for index, finished in enumerate([8, 8, 8, 2])
    ]
    assert [(one.group_id, one.num_missing) for one in plan(waiting)] == [("g3", 6)]


def test_groups_are_split_whole_and_none_is_lost() -> None:
    plans = plan([], num_groups=7)
    parts = split_plans(plans, 3)
    assert sorted(len(part) for part in parts) == [2, 2, 3]
    assert sorted(one.group_id for part in parts for one in part) == sorted(one.group_id for one in plans)
