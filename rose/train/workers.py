"""The two workers of a train loop, as plain async classes; ``rose.train.crew`` makes Ray actors of them.

- :class:`EnvManager` surveys what the scheduler holds and brings groups to completion.
- :class:`TrainWorker` owns the weights.  :meth:`TrainWorker.start` opens a new attempt: it takes the newest
  checkpoint, claims the attempt's number on disk, tells the scheduler what was consumed, and publishes
  its first version as an anchor.  :meth:`TrainWorker.train` takes one step.

Order inside a step, and why nothing is lost or applied twice::

    lease -> train -> checkpoint -> acknowledge -> publish -> require the version
           ^ death: the lease returns           ^ death: ids are in the checkpoint, `resume` drops them
                     ^ death: as before                        ^ death: a new attempt publishes its own

Version = number of steps behind the weights.  Blocking work (torch, disk, relay) runs in a thread, so that the
worker goes on answering.  A worker does one thing at a time; its caller sees to that.

Ray is not imported here.  Callers: ``rose.train.crew``, tests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rose.auth import Tokens
from rose.errors import ConfigError, RoseError, TrainError
from rose.train.client import SchedulerClient
from rose.train.collect import Acceptance, Collected, CollectParams
from rose.train.config import TrainConfig
from rose.train.env import Family, Latency, Task, make_family
from rose.train.metrics import lengths_by_quantile, trajectory_metrics
from rose.train.rewards import PoolParams, RewardPool
from rose.train.rollout import (
    EpisodeParams,
    EpisodeRunner,
    GroupPlan,
    GroupState,
    RolloutReport,
    Score,
    single_token_ids,
)

LEASE_WAIT_S = 5.0
"""The groups are complete when a lease is asked for; waiting longer would hide that one was lost."""


RewardPoolWorker = Any
"""A :class:`rose.train.rewards.Worker`."""


class Publisher(Protocol):
    """What the trainer needs from ``rose.weights.publisher.WeightPublisher``."""

    def publish(self, version: int, *, step: int | None = None, lr: float | None = None) -> Any:
        """Make ``version`` durable and current; the report has ``kind``, ``bytes_dense``, ``bytes_sent``, ``density``."""
        ...


MakeTrainer = Callable[[TrainConfig], Any]
"""Builds a :class:`rose.train.trainer.Trainer`."""

MakePublisher = Callable[[TrainConfig, Tokens, Any, int], Publisher]
"""Builds a publisher of ``module`` for ``attempt``: ``(config, tokens, module, attempt)``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """How a project brings its own trainer or transport; None takes ours.  They cross to an actor, so they must be
    importable there."""

    make_trainer: MakeTrainer | None = None
    make_publisher: MakePublisher | None = None


class EnvManager:
    """Runs episodes of one job.

    Args:
        spawn_reward_worker: Makes a worker of the reward pool; needed where ``reward.kind`` is not ``environment``.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokens: Tokens,
        spawn_reward_worker: Callable[[TrainConfig], RewardPoolWorker] | None = None,
    ) -> None:
        self._config = config
        self._client = SchedulerClient(
            config.scheduler.url,
            agent_token=tokens.agent,
            turn_timeout_s=config.scheduler.turn_timeout_s,
            retry_s=config.scheduler.retry_s,
        )
        self._family = family_of(config)
        self._spawn = spawn_reward_worker
        self._pool: RewardPool | None = None
        self._runner: EpisodeRunner | None = None
        self._evaluator: EpisodeRunner | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def survey(self, group_ids: Sequence[str] | None = None) -> list[GroupState]:
        """Groups that no trainer has taken; episodes that nobody runs any more are cancelled.

        Args:
            group_ids: Only these; call it when none of their episodes is running.  None = all of the job.

        In an undisturbed run it finds nothing.
        """
        job = self._config.job
        for orphan in await self._client.list_trajectories(job=job, state="running"):
            if group_ids is None or orphan.get("group_id") in group_ids:
                await self._client.cancel(orphan["id"])
        members: dict[str, list[str]] = {}
        for trajectory in await self._client.list_trajectories(job=job, state="finished"):
            if group_ids is None or trajectory.get("group_id") in group_ids:
                members.setdefault(str(trajectory.get("group_id")), []).append(trajectory["id"])
        groups: list[GroupState] = []
        for group_id, ids in members.items():
            one = await self._client.get_trajectory(ids[0])
            size, task = one.get("group_size"), one.get("task")
            if isinstance(size, int) and isinstance(task, dict):  # else no group that we could complete
                groups.append(
                    GroupState(group_id=group_id, group_size=size, task=task, num_finished=len(ids))
                )
        return groups

    async def num_ready(self) -> int:
        """Complete groups that no trainer has taken."""
        finished = await self._client.list_trajectories(job=self._config.job, state="finished")
        counts = Counter(str(trajectory.get("group_id")) for trajectory in finished)
        return sum(count >= self._config.rollout.group_size for count in counts.values())

    async def run(self, plans: Sequence[GroupPlan]) -> RolloutReport:
        self._runner = self._runner or self._make_runner(self._config.rollout.temperature)
        return await self._runner.run(plans)

    async def evaluate(self, tasks: Sequence[Task]) -> list[Score]:
        """Play held-out episodes under a job of their own."""
        settings = self._config.eval
        self._evaluator = self._evaluator or self._make_runner(settings.temperature)
        return await self._evaluator.evaluate(
            tasks, job=eval_job(self._config), episodes_per_task=settings.episodes_per_task
        )

    async def progress(self) -> tuple[int, int]:
        """Episodes started and ended so far."""
        runners = [one for one in (self._runner, self._evaluator) if one is not None]
        return sum(one.num_started for one in runners), sum(one.num_ended for one in runners)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await self._client.close()

    def _make_runner(self, temperature: float) -> EpisodeRunner:
        config = self._config
        if config.reward.kind != "environment" and self._pool is None:
            if self._spawn is None:
                raise ConfigError("needs reward workers, and nobody makes them here", field="reward.kind")
            spawn = self._spawn
            self._pool = RewardPool(
                lambda: spawn(config),
                PoolParams(
                    min_workers=config.reward.min_workers,
                    max_workers=config.reward.max_workers,
                    timeout_s=config.reward.timeout_s,
                    max_retries=config.reward.max_retries,
                    idle_s=config.reward.idle_s,
                ),
            )
        allowed = self._family.allowed_texts
        return EpisodeRunner(
            self._client,
            self._family,
            EpisodeParams(
                job=config.job,
                model=config.scheduler.model,
                temperature=temperature,
                max_tokens=config.rollout.max_tokens,
                concurrency=config.env.concurrency,
                step_timeout_s=config.env.step_timeout_s,
                max_retries=config.env.max_retries,
                reward_range=config.env.reward_range,
            ),
            None if allowed is None else single_token_ids(config.model, allowed),
            self._pool,
        )


def family_of(config: TrainConfig) -> Family:
    """The environments of a job.

    Raises:
        ConfigError: Unknown kind or settings.
    """
    delay = config.env.latency
    return make_family(
        config.env.kind, config.env.settings, Latency(median_s=delay.median_s, sigma=delay.sigma)
    )


def eval_job(config: TrainConfig) -> str:
    """Name under which held-out episodes run, so that no trainer leases them."""
    return f"{config.job}-eval"


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
        self._client = SchedulerClient(
            config.scheduler.url,
            agent_token=tokens.agent,
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
            )
        )
        self._acceptance = Acceptance()
        self._trainer: Any = None
        self._publisher: Publisher | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def start(self) -> dict[str, Any]:
        """Open a new attempt; ``{attempt, step, passed_over, update}``, where ``step`` is the next to take.

        Raises:
            TrainError: There are checkpoints, and none can be read.
            RoseError: Model, scheduler or relay refuse.
        """
        from rose.train import checkpoint as checkpoints

        if self._ranks:
            from rose.train.ranks import RankedTrainer

            self._trainer = await asyncio.to_thread(
                RankedTrainer, self._config, self._make_trainer, self._ranks
            )
        else:
            self._trainer = await asyncio.to_thread(self._make_trainer, self._config)
        found, passed_over = await asyncio.to_thread(checkpoints.load_latest, self._directory)
        if found is None and passed_over:
            # Going on from nothing would drop them as its own come, and they may be readable tomorrow.
            raise TrainError(
                f"none of {len(passed_over)} checkpoints can be read, the newest: {passed_over[0]}",
                field="output_dir",
                fix=f"repair them, or move {self._directory} away to begin anew",
            )
        if found is not None:
            await asyncio.to_thread(self._trainer.restore, found)
            self._consumed = {step: tuple(ids) for step, ids in found.consumed.items()}
        self._attempt = checkpoints.latest_attempt(self._directory) + 1
        # Claims the number before anyone hears it: a death right after this leaves the attempt used up.
        await self._save()
        await self._resume()
        self._publisher = await asyncio.to_thread(
            self._make_publisher, self._config, self._tokens, self._trainer.module, self._attempt
        )
        update = await self._publish(None)
        return {
            "attempt": self._attempt,
            "step": self._trainer.step_index,
            "passed_over": passed_over,
            "update": update,
        }

    async def train(self, learning_rate: float, single_update: bool = False) -> dict[str, Any]:
        """Take one step, and return its metrics.

        Where groups are missing nothing is trained; what was leased stays with this step, and the answer is
        ``{"missing": groups to lease still, "launch": groups to start for them}``.

        Raises:
            TrainError: A trajectory cannot be trained on, or the gradient is not finite.
        """
        from rose.train.batch import samples_of  # loads torch, which only the trainer's actor needs

        if self._trainer is None:
            raise TrainError("train() before start()", field="trainer")
        await self._lease()
        if missing := self._collected.num_missing:
            return {"missing": missing, "launch": self._acceptance.to_launch(missing)}
        trainer, step = self._trainer, self._trainer.step_index
        trajectories, batch_ids = self._collected.trajectories, list(self._collected.batch_ids)
        filtered = [] if not self._collected.kept else list(self._collected.filtered.values())
        started_s = time.monotonic()
        samples = [
            sample
            for trajectory in trajectories
            for sample in samples_of(trajectory, vocab_size=trainer.vocab_size, max_tokens=trainer.max_tokens)
        ]
        report = await asyncio.to_thread(
            trainer.step, samples, learning_rate=learning_rate, single_update=single_update
        )
        trained_s = time.monotonic()
        self._consumed[step] = self._collected.ids
        self._collected.clear()
        await self._save()
        saved_s = time.monotonic()
        for batch_id in batch_ids:
            await self._client.ack(batch_id, step=step, attempt=self._attempt)
        publish_started_s = time.monotonic()
        update = await self._publish(learning_rate)
        return {
            "step": step,
            "attempt": self._attempt,
            "version": f"{self._attempt}.{step + 1}",
            **trajectory_metrics(trajectories, version=(self._attempt, step)),
            **{name: value for name, value in report.to_dict().items() if name != "seconds"},
            "num_leases": len(batch_ids),
            "num_filtered_groups": len(filtered),
            "acceptance": self._acceptance.rate,
            "filtered_by_length": lengths_by_quantile([one for group in filtered for one in group]),
            "lr": learning_rate,
            "train_s": trained_s - started_s,
            "checkpoint_s": saved_s - trained_s,
            "publish_s": time.monotonic() - publish_started_s,
            "update": update,
        }

    async def release(self) -> None:
        """Hand back what was leased for a step that will be begun again."""
        if self._collected.batch_ids:
            self._collected.clear()
            await self._resume()

    async def export(self, target: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        await asyncio.to_thread(self._trainer.export, target)

    async def pin(self, job: str) -> str:
        """Let no worker below the current weights take a turn of ``job``; returns their version."""
        version = self._trainer.step_index
        await self._client.set_version(job=job, attempt=self._attempt, version=version)
        return f"{self._attempt}.{version}"

    async def _lease(self) -> None:
        """Lease what the step lacks, as far as it is there."""
        config, version = self._config, (self._attempt, self._trainer.step_index)

        async def before_retry() -> None:
            # The lost answer may have been a batch.  Everything goes back, what this step holds included.
            self._collected.clear()
            await self._resume()

        asynchronous = config.rollout.mode == "asynchronous"
        while missing := self._collected.num_missing:
            # A synchronous refill has either been played by now, or is to be.
            wait_s = LEASE_WAIT_S if asynchronous or not self._collected.batch_ids else 0.0
            leased = await self._client.lease(
                job=config.job,
                num_groups=missing,
                attempt=version[0],
                version=version[1],
                ttl_s=config.scheduler.lease_ttl_s,
                wait_s=wait_s,
                before_retry=before_retry,
            )
            if leased is None:
                return
            try:
                kept, seen = self._collected.add(*leased, version)
            except RoseError:
                await self.release()
                raise
            if self._collected.params.dynamic_sampling:
                self._acceptance.observe(kept, seen)

    async def _resume(self) -> None:
        consumed = [name for step in sorted(self._consumed) for name in self._consumed[step]]
        await self._client.resume(job=self._config.job, attempt=self._attempt, consumed=consumed)

    async def close(self) -> None:
        await self._client.close()

    async def _save(self) -> None:
        from rose.train import checkpoint as checkpoints

        oldest = self._trainer.step_index - checkpoints.CONSUMED_STEPS
        self._consumed = {step: ids for step, ids in self._consumed.items() if step >= oldest}
        captured = await asyncio.to_thread(
            self._trainer.capture,
            attempt=self._attempt,
            version=self._trainer.step_index,
            consumed=self._consumed,
        )
        keep = self._config.trainer.keep_checkpoints
        await asyncio.to_thread(checkpoints.save, captured, self._directory, keep=keep)

    async def _publish(self, learning_rate: float | None) -> dict[str, Any]:
        """Publish the weights as they are, then let no worker below them take a turn."""
        assert self._publisher is not None
        version = self._trainer.step_index
        report = await asyncio.to_thread(
            self._publisher.publish, version, step=version - 1 if version else None, lr=learning_rate
        )
        await self._client.set_version(job=self._config.job, attempt=self._attempt, version=version)
        return {
            "kind": str(report.kind),
            "bytes_dense": int(report.bytes_dense),
            "bytes_sent": int(report.bytes_sent),
            "density": float(report.density),
        }


def torch_trainer(config: TrainConfig) -> Any:
    """The trainer that ``rose train`` uses unless it is given another."""
    import torch

    from rose.train.advantages import OverlongParams
    from rose.train.loss import LossParams
    from rose.train.trainer import TorchTrainer, TrainerParams

    settings = config.trainer
    torch.set_num_threads(settings.num_threads)
    return TorchTrainer(
        config.model,
        TrainerParams(
            learning_rate=settings.learning_rate,
            num_epochs=settings.num_epochs,
            minibatch_sequences=settings.minibatch_sequences,
            max_part_tokens=settings.max_part_tokens,
            max_grad_norm=settings.max_grad_norm,
            weight_decay=settings.weight_decay,
            estimator="rloo" if settings.algorithm == "rloo" else "grpo",
            scale_advantages=settings.scale_advantages,
            loss=LossParams(
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                truncation=settings.truncation,
                entropy_weight=settings.entropy_weight,
                aggregation=settings.aggregation,
                kl_weight=settings.kl_weight,
                kl_kind=settings.kl_kind,
            ),
            overlong=OverlongParams(
                max_tokens=settings.overlong.max_tokens,
                buffer_tokens=settings.overlong.buffer_tokens,
                weight=settings.overlong.weight,
            ),
            policy_dtype=settings.policy_dtype,
            compute_dtype=settings.compute_dtype,
            activation_checkpointing=settings.activation_checkpointing,
            seed=config.seed,
        ),
    )


def make_publisher(config: TrainConfig, tokens: Tokens, module: Any, attempt: int) -> Publisher:
    """A publisher of ``module`` into the configured store."""
    from rose.weights.params import WeightsParams
    from rose.weights.publisher import WeightPublisher
    from rose.weights.stores import open_store

    settings = config.weights
    if settings.relay_url is not None:
        store = open_store(settings.relay_url, tokens.relay)
    elif settings.directory is not None:
        store = open_store(str(settings.directory))
    else:
        raise ConfigError("needs relay_url or directory", field="weights")
    return WeightPublisher(module, store, config.run_id, attempt, WeightsParams())
