"""The fleet's switch: who is held, stages of a release, and what takes one back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.policy.fleet_switch import Done, FleetSwitch, NodeSaid, Released, TakenBack

GROUPS = ("canary", "eu", "us")


def say(
    switch: FleetSwitch, at_s: float, node: str, group: str, *, late: bool = False, measured: bool = True
) -> None:
    switch.said(
        at_s, NodeSaid(node=node, group=group, late="P99 is too long" if late else "", measured=measured)
    )


def held(switch: FleetSwitch) -> list[str]:
    return [group for group in GROUPS if switch.is_held(group)]


def test_off_holds_all_and_groups_that_nobody_has_met() -> None:
    switch = FleetSwitch()
    assert held(switch) == []
    switch.off()
    assert held(switch) == list(GROUPS)
    switch.on(0.0, ("eu",))
    assert held(switch) == ["canary", "us"]


def test_off_holds_the_groups_that_are_named() -> None:
    switch = FleetSwitch()
    switch.off(("eu",))
    assert held(switch) == ["eu"]


def test_the_canary_goes_first_and_the_rest_when_it_was_watched() -> None:
    switch = FleetSwitch()
    switch.off()
    assert switch.on(0.0, canary=("canary",), watch_s=60.0) == [Released(groups=("canary",))]
    assert held(switch) == ["eu", "us"]
    say(switch, 59.0, "n", "canary")
    assert switch.tick(59.0) == []
    assert switch.tick(60.0) == [Released(groups=())]
    assert held(switch) == []
    assert switch.tick(119.0) == []
    assert switch.tick(120.0) == [Done()]
    assert switch.release is None


def test_a_canary_that_nobody_hears_or_measures_is_waited_for() -> None:
    switch = FleetSwitch()
    switch.off()
    switch.on(0.0, canary=("canary",), watch_s=60.0)
    say(switch, 52.0, "n", "canary")
    assert switch.tick(60.0) == []  # silent since
    say(switch, 61.0, "n", "canary", measured=False)
    say(switch, 61.0, "m", "eu")
    assert switch.tick(61.0) == []
    say(switch, 62.0, "n", "canary")
    assert switch.tick(62.0) == [Released(groups=())]


def test_a_group_that_breaks_its_promise_for_long_is_held_again_and_nothing_follows() -> None:
    switch = FleetSwitch()
    switch.off()
    switch.on(0.0, canary=("canary",), watch_s=60.0)
    say(switch, 1.0, "n", "canary")
    say(switch, 10.0, "n", "canary", late=True)
    assert switch.tick(19.0) == []
    (action,) = switch.tick(20.0)
    assert action == TakenBack(groups=("canary",), reason="n in group canary: P99 is too long")
    assert held(switch) == list(GROUPS)
    assert switch.tick(1000.0) == []
    assert switch.taken_back


def test_a_canary_that_falls_silent_is_held_again() -> None:
    switch = FleetSwitch()
    switch.off()
    say(switch, 29.0, "n", "canary")
    switch.on(30.0, canary=("canary",), watch_s=60.0)
    assert switch.tick(39.0) == []
    (action,) = switch.tick(40.0)
    assert action == TakenBack(groups=("canary",), reason="n in group canary: silent for 10 s")
    assert held(switch) == list(GROUPS)


def test_who_was_silent_before_its_stage_began_is_not_waited_for() -> None:
    switch = FleetSwitch()
    switch.off()
    say(switch, 0.0, "dead", "eu")
    say(switch, 0.0, "n", "canary")
    switch.on(1.0, canary=("canary",), watch_s=60.0)
    assert switch.skipped() == ()  # not of this stage
    say(switch, 61.0, "n", "canary")
    assert switch.tick(61.0) == [Released(groups=())]
    assert switch.skipped() == ("dead",)
    assert switch.tick(90.0) == []
    assert switch.tick(121.0) == [Done()]
    assert held(switch) == []  # its order stands
    assert switch.skipped() == ("dead",)
    switch.off()
    assert switch.skipped() == ()


def test_who_comes_back_in_the_middle_of_its_stage_is_judged_again() -> None:
    switch = FleetSwitch()
    switch.off()
    say(switch, 0.0, "n", "eu")
    switch.on(600.0, watch_s=100.0)
    assert switch.skipped() == ("n",)
    say(switch, 620.0, "n", "eu")
    assert switch.skipped() == ()
    assert switch.tick(629.0) == []
    assert [type(one) for one in switch.tick(630.0)] == [TakenBack]


def test_a_moment_is_no_broken_promise() -> None:
    switch = FleetSwitch()
    switch.on(0.0, watch_s=100.0)
    for at_s in range(0, 60, 3):
        say(switch, at_s, "n", "eu", late=at_s % 6 == 0)
        assert switch.tick(at_s) == []


def test_who_was_late_before_it_lent_is_judged_when_it_has_been_in_time() -> None:
    switch = FleetSwitch()
    switch.off()
    say(switch, 0.0, "n", "eu", late=True)
    switch.on(1.0, watch_s=100.0)
    assert switch.tick(50.0) == []
    say(switch, 51.0, "n", "eu")
    say(switch, 52.0, "n", "eu", late=True)
    assert [type(one) for one in switch.tick(62.0)] == [TakenBack]


def test_when_the_rest_is_late_the_canary_stays() -> None:
    switch = FleetSwitch()
    switch.off()
    switch.on(0.0, canary=("canary",), watch_s=10.0)
    say(switch, 9.0, "n", "canary")
    say(switch, 9.0, "m", "eu")
    switch.tick(10.0)
    say(switch, 11.0, "n", "canary", late=True)  # watched to its end: no longer its stage
    say(switch, 11.0, "m", "eu")
    assert switch.tick(20.0) == [Done()]

    switch.off()
    switch.on(30.0, canary=("canary",), watch_s=10.0)
    say(switch, 39.0, "n", "canary")
    say(switch, 39.0, "m", "eu")
    switch.tick(40.0)
    say(switch, 40.0, "m", "eu", late=True)
    assert [type(one) for one in switch.tick(50.0)] == [TakenBack]
    assert held(switch) == ["eu", "us"]


def test_off_in_the_middle_of_a_release_ends_it() -> None:
    switch = FleetSwitch()
    switch.on(0.0, canary=("canary",), watch_s=10.0)
    switch.off(("us",))
    say(switch, 10.0, "n", "canary")
    assert switch.tick(10.0) == []
    assert held(switch) == ["us"]


def test_a_restart_watches_the_stage_anew() -> None:
    switch = FleetSwitch()
    switch.off()
    switch.on(0.0, canary=("canary",), watch_s=60.0)
    after = FleetSwitch()
    after.restore(1000.0, switch.state())
    assert held(after) == ["eu", "us"]
    say(after, 1059.0, "n", "canary")
    assert after.tick(1059.0) == []
    assert after.tick(1060.0) == [Released(groups=())]


orders = st.lists(
    st.one_of(
        st.tuples(st.just("off"), st.lists(st.sampled_from(GROUPS), max_size=2, unique=True)),
        st.tuples(st.just("on"), st.lists(st.sampled_from(GROUPS), max_size=2, unique=True)),
        st.tuples(st.just("tick"), st.integers(1, 40)),
        st.tuples(st.just("late"), st.sampled_from(GROUPS)),
        st.tuples(st.just("well"), st.sampled_from(GROUPS)),
    ),
    max_size=40,
)


@given(orders=orders)
def test_nobody_is_released_but_by_on_and_a_restart_changes_nobody(orders: list[tuple[str, object]]) -> None:
    switch, at_s = FleetSwitch(), 0.0
    for kind, what in orders:
        before = held(switch)
        match kind, what:
            case "off", list():
                switch.off(tuple(what))
                assert set(what or GROUPS) <= set(held(switch))
            case "on", list():
                switch.on(at_s, canary=tuple(what), watch_s=20.0)
            case "tick", int():
                at_s += what
                actions = switch.tick(at_s)
                if not any(isinstance(one, Released) for one in actions):
                    assert set(before) <= set(held(switch))
            case _, str():
                say(switch, at_s, what, what, late=kind == "late")
        copy = FleetSwitch()
        copy.restore(at_s, switch.state())
        assert held(copy) == held(switch)


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_of_our_own_takes_no_release_back_and_watches_nothing(late: bool) -> None:
    switch = FleetSwitch(clock_gap_s=1.0)
    say(switch, 0.0, "n", "eu")
    switch.on(0.0, watch_s=30.0)
    for half in range(1, 41):
        say(switch, half / 2, "n", "eu", late=late and half == 40)
        assert switch.tick(half / 2) == []
    assert switch.tick(32.0) == []  # twelve seconds later
    for half in range(65, 84):
        say(switch, half / 2, "n", "eu")
        assert switch.tick(half / 2) == []
    say(switch, 42.0, "n", "eu")
    assert switch.tick(42.0) == [Done()]
