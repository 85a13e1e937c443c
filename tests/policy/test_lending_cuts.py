"""LendingPolicy: what it takes back, how soon, and when it kills."""

from __future__ import annotations

import dataclasses

import pytest

from rose.decisions.freeze import freeze, thaw
from rose.policy.lending_events import (
    Action,
    KillRollout,
    Mode,
    ModeSet,
    Phase,
    RolloutReported,
    SetLend,
    Tick,
)
from rose.policy.lending_policy import LendingPolicy
from tests.policy.lending_world import PARAMS, World


@pytest.fixture
def filling(world: World) -> World:
    """It has lent 80 of 100, and use has grown by 2 a second, to 11: one more page than the watermark leaves."""
    world.run(5.0)
    world.obeys = False
    for world.used in range(0, 12, 2):
        world.step(world.at_s + 1.0)
    world.used = 11
    world.actions.clear()
    return world


def test_a_cut_ahead_of_need_is_not_urgent_and_kills_nobody_while_what_is_free_lasts(filling: World) -> None:
    policy = filling.policy
    (cut,) = filling.step(filling.at_s + 1.0)
    assert isinstance(cut, SetLend)
    assert (cut.pages, cut.deadline_s) == (69, None)
    filling.run(filling.at_s + 5 * policy.worst_reclaim_s, 0.05)
    assert len(filling.actions) == 1
    assert not policy.is_urgent
    assert policy.num_cuts == 1


def test_a_cut_ahead_of_need_is_due_once_a_burst_could_outrun_it(filling: World) -> None:
    policy = filling.policy
    filling.step(filling.at_s + 1.0)
    filling.used = 18  # it has grown by 7 at once, and 2 are left
    (due,) = filling.step(filling.at_s + 1.0)
    assert due == SetLend(pages=69, deadline_s=pytest.approx(filling.at_s + 0.1), reason=policy.reason)
    assert not policy.is_urgent  # a gap of production's may do
    filling.step(filling.at_s + 0.05)
    assert policy.is_urgent
    (kill,) = filling.step(filling.at_s + 0.06)
    assert isinstance(kill, KillRollout)


def test_a_cut_that_was_not_due_says_nothing_of_how_long_reclaims_take(filling: World) -> None:
    policy = filling.policy
    for _ in range(30):
        filling.obeys = False
        for filling.used in (2, 4, 6, 8, 10, 11):
            filling.step(filling.at_s + 1.0)
        assert filling.held > policy.lend_pages
        filling.run(filling.at_s + 1.0, 0.05)
        filling.obeys = True
        filling.used = 0
        filling.run(filling.at_s + 80.0)
    assert policy.reclaim_p99_s == pytest.approx(0.65)


def test_a_cut_that_production_waits_for_is_urgent_at_once(world: World) -> None:
    world.run(5.0)
    world.obeys = False
    world.step(5.1, needed_pages=30)
    assert world.policy.is_urgent
    world.held = world.policy.lend_pages
    world.step(5.11, needed_pages=30)
    assert not world.policy.is_urgent


def test_what_an_operator_takes_back_is_urgent_while_it_is_held(world: World) -> None:
    world.run(5.0)
    world.policy.handle(ModeSet(at_s=5.1, mode=Mode.OFF))
    assert world.policy.is_urgent
    world.step(5.2)
    world.step(5.3)
    assert not world.policy.is_urgent


def test_growth_waits_for_the_cool_down_after_a_cut(world: World) -> None:
    world.run(5.0)
    world.used = 11
    world.step(5.2)
    assert world.policy.lend_pages == 69
    world.used = 0
    world.run(10.1, 0.1)
    assert world.policy.lend_pages == 69
    world.run(10.5, 0.1)
    assert world.policy.lend_pages > 69


def test_the_rate_of_cuts_is_bounded_whatever_the_traffic(world: World) -> None:
    """A sawtooth that is high every 7 s cuts each time the loan has grown back; the fourth time it has not."""
    cuts = list[float]()
    for number in range(6000):
        at_s = number * 0.05
        world.used = 60 if at_s % 7.0 > 6.0 else 0
        for action in world.step(at_s):
            if isinstance(action, SetLend) and action.deadline_s is not None:
                cuts.append(at_s)
    # A cut that no growth preceded is only possible while the first burst of all is being learned.
    assert len(cuts) >= 1
    for start_s in cuts:
        assert sum(start_s <= at_s < start_s + PARAMS.cut_window_s for at_s in cuts) <= PARAMS.max_cuts + 2


def test_after_its_share_of_cuts_a_loan_stays_frozen_for_the_window() -> None:
    params = dataclasses.replace(PARAMS, growth_window_s=1.0)  # forgets bursts: the worst case for the rate
    world = World(LendingPolicy(params))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    cuts = list[float]()
    for number in range(12000):
        at_s = number * 0.05
        world.used = 60 if at_s % 9.0 > 8.0 else 0
        cuts += [at_s for a in world.step(at_s) if isinstance(a, SetLend) and a.deadline_s is not None]
    assert len(cuts) > 10
    for first, fourth in zip(cuts, cuts[params.max_cuts :], strict=False):
        assert fourth - first >= params.cut_window_s - 1e-6


def test_what_the_latest_cut_left_is_lent_again_after_off_and_on_whatever_the_rate_of_cuts() -> None:
    params = dataclasses.replace(PARAMS, growth_window_s=1.0)
    world = World(LendingPolicy(params))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    while world.policy.num_cuts < params.max_cuts:
        world.used = 40 if world.at_s % 9.0 > 8.0 else 0
        world.step(world.at_s + 0.05)
    left = world.policy.lend_pages
    assert 0 < left < 80
    world.used = 0
    world.policy.handle(ModeSet(at_s=world.at_s, mode=Mode.OFF))
    world.step(world.at_s + 0.05)
    assert world.policy.lend_pages == 0
    world.policy.handle(ModeSet(at_s=world.at_s, mode=Mode.ON))
    world.run(world.at_s + params.cool_down_s + 5.0)
    assert world.policy.lend_pages == left
    assert world.at_s < params.cut_window_s


def test_pressure_that_serving_relieved_itself_counts_as_a_cut(world: World) -> None:
    world.step(0.0)
    world.step(0.5, pressure_seq=1)
    world.run(5.0, 0.5)
    assert world.policy.lend_pages == 30
    world.run(6.5, 0.5)
    assert world.policy.lend_pages == 60


def test_an_engine_that_holds_more_than_its_loan_past_the_deadline_is_killed_until_it_is_gone(
    world: World,
) -> None:
    world.run(5.0)
    world.obeys, world.used = False, 30
    world.step(5.1)
    assert not any(isinstance(action, KillRollout) for action in world.step(5.19))
    (kill,) = world.step(5.25)
    assert isinstance(kill, KillRollout)
    assert kill.reason.startswith("80 pages held, 38 allowed")
    assert world.step(5.3) == []  # it is on its way
    assert isinstance(world.step(5.8)[0], KillRollout)
    world.policy.handle(RolloutReported(at_s=5.9, alive=False, phase=Phase.ABSENT, reserved_pages=0))
    world.policy.check()
    assert world.policy.lend_pages == 0
    assert world.policy.handle(Tick(at_s=6.5)) == []


def test_obeying_in_time_prevents_the_kill(world: World) -> None:
    world.run(5.0)
    world.used = 30
    world.step(5.1)
    world.obeys = False
    assert [a for a in world.step(7.0) if isinstance(a, KillRollout)] == []


def test_further_cuts_do_not_postpone_the_first_deadline(world: World) -> None:
    world.run(5.0)
    world.obeys = False
    kills = list[float]()
    for number in range(12):
        world.used = 11 + 5 * number
        at_s = 5.1 + 0.02 * number
        kills += [at_s for a in world.step(at_s) if isinstance(a, KillRollout)]
    assert kills[0] == pytest.approx(5.22)


def test_an_engine_found_above_its_loan_gets_one_deadline(world: World) -> None:
    """The agent was restarted and lends nothing yet."""
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.OFF))
    report = RolloutReported(at_s=1.0, alive=True, phase=Phase.READY, reserved_pages=10)
    assert world.policy.handle(report) == []
    assert world.policy.handle(Tick(at_s=1.1)) == []
    (kill,) = world.policy.handle(Tick(at_s=1.11))
    assert isinstance(kill, KillRollout)


def test_growth_waits_until_a_cut_is_answered(world: World) -> None:
    params = dataclasses.replace(PARAMS, cool_down_s=0.01, reclaim_deadline_s=100.0)
    world = World(LendingPolicy(params))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    world.run(5.0)
    world.used = 30
    world.obeys = False
    world.step(5.1)
    lent = world.policy.lend_pages
    world.used = 0
    world.run(20.0)
    assert world.policy.lend_pages == lent
    world.obeys = True
    world.held = lent
    world.run(40.0)
    assert world.policy.lend_pages > lent


def test_the_p99_of_reclaims_is_the_worst_case_until_enough_were_seen() -> None:
    policy = LendingPolicy(dataclasses.replace(PARAMS, cool_down_s=0.001, max_cuts=100, cut_window_s=0.001))
    world = World(policy)
    policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    at_s = 0.0
    for number in range(25):
        assert policy.reclaim_p99_s == pytest.approx(0.65 if number < 5 else 0.07 if number < 20 else 0.06)
        for pause_s, used in ((70.0, 0), (2.0, 0), (2.0, 0), (2.0, 11)):
            at_s += pause_s
            world.used = used
            world.obeys = used == 0
            world.step(at_s)
        assert policy.num_cuts == number + 1
        policy.handle(RolloutReported(at_s=at_s + 0.01, alive=True, phase=Phase.READY, reserved_pages=0))
        at_s += 0.01
        world.obeys = True


def test_a_kill_counts_as_a_worst_case_reclaim_however_fast_it_went(world: World) -> None:
    policy = world.policy

    def held(at_s: float, pages: int, alive: bool = True) -> list[Action]:
        return policy.handle(RolloutReported(at_s=at_s, alive=alive, phase=Phase.READY, reserved_pages=pages))

    policy.handle(ModeSet(at_s=0.0, mode=Mode.OFF))
    for number in range(30):  # found above its loan, gives it back within 10 ms
        held(1.0 + number, 5)
        held(1.01 + number, 0)
    assert policy.reclaim_p99_s == pytest.approx(0.06)
    held(40.0, 5)
    (kill,) = policy.handle(Tick(at_s=40.11))
    assert isinstance(kill, KillRollout)
    held(40.12, 0, alive=False)
    assert policy.reclaim_p99_s == pytest.approx(0.65)


def test_a_restart_of_serving_is_no_burst(world: World) -> None:
    policy = world.policy
    assert isinstance(policy, LendingPolicy)
    world.step(0.0)
    world.step(0.1, phase=Phase.STARTING)
    world.used = 50
    world.step(0.2)
    assert policy.need_pages == 0


def test_what_we_ask_for_and_what_serving_reports_within_a_deadline_is_one_cut() -> None:
    world = World(LendingPolicy(dataclasses.replace(PARAMS, max_cuts=2)))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    world.run(5.0)
    world.used = 11
    world.step(5.1)
    lent = world.policy.lend_pages
    world.step(5.15, pressure_seq=1)
    world.used = 0
    for number in range(16):  # with two cuts it would be frozen for a minute
        world.step(5.5 + 0.5 * number, pressure_seq=1)
    assert world.policy.lend_pages > lent


def test_many_unanswered_cuts_keep_the_first_deadline_and_a_short_list() -> None:
    params = dataclasses.replace(
        PARAMS, reclaim_deadline_s=50.0, growth_window_s=0.01, hysteresis_fraction=0.001
    )
    world = World(LendingPolicy(params))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    for second in range(10):
        world.step(float(second), total_pages=10_000)
    world.obeys = False
    for number in range(300):  # most take more than the hysteresis
        world.used = 10 * number
        world.step(10.0 + number / 10, total_pages=10_000)
    assert world.policy.num_cuts > 64
    # The first was due when nearly nothing was left free, after 29 s; the last was asked for after 40.
    actions = world.step(79.5, total_pages=10_000)
    assert any(isinstance(action, KillRollout) for action in actions)


def test_the_books_of_an_older_decision_log_go_on(filling: World) -> None:
    """They named the moment that a cut was asked for, from which its deadline ran, and had no cut that was not due."""
    filling.used = 18
    filling.step(filling.at_s + 1.0)
    policy = filling.policy
    (promise,) = policy._promises
    assert promise.due_s is not None
    older = []
    for node in freeze(policy):
        if node[:2] == ["object", "lending_policy.LendingPolicy"]:
            pairs = [pair for pair in zip(node[2::2], node[3::2], strict=True) if pair[0] != "_told"]
            node = ["object", "lending.LendingPolicy", *(part for pair in pairs for part in pair)]
        elif node[:2] == ["object", "lending._Promise"]:
            node = ["asked_s" if part == "due_s" else part for part in node]
        older.append(node)
    filling.policy = thaw(older)
    assert isinstance(filling.policy, LendingPolicy)
    (kill,) = filling.step(filling.at_s + 0.11)
    assert isinstance(kill, KillRollout)
