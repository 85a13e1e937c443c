"""CUDA's driver without a GPU: books that keep its rules, and the same over real memory, so that tensors can be written.

The contract suite (``test_page_pools.py``) puts the same questions to these and, where there is a GPU, to the real driver.
"""

from __future__ import annotations

from typing import Any

from rose.coserve.cuda_driver import DLPACK_CPU, NotReady, Spans
from rose.coserve.pages import Arena, HostPagePool
from rose.errors import LedgerError
from rose.units import PAGE_BYTES

P = PAGE_BYTES


class MemoryDriver:
    """CUDA's calls as bookkeeping; every misuse is an error, as it is there.

    Attributes:
        calls: How often each was made.
        fail_at: Which of them fails: ``{"create": 3}`` is the third.
        speaks, sms: What the driver says of itself and of the device's SMs.
        green: SMs of each green stream that was made.
        trace: Names of the calls that take memory away or look at streams, in order.
        launched, finished: Kernels of each stream: :meth:`work` launches one, :meth:`done` finishes all.
    """

    granularity = P
    dlpack_device = (DLPACK_CPU, 0)

    def __init__(self, capacity_pages: int = 64) -> None:
        self.capacity = capacity_pages * P
        self.handles: dict[object, bool] = {}  # handle -> reads as zeros
        self.ranges: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, object]] = {}
        self.readable: set[int] = set()
        self.not_ready = 0
        self.fail_at: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.trace: list[str] = []
        self.launched: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.speaks: tuple[int, int] = (13, 0)
        self.sms: tuple[int, int, int] = (132, 8, 8)
        self.green: list[int] = []
        self._zeroing: list[tuple[int, int]] = []

    def work(self, stream: int) -> None:
        """A kernel is launched."""
        self.launched[stream] = self.launched.get(stream, 0) + 1

    def done(self, stream: int) -> None:
        """Everything on ``stream`` has run."""
        self.finished[stream] = self.launched.get(stream, 0)

    def record(self, stream: int) -> tuple[int, int]:
        self._step("record")
        self.trace.append("record")
        return stream, self.launched.get(stream, 0)

    def passed(self, event: tuple[int, int]) -> bool:
        self._step("passed")
        stream, behind = event
        return self.finished.get(stream, 0) >= behind

    def drop(self, event: Any) -> None:
        self._step("drop")

    def version(self) -> tuple[int, int]:
        return self.speaks

    def sm_split(self) -> tuple[int, int, int]:
        self._step("sm_split")
        return self.sms

    def green_stream(self, num_sms: int) -> tuple[int, int]:
        self._step("green_stream")
        total, step, least = self.sms
        assert least <= num_sms < total
        assert num_sms % step == 0
        self.green.append(num_sms)
        return 1000 + len(self.green), num_sms

    def spans(self) -> Spans:
        return Spans(access=True, access_shared=True, unmap=True, unmap_shared=True)

    def _step(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.fail_at.get(name) == self.calls[name]:
            raise LedgerError(f"{name} failed: CUDA_ERROR_OUT_OF_MEMORY")

    def reserve(self, size: int) -> int:
        self._step("reserve")
        address = 1 << 40 if not self.ranges else max(self.ranges) + (1 << 36)
        self.ranges[address] = size
        return address

    def free_range(self, address: int, size: int) -> None:
        assert self.ranges.pop(address) == size
        assert not [at for at in self.mappings if address <= at < address + size], "freed while mapped"

    def create(self, size: int) -> object:
        self._step("create")
        if self.free_bytes() < size:
            raise LedgerError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
        handle = object()
        self.handles[handle] = False
        return handle

    def release(self, handle: object) -> None:
        assert handle not in [mapped for _, mapped in self.mappings.values()], "released while mapped"
        del self.handles[handle]

    def map(self, address: int, size: int, handle: object) -> None:
        self._step("map")
        assert size == P, "a mapping is a whole handle"
        assert handle in self.handles
        assert any(
            start <= address and address + size <= start + length for start, length in self.ranges.items()
        )
        assert address not in self.mappings, "mapped twice"
        self.mappings[address] = (size, handle)

    def unmap(self, address: int, size: int) -> None:
        self._step("unmap")
        self.trace.append("unmap")
        assert not [at for at, length in self._zeroing if at < address + size and address < at + length], (
            "unmapped under a kernel that writes there"
        )
        for at in range(address, address + size, P):
            del self.mappings[at]
            self.readable.discard(at)

    def allow(self, address: int, size: int) -> None:
        if self.not_ready:
            self.not_ready -= 1
            raise NotReady("cuMemSetAccess: not ready")
        self._step("allow")
        for at in range(address, address + size, P):
            assert at in self.mappings
            self.readable.add(at)

    def zero(self, address: int, size: int) -> None:
        self._step("zero")
        for at in range(address, address + size, P):
            assert at in self.readable
        self._zeroing.append((address, size))

    def settle(self) -> None:
        self._step("settle")
        for address, size in self._zeroing:
            for at in range(address, address + size, P):
                self.handles[self.mappings[at][1]] = True
        self._zeroing.clear()

    def is_zero(self, address: int, size: int) -> bool:
        return all(self.handles[self.mappings[at][1]] for at in range(address, address + size, P))

    def free_bytes(self) -> int:
        return self.capacity - len(self.handles) * P


class RealMemoryDriver(MemoryDriver):
    """The same rules, with main memory behind what is mapped: a byte behind no handle of its own is a fault.

    A shared fallback handle cannot be shown twice in main memory, so arenas on it must be guarded to be read.
    """

    def __init__(self, capacity_pages: int = 64) -> None:
        super().__init__(capacity_pages)
        self.memory: dict[int, Arena] = {}

    def reserve(self, size: int) -> int:
        self._step("reserve")
        arena = HostPagePool().reserve(size, guard=True)
        self.memory[arena.address] = arena
        self.ranges[arena.address] = size
        return arena.address

    def free_range(self, address: int, size: int) -> None:
        super().free_range(address, size)
        self.memory.pop(address).close()

    def map(self, address: int, size: int, handle: object) -> None:
        super().map(address, size, handle)
        arena = self._arena(address)
        arena.map([(address - arena.address, size)])

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        arena = self._arena(address)
        arena.unmap([(address - arena.address, size)])

    def _arena(self, address: int) -> Arena:
        return next(a for at, a in self.memory.items() if at <= address < at + a.size)
