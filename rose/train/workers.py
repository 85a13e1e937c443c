"""The two workers of a train loop, as plain async classes; ``rose.train.loop`` makes Ray actors of them.

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

Ray is not imported here.  Callers: ``rose.train.loop``, tests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rose.auth import Tokens
from rose.errors import ConfigError, TrainError
from rose.train.client import SchedulerClient
from rose.train.config import TrainConfig
from rose.train.env import make_family
from rose.train.rollout import (
    EpisodeParams,
    EpisodeRunner,
    GroupPlan,
    GroupState,
    RolloutReport,
    single_token_ids,
)

LEASE_WAIT_S = 5.0
"""The groups are complete when a lease is asked for; waiting longer would hide that one was lost."""


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
    """Runs episodes of one job."""

    def __init__(self, config: TrainConfig, tokens: Tokens) -> None:
        self._config = config
        self._client = SchedulerClient(
            config.scheduler.url,
            agent_token=tokens.agent,
            turn_timeout_s=config.scheduler.turn_timeout_s,
            retry_s=config.scheduler.retry_s,
        )
        family = make_family(config.env.kind, config.env.settings)
        allowed = (
            None if family.allowed_texts is None else single_token_ids(config.model, family.allowed_texts)
        )
        self._runner = EpisodeRunner(
            self._client,
            family,
            EpisodeParams(
                job=config.job,
                model=config.scheduler.model,
                temperature=config.rollout.temperature,
                max_tokens=config.rollout.max_tokens,
                concurrency=config.env.concurrency,
                step_timeout_s=config.env.step_timeout_s,
                max_retries=config.env.max_retries,
            ),
            allowed,
        )

    async def pid(self) -> int:
        return os.getpid()

    async def survey(self) -> list[GroupState]:
        """Groups that no trainer has taken.  Episodes that nobody runs any more are cancelled.

        Call it when no episode of the job is running.  In an undisturbed run it finds nothing.
        """
        job = self._config.job
        for orphan in await self._client.list_trajectories(job=job, state="running"):
            await self._client.cancel(orphan["id"])
        members: dict[str, list[str]] = {}
        for trajectory in await self._client.list_trajectories(job=job, state="finished"):
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

    async def run(self, plans: Sequence[GroupPlan]) -> RolloutReport:
        return await self._runner.run(plans)

    async def close(self) -> None:
        await self._client.close()


class TrainWorker:
    """Owns the weights of one job."""

    def __init__(self, config: TrainConfig, tokens: Tokens, parts: Parts | None = None) -> None:
        self._config = config
        self._tokens = tokens
        parts = parts or Parts()
        self._make_trainer = parts.make_trainer or torch_trainer
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
        self._trainer: Any = None
        self._publisher: Publisher | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def start(self) -> dict[str, Any]:
        """Open a new attempt; ``{attempt, step, passed_over, update}``, where ``step`` is the next to take.

        Raises:
            RoseError: Model, checkpoint, scheduler or relay refuse.
        """
        from rose.train import checkpoint as checkpoints

        self._trainer = await asyncio.to_thread(self._make_trainer, self._config)
        found, passed_over = await asyncio.to_thread(checkpoints.load_latest, self._directory)
        if found is not None:
            await asyncio.to_thread(self._trainer.restore, found)
            self._consumed = {step: tuple(ids) for step, ids in found.consumed.items()}
        self._attempt = checkpoints.latest_attempt(self._directory) + 1
        # Claims the number before anyone hears it: a death right after this leaves the attempt used up.
        await self._save()
        await self._client.resume(
            job=self._config.job,
            attempt=self._attempt,
            consumed=[name for step in sorted(self._consumed) for name in self._consumed[step]],
        )
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

    async def train(self, learning_rate: float, single_update: bool = False) -> dict[str, Any] | None:
        """Take one step; its metrics, or None when too few groups were ready (nothing has happened then).

        Raises:
            TrainError: A trajectory cannot be trained on, or the gradient is not finite.
        """
        from rose.train.batch import samples_of
        from rose.train.metrics import trajectory_metrics

        if self._trainer is None:
            raise TrainError("train() before start()", field="trainer")
        trainer, step, config = self._trainer, self._trainer.step_index, self._config
        leased = await self._client.lease(
            job=config.job,
            num_groups=config.rollout.num_groups,
            attempt=self._attempt,
            version=step,
            ttl_s=config.scheduler.lease_ttl_s,
            wait_s=LEASE_WAIT_S,
        )
        if leased is None:
            return None
        batch_id, trajectories = leased
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
        self._consumed[step] = tuple(str(trajectory["id"]) for trajectory in trajectories)
        await self._save()
        saved_s = time.monotonic()
        await self._client.ack(batch_id, step=step, attempt=self._attempt)
        publish_started_s = time.monotonic()
        update = await self._publish(learning_rate)
        return {
            "step": step,
            "attempt": self._attempt,
            "version": f"{self._attempt}.{step + 1}",
            **trajectory_metrics(trajectories, version=step),
            **{name: value for name, value in report.to_dict().items() if name != "seconds"},
            "lr": learning_rate,
            "train_s": trained_s - started_s,
            "checkpoint_s": saved_s - trained_s,
            "publish_s": time.monotonic() - publish_started_s,
            "update": update,
        }

    async def close(self) -> None:
        await self._client.close()

    async def _save(self) -> None:
        from rose.train import checkpoint as checkpoints

        oldest = self._trainer.step_index - checkpoints.CONSUMED_STEPS
        self._consumed = {step: ids for step, ids in self._consumed.items() if step >= oldest}
        captured = self._trainer.capture(
            attempt=self._attempt, version=self._trainer.step_index, consumed=self._consumed
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
            max_grad_norm=settings.max_grad_norm,
            weight_decay=settings.weight_decay,
            scale_advantages=settings.scale_advantages,
            loss=LossParams(
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                truncation=settings.truncation,
                entropy_weight=settings.entropy_weight,
            ),
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
