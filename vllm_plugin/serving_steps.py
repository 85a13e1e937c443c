"""Production's engine thread around each step: chunks in and out of the block pool, what is claimed, what the board says.

:meth:`ServingSteps.before_schedule`, :meth:`~ServingSteps.after_schedule` and :meth:`~ServingSteps.after_update` are the step path: they read
numbers that the background thread prepared (:mod:`vllm_plugin.seam`), move chunks in slices of half a millisecond, and make no blocking
call.  What is decided there is in :class:`~rose.policy.coserving.steps.StepBook` and
:class:`~rose.policy.coserving.search.LoanSearch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rose.policy.coserving.search import LoanSearch
from rose.policy.coserving.steps import StepBook
from rose.units import NS_PER_S
from vllm_plugin import internals
from vllm_plugin.board import Board
from vllm_plugin.capacity import SLICE_S, Balloon
from vllm_plugin.first_token_watch import FirstTokenWatch
from vllm_plugin.ghost import GhostCache
from vllm_plugin.prefix_watch import PrefixWatch
from vllm_plugin.seam import Seam
from vllm_plugin.step_learning import StepLearner
from vllm_plugin.waiting import WaitingRequests


class ServingSteps:
    """See the module.  What it is made of is the side's (:class:`vllm_plugin.serving.ServingSide`).

    Args:
        fail: Told of an error in what the background thread asks for beside an idle engine.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        seam: Seam,
        balloon: Balloon,
        steps: StepBook,
        search: LoanSearch,
        ghost: GhostCache,
        prefixes: PrefixWatch,
        board: Board,
        learner: StepLearner,
        first_tokens: FirstTokenWatch,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._scheduler, self._pool = scheduler, internals.block_pool(scheduler)
        self._seam, self._balloon, self._steps, self._search = seam, balloon, steps, search
        self._ghost, self._prefixes, self._board, self._learner = ghost, prefixes, board, learner
        self._first_tokens, self._fail = first_tokens, fail
        self._queue = WaitingRequests(scheduler)
        self._encodes = internals.encoder_budget(scheduler) > 0
        self._claim_told = 0
        self._rests = False
        """Nothing is claimed or remembered: while nothing is lent, there is nothing to do before a step."""

    def on_arrival(self, request: Any) -> None:
        """A request, or a session's next turn, has arrived."""
        if self._board.slo_ttft_ns:
            self._first_tokens.arrived(request)

    def before_schedule(self) -> None:
        """Move chunks in or out of the balloon and state what serving needs.  Between two steps."""
        seam, balloon = self._seam, self._balloon
        if self._rests and not (seam.mapped or seam.target_chunks or balloon.inflated):
            return
        came_back = bool(seam.mapped)
        if came_back:
            until_s = time.monotonic() + SLICE_S
            while seam.mapped and time.monotonic() <= until_s:  # the rest at the next step
                balloon.deflate((seam.mapped.popleft(),))
            self._search.freed()
        if seam.failed:
            return
        steps = self._steps
        self._claim()
        if seam.stranded and internals.num_waiting(self._scheduler):
            self._queue.let_past(balloon.num_usable_chunks * balloon.chunk_blocks - 1)
        lent = len(balloon.inflated)
        if not lent:
            self._ghost.rest()
        lend = steps.to_lend(seam.target_chunks, lent, came_back=came_back)
        self._search.goes_on = False
        if lend:
            self._lend(lend)
        self._rests = not (steps.claim_chunks or self._ghost.watching)

    def _claim(self) -> None:
        """Chunks that serving must get back now, beyond those it can use."""
        waiting = free = 0
        lent = self._steps.claimable(len(self._balloon.inflated))
        if lent:
            if internals.num_waiting(self._scheduler):
                waiting = self._queue.blocks_missing()
            free = self._pool.get_num_free_blocks()
        if self._steps.claim(lent_chunks=lent, free_blocks=free, waiting_blocks=waiting):
            self._seam.notifier.notify()

    def _lend(self, count: int) -> None:
        """Take at most ``count`` chunks out of the pool, as far as the time that a look may take goes."""
        self._ghost.watch()
        taken: list[int] = []
        offered = self._prefixes.offered
        try:
            self._balloon.inflate_free(count, taken=taken, cached=offered)
            self._search.looked(
                time.monotonic(),
                offered,
                num_missing=count - len(taken),
                none_left=self._balloon.exhausted,
            )
        finally:  # also those before an exception: they would be lost to production
            if taken:
                self._seam.released.extend((chunk, self._steps.step) for chunk in taken)
                self._seam.notifier.notify()

    def after_schedule(self, output: Any) -> None:
        """A step starts: publish deadlines.  Nobody needs that between steps unless a rollout engine lives."""
        steps, board = self._steps, self._board
        # Numbered before it counts: nobody may wait for a step that carries no number.
        internals.stamp(output, steps.step + 1)
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        decode, drafts = len(scheduled), 0
        if (
            total != decode
        ):  # somebody has more than one; counted in C: a loop over 256 requests took 50 us here
            decode = list(scheduled.values()).count(1)
            verifying, drafts = internals.drafts_in(output)
            decode += verifying
        encoder = internals.encoder_tokens_in(output, self._scheduler) if self._encodes else 0
        starts = steps.scheduled(total - decode - drafts, decode, time.monotonic_ns(), drafts, encoder)
        if starts and board.watched:
            self._forecast()
        self._prefixes.note(output)
        # No wake: a rollout engine looks before each of its steps, and gets no new slack from a step that starts.
        if board.watched:
            self.tell_step(wake=self._claim_told != steps.claim_chunks)

    def _forecast(self) -> None:
        """How long the step takes that has the workers now, for those who look at the board meanwhile."""
        oldest = self._steps.oldest
        if oldest is not None:
            tokens, decodes, encoder = oldest
            seconds = self._learner.model.predict(tokens, decodes, encoder_tokens=encoder)
            self._steps.step_ns = int(seconds * NS_PER_S)

    def after_update(self, output: Any) -> None:
        """The step that was put together as ``output`` has ended."""
        steps, board = self._steps, self._board
        if not self._scheduler.running and not internals.num_waiting(self._scheduler):
            # Idle from here on: what the last requests held can be lent, and no step looks for it.
            self._balloon.note_freed()
            self._search.freed()
        tokens = steps.ended(time.monotonic_ns(), board.slo_tpot_ns)
        if tokens is None:
            return
        if tokens[0] or tokens[1] or tokens[2]:
            self._learner.measured.append((*tokens, steps.step_ns / NS_PER_S))
        if board.slo_ttft_ns:
            self._first_tokens.ended(output)
        else:
            self._first_tokens.off()
        if board.watched:
            self._forecast()
        self.tell_step()

    def tell_step(self, *, wake: bool = True) -> None:
        """A step has started or ended: onto the board, now or when the background thread comes round."""
        steps, board = self._steps, self._board
        if steps.claim_chunks and not self._scheduler.running and not internals.num_waiting(self._scheduler):
            steps.withdraw()
        if wake and board.watched:
            self._claim_told = steps.claim_chunks
        board.tell(wake=wake)

    def idle(self) -> None:
        """What happens before a step, and is told after one, for an engine that makes none."""
        comes_back = bool(self._seam.mapped)
        try:
            self.before_schedule()  # notifies of what it has taken
            self.tell_step()
        except Exception as error:  # noqa: BLE001  # fail-open
            self._fail(error)
        if comes_back or self._search.goes_on:
            # Else the next round would ask again at once, and so on without end.
            self._seam.notifier.notify()

    def cache_cleared(self) -> None:
        """Nothing is cached any more."""
        self._ghost.clear()
        self._prefixes.clear()
        self._search.freed()
