"""GPU memory that can be given back: CUDA's virtual memory calls behind the page pool's protocols.

Same interface and same promises as the host pool (``rose.coserve.pages``): one reserved range of addresses, ``map`` puts
zeroed memory there, ``unmap`` takes it away, an error leaves nothing of its call behind and is a
:class:`~rose.errors.LedgerError`, never an abort.  **Nothing here has run on a GPU yet**: the logic is tested against a driver
in memory that enforces CUDA's rules, and the tests marked ``gpu`` put the same questions to the real one.

Rules that it keeps, each for a cost or a trap of the driver:

- memory comes in *handles* of one size; a mapping is a whole handle (``cuMemMap`` takes offset 0 only);
- one ``cuMemSetAccess`` and one ``cuMemUnmap`` per contiguous run, however many handles it has, where the driver takes that
  (:class:`~rose.coserve.cuda_driver.Spans`); else one per mapping;
- released handles are kept for the next ``map`` only up to ``retain_bytes``: creating one costs most of a ``map``, but kept
  memory is memory that the peer does not get, and it counts as resident;
- ``cuMemUnmap`` is not ordered with streams: a caller must know that no kernel in flight touches what it unmaps
  (``vllm_plugin.kv_memory`` does), and ``map`` and ``unmap`` belong to a background thread;
- zeroing is queued on a stream of the pool's own, run by run, and waited for once per ``map``;
- ``cuMemSetAccess`` may say NOT_READY under concurrent work: a bounded number of tries;
- unmapped addresses show one shared *fallback* handle of zeros, so that a stray read of a padded row does not fault; it must
  stay zero (:meth:`CudaArena.fallback_intact`).  With ``guard=True`` they are inaccessible instead.

The books follow each call, so that they are right whichever fails: memory whose ``unmap`` was refused stays booked, and addresses
that could not be shown the fallback are shown it by the next call, or by :meth:`CudaArena.mend`.

The driver's calls themselves are in ``rose.coserve.cuda_driver``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

from rose.coserve.cuda_driver import CudaDriver, Driver, patiently
from rose.coserve.pages import Range
from rose.errors import LedgerError
from rose.policy.coserving.runs import runs
from rose.units import PAGE_BYTES, format_bytes

DEFAULT_RESERVE_BYTES = 2 << 30
"""Free on the device after every ``map``: production's lazy kernels, activations and communication buffers (also
``rose.coserve.node_config.GPU_RESERVE_BYTES``)."""

_TRIES = 20
"""To give up what could not be made; a driver that refuses more often keeps it."""


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
    handle, its own or the fallback (with ``guard``: its own or none), but for those that :meth:`mend` still has to do.

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
        self._spans = driver.spans()
        self._mapped: dict[int, Any] = {}
        self._retained: list[Any] = []
        self._fallback: Any = None
        self._bare = set(range(size // handle_bytes))
        """Pieces behind which there is nothing at all."""
        self._dark: set[int] = set()
        """Pieces behind which the fallback is, without access to it yet."""
        self._writing = False
        self._closed = False
        self.address = driver.reserve(size)
        if not guard:
            try:
                self._fallback = driver.create(handle_bytes)
                self._show_fallback()
                self._zero([(0, 1)])
            except LedgerError:
                for _ in range(_TRIES):  # nobody has it yet who could close it later
                    with contextlib.suppress(LedgerError):  # the first one says why
                        self._hide_fallback(range(size // handle_bytes))
                        self._give_up()
                        break
                raise

    def map(self, ranges: Iterable[Range]) -> None:
        """Put zeroed memory behind ``ranges``, which must be unmapped.  All of them, or none and an error.

        What the driver then refuses to take away again stays booked as mapped, and an :meth:`unmap` is due.
        """
        with self._lock:
            wanted = self._pieces(ranges)
            twice = [piece for piece in wanted if piece in self._mapped]
            if twice:
                raise LedgerError(f"handle {twice[0]} is mapped already", field="ranges")
            handles = self._take(len(wanted))
            try:
                self._hide_fallback(wanted)
                for piece in wanted:
                    self._driver.map(self._at(piece), self._bytes, handles[-1])
                    self._mapped[piece] = handles.pop()
                    self._bare.discard(piece)
                for first, count in _calls(wanted, self._spans.access):
                    self._allow(first, count)
                self._zero(runs(wanted))
            except LedgerError:
                self._retained += handles
                with contextlib.suppress(LedgerError):  # the first one says why
                    self._take_away([piece for piece in wanted if piece in self._mapped])
                raise

    def unmap(self, ranges: Iterable[Range]) -> None:
        """Give the memory behind ``ranges`` back to the device (what is above ``retain_bytes``).  Unmapped ranges are fine.

        Raises:
            LedgerError: The driver refused some of it, which stays mapped.
        """
        with self._lock:
            self._take_away([piece for piece in self._pieces(ranges) if piece in self._mapped])

    def mend(self) -> None:
        """Show the fallback where an earlier call could not.

        Raises:
            LedgerError: The driver still refuses.
        """
        with self._lock:
            if not self._closed:
                self._show_fallback()

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
            shown = self._first_shown(self._pieces(released))
            if shown is not None:
                self._zero([(shown, 1)])

    def fallback_intact(self) -> bool:
        """Nobody wrote behind unmapped addresses.  False: something uses memory that it gave back."""
        with self._lock:
            shown = self._first_shown(range(self.size // self._bytes))
            return shown is None or self._driver.is_zero(self._at(shown), self._bytes)

    def close(self) -> None:
        """Give everything back, addresses included: the caller must hold no view of it any more.

        Raises:
            LedgerError: The driver refused a part; call it again.
        """
        with self._lock:
            if self._closed:
                return
            self._take_away(sorted(self._mapped), cover=False)
            self._hide_fallback(range(self.size // self._bytes))
            self._give_up()

    def check(self) -> None:
        """Assert the invariants of the class, as far as the books go."""
        handles = [*self._mapped.values(), *self._retained]
        assert len({id(handle) for handle in handles}) == len(handles)
        assert all(0 <= piece < self.size // self._bytes for piece in self._mapped)
        assert not (self._bare | self._dark) & self._mapped.keys()
        assert not self._bare & self._dark
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
            self._retained += made
            with contextlib.suppress(LedgerError):  # the first one says why
                self._trim(self._retain_bytes)
            raise
        kept = [self._retained.pop() for _ in range(count - new)]
        return kept + made

    def _trim(self, keep_bytes: int) -> None:
        while len(self._retained) * self._bytes > keep_bytes:
            self._driver.release(self._retained[-1])
            self._retained.pop()

    def _take_away(self, pieces: list[int], cover: bool = True) -> None:
        """Unmap pieces of our own: all that the driver lets go of, then the error where it did not."""
        self._settle()
        refused: LedgerError | None = None
        for first, count in _calls(pieces, self._spans.unmap):
            try:
                self._driver.unmap(self._at(first), count * self._bytes)
            except LedgerError as error:
                refused = refused or error
                continue
            gone = range(first, first + count)
            self._retained += [self._mapped.pop(piece) for piece in gone]
            self._bare.update(gone)
        try:
            self._trim(self._retain_bytes)
        except LedgerError as error:
            refused = refused or error
        if cover:
            with contextlib.suppress(LedgerError):  # the memory has gone all the same; :meth:`mend` goes on
                self._show_fallback()
        if refused is not None:
            raise refused

    def _show_fallback(self) -> None:
        """Put the fallback behind all bare pieces.  Where that fails they stay as they are, which is the worst that ``guard`` does too."""
        if self._fallback is None:
            return
        try:
            for piece in sorted(self._bare):
                self._driver.map(self._at(piece), self._bytes, self._fallback)
                self._bare.discard(piece)
                self._dark.add(piece)
        finally:
            for first, count in _calls(sorted(self._dark), self._spans.access_shared):
                self._allow(first, count)
                self._dark.difference_update(range(first, first + count))

    def _hide_fallback(self, pieces: Iterable[int]) -> None:
        self._settle()
        shown = [piece for piece in pieces if piece not in self._bare and piece not in self._mapped]
        for first, count in _calls(shown, self._spans.unmap_shared):
            self._driver.unmap(self._at(first), count * self._bytes)
            self._bare.update(range(first, first + count))
            self._dark.difference_update(range(first, first + count))

    def _first_shown(self, pieces: Iterable[int]) -> int | None:
        """One of ``pieces`` that shows the fallback: they all show the same."""
        if self._fallback is None:
            return None
        hidden = (self._mapped, self._bare, self._dark)
        return next((piece for piece in pieces if not any(piece in each for each in hidden)), None)

    def _zero(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Zeros behind mapped pieces, when it returns; with an error the device may still write there."""
        self._writing = True
        for first, count in pieces:
            self._driver.zero(self._at(first), count * self._bytes)
        self._settle()

    def _settle(self) -> None:
        """Nothing of ours is under way on the device any more: nothing is unmapped before."""
        if self._writing:
            self._driver.settle()
            self._writing = False

    def _allow(self, first: int, count: int) -> None:
        patiently(self._driver.allow, self._at(first), count * self._bytes)

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


def _calls(pieces: Iterable[int], spans: bool) -> list[tuple[int, int]]:
    """``(first, count)`` of each call that sorted pieces take: one per contiguous run, or per piece where a call spans no more."""
    return runs(pieces) if spans else [(piece, 1) for piece in pieces]
