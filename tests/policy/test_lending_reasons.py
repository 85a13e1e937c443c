"""Why a loan stands where it stands: what holds now, not what once changed it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.decisions.event_format import LENDING
from rose.decisions.log import DecisionLog, logs, replay
from rose.policy.baselines import PaperLending
from rose.policy.lending_events import Mode, ModeSet, Phase, RolloutReported, Tick
from rose.policy.lending_policy import LendingPolicy
from tests.policy.lending_world import PARAMS, TOTAL, World


def burst(world: World) -> None:
    """Serving uses all of the device within a reclaim, and a moment later nothing."""
    world.run(5.0)
    world.used, world.at_s = TOTAL, 5.1
    world.step(5.1, needed_pages=TOTAL)
    world.used = 0
    world.run(20.0)


def small_burst(world: World) -> None:
    world.run(5.0)
    world.used = 50
    world.step(5.1)
    world.used = 10
    world.run(20.0)


def use(world: World) -> None:
    world.used = 40
    world.run(20.0)


def use_of_late(world: World) -> None:
    world.policy = LendingPolicy(dataclasses.replace(PARAMS, use_window_s=32.0))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    world.used = 40
    world.run(10.0)
    world.used = 0
    world.run(20.0)


def floor(world: World) -> None:
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON, floor_pages=30))
    world.run(20.0)


def limit(world: World) -> None:
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON, max_lend_pages=7))
    world.run(20.0)


def wish(world: World) -> None:
    world.run(20.0)
    world.policy.handle(
        RolloutReported(at_s=20.0, alive=True, phase=Phase.READY, reserved_pages=10, wanted_pages=10)
    )


def claim(world: World) -> None:
    world.run(20.0)
    for pages in range(86):  # so slowly that no headroom is learned from it
        world.step(20.0 + pages, needed_pages=pages)


def owed(world: World) -> None:
    world.run(20.0)
    world.obeys, world.used = False, 11
    world.step(20.1)


def cooling(world: World) -> None:
    world.run(5.0)
    world.used = 18
    world.step(5.1)
    world.used = 0
    world.step(6.0)


def cut_often(world: World) -> None:
    world.run(10.0)
    for at_s in (20.0, 30.0, 40.0):
        world.used = 15
        world.step(at_s)
        world.used = 0
        world.run(at_s + 9.0)


def short_device(world: World) -> None:
    world.run(20.0)
    world.policy.handle(Tick(at_s=20.0, device_free_bytes=1 << 20, device_reserve_bytes=1 << 27))
    world.run(20.5)


def growing(world: World) -> None:
    world.step(0.0)


def cold(world: World) -> None:
    """Loans cost serving's prefix cache a tenth of its hits."""
    world.run(20.0)
    for number in range(1, 40):
        world.step(
            20.0 + 0.5 * number, queried_tokens=20_000 * number, lost_tokens=2_000 * number, cold_pages=60
        )


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (burst, "serving's demand grew by 100 pages within one reclaim: so much is kept free for 51 s more"),
        (small_burst, "serving's demand grew by 50 pages within one reclaim: so much is kept free for 51 s more"),
        (use, "serving uses 40 pages"),
        (use_of_late, "serving used 40 pages within the last 32 s"),
        (floor, "headroom and floor leave no more"),
        (limit, "the operator's limit"),
        (wish, "rollouts want less"),
        (claim, "serving claims pages"),
        (owed, "serving's use crossed the watermark"),
        (cooling, "no growth for 5 s more, after a cut"),
        (cut_often, "no more than the latest of many cuts left, for 31 s more"),
        (short_device, "less than the reserve of 128.0 MiB is free"),
        (growing, "serving left room"),
        (cold, "serving's prompts miss prefixes"),
    ],
)  # fmt: skip
def test_the_reason_is_the_one_that_holds_now(
    world: World, way: Callable[[World], None], reason: str
) -> None:
    way(world)
    assert world.policy.stands_because == reason
    row = re.sub(r"\d+ s\b", "T", reason).replace("128.0 MiB", "N")
    assert f"\n    {re.sub(r'[0-9]+', 'N', row)} " in (LendingPolicy.__doc__ or "")


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_what_blocks_a_loan_comes_before_all_else(world: World, mode: Mode) -> None:
    burst(world)
    world.policy.handle(ModeSet(at_s=world.at_s, mode=mode))
    assert world.policy.stands_because == f"mode is {mode.name.lower()}"


def test_a_burst_that_is_forgotten_is_no_reason_any_more(world: World) -> None:
    burst(world)
    world.run(100.0)
    assert world.policy.lend_pages == 80
    assert world.policy.stands_because == "headroom and floor leave no more"


def test_a_production_that_shares_compute_only_has_a_fixed_budget(world: World) -> None:
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON, max_lend_pages=10))
    world.step(0.5, compute_only=True)
    assert world.policy.stands_because == "compute only: a fixed budget"


def test_other_policies_say_why_they_changed_it() -> None:
    world = World(PaperLending(PARAMS))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    world.run(5.0)
    assert world.policy.stands_because == "serving left room"


def test_a_replayed_log_ends_with_what_the_status_said(tmp_path: Path) -> None:
    policy = LendingPolicy(PARAMS)
    log = DecisionLog(tmp_path, "lending-n", LENDING, policy, max_bytes=10**9, max_files=2)
    log.roll()
    world = World(policy)
    told = policy.handle

    def logged(event: object) -> list[object]:
        actions = told(event)  # type: ignore[arg-type]
        log.record(event, actions)
        return list(actions)

    policy.handle = logged  # type: ignore[method-assign,assignment]
    logged(ModeSet(at_s=0.0, mode=Mode.ON))
    burst(world)
    log.close()
    (path,) = logs(tmp_path)
    found = replay(path)
    assert found.difference is None
    assert found.ends == f"0 pages lent: {policy.stands_because}"
    assert "kept free" in found.ends
