"""Memory that can be given back: address ranges whose pages come and go, and which bytes are whose KV blocks.

What it decides: nothing.  It moves pages when told, and answers with the kernel's truth.  Who may hold how
many is the ledger's and ``rose.policy.lending``'s business; when a range is no longer read is the engine's.

Two parts:

- :class:`HostPagePool` hands out an :class:`Arena`: a reserved range of addresses, 2 MiB-aligned, without
  memory behind it.  ``map`` puts zeroed pages there, ``unmap`` takes them away.  ``guard=True`` also makes
  unmapped bytes inaccessible, so that a use after release is a fault and not a silent page of zeros.
  A pool on CUDA's virtual memory fits the same two protocols (:class:`PagePool`, :class:`PageArena`).
- :class:`KvGeometry` says where the blocks of vLLM's KV buffer lie.  It takes the layout as data and
  assumes none: layers outermost, blocks outermost, several groups in one buffer.

Invariants: bytes outside mapped ranges hold no memory (unless an unguarded caller touches them); a range
that was unmapped and mapped again reads as zeros; an error leaves nothing of that call mapped, and is a
:class:`~rose.errors.LedgerError`, never an abort; nothing outside the arena is ever touched.

Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rose.coserve.free_memory import free_bytes
from rose.errors import LedgerError
from rose.units import PAGE_BYTES, format_bytes

Range = tuple[int, int]
"""``(offset, length)`` in bytes."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_int, _size = ctypes.c_int, ctypes.c_size_t
_libc.mmap.argtypes = [ctypes.c_void_p, _size, _int, _int, _int, ctypes.c_long]
for _name in ("munmap", "mprotect", "madvise", "mincore"):
    getattr(_libc, _name).restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]

_PROT_NONE = 0
_PROT_RW = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_OS_PAGE_BYTES = mmap.PAGESIZE
RESERVE_BYTES = 256 << 20
"""Never taken.  The kernel overcommits: asked for the last page it kills somebody instead of saying no."""
_LOOK_BYTES = 64 << 20
"""Of one mincore: its answer, a byte per page, is counted while the interpreter lock is held."""


class PageArena(Protocol):
    """One reserved range of addresses of one engine rank."""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    def map(self, ranges: Iterable[Range]) -> None: ...
    def unmap(self, ranges: Iterable[Range]) -> None: ...
    def resident_bytes(self, ranges: Iterable[Range] | None = None) -> int: ...
    def touched_bytes(self, released: Iterable[Range]) -> int: ...
    def wipe(self, released: Iterable[Range]) -> None:
        """Undo what was done behind ranges that hold nothing, by whoever had a right to."""
        ...

    @property
    def retained_bytes(self) -> int:
        """Taken from the device, behind no address: kept for the next ``map``."""
        ...

    def trim(self) -> None:
        """Give what is retained back."""
        ...

    def mend(self) -> None:
        """Finish what an earlier call could not."""
        ...

    def close(self) -> None: ...


class PagePool(Protocol):
    """Where arenas come from: host memory here, CUDA virtual memory on a GPU."""

    def reserve(self, num_bytes: int, guard: bool = False) -> PageArena: ...


def _check(result: int | None, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise LedgerError(f"{what} failed: {os.strerror(code)}", fix=_FIX.get(code))


_FIX = {
    errno.ENOMEM: "less memory is free than asked for; lower the KV budget",
    errno.EINVAL: "Linux 5.14 or newer is needed (MADV_POPULATE_WRITE)",
}


class Arena:
    """Anonymous private memory, reserved but not committed.  Made by :meth:`HostPagePool.reserve`.

    Ranges are byte offsets from :attr:`address`, multiples of the operating system's page; multiples
    of 2 MiB get huge pages where the kernel gives them.

    Raises (``map``, ``unmap``, ``resident_bytes``):
        LedgerError: A range is outside the arena or not page-aligned, the kernel refused, or it is closed.

    ``map`` and ``unmap`` of disjoint ranges may run in several threads; the system calls release the GIL.
    """

    def __init__(self, num_bytes: int, guard: bool, huge: bool, reserve_bytes: int) -> None:
        self.size = num_bytes
        self.guard = guard
        self._reserve_bytes = reserve_bytes
        # An inaccessible page of 2 MiB or more stays on each side: overruns fault, and the
        # kernel cannot merge this range with a neighbour's, so smaps counts it alone.
        span = num_bytes + 3 * PAGE_BYTES
        start = _libc.mmap(None, span, _PROT_NONE, _MAP_FLAGS, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise LedgerError(
                f"cannot reserve {format_bytes(num_bytes)} of addresses: {os.strerror(ctypes.get_errno())}"
            )
        self.address = (start + 2 * PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
        array = (ctypes.c_char * num_bytes).from_address(self.address)
        # The addresses live as long as anybody (a tensor) can still reach them.
        self._unreserve = weakref.finalize(array, _libc.munmap, start, span)
        self._array: ctypes.Array[ctypes.c_char] | None = array
        # A kernel without huge pages says EINVAL.
        _libc.madvise(self.address, num_bytes, mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        if not guard:
            _check(_libc.mprotect(self.address, num_bytes, _PROT_RW), "mprotect")

    @property
    def buffer(self) -> memoryview:
        """All of it, as writable bytes, for ``torch.frombuffer``.  Holds the addresses, not the memory."""
        if self._array is None:
            raise LedgerError("the arena is closed")
        return memoryview(self._array).cast("B")

    def map(self, ranges: Iterable[Range]) -> None:
        """Put zeroed memory behind ``ranges``, which must be unmapped.  All of them, or none and an error."""
        wanted = self._checked(ranges)
        self._check_free(sum(length for _, length in wanted))
        done: list[Range] = []
        try:
            for offset, length in wanted:
                done.append((offset, length))
                if self.guard:
                    _check(_libc.mprotect(self.address + offset, length, _PROT_RW), "mprotect")
                self._populate(self.address + offset, length)
        except LedgerError:
            self.unmap(done)
            raise

    def _populate(self, address: int, length: int) -> None:
        while _libc.madvise(address, length, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR):
                raise LedgerError(
                    f"mapping {format_bytes(length)} failed: {os.strerror(code)}", fix=_FIX.get(code)
                )

    def unmap(self, ranges: Iterable[Range]) -> None:
        """Give the memory behind ``ranges`` back to the machine.  Ranges without memory are fine."""
        for offset, length in self._checked(ranges):
            _check(_libc.madvise(self.address + offset, length, mmap.MADV_DONTNEED), "MADV_DONTNEED")
            if self.guard:
                _check(_libc.mprotect(self.address + offset, length, _PROT_NONE), "mprotect")

    def resident_bytes(self, ranges: Iterable[Range] | None = None) -> int:
        """Bytes with memory behind them, as the kernel counts: ``smaps`` for all, ``mincore`` for ranges.

        ``mincore`` also counts the kernel's shared zero page where an unguarded caller read an unmapped byte.
        """
        if ranges is None:
            if self._array is None:
                return 0
            return _smaps_rss_bytes(self.address, self.address + self.size)
        num_pages = 0
        vector = ctypes.create_string_buffer(_LOOK_BYTES // _OS_PAGE_BYTES)
        for offset, length in self._checked(ranges):
            for start in range(offset, offset + length, _LOOK_BYTES):
                size = min(_LOOK_BYTES, offset + length - start)
                _check(_libc.mincore(self.address + start, size, vector), "mincore")
                # A byte per page, 0 or 1 (its other bits are reserved): as one number that is counted in C.
                present = ctypes.string_at(vector, -(-size // _OS_PAGE_BYTES))
                num_pages += int.from_bytes(present, "little").bit_count()
        return num_pages * _OS_PAGE_BYTES

    def touched_bytes(self, released: Iterable[Range]) -> int:
        """Bytes of ranges that hold nothing by the books and were used all the same: the canary.

        Nothing but a use puts a page behind an unmapped range: a write a page of its own, a read the kernel's zero page.
        ``mincore`` shows both.
        """
        return self.resident_bytes(released)

    def wipe(self, released: Iterable[Range]) -> None:
        """Undo what was done behind ranges that hold nothing."""
        self.unmap(released)

    @property
    def retained_bytes(self) -> int:
        """The kernel takes back what is unmapped at once."""
        return 0

    def trim(self) -> None:
        """Nothing is retained."""

    def mend(self) -> None:
        """Nothing is left undone: the kernel fills in what is touched."""

    def close(self) -> None:
        """Give all memory back, make every byte inaccessible; the addresses go when the last view goes."""
        if self._array is None:
            return
        _check(_libc.madvise(self.address, self.size, mmap.MADV_DONTNEED), "MADV_DONTNEED")
        _check(_libc.mprotect(self.address, self.size, _PROT_NONE), "mprotect")
        self._array = None

    def _check_free(self, num_bytes: int) -> None:
        free = free_bytes()
        if num_bytes > max(0, free - self._reserve_bytes):
            raise LedgerError(
                f"{format_bytes(num_bytes)} asked for, {format_bytes(free)} free on this machine, of which "
                f"{format_bytes(self._reserve_bytes)} stay",
                fix=_FIX[errno.ENOMEM],
            )

    def _checked(self, ranges: Iterable[Range]) -> list[Range]:
        if self._array is None:
            raise LedgerError("the arena is closed")
        checked: list[Range] = []
        for offset, length in ranges:
            if offset < 0 or length <= 0 or offset + length > self.size:
                raise LedgerError(f"[{offset}, +{length}) is outside 0..{self.size}", field="ranges")
            if offset % _OS_PAGE_BYTES or length % _OS_PAGE_BYTES:
                raise LedgerError(f"[{offset}, +{length}) is not page-aligned", field="ranges")
            checked.append((offset, length))
        return checked


class HostPagePool:
    """Arenas in main memory.

    Args:
        huge: Ask for huge pages.  Without them where ranges are not multiples of 2 MiB: unmapping a part of a
            huge page keeps its memory until the kernel gets round to splitting it.
        reserve_bytes: Free after every ``map`` (:func:`rose.coserve.free_memory.free_bytes`).
    """

    def __init__(self, huge: bool = True, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self._huge = huge
        self._reserve_bytes = reserve_bytes

    def reserve(self, num_bytes: int, guard: bool = False) -> Arena:
        """Reserve addresses; no memory yet.

        Args:
            num_bytes: Rounded up to 2 MiB.
            guard: Make unmapped bytes inaccessible (SIGSEGV) instead of zero on demand.
        """
        if num_bytes <= 0:
            raise LedgerError(f"{num_bytes} bytes cannot be reserved", field="num_bytes")
        return Arena(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES, guard, self._huge, self._reserve_bytes)


def _smaps_rss_bytes(start: int, end: int) -> int:
    """Resident bytes of this process's mappings inside ``[start, end)``."""
    total, inside = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            head = line.split(None, 1)[0]
            if not head.endswith(":"):
                low, _, high = head.partition("-")
                inside = int(low, 16) >= start and int(high, 16) <= end
            elif inside and head == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


# --- where the blocks of a KV buffer lie ---


class KvEntry(NamedTuple):
    """Equal layers: block ``b`` of layer ``l`` starts at ``offset + l*layer_stride + b*block_stride``."""

    offset: int
    block_stride: int
    layer_stride: int
    num_layers: int
    page_bytes: int
    """Bytes of one block in one layer (vLLM's word; not a memory page)."""


@dataclass(frozen=True)
class KvGeometry:
    """Where every KV block lies in one backing buffer.  Pure arithmetic.

    Args:
        num_blocks: Block ids are ``0 .. num_blocks - 1``.
        entries: One per group of equal layers; plain 5-tuples are fine.

    Raises:
        LedgerError: A size is not positive, or a stride is shorter than a block.
    """

    num_blocks: int
    entries: Sequence[KvEntry | tuple[int, int, int, int, int]]

    def __post_init__(self) -> None:
        if self.num_blocks <= 0:
            raise LedgerError(f"{self.num_blocks} is not positive", field="num_blocks")
        entries = tuple(KvEntry(*entry) for entry in self.entries)
        object.__setattr__(self, "entries", entries)
        for entry in entries:
            if entry.offset < 0 or entry.num_layers <= 0 or entry.page_bytes <= 0:
                raise LedgerError(f"{entry} has a size that is not positive", field="entries")
            if entry.block_stride < entry.page_bytes or (
                entry.num_layers > 1 and entry.layer_stride < entry.page_bytes
            ):
                raise LedgerError(f"{entry} has blocks that overlap", field="entries")
        if not entries:
            raise LedgerError("there is none", field="entries")

    @property
    def total_bytes(self) -> int:
        """End of the last block: what the buffer must hold."""
        return max(
            e.offset
            + (e.num_layers - 1) * e.layer_stride
            + (self.num_blocks - 1) * e.block_stride
            + e.page_bytes
            for e in map(KvEntry._make, self.entries)
        )

    def ranges(self, blocks: range) -> list[Range]:
        """Bytes of these blocks in all layers: sorted, disjoint, merged where they touch.

        Raises:
            LedgerError: A block id outside the geometry, or a step other than 1.
        """
        if blocks.step != 1 or (blocks and (blocks.start < 0 or blocks.stop > self.num_blocks)):
            raise LedgerError(f"{blocks} is not a run inside 0..{self.num_blocks}", field="blocks")
        if not blocks:
            return []
        pieces: list[Range] = []
        for entry in map(KvEntry._make, self.entries):
            pieces += _entry_ranges(entry, blocks)
        pieces.sort()
        merged = [pieces[0]]
        for offset, length in pieces[1:]:
            last, last_length = merged[-1]
            if offset <= last + last_length:
                merged[-1] = (last, max(last_length, offset + length - last))
            else:
                merged.append((offset, length))
        return merged

    def num_chunks(self, blocks_per_chunk: int) -> int:
        """Whole chunks.  Blocks behind the last one are never lent."""
        return self.num_blocks // blocks_per_chunk

    def chunk_ranges(self, chunk: int, blocks_per_chunk: int) -> list[Range]:
        return self.ranges(range(chunk * blocks_per_chunk, (chunk + 1) * blocks_per_chunk))


def _entry_ranges(entry: KvEntry, blocks: range) -> list[Range]:
    """Runs of one entry.  The inner of the two strides is folded into one run where it leaves no gap."""
    start = entry.offset + blocks.start * entry.block_stride
    axes = sorted([(entry.layer_stride, entry.num_layers), (entry.block_stride, len(blocks))])
    axes = [(stride, count) for stride, count in axes if count > 1]
    run = entry.page_bytes
    for stride, count in list(axes):
        if stride != run:
            break
        run *= count
        axes.pop(0)
    runs = [start]
    for stride, count in axes:
        runs = [base + stride * index for base in runs for index in range(count)]
    return [(base, run) for base in runs]


def num_pages(ranges: Iterable[Range], page_bytes: int = PAGE_BYTES) -> int:
    """Memory pages behind page-exact ranges."""
    return sum(length for _, length in ranges) // page_bytes


def chunk_blocks(geometry: KvGeometry, page_bytes: int = PAGE_BYTES) -> int:
    """The fewest consecutive block ids whose bytes are whole memory pages, for every chunk of that size.

    Only sizes at which chunks are whole pages apart: the whole buffer as a single chunk could never be lent.

    Raises:
        LedgerError: No size up to ``num_blocks`` does; the message says which multiple would.
    """
    entries = [KvEntry._make(entry) for entry in geometry.entries]
    # Chunk i lies i * k * block_stride behind chunk 0: that shift must be whole pages for every entry.
    step = math.lcm(*(page_bytes // math.gcd(page_bytes, entry.block_stride) for entry in entries))
    strides = {entry.block_stride for entry in entries}
    for blocks in range(step, geometry.num_blocks + 1, step):
        # With one stride all chunks are shifted copies of the first.
        chunks = 1 if len(strides) == 1 else geometry.num_chunks(blocks)
        if all(
            offset % page_bytes == 0 and length % page_bytes == 0
            for chunk in range(chunks)
            for offset, length in geometry.chunk_ranges(chunk, blocks)
        ):
            return blocks
    raise LedgerError(
        f"no run of block ids is whole pages of {format_bytes(page_bytes)}",
        field="num_blocks",
        fix=f"make it a multiple of {step} (--num-gpu-blocks-override) and align the layers to pages",
    )
