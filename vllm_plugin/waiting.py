"""Production's queue, before a step: what those lack that wait for blocks, and who may go before them.  Engine thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rose.policy.admission import StepModel
from rose.policy.coserving.steps import claimed_blocks
from vllm_plugin import internals

WAITING_LOOKED_AT = 64
"""Waiting requests that are looked at one by one; a longer queue is pressure anyway."""


class WaitingRequests:
    """See the module.  ``model``: of the steps that read prompts."""

    def __init__(self, scheduler: Any, model: StepModel) -> None:
        self._scheduler, self._model = scheduler, model
        self._missing: dict[tuple[str, int, int], int] = {}

    def blocks_missing(self) -> int:
        """Blocks that those lack who need nothing else to start, and whom the next steps can take in (:func:`claimed_blocks`).

        Asking vLLM takes microseconds a group, so of those that waited at the last look too the answer is kept.
        """
        scheduler, known = self._scheduler, self._missing
        self._missing = kept = {}

        def each() -> Iterator[tuple[int, int]]:
            for request in internals.wait_for_blocks(scheduler, WAITING_LOOKED_AT):
                key = (request.request_id, request.num_tokens, request.num_computed_tokens)
                blocks = known[key] if key in known else internals.blocks_missing(scheduler, request)
                kept[key] = blocks
                # What lies in the prefix cache is neither lacked nor computed.
                tokens = min(request.num_tokens - request.num_computed_tokens, blocks * scheduler.block_size)
                yield tokens, blocks

        return claimed_blocks(
            each(),
            step_tokens=scheduler.max_num_scheduled_tokens,
            prefill_token_s=self._model.prefill_token_s,
        )

    def let_past(self, usable_blocks: int) -> None:
        """Nobody gives back what the first in the queue needs: those behind it that fit need not wait for that."""
        scheduler = self._scheduler
        internals.let_past(
            scheduler,
            lambda request: internals.blocks_missing(scheduler, request) < usable_blocks,
            WAITING_LOOKED_AT,
        )
