"""The rollout engine's side: run only in production's slack, inside a budget that may shrink at any moment.

Two threads, as in :mod:`vllm_plugin.serving`.  The *background thread* (:mod:`vllm_plugin.rollout_rounds`) sleeps until a shared file changes
and then works out two things: how many chunks this engine may hold (:mod:`vllm_plugin.permit`) and whether a step fits production's slack
(:mod:`vllm_plugin.gate`).  The *engine thread* (:mod:`vllm_plugin.rollout_steps`) obeys them between steps.

**Gate.**  With the gate closed :meth:`gated` is true.  The background thread opens it and wakes vLLM's loop.  vLLM's own pause wins over
the gate, so that a pause that waits for running requests can finish.

**Cut.**  When less is allowed than is held, the engine thread takes chunks into the balloon (:mod:`vllm_plugin.cuts`).  Only then are
they unmarked, unmapped and taken off ``reserved_pages``, which is the number production waits for.

**Dead-man.**  Node agent or production silent, damaged files, any exception: nothing is allowed, everything is given back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Phase, RolloutLease
from rose.errors import LedgerError
from rose.policy.coserving.rollout import RolloutBook
from vllm_plugin import compat, internals
from vllm_plugin.capacity import Balloon
from vllm_plugin.compute import common_rung
from vllm_plugin.cuts import Cuts
from vllm_plugin.gate import Gate
from vllm_plugin.layer_totals import LayerTotals
from vllm_plugin.memory import ChunkPlan
from vllm_plugin.pager_channel import PagerChannel
from vllm_plugin.permit import Permit
from vllm_plugin.roles import ENV_DIR
from vllm_plugin.rollout_rounds import RolloutRounds
from vllm_plugin.rollout_steps import RolloutSteps
from vllm_plugin.seam import Seam
from vllm_plugin.step_tally import StepTally
from vllm_plugin.told_lease import ToldLease

logger = logging.getLogger("vllm.rose")

HEARTBEAT_S = 0.1
"""Longest sleep of the background thread when nothing changes."""


class RolloutSide:
    """Everything ROSE does inside a rollout engine.  Arguments as for ``ServingSide``.

    Attributes:
        ladder: The rung of the compute ladder that the workers have put in force; None on the host, where the node agent knows it.
        gated, before_schedule, after_add, after_schedule, after_update: :class:`~vllm_plugin.rollout_steps.RolloutSteps`'s.
    """

    def __init__(
        self,
        scheduler: Any,
        kv_cache_config: Any,
        num_ranks: int,
        *,
        piece_bytes: int = compat.OS_PAGE_BYTES,
        on_gpu: bool = False,
    ) -> None:
        self._scheduler, self._on_gpu = scheduler, on_gpu
        self._block_tokens = scheduler.block_size
        self.ladder: dict[str, Any] | None = None
        self.plan = plan = ChunkPlan.of(kv_cache_config, piece_bytes)
        self._dir = directory = NodeDir(os.environ[ENV_DIR])
        self.seam = seam = Seam()
        self.balloon = Balloon(internals.block_pool(scheduler), plan.chunk_blocks)
        for chunk in range(plan.num_chunks):
            self.balloon.inflate(chunk)
        self.tally = StepTally()
        self.cuts = Cuts(scheduler, self.balloon)
        self.permit = Permit(directory)
        self.gate = Gate(scheduler, self.permit, self.tally.model)
        self.layers = LayerTotals(directory.layers())
        self._lease = ToldLease[RolloutLease](directory.rollout_lease_writer(), HEARTBEAT_S)
        self._pagers = PagerChannel(directory, "rollout", plan.num_chunks, num_ranks, wanted=False)
        self.book = RolloutBook(plan.num_chunks, plan.chunk_pages)
        """Background thread only."""
        self.hooks = RolloutSteps(
            scheduler,
            directory,
            seam=seam,
            balloon=self.balloon,
            cuts=self.cuts,
            gate=self.gate,
            permit=self.permit,
            tally=self.tally,
            layers=self.layers,
        )
        self.rounds = RolloutRounds(
            seam=seam,
            book=self.book,
            hooks=self.hooks,
            permit=self.permit,
            gate=self.gate,
            board=directory.serving_board(),
            lease=self._lease.file,
            pagers=self._pagers,
            publish=self._publish_lease,
            flush=self.tally.log.flush,
        )
        self.gated, self.before_schedule = self.hooks.gated, self.hooks.before_schedule
        self.after_add, self.after_schedule = self.hooks.after_add, self.hooks.after_schedule
        self.after_update = self.hooks.after_update
        self._trouble = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rose-rollout", daemon=True)
        self._publish_lease(0)

    # ------------------------------------------------------------------ engine thread

    def attach(self, engine: Any) -> None:
        """The engine is built and about to enter its loop."""
        self.seam.engine = engine
        if self._on_gpu:
            self.ladder = common_rung(engine.model_executor.collective_rpc("rose_ladder"))
            self.permit.must_serialise = self.ladder is not None and bool(self.ladder["serialise"])
        notifier, directory = self.seam.notifier, self._dir
        notifier.watch(directory.node(), "node")
        notifier.watch(directory.serving_lease(), "lease")
        notifier.watch(directory.serving_board(), "board")
        for rank in range(len(self._pagers.ranks)):
            notifier.watch(directory.rank("rollout", rank, self.plan.num_chunks), f"rank{rank}")
        self._thread.start()

    def usage(self) -> float:
        """KV use relative to the present budget (0..1)."""
        usable = self.balloon.num_usable_chunks * self.plan.chunk_blocks
        return min(1.0, self.balloon.num_used_blocks / usable) if usable else 0.0

    def reset_prefix_cache(self, reset: Any) -> bool:
        """vLLM's own reset, with the balloon out of its way."""
        return self.balloon.reset_around(reset)

    # ------------------------------------------------------------------ background thread

    def _run(self) -> None:
        notified = False
        while not self._stopping:
            try:
                self.rounds.round(notified)
            except LedgerError as error:
                self.rounds.fail_closed(f"shared files: {error}")
            except Exception as error:  # dead-man, see the module docstring
                if self._trouble != repr(error):  # one traceback, not ten a second
                    self._trouble = repr(error)
                    logger.exception("ROSE rollout side")
                self.rounds.fail_closed("internal error, see the log")
                time.sleep(HEARTBEAT_S)
            notified = self.seam.notifier.wait(HEARTBEAT_S)

    def _publish_lease(self, pages: int) -> None:
        """Production is woken only by what it waits for, the number of pages."""
        starting = self.seam.engine is None
        self._lease.say(
            (pages, self.permit.epoch, starting),
            lambda now_ns: RolloutLease(
                phase=Phase.STARTING if starting else Phase.READY,
                acked_epoch=self.permit.epoch,
                reserved_pages=pages,
                wanted_pages=self.plan.total_pages if self._num_requests() else 0,
                gate_open=self.gate.is_open,
                steps=self.tally.num_steps,
                schedules=self.hooks.num_schedules,
                tokens=self.tally.num_tokens,
                decoded=self.tally.num_decoded,
                reclaim_seq=self.cuts.num_cuts,
                cut_requests=self.cuts.num_requests,
                cut_ns=self.cuts.last_ns,
                step_ns=self.tally.longest_ns,
                heartbeat_ns=now_ns,
            ),
        )

    def _num_requests(self) -> int:
        return len(self._scheduler.running) + internals.num_waiting(self._scheduler)

    def stop(self) -> None:
        """End the background thread and give up the files; for tests."""
        self._stopping = True
        self.seam.notifier.stop()
        self._thread.join(timeout=5.0)
        self.rounds.close()
        for writer in (self._lease, self._pagers):
            writer.close()

    def status(self, _argument: Any = None) -> dict[str, Any]:
        """What is in force.  Engine thread (a utility call); asks the workers for the kernel's truth."""
        memory = self.seam.engine.model_executor.collective_rpc("rose_memory")
        usable_chunks = self.balloon.num_usable_chunks
        return {
            "role": "rollout",
            "reason": self.hooks.reason,
            "gate_reason": self.gate.reason,
            "gate_open": self.gate.is_open,
            "gate_opened_by": self.gate.opened_by,
            "usable_pages": usable_chunks * self.plan.chunk_pages,
            "reserved_pages": self.book.lease_pages(),
            "total_pages": self.plan.total_pages,
            "resident_bytes": sum(rank["resident_bytes"] for rank in memory),
            "budget_tokens": max(0, usable_chunks * self.plan.chunk_blocks - 1) * self._block_tokens,
            "used_tokens": self.balloon.num_used_blocks * self._block_tokens,
            "running": len(self._scheduler.running),
            "waiting": internals.num_waiting(self._scheduler),
            "num_preemptions": self.tally.num_preemptions,
            "request_ids": list(self._scheduler.requests),
            "schedules": self.hooks.num_schedules,
            "steps": self.tally.num_steps,
            "reclaim_seq": self.cuts.num_cuts,
            "cut_requests": self.cuts.num_requests,
            "ladder": self.ladder,
            "layer_stops": self.layers.status(self.permit.may_stop),
            "patches": sorted(compat.applied()),
        }
