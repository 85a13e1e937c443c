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
from rose.coserve.pages import RESERVE_BYTES
from rose.errors import ConfigError
from vllm_plugin import ENV_DIR, compat, role
from vllm_plugin.memory import ChunkPlan, Pager
from vllm_plugin.weights import WeightWorkerMixin

logger = logging.getLogger("vllm.rose")

ENV_GUARD = "ROSE_GUARD"
"""``1``: released KV ranges are inaccessible, so that a use after release faults.  For tests."""
ENV_RESERVE = "ROSE_RESERVE_BYTES"
"""Set by the node agent for its engine: what stays free of the machine.  Production takes its own memory back below it."""


class RoseCPUWorker(WeightWorkerMixin, CPUWorker):
    """vLLM's CPU worker with elastic KV memory."""

    rose_pager: Pager | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.patch_spin()
        if role() == "rollout":
            compat.patch_cpu_gemm()
            compat.patch_cpu_experts()
        super().__init__(*args, **kwargs)
        if role() == "rollout":
            compat.stay_eager(self.vllm_config)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        made = self._make_pager(kv_cache_config)
        if made is None:
            super().initialize_from_config(kv_cache_config)
            return
        pager, buffer = made
        with compat.kv_allocation(pager.plan.size_bytes, lambda size: buffer[:size]) as seen:
            super().initialize_from_config(kv_cache_config)
        if len(seen) == 1:
            self.rose_pager = pager
            return
        pager.close()  # without a living report the scheduler does not share
        if not seen:
            pager.arena.close()
        self._not_elastic(
            ConfigError(f"expected one KV allocation of {pager.plan.size_bytes} bytes, saw {len(seen)}")
        )

    def _make_pager(self, kv_cache_config: Any) -> tuple[Pager, torch.Tensor] | None:
        """Elastic memory for the KV cache, all or nothing of it; None: production starts with ordinary memory.

        A function of its own, so that what a failed attempt took is free again before vLLM allocates.
        """
        try:
            pager = Pager(
                NodeDir(os.environ[ENV_DIR]),
                str(role()),
                self.rank,
                ChunkPlan.of(kv_cache_config),
                guard=os.environ.get(ENV_GUARD) == "1",
                reserve_bytes=int(os.environ.get(ENV_RESERVE) or RESERVE_BYTES),
            )
            return pager, torch.frombuffer(pager.arena.buffer, dtype=torch.int8)
        except Exception as error:  # noqa: BLE001  # fail-open
            self._not_elastic(error)
            return None

    def _not_elastic(self, error: Exception) -> None:
        """A rollout engine does not start like that; production does, and its scheduler sees no living rank report."""
        if role() == "rollout":
            raise error
        logger.error("ROSE is off, KV memory is not elastic: %s", error)

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
