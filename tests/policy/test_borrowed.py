"""Borrowed devices: no turn is placed there that would outlive the loan, and what runs there leaves in time, with its tokens."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.decisions.freeze import freeze, thaw
from rose.policy import turn_events as te
from rose.policy.fleet import FleetParams
from rose.policy.routing import POLICY_NAMES
from rose.policy.stop_reasons import RECLAIMED
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier
from tests.policy import reference
from tests.policy.turn_kit import book_of, dispatches, end, hear, join, submit, tokens

DRAIN_S = FleetParams().drain_s


def lent(lent_s: float | None, **params: Any) -> TurnBook:
    """A book with one borrowed worker ``b``, lent for so long from 0 s."""
    book = book_of(**params)
    join(book, "b", Tier.BORROWED, lent_s=lent_s)
    return book


def tick(book: TurnBook, at_s: float) -> list[te.Action]:
    return book.handle(te.ClockTicked(at_s=at_s))


def asked(actions: list[te.Action]) -> list[str]:
    return [action.turn_id for action in actions if isinstance(action, te.StopAttempt)]


def requeued(actions: list[te.Action]) -> list[tuple[str, int]]:
    return [(a.reason, a.num_kept_tokens) for a in actions if isinstance(a, te.Requeued)]


def test_a_device_whose_end_nobody_has_named_takes_no_turn() -> None:
    book = lent(None)
    submit(book, "a")
    assert dispatches(tick(book, 0.1)) == []
    assert [sent.worker_id for sent in dispatches(hear(book, "b", 0.2, lent_s=60.0))] == ["b"]


@settings(max_examples=300, deadline=None)
@given(
    policy=st.sampled_from(POLICY_NAMES),
    lent_s=st.floats(0.0, 30.0),
    expected=st.integers(1, 400),
    beside=st.integers(0, 6),
    prompt=st.integers(1, 900),
    token_s=st.floats(0.001, 0.2),
)
def test_no_turn_is_placed_that_is_expected_to_outlive_the_loan(
    policy: str, lent_s: float, expected: int, beside: int, prompt: int, token_s: float
) -> None:
    book = book_of(policy, expected_tokens=expected)
    join(book, "b", Tier.BORROWED, lent_s=lent_s)
    worker = book.fleet.workers["b"]
    worker.speed.token_s = token_s
    book.fleet.table.sync_speed(worker)
    for number in range(beside + 1):
        sent = dispatches(submit(book, f"n{number}", num_prompt_tokens=prompt, max_tokens=expected))
        turn = book.turns[f"n{number}"]
        worker.inflight -= len(sent)  # as it was when the turn was placed
        assert bool(sent) is reference.ends_in_time(book, turn, worker, 0.0)
        worker.inflight += len(sent)
    book.check()


def test_a_turn_that_is_too_long_for_the_loan_goes_to_a_dedicated_device_or_waits_and_says_why() -> None:
    book = lent(10.0, expected_tokens=500)  # 10 s at 20 ms a token
    submit(book, "a", max_tokens=500)
    assert book.turns["a"].hold == "ends"
    join(book, "d", Tier.DEDICATED)
    assert book.turns["a"].worker is book.fleet.workers["d"]


def test_a_loan_that_is_renewed_makes_room_for_turns_that_were_too_long() -> None:
    book = lent(10.0, expected_tokens=500)
    submit(book, "a", max_tokens=500)
    assert dispatches(hear(book, "b", 1.0, lent_s=10.0)) == []
    assert len(dispatches(hear(book, "b", 2.0, lent_s=20.0))) == 1


def test_turns_leave_with_their_tokens_before_the_device_goes_back() -> None:
    book = lent(20.0)
    submit(book, "a")
    join(book, "d", Tier.DEDICATED)
    for name in "bd":
        hear(book, name, 17.5, lent_s=2.5)
    assert asked(tick(book, 20.0 - DRAIN_S - 0.01)) == []
    assert asked(tick(book, 20.0 - DRAIN_S)) == ["a"]
    assert asked(tick(book, 20.0 - DRAIN_S + 0.5)) == []  # once

    left = end(book, "a", 1, "abort", token_ids=(1, 2, 3), at_s=19.0)

    assert requeued(left) == [("returned", 3)]
    assert [sent.worker_id for sent in dispatches(left)] == ["d"]
    turn = book.turns["a"]
    assert (turn.infra_left, turn.num_reclaims, turn.backoff_until_s) == (book.params.infra_budget, 0, {})
    book.check()


def test_a_turn_whose_engine_does_not_answer_is_moved_with_what_has_arrived() -> None:
    book = lent(20.0)
    submit(book, "a")
    tokens(book, "a", 1, 7, 8, at_s=1.0)
    hear(book, "b", 17.5, lent_s=2.5)
    assert asked(tick(book, 20.0 - DRAIN_S)) == ["a"]
    hear(book, "b", 19.0, lent_s=1.0)
    assert requeued(tick(book, 19.99)) == []

    moved = tick(book, 20.0)

    assert requeued(moved) == [("returned", 2)]
    assert [a.worker_id for a in moved if isinstance(a, te.AbortAttempt)] == ["b"]
    assert book.turns["a"].infra_left == book.params.infra_budget
    late = end(book, "a", 1, "abort", token_ids=(9,), at_s=20.5)
    assert [a.num_tokens for a in late if isinstance(a, te.Fenced)] == [1]


def test_an_owner_that_wants_its_device_at_once_gets_it_and_no_token_is_lost() -> None:
    book = lent(600.0)
    submit(book, "a")
    join(book, "d", Tier.DEDICATED)
    assert dispatches(hear(book, "b", 5.0, lent_s=0.0, reclaim_seq=1)) == []
    # Its node has cut what ran there; the answer needs no request of ours.
    left = end(book, "a", 1, "abort", token_ids=(1, 2), stop_reason=RECLAIMED, at_s=5.1)
    assert requeued(left) == [("returned", 2)]
    assert [sent.worker_id for sent in dispatches(left)] == ["d"]
    # Not a risk of this device: it was said.
    assert (book.turns["a"].num_reclaims, book.fleet.workers["b"].reclaimed_at_s) == (0, None)


def test_a_borrowed_device_that_falls_silent_is_left_at_once_and_goes_back_when_it_was_to() -> None:
    book = lent(4.0)
    submit(book, "a")
    tokens(book, "a", 1, 7, at_s=1.0)
    assert requeued(tick(book, 2.5)) == [("suspect", 1)]
    # It is heard again, but not how long it is lent: the end that it had told has passed.
    hear(book, "b", 5.0)
    assert dispatches(tick(book, 5.1)) == []


def test_a_slow_message_does_not_postpone_the_end() -> None:
    book = lent(20.0)
    for at_s, late_s in ((1.0, 0.1), (2.0, 0.2), (3.0, 0.0)):
        hear(book, "b", at_s + late_s, lent_s=20.0 - at_s)
    assert book.fleet.workers["b"].until_s == pytest.approx(20.0)


def test_others_have_no_end() -> None:
    book = book_of()
    for tier in (Tier.DEDICATED, Tier.HARVESTED):
        join(book, tier.value, tier, lent_s=0.0)
        assert book.fleet.workers[tier.value].until_s == math.inf


def test_the_state_of_a_decision_log_from_before_devices_were_borrowed_is_completed() -> None:
    book = book_of()
    join(book, "d", Tier.DEDICATED)
    submit(book, "a")
    table = book.fleet.table
    table.tier_speed = table.tier_speed[:2]
    for name in ("tier", "until_s"):
        del table._columns[name]
        delattr(table, name)
    del book.fleet.tier_speed[Tier.BORROWED]

    old = thaw(freeze(book))

    old.check()
    join(old, "b", Tier.BORROWED, at_s=1.0, lent_s=60.0)
    old.handle(te.WorkerLost(at_s=2.0, worker_id="d", reason="lost"))
    assert old.turns["a"].worker is old.fleet.workers["b"]
    old.check()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_whatever_is_lent_and_taken_back_every_turn_ends_once_with_all_of_its_tokens(policy: str) -> None:
    """Loans of random length, engines that answer a request to stop in time, late or never; one dedicated device."""
    rng, book = random.Random(3), book_of(policy, expected_tokens=6)
    join(book, "d", Tier.DEDICATED)
    for name in "pq":
        join(book, name, Tier.BORROWED, lent_s=rng.uniform(0.0, 10.0))
    live: dict[tuple[str, int], int] = {}
    ends: dict[str, te.TurnEnded] = {}
    answers: list[tuple[float, str, int]] = []
    now_s, given = 0.0, 0

    def carry(actions: list[te.Action]) -> None:
        for action in actions:
            match action:
                case te.Dispatch():
                    live[(action.turn_id, action.attempt)] = action.max_tokens
                case te.StopAttempt():
                    late_s = rng.choice((0.2, 1.0, 5.0, 1e9))
                    answers.append((now_s + late_s, action.turn_id, action.attempt))
                case te.AbortAttempt():
                    live.pop((action.turn_id, action.attempt), None)
                case te.TurnEnded():
                    assert action.turn_id not in ends
                    ends[action.turn_id] = action
                case _:
                    pass

    for round_number in range(2000):
        now_s += 0.25
        if given < 60 and rng.random() < 0.3:
            given += 1
            carry(submit(book, f"n{given}", at_s=now_s, max_tokens=8, num_prompt_tokens=4))
        for key in list(live):
            if rng.random() < 0.5 and key in live:
                if live[key] == 1:
                    del live[key]
                    carry(end(book, *key, "length", token_ids=(5,), at_s=now_s))
                else:
                    live[key] -= 1
                    carry(tokens(book, *key, 5, at_s=now_s))
        for answer in [answer for answer in answers if answer[0] <= now_s]:
            answers.remove(answer)
            if live.pop(answer[1:], None) is not None:
                carry(end(book, *answer[1:], "abort", at_s=now_s))
        for name in "pq":
            if rng.random() < 0.5:
                carry(hear(book, name, now_s, lent_s=rng.choice((0.0, 1.0, 5.0, 30.0))))
        carry(hear(book, "d", now_s))
        carry(tick(book, now_s))
        book.check()
        if round_number > 1000 and len(ends) == given == 60:
            break
    assert len(ends) == 60
    assert all(len(ended.result.token_ids) == 8 for ended in ends.values())
