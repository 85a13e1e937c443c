"""CUDA's page pool through the real bindings, on the stand-in for the driver's library: what becomes of each call that fails."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve import cuda_driver
from rose.coserve.cuda_driver import CudaDriver, Spans
from rose.coserve.cuda_pages import CudaArena, CudaPagePool
from rose.errors import LedgerError
from rose.units import PAGE_BYTES
from tests.coserve import fakecuda
from tests.coserve.fakecuda import NOT_READY, Device, Hooks

P = PAGE_BYTES
pytestmark = fakecuda.ONLY_WITHOUT_A_GPU


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path, pages=32)


@pytest.fixture
def gpu(device: Device) -> Iterator[Hooks]:
    with device.plugged() as hooks:
        yield hooks


def arena_of(gpu: Hooks, *, guard: bool = False, pages: int = 8, **settings: Any) -> CudaArena:
    return CudaPagePool(**{"reserve_bytes": 0, **settings}).reserve(pages * P, guard=guard)


def seen(arena: CudaArena, piece: int) -> bytes:
    """The first and last bytes behind a piece, as a kernel would read them; a fault where there is no memory."""
    at, size = arena.address + piece * arena._bytes, arena._bytes
    return ctypes.string_at(at, 64) + ctypes.string_at(at + size - 64, 64)


def zeros(arena: CudaArena) -> bool:
    return all(seen(arena, piece) == bytes(128) for piece in range(arena.size // arena._bytes))


# --- an unmap that cannot show the fallback


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_memory_goes_also_where_the_fallback_cannot_be_shown_and_mending_shows_it(
    gpu: Hooks, call: str
) -> None:
    """Addresses that stay bare are a fault for the next kernel that reads a padded row."""
    arena = arena_of(gpu)
    arena.map([(0, 8 * P)])
    gpu.fail(call, from_now=2 if call == "cuMemMap" else 1)
    arena.unmap([(2 * P, 4 * P)])
    arena.check()
    assert arena.resident_bytes([(0, 8 * P)]) == 4 * P
    assert gpu.count("handles") == 5  # those four, and the fallback
    with pytest.raises(AssertionError):
        arena_is_whole(arena)
    arena.mend()
    arena_is_whole(arena)
    arena.close()
    assert gpu.left() == {}


def arena_is_whole(arena: CudaArena) -> None:
    assert not arena._bare
    assert not arena._dark
    assert zeros(arena)


def test_a_later_call_shows_the_fallback_too(gpu: Hooks) -> None:
    arena = arena_of(gpu)
    arena.map([(0, 8 * P)])
    gpu.fail("cuMemMap", from_now=1)
    arena.unmap([(0, 4 * P)])
    arena.unmap([(6 * P, P)])
    arena_is_whole(arena)
    gpu.fail("cuMemMap", probability=1.0)
    arena.unmap([(5 * P, P)])
    with pytest.raises(LedgerError, match="cuMemMap"):
        arena.mend()
    gpu.fail("cuMemMap")
    arena.map([(5 * P, P)])  # what is bare can be mapped
    arena_is_whole(arena)
    arena.close()


# --- calls that take memory away and fail


def test_memory_that_the_driver_does_not_let_go_of_stays_booked_and_goes_later(gpu: Hooks) -> None:
    arena = arena_of(gpu, guard=True)
    arena.map([(0, 2 * P), (4 * P, 2 * P)])
    gpu.fail("cuMemUnmap", from_now=1)
    with pytest.raises(LedgerError, match="cuMemUnmap"):
        arena.unmap([(0, 8 * P)])
    arena.check()
    assert arena.resident_bytes([(0, 2 * P)]) == 2 * P
    assert arena.resident_bytes() == gpu.count("used") == 2 * P  # the other run has gone
    arena.unmap([(0, 8 * P)])
    assert gpu.count("used") == 0
    arena.close()
    assert gpu.left() == {}


def test_a_map_that_fails_and_cannot_be_undone_is_booked(gpu: Hooks) -> None:
    arena = arena_of(gpu, guard=True)
    gpu.fail("cuMemsetD8Async", from_now=1)
    gpu.fail("cuMemUnmap", from_now=1)
    with pytest.raises(LedgerError, match="cuMemsetD8Async"):
        arena.map([(0, 2 * P)])
    arena.check()
    assert arena.resident_bytes() == gpu.count("used") == 2 * P
    arena.unmap([(0, 2 * P)])
    arena.map([(0, 2 * P)])
    assert seen(arena, 0) == seen(arena, 1) == bytes(128)
    arena.close()
    assert gpu.left() == {}


def test_a_close_that_fails_can_be_repeated(gpu: Hooks) -> None:
    for call in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree"):
        arena = arena_of(gpu)
        arena.map([(0, P)])
        gpu.fail(call, from_now=1)
        with pytest.raises(LedgerError, match=call):
            arena.close()
        arena.close()
        assert gpu.left() == {}


CALLS = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async", "cuStreamSynchronize"]


@pytest.mark.parametrize("guard", [False, True], ids=["open", "guarded"])
@pytest.mark.parametrize("call", ["cuMemAddressReserve", *CALLS])
def test_an_arena_that_cannot_be_had_leaves_nothing(gpu: Hooks, guard: bool, call: str) -> None:
    cuda = CudaDriver(0)
    cuda.spans()
    pool = CudaPagePool(driver=cuda, reserve_bytes=0)
    gpu.fail(call, from_now=1)
    if guard and call != "cuMemAddressReserve":
        pool.reserve(8 * P, guard=guard).close()
    else:
        with pytest.raises(LedgerError, match=call):
            pool.reserve(8 * P, guard=guard)
    assert gpu.left() == {}


@pytest.mark.parametrize("guard", [False, True], ids=["open", "guarded"])
@pytest.mark.parametrize("number", range(1, 5))
@pytest.mark.parametrize("call", CALLS)
def test_a_map_that_fails_anywhere_leaves_what_was_there(
    gpu: Hooks, guard: bool, number: int, call: str
) -> None:
    arena = arena_of(gpu, guard=guard)
    arena.map([(7 * P, P)])
    gpu.fail(call, from_now=number)
    try:
        arena.map([(0, 2 * P), (4 * P, 2 * P)])
    except LedgerError:
        assert arena.resident_bytes([(0, 8 * P)]) == P
        arena.map([(0, 2 * P), (4 * P, 2 * P)])
    arena.check()
    assert arena.resident_bytes([(0, 8 * P)]) == 5 * P
    if not guard:
        arena_is_whole(arena)
    arena.close()
    assert gpu.left() == {}


# --- what one call takes


@pytest.mark.parametrize(
    ("quirk", "spans"),
    [
        ("", Spans(True, True, True, True)),
        ("access-one-mapping", Spans(False, False, True, True)),
        ("access-one-handle", Spans(True, False, True, True)),
        ("unmap-one-mapping", Spans(True, True, False, False)),
        ("unmap-one-handle", Spans(True, True, True, False)),
    ],
)
def test_the_driver_is_asked_what_one_call_takes_and_given_no_more(
    device: Device, quirk: str, spans: Spans
) -> None:
    with device.plugged(quirks=quirk) as gpu:
        cuda = CudaDriver(0)
        assert (cuda.spans(), gpu.left()) == (spans, {})
        asked = gpu.count("cuMemCreate")
        arena = CudaPagePool(driver=cuda, reserve_bytes=0).reserve(8 * P)
        before = {call: gpu.count(call) for call in ("cuMemSetAccess", "cuMemUnmap")}
        arena.map([(0, 4 * P)])
        arena.unmap([(0, 4 * P)])
        access = (1 if spans.access else 4) + (1 if spans.access_shared else 4)
        unmap = (1 if spans.unmap_shared else 4) + (1 if spans.unmap else 4)  # the fallback, then ours
        assert gpu.count("cuMemSetAccess") - before["cuMemSetAccess"] == access
        assert gpu.count("cuMemUnmap") - before["cuMemUnmap"] == unmap
        arena_is_whole(arena)
        arena.close()
        assert gpu.left() == {}
        assert gpu.count("cuMemCreate") == asked + 5  # asked once, and then no more


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_driver_that_cannot_be_asked_says_so_and_keeps_nothing(gpu: Hooks, call: str, number: int) -> None:
    gpu.fail(call, from_now=number)
    if (call, number) == ("cuMemAddressReserve", 2):
        assert CudaDriver(0).spans() == Spans(True, True, True, True)
    else:
        with pytest.raises(LedgerError, match=call):
            CudaDriver(0).spans()
    assert gpu.left() == {}


def test_a_driver_that_asks_for_patience_gets_it_but_not_for_ever(
    gpu: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_PATIENT_PAUSE_S", 0.0)
    gpu.fail("cuMemSetAccess", probability=0.5, code=NOT_READY)
    arena = arena_of(gpu)
    for _ in range(20):
        arena.map([(0, 8 * P)])
        arena.unmap([(0, 8 * P)])
    arena_is_whole(arena)
    gpu.fail("cuMemSetAccess", probability=1.0, code=NOT_READY)
    with pytest.raises(LedgerError, match="not ready"):
        arena.map([(0, P)])
    gpu.fail("cuMemSetAccess")
    arena.close()
    assert gpu.left() == {}


# --- events


def test_an_event_comes_behind_the_work_of_a_green_contexts_stream(gpu: Hooks) -> None:
    cuda = CudaDriver(0)
    arena = CudaPagePool(driver=cuda, reserve_bytes=0).reserve(P)
    arena.map([(0, P)])
    green, _ = cuda.green_stream(64)
    for stream in (0, green):
        gpu.hold()
        gpu.kernel(stream, arena.address, value=7)
        event = cuda.record(stream)
        assert not cuda.passed(event)
        gpu.hold(False)
        while not cuda.passed(event):
            pass
        cuda.drop(event)
        assert seen(arena, 0)[:1] == b"\x07"
        arena.unmap([(0, P)])
        arena.map([(0, P)])
    assert int(cuda._call("cuCtxGetCurrent")) == int(cuda._context)
    arena.close()
    assert gpu.left() == {}


@pytest.mark.parametrize("call", ["cuStreamGetCtx", "cuEventCreate", "cuEventRecord"])
def test_an_event_that_cannot_be_had_leaves_nothing_and_the_thread_where_it_was(
    gpu: Hooks, call: str
) -> None:
    cuda = CudaDriver(0)
    green, _ = cuda.green_stream(64)
    gpu.fail(call, from_now=1)
    with pytest.raises(LedgerError, match=call):
        cuda.record(green)
    assert int(cuda._call("cuCtxGetCurrent")) == int(cuda._context)
    assert gpu.left() == {}


@pytest.mark.parametrize("refused", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
def test_an_arena_that_cannot_be_made_leaves_nothing_though_the_driver_refuses_once(
    tmp_path: Path, refused: str
) -> None:
    """Nobody has it, so nobody could close it."""
    with Device(tmp_path, pages=16).plugged() as gpu:
        cuda = CudaDriver(0)
        cuda.spans()
        gpu.fail("cuMemMap", from_now=3)
        gpu.fail(refused, from_now=1)
        with pytest.raises(LedgerError, match="cuMemMap failed"):
            CudaPagePool(driver=cuda, reserve_bytes=0).reserve(8 * PAGE_BYTES)
        assert gpu.left() == {}


@pytest.mark.parametrize("guard", [False, True])
def test_a_device_that_unmaps_one_mapping_of_a_handle_at_a_time_lends_all_the_same(
    device: Device, guard: bool
) -> None:
    """The page behind unmapped addresses is one handle, shown everywhere."""
    with device.plugged(quirks="unmap-one-handle") as gpu:
        cuda = CudaDriver(0)
        assert cuda.spans().unmap
        arena = CudaPagePool(driver=cuda, reserve_bytes=0).reserve(8 * P, guard=guard)
        arena.map([(0, 4 * P)])
        before = gpu.count("cuMemUnmap")
        arena.unmap([(0, 4 * P)])
        assert gpu.count("cuMemUnmap") == before + 1  # four handles of their own, in one call
        arena.close()
        assert gpu.left() == {}
