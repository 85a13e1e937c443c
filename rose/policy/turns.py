"""The turn book: every turn from submission to its end, over workers that come and go.

Everything goes through one method, :meth:`TurnBook.handle`: it takes an event and returns the actions that its caller has to carry
out.  The daemon, the simulator and the tests call it.  Events and actions are in ``rose.policy.turn_events``, workers in
``rose.policy.fleet``, the choice of a worker in ``rose.policy.routing``.

A turn is QUEUED, live (DISPATCHED, DECODING) or has ended.  A cut, an abort we did not ask for, a broken
connection or a dead worker puts it back to the front of the queue *with its tokens*; the next attempt
continues from them.  The agent never sees any of it.

Invariants, checked by :meth:`TurnBook.check` after any sequence of events:

1. A turn has at most one live attempt; a fenced attempt changes nothing.
2. Each token has exactly one segment and one version span, contiguous from 0: no loss, no repeat.
3. ``inflight`` of a worker is the number of its live attempts; ``reserved_tokens`` what they reserved.
4. The queue holds exactly the QUEUED turns, resumed ones first, then by age.
5. A turn is dispatched only to a worker that is ready, on duty, not under pressure, of its job, at the
   required version or above, of the turn's model, with a free slot and KV room; and to a borrowed one only if it is expected
   to end there before the device goes back.

An illegal event (unknown turn, same id twice, time going back) raises :class:`~rose.errors.PolicyError` and
changes nothing.

Pure: no I/O, no clock, no randomness of its own.
"""

from __future__ import annotations

import heapq
from typing import assert_never

from rose.errors import PolicyError
from rose.lineage import format_version
from rose.policy.borrowed import goes_back, must_leave
from rose.policy.draining import Draining
from rose.policy.migration import to_move
from rose.policy.turn_events import (
    Action,
    AttemptEnded,
    AttemptFailed,
    ClientBack,
    ClientGone,
    ClockTicked,
    Event,
    StopAttempt,
    TokensArrived,
    TrajectoryClosed,
    TurnCancelled,
    TurnState,
    TurnStopped,
    TurnSubmitted,
    VersionRequired,
    WorkerAssigned,
    WorkerDuty,
    WorkerHeartbeat,
    WorkerLost,
    WorkerRegistered,
)
from rose.policy.turn_life import TurnLife
from rose.policy.worker import Duty, Health, Tier


class TurnBook(TurnLife):
    """See the module docstring; :class:`~rose.policy.turn_life.TurnLife` for its arguments."""

    # --- the door ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action]:
        if event.at_s < self._now_s:
            raise PolicyError(f"{event.at_s} s after {self._now_s} s: time went back", field="at_s")
        match event:
            case TurnSubmitted():
                actions = self._submit(event)
            case TokensArrived():
                actions = self._tokens(event)
                self._now_s = event.at_s
                return actions
            case AttemptEnded():
                actions = self._ended(event)
            case AttemptFailed():
                actions = self._failed(event)
            case WorkerHeartbeat():
                actions = self._heartbeat(event)
            case WorkerRegistered():
                actions = self._register(event)
            case WorkerLost():
                actions = self._lost(event)
            case WorkerDuty():
                actions = self._duty(event)
            case WorkerAssigned():
                actions = self._assign(event)
            case VersionRequired():
                actions = self._version(event)
            case ClockTicked():
                actions = self._tick(event.at_s)
            case TurnCancelled():
                turn = self._known(event.turn_id)
                actions = self._finish(turn, event.at_s, TurnState.CANCELLED, event.reason)
            case TurnStopped():
                turn = self._known(event.turn_id)
                actions = self._abort(turn)
                actions += self._finish(turn, event.at_s, TurnState.DONE, "stop", event.stop_reason)
            case ClientGone():
                turn = self._known(event.turn_id)
                turn.detached_at_s = event.at_s
                self._watch(turn, event.at_s)
                actions = []
            case ClientBack():
                turn = self._known(event.turn_id)
                if turn.answered_503:
                    turn.queued_at_s = event.at_s  # a new wait for the client; its age in the queue is kept
                turn.detached_at_s, turn.answered_503 = None, False
                self._watch(turn, event.at_s)
                actions = []
            case TrajectoryClosed():
                self.affinity.closed(event.trajectory_id)
                self.remaining.closed(event.trajectory_id)
                actions = []
            case _:
                assert_never(event)
        self._now_s = event.at_s
        if self.placer.queue:
            actions.extend(self._place(event.at_s))
        else:
            self.fleet.table.gained.clear()  # nobody waits for what got better
        return actions

    # --- workers -----------------------------------------------------------------------------------

    def _register(self, event: WorkerRegistered) -> list[Action]:
        down = self.fleet.register(
            at_s=event.at_s,
            worker_id=event.worker_id,
            incarnation=event.incarnation,
            tier=event.tier,
            model=event.model,
            max_model_len=event.max_model_len,
            cap=event.cap,
            max_num_seqs=event.max_num_seqs,
            for_tail=event.for_tail,
        )
        self._fleet_shrank()
        return [action for item in down for action in self._evacuate(item.worker_id, item.reason, event.at_s)]

    def _heartbeat(self, event: WorkerHeartbeat) -> list[Action]:
        worker = self.fleet.workers.get(event.worker_id)
        before = "" if worker is None else worker.run
        self.fleet.heartbeat(
            at_s=event.at_s,
            worker_id=event.worker_id,
            incarnation=event.incarnation,
            seq=event.seq,
            version=event.version,
            state=event.state,
            kv_budget_tokens=event.kv_budget_tokens,
            kv_used_tokens=event.kv_used_tokens,
            running=event.running,
            gated=event.gated,
            reclaim_seq=event.reclaim_seq,
            slack_s=event.slack_s,
            serving_use=event.serving_use,
            waiting=event.waiting,
            num_preemptions=event.num_preemptions,
            run=event.run,
            lent_s=event.lent_s,
            decoded_tokens=event.decoded_tokens,
        )
        worker = self.fleet.workers.get(event.worker_id)
        if worker is None or worker.run == before:
            return []
        # What still runs there would be sampled by another policy from here on.
        return self._evacuate(event.worker_id, "run", event.at_s)

    def _lost(self, event: WorkerLost) -> list[Action]:
        actions: list[Action] = []
        for item in self.fleet.lost(event.worker_id, event.incarnation, event.reason):
            if not event.forget:
                self.fleet.unreachable(self.fleet.workers[item.worker_id], event.at_s)
            actions.extend(self._evacuate(item.worker_id, item.reason, event.at_s))
        if event.forget:
            self.fleet.forget(event.worker_id)
        self._fleet_shrank()
        return actions

    def _duty(self, event: WorkerDuty) -> list[Action]:
        worker = self.fleet.workers.get(event.worker_id)
        if worker is None:
            raise PolicyError(f"worker {event.worker_id} is not registered", field="worker_id")
        self.fleet.set_duty(worker, event.duty)
        if event.duty is Duty.DRAINING:
            return self._evacuate(event.worker_id, "drain", event.at_s)
        return []

    def _assign(self, event: WorkerAssigned) -> list[Action]:
        worker = self.fleet.workers.get(event.worker_id)
        if worker is None:
            raise PolicyError(f"worker {event.worker_id} is not registered", field="worker_id")
        self.fleet.assign(worker, event.job)
        return []  # what runs there goes on until the engine ends it, with its tokens, for the other job's weights

    def _version(self, event: VersionRequired) -> list[Action]:
        old = self.required.get(event.job)
        if old is not None and event.version < old:
            raise PolicyError(
                f"{format_version(event.version)} is older than {format_version(old)}", field="version"
            )
        self.required[event.job] = event.version
        self.fleet.thaw()
        if event.run == self.runs.get(event.job, ""):
            return []
        self.runs[event.job] = event.run
        return self._leave_runs(event.job, event.at_s)

    def _leave_runs(self, job: str, at_s: float) -> list[Action]:
        """Turns of ``job`` that weights of another run sample, or have sampled, begin anew."""
        run, actions = self.runs[job], list[Action]()
        for worker in [worker for worker in self.fleet if run and worker.run != run]:
            actions.extend(self._evacuate(worker.worker_id, "run", at_s, only_job=job))
        waiting = [turn for turn in self.turns.values() if turn.spec.job == job and turn.worker is None]
        for turn in waiting:
            if self._is_of_another_run(turn):
                actions.extend(self._begin_anew(turn, at_s))
        self.placer.try_again(turn.spec.turn_id for turn in waiting if turn.spec.turn_id in self.turns)
        return actions

    def _evacuate(
        self,
        worker_id: str,
        reason: str,
        at_s: float,
        *,
        only_job: str | None = None,
    ) -> list[Action]:
        """Move every turn from a worker, or only those of ``only_job``."""
        actions: list[Action] = []
        for turn_id in sorted(self._live.get(worker_id, ())):
            turn = self.turns[turn_id]
            if only_job is not None and turn.spec.job != only_job:
                continue
            if reason not in ("drain", "suspect", "restarted", "run"):
                turn.infra_left -= 1
            if turn.infra_left < 0:
                actions.extend(
                    self._finish(
                        turn,
                        at_s,
                        TurnState.FAILED,
                        "infra",
                        message=f"worker {worker_id} was lost ({reason})",
                    )
                )
            else:
                actions.extend(self._requeue(turn, at_s, reason, abort=True))
        return actions

    def _fleet_shrank(self) -> None:
        """Turns pinned to dedicated workers may run anywhere once none of these lives."""
        limit = self.params.pin_after_reclaims
        self.placer.try_again(
            turn_id for _, turn_id, _ in self.queue if self.turns[turn_id].num_reclaims >= limit
        )

    # --- the clock ---------------------------------------------------------------------------------

    def _tick(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        down = self.fleet.tick(at_s)
        for item in down:
            actions.extend(self._evacuate(item.worker_id, item.reason, at_s))
        for worker in list(self.fleet):
            if (
                worker.health is Health.DEAD
                and not self._live.get(worker.worker_id)
                and at_s - worker.heard_at_s > self.params.forget_dead_s
            ):
                self.fleet.forget(worker.worker_id)
        if down:
            self._fleet_shrank()
        if self.fleet.table.any_ends:
            actions.extend(self._return_devices(at_s))
        while self._alarms and self._alarms[0][0] <= at_s:
            turn = self.turns.get(heapq.heappop(self._alarms)[1])
            if turn is not None:
                actions.extend(self._look_at(turn, at_s))
        if self.params.migrate_ratio > 0 and not self.placer.queue:
            actions.extend(self._migrate(at_s))
        return actions

    def _migrate(self, at_s: float) -> list[Action]:
        """Turns that slow engines hold back go on where there is room; see :mod:`rose.policy.migration`."""
        if not self.placer.has_home:
            return []
        away = [
            self.turns[turn_id]
            for worker in self.fleet
            if worker.tier is not Tier.DEDICATED
            for turn_id in sorted(self._live.get(worker.worker_id, ()))
        ]
        actions: list[Action] = []
        for move in to_move(
            away,
            lambda turn: self.placer.homes(turn, at_s),
            self.params,
            at_s,
            [worker for worker in self.fleet if worker.tier is Tier.DEDICATED],
        ):
            turn = move.turn
            assert turn.worker is not None
            turn.stopped_at_s, turn.stopped_for = at_s, move.home.worker_id
            turn.stopped_rest = (move.left, move.here_s)
            actions.append(
                StopAttempt(turn_id=turn.spec.turn_id, attempt=turn.attempt, worker_id=turn.worker.worker_id)
            )
        return actions

    def _return_devices(self, at_s: float) -> list[Action]:
        """Turns leave the borrowed devices that go back."""
        actions, drain_s = list[Action](), self.fleet.params.drain_s
        for worker in [worker for worker in self.fleet if goes_back(worker, at_s, drain_s)]:
            live = [self.turns[turn_id] for turn_id in sorted(self._live.get(worker.worker_id, ()))]
            ask, move = must_leave(live, at_s, drain_s)
            for turn in ask:
                turn.asked_to_leave_s = at_s
                actions.append(
                    StopAttempt(turn_id=turn.spec.turn_id, attempt=turn.attempt, worker_id=worker.worker_id)
                )
            for turn in move:
                actions.extend(self._requeue(turn, at_s, "returned", abort=True))
        return actions

    def upgrade(self) -> None:
        """Complete the state of a decision log from before jobs named runs."""
        if not hasattr(self, "runs"):
            self.runs = self.placer.runs = {}
        if not hasattr(self, "draining"):
            self.draining = self.placer.draining = Draining(self.num_running)
