"""The pager on CUDA's own calls, through the real bindings: how many a GiB takes, and that none goes under a kernel.

The device is the stand-in for the driver's library (``tests/coserve/fakecuda``); the shape is that of Qwen2.5-7B.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rose.coserve.cuda_driver import CudaDriver
from rose.coserve.ledger import RecordWriter
from rose.coserve.node_dir import NodeDir
from rose.coserve.pages import KvGeometry
from rose.coserve.records import ChunkState
from rose.policy.coserving.chunks import MAPPED, UNMAPPED
from rose.units import PAGE_BYTES
from tests.coserve import fakecuda
from tests.coserve.fakecuda import Device, Hooks
from vllm_plugin.kv_memory import CudaKvMemory
from vllm_plugin.memory import MAP_SLICE_CHUNKS, ChunkPlan, Pager

pytestmark = fakecuda.ONLY_WITHOUT_A_GPU

LAYERS, BLOCK_BYTES = 28, 2 * 16 * 4 * 128 * 2
"""Keys and values of 16 tokens, 4 heads of 128, bf16, in each layer."""
CHUNK_BLOCKS = PAGE_BYTES // BLOCK_BYTES
CHUNKS = 24
GIB_CHUNKS = 18
"""56 MiB each."""


def plan() -> ChunkPlan:
    num_blocks = CHUNKS * CHUNK_BLOCKS
    layer_bytes = num_blocks * BLOCK_BYTES
    return ChunkPlan(
        geometry=KvGeometry(num_blocks, [(0, BLOCK_BYTES, layer_bytes, LAYERS, BLOCK_BYTES)]),
        num_blocks=num_blocks,
        size_bytes=LAYERS * layer_bytes,
        chunk_blocks=CHUNK_BLOCKS,
        num_chunks=CHUNKS,
        chunk_pages=LAYERS,
        tail_bytes=0,
        aligned=True,
        piece_bytes=PAGE_BYTES,
    )


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Hooks]:
    with Device(tmp_path, pages=2000).plugged() as hooks:
        yield hooks


@pytest.fixture
def pager(gpu: Hooks, tmp_path: Path) -> Iterator[Pager]:
    memory = CudaKvMemory("rollout", driver=CudaDriver(0), reserve_bytes=0)
    pager = Pager(NodeDir(tmp_path / "node"), "rollout", 0, plan(), guard=True, memory=memory)
    yield pager
    pager.close()
    pager.arena.close()
    assert gpu.left() == {}


@pytest.fixture
def writer(tmp_path: Path, pager: Pager) -> Iterator[RecordWriter[ChunkState]]:
    with NodeDir(tmp_path / "node").chunks_writer("rollout", CHUNKS) as writer:
        yield writer


def wish(writer: RecordWriter[ChunkState], chunks: set[int], after_step: int = 0) -> None:
    writer.extra[:] = bytes(int(chunk in chunks) for chunk in range(CHUNKS))
    writer.write(ChunkState(after_step=after_step, heartbeat_ns=time.monotonic_ns()))
    writer.wake()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "condition did not come true"
        time.sleep(0.002)


def calls_until(
    gpu: Hooks, pager: Pager, writer: RecordWriter[ChunkState], chunks: set[int]
) -> dict[str, int]:
    names = ("cuMemMap", "cuMemSetAccess", "cuMemsetD8Async", "cuMemUnmap")
    before = {name: gpu.count(name) for name in names}
    wish(writer, chunks)
    wanted = bytes(MAPPED if chunk in chunks else UNMAPPED for chunk in range(CHUNKS))
    until(lambda: bytes(pager._mapped) == wanted)
    return {name: gpu.count(name) - before[name] for name in names if gpu.count(name) > before[name]}


@pytest.mark.usefixtures("pager")
def test_a_gib_of_neighbours_takes_one_call_per_layer_and_slice(
    gpu: Hooks, pager: Pager, writer: RecordWriter[ChunkState]
) -> None:
    chunks = set(range(1, 1 + GIB_CHUNKS))
    slices = -(-GIB_CHUNKS // MAP_SLICE_CHUNKS)
    assert calls_until(gpu, pager, writer, chunks) == {
        "cuMemMap": GIB_CHUNKS * LAYERS,
        "cuMemSetAccess": slices * LAYERS,
        "cuMemsetD8Async": slices * LAYERS,
    }
    assert calls_until(gpu, pager, writer, set()) == {"cuMemUnmap": LAYERS}


def test_memory_stays_under_a_kernel_in_flight_and_goes_behind_it(
    gpu: Hooks, pager: Pager, writer: RecordWriter[ChunkState]
) -> None:
    """The stand-in writes down an unmap under queued work, and the process's CUDA is over then."""
    cuda = CudaDriver(0)
    stream, _ = cuda.green_stream(64)
    wish(writer, {1, 2})
    until(lambda: bytes(pager._mapped[1:3]) == b"\x01\x01")
    gpu.hold()
    gpu.kernel(stream, pager.arena.address + PAGE_BYTES)
    pager.fence.launched(1, stream)
    asked = gpu.count("cuEventQuery")
    wish(writer, {2}, after_step=1)
    until(lambda: gpu.count("cuEventQuery") > asked + 2)
    assert gpu.count("mappings") == 2 * LAYERS
    gpu.hold(False)
    until(lambda: gpu.count("mappings") == LAYERS)
