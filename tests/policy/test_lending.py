"""LendingPolicy: what it lends, and to whom."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from rose.errors import PolicyError
from rose.policy.baselines import PaperLending, StaticLending
from rose.policy.lending import Lending
from rose.policy.lending_events import (
    ALL_PAGES,
    Action,
    KillRollout,
    Mode,
    ModeSet,
    Phase,
    RlStepStarted,
    RolloutReported,
    ServingReported,
    SetLend,
    Tick,
)
from rose.policy.lending_policy import LendingPolicy
from tests.policy.lending_world import PARAMS, TOTAL, World


def test_a_loan_grows_one_step_per_period_up_to_what_headroom_leaves(world: World) -> None:
    assert world.step(0.0) == [SetLend(pages=30, deadline_s=None, reason="serving left room")]
    assert world.step(0.9) == []
    assert world.step(1.0) == [SetLend(pages=60, deadline_s=None, reason="serving left room")]
    assert world.step(2.0) == [SetLend(pages=80, deadline_s=None, reason="serving left room")]
    world.run(10.0)
    assert world.policy.lend_pages == 80


def test_serving_burst_recalls_pages_at_once_and_restores_the_headroom(world: World) -> None:
    world.run(5.0)
    world.used = 5
    assert world.step(5.1) == []  # 15 of the headroom of 20 are left: no cut yet
    world.used = 11
    # Left are 9 < watermark 10.  It grew 11 within a reclaim: headroom stays 20, target 100 - 11 - 20.
    world.obeys = False
    assert world.step(5.15) == [
        SetLend(pages=69, deadline_s=pytest.approx(5.25), reason="serving's use crossed the watermark")
    ]
    assert world.policy.num_cuts == 1


def test_headroom_covers_the_fastest_growth_within_one_reclaim(world: World) -> None:
    policy = world.policy
    assert isinstance(policy, LendingPolicy)
    world.run(5.0)
    # Worst reclaim 0.1 + 0.5, noticed 0.05 late: all of a rise of 40 within 0.6 s counts.
    assert policy.reclaim_p99_s == pytest.approx(0.65)
    for number in range(5):
        world.used = 10 * number
        world.step(5.0 + 0.15 * number)
    assert policy.need_pages == 40
    assert policy.headroom_pages == 42
    assert policy.watermark_pages == 40
    assert policy.lend_pages <= TOTAL - 40 - 42
    # A slow rise of the same size does not: it leaves time for a cut.
    world.used = 0
    world.run(5.0 + 0.6 + 70.0)
    assert policy.need_pages == 0  # and the burst is forgotten after the window
    start_s = world.at_s
    for number in range(40):
        world.used = number
        world.step(start_s + 0.65 * (number + 1))
    assert policy.need_pages <= 2


def test_a_burst_counts_by_what_a_reclaim_takes_now_not_by_what_it_took_then(world: World) -> None:
    policy = world.policy
    assert isinstance(policy, LendingPolicy)
    world.run(5.0)
    for number in range(5):  # 40 within the 0.65 s of the worst case, 10 at a time
        world.used = 10 * number
        world.step(5.0 + 0.1 * (number + 1))
    assert policy.need_pages == 40
    policy._reclaims_s.extend([0.01] * 20)
    policy._p99_s = None
    assert policy.reclaim_p99_s == pytest.approx(0.06)
    assert policy.need_pages == 10
    policy._reclaims_s.append(0.2)  # the slowest of 21 is their 99th percentile
    policy._p99_s = None
    assert policy.need_pages == 30


def test_what_serving_asks_for_beyond_its_memory_counts_as_growth(world: World) -> None:
    policy = world.policy
    assert isinstance(policy, LendingPolicy)
    world.run(5.0)
    world.used = 15  # its headroom is 20: use can grow no further than that, however large the burst
    world.step(5.1, needed_pages=45)
    assert policy.need_pages == 45


@pytest.mark.parametrize("before", [PaperLending, LendingPolicy])
def test_growth_seen_while_off_or_under_another_policy_is_not_learned_again(before: type[Lending]) -> None:
    seen = World(before(PARAMS))
    seen.policy.handle(ModeSet(at_s=0.0, mode=Mode.OFF))
    seen.run(1.0)
    seen.used = 30
    seen.step(1.2)
    policy = LendingPolicy(PARAMS)
    policy.take_over(seen.policy)
    assert policy.need_pages == 30


def test_what_serving_used_a_moment_ago_is_not_lent() -> None:
    world = World(LendingPolicy(dataclasses.replace(PARAMS, use_window_s=32.0)))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    world.used = 25
    world.step(0.0)
    world.used = 0
    world.run(30.0)
    assert world.policy.lend_pages == TOTAL - 25 - 20
    world.run(40.0)  # the window, a bucket more, and growth by steps
    assert world.policy.lend_pages == TOTAL - 20


def test_a_small_change_of_use_changes_no_loan(world: World) -> None:
    world.run(5.0)
    rng = random.Random(1)
    before = len(world.actions)
    for number in range(200):
        world.used = rng.randint(0, 4)
        world.step(5.0 + 0.05 * number)
    assert world.actions[before:] == []


def test_a_loan_does_not_grow_for_less_than_the_hysteresis(world: World) -> None:
    world.used = 20
    world.run(5.0)
    assert world.policy.lend_pages == 60
    world.used = 19
    world.run(8.0)
    assert world.policy.lend_pages == 60
    world.used = 18
    world.run(10.0)
    assert world.policy.lend_pages == 62


def test_serving_claims_are_met_at_once(world: World) -> None:
    world.run(5.0)
    world.obeys = False
    # Its demand grew by 50 at once, and the hysteresis is 2: so much must be left from now on.
    (cut,) = world.step(5.1, reserved_pages=20, needed_pages=50)
    assert cut == SetLend(pages=48, deadline_s=pytest.approx(5.2), reason="serving claims pages")


@pytest.mark.parametrize(
    ("serving", "reason"),
    [
        ({"phase": Phase.STARTING}, "serving is starting"),
        ({"phase": Phase.OFF}, "serving does not share"),
        ({"alive": False}, "serving is not there"),
    ],
)
def test_serving_that_starts_is_off_or_dead_gets_everything_back(
    world: World, serving: dict[str, object], reason: str
) -> None:
    world.run(5.0)
    world.obeys = False
    assert world.step(5.1, **serving) == [SetLend(pages=0, deadline_s=pytest.approx(5.2), reason=reason)]


def test_serving_that_falls_silent_gets_everything_back(world: World) -> None:
    world.run(5.0)
    assert world.policy.handle(Tick(at_s=7.0)) == []
    assert world.policy.handle(Tick(at_s=7.01)) == [
        SetLend(pages=0, deadline_s=pytest.approx(7.11), reason="serving is silent")
    ]


def test_nothing_is_lent_to_an_engine_that_is_not_ready(world: World) -> None:
    world.run(5.0)
    actions = world.policy.handle(
        RolloutReported(at_s=5.0, alive=True, phase=Phase.STARTING, reserved_pages=0)
    )
    assert actions == [SetLend(pages=0, deadline_s=None, reason="rollout engine is not ready")]


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_modes_off_and_observe_lend_nothing_but_observe_still_measures(world: World, mode: Mode) -> None:
    world.run(5.0)
    (cut,) = world.policy.handle(ModeSet(at_s=5.0, mode=mode))
    assert cut == SetLend(pages=0, deadline_s=pytest.approx(5.1), reason=f"mode is {mode.name.lower()}")
    assert isinstance(world.policy, LendingPolicy)
    assert world.policy.target_pages == 80


def test_the_floor_and_the_operators_limit_are_never_lent(world: World) -> None:
    world.run(5.0)
    (cut,) = world.policy.handle(ModeSet(at_s=5.0, mode=Mode.ON, floor_pages=35))
    assert cut == SetLend(pages=45, deadline_s=pytest.approx(5.1), reason="headroom and floor leave no more")
    (cut,) = world.policy.handle(ModeSet(at_s=5.0, mode=Mode.ON, max_lend_pages=7))
    assert cut == SetLend(pages=7, deadline_s=pytest.approx(5.1), reason="the operator's limit")
    assert world.policy.lend_pages == 7


def test_no_more_is_lent_than_rollouts_want_and_a_smaller_wish_is_no_cut(world: World) -> None:
    policy = world.policy

    def want(at_s: float, pages: int, held: int) -> list[Action]:
        report = RolloutReported(
            at_s=at_s, alive=True, phase=Phase.READY, reserved_pages=held, wanted_pages=pages
        )
        return [*policy.handle(report), *policy.handle(calm(at_s))]

    assert want(0.0, 10, 0) == [SetLend(pages=10, deadline_s=None, reason="serving left room")]
    assert want(1.0, 35, 10) == [SetLend(pages=35, deadline_s=None, reason="serving left room")]
    assert want(1.5, 34, 35) == []  # a wish a page smaller is noise
    policy.handle(
        RolloutReported(at_s=1.5, alive=True, phase=Phase.READY, reserved_pages=20, wanted_pages=10)
    )
    assert policy.lend_pages == 20  # not below what is held
    assert policy.num_cuts == 0
    policy.check()


def test_a_wish_for_less_than_a_chunk_leaves_a_whole_one_on_loan() -> None:
    """Of a loan of 8 pages production, whose chunks have 9, lends nothing: it took back what was held, and gave it again, three times a second."""
    policy = LendingPolicy(PARAMS)
    policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    seen: list[int] = []
    held, at_s = 0, 0.0
    for _ in range(60):
        at_s += 0.05
        out = policy.lend_pages // 9 * 9
        held = min(8, out)
        # It says what it could use once it has something to do it with.
        policy.handle(
            RolloutReported(at_s=at_s, alive=True, phase=Phase.READY, reserved_pages=held, wanted_pages=held)
        )
        policy.handle(dataclasses.replace(calm(at_s), reserved_pages=TOTAL - out, chunk_pages=9))
        seen.append(held)
    assert seen[-20:] == [8] * 20
    assert policy.num_cuts == 0


def calm(at_s: float) -> ServingReported:
    return ServingReported(
        at_s=at_s, alive=True, phase=Phase.READY, total_pages=TOTAL, reserved_pages=TOTAL, used_pages=0
    )


def test_a_device_without_serving_lends_everything_and_takes_it_back_when_off() -> None:
    policy = LendingPolicy(PARAMS)
    policy.handle(RolloutReported(at_s=0.0, alive=True, phase=Phase.READY, reserved_pages=0))
    on = ModeSet(at_s=0.0, mode=Mode.ON, has_serving=False)
    assert policy.handle(on) == [
        SetLend(pages=ALL_PAGES, deadline_s=None, reason="no serving on this device")
    ]
    policy.handle(RolloutReported(at_s=1.0, alive=True, phase=Phase.READY, reserved_pages=500))
    off = ModeSet(at_s=2.0, mode=Mode.OFF, has_serving=False)
    assert policy.handle(off) == [SetLend(pages=0, deadline_s=pytest.approx(2.1), reason="mode is off")]
    assert isinstance(policy.handle(Tick(at_s=2.2))[0], KillRollout)


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (Tick(at_s=4.0), "at_s"),
        (Tick(at_s=math.nan), "at_s"),
        (RolloutReported(at_s=6.0, alive=True, phase=Phase.READY, reserved_pages=-1), "reserved_pages"),
        (ModeSet(at_s=6.0, mode=Mode.ON, floor_pages=-1), "floor_pages"),
        (
            ServingReported(at_s=6.0, alive=True, phase=2, total_pages=-5, reserved_pages=0, used_pages=0),
            "total_pages",
        ),
    ],
)
def test_bad_events_raise_and_leave_the_books_alone(world: World, event: Tick, field: str) -> None:
    world.run(5.0)
    with pytest.raises(PolicyError, match=field):
        world.policy.handle(event)
    assert world.policy.lend_pages == 80
    assert world.policy.handle(Tick(at_s=5.0)) == []


@pytest.mark.parametrize("make", [LendingPolicy, PaperLending, StaticLending])
@pytest.mark.parametrize("seed", range(25))
def test_invariants_hold_on_any_traffic(make: type[Lending], seed: int) -> None:
    """Random reports, modes, deaths and disobedience; every invariant after every event."""
    rng = random.Random(seed)
    policy = make(dataclasses.replace(PARAMS, cool_down_s=0.5))
    at_s, held, total, unanswered_s, queried, lost = 0.0, 0, TOTAL, None, 0, 0
    for _ in range(600):
        at_s += rng.choice([0.0, rng.expovariate(20.0), rng.expovariate(2.0)])
        match rng.randrange(20):
            case 0:
                event: object = ModeSet(at_s=at_s, mode=rng.randrange(3), floor_pages=rng.randint(0, 120))
            case 1 | 2 | 3:
                event = ModeSet(at_s=at_s, mode=Mode.ON, floor_pages=rng.choice([0, 0, 30]))
            case 4:
                event = RlStepStarted(at_s=at_s)
            case 5 | 6:
                free = rng.choice([None, 1 << 30, 1 << 30, rng.randint(0, 1 << 28)])
                event = Tick(at_s=at_s, device_free_bytes=free, device_reserve_bytes=1 << 27)
            case 7 | 8 | 9 | 10 | 11:
                if rng.random() < 0.7:
                    held = min(held, policy.lend_pages) if rng.random() < 0.8 else policy.lend_pages
                event = RolloutReported(
                    at_s=at_s,
                    alive=rng.random() < 0.95,
                    phase=rng.choice([2, 2, 2, 2, 1]),
                    reserved_pages=held,
                    wanted_pages=rng.choice([0, 0, rng.randint(0, 150)]),
                )
            case _:
                total = total if rng.random() < 0.98 else rng.choice([0, 1, 7, 100, 1000])
                prompt = rng.choice([0, 500, 20_000])
                queried, lost = (queried + prompt, lost + rng.randint(0, prompt // 20))
                if rng.random() < 0.01:
                    queried = lost = 0
                event = ServingReported(
                    at_s=at_s,
                    alive=rng.random() < 0.97,
                    phase=rng.choice([2] * 30 + [0, 1, 3]),
                    total_pages=total,
                    reserved_pages=rng.randint(0, total),
                    used_pages=rng.randint(0, total) if rng.random() < 0.5 else total // 10,
                    needed_pages=rng.choice([0, 0, 0, rng.randint(0, 100)]),
                    pressure_seq=rng.choice([0, 1]),
                    queried_tokens=queried,
                    lost_tokens=lost,
                    cold_pages=rng.randint(0, 2 * total),
                )
        actions = policy.handle(event)  # type: ignore[arg-type]
        policy.check()
        assert policy.stands_because
        for action in actions:
            if isinstance(action, SetLend):
                assert action.pages == policy.lend_pages
                assert (action.deadline_s is not None) == (policy.held_pages > action.pages)
        if policy.held_pages <= policy.lend_pages:
            unanswered_s = None
        elif unanswered_s is None:
            unanswered_s = at_s
        elif at_s > unanswered_s + PARAMS.reclaim_deadline_s + PARAMS.backstop_s:
            # Holding too much for longer than that without any kill is impossible.
            unanswered_s = at_s
            more = policy.handle(Tick(at_s=at_s + PARAMS.backstop_s + 0.01))
            at_s += PARAMS.backstop_s + 0.01
            assert any(isinstance(action, KillRollout) for action in [*actions, *more])
