"""The worker class of an engine with elastic KV memory (CUDA).

Imported by vLLM in its worker processes only, and only where the compatibility table lets it (``ROSE_ALLOW_UNMEASURED=1``): **nothing
here has run on a GPU yet**.  The same two additions as :mod:`vllm_plugin.worker`, on CUDA's virtual memory; a rollout engine also
has torch's own memory capped, and computes on its share of the SMs (:mod:`vllm_plugin.compute`).
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from rose.coserve.cuda_driver import CudaDriver, Driver
from rose.coserve.cuda_pages import DEFAULT_RESERVE_BYTES
from vllm_plugin import compat, compute, internals, selfcheck
from vllm_plugin.elastic import ENV_GPU_RESERVE, ElasticKv
from vllm_plugin.kv_memory import CudaKvMemory, KvMemory
from vllm_plugin.layer_stop import LaunchAhead
from vllm_plugin.roles import role
from vllm_plugin.weights import WeightWorkerMixin


class RoseGPUWorker(ElasticKv, WeightWorkerMixin, Worker):
    """vLLM's GPU worker with elastic KV memory."""

    rose_rung: dict[str, Any] | None = None
    _rose_driver: Driver | None = None

    def init_device(self) -> None:
        if role() == "rollout":
            compat.stay_eager(self.vllm_config)
        super().init_device()
        if role() != "rollout":
            return
        selfcheck.require(selfcheck.WORKER)
        compute.cap_torch_memory(self.cache_config.gpu_memory_utilization, self.device)
        driver = self.rose_driver()
        found = compute.facts(
            driver,
            world_size=self.parallel_config.world_size,
            eager=self.model_config.enforce_eager,
        )
        self.rose_rung = compute.enforce(
            driver, found, lambda stream: compute.use_stream(stream, self.device)
        )

    def rose_driver(self) -> Driver:
        """Of this worker's device, which vLLM has initialised."""
        if self._rose_driver is None:
            self._rose_driver = CudaDriver(self.device.index or 0)
        return self._rose_driver

    def rose_kv_memory(self) -> KvMemory:
        reserve_bytes = int(os.environ.get(ENV_GPU_RESERVE) or DEFAULT_RESERVE_BYTES)
        return CudaKvMemory(str(role()), driver=self.rose_driver(), reserve_bytes=reserve_bytes)

    def rose_stream(self) -> int:
        return internals.compute_stream()

    def rose_launch_ahead(self) -> LaunchAhead:
        return LaunchAhead(self.rose_driver(), self.rose_stream)

    def rose_ladder(self) -> dict[str, Any] | None:
        """The rung in force on this rank; collective call."""
        return self.rose_rung
