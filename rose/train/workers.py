"""The worker of a train loop that owns the weights, as a plain async class; ``rose.train.actors`` makes a Ray actor of it.

:meth:`TrainWorker.start` opens a new attempt: it takes the newest checkpoint, claims the attempt's number on disk, tells the
scheduler what was consumed, and publishes its first version as an anchor.  :meth:`TrainWorker.train` takes one step.

Order inside a step, and why nothing is lost or applied twice::

    lease -> train -> checkpoint -> acknowledge -> publish -> require the version
           ^ death: the lease returns           ^ death: ids are in the checkpoint, `resume` drops them
                     ^ death: as before                        ^ death: a new attempt publishes its own

A checkpoint is written every ``checkpoint_every`` steps, in the background where the job says so.  Leases are acknowledged when one is durable that was
trained on them: after a death the others are leased again, in their order, and the versions that were made of them end with the attempt.

With ``trainer.stream_groups`` a step leases group by group, and computes on what it has while it waits for the rest.  What has begun is in memory alone: until the
checkpoint its leases are as open as those of a step that has not begun, and go the same way after a death.

Version = number of steps behind the weights.  Blocking work (torch, disk, relay) runs in a thread, so that the
worker goes on answering.  A worker does one thing at a time; its caller sees to that.

Ray is not imported here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rose.auth import Tokens
from rose.errors import Gone, RoseError, TrainError
from rose.lineage import WeightVersion
from rose.train.build import make_publisher, torch_trainer
from rose.train.client import SchedulerClient
from rose.train.collect import Acceptance, Collected, CollectParams
from rose.train.constrained import FIX, constraints_on, own_constraints
from rose.train.export import Which, export_of
from rose.train.metrics import lengths_by_quantile, success_by_task, success_rate, trajectory_metrics
from rose.train.publishing import MakePublisher, Publisher, publish_patiently, published_attempt
from rose.train.train_config import TrainConfig

logger = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
"""The groups are complete when a lease is asked for; waiting longer would hide that one was lost."""
STREAM_WAIT_S = 1.0
"""For a group to be complete while others are played; then the driver has a look at them."""
RESUMED_STEPS = 4
"""Whose ids a resume names, beside those whose leases may wait for a checkpoint.  One would do."""
BEST_OVER_STEPS = 5
"""Steps over which sampled success is averaged where there is no evaluation: of one batch it is noise, and a batch is older than its checkpoint."""
MAX_NAMED = 8
"""Trajectories of a step that are named in its metrics for being malformed."""


MakeTrainer = Callable[[TrainConfig], Any]
"""Builds a :class:`rose.train.protocol.Trainer`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """How a project brings its own trainer or transport; None takes ours.  They cross to an actor, so they must be
    importable there."""

    make_trainer: MakeTrainer | None = None
    make_publisher: MakePublisher | None = None


class TrainWorker:
    """Owns the weights of one job."""

    def __init__(
        self, config: TrainConfig, tokens: Tokens, parts: Parts | None = None, ranks: Sequence[Any] = ()
    ) -> None:
        self._config = config
        self._tokens = tokens
        parts = parts or Parts()
        self._make_trainer = parts.make_trainer or torch_trainer
        self._ranks = ranks
        self._make_publisher = parts.make_publisher or make_publisher
        self._run = config.run_id
        self._client = SchedulerClient(
            config.scheduler.url,
            trainer_token=tokens.trainer,
            turn_timeout_s=config.scheduler.turn_timeout_s,
            retry_s=config.scheduler.retry_s,
        )
        self._directory = config.output_dir / "checkpoints"
        self._attempt = 0
        self._consumed: dict[int, tuple[str, ...]] = {}
        self._collected = Collected(
            CollectParams(
                num_groups=config.rollout.num_groups,
                alpha=config.alpha,
                dynamic_sampling=config.has_dynamic_sampling,
                max_rounds=config.trainer.dynamic_sampling.max_rounds,
                min_informative=(
                    config.min_informative_groups if config.trainer.guard.starved == "wait" else 0
                ),
                starved_rounds=config.trainer.guard.max_rounds,
            )
        )
        self._acceptance = Acceptance()
        self._informative = Acceptance()
        """Which part of the groups has unequal rewards."""
        self._successes: deque[float] = deque(maxlen=BEST_OVER_STEPS)
        self._samples: dict[str, list[Any]] = {}
        """Of what is leased, by trajectory."""
        self._streams = config.streamed != "off"
        self._begun: set[str] = set()
        """Groups that the step has begun with, or is about to."""
        self._fresh: list[Any] = []
        """Samples of those with which it has not begun yet."""
        self._streamed_s = 0.0
        self._warned: set[tuple[str, str]] = set()
        """Constraints that were warned of."""
        self._name = secrets.token_hex(8)
        """Begins the names of this worker's batches, as no other's."""
        self._unacknowledged: list[tuple[str, int]] = []
        """Leases that were trained on since the last checkpoint was begun, and the steps that were."""
        self._written: list[tuple[str, int]] = []
        """The same of the checkpoint that is being written."""
        self._writing: asyncio.Task[None] | None = None
        self._success: tuple[int, float] | None = None
        """Step and sampled success of the checkpoint that is being written."""
        self._num_leases = 0
        self._busy = asyncio.Lock()
        """Held by a step.  A driver that lost touch with one in progress begins another while the first still runs."""
        self._trainer: Any = None
        self._publisher: Publisher | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def start(self, alpha: int | None = None, num_taken: int | None = None) -> dict[str, Any]:
        """Open a new attempt; ``{attempt, step, passed_over, num_consumed, update}``, where ``step`` is the next to take, and ``num_consumed`` says of
        how many trajectories the steps before it were, as far as the checkpoint does.

        Args:
            alpha: Versions beyond which a sample is too old; None = as the job has it.
            num_taken: Steps taken under the worker that this one replaces; None: it replaces none.

        Raises:
            TrainError: There are checkpoints, and none can be read; or those of the worker before are not there.  Before anything is given up.
            RoseError: Model, scheduler or relay refuse.
        """
        from rose.train import checkpoint as checkpoints

        self._bound_by(alpha)
        if self._ranks:
            from rose.train.ranks import RankedTrainer

            self._trainer = await asyncio.to_thread(
                RankedTrainer, self._config, self._make_trainer, self._ranks
            )
        else:
            self._trainer = await asyncio.to_thread(self._make_trainer, self._config)
        trainer = self._trainer.inner if self._ranks else self._trainer
        if self._config.trainer.stream_groups == "auto" and not hasattr(trainer, "begin"):
            self._streams = False
        if self._streams and not hasattr(trainer, "begin"):
            raise TrainError(
                f"{type(trainer).__name__} has no begin(), see rose.train.protocol.Trainer",
                field="trainer.stream_groups",
                fix='set it to "off"',
            )
        streamed = self._config.streamed if self._streams else "off"
        logger.info("steps begin before their batch is complete (trainer.stream_groups): %s", streamed)
        settings = self._config.trainer
        found, passed_over = await asyncio.to_thread(
            checkpoints.to_go_on_from,
            self._directory,
            num_taken=num_taken,
            # The first one is durable when the second begins.
            most_behind=settings.checkpoint_every * (1 + settings.background_checkpoints),
        )
        if found is not None:
            await asyncio.to_thread(self._trainer.restore, found)
            self._consumed = {step: tuple(ids) for step, ids in found.consumed.items()}
        self._attempt = 1 + max(
            checkpoints.latest_attempt(self._directory),
            # An output folder that was wiped must not make two lives of the job share names.
            await self._client.latest_attempt(self._config.job),
            await asyncio.to_thread(published_attempt, self._config, self._tokens, self._make_publisher),
        )
        is_afresh = found is None and self._attempt > 1
        if is_afresh:
            await self._begin_afresh()
        # Claims the number before anyone trains under it: a death right after this leaves the attempt used up.
        await self._save()
        if is_afresh:  # once more: a driver of before that still lives has played on meanwhile
            await self._begin_afresh()
        else:
            await self._resume()
        if self._ranks:
            open_publisher = partial(self._trainer.open_publisher, self._make_publisher, self._tokens)
        else:
            module = self._trainer.module
            open_publisher = partial(self._make_publisher, self._config, self._tokens, module)
        self._publisher = await asyncio.to_thread(open_publisher, self._attempt)
        update = await self._publish(None)
        return {
            "attempt": self._attempt,
            "step": self._trainer.step_index,
            "passed_over": passed_over,
            "num_consumed": {one: len(ids) for one, ids in self._consumed.items()},
            "update": update,
        }

    async def train(
        self, learning_rate: float, single_update: bool = False, alpha: int | None = None
    ) -> dict[str, Any]:
        """Take one step, and return its metrics.

        Args:
            alpha: Versions beyond which a sample is too old for it; None = as before.

        Where groups are missing nothing is trained; what was leased stays with this step, and the answer is
        ``{"missing": groups to lease still, "launch": groups to start for them, "held": groups of theirs that it has}``.

        Raises:
            TrainError: A trajectory cannot be trained on, or the gradient is not finite.
        """
        if self._trainer is None:
            raise TrainError("train() before start()", field="trainer")
        async with self._busy:
            self._bound_by(alpha)
            return await self._train(learning_rate, single_update)

    async def _train(self, learning_rate: float, single_update: bool) -> dict[str, Any]:
        await self._settle(wait=False)
        await self._lease(LEASE_WAIT_S)
        if missing := self._collected.num_missing:
            # What a synchronous step with alpha = 0 has too much of, no step may use.
            exact = self._config.alpha == 0 and self._config.rollout.mode == "synchronous"
            rate = self._informative if self._collected.num_starving else self._acceptance
            launch = missing if exact else rate.to_launch(missing)
            found = self._collected.round
            return {
                "missing": missing,
                "launch": launch,
                "held": found.num_seen if found.num_due else 0,
            }
        trainer, step = self._trainer, self._trainer.step_index
        trajectories, batch_ids = self._collected.trajectories, list(self._collected.batch_ids)
        filtered = [] if not self._collected.kept else list(self._collected.filtered.values())
        started_s = time.monotonic()
        samples = [sample for one in trajectories for sample in self._samples[one["id"]]]
        if not samples and (names := _constraints(trajectories)):
            text = f"all turns of step {step} were drawn under {', '.join(sorted(names))}, and are left out"
            raise TrainError(text, field="trainer.constrained", fix=FIX)
        malformed = dict(self._collected.malformed)
        report = await asyncio.to_thread(
            trainer.step, samples, learning_rate=learning_rate, single_update=single_update
        )
        trained_s = time.monotonic()
        self._consumed[step] = self._collected.ids
        sampled = [*trajectories, *(one for group in filtered for one in group)]
        sampled_success, sampled_tasks = success_rate(sampled), success_by_task(sampled)
        num_starving, streamed_s = self._collected.num_leases_starved, self._streamed_s
        group_ids = [*self._collected.kept, *self._collected.filtered]
        self._forget()
        self._unacknowledged += [(batch_id, step) for batch_id in batch_ids]
        self._successes.append(sampled_success)
        await self._settle(wait=self._is_saved_after(step))
        # A lease that was found gone has made it durable already.
        if self._is_saved_after(step) and self._unacknowledged:
            await self._checkpoint(step)
        saved_s = time.monotonic()
        publish_started_s = time.monotonic()
        update = await self._publish(learning_rate)
        return {
            "step": step,
            "attempt": self._attempt,
            "version": f"{self._attempt}.{step + 1}",
            **trajectory_metrics(trajectories, version=(self._attempt, step)),
            "sampled_success_rate": sampled_success,
            **({"sampled_tasks": sampled_tasks} if sampled_tasks else {}),
            "num_starved_leases": num_starving,
            **{name: value for name, value in report.to_dict().items() if name != "seconds"},
            "num_leases": len(batch_ids),
            "group_ids": group_ids,
            "num_malformed": len(malformed),
            "malformed": dict(list(malformed.items())[:MAX_NAMED]),
            "num_filtered_groups": len(filtered),
            "acceptance": self._acceptance.rate,
            "filtered_by_length": lengths_by_quantile([one for group in filtered for one in group]),
            "discards_by_length": await self._client.discards(self._config.job),
            "lr": learning_rate,
            "train_s": trained_s - started_s,
            "streamed_s": streamed_s,
            "checkpoint_s": saved_s - trained_s,
            "publish_s": time.monotonic() - publish_started_s,
            "update": update,
        }

    async def _checkpoint(self, step: int) -> None:
        """Write one, or begin to: of the last step always the former."""
        self._written, self._unacknowledged = self._unacknowledged, []
        if not self._config.eval.every_steps and len(self._successes) == BEST_OVER_STEPS:
            self._success = (self._trainer.step_index, sum(self._successes) / BEST_OVER_STEPS)
        is_last = step + 1 >= self._config.num_steps
        if self._config.trainer.background_checkpoints and not is_last:
            await asyncio.to_thread(self._trainer.begin_save, self._directory, **self._told())
            self._writing = asyncio.create_task(asyncio.to_thread(self._trainer.finish_save))
        else:
            self._writing = asyncio.create_task(self._save())
            await self._settle(wait=True)

    async def _settle(self, *, wait: bool) -> None:
        """Acknowledge what a checkpoint that has become durable was trained on.

        Raises:
            TrainError: It could not be written.
        """
        if self._writing is None or not (wait or self._writing.done()):
            return
        writing, self._writing = self._writing, None
        await writing
        done, self._written = self._written, []
        success, self._success = self._success, None
        if success is not None:
            await self._note(*success, "sampled")
        await self._acknowledge(done)

    async def _note(self, step: int, success: float, measure: Literal["held_out", "sampled"]) -> None:
        from rose.train import checkpoint as checkpoints

        # Without a checkpoint of these weights there is nothing to keep, which `note_best` sees.
        if self._config.trainer.guard.keep_best:
            name = checkpoints.name_of(step, self._attempt)
            await asyncio.to_thread(checkpoints.note_best, self._directory, name, success, measure)

    def _is_saved_after(self, step: int) -> bool:
        return (step + 1) % self._config.trainer.checkpoint_every == 0 or step + 1 >= self._config.num_steps

    async def _acknowledge(self, done: Sequence[tuple[str, int]]) -> None:
        """What the newest checkpoint has been trained on is nobody else's any more."""
        try:
            for batch_id, step in done:
                await self._client.ack(batch_id, step=step, attempt=self._attempt, run=self._run)
        except Gone:
            # A lease ran out on the way, and what it held may be ready again.  It is applied and in the checkpoint: say so.
            logger.warning("a lease of step %d ran out: raise scheduler.lease_ttl_s", done[-1][1])
            await self._resume()

    @property
    def _staleness(self) -> dict[str, Any]:
        """One bound for both sides, where the job names a rule: else the scheduler keeps to its own."""
        rule = self._config.stale_rule if self._streams else self._config.rollout.on_stale
        return {} if rule is None else {"alpha": self._collected.params.alpha, "on_stale": rule}

    def _bound_by(self, alpha: int | None) -> None:
        if alpha is not None:
            self._collected.params = replace(self._collected.params, alpha=alpha)

    async def release(self) -> None:
        """Hand back what was leased for a step that will be begun again."""
        async with self._busy:  # not of a step that is being trained on
            if self._collected.batch_ids:
                await self._give_back()

    async def note_success(self, success: float) -> None:
        """How well the present weights do on held-out tasks: the best checkpoint is kept for as long as none is better."""
        await self._settle(wait=True)
        await self._note(self._trainer.step_index, success, "held_out")

    async def export(self, target: Path, which: Which) -> str:
        """See :func:`rose.train.export.export_of`."""
        return await asyncio.to_thread(export_of, self._trainer, self._directory, target, which)

    async def pin(self, job: str) -> str:
        """Let no worker below the current weights take a turn of ``job``; returns their version."""
        version = self._trainer.step_index
        await self._client.set_version(job=job, attempt=self._attempt, version=version, run=self._run)
        return f"{self._attempt}.{version}"

    async def begin(self) -> int:
        """Compute on the groups that are complete while others are played; the number that the step lacks, 0 where nothing can begin.  Where steps are streamed."""
        return await self.gather() if self._streams else 0

    async def gather(self) -> int:
        """Lease what of the step is complete while the rest is played; the number of groups that it lacks."""
        async with self._busy:
            await self._settle(wait=False)
            await self._lease(STREAM_WAIT_S, while_played=True)
            return self._collected.num_missing

    async def _lease(self, patience_s: float, *, while_played: bool = False) -> None:
        """Lease what the step lacks, as far as it is there; where it is streamed, in parts, on which it computes."""
        config, version = self._config, (self._attempt, self._trainer.step_index)
        until_s = time.monotonic() + patience_s
        asynchronous = config.rollout.mode == "asynchronous"
        while missing := self._collected.num_missing:
            num_groups, wait_s = missing, patience_s
            if self._streams:  # in all no longer: the driver has groups to look after
                num_groups, wait_s = 1, 0.0 if self._fresh else max(0.0, until_s - time.monotonic())
            # A synchronous refill has either been played by now, or is to be.
            if not (asynchronous or while_played) and self._collected.num_rounds:
                wait_s = 0.0
            try:
                leased = await self._client.lease(
                    job=config.job,
                    num_groups=num_groups,
                    attempt=version[0],
                    version=version[1],
                    ttl_s=config.scheduler.lease_ttl_s,
                    wait_s=wait_s,
                    # The same until it was answered with a batch: what was leased and never heard of is not lost.
                    name=f"{self._name}-{self._num_leases}",
                    run=self._run,
                    **self._staleness,
                )
            except Gone:
                # Leased, never heard of, and run out since: others have it.
                self._num_leases += 1
                continue
            if leased is None:
                if not await self._begin():
                    return
                continue
            self._num_leases += 1
            if self._has_trained_on(leased[1]):
                logger.warning("a lease ran out before its checkpoint: raise scheduler.lease_ttl_s")
                await self._give_back()  # and say what was trained on
                continue
            try:
                kept, seen = self._collected.add(*leased, version, self._take_samples, num_groups=num_groups)
            except RoseError:
                await self._give_back()
                raise
            if not self._collected.round.num_due:
                if self._collected.params.dynamic_sampling:
                    self._acceptance.observe(kept, seen)
                self._informative.observe(self._collected.round.num_informative, seen)
            if self._streams:
                self._freshen()
        await self._begin()

    def _has_trained_on(self, trajectories: Sequence[dict[str, Any]]) -> bool:
        """Whether any of them are of a lease of before that waits for a checkpoint still."""
        ids = {one.get("id") for one in trajectories if isinstance(one.get("id"), str)}
        waiting = {step for _, step in (*self._unacknowledged, *self._written)}
        return any(not ids.isdisjoint(self._consumed.get(step, ())) for step in waiting)

    def _freshen(self) -> None:
        """Note the groups that the step was not known to have.  One whose lease ran out may come a second time."""
        for group_id, members in self._collected.kept.items():
            if group_id not in self._begun:
                self._begun.add(group_id)
                self._fresh += [sample for one in members for sample in self._samples[one["id"]]]

    async def _begin(self) -> bool:
        """Have the trainer begin with the groups that are new; whether there were any."""
        fresh, self._fresh = self._fresh, []
        if not fresh:
            return False
        is_early, started_s = self._collected.num_missing > 0, time.monotonic()
        await asyncio.to_thread(self._trainer.begin, fresh)
        if is_early:
            self._streamed_s += time.monotonic() - started_s
        return True

    def _take_samples(self, trajectory: dict[str, Any]) -> None:
        """Raises:
        TrainError: It cannot be trained on.
        """
        from rose.train.batch import samples_of  # loads torch, which only the trainer's actor needs

        trainer = self._trainer
        self._samples[trajectory["id"]] = samples_of(
            trajectory,
            vocab_size=trainer.vocab_size,
            max_tokens=trainer.max_tokens,
            constrained=self._config.trainer.constrained,
        )
        self._warn(
            "trajectories begin with %s, and are trained on as if they did not", own_constraints(trajectory)
        )
        if self._config.trainer.constrained == "leave-out":
            self._warn(
                f"turns that were drawn under %s are left out of the loss (num_constrained_turns): {FIX}",
                _constraints([trajectory]),
            )

    def _warn(self, text: str, names: set[str]) -> None:
        """Warn of what was not warned of."""
        if new := sorted(name for name in names if (text, name) not in self._warned):
            self._warned.update((text, name) for name in new)
            logger.warning(text, ", ".join(new))

    async def _give_back(self) -> None:
        """What was leased is another step's."""
        if self._begun:
            await asyncio.to_thread(self._trainer.forget)
        self._forget()
        await self._resume()

    def _forget(self) -> None:
        """What was leased is no business of this step's any more."""
        self._collected.clear()
        self._samples.clear()
        self._begun.clear()
        self._fresh.clear()
        self._streamed_s = 0.0

    async def _resume(self) -> None:
        if self._writing is not None:
            writing, self._writing, self._written = self._writing, None, []
            await writing
        if self._unacknowledged:
            # Every lease goes back, those that were trained on since the last checkpoint too: make them durable first.
            self._unacknowledged = []
            await self._save()
        self._num_leases += 1  # what is open under the last name goes back with the others
        newest = sorted(self._consumed)[-self._num_resumed :]
        consumed = [name for step in newest for name in self._consumed[step]]
        await self._client.resume(
            job=self._config.job, attempt=self._attempt, consumed=consumed, run=self._run
        )

    async def _begin_afresh(self) -> None:
        """Give up what an earlier life of the job, of which this folder knows nothing, has left at the scheduler.

        Its episodes may be of another environment or have another reward.  Before the attempt is claimed: after a death on the way the same
        is done again.  Under the number of the new one, which may be said twice: a driver of before that still lives is refused its next lease or
        acknowledgement, and ends of it.
        """
        groups, running = await self._client.resume(
            job=self._config.job, attempt=self._attempt, consumed=(), run=self._run, afresh=True
        )
        if groups or running:
            logger.warning(
                "job '%s' has run before and begins afresh, for %s holds no checkpoint: %d groups that were sampled for it are given up, "
                "and %d episodes that still ran",
                self._config.job,
                self._directory,
                groups,
                running,
            )

    @property
    def _num_resumed(self) -> int:
        """Steps whose ids a resume names."""
        settings = self._config.trainer
        return RESUMED_STEPS + settings.checkpoint_every * (1 + settings.background_checkpoints)

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.wait({self._writing})
        await self._client.close()

    async def _save(self) -> None:
        await asyncio.to_thread(self._trainer.save, self._directory, **self._told())

    def _told(self) -> dict[str, Any]:
        """What a checkpoint of now is told."""
        from rose.train import checkpoint as checkpoints

        step = self._trainer.step_index
        self._consumed = checkpoints.ids_to_keep(self._consumed, step, self._num_resumed)
        return {
            "attempt": self._attempt,
            "version": step,
            "consumed": dict(self._consumed),
            "keep": self._config.trainer.keep_checkpoints,
        }

    async def _publish(self, learning_rate: float | None) -> dict[str, Any]:
        """Publish the weights as they are, then let no worker below them take a turn."""
        assert self._publisher is not None
        version, config = WeightVersion(self._attempt, self._trainer.step_index), self._config
        sent = await publish_patiently(
            self._publisher, version, learning_rate=learning_rate, patience_s=config.weights.patience_s
        )
        await self._client.set_version(
            job=config.job, attempt=version.attempt, version=version.version, run=self._run, **self._staleness
        )
        return sent


def _constraints(trajectories: Sequence[dict[str, Any]]) -> set[str]:
    """What agents had their turns drawn under."""
    return {
        name
        for one in trajectories
        for turn in one["turns"]
        if turn.get("side") is not True
        for name in constraints_on(one, turn)
    }
