"""One inference engine: a continuous batch, chunked prefill, KV memory and a prefix cache.  No time in here.

``rose.sim.device`` decides how many steps run and how long they take; this module says what a step holds
(:meth:`SimEngine.shape`) and what ``count`` equal steps did (:meth:`SimEngine.advance`).  Requests that decode all move one
token per step, so a step counter ``k`` and a heap of the counts at which requests end replace a loop over tokens.

Invariants (:meth:`SimEngine.check`): ``used_tokens`` is the sum over admitted requests; a request has produced at most its
target; cached and used tokens together stay within the budget (after :meth:`SimEngine.shrink`).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque

from rose.policy.admission import StepModel

MAX_GROUPS = 256
"""Shared prompts remembered as resident."""


class Request:
    """One attempt of a turn, or one production request.  ``prompt`` includes tokens kept from earlier attempts;
    ``kept`` are those that this attempt sampled before its engine preempted it.

    ``trajectory``: what comes next of it finds this request's first ``repeated`` tokens in the prefix cache (None: all that
    it ends with).  ``group``: its members share their first ``shared`` tokens (None: the prompt).
    """

    __slots__ = (
        "admitted",
        "arrived_s",
        "attempt",
        "base",
        "cached",
        "done",
        "first_s",
        "group",
        "join_k",
        "kept",
        "key",
        "prompt",
        "repeated",
        "shared",
        "target",
        "trajectory",
    )

    def __init__(
        self,
        key: str,
        prompt: int,
        target: int,
        arrived_s: float,
        *,
        attempt: int = 0,
        trajectory: str = "",
        group: str = "",
        repeated: int | None = None,
        shared: int | None = None,
    ) -> None:
        self.key = key
        self.prompt = prompt
        self.target = target
        self.arrived_s = arrived_s
        self.attempt = attempt
        self.trajectory = trajectory
        self.group = group
        self.repeated = repeated
        self.shared = prompt if shared is None else shared
        self.first_s: float | None = None
        self.cached = 0
        self.kept = 0
        self.join_k: float | None = None
        self.base = 0.0
        self.done = False
        self.admitted = False

    def token_s(self, ended_s: float) -> float | None:
        """Seconds between its tokens, on average; None where it made one, or none yet."""
        tokens = self.kept + self.target
        return None if tokens <= 1 or self.first_s is None else (ended_s - self.first_s) / (tokens - 1)

    def produced(self, k: float) -> int:
        """Tokens sampled since it last joined the batch, at step count ``k``."""
        if self.join_k is None:
            return 0
        return min(self.target, 1 + int(k - self.join_k + 1e-6))


class SimEngine:
    """See the module.  ``budget_tokens`` bounds used and cached tokens; a prefix is found by whole blocks of ``block_tokens``.
    ``attention_s``: what a prompt token takes for each token before it, on top of ``model``."""

    __slots__ = (
        "_alive",
        "_base",
        "_heap",
        "_number",
        "_prefilling_tokens",
        "attention_s",
        "base_s",
        "block_tokens",
        "budget_tokens",
        "cache",
        "cached_tokens",
        "chunk_tokens",
        "context_s",
        "decode_s",
        "decoded",
        "groups",
        "k",
        "model",
        "num_preempted",
        "pending_tokens",
        "prefill_s",
        "prefilling",
        "requests",
        "running",
        "waiting",
    )

    def __init__(
        self,
        model: StepModel,
        chunk_tokens: int,
        budget_tokens: int,
        block_tokens: int = 1,
        attention_s: float = 0.0,
    ) -> None:
        self.model = model
        self.base_s, self.prefill_s = model.base_s, model.prefill_token_s
        self.decode_s, self.context_s = model.decode_s, model.context_token_s
        self.chunk_tokens = chunk_tokens
        self.budget_tokens = budget_tokens
        self.block_tokens = block_tokens
        self.attention_s = attention_s
        self.k = 0.0
        self.running = 0
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.pending_tokens = 0.0
        """Prompt tokens of ``prefilling`` that are not computed yet."""
        self.cache: OrderedDict[str, int] = OrderedDict()
        self.cached_tokens = 0
        self.groups: OrderedDict[str, int] = OrderedDict()
        self.num_preempted = 0
        self.decoded = 0.0
        """Tokens sampled, prompts' first ones aside."""
        self._alive: dict[str, int] = {}
        """Trajectory -> prefix tokens that a running request of it holds, and that its other requests can reuse before that one ends."""
        self._heap: list[tuple[float, int, Request]] = []
        self._number = 0
        self._base = 0.0
        self._prefilling_tokens = 0

    # --- what it holds ---------------------------------------------------------------------------------

    @property
    def context_tokens(self) -> float:
        """Tokens that the attention of one decode step reads."""
        return self._base + self.running * self.k

    @property
    def used_tokens(self) -> float:
        return self._base + self.running * self.k + self._prefilling_tokens

    @property
    def busy(self) -> bool:
        return self.running > 0 or bool(self.prefilling) or bool(self.waiting)

    def add(self, request: Request) -> None:
        self.requests[request.key] = request
        self.waiting.append(request)

    def admit(self, room_tokens: float) -> float:
        """Move waiting requests into prefill while they fit one chunk and ``room_tokens``; the tokens still missing for
        the first that does not fit the room (0 = none)."""
        while self.waiting:
            request = self.waiting[0]
            if request.done:
                self.waiting.popleft()
                continue
            need = request.prompt + 1
            if need > room_tokens:
                return need - room_tokens
            if self.prefilling and self.pending_tokens + need > self.chunk_tokens:
                return 0.0
            self.waiting.popleft()
            cached = self._take_cached(request)
            request.cached += cached
            request.admitted = True
            room_tokens -= need
            self.prefilling.append(request)
            self._prefilling_tokens += request.prompt
            self.pending_tokens += max(1, request.prompt - cached)
        return 0.0

    def _take_cached(self, request: Request) -> int:
        held = 0
        if request.trajectory:
            held = self.cache.pop(request.trajectory, 0)
            self.cached_tokens -= held
            held = max(held, self._alive.get(request.trajectory, 0))
        if request.group:
            held = max(held, min(self.groups.get(request.group, 0), request.shared))
        held = min(held, request.prompt - 1)
        return held - held % self.block_tokens

    def remember_group(self, group: str, tokens: int) -> None:
        self.groups[group] = tokens
        if len(self.groups) > MAX_GROUPS:
            self.groups.popitem(last=False)

    # --- one stretch of equal steps --------------------------------------------------------------------

    def shape(self, chunk_tokens: int) -> tuple[float, float]:
        """Prompt tokens of each of the next steps, and how many steps finish them; (0, inf) without prefill."""
        if not self.prefilling or chunk_tokens <= 0:
            return 0.0, math.inf
        steps = math.ceil(self.pending_tokens / chunk_tokens - 1e-9)
        return self.pending_tokens / steps, float(steps)

    def prompt_attention_s(self, per_step: float) -> tuple[float, float]:
        """Attention time of prefill: seconds in the next step, and how many more in each step after it.

        Position ``i`` attends to ``i`` tokens, so a whole prompt costs ``prompt**2 / 2`` pairs, and later chunks of it cost more.

        Args:
            per_step: Prompt tokens of each step.
        """
        if not self.attention_s or per_step <= 0 or not self.prefilling:
            return 0.0, 0.0
        if len(self.prefilling) == 1:
            begin = self.prefilling[0].prompt - self.pending_tokens
            pairs = per_step * (begin + per_step / 2)
            return self.attention_s * pairs, self.attention_s * per_step * per_step
        # Several fit one step, as a rule.  Which of their tokens are left is not known where they take more.
        pairs = tokens = 0.0
        for request in self.prefilling:
            cached = min(request.cached, request.prompt - 1)
            pairs += (request.prompt * request.prompt - cached * cached) / 2
            tokens += request.prompt - cached
        return self.attention_s * pairs * per_step / tokens, 0.0

    def asked_model(self, chunk_tokens: int) -> StepModel:
        """Step times as the next step finds them: its prompt tokens cost what they attend to, too (a live engine has learned that)."""
        tokens = min(self.pending_tokens, chunk_tokens)
        extra_s = self.prompt_attention_s(tokens)[0]
        if not extra_s:
            return self.model
        return StepModel(
            base_s=self.base_s,
            prefill_token_s=self.prefill_s + extra_s / tokens,
            decode_s=self.decode_s,
            context_token_s=self.context_s,
        )

    def steps_to_finish(self) -> float:
        heap = self._heap
        while heap and heap[0][2].done:
            heapq.heappop(heap)
        return heap[0][0] - self.k if heap else math.inf

    def advance(
        self, count: float, prefill_per_step: float, decodes: float
    ) -> tuple[list[Request], list[Request]]:
        """After ``count`` steps, each with ``prefill_per_step`` prompt tokens and ``decodes`` tokens per running request:
        requests with their first token now, and requests that ended."""
        if self.running:
            self.k += count * decodes
            self.decoded += count * decodes * self.running
        started: list[Request] = []
        ended: list[Request] = []
        if prefill_per_step > 0 and self.prefilling:
            self.pending_tokens -= count * prefill_per_step
            if self.pending_tokens < 0.5:
                started = self.prefilling
                self.prefilling = []
                self.pending_tokens = 0.0
                self._prefilling_tokens = 0
                for request in started:
                    self._join(request)
                    if request.target <= 1:
                        self._leave(request)
                        ended.append(request)
        heap, k = self._heap, self.k + 1e-6
        while heap and (heap[0][0] <= k or heap[0][2].done):
            request = heapq.heappop(heap)[2]
            if not request.done:
                self._leave(request)
                ended.append(request)
        return started, ended

    def _join(self, request: Request) -> None:
        request.join_k = self.k
        request.base = request.prompt + 1 - self.k
        self._base += request.base
        self.running += 1
        if request.group and not request.cached:
            self.remember_group(request.group, request.shared)
        if request.repeated is not None:
            self._alive[request.trajectory] = request.repeated
        if request.target > 1:
            self._number += 1
            heapq.heappush(self._heap, (self.k + request.target - 1, self._number, request))

    def _leave(self, request: Request) -> None:
        request.done = True
        self.running -= 1
        self._base -= request.base
        if request.repeated is not None and self._alive.get(request.trajectory) == request.repeated:
            del self._alive[request.trajectory]
        del self.requests[request.key]
        if not self.running:
            self.k, self._base = 0.0, 0.0
            self._heap.clear()

    def keep(self, request: Request, tokens: int) -> None:
        """Leave a finished turn's tokens in the prefix cache, as far as the budget allows."""
        held = self.cache.pop(request.trajectory, 0)
        self.cached_tokens -= held
        tokens = max(tokens, held)
        if tokens <= self.budget_tokens - self.used_tokens:
            self.cache[request.trajectory] = tokens
            self.cached_tokens += tokens
            self.evict_to(self.budget_tokens - self.used_tokens)

    def evict_to(self, most: float) -> bool:
        """Drop the least recently used prefixes until ``most`` cached tokens are left; whether any went."""
        went = False
        while self.cache and self.cached_tokens > most:
            self.cached_tokens -= self.cache.popitem(last=False)[1]
            went = True
        return went

    def drop_cache(self) -> None:
        self.cache.clear()
        self.groups.clear()
        self._alive.clear()
        self.cached_tokens = 0

    # --- taking things away ----------------------------------------------------------------------------

    def remove(self, key: str) -> tuple[Request, int] | None:
        """Take a request out wherever it is; it and the tokens it has sampled since it joined (not ``kept``)."""
        request = self.requests.get(key)
        if request is None:
            return None
        produced = request.produced(self.k)
        if request.join_k is not None:
            self._leave(request)
            return request, produced
        request.done = True
        del self.requests[key]
        if request.admitted:
            self.prefilling.remove(request)
            self._prefilling_tokens -= request.prompt
            # What was computed of the chunk is shared out by size: only its sum is known.
            left = self._prefilling_tokens
            self.pending_tokens = self.pending_tokens * left / (left + request.prompt) if left else 0.0
        return request, 0

    def youngest(self) -> Request | None:
        """The request that costs least to stop: prefilling before decoding, last come first."""
        if self.prefilling:
            return self.prefilling[-1]
        for request in reversed(self.requests.values()):
            if request.join_k is not None:
                return request
        return None

    def preempt(self) -> bool:
        """Out of memory by its own growth: the youngest starts again behind its own tokens (vLLM's recomputation)."""
        victim = self.youngest()
        if victim is None:
            return False
        found = self.remove(victim.key)
        assert found is not None
        request, produced = found
        again = Request(
            request.key,
            request.prompt + produced,
            request.target - produced,
            request.arrived_s,
            attempt=request.attempt,
            trajectory=request.trajectory,
            repeated=request.repeated,
        )
        again.first_s, again.cached = request.first_s, request.cached
        again.kept = request.kept + produced
        self.num_preempted += 1
        self.requests[again.key] = again
        self.waiting.appendleft(again)
        return True

    def check(self) -> None:
        """Assert the invariants of the module."""
        live = [request for request in self.requests.values() if request.join_k is not None]
        assert self.running == len(live)
        held = sum(request.base + self.k for request in live)
        assert math.isclose(self.context_tokens, held, rel_tol=1e-6, abs_tol=1e-3)
        assert self.cached_tokens == sum(self.cache.values()) >= 0
        assert self._prefilling_tokens == sum(request.prompt for request in self.prefilling)
        for request in live:
            assert 1 <= request.produced(self.k) <= request.target
        assert len(live) + len(self.prefilling) + sum(not r.done for r in self.waiting) == len(self.requests)
