"""The calls of CUDA's driver that memory and compute sharing need: one small protocol, and the real one through cuda-bindings.

:class:`Driver` is the boundary that the tests cross: their driver in memory keeps CUDA's rules and refuses what CUDA refuses, and
the tests marked ``gpu`` ask the real one the same questions.  **Nothing here has run on a GPU yet.**
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from rose.errors import LedgerError

logger = logging.getLogger("rose.coserve")

DLPACK_CPU, DLPACK_CUDA = 1, 2
"""Device types in DLPack's numbers."""
_SM_STEP = 8
_PATIENT_TRIES = 20
_PATIENT_PAUSE_S = 0.0005


class NotReady(LedgerError):
    """The driver asks for patience (CUDA_ERROR_NOT_READY)."""


def patiently(call: Callable[[int, int], None], address: int, size: int) -> None:
    """Make a call that may ask for patience, and be patient for a bounded time."""
    for attempt in range(_PATIENT_TRIES):
        try:
            call(address, size)
            return
        except NotReady:
            if attempt == _PATIENT_TRIES - 1:
                raise
            time.sleep(_PATIENT_PAUSE_S)


@functools.lru_cache(maxsize=1)
def _zeros(size: int) -> bytes:
    return bytes(size)


def only_zeros(data: bytearray) -> bool:
    """Is every byte zero?  One comparison of memory: byte by byte, 2 MiB hold the interpreter's lock for 20 ms."""
    return data == _zeros(len(data))


class Spans(NamedTuple):
    """Which calls take a contiguous run of several mappings at once.

    CUDA's documentation wants ranges of whole mappings and does not say how many; NVIDIA's sample ``vectorAddMMAP`` spans several with both
    calls, and nothing shows several mappings of one handle.
    """

    access: bool
    access_shared: bool
    """Of mappings that all show one handle."""
    unmap: bool
    unmap_shared: bool
    """Of mappings that all show one handle."""


class Driver(Protocol):
    """Each method is one of CUDA's calls; sizes in bytes, a failure is a LedgerError."""

    @property
    def granularity(self) -> int: ...
    @property
    def dlpack_device(self) -> tuple[int, int]:
        """Where its addresses are, as DLPack says it: type and number."""
        ...

    def reserve(self, size: int) -> int: ...
    def free_range(self, address: int, size: int) -> None: ...
    def create(self, size: int) -> Any: ...
    def release(self, handle: Any) -> None: ...
    def map(self, address: int, size: int, handle: Any) -> None: ...
    def unmap(self, address: int, size: int) -> None: ...
    def allow(self, address: int, size: int) -> None: ...
    def spans(self) -> Spans:
        """What :meth:`allow` and :meth:`unmap` take at once."""
        ...

    def zero(self, address: int, size: int) -> None:
        """Queued; done when :meth:`settle` returns."""
        ...

    def settle(self) -> None: ...
    def is_zero(self, address: int, size: int) -> bool: ...
    def free_bytes(self) -> int: ...
    def record(self, stream: int) -> Any:
        """An event behind everything that is queued on ``stream`` now, whichever context that belongs to."""
        ...

    def passed(self, event: Any) -> bool:
        """Has the device got there?  Does not wait."""
        ...

    def drop(self, event: Any) -> None: ...
    def version(self) -> tuple[int, int]:
        """The CUDA that the driver speaks."""
        ...

    def sm_split(self) -> tuple[int, int, int]:
        """SMs of the device; in which multiples, and from how many on, it splits them."""
        ...

    def green_stream(self, num_sms: int) -> tuple[int, int]:
        """A stream whose kernels run on ``num_sms`` SMs (the driver may round up), and how many they are.  It lives as long as we do."""
        ...


class CudaDriver:
    """The real calls, through cuda-bindings.

    Raises:
        LedgerError: No cuda-bindings, no device, or what the driver answered, by its name.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            from cuda.bindings import driver  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        except ImportError as error:
            raise LedgerError(
                "cuda-bindings is not installed", fix="pip install '.[cuda]' from a checkout of ROSE"
            ) from error
        self._cuda: Any = driver
        self._number = device
        self._context: Any = None
        self._here = threading.local()
        self._green_lock = threading.Lock()
        """A green context is current to one thread at a time, and CUDA does not say what becomes of two."""
        try:
            self._call("cuInit", 0)
        except LedgerError:
            raise
        except Exception as error:  # the bindings raise their own where the driver's library is missing
            raise LedgerError(f"no CUDA driver: {error}") from error
        self._device = self._call("cuDeviceGet", device)
        # The primary context is the one that torch uses; retaining it twice is counted by the driver.
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device
        self._prop = prop
        access = driver.CUmemAccessDesc()
        access.location = prop.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = access
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(self._call("cuMemGetAllocationGranularity", prop, minimum))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = self._call("cuStreamCreate", flags)
        self._spans: Spans | None = None

    def _call(self, name: str, *arguments: Any) -> Any:
        """One driver call: its result, or a LedgerError that names call and code."""
        if self._context is not None and not getattr(self._here, "is_set", False):
            self._answer("cuCtxSetCurrent", self._cuda.cuCtxSetCurrent(self._context))
            self._here.is_set = True  # a context is current to one thread
        return self._answer(name, getattr(self._cuda, name)(*arguments))

    def _answer(self, name: str, answer: Any) -> Any:
        code, *results = answer
        if code == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            raise NotReady(f"{name}: not ready")
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise LedgerError(f"{name} failed: {code.name}")
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def granularity(self) -> int:
        return self._granularity

    @property
    def dlpack_device(self) -> tuple[int, int]:
        return DLPACK_CUDA, self._number

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def free_range(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> Any:
        return self._call("cuMemCreate", size, self._prop, 0)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: Any) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def allow(self, address: int, size: int) -> None:
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def spans(self) -> Spans:
        """Asks the device, once: two pages for a moment."""
        if self._spans is None:
            self._spans = self._ask_spans()
            if not all(self._spans):
                logger.warning("ROSE: the driver takes its mappings one by one: %s", self._spans)
        return self._spans

    def _ask_spans(self) -> Spans:
        size = self._granularity
        with contextlib.ExitStack() as undo:
            address = self.reserve(4 * size)
            undo.callback(self.free_range, address, 4 * size)
            handles = []
            for _ in range(2):
                handles.append(self.create(size))
                undo.callback(self.release, handles[-1])
            mapped: set[int] = set()
            undo.callback(lambda: [self.unmap(at, size) for at in sorted(mapped)])
            # Two handles side by side, then one of them twice.
            for place, handle in enumerate([*handles, handles[0], handles[0]]):
                self.map(address + place * size, size, handle)
                mapped.add(address + place * size)
            access = self._takes_two(self.allow, address)
            shared = self._takes_two(self.allow, address + 2 * size)
            unmap = self._takes_two(self.unmap, address)
            mapped -= {address, address + size}
            unmap_shared = self._takes_two(self.unmap, address + 2 * size)
            mapped -= {address + 2 * size, address + 3 * size}
            return Spans(access, shared, unmap, unmap_shared)

    def _takes_two(self, call: Callable[[int, int], None], address: int) -> bool:
        """Does it span two mappings?  Done either way."""
        size = self._granularity
        try:
            patiently(call, address, 2 * size)
            return True
        except LedgerError:
            for at in (address, address + size):
                patiently(call, at, size)
            return False

    def zero(self, address: int, size: int) -> None:
        """On a stream of our own, beside whatever the engine computes."""
        self._call("cuMemsetD8Async", address, 0, size, self._stream)

    def settle(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def is_zero(self, address: int, size: int) -> bool:
        data = bytearray(size)
        self._call("cuMemcpyDtoH", data, address, size)
        return only_zeros(data)

    def free_bytes(self) -> int:
        free, _total = self._call("cuMemGetInfo")
        return int(free)

    def record(self, stream: int) -> Any:
        """Event and stream have to be of one context, and a green context's stream is of another than ours."""
        with self._current(self._call("cuStreamGetCtx", stream)):
            event = self._call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            try:
                self._call("cuEventRecord", event, stream)
            except LedgerError:
                self.drop(event)
                raise
            return event

    @contextlib.contextmanager
    def _current(self, context: Any) -> Iterator[None]:
        """``context`` is this thread's meanwhile."""
        if int(context) == int(self._context):
            yield
            return
        with self._green_lock:
            self._call("cuCtxSetCurrent", context)
            try:
                yield
            finally:
                self._call("cuCtxSetCurrent", self._context)

    def passed(self, event: Any) -> bool:
        try:
            self._call("cuEventQuery", event)
        except NotReady:
            return False
        return True

    def drop(self, event: Any) -> None:
        self._call("cuEventDestroy", event)

    def version(self) -> tuple[int, int]:
        number = int(self._call("cuDriverGetVersion"))
        return number // 1000, number % 1000 // 10

    def sm_split(self) -> tuple[int, int, int]:
        sm = self._sms().sm
        # Drivers before CUDA 13 do not say; Hopper's documented figures are the larger ones.
        step = int(getattr(sm, "smCoscheduledAlignment", 0)) or _SM_STEP
        least = int(getattr(sm, "minSmPartitionSize", 0)) or _SM_STEP
        return int(sm.smCount), step, least

    def green_stream(self, num_sms: int) -> tuple[int, int]:
        groups, count, _rest = self._call("cuDevSmResourceSplitByCount", 1, self._sms(), 0, num_sms)
        if count != 1:
            raise LedgerError(f"the device gives no group of {num_sms} SMs")
        group = groups[0]
        described = self._call("cuDevResourceGenerateDesc", [group], 1)
        made = self._cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self._call("cuGreenCtxCreate", described, self._device, made)
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = self._call("cuGreenCtxStreamCreate", context, flags, 0)
        self._green = context, stream  # torch knows the stream by its number alone
        return int(stream), int(group.sm.smCount)

    def _sms(self) -> Any:
        kind = self._cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        return self._call("cuDeviceGetDevResource", self._device, kind)
