"""What a harvest is worth: how many dedicated engines the job would need more, to sample as much.

The same job, with the same number of trajectories under way, is simulated on fleets of dedicated engines only, from those that it has to
as many as there are engines in all (:class:`Yardstick`).  Worth is read off that curve: the size at which it samples what the job
samples beside production, less the engines that it has.

Three things bound it.  An engine is worth no more than the time that production's own steps leave of it (:func:`time_left`), nor more than
as many engines of the largest dedicated fleet, where each samples least, as would sample what was harvested.  And a job
with few trajectories samples hardly more on more engines: they wait on one another's latency, not for engines.  Then any number of
engines looks equal, and worth is not told (:attr:`Yardstick.is_loaded`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rose.sim.cells import CellResult
from rose.sim.scenario import Scenario

POINTS = 4
"""Sizes of the dedicated fleet that are simulated."""
LOADED = 0.2
"""The job loads the fleet where its last engines add at least this much of what engines add in proportion; ours.  Rates of two runs
differ by a percent or two by chance: below this that alone would be a tenth of the engines or more."""

CROWDED = 1.15
"""Engines that add more than this times what they would in proportion were too few before; ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Yardstick:
    """What one job samples on dedicated engines only."""

    engines: tuple[int, ...]
    """Rising; the first is what the job has in a cell."""
    tokens_s: tuple[float, ...]
    """Of all of them together."""

    @property
    def gain(self) -> float:
        """What the last engines add, of what they would in proportion: 1 = twice the engines sample twice as much, 0 = no more."""
        if len(self.engines) < 2 or min(self.tokens_s[-2:]) <= 0:
            return 0.0
        more = math.log(self.tokens_s[-1] / self.tokens_s[-2])
        return more / math.log(self.engines[-1] / self.engines[-2])

    @property
    def is_loaded(self) -> bool:
        return self.gain >= LOADED

    @property
    def crowded(self) -> int:
        """The largest of its fleets that samples much less than in proportion to the next: so few engines have not memory enough for all
        trajectories, which take turns in it and read their prompts again.  0: none."""
        pairs = list(zip(self.engines, self.tokens_s, strict=True))
        few = [
            engines
            for (engines, tokens_s), (more, most_s) in pairwise(pairs)
            if most_s * engines > CROWDED * tokens_s * more
        ]
        return max(few, default=0)

    def engines_for(self, tokens_s: float) -> float:
        """The size that samples ``tokens_s``, between the smallest and the largest; never more than in proportion to the largest, whose
        engines have memory enough (a few engines with all trajectories may not have)."""
        rising = np.maximum.accumulate(np.array(self.tokens_s))
        size = float(np.interp(tokens_s, rising, np.array(self.engines, dtype=float)))
        most = self.tokens_s[-1]
        return min(size, tokens_s / most * self.engines[-1]) if most > 0 else float(self.engines[0])


def sizes(scenario: Scenario) -> list[int]:
    """Of the dedicated fleets of a cell's yardstick."""
    cells = scenario.cells
    most = cells.dedicated + max(1, math.ceil(cells.serving * gpu_ratio(scenario)))
    return sorted({round(size) for size in np.linspace(cells.dedicated, most, POINTS)})


def yardstick_of(results: Sequence[CellResult]) -> Yardstick:
    """Of the cells of these :func:`sizes`, each with dedicated engines only."""
    return Yardstick(
        engines=tuple(each.num_dedicated for each in results),
        tokens_s=tuple(each.dedicated_tokens_s * each.num_dedicated for each in results),
    )


def gpu_ratio(scenario: Scenario) -> float:
    """Dedicated engines that have as many GPUs as one serving engine."""
    return scenario.fleet.serving_gpus / scenario.fleet.rollout_gpus


def time_left(scenario: Scenario, own: float) -> float:
    """Share of an engine's time that production leaves: what its own steps do not take, and of those what two engines overlap.

    Args:
        own: Share that its steps need for themselves.  Beside rollouts that is less than how busy it is alone: requests take
            longer, so more of them share a step.
    """
    return 1.0 - min(1.0, own) * (1.0 - scenario.efficiency.overlap)


def worth_of(rose: CellResult, yardstick: Yardstick) -> float | None:
    """Dedicated engines that one serving engine's harvest replaces; None where the job does not load the fleet."""
    if not yardstick.is_loaded:
        return None
    tokens_s = rose.dedicated_tokens_s * rose.num_dedicated + rose.harvested_tokens_s * rose.num_serving
    worth = max(0.0, yardstick.engines_for(tokens_s) - rose.num_dedicated) / max(1, rose.num_serving)
    return min(worth, rose.harvested_tokens_s * yardstick.engines[-1] / yardstick.tokens_s[-1])
