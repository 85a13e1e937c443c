"""The worker of a train loop that plays episodes, as a plain async class; ``rose.train.actors`` makes Ray actors of it.

:class:`EnvManager` surveys what the scheduler holds and brings groups to completion.  Ray is not imported here.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from rose.auth import Tokens
from rose.errors import ConfigError
from rose.train.client import SchedulerClient
from rose.train.envs.base import Family, Task
from rose.train.envs.delayed import EnvLatency
from rose.train.envs.registry import make_family
from rose.train.evaluation import EvalEpisode, Part
from rose.train.plan import GroupPlan, GroupState
from rose.train.rewards import PoolParams, RewardPool
from rose.train.rollout import EpisodeParams, EpisodeRunner, RolloutReport, single_token_ids
from rose.train.train_config import JobTask, RewardSettings, TrainConfig

T = TypeVar("T")

RewardPoolWorker = Any
"""A :class:`rose.train.rewards.Scorer`."""


class EnvManager:
    """Runs episodes of one job.

    Args:
        spawn_reward_worker: Makes a worker of a reward pool; needed where a ``reward.kind`` is not ``environment``.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokens: Tokens,
        spawn_reward_worker: Callable[[RewardSettings], RewardPoolWorker] | None = None,
    ) -> None:
        self._config = config
        self._client = SchedulerClient(
            config.scheduler.url,
            environment_token=tokens.environment,
            turn_timeout_s=config.scheduler.turn_timeout_s,
            retry_s=config.scheduler.retry_s,
        )
        self._tasks = {task.name: task for task in config.all_tasks}
        self._families = {name: family_of(task) for name, task in self._tasks.items()}
        self._spawn = spawn_reward_worker
        self._pools: dict[str, RewardPool] = {}
        self._slots = asyncio.Semaphore(config.env.concurrency)
        # Of their own: the trainer waits for an evaluation, and in line behind every episode begun it would wait for steps.
        self._eval_slots = asyncio.Semaphore(config.env.concurrency)
        self._runners: dict[str, EpisodeRunner] = {}
        self._evaluators: dict[tuple[str, float], EpisodeRunner] = {}
        """By name of the task and temperature."""

    async def pid(self) -> int:
        return os.getpid()

    async def survey(
        self, group_ids: Sequence[str] | None = None, *, with_evaluation: bool = False
    ) -> list[GroupState]:
        """Groups that no trainer has taken; episodes that nobody runs any more are cancelled.

        Args:
            group_ids: Only these; call it when none of their episodes is running.  None = all of the job.
            with_evaluation: Cancel running episodes of evaluations too: none of them is this run's.

        In an undisturbed run it finds nothing.
        """
        job = self._config.job
        if with_evaluation and (self._config.eval.every_steps or self._config.eval.at_end):
            for orphan in await self._client.list_trajectories(job=eval_job(self._config), state="running"):
                await self._client.cancel(orphan["id"])
        for orphan in await self._client.list_trajectories(job=job, state="running"):
            if group_ids is None or orphan.get("group_id") in group_ids:
                await self._client.cancel(orphan["id"])
        members: dict[str, list[str]] = {}
        for trajectory in await self._client.list_trajectories(job=job, state="finished"):
            if group_ids is None or trajectory.get("group_id") in group_ids:
                members.setdefault(str(trajectory.get("group_id")), []).append(trajectory["id"])
        groups: list[GroupState] = []
        for group_id, ids in members.items():
            one = await self._client.get_trajectory(ids[0])
            size, task, name = one.get("group_size"), one.get("task"), one.get("task_kind") or ""
            # Else no group that we could complete, or of a task that the job no longer has.
            if isinstance(size, int) and isinstance(task, dict) and name in self._tasks:
                groups.append(
                    GroupState(
                        group_id=group_id, group_size=size, task=task, num_finished=len(ids), task_kind=name
                    )
                )
        return groups

    async def num_ready(self) -> int:
        """Complete groups that no trainer has taken."""
        finished = await self._client.list_trajectories(job=self._config.job, state="finished")
        counts = Counter(str(trajectory.get("group_id")) for trajectory in finished)
        return sum(count >= self._config.rollout.group_size for count in counts.values())

    async def leave_stale(self) -> None:
        """Play on in no group that the scheduler has given up as too old."""
        stale = await self._client.list_trajectories(job=self._config.job, state="stale")
        for runner in self._runners.values():
            runner.leave({one["id"] for one in stale})

    async def run(self, plans: Sequence[GroupPlan]) -> RolloutReport:
        by_task: dict[str, list[GroupPlan]] = {}
        for plan in plans:
            by_task.setdefault(plan.task_kind, []).append(plan)
        runners = {name: self._runner(name) for name in by_task}
        found = await _all(runners[name].run(part) for name, part in by_task.items())
        return sum(found, RolloutReport(num_episodes=0, num_turns=0, num_retries=0))

    async def evaluate(self, part: Part, tasks: Sequence[tuple[str, Task]]) -> list[EvalEpisode]:
        """Play episodes of an evaluation, ``(name of the task, task)``, under a job of their own."""
        job, heat = eval_job(self._config), part.temperature
        by_task: dict[str, list[Task]] = {}
        for name, task in tasks:
            by_task.setdefault(name, []).append(task)
        for name in by_task:
            if (name, heat) not in self._evaluators:
                self._evaluators[name, heat] = self._make_runner(name, heat, self._eval_slots)
        found = await _all(
            self._evaluators[name, heat].evaluate(
                own, job=job, part=part.name, episodes_per_task=part.episodes_per_task
            )
            for name, own in by_task.items()
        )
        return [score for part in found for score in part]

    async def progress(self) -> tuple[int, int]:
        """Episodes started and ended so far."""
        runners = [*self._runners.values(), *self._evaluators.values()]
        return sum(one.num_started for one in runners), sum(one.num_ended for one in runners)

    async def trouble(self) -> list[tuple[str, str, str]]:
        """What keeps episodes from ending: whose (``turns``, or the rewards of a task), sort, words.

        See :attr:`rose.train.client.SchedulerClient.no_engine` and :meth:`rose.train.rewards.RewardPool.trouble`.
        """
        because = self._client.no_engine
        return [("turns", because, because)] * bool(because) + [
            (f"rewards of {name}" if name else "rewards", sort, words)
            for name, pool in self._pools.items()
            for sort, words in pool.trouble().items()
        ]

    async def stop(self) -> None:
        """End every episode that runs, see :meth:`rose.train.rollout.EpisodeRunner.close`."""
        runners = [*self._runners.values(), *self._evaluators.values()]
        await asyncio.gather(*(runner.close() for runner in runners))

    async def stop_training(self) -> None:
        """End the episodes that would be trained on; those of an evaluation go on."""
        await asyncio.gather(*(runner.close() for runner in self._runners.values()))

    async def close(self) -> None:
        await self.stop()
        for pool in self._pools.values():
            await pool.close()
        await self._client.close()

    def _runner(self, name: str) -> EpisodeRunner:
        if name not in self._runners:
            self._runners[name] = self._make_runner(name, self._config.rollout.temperature, self._slots)
        return self._runners[name]

    def _make_runner(self, name: str, temperature: float, slots: asyncio.Semaphore) -> EpisodeRunner:
        config, task, family = self._config, self._tasks[name], self._families[name]
        allowed = family.allowed_texts
        return EpisodeRunner(
            self._client,
            family,
            EpisodeParams(
                job=config.job,
                model=config.scheduler.model,
                temperature=temperature,
                max_tokens=task.max_tokens,
                concurrency=config.env.concurrency,
                step_timeout_s=task.step_timeout_s,
                max_retries=config.env.max_retries,
                retry_pause_s=config.env.retry_pause_s,
                reward_range=task.reward_range,
                task_kind=name,
            ),
            None if allowed is None else single_token_ids(config.model, allowed),
            self._rewarder(task),
            slots,
        )

    def _rewarder(self, task: JobTask) -> RewardPool | None:
        """The pool that scores a task's episodes; None = their environments do."""
        reward = task.reward
        if reward.kind == "environment":
            return None
        if task.name not in self._pools:
            if self._spawn is None:
                raise ConfigError("needs reward workers, and nobody makes them here", field="reward.kind")
            spawn = self._spawn
            params = PoolParams(
                min_workers=reward.min_workers,
                max_workers=reward.max_workers,
                timeout_s=reward.timeout_s,
                max_retries=reward.max_retries,
                idle_s=reward.idle_s,
            )
            self._pools[task.name] = RewardPool(lambda: spawn(reward), params)
        return self._pools[task.name]


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first error cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [one.result() for one in running]


def family_of(task: JobTask) -> Family:
    """The environments of a task.

    Raises:
        ConfigError: Unknown kind or settings; names the task where there are several.
    """
    latency = EnvLatency(median_s=task.latency.median_s, sigma=task.latency.sigma)
    try:
        return make_family(task.kind, task.settings, latency)
    except ConfigError as error:
        if not task.name:
            raise
        field = (error.field or "").removeprefix("env.")
        raise ConfigError(error.message, field=f"tasks.{task.name}.{field}", fix=error.fix) from error


def eval_job(config: TrainConfig) -> str:
    """Name under which episodes of an evaluation run, so that no trainer leases them."""
    return f"{config.job}-eval"
