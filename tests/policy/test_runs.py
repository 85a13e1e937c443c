"""Turns of one run are never placed on, or recorded from, weights of another."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.decisions.freeze import freeze, thaw
from rose.decisions.log import covers
from rose.lineage import Version
from rose.policy import turn_events as te
from rose.policy.fleet import FleetParams
from rose.policy.routing import make_policy
from rose.policy.stop_reasons import OTHER_RUN
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier
from tests.policy.turn_kit import book_of, dispatches, hear, join, submit, tokens


class Book:
    """A turn book, and a clock that goes on with every event."""

    def __init__(self) -> None:
        self.book = TurnBook(make_policy("cost", random.Random(0)), te.TurnParams(), FleetParams())
        self.now_s = 0.0
        self.seq = 0

    def tell(self, event: type, **fields: object) -> list[te.Action]:
        self.now_s += 0.01
        return self.book.handle(event(at_s=self.now_s, **fields))

    def worker(self, name: str, *, run: str, version: Version = (1, 5)) -> list[te.Action]:
        self.tell(
            te.WorkerRegistered,
            worker_id=name, incarnation="1", tier=Tier.DEDICATED, model="policy", max_model_len=4096,
        )  # fmt: skip
        return self.beat(name, run=run, version=version)

    def beat(self, name: str, *, run: str, version: Version = (1, 5)) -> list[te.Action]:
        self.seq += 1
        return self.tell(
            te.WorkerHeartbeat,
            worker_id=name, incarnation="1", seq=self.seq, version=version, state="ready", run=run,
        )  # fmt: skip

    def turn(self, name: str, job: str, *, streamed: bool = False, run: str = "") -> list[te.Action]:
        return self.tell(
            te.TurnSubmitted,
            turn_id=name, trajectory_id=f"of {name}", job=job, model="policy", num_prompt_tokens=10, max_tokens=50, streamed=streamed, run=run,
        )  # fmt: skip

    def tokens(self, name: str, count: int = 5) -> list[te.Action]:
        turn = self.book.turns[name]
        return self.tell(te.TokensArrived, turn_id=name, attempt=turn.attempt, token_ids=(7,) * count)


def placed(actions: list[te.Action]) -> list[str]:
    return [action.worker_id for action in actions if isinstance(action, te.Dispatch)]


def test_a_job_never_runs_on_weights_of_another_run_however_new_they_are() -> None:
    """One worker followed job A at 1.5, job B required 1.3, and B's turn ran on A's weights."""
    book = Book()
    book.worker("w", run="run-a", version=(1, 5))
    book.tell(te.VersionRequired, job="b", version=(1, 3), run="run-b")

    assert placed(book.turn("t", "b")) == []
    assert book.book.turns["t"].hold == "run"
    assert placed(book.worker("v", run="run-b", version=(1, 3))) == ["v"]


def test_a_worker_that_names_no_run_takes_no_turn_of_a_job_that_does() -> None:
    book = Book()
    book.worker("w", run="")
    book.tell(te.VersionRequired, job="b", version=(1, 3), run="run-b")

    assert placed(book.turn("t", "b")) == []


def test_a_job_that_names_no_run_goes_anywhere() -> None:
    book = Book()
    book.worker("w", run="run-a")

    assert placed(book.turn("t", "chat")) == ["w"]


def test_a_turn_of_such_a_job_stays_with_the_run_that_sampled_its_first_tokens() -> None:
    book = Book()
    book.worker("w", run="run-a")
    book.turn("t", "chat")
    book.tokens("t")
    book.worker("v", run="run-b")

    assert placed(book.tell(te.WorkerLost, worker_id="w", reason="reset")) == []
    assert placed(book.worker("u", run="run-a")) == ["u"]


def test_what_an_engine_stamps_counts_for_more_than_what_its_node_said() -> None:
    """The node's heartbeat was half a second old: its engine had gone over to another run's weights."""
    book = Book()
    book.tell(te.VersionRequired, job="a", version=(1, 5), run="run-a")
    book.worker("w", run="run-a")
    book.turn("t", "a")

    actions = book.tell(
        te.AttemptEnded, turn_id="t", attempt=1, finish_reason="stop", token_ids=(7,) * 5, run="run-b"
    )

    assert not any(isinstance(action, te.TurnEnded) for action in actions)
    assert any(isinstance(action, te.TokensDropped) for action in actions)
    assert placed(book.worker("v", run="run-a")) == ["v"]


def test_a_segment_names_the_run_that_its_engine_stamped() -> None:
    book = Book()
    book.worker("w", run="")
    book.turn("t", "chat")

    (ended,) = (
        action
        for action in book.tell(
            te.AttemptEnded, turn_id="t", attempt=1, finish_reason="stop", token_ids=(7,) * 5, run="run-a"
        )
        if isinstance(action, te.TurnEnded)
    )

    assert [segment.run for segment in ended.result.segments] == ["run-a"]


@pytest.mark.parametrize("job", ["a", "chat"])
def test_what_an_engine_does_not_stamp_no_job_that_names_a_run_keeps(job: str) -> None:
    """Its node's heartbeat was believed: the engine may have any weights."""
    book = Book()
    book.tell(te.VersionRequired, job="a", version=(1, 5), run="run-a")
    book.worker("w", run="run-a")
    for turn in ("t", "u"):
        book.turn(turn, job)
        book.tokens(turn)

    actions = book.tell(te.AttemptEnded, turn_id="t", attempt=1, finish_reason="stop", token_ids=(7,))

    if job == "chat":
        assert any(isinstance(action, te.TurnEnded) for action in actions)
        return
    assert not any(isinstance(action, te.TurnEnded) for action in actions)
    assert not book.book.turns["t"].token_ids
    # What it was still sampling is nobody's either, and it is given no more, whatever its node says.
    book.tell(te.AttemptFailed, turn_id="u", attempt=1, kind="lost", message="reset")
    assert not book.book.turns["u"].token_ids
    book.now_s += 60.0
    assert placed(book.beat("w", run="run-a")) == []
    assert book.book.turns["t"].hold == "run"
    assert placed(book.worker("v", run="run-a")) == ["v", "v"]


def test_a_turn_that_its_engine_refuses_goes_elsewhere_and_keeps_its_tokens() -> None:
    book = Book()
    book.tell(te.VersionRequired, job="a", version=(1, 5), run="run-a")
    book.worker("w", run="run-a")
    book.turn("t", "a")

    book.tell(
        te.AttemptEnded,
        turn_id="t", attempt=1, finish_reason="abort", stop_reason=OTHER_RUN, token_ids=(7,) * 5, run="run-a",
    )  # fmt: skip

    assert len(book.book.turns["t"].token_ids) == 5
    assert placed(book.worker("v", run="run-a")) == ["v"]


def test_an_answer_of_several_runs_is_not_kept() -> None:
    book = Book()
    book.worker("w", run="run-a")
    book.turn("t", "chat")
    book.tokens("t")

    book.tell(te.AttemptFailed, turn_id="t", attempt=1, kind="run", message="two runs")

    assert not book.book.turns["t"].token_ids


def test_a_trajectory_of_a_job_that_names_no_run_stays_with_the_run_of_its_first_turn() -> None:
    book = Book()
    book.worker("w", run="run-b")

    assert placed(book.turn("t", "chat", run="run-a")) == []
    assert book.book.turns["t"].hold == "run"
    assert placed(book.worker("v", run="run-a")) == ["v"]


def test_a_worker_that_goes_over_to_another_run_lets_go_of_its_turns() -> None:
    book = Book()
    book.tell(te.VersionRequired, job="a", version=(1, 5), run="run-a")
    book.worker("w", run="run-a")
    book.worker("v", run="run-a")
    (first,) = placed(book.turn("t", "a"))
    book.tokens("t")

    other = placed(book.beat(first, run="run-b"))

    assert other == [{"w": "v", "v": "w"}[first]]
    assert len(book.book.turns["t"].token_ids) == 5


def test_a_job_that_is_taken_over_by_another_run_keeps_no_token_of_the_first() -> None:
    book = Book()
    book.tell(te.VersionRequired, job="a", version=(1, 5), run="run-a")
    book.worker("w", run="run-a")
    book.turn("t", "a")
    book.tokens("t")

    actions = book.tell(te.VersionRequired, job="a", version=(2, 0), run="run-c")

    assert any(isinstance(action, te.TokensDropped) for action in actions)
    assert placed(book.worker("u", run="run-c", version=(2, 0))) == ["u"]
    assert not book.book.turns["t"].token_ids


def test_a_turn_that_a_client_has_read_a_part_of_ends_where_its_job_goes_over_to_another_run() -> None:
    book = Book()
    book.worker("w", run="")
    book.turn("t", "a", streamed=True)
    book.tokens("t")

    actions = book.tell(te.VersionRequired, job="a", version=(2, 0), run="run-c")

    (ended,) = [action for action in actions if isinstance(action, te.TurnEnded)]
    assert ended.outcome is te.TurnState.FAILED


def test_a_turn_that_waits_is_tried_again_when_its_job_names_the_run() -> None:
    """The engine had the weights before the trainer said so."""
    book = Book()
    book.tell(te.VersionRequired, job="a", version=(1, 0), run="run-x")
    book.worker("w", run="run-a")
    assert placed(book.turn("t", "a")) == []

    assert placed(book.tell(te.VersionRequired, job="a", version=(1, 5), run="run-a")) == ["w"]


def test_a_turn_whose_run_is_gone_begins_anew_when_it_has_waited_long_enough() -> None:
    book = Book()
    book.worker("w", run="run-a")
    book.turn("t", "chat")
    book.tokens("t")
    book.beat("w", run="run-b")
    assert book.book.turns["t"].worker is None

    book.now_s += te.TurnParams().max_queue_s
    book.beat("w", run="run-b")
    actions = book.tell(te.ClockTicked)

    assert [action.hold for action in actions if isinstance(action, te.AnswerUnavailable)] == ["run"]
    assert placed(actions) == ["w"]


def waiting_with_tokens() -> TurnBook:
    """A turn with a prompt of 10 tokens and 60 of its own, of run "r"; 30 are expected, so it needs room for 100."""
    book = book_of(expected_tokens=30)
    join(book, "w", Tier.DEDICATED, run="r")
    submit(book, "t", max_tokens=90)
    tokens(book, "t", 1, *[7] * 60)
    book.handle(te.WorkerLost(at_s=0.2, worker_id="w", reason="reset", forget=True))
    assert [room for _, _, room in book.queue] == [100]
    return book


def test_a_turn_that_begins_anew_needs_the_room_of_a_new_one_when_its_job_names_another_run() -> None:
    book = waiting_with_tokens()

    book.handle(te.VersionRequired(at_s=0.3, job="j", version=(1, 0), run="s"))

    join(book, "v", Tier.DEDICATED, at_s=0.4, run="s", kv_budget_tokens=39)
    assert dispatches(hear(book, "v", 0.5, run="s", kv_budget_tokens=40))


def test_a_turn_that_begins_anew_needs_the_room_of_a_new_one_when_its_run_is_gone() -> None:
    book = waiting_with_tokens()
    join(book, "v", Tier.DEDICATED, at_s=19.9, run="s", kv_budget_tokens=39)
    later_s = 0.2 + te.TurnParams().max_queue_s
    hear(book, "v", later_s, run="s", kv_budget_tokens=39)

    book.handle(te.ClockTicked(at_s=later_s))

    assert dispatches(hear(book, "v", later_s, run="s", kv_budget_tokens=40))


RUNS = ("run-a", "run-b", "")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("beat"), st.sampled_from("xyz"), st.sampled_from(RUNS), st.integers(0, 3)),
            st.tuples(st.just("turn"), st.sampled_from("ab")),
            st.tuples(st.just("require"), st.sampled_from("ab"), st.integers(0, 3)),
            st.tuples(st.just("tokens"), st.integers(0, 9)),
            st.tuples(st.just("lost"), st.sampled_from("xyz")),
        ),
        max_size=40,
    )
)
def test_no_token_of_a_job_is_ever_of_another_run(steps: list[tuple[object, ...]]) -> None:
    book, number = Book(), 0
    required = {"a": 0, "b": 0}
    for name in required:
        book.tell(te.VersionRequired, job=name, version=(1, 0), run=f"run-{name}")
    for name in "xyz":
        book.worker(name, run="run-a", version=(1, 0))
    for step in steps:
        match step:
            case ("beat", str() as worker, str() as run, int() as version):
                if worker in book.book.fleet.workers:
                    book.beat(worker, run=run, version=(1, version))
            case ("turn", str() as job):
                number += 1
                book.turn(f"t{number}", job)
            case ("require", str() as job, int() as version):
                required[job] = max(required[job], version)
                book.tell(te.VersionRequired, job=job, version=(1, required[job]), run=f"run-{job}")
            case ("tokens", int() as which):
                live = [name for name, turn in book.book.turns.items() if turn.worker is not None]
                if live:
                    book.tokens(live[which % len(live)], 1)
            case ("lost", str() as worker):
                book.tell(te.WorkerLost, worker_id=worker, reason="reset")
                book.worker(worker, run="run-b", version=(1, 3))
        for turn in book.book.turns.values():
            assert {segment.run for segment in turn.segments} <= {f"run-{turn.spec.job}"}
            assert turn.worker is None or turn.worker.run == f"run-{turn.spec.job}"
        book.book.check()


# --- decision logs from before there were runs

NEW = {
    "turns.TurnBook": {"runs"},
    "placing.Placer": {"runs"},
    "worker.Worker": {"run"},
    "turn.Turn": {"dispatch_run"},
}
MOVED = {"worker.LendingState": "fleet.Lending"} | {
    f"worker.{name}": f"fleet.{name}" for name in ("Worker", "Tier", "Health", "Duty")
}


def as_before(nodes: list[list[Any]]) -> list[list[Any]]:
    """A frozen state as it was written then."""
    found = []
    for node in nodes:
        if node[0] == "object":
            pairs = [
                (name, part)
                for name, part in zip(node[2::2], node[3::2], strict=True)
                if name not in NEW.get(node[1], ()) and (node[1], name) != ("packed.WorkerTable", "run")
            ]
            node = [*node[:2], *(one for pair in pairs for one in pair)]
        elif node[0] == "dict" and "reclaim_rate" in node and "run" in node:  # the table's columns
            at = node.index("run")
            node = [*node[:at], *node[at + 2 :]]
        if node[0] in ("object", "enum"):
            node = [node[0], MOVED.get(node[1], node[1]), *node[2:]]
        found.append(node)
    return found


def test_the_state_of_an_older_decision_log_goes_on() -> None:
    book = Book()
    book.worker("w", run="")
    book.worker("v", run="")
    book.tell(te.VersionRequired, job="a", version=(1, 2))
    book.turn("t", "a")
    old = Book()
    old.book, old.now_s, old.seq = thaw(as_before(freeze(book.book))), book.now_s, book.seq

    old.book.check()
    for each in (book, old):
        each.beat("w", run="", version=(1, 6))
        each.turn("u", "a")
    assert [turn.worker and turn.worker.worker_id for turn in old.book.turns.values()] == [
        turn.worker and turn.worker.worker_id for turn in book.book.turns.values()
    ]
    old.book.check()


def test_a_queue_without_the_room_that_a_turn_needs_goes_on() -> None:
    """As it was in a decision log of before: pairs of order and turn."""
    book = Book()
    book.turn("t", "a")
    nodes = freeze(book.book)
    (queue,) = (
        dict(zip(node[2::2], node[3::2], strict=True))["queue"]
        for node in nodes
        if node[:2] == ["object", "placing.Placer"]
    )
    for (entry,) in nodes[queue[0]][1:]:
        assert nodes[entry].pop() == book.book.turns["t"].need_tokens

    old = Book()
    old.book, old.now_s, old.seq = thaw(nodes), book.now_s, book.seq

    assert placed(old.worker("w", run="")) == ["w"]


@pytest.mark.parametrize(
    ("then", "same"),
    [
        ([[5, "t", {"segments": [{"worker": "w"}]}]], True),
        ([[5, "t", {"segments": [{"worker": "v"}]}]], False),
        ([[5, "t"], [6]], False),
        ([[5, "t", {"segments": []}]], False),
        ([[5, "t", {"segments": [{"worker": "w"}], "more": 1}]], False),
    ],
)
def test_recorded_actions_of_an_older_version_have_fewer_fields(then: list[list[Any]], same: bool) -> None:
    assert covers([[5, "t", {"segments": [{"worker": "w", "run": ""}]}, "capacity"]], then) == same
