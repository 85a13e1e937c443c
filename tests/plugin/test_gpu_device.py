"""On a real GPU only: torch over CUDA's virtual memory, the fence on a real stream, and a stream of a green context.

What the driver in memory is asked in ``test_gpu_worker.py`` and ``test_gpu_compute.py``, asked of CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rose.coserve.cuda_driver import CudaDriver
from rose.errors import LedgerError
from rose.policy.ladder import green_sms
from rose.units import PAGE_BYTES
from vllm_plugin import compute
from vllm_plugin.kv_memory import CudaKvMemory, StepFence

pytestmark = pytest.mark.gpu
P = PAGE_BYTES


@pytest.fixture
def torch() -> Any:
    import torch

    torch.cuda.init()
    return torch


@pytest.fixture
def memory(torch: Any) -> CudaKvMemory:
    return CudaKvMemory("rollout", driver=CudaDriver(torch.cuda.current_device()))


@pytest.fixture
def arena(memory: CudaKvMemory, torch: Any) -> Iterator[Any]:
    arena = memory.reserve(8 * P, aligned=True, guard=True)
    yield arena
    torch.cuda.synchronize()
    arena.close()


def test_torch_writes_into_memory_that_came_after_the_tensor_was_made(
    torch: Any, memory: CudaKvMemory, arena: Any
) -> None:
    tensor = memory.tensor(arena, 8 * P)
    assert tensor.is_cuda
    arena.map([(2 * P, 2 * P)])
    part = tensor[2 * P : 4 * P]
    assert int(part.count_nonzero()) == 0
    part.fill_(7)
    torch.cuda.synchronize()
    arena.unmap([(2 * P, P)])
    assert int((tensor[3 * P : 4 * P] == 7).sum()) == P
    arena.map([(2 * P, P)])
    assert int(tensor[2 * P : 3 * P].count_nonzero()) == 0  # nobody else's bits
    del tensor, part


def test_views_as_vllm_makes_them_read_and_write_the_right_bytes(
    torch: Any, memory: CudaKvMemory, arena: Any
) -> None:
    arena.map([(0, 8 * P)])
    tensor = memory.tensor(arena, 8 * P)
    layers = torch.as_strided(tensor, (2, 4, P), (4 * P, P, 1))
    layers[1][2].view(torch.bfloat16).fill_(1.0)
    torch.cuda.synchronize()
    assert int(tensor.view(torch.int16).count_nonzero()) == P // 2
    assert float(tensor[6 * P : 7 * P].view(torch.bfloat16).float().mean()) == 1.0


def test_memory_that_was_given_back_is_free_on_the_device(torch: Any, arena: Any) -> None:
    before = torch.cuda.mem_get_info()[0]
    arena.map([(0, 8 * P)])
    assert before - torch.cuda.mem_get_info()[0] >= 8 * P
    arena.unmap([(0, 8 * P)])
    assert torch.cuda.mem_get_info()[0] >= before - P


def test_the_fence_opens_when_what_was_launched_has_run(torch: Any, memory: CudaKvMemory) -> None:
    fence, stream = StepFence(memory), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second or so
    fence.launched(1, stream.cuda_stream)
    with pytest.raises(LedgerError, match="steps in flight"):
        fence.wait(1, timeout_s=0.0)
    begun = time.monotonic()
    fence.wait(1, timeout_s=30.0)
    assert stream.query()
    assert time.monotonic() - begun < 30.0


def test_torch_computes_on_a_stream_of_a_green_context(torch: Any) -> None:
    driver = CudaDriver(torch.cuda.current_device())
    total, step, least = driver.sm_split()
    stream, sms = driver.green_stream(green_sms(total, 0.5, step, least))
    assert least <= sms < total
    before = torch.cuda.current_stream()
    try:
        compute.use_stream(stream, torch.device("cuda", torch.cuda.current_device()))
        x = torch.ones(512, 512, device="cuda")
        assert float((x @ x).sum()) == 512.0**3
    finally:
        torch.cuda.set_stream(before)
