"""One device (or group of them): a serving engine, a rollout engine, and the time their steps take.

Between two moments at which anything changes, all steps are alike but for the context that grows by one token per request
and step; their total time is then a quadratic in their number.  So a *phase* is ``count`` steps computed at once, exact to
the step.  An arrival or a cut ends the phase at the next step boundary, as in an engine.

Two engines on one device take turns: one step of each per cycle, whose length is the sum less an overlap.  Whether, and with
how many tokens, the rollout engine takes part is :func:`rose.policy.admission.admit`'s decision, asked at each phase.
With ``priority`` they do not: the rollout engine moves only while serving stands still, and a request stops it at once.
With ``rounds`` a cycle has several rollout steps (:mod:`rose.policy.rounds`); a request that arrives ends it with the step in progress.
With ``preempt_s`` they take turns, but a request that arrives stops the rollout step in progress at a layer, and the step goes on later.

Memory is pages of 2 MiB.  Who may use which of them is in the books that say so live (:mod:`rose.sim.memory`).
Serving that lacks pages claims them (``DeviceListener.claimed``); the cut happens at this boundary and costs serving ``unmap_s``.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Protocol

from rose.policy.admission import AdmissionParams, Demand, Rule, admit
from rose.policy.rounds import RoundParams, Rounds
from rose.policy.stop_reasons import RECLAIMED
from rose.sim.board import board_of
from rose.sim.engine import Request, SimEngine
from rose.sim.events import EventQueue
from rose.sim.memory import SharedMemory

CLOSED_RECHECK_S = 0.1
MAX_STEPS = 1_000_000
"""Of one phase."""
_EPSILON_S = 1e-9
_WAITING_LOOKED_AT = 64
"""As the plugin does: a longer queue is pressure anyway."""


class DeviceListener(Protocol):
    """What a device tells the world, always at a step boundary."""

    def served(self, device: SimDevice, request: Request, now_s: float) -> None: ...

    def turn_done(self, device: SimDevice, request: Request, now_s: float) -> None: ...

    def turn_cut(
        self, device: SimDevice, request: Request, produced: int, now_s: float, reason: str | None = RECLAIMED
    ) -> None: ...

    def claimed(self, device: SimDevice, now_s: float) -> None: ...

    def boundary(self, device: SimDevice, now_s: float) -> None: ...


class SimDevice:
    """See the module.

    Args:
        serving_page_tokens, rollout_page_tokens: Tokens whose keys and values fit one page.
        priority: Serving preempts rollout steps, instead of a step of each in turn.
        overlap: Share of the shorter of two steps that is free.
        rounds: How many rollout steps follow one of serving's, at most; with admission by slack.
        preempt_s: How soon a rollout step stops for a request that arrives, to go on later; None = it does not.
        idle_chunk_tokens: Prompt tokens of a rollout step while serving stands still; None = the engine's own chunk.
    """

    def __init__(
        self,
        name: str,
        queue: EventQueue,
        host: DeviceListener,
        *,
        total_pages: int,
        serving: SimEngine | None,
        rollout: SimEngine | None,
        serving_page_tokens: float = 1.0,
        rollout_page_tokens: float = 1.0,
        priority: bool = False,
        overlap: float = 0.0,
        preempt_s: float | None = None,
        idle_chunk_tokens: int | None = None,
        rounds: RoundParams | None = None,
        slo_ttft_s: float = 0.5,
        slo_tpot_s: float = 0.15,
        unmap_s: float = 0.02,
        params: AdmissionParams | None = None,
    ) -> None:
        self.name = name
        self.queue = queue
        self.host = host
        self.total_pages = total_pages
        self.serving = serving
        self.rollout = rollout
        self.serving_page_tokens = serving_page_tokens
        self.rollout_page_tokens = rollout_page_tokens
        self.priority = priority
        self.overlap = overlap
        self.preempt_s = preempt_s
        self.idle_chunk_tokens = idle_chunk_tokens
        self.slo_ttft_s, self.slo_tpot_s = slo_ttft_s, slo_tpot_s
        self.unmap_s = unmap_s
        self.params = params or AdmissionParams()
        self.gated = self.params.rule is not Rule.FREE
        several = rounds is not None and rounds.most > 1 and self.params.rule is Rule.SLACK and not priority
        self.rounds = Rounds(params=rounds, slo_tpot_s=slo_tpot_s) if rounds is not None and several else None
        self.memory = SharedMemory(total_pages) if serving is not None and rollout is not None else None
        self.lend_pages = total_pages if serving is None else 0
        self.rollout_up = False
        self.closed = False
        self.slack_s: float | None = None
        self.reclaim_seq = 0
        self.num_cut = 0
        self.busy_s = 0.0
        self.rollout_busy_s = 0.0
        self.serving_busy_s = 0.0
        self.serving_own_s = 0.0
        """What its steps would have taken with the device to itself."""
        self.num_steps = 0
        self._ending: list[str] = []
        self._phase = 0
        self._active = False
        self._inside = False
        self._start_s = 0.0
        self._cycle_s = 0.0
        self._growth_s = 0.0
        self._count = 0
        self._serving_s = 0.0
        self._rollout_s = 0.0
        self._longest_s = 0.0
        self._from_s = 0.0
        self._rollout_count = 0
        self._round = 1
        """Rollout steps of each of this phase's cycles."""
        self._rollout_growth_s = 0.0
        self._serving_growth_s = 0.0
        self._preempted = False
        self._credit_s = 0.0
        """What a preempted rollout step had already done."""
        self._serving_prefill = 0.0
        self._rollout_prefill = 0.0
        self._rate = 0.0
        self._stall_s = 0.0
        self._ttft_slack_s = math.inf

    # --- memory ----------------------------------------------------------------------------------------

    @property
    def serving_pages(self) -> int:
        serving = self.serving
        if serving is None or not serving.requests:
            return 0
        return math.ceil(serving.used_tokens / self.serving_page_tokens)

    @property
    def rollout_pages(self) -> int:
        """What the rollout engine holds."""
        memory, rollout = self.memory, self.rollout
        if memory is not None:
            return memory.held_pages
        if rollout is None or not self.rollout_up:
            return 0
        return math.ceil((rollout.used_tokens + rollout.cached_tokens) / self.rollout_page_tokens)

    @property
    def usable_pages(self) -> int:
        """Of serving."""
        return self.total_pages if self.memory is None else self.memory.usable_pages

    @property
    def rollout_budget_tokens(self) -> int:
        memory = self.memory
        pages = self.total_pages if memory is None else memory.rollout_pages
        return int(pages * self.rollout_page_tokens)

    # --- from outside ----------------------------------------------------------------------------------

    def arrive(self, request: Request, now_s: float) -> None:
        """A production request."""
        assert self.serving is not None
        self.serving.add(request)
        if self.priority and self._active and self._serving_s <= 0:
            # What the running step had done is lost here; a real one would finish later.
            self._count = self._rollout_count = min(self._count, self._steps_done(now_s))
            self._phase += 1
            self.queue.at(now_s, self._boundary, self._phase)
            return
        preempt_s = self.preempt_s
        if not (self._cut_round(now_s) if preempt_s is None else self._preempt(now_s, preempt_s)):
            self.poke(now_s)

    def _preempt(self, now_s: float, preempt_s: float) -> bool:
        """Stop the rollout step in progress ``preempt_s`` from now, or once serving's own step is over; whether that is sooner than its end.

        In a cycle of both engines serving's step comes first.
        """
        if not self._active or self._inside or self._rollout_s <= 0 or self.priority:
            return False
        if self._preempted:
            return True
        done = self._steps_done(now_s)
        if done >= self._count:
            return False
        began_s = self._start_s + done * self._cycle_s + self._growth_s * done * (done - 1) / 2
        serving_s = self._serving_s + done * self._serving_growth_s if self._serving_s > 0 else 0.0
        served_s = (self._from_s if done == 0 else began_s) + serving_s
        end_s = max(served_s, now_s + preempt_s)
        if end_s >= began_s + self._cycle_s + done * self._growth_s - _EPSILON_S:
            return False
        self._preempted = True
        self._count = done + (self._serving_s > 0)
        self._rollout_count, self._credit_s = done * self._round, max(0.0, end_s - began_s - serving_s)
        while (
            self._rollout_count + 1 < (done + 1) * self._round
            and (step_s := self._rollout_step_s(self._rollout_count)) <= self._credit_s
        ):
            self._rollout_count += 1
            self._credit_s -= step_s
        self._phase += 1
        self.queue.at(end_s, self._boundary, self._phase)
        return True

    def _rollout_step_s(self, number: int) -> float:
        """Of the running phase's rollout step of this number, from 0."""
        return self._rollout_s + number * self._rollout_growth_s

    def _cut_round(self, now_s: float) -> bool:
        """End a cycle of several rollout steps with the one in progress; whether that is sooner than its end."""
        if not self._active or self._inside or self._round == 1 or self._preempted:
            return self._preempted
        done = self._steps_done(now_s)
        if done >= self._count:
            return False
        end_s = self._start_s + (done + 1) * self._cycle_s + self._growth_s * done * (done + 1) / 2
        number = last = (done + 1) * self._round
        while number > done * self._round + 1 and end_s - self._rollout_step_s(number - 1) >= now_s:
            number -= 1
            end_s -= self._rollout_step_s(number)
        if number == last:
            return False
        self._preempted = True
        self._count, self._rollout_count = done + 1, number
        self._phase += 1
        self.queue.at(end_s, self._boundary, self._phase)
        return True

    def add(self, request: Request, now_s: float) -> None:
        """A rollout turn."""
        assert self.rollout is not None
        self.rollout.add(request)
        self.poke(now_s)

    def remove(self, key: str, now_s: float) -> None:
        """An abort from outside; its tokens are dropped."""
        assert self.rollout is not None
        if self.rollout.remove(key) is not None:
            self.poke(now_s)

    def end(self, key: str, now_s: float) -> None:
        """A request ends with what it has, at the next step boundary."""
        self._ending.append(key)
        self.poke(now_s)

    def lend(self, pages: int, now_s: float) -> None:
        """A new loan.  A smaller one is obeyed at the next boundary."""
        self.lend_pages = pages
        self.poke(now_s)

    def poke(self, now_s: float) -> None:
        """Something changed: look again at the next step boundary (now, when nothing runs)."""
        if self._inside:
            return
        if not self._active:
            self._inside = True
            self._obey(now_s)
            self._inside = False
            self._plan(now_s)
            return
        done = self._steps_done(now_s)
        if done + 1 < self._count and not self._preempted:
            self._count = done + 1
            self._rollout_count = self._count * self._round
            self._phase += 1
            self.queue.at(self._end_s(), self._boundary, self._phase)

    def _k(self, rollout: SimEngine, now_s: float) -> float:
        """Its count of steps as of now."""
        runs = self._active and self._rollout_s > 0
        return rollout.k + (self._steps_done(now_s) * self._round * self._rate if runs else 0.0)

    def made(self, key: str, now_s: float) -> int:
        """Tokens that a rollout request has sampled by now."""
        assert self.rollout is not None
        request = self.rollout.requests.get(key)
        return 0 if request is None else request.kept + request.produced(self._k(self.rollout, now_s))

    def start(self, now_s: float) -> None:
        """The rollout engine is up, empty."""
        self.rollout_up = True
        self.poke(now_s)

    def stop(self, now_s: float) -> list[tuple[Request, int]]:
        """The rollout engine is gone, with all that it held; each request and the tokens it had sampled.  Whoever stops it tells the scheduler."""
        rollout = self.rollout
        if rollout is None or not self.rollout_up:
            return []
        k = self._k(rollout, now_s)
        # Its part of the running phase never happens.
        self._rollout_prefill, self._rate, self._rollout_s = 0.0, 0.0, 0.0
        gone = [(request, request.kept + request.produced(k)) for request in rollout.requests.values()]
        for key in list(rollout.requests):
            rollout.remove(key)
        rollout.waiting.clear()
        rollout.drop_cache()
        self._ending.clear()
        self._credit_s = 0.0
        self.rollout_up = False
        if self.memory is not None:
            self.memory.end()
        self.poke(now_s)
        return gone

    # --- phases ----------------------------------------------------------------------------------------

    def _steps_done(self, now_s: float) -> int:
        elapsed = now_s - self._start_s + _EPSILON_S
        if elapsed <= 0:
            return 0
        growth = self._growth_s
        if growth <= 0:
            return int(elapsed / self._cycle_s)
        half = self._cycle_s - growth / 2
        return int((math.sqrt(half * half + 2 * growth * elapsed) - half) / growth)

    def _end_s(self) -> float:
        count = self._count
        return self._start_s + count * self._cycle_s + self._growth_s * count * (count - 1) / 2

    def longest_step_s(self) -> float:
        """What a cut of the rollout engine has to wait for, since this was last asked; the running phase counts.

        Here that is a cycle of both engines; a live engine whose step waits for production's obeys a cut meanwhile.
        """
        runs = self._active and self._rollout_s > 0
        longest_s, self._longest_s = self._longest_s, self._cycle_s if runs else 0.0
        return longest_s

    def _boundary(self, now_s: float, phase: int) -> None:
        if phase != self._phase or not self._active:
            return
        self._active = False
        self._inside = True
        count, host = self._count, self.host
        self.num_steps += count
        self._preempted = False
        length_s = now_s - self._from_s
        self.busy_s += length_s
        serving, rollout = self.serving, self.rollout
        if serving is not None and self._serving_s > 0:
            self.serving_busy_s += length_s
            self.serving_own_s += count * self._serving_s + self._serving_growth_s * count * (count - 1) / 2
            started, ended = serving.advance(count, self._serving_prefill, 1.0)
            for request in started:
                if request.first_s is None:
                    request.first_s = now_s
            for request in ended:
                if request.repeated is not None:
                    serving.keep(request, request.repeated)
                host.served(self, request, now_s)
                if self.rounds is not None and (each_s := request.token_s(now_s)) is not None:
                    self.rounds.served(each_s)
        if rollout is not None and self._rollout_s > 0:
            self.rollout_busy_s += length_s
            _, ended = rollout.advance(self._rollout_count, self._rollout_prefill, self._rate)
            for request in ended:
                if request.trajectory:
                    rollout.keep(request, request.prompt + request.target)
                host.turn_done(self, request, now_s)
        self._obey(now_s)
        host.boundary(self, now_s)
        self._inside = False
        self._plan(now_s)

    def _obey(self, now_s: float) -> None:
        """One round of both books: claim what serving lacks, lend, give back, take."""
        memory, serving, rollout = self.memory, self.serving, self.rollout
        ending, self._ending = self._ending, []
        for key in ending:
            found = None if rollout is None else rollout.remove(key)
            if found is not None:
                self.host.turn_cut(self, found[0], found[1], now_s, None)
        if memory is None or serving is None or rollout is None:
            return
        used = self.serving_pages
        if memory.may_claim and memory.claim(used_pages=used, waiting_pages=self._waiting_pages(serving)):
            self.host.claimed(self, now_s)
            self._stall_s = self.unmap_s
        gave = False
        if not memory.is_settled(self.lend_pages):
            memory.serve(now_s, lend_pages=self.lend_pages, used_pages=used)
            if serving.cached_tokens:  # what is lent keeps no prefixes
                serving.evict_to(memory.usable_pages * self.serving_page_tokens - serving.used_tokens)
            gave = self.rollout_up and self._follow(memory, rollout, now_s)
            memory.serve(now_s, lend_pages=self.lend_pages, used_pages=used)
            memory.rest(self.lend_pages)
        if self.rollout_up and rollout.waiting:
            budget = self.rollout_budget_tokens
            for request in list(rollout.waiting):
                if not request.done and request.prompt + 1 > budget:
                    # It would wait for ever: the scheduler must hear of it.
                    rollout.remove(request.key)
                    self.host.turn_cut(self, request, 0, now_s)
        if gave:
            self.reclaim_seq += 1
            self.host.boundary(self, now_s)

    def _waiting_pages(self, serving: SimEngine) -> int:
        """What the requests that wait for memory would take."""
        if not serving.waiting:
            return 0
        looked_at = islice(serving.waiting, _WAITING_LOOKED_AT)
        tokens = sum(request.prompt + 1 for request in looked_at if not request.done)
        return math.ceil(tokens / self.serving_page_tokens)

    def _follow(self, memory: SharedMemory, rollout: SimEngine, now_s: float) -> bool:
        """The rollout engine holds what it may; prefixes go first, then the youngest turns.  Whether it gave anything up."""
        keep = memory.keep_chunks(self.lend_pages)
        budget = int(keep * memory.chunk_pages * self.rollout_page_tokens)
        rollout.evict_to(budget - rollout.used_tokens)
        while rollout.used_tokens > budget:
            victim = rollout.youngest()
            if victim is None:
                break
            found = rollout.remove(victim.key)
            assert found is not None
            self.num_cut += 1
            self.host.turn_cut(self, found[0], found[1], now_s)
        return memory.follow(keep)

    def _plan(self, now_s: float) -> None:
        """Choose the next phase and schedule its end."""
        serving, rollout = self.serving, self.rollout
        steps = math.inf
        serving_s = rollout_s = serving_growth = rollout_growth = 0.0
        self._serving_prefill = self._rollout_prefill = self._rate = 0.0
        self._round = 1
        if serving is not None and serving.requests:
            steps = self._plan_serving(serving, now_s)
            if serving.prefilling or serving.running:
                serving_s = (
                    serving.base_s
                    + self._serving_prefill * serving.prefill_s
                    + serving.running * serving.decode_s
                    + serving.context_tokens * serving.context_s
                )
                serving_growth = serving.running * serving.context_s
                if self._serving_prefill:
                    attention_s, longer_s = serving.prompt_attention_s(self._serving_prefill)
                    serving_s += attention_s
                    serving_growth += longer_s
        self.closed = False
        self.slack_s = None
        self._ttft_slack_s = math.inf
        if rollout is not None and self.rollout_up and rollout.requests:
            rollout_steps = self._plan_rollout(rollout, serving_s > 0, now_s)
            if rollout_steps > 0:
                decodes = rollout.running * self._rate
                rollout_s = (
                    rollout.base_s
                    + self._rollout_prefill * rollout.prefill_s
                    + decodes * rollout.decode_s
                    + rollout.context_tokens * self._rate * rollout.context_s
                )
                rollout_growth = decodes * self._rate * rollout.context_s
                if self._rollout_prefill:
                    attention_s, longer_s = rollout.prompt_attention_s(self._rollout_prefill)
                    rollout_s += attention_s
                    rollout_growth += longer_s
                self._round = self._round_steps(rollout_s, rollout_steps)
                steps = min(steps, rollout_steps // self._round)
            elif serving_s > 0:
                steps = min(steps, math.ceil(CLOSED_RECHECK_S / serving_s))
        self._serving_s, self._rollout_s = serving_s, rollout_s
        if serving_s <= 0 and rollout_s <= 0:
            return
        num = self._round
        cycle_s = serving_s + num * rollout_s + rollout_growth * num * (num - 1) / 2
        growth_s = serving_growth + num * num * rollout_growth
        if serving_s > 0 and rollout_s > 0:
            cycle_s -= self.overlap * min(serving_s, rollout_s)
            growth_s -= self.overlap * (serving_growth if serving_s <= rollout_s else num * rollout_growth)
            if self._ttft_slack_s < math.inf:
                steps = min(steps, self._cycles_within(self._ttft_slack_s, rollout_s, cycle_s - serving_s))
        count = 1 if steps < 1 else int(steps) if steps < MAX_STEPS else MAX_STEPS
        if rollout_s > 0:  # a cut waits for the end of a cycle here, production's step included
            self._longest_s = max(self._longest_s, cycle_s + growth_s * (count - 1))
        self._from_s = start_s = now_s + self._stall_s
        if rollout_s > 0 and self._credit_s:
            start_s -= min(self._credit_s, 0.999 * rollout_s)
            self._credit_s = 0.0
        self._cycle_s, self._growth_s, self._count, self._start_s = cycle_s, growth_s, count, start_s
        self._rollout_count, self._rollout_growth_s = count * num, rollout_growth
        self._serving_growth_s = serving_growth
        self._stall_s = 0.0
        self._active = True
        self._phase += 1
        if rollout is not None and rollout_s > 0 and rollout.cached_tokens:
            growth = count * num * rollout.running * self._rate
            rollout.evict_to(rollout.budget_tokens - rollout.used_tokens - growth)
        self.queue.at(self._end_s(), self._boundary, self._phase)

    def _round_steps(self, rollout_s: float, most: float) -> int:
        """Rollout steps of each cycle of this phase: one, unless serving decodes alone and can spare more."""
        if self.rounds is None or self.slack_s is None or self._ttft_slack_s < math.inf:
            return 1
        return int(min(self.rounds.fit(slack_s=self.slack_s, step_s=rollout_s), most))

    def _cycles_within(self, slack_s: float, rollout_s: float, delay_s: float) -> int:
        """How many cycles until admission, asked before each rollout step as engines do, would say no: each of them
        takes ``delay_s`` of what the prompt that is being read can spare."""
        need_s = 0.0 if self.params.rule is Rule.PAPER else rollout_s
        return 1 + max(0, int(min(1e6, (slack_s - need_s) / max(delay_s, _EPSILON_S))))

    def _plan_serving(self, serving: SimEngine, now_s: float) -> float:
        """Admit what fits; how many steps until its batch changes."""
        page_tokens = self.serving_page_tokens
        may_use = self.usable_pages * page_tokens
        room = may_use - serving.used_tokens
        if serving.cached_tokens:
            # Memory that no request holds keeps prefixes, until requests or the loan take it.
            serving.budget_tokens = int(may_use)
            serving.evict_to(room)
        missing = serving.admit(room) if serving.waiting else 0.0
        if not missing and room < serving.running + 1:
            missing = serving.running + 1.0
        while serving.running > 1 and room < serving.running:
            serving.preempt()
            room = may_use - serving.used_tokens
        if serving.cached_tokens:
            serving.evict_to(may_use - serving.used_tokens)
        self._serving_prefill, steps = serving.shape(serving.chunk_tokens)
        if serving.running:
            free = may_use - serving.used_tokens
            if self.memory is not None and self.memory.may_claim:
                above = free - self.memory.steps.watermark_blocks * page_tokens
                if above >= 0:  # it claims as soon as it is below
                    free = above + serving.running
            steps = max(1.0, min(steps, serving.steps_to_finish(), free // serving.running))
        return min(steps, 4.0) if missing > 0 else steps

    def _plan_rollout(self, rollout: SimEngine, beside_serving: bool, now_s: float) -> float:
        """Admission by memory and by slack; steps until its batch changes, 0 when it may not or need not run."""
        budget = rollout.budget_tokens = self.rollout_budget_tokens
        used = rollout.used_tokens
        if rollout.waiting:
            rollout.admit(budget - used)
            used = rollout.used_tokens
        while rollout.running > 1 and budget - used < rollout.running:
            rollout.preempt()
            used = rollout.used_tokens
        if (beside_serving and self.priority) or (not rollout.running and not rollout.prefilling):
            return 0.0
        chunk, rate = rollout.chunk_tokens, 1.0
        if beside_serving and self.gated:
            serving = self.serving
            assert serving is not None
            demand = Demand(
                num_decodes=rollout.running,
                prefill_tokens=int(rollout.pending_tokens),
                context_tokens=int(rollout.context_tokens),
            )
            board = board_of(serving, now_s, self.slo_ttft_s, self.slo_tpot_s)
            model = rollout.asked_model(self.params.max_prefill_tokens)
            answer = admit(now_s, board=board, model=model, params=self.params, demand=demand)
            self.slack_s = answer.slack_s
            if board.ttft_deadline_s is not None:
                kept_s = self.params.guard_s + self.params.reserve_s
                self._ttft_slack_s = board.ttft_deadline_s - now_s - kept_s
            tokens = answer.token_budget
            if tokens <= 0:
                self.closed = True
                return 0.0
            if tokens < rollout.running:
                chunk, rate = 0, tokens / rollout.running
            else:
                chunk = min(chunk, tokens - rollout.running)
        elif self.idle_chunk_tokens is not None and self.serving is not None and not beside_serving:
            chunk = min(chunk, self.idle_chunk_tokens)
        self._rollout_prefill, steps = rollout.shape(chunk)
        if rollout.running:
            self._rate = rate
            room = (budget - used) // (rollout.running * rate)
            steps = max(1.0, min(steps, math.ceil(rollout.steps_to_finish() / rate - 1e-6), room))
        elif not self._rollout_prefill:
            self.closed = True
            return 0.0
        return steps

    def check(self) -> None:
        """Memory is never promised twice, and both engines' books hold."""
        for engine in (self.serving, self.rollout):
            if engine is not None:
                engine.check()
        if self.memory is not None:
            self.memory.check()
        assert self.serving_pages <= self.usable_pages + 2
