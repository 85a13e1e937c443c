"""Environments that cost nothing: conversations of a drawn number of turns, with observations of a drawn length.

By name ``benchmarks.training.envs:scripted``.  What an episode does depends on its number in its process alone, so every arm of
a benchmark is given the same mix.  Rewards are drawn too: a trainer that sleeps does not mind.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rose.train.envs.base import Environment, Observation, Task

WORDS = ("the file holds nothing of note", "error: no such entry", "three results were found", "done")

num_turns = 0
"""Answers that environments of this process were given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedParams:
    num_tasks: int = 64
    turns_median: float = 4.0
    turns_sigma: float = 0.6
    turns_max: int = 16
    observation_chars: int = 200
    think_s: float = 0.0
    """Mean time of a step (exponential): what a tool takes."""
    stagger_s: float = 0.0
    """First observations come spread over this time, so that episodes are not in step."""
    seed: int = 0


class ScriptedFamily:
    allowed_texts = None

    def __init__(self, params: ScriptedParams) -> None:
        self._params = params
        self._num_made = 0

    def tasks(self) -> Sequence[Task]:
        return [{"env": "scripted", "number": number} for number in range(self._params.num_tasks)]

    def held_out_tasks(self, count: int) -> Sequence[Task]:
        return [{"env": "scripted", "number": -1 - number} for number in range(count)]

    def make(self) -> Environment:
        self._num_made += 1
        return Scripted(self._params, random.Random(self._params.seed * 1_000_003 + self._num_made))


class Scripted:
    def __init__(self, params: ScriptedParams, rng: random.Random) -> None:
        self._params = params
        self._rng = rng
        drawn = params.turns_median * math.exp(rng.gauss(0.0, params.turns_sigma))
        self._left = max(1, min(params.turns_max, round(drawn)))

    async def reset(self, task: Task) -> Observation:
        if self._params.stagger_s:
            await asyncio.sleep(self._rng.uniform(0.0, self._params.stagger_s))
        return self._observe(f"Task {task['number']}: ")

    async def step(self, text: str) -> Observation:
        global num_turns
        num_turns += 1
        self._left -= 1
        if self._left == 0:
            reward = float(self._rng.random() < 0.5)
            return Observation(done=True, reward=reward, success=reward > 0)
        if self._params.think_s:
            await asyncio.sleep(self._rng.expovariate(1.0 / self._params.think_s))
        return self._observe("")

    async def close(self) -> None:
        pass

    def _observe(self, begin: str) -> Observation:
        text = begin
        while len(text) < self._params.observation_chars:
            text += self._rng.choice(WORDS) + f" {self._rng.randrange(10**6)}. "
        return Observation(messages=({"role": "user", "content": text[: self._params.observation_chars]},))


def scripted(**settings: Any) -> ScriptedFamily:
    return ScriptedFamily(ScriptedParams(**settings))
