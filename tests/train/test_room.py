"""Where a job's actors come to be in a Ray cluster: a rank that computes on a GPU has one of its own, and nobody else has any."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.train import room as rooms
from rose.train.cluster import ray_for
from rose.train.room import Room
from rose.train.train_config import TrainConfig

pytestmark = pytest.mark.timeout(200)

SOON_S = 10
"""By then a job in a cluster that is too small has said what is missing."""


class Seer:
    def devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def job(
    short_tmp: Path,
    num_ranks: int,
    num_managers: int | None = 1,
    when_too_small: str = "fail",
    device: str = "cuda",
) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": "m",
            "weights": {"directory": "w"},
            "trainer": {"learning_rate": 1e-6, "num_ranks": num_ranks, "device": device},
            "env": {"num_managers": num_managers},
            "ray": {
                "address": "local",
                "temp_dir": short_tmp / "r",
                "num_cpus": 4,
                "when_too_small": when_too_small,
            },
        }
    )


async def test_each_rank_has_a_gpu_and_a_cluster_with_too_few_says_so(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray counts the GPUs that it is told of, whether they are there or not."""
    import ray

    with ray_for(job(short_tmp, 2)):
        monkeypatch.setattr("rose.train.room.PATIENCE_S", 60.0)
        room = Room(job(short_tmp, 2))
        assert await room.hold()
        options: list[Any] = [room.of_rank(0), room.of_rank(1), room.of_manager(0)]
        actors = [ray.remote(**one)(Seer).remote() for one in options]
        assert ray.get([one.devices.remote() for one in actors]) in (["0", "1", ""], ["1", "0", ""])
        monkeypatch.setattr("rose.train.room.PATIENCE_S", 0.0)
        with pytest.raises(
            ConfigError, match=r"ray: the cluster has 2 GPUs; the job's 3 trainer ranks want one each"
        ):
            await Room(job(short_tmp, 3)).hold()


class Full:
    """A room in a cluster that has so many nodes of one CPU, of which some are free; a wait takes its whole time at once.

    The clock is the room's own: what it takes for its word is its patience, and not this machine's.  After :data:`SOON_S` all are free.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        config: TrainConfig,
        nodes: int,
        free: int,
    ) -> None:
        self.now_s, self.asked = 0.0, list[int]()
        self.room = Room(config)
        self.free, self.nodes = free, nodes
        monkeypatch.setattr(rooms, "_of_nodes", lambda resource: [1] * nodes)
        monkeypatch.setattr(rooms, "_free_cpus", lambda: self.free)
        monkeypatch.setattr(rooms, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(self.room, "_ask", self.ask)

    def ask(self, max_managers: int, *, in_pieces: bool = False) -> None:
        if self.room._follows:
            self.room.num_managers = min(max_managers, 8)
        self.room._group = self
        self.asked.append(self.room.num_managers)

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        if self.now_s > SOON_S:
            self.free = self.nodes
        return 1 + self.room.num_managers <= self.free


@pytest.mark.parametrize(("num_managers", "missing"), [(None, 1), (2, 2)])
async def test_what_is_missing_is_said_soon_however_many_nodes_there_are(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, num_managers: int | None, missing: int
) -> None:
    cluster = Full(monkeypatch, job(short_tmp, 1, num_managers), nodes=9, free=1)
    with pytest.raises(ConfigError, match=f"without room: {missing} x environment manager"):
        await cluster.room.hold()
    assert cluster.now_s <= SOON_S


@pytest.mark.parametrize(("num_managers", "missing"), [(None, 1), (2, 2)])
async def test_a_job_that_waits_for_room_says_as_soon_what_is_missing(
    short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_managers: int | None,
    missing: int,
) -> None:
    """Room comes after that, so what it has said it said before."""
    cluster = Full(monkeypatch, job(short_tmp, 1, num_managers, "wait"), nodes=9, free=1)
    assert await cluster.room.hold()
    assert cluster.now_s > SOON_S
    (said,) = [one for one in caplog.messages if "waiting for room" in one]
    assert f"9 CPUs on 9 nodes, 1 of them free; the job's actors want {1 + missing}" in said
    assert f"without room: {missing} x environment manager" in said


async def test_a_job_has_as_many_managers_as_there_is_room_for(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Full(monkeypatch, job(short_tmp, 1, None), nodes=9, free=5)
    assert await cluster.room.hold()
    assert cluster.asked == [8, 4]
    assert cluster.now_s <= SOON_S


class Nodes:
    """Ray's placement groups, on nodes with so many CPUs of which so many are free: one has its room where its pieces fit, largest first.

    As in :class:`Full` a wait takes its whole time at once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpus: list[int], free: list[int]) -> None:
        self.cpus, self.free, self.now_s, self.pieces = cpus, free, 0.0, list[int]()
        monkeypatch.setattr(
            rooms, "_of_nodes", lambda resource: self.cpus if resource == "CPU" else [0] * len(self.cpus)
        )
        monkeypatch.setattr(rooms, "_free_cpus", lambda: sum(self.free))
        monkeypatch.setattr(rooms, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        ray_groups = importlib.import_module(
            "ray.util.placement_group"
        )  # ``ray.util`` has a function of this name
        monkeypatch.setattr(ray_groups, "placement_group", self.group)
        monkeypatch.setattr(ray_groups, "remove_placement_group", lambda group: None)

    def group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.pieces = [int(one["CPU"]) for one in bundles]
        return self

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        left = sorted(self.free, reverse=True)
        for piece in sorted(self.pieces, reverse=True):
            if left[0] < piece:
                return False
            left = sorted([left[0] - piece, *left[1:]], reverse=True)
        return True


def places(room: Room) -> list[int]:
    found: list[Any] = [room.of_rank(0), room.of_rank(1), room.of_manager(0)]
    return [one["scheduling_strategy"].placement_group_bundle_index for one in found]


async def test_ranks_that_no_node_has_room_for_together_any_more_are_placed_one_by_one(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Nodes(monkeypatch, [2, 1, 1], [2, 1, 1])
    room = Room(job(short_tmp, 2, device="cpu"))
    assert await room.hold()
    assert (cluster.pieces, places(room)) == ([2, 1], [0, 0, 1])
    cluster.cpus = cluster.free = [1, 1, 1]  # the large one has died, and a small one has come

    assert await room.hold()

    assert (cluster.pieces, places(room)) == ([1, 1, 1], [0, 1, 2])


async def test_ranks_do_not_wait_for_the_large_node_that_others_use(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Nodes(monkeypatch, [4, 2, 2], [1, 1, 1])

    assert await Room(job(short_tmp, 2, device="cpu")).hold()

    assert cluster.pieces == [1, 1, 1]
    assert cluster.now_s <= SOON_S
