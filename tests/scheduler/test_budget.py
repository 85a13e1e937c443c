"""What answers and trajectories hold: ids only, counted in bytes and bounded for each job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.errors import CapacityError
from rose.scheduler.journal import Journal
from rose.scheduler.records import FinishRecord, Record, TurnRecord, UnleasedRecord, packed
from rose.scheduler.store import TrajectoryStore, sp
from tests.scheduler.conftest import World, generate, user
from tests.scheduler.test_asking_again import rejoin
from tests.scheduler.test_restart import turn_of

WANTED: dict[str, Any] = {"max_tokens": 50, "logprobs": True, "return_token_ids": True}


async def test_an_answer_with_many_choices_is_journalled_as_its_ids(world: World) -> None:
    await world.start()
    await world.add("a", mean_tokens=10_000)
    session = await world.trajectory()
    before = world.scheduler.journal.size_bytes
    answer = await world.chat(session, [user("x" * 1000)], **WANTED, n=16, top_logprobs=5)
    assert len(answer["choices"]) == 16
    ids = 4 * 1000 + 16 * 50 * (4 + 8)
    assert world.scheduler.journal.size_bytes - before < ids + 16 * 1024
    turns = world.scheduler.store.trajectories[session].turns
    assert len({id(turn.suffix_ids) for turn in turns}) == 1  # one prompt, in memory as in the journal


@pytest.mark.parametrize("compact_bytes", [1, 2**30])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_an_answer_is_said_again_from_its_ids_after_a_restart(
    world: World, route: str, compact_bytes: int
) -> None:
    await world.start()
    await world.add("a", mean_tokens=10_000)
    session = await world.trajectory()
    headers = {"X-Session-ID": session, "X-ROSE-Turn": "0"}
    if route == "/v1/completions":
        body = {"prompt": ["abc", "xyz"], "n": 2, "max_tokens": 20, "logprobs": 0}
    else:
        body = {"messages": [user("x")], **WANTED, "n": 3}
    first = await world.ok("POST", route, {"model": "policy", **body}, headers=headers)
    for _ in range(2):
        await world.scheduler.stop(drain_s=0)
        await world.start(journal={"compact_bytes": compact_bytes})
    await rejoin(world)
    assert await world.ok("POST", route, {"model": "policy", **body}, headers=headers) == first


async def test_tokens_are_said_again_from_the_journal(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory()
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 20}}
    headers = {"X-Session-ID": session, "X-ROSE-Turn": "0"}
    first, again = [await world.ok("POST", "/rose/v1/generate", body, headers=headers) for _ in range(2)]
    assert first == again
    assert len(engine.requests) == 1


def store_of(tmp_path: Path, **bounds: Any) -> TrajectoryStore:
    return TrajectoryStore(
        Journal(tmp_path),
        sp.SampleParams(),
        max_trajectories=100,
        retained_finals=bounds.pop("retained_finals", 100),
        compact_bytes=bounds.pop("compact_bytes", 2**30),
        **bounds,
    )


def create(store: TrajectoryStore, job: str, task: Any = None) -> str:
    return store.create(job=job, group_id=None, group_size=1, task=task, sampling={})


def test_a_job_that_is_full_is_refused_with_the_reason_and_others_are_not(tmp_path: Path) -> None:
    store = store_of(tmp_path, max_job_bytes=100_000)
    names = [create(store, "big", task="x" * 30_000) for _ in range(3)]
    with pytest.raises(CapacityError) as caught:
        create(store, "big", task="x" * 30_000)
    error = caught.value
    assert (error.status, error.code, error.field) == (429, "job_full", "job")
    assert "limits.max_job_bytes" in (error.fix or "")
    assert error.retry_after_s
    create(store, "other", task="x" * 30_000)
    store.cancel(names[0], "cancelled")
    create(store, "big", task="x" * 30_000)
    store.journal.close()


def test_jobs_together_are_bounded_too(tmp_path: Path) -> None:
    store = store_of(tmp_path, max_held_bytes=100_000)
    for number in range(3):
        create(store, f"job {number}", task="x" * 30_000)
    with pytest.raises(CapacityError) as caught:
        create(store, "one more", task="x" * 30_000)
    assert "limits.max_held_bytes" in (caught.value.fix or "")
    store.journal.close()


def test_small_values_are_counted_as_what_they_are_in_memory(tmp_path: Path) -> None:
    """Two bytes of JSON would be a list object each."""
    import tracemalloc

    store = store_of(tmp_path)
    tracemalloc.start()
    for _ in range(20):
        create(store, "job", task=[[] for _ in range(50_000)])
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 1.2 * store.held_bytes("job")
    assert store.trajectories[next(iter(store.trajectories))].trace("running")["task"] == [[]] * 50_000
    store.journal.close()


@pytest.mark.parametrize("compact_bytes", [0, 2**30])
def test_what_is_held_is_the_same_after_a_restart(tmp_path: Path, compact_bytes: int) -> None:
    store = store_of(tmp_path)
    names = [create(store, f"job {at % 2}", task={"at": at}) for at in range(6)]
    for name in names:
        store.add_turn(turn_of(name, "1.0"))
        store.add_turn(sibling_of(turn_of(name, "1.0")))
    store.add_form(store.trajectories[names[0]], 0, b"t" * 16, b"r" * 16)
    for name in names[:4]:
        store.finish(FinishRecord(id=name, reward=1.0, info=packed({"why": "x" * 100})))
    store.cancel(names[5], "cancelled")
    leased, _ = store.lease(job="job 0", num_groups=1, version=(1, 0), ttl_s=60)
    assert leased is not None
    store.ack(leased.batch_id, 1, 1)
    held = {job: store.held_bytes(job) for job in ("job 0", "job 1")}
    assert 0 < held["job 0"] < held["job 1"] * 2
    store.journal.close()
    for _ in range(2):
        again = store_of(tmp_path, compact_bytes=compact_bytes)
        assert {job: again.held_bytes(job) for job in held} == held
        again.journal.close()


def sibling_of(record: TurnRecord) -> TurnRecord:
    """A second choice of its request."""
    import msgspec

    return msgspec.structs.replace(record, turn=1, choice=1, num_choices=2, suffix_ids=b"", prompt_of=0)


def test_nothing_is_held_for_a_job_whose_trajectories_are_final(tmp_path: Path) -> None:
    store = store_of(tmp_path, retained_finals=3)
    for _ in range(10):
        name = create(store, "job", task="x" * 1000)
        store.add_turn(turn_of(name, "1.0"))
        store.cancel(name, "cancelled")
    assert store.held_bytes("job") == 0
    assert len(store.trajectories) == 3
    store.journal.close()


def sampled(store: TrajectoryStore, group: str, *, finished: bool = True) -> str:
    name = store.create(job="job", group_id=group, group_size=2, task="x" * 1000, sampling={})
    store.add_turn(turn_of(name, "1.0"))
    if finished:
        store.finish(FinishRecord(id=name, reward=1.0))
    return name


@pytest.mark.parametrize("compact_bytes", [0, 2**30])
def test_bytes_of_what_no_trainer_comes_for_come_back(tmp_path: Path, compact_bytes: int) -> None:
    """Whole groups, and those whose others never came; not what is played, nor what is leased."""
    store = store_of(tmp_path)
    first = [sampled(store, "leased") for _ in range(2)]
    leased, _ = store.lease(job="job", num_groups=1, version=(1, 0), ttl_s=60)
    assert leased is not None
    kept = store.held_bytes("job")
    whole = [sampled(store, "whole") for _ in range(2)]
    half = sampled(store, "half")
    played = [sampled(store, "played"), sampled(store, "played", finished=False)]
    assert store.expire_unleased(3600.0) == []
    actions = store.expire_unleased(0.0)
    assert actions == [
        sp.Discard(trajectory_ids=tuple(whole), reason="unleased"),
        sp.Discard(trajectory_ids=(half,), reason="unleased"),
    ]
    assert store.state(half) == ("cancelled", "unleased")
    assert store.num_unleased == 3
    assert store.held_bytes("job") > kept
    store.cancel(played[1], "cancelled")
    assert [each.trajectory_ids for each in store.expire_unleased(0.0)] == [(played[0],)]  # type: ignore[union-attr]
    assert store.held_bytes("job") == kept
    store.journal.close()
    again = store_of(tmp_path, compact_bytes=compact_bytes)
    assert again.held_bytes("job") == kept
    assert again.state(first[0])[0] == "leased"
    again.journal.close()


def test_a_batch_that_comes_back_has_the_whole_time_again(tmp_path: Path, monkeypatch: Any) -> None:
    at_s = 0.0
    monkeypatch.setattr("rose.scheduler.books.time.monotonic", lambda: at_s)
    store = store_of(tmp_path)
    names = [sampled(store, "g") for _ in range(2)]
    store.lease(job="job", num_groups=1, version=(1, 0), ttl_s=60, name="b")
    at_s = 90.0
    assert store.expire_unleased(60.0) == [], "its trainer has it"
    store.give_back("b")
    at_s = 140.0
    assert store.expire_unleased(60.0) == []
    at_s = 151.0
    assert store.expire_unleased(60.0) == [sp.Discard(trajectory_ids=tuple(names), reason="unleased")]
    store.journal.close()


def test_why_a_group_was_given_up_is_in_the_journal(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    half, running = sampled(store, "half"), sampled(store, "runs", finished=False)
    assert store.begin_afresh("job")[:2] == (1, 1)
    store.journal.close()
    again = store_of(tmp_path)
    assert (again.state(half), again.state(running)) == (("cancelled", "afresh"),) * 2
    assert again.num_unleased == 0
    again.journal.close()


def test_a_journal_that_does_not_say_why_a_group_was_given_up_means_that_no_trainer_came() -> None:
    before = msgspec.msgpack.encode({"type": "unleased", "job": "job", "group_id": "g"})
    assert msgspec.msgpack.decode(before, type=Record) == UnleasedRecord(job="job", group_id="g")
    assert UnleasedRecord(job="job", group_id="g").reason == "unleased"


async def test_a_job_that_nobody_trains_does_not_stay_full(world: World) -> None:
    await world.start(limits={"max_job_bytes": 30_000}, timeouts={"unleased_s": 0.001})
    world.scheduler.control._swept_at_s = float("inf")
    sessions = []
    while world.scheduler.store.held_bytes("job") < 27_000:
        sessions.append(await world.trajectory())
        await world.ok("POST", f"/rose/v1/trajectories/{sessions[-1]}/finish", {"reward": 1})
    status, _ = await world.call("POST", "/rose/v1/trajectories", {"job": "job", "task": "x" * 10_000})
    assert status == 429
    world.scheduler.control._swept_at_s = 0.0
    await world.until(lambda: not world.scheduler.store.held_bytes("job"))
    await world.ok("POST", "/rose/v1/trajectories", {"job": "job", "task": "x" * 10_000})
    told = await world.ok("GET", "/status")
    assert sum(told["discards"]["job"]["unleased"]) == told["dropped_unleased"] == len(sessions)
    async with world.session.get(world.url + "/metrics") as response:
        assert f"rose_dropped_unleased_total {len(sessions)}.0" in await response.text()


def test_final_trajectories_stay_readable_within_their_bytes(tmp_path: Path) -> None:
    store = store_of(tmp_path, retained_bytes=50_000)
    names = [create(store, "job", task="x" * 20_000) for _ in range(5)]
    for name in names:
        store.cancel(name, "cancelled")
    assert sorted(store.trajectories) == sorted(names[-2:])
    store.journal.close()


async def test_a_full_job_takes_no_turn_but_says_what_it_said(world: World) -> None:
    await world.start(limits={"max_job_bytes": 30_000})
    await world.add("a", mean_tokens=10_000)
    session = await world.trajectory()
    headers = {"X-Session-ID": session, "X-ROSE-Turn": "0"}
    body = {"model": "policy", "messages": [user("x" * 3000)], "max_tokens": 900}
    first = await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    while world.scheduler.store.held_bytes("job") < 30_000:
        await generate(world, session, max_tokens=900)
    status, answer = await world.call(
        "POST", "/v1/chat/completions", {**body, "seed": 1}, headers={"X-Session-ID": session}
    )
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (429, "job_full", "job")
    assert await world.ok("POST", "/v1/chat/completions", body, headers=headers) == first
    assert (await world.ok("GET", "/status"))["held_bytes"]["job"] >= 30_000
    await world.ok("POST", f"/rose/v1/trajectories/{session}/finish", {"reward": 1})


def test_a_journal_of_before_is_read(tmp_path: Path) -> None:
    """As older ones were written: with whole answers, one name for an answer, no id, task and info as they are, and no runs."""
    import msgspec

    from rose.frames import frame
    from rose.scheduler.journal import MAGIC

    encode = msgspec.msgpack.Encoder().encode
    turn = msgspec.to_builtins(turn_of("t-1", "1.0"), builtin_types=(bytes,)) | {
        "answer": b"{}",
        "tip": b"t" * 16,
        "digest": "d",
        "turn_key": "0",
    }
    records = [
        {
            "type": "create",
            "id": "t-1",
            "job": "j",
            "group_id": "g",
            "group_size": 1,
            "created_at": 1.0,
            "task": {"a": [1]},
        },
        {
            name: turn[name]
            for name in turn
            if name not in ("id", "choice", "num_choices", "thoughts", "key", "retry")
        },
        {"type": "finish", "id": "t-1", "reward": 1.0, "info": {"b": None}},
        {"type": "version", "job": "j", "attempt": 1, "version": 0},
    ]
    (tmp_path / "journal.rose").write_bytes(MAGIC + b"".join(frame(encode(each)) for each in records))
    store = store_of(tmp_path)
    trajectory = store.trajectories["t-1"]
    assert trajectory.tips == {b"t" * 16: (0,)}
    trace = trajectory.trace("finished")
    assert (trace["task"], trace["info"]) == ({"a": [1]}, {"b": None})
    assert list(trajectory.answers_to("d")) == []
    assert trajectory.named == {}
    assert (store.versions["j"], store.runs.get("j", "")) == ((1, 0), "")
    store.require("j", (1, 1), "mine")
    assert store.runs["j"] == "mine", "a job of no run is taken by the first that names one"
    leased, _ = store.lease(job="j", num_groups=1, version=(1, 1), ttl_s=60, alpha=1)
    assert leased is not None
    assert leased.trajectory_ids == ("t-1",), "and what was sampled before is its own"
    store.journal.close()
