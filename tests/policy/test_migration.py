"""Turns that a slow harvested engine holds back go on at a dedicated one."""

from __future__ import annotations

import random

import pytest

from rose.policy import turn_events as te
from rose.policy.migration import MIN_OBSERVED, Least, Rest, there_s
from rose.policy.pace import Pace
from rose.policy.speed import Speed
from rose.policy.stop_reasons import RECLAIMED
from rose.policy.turns import TurnBook
from rose.policy.worker import Duty, Tier
from tests.policy.turn_kit import book_of, dispatches, end, hear, join, submit

HALF_S = 0.5


def paced(*beats: tuple[float, int | None, float]) -> Pace:
    pace = Pace()
    for at_s, decoded, load_s in beats:
        pace.heard(at_s=at_s, decoded=decoded, load_s=load_s)
    return pace


def test_what_one_turn_makes_is_what_all_make_by_their_number() -> None:
    pace = paced((0.0, 100, 0.0), (1.0, 180, 4.0), (2.0, 220, 8.0))  # four turns all the time
    assert pace.made == pytest.approx(20 + 10)


def test_a_turn_that_came_between_two_heartbeats_has_its_part() -> None:
    pace = paced((0.0, 0, 0.0), (1.0, 40, 2.0), (2.0, 80, 4.0))
    assert pace.since(0.5, 0.0) == pytest.approx(10 + 20)


def test_a_turn_from_before_what_is_remembered_counts_from_its_dispatch() -> None:
    pace = paced(*((float(at), 10 * at, float(at)) for at in range(200)))
    assert pace.since(20.0, 200.0) == pytest.approx(1990 - 200)


@pytest.mark.parametrize(
    "beats",
    [
        (),
        ((0.0, 5, 0.0),),
        ((0.0, 5, 0.0), (2.0, 3, 1.0)),  # it was started again
        ((0.0, 5, 0.0), (1.0, 9, 1.0), (2.0, None, 2.0)),  # nobody counts any more
    ],
)
def test_too_little_heard_says_nothing(beats: tuple[tuple[float, int | None, float], ...]) -> None:
    assert paced(*beats).since(0.0, 0.0) is None


def test_nothing_heard_since_its_dispatch_says_nothing() -> None:
    assert paced((0.0, 5, 0.0), (1.0, 9, 1.0)).since(1.0, 4.0) is None


def test_an_idle_engine_makes_nobody_faster() -> None:
    pace = paced((0.0, 0, 0.0), (1.0, 10, 1.0), (2.0, 10, 1.0))
    assert pace.made == pytest.approx(10)


def burst(
    book: TurnBook, *, decoded_a_s: float = 0.0, turns: int = 1, until_s: float = 3.0
) -> list[te.Action]:
    """Turns go to the harvested worker; then the dedicated one has room, and the harvested one makes this many tokens a second."""
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.CORDONED))
    for index in range(turns):
        submit(book, f"a{index}", at_s=0.0, max_tokens=100)
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.ACTIVE))
    actions: list[te.Action] = []
    for beat in range(1, round(until_s / HALF_S) + 1):
        at_s = beat * HALF_S
        hear(book, "h", at_s, decoded_tokens=round(decoded_a_s * at_s), running=turns)
        hear(book, "d", at_s)
        actions += book.handle(te.ClockTicked(at_s=at_s))
        book.check()
    return actions


def fleet(**params: float) -> TurnBook:
    book = book_of(**{"migrate_ratio": 1.5, "expected_tokens": 50, **params})
    join(book, "d", Tier.DEDICATED)
    join(book, "h", Tier.HARVESTED, decoded_tokens=0)
    for _ in range(MIN_OBSERVED):
        speed = book.fleet.workers["h"].speed
        speed.observe(at_s=0.0, seconds=speed.token_s * 100, num_new=100, crowd=0.0, num_prefilled=0)
    return book


def test_a_turn_of_an_engine_that_stands_still_is_asked_back() -> None:
    actions = burst(fleet())
    assert te.StopAttempt(turn_id="a0", attempt=1, worker_id="h") in actions


def test_a_turn_is_asked_back_once() -> None:
    actions = burst(fleet(), until_s=6.0)
    assert sum(isinstance(action, te.StopAttempt) for action in actions) == 1


def test_it_goes_on_with_its_tokens_at_the_dedicated_worker() -> None:
    book = fleet()
    burst(book)
    actions = end(book, "a0", 1, "abort", at_s=3.1, token_ids=(1, 2, 3))
    assert te.Requeued(turn_id="a0", worker_id="h", reason="migrate", num_kept_tokens=3) in actions
    (second,) = dispatches(actions)
    assert (second.worker_id, second.num_kept_tokens) == ("d", 3)


def test_a_turn_that_ends_before_it_is_stopped_has_ended() -> None:
    book = fleet()
    burst(book)
    actions = end(book, "a0", 1, "stop", at_s=3.1, token_ids=(1, 2, 3))
    assert any(isinstance(action, te.TurnEnded) for action in actions)


def test_a_cut_in_the_meantime_is_a_cut() -> None:
    book = fleet()
    burst(book)
    actions = end(book, "a0", 1, "abort", at_s=3.1, token_ids=(1,), stop_reason=RECLAIMED)
    assert te.Requeued(turn_id="a0", worker_id="h", reason="reclaim", num_kept_tokens=1) in actions


def test_a_slow_engine_is_known_to_be_slow_though_its_turns_are_moved() -> None:
    book = fleet()
    before = book.fleet.workers["h"].speed.token_s
    burst(book)
    end(book, "a0", 1, "abort", at_s=3.1, token_ids=(1,))
    assert book.fleet.workers["h"].speed.token_s > before


def test_an_engine_that_goes_on_as_it_should_keeps_its_turns() -> None:
    book = fleet()
    assert not any(isinstance(action, te.StopAttempt) for action in burst(book, decoded_a_s=60.0))


@pytest.mark.parametrize("params", [{"migrate_ratio": 0.0}, {"migrate_margin_s": 1e6}])
def test_a_turn_stays_where_it_is_not_worth_it(params: dict[str, float]) -> None:
    assert not any(isinstance(action, te.StopAttempt) for action in burst(fleet(**params)))


def test_no_more_turns_are_asked_back_than_there_is_room_for() -> None:
    book = fleet()
    book.fleet.workers["d"].cap = 3
    book.fleet.table.sync(book.fleet.workers["d"])
    actions = burst(book, turns=8)
    assert sum(isinstance(action, te.StopAttempt) for action in actions) == 3


def test_an_engine_of_which_nothing_is_known_keeps_its_turns() -> None:
    book = fleet()
    book.fleet.workers["h"].speed.num_observed = MIN_OBSERVED - 1
    assert not any(isinstance(action, te.StopAttempt) for action in burst(book))


def test_whoever_waits_comes_first() -> None:
    book = fleet()
    submit(book, "waits", num_prompt_tokens=10, max_tokens=5, min_version=(9, 0))
    assert not any(isinstance(action, te.StopAttempt) for action in burst(book))


def test_what_would_have_to_begin_anew_stays() -> None:
    book = fleet()
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.CORDONED))
    submit(book, "seeded", at_s=0.0, max_tokens=100, resumable=False)
    assert not any(
        isinstance(action, te.StopAttempt) and action.turn_id == "seeded" for action in burst(book)
    )


def test_an_engine_whose_tokens_nobody_counts_keeps_its_turns() -> None:
    book = fleet()
    hear(book, "h", 0.0)
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.CORDONED))
    submit(book, "a", at_s=0.0, max_tokens=100)
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.ACTIVE))
    for at_s in (1.0, 2.0, 3.0):
        hear(book, "h", at_s)
        hear(book, "d", at_s)
        assert not book.handle(te.ClockTicked(at_s=at_s))


@pytest.mark.parametrize("seed", range(20))
def test_no_engine_with_room_is_quicker_than_the_least_that_spares_a_look_at_each(seed: int) -> None:
    rng, book = random.Random(seed), book_of()
    for number in range(8):
        join(book, f"w{number}", Tier.DEDICATED)
        worker = book.fleet.workers[f"w{number}"]
        worker.speed = Speed(
            token_s=rng.uniform(0.005, 0.05), crowd_s=rng.uniform(0, 0.002), prefill_s=rng.uniform(1e-5, 1e-3)
        )
        worker.inflight = rng.randrange(worker.slots + 1)
    submit(book, "a", num_prompt_tokens=rng.randrange(1, 20_000))
    turn, rest = book.turns["a"], Rest(made=rng.uniform(0, 500), left=rng.uniform(1, 500), here_s=1.0)
    workers = list(book.fleet)
    bound_s = Least.of(workers).there_s(turn, rest)
    open_ = [worker for worker in workers if worker.inflight < worker.slots]
    # More may be on their way there by now than run there.
    assert bound_s <= min(there_s(turn, rest, one, one.inflight + rng.randrange(2)) for one in open_)
    (alone,) = open_[:1]
    assert Least.of([alone]).there_s(turn, rest) == pytest.approx(there_s(turn, rest, alone, alone.inflight))


def test_where_no_engine_has_room_nothing_is_quick_enough() -> None:
    book = book_of()
    join(book, "w", Tier.DEDICATED)
    book.fleet.workers["w"].inflight = book.fleet.workers["w"].slots
    submit(book, "a")
    rest = Rest(made=0.0, left=1.0, here_s=1.0)
    assert Least.of(book.fleet).there_s(book.turns["a"], rest) == float("inf")
