"""A rollout engine that has to hold less: which chunks it gives up, and which requests end for it.

Unused chunks go first, then those that cost the fewest tokens to compute again; requests in them end at once with ``finish_reason
"abort"``, ``stop_reason "rose:kv_reclaimed"`` and their tokens so far.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from rose.policy.stop_reasons import RECLAIMED, TOO_LARGE
from vllm_plugin import internals
from vllm_plugin.capacity import Balloon

logger = logging.getLogger("vllm.rose")

CUT_S = 0.05
"""Longest look for unused chunks."""
UNLIMITED = 1 << 30


class Cuts:
    """See the module.

    Attributes:
        num_cuts: So many times memory was given up.
        num_requests: So many requests have ended for it, or because they fit no budget.
        last_ns: How long the last one took.
    """

    def __init__(self, scheduler: Any, balloon: Balloon) -> None:
        self._scheduler, self._balloon = scheduler, balloon
        self._block_tokens = scheduler.block_size
        self.num_cuts = 0
        self.num_requests = 0
        self.last_ns = 0

    def cut(self, engine: Any, keep: int, reason: str) -> list[int]:
        """Shrink to ``keep`` chunks now; the chunks that were given up."""
        started_ns = time.monotonic_ns()
        balloon = self._balloon
        released = balloon.inflate_free(balloon.num_usable_chunks - keep, budget_s=CUT_S)
        if balloon.num_usable_chunks > keep:
            victims, hit = balloon.cheapest_victims(balloon.num_usable_chunks - keep, self._holders())
            if keep == 0 and 0 not in balloon.inflated:
                victims.append(0)
                hit = [name for name, _, ids in self._holders() if ids]
            self._end(engine, hit, RECLAIMED)
            released += [chunk for chunk in victims if balloon.inflate(chunk)]
        self.refuse_oversized(engine)
        self.num_cuts += 1
        self.last_ns = time.monotonic_ns() - started_ns
        logger.info(
            "ROSE: cut to %d of %d chunks, %d released in %.1f ms: %s",
            keep,
            balloon.num_chunks,
            len(released),
            self.last_ns / 1e6,
            reason,
        )
        return released

    def refuse_oversized(self, engine: Any, only: Any = None) -> None:
        """Waiting requests that the present budget can never hold would wait for ever: answer them now.

        ``only``: the others were looked at when the budget became what it is.
        """
        usable = self._balloon.num_usable_chunks * self._balloon.chunk_blocks - 1
        looked_at = internals.waiting_requests(self._scheduler, UNLIMITED) if only is None else [only]
        hopeless = [request.request_id for request in looked_at if self._blocks_of(request) > usable]
        if hopeless:
            self._end(engine, hopeless, RECLAIMED if usable <= 0 else TOO_LARGE)

    def _end(self, engine: Any, names: list[str], reason: str) -> None:
        self.num_requests += internals.finish_with_partial_output(self._scheduler, engine, names, reason)

    def _holders(self) -> list[tuple[str, int, list[int]]]:
        """Every request with the tokens it would have to compute again elsewhere, and its blocks."""
        return [
            (
                name,
                request.num_computed_tokens,
                [i for group in internals.block_ids_of(self._scheduler, name) for i in group],
            )
            for name, request in list(self._scheduler.requests.items())
        ]

    def _blocks_of(self, request: Any) -> int:
        """Blocks to hold what is known of a request and its next token."""
        return -(-(request.num_tokens + 1) // self._block_tokens)
