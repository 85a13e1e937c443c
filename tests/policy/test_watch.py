"""What mode observe reports, and when harvesting ends by itself."""

from __future__ import annotations

import pytest

from rose.errors import ConfigError
from rose.policy.watch import Harvestable, SloGuard, StepFloor


def test_harvestable_pages_are_weighted_by_time() -> None:
    seen = Harvestable()
    assert seen.report() is None
    seen.see(0.0, 10, 0.0)
    seen.see(1.0, 40, 0.25)  # 10 pages for 1 s
    seen.see(4.0, 0, 1.0)  # 40 pages for 3 s
    report = seen.report()
    assert report is not None
    assert report.mean_pages == pytest.approx((10 * 1 + 40 * 3) / 4)
    assert (report.least_pages, report.most_pages, report.seconds) == (0, 40, 4.0)
    assert report.busy_fraction == pytest.approx(0.25)


@pytest.mark.parametrize("step_s", [0.06, 2.0])
def test_steps_longer_than_the_time_between_two_looks_count_whole(step_s: float) -> None:
    seen = Harvestable()
    for look in range(1, 1001):
        at_s = look * 0.05
        seen.see(at_s, 10, 0.8 * step_s * (at_s // step_s))  # a sum grows when a step ends
    report = seen.report()
    assert report is not None
    assert report.busy_fraction == pytest.approx(0.8, abs=0.05)


def test_what_was_computed_while_nobody_looked_is_not_counted_later() -> None:
    seen = Harvestable()
    seen.see(0.0, 10, 0.0)
    seen.see(0.1, 10, 30.0)
    seen.see(60.0, 10, 60.0)  # nobody looked
    seen.see(61.0, 10, 60.0)
    report = seen.report()
    assert report is not None
    assert report.busy_fraction == pytest.approx(0.1 / 1.1)


def test_silence_and_a_restart_of_production_are_not_counted() -> None:
    seen = Harvestable()
    seen.see(0.0, 10, 5.0)
    seen.see(60.0, 10, 6.0)  # nobody looked
    seen.see(61.0, 10, 0.1)  # production is a new process
    assert seen.report() is None
    seen.see(62.0, 10, 0.6)
    report = seen.report()
    assert report is not None
    assert report.seconds == pytest.approx(1.0)


def test_the_guard_trips_at_the_nth_breach_in_the_window_while_something_is_lent() -> None:
    guard = SloGuard(3, 60.0)
    assert not guard.see(0.0, 100, lent=True)  # what was before us is not ours
    assert not guard.see(1.0, 102, lent=True)
    assert not guard.see(2.0, 110, lent=False)  # production's own
    assert guard.see(3.0, 111, lent=True)
    guard.forgive()
    assert not guard.see(4.0, 111, lent=True)


def test_breaches_grow_old_and_a_restarted_production_counts_from_zero() -> None:
    guard = SloGuard(2, 10.0)
    guard.see(0.0, 0, lent=True)
    assert not guard.see(1.0, 1, lent=True)
    assert not guard.see(12.0, 2, lent=True)
    assert not guard.see(13.0, 0, lent=True)
    assert guard.see(14.0, 1, lent=True)


def test_zero_means_never() -> None:
    guard = SloGuard(0, 1.0)
    guard.see(0.0, 0, lent=True)
    assert not guard.see(0.1, 1000, lent=True)
    assert guard.total == 1000


@pytest.mark.parametrize(("most", "window_s"), [(-1, 1.0), (1, 0.0), (1, float("inf")), (1, float("nan"))])
def test_impossible_limits_are_refused(most: int, window_s: float) -> None:
    with pytest.raises(ConfigError):
        SloGuard(most, window_s)


def test_the_floor_is_what_the_shortest_steps_take_and_needs_enough_of_them() -> None:
    floor = StepFloor()
    for step in range(63):
        floor.see(step, 0.020, running=1)
    assert floor.floor_s is None
    floor.see(63, 0.001, running=0)  # nothing ran: no step of anybody
    floor.see(63, 0.001, running=1)  # and the same step again
    assert floor.floor_s is None
    for step in range(64, 264):
        floor.see(step, 0.030, running=1)
    assert floor.floor_s == 0.020
