"""How much production may lend, and who watches its steps: plain answers of its book."""

from __future__ import annotations

import math

import pytest

from rose.policy.coserving.events import PeerCounted, Report, ServingLooked
from rose.policy.coserving.rollout import RolloutBook
from rose.policy.coserving.serving import NODE_DEAD_S, STRANDED_AFTER_S, ServingBook, lendable_chunks
from rose.policy.lending_events import Mode

ASKED = {"mode": Mode.ON, "lend_pages": 10, "node_age_s": 0.0, "num_chunks": 8, "chunk_pages": 2}


@pytest.mark.parametrize(
    ("change", "chunks"),
    [
        ({}, 5),
        ({"lend_pages": 11}, 5),  # whole chunks
        ({"lend_pages": 100}, 7),  # never the one of the null block
        ({"lend_pages": 100, "floor_pages": 9}, 3),
        ({"floor_pages": 100}, 0),
        ({"lend_pages": -4}, 0),
        ({"mode": Mode.OBSERVE}, 0),
        ({"mode": Mode.OFF}, 0),
        ({"node_age_s": NODE_DEAD_S}, 5),
        ({"node_age_s": NODE_DEAD_S + 0.1}, 0),
        ({"node_age_s": math.nan}, 0),
        ({"num_chunks": 1}, 0),
    ],
)
def test_a_loan_is_what_the_agent_asks_for_above_the_floor(change: dict[str, float], chunks: int) -> None:
    assert lendable_chunks(**{**ASKED, **change}) == chunks  # type: ignore[arg-type]


def looked(book: ServingBook, target: int, *released: int) -> None:
    book.handle(
        ServingLooked(
            at_s=0.0,
            released=tuple((chunk, 0) for chunk in released),
            reports=(),
            target_chunks=target,
            claim_chunks=0,
        )
    )


def test_what_is_out_or_on_its_way_back_is_not_missing_from_a_loan() -> None:
    book = ServingBook(8, 1)
    looked(book, 4, 5, 6, 7)
    assert book.missing_from(4) == 1
    looked(book, 2)  # one comes back
    assert (book.num_lent, book.chunks.num_coming) == (2, 1)
    assert book.missing_from(4) == 1


def test_nothing_more_is_lent_to_who_does_not_give_back() -> None:
    book = ServingBook(8, 1)
    looked(book, 4, 5, 6, 7)
    for mark in book.chunks.mark():
        book.chunks.published()
        book.settle([Report(mark.generation, mark.marks)])
    looked(book, 0)
    for at_s in (0.0, STRANDED_AFTER_S):
        book.handle(PeerCounted(at_s=at_s, pages=3))
    assert book.stranded
    assert (book.may_lend(4), book.missing_from(4)) == (0, 0)


@pytest.mark.parametrize(
    ("lives", "may_run", "lent", "watched"),
    [
        (True, True, False, True),
        (True, False, False, False),
        (True, False, True, True),
        (False, True, True, False),
    ],
)
def test_steps_are_watched_by_a_rollout_engine_that_may_run_or_owes_memory(
    lives: bool, may_run: bool, lent: bool, watched: bool
) -> None:
    book = ServingBook(8, 1)
    if lent:
        looked(book, 1, 7)
    assert book.is_watched(peer_lives=lives, may_run=may_run) is watched


def test_a_rollout_engine_holds_whole_chunks_and_no_more_than_it_has() -> None:
    book = RolloutBook(8, 2)
    assert [book.chunks_of(pages) for pages in (0, 5, 16, 100)] == [0, 2, 8, 8]
