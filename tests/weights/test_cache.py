"""What a pull-through relay keeps: events in, keys to delete out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import CapacityError
from rose.weights.cache import CacheBook


def test_the_least_recently_used_goes() -> None:
    book = CacheBook(100)
    for key in "abc":
        assert book.admit(key, 30) == []
        book.landed(key)
    book.used("a")
    assert book.admit("d", 60) == ["b", "c"]


def test_what_is_arriving_stays_and_counts() -> None:
    book = CacheBook(100)
    book.admit("a", 60)
    with pytest.raises(CapacityError) as caught:
        book.admit("b", 60)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
    book.landed("a")
    assert book.admit("b", 60) == ["a"]


def test_what_can_never_fit_is_said_so() -> None:
    book = CacheBook(100)
    book.admit("a", 50)
    book.landed("a")
    with pytest.raises(CapacityError) as caught:
        book.admit("b", 101)
    assert caught.value.status == 507
    assert book.num_bytes == 50


@given(st.lists(st.tuples(st.sampled_from("alduf"), st.integers(0, 9), st.integers(0, 60)), max_size=80))
def test_no_more_than_the_limit_is_ever_held(ops: list[tuple[str, int, int]]) -> None:
    book = CacheBook(100)
    arriving: dict[str, int] = {}
    whole: dict[str, int] = {}
    for number, (what, name, nbytes) in enumerate(ops):
        key = f"{name}-{number}"
        try:
            if what == "a":
                for gone in book.admit(key, nbytes):
                    del whole[gone]
                arriving[key] = nbytes
        except CapacityError:
            assert nbytes + sum(arriving.values()) > 100
        if what == "l" and arriving:
            landed = next(iter(arriving))
            book.landed(landed)
            whole[landed] = arriving.pop(landed)
        if what == "d" and whole:
            dropped = next(iter(whole))
            book.drop(dropped)
            del whole[dropped]
        if what == "f" and arriving:
            failed = next(iter(arriving))
            book.drop(failed)
            del arriving[failed]
        if what == "u" and whole:
            book.used(next(iter(whole)))
        assert book.num_bytes == sum(whole.values()) + sum(arriving.values()) <= 100
