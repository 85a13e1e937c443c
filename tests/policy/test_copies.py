"""Second copies of running turns: where they begin, and that one of the two stands."""

from __future__ import annotations

from typing import Any

import pytest

from rose.errors import ConfigError
from rose.policy import turn_events as te
from rose.policy.copies import MARK, Copies, CopyParams
from rose.policy.migration import MIN_OBSERVED
from rose.policy.turn import Turn
from rose.policy.turns import TurnBook
from rose.policy.worker import Duty, Tier
from tests.policy.turn_kit import book_of, dispatches, end, ended, hear, join, submit, tokens

SPEED = {"token_s": 0.02, "crowd_s": 0.0, "prefill_s": 0.0001}


def fleet_of(*, slow: str = "h0", slowness: float = 3.0, **params: Any) -> tuple[TurnBook, Copies]:
    """Two harvested workers, the first of which is slow; a long turn runs there, five seconds of it."""
    book = book_of("random")
    for name in ("h0", "h1"):
        join(book, name, Tier.HARVESTED, decoded_tokens=0)
        speed = book.fleet.workers[name].speed
        speed.num_observed = MIN_OBSERVED
        for field, value in SPEED.items():
            setattr(speed, field, value * (slowness if name == slow else 1.0))
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="h1", duty=Duty.CORDONED))
    submit(book, "x", num_prompt_tokens=100, max_tokens=800)
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="h1", duty=Duty.ACTIVE))
    book.turns["x"].expected_tokens = 400
    hear(book, "h0", 2.0, decoded_tokens=50)
    hear(book, "h1", 2.0, decoded_tokens=0)
    return book, Copies(book=book, params=CopyParams(**{"most": 4, **params}))


def made(turn: Turn) -> int:
    return 60


def begin(book: TurnBook, copies: Copies, at_s: float = 2.0) -> list[te.TurnSubmitted]:
    found = []
    for copy in copies.look(at_s, made):
        book.handle(copy)
        found.append(copy)
    return found


def test_a_copy_begins_with_the_tokens_so_far_on_the_engine_that_would_end_it_soonest() -> None:
    book, copies = fleet_of()
    (copy,) = begin(book, copies)

    assert (copy.turn_id, copy.only_at) == ("x" + MARK, "h1")
    assert (copy.num_prompt_tokens, copy.max_tokens, copy.num_copied) == (160, 740, 60)
    worker = book.turns[copy.turn_id].worker
    assert worker is not None
    assert worker.worker_id == "h1"
    assert begin(book, copies) == []  # one of each
    book.placer.check()


@pytest.mark.parametrize(
    "change",
    [{"ratio": 0.1}, {"most": 0}, {"least_s": 1e9}, {"slow": "h1"}],
    ids=["would take too long", "none allowed", "short rest", "the other is slower"],
)
def test_nothing_is_copied_that_would_not_gain(change: dict[str, Any]) -> None:
    book, copies = fleet_of(**change)
    assert begin(book, copies) == []


def test_nothing_is_copied_while_somebody_waits() -> None:
    book, copies = fleet_of()
    submit(book, "waits", at_s=2.0, model="other")
    assert begin(book, copies) == []


def test_weights_of_another_version_draw_other_tokens() -> None:
    book, copies = fleet_of()
    hear(book, "h1", 2.0, version=(1, 1), decoded_tokens=0)
    assert begin(book, copies) == []


def test_the_copy_that_ends_first_stands_for_the_turn_and_its_whole_length_is_learned() -> None:
    book, copies = fleet_of()
    (copy,) = begin(book, copies)
    tokens(book, copy.turn_id, 1, *range(40), at_s=3.0)
    done = ended(end(book, copy.turn_id, 1, at_s=3.0))

    assert copies.ended(done.turn_id, done.outcome) == ("x", True)
    lost = ended(book.handle(te.TurnCancelled(at_s=3.0, turn_id="x", reason="overtaken")))
    assert copies.ended(lost.turn_id, lost.outcome) == (None, False)
    assert copies.of == {}
    assert book.remaining._made["t-x"][1] == 100
    assert book.affinity.where("t-x")[1] == 200


def test_a_turn_that_ends_first_takes_its_copy_with_it() -> None:
    book, copies = fleet_of()
    (copy,) = begin(book, copies)
    done = ended(end(book, "x", 1, at_s=3.0))

    assert copies.ended(done.turn_id, done.outcome) == (copy.turn_id, True)
    lost = ended(book.handle(te.TurnCancelled(at_s=3.0, turn_id=copy.turn_id, reason="overtaken")))
    assert copies.ended(lost.turn_id, lost.outcome) == (None, False)


def test_a_copy_that_loses_its_place_is_given_up_and_the_turn_goes_on() -> None:
    book, copies = fleet_of()
    (copy,) = begin(book, copies)
    assert dispatches(book.handle(te.WorkerLost(at_s=3.0, worker_id="h1", reason="lost"))) == []
    assert copies.is_of_no_use(copy.turn_id)
    assert not copies.is_of_no_use("x")
    lost = ended(book.handle(te.TurnCancelled(at_s=3.0, turn_id=copy.turn_id, reason="no place")))
    assert copies.ended(lost.turn_id, lost.outcome) == (None, False)

    done = ended(end(book, "x", 1, at_s=4.0))
    assert copies.ended(done.turn_id, done.outcome) == (None, True)


def test_a_turn_without_a_copy_ends_as_ever() -> None:
    _, copies = fleet_of()
    assert copies.ended("y", te.TurnState.FAILED) == (None, True)


@pytest.mark.parametrize(("params", "field"), [({"most": -1}, "most"), ({"ratio": 0.0}, "ratio")])
def test_what_is_out_of_range_is_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CopyParams(**params)
    assert caught.value.field == field
