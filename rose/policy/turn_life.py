"""The life of one turn in the book: submitted, placed, attempted, continued elsewhere, ended.

What happens to workers, and the door that every event comes through, are in :mod:`rose.policy.turns`, which has the invariants too.

Pure: no I/O, no clock, no randomness of its own.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict

from rose.errors import PolicyError
from rose.lineage import Version
from rose.policy.affinity import Affinity
from rose.policy.borrowed import goes_back
from rose.policy.draining import Draining
from rose.policy.fleet import Fleet, FleetParams
from rose.policy.placing import Entry, Placer
from rose.policy.remaining import Remaining
from rose.policy.routing import Candidate, RoutingPolicy
from rose.policy.stop_reasons import OTHER_RUN, RECLAIMED
from rose.policy.turn import Turn
from rose.policy.turn_events import (
    LIVE,
    AbortAttempt,
    Action,
    AnswerUnavailable,
    AttemptEnded,
    AttemptFailed,
    Dispatch,
    Fenced,
    Requeued,
    TokensArrived,
    TokensDropped,
    TokensKept,
    TurnEnded,
    TurnParams,
    TurnState,
    TurnSubmitted,
)
from rose.policy.worker import Worker

MAX_GROUPS = 20_000
"""Whose begin is remembered; one that is forgotten counts as begun with its next turn."""


class TurnLife:
    """See the module docstring.

    Args:
        policy: Chooses among eligible workers.
        params: Bounds of a turn.
        fleet_params: Liveness limits and caps.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        params: TurnParams | None = None,
        fleet_params: FleetParams | None = None,
    ) -> None:
        self.params = params or TurnParams()
        self.fleet = Fleet(params=fleet_params or FleetParams())
        self.turns: dict[str, Turn] = {}
        self.required: dict[str, Version] = {}
        self.runs: dict[str, str] = {}
        """Of jobs whose trainer named one."""
        self._live: dict[str, set[str]] = {}
        self.affinity = Affinity(
            self.fleet,
            max_entries=self.params.max_affinity_entries,
            expected_tokens=self.params.expected_tokens,
            ewma=self.params.expected_ewma,
        )
        self.remaining = Remaining(max_entries=self.params.max_affinity_entries)
        self.num_running: Counter[str] = Counter()
        self.num_done: Counter[str] = Counter()
        """Turns by job: not ended, and ended, since :meth:`forget_job`."""
        self.draining = Draining(self.num_running)
        self.placer = Placer(
            policy=policy,
            params=self.params,
            fleet=self.fleet,
            affinity=self.affinity,
            remaining=self.remaining,
            turns=self.turns,
            required=self.required,
            runs=self.runs,
            draining=self.draining,
        )
        self._by_trajectory: dict[str, set[str]] = {}
        self._alarms: list[tuple[float, str]] = []
        """When to look at a turn again; one too many is harmless."""
        self._begun_s: OrderedDict[str, float] = OrderedDict()
        """When the first turn of a group came; the oldest groups are forgotten first."""
        self._num_submitted = 0
        self._now_s = float("-inf")

    @property
    def policy(self) -> RoutingPolicy:
        return self.placer.policy

    @policy.setter
    def policy(self, policy: RoutingPolicy) -> None:
        self.placer.policy = policy

    @property
    def queue(self) -> list[Entry]:
        """Turns that wait, in order: ``((class, age, number), turn_id, KV room it needs)``."""
        return self.placer.queue

    def forget_job(self, job: str) -> None:
        """Its counts; it has no turn any more."""
        if self.num_running[job] == 0:
            del self.num_running[job], self.num_done[job]
            self.draining.forget(job)

    def turns_of(self, trajectory_id: str) -> list[str]:
        """Its turns that have not ended."""
        return sorted(self._by_trajectory.get(trajectory_id, ()))

    def oldest_live(self, job: str) -> dict[str, Version]:
        """For each trajectory of the job with a turn under way: its oldest token is of this version's step or an earlier one."""
        found: dict[str, Version] = {}
        for turn in self.turns.values():
            version = turn.oldest_at_most if turn.spec.job == job else None
            if version is not None:
                name = turn.spec.trajectory_id
                found[name] = min(version, found.get(name, version), key=lambda each: each[1])
        return found

    # --- from submission to the end ----------------------------------------------------------------

    def _submit(self, event: TurnSubmitted) -> list[Action]:
        if event.turn_id in self.turns:
            raise PolicyError(f"turn {event.turn_id} is already running", field="turn_id")
        if event.num_prompt_tokens < 1 or event.max_tokens < 1:
            raise PolicyError("a turn needs a prompt and room for one token", field="num_prompt_tokens")
        if len(self.queue) >= self.params.max_queued:
            raise PolicyError(f"{len(self.queue)} turns are queued already", field="queue")
        self._num_submitted += 1
        params = self.params
        uses_rank = params.longest_first_s > 0 or params.tail_fraction > 0
        rank = self.remaining.rank(event.trajectory_id, event.history) if uses_rank else 0.0
        turn = Turn(
            spec=event,
            order=(1, self._since_s(event) - params.longest_first_s * rank, self._num_submitted),
            is_tail=rank > 1.0 - params.tail_fraction,
            queued_at_s=event.at_s,
            infra_left=self.params.infra_budget,
            data_left=self.params.data_budget,
        )
        self.turns[event.turn_id] = turn
        self._by_trajectory.setdefault(event.trajectory_id, set()).add(event.turn_id)
        self.num_running[event.job] += 1
        self.draining.submitted(event.job, begins=not self.remaining.has_begun(event.trajectory_id))
        self.placer.put(turn)
        self._watch(turn, event.at_s)
        return []

    def _since_s(self, event: TurnSubmitted) -> float:
        """From when on a turn counts as waiting."""
        limit_s = self.params.oldest_first_s
        if limit_s <= 0:
            return event.at_s
        group = f"{event.job}/{event.group_id or event.trajectory_id}"
        begun_s = self._begun_s.setdefault(group, event.at_s)
        if len(self._begun_s) > MAX_GROUPS:
            self._begun_s.popitem(last=False)
        return event.at_s - self.params.oldest_first_share * min(limit_s, event.at_s - begun_s)

    def _tokens(self, event: TokensArrived) -> list[Action]:
        turn = self._live_attempt(event.turn_id, event.attempt)
        if turn is None:
            return [Fenced(turn_id=event.turn_id, attempt=event.attempt, num_tokens=len(event.token_ids))]
        return self._keep(turn, event)

    def _keep(self, turn: Turn, event: TokensArrived | AttemptEnded) -> list[Action]:
        if event.logprobs and len(event.logprobs) != len(event.token_ids):
            raise PolicyError("needs one entry per token", field="logprobs")
        room = turn.spec.max_tokens - len(turn.token_ids)
        token_ids = event.token_ids[:room]
        if not token_ids:
            return []
        worker = turn.worker
        assert worker is not None  # live
        start, count = len(turn.token_ids), len(token_ids)
        turn.state = TurnState.DECODING
        turn.progress_at_s = event.at_s
        if turn.first_token_at_s is None:
            turn.first_token_at_s = event.at_s
        if start == turn.attempt_start:
            published = self.required.get(turn.spec.job)
            # A trainer's weights are at the relay, and in engines, before its call names them here.
            turn.attempt_published = published and max(published, worker.version or published)
        turn.append(worker, token_ids, event.logprobs[:count])
        return [TokensKept(turn_id=event.turn_id, attempt=event.attempt, start=start, num_tokens=count)]

    def _ended(self, event: AttemptEnded) -> list[Action]:
        turn = self._live_attempt(event.turn_id, event.attempt)
        if turn is None:
            return [Fenced(turn_id=event.turn_id, attempt=event.attempt, num_tokens=len(event.token_ids))]
        worker = turn.worker
        assert worker is not None
        kept = self._keep(turn, event) if event.token_ids else []
        return kept + self._end_attempt(turn, worker, event)

    def _end_attempt(self, turn: Turn, worker: Worker, event: AttemptEnded) -> list[Action]:
        turn.relabel(event.versions)
        num_new = len(turn.token_ids) - turn.attempt_start
        if num_new and (problem := self._heed_stamps(turn, worker, event.run)):
            turn.infra_left -= 1
            return self._refused(turn, worker, event.at_s, problem)
        self.fleet.answered(worker)
        turn.attempt_mixed = event.kv_mixed
        prefilled = turn.spec.num_prompt_tokens + turn.attempt_start
        if event.num_cached_tokens is not None:
            cached = min(event.num_cached_tokens, prefilled)
            turn.num_cached_tokens += cached
            if turn.attempt > 1:
                turn.num_recomputed_tokens = max(0, turn.num_recomputed_tokens - cached)
        if event.finish_reason != "abort":
            copied = turn.spec.num_copied
            num_whole = copied + len(turn.token_ids)
            self.remaining.made(turn.spec.trajectory_id, turn.spec.history, num_whole)
            self.affinity.finished(
                turn.spec.trajectory_id,
                turn.spec.history,
                worker,
                num_prompt=turn.spec.num_prompt_tokens - copied,
                num_new=num_whole,
            )
            self._learn_speed(turn, worker, event.at_s, num_new, event.num_cached_tokens)
            return self._finish(turn, event.at_s, TurnState.DONE, event.finish_reason, event.stop_reason)
        if len(turn.token_ids) >= turn.spec.max_tokens:
            return self._finish(turn, event.at_s, TurnState.DONE, "length", None)
        if event.stop_reason == OTHER_RUN:
            turn.num_futile = 0 if num_new else turn.num_futile + 1
            return self._refused(
                turn, worker, event.at_s, f"worker {worker.worker_id} has another run's weights"
            )
        if turn.asked_to_leave_s is not None or goes_back(worker, event.at_s, self.fleet.params.drain_s):
            return self._requeue(turn, event.at_s, "returned", abort=False)
        reclaimed = event.stop_reason == RECLAIMED
        moved = turn.stopped_at_s is not None and not reclaimed
        if reclaimed:
            turn.num_reclaims += 1
            self.fleet.reclaimed(worker.worker_id, event.at_s)
        elif moved:
            # Else only turns that were not slow enough to be moved would tell how fast it is.
            left, rest_s = turn.stopped_rest
            self._learn_speed(
                turn, worker, event.at_s, num_new + max(1, round(left)), event.num_cached_tokens, rest_s
            )
        # An abort that brought no token must not become a hot loop.
        turn.num_futile = 0 if num_new else turn.num_futile + 1
        self._back_off(turn, worker, event.at_s)
        reason = "reclaim" if reclaimed else "migrate" if moved else "abort"
        return self._requeue(turn, event.at_s, reason, abort=False)

    def _back_off(self, turn: Turn, worker: Worker, at_s: float) -> None:
        """The turn stays away from this worker, longer each time that brought nothing."""
        wait_s = min(self.params.backoff_s * 2 ** min(turn.num_futile, 8), self.params.max_backoff_s)
        turn.backoff_until_s[worker.worker_id] = at_s + wait_s

    def _heed_stamps(self, turn: Turn, worker: Worker, run: str | None) -> str:
        """Whose weights sampled the live attempt, by its engine's own word; why its tokens cannot be kept, empty where they can."""
        if run is not None:
            self.fleet.stamped(worker, run)
            turn.relabel_run(run)
            return (
                f"worker {worker.worker_id} has another run's weights"
                if self._is_of_another_run(turn)
                else ""
            )
        if not self.runs.get(turn.spec.job):
            return ""
        self.fleet.stamped(worker, None)
        for name in self._live[worker.worker_id]:  # what else it samples for such jobs is nobody's either
            if self.runs.get(self.turns[name].spec.job):
                self.turns[name].relabel_run("")
        return f"worker {worker.worker_id} does not say whose weights sampled its tokens"

    def _learn_speed(
        self,
        turn: Turn,
        worker: Worker,
        at_s: float,
        num_new: int,
        num_cached: int | None,
        rest_s: float = 0.0,
    ) -> None:
        """``rest_s``: so much longer the ``num_new`` tokens would have taken."""
        cached = turn.attempt_resident if num_cached is None else num_cached
        self.fleet.served(
            worker,
            at_s=at_s,
            seconds=at_s - turn.attempt_at_s + rest_s,
            num_new=num_new,
            num_prefilled=max(0, turn.spec.num_prompt_tokens + turn.attempt_start - cached),
            load_s=worker.load_until(at_s) - turn.attempt_load_s + rest_s * worker.inflight,
        )

    def _refused(
        self, turn: Turn, worker: Worker, at_s: float, message: str, *, forget: bool = False
    ) -> list[Action]:
        """The engine has weights of another run than this turn's: elsewhere, and here once it says otherwise."""
        if turn.infra_left < 0:
            return self._finish(turn, at_s, TurnState.FAILED, "infra", message=message)
        self._back_off(turn, worker, at_s)
        return self._requeue(turn, at_s, "run", abort=False, forget=forget)

    def _failed(self, event: AttemptFailed) -> list[Action]:
        turn = self._live_attempt(event.turn_id, event.attempt)
        if turn is None:
            return [Fenced(turn_id=event.turn_id, attempt=event.attempt, num_tokens=0)]
        worker = turn.worker
        assert worker is not None
        turn.num_futile += 1
        self._back_off(turn, worker, event.at_s)
        if event.kind not in ("busy", "data") and self.fleet.workers.get(worker.worker_id) is worker:
            self.fleet.failed(worker, event.at_s)
        match event.kind:
            case "data":
                return self._finish(turn, event.at_s, TurnState.FAILED, "data", message=event.message)
            case "bad":
                turn.data_left -= 1
                if turn.data_left < 0:
                    return self._finish(turn, event.at_s, TurnState.FAILED, "bad", message=event.message)
            case "run":
                turn.infra_left -= 1
                return self._refused(turn, worker, event.at_s, event.message, forget=True)
            case "busy":
                pass  # a full engine is not a fault; the turn's queue limit bounds the wait
            case _:
                turn.infra_left -= 1
                if turn.infra_left < 0:
                    return self._finish(turn, event.at_s, TurnState.FAILED, "infra", message=event.message)
        return self._requeue(turn, event.at_s, event.kind, abort=False)

    def _requeue(
        self, turn: Turn, at_s: float, reason: str, *, abort: bool, forget: bool = False
    ) -> list[Action]:
        """Back to the front, with the tokens, unless they are of other weights than the next ones (``forget``: surely so);
        ``abort`` tells the old engine to let go."""
        worker = turn.worker
        assert worker is not None
        forget = forget or self._is_of_another_run(turn)
        if forget and turn.spec.streamed and turn.spec.resumable and turn.token_ids:
            return self._begin_anew(turn, at_s)
        actions = self._abort(turn) if abort else []
        self._release(turn, at_s)
        if forget or not turn.spec.resumable:
            actions.extend(self._forget_tokens(turn))
        turn.state, turn.queued_at_s = TurnState.QUEUED, at_s
        turn.order = (0, turn.spec.at_s, turn.order[2])
        self.placer.put(turn)
        self._watch(turn, at_s)
        actions.append(
            Requeued(
                turn_id=turn.spec.turn_id,
                worker_id=worker.worker_id,
                reason=reason,
                num_kept_tokens=len(turn.token_ids),
            )
        )
        return actions

    def _begin_anew(self, turn: Turn, at_s: float) -> list[Action]:
        """A queued turn whose tokens no engine may go on from.  A client that has read them cannot take them back: then it has failed."""
        if turn.spec.streamed and turn.spec.resumable and turn.token_ids:
            return self._finish(
                turn,
                at_s,
                TurnState.FAILED,
                "infra",
                message="the engines went over to another run's weights",
            )
        self.placer.remove(turn)
        actions = self._forget_tokens(turn)
        self.placer.put(turn)  # it needs less room now
        return actions

    def _is_of_another_run(self, turn: Turn) -> bool:
        """Was any of its tokens sampled by other weights than its job's, its trajectory's, or its first token's?"""
        run = self.runs.get(turn.spec.job) or turn.spec.run or (turn.segments[0].run if turn.segments else "")
        return any(segment.run != run for segment in turn.segments)

    def _forget_tokens(self, turn: Turn) -> list[Action]:
        if not turn.token_ids:
            return []
        dropped = TokensDropped(turn_id=turn.spec.turn_id, num_tokens=len(turn.token_ids))
        turn.restart()
        return [dropped]

    def _finish(
        self,
        turn: Turn,
        at_s: float,
        outcome: TurnState,
        reason: str,
        stop_reason: str | int | None = None,
        message: str = "",
    ) -> list[Action]:
        actions: list[Action] = []
        spec = turn.spec
        if turn.state in LIVE:
            if outcome is not TurnState.DONE and reason not in ("data", "infra", "bad"):
                actions.extend(self._abort(turn))
            self._release(turn, at_s)
        else:
            self.placer.remove(turn)
        del self.turns[spec.turn_id]
        self.num_running[spec.job] -= 1
        self.num_done[spec.job] += 1
        mine = self._by_trajectory[spec.trajectory_id]
        mine.discard(spec.turn_id)
        if not mine:
            del self._by_trajectory[spec.trajectory_id]
        actions.append(
            TurnEnded(
                turn_id=spec.turn_id,
                outcome=outcome,
                reason=reason,
                stop_reason=stop_reason,
                message=message,
                result=turn.result(at_s),
            )
        )
        return actions

    def _abort(self, turn: Turn) -> list[Action]:
        if turn.worker is None:
            return []
        return [
            AbortAttempt(turn_id=turn.spec.turn_id, attempt=turn.attempt, worker_id=turn.worker.worker_id)
        ]

    # --- alarms ------------------------------------------------------------------------------------

    def _watch(self, turn: Turn, at_s: float) -> None:
        """Set the next alarm of a turn."""
        params, spec = self.params, turn.spec
        next_s = at_s + params.alarm_horizon_s
        if spec.deadline_at_s is not None:
            next_s = min(next_s, spec.deadline_at_s)
        if turn.detached_at_s is not None:
            next_s = min(next_s, turn.detached_at_s + params.detach_s)
        if turn.state is TurnState.QUEUED:
            if not turn.answered_503:
                next_s = min(next_s, turn.queued_at_s + params.max_queue_s)
        elif spec.shows_tokens:
            next_s = min(next_s, max(turn.progress_at_s + params.stall_s, at_s + params.min_alarm_s))
        heapq.heappush(self._alarms, (next_s, spec.turn_id))

    def _look_at(self, turn: Turn, at_s: float) -> list[Action]:
        """Do what is due for a turn at this time, if anything."""
        actions: list[Action] = []
        spec, params = turn.spec, self.params
        if spec.deadline_at_s is not None and at_s >= spec.deadline_at_s:
            return self._finish(
                turn, at_s, TurnState.FAILED, "deadline", message="the turn's deadline passed"
            )
        if turn.detached_at_s is not None and at_s - turn.detached_at_s >= params.detach_s:
            return self._finish(turn, at_s, TurnState.CANCELLED, "client_gone")
        if turn.state is TurnState.QUEUED:
            waited_s = at_s - turn.queued_at_s
            if waited_s >= params.max_queue_s and not turn.answered_503:
                turn.answered_503 = True
                turn.detached_at_s = turn.detached_at_s or at_s
                turn.hold = self.placer.why(turn, at_s)
                actions.append(AnswerUnavailable(turn_id=spec.turn_id, waited_s=waited_s, hold=turn.hold))
                if turn.hold == "run" and not self.runs.get(spec.job):
                    # Nobody asked for this run, and nobody has it any more.
                    actions.extend(self._begin_anew(turn, at_s))
                    if spec.turn_id not in self.turns:
                        return actions
                    self.placer.try_again((spec.turn_id,))
        elif (
            spec.shows_tokens
            and turn.worker is not None
            and not turn.worker.gated
            and at_s - turn.progress_at_s >= params.stall_s
        ):
            turn.infra_left -= 1
            turn.backoff_until_s[turn.worker.worker_id] = at_s + params.max_backoff_s
            if turn.infra_left < 0:
                message = f"worker {turn.worker.worker_id} stalled"
                return self._finish(turn, at_s, TurnState.FAILED, "infra", message=message)
            return self._requeue(turn, at_s, "stall", abort=True)
        self._watch(turn, at_s)
        return actions

    # --- placing -----------------------------------------------------------------------------------

    def _place(self, at_s: float) -> list[Action]:
        return [
            self._dispatch(turn, worker, candidate, at_s)
            for turn, worker, candidate in self.placer.place(at_s)
        ]

    def _dispatch(self, turn: Turn, worker: Worker, candidate: Candidate, at_s: float) -> Dispatch:
        spec = turn.spec
        turn.attempt += 1
        turn.state = TurnState.DISPATCHED
        turn.worker, turn.dispatch_version, turn.dispatch_run = worker, worker.version, worker.run
        turn.attempt_start, turn.attempt_at_s, turn.progress_at_s = len(turn.token_ids), at_s, at_s
        turn.attempt_made, turn.stopped_at_s, turn.asked_to_leave_s = worker.pace.made, None, None
        turn.reserved_tokens = turn.need_tokens
        if turn.first_dispatch_at_s is None:
            turn.first_dispatch_at_s = at_s
        if turn.attempt > 1:
            turn.num_recomputed_tokens += spec.num_prompt_tokens + len(turn.token_ids)
        resident = candidate.resident_tokens if worker is candidate.affine else 0
        self.fleet.take(
            worker,
            at_s=at_s,
            reserved=turn.reserved_tokens,
            admitted=max(0, candidate.num_prompt_tokens - resident),
        )
        turn.attempt_load_s, turn.attempt_resident = worker.load_s, resident
        self._watch(turn, at_s)
        self._live.setdefault(worker.worker_id, set()).add(spec.turn_id)
        if spec.group_id is not None and candidate.affine is None:
            self.affinity.started(spec.group_id, worker, candidate.num_prompt_tokens)
        affinity = "miss" if candidate.affine is None else "hit" if candidate.affine is worker else "broken"
        return Dispatch(
            turn_id=spec.turn_id,
            attempt=turn.attempt,
            worker_id=worker.worker_id,
            num_kept_tokens=len(turn.token_ids),
            max_tokens=spec.max_tokens - len(turn.token_ids),
            affinity=affinity,
            queued_s=at_s - turn.queued_at_s,
        )

    # --- books -------------------------------------------------------------------------------------

    def _release(self, turn: Turn, at_s: float) -> None:
        worker = turn.worker
        assert worker is not None
        self.fleet.give_back(worker, at_s=at_s, reserved=turn.reserved_tokens)
        live = self._live[worker.worker_id]
        live.discard(turn.spec.turn_id)
        if not live:
            del self._live[worker.worker_id]
        turn.worker, turn.reserved_tokens = None, 0
        turn.close_attempt()

    def _known(self, turn_id: str) -> Turn:
        turn = self.turns.get(turn_id)
        if turn is None:
            raise PolicyError(f"turn {turn_id} is not running", field="turn_id")
        return turn

    def _live_attempt(self, turn_id: str, attempt: int) -> Turn | None:
        turn = self.turns.get(turn_id)
        if turn is None or turn.state not in LIVE or turn.attempt != attempt:
            return None
        return turn

    def check(self) -> None:
        """Assert the invariants of the module docstring, in its order."""
        live: dict[str, list[Turn]] = {}
        for turn in self.turns.values():
            assert (turn.worker is not None) == (turn.state in LIVE)  # 1
            turn.check()  # 2
            if turn.worker is not None:
                live.setdefault(turn.worker.worker_id, []).append(turn)
        for worker in self.fleet:  # 3
            turns = live.pop(worker.worker_id, [])
            assert worker.inflight == len(turns)
            assert worker.reserved_tokens == sum(turn.reserved_tokens for turn in turns)
            assert all(turn.worker is worker for turn in turns)
        assert not live
        self.placer.check()  # 4
        self.fleet.table.check(self.fleet)  # 6
