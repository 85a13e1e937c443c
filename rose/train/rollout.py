"""Run episodes: environments talk to the policy through the scheduler's OpenAI route.

:meth:`EpisodeRunner.run` brings groups to completion: it starts the missing episodes, all at once, and returns when
each has been finished with its reward.  Tokens, log-probs and versions are not seen here; the scheduler
records them, and the trainer leases them.

An episode that fails is played again, up to ``max_retries`` times.  Its trajectory is cancelled first, so that half an episode is
never trained on.  After the last retry its group is given up and named in the report; other groups go on.  An episode fails when

- its environment raises, takes too long, or answers what is no observation (messages or info that are not JSON);
- its reward fails, is not finite or is out of range (a failed reward is never reported as 0);
- the engines fail one of its turns, or the turn runs out of time;
- the scheduler cancels or forgets its trajectory, or refuses the content of a request.

Failures are counted by cause (:class:`Cause`).  Each retry waits longer than the one before, so that a fault which hits all episodes at
once has time to pass.  Only a scheduler that cannot be reached, or that does not accept our token, ends the run.

A conversation that outgrows the engines' context ends there: with the reward of its last observation (or the
rewarder's), no success, and ``truncated`` in its info.

*Redundant* episodes (``GroupPlan.num_redundant``) race with the others of their group: the scheduler takes the first
``group_size`` that finish and drops the rest, so a straggler costs nobody time.  Fast episodes are short ones, which
biases what is trained on; it is off unless asked for.

To end episodes early call :meth:`EpisodeRunner.stop`.  It returns when the scheduler has been told of each of them, so that no engine
goes on generating for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rose.errors import (
    ConfigError,
    Conflict,
    EngineError,
    Gone,
    RequestError,
    RoseError,
    TrainError,
)
from rose.train.client import SchedulerClient, StartedTrajectory
from rose.train.envs.base import Environment, Family, Message, Observation, Task
from rose.train.episode_faults import (
    Cause,
    EpisodeFailed,
    checked_reward,
    failure_of,
    info_of,
    success_of,
)
from rose.train.evaluation import EvalEpisode
from rose.train.plan import GroupPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONVERSATION_TURNS = 10_000
"""Backstop against an environment that never ends; the scheduler's own limit is lower."""
PAUSE_FACTOR, MAX_PAUSE_S = 4.0, 60.0
"""Of the pauses before new tries of an episode."""
CLOSE_TIMEOUT_S = 10.0
"""How long the end of a run waits for a scheduler that does not answer."""


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
    retry_pause_s: float = 0.0
    """Before the first new try, give or take a half; four times as long before each further one."""
    reward_range: tuple[float, float] = (-1e6, 1e6)
    task_kind: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutReport:
    """What one manager ran."""

    num_episodes: int
    """Finished with a reward."""
    num_turns: int
    num_retries: int
    num_dropped: int = 0
    """Redundant episodes that came too late."""
    num_stale_groups: int = 0
    """Groups that the scheduler gave up while they were played, because their first tokens had become too old."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """Failed tries by :class:`Cause`."""
    failures: tuple[tuple[str, str], ...] = ()
    """Groups that were given up: ``(group_id, why)``."""

    def __add__(self, other: RolloutReport) -> RolloutReport:
        return RolloutReport(
            num_episodes=self.num_episodes + other.num_episodes,
            num_turns=self.num_turns + other.num_turns,
            num_retries=self.num_retries + other.num_retries,
            num_dropped=self.num_dropped + other.num_dropped,
            num_stale_groups=self.num_stale_groups + other.num_stale_groups,
            causes=Counter(self.causes) + Counter(other.causes),
            failures=self.failures + other.failures,
        )


class Rewarder(Protocol):
    """Scores finished episodes where the environment's own reward is not the one."""

    async def score(self, task: Task, messages: Sequence[Message], final: Observation) -> float:
        """Raises any error: the episode is then played again, and its group given up in the end."""
        ...


def single_token_ids(model_path: Path, texts: Sequence[str]) -> list[int]:
    """Ids of answers that must be one token each in the model's tokenizer.

    Raises:
        ConfigError: No tokenizer, or an answer that is several tokens, unknown or the same token as another.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{model_path} has no readable tokenizer.json", field="model") from error
    unknown = getattr(tokenizer.model, "unk_token", None)
    texts_by_id: dict[int, str] = {}
    for text in texts:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        wrong: str | None = None
        if len(encoded.ids) != 1:
            wrong = f"is {len(encoded.ids)} tokens in {model_path}, not one"
        elif unknown is not None and encoded.tokens == [unknown] and text != unknown:
            wrong = f"is no token of {model_path}: it is read as {unknown}"
        elif encoded.ids[0] in texts_by_id:
            wrong = f"is the same token in {model_path} as '{texts_by_id[encoded.ids[0]]}'"
        if wrong is not None:
            raise ConfigError(
                f"'{text}' {wrong}",
                field="model",
                fix="use a model whose tokenizer has the environment's answers",
            )
        texts_by_id[encoded.ids[0]] = text
    return list(texts_by_id)


class EpisodeRunner:
    """See the module's docstring.

    Args:
        client: Not owned.
        family: Makes the environments.
        allowed_token_ids: Restriction of every turn; None = free text.
        rewarder: None = the environment's own reward.
        slots: Shared with runners of other tasks; None = ``concurrency`` of its own.

    Attributes:
        num_started, num_ended: Episodes since it was made, for progress.
    """

    def __init__(
        self,
        client: SchedulerClient,
        family: Family,
        params: EpisodeParams,
        allowed_token_ids: Sequence[int] | None,
        rewarder: Rewarder | None = None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        self._client = client
        self._family = family
        self._params = params
        self._allowed = allowed_token_ids
        self._rewarder = rewarder
        self._slots = slots or asyncio.Semaphore(params.concurrency)
        self._groups: set[_GroupRun] = set()
        self._episodes: set[asyncio.Task[Any]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        """Cancellations on their way to the scheduler."""
        self.num_started = 0
        self.num_ended = 0

    async def run(self, plans: Sequence[GroupPlan]) -> RolloutReport:
        """Complete ``plans``; may be called again while it runs.

        Raises:
            RoseError: The scheduler refused.
        """
        groups = [_GroupRun(plan) for plan in plans]
        self._groups.update(groups)
        try:
            async with asyncio.TaskGroup() as tasks:
                # The groups side by side rather than one after another: they end together.
                for index in range(max((group.num_episodes for group in groups), default=0)):
                    for group in groups:
                        if index < group.num_episodes:
                            group.tasks.append(self._begin(tasks, self._member(group)))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first one; it cancelled the others
        finally:
            self._groups.difference_update(groups)
        return RolloutReport(
            num_episodes=sum(group.num_finished for group in groups),
            num_turns=sum(group.num_turns for group in groups),
            num_retries=sum(group.num_retries for group in groups),
            num_dropped=sum(group.num_dropped for group in groups),
            num_stale_groups=sum(group.is_stale for group in groups),
            causes=sum((group.causes for group in groups), Counter[str]()),
            failures=tuple((group.plan.group_id, group.failure) for group in groups if group.failure),
        )

    async def evaluate(
        self, tasks: Sequence[Task], *, job: str, part: str, episodes_per_task: int
    ) -> list[EvalEpisode]:
        """Play episodes that no trainer is handed, under the name ``part``.  One that keeps failing is an error, not a zero.

        Raises:
            TrainError: An environment or a reward failed too often.
            RoseError: The scheduler refused.
        """

        async def one(index: int) -> EvalEpisode:
            name = f"{part}-{self._params.task_kind}-{index}"
            final, num_turns, trace = await self.play(tasks[index], job=job, group_id=name)
            return EvalEpisode(
                task_index=index,
                reward=final.reward,
                success=final.success,
                num_turns=num_turns,
                task_kind=self._params.task_kind,
                versions=tuple(
                    str(span[0]) for turn in trace.get("turns") or () for span in turn.get("versions") or ()
                ),
            )

        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    self._begin(group, one(index))
                    for index in range(len(tasks))
                    for _ in range(episodes_per_task)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in running]

    async def play(self, task: Task, *, job: str, group_id: str) -> tuple[Observation, int, dict[str, Any]]:
        """One episode that no trainer is handed: its last observation, its turns, and its trace.

        For evaluation, and for trainers that keep their own batches.

        Raises:
            TrainError: It failed too often.
            RoseError: The scheduler refused.
        """
        async with self._slots:
            for retry in range(self._params.max_retries + 1):
                await self._pause(retry)
                begun: StartedTrajectory | None = None
                try:
                    begun = await self._create(
                        job=job,
                        group_id=group_id,
                        group_size=4096,
                        task=task,
                        task_kind=self._params.task_kind,
                    )
                    final, num_turns = await self._play(begun.key, task)
                    return final, num_turns, await self._client.get_trajectory(begun.id)
                except (EpisodeFailed, RequestError) as error:
                    failure = failure_of(error)
                    if retry == self._params.max_retries:
                        raise TrainError(f"an episode of {job} failed: {failure}", field="env") from error
                finally:
                    if begun:
                        await self._let_go(begun.id)  # scored or not, nobody is to train on it
        raise AssertionError("unreachable")

    def leave(self, trajectory_ids: Set[str]) -> None:
        """End the groups of these trajectories: the scheduler gave them up, which an episode would hear at its next turn only."""
        for group in self._groups:
            if not trajectory_ids.isdisjoint(group.trajectory_ids):
                group.grew_stale()

    async def stop(self) -> None:
        """End every episode that runs; the scheduler has been told of each when this returns.  Their :meth:`run` returns too."""
        for task in self._episodes:
            task.cancel()
        while busy := {*self._episodes, *self._leaving}:
            await asyncio.wait(busy)

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """:meth:`stop`, but where the scheduler does not answer in time it is left to find out by itself."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.stop()
        except TimeoutError:
            logger.warning("%d trajectories could not be cancelled in time", len(self._leaving))
            for task in self._leaving:
                task.cancel()
            await asyncio.gather(*self._episodes, *self._leaving, return_exceptions=True)

    def _begin(self, tasks: asyncio.TaskGroup, episode: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = tasks.create_task(episode)
        self._episodes.add(task)
        task.add_done_callback(self._episodes.discard)
        return task

    async def _create(self, **what: Any) -> StartedTrajectory:
        """A new trajectory.  Where the caller is cancelled before it hears the name, it is let go all the same."""
        creating = asyncio.create_task(self._client.create_trajectory(**what))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:

            async def abandon() -> None:
                await self._client.cancel((await creating).id)

            with suppress(RoseError):
                await self._leave(abandon())
            raise

    async def _let_go(self, trajectory_id: str) -> None:
        await self._leave(self._client.cancel(trajectory_id))

    async def _leave(self, cancelling: Coroutine[Any, Any, None]) -> None:
        """Cancel a trajectory; goes on where its caller is cancelled meanwhile, even twice, and :meth:`stop` waits for it."""
        task = asyncio.create_task(cancelling)
        self._leaving.add(task)
        task.add_done_callback(self._left)
        await asyncio.shield(task)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a trajectory was not cancelled: %s", task.exception())

    async def _member(self, group: _GroupRun) -> None:
        """One episode of a group, to its reward."""
        async with self._slots:
            if group.is_over:
                return
            self.num_started += 1
            try:
                await self._episode(group)
            finally:
                self.num_ended += 1

    async def _episode(self, group: _GroupRun) -> None:
        plan = group.plan
        for retry in range(self._params.max_retries + 1):
            trajectory_id = ""
            try:
                await self._pause(retry)
                begun = await self._create(
                    job=self._params.job,
                    group_id=plan.group_id,
                    group_size=plan.group_size,
                    task=plan.task,
                    task_kind=plan.task_kind,
                    prefill_per_decode=plan.prefill_per_decode,
                )
                trajectory_id = begun.id
                group.trajectory_ids.add(trajectory_id)
                final, num_turns = await self._play(begun.key, plan.task)
                await self._client.finish(
                    trajectory_id, reward=final.reward, success=final.success, info=final.info
                )
                group.finished(num_turns)
                return
            except (EpisodeFailed, RequestError) as error:
                if isinstance(error, Gone) and error.reason == "stale":
                    group.grew_stale()  # as a whole; another is played in its place
                    return
                if plan.num_redundant and isinstance(error, Gone | Conflict):
                    group.num_dropped += 1  # the group is complete without us
                    return
                if trajectory_id:
                    await self._let_go(trajectory_id)
                failure = failure_of(error)
                logger.warning("episode %s of group %s failed: %s", trajectory_id, plan.group_id, failure)
                group.causes[failure.cause] += 1
                if retry == self._params.max_retries:
                    group.give_up(f"{failure.cause} failed {retry + 1} times: {failure}")
                    return
                group.num_retries += 1
            except asyncio.CancelledError:
                # Stopped on purpose, by the group or by our caller: nobody will finish this trajectory.
                if trajectory_id:
                    with suppress(RoseError):
                        await self._let_go(trajectory_id)
                if group.is_complete:
                    group.num_dropped += 1
                raise
            except Exception:
                if trajectory_id:
                    await self._let_go(trajectory_id)
                raise

    async def _pause(self, retry: int) -> None:
        if retry:
            await asyncio.sleep(pause_before(retry, self._params.retry_pause_s, random.uniform(0.5, 1.5)))

    async def _play(self, key: str, task: Task) -> tuple[Observation, int]:
        """Of the trajectory whose ``key`` it is: the final observation, with the reward that counts, and the number of turns."""
        try:
            environment = self._family.make()
        except Exception as error:
            raise EpisodeFailed(Cause.ENVIRONMENT, f"{type(error).__name__}: {error}") from error
        try:
            observation = await self._guard(lambda: environment.reset(task))
            messages: list[Message] = []
            for turn in range(MAX_CONVERSATION_TURNS):
                messages.extend(observation.messages)
                if observation.done:
                    return await self._score(task, messages, observation), turn
                try:
                    text = await self._client.chat(
                        key,
                        turn,
                        model=self._params.model,
                        messages=messages,
                        temperature=self._params.temperature,
                        max_tokens=self._params.max_tokens,
                        allowed_token_ids=self._allowed,
                    )
                except EngineError as error:
                    raise EpisodeFailed(Cause.ENGINE, error) from error
                except RequestError as error:
                    if error.code not in ("context_length_exceeded", "too_many_turns"):
                        raise
                    if turn == 0:
                        text = f"the first prompt does not fit: {error}"
                        raise EpisodeFailed(Cause.ENVIRONMENT, text) from error
                    # Outgrown, as long conversations do: it ends here, and is paid what it had.
                    info = {**info_of(observation), "truncated": True}
                    cut = replace(observation, done=True, success=False, info=info)
                    return await self._score(task, messages, cut), turn
                messages.append({"role": "assistant", "content": text})
                observation = await self._guard(lambda text=text: environment.step(text))
            raise EpisodeFailed(Cause.ENVIRONMENT, f"no end after {MAX_CONVERSATION_TURNS} turns")
        finally:
            await self._close(environment)

    async def _score(self, task: Task, messages: list[Message], final: Observation) -> Observation:
        final = replace(final, success=success_of(final), info=info_of(final))
        if self._rewarder is not None:
            try:
                final = replace(final, reward=await self._rewarder.score(task, messages, final))
            except Exception as error:
                raise EpisodeFailed(Cause.REWARD, f"reward failed: {error}") from error
        return checked_reward(final, self._params.reward_range)

    async def _guard(self, call: Callable[[], Awaitable[Any]]) -> Observation:
        """Environment code is foreign: whatever it does wrong costs its own episode and no more."""
        try:
            async with asyncio.timeout(self._params.step_timeout_s):
                found = await call()
            if not isinstance(found, Observation):
                raise TypeError(f"gave {type(found).__name__}, not an Observation")
            if not isinstance(found.messages, list | tuple):
                raise TypeError(f"gave {type(found.messages).__name__} for messages, not a tuple")
            for message in found.messages:
                if not isinstance(message, dict):
                    raise TypeError(f"gave {type(message).__name__} for a message, not a dict")
                json.dumps(message)
            return replace(found, done=bool(found.done))
        except TimeoutError as error:
            raise EpisodeFailed(
                Cause.ENVIRONMENT, f"no answer within {self._params.step_timeout_s:g} s"
            ) from error
        except Exception as error:
            raise EpisodeFailed(Cause.ENVIRONMENT, f"{type(error).__name__}: {error}") from error

    async def _close(self, environment: Environment) -> None:
        try:
            async with asyncio.timeout(self._params.step_timeout_s):
                await environment.close()
        except Exception as error:  # noqa: BLE001
            logger.warning("an environment did not close: %s", error)


def pause_before(retry: int, first_s: float, jitter: float) -> float:
    """Seconds before new try ``retry`` (the first is 1); ``jitter`` so that no two episodes come back at the same moment."""
    return min(first_s * PAUSE_FACTOR ** (retry - 1), MAX_PAUSE_S) * jitter


class _GroupRun:
    """A group while it is being completed."""

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan
        self.tasks: list[asyncio.Task[None]] = []
        self.trajectory_ids: set[str] = set()
        self.num_finished = self.num_turns = self.num_retries = self.num_dropped = 0
        self.causes: Counter[str] = Counter()
        self.failure = ""
        self.is_stale = False

    @property
    def num_episodes(self) -> int:
        return self.plan.num_missing + self.plan.num_redundant if self.plan.num_missing else 0

    @property
    def is_complete(self) -> bool:
        return self.num_finished >= self.plan.num_missing

    @property
    def is_over(self) -> bool:
        return bool(self.failure) or self.is_stale or self.is_complete

    def finished(self, num_turns: int) -> None:
        self.num_finished += 1
        self.num_turns += num_turns
        if self.is_over:
            self._stop()

    def give_up(self, why: str) -> None:
        self.failure = self.failure or why
        self._stop()

    def grew_stale(self) -> None:
        self.is_stale = True
        self._stop()

    def _stop(self) -> None:
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()
