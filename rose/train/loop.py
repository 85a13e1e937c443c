"""The train loop: rollouts, one optimiser step, the next version; on Ray.

Read :func:`_train` first: it is the loop.  It is synchronous: the episodes of step ``s`` run on version
``s`` and no other.  Ray holds no durable state.  What must survive is in two places, the scheduler's journal
(finished episodes, leases) and the trainer's checkpoint (weights, optimiser, consumed ids), so any actor may die
at any moment:

- an environment manager: its open episodes are cancelled, the finished ones are kept, the rest starts again;
- the trainer: it restarts from its checkpoint under a new attempt, and what it had leased without
  having consumed is leased again;
- this driver: the next ``rose train`` with the same output folder goes on in the same way.

``max_restarts`` deaths in a row without a finished step between them end the run: something is wrong.

Decides nothing about tokens, losses or weights.  One driver per output folder (a lock sees to it).
Callers: ``rose.train.cli``, the demo, tests.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.auth import Tokens
from rose.errors import ConfigError, RoseError, TrainError
from rose.train.config import TrainConfig
from rose.train.env import make_family
from rose.train.metrics import MetricsFile
from rose.train.rollout import GroupState, plan_groups, single_token_ids, split_plans
from rose.train.workers import EnvManager, Parts, TrainWorker

logger = logging.getLogger(__name__)

Progress = Callable[[Mapping[str, Any]], None]
"""Called with each step's metrics, and with ``{"event": ...}`` for starts and restarts."""

MAX_SHORT_LEASES = 10
"""Rollout rounds without a leasable batch before a step gives up.  One is normal after a restart: groups
that waited too long are stale, and dropping them leaves a gap."""

PING_TIMEOUT_S = 60.0
"""Longer than an actor takes to start on one busy core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended."""

    num_steps: int
    attempt: int
    num_restarts: int
    success_first: float | None
    """Of the first step taken in this run; None when nothing was left to do."""
    success_last: float | None


def run_training(
    config: TrainConfig,
    tokens: Tokens,
    *,
    progress: Progress | None = None,
    parts: Parts | None = None,
) -> RunResult:
    """Run the job to its last step; goes on from ``output_dir`` if a run was there before.

    Raises:
        ConfigError: Something can be seen to be wrong before Ray starts, or another driver is at work.
        TrainError: The run cannot go on.
        RoseError: Scheduler or relay refuse.
    """
    check_job(config)
    with _sole_driver(config.output_dir), private_ray(config):
        return asyncio.run(_until_signal(_train(config, tokens, progress or (lambda _: None), parts)))


def check_job(config: TrainConfig) -> None:
    """Find what is wrong with a job without starting anything."""
    if not (config.model / "config.json").is_file():
        raise ConfigError(f"{config.model} is not a model folder", field="model")
    family = make_family(config.env.kind, config.env.settings)
    if not family.tasks():
        raise ConfigError("the environment has no tasks", field="env")
    if family.allowed_texts is not None:
        single_token_ids(config.model, family.allowed_texts)


async def _train(config: TrainConfig, tokens: Tokens, progress: Progress, parts: Parts | None) -> RunResult:
    metrics = MetricsFile(config.output_dir / "metrics.jsonl")
    crew = _Crew(config, tokens, parts)
    curve: list[float] = []
    try:
        while True:
            try:
                for event in await crew.ensure():
                    progress(event)
                if crew.step >= config.num_steps:
                    break
                step_started_s = time.monotonic()
                record = await _step(config, crew)
            except _ActorDied as death:
                crew.last_death = str(death)
                continue
            crew.num_deaths_in_a_row = 0
            crew.step = record["step"] + 1
            end_s = time.monotonic()
            record = {**record, "step_s": end_s - step_started_s, "end_s": end_s}
            curve.append(record["success_rate"])
            metrics.append(record)
            progress(record)
    finally:
        metrics.close()
    return RunResult(
        num_steps=crew.step,
        attempt=crew.attempt,
        num_restarts=crew.num_restarts,
        success_first=curve[0] if curve else None,
        success_last=curve[-1] if curve else None,
    )


async def _step(config: TrainConfig, crew: _Crew) -> dict[str, Any]:
    """Complete the step's groups, train on them, publish."""
    rollout_s, num_episodes, num_retries = 0.0, 0, 0
    for _ in range(MAX_SHORT_LEASES):
        started_s = time.monotonic()
        plans = plan_groups(
            waiting=await crew.survey(),
            tasks=crew.tasks,
            step=crew.step,
            attempt=crew.attempt,
            num_groups=config.rollout.num_groups,
            group_size=config.rollout.group_size,
        )
        for report in await crew.run(split_plans(plans, config.env.num_managers)):
            num_episodes += report.num_episodes
            num_retries += report.num_retries
        rollout_s += time.monotonic() - started_s
        record = await crew.train(crew.step)
        if record is not None:
            rollout = {"rollout_s": rollout_s, "num_episodes": num_episodes, "num_env_retries": num_retries}
            return {**record, **rollout}
    raise TrainError(
        f"no batch of {config.rollout.num_groups} groups could be leased in {MAX_SHORT_LEASES} rounds",
        field="rollout.num_groups",
        fix="see the scheduler's /status for discarded groups",
    )


class _ActorDied(Exception):
    """An actor is gone; its replacement goes on from durable state."""


class _Crew:
    """The actors of a run: makes them, replaces dead ones, and renames Ray's errors."""

    def __init__(self, config: TrainConfig, tokens: Tokens, parts: Parts | None) -> None:
        self.config = config
        self.tasks = make_family(config.env.kind, config.env.settings).tasks()
        self.step = 0
        self.attempt = 0
        self.num_restarts = 0
        self.num_deaths_in_a_row = 0
        self.last_death: str | None = None
        """Why the last step was broken off; :meth:`ensure` finds out whose death it was."""
        self._tokens = tokens
        self._parts = parts
        self._managers: list[Any] = [None] * config.env.num_managers
        self._trainer: Any = None

    async def ensure(self) -> list[dict[str, Any]]:
        """Have every actor alive; what happened on the way, for the progress callback.

        Raises:
            TrainError: Too many deaths in a row.
        """
        import ray

        events: list[dict[str, Any]] = []
        for index, manager in enumerate(self._managers):
            if not await self._alive(manager, f"environment manager {index}", events):
                made = ray.remote(num_cpus=1)(EnvManager).remote(self.config, self._tokens)
                self._managers[index] = made
        trainer_alive = await self._alive(self._trainer, "trainer", events)
        if self.last_death is not None and not events:
            self._count("nobody that stayed dead", events)  # unreachable for a moment: it counts all the same
        self.last_death = None
        if not trainer_alive:
            self._trainer = ray.remote(num_cpus=1)(TrainWorker).remote(self.config, self._tokens, self._parts)
            started = await _answer(self._trainer.start.remote())
            self.step, self.attempt = started["step"], started["attempt"]
            events.append({"event": "attempt", **started})
        return events

    async def _alive(self, actor: Any, name: str, events: list[dict[str, Any]]) -> bool:
        """Whether ``actor`` answers.  One that is silent for too long is made sure to be dead."""
        import ray

        if actor is None:
            return False
        try:
            await asyncio.wait_for(_answer(actor.pid.remote()), PING_TIMEOUT_S)
            return True
        except (_ActorDied, TimeoutError) as error:
            ray.kill(actor)
            self.last_death = self.last_death or str(error) or "no answer"
            self._count(name, events)
            return False

    def _count(self, name: str, events: list[dict[str, Any]]) -> None:
        self.num_restarts += 1
        self.num_deaths_in_a_row += 1
        logger.warning("%s died and is replaced: %s", name, self.last_death)
        events.append({"event": "actor_died", "actor": name, "reason": self.last_death})
        if self.num_deaths_in_a_row > self.config.ray.max_restarts:
            raise TrainError(
                f"{self.num_deaths_in_a_row} deaths in a row without a finished step, the last: {self.last_death}",
                field="ray.max_restarts",
            )

    async def survey(self) -> list[GroupState]:
        return await _answer(self._managers[0].survey.remote())

    async def run(self, plans: list[list[Any]]) -> list[Any]:
        calls = [
            manager.run.remote(part) for manager, part in zip(self._managers, plans, strict=True) if part
        ]
        # All of them are waited for even if one fails: the next survey must find nothing running.
        reports = await asyncio.gather(*(_answer(call) for call in calls), return_exceptions=True)
        for report in reports:
            if isinstance(report, BaseException):
                raise report
        return reports

    async def train(self, step: int) -> dict[str, Any] | None:
        rate, fine = self.config.learning_rate_at(step), self.config.is_fine_tuning(step)
        return await _answer(self._trainer.train.remote(rate, single_update=fine))


async def _answer(reference: Any) -> Any:
    """Await an actor's answer; Ray's errors become ours."""
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        return await reference
    except RayActorError as error:
        raise _ActorDied(str(error).strip().splitlines()[0][:200]) from error
    except RayTaskError as error:
        if isinstance(error.cause, RoseError):
            raise error.cause from error
        raise TrainError(f"an actor failed: {type(error.cause).__name__}: {error.cause}") from error
    except RayError as error:
        raise TrainError(f"Ray failed: {type(error).__name__}", field="ray") from error


async def _until_signal(work: Any) -> Any:
    """Run ``work``; SIGTERM cancels it, so that what was started is stopped on the way out."""
    task = asyncio.ensure_future(work)
    told_to_stop = False

    def stop() -> None:
        nonlocal told_to_stop
        told_to_stop = True
        task.cancel()

    try:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    except (ValueError, RuntimeError):
        pass  # not the main thread: whoever called us sees to signals
    try:
        return await task
    except asyncio.CancelledError:
        if told_to_stop:
            raise TrainError("stopped by SIGTERM", fix="run it again to go on from its checkpoint") from None
        raise


@contextmanager
def private_ray(config: TrainConfig) -> Iterator[None]:
    """Ray for one run: a private cluster without dashboard or network, removed at the end; or a given one."""
    # Before the import: Ray reads them once.  No usage report, and no worker is started ahead of need: on
    # one core each costs seconds.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    if config.ray.address is None:
        # Ray's ports take commands from whoever reaches them.  It replaces a loopback `_node_ip_address` by
        # an outside one unless this, the only switch there is, says that the node will have no peers.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
    except ImportError as error:
        raise ConfigError("ray is not installed", field="ray", fix="pip install 'rose-rl[cpu]'") from error
    if config.ray.address is None:
        from ray._private import ray_constants

        # The variable alone does nothing where somebody imported Ray before us (vLLM does).
        ray_constants.ENABLE_RAY_CLUSTER = False

    settings = config.ray
    own_dir: Path | None = None
    try:
        try:
            if settings.address is not None:
                ray.init(address=settings.address, logging_level=logging.ERROR)
            else:
                directory = settings.temp_dir
                if directory is None:
                    directory = own_dir = Path(tempfile.mkdtemp(prefix="rose-ray-"))
                ray.init(
                    address="local",  # or RAY_ADDRESS would win
                    num_cpus=max(settings.num_cpus, config.env.num_managers + 1),
                    num_gpus=0,
                    include_dashboard=False,
                    object_store_memory=settings.object_store_bytes,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(directory.absolute()),
                )
        except (ConnectionError, OSError, ValueError) as error:
            raise ConfigError(f"Ray cannot start: {error}", field="ray") from error
        yield
    finally:
        ray.shutdown()
        if own_dir is not None:
            shutil.rmtree(own_dir, ignore_errors=True)


@contextmanager
def _sole_driver(directory: Path) -> Iterator[None]:
    """Two drivers on one folder would open attempts over each other."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "driver.lock").open("a")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error}", field="output_dir") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run is at work in {directory}", field="output_dir") from None
        yield
