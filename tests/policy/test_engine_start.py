"""What a rollout engine beside production is started with, and how soon again."""

from __future__ import annotations

import pytest

from rose.errors import ConfigError
from rose.policy.engine_start import Restarts, is_outgrown, kv_pages, memory_share
from rose.policy.lending_events import ALL_PAGES

GIB = 1 << 30


def test_of_an_elastic_device_all_pages_could_be_lent_whatever_the_limit_is_now() -> None:
    assert kv_pages(total_pages=100, compute_only=False, max_lend_pages=7) == 100


@pytest.mark.parametrize(("limit", "pages"), [(7, 7), (0, 0), (ALL_PAGES, None)])
def test_beside_production_that_keeps_its_memory_only_the_operator_knows(
    limit: int, pages: int | None
) -> None:
    assert kv_pages(total_pages=100, compute_only=True, max_lend_pages=limit) == pages


def test_the_memory_share_holds_three_times_the_weights_and_a_step() -> None:
    share = memory_share(weights_bytes=2 * GIB, device_bytes=80 * GIB, free_bytes=20 * GIB)
    assert share == 0.10


@pytest.mark.parametrize(
    ("weights", "message"), [(8 * GIB, "production leaves 20.0 GiB"), (None, "cannot be seen")]
)
def test_a_policy_that_does_not_fit_or_of_unknown_size_is_refused_by_name(
    weights: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.model.*{message}.*--gpu-memory-utilization"):
        memory_share(weights_bytes=weights, device_bytes=80 * GIB, free_bytes=20 * GIB)


def test_the_pause_doubles_from_what_a_failed_start_took_up_to_the_window() -> None:
    restarts = Restarts(10, 600.0, 1.0)
    now_s, pauses = 0.0, []
    for _ in range(7):
        restarts.started(now_s)
        now_s += 24.0  # that long it took to find out
        restarts.ended(now_s)
        pauses.append(restarts.next_start_s - now_s)
        now_s = restarts.next_start_s
    assert pauses[:4] == [24.0, 48.0, 96.0, 192.0]
    assert max(pauses) <= 600.0


def test_an_engine_that_had_come_up_is_back_soon_and_less_soon_each_time() -> None:
    restarts = Restarts(10, 600.0, 1.0)
    pauses = []
    for at_s in (0.0, 50.0, 100.0):
        restarts.started(at_s)
        restarts.came_up()
        restarts.ended(at_s + 40.0)
        pauses.append(restarts.next_start_s - at_s - 40.0)
    assert pauses == [1.0, 2.0, 4.0]


def test_an_end_long_ago_counts_no_more() -> None:
    restarts = Restarts(10, 600.0, 1.0)
    restarts.started(0.0)
    restarts.ended(30.0)
    restarts.started(1000.0)
    restarts.came_up()
    restarts.ended(5000.0)
    assert restarts.next_start_s == 5001.0


def test_so_many_starts_within_the_window_and_no_more_until_it_is_over_or_forgiven() -> None:
    restarts = Restarts(2, 600.0, 1.0)
    for at_s in (0.0, 10.0, 20.0):
        assert not restarts.exhausted(at_s)
        restarts.started(at_s)
    assert restarts.exhausted(21.0)
    assert not restarts.exhausted(601.0)
    restarts.forgive()
    assert not restarts.exhausted(21.0)


@pytest.mark.parametrize(
    ("pages", "made_for", "outgrown"),
    [(36, 7, True), (105, 100, False), (106, 100, True), (7, 36, False), (1, 0, True)],
)
def test_a_few_pages_more_are_not_worth_a_start(pages: int, made_for: int, outgrown: bool) -> None:
    assert is_outgrown(pages=pages, made_for=made_for) is outgrown
