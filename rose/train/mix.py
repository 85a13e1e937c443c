"""Which task each group of a run plays, and what is known of each task's shape.

A job may train on several tasks, mixed by weight.  :class:`TaskMix` gives group number ``i`` of the run its task: always the one
that is furthest behind its share, and of that task the next, in order.  So every stretch of groups is mixed as the weights say
(no task is ever a whole group behind or ahead), and a restart goes on where the run was.

Groups that a step begins because others came to nothing are not of that order, or they would take the turns of what comes next: their tasks are
drawn by weight, from the job's seed and the group's place in its step.

:class:`TaskShapes` remembers, per task, how many new prompt tokens come with each sampled one: agentic tasks read far more than
they write, and the scheduler places turns better when it knows how much.

Pure.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rose.train.envs.base import Task

EWMA = 0.3
"""Weight of a new step's ratio."""


class TaskMix:
    """Args:
    tasks: Per name, in the order in which they are walked through; none empty.
    weights: Per name, positive; 1 where there is none.
    seed: Of what :meth:`drawn` says.
    """

    def __init__(
        self,
        tasks: Mapping[str, Sequence[Task]],
        weights: Mapping[str, float] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self._tasks = tasks
        self._names = list(tasks)
        given = [float((weights or {}).get(name, 1.0)) for name in self._names]
        self._shares = [weight / sum(given) for weight in given]
        self._counts = [0] * len(self._names)
        self._drawn = array("B"), array("Q")
        """Of each group so far: which name, and how many of that name came before."""

    def at(self, index: int) -> tuple[str, Task]:
        """Name and task of group ``index`` (0-based) of the run."""
        if len(self._names) == 1:
            name = self._names[0]
            return name, self._tasks[name][index % len(self._tasks[name])]
        names, numbers = self._drawn
        while len(names) <= index:
            at = len(names) + 1
            behind = [share * at - count for share, count in zip(self._shares, self._counts, strict=True)]
            which = behind.index(max(behind))
            names.append(which)
            numbers.append(self._counts[which])
            self._counts[which] += 1
        name = self._names[names[index]]
        return name, self._tasks[name][numbers[index] % len(self._tasks[name])]

    def drawn(self, step: int, index: int) -> tuple[str, Task]:
        """Name and task of group ``index`` of ``step`` where it is of no place in the order; the same whenever it is asked for."""
        draw = random.Random(f"{self._seed}/{step}/{index}")
        name = draw.choices(self._names, self._shares)[0]
        return name, draw.choice(self._tasks[name])


@dataclass(slots=True)
class TaskShapes:
    """Prefill:decode ratio per task name, smoothed over steps."""

    ratios: dict[str, float] = field(default_factory=dict)

    def observe(self, record: Mapping[str, Any]) -> None:
        """Learn from a step's metrics (``rose.train.metrics``)."""
        measured = {name: one["prefill_per_decode"] for name, one in (record.get("tasks") or {}).items()}
        for name, ratio in (measured or {"": record["prefill_per_decode"]}).items():
            if ratio > 0.0:
                seen = self.ratios.get(name, ratio)
                self.ratios[name] = seen + EWMA * (ratio - seen)
