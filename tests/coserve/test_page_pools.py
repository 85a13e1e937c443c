"""One contract for every page pool: the host's, CUDA's against a driver in memory and on the stand-in for its library, and on a GPU.

The driver in memory keeps CUDA's rules and refuses what the real one refuses; the gpu run asks both the same questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.cuda_driver import NotReady
from rose.coserve.cuda_pages import CudaArena, CudaPagePool
from rose.coserve.pages import HostPagePool
from rose.errors import LedgerError
from rose.units import PAGE_BYTES
from tests.coserve import fakecuda
from tests.coserve.memory_driver import MemoryDriver, RealMemoryDriver

P = PAGE_BYTES


def host() -> Any:
    return HostPagePool()


def cuda_in_memory() -> Any:
    return CudaPagePool(driver=MemoryDriver(), reserve_bytes=0)


def cuda_on_real_memory() -> Any:
    return CudaPagePool(driver=RealMemoryDriver(), reserve_bytes=0)


def cuda() -> Any:
    return CudaPagePool(0)


def has_gpu() -> bool:
    try:
        CudaPagePool(0)
    except LedgerError:
        return False
    return True


POOLS = [
    host,
    cuda_in_memory,
    cuda_on_real_memory,
    pytest.param(
        cuda, marks=[pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU here")]
    ),
]


@pytest.fixture(params=[*POOLS, pytest.param("stand-in", marks=fakecuda.ONLY_WITHOUT_A_GPU)])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "stand-in":
        with fakecuda.Device(tmp_path).plugged() as gpu:
            yield CudaPagePool(reserve_bytes=0)
            assert gpu.count("handles") == gpu.count("reservations") == 0
        return
    make: Callable[[], Any] = request.param
    yield make()


@pytest.fixture(params=[False, True], ids=["open", "guarded"])
def arena(pool: Any, request: pytest.FixtureRequest) -> Any:
    arena = pool.reserve(8 * P, guard=request.param)
    yield arena
    arena.close()


def test_a_reserved_range_holds_no_memory_until_it_is_mapped(arena: Any) -> None:
    assert arena.size == 8 * P
    assert arena.address % P == 0
    assert arena.resident_bytes([(0, 8 * P)]) == 0


def test_memory_comes_and_goes_by_ranges(arena: Any) -> None:
    arena.map([(0, 2 * P), (5 * P, P)])
    assert arena.resident_bytes([(0, 8 * P)]) == 3 * P
    arena.unmap([(P, P)])
    assert arena.resident_bytes([(0, 8 * P)]) == 2 * P
    assert arena.resident_bytes([(P, P)]) == 0
    arena.map([(P, P)])
    arena.unmap([(0, 8 * P)])  # ranges without memory are fine
    assert arena.resident_bytes([(0, 8 * P)]) == 0


def test_released_memory_that_nobody_uses_is_untouched(arena: Any) -> None:
    arena.map([(0, 4 * P)])
    arena.unmap([(P, 3 * P)])
    assert arena.touched_bytes([(P, 7 * P)]) == 0


@pytest.mark.parametrize("bad", [(-P, P), (0, 0), (0, 9 * P), (8 * P, P), (17, P), (0, P + 5)])
def test_a_range_outside_or_off_a_page_is_refused_and_changes_nothing(
    arena: Any, bad: tuple[int, int]
) -> None:
    arena.map([(0, P)])
    for call in (arena.map, arena.unmap):
        with pytest.raises(LedgerError):
            call([(3 * P, P), bad])
    assert arena.resident_bytes([(0, 8 * P)]) == P


def test_nothing_is_left_after_close_and_a_closed_arena_says_so(pool: Any) -> None:
    arena = pool.reserve(4 * P)
    arena.map([(0, 4 * P)])
    arena.close()
    arena.close()
    assert arena.resident_bytes() == 0
    with pytest.raises(LedgerError, match="closed"):
        arena.map([(0, P)])


def test_a_size_that_is_not_positive_is_refused(pool: Any) -> None:
    with pytest.raises(LedgerError, match="num_bytes"):
        pool.reserve(0)


# --- CUDA's own rules, against the driver in memory


@pytest.fixture
def driver() -> MemoryDriver:
    return MemoryDriver()


def cuda_arena(driver: MemoryDriver, **settings: Any) -> CudaArena:
    guard = settings.pop("guard", False)
    return CudaPagePool(driver=driver, **{"reserve_bytes": 0, **settings}).reserve(8 * P, guard=guard)


def test_one_access_and_one_unmap_call_per_contiguous_run(driver: MemoryDriver) -> None:
    arena = cuda_arena(driver, guard=True)
    arena.map([(0, 4 * P), (6 * P, 2 * P)])
    assert (driver.calls["map"], driver.calls["allow"]) == (6, 2)
    arena.unmap([(0, 8 * P)])
    assert driver.calls["unmap"] == 2


def test_mapped_memory_reads_as_zeros_and_so_does_what_is_behind_unmapped_addresses(
    driver: MemoryDriver,
) -> None:
    arena = cuda_arena(driver)
    arena.map([(0, P)])
    assert all(driver.handles.values())
    assert set(driver.mappings) == {arena.address + i * P for i in range(8)}  # no address is left that faults
    assert arena.fallback_intact()
    assert arena.touched_bytes([(P, 7 * P)]) == 0
    driver.handles[arena._fallback] = False  # a stray write
    assert not arena.fallback_intact()
    assert arena.touched_bytes([(P, 7 * P)]) == P


def test_what_a_warm_up_wrote_behind_unmapped_addresses_is_wiped(driver: MemoryDriver) -> None:
    arena = cuda_arena(driver)
    arena.map([(0, P)])
    driver.handles[arena._fallback] = False
    assert arena.touched_bytes([(P, 7 * P)]) == P
    arena.wipe([(P, 7 * P)])
    assert arena.touched_bytes([(P, 7 * P)]) == 0
    guarded = cuda_arena(driver, guard=True)
    guarded.wipe([(0, 8 * P)])
    assert driver.calls["zero"] == 3  # of the fallback, of the mapped page, and the wipe


def test_guarded_addresses_show_nothing(driver: MemoryDriver) -> None:
    arena = cuda_arena(driver, guard=True)
    assert driver.mappings == {}
    arena.map([(P, P)])
    arena.unmap([(P, P)])
    assert driver.mappings == {}


def test_retained_handles_count_as_resident_and_are_used_before_new_ones(driver: MemoryDriver) -> None:
    arena = cuda_arena(driver, retain_bytes=2 * P, guard=True)
    arena.map([(0, 4 * P)])
    arena.unmap([(0, 4 * P)])
    arena.check()
    assert arena.resident_bytes() == 2 * P
    created = driver.calls["create"]
    arena.map([(0, 3 * P)])
    assert driver.calls["create"] == created + 1
    arena.unmap([(0, 3 * P)])
    arena.trim()
    assert arena.resident_bytes() == 0
    assert driver.handles == {}


def test_zeroing_is_queued_run_by_run_and_waited_for_once_per_map(driver: MemoryDriver) -> None:
    arena = cuda_arena(driver, guard=True)
    arena.map([(0, 2 * P), (4 * P, P), (7 * P, P)])
    assert (driver.calls["zero"], driver.calls["settle"]) == (3, 1)
    assert all(driver.handles.values())


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize(("call", "number"), [("create", 3), ("map", 2), ("allow", 1), ("allow", 2)])
def test_a_failure_in_the_middle_of_a_map_leaves_nothing_of_it(
    driver: MemoryDriver, guard: bool, call: str, number: int
) -> None:
    arena = cuda_arena(driver, guard=guard)
    arena.map([(7 * P, P)])
    handles, mappings = set(driver.handles), dict(driver.mappings)
    driver.fail_at = {call: driver.calls.get(call, 0) + number}
    with pytest.raises(LedgerError, match="OUT_OF_MEMORY"):
        arena.map([(0, 2 * P), (4 * P, 2 * P)])
    assert set(driver.handles) == handles
    assert driver.mappings == mappings
    driver.fail_at = {}
    arena.map([(0, 2 * P), (4 * P, 2 * P)])
    arena.check()


def test_not_ready_is_tried_again_but_not_for_ever(
    driver: MemoryDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.coserve.cuda_driver._PATIENT_PAUSE_S", 0.0)
    arena = cuda_arena(driver, guard=True)
    driver.not_ready = 5
    arena.map([(0, P)])
    driver.not_ready = 1000
    with pytest.raises(NotReady):
        arena.map([(P, P)])
    assert arena.resident_bytes() == P


def test_the_reserve_of_the_device_is_never_taken(driver: MemoryDriver) -> None:
    arena = cuda_arena(driver, guard=True, reserve_bytes=60 * P)
    arena.map([(0, 4 * P)])
    with pytest.raises(LedgerError, match="free on the device"):
        arena.map([(4 * P, P)])
    assert arena.resident_bytes() == 4 * P


def test_mapping_what_is_mapped_is_refused_and_changes_nothing(driver: MemoryDriver) -> None:
    arena = cuda_arena(driver, guard=True)
    arena.map([(0, 2 * P)])
    with pytest.raises(LedgerError, match="mapped already"):
        arena.map([(P, 2 * P)])
    assert arena.resident_bytes() == 2 * P


def test_a_handle_size_that_the_device_cannot_make_is_refused(driver: MemoryDriver) -> None:
    with pytest.raises(LedgerError, match="handle_bytes"):
        CudaPagePool(driver=driver, handle_bytes=P // 2)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_maps_and_unmaps_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    driver = MemoryDriver(capacity_pages=6)  # tight: some maps fail
    arena = cuda_arena(driver, guard=rng.random() < 0.5, retain_bytes=rng.choice([0, 2 * P]))
    for _ in range(200):
        first = rng.randrange(8)
        piece = (first * P, rng.randint(1, 8 - first) * P)
        try:
            (arena.map if rng.random() < 0.5 else arena.unmap)([piece])
        except LedgerError:
            pass
        arena.check()
        assert arena.resident_bytes() == len(driver.handles) * P
        own = arena.resident_bytes([(0, 8 * P)])
        assert len(driver.mappings) == (own // P if arena.guard else 8)
    arena.close()
    assert (driver.handles, driver.mappings, driver.ranges) == ({}, {}, {})
