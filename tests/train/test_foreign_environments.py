"""What an environment's own mistakes cost: the episode that they were made in, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.errors import TrainError
from rose.train.envs.base import Observation
from rose.train.envs.frozenlake import FrozenLakeFamily, FrozenLakeParams
from tests.train.test_rollout import client_of, group, runner_of
from tests.train.world import World, running_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path_factory.mktemp("world"), policy_model) as world:
        yield world


def says(content: Any) -> Observation:
    return Observation(messages=({"role": "user", "content": content},))


ENDLESS: dict[str, Any] = {}
ENDLESS["within"] = ENDLESS
FIRST: dict[str, Any] = {
    "no messages": Observation(messages=None),  # type: ignore[arg-type]
    "a message that is none": Observation(messages=("look around",)),  # type: ignore[arg-type]
    "bytes": says(b"look around"),
    "a set": says({"look", "around"}),
    "no info": Observation(done=True, info=None),  # type: ignore[arg-type]
    "a list for info": Observation(done=True, info=["won"]),  # type: ignore[arg-type]
    "info of numpy": Observation(done=True, info={"score": np.float32(0.5)}),
    "info within itself": Observation(done=True, info=ENDLESS),
    "a success of words": Observation(done=True, success="won"),  # type: ignore[arg-type]
    "a done of two minds": Observation(done=np.array([True, False])),  # type: ignore[arg-type]
    "nothing": None,
}
"""What its first answer is, by what is wrong with it."""


class Odd:
    def __init__(self, fault: str) -> None:
        self._fault = fault

    def reset(self, task: Any) -> Any:
        if self._fault == "call":  # not even a coroutine
            raise KeyError("task")
        return self._answer()

    async def _answer(self) -> Any:
        return FIRST[self._fault]

    async def close(self) -> None: ...


class Flaky(FrozenLakeFamily):
    """Its first episode is ``fault``'s."""

    def __init__(self, fault: str) -> None:
        super().__init__(FrozenLakeParams())
        self._fault, self._num_made = fault, 0

    def make(self) -> Any:
        self._num_made += 1
        if self._num_made > 1:
            return super().make()
        if self._fault == "make":
            raise ConnectionError("no sandbox is free")
        return Odd(self._fault)


@pytest.mark.parametrize("fault", ["make", "call", *FIRST])
async def test_whatever_foreign_code_does_wrong_costs_one_episode(world: World, fault: str) -> None:
    family, job = Flaky(fault), f"odd-{fault}".replace(" ", "-")
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job=job).run([group(family, size=2)])
        assert await client.list_trajectories(job=job, state="running") == []
    assert (report.num_episodes, report.num_retries, report.failures) == (2, 1, ())
    assert report.causes == {"environment": 1}


class Once(FrozenLakeFamily):
    """Every episode is one observation."""

    def __init__(self, only: Observation) -> None:
        super().__init__(FrozenLakeParams())
        self._only = only

    def make(self) -> Any:
        return self

    async def reset(self, task: Any) -> Observation:
        return self._only

    async def close(self) -> None: ...


@pytest.mark.parametrize("success", [np.True_, np.False_])
async def test_a_success_of_numpys_is_one(world: World, success: Any) -> None:
    """``reward > 0`` is, of a reward of numpy's."""
    family, job = Once(Observation(done=True, success=success)), f"numpy-{success}"
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job=job).run([group(family, size=1)])
        leased = await client.lease(job=job, num_groups=1, attempt=0, version=0, ttl_s=60, wait_s=0)
    assert (report.num_episodes, report.failures, leased is None) == (1, (), False)
    assert [one["success"] for one in leased[1]] == [bool(success)]  # type: ignore[index]


async def test_an_episode_that_outgrows_the_context_without_any_info_is_given_up(world: World) -> None:
    class Long(Once):
        async def step(self, text: str) -> Observation:
            return self._only

    said = {"role": "user", "content": "S" * 300}
    family = Long(Observation(messages=(said,), info=None))  # type: ignore[arg-type]
    async with client_of(world) as client:
        report = await runner_of(world, client, family, job="bare").run([group(family, size=1)])
    assert report.failures == (("g", "environment failed 2 times: gave NoneType for info, not a dict"),)


async def test_a_task_that_is_no_json_ends_the_run_by_its_name(world: World) -> None:
    async with client_of(world) as client:
        with pytest.raises(
            TrainError, match=r"/rose/v1/trajectories: cannot be sent as JSON: set is not JSON"
        ):
            await client.create_trajectory(job="set", group_id="g", group_size=1, task={"words": {1, 2}})
        assert await client.list_trajectories(job="set", state="running") == []
