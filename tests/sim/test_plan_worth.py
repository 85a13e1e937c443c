"""What ``rose plan`` says a harvest is worth: as many dedicated engines as sample the same, within what production leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rose.sim.plan import Task, cell_of, make_plan, yardstick_tasks
from rose.sim.plan_words import document
from rose.sim.scenario import Scenario
from rose.sim.traffic import GeneratedTraffic, generated
from rose.sim.worth import LOADED, Yardstick, sizes, time_left, worth_of, yardstick_of

ENGINES = 16


def scenario(in_flight: int) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "small",
            "fleet": {"dedicated": 1, "serving": ENGINES, "trainers": 100},
            "job": {"group_size": 4},
            "cells": {
                "serving": 3,
                "dedicated": 1,
                "warm_s": 10.0,
                "seconds": 70.0,
                "in_flight_per_engine": in_flight,
            },
        }
    )


def traffic_of(config: Scenario, times: float) -> GeneratedTraffic:
    return generated(
        ENGINES, config.serving.model_copy(update={"requests_per_s": config.serving.requests_per_s * times})
    )


def task(config: Scenario, times: float, system: str = "rose") -> Task:
    return Task(
        scenario=config, traffic=traffic_of(config, times), system=system, start_s=0.0, seed=config.seed
    )


def test_worth_of_a_job_that_does_not_load_the_fleet_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trajectories wait for their own steps: half the engines sample as much, so any number of them looks equal."""
    config = scenario(4)
    # Most of a plan's simulations, and nothing that is looked at here.
    monkeypatch.setattr("rose.sim.plan.assumptions", lambda *_: [])
    monkeypatch.setattr("rose.sim.plan.draws", lambda *_: 1)

    plan = make_plan(config, traffic_of(config, 1.0), workers=1)

    assert plan.yardstick.gain < LOADED
    assert plan.gpus is None
    assert not plan.lends
    assert document(plan)["summary"]["gpus_mean"] is None


def test_worth_is_as_many_dedicated_engines_as_sample_the_same() -> None:
    """One engine fewer samples less than the job beside production does, one more samples more."""
    config = scenario(24)
    beside = task(config, 2.0)
    rose, curve = beside.run(), yardstick_of([each.run() for each in yardstick_tasks(beside)])

    worth = worth_of(rose, curve)

    assert worth is not None
    tokens_s = rose.dedicated_tokens_s + rose.harvested_tokens_s * rose.num_serving
    size = 1 + worth * rose.num_serving
    assert 1 < size < 4
    fewer, more = (
        replace(beside, dedicated=max(1, number)).run()
        for number in (math.ceil(size) - 1, math.floor(size) + 1)
    )
    assert (
        fewer.dedicated_tokens_s * fewer.num_dedicated <= tokens_s * 1.02
    )  # two runs differ by a percent or two
    assert tokens_s <= more.dedicated_tokens_s * more.num_dedicated * 1.02


def test_worth_stays_within_what_production_leaves_and_falls_with_its_traffic() -> None:
    """Alone it is busier than its steps need beside rollouts, where more requests share a step; at little traffic that is the same."""
    config = scenario(24)
    curve = yardstick_of([each.run() for each in yardstick_tasks(task(config, 1.0))])
    found = []
    for times in (0.1, 2.0, 8.0):
        rose, alone = task(config, times).run(), task(config, times, "fixed_async").run()
        cell = cell_of("mean", 0.1, [(rose, alone)], curve, config)
        assert cell.worth is not None
        assert cell.worth <= cell.most == time_left(config, rose.serving_own)
        assert rose.serving_own < rose.serving_busy
        assert alone.serving_own == pytest.approx(alone.serving_busy)
        found.append((cell, worth_of(rose, curve)))

    worths = [cell.worth or 0.0 for cell, _ in found]
    assert worths[0] > worths[1] + 0.05
    assert worths[1] > worths[2] + 0.05
    for cell, uncut in found:  # by itself, but for chance
        assert uncut is not None
        assert uncut <= cell.most + 0.02
    idle = time_left(config, found[0][0].busy)
    assert worths[0] <= idle + 0.02


def test_worth_is_no_more_than_as_many_engines_as_would_sample_the_harvest() -> None:
    """A busy fleet harvested 14 tokens a second, and was told that these were worth half a GPU: chance in the job's own engines' rate."""
    config = scenario(24)
    rose = task(config, 2.0).run()
    curve = Yardstick(engines=(1, 2, 3), tokens_s=(600.0, 900.0, 1200.0))
    little = replace(rose, num_dedicated=1, dedicated_tokens_s=700.0, harvested_tokens_s=8.0)

    assert worth_of(little, curve) == pytest.approx(8.0 / 400.0)
    assert worth_of(replace(little, harvested_tokens_s=0.0), curve) == 0.0


def test_the_time_left_is_what_is_not_busy_and_what_two_engines_overlap() -> None:
    config = scenario(4)
    config = config.model_copy(update={"efficiency": config.efficiency.model_copy(update={"overlap": 0.2})})

    assert time_left(config, 0.0) == 1.0
    assert time_left(config, 0.5) == pytest.approx(0.6)
    assert time_left(config, 1.2) == pytest.approx(0.2)


def test_worth_is_read_off_the_curve_and_never_above_proportion() -> None:
    curve = Yardstick(engines=(2, 4, 6), tokens_s=(100.0, 180.0, 240.0))

    assert curve.engines_for(180.0) == 4
    assert curve.engines_for(210.0) == pytest.approx(5)
    assert (curve.engines_for(10.0), curve.engines_for(999.0)) == (pytest.approx(0.25), 6)
    thrashing = Yardstick(
        engines=(2, 4, 6), tokens_s=(20.0, 40.0, 240.0)
    )  # too few for all trajectories' memory
    assert thrashing.engines_for(80.0) == 2
    assert Yardstick(engines=(2, 4), tokens_s=(0.0, 0.0)).engines_for(5.0) == 2
    assert (curve.crowded, thrashing.crowded) == (0, 4)


@pytest.mark.parametrize(
    ("tokens_s", "gain"),
    [((100.0, 200.0), 1.0), ((100.0, 100.0), 0.0), ((0.0, 0.0), 0.0), ((100.0, 2**0.1 * 100), 0.1)],
)
def test_what_the_last_engines_add(tokens_s: tuple[float, float], gain: float) -> None:
    curve = Yardstick(engines=(2, 4), tokens_s=tokens_s)

    assert curve.gain == pytest.approx(gain)
    assert curve.is_loaded == (gain >= LOADED)


def test_an_engine_of_more_gpus_than_a_dedicated_one_has_a_longer_curve() -> None:
    config = scenario(4)
    wide = config.model_copy(update={"fleet": config.fleet.model_copy(update={"serving_gpus": 2})})

    assert (sizes(config), sizes(wide)) == ([1, 2, 3, 4], [1, 3, 5, 7])
