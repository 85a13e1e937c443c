"""The rollout engine's side: run only in production's slack, inside a budget that may shrink at any moment.

Two threads, as in :mod:`vllm_plugin.serving`.  The *background thread* sleeps until a shared file changes and then works out two
numbers: how many chunks this engine may hold (:mod:`vllm_plugin.permit`) and whether a step fits production's slack
(:mod:`vllm_plugin.gate`).  The *engine thread* obeys them between steps.

**Gate.**  With the gate closed :meth:`gated` is true.  The background thread opens it and wakes vLLM's loop.  vLLM's own pause wins over
the gate, so that a pause that waits for running requests can finish.

**Cut.**  When less is allowed than is held, the engine thread takes chunks into the balloon (:mod:`vllm_plugin.cuts`).  Only then are
they unmarked, unmapped and taken off ``reserved_pages``, which is the number production waits for.

**Dead-man.**  Node agent or production silent, damaged files, any exception: nothing is allowed, everything is given back.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Phase, RolloutLease
from rose.errors import LedgerError
from rose.policy.coserving.events import (
    AllowedAgain,
    Mark,
    MarksWritten,
    Reserve,
    RolloutEvent,
    RolloutLooked,
    Use,
)
from rose.policy.coserving.rollout import RolloutBook
from rose.units import NS_PER_S
from vllm_plugin import compat, internals
from vllm_plugin.capacity import Balloon
from vllm_plugin.cuts import Cuts
from vllm_plugin.gate import Gate
from vllm_plugin.memory import ChunkPlan
from vllm_plugin.pager_channel import PagerChannel
from vllm_plugin.permit import Permit
from vllm_plugin.protocol_log import ProtocolLog
from vllm_plugin.roles import ENV_DIR
from vllm_plugin.step_tally import StepTally
from vllm_plugin.watch import Notifier

logger = logging.getLogger("vllm.rose")

HEARTBEAT_S = 0.1
"""Longest sleep of the background thread when nothing changes."""


class RolloutSide:
    """Everything ROSE does inside a rollout engine.  Arguments as for ``ServingSide``."""

    def __init__(
        self,
        scheduler: Any,
        kv_cache_config: Any,
        num_ranks: int,
        *,
        piece_bytes: int = compat.OS_PAGE_BYTES,
        on_gpu: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._engine: Any = None
        self._on_gpu = on_gpu
        self.ladder: dict[str, Any] | None = None
        """The rung of the compute ladder that the workers have put in force; None on the host, where the node agent knows it."""
        self.plan = ChunkPlan.of(kv_cache_config, piece_bytes)
        self._dir = NodeDir(os.environ[ENV_DIR])
        self.balloon = Balloon(internals.block_pool(scheduler), self.plan.chunk_blocks)
        for chunk in range(self.plan.num_chunks):
            self.balloon.inflate(chunk)
        self._block_tokens = scheduler.block_size

        # Written by the background thread, read by the engine thread.
        self._allowed_chunks = 0
        self._mapped: collections.deque[int] = collections.deque()
        # Written by the engine thread, read by the background thread.
        self._released: collections.deque[tuple[int, int]] = collections.deque()
        """As in ``ServingSide``."""
        self.num_schedules = 0
        self._stopped_ns: int | None = 0
        """Of all steps so far, between two layers; None: could not be read."""
        self.tally = StepTally()
        self.cuts = Cuts(scheduler, self.balloon)
        self.permit = Permit(self._dir)
        self.gate = Gate(scheduler, self.permit, self.tally.model)
        self.reason = "starting"

        self._lease = self._dir.rollout_lease_writer()
        self._pagers = PagerChannel(self._dir, "rollout", self.plan.num_chunks, num_ranks, wanted=False)
        self._board = self._dir.serving_board()
        self._engine_board = self._dir.serving_board()  # readers are one per thread
        self._layers = self._dir.layers()
        """Engine thread."""
        self.book = RolloutBook(self.plan.num_chunks, self.plan.chunk_pages)
        """Background thread only."""
        self._door = ProtocolLog("rollout", self.book)
        self._idle_asked = False
        self._said: tuple[int, ...] = ()
        self._said_ns = 0
        self._trouble = ""
        self._mended: set[Path] = set()
        self._notifier = Notifier()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rose-rollout", daemon=True)
        self._publish_lease(0)

    # ------------------------------------------------------------------ engine thread

    def attach(self, engine: Any) -> None:
        """The engine is built and about to enter its loop."""
        self._engine = engine
        if self._on_gpu:
            self.ladder = self._common_rung(engine.model_executor.collective_rpc("rose_ladder"))
            self.permit.must_serialise = self.ladder is not None and bool(self.ladder["serialise"])
        watched = [
            ("node", self._dir.node()),
            ("lease", self._dir.serving_lease()),
            ("board", self._dir.serving_board()),
        ]
        watched += [
            (f"rank{r}", self._dir.rank("rollout", r, self.plan.num_chunks))
            for r in range(len(self._pagers.ranks))
        ]
        for name, reader in watched:
            self._notifier.watch(reader, name)
        self._thread.start()

    def _common_rung(self, rungs: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        """One for the whole engine, whose ranks step together: a rank that needs its steps serialised decides for all."""
        told = [rung for rung in rungs if rung is not None]
        return next((rung for rung in told if rung["serialise"]), told[0] if told else None)

    def gated(self) -> bool:
        """Does vLLM's loop have to believe that there is no work?"""
        if self.gate.is_open or self._engine is None:
            return False
        return not internals.is_paused(self._scheduler) and not internals.engine_is_stopping(self._engine)

    def before_schedule(self) -> int:
        """Obey the two numbers; tokens this step may schedule (0: none)."""
        self._balance()
        for request in internals.waiting_requests(self._scheduler, 1):
            # It was running, has outgrown the budget and was preempted: everybody behind it would wait for it.
            self.cuts.refuse_oversized(self._engine, request)
        self.num_schedules += 1
        try:
            tokens = self.gate.tokens(self._engine_board) if self._allowed_chunks else 0
        except LedgerError as error:
            self.gate.reason, tokens = str(error), 0
        if tokens == 0:
            self.gate.is_open = False
        return tokens

    def _balance(self) -> None:
        """Take mapped chunks into use; give up chunks that are no longer allowed."""
        while self._mapped:
            self.balloon.deflate((self._mapped.popleft(),))
        if self.balloon.num_usable_chunks > self._allowed_chunks:
            released = self.cuts.cut(self._engine, self._allowed_chunks, self.reason)
            self._released.extend((chunk, self.num_schedules) for chunk in released)
            self._notifier.notify()

    def after_add(self, request: Any) -> None:
        """A request has come in."""
        self.cuts.refuse_oversized(self._engine, request)

    def after_schedule(self, output: Any) -> None:
        internals.stamp(output, self.num_schedules, self.permit.may_stop)
        self.tally.begin(output, self._scheduler.running)

    def after_update(self) -> None:
        self.tally.end(self._stood_ns())

    def _stood_ns(self) -> int | None:
        """How long the step that ends stood between two layers: time in which it did nothing, and a cut ends it at once.

        None: not known.  Asked at every step, whether steps may stop now or not: what was not taken off the step that stood would be
        taken off a later one.
        """
        try:
            said = self._layers.read()
        except LedgerError:
            self._stopped_ns = None
            return None
        before, self._stopped_ns = self._stopped_ns, said.waited_ns if said is not None else 0
        return None if before is None else max(0, self._stopped_ns - before)

    def usage(self) -> float:
        """KV use relative to the present budget (0..1)."""
        usable = self.balloon.num_usable_chunks * self.plan.chunk_blocks
        return min(1.0, self.balloon.num_used_blocks / usable) if usable else 0.0

    def reset_prefix_cache(self, reset: Any) -> bool:
        """vLLM demands an otherwise empty pool: let the balloon out, reset, take it in again."""
        chunks = sorted(self.balloon.inflated)
        self.balloon.deflate(chunks)
        try:
            return bool(reset())
        finally:
            for chunk in chunks:
                if not self.balloon.inflate(chunk):
                    raise RuntimeError(f"chunk {chunk} could not be taken back after a reset")

    # ------------------------------------------------------------------ background thread

    def _run(self) -> None:
        notified = False
        while not self._stopping:
            try:
                self._round(notified)
            except LedgerError as error:
                self._fail_closed(f"shared files: {error}")
            except Exception as error:  # dead-man, see the module docstring
                if self._trouble != repr(error):  # one traceback, not ten a second
                    self._trouble = repr(error)
                    logger.exception("ROSE rollout side")
                self._fail_closed("internal error, see the log")
                time.sleep(HEARTBEAT_S)
            notified = self._notifier.wait(HEARTBEAT_S)

    def _round(self, notified: bool) -> None:
        """Look at everything once and act.  ``notified``: an event called, not the timer."""
        book, at_s = self.book, time.monotonic()
        trouble = self._mend_files()
        reports, _ = self._pagers.reports()
        self.tally.log.flush()
        pages, reason = self.permit.pages() if not trouble else (0, trouble)
        allowed = book.chunks_of(pages)
        waiting = len(self._released)
        if waiting:
            self._pagers.fence(max(book.chunks.after_step, self._released[waiting - 1][1]))
        released = tuple(self._released.popleft() for _ in range(waiting))
        self._allow(allowed, reason)
        growing = self._tell(
            RolloutLooked(at_s=at_s, released=released, reports=reports, allowed_chunks=allowed)
        )
        if growing:
            # Announced first, production's numbers read second: production keeps its reservation, we step back.
            allowed_now = book.chunks_of(self.permit.pages()[0])
            self._tell(AllowedAgain(at_s=time.monotonic(), allowed_chunks=allowed_now))
        if self._mapped or book.chunks.num_used > allowed:
            self._call_when_idle()
        if not (allowed > 0 and self.gate.tokens(self._board) > 0):
            self.gate.is_open = False
        elif not self.gate.is_open:
            self.gate.opened_by = "event" if notified else "timer"
            self.gate.is_open = True
            internals.wake(self._engine)

    def _tell(self, event: RolloutEvent) -> bool:
        """Tell the book, and do what it says; whether the lease announces a growth now."""
        growing = False
        for action in self._door.handle(event):
            match action:
                case Use():
                    self._mapped.extend(action.chunks)
                case Reserve():
                    growing = action.growing
                    self._publish_lease(action.pages)
                case Mark():
                    self._pagers.write(action)
                    self._door.handle(MarksWritten())
        return growing

    def _mend_files(self) -> str:
        """A stranger's write, a file cut off or deleted, must not end the sharing: production would wait for a number for ever.

        Why nothing may be held, else "": who cannot be found by its name cannot be counted by a production that comes later.
        """
        for writer in (self._lease, self._pagers.marks):
            try:
                if writer.mend() and writer.path not in self._mended:
                    self._mended.add(writer.path)
                    logger.warning(
                        "ROSE: %s was deleted, cut off or written by another process; mended", writer.path
                    )
            except LedgerError as error:
                return f"shared files: {error}"
        return ""

    def _allow(self, chunks: int, reason: str) -> None:
        self.reason = reason
        self._allowed_chunks = chunks
        if chunks == 0:
            self.gate.is_open = False

    def _fail_closed(self, reason: str) -> None:
        """Nothing may be held.  Never raises: the thread that gives memory back must not end."""
        self._allow(0, reason)
        if self.book.chunks.num_used and self._engine is not None:
            with suppress(Exception):
                self._call_when_idle()  # with the gate closed nothing else would give back what is held

    def _call_when_idle(self) -> None:
        """A gated or idle engine calls no ``schedule``: have it run our hook once."""
        if not self._idle_asked:
            self._idle_asked = True
            internals.call_when_idle(self._engine, self._idle)

    def _idle(self) -> None:
        self._idle_asked = False
        self._balance()
        self._notifier.notify()

    def _publish_lease(self, pages: int) -> None:
        """Write the lease when it says something new, or to show that we live.

        Production is woken only by what it waits for, the number of pages: see ``ServingSide._publish_lease``.
        """
        said = (pages, self.permit.epoch, self._engine is None)
        now_ns = time.monotonic_ns()
        changed = said != self._said
        if not changed and now_ns - self._said_ns < HEARTBEAT_S * 0.8 * NS_PER_S:
            return
        self._said, self._said_ns = said, now_ns
        running, waiting = len(self._scheduler.running), internals.num_waiting(self._scheduler)
        self._lease.write(
            RolloutLease(
                phase=Phase.STARTING if self._engine is None else Phase.READY,
                acked_epoch=self.permit.epoch,
                reserved_pages=pages,
                wanted_pages=self.plan.total_pages if running + waiting else 0,
                gate_open=self.gate.is_open,
                steps=self.tally.num_steps,
                schedules=self.num_schedules,
                tokens=self.tally.num_tokens,
                decoded=self.tally.num_decoded,
                reclaim_seq=self.cuts.num_cuts,
                cut_requests=self.cuts.num_requests,
                cut_ns=self.cuts.last_ns,
                step_ns=self.tally.longest_ns,
                heartbeat_ns=now_ns,
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
        for writer in (self._lease, self._pagers):
            writer.close()

    def status(self, _argument: Any = None) -> dict[str, Any]:
        """What is in force.  Engine thread (a utility call); asks the workers for the kernel's truth."""
        memory = self._engine.model_executor.collective_rpc("rose_memory")
        return {
            "role": "rollout",
            "reason": self.reason,
            "gate_reason": self.gate.reason,
            "gate_open": self.gate.is_open,
            "gate_opened_by": self.gate.opened_by,
            "usable_pages": self.balloon.num_usable_chunks * self.plan.chunk_pages,
            "reserved_pages": self.book.lease_pages(),
            "total_pages": self.plan.total_pages,
            "resident_bytes": sum(rank["resident_bytes"] for rank in memory),
            "budget_tokens": max(0, self.balloon.num_usable_chunks * self.plan.chunk_blocks - 1)
            * self._block_tokens,
            "used_tokens": self.balloon.num_used_blocks * self._block_tokens,
            "running": len(self._scheduler.running),
            "waiting": internals.num_waiting(self._scheduler),
            "num_preemptions": self.tally.num_preemptions,
            "request_ids": list(self._scheduler.requests),
            "schedules": self.num_schedules,
            "steps": self.tally.num_steps,
            "reclaim_seq": self.cuts.num_cuts,
            "cut_requests": self.cuts.num_requests,
            "ladder": self.ladder,
            "layer_stops": self._layer_stops(),
            "patches": sorted(compat.applied()),
        }

    def _layer_stops(self) -> dict[str, Any] | None:
        """What stopping between layers has done so far; None where steps cannot: not eager, or of several pipeline stages."""
        try:
            said = self._layers.read() if self._layers.alive() else None
        except (
            LedgerError
        ) as error:  # mended by its writer at the next step; everything else is as true as it was
            return {"error": str(error)}
        return None if said is None else {"on": self.permit.may_stop, **asdict(said)}
