"""What the tests of whole runs share: a job on a :class:`~tests.train.world.World`, and somebody who kills its actors.

``python -m tests.train.ray_world TABLE.json TOKENS.toml [MODULE:TRAINER]`` is a driver of its own, for tests that kill the driver.
Actors import this module, too: it imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import pkgutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.auth import Tokens
from rose.testing.toy_recipe import TOY_RECIPE
from rose.train.envs.base import Observation
from rose.train.envs.frozenlake import FrozenLakeFamily, FrozenLakeParams
from rose.train.loop import run_training
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from tests.train.file_publisher import RUN, file_publisher

if TYPE_CHECKING:
    from tests.train.world import World

SHORT_LAKES = {"num_maps": 4, "max_turns": 4, "min_start_distance": 1, "max_start_distance": 2}
"""Tasks of a few turns, of which an untrained policy solves some: for runs in which nobody looks at what they learn."""
FINE_TUNING = {"fine_tuning_steps": 2, "fine_tuning_learning_rate": 5e-6}


def job_table(world: World, **changes: Any) -> dict[str, Any]:
    return {
        "job": RUN,
        "model": str(world.model_path),
        "output_dir": str(world.root / "out"),
        "num_steps": 6,
        "scheduler": {"url": world.url, "retry_s": 20.0},
        "weights": {"directory": str(world.versions)},
        "rollout": {"num_groups": 4, "group_size": 8},
        "env": {"settings": {"num_maps": 4}},
    } | {
        **changes,
        "ray": {"address": "local"} | changes.get("ray", {}),
        "trainer": {**TOY_RECIPE, **FINE_TUNING, "keep_checkpoints": 100, **changes.get("trainer", {})},
    }


class Assassin:
    """Progress callback that SIGKILLs actors: ``victims`` by step, when that step is *under way* or just done.

    Args:
        mid_step: Wait until the next step's first sign of life.
    """

    def __init__(self, victims: Mapping[int, str], *, mid_step: bool = False) -> None:
        self._victims = dict(victims)
        self._mid_step = mid_step
        self._aim: str | None = None
        self.records: list[Mapping[str, Any]] = []
        self.events: list[str] = []

    def __call__(self, record: Mapping[str, Any]) -> None:
        if record.get("event") == "rollout":
            if self._aim is not None:
                self._shoot(self._aim)
            return
        if "event" in record:
            self.events.append(f"{record['event']} {record.get('actor', '')}".strip())
            return
        self.records.append(record)
        victim = self._victims.pop(record["step"], None)
        if victim is not None and self._mid_step:
            self._aim = victim
        elif victim is not None:
            self._shoot(victim)

    def _shoot(self, victim: str) -> None:
        self._aim = None
        os.kill(actor_pid(victim), signal.SIGKILL)


def actor_pid(class_name: str, ancestor: int | None = None) -> int:
    """Ray names its workers after what they run."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"ray::{class_name}" in (entry / "cmdline").read_text():
                status = (entry / "status").read_text()
                if "\nState:\tZ" not in status and _descends_from(int(entry.name), ancestor or os.getpid()):
                    return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"no actor {class_name}")


def _descends_from(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return False


async def reward_of_length(task: Any, messages: Any, info: Any) -> float:
    """A reward function that the environment does not have: short episodes are worth more."""
    return 1.0 / max(1, info["turns"])


async def constant_reward(task: Any, messages: Any, info: Any) -> float:
    return 0.25


class Wrapper:
    """An environment that does as ``inner``, but for what a subclass changes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def reset(self, task: Any) -> Observation:
        return await self.inner.reset(task)

    async def step(self, text: str) -> Observation:
        return await self.inner.step(text)

    async def close(self) -> None:
        await self.inner.close()


class HalfEndless(FrozenLakeFamily):
    """FrozenLake on which every other task never answers."""

    def make(self) -> Any:
        inner, tasks = super().make(), list(self.tasks())

        class Episode(Wrapper):
            async def reset(self, task: Any) -> Observation:
                return await (asyncio.Future() if tasks.index(task) % 2 else inner.reset(task))

        return Episode(inner)


def half_endless() -> HalfEndless:
    return HalfEndless(FrozenLakeParams(**SHORT_LAKES))


class OneStuck(FrozenLakeFamily):
    """FrozenLake whose first episode does not answer after its first turn."""

    num_made = 0

    def make(self) -> Any:
        self.num_made += 1
        inner, is_stuck = super().make(), self.num_made == 1

        class Episode(Wrapper):
            async def step(self, text: str) -> Observation:
                return await (asyncio.Future() if is_stuck else inner.step(text))

        return Episode(inner)


def one_stuck() -> OneStuck:
    return OneStuck(FrozenLakeParams(**SHORT_LAKES))


class Gated(FrozenLakeFamily):
    """FrozenLake whose first ``num_free`` episodes, of each manager, begin at once, and all others when there is a file."""

    def __init__(self, path: Path, num_free: int) -> None:
        super().__init__(FrozenLakeParams(**SHORT_LAKES))
        self._path, self._num_free, self._num_made = path, num_free, 0

    def make(self) -> Any:
        inner, path, is_free = super().make(), self._path, self._num_made < self._num_free
        self._num_made += 1

        class Episode(Wrapper):
            async def reset(self, task: Any) -> Observation:
                while not (is_free or path.exists()):  # noqa: ASYNC110 - another process makes it
                    await asyncio.sleep(0.05)
                return await inner.reset(task)

        return Episode(inner)


def gated(path: str, num_free: int = 8) -> Gated:
    return Gated(Path(path), num_free)


class LateGroups(FrozenLakeFamily):
    """FrozenLake of which five groups (of four) begin, and the others when a trainer has begun with a part of a step's three, or after two minutes.

    After a death five more begin: :meth:`found_none` lets one more go where these fill steps exactly.
    """

    has_begun = False
    num_free = 5
    newest: LateGroups | None = None

    def __init__(self, params: FrozenLakeParams) -> None:
        super().__init__(params)
        self.num_made: Counter[int] = Counter()
        self.num_played = 0
        self.waiting: list[int] = []

    @staticmethod
    def found_none() -> None:
        """A trainer lacks groups, and there is none: where none is played either, the next may begin."""
        family = LateGroups.newest
        if family is not None and family.waiting and not family.num_played:
            LateGroups.num_free = max(LateGroups.num_free, min(family.waiting) + 1)

    def make(self) -> Any:
        inner, tasks, family = super().make(), list(self.tasks()), self
        LateGroups.newest = self

        class Episode(Wrapper):
            is_played = False

            async def reset(self, task: Any) -> Observation:
                index = tasks.index(task)
                group = made[index] // 4 * len(tasks) + index  # tasks have their groups in turn
                made[index] += 1
                family.waiting.append(group)
                try:
                    for _ in range(10_000):
                        if LateGroups.has_begun or group < LateGroups.num_free:
                            break
                        await asyncio.sleep(0.01)
                finally:
                    family.waiting.remove(group)
                family.num_played += 1
                self.is_played = True
                return await inner.reset(task)

            async def close(self) -> None:
                family.num_played -= self.is_played
                self.is_played = False
                await super().close()

        made = self.num_made
        return Episode(inner)


def late_groups() -> LateGroups:
    return LateGroups(FrozenLakeParams(**SHORT_LAKES))


class Over(FrozenLakeFamily):
    """FrozenLake in which every ``every``-th task is over when it begins."""

    every = 2

    def make(self) -> Any:
        inner, tasks, every = super().make(), list(self.tasks()), self.every

        class Episode(Wrapper):
            async def reset(self, task: Any) -> Observation:
                if tasks.index(task) % every == 0:
                    return Observation(done=True, reward=0.5)
                return await inner.reset(task)

        return Episode(inner)


class Dull(FrozenLakeFamily):
    """FrozenLake in which every other task earns nothing, whatever is done: its groups teach nothing."""

    def make(self) -> Any:
        inner, tasks = super().make(), list(self.tasks())
        is_dull = False

        class Episode(Wrapper):
            async def reset(self, task: Any) -> Observation:
                nonlocal is_dull
                is_dull = tasks.index(task) % 2 == 0
                return await inner.reset(task)

            async def step(self, text: str) -> Observation:
                seen = await inner.step(text)
                return replace(seen, reward=0.0) if is_dull else seen

        return Episode(inner)


class ByHeart(FrozenLakeFamily):
    """FrozenLake in which every training task is solved by the first move, and no held-out one by any."""

    def make(self) -> Any:
        inner, tasks = super().make(), list(self.tasks())
        known = False

        class Episode(Wrapper):
            async def reset(self, task: Any) -> Observation:
                nonlocal known
                known = task in tasks
                return await inner.reset(task)

            async def step(self, text: str) -> Observation:
                await inner.step(text)
                return Observation(done=True, reward=float(known), success=known)

        return Episode(inner)


def by_heart() -> ByHeart:
    return ByHeart(FrozenLakeParams(**SHORT_LAKES))


def half_dull() -> Dull:
    return Dull(FrozenLakeParams(**SHORT_LAKES))


def half_over() -> Over:
    return Over(FrozenLakeParams(**SHORT_LAKES))


def all_over() -> Over:
    family = half_over()
    family.every = 1
    return family


class Failing(FrozenLakeFamily):
    """FrozenLake in which some tasks have no environment, but for every fourth episode, which is over when it begins."""

    num_made = 0

    def make(self) -> Any:
        inner, is_broken = super().make(), self.is_broken
        self.num_made += 1
        is_over = self.num_made % 4 == 0

        class Episode(Wrapper):
            async def reset(self, task: Any) -> Observation:
                if is_broken(task):
                    if is_over:
                        return Observation(done=True, reward=0.5)
                    await asyncio.sleep(0.2)  # so that the other has ended
                    raise ConnectionError("its sandbox does not start")
                return await inner.reset(task)

        return Episode(inner)

    def is_broken(self, task: Any) -> bool:
        return task == self.tasks()[0]


class HeldOutFailing(Failing):
    def is_broken(self, task: Any) -> bool:
        return task not in self.tasks()


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def first_task_fails() -> Failing:
    return Failing(FrozenLakeParams(**SHORT_LAKES))


def held_out_fails() -> HeldOutFailing:
    return HeldOutFailing(FrozenLakeParams(**SHORT_LAKES))


def main(table: str, tokens: str, trainer: str | None = None) -> None:
    config = TrainConfig.model_validate(json.loads(Path(table).read_text()))

    def show(record: Mapping[str, Any]) -> None:
        print(json.dumps({"step": record.get("step"), "event": record.get("event")}), flush=True)

    make_trainer = None if trainer is None else pkgutil.resolve_name(trainer)
    parts = Parts(make_publisher=file_publisher, make_trainer=make_trainer)
    run_training(config, Tokens.load(tokens), progress=show, parts=parts, watch_s=1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
