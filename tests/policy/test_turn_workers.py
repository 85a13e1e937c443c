"""TurnBook: silence, memory, drains and devices that change hands; who holds what."""

from __future__ import annotations

import random

import pytest

from rose.policy import turn_events as te
from rose.policy.fleet import FleetParams
from rose.policy.routing import POLICY_NAMES, make_policy
from rose.policy.stop_reasons import OTHER_RUN
from rose.policy.turns import TurnBook
from rose.policy.worker import Duty, Tier
from tests.policy.turn_kit import book_of, dispatches, end, hear, join, submit, tokens


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
    assert book.turns["b"].hold == "memory", "a slot is free, the worker is not full"
    assert book.fleet.workers["h"].reserved_tokens == 18
    (sent,) = dispatches(end(book, "a", 1))
    assert sent.turn_id == "b"


def test_why_a_turn_waits_beside_idle_engines_is_said_as_it_is(book: TurnBook) -> None:
    """That all engines were full was said of one that was cordoned, and beside one of another run."""
    for name in ("d", "h"):
        book.handle(te.WorkerDuty(at_s=0.0, worker_id=name, duty=Duty.CORDONED))
    submit(book, "a")
    (said,) = [
        each for each in book.handle(te.ClockTicked(at_s=400.0)) if isinstance(each, te.AnswerUnavailable)
    ]
    assert said.hold == "closed"
    assert set(te.HOLDS) >= {"closed", "memory", "capacity"}


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


def test_a_device_given_to_another_job_takes_no_new_turn_and_loses_no_token_of_what_runs(
    book: TurnBook,
) -> None:
    """Its engine ends them when the other job's weights come in, with what they have; an abort would lose that."""
    (first,) = dispatches(submit(book, "a"))
    other = "h" if first.worker_id == "d" else "d"
    assert book.handle(te.WorkerAssigned(at_s=0.1, worker_id=first.worker_id, job="k")) == []
    assert [item.worker_id for item in dispatches(submit(book, "b", at_s=0.2))] == [other]

    ended = end(book, "a", 1, "abort", token_ids=(1, 2, 3), at_s=0.3, stop_reason=OTHER_RUN)

    assert [item.worker_id for item in dispatches(ended)] == [other]
    assert len(book.turns["a"].token_ids) == 3
    assert book.turns["a"].infra_left == book.params.infra_budget
    book.handle(te.WorkerAssigned(at_s=0.4, worker_id=first.worker_id, job=""))
    book.handle(te.WorkerAssigned(at_s=0.4, worker_id=other, job=""))
    submit(book, "c", at_s=0.5)
    assert book.turns["c"].state is te.TurnState.QUEUED
    (again,) = dispatches(book.handle(te.WorkerAssigned(at_s=0.6, worker_id=other, job=None)))
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


def failing(book: TurnBook, name: str, at_s: float) -> None:
    """A turn of this name fails on whichever worker it is."""
    turn = book.turns[name]
    book.handle(
        te.AttemptFailed(at_s=at_s, turn_id=name, attempt=turn.attempt, kind="lost", message="status 500")
    )


def test_an_engine_that_fails_every_request_is_left_alone_however_well_it_says_it_is() -> None:
    book = book_of(fleet=FleetParams(rest_after_failures=3, rest_s=2.0), backoff_s=0.0)
    join(book, "d", Tier.DEDICATED)
    worker = book.fleet.workers["d"]
    for number in range(3):
        submit(book, f"x{number}", at_s=0.1)
        failing(book, f"x{number}", 0.1)
        book.handle(te.TurnCancelled(at_s=0.1, turn_id=f"x{number}", reason="test"))
    hear(book, "d", 1.0)
    assert not dispatches(submit(book, "waits", at_s=1.0))
    hear(book, "d", 2.0)
    (again,) = dispatches(book.handle(te.ClockTicked(at_s=2.1)))
    assert again.turn_id == "waits"
    failing(book, "waits", 2.2)  # still wedged: twice as long
    hear(book, "d", 4.0)
    assert not dispatches(book.handle(te.ClockTicked(at_s=4.1)))
    hear(book, "d", 6.0)
    (again,) = dispatches(book.handle(te.ClockTicked(at_s=6.3)))
    end(book, "waits", again.attempt, at_s=6.4)
    assert (worker.failures_in_a_row, worker.may_take_turns) == (0, True)
    book.check()


def test_an_engine_that_takes_no_connection_is_left_alone_however_well_its_node_says_it_is() -> None:
    book = book_of(fleet=FleetParams(rest_after_failures=3, rest_s=2.0))
    join(book, "d", Tier.DEDICATED)
    submit(book, "x", at_s=0.1)
    book.handle(te.WorkerLost(at_s=0.1, worker_id="d", reason="lost"))
    hear(book, "d", 0.6)
    assert not dispatches(book.handle(te.ClockTicked(at_s=0.7)))
    hear(book, "d", 2.0)
    (again,) = dispatches(book.handle(te.ClockTicked(at_s=2.2)))
    assert again.turn_id == "x"
    book.handle(te.WorkerLost(at_s=2.3, worker_id="d", reason="lost"))  # still: twice as long
    hear(book, "d", 4.0)
    assert not dispatches(book.handle(te.ClockTicked(at_s=4.4)))
    hear(book, "d", 6.0)
    assert dispatches(book.handle(te.ClockTicked(at_s=6.4)))
    book.check()


def test_failures_between_answers_and_refused_requests_are_no_row() -> None:
    book = book_of(fleet=FleetParams(rest_after_failures=2), backoff_s=0.0)
    join(book, "d", Tier.DEDICATED)
    for number, kind in enumerate(["lost", None, "bad", None, "busy", "busy", "busy", "data"]):
        name = f"x{number}"
        (sent,) = dispatches(submit(book, name, at_s=0.1))
        if kind is None:
            end(book, name, sent.attempt, at_s=0.1)
        else:
            book.handle(te.AttemptFailed(at_s=0.1, turn_id=name, attempt=1, kind=kind, message="m"))
            if name in book.turns:
                book.handle(te.TurnCancelled(at_s=0.1, turn_id=name, reason="test"))
    assert book.fleet.workers["d"].may_take_turns
    book.check()
