"""TurnBook: what holds after any sequence of events at all."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rose.errors import PolicyError
from rose.policy import turn_events as te
from rose.policy.fleet import FleetParams
from rose.policy.routing import POLICY_NAMES, make_policy
from rose.policy.stop_reasons import OTHER_RUN, RECLAIMED
from rose.policy.turns import TurnBook
from rose.policy.worker import Duty, Tier
from tests.policy import reference

ASKED = {"reclaim": RECLAIMED, "other run": OTHER_RUN}


class AnySequence(RuleBasedStateMachine):
    """Invariants of the turn book after any sequence of events, in any order, from any engine."""

    @initialize(
        policy=st.sampled_from(POLICY_NAMES),
        plain=st.booleans(),
        running=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4),
    )
    def begin(self, policy: str, plain: bool, running: list[tuple[bool, bool]]) -> None:
        extra = {} if plain else {"longest_first_s": 3.0, "tail_fraction": 0.3, "migrate_ratio": 1.0}
        self.book = TurnBook(
            make_policy(policy, random.Random(0)),
            te.TurnParams(max_queue_s=20.0, stall_s=5.0, **extra),  # type: ignore[arg-type]
            FleetParams(adaptive_cap=not plain),
        )
        self.now_s = 0.0
        self.num_submitted = 0
        self.seqs: dict[str, int] = {}
        self.delivered: dict[str, list[int]] = {}
        self.ends: dict[str, te.TurnEnded] = {}
        self.required = (0, 0)
        self.run = ""
        self.stopped: set[tuple[str, int]] = set()
        self.mend()
        for resumable, streamed in running:
            self.turn(resumable, streamed, 6, "x", None)
            self.feed(te.TokensArrived(at_s=0.0, turn_id=f"n{self.num_submitted}", attempt=1, token_ids=(7,)))

    def feed(self, event: te.Event) -> None:
        try:
            actions = self.book.handle(event)
        except PolicyError:
            return
        for action in actions:
            match action:
                case te.Dispatch():
                    turn = self.book.turns[action.turn_id]
                    worker = self.book.fleet.workers[action.worker_id]
                    assert turn.worker is worker
                    assert worker.may_take_turns
                    assert worker.job in (None, "j")
                    assert not self.run or worker.run == self.run
                    assert {segment.run for segment in turn.segments} <= {worker.run}
                    assert worker.version is not None
                    assert worker.version >= self.required
                    assert worker.inflight <= worker.slots <= worker.cap
                    assert event.at_s <= worker.until_s - self.book.fleet.params.drain_s
                    assert action.num_kept_tokens == len(turn.token_ids)
                    assert action.max_tokens == turn.spec.max_tokens - len(turn.token_ids)
                case te.StopAttempt():
                    turn = self.book.turns[action.turn_id]
                    assert (turn.attempt, turn.worker and turn.worker.worker_id) == (
                        action.attempt,
                        action.worker_id,
                    )
                    assert turn.worker is not None
                    assert turn.worker.tier is not Tier.DEDICATED
                    self.stopped.add((action.turn_id, action.attempt))
                case te.TokensKept():
                    assert isinstance(event, te.TokensArrived)
                    mine = self.delivered.setdefault(action.turn_id, [])
                    assert action.start == len(mine)
                    mine.extend(event.token_ids[: action.num_tokens])
                case te.TokensDropped():
                    self.delivered[action.turn_id] = []
                case te.TurnEnded():
                    assert action.turn_id not in self.ends
                    self.ends[action.turn_id] = action
                    assert list(action.result.token_ids) == self.delivered.get(action.turn_id, [])
                    versions = [span.version for span in action.result.spans]
                    assert versions == sorted(versions)
                case _:
                    pass

    @rule()
    def mend(self) -> None:
        """The whole fleet is well, with the weights that are wanted: else nearly nothing is ever placed."""
        for name, tier in zip("abc", Tier, strict=True):
            if name not in self.book.fleet.workers:
                self.register(name, tier, 2)
            self.feed(te.WorkerDuty(at_s=self.now_s, worker_id=name, duty=Duty.ACTIVE))
            self.feed(te.WorkerAssigned(at_s=self.now_s, worker_id=name, job=None))
            self.beat(name, self.required[1], None, 0, 0, "ready", None, self.run)

    @rule(name=st.sampled_from("abc"), tier=st.sampled_from(list(Tier)), cap=st.integers(1, 3))
    def register(self, name: str, tier: Tier, cap: int) -> None:
        incarnation = str(self.seqs.get(name, 0))
        self.feed(
            te.WorkerRegistered(
                at_s=self.now_s,
                worker_id=name,
                incarnation=incarnation,
                tier=tier,
                model="m",
                max_model_len=60,
                cap=cap,
            )
        )

    @rule(
        name=st.sampled_from("abc"),
        ahead=st.integers(0, 2),
        budget=st.one_of(st.none(), st.integers(20, 80)),
        used=st.integers(0, 100),
        reclaims=st.integers(0, 2),
        state=st.sampled_from(["ready", "ready", "ready", "starting"]),
        lent_s=st.one_of(st.none(), st.floats(0.0, 12.0)),
        run=st.sampled_from(["", "", "r", "s"]),
    )
    def beat(
        self,
        name: str,
        ahead: int,
        budget: int | None,
        used: int,
        reclaims: int,
        state: str,
        lent_s: float | None,
        run: str,
    ) -> None:
        worker = self.book.fleet.workers.get(name)
        if worker is None:
            return
        self.seqs[name] = self.seqs.get(name, 0) + 1
        version = max(worker.version or (0, 0), (0, ahead))
        self.feed(
            te.WorkerHeartbeat(
                at_s=self.now_s,
                worker_id=name,
                incarnation=worker.incarnation,
                seq=worker.seq + 1,
                version=version,
                state=state,
                kv_budget_tokens=budget,
                kv_used_tokens=used,
                reclaim_seq=worker.reclaim_seq + (reclaims == 2),
                num_preemptions=used // 50,
                lent_s=lent_s,
                decoded_tokens=None if budget is None else used,
                run=run,
            )
        )

    @rule(
        resumable=st.booleans(),
        streamed=st.booleans(),
        max_tokens=st.integers(1, 6),
        trajectory=st.sampled_from("xyz"),
        group=st.sampled_from([None, "g"]),
    )
    def turn(
        self, resumable: bool, streamed: bool, max_tokens: int, trajectory: str, group: str | None
    ) -> None:
        self.num_submitted += 1
        self.feed(
            te.TurnSubmitted(
                at_s=self.now_s,
                turn_id=f"n{self.num_submitted}",
                trajectory_id=trajectory,
                job="j",
                model="m",
                group_id=group,
                num_prompt_tokens=10,
                max_tokens=max_tokens,
                resumable=resumable,
                streamed=streamed,
            )
        )

    def some_attempt(self, data: st.DataObject) -> tuple[str, int] | None:
        if not self.num_submitted:
            return None
        live = [name for name, turn in self.book.turns.items() if turn.worker is not None]
        if live and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(live))
            return name, self.book.turns[name].attempt
        name = f"n{data.draw(st.integers(max(1, self.num_submitted - 8), self.num_submitted))}"
        turn = self.book.turns.get(name)
        latest = turn.attempt if turn is not None else 1
        return name, max(1, latest - data.draw(st.sampled_from([0, 0, 0, 1])))

    @rule(data=st.data(), ids=st.lists(st.integers(0, 99), min_size=1, max_size=3))
    def output(self, data: st.DataObject, ids: list[int]) -> None:
        found = self.some_attempt(data)
        if found is not None:
            self.feed(
                te.TokensArrived(at_s=self.now_s, turn_id=found[0], attempt=found[1], token_ids=tuple(ids))
            )

    @rule(
        data=st.data(),
        how=st.sampled_from(["stop", "length", "abort", "reclaim", "other run"]),
        newer=st.booleans(),
        stamp=st.sampled_from(["as believed", "as believed", None, "s"]),
    )
    def finish(self, data: st.DataObject, how: str, newer: bool, stamp: str | None) -> None:
        found = self.some_attempt(data)
        if found is None:
            return
        turn = self.book.turns.get(found[0])
        count = 0 if turn is None else len(turn.token_ids) - turn.attempt_start
        spans: tuple[te.Span, ...] = ()
        if turn is not None and turn.dispatch_version is not None and count and newer:
            later = (turn.dispatch_version[0], turn.dispatch_version[1] + 1)
            spans = (te.Span(version=later, start=0, num_tokens=count),)
        self.feed(
            te.AttemptEnded(
                at_s=self.now_s,
                turn_id=found[0],
                attempt=found[1],
                finish_reason="abort" if how in ASKED else how,
                stop_reason=ASKED.get(how),
                versions=spans,
                run=turn.dispatch_run if turn is not None and stamp == "as believed" else stamp,
            )
        )

    @precondition(lambda self: self.stopped)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 99), max_size=3))
    def stop(self, data: st.DataObject, ids: list[int]) -> None:
        """An engine answers what it was asked to stop; perhaps late."""
        turn_id, attempt = data.draw(st.sampled_from(sorted(self.stopped)))
        self.stopped.discard((turn_id, attempt))
        self.feed(te.TokensArrived(at_s=self.now_s, turn_id=turn_id, attempt=attempt, token_ids=tuple(ids)))
        self.feed(te.AttemptEnded(at_s=self.now_s, turn_id=turn_id, attempt=attempt, finish_reason="abort"))

    @rule(data=st.data(), kind=st.sampled_from(["lost", "busy", "bad", "data"]))
    def fail(self, data: st.DataObject, kind: str) -> None:
        found = self.some_attempt(data)
        if found is not None:
            self.feed(
                te.AttemptFailed(
                    at_s=self.now_s, turn_id=found[0], attempt=found[1], kind=kind, message="told to"
                )
            )

    @rule(name=st.sampled_from("abc"), forget=st.booleans())
    def lose(self, name: str, forget: bool) -> None:
        self.feed(te.WorkerLost(at_s=self.now_s, worker_id=name, reason="lost", forget=forget))

    @rule(name=st.sampled_from("abc"), duty=st.sampled_from(list(Duty)))
    def duty(self, name: str, duty: Duty) -> None:
        self.feed(te.WorkerDuty(at_s=self.now_s, worker_id=name, duty=duty))

    @rule(name=st.sampled_from("abc"), job=st.sampled_from(["j", "j", None, "other"]))
    def assign(self, name: str, job: str | None) -> None:
        self.feed(te.WorkerAssigned(at_s=self.now_s, worker_id=name, job=job))

    @rule(step=st.sampled_from([0.1, 0.3, 0.7, 2.0]))
    def time(self, step: float) -> None:
        self.now_s += step
        self.feed(te.ClockTicked(at_s=self.now_s))

    @rule(data=st.data(), what=st.sampled_from(["gone", "back", "cancel", "stopped"]))
    def client(self, data: st.DataObject, what: str) -> None:
        found = self.some_attempt(data)
        if found is None:
            return
        event: te.Event
        match what:
            case "gone":
                event = te.ClientGone(at_s=self.now_s, turn_id=found[0])
            case "back":
                event = te.ClientBack(at_s=self.now_s, turn_id=found[0])
            case "cancel":
                event = te.TurnCancelled(at_s=self.now_s, turn_id=found[0], reason="test")
            case _:
                event = te.TurnStopped(at_s=self.now_s, turn_id=found[0], stop_reason="x")
        self.feed(event)

    @precondition(lambda self: self.required < (0, 2))
    @rule()
    def publish(self) -> None:
        self.required = (0, self.required[1] + 1)
        self.feed(te.VersionRequired(at_s=self.now_s, job="j", version=self.required, run=self.run))

    @rule(run=st.sampled_from(["", "r", "s"]))
    def take_over(self, run: str) -> None:
        """The job is another trainer's from here on."""
        self.run = run
        self.feed(te.VersionRequired(at_s=self.now_s, job="j", version=self.required, run=run))

    @invariant()
    def books_hold(self) -> None:
        if hasattr(self, "book"):
            self.book.check()
            # Nothing is lost: every accepted turn is running or has ended, never both.
            assert not set(self.book.turns) & set(self.ends)
            waiting = [t for t in self.book.turns.values() if t.state is te.TurnState.QUEUED]
            for turn in waiting:  # and none waits while a worker has room for it
                for worker in self.book.fleet:
                    if reference.eligible(self.book, turn, worker, self.now_s):
                        assert turn.hold == "policy"  # only a policy that declines may leave it there


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
