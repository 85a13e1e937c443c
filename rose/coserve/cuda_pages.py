"""GPU memory that can be given back: CUDA's virtual memory calls behind the page pool's protocols.

Same interface and same promises as the host pool (``rose.coserve.pages``): one reserved range of addresses, ``map`` puts
zeroed memory there, ``unmap`` takes it away, an error leaves nothing of its call behind and is a
:class:`~rose.errors.LedgerError`, never an abort.  **Nothing here has run on a GPU yet**: the logic is tested against a driver
in memory that enforces CUDA's rules, and the tests marked ``gpu`` put the same questions to the real one.

Rules that it keeps, each for a cost or a trap of the driver:

- memory comes in *handles* of one size; a mapping is a whole handle (``cuMemMap`` takes offset 0 only);
- one ``cuMemSetAccess`` and one ``cuMemUnmap`` per contiguous run, however many handles it has;
- released handles are kept for the next ``map`` only up to ``retain_bytes``: creating one costs most of a ``map``, but kept
  memory is memory that the peer does not get, and it counts as resident;
- ``cuMemUnmap`` is not ordered with streams: ``fence`` must return before it, and a caller on the step path has none to
  give, so ``map`` and ``unmap`` belong to a background thread;
- ``cuMemSetAccess`` may say NOT_READY under concurrent work: a bounded number of tries;
- unmapped addresses show one shared *fallback* handle of zeros, so that a stray read of a padded row does not fault; it must
  stay zero (:meth:`CudaArena.fallback_intact`).  With ``guard=True`` they are inaccessible instead.

Callers: vLLM workers on a GPU (not wired yet), ``benchmarks/gpu_check.py``, the tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rose.coserve.pages import Range
from rose.errors import LedgerError
from rose.units import PAGE_BYTES, format_bytes

DEFAULT_RESERVE_BYTES = 2 << 30
"""Free on the device after every ``map``: production's lazy kernels, activations and communication buffers (also
``rose.coserve.config.GPU_RESERVE_BYTES``)."""
_ACCESS_TRIES = 20
_ACCESS_PAUSE_S = 0.0005


class NotReady(LedgerError):
    """The driver asks for patience (CUDA_ERROR_NOT_READY)."""


class Driver(Protocol):
    """The calls that an arena makes, each one of CUDA's; sizes in bytes, a failure is a LedgerError."""

    @property
    def granularity(self) -> int: ...
    def reserve(self, size: int) -> int: ...
    def free_range(self, address: int, size: int) -> None: ...
    def create(self, size: int) -> Any: ...
    def release(self, handle: Any) -> None: ...
    def map(self, address: int, size: int, handle: Any) -> None: ...
    def unmap(self, address: int, size: int) -> None: ...
    def allow(self, address: int, size: int) -> None: ...
    def zero(self, address: int, size: int) -> None: ...
    def is_zero(self, address: int, size: int) -> bool: ...
    def free_bytes(self) -> int: ...


def _nothing() -> None:
    """A fence where nobody computes."""


class CudaPagePool:
    """Arenas on one device.

    Args:
        driver: None = CUDA's, for ``device``.
        handle_bytes: Size of one handle; a multiple of the driver's granularity.  Larger means fewer calls and coarser loans.
        retain_bytes: Kept after ``unmap`` for the next ``map``; serving only, 0 in a rollout engine.
        reserve_bytes: Never taken from the device.
        fence: Returns when no kernel in flight can touch what is about to be unmapped.
    """

    def __init__(
        self,
        device: int = 0,
        *,
        driver: Driver | None = None,
        handle_bytes: int = PAGE_BYTES,
        retain_bytes: int = 0,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
        fence: Callable[[], None] = _nothing,
    ) -> None:
        self._driver = driver if driver is not None else CudaDriver(device)
        if handle_bytes <= 0 or handle_bytes % self._driver.granularity:
            raise LedgerError(
                f"{handle_bytes} is not a multiple of the device's {self._driver.granularity}",
                field="handle_bytes",
            )
        self._handle_bytes = handle_bytes
        self._retain_bytes = retain_bytes
        self._reserve_bytes = reserve_bytes
        self._fence = fence

    def reserve(self, num_bytes: int, guard: bool = False) -> CudaArena:
        """Reserve addresses for ``num_bytes`` (rounded up to a handle); memory only for the fallback handle."""
        if num_bytes <= 0:
            raise LedgerError(f"{num_bytes} bytes cannot be reserved", field="num_bytes")
        size = -(-num_bytes // self._handle_bytes) * self._handle_bytes
        return CudaArena(
            self._driver,
            size,
            handle_bytes=self._handle_bytes,
            retain_bytes=self._retain_bytes,
            reserve_bytes=self._reserve_bytes,
            guard=guard,
            fence=self._fence,
        )


class CudaArena:
    """One reserved range.  Made by :meth:`CudaPagePool.reserve`.

    Invariants (:meth:`check`): every handle is mapped or retained, none is both; every address shows exactly one
    handle, its own or the fallback (with ``guard``: its own or none).

    Thread-safe: one lock around every change.  Never call it from a step path.
    """

    def __init__(
        self,
        driver: Driver,
        size: int,
        *,
        handle_bytes: int,
        retain_bytes: int,
        reserve_bytes: int,
        guard: bool,
        fence: Callable[[], None],
    ) -> None:
        self._driver, self.size, self.guard = driver, size, guard
        self._bytes, self._retain_bytes, self._reserve_bytes = handle_bytes, retain_bytes, reserve_bytes
        self._fence = fence
        self._lock = threading.Lock()
        self._mapped: dict[int, Any] = {}
        self._retained: list[Any] = []
        self._fallback: Any = None
        self._closed = False
        self.address = driver.reserve(size)
        if not guard:
            try:
                self._fallback = driver.create(handle_bytes)
                self._show_fallback(range(size // handle_bytes))
                driver.zero(self.address, handle_bytes)
            except LedgerError:
                self._give_up()
                raise

    def map(self, ranges: Iterable[Range]) -> None:
        """Put zeroed memory behind ``ranges``, which must be unmapped.  All of them, or none and an error."""
        with self._lock:
            wanted = self._pieces(ranges)
            twice = [piece for piece in wanted if piece in self._mapped]
            if twice:
                raise LedgerError(f"handle {twice[0]} is mapped already", field="ranges")
            handles = self._take(len(wanted))
            done: list[int] = []
            hidden = False
            try:
                if self._fallback is not None:
                    self._hide_fallback(wanted)
                hidden = True
                for piece in wanted:
                    self._driver.map(self._at(piece), self._bytes, handles[len(done)])
                    done.append(piece)
                for first, count in _runs(wanted):
                    self._allow(self._at(first), count * self._bytes)
                    self._driver.zero(self._at(first), count * self._bytes)
            except LedgerError:
                for first, count in _runs(done):
                    self._driver.unmap(self._at(first), count * self._bytes)
                for handle in handles:
                    self._driver.release(handle)
                if hidden and self._fallback is not None:
                    self._show_fallback(wanted)
                raise
            self._mapped.update(zip(wanted, handles, strict=True))

    def unmap(self, ranges: Iterable[Range]) -> None:
        """Give the memory behind ``ranges`` back to the device (what is above ``retain_bytes``).  Unmapped ranges are fine."""
        with self._lock:
            gone = [piece for piece in self._pieces(ranges) if piece in self._mapped]
            if not gone:
                return
            self._fence()
            for first, count in _runs(gone):
                self._driver.unmap(self._at(first), count * self._bytes)
                for piece in range(first, first + count):
                    self._retained.append(self._mapped.pop(piece))
                if self._fallback is not None:
                    self._show_fallback(range(first, first + count))
            self._trim(self._retain_bytes)

    def trim(self) -> None:
        """Give retained handles back too: the peer asks for memory."""
        with self._lock:
            self._trim(0)

    def resident_bytes(self, ranges: Iterable[Range] | None = None) -> int:
        """Bytes of the device that this arena holds: mapped, retained, and the fallback; of ``ranges`` the mapped ones."""
        with self._lock:
            if ranges is not None:
                return sum(self._bytes for piece in self._pieces(ranges) if piece in self._mapped)
            handles = len(self._mapped) + len(self._retained) + (self._fallback is not None)
            return handles * self._bytes

    def touched_bytes(self, released: Iterable[Range]) -> int:
        """A handle's worth where somebody wrote behind unmapped addresses: they all show one handle."""
        self._pieces(released)
        return 0 if self.fallback_intact() else self._bytes

    def fallback_intact(self) -> bool:
        """Nobody wrote behind unmapped addresses.  False: something uses memory that it gave back."""
        with self._lock:
            free = next((p for p in range(self.size // self._bytes) if p not in self._mapped), None)
            if self._fallback is None or free is None:
                return True
            return self._driver.is_zero(self._at(free), self._bytes)

    def close(self) -> None:
        """Give everything back, addresses included: the caller must hold no view of it any more."""
        with self._lock:
            if self._closed:
                return
            self._fence()
            pieces = range(self.size // self._bytes) if self._fallback is not None else sorted(self._mapped)
            for first, count in _runs(pieces):
                self._driver.unmap(self._at(first), count * self._bytes)
            self._retained += self._mapped.values()
            self._mapped.clear()
            self._give_up()

    def check(self) -> None:
        """Assert the invariants of the class, as far as the books go."""
        handles = [*self._mapped.values(), *self._retained]
        assert len({id(handle) for handle in handles}) == len(handles)
        assert all(0 <= piece < self.size // self._bytes for piece in self._mapped)
        assert len(self._retained) * self._bytes <= max(self._retain_bytes, 0) or self._closed

    # -- helpers; the lock is held ---------------------------------------------------------------------

    def _at(self, piece: int) -> int:
        return self.address + piece * self._bytes

    def _take(self, count: int) -> list[Any]:
        """``count`` handles: retained ones first; all of them or none."""
        new = max(0, count - len(self._retained))
        free = self._driver.free_bytes()
        if new * self._bytes > free - self._reserve_bytes:
            raise LedgerError(
                f"{format_bytes(new * self._bytes)} asked for, {format_bytes(free)} free on the device, of which "
                f"{format_bytes(self._reserve_bytes)} stay",
                fix="lower the KV budget",
            )
        made: list[Any] = []
        try:
            for _ in range(new):
                made.append(self._driver.create(self._bytes))  # noqa: PERF401 - on failure the earlier ones count
        except LedgerError:
            for handle in made:
                self._driver.release(handle)
            raise
        kept = [self._retained.pop() for _ in range(count - new)]
        return kept + made

    def _trim(self, keep_bytes: int) -> None:
        while len(self._retained) * self._bytes > keep_bytes:
            self._driver.release(self._retained.pop())

    def _show_fallback(self, pieces: Iterable[int]) -> None:
        listed = list(pieces)
        for piece in listed:
            self._driver.map(self._at(piece), self._bytes, self._fallback)
        for first, count in _runs(listed):
            self._allow(self._at(first), count * self._bytes)

    def _hide_fallback(self, pieces: Iterable[int]) -> None:
        for first, count in _runs(pieces):
            self._driver.unmap(self._at(first), count * self._bytes)

    def _allow(self, address: int, size: int) -> None:
        for attempt in range(_ACCESS_TRIES):
            try:
                self._driver.allow(address, size)
                return
            except NotReady:
                if attempt == _ACCESS_TRIES - 1:
                    raise
                time.sleep(_ACCESS_PAUSE_S)

    def _give_up(self) -> None:
        self._trim(0)
        if self._fallback is not None:
            self._driver.release(self._fallback)
            self._fallback = None
        self._driver.free_range(self.address, self.size)
        self._closed = True

    def _pieces(self, ranges: Iterable[Range]) -> list[int]:
        if self._closed:
            raise LedgerError("the arena is closed")
        pieces: list[int] = []
        for offset, length in ranges:
            if offset < 0 or length <= 0 or offset + length > self.size:
                raise LedgerError(f"[{offset}, +{length}) is outside 0..{self.size}", field="ranges")
            if offset % self._bytes or length % self._bytes:
                raise LedgerError(f"[{offset}, +{length}) is not page-aligned", field="ranges")
            pieces += range(offset // self._bytes, (offset + length) // self._bytes)
        return sorted(set(pieces))


def _runs(pieces: Iterable[int]) -> list[tuple[int, int]]:
    """``(first, count)`` of each contiguous run of sorted numbers."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        if runs and runs[-1][0] + runs[-1][1] == piece:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((piece, 1))
    return runs


class CudaDriver:
    """The real calls, through cuda-bindings.

    Raises:
        LedgerError: No cuda-bindings, no device, or what the driver answered, by its name.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise LedgerError("cuda-bindings is not installed", fix="pip install 'rose-rl[gpu]'") from error
        self._cuda: Any = driver
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device)
        # The primary context is the one that torch uses; retaining it twice is counted by the driver.
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._call("cuCtxSetCurrent", self._context)
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
        self._thread = threading.get_ident()

    def _call(self, name: str, *arguments: Any) -> Any:
        """One driver call: its result, or a LedgerError that names call and code."""
        if name != "cuInit" and getattr(self, "_thread", None) not in (None, threading.get_ident()):
            self._cuda.cuCtxSetCurrent(self._context)  # a context is current to one thread
        code, *results = getattr(self._cuda, name)(*arguments)
        if code == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            raise NotReady(f"{name}: not ready")
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise LedgerError(f"{name} failed: {code.name}")
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def granularity(self) -> int:
        return self._granularity

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

    def zero(self, address: int, size: int) -> None:
        """On a stream of our own; returns when done, so that no step can see another engine's bits."""
        self._call("cuMemsetD8Async", address, 0, size, self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def is_zero(self, address: int, size: int) -> bool:
        data = bytearray(size)
        self._call("cuMemcpyDtoH", data, address, size)
        return not any(data)

    def free_bytes(self) -> int:
        free, _total = self._call("cuMemGetInfo")
        return int(free)
