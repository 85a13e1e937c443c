"""A turn that production holds back goes on at a dedicated engine, over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rose.policy.migration import MIN_OBSERVED
from rose.testing.fake_engine import Fault
from tests.scheduler.conftest import World

PROMPT = [5, 6, 7, 8]


async def generate(world: World, name: str) -> Any:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 40, "temperature": 0.0}}
    return await world.ok("POST", "/rose/v1/generate", body, headers={"X-Session-ID": name})


@pytest.mark.parametrize("num_before", [0, 3])
async def test_its_tokens_are_those_of_a_turn_that_nobody_held_back(world: World, num_before: int) -> None:
    await world.start(migrate_ratio=1.5)
    harvested = await world.add("h", tier="harvested", mean_tokens=1000)
    for _ in range(MIN_OBSERVED):
        undisturbed = await generate(world, await world.trajectory())
    harvested.faults.append(Fault(kind="stall", after=num_before))
    name = await world.trajectory()
    asked = asyncio.create_task(generate(world, name))
    await world.until(lambda: harvested.num_running)
    await world.add("d", mean_tokens=1000)
    answer = await asked
    assert answer["token_ids"] == undisturbed["token_ids"]
    record = await world.ok("GET", f"/rose/v1/trajectories/{name}/tokens")
    workers = [row["worker"] for row in record["tokens"] if row["sampled"]]
    assert workers == ["h"] * num_before + ["d"] * (40 - num_before)
    assert world.scheduler.status.reroutes["migrate"] == 1
