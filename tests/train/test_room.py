"""Where a job's actors come to be in a Ray cluster: a rank that computes on a GPU has one of its own, and nobody else has any."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.train.cluster import ray_for
from rose.train.room import Room
from rose.train.train_config import TrainConfig

pytestmark = pytest.mark.timeout(200)


class Seer:
    def devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def job(short_tmp: Path, num_ranks: int) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": "m",
            "weights": {"directory": "w"},
            "trainer": {"learning_rate": 1e-6, "num_ranks": num_ranks, "device": "cuda"},
            "env": {"num_managers": 1},
            "ray": {"address": "local", "temp_dir": short_tmp / "r", "num_cpus": 4},
        }
    )


async def test_each_rank_has_a_gpu_and_a_cluster_with_too_few_says_so(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray counts the GPUs that it is told of, whether they are there or not."""
    import ray

    monkeypatch.setattr("rose.train.room.PATIENCE_S", 0.0)
    with ray_for(job(short_tmp, 2)):
        room = Room(job(short_tmp, 2))
        assert await room.hold()
        options: list[Any] = [room.of_rank(0), room.of_rank(1), room.of_manager(0)]
        actors = [ray.remote(**one)(Seer).remote() for one in options]
        assert ray.get([one.devices.remote() for one in actors]) in (["0", "1", ""], ["1", "0", ""])
        with pytest.raises(
            ConfigError, match=r"ray: the cluster has 2 GPUs; the job's 3 trainer ranks want one each"
        ):
            await Room(job(short_tmp, 3)).hold()
