"""SampleBook: whole groups, first ready first, to one trainer, exactly once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rose.errors import Conflict, Gone, NotFound
from rose.policy import samples as sp


@pytest.fixture
def book() -> Iterator[sp.SampleBook]:
    book = sp.SampleBook(params=sp.SampleParams(alpha=2))
    yield book
    book.check()


def create(book: sp.SampleBook, name: str, group: str = "g", size: int = 2) -> None:
    book.handle(sp.TrajectoryCreated(trajectory_id=name, job="j", group_id=group, group_size=size))


def finish(book: sp.SampleBook, name: str, oldest: tuple[int, int] | None = (1, 0)) -> list[sp.Action]:
    versions = () if oldest is None else (oldest,)
    return book.handle(sp.TrajectoryFinished(trajectory_id=name, versions=versions))


def fill(book: sp.SampleBook, group: str, oldest: tuple[int, int] = (1, 0)) -> None:
    for index in range(2):
        create(book, f"{group}{index}", group)
        finish(book, f"{group}{index}", oldest)


def lease(
    book: sp.SampleBook,
    name: str = "b",
    num_groups: int = 1,
    version: tuple[int, int] = (1, 0),
    at_s: float = 0.0,
) -> list[sp.Action]:
    return book.handle(
        sp.BatchAsked(at_s=at_s, batch_id=name, job="j", num_groups=num_groups, version=version, ttl_s=10.0)
    )


def leased(actions: list[sp.Action]) -> tuple[str, ...]:
    return next((a.trajectory_ids for a in actions if isinstance(a, sp.Leased)), ())


def test_a_group_is_ready_when_all_its_members_have_finished(book: sp.SampleBook) -> None:
    create(book, "a")
    create(book, "b")
    assert finish(book, "a") == []
    assert leased(lease(book)) == ()
    assert finish(book, "b") == [sp.GroupReady(job="j", group_id="g")]
    assert leased(lease(book)) == ("a", "b")


def test_members_beyond_the_group_size_are_redundant(book: sp.SampleBook) -> None:
    for name in "abc":
        create(book, name)
    finish(book, "a")
    assert sp.Discard(trajectory_ids=("b",), reason="redundant") in finish(book, "c")
    assert leased(lease(book)) == ("a", "c")
    with pytest.raises(Gone, match="redundant"):
        finish(book, "b")


def test_a_cancelled_member_is_replaced_by_a_new_sample(book: sp.SampleBook) -> None:
    create(book, "a")
    create(book, "b")
    finish(book, "a")
    book.handle(sp.TrajectoryCancelled(trajectory_id="b", reason="env"))
    create(book, "c")
    finish(book, "c")
    assert leased(lease(book)) == ("a", "c")


def test_groups_are_leased_in_the_order_they_became_ready(book: sp.SampleBook) -> None:
    for group in ("p", "q", "r"):
        fill(book, group)
    assert leased(lease(book, "b1", num_groups=2)) == ("p0", "p1", "q0", "q1")
    assert leased(lease(book, "b2", num_groups=2)) == ()
    assert leased(lease(book, "b2")) == ("r0", "r1")


def test_an_expired_lease_returns_its_groups_to_the_front(book: sp.SampleBook) -> None:
    fill(book, "p")
    lease(book)
    fill(book, "q")
    assert book.due(9.9) == []
    assert book.due(10.0) == ["b"]
    book.handle(sp.BatchExpired(batch_id="b"))
    assert leased(lease(book, "b2")) == ("p0", "p1")


def test_acknowledging_consumes_and_may_be_repeated(book: sp.SampleBook) -> None:
    fill(book, "p")
    lease(book)
    ack = sp.BatchAcked(batch_id="b", step=7, attempt=1)
    assert book.handle(ack) == [sp.Consumed(trajectory_ids=("p0", "p1"))]
    assert book.handle(ack) == []
    with pytest.raises(Conflict, match="step 7"):
        book.handle(sp.BatchAcked(batch_id="b", step=8, attempt=1))
    assert leased(lease(book, "b2")) == ()


def test_a_late_acknowledgement_counts_until_the_groups_are_leased_again(book: sp.SampleBook) -> None:
    for group, again in (("p", False), ("q", True)):
        fill(book, group)
        lease(book, group)
        book.handle(sp.BatchExpired(batch_id=group))
        if again:
            lease(book, "other")
            with pytest.raises(Gone, match="leased again"):
                book.handle(sp.BatchAcked(batch_id=group, step=1, attempt=1))
        else:
            assert book.handle(sp.BatchAcked(batch_id=group, step=1, attempt=1)) != []
            assert leased(lease(book, "none")) == ()


def test_a_batch_that_ran_out_has_no_part_of_a_later_group_of_the_same_name(book: sp.SampleBook) -> None:
    fill(book, "p")
    lease(book, "late")
    book.handle(sp.BatchExpired(batch_id="late"))
    lease(book, "other")
    book.handle(sp.BatchAcked(batch_id="other", step=1, attempt=1))
    for name in ("again0", "again1"):
        create(book, name, "p")
        finish(book, name)
    for event in (
        sp.BatchAcked(batch_id="late", step=1, attempt=1),
        sp.BatchAsked(at_s=0.0, batch_id="late", job="j", num_groups=1, version=(1, 0), ttl_s=10.0),
    ):
        with pytest.raises(Gone):
            book.handle(event)
    assert leased(lease(book, "next")) == ("again0", "again1")


def test_a_restarted_trainer_gets_back_what_it_had_not_consumed(book: sp.SampleBook) -> None:
    fill(book, "p")
    fill(book, "q")
    lease(book, num_groups=2)
    actions = book.handle(sp.JobResumed(job="j", attempt=2, consumed=("p0", "p1")))
    assert sp.Consumed(trajectory_ids=("p0", "p1")) in actions
    assert leased(lease(book, "b2", version=(2, 0))) == ("q0", "q1")


def test_a_replaced_trainer_can_no_longer_lease(book: sp.SampleBook) -> None:
    """Its groups would be lost to the one that replaced it until the lease ran out."""
    fill(book, "p")
    book.handle(sp.JobResumed(job="j", attempt=2, consumed=()))
    with pytest.raises(Conflict, match="replaced"):
        lease(book, version=(1, 0))
    assert leased(lease(book, version=(2, 0))) == ("p0", "p1")


def test_a_replaced_trainer_can_no_longer_acknowledge(book: sp.SampleBook) -> None:
    fill(book, "p")
    book.handle(sp.JobResumed(job="j", attempt=2, consumed=()))
    lease(book, version=(2, 0))
    with pytest.raises(Conflict, match="replaced"):
        book.handle(sp.BatchAcked(batch_id="b", step=1, attempt=1))
    with pytest.raises(Conflict, match="replaced"):
        book.handle(sp.JobResumed(job="j", attempt=1, consumed=()))


def test_stale_groups_are_dropped_whole_at_the_lease(book: sp.SampleBook) -> None:
    create(book, "p0", "p")
    create(book, "p1", "p")
    finish(book, "p0", (1, 3))
    finish(book, "p1", (1, 0))
    fill(book, "q", (1, 2))
    actions = lease(book, version=(1, 3))
    assert sp.Discard(trajectory_ids=("p0", "p1"), reason="stale") in actions
    assert leased(actions) == ("q0", "q1")


def test_stale_members_are_marked_when_so_configured() -> None:
    book = sp.SampleBook(params=sp.SampleParams(alpha=0, on_stale="mask"))
    create(book, "a")
    create(book, "b")
    finish(book, "a", (1, 0))
    finish(book, "b", (1, 1))
    (grant,) = lease(book, version=(1, 1))
    assert isinstance(grant, sp.Leased)
    assert grant.stale_ids == ("a",)


def turn(book: sp.SampleBook, name: str, oldest: tuple[int, int]) -> list[sp.Action]:
    return book.handle(sp.TurnAdded(trajectory_id=name, versions=(oldest,), num_tokens=10))


def publish(book: sp.SampleBook, version: tuple[int, int], **fields: object) -> list[sp.Action]:
    return book.handle(sp.VersionPublished(job="j", version=version, **fields))  # type: ignore[arg-type]


def of_run(book: sp.SampleBook, name: str, *runs: str) -> None:
    """A group of one trajectory that these runs' weights sampled, ready."""
    create(book, name, group=name, size=1)
    book.handle(sp.TurnAdded(trajectory_id=name, versions=((1, 0),), num_tokens=10, runs=runs))
    finish(book, name)


def test_no_batch_has_what_another_run_sampled_from_when_its_job_is_one_run_s(book: sp.SampleBook) -> None:
    of_run(book, "theirs", "run-b")
    of_run(book, "both", "run-a", "run-b")
    of_run(book, "nameless")
    of_run(book, "mine", "run-a")
    book.runs["j"] = "run-a"

    actions = lease(book, num_groups=2)

    assert leased(actions) == ("nameless", "mine")
    assert sp.Discard(trajectory_ids=("theirs", "both"), reason="stale") in actions


def test_no_group_of_a_job_that_names_no_run_has_two(book: sp.SampleBook) -> None:
    """Nobody could say whose policy its advantages are of."""
    for name, run in (("one", "run-a"), ("other", "run-b")):
        create(book, name, group="mixed", size=2)
        book.handle(sp.TurnAdded(trajectory_id=name, versions=((1, 0),), num_tokens=10, runs=(run,)))
        finish(book, name)
    of_run(book, "whole", "run-b")

    actions = lease(book, num_groups=1)

    assert leased(actions) == ("whole",)
    assert sp.Discard(trajectory_ids=("one", "other"), reason="stale") in actions


def test_a_lease_that_ran_out_is_not_had_again_with_another_run_s_samples(book: sp.SampleBook) -> None:
    of_run(book, "theirs", "run-b")
    lease(book, "before")
    book.runs["j"] = "run-a"
    with pytest.raises(Gone, match="another run"):
        lease(book, "before")
    book.handle(sp.BatchExpired(batch_id="before"))
    with pytest.raises(Gone, match="another run"):
        lease(book, "before")

    assert lease(book, "after") == gone("theirs")


@pytest.mark.parametrize("on_stale", sp.STALE_RULES)
def test_a_version_drops_what_another_run_has_begun(book: sp.SampleBook, on_stale: str) -> None:
    create(book, "theirs")
    book.handle(sp.TurnAdded(trajectory_id="theirs", versions=((1, 0),), num_tokens=10, runs=("run-b",)))
    book.runs["j"] = "run-a"

    assert publish(book, (1, 0), on_stale=on_stale) == gone("theirs")


def gone(*names: str) -> list[sp.Action]:
    return [sp.Discard(trajectory_ids=names, reason="stale")]


def test_what_runs_is_given_up_with_its_group_once_no_lease_could_take_it(book: sp.SampleBook) -> None:
    for name in ("a", "b"):
        create(book, name)
        turn(book, name, (1, 0))
    finish(book, "b", (1, 0))
    create(book, "young", "q")
    turn(book, "young", (1, 1))
    fill(book, "complete", (1, 0))
    fill(book, "leased", (1, 0))
    book.ready["j"].remove("complete")
    lease(book)
    book.ready["j"] = ["complete"]

    assert publish(book, (1, 2)) == []
    assert publish(book, (1, 3)) == gone("a", "b", "complete0", "complete1")

    with pytest.raises(Gone) as caught:
        finish(book, "a")
    assert caught.value.reason == "stale"
    assert book.counts() == {"stale": 4, "running": 1, "leased": 2}
    assert sum(book.discards.report("j")["stale"]) == 4
    assert book.handle(sp.BatchAcked(batch_id="b", step=3, attempt=1)) != []


def test_a_turn_that_ends_too_old_is_the_last_of_its_group(book: sp.SampleBook) -> None:
    create(book, "a")
    create(book, "b")
    publish(book, (1, 3))
    assert turn(book, "a", (1, 1)) == []
    assert turn(book, "b", (1, 0)) == gone("a", "b")
    assert turn(book, "b", (1, 0)) == []


def test_tokens_of_a_turn_under_way_count(book: sp.SampleBook) -> None:
    create(book, "a")
    assert publish(book, (1, 3), live={"a": (1, 1)}) == []
    assert publish(book, (1, 4), live={"a": (1, 1), "b": (1, 4)}) == gone("a")


def test_only_under_cancel_and_at_the_bound_that_the_trainer_names(book: sp.SampleBook) -> None:
    create(book, "a")
    turn(book, "a", (1, 0))
    for other in ("mask", "wait"):
        assert publish(book, (1, 9), on_stale=other) == []
        assert turn(book, "a", (1, 0)) == []
    assert publish(book, (1, 9), alpha=9) == []
    assert publish(book, (1, 9), alpha=8) == gone("a")


def test_a_later_step_of_an_abandoned_attempt_is_still_to_come(book: sp.SampleBook) -> None:
    create(book, "a")
    turn(book, "a", (1, 9))
    assert publish(book, (2, 5)) == []
    create(book, "b", "q", 1)
    finish(book, "b", (2, 5))
    assert leased(lease(book, version=(2, 5))) == ("b",)
    assert publish(book, (2, 12)) == gone("a")


def full(
    book: sp.SampleBook, group: str, rewards: tuple[float, ...], num_tokens: int = 10, **fields: object
) -> list[sp.Action]:
    """A group of as many members as ``rewards``."""
    actions: list[sp.Action] = []
    for index in range(len(rewards)):
        create(book, f"{group}{index}", group, len(rewards))
    for index, reward in enumerate(rewards):
        name = f"{group}{index}"
        book.handle(sp.TurnAdded(trajectory_id=name, versions=((1, 0),), num_tokens=num_tokens))
        actions += book.handle(
            sp.TrajectoryFinished(trajectory_id=name, versions=((1, 0),), reward=reward, **fields)  # type: ignore[arg-type]
        )
    return actions


def test_a_group_without_a_difference_in_reward_is_filtered_whole() -> None:
    book = sp.SampleBook()
    actions = full(book, "p", (1.0, 1.0), filter_equal=True)
    assert actions == [sp.Discard(trajectory_ids=("p0", "p1"), reason="filtered")]
    full(book, "q", (1.0, 0.0), filter_equal=True)
    assert leased(lease(book)) == ("q0", "q1")
    assert book.counts() == {"filtered": 2, "leased": 2}
    book.check()


def test_in_submission_order_no_later_group_overtakes() -> None:
    book = sp.SampleBook(params=sp.SampleParams(order="submitted"))
    create(book, "slow", "s", 1)
    fill(book, "q")
    assert leased(lease(book, "b1")) == ()
    finish(book, "slow")
    assert leased(lease(book, "b2", num_groups=2)) == ("slow", "q0", "q1")
    create(book, "dead", "d", 1)
    fill(book, "r")
    book.handle(sp.TrajectoryCancelled(trajectory_id="dead", reason="env"))
    assert leased(lease(book, "b3")) == ("r0", "r1")  # what was given up blocks nobody


def test_in_submission_order_a_group_that_nobody_completes_holds_up_the_others_for_a_while_only() -> None:
    book = sp.SampleBook(params=sp.SampleParams(order="submitted", abandoned_s=60.0))
    create(book, "done", "half", 2)
    create(book, "dead", "half", 2)
    finish(book, "done")
    book.handle(sp.TrajectoryCancelled(trajectory_id="dead", reason="env"))
    fill(book, "q")
    assert leased(lease(book, "b1", at_s=1.0)) == ()
    assert leased(lease(book, "b2", at_s=62.0)) == ("q0", "q1")


def waiting_book() -> sp.SampleBook:
    """alpha 1; one group ready that would be too old for nobody."""
    book = sp.SampleBook(params=sp.SampleParams(alpha=1, on_stale="wait"))
    fill(book, "r", (1, 1))
    return book


def test_wait_holds_the_trainer_for_the_slowest_and_then_takes_it_first() -> None:
    book = waiting_book()
    create(book, "slow", "s", 1)
    book.handle(sp.TurnAdded(trajectory_id="slow", versions=((1, 0),), num_tokens=5))
    fill(book, "q", (1, 1))
    assert leased(lease(book, "b1", version=(1, 0))) == ("r0", "r1")  # after it: version 1, lag 1
    assert leased(lease(book, "b2", version=(1, 1))) == ()  # after it the lag would be 2
    finish(book, "slow", (1, 0))
    assert leased(lease(book, "b3", version=(1, 1))) == ("slow",)  # before q, which was ready long ago
    assert leased(lease(book, "b4", version=(1, 2))) == ("q0", "q1")
    assert book.counts()["stale"] == 0


def test_wait_also_holds_for_the_finished_members_of_a_running_group() -> None:
    book = waiting_book()
    create(book, "early", "s", 2)
    finish(book, "early", (1, 0))
    create(book, "late", "s", 2)
    book.handle(sp.TurnAdded(trajectory_id="late", versions=((1, 1),), num_tokens=5))
    assert leased(lease(book, "b1", version=(1, 1))) == ()
    finish(book, "late", (1, 1))
    assert leased(lease(book, "b2", version=(1, 1))) == ("early", "late")


def test_wait_holds_for_a_first_turn_whose_version_is_not_known_yet() -> None:
    book = waiting_book()
    book.handle(sp.TrajectoryCreated(trajectory_id="new", job="j", group_id="n", group_size=1, floor=(1, 0)))
    assert leased(lease(book, "b1", version=(1, 1))) == ()
    book.handle(
        sp.TurnAdded(trajectory_id="new", versions=((1, 1),), num_tokens=5)
    )  # it was younger than feared
    assert leased(lease(book, "b2", version=(1, 1))) == ("r0", "r1")


def test_wait_does_not_hold_for_a_group_that_nobody_plays() -> None:
    book = waiting_book()
    create(book, "left", "s", 2)
    finish(book, "left", (1, 0))
    assert leased(lease(book, "b1", version=(1, 1), at_s=5.0)) == ()  # its next member may be on its way
    assert leased(lease(book, "b2", version=(1, 1), at_s=65.0)) == ()
    create(book, "next", "s", 2)
    assert leased(lease(book, "b3", version=(1, 1), at_s=66.0)) == ()
    book.handle(sp.TrajectoryCancelled(trajectory_id="next", reason="idle"))
    assert leased(lease(book, "b4", version=(1, 1), at_s=70.0)) == ()
    assert leased(lease(book, "b5", version=(1, 1), at_s=130.5)) == ("r0", "r1")


@pytest.mark.parametrize("on_stale", sp.STALE_RULES)
def test_what_cannot_wait_for_another_step_is_leased_first(on_stale: str) -> None:
    book = sp.SampleBook(params=sp.SampleParams(alpha=1, on_stale=on_stale))
    fill(book, "young", (1, 1))
    fill(book, "old", (1, 0))
    assert leased(lease(book, "b", version=(1, 1))) == ("old0", "old1")


def test_a_lease_may_bring_its_own_bound_and_rule() -> None:
    book = sp.SampleBook(params=sp.SampleParams(alpha=4, on_stale="cancel"))
    asked = {"at_s": 0.0, "job": "j", "num_groups": 1, "version": (1, 2), "ttl_s": 9.0}
    fill(book, "p", (1, 0))
    (grant,) = book.handle(sp.BatchAsked(batch_id="a", alpha=1, on_stale="mask", **asked))  # type: ignore[arg-type]
    assert isinstance(grant, sp.Leased)
    assert grant.stale_ids == ("p0", "p1")
    fill(book, "q", (1, 0))
    (gone,) = book.handle(sp.BatchAsked(batch_id="b", alpha=1, **asked))  # type: ignore[arg-type]
    assert isinstance(gone, sp.Discard)


@pytest.mark.parametrize("seed", range(8))
def test_under_wait_nothing_gets_too_old_and_the_trainer_goes_on(seed: int) -> None:
    """At most ``(alpha + 1) * num_groups`` groups begun, as the asynchronous loop has it; everything else at random."""
    rng = random.Random(seed)
    alpha, num_groups, size = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([1, 3])
    book = sp.SampleBook(params=sp.SampleParams(alpha=alpha, on_stale="wait"))
    version, num_steps, num_begun = 0, 0, 0
    left: dict[str, int] = {}
    """Members still to be created, by group."""
    running: dict[str, int | None] = {}
    """Version of the first turn; None while it is under way."""
    for number in range(1500):
        begun = len(left) + len(book.ready.get("j", ()))
        if begun < (alpha + 1) * num_groups:
            left[f"g{num_begun}"] = size
            num_begun += 1
        group = rng.choice(sorted(left)) if left else None
        if group is not None and left[group] and len(running) < 2 * num_groups:
            left[group] -= 1
            name = f"{group}-{left[group]}"
            book.handle(
                sp.TrajectoryCreated(
                    trajectory_id=name, job="j", group_id=group, group_size=size, floor=(1, version)
                )
            )
            running[name] = None
        if running and rng.random() < 0.7:
            name = rng.choice(sorted(running))
            oldest = running[name]
            if oldest is None:
                oldest = running[name] = rng.randint(book.samples[name].floor[1], version)  # type: ignore[index]
                book.handle(sp.TurnAdded(trajectory_id=name, versions=((1, oldest),), num_tokens=1))
            elif rng.random() < 0.3:
                finish(book, name, (1, oldest))
                del running[name]
                group = name.split("-")[0]
                if book.groups[("j", group)].ready:
                    del left[group]
        for action in lease(book, f"b{number}", num_groups, version=(1, version)):
            assert isinstance(action, sp.Leased)
            assert action.stale_ids == ()
            book.handle(sp.BatchAcked(batch_id=action.batch_id, step=num_steps, attempt=1))
            version, num_steps = version + 1, num_steps + 1
        book.check()
    assert num_steps >= 10


def test_each_job_has_its_own_alpha() -> None:
    loose = sp.JobParams(alpha=5)
    book = sp.SampleBook(params=sp.SampleParams(alpha=0, jobs={"loose": loose}))
    for job in ("j", "loose"):
        book.handle(sp.TrajectoryCreated(trajectory_id=job, job=job, group_id=job, group_size=1))
        book.handle(sp.TrajectoryFinished(trajectory_id=job, versions=((1, 0),)))
    asked = {"at_s": 0.0, "num_groups": 1, "version": (1, 3), "ttl_s": 9.0}
    assert leased(book.handle(sp.BatchAsked(batch_id="a", job="j", **asked))) == ()  # type: ignore[arg-type]
    assert leased(book.handle(sp.BatchAsked(batch_id="b", job="loose", **asked))) == ("loose",)  # type: ignore[arg-type]


def test_a_group_that_no_trainer_came_for_is_given_up_whole(book: sp.SampleBook) -> None:
    fill(book, "g")
    create(book, "half", "h")
    finish(book, "half")
    assert book.handle(sp.GroupForsaken(job="j", group_id="g")) == [
        sp.Discard(trajectory_ids=("g0", "g1"), reason="unleased")
    ]
    assert book.handle(sp.GroupForsaken(job="j", group_id="h", reason="afresh")) == [
        sp.Discard(trajectory_ids=("half",), reason="afresh")
    ]
    assert leased(lease(book)) == ()


def test_a_group_that_is_played_or_leased_is_not_given_up(book: sp.SampleBook) -> None:
    fill(book, "g")
    assert leased(lease(book)) == ("g0", "g1")
    create(book, "a", "h")
    create(book, "b", "h")
    finish(book, "a")
    for group in ("g", "h"):
        with pytest.raises(Conflict):
            book.handle(sp.GroupForsaken(job="j", group_id=group))
    with pytest.raises(NotFound):
        book.handle(sp.GroupForsaken(job="j", group_id="nobody's"))


def test_discards_are_told_by_cause_and_by_quarter_of_the_lengths() -> None:
    book = sp.SampleBook()
    for index, num_tokens in enumerate((10, 10, 100, 100, 1000, 1000, 10_000, 10_000)):
        full(book, f"g{index}", (1.0,), num_tokens=num_tokens)
    create(book, "long", "x", 1)
    book.handle(sp.TurnAdded(trajectory_id="long", versions=((1, 0),), num_tokens=10_000))
    book.handle(sp.TrajectoryCancelled(trajectory_id="long", reason="idle"))
    full(book, "same", (0.0, 0.0), num_tokens=10, filter_equal=True)
    assert book.discards.report("j") == {"idle": [0, 0, 0, 1], "filtered": [2, 0, 0, 0]}


def test_refused_events_change_nothing(book: sp.SampleBook) -> None:
    create(book, "a")
    with pytest.raises(Conflict, match="exists"):
        create(book, "a")
    with pytest.raises(Conflict, match="size 2"):
        create(book, "x", size=3)
    with pytest.raises(NotFound):
        finish(book, "ghost")
    with pytest.raises(Gone):
        book.handle(sp.BatchAcked(batch_id="ghost", step=1, attempt=1))
    finish(book, "a")
    with pytest.raises(Conflict, match="already finished"):
        finish(book, "a")
    assert book.counts() == {"finished": 1}
