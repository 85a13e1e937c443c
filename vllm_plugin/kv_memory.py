"""The seam between a worker's pager and the memory of its device: main memory, or CUDA's virtual memory.

A :class:`KvMemory` says in which pieces memory comes and goes, reserves an arena, shows it to torch as one tensor, and knows how to
wait for the device.  :class:`StepFence` is what makes taking memory away safe on a device that works behind its host's back: vLLM's
engine schedules a step ahead, so a block may be freed while a step that writes to it is still on its way.  The engine
core stamps each step, and publishes the newest stamp before the marks of what it gives up; the worker notes each step that it
has launched (two attribute writes; no call to the driver on the step path); the pager waits for the stamp, then for an
event behind everything on the compute stream, and only then unmaps.

On the host a step is over when its launch returns, and the wait for the device is none.  The CUDA side has not run on a GPU yet; the tests
run it on a driver in memory, through the same pager.

Imports torch only where a tensor is made.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Protocol

from rose.coserve.cuda_driver import Driver
from rose.coserve.cuda_pages import DEFAULT_RESERVE_BYTES, CudaPagePool
from rose.coserve.pages import RESERVE_BYTES, HostPagePool, PageArena
from rose.errors import LedgerError
from rose.units import PAGE_BYTES
from vllm_plugin.compat import OS_PAGE_BYTES

SERVING_RETAIN_BYTES = 256 << 20
"""Production keeps the handles of this much lent memory, and maps them first when chunks come back: creating a handle is most of the time
of a map."""
FENCE_S = 1.0
"""Longest wait for steps in flight in one go: a step that takes longer is asked about again in the next round."""
_POLL_S = 0.0002


class KvMemory(Protocol):
    """Where the KV cache of one worker lies."""

    @property
    def piece_bytes(self) -> int:
        """Every run of bytes that comes and goes is a multiple of this."""
        ...

    def reserve(self, size_bytes: int, *, aligned: bool, guard: bool) -> PageArena:
        """Addresses for the whole cache.  ``aligned``: all runs are multiples of 2 MiB."""
        ...

    def tensor(self, arena: PageArena, size_bytes: int) -> Any:
        """``size_bytes`` of it as an int8 tensor, which must not outlive the process's use of the arena."""
        ...

    def drain(self, stream: int, until_s: float) -> bool:
        """Wait until the device has done what is queued on ``stream`` now; False: not until then."""
        ...


class HostKvMemory:
    """Main memory: what vLLM's CPU build computes on.

    Args:
        reserve_bytes: Of the machine, free after every growth.
    """

    piece_bytes = OS_PAGE_BYTES

    def __init__(self, reserve_bytes: int = RESERVE_BYTES) -> None:
        self._reserve_bytes = reserve_bytes

    def reserve(self, size_bytes: int, *, aligned: bool, guard: bool) -> PageArena:
        return HostPagePool(huge=aligned, reserve_bytes=self._reserve_bytes).reserve(size_bytes, guard=guard)

    def tensor(self, arena: PageArena, size_bytes: int) -> Any:
        import torch

        return torch.frombuffer(arena.buffer, dtype=torch.int8)[:size_bytes]  # type: ignore[attr-defined]

    def drain(self, stream: int, until_s: float) -> bool:
        return True


class CudaKvMemory:
    """A GPU's memory.

    Args:
        role: ``serving`` keeps some handles and may take the device's last byte for its own cache; ``rollout`` keeps none and
            leaves the device's non-KV reserve alone.
        reserve_bytes: That reserve.
    """

    piece_bytes = PAGE_BYTES

    def __init__(self, role: str, *, driver: Driver, reserve_bytes: int = DEFAULT_RESERVE_BYTES) -> None:
        self._driver = driver
        serving = role == "serving"
        self._pool = CudaPagePool(
            driver=self._driver,
            handle_bytes=self.piece_bytes,
            retain_bytes=SERVING_RETAIN_BYTES if serving else 0,
            reserve_bytes=0 if serving else reserve_bytes,
        )

    def reserve(self, size_bytes: int, *, aligned: bool, guard: bool) -> PageArena:
        if not aligned:
            raise LedgerError("runs of the KV cache are not whole pages of 2 MiB", field="KV cache")
        _empty_torchs_cache()
        return self._pool.reserve(size_bytes, guard=guard)

    def tensor(self, arena: PageArena, size_bytes: int) -> Any:
        return tensor_over(arena.address, size_bytes, self._driver.dlpack_device)

    def drain(self, stream: int, until_s: float) -> bool:
        event = self._driver.record(stream)
        try:
            while not self._driver.passed(event):
                if time.monotonic() > until_s:
                    return False
                time.sleep(_POLL_S)
            return True
        finally:
            self._driver.drop(event)


class StepFence:
    """Which of its engine's steps a worker has launched, and whether it is launching one.

    The engine thread of the worker calls :meth:`begin`, :meth:`launched` and :meth:`end` around each step; the pager calls the others.
    """

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._step = 0
        self._stream = 0
        self._stopped = False
        self._running = False
        self._closed = False

    def stop(self) -> None:
        """Let nobody through any more: what is launched is not known."""
        self._stopped = True

    def close(self, closed: bool = True) -> None:
        """Have no further step begin: nobody is left who could say which is the last."""
        self._closed = closed

    def begin(self) -> None:
        """A step is about to be launched.  Step path: no call, no lock.

        Raises:
            LedgerError: It may not, its memory is being given back.
        """
        self._running = True  # first: who closes looks at it second
        if self._closed:
            self._running = False
            raise LedgerError("its engine core is gone, and its memory goes", field="step")

    def launched(self, step: int, stream: int) -> None:
        """Everything of ``step`` is queued on ``stream``; stamps rise, and 0 is a step of vLLM's own.  Step path: no call, no lock."""
        self._stream = stream  # first: who sees the step must see its stream
        if step:
            self._step = step

    def end(self) -> None:
        """Nothing is being launched, whatever became of it."""
        self._running = False

    def wait(self, step: int, timeout_s: float) -> None:
        """Return when no step up to ``step`` can touch memory any more.

        Raises:
            LedgerError: Not within ``timeout_s``; nothing may be unmapped.
        """
        if self._stopped:
            raise LedgerError("are not known any more", field="steps in flight")
        until_s = time.monotonic() + timeout_s
        while self._closed and self._running:  # it has no number that could be waited for
            if time.monotonic() > until_s:
                raise LedgerError("the last one does not end", field="steps in flight")
            time.sleep(_POLL_S)
        while self._step < step:
            if time.monotonic() > until_s:
                raise LedgerError(
                    f"step {step} was not launched; the last was {self._step}", field="steps in flight"
                )
            time.sleep(_POLL_S)
        if not self._memory.drain(self._stream, until_s):
            raise LedgerError(f"not done after {timeout_s:g} s", field="steps in flight")


# --- a tensor over addresses that torch did not allocate


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_CAPSULE_NAME = b"dltensor"
_KIND_INT = 0
_described: list[Any] = []
"""torch holds these descriptions without counting: one per engine, for ever."""


def tensor_over(address: int, size_bytes: int, device: tuple[int, int]) -> Any:
    """An int8 tensor over memory that somebody else owns, by DLPack: ``device`` is its type and number.

    DLPack and not CUDA's array interface, because that asks the driver about the pointer, and a reserved address
    without memory is none to it.  The owner must outlive the tensor; torch is told of no way to free it.
    """
    import torch
    from torch.utils.dlpack import from_dlpack

    shape = (ctypes.c_int64 * 1)(size_bytes)
    managed = _DLManagedTensor(
        tensor=_DLTensor(
            data=address,
            device=_DLDevice(*device),
            ndim=1,
            dtype=_DLDataType(_KIND_INT, 8, 1),
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        )
    )
    _described.append((managed, shape))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor = from_dlpack(new(ctypes.addressof(managed), _CAPSULE_NAME, None))
    if tensor.data_ptr() != address or tensor.dtype is not torch.int8:  # a copy would be nobody's KV cache
        raise LedgerError("torch made a copy of it", field="KV cache")
    return tensor


def _empty_torchs_cache() -> None:
    """What torch keeps of freed memory is memory that the driver does not have for us."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
