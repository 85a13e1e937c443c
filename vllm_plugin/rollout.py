"""The rollout engine's side: run only in production's slack, inside a budget that may shrink at any moment.

Two threads, as in :mod:`vllm_plugin.serving`.  The *background thread* sleeps until a shared file changes and then works out two
numbers: how many chunks this engine may hold (:func:`rose.policy.coserving.rollout.allowed_pages`) and whether a step fits
production's slack (:func:`rose.policy.admission.admit`).  The *engine thread* obeys them between steps.

**Gate.**  With the gate closed :meth:`gated` is true, vLLM's loop believes it has no work and sleeps in its input queue: no
``schedule()`` call, no polling.  The background thread opens the gate and wakes it.  vLLM's own pause wins over
the gate, so that a pause that waits for running requests can finish.

**Cut.**  When less is allowed than is held, the engine thread takes chunks into the balloon: unused ones first, then those that
cost the fewest active blocks; requests in them end at once with ``finish_reason "abort"``, ``stop_reason
"rose:kv_reclaimed"`` and their tokens so far.  Only then are the chunks unmarked, unmapped and taken off
``reserved_pages``, which is the number production waits for.

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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rose.coserve.ledger import RecordReader
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import ChunkState, Phase, RolloutLease, ServingBoard
from rose.errors import LedgerError
from rose.policy.admission import AdmissionParams, BoardView, Demand, Rule, admit
from rose.policy.compat import Support
from rose.policy.coserving.chunks import Report
from rose.policy.coserving.rollout import RolloutBook, allowed_pages
from rose.policy.stop_reasons import RECLAIMED, TOO_LARGE
from rose.units import NS_PER_S
from vllm_plugin import compat, internals
from vllm_plugin.capacity import Balloon
from vllm_plugin.memory import ChunkPlan, engine_number
from vllm_plugin.roles import ENV_DIR
from vllm_plugin.step_log import StepLog, first_model
from vllm_plugin.watch import Notifier

logger = logging.getLogger("vllm.rose")

HEARTBEAT_S = 0.1
"""Longest sleep of the background thread when nothing changes."""
PREFILL_LOOKED_AT = 16
"""Waiting requests whose prompts count as demand of the next step."""
DEAD_AFTER_S = 2.0
"""Node agent or serving engine silent for longer: give everything back."""
STEPS_TOLD = 64
"""Of so many last steps the lease tells the longest: what a cut has to wait for."""
UNLIMITED = 1 << 30


def demand_of(running: Sequence[Any], waiting: Sequence[Any]) -> Demand:
    """What the next step would run.  A running request whose prompt is not computed yet wants the rest of it."""
    left = [request.num_tokens - request.num_computed_tokens for request in running]
    num_decodes = sum(tokens <= 1 for tokens in left)
    return Demand(
        num_decodes=num_decodes,
        prefill_tokens=sum(tokens for tokens in left if tokens > 1)
        + sum(request.num_tokens - request.num_computed_tokens for request in waiting),
        context_tokens=sum(request.num_computed_tokens for request in running),
    )


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
        self.gate_open = False
        # Written by the engine thread, read by the background thread.
        self._released: collections.deque[tuple[int, int]] = collections.deque()
        """As in ``ServingSide``."""
        self.num_schedules = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._num_decoded = 0
        self._num_preemptions = 0
        self._reclaim_seq = 0
        self._num_cut_requests = 0
        self._cut_ns = 0

        self._step_started_ns = 0
        self._steps_ns: collections.deque[int] = collections.deque((0,), maxlen=STEPS_TOLD)
        self._scheduled = (0, 0)
        self._context_tokens = 0
        self._may_stop = False
        """Steps may stop between two layers.  Background thread's word."""
        self._stopped_ns = 0
        """Of all steps so far, between two layers."""
        self.model = first_model()
        self._step_log = StepLog()
        self.admission_params = AdmissionParams()
        self.reason = "starting"
        self.gate_reason = "starting"
        self.gate_opened_by = "nobody"

        self._lease = self._dir.rollout_lease_writer()
        self._chunks = self._dir.chunks_writer("rollout", self.plan.num_chunks)
        self._engine_number = engine_number()
        self._chunks.write(ChunkState(engine=self._engine_number, heartbeat_ns=time.monotonic_ns()))
        self._ranks = [self._dir.rank("rollout", r, self.plan.num_chunks) for r in range(num_ranks)]
        self._node = self._dir.node()
        self._serving_lease = self._dir.serving_lease()
        self._board = self._dir.serving_board()
        self._engine_board = self._dir.serving_board()  # readers are one per thread
        self._layers = self._dir.layers()
        """Engine thread."""
        self.book = RolloutBook(self.plan.num_chunks, self.plan.chunk_pages)
        """Background thread only."""
        self._epoch = 0
        self._idle_asked = False
        self._said: tuple[int, ...] = ()
        self._said_ns = 0
        self._has_serving = True
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
        watched = [
            ("node", self._dir.node()),
            ("lease", self._dir.serving_lease()),
            ("board", self._dir.serving_board()),
        ]
        watched += [
            (f"rank{r}", self._dir.rank("rollout", r, self.plan.num_chunks)) for r in range(len(self._ranks))
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
        if self.gate_open or self._engine is None:
            return False
        return not internals.is_paused(self._scheduler) and not internals.engine_is_stopping(self._engine)

    def before_schedule(self) -> int:
        """Obey the two numbers; tokens this step may schedule (0: none)."""
        self._balance()
        for request in internals.waiting_requests(self._scheduler, 1):
            # It was running, has outgrown the budget and was preempted: everybody behind it would wait for it.
            self._refuse_oversized(request)
        self.num_schedules += 1
        try:
            tokens = self._admit(self._engine_board)
        except LedgerError as error:  # without the board nothing says that production can spare anything
            self.gate_reason, tokens = str(error), 0
        if tokens == 0:
            self.gate_open = False
        return tokens

    def _balance(self) -> None:
        """Take mapped chunks into use; give up chunks that are no longer allowed."""
        while self._mapped:
            self.balloon.deflate((self._mapped.popleft(),))
        if self.balloon.num_usable_chunks > self._allowed_chunks:
            self._cut(self._allowed_chunks)

    def _cut(self, keep: int) -> None:
        """Shrink to ``keep`` chunks now.  Requests that lose memory end with what they have."""
        started_ns = time.monotonic_ns()
        balloon = self.balloon
        released = balloon.inflate_free(balloon.num_usable_chunks - keep, budget_s=0.05)
        if balloon.num_usable_chunks > keep:
            victims, hit = balloon.cheapest_victims(balloon.num_usable_chunks - keep, self._holders())
            if keep == 0 and 0 not in balloon.inflated:
                victims.append(0)
                hit = [name for name, _, ids in self._holders() if ids]
            self._num_cut_requests += internals.finish_with_partial_output(
                self._scheduler, self._engine, hit, RECLAIMED
            )
            released += [chunk for chunk in victims if balloon.inflate(chunk)]
        self._refuse_oversized()
        self._reclaim_seq += 1
        self._cut_ns = time.monotonic_ns() - started_ns
        logger.info(
            "ROSE: cut to %d of %d chunks, %d released in %.1f ms: %s",
            keep,
            self.balloon.num_chunks,
            len(released),
            self._cut_ns / 1e6,
            self.reason,
        )
        self._released.extend((chunk, self.num_schedules) for chunk in released)
        self._notifier.notify()

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

    def _refuse_oversized(self, only: Any = None) -> None:
        """Waiting requests that the present budget can never hold would wait for ever: answer them now.

        ``only``: the others were looked at when the budget became what it is.
        """
        usable = self.balloon.num_usable_chunks * self.plan.chunk_blocks - 1
        looked_at = internals.waiting_requests(self._scheduler, UNLIMITED) if only is None else [only]
        hopeless = [request.request_id for request in looked_at if self._blocks_of(request) > usable]
        if hopeless:
            reason = RECLAIMED if usable <= 0 else TOO_LARGE
            self._num_cut_requests += internals.finish_with_partial_output(
                self._scheduler, self._engine, hopeless, reason
            )

    def _blocks_of(self, request: Any) -> int:
        """Blocks to hold what is known of a request and its next token."""
        return -(-(request.num_tokens + 1) // self._block_tokens)

    def after_add(self, request: Any) -> None:
        """A request has come in."""
        self._refuse_oversized(request)

    def after_schedule(self, output: Any) -> None:
        internals.stamp(output, self.num_schedules, self._may_stop)
        self._step_started_ns = time.monotonic_ns()
        # Counted in C: a loop over 256 requests here took 50 us of production's step.
        decode = list(output.num_scheduled_tokens.values()).count(1)
        prefill = output.total_num_scheduled_tokens - decode
        self._scheduled = (prefill, decode)
        self._num_preemptions += len(output.preempted_req_ids or ())
        self._context_tokens = sum(request.num_computed_tokens for request in self._scheduler.running)

    def after_update(self) -> None:
        prefill, decode = self._scheduled
        if prefill + decode:
            self._num_steps += 1
            self._num_tokens += prefill + decode
            self._num_decoded += decode
            step_ns = max(1, time.monotonic_ns() - self._step_started_ns - self._stood_ns())
            self._steps_ns.append(step_ns)
            seconds = step_ns / NS_PER_S
            self.model.observe(
                prefill_tokens=prefill,
                num_decodes=decode,
                seconds=seconds,
                context_tokens=self._context_tokens,
            )
            self._step_log.write(prefill, decode, self._context_tokens, seconds)

    def _stood_ns(self) -> int:
        """How long the step that ends stood between two layers: time in which it did nothing, and a cut ends it at once."""
        if not self._may_stop:
            return 0
        try:
            said = self._layers.read()
        except LedgerError:
            return 0
        before, self._stopped_ns = self._stopped_ns, said.waited_ns if said is not None else 0
        return max(0, self._stopped_ns - before)

    def _admit(self, reader: RecordReader[ServingBoard]) -> int:
        """Tokens the next step may have: what fits production's slack.  Either thread, each with its reader."""
        if self._allowed_chunks == 0:
            return 0
        scheduler = self._scheduler
        waiting = internals.waiting_requests(scheduler, PREFILL_LOOKED_AT)
        admission = admit(
            time.monotonic_ns() / NS_PER_S,
            board=self._view(reader),
            model=self.model,
            params=self.admission_params,
            demand=demand_of(list(scheduler.running), waiting),
        )
        self.gate_reason = admission.reason
        return admission.token_budget

    def _view(self, reader: RecordReader[ServingBoard]) -> BoardView:
        if not self._has_serving:
            return BoardView(present=False)
        board = reader.read()
        if board is None:
            raise LedgerError("serving has no board", field=str(reader.path))
        return BoardView(
            busy=bool(board.busy),
            running=board.running,
            waiting=board.waiting,
            ttft_deadline_s=board.ttft_deadline_ns / NS_PER_S or None,
            tpot_deadline_s=board.tpot_deadline_ns / NS_PER_S or None,
            step_started_s=board.step_started_ns / NS_PER_S,
            step_s=board.step_ns / NS_PER_S,
        )

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
        book, chunks, chunk_pages = self.book, self.book.chunks, self.plan.chunk_pages
        trouble = self._mend_files()
        released = [self._released.popleft() for _ in range(len(self._released))]
        if released:
            book.released(released)
            # Before the marks: who sees a chunk unmarked must find the step that may be the last to touch it.
            self._write_chunks()
        self._mapped.extend(book.settle(self._reports()))

        self._step_log.flush()
        pages, reason = self._permitted_pages() if not trouble else (0, trouble)
        allowed = min(pages // chunk_pages, self.plan.num_chunks)
        book.shrink(allowed)
        self._allow(allowed, reason)
        growth = book.growth(allowed)
        # Reserve first, read serving's number second: serving keeps its reservation, we step back.
        self._publish_lease(growth)
        if growth:
            book.grow(growth, self._permitted_pages()[0] // chunk_pages)
            self._publish_lease(0)
        if chunks.changed:
            self._write_chunks(marks=True)
            self._chunks.wake()
        if self._mapped or chunks.num_used > allowed:
            self._call_when_idle()
        fits = allowed > 0 and self._admit(self._board) > 0
        if fits and not self.gate_open:
            self.gate_opened_by = "event" if notified else "timer"
            self.gate_open = True
            internals.wake(self._engine)
        elif not fits:
            self.gate_open = False

    def _reports(self) -> list[Report]:
        """What the workers say; of one whose file is gone, nothing."""
        reports = []
        for reader in self._ranks:
            record = reader.read()  # the states are at least as new as its generation
            states = reader.extra
            if record is None or len(states) != self.plan.num_chunks:
                raise LedgerError("a worker's file is gone", field=str(reader.path))
            reports.append(Report(record.generation, states))
        return reports

    def _write_chunks(self, *, marks: bool = False) -> None:
        """Tell the pagers; ``marks``: what the book says is wanted, under a new generation."""
        chunks = self.book.chunks
        if marks:
            self._chunks.extra[:] = chunks.marks
        self._chunks.write(
            ChunkState(
                engine=self._engine_number,
                generation=chunks.generation + marks,
                after_step=chunks.after_step,
                heartbeat_ns=time.monotonic_ns(),
            )
        )
        if marks:
            chunks.published()

    def _mend_files(self) -> str:
        """A stranger's write, a file cut off or deleted, must not end the sharing: production would wait for a number for ever.

        Why nothing may be held, else "": who cannot be found by its name cannot be counted by a production that comes later.
        """
        for writer in (self._lease, self._chunks):
            try:
                if writer.mend() and writer.path not in self._mended:
                    self._mended.add(writer.path)
                    logger.warning(
                        "ROSE: %s was deleted, cut off or written by another process; mended", writer.path
                    )
            except LedgerError as error:
                return f"shared files: {error}"
        return ""

    def _permitted_pages(self) -> tuple[int, str]:
        """None where another's file cannot be read; the round goes on, for what is held must go back."""
        try:
            return self._allowed_pages()
        except LedgerError as error:
            return 0, f"shared files: {error}"

    def _allowed_pages(self) -> tuple[int, str]:
        """What this engine may hold by what the shared files say now."""
        now_ns = time.monotonic_ns()
        node = self._node.read()
        if node is None or not self._node.alive():
            return 0, "node agent is not there"
        self._epoch = node.epoch
        self._has_serving = bool(node.has_serving)
        rule = Rule(node.rule) if node.rule in list(Rule) else Rule.SLACK
        # An agent of before has no such number, and a damaged one is no reason to hurry.
        delay = node.delay_pct / 100 if 0 < node.delay_pct <= 100 else 1.0
        must = self.ladder is not None and bool(self.ladder["serialise"])
        wanted = (rule, bool(node.serialise) or must, delay)
        if wanted != (
            self.admission_params.rule,
            self.admission_params.serialise,
            self.admission_params.delay,
        ):
            self.admission_params = replace(
                self.admission_params, rule=rule, serialise=wanted[1], delay=delay
            )
        self._may_stop = bool(node.stop_at_layers and node.has_serving and wanted[1])
        lease = self._serving_lease.read() if node.has_serving else None
        board = self._board.read() if node.has_serving else None
        return allowed_pages(
            mode=node.mode,
            lend_pages=node.lend_pages,
            has_serving=self._has_serving,
            serving_phase=lease.phase if lease is not None else Phase.ABSENT,
            serving_alive=lease is not None and self._serving_lease.alive(),
            serving_total=lease.total_pages if lease is not None else 0,
            serving_reserved=lease.reserved_pages if lease is not None else 0,
            serving_needed=board.needed_pages if board is not None else 0,
            node_age_s=(now_ns - node.heartbeat_ns) / NS_PER_S,
            serving_age_s=(now_ns - lease.heartbeat_ns) / NS_PER_S if lease is not None else 0.0,
            compute_only=lease is not None and lease.support == Support.COMPUTE_ONLY,
            dead_after_s=DEAD_AFTER_S,
        )

    def _allow(self, chunks: int, reason: str) -> None:
        self.reason = reason
        self._allowed_chunks = chunks
        if chunks == 0:
            self.gate_open = False

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

    def _publish_lease(self, growth_chunks: int) -> None:
        """Write the lease when it says something new, or to show that we live.

        Production is woken only by what it waits for, the number of pages: see ``ServingSide._publish_lease``.
        """
        pages = self.book.lease_pages(growth_chunks)
        said = (pages, self._epoch, self._engine is None)
        now_ns = time.monotonic_ns()
        changed = said != self._said
        if not changed and now_ns - self._said_ns < HEARTBEAT_S * 0.8 * NS_PER_S:
            return
        self._said, self._said_ns = said, now_ns
        running, waiting = len(self._scheduler.running), internals.num_waiting(self._scheduler)
        self._lease.write(
            RolloutLease(
                phase=Phase.STARTING if self._engine is None else Phase.READY,
                acked_epoch=self._epoch,
                reserved_pages=pages,
                wanted_pages=self.plan.total_pages if running + waiting else 0,
                gate_open=self.gate_open,
                steps=self._num_steps,
                schedules=self.num_schedules,
                tokens=self._num_tokens,
                decoded=self._num_decoded,
                reclaim_seq=self._reclaim_seq,
                cut_requests=self._num_cut_requests,
                cut_ns=self._cut_ns,
                step_ns=max(tuple(self._steps_ns)),
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
        for writer in (self._lease, self._chunks):
            writer.close()

    def status(self, _argument: Any = None) -> dict[str, Any]:
        """What is in force.  Engine thread (a utility call); asks the workers for the kernel's truth."""
        memory = self._engine.model_executor.collective_rpc("rose_memory")
        return {
            "role": "rollout",
            "reason": self.reason,
            "gate_reason": self.gate_reason,
            "gate_open": self.gate_open,
            "gate_opened_by": self.gate_opened_by,
            "usable_pages": self.balloon.num_usable_chunks * self.plan.chunk_pages,
            "reserved_pages": self.book.lease_pages(),
            "total_pages": self.plan.total_pages,
            "resident_bytes": sum(rank["resident_bytes"] for rank in memory),
            "budget_tokens": max(0, self.balloon.num_usable_chunks * self.plan.chunk_blocks - 1)
            * self._block_tokens,
            "used_tokens": self.balloon.num_used_blocks * self._block_tokens,
            "running": len(self._scheduler.running),
            "waiting": internals.num_waiting(self._scheduler),
            "num_preemptions": self._num_preemptions,
            "request_ids": list(self._scheduler.requests),
            "schedules": self.num_schedules,
            "steps": self._num_steps,
            "reclaim_seq": self._reclaim_seq,
            "cut_requests": self._num_cut_requests,
            "ladder": self.ladder,
            "layer_stops": self._layer_stops(),
            "patches": sorted(compat.applied()),
        }

    def _layer_stops(self) -> dict[str, Any] | None:
        """What stopping between layers has done so far; None where steps cannot: not eager, or of several pipeline stages."""
        said = self._layers.read() if self._layers.alive() else None
        return None if said is None else {"on": self._may_stop, **asdict(said)}
