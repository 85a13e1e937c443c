"""TurnBook: what becomes of a turn whose engine cuts it, dies or lies."""

from __future__ import annotations

import pytest

from rose.errors import PolicyError
from rose.policy import turn_events as te
from rose.policy.stop_reasons import RECLAIMED
from rose.policy.turns import TurnBook
from rose.policy.worker import Duty, Tier
from tests.policy.turn_kit import book_of, dispatches, end, ended, hear, join, submit, tokens


def test_reclaimed_turn_continues_on_another_worker_with_its_tokens(book: TurnBook) -> None:
    (first,) = dispatches(submit(book, "a", dedicated_only=False))
    tokens(book, "a", 1, 5, 6, 7)
    (second,) = dispatches(end(book, "a", 1, "abort", stop_reason=RECLAIMED))
    assert second.worker_id != first.worker_id
    assert (second.attempt, second.num_kept_tokens, second.max_tokens) == (2, 3, 5)
    tokens(book, "a", 2, 8, at_s=0.3)
    done = ended(end(book, "a", 2, at_s=0.4))
    assert done.outcome is te.TurnState.DONE
    assert done.result.token_ids == (5, 6, 7, 8)
    assert done.result.logprobs == (-5.0, -6.0, -7.0, -8.0)
    assert [(s.attempt, s.start, s.num_tokens) for s in done.result.segments] == [(1, 0, 3), (2, 3, 1)]


def test_a_late_result_of_a_replaced_attempt_changes_nothing(book: TurnBook) -> None:
    (first,) = dispatches(submit(book, "a"))
    actions = book.handle(te.WorkerLost(at_s=0.1, worker_id=first.worker_id, reason="lost"))
    assert te.AbortAttempt(turn_id="a", attempt=1, worker_id=first.worker_id) in actions
    assert tokens(book, "a", 1, 9, 9) == [te.Fenced(turn_id="a", attempt=1, num_tokens=2)]
    assert end(book, "a", 1)[0] == te.Fenced(turn_id="a", attempt=1, num_tokens=0)
    tokens(book, "a", 2, 4, at_s=0.3)
    assert ended(end(book, "a", 2, at_s=0.4)).result.token_ids == (4,)


def test_a_turn_that_cannot_be_resumed_restarts_from_its_prompt(book: TurnBook) -> None:
    submit(book, "a", resumable=False)
    tokens(book, "a", 1, 5, 6)
    actions = end(book, "a", 1, "abort", stop_reason=RECLAIMED)
    assert te.TokensDropped(turn_id="a", num_tokens=2) in actions
    (second,) = dispatches(actions)
    assert (second.num_kept_tokens, second.max_tokens) == (0, 8)


def test_engine_version_spans_replace_the_version_at_dispatch(book: TurnBook) -> None:
    submit(book, "a")
    tokens(book, "a", 1, 5, 6, 7)
    spans = (te.Span(version=(1, 0), start=0, num_tokens=1), te.Span(version=(1, 1), start=1, num_tokens=2))
    assert ended(end(book, "a", 1, versions=spans)).result.spans == spans


def test_how_old_a_turn_under_way_is_at_least(book: TurnBook) -> None:
    """A live token may be as new as what was published when it came: the worker may have changed its weights since the dispatch."""

    def publish(version: tuple[int, int]) -> None:
        book.handle(te.VersionRequired(at_s=0.1, job="j", version=version))
        for name in ("d", "h"):
            hear(book, name, 0.1, version=version)

    submit(book, "a")
    submit(book, "other", job="k")
    assert book.oldest_live("j") == {}
    publish((1, 2))
    tokens(book, "a", 1, 5, 6)
    tokens(book, "other", 1, 5)
    publish((1, 3))
    tokens(book, "a", 1, 7)
    assert book.oldest_live("j") == {"t-a": (1, 2)}
    spans = (te.Span(version=(1, 1), start=0, num_tokens=3),)
    end(book, "a", 1, "abort", stop_reason=RECLAIMED, versions=spans)
    tokens(book, "a", 2, 8, at_s=0.3)
    assert book.oldest_live("j") == {"t-a": (1, 1)}


def test_a_turn_under_way_may_be_as_new_as_its_worker_was_heard_to_be(book: TurnBook) -> None:
    """A trainer's weights are at the relay, and in engines, before its call names them to the scheduler."""
    book.handle(te.VersionRequired(at_s=0.0, job="j", version=(1, 4)))
    for name in ("d", "h"):
        hear(book, name, 0.0, version=(1, 5))
    submit(book, "a")
    tokens(book, "a", 1, 5)
    assert book.oldest_live("j") == {"t-a": (1, 5)}


def test_how_old_a_turn_of_two_attempts_is_goes_by_the_step(book: TurnBook) -> None:
    """Its trainer began anew from an older checkpoint: 2.3 is older than 1.10, and is made a later attempt's by its number alone."""
    for name in ("d", "h"):
        hear(book, name, 0.0, version=(1, 10))
    submit(book, "a")
    tokens(book, "a", 1, 5)
    of_first = (te.Span(version=(1, 10), start=0, num_tokens=1),)
    end(book, "a", 1, "abort", stop_reason=RECLAIMED, versions=of_first)
    book.handle(te.VersionRequired(at_s=0.25, job="j", version=(2, 3)))
    # Its worker was sent it at 1.10, and is not bound by what was published since.
    tokens(book, "a", 2, 6, at_s=0.3)
    assert book.oldest_live("j") == {"t-a": (1, 10)}
    end(book, "a", 2, "abort", at_s=0.5, stop_reason=RECLAIMED, versions=of_first)
    assert [sent.attempt for sent in dispatches(hear(book, "d", 3.0, version=(2, 3)))] == [3]
    tokens(book, "a", 3, 7, at_s=3.1)
    assert book.oldest_live("j") == {"t-a": (2, 3)}


def test_version_spans_that_do_not_fit_are_ignored(book: TurnBook) -> None:
    submit(book, "a")
    tokens(book, "a", 1, 5, 6, 7)
    gap = (te.Span(version=(9, 9), start=1, num_tokens=2),)
    result = ended(end(book, "a", 1, versions=gap)).result
    assert result.spans == (te.Span(version=(1, 0), start=0, num_tokens=3),)


def test_workers_below_the_required_version_take_no_new_turn(book: TurnBook) -> None:
    book.handle(te.VersionRequired(at_s=0.0, job="j", version=(1, 1)))
    assert dispatches(submit(book, "a")) == []
    assert book.turns["a"].hold == "weights"
    (sent,) = dispatches(hear(book, "h", 0.1, version=(1, 1)))
    assert sent.worker_id == "h"


def test_other_jobs_are_not_held_back_by_a_version(book: TurnBook) -> None:
    book.handle(te.VersionRequired(at_s=0.0, job="other", version=(1, 1)))
    assert len(dispatches(submit(book, "a"))) == 1


def test_a_turn_never_goes_back_to_older_weights(book: TurnBook) -> None:
    assert dispatches(submit(book, "a", min_version=(1, 5))) == []
    (sent,) = dispatches(hear(book, "d", 0.1, version=(1, 5)))
    assert sent.worker_id == "d"


def test_a_cut_turn_does_not_continue_on_older_weights(book: TurnBook) -> None:
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="h", duty=Duty.CORDONED))
    submit(book, "a")
    tokens(book, "a", 1, 5)
    book.handle(te.WorkerDuty(at_s=0.1, worker_id="h", duty=Duty.ACTIVE))
    newer = (te.Span(version=(1, 1), start=0, num_tokens=1),)
    assert dispatches(end(book, "a", 1, "abort", stop_reason=RECLAIMED, versions=newer)) == []
    assert dispatches(hear(book, "h", 0.3, version=(1, 0))) == []
    (sent,) = dispatches(hear(book, "h", 0.4, version=(1, 1)))
    assert sent.worker_id == "h"


def test_a_turn_that_was_cut_three_times_waits_for_a_dedicated_worker(book: TurnBook) -> None:
    book.handle(te.WorkerDuty(at_s=0.0, worker_id="d", duty=Duty.CORDONED))
    submit(book, "a")
    at_s = 0.0
    for attempt in (1, 2, 3):
        at_s += 10.0
        hear(book, "d", at_s)
        hear(book, "h", at_s)
        book.handle(te.ClockTicked(at_s=at_s))
        end(book, "a", attempt, "abort", at_s=at_s, stop_reason=RECLAIMED)
    at_s += 10.0
    hear(book, "h", at_s)
    assert book.turns["a"].hold == "pinned"
    (sent,) = dispatches(book.handle(te.WorkerDuty(at_s=at_s, worker_id="d", duty=Duty.ACTIVE)))
    assert sent.worker_id == "d"


def test_infrastructure_failures_have_a_budget(book: TurnBook) -> None:
    submit(book, "a")
    at_s = 0.0
    actions: list[te.Action] = []
    for attempt in range(1, 7):
        at_s += 20.0
        for name in ("d", "h"):
            hear(book, name, at_s)
        actions = book.handle(
            te.AttemptFailed(at_s=at_s, turn_id="a", attempt=attempt, kind="lost", message="boom")
        )
        if attempt < 6:
            hear(book, "d", at_s + 10)
    assert (ended(actions).outcome, ended(actions).reason) == (te.TurnState.FAILED, "infra")


def test_a_deterministic_refusal_fails_the_turn_at_once(book: TurnBook) -> None:
    submit(book, "a")
    actions = book.handle(te.AttemptFailed(at_s=0.1, turn_id="a", attempt=1, kind="data", message="too long"))
    assert (ended(actions).reason, ended(actions).message) == ("data", "too long")


def test_waiting_too_long_answers_503_and_keeps_the_place() -> None:
    book = book_of(max_queue_s=5.0, detach_s=30.0)
    submit(book, "a")
    assert book.handle(te.ClockTicked(at_s=4.9)) == []
    assert book.handle(te.ClockTicked(at_s=5.0)) == [
        te.AnswerUnavailable(turn_id="a", waited_s=5.0, hold="model")
    ]
    book.handle(te.ClientBack(at_s=8.0, turn_id="a"))
    book.handle(te.ClockTicked(at_s=36.0))
    assert "a" in book.turns


def test_an_abandoned_turn_is_cancelled_after_a_while(book: TurnBook) -> None:
    submit(book, "a")
    book.handle(te.ClientGone(at_s=0.1, turn_id="a"))
    for at_s in range(1, 30):
        for name in ("d", "h"):
            hear(book, name, float(at_s))
        book.handle(te.ClockTicked(at_s=float(at_s)))
    actions = book.handle(te.ClockTicked(at_s=30.2))
    assert any(isinstance(action, te.AbortAttempt) for action in actions)
    assert (ended(actions).outcome, ended(actions).reason) == (te.TurnState.CANCELLED, "client_gone")


@pytest.mark.parametrize("to", ["streamed", "streamed_here"])
def test_a_stalled_stream_moves_unless_its_engine_is_gated(to: str) -> None:
    book = book_of(stall_s=3.0)
    join(book, "d", Tier.DEDICATED)
    submit(book, "a", **{to: True})
    for at_s in (1.0, 2.0, 3.0):
        hear(book, "d", at_s, gated=True)
        assert not any(isinstance(a, te.Requeued) for a in book.handle(te.ClockTicked(at_s=at_s)))
    hear(book, "d", 3.5, gated=False)
    actions = book.handle(te.ClockTicked(at_s=3.6))
    assert te.Requeued(turn_id="a", worker_id="d", reason="stall", num_kept_tokens=0) in actions


def test_illegal_events_raise_and_change_nothing(book: TurnBook) -> None:
    submit(book, "a", at_s=5.0)
    before = (dict(book.turns), list(book.queue), book.turns["a"].attempt)
    with pytest.raises(PolicyError, match="already running"):
        submit(book, "a", at_s=5.0)
    with pytest.raises(PolicyError, match="time went back"):
        submit(book, "b", at_s=4.0)
    with pytest.raises(PolicyError, match="not running"):
        book.handle(te.TurnCancelled(at_s=5.0, turn_id="ghost", reason="x"))
    with pytest.raises(PolicyError, match="not registered"):
        book.handle(te.WorkerDuty(at_s=5.0, worker_id="ghost", duty=Duty.ACTIVE))
    with pytest.raises(PolicyError, match="room for one token"):
        submit(book, "b", at_s=5.0, max_tokens=0)
    assert before == (dict(book.turns), list(book.queue), book.turns["a"].attempt)


def test_a_turn_that_is_aborted_without_a_token_again_and_again_waits_no_longer_than_the_bound() -> None:
    book = book_of(backoff_s=1.0, max_backoff_s=8.0)
    join(book, "w", Tier.DEDICATED)
    submit(book, "a")
    turn = book.turns["a"]
    waits = list[float]()
    for attempt in range(1, 1100):
        at_s = 10.0 * attempt
        hear(book, "w", at_s)
        book.handle(te.ClockTicked(at_s=at_s))
        end(book, "a", attempt, "abort", at_s=at_s)
        waits.append(turn.backoff_until_s["w"] - at_s)
    assert waits[:4] == [2.0, 4.0, 8.0, 8.0]
    assert waits[-1] == 8.0
