"""Run episodes: environments talk to the policy through the scheduler's OpenAI route.

:meth:`EpisodeRunner.run` brings groups to completion: it starts the missing episodes, all at once, and returns when
each has been finished with its reward.  Tokens, log-probs and versions are not seen here; the scheduler
records them, and the trainer leases them.

One failing environment is one failing episode: its trajectory is cancelled (so that no half of it is ever
trained on) and the episode starts again, ``max_retries`` times.  Then, or when the scheduler refuses, the step
fails; a failed reward is never reported as 0.

:func:`plan_groups` decides which episodes a step still needs, from what the scheduler has.  It makes a step
repeatable: after the death of an actor, the driver or the scheduler, finished episodes are kept, those
that nobody runs any more are cancelled, and only the rest is started.  Pure.

Callers: ``rose.train.actors``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import ConfigError, RoseError, TrainError
from rose.train.client import SchedulerClient
from rose.train.env import Environment, Family, Message, Observation, Task

logger = logging.getLogger(__name__)

MAX_CONVERSATION_TURNS = 10_000
"""Backstop against an environment that never ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupState:
    """A group in the scheduler that no trainer has taken yet."""

    group_id: str
    group_size: int
    task: Task
    num_finished: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """Episodes that one group still needs."""

    group_id: str
    group_size: int
    task: Task
    num_missing: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeParams:
    """How turns are sampled, and what an environment may take."""

    job: str
    model: str
    temperature: float
    max_tokens: int
    concurrency: int
    step_timeout_s: float
    max_retries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutReport:
    """What one manager ran."""

    num_episodes: int
    num_turns: int
    num_retries: int


def plan_groups(
    *,
    waiting: Sequence[GroupState],
    tasks: Sequence[Task],
    step: int,
    attempt: int,
    num_groups: int,
    group_size: int,
) -> list[GroupPlan]:
    """Episodes to start so that ``num_groups`` groups are complete.

    Args:
        waiting: Groups that no trainer has taken, complete or not.
        tasks: The tasks of the job; steps walk through them in order.

    Groups begun before come first, or their finished episodes would be lost.  A new group's name holds
    the attempt, because a step that is repeated after a roll-back must not meet its earlier groups.
    """
    plans = [
        GroupPlan(
            group_id=group.group_id,
            group_size=group.group_size,
            task=group.task,
            num_missing=group.group_size - group.num_finished,
        )
        for group in waiting
        if group.num_finished < group.group_size
    ]
    num_begun = len(waiting)
    names = {group.group_id for group in waiting}
    index = 0
    while num_begun < num_groups:
        group_id = f"{attempt}-{step:06d}-{index:04d}"
        if group_id not in names:
            task = tasks[(step * num_groups + index) % len(tasks)]
            plans.append(
                GroupPlan(group_id=group_id, group_size=group_size, task=task, num_missing=group_size)
            )
            num_begun += 1
        index += 1
    return plans


def split_plans(plans: Sequence[GroupPlan], num_managers: int) -> list[list[GroupPlan]]:
    """Whole groups to managers in turn, the largest first."""
    ordered = sorted(plans, key=lambda plan: -plan.num_missing)
    return [list(ordered[start::num_managers]) for start in range(num_managers)]


def single_token_ids(model_path: Path, texts: Sequence[str]) -> list[int]:
    """Ids of answers that must be one token each in the model's tokenizer.

    Raises:
        ConfigError: No tokenizer, or an answer that is several tokens.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{model_path} has no readable tokenizer.json", field="model") from error
    ids: list[int] = []
    for text in texts:
        encoded = tokenizer.encode(text, add_special_tokens=False).ids
        if len(encoded) != 1:
            raise ConfigError(
                f"'{text}' is {len(encoded)} tokens in {model_path}, not one",
                field="model",
                fix="use a model whose tokenizer has the environment's answers",
            )
        ids.append(encoded[0])
    return ids


class EpisodeRunner:
    """See the module's docstring.

    Args:
        client: Not owned.
        family: Makes the environments.
        allowed_token_ids: Restriction of every turn; None = free text.
    """

    def __init__(
        self,
        client: SchedulerClient,
        family: Family,
        params: EpisodeParams,
        allowed_token_ids: Sequence[int] | None,
    ) -> None:
        self._client = client
        self._family = family
        self._params = params
        self._allowed = allowed_token_ids
        self._slots = asyncio.Semaphore(params.concurrency)
        self._num_retries = 0

    async def run(self, plans: Sequence[GroupPlan]) -> RolloutReport:
        """Complete ``plans``.

        Raises:
            TrainError: An environment failed too often.
            RoseError: The scheduler refused.
        """
        self._num_retries = 0
        try:
            async with asyncio.TaskGroup() as group:
                # The groups side by side rather than one after another: they end together.
                tasks = [
                    group.create_task(self._episode(plan))
                    for index in range(max((plan.num_missing for plan in plans), default=0))
                    for plan in plans
                    if index < plan.num_missing
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first one; it cancelled the others
        return RolloutReport(
            num_episodes=len(tasks),
            num_turns=sum(task.result() for task in tasks),
            num_retries=self._num_retries,
        )

    async def _episode(self, plan: GroupPlan) -> int:
        """One episode to its reward; the number of its turns."""
        async with self._slots:
            for retry in range(self._params.max_retries + 1):
                trajectory_id = await self._client.create_trajectory(
                    job=self._params.job, group_id=plan.group_id, group_size=plan.group_size, task=plan.task
                )
                try:
                    final, num_turns = await self._play(trajectory_id, plan.task)
                    await self._client.finish(
                        trajectory_id, reward=final.reward, success=final.success, info=final.info
                    )
                    return num_turns
                except _EnvironmentFailed as failure:
                    logger.warning("episode of group %s failed: %s", plan.group_id, failure)
                    await self._client.cancel(trajectory_id)
                    if retry == self._params.max_retries:
                        raise TrainError(
                            f"environment failed {retry + 1} times: {failure}", field="env"
                        ) from failure
                    self._num_retries += 1
                except RoseError:
                    await self._client.cancel(trajectory_id)
                    raise
        raise AssertionError("unreachable")

    async def _play(self, trajectory_id: str, task: Task) -> tuple[Observation, int]:
        environment = self._family.make()
        try:
            observation = await self._guard(environment.reset(task))
            messages: list[Message] = []
            for turn in range(MAX_CONVERSATION_TURNS):
                if observation.done:
                    return _final(observation), turn
                messages.extend(observation.messages)
                text = await self._client.chat(
                    trajectory_id,
                    turn,
                    model=self._params.model,
                    messages=messages,
                    temperature=self._params.temperature,
                    max_tokens=self._params.max_tokens,
                    allowed_token_ids=self._allowed,
                )
                messages.append({"role": "assistant", "content": text})
                observation = await self._guard(environment.step(text))
            raise _EnvironmentFailed(f"no end after {MAX_CONVERSATION_TURNS} turns")
        finally:
            await self._close(environment)

    async def _guard(self, call: Any) -> Observation:
        """Environment code is foreign: whatever it does wrong costs its own episode and no more."""
        try:
            async with asyncio.timeout(self._params.step_timeout_s):
                return await call
        except TimeoutError as error:
            raise _EnvironmentFailed(f"no answer within {self._params.step_timeout_s:g} s") from error
        except Exception as error:
            raise _EnvironmentFailed(f"{type(error).__name__}: {error}") from error

    async def _close(self, environment: Environment) -> None:
        try:
            async with asyncio.timeout(self._params.step_timeout_s):
                await environment.close()
        except Exception as error:  # noqa: BLE001
            logger.warning("an environment did not close: %s", error)


class _EnvironmentFailed(Exception):
    """An environment's own failure; the episode is tried again."""


def _final(observation: Observation) -> Observation:
    if not math.isfinite(observation.reward):
        raise _EnvironmentFailed(f"reward {observation.reward} is not finite")
    try:
        json.dumps(observation.info)
    except (TypeError, ValueError) as error:
        raise _EnvironmentFailed(f"info is not JSON: {error}") from error
    return observation
