"""Turns that moved, from the scheduler's own event stream and its own answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.auth import Tokens
from rose.demo.result import shorter_side
from rose.demo.resumed import ResumedTurns, moved, turn_of
from rose.testing.fake_engine import Fault
from tests.scheduler.conftest import World, generate


def row(token: int, worker: str, attempt: int) -> dict[str, Any]:
    tier = "harvested" if worker == "h" else "dedicated"
    return {
        "id": token,
        "text": f"t{token}",
        "sampled": True,
        "turn": 0,
        "logprob": -0.5,
        "version": "1.2",
        "worker": worker,
        "tier": tier,
        "attempt": attempt,
    }


ANSWER = {
    "id": "tr-1",
    "turn": 0,
    "tokens": [
        {"id": 1, "text": "<|user|>SF", "sampled": False},
        *(row(token, "h", 1) for token in range(9)),
        *(row(token, "d", 2) for token in range(9, 25)),
    ],
}


def test_an_answer_becomes_a_turn_with_its_cut() -> None:
    turn = turn_of(ANSWER)

    assert turn is not None
    assert (turn.parts, turn.prompt, turn.trajectory_id) == ((9, 16), "<|user|>SF", "tr-1")
    assert [token.worker for token in turn.tokens] == ["h"] * 9 + ["d"] * 16
    assert turn_of({**ANSWER, "tokens": ANSWER["tokens"][:10]}) is None


@pytest.mark.parametrize(
    ("parts", "side"), [((9, 16), 9), ((24, 1), 1), ((1, 8, 16), 9), ((25,), 0), ((), 0)]
)
def test_the_shorter_side_is_that_of_the_cut_nearest_to_the_middle(parts: tuple[int, ...], side: int) -> None:
    assert shorter_side(parts) == side


def test_the_turn_whose_cut_is_nearest_to_its_middle_is_kept() -> None:
    turns = ResumedTurns()
    short = {**ANSWER, "tokens": [*ANSWER["tokens"][:3], ANSWER["tokens"][-1]]}
    for answer in (short, ANSWER, short):
        turns.see(answer)

    assert turns.found == [(2, 1), (9, 16), (2, 1)]
    assert turns.best is not None
    assert turns.best.parts == (9, 16)


def test_only_turns_that_ended_well_at_a_later_attempt_have_moved() -> None:
    spans = [
        [1, "h", "harvested", "a", 1, 0.0, 1.0, "reclaimed"],
        [2, "d", "dedicated", "a", 2, 1.0, 2.0, "done"],
        [3, "d", "dedicated", "b", 1, 1.0, 2.0, "done"],
        [4, "d", "dedicated", "c", 2, 1.0, None, ""],
        "nonsense",
    ]
    assert moved({"spans": spans}) == ["a"]
    assert moved({"spans": None}) == []


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path, Tokens.generate())
    async with aiohttp.ClientSession() as session:
        world.session = world.turn_session = session
        yield world
        await world.close()


async def test_a_turn_that_moves_is_found_while_the_scheduler_has_it(world: World) -> None:
    await world.start()
    first = await world.add("first", tier="harvested")
    first.hold = asyncio.Event()
    first.faults.append(Fault(kind="reclaim", after=10))
    turns = ResumedTurns()
    watching = asyncio.create_task(turns.watch(world.url, world.tokens.environment))
    try:
        trajectory = await world.trajectory()
        asking = asyncio.create_task(generate(world, trajectory, max_tokens=25, ignore_eos=True))
        await world.until(lambda: first.requests)
        await world.add("second")
        first.hold.set()
        await asking
        async with asyncio.timeout(20):
            while not turns.found:  # noqa: ASYNC110 - said by another program, once a second
                await asyncio.sleep(0.02)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert turns.found == [(10, 15)]
    assert turns.best is not None
    assert turns.best.trajectory_id == trajectory
    assert [token.worker for token in turns.best.tokens] == ["first"] * 10 + ["second"] * 15
