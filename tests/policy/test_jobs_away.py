"""Provisioning of jobs that are away: what they give back, and what they find when they return."""

from __future__ import annotations

import pytest

from rose.policy import provisioning as pv
from rose.policy.worker import Tier
from tests.policy.provisioning_kit import MANY, job, seen


def of_two(job_idle_s: float = 100.0) -> pv.Provisioning:
    """Jobs ``a`` and ``b``, four devices."""
    book = pv.Provisioning(params=pv.ProvisioningParams(job_idle_s=job_idle_s, rest_s=0.0, min_active_s=0.0))
    for name in "ab":
        job(book, name, 4, 0)
    for name in ("d0", "d1", "d2", "d3"):
        seen(book, name, Tier.DEDICATED)
    return book


def spend(book: pv.Provisioning, seconds: int, training: tuple[str, ...] = (), **turns: int) -> None:
    """So long these jobs have so many turns each; those not named are not heard of."""
    start_s = book._now_s
    for second in range(1, seconds + 1):
        for name, num_turns in turns.items():
            book.handle(
                pv.LoadSeen(
                    at_s=start_s + second, job=name, num_turns=num_turns, is_training=name in training
                )
            )
        book.handle(pv.DecideNow(at_s=start_s + second))
        book.check()


def test_a_job_that_is_away_holds_nothing_and_what_was_learned_of_it_stays() -> None:
    book = of_two()
    for _ in range(3):
        spend(book, 60, a=MANY)
        assert book.held("a")
        spend(book, 150, a=0)
        if not book.jobs["a"].phases.alternates:
            assert book.held("a") == [], "nothing is known yet: it is taken to be away"
    assert book.jobs["a"].phases.alternates
    assert book.jobs["a"].phases.usual_away_s == pytest.approx(150.0, abs=3.0)
    assert book.held("a"), "by what is known of its phases it comes back"
    spend(book, 350, a=0)
    assert book.held("a") == []


def test_a_job_whose_trainer_has_a_batch_is_not_away() -> None:
    book = of_two()
    spend(book, 60, a=MANY)
    spend(book, 500, training=("a",), a=0)
    assert not book.jobs["a"].is_away
    assert book.held("a")
    spend(book, 90, a=0)
    assert not book.jobs["a"].is_away, "it has just trained"
    spend(book, 20, a=0)
    assert book.held("a") == []


def test_who_was_away_has_no_claim_by_that() -> None:
    book = of_two()
    spend(book, 60, a=MANY)
    spend(book, 10, a=MANY, b=MANY)
    spend(book, 300, a=0, b=MANY)
    assert book.jobs["a"].is_away
    spend(book, 1, a=MANY, b=MANY)
    assert book.jobs["a"].used_s >= book.jobs["b"].used_s
    spend(book, 300, a=MANY, b=0)
    assert book.jobs["b"].is_away
    job(book, "c", 1, 0, at_s=book._now_s)
    assert book.jobs["c"].used_s == book.jobs["a"].used_s, "level with those that are there"


def test_what_a_job_had_too_much_is_not_forgiven_because_it_was_away() -> None:
    book = of_two(job_idle_s=5.0)
    spend(book, 60, a=MANY, b=1)
    spend(book, 20, a=0, b=1)
    assert book.jobs["a"].is_away
    spend(book, 1, a=MANY, b=1)
    assert book.jobs["a"].used_s > book.jobs["b"].used_s + 50


def test_a_job_that_is_away_adopts_nothing() -> None:
    book = of_two()
    job(book, "a", 4, 0, run="a")
    spend(book, 3, a=MANY)
    spend(book, 200, a=0, b=MANY)
    seen(book, "new", Tier.DEDICATED, book._now_s, run="a")
    spend(book, 1, b=MANY)
    assert book.held("a") == []
