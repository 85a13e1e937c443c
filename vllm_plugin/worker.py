"""The worker class of an engine with elastic KV memory (CPU build).

Imported by vLLM in its worker processes only.  Adds two things to vLLM's own worker: the KV
allocation comes from a page pool that can give memory back, and the weight calls of
:mod:`vllm_plugin.weights`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rose.coserve.ledger import NodeDir
from vllm_plugin import ENV_DIR, compat, role
from vllm_plugin.memory import ChunkPlan, Pager
from vllm_plugin.weights import WeightWorkerMixin

logger = logging.getLogger("vllm.rose")

ENV_GUARD = "ROSE_GUARD"
"""``1``: released KV ranges are inaccessible, so that a use after release faults.  For tests."""


class RoseCPUWorker(WeightWorkerMixin, CPUWorker):
    """vLLM's CPU worker with elastic KV memory."""

    rose_pager: Pager | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.patch_spin()
        if role() == "rollout":
            compat.patch_cpu_gemm()
        super().__init__(*args, **kwargs)
        if role() == "rollout":
            compat.stay_eager(self.vllm_config)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        try:
            plan = ChunkPlan.of(kv_cache_config)
            pager = Pager(
                NodeDir(os.environ[ENV_DIR]),
                str(role()),
                self.rank,
                plan,
                guard=os.environ.get(ENV_GUARD) == "1",
            )
        except Exception as error:
            if role() == "rollout":
                raise
            # Production starts with ordinary memory; the scheduler sees no rank report and stays off.
            logger.error("ROSE is off, KV memory is not elastic: %s", error)
            super().initialize_from_config(kv_cache_config)
            return
        buffer = torch.frombuffer(pager.arena.buffer, dtype=torch.int8)
        with compat.kv_allocation(plan.size_bytes, lambda size: buffer[:size]):
            super().initialize_from_config(kv_cache_config)
        self.rose_pager = pager

    def rose_memory(self) -> dict[str, int]:
        """Truth about this rank's KV memory, from the kernel; collective call."""
        if self.rose_pager is None:
            return {"elastic": 0, "resident_bytes": 0, "size_bytes": 0}
        return {
            "elastic": 1,
            "resident_bytes": self.rose_pager.resident_bytes(),
            "size_bytes": self.rose_pager.plan.size_bytes,
        }

    def shutdown(self) -> None:
        if self.rose_pager is not None:
            self.rose_pager.close()
        super().shutdown()
