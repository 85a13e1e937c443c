"""The asynchronous way to take a step: episodes go on while the trainer trains, a bounded number of versions behind.

:meth:`AsyncLoop.step` is the loop's body: keep enough groups in flight, and train as soon as a batch can be leased.

*Bound.*  At most ``(alpha + 1) * num_groups`` groups are begun and not yet trained on.  With ``num_groups`` consumed a step
and groups consumed about in the order of their start, a group waits at most ``alpha`` steps (the admission rule of AReaL, Fu
et al. 2025).  About, because a slow group is overtaken; what decides is therefore checked where it counts, twice: the
scheduler drops or marks old groups at the lease, and the trainer leaves out what is older than ``alpha``
(``rose.train.collect``).  Where the job says so, ``alpha`` follows what steps measure (``rose.policy.adaptive_alpha``).

A dead environment manager takes its groups with it and nobody else's: their finished episodes are kept, the missing ones are
played on its replacement.  While the trainer restarts, the episodes go on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rose.errors import TrainError
from rose.policy.adaptive_alpha import AdaptiveAlpha, AlphaParams, StepTaken
from rose.train.actors import ActorDied, Actors
from rose.train.metrics import records_of
from rose.train.plan import GroupPlan, plan_groups, plan_of
from rose.train.rollout import RolloutReport
from rose.train.train_config import TrainConfig


class AsyncLoop:
    """See the module's docstring."""

    def __init__(self, config: TrainConfig, actors: Actors) -> None:
        self._config = config
        self._actors = actors
        self._running: dict[asyncio.Task[RolloutReport], GroupPlan] = {}
        self._lost: list[GroupPlan] = []
        """Groups whose manager died."""
        self._surveyed = False
        self._num_begun = 0
        self._num_failed = 0
        self._num_episodes = self._num_retries = self._num_stale_groups = 0
        self._causes: Counter[str] = Counter()
        self._adaptive = _adaptive_alpha(config)
        actors.alpha = config.alpha if self._adaptive is None else self._adaptive.accepted

    async def step(self) -> dict[str, Any]:
        """Train once, on the first batch that is there.

        Raises:
            ActorDied: An actor died; call it again when all actors are there.
            TrainError: Too many groups failed, or the trainer cannot go on.
        """
        started_s = time.monotonic()
        wanted, held = self._config.rollout.num_groups, 0
        is_first = True
        while True:
            death = self._reap()
            if death is not None and not is_first:
                raise death
            # Of a death that is known at the first look, the replacement is seen to already.
            is_first = False
            await self._recover()
            await self._fill(wanted, held)
            # Also ends when a lease finds too little: then this loop looks after its groups again.
            record = await self._actors.train()
            if "step" in record:
                record.pop("group_ids")
                break
            wanted, held = max(wanted, record["launch"]), record["held"]
        await self._leave_stale()
        counts = {
            "num_episodes": self._num_episodes,
            "num_env_retries": self._num_retries,
            "num_stale_groups": self._num_stale_groups,
        }
        failed: dict[str, Any] = {
            "num_failed_groups": self._num_failed,
            "num_running_groups": len(self._running),
        }
        failed["failed_tries"] = dict(self._causes)
        self._num_episodes = self._num_retries = self._num_failed = self._num_stale_groups = 0
        self._causes.clear()
        # Of an asynchronous step, the rollout's share is what the trainer waited for.
        busy_s = record["train_s"] + record["checkpoint_s"] + record["publish_s"]
        whole_s = time.monotonic() - started_s
        record |= {**counts, **failed, "rollout_s": max(0.0, whole_s - busy_s)}
        return record | self._adapted(record, whole_s)

    @property
    def _alpha(self) -> int:
        """For what is begun now."""
        return self._config.alpha if self._adaptive is None else self._adaptive.alpha

    def _adapted(self, record: Mapping[str, Any], whole_s: float) -> dict[str, Any]:
        """The bounds of the step, and why those of the next are what they are."""
        told: dict[str, Any] = {"alpha": self._alpha}
        if self._adaptive is None:
            return told
        told["alpha_accepted"] = self._actors.alpha
        waited_s = record["rollout_s"] - record["streamed_s"]
        measured = record["mismatch_kl"] if record["num_trained_sequences"] else math.nan
        idle = waited_s / whole_s if whole_s > 0 else math.nan
        decision = self._adaptive.handle(StepTaken(mismatch_kl=measured, idle=idle))
        self._actors.alpha = decision.accepted
        return {
            **told,
            "idle": idle,
            "alpha_cause": decision.cause,
            "alpha_changes": dict(self._adaptive.num_changes),
        }

    async def close(self) -> None:
        """Wait for no group any more.  Their episodes are the managers', see :meth:`rose.train.actors.Actors.stop_episodes`."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()

    async def _leave_stale(self) -> None:
        """What the new version has made useless gives its room back now, and not when its environments next speak."""
        try:
            await self._actors.leave_stale()
        except ActorDied:
            pass  # the step stands; the next one finds out

    async def _fill(self, wanted: int, held: int) -> None:
        """Begin groups up to the bound; at least what the trainer is known to lack.  ``held``: what it has of that already."""
        config, actors = self._config, self._actors
        begun = len(self._running) + held + await actors.num_ready()
        bound = (self._alpha + 1) * max(config.rollout.num_groups, wanted)
        num_new = bound - begun
        if num_new <= 0:
            return
        first = self._num_begun
        plans = plan_groups(
            waiting=(),
            mix=actors.mix,
            step=actors.step,
            first_task=0,
            attempt=actors.attempt,
            num_groups=num_new,
            group_size=config.rollout.group_size,
            num_redundant=config.rollout.redundant_episodes,
            first_index=first,
            ratios=actors.shapes.ratios,
        )
        self._num_begun += num_new
        for plan in plans:
            self._begin(plan)

    def _begin(self, plan: GroupPlan) -> None:
        manager = min(range(self._actors.num_managers), key=lambda index: (self._load(index), index))
        task = asyncio.create_task(self._actors.run_on(manager, [plan]), name=str(manager))
        self._running[task] = plan

    def _load(self, manager: int) -> int:
        return sum(task.get_name() == str(manager) for task in self._running)

    def _reap(self) -> ActorDied | None:
        """Take note of the groups that have ended; the death of a manager, if one has died.

        Raises:
            TrainError: Too many groups failed.
        """
        death: ActorDied | None = None
        for task in [task for task in self._running if task.done()]:
            plan = self._running.pop(task)
            error = task.exception()
            if isinstance(error, ActorDied):
                self._lost.append(plan)
                death = error
            elif error is not None:
                raise error
            else:
                report = task.result()
                self._num_episodes += report.num_episodes
                self._num_retries += report.num_retries
                self._num_stale_groups += report.num_stale_groups
                self._causes += Counter(report.causes)
                for name, why in report.failures:
                    self._num_failed += 1
                    self._actors.gave_up(name)
                    if self._actors.may_begin_again(name):
                        self._lost.append(plan)
                    if self._num_failed > self._config.env.max_failed_groups:
                        raise TrainError(f"{self._num_failed} groups failed, the last: {why}", field="env")
        return death

    async def _recover(self) -> None:
        """Begin again what a dead manager, or an earlier driver, has left behind."""
        if not self._surveyed:
            groups = await self._actors.survey()
            self._surveyed = True
            # Numbers of groups go on from the step's place in the schedule, so that restarts walk on through the tasks.
            self._num_begun = self._actors.step * self._config.rollout.num_groups
            for group in groups:
                if group.num_finished < group.group_size:
                    self._begin(plan_of(group))
        if self._lost:
            lost, self._lost = self._lost, []
            left = {
                group.group_id: group.num_finished
                for group in await self._actors.survey([one.group_id for one in lost])
            }
            for plan in lost:
                num_missing = plan.group_size - left.get(plan.group_id, 0)
                if num_missing > 0:
                    self._begin(replace(plan, num_missing=num_missing))


def _adaptive_alpha(config: TrainConfig) -> AdaptiveAlpha | None:
    """None where the bound stands still; else as the last step of before has left it."""
    settings = config.rollout.adaptive_alpha
    if not settings.enabled:
        return None
    alpha, accepted = config.alpha, None
    for record in records_of(config.output_dir / "metrics.jsonl"):
        if isinstance(record.get("alpha_accepted"), int) and isinstance(record.get("alpha"), int):
            alpha, accepted = record["alpha"], record["alpha_accepted"]
    params = settings.model_dump(exclude={"enabled"})
    return AdaptiveAlpha(AlphaParams(**params), alpha, accepted)
