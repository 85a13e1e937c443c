"""What counts as memory that did not come back over on/off cycles; the engines are started by benchmarks/cycles.py alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cycles import Cycle, growth_bytes, is_met, summarise
from tests.pair.memory import TOTAL_PAGES

MIB = 1 << 20


def life(sizes_mib: Sequence[int], *, restarted: bool = False) -> list[Cycle]:
    cycles = [
        Cycle(number=0, resident_bytes_after=mib * MIB, kv_pages_after=TOTAL_PAGES) for mib in sizes_mib
    ]
    return [*cycles, Cycle(number=0, restarted="killed", kv_pages_after=TOTAL_PAGES)] if restarted else cycles


def summary(done: list[Cycle], stock: list[Cycle]) -> dict[str, Any]:
    memory = SimpleNamespace(worst_pages=TOTAL_PAGES, num_samples=1)
    return summarise(done, stock, SimpleNamespace(memory=memory), wrong=0)  # type: ignore[arg-type]


def test_growth_is_that_of_each_life_of_production_after_its_first_cycle() -> None:
    first = life([900, 1000, 1000, 1000, 1000, 1000, 1010, 1010, 1010, 1010, 1010], restarted=True)
    second = life([2000] * 9 + [2003] * 5)
    too_short = life([10, 500])
    assert growth_bytes([*first, *second]) == [10 * MIB, 3 * MIB]
    assert growth_bytes([*second, Cycle(number=0, restarted="ended"), *too_short]) == [3 * MIB]


@pytest.mark.parametrize(
    ("ours", "stock", "met"),
    [(0, 0, True), (16, 0, True), (17, 0, False), (60, 50, True), (70, 50, False), (17, -9, False)],
)
def test_memory_that_stock_vllm_keeps_as_well_is_not_ours(ours: int, stock: int, met: bool) -> None:
    def grown(mib: int) -> list[Cycle]:
        return life([100] * 6 + [100 + mib] * 5)

    assert is_met(summary(grown(ours), grown(stock))) is met


def test_too_few_cycles_do_not_say_that_memory_comes_back() -> None:
    assert not is_met(summary(life([100] * 9), life([100] * 9)))


@pytest.mark.parametrize(
    "change",
    [
        {"errors": ["status 500"]},
        {"different": 1},
        {"logprob_diff": 0.01},
        {"kv_pages_after": TOTAL_PAGES - 1.0},
    ],
)
def test_one_cycle_that_broke_a_limit_is_enough(change: dict[str, Any]) -> None:
    done = life([100] * 11)
    done[3] = Cycle(number=3, **{"resident_bytes_after": 100 * MIB, "kv_pages_after": TOTAL_PAGES, **change})
    assert not is_met(summary(done, life([100] * 11)))
