"""Production's board: its deadlines, load and claims of this moment, for the rollout engine beside it; and which thread writes them.

While a rollout engine may run (``watched``), the engine thread writes the board twice in each step, and looks before each whether another
process has written into the file.  Otherwise no one needs it that often: the background thread writes it, and looks once a round.

One thread writes at a time, and only the background thread changes which (:meth:`Board.turn_over`).  To take over from the engine thread
it asks, and waits until that thread answers at the end of a step: it may be in the middle of a write.  Until then nothing is written and
the last record stands.  To hand over to the engine thread it need not wait, because it is not writing itself.
"""

from __future__ import annotations

import time
from typing import Any

from rose.coserve.ledger import RecordWriter
from rose.coserve.records import ServingBoard
from rose.policy.coserving.steps import StepBook
from rose.policy.coserving.timing import encoder_steps, latest_start, prompt_work_s
from rose.units import NS_PER_S
from vllm_plugin import internals
from vllm_plugin.capacity import Balloon
from vllm_plugin.first_token_watch import arrival_ns
from vllm_plugin.memory import ChunkPlan
from vllm_plugin.peers import Trouble, require_own
from vllm_plugin.waiting import WAITING_LOOKED_AT


class Board:
    """See the module.

    Args:
        file: Its file, which this closes.
        model: vLLM's step times, as :mod:`vllm_plugin.step_log` learns them.

    Attributes:
        watched: A rollout engine lives and may run: it wants to know of every step at once, and is woken.
        slo_ttft_ns, slo_tpot_ns: What is promised to production's users; 0 = nothing.
    """

    def __init__(
        self,
        file: RecordWriter[ServingBoard],
        scheduler: Any,
        plan: ChunkPlan,
        balloon: Balloon,
        steps: StepBook,
        model: Any,
        trouble: Trouble,
    ) -> None:
        self.file = file
        self.watched = True
        self.slo_ttft_ns = 0
        self.slo_tpot_ns = 0
        self._scheduler, self._balloon, self._steps, self._model = scheduler, balloon, steps, model
        self._trouble = trouble
        self._chunk_pages = plan.chunk_pages
        self._stride = internals.state_stride(scheduler)
        self._block_pages = plan.total_pages / max(1, plan.num_blocks)
        self._asked = 0
        """Counts the background thread's requests to become the writer.  It is the writer once ``_given`` has the same number."""
        self._given = -1
        self._lost = False
        """The name is gone: for the engine thread, while it writes."""
        self._said: tuple[int, ...] = ()

    # ------------------------------------------------------------------ engine thread

    def tell(self, *, wake: bool) -> None:
        """A step has started or ended: written now, or by the background thread when it comes round.

        Raises:
            LedgerError: A stranger wrote into the file.
        """
        if not self.watched:
            self._given = self._asked
            return
        file = self.file
        # Before the record is overwritten, and beside a system call of the same kind, whose code is in the CPU's caches.
        require_own(file)
        if self._lost:
            self._lost = False
            self._trouble.mend(file)
        self.write(busy=self._steps.is_busy())
        if wake:
            file.wake()

    def next_first_token(self) -> Any:
        """First come first served: the oldest request that waits for its first token has the earliest deadline.  One that waits for
        something else than us, such as a session for its client, is owed nothing until it has that.  Any thread.
        """
        for limit in (1, WAITING_LOOKED_AT):  # the first is it, unless it was preempted
            for request in internals.waiting_requests(self._scheduler, limit):
                if not request.num_output_tokens and not internals.is_blocked(self._scheduler, request):
                    return request
        return None

    # ------------------------------------------------------------------ background thread

    def turn_over(self, watched: bool, *, healthy: bool) -> None:
        """Decide who writes from now on, and write what the step path has noted where that is us."""
        if not self.watched and self._given == self._asked and healthy:
            self._publish()
        if watched == self.watched:
            return
        if not watched:
            self._asked += 1
        self.watched = watched
        if watched:
            self.file.wake()

    def find(self) -> None:
        """Make a file that was deleted anew, if it is ours to write."""
        if self.file.named():
            return
        if self.watched:
            self._lost = True  # the engine thread writes it, so it is the one to make it anew
        elif self._given == self._asked:
            self._trouble.mend(self.file)

    def _publish(self) -> None:
        """What is new since the last time, if anything is.

        Raises:
            LedgerError: A stranger wrote into the file.
        """
        require_own(self.file)
        scheduler, steps, busy = self._scheduler, self._steps, self._steps.is_busy()
        said = (
            steps.step,
            busy,
            len(scheduler.running),
            internals.num_waiting(scheduler),
            steps.claim_chunks,
            steps.breaches,
        )
        if said == self._said:
            return
        self._said = said
        self.write(busy=busy)

    # ------------------------------------------------------------------ whoever it belongs to

    def write(self, *, busy: bool) -> None:
        """Say how production stands.  The thread that the board belongs to just now."""
        scheduler, model, steps = self._scheduler, self._model, self._steps
        slo_ttft_ns, slo_tpot_ns = self.slo_ttft_ns, self.slo_tpot_ns
        running = len(scheduler.running)
        num_waiting = internals.num_waiting(scheduler)
        head = self.next_first_token() if num_waiting else None
        owes_first = head is not None or steps.reads_prompt()
        now_ns = time.monotonic_ns()
        ttft_deadline = tpot_deadline = 0
        waiting_tokens = 0
        if running and slo_tpot_ns:
            decode_ns = int(model.predict(*steps.expects(running)) * NS_PER_S)
            tpot_deadline = max(1, latest_start(steps.due_since_ns or now_ns, slo_tpot_ns, decode_ns))
        if num_waiting and slo_ttft_ns:
            oldest = internals.waiting_requests(scheduler, 1)
            if oldest and oldest[0].num_output_tokens and slo_tpot_ns:
                # Preempted: it has had its first token, and waits for a next one like those that run.
                prefill_ns = self._prompt_ns(oldest[0], oldest[0].num_tokens, running)
                deadline = max(1, latest_start(steps.due_since_ns or now_ns, slo_tpot_ns, prefill_ns))
                tpot_deadline = min(tpot_deadline, deadline) if tpot_deadline else deadline
            if head is not None:
                waiting_tokens = head.num_tokens
                ttft_deadline = self._first_token_deadline(head, waiting_tokens, running)
        if running:
            # A prompt that is read in several steps counts as running from the first of them, and still owes its first token.
            # Such requests are the last that were let in.
            for request in reversed(scheduler.running):
                left = request.num_tokens - request.num_computed_tokens
                if left <= 0 or request.num_output_tokens:
                    break
                owes_first = True
                if slo_ttft_ns:
                    deadline = self._first_token_deadline(request, left, running - 1)
                    ttft_deadline = min(ttft_deadline, deadline) if ttft_deadline else deadline
        # The fields of ServingBoard in their order; a record made of keywords costs more than all of the above.
        self.file.put(
            steps.step,
            busy,
            running,
            num_waiting,
            waiting_tokens,
            ttft_deadline,
            tpot_deadline,
            steps.started_ns,
            steps.step_ns,
            steps.busy_ns,
            steps.breaches,
            int(self._balloon.num_used_blocks * self._block_pages + 0.999),  # used_pages
            steps.needed_chunks(self._balloon.num_usable_chunks) * self._chunk_pages,
            steps.pressure_seq,
            now_ns,  # written_ns
            owes_first,
        )

    def _first_token_deadline(self, request: Any, tokens: int, num_decodes: int) -> int:
        """Until when work on a prompt of ``tokens`` beside ``num_decodes`` requests must start."""
        work_ns = self._prompt_ns(request, tokens, num_decodes)
        return max(1, latest_start(arrival_ns(request), self.slo_ttft_ns, work_ns))

    def _prompt_ns(self, request: Any, tokens: int, num_decodes: int) -> int:
        """How long ``tokens`` of a request's prompt take, and what its images need first, beside ``num_decodes`` requests."""
        model = self._model
        drafts, num_decodes = self._steps.expects(num_decodes)
        chunk, stride = max(1, self._scheduler.max_num_scheduled_tokens - num_decodes - drafts), self._stride
        if 0 < stride <= chunk:
            chunk -= chunk % stride
        more_steps = int(0 < stride < tokens)  # up to the last state that is cached, and from there
        encoder = [size for _, size in internals.encoder_left(self._scheduler, request)]
        if encoder:
            more_steps += encoder_steps(encoder, internals.encoder_budget(self._scheduler)) - 1
        seconds = prompt_work_s(
            tokens,
            chunk_tokens=chunk,
            decode_step_s=model.predict(drafts, num_decodes),
            prefill_token_s=model.prefill_token_s,
            encoder_s=sum(encoder) * model.encoder_token_s,
            more_steps=more_steps,
        )
        return int(seconds * NS_PER_S)
