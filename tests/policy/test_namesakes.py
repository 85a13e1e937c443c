"""Two nodes of one name: which has it, and what the other says."""

from __future__ import annotations

import pytest

from rose.policy.namesakes import Holder, Namesakes, NodePlace

HERE = NodePlace(url="http://host7:8100", host="host7")
THERE = NodePlace(url="http://host8:8100", host="host8")


def book(most: int = 10) -> Namesakes[int]:
    return Namesakes(fresh_s=10.0, remember_s=600.0, most=most)


def holder(heard_s: float, place: NodePlace = HERE) -> Holder:
    return Holder(incarnation="a", heard_s=heard_s, place=place)


@pytest.mark.parametrize(
    ("place", "silent_s", "refused"),
    [
        (HERE, 0.0, False),  # an engine that was started again
        (NodePlace(url=HERE.url), 0.0, False),  # an older node does not say its host
        (NodePlace(url="http://host8:8100"), 9.9, True),
        (NodePlace(url="http://host8:8100"), 10.0, False),  # the other one is gone
        (NodePlace(url=HERE.url, host="host8"), 0.0, True),  # the address was copied, too
    ],
)
def test_one_from_elsewhere_has_not_the_name_of_one_that_lives(
    place: NodePlace, silent_s: float, refused: bool
) -> None:
    assert book().num_refusals(100.0, "n", "b", place, holder(100.0 - silent_s)) == refused


def test_nobodys_name_is_anybodys_and_its_own_incarnation_keeps_it() -> None:
    assert not book().num_refusals(0.0, "n", "b", HERE, None)
    assert not book().num_refusals(0.0, "n", "a", NodePlace(url="http://elsewhere:1"), holder(0.0))


def test_no_engine_comes_back_to_an_incarnation_that_it_has_left() -> None:
    names = book()
    b = Holder(incarnation="b", heard_s=2.0, place=HERE)
    # A scheduler that was started again may hear it before it registers.
    names.heard(1.0, "n", "b", 40, may_hold=True)
    assert names.num_refusals(1.0, "n", "b", HERE, holder(1.0)) == 0
    assert [names.num_refusals(at_s, "n", "a", HERE, b) for at_s in (2.0, 2.5)] == [1, 2]
    assert names.num_refusals(12.0, "n", "a", HERE, b) == 0
    assert names.num_refusals(12.0, "n", "b", HERE, holder(12.0)) == 1
    for incarnation in map(str, range(20)):
        assert names.num_refusals(12.0, "n", incarnation, HERE, holder(12.0)) == 0


def test_what_a_stranger_said_counts_while_it_is_heard() -> None:
    names = book()
    names.heard(0.0, "n", "b", 0, may_hold=False)
    names.num_refusals(5.0, "n", "b", NodePlace(url="http://host8:1"), holder(5.0))
    ((name, stranger),) = names.strangers(14.9)
    assert (name, stranger.said, str(stranger.place)) == ("n", 0, "http://host8:1")
    assert not list(names.strangers(15.0))
    names.forget_silent(15.0)
    assert not names.num_refusals(15.0, "n", "b", HERE, holder(15.0))


@pytest.mark.parametrize(
    ("is_refused", "may_hold", "counts_s"),
    [(True, True, 600.0), (True, False, 10.0), (False, True, 10.0)],  # the last may have been started again
)
def test_one_that_was_refused_and_falls_silent_with_memory_counts_on(
    is_refused: bool, may_hold: bool, counts_s: float
) -> None:
    names = book()
    if is_refused:
        names.num_refusals(0.0, "n", "b", THERE, holder(0.0))
    names.heard(0.0, "n", "b", 40, may_hold=may_hold)
    names.forget_silent(counts_s - 0.1)
    assert [name for name, _ in names.strangers(counts_s - 0.1)] == ["n"]
    assert not list(names.strangers(counts_s))
    names.forget_silent(counts_s)
    assert names.num_refusals(counts_s, "n", "b", THERE, holder(counts_s)) == 1


def test_one_that_lost_its_name_to_another_place_counts_on() -> None:
    names = book()
    assert names.num_refusals(20.0, "n", "b", THERE, holder(5.0)) == 0
    names.forget_silent(20.0)
    names.heard(5.0, "n", "a", 40, may_hold=True)
    ((_, stranger),) = names.strangers(604.9)
    assert (stranger.place, stranger.said) == (HERE, 40)


@pytest.mark.parametrize(
    ("name", "place", "num_left"),
    [("n", THERE, 0), ("named-anew", THERE, 0), ("n", HERE, 1), ("n", NodePlace(url=THERE.url), 1)],
)
def test_an_engine_that_comes_up_takes_the_place_of_the_one_before(
    name: str, place: NodePlace, num_left: int
) -> None:
    names = book()
    names.num_refusals(0.0, "n", "b", THERE, holder(0.0))
    names.heard(0.0, "n", "b", 40, may_hold=True)
    assert names.num_refusals(30.0, name, "c", place, None) == 0
    assert len(list(names.strangers(30.0))) == num_left


def test_only_so_many_are_remembered_and_the_longest_silent_goes_first() -> None:
    names = book(most=2)
    for at_s, name in enumerate(("a", "b", "a", "c")):
        names.heard(float(at_s), name, "1", at_s, may_hold=True)
    assert [(name, one.said) for name, one in names.strangers(4.0)] == [("a", 2), ("c", 3)]
