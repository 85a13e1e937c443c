"""TurnBook: where turns go, what happens when engines cut, die or lie, and what holds after anything at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rose.errors import PolicyError
from rose.policy import turn_events as te
from rose.policy.fleet import Duty, FleetParams, Tier
from rose.policy.routing import POLICY_NAMES, make_policy
from rose.policy.turns import RECLAIMED, TurnBook
from tests.scheduler import reference


def book_of(
    policy: str = "sticky_least_loaded", *, fleet: FleetParams | None = None, **params: Any
) -> TurnBook:
    return TurnBook(make_policy(policy, random.Random(0)), te.TurnParams(**params), fleet or FleetParams())


@pytest.fixture
def book() -> Iterator[TurnBook]:
    """Workers ``d`` (dedicated) and ``h`` (harvested), both ready at version 1.0; books checked at the end."""
    book = book_of()
    join(book, "d", Tier.DEDICATED)
    join(book, "h", Tier.HARVESTED)
    yield book
    book.check()


_seq = {"n": 0}


def join(
    book: TurnBook, name: str, tier: Tier, at_s: float = 0.0, incarnation: str = "1", **beat: Any
) -> None:
    book.handle(
        te.WorkerRegistered(
            at_s=at_s, worker_id=name, incarnation=incarnation, tier=tier, model="m", max_model_len=1000
        )
    )
    hear(book, name, at_s, incarnation=incarnation, **beat)


def hear(book: TurnBook, name: str, at_s: float, **fields: Any) -> list[te.Action]:
    _seq["n"] += 1
    beat = {"incarnation": "1", "seq": _seq["n"], "version": (1, 0), "state": "ready", **fields}
    return book.handle(te.WorkerHeartbeat(at_s=at_s, worker_id=name, **beat))


def submit(book: TurnBook, name: str, at_s: float = 0.0, **fields: Any) -> list[te.Action]:
    spec = {"trajectory_id": f"t-{name}", "job": "j", "model": "m", "num_prompt_tokens": 10, "max_tokens": 8}
    return book.handle(te.TurnSubmitted(at_s=at_s, turn_id=name, **{**spec, **fields}))


def tokens(book: TurnBook, name: str, attempt: int, *ids: int, at_s: float = 0.1) -> list[te.Action]:
    return book.handle(
        te.TokensArrived(
            at_s=at_s, turn_id=name, attempt=attempt, token_ids=ids, logprobs=tuple(-float(i) for i in ids)
        )
    )


def end(
    book: TurnBook, name: str, attempt: int, reason: str = "stop", at_s: float = 0.2, **fields: Any
) -> Any:
    return book.handle(
        te.AttemptEnded(at_s=at_s, turn_id=name, attempt=attempt, finish_reason=reason, **fields)
    )


def dispatches(actions: list[te.Action]) -> list[te.Dispatch]:
    return [action for action in actions if isinstance(action, te.Dispatch)]


def ended(actions: list[te.Action]) -> te.TurnEnded:
    (found,) = [action for action in actions if isinstance(action, te.TurnEnded)]
    return found


def test_reclaimed_turn_continues_on_another_worker_with_its_tokens(book: TurnBook) -> None:
    (first,) = dispatches(submit(book, "a", dedicated_only=False))
    tokens(book, "a", 1, 5, 6, 7)
    (second,) = dispatches(end(book, "a", 1, "abort", stop_reason=RECLAIMED))
    assert second.worker_id != first.worker_id
    assert (second.attempt, second.num_kept_tokens, second.max_tokens) == (2, 3, 5)
    tokens(book, "a", 2, 8, at_s=0.3)
    done = ended(end(book, "a", 2, at_s=0.4))
    assert done.outcome is te.TurnState.DONE
    assert done.result.token_ids == (5, 6, 7, 8)
    assert done.result.logprobs == (-5.0, -6.0, -7.0, -8.0)
    assert [(s.attempt, s.start, s.num_tokens) for s in done.result.segments] == [(1, 0, 3), (2, 3, 1)]


def test_a_late_result_of_a_replaced_attempt_changes_nothing(book: TurnBook) -> None:
    (first,) = dispatches(submit(book, "a"))
    actions = book.handle(te.WorkerLost(at_s=0.1, worker_id=first.worker_id, reason="lost"))
    assert te.AbortAttempt(turn_id="a", attempt=1, worker_id=first.worker_id) in actions
    assert tokens(book, "a", 1, 9, 9) == [te.Fenced(turn_id="a", attempt=1, num_tokens=2)]
    assert end(book, "a", 1)[0] == te.Fenced(turn_id="a", attempt=1, num_tokens=0)
    tokens(book, "a", 2, 4, at_s=0.3)
    assert ended(end(book, "a", 2, at_s=0.4)).result.token_ids == (4,)


def test_a_turn_that_cannot_be_resumed_restarts_from_its_prompt(book: TurnBook) -> None:
    submit(book, "a", resumable=False)
    tokens(book, "a", 1, 5, 6)
    actions = end(book, "a", 1, "abort", stop_reason=RECLAIMED)
    assert te.TokensDropped(turn_id="a", num_tokens=2) in actions
    (second,) = dispatches(actions)
    assert (second.num_kept_tokens, second.max_tokens) == (0, 8)


def test_engine_version_spans_replace_the_version_at_dispatch(book: TurnBook) -> None:
    submit(book, "a")
    tokens(book, "a", 1, 5, 6, 7)
    spans = (te.Span(version=(1, 0), start=0, num_tokens=1), te.Span(version=(1, 1), start=1, num_tokens=2))
    assert ended(end(book, "a", 1, versions=spans)).result.spans == spans


def test_version_spans_that_do_not_fit_are_ignored(book: TurnBook) -> None:
    submit(book, "a")
    tokens(book, "a", 1, 5, 6, 7)
    gap = (te.Span(version=(9, 9), start=1, num_tokens=2),)
    result = ended(end(book, "a", 1, versions=gap)).result
    assert result.spans == (te.Span(version=(1, 0), start=0, num_tokens=3),)


def test_workers_below_the_required_version_take_no_new_turn(book: TurnBook) -> None:
    book.handle(te.VersionRequired(at_s=0.0, job="j", version=(1, 1)))
    assert dispatches(submit(book, "a")) == []
    assert book.turns["a"].hold == "weights"
    (sent,) = dispatches(hear(book, "h", 0.1, version=(1, 1)))
    assert sent.worker_id == "h"


def test_other_jobs_are_not_held_back_by_a_version(book: TurnBook) -> None:
    book.handle(te.VersionRequired(at_s=0.0, job="other", version=(1, 1)))
    assert len(dispatches(submit(book, "a"))) == 1


def test_a_turn_never_goes_back_to_older_weights(book: TurnBook) -> None:
    assert dispatches(submit(book, "a", min_version=(1, 5))) == []
    (sent,) = dispatches(hear(book, "d", 0.1, version=(1, 5)))
    assert sent.worker_id == "d"


def test_a_cut_turn_does_not_continue_on_older_weights(book: TurnBook) -> None:
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="h", duty=Duty.CORDONED))
    submit(book, "a")
    tokens(book, "a", 1, 5)
    book.handle(te.WorkerDuty(at_s=0.1, worker_id="h", duty=Duty.ACTIVE))
    newer = (te.Span(version=(1, 1), start=0, num_tokens=1),)
    assert dispatches(end(book, "a", 1, "abort", stop_reason=RECLAIMED, versions=newer)) == []
    assert dispatches(hear(book, "h", 0.3, version=(1, 0))) == []
    (sent,) = dispatches(hear(book, "h", 0.4, version=(1, 1)))
    assert sent.worker_id == "h"


def test_silence_makes_suspect_then_dead(book: TurnBook) -> None:
    submit(book, "a", dedicated_only=True)
    for at_s in (0.5, 1.0, 1.5):
        book.handle(te.ClockTicked(at_s=at_s))
        hear(book, "h", at_s)
    assert dispatches(book.handle(te.ClockTicked(at_s=2.1))) == []
    assert book.fleet.workers["d"].health == "suspect"
    assert book.turns["a"].state is te.TurnState.DISPATCHED  # a dedicated worker is waited for
    for at_s in range(3, 10):
        hear(book, "h", float(at_s))
        book.handle(te.ClockTicked(at_s=float(at_s)))
    hear(book, "h", 9.9)
    actions = book.handle(te.ClockTicked(at_s=10.0))
    assert te.Requeued(turn_id="a", worker_id="d", reason="silent", num_kept_tokens=0) in actions


def test_turns_leave_a_silent_harvested_worker_at_once(book: TurnBook) -> None:
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.CORDONED))
    submit(book, "a")
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.ACTIVE))
    for at_s in (0.5, 1.0, 1.5, 2.0):
        hear(book, "d", at_s)
        actions = book.handle(te.ClockTicked(at_s=at_s))
    assert te.Requeued(turn_id="a", worker_id="h", reason="suspect", num_kept_tokens=0) in actions
    (second,) = dispatches(actions)
    assert second.worker_id == "d"


def test_our_own_pause_is_not_held_against_the_workers(book: TurnBook) -> None:
    book.handle(te.ClockTicked(at_s=0.1))
    book.handle(te.ClockTicked(at_s=60.0))  # this process was stopped for a minute
    assert {worker.health for worker in book.fleet} == {"ready"}


def test_a_fleet_that_falls_silent_together_is_not_demoted() -> None:
    book = book_of()
    for index in range(5):
        join(book, f"w{index}", Tier.DEDICATED)
    at_s = 0.0
    while at_s < 29.0:
        at_s += 0.5
        book.handle(te.ClockTicked(at_s=at_s))
        hear(book, "w0", at_s)
    assert {worker.health for worker in book.fleet} == {"ready"}
    book.handle(te.ClockTicked(at_s=29.8))
    book.handle(te.ClockTicked(at_s=30.6))
    assert book.fleet.workers["w1"].health == "dead"


def test_a_dead_worker_returns_only_with_a_version(book: TurnBook) -> None:
    book.handle(te.WorkerLost(at_s=0.1, worker_id="d", reason="lost"))
    hear(book, "d", 0.2, version=None)
    assert book.fleet.workers["d"].health == "dead"
    hear(book, "d", 0.3)
    assert book.fleet.workers["d"].health == "ready"


def test_reclaim_blocks_new_turns_until_use_is_inside_the_budget(book: TurnBook) -> None:
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.CORDONED))
    hear(book, "h", 0.1, reclaim_seq=1, kv_budget_tokens=100, kv_used_tokens=150)
    assert dispatches(submit(book, "a", at_s=0.2)) == []
    (sent,) = dispatches(hear(book, "h", 0.3, reclaim_seq=1, kv_budget_tokens=100, kv_used_tokens=50))
    assert sent.worker_id == "h"
    assert book.fleet.workers["h"].lending == "frozen"
    book.handle(te.VersionRequired(at_s=0.4, job="j", version=(1, 0)))
    assert book.fleet.workers["h"].lending == "open"


def test_kv_room_is_reserved_and_given_back(book: TurnBook) -> None:
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.CORDONED))
    hear(book, "h", 0.0, kv_budget_tokens=30)
    assert len(dispatches(submit(book, "a"))) == 1  # 10 + 8 of 30
    assert dispatches(submit(book, "b")) == []
    assert book.fleet.workers["h"].reserved_tokens == 18
    (sent,) = dispatches(end(book, "a", 1))
    assert sent.turn_id == "b"


def test_a_turn_that_was_cut_three_times_waits_for_a_dedicated_worker(book: TurnBook) -> None:
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.CORDONED))
    submit(book, "a")
    at_s = 0.0
    for attempt in (1, 2, 3):
        at_s += 10.0
        hear(book, "d", at_s)
        hear(book, "h", at_s)
        book.handle(te.ClockTicked(at_s=at_s))
        end(book, "a", attempt, "abort", at_s=at_s, stop_reason=RECLAIMED)
    at_s += 10.0
    hear(book, "h", at_s)
    assert book.turns["a"].hold == "pinned"
    (sent,) = dispatches(book.handle(te.WorkerDuty(at_s=at_s, worker_id="d", duty=Duty.ACTIVE)))
    assert sent.worker_id == "d"


def test_resumed_turns_go_first(book: TurnBook) -> None:
    for worker in book.fleet:
        worker.cap = 1
    submit(book, "a")
    submit(book, "b")
    submit(book, "c", at_s=0.1)
    actions = book.handle(te.WorkerLost(at_s=0.2, worker_id=book.turns["a"].worker.worker_id, reason="lost"))  # type: ignore[union-attr]
    assert dispatches(actions) == []
    (sent,) = dispatches(end(book, "b", 1, at_s=0.3))
    assert sent.turn_id == "a"


def test_infrastructure_failures_have_a_budget(book: TurnBook) -> None:
    submit(book, "a")
    at_s = 0.0
    actions: list[te.Action] = []
    for attempt in range(1, 7):
        at_s += 20.0
        for name in ("d", "h"):
            hear(book, name, at_s)
        actions = book.handle(
            te.AttemptFailed(at_s=at_s, turn_id="a", attempt=attempt, kind="lost", message="boom")
        )
        if attempt < 6:
            hear(book, "d", at_s + 10)
    assert (ended(actions).outcome, ended(actions).reason) == (te.TurnState.FAILED, "infra")


def test_a_deterministic_refusal_fails_the_turn_at_once(book: TurnBook) -> None:
    submit(book, "a")
    actions = book.handle(te.AttemptFailed(at_s=0.1, turn_id="a", attempt=1, kind="data", message="too long"))
    assert (ended(actions).reason, ended(actions).message) == ("data", "too long")


def test_waiting_too_long_answers_503_and_keeps_the_place() -> None:
    book = book_of(max_queue_s=5.0, detach_s=30.0)
    submit(book, "a")
    assert book.handle(te.ClockTicked(at_s=4.9)) == []
    assert book.handle(te.ClockTicked(at_s=5.0)) == [te.AnswerUnavailable(turn_id="a", waited_s=5.0)]
    book.handle(te.ClientBack(at_s=8.0, turn_id="a"))
    book.handle(te.ClockTicked(at_s=36.0))
    assert "a" in book.turns


def test_an_abandoned_turn_is_cancelled_after_a_while(book: TurnBook) -> None:
    submit(book, "a")
    book.handle(te.ClientGone(at_s=0.1, turn_id="a"))
    for at_s in range(1, 30):
        for name in ("d", "h"):
            hear(book, name, float(at_s))
        book.handle(te.ClockTicked(at_s=float(at_s)))
    actions = book.handle(te.ClockTicked(at_s=30.2))
    assert any(isinstance(action, te.AbortAttempt) for action in actions)
    assert (ended(actions).outcome, ended(actions).reason) == (te.TurnState.CANCELLED, "client_gone")


def test_a_stalled_stream_moves_unless_its_engine_is_gated() -> None:
    book = book_of(stall_s=3.0)
    join(book, "d", Tier.DEDICATED)
    submit(book, "a", streamed=True)
    for at_s in (1.0, 2.0, 3.0):
        hear(book, "d", at_s, gated=True)
        assert not any(isinstance(a, te.Requeued) for a in book.handle(te.ClockTicked(at_s=at_s)))
    hear(book, "d", 3.5, gated=False)
    actions = book.handle(te.ClockTicked(at_s=3.6))
    assert te.Requeued(turn_id="a", worker_id="d", reason="stall", num_kept_tokens=0) in actions


def test_first_turns_of_a_group_share_a_worker_up_to_half_its_cap_then_spread() -> None:
    book = TurnBook(make_policy("cost", random.Random(0)), te.TurnParams(), FleetParams(cap_harvested=16))
    for index in range(4):
        join(book, f"h{index}", Tier.HARVESTED)
    sent = [
        dispatches(submit(book, f"n{index}", group_id="g", num_prompt_tokens=500))[0].worker_id
        for index in range(12)
    ]
    assert len(set(sent[:8])) == 1  # half of 16: eight read the prompt once
    assert sent[8] != sent[0]


def test_a_resumed_turn_goes_before_those_that_only_waited() -> None:
    book = book_of()
    book.handle(
        te.WorkerRegistered(
            at_s=0.0,
            worker_id="d",
            incarnation="1",
            tier=Tier.DEDICATED,
            model="m",
            max_model_len=1000,
            cap=1,
        )
    )
    hear(book, "d", 0.0)
    submit(book, "old")
    submit(book, "waits", at_s=0.1)
    end(book, "old", 1, "abort", at_s=0.2, stop_reason=RECLAIMED)
    submit(book, "new", at_s=0.3)
    assert [turn_id for _, turn_id in book.queue] == ["old", "new"]
    assert book.turns["waits"].worker is not None  # "old" backs off from the worker that cut it


def history(book: TurnBook, lengths: list[int]) -> None:
    """Trajectories of so many tokens that ended at time 0."""
    for index, num_tokens in enumerate(lengths):
        book.remaining.made(f"old{index}", "j", num_tokens)
        book.handle(te.TrajectoryClosed(at_s=0.0, trajectory_id=f"old{index}"))


def test_the_longest_expected_rest_goes_first_but_age_wins_in_the_end() -> None:
    book = book_of(longest_first_s=5.0)
    history(book, [100] * 60 + [1000] * 20)
    book.remaining.made("t-long", "j", 200)
    for index, name in enumerate(("a", "b", "c")):
        submit(book, name, at_s=float(index))
    submit(book, "long", at_s=4.0)
    submit(book, "late", at_s=6.0, trajectory_id="t-long")
    # Worth 5 s and 3.75 s of age (three of four estimates are smaller): as if from -1 s and 2.25 s.
    assert [turn_id for _, turn_id in book.queue] == ["long", "a", "b", "c", "late"]


def test_the_oldest_group_goes_first_but_a_later_turn_overtakes_by_no_more_than_the_bound() -> None:
    book = book_of(oldest_first_s=5.0)
    submit(book, "old-1", at_s=0.0, group_id="old")
    submit(book, "young-1", at_s=3.0, group_id="young")
    submit(book, "old-2", at_s=4.0, group_id="old")
    submit(book, "lone", at_s=4.5, group_id=None)
    submit(book, "old-3", at_s=9.0, group_id="old")
    # As if from 0 s, 3 s, 0 s, 4.5 s, and 9 - 5 = 4 s.
    assert [turn_id for _, turn_id in book.queue] == ["old-1", "old-2", "young-1", "old-3", "lone"]


def test_in_a_full_fleet_a_turn_waits_a_moment_for_a_slot_where_its_prefix_is() -> None:
    """Two workers of one slot: `x` has run on `a`, whose slot `p` holds; then `b` opens."""

    def until_b_opens(**params: float) -> tuple[TurnBook, list[str]]:
        book = book_of(fleet=FleetParams(cap_dedicated=1), **params)
        join(book, "a", Tier.DEDICATED)
        submit(book, "x", at_s=0.0)
        tokens(book, "x", 1, 5, at_s=0.0)
        end(book, "x", 1, at_s=0.0)
        submit(book, "p", at_s=0.0)
        submit(book, "x2", at_s=1.0, trajectory_id="t-x")
        submit(book, "new", at_s=1.1)
        book.handle(
            te.WorkerRegistered(
                at_s=1.2, worker_id="b", incarnation="1", tier=Tier.DEDICATED, model="m", max_model_len=1000
            )
        )
        return book, [sent.turn_id for sent in dispatches(hear(book, "b", 1.2))]

    assert until_b_opens()[1] == ["x2"]  # the oldest, though it reads its prompt again
    book, first = until_b_opens(affine_wait_s=0.5)
    assert first == ["new"]
    (sent,) = dispatches(end(book, "p", 1, at_s=1.3))
    assert (sent.turn_id, sent.worker_id) == ("x2", "a")

    book, _ = until_b_opens(affine_wait_s=0.5)
    end(book, "new", 1, at_s=1.4)  # `b` is free again, and only `x2` waits: it need not
    assert book.turns["x2"].worker is not None

    book, _ = until_b_opens(affine_wait_s=0.5)
    submit(book, "newer", at_s=1.3)
    end(book, "new", 1, at_s=1.6)  # it has waited long enough
    assert book.turns["x2"].worker is not None
    assert book.turns["newer"].worker is None


def test_groups_of_two_jobs_are_not_mistaken_for_each_other() -> None:
    book = book_of(oldest_first_s=60.0)
    submit(book, "a", at_s=0.0, job="j", group_id="g")
    submit(book, "b", at_s=1.0, job="k", group_id="x")
    submit(book, "c", at_s=2.0, job="k", group_id="g")
    assert [turn_id for _, turn_id in book.queue] == ["a", "b", "c"]


def test_what_is_expected_of_a_turn_is_learned_per_kind_of_task() -> None:
    book = book_of()
    join(book, "d", Tier.DEDICATED)

    def expected(name: str, num_prompt: int = 600, **fields: Any) -> int:
        submit(book, name, at_s=1.0, num_prompt_tokens=num_prompt, max_tokens=300, **fields)
        return book.turns[name].expected_tokens

    assert expected("first") == book.params.expected_tokens  # nothing is known
    assert expected("ratio", task_kind="maths", prefill_per_decode=6.0) == 100
    tokens(book, "ratio", 1, *range(40), at_s=1.0)
    end(book, "ratio", 1, at_s=1.0)
    assert expected("seen", task_kind="maths", prefill_per_decode=6.0) == 40
    assert expected("other", task_kind="games") == book.params.expected_tokens
    # Only what the cache lacks is new: 640 of 700 tokens are where the trajectory ran before.
    assert expected("next", 700, task_kind="games", prefill_per_decode=6.0, trajectory_id="t-ratio") == 10


def test_a_tail_turn_takes_a_dedicated_worker_when_one_is_free() -> None:
    book = book_of("random", tail_fraction=0.2)
    history(book, [100] * 60 + [1000] * 20)
    join(book, "d", Tier.DEDICATED)
    for index in range(9):
        join(book, f"h{index}", Tier.HARVESTED)
    for index in range(20):
        submit(book, f"short{index}")
    for index in range(5):
        book.remaining.made(f"t-long{index}", "j", 200)
        (sent,) = dispatches(submit(book, f"long{index}"))
        assert sent.worker_id == "d"
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.CORDONED))
    book.remaining.made("t-more", "j", 200)
    assert dispatches(submit(book, "more")) != []  # anywhere rather than nowhere


def test_a_full_cache_lowers_what_a_worker_gets() -> None:
    book = TurnBook(make_policy("random", random.Random(0)), te.TurnParams(), FleetParams(adaptive_cap=True))
    join(book, "d", Tier.DEDICATED, kv_budget_tokens=100_000)
    for index in range(40):
        submit(book, f"n{index}")
    hear(book, "d", 1.0, kv_budget_tokens=100_000, kv_used_tokens=95_000)
    assert book.fleet.workers["d"].slots == 29  # 40 * 0.7 / 0.95
    assert dispatches(submit(book, "more", at_s=1.0)) == []
    assert book.turns["more"].hold == "capacity"


def test_drain_moves_turns_without_blame(book: TurnBook) -> None:
    (first,) = dispatches(submit(book, "a"))
    actions = book.handle(te.WorkerDuty(at_s=0.1, worker_id=first.worker_id, duty=Duty.DRAINING))
    (second,) = dispatches(actions)
    assert second.worker_id != first.worker_id
    assert book.turns["a"].infra_left == book.params.infra_budget


def test_a_device_given_to_another_job_lets_go_of_the_first_ones_turns(book: TurnBook) -> None:
    (first,) = dispatches(submit(book, "a"))
    other = "h" if first.worker_id == "d" else "d"
    actions = book.handle(te.WorkerAssigned(at_s=0.1, worker_id=first.worker_id, job="k"))
    assert te.AbortAttempt(turn_id="a", attempt=1, worker_id=first.worker_id) in actions
    assert [item.worker_id for item in dispatches(actions)] == [other]
    assert book.turns["a"].infra_left == book.params.infra_budget
    book.handle(te.WorkerAssigned(at_s=0.2, worker_id=other, job=""))
    assert book.turns["a"].state is te.TurnState.QUEUED
    (again,) = dispatches(book.handle(te.WorkerAssigned(at_s=0.3, worker_id=other, job=None)))
    assert again.worker_id == other


def test_affinity_is_to_what_is_resident_and_a_cut_ends_it(book: TurnBook) -> None:
    (first,) = dispatches(submit(book, "a", trajectory_id="t"))
    tokens(book, "a", 1, 1, 2)
    end(book, "a", 1)
    worker, resident = book.affinity.where("t")
    assert (worker is not None and worker.worker_id, resident) == (first.worker_id, 12)
    hear(book, first.worker_id, 0.3, reclaim_seq=1)
    assert book.affinity.where("t")[1] == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_places_turns_and_keeps_the_books(policy: str) -> None:
    book = book_of(policy)
    for index in range(3):
        join(book, f"w{index}", Tier.DEDICATED if index else Tier.HARVESTED)
    sent = [dispatches(submit(book, f"n{index}"))[0].worker_id for index in range(9)]
    book.check()
    assert len(set(sent)) > 1


def test_illegal_events_raise_and_change_nothing(book: TurnBook) -> None:
    submit(book, "a", at_s=5.0)
    before = (dict(book.turns), list(book.queue), book.turns["a"].attempt)
    with pytest.raises(PolicyError, match="already running"):
        submit(book, "a", at_s=5.0)
    with pytest.raises(PolicyError, match="time went back"):
        submit(book, "b", at_s=4.0)
    with pytest.raises(PolicyError, match="not running"):
        book.handle(te.TurnCancelled(at_s=5.0, turn_id="ghost", reason="x"))
    with pytest.raises(PolicyError, match="not registered"):
        book.handle(te.WorkerDuty(at_s=5.0, worker_id="ghost", duty=Duty.ACTIVE))
    with pytest.raises(PolicyError, match="room for one token"):
        submit(book, "b", at_s=5.0, max_tokens=0)
    assert before == (dict(book.turns), list(book.queue), book.turns["a"].attempt)


def test_the_queue_is_bounded() -> None:
    book = book_of(max_queued=2)
    submit(book, "a")
    submit(book, "b")
    with pytest.raises(PolicyError, match="queued already"):
        submit(book, "c")
    assert len(book.queue) == 2


class AnySequence(RuleBasedStateMachine):
    """Invariants of the turn book after any sequence of events, in any order, from any engine."""

    @initialize(policy=st.sampled_from(POLICY_NAMES), plain=st.booleans())
    def begin(self, policy: str, plain: bool) -> None:
        extra = {} if plain else {"longest_first_s": 3.0, "tail_fraction": 0.3}
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
                    assert worker.version is not None
                    assert worker.version >= self.required
                    assert worker.inflight <= worker.slots <= worker.cap
                    assert action.num_kept_tokens == len(turn.token_ids)
                    assert action.max_tokens == turn.spec.max_tokens - len(turn.token_ids)
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
    )
    def beat(self, name: str, ahead: int, budget: int | None, used: int, reclaims: int, state: str) -> None:
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

    @rule(data=st.data(), how=st.sampled_from(["stop", "length", "abort", "reclaim"]), newer=st.booleans())
    def finish(self, data: st.DataObject, how: str, newer: bool) -> None:
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
                finish_reason="abort" if how == "reclaim" else how,
                stop_reason=RECLAIMED if how == "reclaim" else None,
                versions=spans,
            )
        )

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
        self.feed(te.VersionRequired(at_s=self.now_s, job="j", version=self.required))

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
