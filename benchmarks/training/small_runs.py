"""Whole training runs that truly learn, in one process: the demo's policy, its engines in torch, the real scheduler and loops.

What stands in, each at a boundary with tests of its own: an engine is ``tests.train.world.TorchEngine`` (the scheduler's fake
engine, which samples from the policy and reports its log-probs), a version travels as a file, and the workers live in this
process instead of Ray's.

A *harvested* engine here is one whose requests are cut now and then with the reclaim stop reason, after some tokens, as when
production takes its memory back; the scheduler then finishes those turns elsewhere.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rose.lineage import parse_version
from rose.policy.staleness import lag
from rose.testing.fake_engine import Fault
from rose.train import checkpoint as checkpoints
from rose.train.loop import train_with
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from tests.train.file_publisher import RUN, file_publisher
from tests.train.local_actors import LocalActors
from tests.train.world import World, running_world

CUT_EVERY_S = 1.0
NUM_CUT = 4
"""Requests of a harvested engine that each reclaim cuts."""


def train(
    folder: Path,
    model: Path,
    job: Mapping[str, Any],
    *,
    num_engines: int,
    seed: int,
    cut: bool = True,
    progress: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Run a job to its end.

    Args:
        job: As in a job file, without its name and what says where scheduler, weights and output are.
        num_engines: One dedicated engine, the others harvested.
        cut: Whether requests of harvested engines are cut.
        progress: Called with each step's metrics.

    Returns:
        ``records`` (the steps' metrics), ``seconds``, ``num_cuts``, and ``trajectories``: one entry for each that ended, with its
        number of turns and whether it was trained on; None after more steps than a checkpoint keeps the ids of.
    """
    records: list[Mapping[str, Any]] = []

    def told(record: Mapping[str, Any]) -> None:
        if "event" not in record:
            records.append(record)
            progress(record)

    with running_world(folder, model, num_engines=num_engines) as world:
        config = TrainConfig.model_validate(
            {
                **job,
                "job": RUN,  # whose weights the engines serve: turns of another name would wait for ever
                "seed": seed,
                "model": str(model),
                "output_dir": str(folder / "out"),
                "scheduler": {"url": world.url},
                "weights": {"directory": str(world.versions)},
                "log": {"tensorboard": False},
            }
        )
        started_s = time.monotonic()
        cutting = asyncio.run_coroutine_threadsafe(_cut(world, seed), world.loop) if cut else None
        try:
            asyncio.run(_run(world, config, told))
        finally:
            if cutting is not None:
                cutting.cancel()
        seconds = time.monotonic() - started_s
        return {
            "records": [dict(record) for record in records],
            "seconds": seconds,
            "num_cuts": sum(node.reclaim_seq for node in world.nodes),
            "trajectories": _ended(world, config) if config.num_steps < checkpoints.CONSUMED_STEPS else None,
        }


async def _run(world: World, config: TrainConfig, told: Callable[[Mapping[str, Any]], None]) -> None:
    actors = LocalActors(config, world.tokens, Parts(make_publisher=file_publisher))
    try:
        await train_with(actors, told)
    finally:
        await actors.close()


async def _cut(world: World, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(CUT_EVERY_S)
        for engine, node in zip(world.engines[1:], world.nodes[1:], strict=True):
            engine.faults.extend(Fault(kind="reclaim", after=rng.randrange(6)) for _ in range(NUM_CUT))
            node.reclaim_seq += 1


def _ended(world: World, config: TrainConfig) -> list[dict[str, Any]]:
    assert world.scheduler is not None
    store = world.scheduler.store
    newest, _ = checkpoints.load_latest(config.output_dir / "checkpoints")
    step_of = {} if newest is None else {name: step for step, ids in newest.consumed.items() for name in ids}
    found: list[dict[str, Any]] = []
    for name, one in store.trajectories.items():
        state, _ = store.state(name)
        if one.created.job != config.job or state not in ("consumed", "stale", "finished"):
            continue  # held-out episodes, and those that the end of the run broke off
        spans = [span for turn in one.turns for span in turn.versions]
        step = step_of.get(name)
        old = 0 if step is None else max(lag((1, step), parse_version(span[0])) for span in spans)
        found.append(
            {
                "num_turns": len(one.turns),
                "state": state,
                "lag": old,
                "success": bool(one.finish and one.finish.success),
                "trained": step is not None and old <= config.alpha,
            }
        )
    return found
