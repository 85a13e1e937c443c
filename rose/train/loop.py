"""The train loop: rollouts, one optimiser step, the next version; on Ray.

Read :func:`train_with` and its :func:`_steps` first, then one of the two ways to take a step: :func:`_synchronous_step` here, in which the episodes
of step ``s`` run on version ``s`` (what a restart or a refill left over, on one before), or ``rose.train.async_loop``, in which they go on while the trainer
trains and may lie ``alpha`` versions behind.

Ray holds no durable state.  What must survive is in two places, the scheduler's journal (finished episodes, leases) and
the trainer's checkpoint (weights, optimiser, consumed ids), so any actor may die at any moment:

- an environment manager: its open episodes are cancelled, the finished ones are kept, the rest starts again;
- a reward worker: its request goes to another;
- the trainer, or one of its ranks: it restarts from its checkpoint under a new attempt, and what it had leased without
  having consumed is leased again;
- this driver: the next ``rose train`` with the same output folder goes on in the same way.

``max_restarts`` deaths in a row without a finished step between them end the run: something is wrong.

Decides nothing about tokens, losses or weights.  One driver per output folder (a lock sees to it).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rose.auth import Tokens
from rose.errors import ConfigError, RunInterrupted, TrainError
from rose.train.actors import ActorDied, Actors, EvaluationFailed
from rose.train.async_loop import AsyncLoop
from rose.train.check import check_job
from rose.train.cluster import ray_died, ray_for
from rose.train.device_loan import DeviceLoan
from rose.train.evaluation import Recent
from rose.train.logs import open_logs
from rose.train.metrics import records_of
from rose.train.plan import GroupPlan, TaskOrder, plan_groups, split_plans
from rose.train.rollout import RolloutReport
from rose.train.tail_rounds import TailRounds
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts

logger = logging.getLogger(__name__)

Progress = Callable[[Mapping[str, Any]], None]
"""Called with each step's metrics, and with ``{"event": ...}`` for starts and restarts."""

MAX_ROUNDS = 10
"""Rollout rounds in which nothing more could be leased before a step gives up.  One is normal after a restart: groups
that waited too long are stale, and dropping them leaves a gap."""

MAX_NAMED = 8
"""Steps that are named in a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended."""

    num_steps: int
    attempt: int
    num_restarts: int
    success_first: float | None
    """``sampled_success_rate`` of the first step taken in this run; None when nothing was left to do."""
    success_last: float | None
    """The same of the last step."""
    success_held_out: float | None = None
    """Of the last evaluation, if there was one."""
    exported: str = ""
    """Which weights ``output_dir/model`` holds, in words; empty: none were exported."""


def run_training(
    config: TrainConfig,
    tokens: Tokens,
    *,
    progress: Progress | None = None,
    parts: Parts | None = None,
    watch_s: float | None = None,
) -> RunResult:
    """Run the job to its last step; goes on from ``output_dir`` if a run was there before.

    Args:
        watch_s: Also report ``{"event": "rollout", "started", "ended"}`` this often while a step runs.

    Raises:
        ConfigError: Something can be seen to be wrong before Ray starts, or another driver is at work.
        TrainError: The run cannot go on.
        RoseError: Scheduler or relay refuse.
    """
    check_job(config, parts)
    loan = DeviceLoan(config.lend, tokens)
    loan.check()
    loan.close()
    report = progress or (lambda _: None)
    with sole_driver(config.output_dir), ray_for(config) as cluster:
        if cluster is not None:
            report({"event": "cluster", **asdict(cluster)})
        return asyncio.run(_until_signal(train_with(Actors(config, tokens, parts), report, watch_s=watch_s)))


async def train_with(actors: Actors, progress: Progress, *, watch_s: float | None = None) -> RunResult:
    """The loop itself; see :func:`run_training`.  However it ends, no episode goes on behind it."""
    async_loop = AsyncLoop(actors.config, actors) if actors.config.rollout.mode == "asynchronous" else None
    loan = DeviceLoan(actors.config.lend, actors.tokens)
    try:
        return await _steps(actors, async_loop, loan, progress, watch_s)
    finally:
        loan.close()
        if async_loop is not None:
            await async_loop.close()
        if not ray_died.is_set():
            await actors.stop_episodes()


async def _steps(
    actors: Actors,
    async_loop: AsyncLoop | None,
    loan: DeviceLoan,
    progress: Progress,
    watch_s: float | None,
) -> RunResult:
    config = actors.config
    curve: list[float] = []
    held_out: float | None = None
    evaluation: _Evaluation | None = None

    tail = TailRounds(config.rollout, actors.mix) if config.rollout.tail_batching.extra_groups else None
    order = TaskOrder(config.rollout.num_groups)
    recent = Recent(config.eval.average_over)
    for earlier in records_of(config.output_dir / "metrics.jsonl"):
        order.note(earlier)
        if "eval" in earlier:
            recent.add(earlier["step"], earlier["eval"])

    def tell(record: dict[str, Any]) -> None:
        nonlocal held_out
        if "eval" in record:
            record["eval"]["recent"] = recent.add(record["step"], record["eval"])
            held_out = record["eval"]["success_rate"]
        logs.write(record)
        progress(record)

    async def end_evaluation(*, drop: bool = False) -> None:
        """And tell the step that has waited for it."""
        nonlocal evaluation
        if evaluation is None:
            return
        ended, evaluation = evaluation, None
        try:
            await (ended.drop() if drop else ended.finish())
        finally:
            tell(ended.record)

    with open_logs(config) as logs:
        try:
            while True:
                try:
                    for event in await actors.ensure():
                        progress(event)
                        if event["event"] == "attempt":
                            pending = None if evaluation is None else evaluation.record["step"]
                            lost = logs.restore(event["step"], event["num_consumed"], pending)
                            if lost:
                                _tell_of_lost(lost, progress)
                    if actors.step >= config.num_steps:
                        break
                    started_s = time.monotonic()
                    async with _watched(actors, progress, watch_s):
                        if async_loop is None:
                            record = await _synchronous_step(
                                config, actors, loan, end_evaluation, order, tail
                            )
                        else:
                            record = await async_loop.step()
                except ActorDied as death:
                    actors.last_death = str(death)
                    await end_evaluation(drop=True)  # a new trainer's first version would play the rest of it
                    continue
                actors.num_deaths_in_a_row = 0
                actors.shapes.observe(record)
                actors.step = record["step"] + 1
                end_s = time.monotonic()
                record = {**record, "step_s": end_s - started_s, "end_s": end_s}
                curve.append(record["sampled_success_rate"])
                if not _evaluates_after(config, actors.step):
                    tell(record)
                    continue
                evaluation = _Evaluation(actors, record)
                if not config.eval.background or actors.step >= config.num_steps:
                    async with loan.lent():
                        await end_evaluation()
        finally:
            await end_evaluation(drop=True)
        exported = ""
        if config.export and actors.step >= config.num_steps:
            which = "best" if config.export == "best" else "last"
            try:
                exported = await actors.export(config.output_dir / "model", which)
            except ActorDied as death:
                raise TrainError(
                    f"all steps are taken, but the trainer died while it wrote the export: {death}",
                    field="export",
                    fix=f"`rose train --export {which}` writes it from the checkpoints",
                ) from death
    return RunResult(
        num_steps=actors.step,
        attempt=actors.attempt,
        num_restarts=actors.num_restarts,
        success_first=curve[0] if curve else None,
        success_last=curve[-1] if curve else None,
        success_held_out=held_out,
        exported=exported,
    )


def _tell_of_lost(steps: list[int], progress: Progress) -> None:
    names = ", ".join(str(step + 1) for step in steps[:MAX_NAMED])
    names += f" and {len(steps) - MAX_NAMED} more" if len(steps) > MAX_NAMED else ""
    text = f'steps {names} were taken and had no line in metrics.jsonl: their numbers are lost, and a line marked "restored" stands for each'
    logger.warning("%s", text)
    progress({"event": "restored", "steps": steps, "text": text})


class _Evaluation:
    """Episodes of an evaluation on the weights of now, under way, and the record of the step that made these weights."""

    def __init__(self, actors: Actors, record: dict[str, Any]) -> None:
        self.record = record
        self._actors = actors
        self._playing = asyncio.ensure_future(actors.evaluate())

    async def finish(self) -> None:
        """Wait for them, and put into the record what they say."""
        started_s = time.monotonic()
        try:
            self.record["eval"] = await self._playing
            self.record["eval_s"] = time.monotonic() - started_s
        except ActorDied as death:
            self._actors.last_death = str(death)  # the step stands; its evaluation is lost
        except EvaluationFailed as error:
            self.record["eval_error"] = str(error)

    async def drop(self) -> None:
        """Wait for them no more."""
        self._playing.cancel()
        await asyncio.gather(self._playing, return_exceptions=True)


async def _synchronous_step(
    config: TrainConfig,
    actors: Actors,
    loan: DeviceLoan,
    end_evaluation: Callable[[], Awaitable[None]],
    order: TaskOrder,
    tail: TailRounds | None,
) -> dict[str, Any]:
    """Complete the step's groups, train on them, publish.  Where groups are missing or teach nothing, more are run."""
    rollout_s, num_episodes, num_retries, num_failed = 0.0, 0, 0, 0
    lent_before_s = loan.lent_s
    causes: Counter[str] = Counter()
    wanted = config.rollout.num_groups
    most_rounds = max(config.trainer.dynamic_sampling.max_rounds, config.trainer.guard.max_rounds)
    for round_index in range(MAX_ROUNDS + most_rounds):
        started_s = time.monotonic()
        waiting = [group for group in await actors.survey() if actors.may_begin_again(group.group_id)]
        if tail is not None:
            where: Any = {"step": actors.step, "attempt": actors.attempt, "ratios": actors.shapes.ratios}
            tail.go_on(actors.step, records_of(config.output_dir / "metrics.jsonl"))
            plans = tail.more(wanted, **where) if round_index else tail.begin(waiting, **where)
        else:
            plans = plan_groups(
                waiting=waiting,
                mix=actors.mix,
                step=actors.step,
                first_task=None if round_index else order.begin(actors.step, waiting),
                attempt=actors.attempt,
                num_groups=wanted,
                group_size=config.rollout.group_size,
                num_redundant=config.rollout.redundant_episodes,
                first_index=max(config.rollout.num_groups, actors.num_named) if round_index else 0,
                ratios=actors.shapes.ratios,
            )
        actors.note_names(plans)
        last_failure = ""
        async with loan.lent():
            reports = await _played(config, actors, split_plans(plans, actors.num_managers))
            played_s = time.monotonic()
            await end_evaluation()  # before the weights change
            started_s += time.monotonic() - played_s  # told apart, as `eval_s`
        for report in reports:
            num_episodes += report.num_episodes
            num_retries += report.num_retries
            causes += Counter(report.causes)
            num_failed += len(report.failures)
            for name, _ in report.failures:
                actors.gave_up(name)
                if tail is not None:
                    tail.failed(name)
            last_failure = report.failures[-1][1] if report.failures else last_failure
        if num_failed > config.env.max_failed_groups:
            raise TrainError(f"{num_failed} groups failed in one step, the last: {last_failure}", field="env")
        rollout_s += time.monotonic() - started_s
        record = await actors.train()
        if "step" in record:
            group_ids = record.pop("group_ids")
            if tail is not None:
                told = tail.end(group_ids, record["sampled_mean"], record["num_trajectories"])
                record["tail_batching"] = told
            else:
                record["next_task"] = order.first(record["step"] + 1)
            rollout = {"rollout_s": rollout_s, "num_episodes": num_episodes, "num_env_retries": num_retries}
            if config.lend.node_dir is not None:
                rollout["lent_s"] = loan.lent_s - lent_before_s
            return {**record, **rollout, "num_failed_groups": num_failed, "failed_tries": dict(causes)}
        wanted = record["launch"]
    raise TrainError(
        f"{record['missing']} of {config.rollout.num_groups} groups could not be leased",
        field="rollout.num_groups",
        fix="see the scheduler's /status for discarded groups",
    )


async def _played(config: TrainConfig, actors: Actors, plans: list[list[GroupPlan]]) -> list[RolloutReport]:
    """Play the episodes.

    Where steps are streamed, the trainer computes on groups that are complete meanwhile; in short and long rounds it takes its batch as soon as there is
    one, and what is played still is given up.
    """
    playing = asyncio.ensure_future(actors.run(plans))
    has_tail = config.rollout.tail_batching.extra_groups > 0
    try:
        while (config.streamed != "off" or has_tail) and not playing.done():
            if has_tail and not await actors.gather():
                await actors.stop_training()
                break
            if not has_tail and not await actors.begin():
                break
    except ActorDied:
        pass  # the trainer: what is played counts all the same, and the step finds out
    except BaseException:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        raise
    return await playing


def _evaluates_after(config: TrainConfig, num_steps: int) -> bool:
    every = config.eval.every_steps
    return (every > 0 and num_steps % every == 0) or (config.eval.at_end and num_steps == config.num_steps)


@asynccontextmanager
async def _watched(actors: Actors, progress: Progress, watch_s: float | None) -> AsyncIterator[None]:
    """Report how many episodes have ended while the block runs."""

    async def look(period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                started, ended = await actors.progress()
            except (ActorDied, TrainError):
                continue  # whoever needs that manager will say so
            progress({"event": "rollout", "started": started, "ended": ended})

    task = None if watch_s is None else asyncio.create_task(look(watch_s))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _until_signal(work: Awaitable[RunResult]) -> RunResult:
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
        if ray_died.is_set():
            raise RunInterrupted(
                "a process of its Ray cluster was killed",
                field="ray",
                fix="run it again to go on from its checkpoint",
            ) from None
        if told_to_stop:
            raise TrainError("stopped by SIGTERM", fix="run it again to go on from its checkpoint") from None
        raise


@contextmanager
def sole_driver(directory: Path) -> Iterator[None]:
    """Two drivers on one folder would open attempts over each other.

    Raises:
        ConfigError: There is another, or the folder cannot be written.
    """
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
