"""The stand-in for CUDA's driver keeps CUDA's rules, through the real cuda-bindings: what it must refuse, and what it must not."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.cuda_driver import CudaDriver, NotReady, only_zeros
from rose.errors import LedgerError
from rose.units import PAGE_BYTES
from tests.coserve import fakecuda
from tests.coserve.fakecuda import NOT_READY, Device, Hooks

P = PAGE_BYTES
pytestmark = fakecuda.ONLY_WITHOUT_A_GPU


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path, pages=8)


@pytest.fixture
def gpu(device: Device) -> Iterator[Hooks]:
    with device.plugged() as hooks:
        yield hooks


@pytest.fixture
def cuda(gpu: Hooks) -> CudaDriver:
    return CudaDriver(0)


def forget(device: Device) -> list[str]:
    """The rules broken so far, on purpose."""
    broken = device.broken_rules()
    device.log.unlink(missing_ok=True)
    return broken


def mapped(cuda: CudaDriver, pages: int = 1, handle_pages: int = 1) -> tuple[int, list[Any]]:
    """Accessible memory, and the handles behind it."""
    address = cuda.reserve(pages * handle_pages * P)
    handles = [cuda.create(handle_pages * P) for _ in range(pages)]
    for i, handle in enumerate(handles):
        cuda.map(address + i * handle_pages * P, handle_pages * P, handle)
    cuda.allow(address, pages * handle_pages * P)
    return address, handles


@pytest.mark.parametrize("handle_pages", [1, 2, 4])
def test_a_handle_of_2_4_or_8_mib_comes_dirty_is_zeroed_and_goes(
    gpu: Hooks, cuda: CudaDriver, handle_pages: int
) -> None:
    size = handle_pages * P
    address, (handle,) = mapped(cuda, handle_pages=handle_pages)
    assert cuda.free_bytes() == 8 * P - size
    assert not cuda.is_zero(address, size)
    cuda.zero(address, size)
    assert not cuda.is_zero(address, size)  # queued; a copy does not wait for a stream that does not block
    cuda.settle()
    assert cuda.is_zero(address, size)
    cuda.unmap(address, size)
    assert cuda.free_bytes() == 8 * P - size  # the handle is there still
    cuda.release(handle)
    cuda.free_range(address, size)
    assert gpu.left() == {}


def test_one_byte_at_either_end_is_no_zero(cuda: CudaDriver) -> None:
    """Of stretches of several sizes in turn."""
    for pages in (1, 4, 1):
        address, _ = mapped(cuda, handle_pages=pages)
        cuda.zero(address, pages * P)
        cuda.settle()
        for at in (address, address + pages * P - 1):
            assert cuda.is_zero(address, pages * P)
            ctypes.memset(at, 1, 1)
            assert not cuda.is_zero(address, pages * P)
            ctypes.memset(at, 0, 1)


@pytest.mark.parametrize("last", [0, 1])
def test_bytes_are_compared_as_one_stretch_of_memory(last: int) -> None:
    """Two million of them one by one hold the interpreter's lock for 20 ms, in which production launches nothing."""

    class Walked(bytearray):
        def __iter__(self) -> Any:
            raise AssertionError("each byte is an object in turn")

    assert only_zeros(Walked(bytes(P - 1) + bytes([last]))) == (last == 0)


def test_one_access_call_and_one_unmap_may_span_several_mappings(gpu: Hooks, cuda: CudaDriver) -> None:
    address, handles = mapped(cuda, pages=4)
    assert (gpu.count("cuMemMap"), gpu.count("cuMemSetAccess")) == (4, 1)
    cuda.unmap(address, 4 * P)
    assert gpu.count("mappings") == 0
    for handle in handles:
        cuda.release(handle)


def test_memory_of_a_released_handle_is_there_until_it_is_unmapped(gpu: Hooks, cuda: CudaDriver) -> None:
    address, (handle,) = mapped(cuda)
    cuda.release(handle)
    assert gpu.count("used") == P
    cuda.unmap(address, P)
    assert gpu.count("used") == 0


def misuses(cuda: CudaDriver) -> dict[str, Any]:
    """Each breaks one rule."""
    address, (handle, _) = mapped(cuda, pages=2, handle_pages=2)
    spare = cuda.reserve(4 * P)
    gone = cuda.create(P)
    cuda.release(gone)
    return {
        "a part of a mapping: unmap": lambda: cuda.unmap(address, P),
        "a part of a mapping: access": lambda: cuda.allow(address + P, P),
        "not mapped everywhere: unmap": lambda: cuda.unmap(spare, P),
        "not mapped everywhere: access": lambda: cuda.allow(spare, P),
        "mapped already": lambda: cuda.map(address, P, handle),
        "outside every reservation": lambda: cuda.map(spare + 4 * P, P, handle),
        "of a handle of": lambda: cuda.map(spare, 4 * P, handle),
        "unknown or released: map": lambda: cuda.map(spare, P, gone),
        "unknown or released: release": lambda: cuda.release(gone),
        "not whole granules": lambda: cuda.map(spare, P // 2, handle),
        "are not whole granules: create": lambda: cuda.create(P + 1),
        "are not whole granules: reserve": lambda: cuda.reserve(P - 1),
        "still mapped": lambda: cuda.free_range(address, 4 * P),
        "not a whole reservation": lambda: cuda.free_range(spare, P),
        "no accessible memory": lambda: cuda.zero(spare, P),
        "an unknown event": lambda: cuda.passed(0x1000),
        "an unknown stream": lambda: cuda._call("cuStreamSynchronize", 0x1000),
    }


def test_every_broken_rule_is_refused_and_written_down(device: Device, cuda: CudaDriver) -> None:
    for rule, misuse in misuses(cuda).items():
        with pytest.raises(LedgerError, match="failed"):
            misuse()
        (line,) = forget(device)
        assert rule.split(":")[0] in line


def test_a_broken_rule_fails_whoever_plugged_the_device_in(device: Device) -> None:
    def misuse() -> None:
        with pytest.raises(LedgerError):
            CudaDriver(0).create(1)

    with pytest.raises(AssertionError, match="not whole granules"), device.plugged():
        misuse()
    forget(device)


def test_a_context_is_current_to_one_thread(device: Device, cuda: CudaDriver) -> None:
    from cuda.bindings import driver

    def elsewhere() -> None:
        answers.append(driver.cuMemGetInfo()[0].name)
        answers.append(cuda.free_bytes())  # ours makes it current

    answers: list[Any] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert answers == ["CUDA_ERROR_INVALID_CONTEXT", 8 * P]
    assert len(forget(device)) == 1


def test_an_event_passes_when_what_was_queued_before_it_has_run(gpu: Hooks, cuda: CudaDriver) -> None:
    address, _ = mapped(cuda)
    stream = cuda._call("cuStreamCreate", 1)
    gpu.hold()
    gpu.kernel(int(stream), address)
    event = cuda.record(int(stream))
    gpu.kernel(int(stream), address)
    assert not cuda.passed(event)
    cuda._call("cuEventSynchronize", event)
    assert cuda.passed(event)
    with pytest.raises(NotReady):
        cuda._call("cuStreamQuery", stream)  # the second kernel is behind it
    cuda.settle()  # of another stream
    assert cuda.passed(event)
    cuda.drop(event)
    assert gpu.count("events") == 0


@pytest.mark.parametrize("fault", ["taken away under work in flight", "writes where no memory is accessible"])
def test_a_fault_is_sticky(device: Device, gpu: Hooks, cuda: CudaDriver, fault: str) -> None:
    address, (handle,) = mapped(cuda)
    stream = cuda._call("cuStreamCreate", 1)
    gpu.hold()
    if "taken" in fault:
        gpu.kernel(int(stream), address)
        cuda.unmap(address, P)
    else:
        cuda.unmap(address, P)
        gpu.kernel(int(stream), address)
        with pytest.raises(LedgerError, match="ILLEGAL_ADDRESS"):
            cuda._call("cuStreamSynchronize", stream)
    for call in (cuda.free_bytes, lambda: cuda.release(handle), lambda: cuda.create(P)):
        with pytest.raises(LedgerError, match="ILLEGAL_ADDRESS"):
            call()
    (line,) = forget(device)
    assert fault in line


def test_an_event_is_refused_on_a_stream_of_another_context(device: Device) -> None:
    for quirks, refused in (("", True), ("any-event", False)):
        with device.plugged(quirks=quirks):
            cuda = CudaDriver(0)
            stream, _ = cuda.green_stream(64)
            event = cuda._call("cuEventCreate", 0)
            if refused:
                with pytest.raises(LedgerError, match="INVALID_HANDLE"):
                    cuda._call("cuEventRecord", event, stream)
            else:
                cuda._call("cuEventRecord", event, stream)


def test_a_green_context_is_current_to_one_thread_at_a_time(device: Device, cuda: CudaDriver) -> None:
    stream, _ = cuda.green_stream(64)
    context = cuda._call("cuStreamGetCtx", stream)
    answers: list[str] = []

    def take() -> None:
        (code,) = cuda._cuda.cuCtxSetCurrent(context)
        answers.append(code.name)
        cuda._cuda.cuCtxSetCurrent(cuda._context)

    with cuda._current(context):
        other = threading.Thread(target=take)
        other.start()
        other.join(30)
    take()
    assert answers == ["CUDA_ERROR_INVALID_CONTEXT", "CUDA_SUCCESS"]
    (line,) = forget(device)
    assert "current to another thread" in line


def test_threads_that_record_on_a_green_contexts_stream_take_turns(cuda: CudaDriver) -> None:
    """The pager's, and the one that launches; two at once would be a broken rule."""
    stream, _ = cuda.green_stream(64)
    events: list[Any] = []
    other = threading.Thread(target=lambda: events.append(cuda.record(stream)))
    with cuda._current(cuda._call("cuStreamGetCtx", stream)):
        other.start()
        other.join(0.1)
    other.join(30)
    assert len(events) == 1
    cuda.drop(events[0])


@pytest.mark.parametrize(
    "quirk", ["access-one-mapping", "unmap-one-mapping", "access-one-handle", "unmap-one-handle"]
)
def test_a_device_may_refuse_calls_that_span_mappings(device: Device, quirk: str) -> None:
    with device.plugged(quirks=quirk):
        cuda = CudaDriver(0)
        address, handle = cuda.reserve(2 * P), cuda.create(P)
        cuda.map(address, P, handle)
        cuda.map(address + P, P, handle)
        if quirk.startswith("access"):
            with pytest.raises(LedgerError, match="cuMemSetAccess failed"):
                cuda.allow(address, 2 * P)
            cuda.allow(address, P)
        else:
            cuda.allow(address, 2 * P)
            with pytest.raises(LedgerError, match="cuMemUnmap failed"):
                cuda.unmap(address, 2 * P)
            cuda.unmap(address, P)


def test_calls_fail_by_seeded_chance_and_where_a_test_says(device: Device) -> None:
    def outcomes(seed: int) -> list[bool]:
        with device.plugged(seed=seed, fail={"cuMemSetAccess": (0.5, NOT_READY)}):
            cuda = CudaDriver(0)
            address, handle = cuda.reserve(P), cuda.create(P)
            cuda.map(address, P, handle)
            found = []
            for _ in range(32):
                try:
                    cuda.allow(address, P)
                    found.append(True)
                except NotReady:
                    found.append(False)
            return found

    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert 4 < sum(outcomes(1)) < 28
    with device.plugged() as gpu:
        cuda = CudaDriver(0)
        gpu.fail("cuMemCreate", from_now=2)
        cuda.create(P)
        with pytest.raises(LedgerError, match="OUT_OF_MEMORY"):
            cuda.create(P)
        cuda.create(P)


HOLDER = """
import sys, time
from rose.coserve.cuda_driver import CudaDriver
cuda = CudaDriver(0)
held = [cuda.create(int(sys.argv[1])) for _ in range(5)]
print("up", flush=True)
sys.stdin.read()
"""


def test_memory_of_a_killed_process_is_free_for_the_others(device: Device, cuda: CudaDriver) -> None:
    peer = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(P)],
        env={**os.environ, **device.env()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert peer.stdout is not None
    assert peer.stdout.readline() == b"up\n"
    assert cuda.free_bytes() == 3 * P
    kept = [cuda.create(P) for _ in range(3)]
    with pytest.raises(LedgerError, match="OUT_OF_MEMORY"):
        cuda.create(P)
    peer.send_signal(signal.SIGKILL)
    peer.communicate()
    assert cuda.free_bytes() == 5 * P
    kept.append(cuda.create(5 * P))


def test_a_fork_of_a_process_that_uses_the_device_has_none(device: Device, cuda: CudaDriver) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            cuda.free_bytes()
        except LedgerError as error:
            os._exit(0 if "NOT_INITIALIZED" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(forget(device)) == 1


def test_without_a_device_there_is_none(device: Device) -> None:
    with device.plugged():
        CudaDriver(0)
    with pytest.raises(LedgerError, match="NO_DEVICE"):
        CudaDriver(0)
