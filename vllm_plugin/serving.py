"""Production's side: lend memory nobody needs, publish slack, take everything back first.

Two threads.  The *engine thread* calls :meth:`ServingSide.before_add` for every request, and :meth:`before_schedule`, :meth:`after_schedule`
and :meth:`after_update` around every step: they read numbers the other thread prepared, move chunks in
and out of the balloon in slices of half a millisecond, and keep the books of the step.  They make no blocking call.  The
*background thread* sleeps until a shared file changes, decides how many chunks are lent, marks chunks for the
pagers, and publishes the lease.

What the engine thread decides is in :class:`~rose.policy.coserving.steps.StepBook`, what the background thread decides in
:class:`~rose.policy.coserving.serving.ServingBook`; who writes the board, and what: :mod:`vllm_plugin.board`.

Order of lending: balloon -> unmark -> all ranks unmapped -> ``reserved_pages`` falls.
Order of taking back: ``reserved_pages`` rises -> wait for the peer's *number* -> mark -> all ranks mapped -> balloon
lets go.  Nothing here waits for the peer; if it never answers, serving stays as large as it is, and the node
agent kills the peer at the deadline.

What a loan costs the prefix cache is counted where a prompt arrives (:mod:`vllm_plugin.ghost`) and published in the lease; which
cached chunks may be lent at all is worked out before (:mod:`vllm_plugin.prefix_watch`).

Fail-open: an exception in any hook ends in :meth:`ServingSide.fail`: the hooks become no-ops, all memory is asked back,
``phase = off`` is published, one line is logged.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from rose.coserve.node_dir import NodeDir
from rose.coserve.record_layout import pack_found
from rose.coserve.records import Mode, NodeState, Phase, ServingLease
from rose.errors import LedgerError
from rose.policy.compat import Row, Support, row
from rose.policy.coserving.events import (
    Mark,
    MarksWritten,
    PeerCounted,
    Reserve,
    ServingEvent,
    ServingLooked,
    Stranded,
    Use,
)
from rose.policy.coserving.search import LoanSearch
from rose.policy.coserving.serving import ServingBook, lendable_chunks
from rose.policy.coserving.steps import StepBook
from rose.units import NS_PER_S
from vllm_plugin import compat, internals
from vllm_plugin.board import WAITING_LOOKED_AT, Board
from vllm_plugin.capacity import SLICE_S, Balloon
from vllm_plugin.ghost import GhostCache
from vllm_plugin.memory import ChunkPlan
from vllm_plugin.pager_channel import PagerChannel
from vllm_plugin.peers import Peers, Trouble, require_own
from vllm_plugin.prefix_watch import PrefixWatch
from vllm_plugin.protocol_log import ProtocolLog
from vllm_plugin.roles import ENV_DIR
from vllm_plugin.step_log import first_model
from vllm_plugin.watch import Notifier

logger = logging.getLogger("vllm.rose")

HEARTBEAT_S = 0.25
FITTED_UNWATCHED = 8
"""Steps per round that the step model learns from while no rollout engine may run; 20 us each, with the interpreter's lock."""


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
    ) -> None:
        self._scheduler = scheduler
        self._engine: Any = None
        self.plan = ChunkPlan.of(kv_cache_config, piece_bytes)
        self._dir = NodeDir(os.environ[ENV_DIR])
        self.balloon = Balloon(internals.block_pool(scheduler), self.plan.chunk_blocks)
        self._block_tokens = scheduler.block_size
        self.ghost = GhostCache(
            internals.block_pool(scheduler),
            self._block_tokens,
            self.fail,
            internals.group_windows(scheduler) if elastic else (None,),
            drops_last=internals.looks_past_last_hit(scheduler),
        )
        self.prefixes = PrefixWatch(
            internals.block_pool(scheduler), self.plan, self._block_tokens, self.ghost, learns=elastic
        )
        self.steps = StepBook(
            self.plan.num_blocks, self.plan.chunk_blocks, stages=internals.has_stages(scheduler)
        )
        """Engine thread only, but for numbers that the background thread reads."""
        self._block_pages = self.plan.total_pages / max(1, self.plan.num_blocks)
        self.failed: str | None = None
        self._errors = 0

        # Written by the background thread, read by the engine thread.
        self._target_lent_chunks = 0
        self._reserved_pages = self.plan.total_pages
        self._mapped: collections.deque[int] = collections.deque()
        # Written by the engine thread, read by the background thread.
        self._released: collections.deque[tuple[int, int]] = collections.deque()
        """Chunk, and the last step that was scheduled before it was taken out of the pool."""
        self.search = LoanSearch()
        self._claim_told = 0
        self._missing: dict[tuple[str, int, int], int] = {}
        self._max_loss = 0.0
        self._rests = False
        """Nothing is claimed or remembered: while nothing is lent, there is nothing to do before a step."""

        self._measured: collections.deque[tuple[int, int, int, float]] = collections.deque(maxlen=64)
        self.model = first_model()

        self.row = because if because is not None else row("decoder" if elastic else "kv_connector")
        self._elastic = elastic
        with contextlib.ExitStack() as made:  # a file that is kept open here would look like a live engine's
            self._lease = made.enter_context(compat.starting_lease() or self._dir.serving_lease_writer())
            self._lease.extra[:] = pack_found(found)
            board = made.enter_context(self._dir.serving_board_writer())
            num_ranks = num_ranks if elastic else 0
            self._pagers = made.enter_context(
                PagerChannel(self._dir, "serving", self.plan.num_chunks, num_ranks, wanted=True)
            )
            for reader in self._pagers.ranks:
                record = reader.read()
                # A file without a writer, or of another engine's worker, which dies: our worker has no page pool.
                if record is None or record.engine != self._pagers.engine or not reader.alive():
                    raise RuntimeError("a worker did not report elastic memory")
            made.pop_all()
        self._node = self._dir.node()
        self._trouble = Trouble()
        self._board = Board(board, scheduler, self.plan, self.balloon, self.steps, self.model, self._trouble)
        self._peers = Peers(self._dir, self._trouble)
        self._notifier = Notifier()
        self._stopping = False
        self.book = ServingBook(self.plan.num_chunks, self.plan.chunk_pages)
        """Background thread only.  The balloon holds what is not in use by it, plus `_released` less `_mapped`."""
        self._door = ProtocolLog("serving", self.book)
        self._idle_asked = False
        self._said: tuple[int, ...] = ()
        self._said_ns = 0
        self._thread = threading.Thread(target=self._run, name="rose-serving", daemon=True)
        self._publish_lease(self.plan.total_pages)

    # ------------------------------------------------------------------ engine thread

    def attach(self, engine: Any) -> None:
        """The engine is built and about to enter its loop."""
        self._engine = engine
        self._board.write(busy=False)
        for name in ("node", "peer"):
            reader = self._dir.node() if name == "node" else self._dir.rollout_lease()
            self._notifier.watch(reader, name)
        for rank in range(len(self._pagers.ranks)):
            self._notifier.watch(self._dir.rank("serving", rank, self.plan.num_chunks), f"rank{rank}")
        self._thread.start()

    def before_add(self, request: Any) -> None:
        """A request has arrived: count what it will not find for the loan's sake."""
        self.ghost.on_prompt(request)

    def before_schedule(self) -> None:
        """Move chunks in or out of the balloon and state what serving needs.  Between two steps."""
        if self._rests and not (self._mapped or self._target_lent_chunks or self.balloon.inflated):
            return
        came_back = bool(self._mapped)
        if came_back:
            until_s = time.monotonic() + SLICE_S
            while self._mapped and time.monotonic() <= until_s:  # the rest at the next step
                self.balloon.deflate((self._mapped.popleft(),))
            self.search.freed()
        if self.failed is not None:
            return
        self._claim()
        if self.book.stranded and internals.num_waiting(self._scheduler):
            self._let_past()
        lent = len(self.balloon.inflated)
        if not lent:
            self.ghost.rest()
        lend = self.steps.to_lend(self._target_lent_chunks, lent, came_back=came_back)
        self.search.goes_on = False
        if lend:
            self._lend(lend)
        self._rests = not (self.steps.claim_chunks or self.ghost.watching)

    def _lend(self, count: int) -> None:
        """Take at most ``count`` chunks out of the pool, as far as the time that a look may take goes."""
        self.ghost.watch()
        taken: list[int] = []
        offered = self.prefixes.offered
        try:
            self.balloon.inflate_free(count, taken=taken, cached=offered)
            self.search.looked(
                time.monotonic(),
                offered,
                num_missing=count - len(taken),
                none_left=self.balloon.exhausted,
            )
        finally:  # also those before an exception: they would be lost to production
            if taken:
                self._released.extend((chunk, self.steps.step) for chunk in taken)
                self._notifier.notify()

    def _let_past(self) -> None:
        """Nobody gives back what the first in the queue needs: those behind it that fit need not wait for that."""
        usable = self.balloon.num_usable_chunks * self.plan.chunk_blocks - 1
        internals.let_past(
            self._scheduler,
            lambda request: internals.blocks_missing(self._scheduler, request) < usable,
            WAITING_LOOKED_AT,
        )

    def _claim(self) -> None:
        """Chunks that serving must get back now, beyond those it can use."""
        lent = self.steps.claimable(len(self.balloon.inflated))
        waiting = 0
        if lent and internals.num_waiting(self._scheduler):
            requests = internals.wait_for_blocks(self._scheduler, WAITING_LOOKED_AT)
            waiting = self._blocks_missing(requests)
        free = internals.block_pool(self._scheduler).get_num_free_blocks() if lent else 0
        if self.steps.claim(lent_chunks=lent, free_blocks=free, waiting_blocks=waiting):
            self._notifier.notify()

    def _blocks_missing(self, requests: Sequence[Any]) -> int:
        """Blocks that these lack.  Asking vLLM takes microseconds a group, so of those that waited at the last look too the answer is kept."""
        known = self._missing
        self._missing = {
            key: known[key] if key in known else internals.blocks_missing(self._scheduler, request)
            for request in requests
            for key in ((request.request_id, request.num_tokens, request.num_computed_tokens),)
        }
        return sum(self._missing.values())

    def after_schedule(self, output: Any) -> None:
        """A step starts: publish deadlines.  Nobody needs that between steps unless a rollout engine lives."""
        # Numbered before it counts: nobody may wait for a step that carries no number.
        internals.stamp(output, self.steps.step + 1)
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        decode, drafts = len(scheduled), 0
        if (
            total != decode
        ):  # somebody has more than one; counted in C: a loop over 256 requests took 50 us here
            decode = list(scheduled.values()).count(1)
            verifying, drafts = internals.drafts_in(output)
            decode += verifying
        encoder = internals.encoder_tokens_in(output, self._scheduler)
        if self.steps.scheduled(total - decode - drafts, decode, time.monotonic_ns(), drafts, encoder):
            self._forecast()
        self.prefixes.note(output)
        # No wake: a rollout engine looks before each of its steps, and gets no new slack from a step that starts.
        if self._board.watched:
            self._tell_step(wake=self._claim_told != self.steps.claim_chunks)

    def _forecast(self) -> None:
        """How long the step takes that has the workers now, for those who look at the board meanwhile."""
        oldest = self.steps.oldest
        if self._board.watched and oldest is not None:
            tokens, decodes, encoder = oldest
            seconds = self.model.predict(tokens, decodes, encoder_tokens=encoder)
            self.steps.step_ns = int(seconds * NS_PER_S)

    def after_update(self) -> None:
        """A step has ended."""
        if not self._scheduler.running and not internals.num_waiting(self._scheduler):
            # Idle from here on: what the last requests held can be lent, and no step looks for it.
            self.balloon.note_freed()
            self.search.freed()
        tokens = self.steps.ended(time.monotonic_ns(), self._board.slo_tpot_ns)
        if tokens is None:
            return
        if any(tokens):
            self._measured.append((*tokens, self.steps.step_ns / NS_PER_S))
        self._forecast()
        self._tell_step()

    def _tell_step(self, *, wake: bool = True) -> None:
        """A step has started or ended: onto the board, now or when the background thread comes round."""
        if internals.num_waiting(self._scheduler):
            head = self._board.next_first_token()
            if head is not None:
                age_ns = (time.time() - head.arrival_time) * NS_PER_S
                self.steps.waits_since(head.request_id, age_ns, self._board.slo_ttft_ns)
        elif self.steps.claim_chunks and not self._scheduler.running:
            self.steps.withdraw()
        if wake and self._board.watched:
            self._claim_told = self.steps.claim_chunks
        self._board.tell(wake=wake)

    def usage(self) -> float:
        """KV use as vLLM would report it without the balloon (0..1)."""
        return self.balloon.num_used_blocks / max(1, self.plan.num_blocks - 1)

    def reset_prefix_cache(self, reset: Any) -> bool:
        """vLLM demands an otherwise empty pool: let the balloon out, reset, take it in again."""
        chunks = sorted(self.balloon.inflated)
        self.balloon.deflate(chunks)
        try:
            done = bool(reset())
            if done:
                self.cache_cleared()
            return done
        finally:
            lost = [chunk for chunk in chunks if not self.balloon.inflate(chunk)]
            if lost:  # requests hold them: nothing ran since they were let out
                raise RuntimeError(f"chunks {lost} could not be taken back after a reset")

    def cache_cleared(self) -> None:
        """Nothing is cached any more."""
        self.ghost.clear()
        self.prefixes.clear()
        self.search.freed()

    def fail(self, error: BaseException) -> None:
        """Fail open.  Any thread."""
        if self.failed is None:
            self.failed = f"{type(error).__name__}: {error}"
            self._errors += 1
            logger.error("ROSE is off, serving goes on as without it: %s", self.failed, exc_info=error)
            self._target_lent_chunks = 0
            self.ghost.stop()
            self._notifier.notify()
        if not self._thread.is_alive():  # failed while being attached: nobody else would say it
            self._say_off()

    # ------------------------------------------------------------------ background thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._round()
            except Exception as error:  # noqa: BLE001  # fail-open, see the module docstring
                self.fail(error)
                self._say_off()
                time.sleep(HEARTBEAT_S)
            self._notifier.wait(HEARTBEAT_S)

    def _say_off(self) -> None:
        """Publish the phase even when nothing else works any more."""
        try:
            self._publish_lease(self._reserved_pages)
        except Exception as error:  # noqa: BLE001  # the end of the line: readers see the heartbeat age
            logger.debug("ROSE: phase off is not published: %r", error)

    def _round(self) -> None:
        """Look at everything once and act.  Order: see the module docstring."""
        if not self._board.watched:  # nobody asks for a prediction: a few steps a second keep the model right
            for _ in range(len(self._measured) - FITTED_UNWATCHED):
                self._measured.popleft()
        while self._measured:  # the fit is too slow for the step path
            prefill, decode, encoder, seconds = self._measured.popleft()
            self.model.observe(
                prefill_tokens=prefill, num_decodes=decode, encoder_tokens=encoder, seconds=seconds
            )
        book, at_s = self.book, time.monotonic()
        self._check_own_files()
        reports, retained = self._pagers.reports()
        node = self._read_node()
        self._turn_board_over(node)
        target = self._lendable(node)
        waiting = len(self._released)
        if waiting:
            self._pagers.fence(max(book.chunks.after_step, self._released[waiting - 1][1]))
        released = tuple(self._released.popleft() for _ in range(waiting))
        self._tell(
            ServingLooked(
                at_s=at_s,
                released=released,
                reports=reports,
                target_chunks=target,
                claim_chunks=self.steps.claim_chunks,
                retained_pages=retained,
            )
        )
        self.prefixes.look(
            self._max_loss, released=[chunk for chunk, _ in released], short=target - book.num_lent
        )
        self._target_lent_chunks = book.may_lend(target)
        # Reserved first, the peer's number read second: of two that grow at once, one sees the other.
        peer_pages = self._peers.pages() if book.num_lent else 0
        self._tell(PeerCounted(at_s=time.monotonic(), pages=peer_pages))
        missing = book.missing_from(self._target_lent_chunks)
        if self._mapped or (missing and self.search.may_find_more(time.monotonic(), self.prefixes.offered)):
            self._call_when_idle()

    def _tell(self, event: ServingEvent) -> None:
        """Tell the book, and do what it says."""
        for action in self._door.handle(event):
            match action:
                case Use():
                    self._mapped.extend(action.chunks)
                case Reserve():
                    self._publish_lease(action.pages)
                case Stranded():
                    self._say_stranded(action.pages)
                case Mark():
                    # A stranger's mark must not be written over unseen: a pager may have obeyed it.
                    self._check_own_files()
                    self._pagers.write(action)
                    self._door.handle(MarksWritten())

    def _say_stranded(self, pages: int) -> None:
        if pages:
            logger.error(
                "ROSE: %d pages of 2 MiB are not given back, by a process that neither obeys nor dies (frozen?); production "
                "goes on with what it has, nothing more is lent; kill or thaw the rollout engine of %s",
                pages,
                self._dir.path,
            )
        else:
            logger.warning("ROSE: what was not given back has come back")

    def _check_own_files(self) -> None:
        """Notice a stranger's writes; once we are off, undo them, so that they keep no memory from production.  What was
        deleted is made anew: that steers nothing, and whoever comes later has to find it.

        Raises:
            LedgerError: Somebody else wrote into our files.
        """
        if self.failed is None:
            require_own(self._lease)
            require_own(self._pagers.marks)
        for writer in (self._lease, self._pagers.marks):
            self._trouble.mend(writer)
        self._board.find()

    def _read_node(self) -> NodeState | None:
        """What the agent says; None also where that cannot be read: an agent of another version is no agent."""
        try:
            node = self._node.read()
        except LedgerError as error:
            self._trouble.say("node.state", error)
            return None
        self._trouble.over("node.state")
        return node

    def _turn_board_over(self, node: NodeState | None) -> None:
        """Is there anybody who steers by our steps?"""
        may_run = node is not None and node.mode == Mode.ON
        watched = self.book.is_watched(peer_lives=self._peers.any_alive(), may_run=may_run)
        compat.let_spin(not watched or self.failed is not None)
        self._board.turn_over(watched, healthy=self.failed is None)

    def _lendable(self, node: NodeState | None) -> int:
        """Chunks that may be lent now: what the agent asks for, nothing when it is silent or we failed."""
        if node is None or self.failed is not None:
            return 0
        self._board.slo_ttft_ns, self._board.slo_tpot_ns = node.slo_ttft_ns, node.slo_tpot_ns
        self.steps.fixed = bool(node.fixed)
        self._max_loss = max(0, node.max_loss_ppm) / 1e6
        if not self._elastic:
            return 0
        return lendable_chunks(
            mode=node.mode,
            lend_pages=node.lend_pages,
            floor_pages=node.floor_pages,
            node_age_s=(time.monotonic_ns() - node.heartbeat_ns) / NS_PER_S,
            num_chunks=self.plan.num_chunks,
            chunk_pages=self.plan.chunk_pages,
        )

    def _call_when_idle(self) -> None:
        """An idle engine calls no ``schedule``: have it run our hook once."""
        if not self._idle_asked:
            self._idle_asked = True
            internals.call_when_idle(self._engine, self._idle)

    def _idle(self) -> None:
        self._idle_asked = False
        comes_back = bool(self._mapped)
        try:
            self.before_schedule()  # notifies of what it has taken
            self._tell_step()
        except Exception as error:  # noqa: BLE001  # fail-open
            self.fail(error)
        if (
            comes_back or self.search.goes_on
        ):  # else the next round would ask again at once, and so on without end
            self._notifier.notify()

    def _publish_lease(self, reserved_pages: int) -> None:
        """Write the lease when it says something new, or to show that we live.

        Each engine wakes when the other's lease changes.  Unconditional writes would therefore trigger each other for ever, on
        production's core.
        """
        self._reserved_pages = reserved_pages
        phase = Phase.OFF if self.failed else Phase.STARTING if self._engine is None else Phase.READY
        total = self.plan.total_pages
        said = (phase, reserved_pages, self._errors, self.book.stranded_pages)
        now_ns = time.monotonic_ns()
        changed = said != self._said
        if not changed and now_ns - self._said_ns < HEARTBEAT_S * 0.8 * NS_PER_S:
            return
        self._said, self._said_ns = said, now_ns
        self._lease.write(
            ServingLease(
                phase=phase,
                support=Support.ELASTIC if self._elastic else Support.COMPUTE_ONLY,
                row=self.row.number,
                total_pages=total,
                reserved_pages=reserved_pages,
                lent_pages=total - reserved_pages,
                stranded_pages=self.book.stranded_pages,
                queried_tokens=self.ghost.queried_tokens,
                lost_tokens=self.ghost.lost_tokens,
                cold_pages=int(len(self.ghost) * self._block_pages + 0.999),
                kept_pages=self.prefixes.num_kept * self.plan.chunk_pages,
                heartbeat_ns=now_ns,
                errors=self._errors,
            )
        )
        if changed:
            self._lease.wake()

    def stop(self) -> None:
        """End the background thread and give up the files; for tests."""
        self._stopping = True
        self._notifier.stop()
        self._thread.join(timeout=5.0)
        self._door.close()
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
            "target_lent_chunks": self._target_lent_chunks,
            "claim_chunks": self.steps.claim_chunks,
            "stranded_pages": self.book.stranded_pages,
            "pressure_seq": self.steps.pressure_seq,
            "queried_tokens": self.ghost.queried_tokens,
            "lost_tokens": self.ghost.lost_tokens,
            "patches": sorted(compat.applied()),
        }
