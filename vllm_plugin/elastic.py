"""Elastic KV memory inside a worker of vLLM, whatever its device: what both worker classes of ours add.

A mixin in front of vLLM's worker.  vLLM allocates the whole KV cache with one call; we answer that call with a tensor over
our own range of addresses, start the pager that maps and unmaps it, and tell the pager which steps have been launched.

Production starts with ordinary memory where anything of this fails; its scheduler then sees no living rank report, and nothing
is lent.  A rollout engine does not start like that.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from rose.coserve.node_dir import NodeDir
from rose.errors import ConfigError, RoseError
from vllm_plugin import compat, internals
from vllm_plugin.kv_layout import page_layers
from vllm_plugin.kv_memory import KvMemory
from vllm_plugin.layer_stop import LaunchAhead, LayerStop
from vllm_plugin.memory import ChunkPlan, Pager
from vllm_plugin.roles import ENV_DIR, role

logger = logging.getLogger("vllm.rose")

ENV_GUARD = "ROSE_GUARD"
"""``1``: released KV ranges are inaccessible, so that a use after release faults.  For tests."""

ENV_RESERVE = "ROSE_RESERVE_BYTES"
"""Set by the node agent for its engine: what stays free of the machine.  Production takes its own memory back below it."""
ENV_GPU_RESERVE = "ROSE_GPU_RESERVE_BYTES"
"""The same of a GPU."""


class ElasticKv:
    """In front of vLLM's worker in the order of its classes."""

    rose_pager: Pager | None = None
    rose_layers: LayerStop | None = None
    """Of a rollout engine whose steps can stop between two layers."""
    rank: int
    rose_drafts = False
    """A drafter with keys and values of its own follows each step, when vLLM samples."""
    rose_unsampled = 0
    """The step whose drafter has not run yet."""

    def rose_kv_memory(self) -> KvMemory:
        """The memory of this worker's device."""
        raise NotImplementedError

    def rose_stream(self) -> int:
        """The stream that steps are launched on; 0 where there is none."""
        return 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        made = self._make_pager(kv_cache_config)
        if made is None:
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
            return
        pager, buffer, paged_config = made
        with internals.kv_allocation(pager.plan.size_bytes, lambda _: buffer) as seen:
            super().initialize_from_config(paged_config)  # type: ignore[misc]
        if len(seen) == 1:
            config = getattr(self, "vllm_config", None)
            self.rose_drafts = config is not None and internals.drafts_with_keys(config)
            self.rose_pager = pager
            self._make_layer_stop(kv_cache_config)
            return
        pager.close()  # without a living report the scheduler does not share
        if not seen:
            del buffer, made
            pager.arena.close()
        self._not_elastic(
            ConfigError(f"expected one KV allocation of {pager.plan.size_bytes} bytes, saw {len(seen)}")
        )

    def rose_launch_ahead(self) -> LaunchAhead | None:
        """Of a device that works behind its host's back; None where there is none."""
        return None

    def _make_layer_stop(self, kv_cache_config: Any) -> None:
        """So that steps can stop between two layers, should the node agent want it; without it they do not."""
        config = getattr(self, "vllm_config", None)
        if role() != "rollout" or config is None or not internals.runs_python_between_layers(config):
            return
        try:
            stop = LayerStop(
                NodeDir(os.environ[ENV_DIR]),
                self.rank,
                config.parallel_config.world_size,
                ahead=self.rose_launch_ahead(),
            )
            model = self.get_model()  # type: ignore[attr-defined]
            stop.find(model, internals.kv_layers(kv_cache_config))
            self.rose_layers = stop
        except RoseError as error:
            logger.warning("ROSE: rollout steps stop at no layer: %s", error)

    def _make_pager(self, kv_cache_config: Any) -> tuple[Pager, Any, Any] | None:
        """Elastic memory for the KV cache, all or nothing of it; None: production starts with ordinary memory.

        A function of its own, so that what a failed attempt took is free again before vLLM allocates.
        """
        try:
            memory = self.rose_kv_memory()
            config = getattr(self, "vllm_config", None)
            drafts = config is not None and compat.has_drafts(config)
            compat.require_elastic(kv_cache_config, memory.piece_bytes, str(role()), drafts=drafts)
            pager = Pager(
                NodeDir(os.environ[ENV_DIR]),
                str(role()),
                self.rank,
                ChunkPlan.of(kv_cache_config, memory.piece_bytes),
                guard=os.environ.get(ENV_GUARD) == "1",
                memory=memory,
            )
            return pager, pager.tensor(), page_layers(kv_cache_config, memory.piece_bytes)
        except Exception as error:  # noqa: BLE001  # fail-open
            self._not_elastic(error)
            return None

    def _not_elastic(self, error: Exception) -> None:
        """A rollout engine does not start like that; production does, and its scheduler sees no living rank report."""
        if role() == "rollout":
            raise error
        logger.warning("ROSE: the KV cache keeps the memory that vLLM gives it: %s", error)
        compat.let_spin(True)  # nobody beside it can be helped by its sleeping

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        pager = self.rose_pager
        if pager is None:
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self.rose_layers is not None:
            self.rose_layers.begin(internals.stamp_of(scheduler_output), internals.may_stop(scheduler_output))
        pager.fence.begin()
        try:
            output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
            number = internals.stamp_of(scheduler_output)
            if self.rose_drafts and output is None:
                self.rose_unsampled = number
            else:
                self._launched(pager, number)
        finally:
            pager.fence.end()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        pager, number = self.rose_pager, self.rose_unsampled
        if pager is None or not number:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        pager.fence.begin()
        try:
            output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
            self.rose_unsampled = 0
            self._launched(pager, number)
        finally:
            pager.fence.end()
        return output

    def _launched(self, pager: Pager, number: int) -> None:
        """Nothing more of step ``number`` will be launched."""
        try:
            pager.fence.launched(number, self.rose_stream())
        except (
            Exception
        ) as error:  # fail-open: a step that is not noted only keeps memory from being taken away
            logger.exception("ROSE: a step could not be noted; nothing is lent from now on: %r", error)
            pager.fence.stop()

    def rose_memory(self) -> dict[str, int]:
        """Truth about this rank's KV memory; collective call."""
        if self.rose_pager is None:
            return {"elastic": 0, "resident_bytes": 0, "size_bytes": 0}
        return {
            "elastic": 1,
            "resident_bytes": self.rose_pager.resident_bytes(),
            "size_bytes": self.rose_pager.plan.size_bytes,
        }

    def shutdown(self) -> None:
        if self.rose_layers is not None:
            self.rose_layers.close()
        if self.rose_pager is not None:
            self.rose_pager.close()
        super().shutdown()  # type: ignore[misc]
