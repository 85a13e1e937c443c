"""KV memory of one engine as chunks of whole pages, and the worker thread that maps and unmaps them.

:class:`ChunkPlan` is computed by the scheduler and by every worker from the same ``KVCacheConfig``, so both
speak of the same chunk numbers.  :class:`Pager` lives in each worker: it sleeps on ``<role>.chunks``, makes the
memory agree with it, and reports in ``<role>.rank<k>``.

Chunks that come or go together do so in as few calls as their numbers allow: one per contiguous run of chunks and layer.

The order is the scheduler's duty: a chunk is taken out of the block pool *before* it is unmarked, and
returned to the pool only *after* every rank reports it mapped.  Steps that were scheduled before that may still be on their
way: the pager waits for them (:class:`~vllm_plugin.kv_memory.StepFence`).  It therefore never touches
memory that a step may use, and needs no lock with it.

A report names the generation of marks that the pager acts by; the engine core believes it of a chunk only from the generation on
that set the chunk's mark (:mod:`rose.policy.coserving`).  A chunk on its way out is reported as such until its memory is gone.

What the memory is (main memory, a GPU's) is behind :class:`~vllm_plugin.kv_memory.KvMemory`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rose.coserve.audit import AUDIT_EVERY_S
from rose.coserve.node_dir import NodeDir
from rose.coserve.pages import KvGeometry, PageArena, Range
from rose.coserve.records import Mode, RankState
from rose.errors import ConfigError, LedgerError
from rose.policy.coserving.chunks import MAPPED, MOVING, UNMAPPED
from rose.policy.coserving.runs import runs
from rose.policy.coserving.serving import chunks_at_start
from rose.units import NS_PER_S, PAGE_BYTES, format_bytes
from vllm_plugin import compat
from vllm_plugin.compat import OS_PAGE_BYTES
from vllm_plugin.kv_layout import CountedCache, kv_entries
from vllm_plugin.kv_memory import FENCE_S, HostKvMemory, KvMemory, StepFence
from vllm_plugin.roles import ENV_ENGINE, ENV_PEER_PAGES

logger = logging.getLogger("vllm.rose")

HEARTBEAT_S = 0.25
TRIM_AFTER_S = 5.0
"""Memory kept for a growth that has not come for so long goes back to the device."""
MAP_SLICE_CHUNKS = 8
"""Chunks mapped at once before the report is refreshed: keeps a reclaim from waiting behind a long growth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """How the KV allocation is cut into chunks.

    Attributes:
        piece_bytes: Every run of a chunk is a multiple of it, and begins at one.
        size_bytes: Of the whole allocation.
        chunk_blocks: Block ids per chunk; chunk ``c`` is blocks ``[c * chunk_blocks, (c+1) * chunk_blocks)``.
        num_chunks: Whole chunks; the blocks behind the last one are never lent.
        chunk_pages: 2 MiB pages per chunk, over all layers.
        tail_bytes: Bytes that belong to no chunk (always mapped).
        aligned: Every run of a chunk is a multiple of 2 MiB, so huge pages can back it.
    """

    geometry: KvGeometry
    num_blocks: int
    size_bytes: int
    chunk_blocks: int
    num_chunks: int
    chunk_pages: int
    tail_bytes: int
    aligned: bool
    piece_bytes: int = OS_PAGE_BYTES

    @classmethod
    def of(cls, kv_cache_config: Any, piece_bytes: int = OS_PAGE_BYTES) -> ChunkPlan:
        """Plan of a ``KVCacheConfig``, whose layers are set apart as :func:`kv_layout.page_layers` does, or of a ``CountedCache``.

        Raises:
            ConfigError: Its layers are not one group's that fills one allocation, or it is too small to be cut into four chunks.
        """
        if isinstance(kv_cache_config, CountedCache):
            return cls._counted(kv_cache_config)
        num_blocks, size_bytes, entries = kv_entries(kv_cache_config, piece_bytes)
        geometry = KvGeometry(num_blocks=num_blocks, entries=entries)
        block_bytes = sum(num_layers * page_bytes for _, _, _, num_layers, page_bytes in entries)
        run_bytes = [_run_bytes_per_block(entry) for entry in entries]
        # Smallest number of blocks whose memory is whole 2 MiB pages in total and whole pieces in each run.
        chunk_blocks = PAGE_BYTES // math.gcd(PAGE_BYTES, block_bytes)
        for run in run_bytes:
            chunk_blocks = math.lcm(chunk_blocks, piece_bytes // math.gcd(piece_bytes, run))
        num_chunks = num_blocks // chunk_blocks
        if num_chunks < 4:
            raise ConfigError(
                f"{format_bytes(size_bytes)} is {num_chunks} chunks of {chunk_blocks} blocks; 4 are needed",
                field="KV cache size",
                fix="give the engine more KV memory",
            )
        return cls(
            geometry=geometry,
            num_blocks=num_blocks,
            size_bytes=size_bytes,
            chunk_blocks=chunk_blocks,
            num_chunks=num_chunks,
            chunk_pages=chunk_blocks * block_bytes // PAGE_BYTES,
            tail_bytes=size_bytes - num_chunks * chunk_blocks * block_bytes,
            aligned=all(chunk_blocks * run % PAGE_BYTES == 0 for run in run_bytes),
            piece_bytes=piece_bytes,
        )

    @classmethod
    def _counted(cls, cache: CountedCache) -> ChunkPlan:
        """One chunk of everything: the null block is in it, so it is never lent."""
        block_bytes = cache.size_bytes // cache.num_blocks
        chunk_pages = cache.size_bytes // PAGE_BYTES
        return cls(
            geometry=KvGeometry(
                num_blocks=cache.num_blocks, entries=[(0, block_bytes, block_bytes, 1, block_bytes)]
            ),
            num_blocks=cache.num_blocks,
            size_bytes=cache.size_bytes,
            chunk_blocks=cache.num_blocks,
            num_chunks=1,
            chunk_pages=chunk_pages,
            tail_bytes=cache.size_bytes - chunk_pages * PAGE_BYTES,
            aligned=False,
        )

    @property
    def total_pages(self) -> int:
        """Pages of all chunks: what this engine could hold."""
        return self.num_chunks * self.chunk_pages

    @property
    def lendable_pages(self) -> int:
        """Of these at most: the first chunk has vLLM's null block and is never lent."""
        return self.total_pages - self.chunk_pages

    def ranges(self, chunks: Iterable[int]) -> list[Range]:
        """Byte ranges ``(offset, length)`` of chunks, given in order, in the allocation; neighbours in one piece in each layer."""
        found: list[Range] = []
        for first, count in runs(chunks):
            found += self.geometry.ranges(
                range(first * self.chunk_blocks, (first + count) * self.chunk_blocks)
            )
        return found

    def run_ranges(self, mapped: bytes | bytearray) -> tuple[list[Range], list[Range]]:
        """Ranges of all chunks that are mapped, and of all that are not."""
        chunks = range(self.num_chunks)
        return self.ranges(c for c in chunks if mapped[c]), self.ranges(c for c in chunks if not mapped[c])

    def tail_ranges(self) -> list[tuple[int, int]]:
        """Whole pieces that belong to no chunk: blocks behind the last one, and what sets layers apart."""
        end = -(-self.size_bytes // self.piece_bytes) * self.piece_bytes
        found, at = [], 0
        for offset, length in [*self.geometry.ranges(range(self.num_chunks * self.chunk_blocks)), (end, 0)]:
            if offset > at:
                found.append((at, offset - at))
            at = offset + length
        return found


def _run_bytes_per_block(entry: tuple[int, int, int, int, int]) -> int:
    """Contiguous bytes one more block id adds to each run of an entry."""
    _, block_stride, _, num_layers, page_bytes = entry
    return num_layers * page_bytes if block_stride == num_layers * page_bytes else page_bytes


def engine_number() -> int:
    """Of the engine that this process belongs to, as its core made it before it started its workers; 0: none has."""
    return int(os.environ.get(ENV_ENGINE, "0"))


class Pager:
    """Maps and unmaps the chunks of one worker rank.

    Args:
        node_dir: The node directory.
        role: ``serving`` starts with everything mapped but what the peer still holds, ``rollout`` with nothing but the tail.
        rank: Of this worker in its engine.
        plan: The chunk plan.
        guard: Make released ranges inaccessible, so that a use after release faults (tests).
        memory: Of the worker's device; None = main memory.

    Attributes:
        fence: Where the worker notes the steps that it has launched.
    """

    def __init__(
        self,
        node_dir: NodeDir,
        role: str,
        rank: int,
        plan: ChunkPlan,
        *,
        guard: bool,
        memory: KvMemory | None = None,
    ) -> None:
        self.plan = plan
        self._memory = memory if memory is not None else HostKvMemory()
        self.fence = StepFence(self._memory)
        self._role = role
        self._chunks = node_dir.chunks(role, plan.num_chunks)
        self._node, self._neighbour = node_dir.node(), node_dir.rollout_lease()
        self._mapped = bytearray(plan.num_chunks)
        self._torn: set[int] = set()
        """Chunks of which a call that failed has left a part: to be unmapped, before anything else becomes of them."""
        self._engine = engine_number()
        self._generation = self._told_generation = 0
        self._unmended = ""
        self._released_s = time.monotonic()
        self.arena: PageArena = self._memory.reserve(plan.size_bytes, aligned=plan.aligned, guard=guard)
        try:
            if tail := plan.tail_ranges():
                self.arena.map(tail)
            if role == "serving":
                peer_pages = int(os.environ.get(ENV_PEER_PAGES, "0"))
                self._map(range(chunks_at_start(plan.num_chunks, plan.chunk_pages, peer_pages)))
            # Last: a report that has a writer says that the memory is there.
            self._report = node_dir.rank_writer(role, rank, plan.num_chunks)
        except BaseException:
            self.arena.close()
            raise
        self._audited = RankState()
        self._served = False
        """Has there been an engine core?  Nobody uses a released page from then on."""
        self._publish()
        self._stopping = self._closed = False
        self._trouble = ""
        self.num_rounds = 0
        """How often the thread has looked at what is wanted."""
        self._thread = threading.Thread(target=self._run, name=f"rose-pager-{rank}", daemon=True)
        self._thread.start()

    def tensor(self) -> Any:
        """The whole allocation as one int8 tensor."""
        return self._memory.tensor(self.arena, self.plan.size_bytes)

    def _map(self, chunks: Sequence[int]) -> None:
        """Map chunks with one call.

        Raises:
            LedgerError: None is mapped; those that could not be cleaned up are torn.
        """
        try:
            self.arena.map(self.plan.ranges(chunks))
        except LedgerError:
            self._mark_torn(chunks)
            raise
        for chunk in chunks:
            self._mapped[chunk] = MAPPED

    def _map_what_fits(self, chunks: Sequence[int]) -> None:
        """Map chunks: with one call where all fit, and else the first that do.

        Raises:
            LedgerError: Some did not.
        """
        try:
            self._map(chunks)
        except LedgerError:
            half = len(chunks) // 2
            if not half or self._torn:
                raise
            self._map_what_fits(chunks[:half])
            self._map_what_fits(chunks[half:])
            return

    def _unmap(self, chunks: Sequence[int]) -> None:
        """Unmap chunks with one call.

        Raises:
            LedgerError: Those that are not gone are torn.
        """
        try:
            self.arena.unmap(self.plan.ranges(chunks))
        except LedgerError:
            self._mark_torn(chunks)
            raise
        self._torn.difference_update(chunks)
        for chunk in chunks:
            self._mapped[chunk] = UNMAPPED

    def _mark_torn(self, chunks: Sequence[int]) -> None:
        """What has become of chunks behind a call that failed, by the arena's word."""
        for chunk in chunks:
            is_left = self.arena.resident_bytes(self.plan.ranges([chunk])) > 0
            self._mapped[chunk] = MOVING if is_left else UNMAPPED
            if is_left:
                self._torn.add(chunk)
            else:
                self._torn.discard(chunk)

    def _publish(self, wake: bool = True) -> None:
        try:
            self._report.mend()  # what a stranger made of it is not ours to serve from
        except LedgerError as error:  # those who have met us read on
            if self._unmended != str(error):
                self._unmended = str(error)
                logger.error("ROSE pager: %s", error)
        self._told_generation = self._generation
        self._report.extra[:] = self._mapped
        retained = -(-self.arena.retained_bytes // PAGE_BYTES)
        self._report.write(
            replace(
                self._audited,
                engine=self._engine,
                generation=self._generation,
                resident_pages=sum(map(bool, self._mapped)) * self.plan.chunk_pages + retained,
                retained_pages=retained,
                heartbeat_ns=time.monotonic_ns(),
            )
        )
        if wake:
            self._report.wake()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._look()
                self._trouble = ""
            except Exception as error:  # this thread must outlive everything: see below
                # Memory that could not be mapped stays reported as unmapped: the scheduler keeps the chunk in
                # the balloon, and the next round tries again.  A file that cannot be read may be replaced.
                if self._trouble != str(error):  # one line, not one in every round
                    self._trouble = str(error)
                    if isinstance(error, LedgerError) and not self._served:
                        # Of an engine before ours, perhaps of another model: ours writes its own soon, and says what is wrong if it cannot.
                        logger.info("ROSE pager: waits for its engine core's file: %s", error)
                    else:
                        logger.error("ROSE pager: %s", error, exc_info=error)
                time.sleep(HEARTBEAT_S)

    def _look(self) -> None:
        """Look at what is wanted, make the memory agree with it, sleep until something changes."""
        if self._role == "serving":
            compat.let_spin(not self._has_neighbour())
        word = self._chunks.word()
        try:
            wanted = self._wanted()
            if wanted is not None:
                self.agree(*wanted)
            self.arena.mend()
            if self.arena.retained_bytes and time.monotonic() - self._released_s > TRIM_AFTER_S:
                self.arena.trim()
            if self._served and time.monotonic_ns() - self._audited.audited_ns > AUDIT_EVERY_S * NS_PER_S:
                self.audit()
        finally:
            self.num_rounds += 1
            # A heartbeat is nobody's reason to look; that newer marks are acted by is.
            self._publish(wake=self._generation != self._told_generation)
        self._chunks.wait(word, HEARTBEAT_S)

    def _has_neighbour(self) -> bool:
        """May a rollout engine run on the device, or owe it memory?  Unreadable counts as one."""
        try:
            if not self._neighbour.alive():
                return False
            node, lease = self._node.read(), self._neighbour.read()
            may_run = node is not None and node.mode == Mode.ON
            return may_run or (lease is not None and lease.reserved_pages > 0)
        except LedgerError:
            return True

    def _wanted(self) -> tuple[bytes, int, int] | None:
        """What our engine core wants mapped, the step to wait for, and the generation; None: nothing is known, leave
        everything as it is.

        Workers start before their engine core writes: until then the file is that of another engine, dead or about to die,
        and speaks of its loan, not of ours.
        """
        if self._chunks.alive():
            before = self._chunks.read()  # the marks are at least as new as its generation
            wanted = self._chunks.extra
            record = self._chunks.read()  # behind the marks: see ChunkState.after_step
            known = before is not None and record is not None and record.engine == self._engine
            if known and len(wanted) == self.plan.num_chunks:
                if not self._served:
                    # vLLM's warm-up comes before there is an engine core, and may have used any of it.
                    self.arena.wipe(self.plan.run_ranges(self._mapped)[1])
                    self._served = True
                self.fence.close(False)
                return wanted, record.after_step, before.generation
        if self._role == "serving":
            return None
        if self._served:
            # Our engine core is gone.  What it has sent may be running, or lie unread: none begins any more, and the one that runs is
            # waited for, for it uses memory that nobody is left to take out of its block pool.
            self.fence.close()
        return bytes(self.plan.num_chunks), 0, self._generation

    def agree(self, wanted: bytes, after_step: int = 0, generation: int = 0) -> None:
        """Make the memory agree with ``wanted`` (one byte per chunk): releases first, then growth in slices.

        Args:
            after_step: No step up to this one may find its memory gone.
            generation: Of ``wanted``.

        Raises:
            LedgerError: Steps in flight do not end, or memory cannot be taken away (growth goes on), or it cannot be had.
        """
        self._generation = generation  # nothing is done for older marks any more
        chunks = range(self.plan.num_chunks)
        stuck = self._clear_torn()
        for chunk in [c for c in chunks if self._mapped[c] == MOVING and wanted[c] and c not in self._torn]:
            self._mapped[chunk] = MAPPED
        going = [c for c in chunks if self._mapped[c] and not wanted[c]]
        late = self._release(going, after_step, 0.0)
        missing = [c for c in chunks if wanted[c] and not self._mapped[c]]
        word = self._chunks.word()
        for start in range(0, len(missing), MAP_SLICE_CHUNKS):
            try:
                self._grow(missing[start : start + MAP_SLICE_CHUNKS])
            finally:
                self._publish()
            if self._chunks.word() != word:  # the wish has changed: look again before growing further
                break
        if (
            late is not None
        ):  # behind the growth: what production wants back does not wait for what it gives up
            late = self._release(going, after_step, FENCE_S) or (late if self._torn else None)
        if late is not None or stuck is not None:
            raise late or stuck  # type: ignore[misc]

    def _clear_torn(self) -> LedgerError | None:
        """Take away what failed calls have left: nobody uses it, and no step does."""
        if not self._torn:
            return None
        try:
            self._unmap(sorted(self._torn))
        except LedgerError as error:
            return error
        finally:
            self._publish()
        return None

    def _grow(self, chunks: list[int]) -> None:
        """Report the chunks as ``MOVING``, then map those that are still wanted.

        The report comes first: the pages that workers of a dead engine core hold are counted from it, and without it a chunk that is
        just being mapped would be counted as free and given away.
        """
        for chunk in chunks:
            self._mapped[chunk] = MOVING
        try:
            self._publish(wake=False)
            wanted = self._wanted()
            still = [chunk for chunk in chunks if wanted is not None and wanted[0][chunk]]
            if still:
                self._map_what_fits(still)
        finally:
            for chunk in chunks:
                if self._mapped[chunk] == MOVING and chunk not in self._torn:
                    self._mapped[chunk] = UNMAPPED

    def _release(self, chunks: list[int], after_step: int, timeout_s: float) -> LedgerError | None:
        """Unmap what nobody wants, when no step can touch it any more; the error where that takes longer than ``timeout_s`` or fails."""
        chunks = [chunk for chunk in chunks if self._mapped[chunk] and chunk not in self._torn]
        if not chunks:
            return None
        for chunk in chunks:
            self._mapped[chunk] = MOVING
        self._publish(wake=False)
        try:
            self.fence.wait(after_step, timeout_s)
        except LedgerError as error:
            return error
        wanted = self._wanted()  # what is wanted back by now need not go and come
        back = {chunk for chunk in chunks if wanted is not None and wanted[0][chunk]}
        for chunk in back:
            self._mapped[chunk] = MAPPED
        try:
            self._unmap([chunk for chunk in chunks if chunk not in back])
        except LedgerError as error:
            return error
        finally:
            self._released_s = time.monotonic()
            self._publish()
        return None

    def audit(self) -> None:
        """Hold the book against the kernel's word.  On the pager's thread: nothing is on its way in or out meanwhile.

        A few system calls for each run of chunks in each layer; the interpreter lock is free during each.
        """
        mapped, released = self.plan.run_ranges(self._mapped)
        mapped += self.plan.tail_ranges()
        booked = sum(length for _, length in mapped)
        self._audited = RankState(
            booked_bytes=booked,
            missing_bytes=booked - self.arena.resident_bytes(mapped),
            touched_bytes=self.arena.touched_bytes(released),
            audited_ns=time.monotonic_ns(),
        )

    def resident_bytes(self) -> int:
        """What is resident of the KV allocation: by the kernel's word on the host, by the books of the driver's calls on a GPU."""
        return self.arena.resident_bytes()

    def close(self) -> None:
        """No step runs any more, and none will.  A rollout worker's memory goes first: without a report nobody counts it, and a process
        that ends in the idle class takes its time.  Where it does not go, the report stays for as long as the process does."""
        if self._closed:
            return
        self._stopping = True
        self._thread.join(timeout=2.0)
        if self._thread.is_alive():
            return
        self._closed = True
        if self._role == "rollout":
            try:
                self.fence.wait(0, FENCE_S)  # a device may still be at what was launched last
                self._unmap([chunk for chunk in range(self.plan.num_chunks) if self._mapped[chunk]])
            except LedgerError as error:
                logger.error("ROSE pager: %s", error)
                return
            self._publish()
        self._report.close()
