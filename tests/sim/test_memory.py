"""Memory of a simulated device: the live books decide, nothing is there twice, and nothing is moved without them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.policy.coserving.steps import WATERMARK_FRACTION
from rose.sim.engine import Request
from rose.sim.memory import SharedMemory
from tests.sim.test_device import shared_device

TOTAL = 2563
"""256 chunks of 10 pages, and three that are left over."""


def rounds(memory: SharedMemory, *, lend: int, used: int, waiting: int = 0, up: bool = True) -> None:
    """What a device does at a step boundary; the rollout engine's turns always fit."""
    memory.claim(used_pages=used, waiting_pages=waiting)
    memory.serve(0.0, lend_pages=lend, used_pages=used)
    if up:
        memory.follow(memory.keep_chunks(lend))
    memory.serve(0.0, lend_pages=lend, used_pages=used)
    memory.rest(lend)
    memory.check()


def test_a_loan_is_held_by_the_rollout_engine_and_missed_by_production() -> None:
    memory = SharedMemory(TOTAL)
    rounds(memory, lend=1234, used=100)
    assert (memory.held_pages, memory.rollout_pages) == (1230, 1230)
    assert (memory.usable_pages, memory.reserved_pages) == (TOTAL - 1230, TOTAL - 1230)
    assert memory.is_settled(1234)


def test_only_what_production_does_not_use_is_lent() -> None:
    memory = SharedMemory(TOTAL)
    rounds(memory, lend=2000, used=1000)
    assert memory.held_pages == 1560
    assert not memory.is_settled(2000)
    rounds(memory, lend=2000, used=500)
    assert memory.held_pages == 2000


def test_production_claims_before_anybody_waits_as_the_live_engine_does() -> None:
    """Below its watermark; the simulator used to wait until a request did not fit."""
    device, queue, host = shared_device(gated=False)
    device.arrive(Request("p", 100, 150, 0.0), 0.0)
    queue.run(100.0)

    assert device.memory is not None
    assert host.claims == 1
    assert WATERMARK_FRACTION * 4000 > 4000 - 3600 - 250
    assert device.memory.steps.pressure_seq == 1


def test_a_claim_takes_memory_back_without_the_agent() -> None:
    memory = SharedMemory(TOTAL)
    rounds(memory, lend=2000, used=100)
    rounds(memory, lend=2000, used=400, waiting=300)
    # 128 pages of watermark and 300 waiting, less 163 free.
    assert memory.held_pages == 2000 - 270
    assert memory.usable_pages == TOTAL - 1730
    assert not memory.is_settled(2000)


def test_of_a_fixed_split_nothing_is_claimed() -> None:
    memory = SharedMemory(TOTAL)
    memory.steps.fixed = True
    rounds(memory, lend=2000, used=100)
    rounds(memory, lend=2000, used=563, waiting=1000)
    assert memory.held_pages == 2000


def test_a_dead_rollout_engine_holds_nothing_and_the_next_one_gets_the_loan() -> None:
    memory = SharedMemory(TOTAL)
    rounds(memory, lend=2000, used=100)
    memory.end()
    memory.check()
    assert memory.held_pages == 0
    rounds(memory, lend=0, used=100, up=False)
    assert memory.usable_pages == TOTAL
    rounds(memory, lend=2000, used=100)
    assert memory.held_pages == 2000


@pytest.mark.parametrize("total", [1, 4, 255, 256, 511, 40_000])
def test_a_device_of_any_size_is_cut_into_chunks(total: int) -> None:
    memory = SharedMemory(total)
    assert 1 <= memory.num_chunks < 512
    rounds(memory, lend=total, used=0)
    rounds(memory, lend=0, used=0)
    assert memory.usable_pages == total


@given(
    looks=st.lists(
        st.tuples(
            st.integers(0, TOTAL + 100),
            st.floats(0.0, 1.0),
            st.integers(0, 500),
            st.booleans(),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_nothing_is_there_twice_whatever_is_asked_for(
    looks: list[tuple[int, float, int, bool, bool]],
) -> None:
    memory = SharedMemory(TOTAL)
    for lend, share, waiting, up, dies in looks:
        used = int(share * memory.usable_pages)
        rounds(memory, lend=lend, used=used, waiting=waiting, up=up)
        assert memory.usable_pages >= used
        assert memory.usable_pages + memory.rollout_pages <= TOTAL
        if dies:
            memory.end()
