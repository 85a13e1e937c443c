"""Whole runs of a small job on a :class:`~tests.train.world.World` and a :class:`~tests.train.local_actors.LocalActors`, and what they consumed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rose.train import checkpoint as checkpoints
from rose.train.loop import train_with
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from tests.train.file_publisher import file_publisher
from tests.train.local_actors import LocalActors
from tests.train.ray_world import SHORT_LAKES, job_table
from tests.train.world import World

SMALL = {"num_groups": 2, "group_size": 4}
QUIET = {"tensorboard": False}


class Script:
    """Progress callback that does something once when a step is done."""

    def __init__(self, actors: LocalActors, deeds: Mapping[int, str]) -> None:
        self._actors, self._deeds = actors, dict(deeds)
        self.records: list[dict[str, Any]] = []
        self.events: list[str] = []

    def __call__(self, record: Mapping[str, Any]) -> None:
        if "event" in record:
            self.events.append(str(record["event"]))
            return
        self.records.append(dict(record))
        deed = self._deeds.pop(record["step"], None)
        if deed is not None:
            getattr(self._actors, deed)()


async def run(
    world: World,
    deeds: Mapping[int, str],
    *,
    parts: Parts | None = None,
    prepare: Callable[[LocalActors], None] = lambda actors: None,
    **changes: Any,
) -> tuple[Script, TrainConfig, Any]:
    table = {"log": QUIET, "rollout": SMALL, "env": {"settings": SHORT_LAKES}} | changes
    config = TrainConfig.model_validate(job_table(world, **table))
    actors = LocalActors(config, world.tokens, parts or Parts(make_publisher=file_publisher))
    prepare(actors)
    script = Script(actors, deeds)
    before = asyncio.all_tasks()
    try:
        result = await train_with(actors, script)
    finally:
        await actors.close()
        assert asyncio.all_tasks() == before  # whoever started something has waited for it
    return script, config, result


def consumed_of(config: TrainConfig) -> dict[int, tuple[str, ...]]:
    newest, _ = checkpoints.load_latest(config.output_dir / "checkpoints")
    assert newest is not None
    return dict(newest.consumed)


def assert_applied_once(world: World, config: TrainConfig) -> None:
    assert world.scheduler is not None
    ids = [name for step in consumed_of(config).values() for name in step]
    assert len(ids) == len(set(ids))
    counts = world.scheduler.store.book.counts(config.job)
    assert counts["consumed"] == len(ids)
    assert counts["leased"] == 0
