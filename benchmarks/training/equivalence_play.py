"""One part of the equivalence gate: a fleet of real engines, a frozen policy, and every group that a trainer is leased.

Real are scheduler, relay, node agents and vLLM engines (the demo's own programs, :mod:`rose.demo.programs`), the asynchronous loop with its
leases, checkpoints and versions, and the environments.  Two things are set apart, each at a seam that is there for it:

- :class:`FrozenTrainer` takes no update.  Its step computes the loss's gradient of each leased group, and the next version is published
  with the same weights: versions, ages and commits are as in training.
- The worker of the loop hands on what it was leased (:class:`Recorded`); the actors live in this process instead of Ray's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.training.equivalence_sums import NUM_ACTIONS, Floats, Group
from benchmarks.training.fleets import HARVESTED, Fleet, FleetPlan, engine_counts, play
from rose.auth import Tokens, bearer
from rose.demo import programs
from rose.demo.demo_config import DemoConfig
from rose.demo.resumed import lines_of
from rose.lineage import Version, parse_version
from rose.policy.staleness import lag
from rose.testing.toy_recipe import TOY_RECIPE
from rose.train.batch import TrainingSequence
from rose.train.build import trainer_params
from rose.train.envs.frozenlake import ACTIONS, FrozenLakeParams
from rose.train.envs.frozenlake_plan import LakePlanFamily
from rose.train.loop import train_with
from rose.train.loss import mismatch
from rose.train.protocol import TrainReport
from rose.train.rollout import single_token_ids
from rose.train.step_parts import key_of
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer
from rose.train.workers import Parts, TrainWorker
from rose.wire.http_client import BROKEN, open_client
from tests.train.local_actors import LocalActor, LocalActors

DIMENSIONS = 1024
"""Of a projected gradient.  Both fleets are projected alike, so that equal means stay equal."""
CATCH_UP_S = 10.0
COUNTED: Sequence[str] = ("turns", "moved", "migrated", "deep", "stale", "mixed", "versions")
"""Of a group, beside what is judged: turns, trajectories that were marked as stale, turns with tokens of two versions."""
RECLAIM = "reclaim"
"""How the scheduler's events name the end of an attempt whose memory production took back (``rose.policy.turn_life``)."""
LAKES = FrozenLakeParams(size=6, num_maps=8, max_start_distance=10, seed=0)
REPORTED = (
    *("step", "num_stale_groups", "num_stale", "num_resumed_turns", "num_kv_mixed_turns", "lag_max"),
    *("mismatch_kl", "logprob_diff_max", "failed_tries", "discards_by_length", "tiers"),
)


class Sketch:
    """A fixed random projection of the gradient, by random signs into :data:`DIMENSIONS` sums."""

    def __init__(self, size: int) -> None:
        draws = torch.Generator().manual_seed(size)
        self._places = torch.randint(0, DIMENSIONS, (size,), generator=draws)
        self._signs = torch.randint(0, 2, (size,), generator=draws).float() * 2.0 - 1.0

    def of(self, gradients: Sequence[torch.Tensor]) -> Floats:
        flat = torch.cat([one.reshape(-1) for one in gradients])
        sums = torch.zeros(DIMENSIONS, dtype=torch.float64)
        return sums.index_add_(0, self._places, (flat * self._signs).double()).numpy()


class FrozenTrainer(TorchTrainer):
    """Measures each leased group and changes nothing.

    Attributes:
        gradients: Of the last step, by group: of the sum of the loss over the group's tokens, divided by their number.
    """

    def __init__(self, config: TrainConfig) -> None:
        torch.set_num_threads(config.trainer.num_threads)
        super().__init__(config.model, replace(trainer_params(config), streamed="gradients"))
        self._sketch = Sketch(sum(one.numel() for one in self.masters))
        self.gradients: dict[str, Floats] = {}

    def step(
        self,
        samples: Sequence[TrainingSequence],
        *,
        learning_rate: float | None = None,
        single_update: bool = False,
    ) -> TrainReport:
        started_s = time.monotonic()
        groups: dict[str, list[TrainingSequence]] = {}
        for one in samples:
            groups.setdefault(one.group_id, []).append(one)
        self.gradients.clear()
        proximal: list[torch.Tensor] = []
        behaviour: list[float] = []
        for name, members in groups.items():
            self.forget()
            self.begin(members)
            count = sum(len(one.positions) for one in members)
            zeros = (torch.zeros_like(one) if one.grad is None else one.grad for one in self.masters)
            self.gradients[name] = self._sketch.of(list(zeros)) / count
            proximal += [self._begun.proximal[key_of(one)] for one in members]
            behaviour += [value for one in members for value in one.logprobs]
        self.forget()
        self._step_index += 1
        apart = mismatch(torch.tensor(behaviour), torch.cat(proximal))
        return TrainReport(
            num_sequences=len(samples),
            num_tokens=len(behaviour),
            num_trained_sequences=sum(not one.masked for one in samples),
            num_updates=0,
            learning_rate=learning_rate or 0.0,
            loss=0.0,
            entropy=0.0,
            clip_fraction=0.0,
            grad_norm=0.0,
            ess=1.0,
            truncated_weight_fraction=0.0,
            kl_reference=0.0,
            seconds=time.monotonic() - started_s,
            mismatch_kl=apart["mismatch_kl"],
            ratio_p99=apart["ratio_p99"],
            logprob_diff_max=apart["logprob_diff_max"],
        )


class Ends:
    """Why attempts ended, as the scheduler's event stream has it, while a run lasts.

    Attributes:
        how: By trajectory and attempt; each trajectory has one turn.
    """

    def __init__(self) -> None:
        self.how: dict[tuple[str, int], str] = {}
        self._taken = asyncio.Event()

    def take(self, event: Mapping[str, Any]) -> None:
        """Take what an event says of attempts that are over."""
        for span in event.get("spans") or ():
            _, _, _, trajectory, attempt, _, end_s, how = span
            if end_s is not None:
                self.how[trajectory, attempt] = how
        self._taken.set()

    async def catch_up(self) -> None:
        """Until what had ended before is known; the stream tells once a second.  Where it tells nothing, a cut too few is counted."""
        self._taken.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._taken.wait(), CATCH_UP_S)

    async def watch(self, url: str, token: str) -> None:
        """Follow the scheduler until cancelled; what was missed is in the history that each connection begins with."""
        timeout = httpx.Timeout(None, connect=2.0, read=30.0)
        async with open_client(bearer(token)) as client:
            while True:
                with suppress(*BROKEN, ValueError):
                    async with client.stream("GET", f"{url}/events", timeout=timeout) as stream:
                        async for line in lines_of(stream.aiter_raw()):
                            if line.startswith(b"data:"):
                                self.take(json.loads(line[5:]))
                await asyncio.sleep(1.0)


class Recorded(TrainWorker):
    """A train worker that keeps what it was leased for the last step.

    Attributes:
        ends: Asked to catch up after each step: what a step was leased may have been cut a moment ago.
        leased: Trajectories by group, in the order of their lease.
        version: Attempt and step that leased them.
    """

    ends: Ends
    leased: Mapping[str, Sequence[Mapping[str, Any]]] = {}
    version: Version = (0, 0)

    async def _train(self, learning_rate: float, single_update: bool) -> dict[str, Any]:
        step = self._trainer.step_index
        found = await super()._train(learning_rate, single_update)
        if "step" in found:
            self.leased, self.version = self._last, (self._attempt, step)
            await self.ends.catch_up()
        return found

    def _forget(self) -> None:
        self._last = dict(self._collected.kept)
        super()._forget()

    @property
    def gradients(self) -> Mapping[str, Floats]:
        return self._trainer.gradients


class RecordedActors(LocalActors):
    """Workers in this process, whose trainer is :class:`Recorded`."""

    worker: Recorded

    def __init__(self, config: TrainConfig, tokens: Tokens, parts: Parts, ends: Ends) -> None:
        super().__init__(config, tokens, parts)
        self._ends = ends

    def _make_trainer(self) -> None:
        self.worker = Recorded(self.config, self.tokens, self._parts)
        self.worker.ends = self._ends
        self._trainer = LocalActor(self.worker)
        self.made.append(self._trainer)


def group_of(
    members: Sequence[Mapping[str, Any]],
    *,
    version: Version,
    boards: Sequence[Sequence[str]],
    actions: Sequence[int],
    gradient: Floats,
    ends: Mapping[tuple[str, int], str],
) -> tuple[Group, dict[str, int]]:
    """A leased group in sums, and what else is counted of it.

    Args:
        version: Of the step that leased it.
        actions: Token ids of the moves.
        ends: Why attempts ended, by trajectory and attempt.
    """
    number = {token: move for move, token in enumerate(actions)}
    counts: np.ndarray | None = None
    tokens = behind = cut = cut_wins = 0
    told: dict[str, int] = dict.fromkeys(COUNTED, 0)
    for one in members:
        told["stale"] += one.get("stale") is True
        for turn in one["turns"]:
            ids, segments = turn["token_ids"], turn["segments"]
            if counts is None:
                counts = np.zeros((len(ids), NUM_ACTIONS), dtype=np.int64)
            counts[np.arange(len(ids)), [number[token] for token in ids]] += 1
            tokens += len(ids)
            behind += sum(count * lag(version, parse_version(name)) for name, _, count in turn["versions"])
            told["turns"] += 1
            told["versions"] += len(turn["versions"]) > 1
            told["mixed"] += turn.get("kv_mixed") is True
            if len(segments) < 2:
                continue
            told["moved"] += 1
            reasons = [
                ends.get((one["id"], segment["attempt"]))
                for segment in segments[:-1]
                if segment["tier"] == HARVESTED
            ]
            told["migrated"] += "migrate" in reasons
            if RECLAIM in reasons:
                cut += 1
                cut_wins += bool(one["success"])
                told["deep"] += min(segments[0]["n"], segments[-1]["n"]) >= 8
    assert counts is not None, "a group without a turn is set aside by the loop"
    known = [list(rows) for rows in boards]
    return (
        Group(
            board=known.index(list(members[0]["task"]["map"])),
            episodes=len(members),
            wins=sum(bool(one["success"]) for one in members),
            moves=sum(int(one["info"]["moves"]) for one in members),
            tokens=tokens,
            lag=behind,
            actions=tuple(int(count) for count in counts.ravel()),
            cut=cut,
            cut_wins=cut_wins,
            gradient=gradient,
        ),
        told,
    )


Sink = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], None]
"""Given the groups of a step, and what the step tells of itself."""


def job_of(plan: FleetPlan, num_steps: int) -> TrainConfig:
    """The asynchronous job whose batches are recorded."""
    job = plan.config.job
    return TrainConfig.model_validate(
        {
            "job": programs.JOB,
            "seed": plan.config.seed,
            "num_steps": num_steps,
            "model": plan.policy_model,
            "output_dir": plan.train_dir,
            "scheduler": {"url": plan.config.url("scheduler"), "model": programs.POLICY_MODEL},
            "weights": {"relay_url": plan.config.url("relay"), "run_id": programs.RUN_ID},
            "env": {"kind": "frozenlake_plan", "settings": asdict(LAKES)},
            "rollout": {
                "mode": "asynchronous",
                "alpha": 1,
                "on_stale": "cancel",
                "num_groups": job.num_groups,
                "group_size": job.group_size,
                "max_tokens": LAKES.size**2,
            },
            "trainer": {
                **TOY_RECIPE,
                "num_epochs": 1,
                "minibatch_sequences": job.num_groups * job.group_size,
                "entropy_weight": 0.0,
                "count_idle": True,
                "stream_groups": "off",
                "keep_checkpoints": 1,
            },
            "log": {"tensorboard": False, "page": False},
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOfRun:
    """What is to be played: a fleet with a frozen policy, and how many steps are missing."""

    fleet: Fleet
    num_steps: int


def play_part(config: DemoConfig, part: PartOfRun, sink: Sink, told: Callable[[str], None]) -> None:
    """Start the fleet, have the loop lease ``num_steps`` batches, and end everything.

    Raises:
        ConfigError: This machine cannot run it.
        RoseError: A program or the loop failed; what the sink was given stands.
    """

    async def lease(plan: FleetPlan, tokens: Tokens) -> None:
        def told_step(rows: Sequence[Mapping[str, Any]], step: Mapping[str, Any]) -> None:
            sink(rows, {**step, **engine_counts(plan)})

        parts = Parts(make_trainer=FrozenTrainer)
        await record(job_of(plan, part.num_steps), tokens, parts, told_step, told)

    play(config, part.fleet, lease, told)


async def record(
    config: TrainConfig, tokens: Tokens, parts: Parts, sink: Sink, told: Callable[[str], None]
) -> None:
    """Run the loop of a job to its end, and give the sink what each step was leased."""
    ends = Ends()
    actors = RecordedActors(config, tokens, parts, ends)
    boards = [task["map"] for task in LakePlanFamily(LAKES).tasks()]
    actions = single_token_ids(config.model, ACTIONS)
    began_s = time.monotonic()

    def leased(record: Mapping[str, Any]) -> None:
        if "event" in record:
            told(str(record))
            return
        rows: list[Mapping[str, Any]] = []
        for name, members in actors.worker.leased.items():
            group, counted = group_of(
                members,
                version=actors.worker.version,
                boards=boards,
                actions=actions,
                gradient=actors.worker.gradients[name],
                ends=ends.how,
            )
            rows.append({**group.to_json(), **counted})
        step = {name: record[name] for name in REPORTED if name in record}
        sink(rows, {**step, "seconds": round(time.monotonic() - began_s, 2)})

    watching = asyncio.create_task(ends.watch(config.scheduler.url, tokens.environment))
    try:
        await train_with(actors, leased)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await actors.close()
