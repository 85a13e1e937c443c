"""The actors without Ray: the same workers, in this event loop.  Whole runs in seconds, and deaths on command.

Stands for ``rose.train.actors.Actors`` where a test is about the loops; ``test_async.py``, ``test_faults.py`` and ``test_loop.py`` run
the same loops on real actors.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayActorError

from rose.train.actors import Actors
from rose.train.env_manager import EnvManager
from rose.train.rewards import RewardWorker
from rose.train.train_config import RewardSettings
from rose.train.workers import TrainWorker


class LocalActor:
    """Looks like a Ray handle: ``actor.method.remote(...)`` is awaitable.  After :meth:`kill` nothing of it runs on."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._calls: set[asyncio.Task[Any]] = set()
        self._died = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        actor = self

        class Method:
            @staticmethod
            def remote(*arguments: Any, **named: Any) -> Any:
                return asyncio.ensure_future(actor.call(method, arguments, named))

        return Method()

    async def call(self, method: Any, arguments: Any, named: Any) -> Any:
        if self._died.is_set():
            raise RayActorError(error_msg="killed")
        work = asyncio.ensure_future(method(*arguments, **named))
        death = asyncio.ensure_future(self._died.wait())
        self._calls.add(work)
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if self._died.is_set():  # even if the work has heard of it by now
                raise RayActorError(error_msg="killed")
            return work.result()
        finally:
            death.cancel()
            self._calls.discard(work)

    def kill(self) -> None:
        """Cut it off.  A killed process tells nobody, so clean-up code of what it ran must not run either: its client is
        taken away first."""
        self._died.set()
        client = self._target._client
        client._call = _nobody_answers
        for call in self._calls:
            call.cancel()


async def _nobody_answers(*_: Any, **__: Any) -> Any:
    raise asyncio.CancelledError


class LocalRewards:
    """A :class:`rose.train.rewards.Scorer` in this process."""

    def __init__(self, reward: RewardSettings) -> None:
        self._worker = RewardWorker(reward.kind, reward.settings)

    async def ready(self) -> None:
        pass

    async def score(self, task: Any, messages: Any, info: Any) -> float:
        return await self._worker.score(task, messages, info)

    def kill(self) -> None:
        pass


class LocalActors(Actors):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made: list[LocalActor] = []

    async def _hold_room(self) -> bool:
        return False

    def _make_manager(self, index: int) -> Any:
        self.made.append(LocalActor(EnvManager(self.config, self.tokens.only(["environment"]), LocalRewards)))
        return self.made[-1]

    def _make_trainer(self) -> None:
        self._trainer = LocalActor(TrainWorker(self.config, self.tokens, self._parts))
        self.made.append(self._trainer)

    def _kill(self, actor: Any) -> None:
        actor.kill()

    def kill_manager(self, index: int = 0) -> None:
        self._managers[index].kill()

    def kill_trainer(self) -> None:
        self._trainer.kill()

    async def close(self) -> None:
        for actor in self.made:
            await actor._target.close()
