"""A bound of staleness that adapts, in whole asynchronous runs on the real scheduler: what is begun, what is too old, and what lives on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.train.check import check_job
from rose.train.client import SchedulerClient
from rose.train.train_config import TrainConfig
from tests.train.local_run import SMALL, assert_applied_once, run
from tests.train.ray_world import job_table
from tests.train.world import World, running_world

pytestmark = pytest.mark.timeout(300)

EAGER = {"enabled": True, "window": 1, "most": 2, "idle_target": 1e-9, "kl_target": 1e9}
"""Raises the bound whenever it may: the trainer always waits for more than no time."""


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


def adapting(alpha: int, **adaptive: Any) -> dict[str, Any]:
    return {**SMALL, "mode": "asynchronous", "alpha": alpha, "on_stale": "mask", "adaptive_alpha": adaptive}


async def test_a_trainer_that_waits_has_more_begun_and_a_restart_goes_on_with_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer dies on the way, and then the driver ends."""
    leased, lease = list[int](), SchedulerClient.lease

    async def leasing(self: SchedulerClient, **named: Any) -> Any:
        found = await lease(self, **named)
        if found is not None:
            leased.append(named["alpha"])
        return found

    monkeypatch.setattr(SchedulerClient, "lease", leasing)
    script, config, result = await run(world, {3: "kill_trainer"}, num_steps=5, rollout=adapting(1, **EAGER))
    told = [(one["alpha"], one["alpha_accepted"], one["alpha_cause"]) for one in script.records]
    # Two steps until what was begun under the first bound is trained on, one to measure.
    settling = (1, 1, "settling")
    assert told == [settling, settling, (1, 1, "idle"), (2, 2, "settling"), (2, 2, "settling")]
    assert [one["alpha_changes"]["idle"] for one in script.records] == [0, 0, 1, 1, 1]
    assert leased == [1, 1, 1, 2, 2]
    assert result.num_restarts == 1
    assert_applied_once(world, config)
    again, _, _ = await run(world, {}, num_steps=6, rollout=adapting(1, **EAGER))
    assert [(one["alpha"], one["alpha_accepted"]) for one in again.records] == [(2, 2)]


async def test_a_mismatch_halves_what_is_begun_and_throws_nothing_away(world: World) -> None:
    adaptive = {"enabled": True, "window": 1, "kl_target": 1e-15}
    rollout = adapting(4, **adaptive) | {"on_stale": "wait"}
    script, config, _ = await run(world, {}, num_steps=9, rollout=rollout)
    told = [(one["alpha"], one["alpha_accepted"]) for one in script.records]
    # Lowered by the sixth step; what was begun in that one may be four versions old in the tenth.
    assert told == [(4, 4)] * 6 + [(2, 4)] * 3
    assert script.records[5]["alpha_cause"] == "mismatch"
    assert all(one["lag_max"] <= one["alpha_accepted"] for one in script.records)
    assert sum(one["num_stale"] for one in script.records) == 0
    assert_applied_once(world, config)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mode": "synchronous"}, r"rollout\.adaptive_alpha: is for asynchronous runs"),
        ({"on_stale": None}, r"rollout\.on_stale: rollout\.adaptive_alpha needs a rule"),
        ({"alpha": 9}, r"rollout\.alpha: is 9, outside"),
    ],
)
def test_a_job_that_it_does_not_fit_is_refused_before_it_starts(
    world: World, changes: dict[str, Any], why: str
) -> None:
    config = TrainConfig.model_validate(job_table(world, rollout={**adapting(1, enabled=True), **changes}))
    with pytest.raises(ConfigError, match=why):
        check_job(config)
