"""What production's lease says, and when it is written: how much is lent, what that costs, and where the engine is in its life."""

from __future__ import annotations

from typing import Any

from rose.coserve.ledger import RecordWriter
from rose.coserve.records import Phase, ServingLease
from rose.policy.compat import Row, Support
from rose.policy.coserving.serving import ServingBook
from vllm_plugin.ghost import GhostCache
from vllm_plugin.memory import ChunkPlan
from vllm_plugin.prefix_watch import PrefixWatch
from vllm_plugin.seam import Seam
from vllm_plugin.told_lease import ToldLease

HEARTBEAT_S = 0.25


class LentLease:
    """See the module.  Background thread, but for the first and the last word.

    Args:
        file: Its file, which this closes.
        because: The row of the compatibility table by which production takes part.
        elastic: Its KV memory can be given back; else it shares compute only.

    Attributes:
        errors: That have switched ROSE off here.
    """

    def __init__(
        self,
        file: RecordWriter[Any],
        *,
        because: Row,
        elastic: bool,
        plan: ChunkPlan,
        seam: Seam,
        book: ServingBook,
        ghost: GhostCache,
        prefixes: PrefixWatch,
    ) -> None:
        self._told = ToldLease[ServingLease](file, HEARTBEAT_S)
        self._row, self._support = because, Support.ELASTIC if elastic else Support.COMPUTE_ONLY
        self._plan, self._seam, self._book = plan, seam, book
        self._ghost, self._prefixes = ghost, prefixes
        self._block_pages = plan.total_pages / max(1, plan.num_blocks)
        self._reserved_pages = book.lease_pages
        self.errors = 0

    @property
    def file(self) -> RecordWriter[ServingLease]:
        return self._told.file

    def say(self, reserved_pages: int | None = None) -> None:
        """Publish how many pages production holds (None: as many as it said last), if there is anything new.

        Raises:
            LedgerError: It cannot be written.
        """
        if reserved_pages is not None:
            self._reserved_pages = reserved_pages
        stranded_pages = self._book.stranded_pages
        news = (self._phase, self._reserved_pages, self.errors, stranded_pages)
        self._told.say(news, self._record)

    @property
    def _phase(self) -> Phase:
        if self._seam.failed:
            return Phase.OFF
        return Phase.STARTING if self._seam.engine is None else Phase.READY

    def _record(self, now_ns: int) -> ServingLease:
        total, reserved = self._plan.total_pages, self._reserved_pages
        return ServingLease(
            phase=self._phase,
            support=self._support,
            row=self._row.number,
            total_pages=total,
            reserved_pages=reserved,
            lent_pages=total - reserved,
            stranded_pages=self._book.stranded_pages,
            queried_tokens=self._ghost.queried_tokens,
            lost_tokens=self._ghost.lost_tokens,
            cold_pages=int(len(self._ghost) * self._block_pages + 0.999),
            kept_pages=self._prefixes.num_kept * self._plan.chunk_pages,
            heartbeat_ns=now_ns,
            errors=self.errors,
        )

    def close(self) -> None:
        self._told.close()
