"""Memory that a step may use is never taken away; and where that fence is broken on purpose, the tests see it.

vLLM's real block pool, the balloon, the pager and its guarded memory in a process of their own, which plays the engine: each step
writes to every block that a request holds.  A block without memory ends the process with SIGSEGV.
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.pages import KvGeometry
from rose.coserve.records import ChunkState
from rose.units import PAGE_BYTES
from vllm_plugin.capacity import Balloon
from vllm_plugin.memory import ChunkPlan, Pager

CHUNKS, CHUNK_BLOCKS = 8, 4
BLOCK_BYTES = PAGE_BYTES // CHUNK_BLOCKS
BLOCKS = CHUNKS * CHUNK_BLOCKS
PLAN = ChunkPlan(
    geometry=KvGeometry(BLOCKS, [(0, BLOCK_BYTES, BLOCK_BYTES, 1, BLOCK_BYTES)]),
    num_blocks=BLOCKS,
    size_bytes=CHUNKS * PAGE_BYTES,
    chunk_blocks=CHUNK_BLOCKS,
    num_chunks=CHUNKS,
    chunk_pages=1,
    tail_bytes=0,
    aligned=True,
)
NUM_STEPS = 150


class Engine:
    """Requests come and go, chunks are lent and come back, and every step writes to what requests hold."""

    def __init__(self, pool: Any, path: Path) -> None:
        node = NodeDir(path)
        self.pool, self.balloon = pool, Balloon(pool, CHUNK_BLOCKS)
        self.wish = node.chunks_writer("serving", CHUNKS)
        self.wanted = bytearray(b"\x01" * CHUNKS)
        self.pager = Pager(node, "serving", 0, PLAN, guard=True)
        self.report = node.rank("serving", 0, CHUNKS)
        self.memory = self.pager.arena.buffer
        self.held: list[Any] = []
        self.agree()

    def agree(self) -> None:
        """Publish what is wanted and wait until the pager has done it."""
        self.wish.extra[:] = self.wanted
        self.wish.write(ChunkState(heartbeat_ns=time.monotonic_ns()))
        self.wish.wake()
        deadline_s = time.monotonic() + 30.0
        while self.report.extra != self.wanted:
            assert time.monotonic() < deadline_s
            time.sleep(0.0005)

    def lend(self, count: int) -> None:
        for chunk in self.balloon.inflate_free(count, budget_s=1.0):
            self.wanted[chunk] = 0
        self.agree()

    def take_back(self, chunks: list[int]) -> None:
        for chunk in chunks:
            self.wanted[chunk] = 1
        self.agree()
        self.balloon.deflate(chunks)

    def step(self) -> None:
        for block in self.held:
            at = block.block_id * BLOCK_BYTES
            self.memory[at] = self.memory[at + BLOCK_BYTES - 1] = 1

    def run(self, rng: random.Random) -> None:
        for _ in range(NUM_STEPS):
            match rng.randrange(4):
                case 0 if free := self.pool.get_num_free_blocks():
                    self.held += self.pool.get_new_blocks(rng.randint(1, min(free, 6)))
                case 1 if self.held:
                    rng.shuffle(self.held)
                    count = rng.randint(1, len(self.held))
                    self.pool.free_blocks([self.held.pop() for _ in range(count)])
                case 2:
                    self.lend(rng.randint(1, 3))
                case 3 if self.balloon.inflated:
                    lent = sorted(self.balloon.inflated)
                    self.take_back(rng.sample(lent, rng.randint(1, len(lent))))
            self.step()


def outcome(path: Path, seed: int, break_it: Callable[[], None]) -> int:
    """Run an engine in a child process: its exit code, or the signal that ended it as a negative number."""
    from vllm.v1.core.block_pool import BlockPool

    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()  # the fault is expected
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            break_it()
            pool = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=16)
            Engine(pool, path).run(random.Random(seed))
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _whole() -> None:
    return


def _without_the_look_at_requests() -> None:
    """The balloon takes a chunk whatever holds it."""
    Balloon.active_blocks = lambda self, chunk: []  # type: ignore[method-assign]


def _without_the_wait_for_memory() -> None:
    """A chunk is used again before it is mapped."""

    def at_once(self: Engine, chunks: list[int]) -> None:
        self.balloon.deflate(chunks)

    Engine.take_back = at_once  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(3))
def test_no_step_meets_memory_that_was_lent(tmp_path: Path, seed: int) -> None:
    assert outcome(tmp_path, seed, _whole) == 0


@pytest.mark.parametrize(
    "break_it", [_without_the_look_at_requests, _without_the_wait_for_memory], ids=lambda f: f.__name__
)
def test_a_broken_fence_is_caught(tmp_path: Path, break_it: Callable[[], None]) -> None:
    assert outcome(tmp_path, 0, break_it) == -signal.SIGSEGV
