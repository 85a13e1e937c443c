"""Whole runs in which some turns are drawn under something that the trainer does not reproduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.errors import TrainError
from rose.train.client import SchedulerClient
from rose.wire.samples import NewTrajectory
from tests.train.local_run import run
from tests.train.ray_world import SHORT_LAKES
from tests.train.world import World, running_world

pytestmark = pytest.mark.timeout(300)

NO_HOLES = {
    "settings": {**SHORT_LAKES, "frozen_fraction": 1.0, "min_start_distance": 2, "max_start_distance": 3}
}
"""Lakes on which no episode ends with its first turn."""


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


def constrain(monkeypatch: pytest.MonkeyPatch, is_constrained: Callable[[int], bool]) -> None:
    """Have those turns drawn under something, as an agent may that talks to the scheduler itself."""
    original = SchedulerClient._call

    async def call(self: Any, method: str, path: str, auth: Any, body: Any = None, **named: Any) -> Any:
        if path == "/v1/chat/completions" and is_constrained(int(named["headers"]["X-ROSE-Turn"])):
            body = {**body, "bad_words": ["no"]}
        return await original(self, method, path, auth, body, **named)

    monkeypatch.setattr(SchedulerClient, "_call", call)


@pytest.mark.parametrize("constrained", ["leave-out", "train"])
async def test_turns_under_a_constraint_are_left_out_counted_and_told_of_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, constrained: str
) -> None:
    constrain(monkeypatch, lambda turn: turn % 2 == 1)
    script, _, _ = await run(world, {}, num_steps=2, env=NO_HOLES, trainer={"constrained": constrained})
    for record in script.records:
        assert 0 < record["num_constrained_turns"] < record["num_turns"]
        left_out = record["num_constrained_turns"] if constrained == "leave-out" else 0
        assert record["num_tokens"] == record["num_turns"] - left_out  # a turn is one token
    told = [record.getMessage() for record in caplog.records if "were drawn under" in record.getMessage()]
    assert len(told) == (constrained == "leave-out")
    assert all("under bad_words are left out" in text and "trainer.constrained" in text for text in told)


async def test_a_step_of_which_nothing_is_left_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    constrain(monkeypatch, lambda turn: True)
    with pytest.raises(TrainError, match="all turns of step 0 were drawn under bad_words") as caught:
        await run(world, {}, num_steps=1)
    assert caught.value.field == "trainer.constrained"
    assert 'trainer.constrained = "train"' in str(caught.value.fix)


async def test_what_the_job_chose_for_all_its_turns_is_trained_on_with_one_warning(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = SchedulerClient._call

    async def call(self: Any, method: str, path: str, auth: Any, body: Any = None, **named: Any) -> Any:
        if isinstance(body, NewTrajectory):
            body = msgspec.structs.replace(body, sampling={"top_p": 0.95})
        return await original(self, method, path, auth, body, **named)

    monkeypatch.setattr(SchedulerClient, "_call", call)
    script, _, _ = await run(world, {}, num_steps=2)
    assert [record["num_constrained_turns"] for record in script.records] == [0, 0]
    assert all(record["num_tokens"] == record["num_turns"] for record in script.records)
    told = [record.getMessage() for record in caplog.records if "top_p" in record.getMessage()]
    assert told == ["trajectories begin with top_p, and are trained on as if they did not"]
