"""Environments made slow, for benchmarks of stragglers."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rose.train.envs.base import Environment, Family, Observation, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvLatency:
    """Time that each ``reset`` and ``step`` is made to take: lognormal, seeded by the task and the turn."""

    median_s: float
    sigma: float

    def draw_s(self, task: Task, turn: int) -> float:
        """Seconds that this turn takes; always the same for the same task and turn."""
        seed = json.dumps([dict(task), turn], sort_keys=True)
        return self.median_s * math.exp(random.Random(seed).gauss(0.0, self.sigma))


class DelayedFamily:
    """A family whose environments are slow, for benchmarks of stragglers."""

    def __init__(self, family: Family, latency: EnvLatency) -> None:
        self._family = family
        self._latency = latency

    @property
    def allowed_texts(self) -> tuple[str, ...] | None:
        return self._family.allowed_texts

    def tasks(self) -> Sequence[Task]:
        return self._family.tasks()

    def held_out_tasks(self, count: int) -> Sequence[Task]:
        return self._family.held_out_tasks(count)

    def make(self) -> Environment:
        return _Delayed(self._family.make(), self._latency)


class _Delayed:
    def __init__(self, environment: Environment, latency: EnvLatency) -> None:
        self._environment = environment
        self._latency = latency
        self._task: Task = {}
        self._turn = 0

    async def reset(self, task: Task) -> Observation:
        self._task, self._turn = task, 0
        await asyncio.sleep(self._latency.draw_s(task, 0))
        return await self._environment.reset(task)

    async def step(self, text: str) -> Observation:
        self._turn += 1
        await asyncio.sleep(self._latency.draw_s(self._task, self._turn))
        return await self._environment.step(text)

    async def close(self) -> None:
        await self._environment.close()
