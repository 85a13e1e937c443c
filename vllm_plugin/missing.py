"""KV memory that production was started without, as a rollout engine that stood still held it.

Its chunks leave the block pool before anything else of ours can fail.  They come back through production's ordinary rounds
(:mod:`vllm_plugin.serving_rounds`), whose book begins with them; where there are none, because ROSE could not be switched on, through
:meth:`Missing.take_back`: the same book, asked for nothing but to take back, until nothing is missing any more.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from typing import Any

from rose.coserve.node_dir import NodeDir
from rose.errors import LedgerError
from rose.policy.coserving.events import Mark, MarksWritten, PeerCounted, ServingEvent, ServingLooked, Use
from rose.policy.coserving.serving import ServingBook
from vllm_plugin import internals
from vllm_plugin.capacity import SLICE_S, Balloon
from vllm_plugin.memory import ChunkPlan
from vllm_plugin.pager_channel import PagerChannel, chunks_away
from vllm_plugin.peers import Peers, Trouble
from vllm_plugin.roles import ENV_DIR

logger = logging.getLogger("vllm.rose")

LOOK_EVERY_S = 0.25


class Missing:
    """See the module.

    Args:
        num_pagers: Workers of the engine whose memory comes and goes.

    Attributes:
        chunks: Those that are missing; in the balloon when this is made.
        files: Of the side that is being made; one that is kept open where it failed would look like a live engine's.
    """

    def __init__(self, scheduler: Any, kv_cache_config: Any, num_pagers: int, piece_bytes: int) -> None:
        self.plan = plan = ChunkPlan.of(kv_cache_config, piece_bytes)
        self.directory = NodeDir(os.environ[ENV_DIR])
        self.balloon = Balloon(internals.block_pool(scheduler), plan.chunk_blocks)
        self.chunks = chunks_away(self.directory, plan.num_chunks, num_pagers, plan.chunk_pages)
        for chunk in self.chunks:
            self.balloon.inflate(chunk)
        self.files = contextlib.ExitStack()
        self._num_pagers = num_pagers
        self._back: collections.deque[int] = collections.deque()

    # ------------------------------------------------------------------ engine thread

    def take_back(self) -> bool:
        """The side could not be made: close its files, and bring back what is missing; whether there is anything.  Never raises."""
        try:
            self.files.close()
            if self.chunks:
                threading.Thread(target=self._run, name="rose-missing", daemon=True).start()
        except Exception as error:  # noqa: BLE001  # fail-open
            logger.error("ROSE: what production was started without stays missing: %r", error)
            return False
        return bool(self.chunks)

    def before_schedule(self) -> None:
        """Between two steps: what has its memory again goes back to the pool."""
        if self._back:
            until_s = time.monotonic() + SLICE_S
            while self._back and time.monotonic() <= until_s:
                self.balloon.deflate((self._back.popleft(),))

    # ------------------------------------------------------------------ background thread

    def _run(self) -> None:
        trouble = Trouble()
        book = ServingBook(self.plan.num_chunks, self.plan.chunk_pages, self.chunks)
        peers, pagers = Peers(self.directory, trouble), None
        while book.chunks.num_used < book.chunks.num_chunks:
            try:
                pagers = pagers or self._open()
                self._round(book, peers, pagers)
                trouble.over("missing")
            except LedgerError as error:
                trouble.say("missing", error)
            except Exception as error:  # noqa: BLE001  # this thread alone brings the memory back
                trouble.say("missing", LedgerError(repr(error)))
            time.sleep(LOOK_EVERY_S)
        logger.warning("ROSE: what production was started without has come back")
        peers.close()
        if pagers is not None:
            pagers.close()

    def _open(self) -> PagerChannel:
        """To the workers whose memory comes and goes: one that could not make it so has its own, whole, and reports nothing."""
        pagers = PagerChannel(
            self.directory, "serving", self.plan.num_chunks, self._num_pagers, wanted=True, away=self.chunks
        )
        for reader in list(pagers.ranks):
            with contextlib.suppress(LedgerError):  # it cannot be read just now, but is there
                record = reader.read()
                if record is None or record.engine != pagers.engine:
                    pagers.ranks.remove(reader)
        return pagers

    def _round(self, book: ServingBook, peers: Peers, pagers: PagerChannel) -> None:
        """As of :class:`~vllm_plugin.serving_rounds.ServingRounds`, of which nobody may have anything."""
        reports, _ = pagers.reports()
        looked = ServingLooked(
            at_s=time.monotonic(), released=(), reports=reports, target_chunks=0, claim_chunks=0
        )
        self._tell(book, pagers, looked)
        self._tell(book, pagers, PeerCounted(at_s=time.monotonic(), pages=peers.pages()))

    def _tell(self, book: ServingBook, pagers: PagerChannel, event: ServingEvent) -> None:
        for action in book.handle(event):
            match action:
                case Use():
                    self._back.extend(action.chunks)
                case Mark():
                    pagers.write(action)
                    book.handle(MarksWritten())
                case _:  # the lease says that we are off, and nothing more
                    pass
