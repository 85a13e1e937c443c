"""Late first tokens: each request counts once, whoever stands before it in the queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.policy.coserving.first_tokens import FirstTokens
from rose.policy.coserving.timing import is_late

LIMIT_S = 1.0


def all_overdue(book: FirstTokens, at_s: float) -> list[str]:
    found = []
    while (late := book.overdue(at_s, LIMIT_S)) is not None:
        book.late(late)
        found.append(late)
    return found


def test_who_is_not_the_first_in_the_queue_counts_when_its_limit_passes_and_not_again() -> None:
    book = FirstTokens()
    for number, request_id in enumerate("abc"):
        book.arrived(request_id, number / 4)

    assert all_overdue(book, 1.2) == ["a"]
    assert all_overdue(book, 2.0) == ["b", "c"]
    for request_id in "abc":
        book.came([request_id], 3.0, LIMIT_S)

    assert (book.num_late, len(book)) == (3, 0)


def test_a_first_token_that_comes_late_counts_and_one_in_time_does_not() -> None:
    book = FirstTokens()
    for request_id in "ab":
        book.arrived(request_id, 0.0)

    book.came(["a"], 1.0, LIMIT_S)
    book.came(["b"], 1.1, LIMIT_S)

    assert (book.num_late, book.overdue(5.0, LIMIT_S)) == (1, None)


def test_who_ended_in_time_is_not_late_when_its_limit_has_passed() -> None:
    book = FirstTokens()
    book.arrived("a", 0.0)
    assert book.overdue(2.0, LIMIT_S) == "a"
    book.ended("a")

    assert (book.num_late, len(book)) == (0, 0)


def test_who_waits_for_something_else_lets_others_past_and_counts_with_its_token() -> None:
    book = FirstTokens()
    for request_id in ("grammar", "b"):
        book.arrived(request_id, 0.0)

    assert book.overdue(2.0, LIMIT_S) == "grammar"
    book.waits_for_others("grammar")
    assert book.overdue(2.0, LIMIT_S) == "b"
    book.late("b")
    book.came(["grammar"], 2.5, LIMIT_S)

    assert book.num_late == 2


def test_of_a_promise_that_was_withdrawn_nothing_is_kept() -> None:
    book = FirstTokens()
    book.arrived("a", 0.0)

    assert book.overdue(10.0, 0) is None
    assert (book.num_late, len(book)) == (0, 0)


@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=30),
    look_every=st.integers(1, 7),
)
def test_the_count_is_the_number_of_late_first_tokens_however_often_limits_are_looked_at(
    requests: list[tuple[int, int]], look_every: int
) -> None:
    """Requests (arrival and first token after that, in tenths of the limit) in any order of their first tokens."""
    book = FirstTokens()
    requests.sort()
    events = sorted(
        [
            *((at, 0, number) for number, (at, _) in enumerate(requests)),
            *((at + took, 1, number) for number, (at, took) in enumerate(requests)),
            *((at, 2, 0) for at in range(0, 80, look_every)),
        ]
    )
    for at, kind, number in events:
        if kind == 0:
            book.arrived(str(number), at / 10)
        elif kind == 1:
            book.came([str(number)], at / 10, LIMIT_S)
        else:
            all_overdue(book, at / 10)

    assert book.num_late == sum(is_late((at + took) / 10 - at / 10, LIMIT_S) for at, took in requests)
    assert len(book) == 0


def test_what_a_session_sends_while_it_waits_does_not_begin_its_time_anew() -> None:
    book = FirstTokens()
    book.arrived("a", 0.0)
    book.arrived("a", 0.9)
    assert book.overdue(1.5, 1.0) == "a"
