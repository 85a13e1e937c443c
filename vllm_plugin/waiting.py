"""Production's queue, before a step: what those lack that wait for blocks, and who may go before them.  Engine thread."""

from __future__ import annotations

from typing import Any

from vllm_plugin import internals

WAITING_LOOKED_AT = 64
"""Waiting requests that are looked at one by one; a longer queue is pressure anyway."""


class WaitingRequests:
    """See the module."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._missing: dict[tuple[str, int, int], int] = {}

    def blocks_missing(self) -> int:
        """Blocks that those lack who need nothing else to start.

        Asking vLLM takes microseconds a group, so of those that waited at the last look too the answer is kept.
        """
        scheduler, known = self._scheduler, self._missing
        self._missing = {
            key: known[key] if key in known else internals.blocks_missing(scheduler, request)
            for request in internals.wait_for_blocks(scheduler, WAITING_LOOKED_AT)
            for key in ((request.request_id, request.num_tokens, request.num_computed_tokens),)
        }
        return sum(self._missing.values())

    def let_past(self, usable_blocks: int) -> None:
        """Nobody gives back what the first in the queue needs: those behind it that fit need not wait for that."""
        scheduler = self._scheduler
        internals.let_past(
            scheduler,
            lambda request: internals.blocks_missing(scheduler, request) < usable_blocks,
            WAITING_LOOKED_AT,
        )
