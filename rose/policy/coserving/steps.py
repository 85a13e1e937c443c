"""Production's book of steps: which are under way, what its requests claim, which promises broke.

The engine thread of production's core owns it and calls, in this order::

    claim(...)         before vLLM puts a step together, while anything is lent
    to_lend(...)       then: how much of what is free may go
    scheduled(...)     a step has been put together; it starts now unless one is still under way
                       (with speculative decoding: and how many drafts it verifies; with images: and what of them it encodes)
    ended()            the oldest of them has ended
    first_tokens       who waits for one: not of the step path, another thread's (:mod:`vllm_plugin.first_token_watch`)

This is production's step path: scalars in and out, no event objects, no locks, no logging.

Pure: no I/O, no clock.  Times are nanoseconds on one clock; blocks are the engine's own, a chunk is a whole number of them.
"""

from __future__ import annotations

from collections import deque

from rose.policy.coserving.first_tokens import FirstTokens
from rose.policy.coserving.timing import is_late

MAX_IN_FLIGHT = 64
"""More than vLLM ever schedules ahead: a step for each stage of a pipeline, and one."""
_DRAFTS_WEIGHT = 1 / 16
"""Of a step's drafts in what is expected of the next: about the last 16 steps that decode count."""
WATERMARK_FRACTION = 0.05
"""Free, usable memory below this fraction of the total (and below what waiting requests need) is pressure."""


class StepBook:
    """See the module.

    Args:
        num_blocks: Of production's whole KV memory.
        chunk_blocks: Of one chunk.
        stages: The workers are a pipeline: steps under way overlap, and each takes from when it was put together until it ends.  The gaps
            between their ends are shorter than what anybody waits for a token.

    Attributes:
        step: Number of the last step that was put together; the first is 1.
        started_ns: Since when the oldest step under way has had the workers to itself.
        step_ns: How long that step takes, as far as is known: a forecast, set from outside, until it has ended.
        busy_ns: Of all steps that have ended.
        last_token_ns: When the last step ended.
        due_since_ns: Since when whoever comes next has waited for a token.
        claim_chunks: What serving must get back now, beyond what it can use.
        pressure_seq: How often a claim has begun.
        first_tokens: Who waits for a first token, and how many came late.  The background thread's.
        long_steps: Steps that took longer than a token was promised, of those that somebody waited for with tokens before.
        drafts_per_decode: Drafts that a step verifies for each request that decodes, of late; 0 without speculative decoding.
        decided: Where a decision log is kept: the numbers of each claim and each room for a loan that differs from the one before
            (:func:`rose.policy.coserving.loans.of_step`).  The background thread takes them out.
        fixed: The loan is a fixed split: nothing of it is claimed back.
    """

    def __init__(self, num_blocks: int, chunk_blocks: int, *, stages: bool = False) -> None:
        self.watermark_blocks = int(WATERMARK_FRACTION * num_blocks)
        self.step = 0
        self.started_ns = 0
        self.step_ns = 0
        self.busy_ns = 0
        self.last_token_ns = 0
        self.claim_chunks = 0
        self.pressure_seq = 0
        self.under_pressure = False
        self.first_tokens = FirstTokens()
        self.long_steps = 0
        self.drafts_per_decode = 0.0
        self.fixed = False
        self.decided: deque[tuple[int, ...]] | None = None
        self._num_busy = self._num_reading = 0
        """Of the steps under way, those that have tokens, and those that read a prompt."""
        self._room: tuple[int, ...] = ()
        self._chunk_blocks = chunk_blocks
        self._stages = stages
        self._in_flight: deque[tuple[int, int, int, int, int]] = deque()
        """Prompt tokens, requests that decode, their drafts and encoder tokens, and when it was put together, of each step that has not
        ended: two with asynchronous scheduling."""

    @property
    def breaches(self) -> int:
        """Promises that were broken: first tokens that came late, and long steps.  Any thread."""
        return self.first_tokens.num_late + self.long_steps

    def claimable(self, lent_chunks: int) -> int:
        """What of a loan can be claimed back."""
        return 0 if self.fixed else lent_chunks

    def claim(self, *, lent_chunks: int, free_blocks: int, waiting_blocks: int) -> bool:
        """Work out the claim anew; whether it is another one now.

        Args:
            lent_chunks: Out of production's use, and :meth:`claimable`; nothing beyond them can be claimed.
            free_blocks: Of what it can use.
            waiting_blocks: What requests that wait for memory would take.
        """
        short = self.watermark_blocks + waiting_blocks - free_blocks
        chunks = min(lent_chunks, -(-short // self._chunk_blocks)) if short > 0 else 0
        pressure = chunks > 0
        if pressure and not self.under_pressure:
            self.pressure_seq += 1
        self.under_pressure = pressure
        if chunks == self.claim_chunks:
            return False
        self.claim_chunks = chunks
        if self.decided is not None:
            self.decided.append((lent_chunks, free_blocks, waiting_blocks, chunks, self.pressure_seq))
        return True

    def withdraw(self) -> None:
        """Who asked is gone, and no step looks at the queue before the next request comes."""
        self.claim_chunks = 0
        self.under_pressure = False
        if self.decided is not None:
            self.decided.append((0, self.pressure_seq))

    def to_lend(self, target_chunks: int, lent_chunks: int, *, came_back: bool = False) -> int:
        """How many more chunks may leave the block pool before this step, if they are free.

        Args:
            came_back: Some have just come back.  They are for the step that starts now: the loan may not have heard of the claim yet.
        """
        if self.under_pressure or came_back:
            return 0
        chunks = max(0, target_chunks - lent_chunks)
        if chunks and self.decided is not None:
            room = (target_chunks, lent_chunks, chunks)
            if room != self._room:
                self._room = room
                self.decided.append(room)
        return chunks

    def needed_chunks(self, usable_chunks: int) -> int:
        """What serving must come to hold while it claims memory, else 0."""
        return usable_chunks + self.claim_chunks if self.claim_chunks else 0

    def scheduled(self, prefill: int, decode: int, now_ns: int, drafts: int = 0, encoder: int = 0) -> bool:
        """A step has been put together; whether it starts at once.

        Args:
            prefill: Prompt tokens.
            decode: Requests that decode, with one token each.
            drafts: Tokens beyond those, that the step verifies; how many of them come out nobody knows yet.
            encoder: What an encoder makes of its images and the like, in tokens; it runs before the rest of the step.
        """
        self.step += 1
        if decode:
            self.drafts_per_decode += _DRAFTS_WEIGHT * (drafts / decode - self.drafts_per_decode)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._take()
        self._in_flight.append((prefill, decode, drafts, encoder, now_ns))
        if prefill or decode or drafts or encoder:
            self._num_busy += 1
            self._num_reading += prefill > 0
        if self._front() is not self._in_flight[-1]:
            return False
        self.started_ns = now_ns
        return True

    @property
    def oldest(self) -> tuple[int, int, int] | None:
        """Of the step that has the workers: tokens that it computes beyond one for each request that decodes, those requests, and
        encoder tokens.

        A draft is computed as a prompt token is, whatever becomes of it.
        """
        step = self._front()
        if step is None:
            return None
        prefill, decode, drafts, encoder, _ = step
        return prefill + drafts, decode, encoder

    def _front(self) -> tuple[int, int, int, int, int] | None:
        """The step that ends next.  A pipeline's steps without tokens, which fill it up beside a single batch, are passed over."""
        steps = self._in_flight
        if not self._stages:
            return steps[0] if steps else None
        return next((step for step in steps if any(step[:4])), None)

    @property
    def due_since_ns(self) -> int:
        if self._stages and self._front() is not None:
            return self.started_ns  # its requests had their last token just before
        return self.last_token_ns

    def expects(self, num_decodes: int) -> tuple[float, int]:
        """The same of a step that has ``num_decodes`` requests, no prompt and no image."""
        return self.drafts_per_decode * num_decodes, num_decodes

    def ended(self, now_ns: int, slo_tpot_ns: int) -> tuple[int, int, int] | None:
        """The oldest step has ended, the next one starts; what it was as :attr:`oldest` says it, None where none was under way."""
        if not self._in_flight:
            return None
        prefill, decode, drafts, encoder, began_ns = self._take()
        if self._stages:
            if not prefill + decode:
                return 0, 0, 0
            self.step_ns = now_ns - began_ns
            self.busy_ns += now_ns - max(began_ns, self.last_token_ns)
        else:
            self.step_ns = now_ns - self.started_ns
            self.busy_ns += self.step_ns
        if decode and is_late(self.step_ns, slo_tpot_ns):
            self.long_steps += 1
        self.last_token_ns = now_ns
        following = self._front()
        if following is not None:
            self.started_ns = following[4] if self._stages else now_ns
        return prefill + drafts, decode, encoder

    def _take(self) -> tuple[int, int, int, int, int]:
        """The oldest step is not under way any more."""
        step = prefill, decode, drafts, encoder, _ = self._in_flight.popleft()
        if prefill or decode or drafts or encoder:
            self._num_busy -= 1
            self._num_reading -= prefill > 0
        return step

    def is_busy(self) -> bool:
        """Whether a step with tokens is under way.  Any thread."""
        return self._num_busy > 0

    def reads_prompt(self) -> bool:
        """Whether a step under way reads (a part of) a prompt.  Any thread."""
        return self._num_reading > 0
