"""Short and long rounds in a synchronous run: which groups a step begins, by :class:`rose.policy.tail_batching.TailBatching`.

A prompt is its number in the job's mix of tasks.  A group that is put by is given up with what of it has finished, and its prompt begins
anew under another name.  One that was completed beyond its batch is in the next one.

Told with each step (``tail_batching`` of its record) is what a later driver needs to go on: a death between a step's checkpoint and its line in
``metrics.jsonl`` has that step's prompts begin once more.  A death before the checkpoint loses none: what was begun is complete, or is put by.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rose.policy.tail_batching import TailBatching
from rose.train.mix import TaskMix
from rose.train.plan import GroupPlan, GroupState
from rose.train.train_config import RolloutSettings


class TailRounds:
    """Args:
    settings: With ``tail_batching.extra_groups`` above 0.
    """

    def __init__(self, settings: RolloutSettings, mix: TaskMix) -> None:
        tail = settings.tail_batching
        self._settings, self._mix = settings, mix
        self._policy = TailBatching(
            num_groups=settings.num_groups,
            extra_groups=tail.extra_groups,
            extra_members=settings.redundant_episodes,
            patience=tail.patience,
        )
        self._next_prompt: int | None = None
        self._begun: dict[str, int] = {}
        """Groups that no step has taken yet, and their prompts."""
        self._num_named = 0
        self._is_long = False
        self._num_again = 0
        cycle = math.ceil(settings.num_groups / tail.extra_groups) + 1
        self._recent: deque[tuple[float, int]] = deque(maxlen=cycle)
        """Mean length and number of trajectories of the last batches, as many as from one long round to the next."""

    def go_on(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Where the last driver has left it.  Once, before the first step.

        Args:
            step: The next to take.
            records: Of ``metrics.jsonl``.
        """
        if self._next_prompt is not None:
            return
        self._next_prompt = step * self._settings.num_groups
        found: dict[int, Mapping[str, Any]] = {}
        for record in records:
            if record.get("restored") is True:
                continue  # the last driver died before its line: what the step before left is where to go on
            # A step that is taken again ends what came of it the first time.
            found = {at: told for at, told in found.items() if at < record["step"] < step}
            told = record.get("tail_batching")
            if record["step"] < step and isinstance(told, Mapping):
                found[record["step"]] = told
        if found:
            told = found[max(found)]
            self._next_prompt = int(told["next_prompt"])
            self._policy.end(map(int, told["put_by"]))
            self._begun = {str(name): int(prompt) for name, prompt in told["begun"].items()}

    def begin(
        self, waiting: Sequence[GroupState], *, step: int, attempt: int, ratios: Mapping[str, float]
    ) -> list[GroupPlan]:
        """Episodes of a round, after :meth:`go_on`.

        Args:
            waiting: What the scheduler has of this job, while nothing is played.
        """
        complete = {group.group_id for group in waiting if group.num_finished >= group.group_size}
        slow = [prompt for name, prompt in self._begun.items() if name not in complete]
        self._begun = {name: prompt for name, prompt in self._begun.items() if name in complete}
        self._policy.end(slow)
        this = self._policy.begin(len(complete))
        self._is_long, self._num_again = this.is_long, len(this.again)
        prompts = [*this.again, *self._new(this.num_new)]
        return [self._plan(prompt, step, attempt, ratios, this.extra_members) for prompt in prompts]

    def more(self, count: int, *, step: int, attempt: int, ratios: Mapping[str, float]) -> list[GroupPlan]:
        """Episodes of so many groups that the step lacks still."""
        return [self._plan(prompt, step, attempt, ratios, 0) for prompt in self._new(count)]

    def failed(self, group_id: str) -> None:
        """Its episodes kept failing: it is no slow one, and its prompt is left."""
        self._begun.pop(group_id, None)

    def end(self, group_ids: Sequence[str], sampled_mean: float, count: int) -> dict[str, Any]:
        """A step was taken; what its record says of it.

        Args:
            group_ids: That it was trained on.
            sampled_mean: Sampled tokens of a trajectory of its batch, of ``count`` of them.
        """
        for name in group_ids:
            self._begun.pop(name, None)
        self._recent.append((sampled_mean, count))
        total = sum(number for _, number in self._recent)
        usual = sum(mean * number for mean, number in self._recent) / max(1, total)
        return {
            "is_long": int(self._is_long),
            "num_again": self._num_again,
            "num_put_by": len(self._policy.put_by) + len(self._begun),
            "length_ratio": sampled_mean / usual if usual else 1.0,
            "next_prompt": self._next_prompt,
            "put_by": list(self._policy.put_by),
            "begun": dict(self._begun),
        }

    def _new(self, count: int) -> list[int]:
        assert self._next_prompt is not None
        first, self._next_prompt = self._next_prompt, self._next_prompt + count
        return list(range(first, first + count))

    def _plan(
        self, prompt: int, step: int, attempt: int, ratios: Mapping[str, float], num_redundant: int
    ) -> GroupPlan:
        kind, task = self._mix.at(prompt)
        name = f"{attempt}-{step:06d}-{self._num_named:04d}"
        self._num_named += 1
        self._begun[name] = prompt
        return GroupPlan(
            group_id=name,
            group_size=self._settings.group_size,
            task=task,
            num_missing=self._settings.group_size,
            num_redundant=num_redundant,
            task_kind=kind,
            prefill_per_decode=ratios.get(kind),
        )
