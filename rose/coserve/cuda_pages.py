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
- ``cuMemUnmap`` is not ordered with streams: a caller must know that no kernel in flight touches what it unmaps
  (``vllm_plugin.kv_memory`` does), and ``map`` and ``unmap`` belong to a background thread;
- zeroing is queued on a stream of the pool's own, run by run, and waited for once per ``map``;
- ``cuMemSetAccess`` may say NOT_READY under concurrent work: a bounded number of tries;
- unmapped addresses show one shared *fallback* handle of zeros, so that a stray read of a padded row does not fault; it must
  stay zero (:meth:`CudaArena.fallback_intact`).  With ``guard=True`` they are inaccessible instead.

Callers: vLLM workers on a GPU (``vllm_plugin.kv_memory``), ``benchmarks/gpu_check.py``, the tests.  The driver's calls themselves are in
``rose.coserve.cuda_driver``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from rose.coserve.cuda_driver import CudaDriver, Driver, NotReady
from rose.coserve.pages import Range
from rose.errors import LedgerError
from rose.units import PAGE_BYTES, format_bytes

DEFAULT_RESERVE_BYTES = 2 << 30
"""Free on the device after every ``map``: production's lazy kernels, activations and communication buffers (also
``rose.coserve.config.GPU_RESERVE_BYTES``)."""
_ACCESS_TRIES = 20
_ACCESS_PAUSE_S = 0.0005


class CudaPagePool:
    """Arenas on one device.

    Args:
        driver: None = CUDA's, for ``device``.
        handle_bytes: Size of one handle; a multiple of the driver's granularity.  Larger means fewer calls and coarser loans.
        retain_bytes: Kept after ``unmap`` for the next ``map``; serving only, 0 in a rollout engine.
        reserve_bytes: Never taken from the device.
    """

    def __init__(
        self,
        device: int = 0,
        *,
        driver: Driver | None = None,
        handle_bytes: int = PAGE_BYTES,
        retain_bytes: int = 0,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
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
    ) -> None:
        self._driver, self.size, self.guard = driver, size, guard
        self._bytes, self._retain_bytes, self._reserve_bytes = handle_bytes, retain_bytes, reserve_bytes
        self._lock = threading.Lock()
        self._mapped: dict[int, Any] = {}
        self._retained: list[Any] = []
        self._fallback: Any = None
        self._bare = set(range(size // handle_bytes))
        """Pieces behind which there is nothing at all."""
        self._closed = False
        self.address = driver.reserve(size)
        if not guard:
            try:
                self._fallback = driver.create(handle_bytes)
                self._show_fallback(range(size // handle_bytes))
                self._zero([(0, 1)])
            except LedgerError:
                self._hide_fallback(range(size // handle_bytes))
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
            try:
                self._hide_fallback(wanted)
                for piece in wanted:
                    self._driver.map(self._at(piece), self._bytes, handles[len(done)])
                    done.append(piece)
                for first, count in _runs(wanted):
                    self._allow(self._at(first), count * self._bytes)
                self._zero(_runs(wanted))
            except LedgerError:
                for first, count in _runs(done):
                    self._driver.unmap(self._at(first), count * self._bytes)
                for handle in handles:
                    self._driver.release(handle)
                self._show_fallback(piece for piece in wanted if piece in self._bare)
                raise
            self._mapped.update(zip(wanted, handles, strict=True))
            self._bare.difference_update(wanted)

    def unmap(self, ranges: Iterable[Range]) -> None:
        """Give the memory behind ``ranges`` back to the device (what is above ``retain_bytes``).  Unmapped ranges are fine."""
        with self._lock:
            gone = [piece for piece in self._pieces(ranges) if piece in self._mapped]
            for first, count in _runs(gone):
                self._driver.unmap(self._at(first), count * self._bytes)
                for piece in range(first, first + count):
                    self._retained.append(self._mapped.pop(piece))
                self._bare.update(range(first, first + count))
            self._trim(self._retain_bytes)
            self._show_fallback(gone)

    def trim(self) -> None:
        """Give retained handles back too."""
        with self._lock:
            self._trim(0)

    @property
    def retained_bytes(self) -> int:
        """Kept for the next ``map``: taken from the device, behind no address."""
        return len(self._retained) * self._bytes

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

    def wipe(self, released: Iterable[Range]) -> None:
        """Zeros behind unmapped addresses again."""
        with self._lock:
            shown = [
                piece
                for piece in self._pieces(released)
                if piece not in self._bare and piece not in self._mapped
            ]
            if self._fallback is not None and shown:
                self._zero([(shown[0], 1)])

    def fallback_intact(self) -> bool:
        """Nobody wrote behind unmapped addresses.  False: something uses memory that it gave back."""
        with self._lock:
            free = next((p for p in range(self.size // self._bytes) if p not in self._mapped), None)
            if self._fallback is None or free is None or free in self._bare:
                return True
            return self._driver.is_zero(self._at(free), self._bytes)

    def close(self) -> None:
        """Give everything back, addresses included: the caller must hold no view of it any more."""
        with self._lock:
            if self._closed:
                return
            self._hide_fallback(p for p in range(self.size // self._bytes) if p not in self._mapped)
            for first, count in _runs(sorted(self._mapped)):
                self._driver.unmap(self._at(first), count * self._bytes)
            self._retained += self._mapped.values()
            self._mapped.clear()
            self._give_up()

    def check(self) -> None:
        """Assert the invariants of the class, as far as the books go."""
        handles = [*self._mapped.values(), *self._retained]
        assert len({id(handle) for handle in handles}) == len(handles)
        assert all(0 <= piece < self.size // self._bytes for piece in self._mapped)
        assert not self._bare & self._mapped.keys()
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
        """Put the fallback behind bare pieces.  Where that fails they stay bare, which is the worst that ``guard`` does too."""
        if self._fallback is None:
            return
        shown: list[int] = []
        try:
            for piece in pieces:
                self._driver.map(self._at(piece), self._bytes, self._fallback)
                self._bare.discard(piece)
                shown.append(piece)
        finally:
            for first, count in _runs(shown):
                self._allow(self._at(first), count * self._bytes)

    def _hide_fallback(self, pieces: Iterable[int]) -> None:
        for first, count in _runs([piece for piece in pieces if piece not in self._bare]):
            self._driver.unmap(self._at(first), count * self._bytes)
            self._bare.update(range(first, first + count))

    def _zero(self, runs: Iterable[tuple[int, int]]) -> None:
        """Zeros behind mapped pieces.  Returns, also with an error, only when the device writes there no more."""
        try:
            for first, count in runs:
                self._driver.zero(self._at(first), count * self._bytes)
        finally:
            self._driver.settle()

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
