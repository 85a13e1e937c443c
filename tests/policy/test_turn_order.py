"""TurnBook: who goes first, and what waits for what."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rose.errors import PolicyError
from rose.policy import turn_events as te
from rose.policy.fleet import FleetParams
from rose.policy.packed import Eligible
from rose.policy.routing import Candidate, make_policy
from rose.policy.stop_reasons import RECLAIMED
from rose.policy.turns import TurnBook
from rose.policy.worker import Duty, Tier, Worker
from tests.policy.turn_kit import book_of, dispatches, end, hear, join, submit, tokens


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
    assert [turn_id for _, turn_id, _ in book.queue] == ["old", "new"]
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
    assert [turn_id for _, turn_id, _ in book.queue] == ["long", "a", "b", "c", "late"]


def test_the_oldest_group_goes_first_but_a_later_turn_overtakes_by_no_more_than_the_bound() -> None:
    book = book_of(oldest_first_s=5.0)
    submit(book, "old-1", at_s=0.0, group_id="old")
    submit(book, "young-1", at_s=3.0, group_id="young")
    submit(book, "old-2", at_s=4.0, group_id="old")
    submit(book, "lone", at_s=4.5, group_id=None)
    submit(book, "old-3", at_s=9.0, group_id="old")
    # As if from 0 s, 3 s, 0 s, 4.5 s, and 9 - 5 = 4 s.
    assert [turn_id for _, turn_id, _ in book.queue] == ["old-1", "old-2", "young-1", "old-3", "lone"]


def test_groups_that_began_together_take_turns_where_a_share_of_their_age_counts() -> None:
    book = book_of(oldest_first_s=60.0, oldest_first_share=0.75)
    submit(book, "first-1", at_s=0.0, group_id="first")
    submit(book, "second-1", at_s=0.4, group_id="second")
    submit(book, "late", at_s=10.0, group_id=None)
    submit(book, "second-2", at_s=10.0, group_id="second")
    submit(book, "first-2", at_s=11.0, group_id="first")
    submit(book, "first-3", at_s=12.0, group_id="first")
    # As if from 0 s, 0.4 s, 10 s, 10 - 0.75 * 9.6 = 2.8 s, 11 - 0.75 * 11 = 2.75 s, and 3 s: 0.4 s of age are not worth 2 s of waiting.
    order = ["first-1", "second-1", "first-2", "second-2", "first-3", "late"]
    assert [turn_id for _, turn_id, _ in book.queue] == order


def test_in_a_full_fleet_a_turn_waits_a_moment_for_a_slot_where_its_prefix_is() -> None:
    """Two workers of one slot: `x` has run on `a`, whose slot `p` holds; then `b` opens."""

    def until_b_opens(prefill_s: float = 0.1, **params: float) -> tuple[TurnBook, list[str]]:
        book = book_of(fleet=FleetParams(cap_dedicated=1), **params)
        join(book, "a", Tier.DEDICATED)
        submit(book, "x", at_s=0.0)
        tokens(book, "x", 1, 5, at_s=0.0)
        end(book, "x", 1, at_s=0.0)
        book.fleet.workers["a"].speed.prefill_s = prefill_s  # of ten tokens: a second to read
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
    assert until_b_opens(prefill_s=0.001, affine_wait_s=0.5)[1] == [
        "x2"
    ]  # to read it takes less than it has waited
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
    assert [turn_id for _, turn_id, _ in book.queue] == ["a", "b", "c"]


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


def test_the_tail_goes_to_the_worker_that_is_for_it_before_other_dedicated_ones() -> None:
    book = book_of("random", tail_fraction=0.2)
    history(book, [100] * 60 + [1000] * 20)
    join(book, "wide", Tier.DEDICATED, for_tail=True)
    for index in range(3):
        join(book, f"narrow{index}", Tier.DEDICATED)
        join(book, f"h{index}", Tier.HARVESTED)

    def place_of_a_long_turn(name: str) -> str:
        book.remaining.made(f"t-{name}", "j", 200)
        (sent,) = dispatches(submit(book, name))
        return sent.worker_id

    short = {dispatches(submit(book, f"short{index}"))[0].worker_id for index in range(40)}
    assert len(short) == 7  # nothing is kept free for it
    assert {place_of_a_long_turn(f"long{index}") for index in range(5)} == {"wide"}
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="wide", duty=Duty.CORDONED))
    assert {place_of_a_long_turn(f"longer{index}")[:6] for index in range(5)} == {"narrow"}
    book.check()


def test_the_queue_is_bounded() -> None:
    book = book_of(max_queued=2)
    submit(book, "a")
    submit(book, "b")
    with pytest.raises(PolicyError, match="queued already"):
        submit(book, "c")
    assert len(book.queue) == 2


def test_a_turn_is_placed_by_what_its_kind_of_task_has_taught() -> None:
    """Under the job's name alone nothing is known where tasks have kinds: no move's price was shared by the turns that follow."""
    book = book_of("cost")
    asked: list[float | None] = []
    policy = book.policy

    class Seen:
        def choose(self, turn: Candidate, eligible: Eligible) -> Worker | None:
            asked.append(turn.remaining_tokens)
            return policy.choose(turn, eligible)

    book.policy = Seen()
    join(book, "d", Tier.DEDICATED)
    for index in range(60):
        book.remaining.made(f"old{index}", "j/maths", 100)
        book.remaining.closed(f"old{index}")
    submit(book, "a", task_kind="maths")
    submit(book, "b", task_kind="poems")

    assert asked == [100.0, None]
