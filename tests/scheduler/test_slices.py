"""Long answers for people and trainers are built a slice at a time: turns are answered meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rose.scheduler import slices
from rose.scheduler.learning import BUCKET_S, MAX_BUCKETS
from tests.scheduler.conftest import PROMPT, World

NUM_MANY = 3_000


@pytest.fixture
async def crowded(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """More than anything can answer in the turns of the event loop that a turn takes, when each item is a slice."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    await world.start()
    await world.add("a", mean_tokens=4)
    store, timeline = world.scheduler.store, world.scheduler.timeline
    for number in range(NUM_MANY):
        store.create(job="big", group_id=f"g{number // 4}", group_size=4, task=None, sampling={})
    for bucket in range(MAX_BUCKETS):
        timeline._learning.finished("big", bucket * BUCKET_S, 1.0, None)
    return world


LONG = ["/rose/v1/trajectories", "/rose/v1/groups", "/rose/v1/history", "/rose/v1/trajectories/{}/tokens"]


@pytest.mark.parametrize("path", LONG)
async def test_a_turn_is_answered_while_a_long_answer_is_built(crowded: World, path: str) -> None:
    if path.endswith("tokens"):
        path = path.format(name := await crowded.trajectory())
        body = {"token_ids": PROMPT * (NUM_MANY // 4), "session_id": name}
        await crowded.ok("POST", "/rose/v1/generate", body)
    asked = asyncio.create_task(crowded.ok("GET", path))
    await crowded.until(crowded.scheduler.looking.locked)
    await crowded.ok("POST", "/rose/v1/generate", {"token_ids": PROMPT})
    assert crowded.scheduler.looking.locked()
    found: Any = await asked
    if path.endswith("history"):
        assert len(found["jobs"]["big"]) == MAX_BUCKETS
    elif path.endswith("groups"):
        assert [group["states"] for group in found["groups"]] == [{"running": 4}] * (NUM_MANY // 4)
    elif path.endswith("tokens"):
        assert [row["id"] for row in found["tokens"]][: len(PROMPT)] == PROMPT
    else:
        assert len({each["id"] for each in found["trajectories"]}) == NUM_MANY


async def test_what_is_forgotten_while_it_is_searched_is_left_out(crowded: World) -> None:
    store = crowded.scheduler.store
    asked = asyncio.create_task(crowded.ok("GET", "/rose/v1/trajectories"))
    await crowded.until(crowded.scheduler.looking.locked)
    gone = list(store.trajectories)[-11:]
    store._retained_finals = 1
    for name in gone:
        store.cancel(name, "cancelled")
    assert crowded.scheduler.looking.locked()
    listed = {each["id"] for each in (await asked)["trajectories"]}
    assert len(listed) == NUM_MANY - 10
    assert listed & set(gone) == {gone[-1]}


async def test_a_turn_is_answered_while_a_batch_is_written(crowded: World) -> None:
    num_groups = 100
    for number in range(num_groups):
        name = await crowded.trajectory(job="leased", group_id=f"l{number}")
        await crowded.ok("POST", "/rose/v1/generate", {"token_ids": PROMPT}, headers={"X-Session-ID": name})
        await crowded.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1.0})
    body = {"job": "leased", "num_groups": num_groups, "version": "0.0"}
    asked = asyncio.create_task(crowded.ok("PUT", "/rose/v1/batches/b", body, role="trainer"))
    await crowded.until(lambda: crowded.scheduler.store.book.batches)
    await crowded.ok("POST", "/rose/v1/generate", {"token_ids": PROMPT})
    assert not asked.done()
    assert len((await asked)["trajectories"]) == num_groups
