"""Environments: what an agent sees, says and is paid for, one conversation at a time.

An :class:`Environment` is one running episode; a :class:`Family` makes them and lists their tasks.
A *task* is plain JSON data and holds everything that an episode depends on, so that an episode can be
started again anywhere (after a lost actor, for example) and is the same episode.

The protocol is async because real environments wait (for a browser, a sandbox, a judge); those here do
not.  An environment never sees token ids, engines or weights: messages in, messages out.  It owns the
reward: ``reward`` counts on the last observation of an episode only, is finite, and no further from 0 than :data:`MAX_REWARD`.

Text that is no legal action is the agent's mistake, not an error: the episode goes on (and its turns run
out).  :class:`~rose.errors.TrainError` is for what the run cannot absorb: a task of another family, or a
step after the end.

The ones that exist are listed in :mod:`rose.train.envs.registry`, by the names that a job's settings use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]
"""``{"role": ..., "content": ...}``, as in the OpenAI API."""

Task = Mapping[str, Any]

MAX_REWARD = 1e9
"""That is trained on, of either sign.  A scheduler takes larger ones: it serves other trainers too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the agent is shown next.  When ``done``, ``messages`` is empty and ``reward`` is final."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0
    success: bool = False
    info: dict[str, Any] = field(default_factory=dict)


def unusable(reward: object) -> str | None:
    """Why it cannot be paid, in short; None where it can: a finite number of Python's own, for others do not go through JSON."""
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return f"{reward!r:.40} is no Python float: return float(...)"
    try:
        return None if math.isfinite(reward) else f"{reward!r} is not finite"
    except OverflowError:
        return "a whole number beyond every float is not finite"


class Environment(Protocol):
    """One episode.  Life: ``reset`` -> ``step``... until ``done`` -> ``close``; ``close`` is always safe."""

    async def reset(self, task: Task) -> Observation:
        """Begin the episode that ``task`` describes; what the agent is shown first."""
        ...

    async def step(self, text: str) -> Observation:
        """The agent has answered ``text``; what it is shown next, or how the episode ended."""
        ...

    async def close(self) -> None:
        """Give up what the episode holds, however far it came."""
        ...


class Family(Protocol):
    """A kind of environment with its settings."""

    @property
    def allowed_texts(self) -> tuple[str, ...] | None:
        """The only answers that make sense, each one token; None = free text."""
        ...

    def tasks(self) -> Sequence[Task]:
        """The training tasks, in a fixed order that depends on the settings alone."""
        ...

    def held_out_tasks(self, count: int) -> Sequence[Task]:
        """Up to ``count`` tasks for evaluation, none of them among the training tasks."""
        ...

    def make(self) -> Environment:
        """An environment for one episode."""
        ...
