"""The synchronous loop on actors that do as the test says: names of groups, rounds, and how a run ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rose.auth import Tokens
from rose.errors import TrainError
from rose.train.actors import ActorDied, Actors
from rose.train.loop import train_with
from rose.train.plan import GroupPlan, GroupState
from rose.train.rollout import RolloutReport
from rose.train.train_config import TrainConfig


class PlayedActors(Actors):
    """Episodes end at once, but for those of the ``dies_in``-th round, whose manager dies.

    The trainer asks for ``refills`` in each attempt at a step, and gives back what it holds before the next.
    """

    def __init__(
        self, config: TrainConfig, *, dies_in: int | None = None, refills: Sequence[int] = ()
    ) -> None:
        super().__init__(config, Tokens.generate(), None)
        self.attempt = 1
        self.rounds: list[list[str]] = []
        self._dies_in, self._all_refills, self._refills = dies_in, refills, list(refills)
        self._waiting: list[GroupState] = []
        self._held: list[GroupState] = []

    async def ensure(self) -> list[dict[str, Any]]:
        self._waiting, self._held = self._held + self._waiting, []
        self._refills = list(self._all_refills)
        return []

    async def survey(self, group_ids: Sequence[str] | None = None) -> list[GroupState]:
        return list(self._waiting)

    async def run(self, plans: list[list[GroupPlan]]) -> list[RolloutReport]:
        named = [plan for part in plans for plan in part]
        self.rounds.append([plan.group_id for plan in named])
        if len(self.rounds) == self._dies_in:
            raise ActorDied("the manager")
        for plan in named:
            size = plan.group_size
            self._waiting.append(
                GroupState(group_id=plan.group_id, group_size=size, task=plan.task, num_finished=size)
            )
        return [RolloutReport(num_episodes=len(named), num_turns=0, num_retries=0)]

    async def train(self) -> dict[str, Any]:
        self._held, self._waiting = self._held + self._waiting, []
        if self._refills:
            missing = self._refills.pop(0)
            return {"missing": missing, "launch": missing, "held": 0}
        return {
            "step": self.step,
            "group_ids": [group.group_id for group in self._held],
            "sampled_success_rate": 0.0,
            "prefill_per_decode": 0.0,
        }

    async def stop_episodes(self) -> None:
        pass


def config_of(tmp_path: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": str(tmp_path / "model"),
            "output_dir": str(tmp_path / "out"),
            "num_steps": 1,
            "weights": {"directory": str(tmp_path / "weights")},
            "log": {"tensorboard": False, "page": False},
            "rollout": {"mode": "synchronous", "num_groups": 4, "group_size": 2},
            "trainer": {"learning_rate": 1e-3, "algorithm": "dapo", "stream_groups": "off"},
            **changes,
        }
    )


async def test_a_refill_after_a_managers_death_meets_no_group_that_the_trainer_holds(tmp_path: Path) -> None:
    actors = PlayedActors(config_of(tmp_path), dies_in=2, refills=[3])
    await train_with(actors, lambda _: None)
    first, died, again, refill = actors.rounds
    assert (len(first), len(died), again, len(refill)) == (4, 3, [], 3)
    assert not {*first, *died} & {*refill}


async def test_a_refill_meets_no_group_that_was_named_beside_those_that_waited(tmp_path: Path) -> None:
    actors = PlayedActors(config_of(tmp_path), refills=[3])
    left = GroupState(group_id="0-000000-0000", group_size=2, task={}, num_finished=2)
    ready = [left, GroupState(group_id="1-000000-0000", group_size=2, task={}, num_finished=2)]
    actors._waiting += ready
    await train_with(actors, lambda _: None)
    names = [name for names in actors.rounds for name in names] + [group.group_id for group in ready]
    assert len(names) == len({*names}) == 2 + 3 + 2


async def test_a_refill_has_no_number_of_the_steps_own(tmp_path: Path) -> None:
    """Also in a step that begins fewer groups of its own, beside what was left over: a later attempt tells them apart by it."""
    actors = PlayedActors(config_of(tmp_path), refills=[2])
    actors._waiting.append(GroupState(group_id="left", group_size=2, task={}, num_finished=2))
    await train_with(actors, lambda _: None)
    assert actors.rounds == [
        ["1-000000-0000", "1-000000-0001", "1-000000-0002"],
        ["1-000000-0004", "1-000000-0005"],
    ]


class Refilling(PlayedActors):
    """In each step one group is missing after the first lease, and ``launch`` are begun for it.  A step takes what is oldest, and what it leaves waits."""

    def __init__(self, config: TrainConfig, launch: int) -> None:
        super().__init__(config)
        self._launch, self._is_refilling = launch, False
        self.own: list[tuple[str, Any]] = []
        """Kind and task of each group that a step began with."""
        self.refills: list[tuple[str, Any]] = []

    async def run(self, plans: list[list[GroupPlan]]) -> list[RolloutReport]:
        begun = sorted((plan for part in plans for plan in part), key=lambda plan: plan.group_id)
        (self.refills if self._is_refilling else self.own).extend((one.task_kind, one.task) for one in begun)
        return await super().run(plans)

    async def train(self) -> dict[str, Any]:
        count = 1 if self._is_refilling else self.config.rollout.num_groups
        self._waiting, left = self._waiting[:count], self._waiting[count:]
        record = await super().train()
        self._waiting, self._held = left, []
        self._is_refilling = self._launch > 0 and not self._is_refilling
        return {"missing": 1, "launch": self._launch, "held": 0} if self._is_refilling else record


def two_tasks(tmp_path: Path, num_steps: int) -> TrainConfig:
    """Three groups of the one to one of the other."""
    lake = {"kind": "frozenlake", "settings": {"num_maps": 100}, "max_tokens": 1}
    tasks = [{**lake, "name": "much", "weight": 3.0}, {**lake, "name": "little"}]
    return config_of(tmp_path, num_steps=num_steps, tasks=tasks)


async def test_refills_leave_the_order_and_the_mix_of_tasks_as_they_are(tmp_path: Path) -> None:
    actors = Refilling(two_tasks(tmp_path, 200), launch=1)
    await train_with(actors, lambda _: None)
    assert actors.own == [actors.mix.at(index) for index in range(800)]
    # By weight 150 of 200, give or take six: the place behind four others in the order is always the same one's.
    assert 130 <= [kind for kind, _ in actors.refills].count("much") <= 170


@pytest.mark.parametrize("breaks_off", [None, 7])
async def test_what_a_refill_leaves_over_takes_no_tasks_turn(tmp_path: Path, breaks_off: int | None) -> None:
    """Nor where another driver goes on: the order is that of a run without refills."""
    alone = Refilling(two_tasks(tmp_path / "alone", 12), launch=0)
    await train_with(alone, lambda _: None)

    first = Refilling(two_tasks(tmp_path, breaks_off or 16), launch=2)
    await train_with(first, lambda _: None)
    own = first.own
    if breaks_off is not None:
        second = Refilling(two_tasks(tmp_path, 16), launch=2)
        second.step, second.attempt, second._waiting = breaks_off, 2, first._waiting
        await train_with(second, lambda _: None)
        own = first.own + second.own
    assert len(own) == 4 + 15 * 3  # one that was left over in each step but the first
    assert own[:48] == alone.own


async def test_a_starved_step_has_as_many_rounds_as_its_guard(tmp_path: Path) -> None:
    trainer = {
        "learning_rate": 1e-3,
        "algorithm": "grpo",
        "stream_groups": "off",
        "guard": {"max_rounds": 40},
    }
    actors = PlayedActors(config_of(tmp_path, trainer=trainer), refills=[1] * 39)
    assert (await train_with(actors, lambda _: None)).num_steps == 1
    assert len(actors.rounds) == 40


async def test_a_trainer_that_dies_in_the_export_is_named_with_what_to_do(tmp_path: Path) -> None:
    class Dying(PlayedActors):
        async def export(self, target: Path, which: Any) -> str:
            raise ActorDied("out of memory")

    with pytest.raises(
        TrainError, match=r"while it wrote the export.*out of memory.*rose train --export last"
    ):
        await train_with(Dying(config_of(tmp_path, export=True)), lambda _: None)
