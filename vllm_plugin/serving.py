"""Production's side: lend memory nobody needs, publish slack, take everything back first.

Two threads.  The *engine thread* calls :meth:`ServingSide.before_add` for every request and the three hooks of
:mod:`vllm_plugin.serving_steps` around every step; they make no blocking call.  The *background thread* sleeps until a shared file
changes and does a round of :mod:`vllm_plugin.serving_rounds`: how many chunks are lent, marks for the pagers, the lease.  What both touch is in
:mod:`vllm_plugin.seam`.

What the engine thread decides is in :class:`~rose.policy.coserving.steps.StepBook`, what the background thread decides in
:class:`~rose.policy.coserving.serving.ServingBook`; who writes the board, and what: :mod:`vllm_plugin.board`.

What a loan costs the prefix cache is counted where a prompt arrives (:mod:`vllm_plugin.ghost`) and published in the lease; which
cached chunks may be lent at all is worked out before (:mod:`vllm_plugin.prefix_watch`).

Fail-open: an exception in any hook ends in :meth:`ServingSide.fail`: the hooks become no-ops, all memory is asked back,
``phase = off`` is published, one line is logged.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from rose.coserve.record_layout import pack_found
from rose.policy.compat import Row, row
from rose.policy.coserving.loans import LoanBook
from rose.policy.coserving.search import LoanSearch
from rose.policy.coserving.serving import ServingBook
from rose.policy.coserving.steps import StepBook
from rose.units import PAGE_BYTES, format_bytes
from vllm_plugin import compat, internals
from vllm_plugin.board import Board
from vllm_plugin.first_token_watch import FirstTokenWatch
from vllm_plugin.ghost import GhostCache
from vllm_plugin.loan_log import LoanLog
from vllm_plugin.missing import Missing
from vllm_plugin.pager_channel import PagerChannel
from vllm_plugin.peers import Trouble
from vllm_plugin.prefix_watch import PrefixWatch
from vllm_plugin.seam import Seam
from vllm_plugin.serving_lease import HEARTBEAT_S, LentLease
from vllm_plugin.serving_rounds import ServingRounds
from vllm_plugin.serving_steps import ServingSteps
from vllm_plugin.step_learning import StepLearner

logger = logging.getLogger("vllm.rose")


class ServingSide:
    """Everything ROSE does inside a production engine.

    Args:
        scheduler: vLLM's scheduler, after its own construction.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        num_ranks: Worker processes of the engine.
        elastic: Its KV memory can be given back; else it shares compute only and lends nothing.
        piece_bytes: In which pieces its memory comes and goes.
        because: The row of the compatibility table by which it takes part.
        found: What of the configuration the row was found by.
        missing: What of its memory it has started without; None: looked at here.

    Attributes:
        failed: Why ROSE is off here; None while it is on.
        before_schedule, after_schedule, after_update: The hooks around a step, bound here so that a step pays for no call more.
    """

    def __init__(
        self,
        scheduler: Any,
        kv_cache_config: Any,
        num_ranks: int,
        elastic: bool = True,
        *,
        piece_bytes: int = compat.OS_PAGE_BYTES,
        because: Row | None = None,
        found: str = "",
        missing: Missing | None = None,
    ) -> None:
        pool = internals.block_pool(scheduler)
        self.failed: str | None = None
        num_pagers = num_ranks if elastic else 0
        # First of all: whatever becomes of us below, no step meets memory that is not there.
        missing = missing or Missing(scheduler, kv_cache_config, num_pagers, piece_bytes)
        self.plan, self._dir, self.balloon = missing.plan, missing.directory, missing.balloon
        plan, directory, away = self.plan, self._dir, missing.chunks
        self.seam = seam = Seam()
        self.ghost = GhostCache(
            pool,
            scheduler.block_size,
            self.fail,
            internals.group_windows(scheduler) if elastic else (None,),
            drops_last=internals.looks_past_last_hit(scheduler),
        )
        self.prefixes = PrefixWatch(pool, plan, scheduler.block_size, self.ghost, learns=elastic)
        self.steps = StepBook(plan.num_blocks, plan.chunk_blocks, stages=internals.has_stages(scheduler))
        """Engine thread only, but for numbers that the background thread reads."""
        self.book = ServingBook(plan.num_chunks, plan.chunk_pages, away)
        """Background thread only.  The balloon holds what is not in use by it, plus the seam's ``released`` less ``mapped``."""
        self.search, self.learner = LoanSearch(), StepLearner()
        made = missing.files
        lease = made.enter_context(compat.starting_lease() or directory.serving_lease_writer())
        lease.extra[:] = pack_found(found)
        board = made.enter_context(directory.serving_board_writer())
        self._pagers = made.enter_context(
            PagerChannel(directory, "serving", plan.num_chunks, num_pagers, wanted=True, away=away)
        )
        self._pagers.require_workers()
        trouble = Trouble()
        self._lease = LentLease(
            lease,
            because=because if because is not None else row("decoder" if elastic else "kv_connector"),
            elastic=elastic,
            plan=plan,
            seam=seam,
            book=self.book,
            ghost=self.ghost,
            prefixes=self.prefixes,
        )
        self._board = Board(board, scheduler, plan, self.balloon, self.steps, self.learner.model, trouble)
        self.first_tokens = FirstTokenWatch(scheduler, self.steps.first_tokens)
        self.hooks = ServingSteps(
            scheduler,
            seam=seam,
            balloon=self.balloon,
            steps=self.steps,
            search=self.search,
            ghost=self.ghost,
            prefixes=self.prefixes,
            board=self._board,
            learner=self.learner,
            first_tokens=self.first_tokens,
            fail=self.fail,
        )
        self.rounds = ServingRounds(
            directory,
            elastic=elastic,
            seam=seam,
            book=self.book,
            steps=self.steps,
            search=self.search,
            prefixes=self.prefixes,
            learner=self.learner,
            first_tokens=self.first_tokens,
            board=self._board,
            lease=self._lease,
            pagers=self._pagers,
            trouble=trouble,
            loans=LoanLog(
                LoanBook(plan.num_blocks, plan.chunk_blocks, plan.num_chunks, plan.chunk_pages), self.steps
            ),
            idle=self.hooks.idle,
        )
        self.before_schedule, self.after_schedule = self.hooks.before_schedule, self.hooks.after_schedule
        self.after_update = self.hooks.after_update
        self._elastic = elastic
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rose-serving", daemon=True)
        self._lease.say()

    # ------------------------------------------------------------------ engine thread

    def attach(self, engine: Any) -> None:
        """The engine is built and about to enter its loop."""
        self.seam.engine = engine
        notifier, directory = self.seam.notifier, self._dir
        try:
            self._board.write(busy=False)
            notifier.watch(directory.node(), "node")
            notifier.watch(directory.rollout_lease(), "peer")
            for rank in range(len(self._pagers.ranks)):
                notifier.watch(directory.rank("serving", rank, self.plan.num_chunks), f"rank{rank}")
        finally:
            # Whatever fails: memory that a peer has held since before our start comes back through this thread alone.
            self._thread.start()
        total, lendable = (
            format_bytes(pages * PAGE_BYTES) for pages in (self.plan.total_pages, self.plan.lendable_pages)
        )
        logger.info(
            "ROSE is on: %s KV memory may be lent; to see how it stands: rose node status --dir %s",
            f"at most {lendable} of {total}" if self._elastic else f"compute only, none of {total}",
            directory.path,
        )

    def before_add(self, request: Any) -> None:
        """A request has arrived, and nothing of it is scheduled."""
        self.ghost.on_prompt(request)
        self.hooks.on_arrival(request)

    def usage(self) -> float:
        """KV use as vLLM would report it without the balloon (0..1)."""
        return self.balloon.num_used_blocks / max(1, self.plan.num_blocks - 1)

    def reset_prefix_cache(self, reset: Any) -> bool:
        """vLLM's own reset, with the balloon out of its way."""
        done = self.balloon.reset_around(reset)
        if done:
            self.cache_cleared()
        return done

    def cache_cleared(self) -> None:
        """Nothing is cached any more."""
        self.hooks.cache_cleared()

    def fail(self, error: BaseException) -> None:
        """Fail open.  Any thread."""
        if self.failed is None:
            self.failed = f"{type(error).__name__}: {error}"
            self.seam.failed = True
            self._lease.errors += 1
            logger.error("ROSE is off, serving goes on as without it: %s", self.failed, exc_info=error)
            self.seam.target_chunks = 0
            self.ghost.stop()
            self.seam.notifier.notify()
        if not self._thread.is_alive():  # nobody else would say it
            self._say_off()

    # ------------------------------------------------------------------ background thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.rounds.round()
            except Exception as error:  # noqa: BLE001  # fail-open, see the module docstring
                self.fail(error)
                self._say_off()
                time.sleep(HEARTBEAT_S)
            self.seam.notifier.wait(HEARTBEAT_S)

    def _say_off(self) -> None:
        """Publish the phase even when nothing else works any more."""
        try:
            self._lease.say()
        except Exception as error:  # noqa: BLE001  # the end of the line: readers see the heartbeat age
            logger.debug("ROSE: phase off is not published: %r", error)

    def stop(self) -> None:
        """End the background thread and give up the files; for tests."""
        self._stopping = True
        self.seam.notifier.stop()
        self._thread.join(timeout=5.0)
        self.rounds.close()
        for writer in (self._lease, self._board.file, self._pagers):
            writer.close()

    def status(self, _argument: Any = None) -> dict[str, Any]:
        """What is in force, for tests and ``rose node status``."""
        return {
            "role": "serving",
            "failed": self.failed,
            "total_pages": self.plan.total_pages,
            "chunk_pages": self.plan.chunk_pages,
            "chunk_blocks": self.plan.chunk_blocks,
            "lent_chunks": len(self.balloon.inflated),
            "target_lent_chunks": self.seam.target_chunks,
            "claim_chunks": self.steps.claim_chunks,
            "stranded_pages": self.book.stranded_pages,
            "pressure_seq": self.steps.pressure_seq,
            "queried_tokens": self.ghost.queried_tokens,
            "lost_tokens": self.ghost.lost_tokens,
            "patches": sorted(compat.applied()),
        }
