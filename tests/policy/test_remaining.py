"""What is left of a trajectory, predicted from those that ended."""

from __future__ import annotations

import pytest

from rose.policy.remaining import MIN_SAMPLES, Remaining


def learned(lengths: list[int]) -> Remaining:
    book = Remaining()
    for index, num_tokens in enumerate(lengths):
        book.made(f"old{index}", "j", num_tokens)
        book.closed(f"old{index}")
    return book


def test_nothing_is_predicted_before_enough_have_ended() -> None:
    book = learned([100] * (MIN_SAMPLES - 1))
    assert book.tokens("new", "j") is None
    assert book.rank("new", "j") == 0.0


def test_with_a_heavy_tail_the_longer_it_ran_the_longer_it_will() -> None:
    book = learned([100] * 60 + [1000] * 20)
    assert book.tokens("new", "j") == (60 * 100 + 20 * 1000) / 80
    book.made("new", "j", 200)
    assert book.tokens("new", "j") == 800
    assert book.tokens("new", "other") is None


def test_the_rank_is_among_recent_estimates() -> None:
    book = learned([100] * 60 + [1000] * 20)
    book.made("long", "j", 200)
    for index in range(9):
        book.rank(f"fresh{index}", "j")
    assert book.rank("long", "j") == 1.0
    assert book.rank("fresh0", "j") == 0.0


def test_memory_is_bounded() -> None:
    book = Remaining(max_entries=10)
    for index in range(1000):
        book.made(f"t{index}", f"job{index % 500}", 5)
        book.rank(f"t{index}", "job1")
    for index in range(1000):
        book.made(f"u{index}", f"job{index % 500}", 5)
        book.closed(f"u{index}")
    assert len(book._made) <= 10
    assert len(book._jobs) <= 256


def test_who_still_runs_counts_as_longer_than_what_it_has_made() -> None:
    book = learned([100] * 60)
    for index in range(60):
        book.made(f"runs{index}", "j", 400)
    book.made("late", "j", 90)

    # Half end with 100; the others, who have made 400, are expected to make as much again as the last bin ends with.
    whole = (100 + 2 * 2 ** (36 / 4)) / 2
    assert book.tokens("late", "j") == pytest.approx(whole - 90, rel=0.02)
    assert book.tokens("runs0", "j") == 400


def test_one_that_ends_or_is_forgotten_runs_no_longer() -> None:
    book = Remaining(max_entries=100)
    for index in range(MIN_SAMPLES):
        book.made(f"old{index}", "j", 100)
        book.closed(f"old{index}")
    before = book.tokens("new", "j")
    for index in range(101):
        book.made(f"runs{index}", "j", 1000)
    for index in range(100):
        book.made(f"other{index}", "k", 5)

    assert book.tokens("new", "j") == before == 100


def test_a_history_that_was_forgotten_while_its_trajectories_ran_begins_anew() -> None:
    book = learned([100] * MIN_SAMPLES)
    book.made("runs", "j", 50)
    for index in range(300):
        book.made(f"t{index}", f"job{index}", 5)
    assert book.tokens("new", "j") is None
    book.made("runs", "j", 50)
    book.closed("runs")

    assert sum(book._jobs["j"].running) == 0
