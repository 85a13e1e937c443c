"""Fault injection for a real worker: loaded with ``--worker-extension-cls``, called over vLLM's developer route."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch


class FaultyWorker:
    """Adds calls to the worker; changes nothing until one is made."""

    rank: int

    def spoil_next_write(self, rank: int) -> bool:
        """On ``rank``, let the first write of the next commit go wrong by one bit."""
        from vllm_plugin import rank_weights

        if self.rank != rank:
            return False
        real = rank_weights.put

        def put(bits: torch.Tensor, piece: Any, values: torch.Tensor) -> bool:
            rank_weights.put = real
            values = values.clone()
            values.view(-1)[0] ^= 1
            real(bits, piece, values)
            return True  # what reading back would say

        rank_weights.put = put
        return True

    def die_at_stage(self, rank: int) -> bool:
        """On ``rank``, end the process as the kernel would, when the next staging has its places."""
        from vllm_plugin import rank_weights

        if self.rank != rank:
            return False

        def place(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        rank_weights.RankWeights._place = place  # type: ignore[method-assign, assignment]
        return True

    def die_at_commit(self, rank: int) -> bool:
        """On ``rank``, end the process as the kernel would, in the middle of the next commit."""
        from vllm_plugin import rank_weights

        if self.rank != rank:
            return False

        def put(bits: torch.Tensor, piece: Any, values: torch.Tensor) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        rank_weights.put = put
        return True

    def smallest_parameter(self) -> int:
        """Elements of the smallest parameter: 0 where vLLM's CPU build freed a packed weight."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return min(parameter.numel() for parameter in model.parameters())
