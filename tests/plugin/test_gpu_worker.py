"""The KV memory of a GPU worker: the pager, the fence and the worker class on CUDA's rules, kept by a driver in memory.

The driver has main memory behind what is mapped, so vLLM's own views of its cache can be written; a byte behind memory that was
given back ends the process.  On a GPU the same pool runs in ``tests/coserve/test_page_pools.py`` and in ``benchmarks/gpu_check.py``.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import os
import queue
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.coserve.cuda_driver import DLPACK_CPU
from rose.coserve.cuda_pages import DEFAULT_RESERVE_BYTES
from rose.coserve.ledger import RecordWriter
from rose.coserve.node_dir import NodeDir
from rose.coserve.pages import HostPagePool
from rose.coserve.records import ChunkState
from rose.errors import ConfigError, LedgerError
from rose.policy.coserving.chunks import MAPPED, MOVING
from rose.policy.coserving.events import MarksWritten, Report
from rose.units import PAGE_BYTES
from tests.coserve.memory_driver import RealMemoryDriver
from tests.plugin import harness
from tests.plugin.reports import having_memory
from vllm_plugin import internals, kv_memory
from vllm_plugin.kv_layout import page_layers
from vllm_plugin.kv_memory import CudaKvMemory, HostKvMemory, StepFence, tensor_over
from vllm_plugin.memory import ChunkPlan, Pager

STREAM = 7
CHUNKS = 16


@pytest.fixture
def node_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeDir:
    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "node"))
    monkeypatch.setenv("ROSE_GUARD", "1")
    monkeypatch.delenv("ROSE_GPU_RESERVE_BYTES", raising=False)
    return NodeDir(tmp_path / "node")


@pytest.fixture
def driver() -> RealMemoryDriver:
    """With room for the non-KV reserve of a rollout engine, and 200 pages."""
    return RealMemoryDriver(capacity_pages=DEFAULT_RESERVE_BYTES // PAGE_BYTES + 200)


def config_of(num_blocks: int = 512) -> Any:
    """Two layers of 64 KiB a block, layers outermost: 32 blocks are one page in each."""
    config = harness.kv_cache_config(None)
    (tensor,) = config.kv_cache_tensors
    page = 2 * tensor.block_stride
    config.num_blocks = num_blocks
    config.kv_cache_tensors = [
        dataclasses.replace(
            tensor, size=2 * num_blocks * page, block_stride=page, layer_stride=num_blocks * page
        )
    ]
    spec = dataclasses.replace(config.kv_cache_groups[0].kv_cache_spec, num_kv_heads=4)
    config.kv_cache_groups[0].kv_cache_spec = spec
    assert spec.page_size_bytes == page == 64 * 1024
    return config


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, node_dir: NodeDir, driver: RealMemoryDriver
) -> Iterator[Callable[..., Any]]:
    """A GPU worker of ``role`` on that driver, with vLLM's own allocation of a KV cache behind it."""
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.utils import allocate_kv_cache

    from vllm_plugin.gpu_worker import RoseGPUWorker

    started: list[Any] = []

    def allocate(self: Any, kv_cache_config: Any) -> None:
        self.caches = allocate_kv_cache(kv_cache_config, torch.device("cpu"), KVCacheLayout.LBNHC)

    def execute(self: Any, scheduler_output: Any) -> str:
        if scheduler_output is None:
            raise RuntimeError("injected")
        self.driver.work(STREAM)
        return "output"

    monkeypatch.setattr(Worker, "initialize_from_config", allocate)
    monkeypatch.setattr(Worker, "execute_model", execute)
    monkeypatch.setattr(Worker, "shutdown", lambda self: None)
    monkeypatch.setattr(internals, "compute_stream", lambda: STREAM)
    monkeypatch.setattr(RoseGPUWorker, "rose_driver", lambda self: self.driver)

    def start(role: str, num_blocks: int = 512) -> Any:
        monkeypatch.setenv("ROSE_ROLE", role)
        worker: Any = object.__new__(RoseGPUWorker)
        worker.rank, worker.driver = 0, driver
        started.append(worker)
        worker.initialize_from_config(config_of(num_blocks))
        return worker

    yield start
    for worker in started:
        worker.shutdown()


def step(worker: Any, number: int) -> Any:
    output = SimpleNamespace()
    internals.stamp(output, number)
    return worker.execute_model(output)


def wish(writer: RecordWriter[ChunkState], chunks: set[int], after_step: int = 0) -> None:
    writer.extra[:] = bytes(int(chunk in chunks) for chunk in range(CHUNKS))
    writer.write(ChunkState(after_step=after_step, heartbeat_ns=time.monotonic_ns()))
    writer.wake()


def report(node_dir: NodeDir, role: str) -> bytes:
    reader = node_dir.rank(role, 0)  # type: ignore[arg-type]
    try:
        return reader.extra
    finally:
        reader.close()


def mapped(node_dir: NodeDir, role: str) -> set[int | str]:
    return having_memory(report(node_dir, role))


def pages_of(node_dir: NodeDir) -> tuple[int, int]:
    """What production's worker says that it has, and what of that it only keeps."""
    reader = node_dir.rank("serving", 0)
    try:
        record = reader.read()
    finally:
        reader.close()
    assert record is not None
    return record.resident_pages, record.retained_pages


def until(condition: Callable[[], bool], otherwise: Callable[[], str] = lambda: "") -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"condition did not come true; {otherwise()}"
        time.sleep(0.002)


def rounds(worker: Any, number: int) -> None:
    seen = worker.rose_pager.num_rounds
    until(lambda: worker.rose_pager.num_rounds >= seen + number)


# --- the worker's cache lies in memory that can go


def test_a_step_is_over_only_when_its_drafter_has_run(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter with keys and values of its own runs when vLLM samples: until then the step may touch memory."""
    from vllm.v1.worker.gpu_worker import Worker

    monkeypatch.setattr(Worker, "execute_model", lambda self, output: None)
    monkeypatch.setattr(Worker, "sample_tokens", lambda self, grammar: "tokens")
    worker = start("serving")
    worker.rose_drafts = True
    fence = worker.rose_pager.fence
    step(worker, 1)
    with pytest.raises(LedgerError, match="was not launched"):
        fence.wait(1, 0.0)

    assert worker.sample_tokens(None) == "tokens"

    fence.wait(1, 0.0)
    fence.close()  # the engine core is gone
    with pytest.raises(LedgerError, match="is gone"):
        step(worker, 2)


def test_vllms_views_of_its_cache_lie_in_the_reserved_range(
    start: Callable[..., Any], node_dir: NodeDir, driver: RealMemoryDriver
) -> None:
    worker = start("serving")
    pager = worker.rose_pager
    assert [cache.data_ptr() - pager.arena.address for cache in worker.caches.values()] == [0, 512 << 16]
    assert all(bool((cache == 0).all()) for cache in worker.caches.values())
    worker.caches["layer.1"][511].fill_(1)  # the last block of the last layer
    assert mapped(node_dir, "serving") == set(range(CHUNKS))
    assert pager.resident_bytes() == len(driver.handles) * PAGE_BYTES == 2 * CHUNKS * PAGE_BYTES
    assert worker.rose_memory()["elastic"] == 1


def test_layers_are_set_apart_where_the_number_of_blocks_does_not_fit(
    start: Callable[..., Any], driver: RealMemoryDriver
) -> None:
    """530 blocks: 16 chunks and a rest that is not lent, in each layer."""
    worker = start("rollout", num_blocks=530)
    plan, (first, second) = worker.rose_pager.plan, worker.caches.values()
    assert second.data_ptr() - first.data_ptr() == 17 * PAGE_BYTES
    assert (plan.num_chunks, plan.chunk_pages) == (CHUNKS, 2)
    assert plan.tail_ranges() == [(16 * PAGE_BYTES, PAGE_BYTES), (33 * PAGE_BYTES, PAGE_BYTES)]
    assert len(driver.handles) == 2  # the rests, and no more
    for cache in (first, second):
        cache[512:].fill_(3)
        assert bool((cache[529] == 3).all())


def test_a_rollout_worker_leaves_the_devices_reserve_alone_and_production_does_not_ask(
    node_dir: NodeDir, driver: RealMemoryDriver
) -> None:
    reserve_pages = DEFAULT_RESERVE_BYTES // PAGE_BYTES
    driver.capacity = (reserve_pages + 3) * PAGE_BYTES
    plan = ChunkPlan.of(config_of(), PAGE_BYTES)
    arena = CudaKvMemory("rollout", driver=driver).reserve(plan.size_bytes, aligned=True, guard=True)
    arena.map([(0, 3 * PAGE_BYTES)])
    with pytest.raises(LedgerError, match="free on the device"):
        arena.map([(3 * PAGE_BYTES, PAGE_BYTES)])
    arena = CudaKvMemory("serving", driver=driver).reserve(plan.size_bytes, aligned=True, guard=True)
    arena.map([(0, 4 * PAGE_BYTES)])


def test_production_starts_with_ordinary_memory_where_the_device_has_none_for_us(
    start: Callable[..., Any], node_dir: NodeDir, driver: RealMemoryDriver
) -> None:
    driver.fail_at = {"create": 9}
    worker = start("serving")
    assert worker.rose_pager is None
    assert driver.handles == {}
    assert not node_dir.rank("serving", 0).alive()
    next(iter(worker.caches.values())).fill_(1)
    assert step(worker, 1) == "output"


def test_a_rollout_worker_does_not(start: Callable[..., Any], driver: RealMemoryDriver) -> None:
    driver.fail_at = {"reserve": 1}
    with pytest.raises(LedgerError, match="OUT_OF_MEMORY"):
        start("rollout")


# --- nothing is unmapped under a step in flight


def test_memory_goes_only_when_the_last_step_that_may_touch_it_has_run(
    start: Callable[..., Any], node_dir: NodeDir, driver: RealMemoryDriver
) -> None:
    worker = start("serving")
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, set(range(CHUNKS)))
        step(worker, 1)
        wish(writer, set(range(1, CHUNKS)), after_step=2)  # step 2 is scheduled, and still on its way here
        time.sleep(0.02)
        assert "record" not in driver.trace
        step(worker, 2)
        until(lambda: "record" in driver.trace)  # launched: the device is asked now
        assert "unmap" not in driver.trace
        assert report(node_dir, "serving")[0] == MOVING  # there, and nobody's to use
        driver.done(STREAM)
        until(lambda: mapped(node_dir, "serving") == set(range(1, CHUNKS)))
        assert driver.trace.index("record") < driver.trace.index("unmap")


def test_a_chunk_that_is_wanted_again_while_it_waits_to_go_stays(
    start: Callable[..., Any], node_dir: NodeDir, driver: RealMemoryDriver
) -> None:
    worker = start("serving")
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, set(range(CHUNKS)))
        step(worker, 1)
        wish(writer, set(range(2, CHUNKS)), after_step=1)
        until(lambda: report(node_dir, "serving")[:2] == bytes([MOVING, MOVING]))
        wish(writer, set(range(1, CHUNKS)), after_step=1)
        driver.done(STREAM)
        until(lambda: report(node_dir, "serving")[:2] == bytes([0, MAPPED]))
    assert len(driver.handles) >= 2 * (CHUNKS - 1)


def test_growth_does_not_wait_for_steps_that_do_not_end(
    start: Callable[..., Any], node_dir: NodeDir, driver: RealMemoryDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What production wants back must not hang on what it gives up."""
    monkeypatch.setattr("vllm_plugin.memory.FENCE_S", 0.05)
    worker = start("rollout")
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, {1, 2})
        until(lambda: mapped(node_dir, "rollout") == {1, 2})
        step(worker, 1)
        wish(writer, {2, 3}, after_step=1)
        until(lambda: mapped(node_dir, "rollout") == {"1 moves", 2, 3})
        until(lambda: "steps in flight" in worker.rose_pager._trouble)
        driver.done(STREAM)
        until(lambda: mapped(node_dir, "rollout") == {2, 3})


def test_a_worker_that_cannot_note_its_steps_serves_on_and_gives_nothing_away(
    start: Callable[..., Any], node_dir: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start("serving")

    def broken() -> int:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(internals, "compute_stream", broken)
    assert step(worker, 1) == "output"
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, set())
        until(lambda: bool(worker.rose_pager._trouble))
    assert mapped(node_dir, "serving") == {f"{chunk} moves" for chunk in range(CHUNKS)}


def test_vllms_own_error_in_a_step_stays_vllms(start: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        start("serving").execute_model(None)


def test_a_rollout_engine_core_that_dies_takes_its_memory_with_it_when_the_steps_have_run(
    start: Callable[..., Any], node_dir: NodeDir, driver: RealMemoryDriver
) -> None:
    worker = start("rollout")
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, {4, 5})
        until(lambda: mapped(node_dir, "rollout") == {4, 5})
        step(worker, 1)
    pager = worker.rose_pager
    until(
        lambda: "record" in driver.trace,
        lambda: f"{pager.num_rounds} rounds, core alive: {pager._chunks.alive()}, {pager._trouble!r}",
    )
    assert mapped(node_dir, "rollout") == {"4 moves", "5 moves"}
    driver.done(STREAM)
    until(lambda: driver.handles == {})


def test_a_byte_behind_memory_that_was_given_back_is_a_fault(
    start: Callable[..., Any], node_dir: NodeDir
) -> None:
    def last_words(touch: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                faulthandler.disable()
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                worker = start("serving")
                worker.rose_pager.agree(bytes([0] + [1] * (CHUNKS - 1)))
                worker.caches["layer.1"][touch].fill_(1)
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert last_words(32) == 0
    assert last_words(31) == -signal.SIGSEGV


# --- what production keeps for the first chunks that come back


def test_production_keeps_some_handles_counts_them_and_lets_them_go_in_time(
    start: Callable[..., Any], node_dir: NodeDir, driver: RealMemoryDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "SERVING_RETAIN_BYTES", 3 * PAGE_BYTES)
    worker = start("serving")
    pager = worker.rose_pager
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, set(range(2, CHUNKS)))
        until(lambda: pages_of(node_dir) == (2 * (CHUNKS - 2) + 3, 3))  # said behind the chunks' states
        assert mapped(node_dir, "serving") == set(range(2, CHUNKS))
        assert len(driver.handles) == 2 * (CHUNKS - 2) + 3
        created = driver.calls["create"]
        wish(writer, set(range(1, CHUNKS)))
        until(lambda: 1 in mapped(node_dir, "serving"))
        assert driver.calls["create"] == created  # what was kept came first
        monkeypatch.setattr("vllm_plugin.memory.TRIM_AFTER_S", 0.0)
        until(lambda: len(driver.handles) == 2 * (CHUNKS - 1))
        until(lambda: pages_of(node_dir) == (2 * (CHUNKS - 1), 0))
    assert pager.plan.chunk_pages == 2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Made without a role: vLLM loads the plugin here."""
    from tests.tiny_model import write_tiny_model

    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return harness.engine_config(folder)


@pytest.fixture
def engine_of(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], tuple[Any, Any]]]:
    """A role's scheduler, whose memory is all mapped, and the worker rank that says so."""
    from vllm_plugin.scheduler import RolloutScheduler, ServingScheduler

    opened: list[Any] = []

    def build(role: str) -> tuple[Any, Any]:
        monkeypatch.setenv("ROSE_DIR", str(tmp_path / "n"))
        monkeypatch.setenv("ROSE_ROLE", role)
        rank = harness.write_rank(tmp_path / "n", role, mapped=True)
        scheduler: Any = harness.build(ServingScheduler if role == "serving" else RolloutScheduler, config)
        side = scheduler.rose
        opened.extend((side._lease, side._pagers, rank, *((side._board.file,) if role == "serving" else ())))
        return scheduler, rank

    yield build
    for writer in opened:
        writer.close()


def inflate(side: Any, count: int) -> None:
    """Have the engine thread take that many chunks out of the pool; a slice of its time may not be enough."""
    side.seam.target_chunks = count
    until(lambda: side.before_schedule() or len(side.balloon.inflated) == count)


def test_production_does_not_count_kept_handles_as_lent(
    engine_of: Callable[[str], tuple[Any, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer may have what production's lease leaves, and a kept handle is not there to be had."""
    scheduler, rank = engine_of("serving")
    side = scheduler.rose
    inflate(side, 4)
    monkeypatch.setattr(side.rounds, "_lendable", lambda node: 4)
    monkeypatch.setattr(side.seam, "call_when_idle", lambda callback: None)
    side.rounds.round()
    away = {c for c, wanted in enumerate(side._pagers.marks.extra) if not wanted}
    assert len(away) == 4
    for chunk in away:
        rank.extra[chunk] = 0
    rank.write(harness.RankState(generation=harness.ANY, resident_pages=15, retained_pages=3))
    side.rounds.round()
    assert NodeDir(tmp_path / "n").serving_lease().read().lent_pages == 1  # type: ignore[union-attr]
    rank.write(harness.RankState(generation=harness.ANY, resident_pages=12))
    side.rounds.round()
    assert NodeDir(tmp_path / "n").serving_lease().read().lent_pages == 4  # type: ignore[union-attr]


# --- the stamps


def test_production_uses_no_chunk_that_is_on_its_way_out(
    engine_of: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given up, and taken back before its memory had gone: the pager may be about to take it away."""
    scheduler, rank = engine_of("serving")
    side, lendable = scheduler.rose, [1]
    monkeypatch.setattr(side.rounds, "_lendable", lambda node: lendable[0])
    monkeypatch.setattr(side.seam, "call_when_idle", lambda callback: None)
    inflate(side, 1)
    side.rounds.round()
    (chunk,) = side.book.chunks.leaving()
    lendable[0] = 0
    side.rounds.round()
    assert side._pagers.marks.extra[chunk] == 1  # wanted back
    for state, given in ((MOVING, []), (MAPPED, [chunk])):
        rank.extra[chunk] = state
        rank.write(harness.RankState(generation=harness.ANY, resident_pages=16))
        side.rounds.round()
        assert list(side.seam.mapped) == given


def test_the_step_to_wait_for_is_published_before_the_marks(
    engine_of: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, _ = engine_of("serving")
    side, written = scheduler.rose, []
    scheduler.add_request(harness.request("a"))
    stamps = [internals.stamp_of(harness.step(scheduler)) for _ in range(3)]
    assert stamps == [1, 2, 3]
    inflate(side, 2)  # before the step after the third
    write = side._pagers.marks.write
    monkeypatch.setattr(
        side._pagers.marks,
        "write",
        lambda r: (written.append((r.after_step, bytes(side._pagers.marks.extra))), write(r)),
    )
    monkeypatch.setattr(side.rounds, "_lendable", lambda node: 2)
    monkeypatch.setattr(side.seam, "call_when_idle", lambda callback: None)
    side.rounds.round()
    assert [(step, marks.count(0)) for step, marks in written] == [(3, 0), (3, 2)]


def test_a_rollout_engine_waits_for_the_steps_before_a_cut_and_for_no_later_one(
    engine_of: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that is being scheduled while the cut is published cannot touch it: waiting for it would delay the reclaim."""
    scheduler, _ = engine_of("rollout")
    side, written = scheduler.rose, []
    side.seam.engine = harness.engine()
    side.seam.engine.output_queue = queue.Queue()
    side.seam.target_chunks, chunks = 4, [1, 2, 3, 4]
    side.book.chunks.take(chunks)
    (mark,) = side.book.chunks.mark()
    side._pagers.write(mark)
    side.book.handle(MarksWritten())
    side.seam.mapped.extend(side.book.settle([Report(harness.ANY, b"\1" * side.plan.num_chunks)]))
    monkeypatch.setattr(side.gate, "tokens", lambda board: 1000)
    scheduler.add_request(harness.request("a"))
    assert [internals.stamp_of(harness.step(scheduler)) for _ in range(2)] == [1, 2]
    side.seam.target_chunks = 0
    assert internals.stamp_of(harness.step(scheduler)) == 3  # cut at its head
    write = side._pagers.marks.write
    monkeypatch.setattr(
        side._pagers.marks,
        "write",
        lambda r: (written.append((r.after_step, bytes(side._pagers.marks.extra).count(1))), write(r)),
    )
    side.rounds.round(False)
    assert written == [(2, 4), (2, 0)]


def test_a_step_without_a_number_is_nobodys() -> None:
    assert internals.stamp_of(SimpleNamespace()) == 0


# --- torch over addresses that it did not allocate


def test_a_tensor_over_a_range_writes_where_the_range_is() -> None:
    arena = HostPagePool().reserve(2 * PAGE_BYTES)
    tensor = tensor_over(arena.address, 2 * PAGE_BYTES - 8, (DLPACK_CPU, 0))
    assert (tensor.data_ptr(), tensor.numel(), tensor.dtype.itemsize) == (
        arena.address,
        2 * PAGE_BYTES - 8,
        1,
    )
    tensor[PAGE_BYTES] = 5
    assert arena.buffer[PAGE_BYTES] == 5
    view = tensor.as_strided((3,), (PAGE_BYTES // 2,), 0)
    assert view.tolist() == [0, 0, 5]


def test_a_tensor_can_be_made_over_addresses_without_memory() -> None:
    arena = HostPagePool().reserve(2 * PAGE_BYTES, guard=True)
    tensor = CudaKvMemory("rollout", driver=RealMemoryDriver()).tensor(arena, PAGE_BYTES)
    assert arena.resident_bytes() == 0
    arena.map([(0, PAGE_BYTES)])
    tensor[9] = 1
    assert arena.buffer[9] == 1


# --- where layers lie


def test_a_cache_whose_layers_are_whole_pieces_apart_is_left_as_it_is() -> None:
    config = config_of()
    assert page_layers(config, PAGE_BYTES) is config
    assert page_layers(config_of(530), 4096).kv_cache_tensors[0].size == 2 * 530 * 65536


def test_groups_of_layers_behind_each_other_stay_so_and_those_over_each_other_are_refused() -> None:
    config = config_of(530)
    (tensor,) = config.kv_cache_tensors
    region = tensor.layer_stride
    behind = dataclasses.replace(tensor, layers=["layer.2", "layer.3"], offset=2 * region)
    config.kv_cache_tensors = [behind, tensor]
    config.kv_cache_groups[0].layer_names = [*tensor.layers, *behind.layers]
    paged = page_layers(config, PAGE_BYTES).kv_cache_tensors
    assert [one.offset // PAGE_BYTES for one in paged] == [34, 0]
    assert {one.size // PAGE_BYTES for one in paged} == {68}
    config.kv_cache_tensors = [tensor, dataclasses.replace(tensor, layers=["layer.2", "layer.3"])]
    with pytest.raises(ConfigError, match="over each other"):
        page_layers(config, PAGE_BYTES)


def test_a_plan_cuts_memory_into_whole_pieces_of_its_device() -> None:
    plan = ChunkPlan.of(config_of(530), PAGE_BYTES)
    for chunk in range(plan.num_chunks):
        assert all(at % PAGE_BYTES == length % PAGE_BYTES == 0 for at, length in plan.ranges([chunk]))
    pieces = [r for chunk in range(plan.num_chunks) for r in plan.ranges([chunk])] + plan.tail_ranges()
    ends = sorted((at, at + length) for at, length in pieces)
    assert (ends[0][0], ends[-1][1]) == (0, 34 * PAGE_BYTES)
    assert all(one[1] == two[0] for one, two in itertools.pairwise(ends))  # nothing twice, no gap


def test_the_host_waits_for_nothing_once_a_step_has_returned() -> None:
    fence = StepFence(HostKvMemory())
    fence.launched(3, 0)
    fence.launched(internals.stamp_of(SimpleNamespace()), 0)  # one of vLLM's own, a warm-up
    fence.wait(3, timeout_s=0.0)
    with pytest.raises(LedgerError, match="step 4 was not launched"):
        fence.wait(4, timeout_s=0.01)


def test_a_pager_that_is_told_of_no_device_is_the_hosts(node_dir: NodeDir) -> None:
    pager = Pager(node_dir, "rollout", 0, ChunkPlan.of(config_of()), guard=True)
    try:
        assert (pager.resident_bytes(), pager.tensor().numel()) == (0, pager.plan.size_bytes)
    finally:
        pager.close()
