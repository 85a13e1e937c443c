"""Rewards as a service: stateless workers score finished episodes, apart from the engines and the environments.

A *reward function* is ``async (task, messages, info) -> float``.  Known by name (:data:`REWARDS`):

- ``exact_match``: 1 where the last line of the agent's last message equals ``task["answer"]``, else 0;
- ``endpoint``: ``POST {task, messages, info}`` to ``settings.url``, which answers ``{"reward": x}``;
- ``module:function``: your own, importable where the workers run; it takes no ``settings``.

:class:`RewardPool` shares the work among workers, one request each at a time.  It grows while requests wait, up to
``max_workers``, and shrinks to ``min_workers`` when they are idle.  A worker that dies or hangs is replaced and its
request tried again; an error of the function itself is tried again too, and then handed to the caller, who plays the episode
again.  A failed reward is never a number.  The start of a worker has a limit of its own: no request's time runs before it is up, or a
worker that imports for longer than a request may take would be killed at each try, and never score.

Ray is not imported here: the pool is given ``spawn``, which makes a worker (``rose.train.actors`` makes Ray actors).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rose.auth import bearer
from rose.errors import ConfigError, TrainError
from rose.train.envs.base import Message, Observation, Task, unusable
from rose.train.envs.own_code import import_own
from rose.wire.http_client import ask, open_client

T = TypeVar("T")
RewardFunction = Callable[[Task, Sequence[Message], Mapping[str, Any]], Awaitable[float]]

MAX_ANSWER_BYTES = 1 << 20
START_TIMEOUT_S = 300.0
"""For a worker's process, on a busy core, and for what its function imports (torch, the client of a sandbox): as long as any actor may take."""
SLOW_START_S = 15.0
"""A start that somebody waits for and that takes longer is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolParams:
    """How many workers score, and how patient their pool is with them."""

    min_workers: int = 1
    max_workers: int = 4
    timeout_s: float = 30.0
    """Of one request, once its worker is up; a worker that takes longer is replaced."""
    start_timeout_s: float = START_TIMEOUT_S
    max_retries: int = 3
    idle_s: float = 30.0
    """A worker beyond ``min_workers`` ends after this long without work."""


class Scorer(Protocol):
    """What the pool needs of a worker; any exception but :class:`TrainError` means that it is broken."""

    async def ready(self) -> None:
        """Return when it has started."""
        ...

    async def score(self, task: Task, messages: Sequence[Message], info: Mapping[str, Any]) -> float:
        """The reward of one finished episode."""
        ...

    def kill(self) -> None:
        """End the worker; it is not used again."""
        ...


class RewardWorker:
    """Runs one reward function; made into an actor by the actors."""

    def __init__(self, kind: str, settings: Mapping[str, Any]) -> None:
        self._function = make_reward(kind, settings)

    async def ready(self) -> None:
        """Answered as soon as the worker is made."""

    async def score(self, task: Task, messages: Sequence[Message], info: Mapping[str, Any]) -> float:
        """Raises TrainError: The function failed, or gave no finite number."""
        try:
            reward = await self._function(task, messages, info)
        except Exception as error:
            raise TrainError(f"{type(error).__name__}: {error}", field="reward") from error
        if (found := unusable(reward)) is not None:
            raise TrainError(found, field="reward")
        return float(reward)


class RewardPool:
    """See the module's docstring.  One event loop; :meth:`close` when done."""

    def __init__(self, spawn: Callable[[], Scorer], params: PoolParams) -> None:
        self._spawn = spawn
        self._params = params
        self._idle: list[tuple[Scorer, float]] = []
        """Free workers and since when; the last is the one used last."""
        self._starting: dict[Scorer, float] = {}
        """Workers that have not said yet that they are up, and since when."""
        self._num_workers = 0
        self._failed_in_a_row, self._why = 0, ""
        self._free = asyncio.Condition()
        self.num_scored = self.num_failures = self.num_replaced = 0
        for _ in range(params.min_workers):
            self._idle.append((self._new(), time.monotonic()))

    @property
    def num_workers(self) -> int:
        """Busy and idle ones."""
        return self._num_workers

    async def score(self, task: Task, messages: Sequence[Message], final: Observation) -> float:
        """The reward of a finished episode.

        Raises:
            TrainError: It failed ``max_retries + 1`` times; the last reason.
        """
        why = ""
        for _ in range(self._params.max_retries + 1):
            worker = await self._take()
            try:
                reward = await self._ask(worker, task, messages, final)
            except BaseException as error:
                if (
                    isinstance(error, TrainError) and error.field != "ray"
                ):  # the worker is well, the function is not
                    self.num_failures += 1
                    why = self._note_failure(error)
                    await self._give_back(worker)
                    continue
                if isinstance(error, asyncio.CancelledError) and worker in self._starting:
                    await self._give_back(worker)  # it is at nobody's work yet
                    raise
                # Dead, or hanging, or we were cancelled and it is still at work: not to be used again.
                worker.kill()
                self._starting.pop(worker, None)
                self.num_replaced += 1
                await self._lose()
                if not isinstance(error, Exception):
                    raise
                why = self._note_failure(error)
                continue
            self.num_scored += 1
            self._failed_in_a_row = 0
            await self._give_back(worker)
            return reward
        raise TrainError(f"failed {self._params.max_retries + 1} times: {why}", field="reward")

    def trouble(self, slow_s: float | None = None) -> dict[str, str]:
        """What keeps rewards from coming, in words: of the ``start`` of workers, and of ``tries`` that came to nothing.

        Args:
            slow_s: A start that took less is none; None = :data:`SLOW_START_S`.
        """
        found: dict[str, str] = {}
        idle = {worker for worker, _ in self._idle}
        waited_for = [since_s for worker, since_s in self._starting.items() if worker not in idle]
        took_s = time.monotonic() - min(waited_for) if waited_for else -1.0
        if waited_for and took_s >= (SLOW_START_S if slow_s is None else slow_s):
            most_s = self._params.start_timeout_s
            found["start"] = f"a reward worker is still starting after {took_s:.0f} s (it has {most_s:g} s)"
        if self._failed_in_a_row > self._params.max_retries:
            found["tries"] = f"{self._failed_in_a_row} tries in a row came to nothing, the last: {self._why}"
        return found

    async def _ask(
        self, worker: Scorer, task: Task, messages: Sequence[Message], final: Observation
    ) -> float:
        params = self._params
        if worker in self._starting:
            late = f"a reward worker did not start within {params.start_timeout_s:g} s"
            await _within(params.start_timeout_s, worker.ready(), late)
            self._starting.pop(worker, None)
        late = f"no answer within {params.timeout_s:g} s (reward.timeout_s)"
        return await _within(params.timeout_s, worker.score(task, messages, final.info), late)

    def _note_failure(self, error: Exception) -> str:
        self._failed_in_a_row += 1
        self._why = str(error) or type(error).__name__
        return self._why

    async def close(self) -> None:
        """End the idle workers; call it when nothing is being scored."""
        for worker, _ in self._idle:
            worker.kill()
        self._idle.clear()
        self._starting.clear()

    def _new(self) -> Scorer:
        worker = self._spawn()
        self._starting[worker] = time.monotonic()
        self._num_workers += 1  # only now: a worker that could not be made takes no place
        return worker

    async def _take(self) -> Scorer:
        async with self._free:
            while True:
                if self._idle:
                    return self._idle.pop()[0]
                if self._num_workers < self._params.max_workers:
                    return self._new()
                await self._free.wait()

    async def _give_back(self, worker: Scorer) -> None:
        now_s = time.monotonic()
        async with self._free:
            self._idle.append((worker, now_s))
            while (
                self._num_workers > self._params.min_workers
                and now_s - self._idle[0][1] > self._params.idle_s
            ):
                worker = self._idle.pop(0)[0]
                worker.kill()
                self._starting.pop(worker, None)
                self._num_workers -= 1
            # All: before Python 3.13 a word given to one that is being cancelled is lost, and with it the last wake-up.
            self._free.notify_all()

    async def _lose(self) -> None:
        async with self._free:
            self._num_workers -= 1
            self._free.notify_all()


class _Late(Exception):
    """A limit of the pool's own is over."""


async def _within(limit_s: float, call: Awaitable[T], late: str) -> T:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise _Late(late) from error


def make_reward(kind: str, settings: Mapping[str, Any]) -> RewardFunction:
    """Build a reward function from configuration.

    Raises:
        ConfigError: Unknown kind, a function that is no reward function, or settings that it does not take.
    """
    factory: Any = REWARDS.get(kind)
    if factory is None and ":" in kind:
        return _own(kind, import_own(kind, field="reward.kind"), settings)
    if factory is None:
        known = [*sorted(REWARDS), "module:function"]
        raise ConfigError(f"unknown reward '{kind}'", field="reward.kind", fix=f"one of {known}")
    try:
        return factory(**settings)
    except TypeError as error:
        raise ConfigError(f"{error}", field="reward.settings") from error


def _own(kind: str, function: Any, settings: Mapping[str, Any]) -> RewardFunction:
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    try:
        inspect.signature(function).bind({}, [], {})
    except (TypeError, ValueError):
        is_async = False
    if isinstance(function, type) or not is_async:
        raise ConfigError(f"{kind} is not async (task, messages, info) -> float", field="reward.kind")
    if settings:
        raise ConfigError(
            f"{kind} takes none",
            field="reward.settings",
            fix="say in the function itself what it needs to know",
        )
    return function


def exact_match() -> RewardFunction:
    """1 if the last line of the agent's last message is ``task["answer"]``, else 0."""

    async def reward(task: Task, messages: Sequence[Message], info: Mapping[str, Any]) -> float:
        if "answer" not in task:
            raise TrainError("the task has no answer to compare with", field="task.answer")
        said = [one["content"] for one in messages if one["role"] == "assistant"]
        lines = said[-1].strip().splitlines() if said else []
        return float(bool(lines) and lines[-1].strip() == str(task["answer"]).strip())

    return reward


def endpoint(*, url: str, token: str | None = None, timeout_s: float = 30.0) -> RewardFunction:
    """Ask an HTTP service: ``{"task", "messages", "info"}`` is posted, ``{"reward": number}`` comes back.

    Raises:
        ConfigError: ``url`` is not http or https.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError("must be http:// or https://", field="reward.settings.url")

    async def reward(task: Task, messages: Sequence[Message], info: Mapping[str, Any]) -> float:
        body = {"task": dict(task), "messages": list(messages), "info": dict(info)}
        async with open_client({} if token is None else bearer(token)) as client:
            found = await ask(
                client,
                "POST",
                url,
                json.dumps(body).encode(),
                timeout_s=timeout_s,
                max_bytes=MAX_ANSWER_BYTES,
                field="reward",
                what="the reward endpoint: ",
            )
        if found.status != 200:
            raise TrainError(f"the reward endpoint answered HTTP {found.status}", field="reward")
        answer = json.loads(found.body)
        if not isinstance(answer, dict) or "reward" not in answer:
            raise TrainError("the reward endpoint's answer has no 'reward'", field="reward")
        return answer["reward"]

    return reward


REWARDS: dict[str, Callable[..., RewardFunction]] = {"exact_match": exact_match, "endpoint": endpoint}
