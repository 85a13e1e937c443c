"""Whom the workers of a turn book work for: everybody while jobs do not compete, and then whom provisioning says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.policy import assigning
from rose.policy import provisioning as pv
from rose.policy import turn_events as te
from rose.policy.assigning import Assigner, JobModel, Share, Switching
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier
from tests.policy.turn_kit import book_of, hear, join, submit

MUCH = Share(n_dedicated=9, n_harvested=9, n_borrowed=9)


def assigner_of(book: TurnBook, *, is_carried_out: bool = True, **shares: Share) -> Assigner:
    return Assigner(
        book=book,
        policy=pv.Provisioning(params=pv.ProvisioningParams(rest_s=0.0)),
        share_of=lambda job: shares.get(job, MUCH),
        is_carried_out=is_carried_out,
    )


def step(assigner: Assigner, at_s: float, **switching: Switching) -> dict[str, str | None]:
    """Whose each worker is after a decision."""
    assigner.step(at_s, switching)
    for event in assigner.assignments(at_s):
        assigner.book.handle(event)
    assigner.policy.check()
    return {worker.worker_id: worker.job for worker in assigner.book.fleet}


def ask(
    book: TurnBook, job: str, at_s: float = 0.0, count: int = 40, run: str = "", model: str = "m"
) -> None:
    """``job`` has so many turns; ``run``: whose weights its trainer asks for."""
    if run:
        book.handle(te.VersionRequired(at_s=at_s, job=job, version=(1, 0), run=run))
    for number in range(count):
        submit(book, f"{job}-{model}-{number}-{at_s}", at_s, job=job, model=model)


def test_a_fleet_without_jobs_or_with_one_that_asks_for_no_weights_is_everybodys() -> None:
    book = book_of()
    for index in range(4):
        join(book, f"w{index}", Tier.HARVESTED if index else Tier.DEDICATED)
    assigner = assigner_of(book)
    assert set(step(assigner, 1.0).values()) == {None}
    ask(book, "j", 1.0, count=1)
    for second in range(2, 60):
        assert set(step(assigner, float(second)).values()) == {None}
    assert assigner.policy.hosts == {}


def test_a_fleet_that_follows_the_only_jobs_run_is_everybodys_and_one_that_does_not_is_given_to_it() -> None:
    book = book_of()
    join(book, "mine", Tier.HARVESTED, run="x")
    join(book, "theirs", Tier.HARVESTED, run="y")
    join(book, "nobodys", Tier.HARVESTED)
    ask(book, "j", 0.0, run="x", count=300)
    assigner = assigner_of(book)
    step(assigner, 1.0)
    assert step(assigner, 2.0) == {"mine": None, "theirs": "j", "nobodys": "j"}
    hear(book, "theirs", 3.0, run="x")
    assert step(assigner, 3.0)["theirs"] is None


def test_a_job_that_has_the_fleet_to_itself_has_all_of_it() -> None:
    book = book_of()
    for name, run in (("a", "x"), ("b", "x"), ("other", "y")):
        join(book, name, Tier.DEDICATED, run=run)
    ask(book, "j", 0.0, run="x", count=1)
    assigner = assigner_of(book)
    step(assigner, 1.0)
    assert assigner.num_workers("j") == 2
    ask(book, "k", 1.0, run="y")
    step(assigner, 2.0)
    assert assigner.num_workers("j") + assigner.num_workers("k") == 3
    assert assigner.num_workers("k") >= 1


def test_two_jobs_that_ask_for_the_same_weights_or_none_do_not_compete() -> None:
    book = book_of()
    join(book, "a", Tier.DEDICATED, run="x")
    for job, run in (("train", "x"), ("eval", "x"), ("chat", "")):
        ask(book, job, 0.0, run=run)
    assert step(assigner_of(book), 1.0) == {"a": None}


def test_jobs_of_different_weights_compete_for_devices_of_their_model_alone() -> None:
    book = book_of()
    join(book, "a", Tier.DEDICATED, run="x")
    join(book, "b", Tier.DEDICATED, run="y")
    book.handle(
        te.WorkerRegistered(
            at_s=0.0, worker_id="judge", incarnation="1", tier=Tier.DEDICATED, model="judge", max_model_len=99
        )
    )
    hear(book, "judge", 0.0)
    for job, run in (("one", "x"), ("two", "y")):
        ask(book, job, 0.0, run=run)
    assert step(assigner_of(book), 1.0) == {"a": "one", "b": "two", "judge": None}


def test_a_cap_that_binds_is_kept_and_the_rest_is_parked() -> None:
    book = book_of()
    for name in ("a", "b"):
        join(book, name, Tier.HARVESTED)
    ask(book, "j", 0.0)
    assigner = assigner_of(book, j=Share(n_dedicated=0, n_harvested=1))
    assert sorted(map(str, step(assigner, 1.0).values())) == ["", "j"]


def test_when_a_second_job_comes_the_first_keeps_what_has_its_weights_until_the_second_gets_its_part() -> (
    None
):
    book = book_of()
    for index in range(4):
        join(book, f"w{index}", Tier.HARVESTED, run="x")
    ask(book, "one", 0.0, run="x", count=300)
    assigner = assigner_of(book)
    assert set(step(assigner, 1.0).values()) == {None}
    ask(book, "two", 1.0, run="y", count=300)
    assert sorted(map(str, step(assigner, 2.0).values())) == ["one", "one", "one", "two"]


def test_after_a_restart_the_fleet_goes_on_as_it_was_from_the_first_decision_on() -> None:
    book = book_of()
    runs = {"w0": "x", "w1": "x", "w2": "y"}
    for job, run in (("one", "x"), ("two", "y")):
        ask(book, job, 0.0, run=run, count=20)
    for name in runs:
        book.handle(
            te.WorkerRegistered(
                at_s=0.5, worker_id=name, incarnation="1", tier=Tier.HARVESTED, model="m", max_model_len=1000
            )
        )
    assigner = assigner_of(book)
    assert set(step(assigner, 1.0).values()) == {None}, "what they have nobody has said yet"
    for name, run in runs.items():
        hear(book, name, 1.5, run=run)
    assert step(assigner, 2.0) == {"w0": "one", "w1": "one", "w2": "two"}


def test_an_engine_that_starts_again_is_not_parked_meanwhile() -> None:
    book = book_of()
    join(book, "w", Tier.HARVESTED, run="x")
    ask(book, "j", 0.0, run="x", count=1)
    assigner = assigner_of(book)
    assert step(assigner, 1.0) == {"w": None}
    hear(book, "w", 2.0, state="starting", version=None, run="")
    for second in range(2, 9):
        assert step(assigner, float(second)) == {"w": None}


def test_a_device_of_a_job_that_competes_stays_its_own_while_its_engine_starts_again() -> None:
    book = book_of()
    join(book, "a", Tier.HARVESTED, run="x")
    join(book, "b", Tier.HARVESTED, run="y")
    for job, run in (("one", "x"), ("two", "y")):
        ask(book, job, 0.0, run=run)
    assigner = assigner_of(book)
    assert step(assigner, 1.0) == {"a": "one", "b": "two"}
    hear(book, "a", 2.0, state="starting", version=None, run="")
    assert step(assigner, 2.0) == {"a": "one", "b": "two"}


def test_most_turns_decide_a_jobs_model_and_not_the_first() -> None:
    book = book_of()
    join(book, "w", Tier.HARVESTED)
    ask(book, "j", 0.0, run="x", count=1, model="judge")
    assigner = assigner_of(book)
    step(assigner, 1.0)
    ask(book, "j", 1.0, count=20)
    assert step(assigner, 2.0) == {"w": "j"}
    assert assigner.policy.jobs["j"].model == "m"


def test_a_jobs_model_does_not_follow_every_swing_and_forgets_what_nobody_asks_for() -> None:
    model = JobModel()
    model.saw({"m": 10})
    for _ in range(30):
        model.saw({"m": 10, "judge": 12})
    assert model.name == "m"
    for _ in range(30):
        model.saw({"judge": 10})
    assert model.name == "judge"
    for number in range(100):
        model.saw({f"name-{number}": 1})
    assert len(model._counts) <= 8


def test_what_a_node_says_of_its_switches_reaches_the_policy() -> None:
    book = book_of()
    join(book, "w", Tier.HARVESTED, run="y")
    ask(book, "j", 0.0, run="x")
    assigner = assigner_of(book)
    step(assigner, 1.0, w=Switching(pull_s=9.0, commit_s=2.0, num_switches=3, copies=("y",)))
    host = assigner.policy.hosts["w"]
    assert (host.pull_s, host.commit_s, host.num_switches, host.copies) == (9.0, 2.0, 3, ("y",))


def test_where_nothing_is_carried_out_devices_are_taken_to_get_their_weights() -> None:
    """In mode ``observe`` no node is told anything, so no device would ever be seen to have obeyed."""
    book = book_of()
    join(book, "w", Tier.HARVESTED, run="y")
    ask(book, "j", 0.0, run="x", count=300)
    assigner = assigner_of(book, is_carried_out=False)
    for second in range(1, 200):
        hear(book, "w", float(second), run="y")
        for action in assigner.step(float(second), {}):
            assert not isinstance(action, pv.Release), action
    assert assigner.policy.held("j") == ["w"]


def finish(book: TurnBook, at_s: float) -> None:
    """All turns end."""
    for name in list(book.turns):
        book.handle(te.TurnCancelled(at_s=at_s, turn_id=name, reason="done"))


def test_jobs_that_train_longer_than_it_takes_to_be_away_keep_what_was_learned_of_them() -> None:
    """Three steps of a minute's sampling and five minutes' training."""
    book = book_of()
    for name in ("w0", "w1"):
        join(book, name, Tier.DEDICATED)
    assigner, second = assigner_of(book), 0
    for _ in range(3):
        ask(book, "one", float(second), run="x")
        ask(book, "two", float(second), run="y")
        for _ in range(60):
            second += 1
            step(assigner, float(second))
        finish(book, float(second))
        for _ in range(300):
            second += 1
            step(assigner, float(second))
    for job in ("one", "two"):
        assert assigner.policy.jobs[job].phases.usual_away_s == pytest.approx(300.0, abs=5.0)
        assert assigner.policy.jobs[job].used_s > 0
    assert assigner.jobs == ["one", "two"], "they come back, by what was learned"
    for _ in range(3 * 300):
        second += 1
        step(assigner, float(second))
    assert assigner.jobs == []


def test_what_was_learned_of_a_job_is_forgotten_after_a_long_time_or_for_the_sake_of_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assigning, "MAX_JOBS", 2)
    book = book_of()
    join(book, "w", Tier.DEDICATED)
    assigner = replace(assigner_of(book), job_forget_s=1000.0)

    def known() -> set[str]:
        return set(assigner.policy.jobs)

    for at_s, job in ((0.0, "one"), (10.0, "two")):
        ask(book, job, at_s, run=job)
        step(assigner, at_s)
        finish(book, at_s)
    ask(book, "three", 20.0, run="three")
    step(assigner, 20.0)
    assert known() == {"one", "two"}, "both may come back any moment"
    step(assigner, 125.0)
    assert known() == {"one", "two"}
    step(assigner, 126.0)
    assert known() == {"two", "three"}
    step(assigner, 140.0)
    step(assigner, 1100.0)
    assert known() == {"two", "three"}
    step(assigner, 1200.0)
    assert known() == {"three"}


def test_a_job_whose_trainer_has_a_batch_is_there() -> None:
    book = book_of()
    join(book, "w", Tier.DEDICATED)
    assigner = replace(assigner_of(book), is_training=lambda job: job == "one")
    for job in ("one", "two"):
        ask(book, job, 0.0, run=job)
    step(assigner, 0.0)
    finish(book, 0.0)
    for second in range(1, 200):
        step(assigner, float(second))
    assert assigner.jobs == ["one"]
