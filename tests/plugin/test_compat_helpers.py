"""Helpers on vLLM's objects that background threads and production's start-up lean on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.errors import ConfigError, LedgerError
from tests.plugin import harness
from vllm_plugin import internals


def test_waiting_requests_can_be_read_while_the_engine_thread_changes_the_queue() -> None:
    """The rollout side's background thread does: an exception there takes all memory from the engine."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    queue: Any = FCFSRequestQueue(range(40_000))
    scheduler = SimpleNamespace(kv_holding_waiting=FCFSRequestQueue(), waiting=queue)
    stop = threading.Event()

    def engine_thread() -> None:
        while not stop.is_set():
            queue.append(queue.popleft())

    before = sys.getswitchinterval()
    thread = threading.Thread(target=engine_thread)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(30):
            assert len(internals.waiting_requests(scheduler, 20_000)) == 20_000
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


# --- the KV allocation of a worker


@pytest.fixture
def node_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeDir:
    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "node"))
    return NodeDir(tmp_path / "node")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, node_dir: NodeDir) -> Callable[..., Any]:
    """A worker of ``role`` on a vLLM that allocates its cache in ``num_calls`` calls; its ``caches``."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vllm_plugin.worker import RoseCPUWorker

    def start(role: str, num_calls: int = 1) -> Any:
        monkeypatch.setenv("ROSE_ROLE", role)

        def allocate(self: Any, kv_cache_config: Any) -> None:
            import torch

            size = kv_cache_config.kv_cache_tensors[0].size
            self.caches = [torch.zeros(size, dtype=torch.int8) for _ in range(num_calls)]

        monkeypatch.setattr(CPUWorker, "initialize_from_config", allocate)
        worker = object.__new__(RoseCPUWorker)
        worker.rank = 0
        worker.initialize_from_config(harness.kv_cache_config(None))
        return worker

    return start


def test_the_cache_of_a_worker_lies_in_the_arena(start: Callable[..., Any], node_dir: NodeDir) -> None:
    worker = start("serving")
    try:
        assert worker.caches[0].data_ptr() == worker.rose_pager.arena.address
        assert node_dir.rank("serving", 0).alive()
    finally:
        worker.rose_pager.close()


@pytest.mark.parametrize("num_calls", [0, 2])
def test_production_starts_where_vllm_allocates_its_cache_in_another_way(
    start: Callable[..., Any], node_dir: NodeDir, num_calls: int
) -> None:
    worker = start("serving", num_calls)
    assert worker.rose_pager is None
    assert not node_dir.rank("serving", 0).alive()
    assert len({cache.data_ptr() for cache in worker.caches}) == num_calls
    for cache in worker.caches:
        cache.fill_(1)  # each has memory of its own, still there


def test_a_rollout_worker_does_not_start_like_that(start: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="saw 2"):
        start("rollout", 2)


def test_production_starts_where_no_elastic_memory_can_be_had(
    start: Callable[..., Any], node_dir: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rose.coserve.pages import Arena

    def broken(*_: Any) -> None:
        raise LedgerError("no memory")

    monkeypatch.setattr(Arena, "map", broken)
    worker = start("serving")
    assert worker.rose_pager is None
    assert len(worker.caches) == 1
    assert not node_dir.rank("serving", 0).alive()


def test_the_compute_stream_is_torchs_and_asking_for_it_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own word makes a new stream the current one where none was set: kernels of steps before ran on another."""
    import torch
    from vllm.platforms import current_platform

    def set_one(*_: Any) -> None:
        raise AssertionError("a stream was made current")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=9))
    monkeypatch.setattr(torch.cuda, "Stream", set_one)
    monkeypatch.setattr(torch.cuda, "set_stream", set_one)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    assert internals.compute_stream() == 9
