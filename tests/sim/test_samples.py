"""The sample book of a simulated job hears what rose-scheduler tells its own, and what that decides is done."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from rose.policy import sample_events as se
from rose.policy import samples as sp
from rose.policy.staleness import worst_lag
from rose.sim.events import EventDigest
from rose.sim.job import SimJob
from rose.sim.scenario import Scenario
from rose.sim.systems import SYSTEMS
from rose.sim.world import SimWorld, simulate

NO_OCCASION = {
    sp.GroupForsaken: "no trainer is away for long enough",
    sp.BatchRestored: "nothing is read back",
    sp.BatchExpired: "no trainer goes quiet",
    sp.BatchReturned: "no trainer gives a batch back",
    sp.JobResumed: "no trainer starts again",
}
"""Events that nothing here gives cause for."""


def scenario(on_stale: str = "cancel", alpha: int = 1, **changes: Any) -> Scenario:
    """More groups begun than are trained on in a step, some of them long: they get old while they are played."""
    return Scenario.model_validate(
        {
            "name": "old",
            "duration_s": 3600.0,
            "num_steps": 8,
            "fleet": {"dedicated": 1, "serving": 1, "trainers": 8},
            "job": {
                "num_groups": 2,
                "group_size": 4,
                "turns_median": 4.0,
                "turns_log_std": 1.0,
                "turns_max": 40,
                "algorithm": "grpo",
            },
            "scheduler": {"batches": {"alpha": alpha, "on_stale": on_stale}},
            **changes,
        }
    )


class Told(sp.SampleBook):
    """Remembers what it was told."""

    def handle(self, event: sp.Event) -> list[sp.Action]:
        self.events.append(event)
        return super().handle(event)

    events: list[sp.Event]


def world_of(what: Scenario, system: str) -> tuple[SimWorld, list[sp.Event]]:
    world = SimWorld(what, SYSTEMS[system], EventDigest(None), None)
    book = Told(params=world.job.book.params)
    book.events = []
    world.job.book = book
    return world, book.events


def test_it_is_told_of_all_that_happens_here() -> None:
    told: set[type] = set()
    for algorithm, system in (("grpo", "fixed_async"), ("dapo", "fixed_sync")):
        what = scenario()
        job = what.job.model_copy(update={"algorithm": algorithm})
        world, events = world_of(what.model_copy(update={"job": job}), system)
        world.run(None)
        world.check()
        told |= {type(event) for event in events}
        turns = [event for event in events if isinstance(event, sp.TurnAdded)]
        assert all(turn.versions for turn in turns)
        assert all(turn.num_tokens > 0 for turn in turns)
        newest: tuple[int, int] | None = None
        for event in events:
            if isinstance(event, sp.VersionPublished):
                newest = event.version
            if isinstance(event, sp.TrajectoryCreated):
                assert event.floor == newest
    assert told == {*typing.get_args(se.Event)} - {*NO_OCCASION}


def test_a_trainer_that_is_to_wait_waits_until_nothing_gets_too_old() -> None:
    """At most ``(alpha + 1) * num_groups`` groups are begun and not trained on, and none by weights older than the newest."""
    waiting, masking = (
        simulate(scenario(rule), "fixed_async", check=True).steps for rule in ("wait", "mask")
    )
    assert len(waiting) == len(masking) == 8
    assert max(step.lag for step in masking) > 1, "nothing would have got old: no test of anything"
    assert max(step.lag for step in waiting) <= 1


def test_a_group_is_given_up_as_soon_as_no_batch_can_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lags: list[int] = []
    submit = SimJob._submit

    def submitted(self: SimJob, trajectory: Any) -> None:
        lags.append(worst_lag(self.version, trajectory.versions))
        submit(self, trajectory)

    monkeypatch.setattr(SimJob, "_submit", submitted)
    world, _ = world_of(scenario(), "fixed_async")
    world.run(None)
    world.check()

    assert len(world.job.steps) >= 8
    assert world.job.book.counts()["stale"] > 0, "nothing got old: no test of anything"
    assert max(lags) == 1
