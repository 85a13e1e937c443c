"""The actors of a run: makes them, replaces dead ones, and renames Ray's errors.

Environment managers, the train worker with its ranks, and reward workers (made by the managers).  Ray holds no durable state: any
actor may die at any moment, and so may a node with all of its actors.  No actor is made before :mod:`rose.train.room` has
reserved room for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose.auth import Tokens
from rose.errors import RoseError, TrainError
from rose.train.build import torch_trainer
from rose.train.env_manager import EnvManager, eval_job, family_of
from rose.train.envs.base import Task
from rose.train.evaluation import EvalEpisode, Part, parts_of, told_of
from rose.train.export import Which
from rose.train.fate import with_its_node
from rose.train.mix import TaskMix, TaskShapes
from rose.train.plan import GroupPlan, GroupState, num_named
from rose.train.rollout import RolloutReport
from rose.train.room import LOOK_EVERY_S, Room
from rose.train.train_config import RewardSettings, TrainConfig
from rose.train.workers import Parts, TrainWorker

logger = logging.getLogger(__name__)

PING_TIMEOUT_S = 60.0
"""Longer than an actor takes to start on one busy core."""
STOP_TIMEOUT_S = 15.0
"""Longer than a manager waits for a scheduler that does not answer."""
START_TIMEOUT_S = 300.0
"""For an actor that has room: Ray notices the death of a node after half a minute, and starts it elsewhere."""
TROUBLE_EVERY_S = 30.0
"""Between two looks at what keeps the engines or rewards from coming that a manager waits for."""
MAX_GIVEN_UP = 2
"""Times that a group is begun whose episodes fail: what it has finished is worth another try, but not one after the other."""
MAX_REMEMBERED = 10_000
"""Groups that are known to have failed."""


class ActorDied(Exception):
    """An actor is gone; its replacement goes on from durable state."""


class EvaluationFailed(TrainError):
    """Episodes of an evaluation failed too often.  The step before them stands."""


class Actors:
    """See the module's docstring.

    Attributes:
        step: The next to take.
        alpha: Versions beyond which a sample is too old for it.
        num_deaths_in_a_row: Without a finished step between them.
        given_up: How often each group's episodes have failed, the newest groups last.
        last_death: Why the last step was broken off; :meth:`ensure` finds out whose death it was.
    """

    def __init__(self, config: TrainConfig, tokens: Tokens, parts: Parts | None) -> None:
        self.config = config
        families = {task.name: family_of(task) for task in config.all_tasks}
        self.mix = TaskMix(
            {name: family.tasks() for name, family in families.items()},
            {task.name: task.weight for task in config.all_tasks},
            seed=config.seed,
        )
        self.shapes = TaskShapes()
        wanted = config.eval.every_steps or config.eval.at_end
        self._eval_tasks: dict[Part, list[tuple[str, Task]]] = {}
        """What an evaluation plays, by part of it."""
        for part in parts_of(config.eval, config.rollout.temperature) if wanted else ():
            self._eval_tasks[part] = [
                (name, task)
                for name, family in families.items()
                for task in (
                    family.tasks()[: config.eval.num_training_tasks]
                    if part.of_training
                    else family.held_out_tasks(config.eval.num_tasks)
                )
            ]
        self.step = 0
        self.alpha = config.alpha
        self.attempt = 0
        self.num_restarts = 0
        self.num_deaths_in_a_row = 0
        self.last_death: str | None = None
        self.given_up: Counter[str] = Counter()
        self._named: tuple[tuple[int, int], int] = (0, 0), 0
        self.tokens = tokens
        self._parts = parts
        self._room = Room(config)
        self._managers: list[Any] = [None] * self._room.num_managers
        self._has_surveyed = False
        self._trainer: Any = None
        self._ranks: list[Any] = []
        self._told: set[tuple[str, str]] = set()
        """Troubles of episodes that the log has: whose, and their sort."""
        self._looked_s: dict[int, float] = {}

    @property
    def num_managers(self) -> int:
        return len(self._managers)

    def gave_up(self, group_id: str) -> None:
        """A group's episodes kept failing."""
        self.given_up[group_id] += 1
        if len(self.given_up) > MAX_REMEMBERED:
            del self.given_up[next(iter(self.given_up))]

    @property
    def num_named(self) -> int:
        """Above the numbers of all groups that this step was begun with, also before a manager died: the trainer may hold any of them."""
        of, count = self._named
        return count if of == (self.attempt, self.step) else 0

    def note_names(self, plans: Sequence[GroupPlan]) -> None:
        """These groups are begun for the step."""
        count = num_named(plans, attempt=self.attempt, step=self.step)
        self._named = (self.attempt, self.step), max(self.num_named, count)

    def may_begin_again(self, group_id: str) -> bool:
        """Whether a group that was begun before is worth it."""
        return self.given_up[group_id] < MAX_GIVEN_UP

    async def ensure(self) -> list[dict[str, Any]]:
        """Have every actor alive; what happened on the way, for the progress callback.

        Raises:
            TrainError: Too many deaths in a row.
        """
        events: list[dict[str, Any]] = []
        alive = [
            await self._alive(manager, f"environment manager {index}", events)
            for index, manager in enumerate(self._managers)
        ]
        trainer_alive = await self._alive(self._trainer, "trainer", events)
        if self.last_death is not None and not events:
            self._count("nobody that stayed dead", events)  # unreachable for a moment: it counts all the same
        self.last_death = None
        if not (trainer_alive and all(alive)) and await self._hold_room():
            trainer_alive, alive = False, [False] * self._room.num_managers
            self._managers = [None] * len(alive)
        new: list[Any] = []
        for index, lives in enumerate(alive):
            if not lives:
                self._managers[index] = self._make_manager(index)
                new.append(self._managers[index])
        if not trainer_alive:
            self._make_trainer()
            new += [*self._ranks, self._trainer]
        for actor in new:
            await self._started(actor)
        if trainer_alive:
            await answer_of(self._trainer.release.remote())
        else:
            num_taken = self.step if self.attempt else None  # by a trainer that this one replaces
            started = await answer_of(self._trainer.start.remote(self.alpha, num_taken))
            self.step, self.attempt = started["step"], started["attempt"]
            events.append({"event": "attempt", **started})
        return events

    async def _hold_room(self) -> bool:
        return await self._room.hold()

    async def _started(self, actor: Any) -> None:
        """Wait until a new actor answers; its room may be lost meanwhile.

        Raises:
            ActorDied: It did not start.
            ConfigError: There is no room for it any more, see :meth:`Room.hold`.
        """
        until_s = time.monotonic() + START_TIMEOUT_S
        ping = asyncio.ensure_future(answer_of(actor.pid.remote()))
        try:
            while not (await asyncio.wait({ping}, timeout=LOOK_EVERY_S))[0]:
                if await self._hold_room():
                    raise ActorDied("the node that it was to start on is gone")
                if time.monotonic() > until_s:
                    raise ActorDied("it did not start")
            await ping
        finally:
            ping.cancel()

    async def _alive(self, actor: Any, name: str, events: list[dict[str, Any]]) -> bool:
        """Whether ``actor`` answers.  One that is silent for too long is made sure to be dead."""
        if actor is None:
            return False
        try:
            await asyncio.wait_for(answer_of(actor.pid.remote()), PING_TIMEOUT_S)
            return True
        except (ActorDied, TimeoutError) as error:
            self._kill(actor)
            self.last_death = self.last_death or str(error) or "no answer"
            self._count(name, events)
            return False

    def _count(self, name: str, events: list[dict[str, Any]]) -> None:
        self.num_restarts += 1
        self.num_deaths_in_a_row += 1
        logger.warning("%s died and is replaced: %s", name, self.last_death)
        events.append({"event": "actor_died", "actor": name, "reason": self.last_death})
        if self.num_deaths_in_a_row > self.config.ray.max_restarts:
            raise TrainError(
                f"{self.num_deaths_in_a_row} deaths in a row without a finished step, the last: {self.last_death}",
                field="ray.max_restarts",
            )

    def _make_manager(self, index: int) -> Any:
        import ray

        config = self.config
        # An asynchronous run makes a call per group, of which a refill begins up to four times as many.  At Ray's own
        # limit, a thousand, the next ping would wait behind them, and the manager be taken for dead.
        num_calls = 1000 + 4 * (config.most_alpha + 1) * config.rollout.num_groups
        options: Any = {**self._room.of_manager(index), "max_concurrency": num_calls}
        make: Any = ray.remote(**options)(with_its_node(EnvManager))
        # Whose code plays there is not asked: it gets no token that publishes, and no key.
        return make.remote(self.config, self.tokens.only(["environment"]), spawn_reward_worker)

    def _kill(self, actor: Any) -> None:
        import ray

        ray.kill(actor)

    def _make_trainer(self) -> None:
        import ray

        config, room = self.config, self._room
        for rank in self._ranks:
            ray.kill(rank)
        if room.num_ranks > 1:
            from rose.train.ranks import TrainRank

            make = (self._parts.make_trainer if self._parts else None) or torch_trainer
            bound = with_its_node(TrainRank)
            self._ranks = [
                ray.remote(**room.of_rank(index))(bound).remote(config, make, index)
                for index in range(1, room.num_ranks)
            ]
        make_worker: Any = ray.remote(**room.of_rank(0))(with_its_node(TrainWorker))
        self._trainer = make_worker.remote(config, self.tokens, self._parts, self._ranks)

    # --- calls -----------------------------------------------------------------------------------------

    async def survey(self, group_ids: Sequence[str] | None = None) -> list[GroupState]:
        # The first is before a run's first evaluation: those that are being played are an earlier driver's.  A manager cannot know, it may be a
        # replaced one's successor, with an evaluation of ours on the others.
        first = not self._has_surveyed
        groups = await answer_of(self._managers[0].survey.remote(group_ids, with_evaluation=first))
        self._has_surveyed = True
        return groups

    async def num_ready(self) -> int:
        return await answer_of(self._managers[0].num_ready.remote())

    async def leave_stale(self) -> None:
        """See :meth:`rose.train.env_manager.EnvManager.leave_stale`."""
        await asyncio.gather(*(answer_of(one.leave_stale.remote()) for one in self._managers))

    async def run(self, plans: list[list[GroupPlan]]) -> list[RolloutReport]:
        """Each manager its plans; all are waited for even if one fails: the next survey must find nothing running."""
        calls = [self.run_on(index, part) for index, part in enumerate(plans) if part]
        reports = await asyncio.gather(*calls, return_exceptions=True)
        for report in reports:
            if isinstance(report, BaseException):
                raise report
        return [report for report in reports if isinstance(report, RolloutReport)]

    async def run_on(self, manager: int, plans: Sequence[GroupPlan]) -> RolloutReport:
        return await self._playing(manager, self._managers[manager].run.remote(list(plans)))

    async def _playing(self, manager: int, reference: Any) -> Any:
        """:func:`answer_of` a call that plays episodes.  Why no engine takes their turns, or their rewards do not come, is logged meanwhile,
        once: a step that waits for them says nothing until it ends, and a manager's own log is read by nobody."""
        answer = asyncio.ensure_future(answer_of(reference))
        try:
            while not (await asyncio.wait({answer}, timeout=TROUBLE_EVERY_S))[0]:
                await self._tell_trouble(manager)
            return await answer
        finally:
            answer.cancel()

    async def _tell_trouble(self, manager: int) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s.get(manager, -TROUBLE_EVERY_S) < TROUBLE_EVERY_S:
            return  # another of its calls has looked
        self._looked_s[manager] = now_s
        try:
            asked = answer_of(self._managers[manager].trouble.remote())
            found = await asyncio.wait_for(asked, PING_TIMEOUT_S)
        except (ActorDied, RoseError, TimeoutError):
            return  # the call itself will say so
        for whose, sort, words in found:
            if (whose, sort) not in self._told:
                self._told.add((whose, sort))
                logger.warning("%s: %s", whose, words)

    async def stop_episodes(self) -> None:
        """The run is over: what managers still play is for nobody.  Without it engines would go on with it until the scheduler
        misses the clients, and its trajectories would stay open for hours.  Gives up in silence: the next run cancels them too."""
        calls = [answer_of(manager.stop.remote()) for manager in self._managers if manager is not None]
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError:
            logger.warning("environment managers did not stop in time")

    async def stop_training(self) -> None:
        """See :meth:`rose.train.env_manager.EnvManager.stop_training`."""
        await asyncio.gather(*(answer_of(one.stop_training.remote()) for one in self._managers))

    async def progress(self) -> tuple[int, int]:
        """Episodes started and ended since the managers were made."""
        counts = await asyncio.gather(*(answer_of(one.progress.remote()) for one in self._managers))
        return sum(count[0] for count in counts), sum(count[1] for count in counts)

    async def train(self) -> dict[str, Any]:
        """See :meth:`rose.train.workers.TrainWorker.train`."""
        rate, fine = self.config.learning_rate_at(self.step), self.config.is_fine_tuning(self.step)
        return await answer_of(self._trainer.train.remote(rate, single_update=fine, alpha=self.alpha))

    async def begin(self) -> int:
        """See :meth:`rose.train.workers.TrainWorker.begin`."""
        return await answer_of(self._trainer.begin.remote())

    async def gather(self) -> int:
        """See :meth:`rose.train.workers.TrainWorker.gather`."""
        return await answer_of(self._trainer.gather.remote())

    async def evaluate(self) -> dict[str, Any]:
        """Play the tasks of an evaluation on the current weights; what it says, and the version that played them all.

        Raises:
            EvaluationFailed: Episodes failed too often.
            TrainError: An episode was played by other weights than those that it was pinned to.
        """
        version = await answer_of(self._trainer.pin.remote(eval_job(self.config)))
        shares = [
            (part, index, share)
            for part, tasks in self._eval_tasks.items()
            for index in range(self.num_managers)
            if (share := tasks[index :: self.num_managers])
        ]
        try:
            found = await asyncio.gather(
                *(
                    self._playing(index, self._managers[index].evaluate.remote(part, share))
                    for part, index, share in shares
                )
            )
        except RoseError as error:
            raise EvaluationFailed(error.message, field=error.field, fix=error.fix) from error
        episodes: dict[str, list[list[EvalEpisode]]] = {}
        for (part, _, _), played in zip(shares, found, strict=True):
            episodes.setdefault(part.name, []).append(played)
        versions = sorted({one for played in found for episode in played for one in episode.versions})
        if versions and versions != [version]:
            raise TrainError(
                f"episodes of an evaluation pinned to {version} were played by {versions}", field="eval"
            )
        told = told_of(episodes, self.config.eval.pass_at)
        if self.config.eval.every_steps:  # one figure, of the last weights, would choose nothing
            await answer_of(self._trainer.note_success.remote(told["success_rate"]))
        return {"version": version, **told}

    async def export(self, target: Path, which: Which) -> str:
        """See :func:`rose.train.export.export_of`."""
        return await answer_of(self._trainer.export.remote(target, which))


class RayRewardWorker:
    """A :class:`rose.train.rewards.Scorer` that is a Ray actor."""

    def __init__(self, reward: RewardSettings) -> None:
        import ray

        from rose.train.rewards import RewardWorker

        make: Any = ray.remote(num_cpus=0)(with_its_node(RewardWorker))
        self._actor = make.remote(reward.kind, reward.settings)

    async def ready(self) -> None:
        await answer_of(self._actor.ready.remote())

    async def score(self, task: Any, messages: Any, info: Any) -> float:
        return await answer_of(self._actor.score.remote(task, messages, info))

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


def spawn_reward_worker(reward: RewardSettings) -> RayRewardWorker:
    return RayRewardWorker(reward)


async def answer_of(reference: Any) -> Any:
    """Await an actor's answer; Ray's errors become ours."""
    from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

    try:
        return await reference
    except (
        RayActorError,
        OutOfMemoryError,
    ) as error:  # the latter from Ray's memory monitor, which killed it
        raise ActorDied(_death_of(error)) from error
    except RayTaskError as error:
        if isinstance(error.cause, RoseError):
            raise error.cause from error
        raise TrainError(
            f"an actor failed: {type(error.cause).__name__}: {error.cause}", field="actor"
        ) from error
    except RayError as error:
        raise TrainError(f"Ray failed: {type(error).__name__}", field="ray") from error


def _death_of(error: Exception) -> str:
    """Why an actor is dead, in a line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if getattr(
        error, "actor_init_failed", False
    ):  # its traceback follows, and what was raised stands at the end
        return f"its start failed: {lines[-1].strip()[:200]}"
    return lines[0][:200]
