"""Which relay is asked, of several: events in, numbers out."""

from __future__ import annotations

from rose.weights.addresses import LAST_AWAY_S, Preference


def test_the_first_that_has_not_failed_is_asked() -> None:
    relays = Preference(["near", "far", "root"])
    assert relays.current(0.0) == 0
    relays.failed(0, 0.0)
    assert relays.current(1.0) == 1
    relays.failed(1, 1.0)
    assert relays.current(1.5) == 2


def test_the_preferred_one_is_tried_again_and_then_less_often() -> None:
    relays = Preference(["near", "far"])
    waits = []
    now_s = 0.0
    for _ in range(8):
        relays.failed(0, now_s)
        began_s = now_s
        while relays.current(now_s) != 0:
            now_s += 0.5
        waits.append(now_s - began_s)
    assert waits == [2, 4, 8, 16, 32, LAST_AWAY_S, LAST_AWAY_S, LAST_AWAY_S]
    relays.answered(0)
    relays.failed(0, now_s)
    assert relays.current(now_s + 2.0) == 0


def test_where_all_have_failed_the_one_of_longest_ago_is_asked() -> None:
    relays = Preference(["near", "far"])
    relays.failed(0, 0.0)
    relays.failed(1, 1.0)
    assert relays.current(1.5) == 0


def test_of_many_who_hear_it_at_once_one_counts() -> None:
    relays = Preference(["near", "far"])
    for _ in range(1000):
        relays.failed(0, 0.0)
    assert relays.current(2.0) == 0
