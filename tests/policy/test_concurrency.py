"""The limit of one worker: what lowers it, what raises it, and how fast."""

from __future__ import annotations

from typing import Any

import pytest

from rose.policy.concurrency import Concurrency


def limiter(limit: float = 20.0, cap: int = 40) -> Concurrency:
    return Concurrency(cap=cap, limit=limit)


def hear(item: Concurrency, at_s: float = 100.0, **fields: Any) -> int:
    beat = {
        "harvested": True,
        "kv_use": 0.7,
        "inflight": 20,
        "running": 20,
        "waiting": 0,
        "num_preemptions": 0,
    }
    item.heard(at_s=at_s, **{**beat, **fields})
    return item.slots


def test_without_a_signal_the_cap_stands() -> None:
    item = Concurrency.at_cap(16)
    for second in range(100):
        hear(item, float(second), kv_use=0.7)
    assert item.slots == 16


@pytest.mark.parametrize(("harvested", "grown"), [(True, 22), (False, 22)])
def test_room_and_a_binding_limit_grow_it_by_a_tenth_per_five_seconds(harvested: bool, grown: int) -> None:
    item = limiter()
    assert hear(item, 100.0, kv_use=0.5, harvested=harvested) == grown
    assert hear(item, 104.9, kv_use=0.5, inflight=22, harvested=harvested) == grown
    assert hear(item, 105.0, kv_use=0.5, inflight=22, harvested=harvested) == 24


def test_a_dedicated_worker_grows_by_a_quarter_per_turnover() -> None:
    item = limiter()
    hear(item, 100.0, kv_use=0.5)
    for _ in range(22):
        item.ended()
    assert hear(item, 100.5, kv_use=0.5, inflight=22, harvested=False) == 27


def test_a_limit_that_does_not_bind_or_a_filling_cache_does_not_grow() -> None:
    assert hear(limiter(), kv_use=0.5, inflight=19) == 20
    assert hear(limiter(), kv_use=0.85) == 20


def test_a_full_cache_trims_to_what_fills_seven_tenths() -> None:
    assert hear(limiter(), kv_use=0.95, inflight=20) == 14  # 20 * 0.7 / 0.95 = 14.7


def test_preemptions_cut_harder_the_longer_they_last() -> None:
    item = limiter()
    assert hear(item, num_preemptions=1) == 16
    assert hear(item, num_preemptions=2) == 10  # x 0.64
    assert hear(item, num_preemptions=3) == 5  # x 0.512
    assert hear(item, num_preemptions=9) == 2  # x 0.5, the hardest
    assert hear(item, num_preemptions=9) == 2


def test_a_queue_in_the_engine_cuts_after_six_reports() -> None:
    item = limiter()
    assert [hear(item, waiting=11) for _ in range(7)] == [20, 20, 20, 20, 20, 18, 18]


def test_a_reclaim_halves_it_and_one_turn_always_may_run() -> None:
    item = limiter(limit=3.0)
    item.reclaimed()
    assert item.slots == 1
    item.reclaimed()
    assert item.slots == 1
