"""The worker class of an engine with elastic KV memory (CPU build).

Imported by vLLM in its worker processes only.  Adds two things to vLLM's own worker: the KV
allocation comes from a page pool that can give memory back (:mod:`vllm_plugin.elastic`), and the weight calls of
:mod:`vllm_plugin.weights`.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from rose.coserve.pages import RESERVE_BYTES
from vllm_plugin import compat, internals, selfcheck
from vllm_plugin.elastic import ENV_RESERVE, ElasticKv
from vllm_plugin.kv_memory import HostKvMemory, KvMemory
from vllm_plugin.roles import role
from vllm_plugin.weights import WeightWorkerMixin


class RoseCPUWorker(ElasticKv, WeightWorkerMixin, CPUWorker):
    """vLLM's CPU worker with elastic KV memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.patch_spin()
        if role() == "rollout":
            selfcheck.require(selfcheck.WORKER + selfcheck.CPU_WORKER)
            compat.patch_cpu_gemm()
            compat.patch_cpu_experts()
        super().__init__(*args, **kwargs)
        if role() == "rollout":
            compat.stay_eager(self.vllm_config)

    def determine_available_memory(self) -> int:
        explicit_bytes = self.cache_config.kv_cache_memory_bytes
        if role() != "rollout" or explicit_bytes is None:
            return super().determine_available_memory()
        # A range of addresses, of which what is lent will be backed: production may well hold nearly all of it now.
        internals.warm_up_if_wanted(self)
        return explicit_bytes

    def rose_kv_memory(self) -> KvMemory:
        return HostKvMemory(int(os.environ.get(ENV_RESERVE) or RESERVE_BYTES))
