"""Batches that a trainer names: asking again is safe, whatever was lost, and each trajectory is trained on once."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rose.errors import RequestError
from rose.frames import frame
from rose.scheduler.journal import MAGIC, Journal
from rose.scheduler.records import FinishRecord
from rose.scheduler.store import TrajectoryStore, sp
from tests.scheduler.conftest import World, user

ASK = {"job": "job", "num_groups": 1, "version": [1, 0], "ttl_s": 600}


async def finished(world: World, count: int) -> list[str]:
    """Trajectories of one turn, each a group of its own, all ready."""
    await world.add("a")
    names = []
    for _ in range(count):
        names.append(await world.trajectory())
        await world.chat(names[-1], [user("x")], max_tokens=4)
        await world.ok("POST", f"/rose/v1/trajectories/{names[-1]}/finish", {"reward": 1})
    return names


async def put(world: World, name: str, **fields: Any) -> tuple[int, Any]:
    return await world.call("PUT", f"/rose/v1/batches/{name}", {**ASK, **fields}, role="trainer")


async def ids_of(world: World, name: str, **fields: Any) -> list[str]:
    status, batch = await put(world, name, **fields)
    assert (status, batch["batch_id"]) == (200, name), batch
    return [one["id"] for one in batch["trajectories"]]


async def test_asking_again_gives_the_same_batch_and_leaves_the_others(world: World) -> None:
    """The answer to ``first`` was lost while ``ahead`` was fetched for the step after it."""
    await world.start()
    names = await finished(world, 3)
    first = await ids_of(world, "first")
    ahead = await ids_of(world, "ahead")
    assert await ids_of(world, "first") == first == names[:1]
    assert await ids_of(world, "ahead") == ahead == names[1:2]
    for number, name in enumerate(("first", "ahead")):
        ack = {"step": number, "attempt": 1}
        await world.ok("POST", f"/rose/v1/batches/{name}/ack", ack, role="trainer")
    assert await ids_of(world, "last") == names[2:]
    assert (await world.ok("GET", "/status"))["trajectories"] == {"consumed": 2, "leased": 1}


async def test_two_that_wait_for_one_name_get_one_batch(world: World) -> None:
    await world.start()
    await world.add("a")
    name = await world.trajectory()
    waiting = [asyncio.create_task(put(world, "b", wait_s=30)) for _ in range(2)]
    await world.until(lambda: len(world.scheduler.control._group_ready._waiters) == 2)
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})
    (status, first), (_, second) = await asyncio.gather(*waiting)
    assert status == 200
    assert first == second


@pytest.mark.parametrize("compact_bytes", [1, 2**30])
async def test_a_batch_has_its_name_after_a_restart(world: World, compact_bytes: int) -> None:
    await world.start()
    await finished(world, 4)
    batch = (await put(world, "held", num_groups=2, consumer="c"))[1]
    await ids_of(world, "acked")
    await world.ok("POST", "/rose/v1/batches/acked/ack", {"step": 1, "attempt": 1}, role="trainer")
    await ids_of(world, "back")
    await world.ok("DELETE", "/rose/v1/batches/back", role="trainer")
    for _ in range(2):
        await world.scheduler.stop(drain_s=0)
        await world.start(journal={"compact_bytes": compact_bytes})
    assert (await put(world, "held", num_groups=2, consumer="c"))[1] == batch
    assert (await put(world, "acked"))[0] == 409
    assert (await put(world, "back"))[0] == 410
    await world.ok("POST", "/rose/v1/batches/acked/ack", {"step": 1, "attempt": 1}, role="trainer")


async def test_marks_of_old_members_are_the_same_when_asked_again_after_a_restart(world: World) -> None:
    await world.start()
    await finished(world, 1)
    fields = {"version": [0, 9], "alpha": 0, "on_stale": "mask"}
    _, batch = await put(world, "b", **fields)
    assert [one["stale"] for one in batch["trajectories"]] == [True]
    await world.scheduler.stop(drain_s=0)
    await world.start()
    assert (await put(world, "b", **fields))[1] == batch


async def test_batches_are_given_back_one_by_one_and_their_names_are_used_up(world: World) -> None:
    await world.start()
    names = await finished(world, 2)
    await ids_of(world, "first")
    await ids_of(world, "second")
    for _ in range(2):  # said twice
        assert await world.ok("DELETE", "/rose/v1/batches/first", role="trainer") == {}
    status, answer = await put(world, "first")
    assert (status, answer["error"]["param"]) == (410, "batch_id")
    late = await world.call("POST", "/rose/v1/batches/first/ack", {"step": 1, "attempt": 1}, role="trainer")
    assert late[0] == 410
    assert await ids_of(world, "third") == names[:1]
    assert await ids_of(world, "second") == names[1:]
    assert await world.ok("DELETE", "/rose/v1/batches/never", role="trainer") == {}
    assert (await put(world, "never"))[0] == 410  # the request that came too late


async def test_a_consumer_that_starts_again_gives_back_its_own_only(world: World) -> None:
    await world.start()
    names = await finished(world, 3)
    for name, consumer in (("a1", "a"), ("b1", "b"), ("n1", "")):
        await ids_of(world, name, **({"consumer": consumer} if consumer else {}))
    resume = {"attempt": 7, "consumed": [], "consumer": "a"}
    answer = await world.ok("POST", "/rose/v1/jobs/job/resume", resume, role="trainer")
    assert answer == {"returned_groups": 1, "consumed": 0, "dropped_groups": 0, "cancelled": 0}
    assert await ids_of(world, "b1", consumer="b") == names[1:2]
    # Its attempt is its own: what the others trained on is still taken.
    for name in ("b1", "n1"):
        await world.ok("POST", f"/rose/v1/batches/{name}/ack", {"step": 1, "attempt": 1}, role="trainer")
    assert await ids_of(world, "a2", consumer="a", version=[7, 0]) == names[:1]
    old = await world.call("POST", "/rose/v1/batches/a2/ack", {"step": 1, "attempt": 6}, role="trainer")
    assert (old[0], old[1]["error"]["param"]) == (409, "attempt")


@pytest.mark.parametrize("change", [{"job": "other"}, {"num_groups": 2}, {"consumer": "c"}])
async def test_a_name_that_stands_for_something_else_is_a_conflict(world: World, change: Any) -> None:
    await world.start()
    await finished(world, 2)
    await ids_of(world, "b")
    status, answer = await put(world, "b", **change)
    assert (status, answer["error"]["param"]) == (409, "batch_id")


async def test_an_expired_batch_can_be_had_again_until_somebody_else_has_it(world: World) -> None:
    await world.start()
    names = await finished(world, 1)
    await ids_of(world, "b", ttl_s=0.001)
    await world.until(lambda: "b" in world.scheduler.store.book.expired)
    assert await ids_of(world, "b", ttl_s=0.001) == names
    await world.until(lambda: "b" in world.scheduler.store.book.expired)
    assert await ids_of(world, "other") == names
    assert (await put(world, "b"))[0] == 410


async def test_prompts_leave_out_what_their_parents_hold_unless_asked_for_whole(world: World) -> None:
    await world.start()
    await finished(world, 1)
    turns = [
        (await put(world, "b", **how))[1]["trajectories"][0]["turns"][0]
        for how in ({}, {"prompts": "suffix"}, {"prompts": "whole"})
    ]
    assert "suffix_token_ids" in turns[0]
    assert turns[0] == turns[1]
    assert "prompt_token_ids" in turns[2]


@pytest.mark.parametrize("name", ["x" * 257, "a%00b", "%0a"])
async def test_a_name_that_is_none_is_400(world: World, name: str) -> None:
    await world.start()
    for method in ("PUT", "DELETE"):
        status, answer = await world.call(method, f"/rose/v1/batches/{name}", ASK, role="trainer")
        assert (status, answer["error"]["param"]) == (400, "batch_id")


# --- any order of anything --------------------------------------------------------------------------------


def store_of(folder: Path, compact_bytes: int = 2**30) -> TrajectoryStore:
    return TrajectoryStore(
        Journal(folder),
        sp.SampleParams(),
        max_trajectories=10_000,
        retained_finals=10_000,
        compact_bytes=compact_bytes,
    )


def test_a_journal_from_before_there_were_names_loads(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    for name in "abcd":
        records.append(
            {"type": "create", "id": name, "job": "j", "group_id": name, "group_size": 1, "created_at": 1.0}
        )
        records.append({"type": "finish", "id": name, "reward": 1.0})

    def lease(batch: str, group: str) -> dict[str, Any]:
        return {
            "type": "lease", "batch_id": batch, "job": "j", "group_ids": [group], "stale_group_ids": [],
            "ttl_s": 600.0,
        }  # fmt: skip

    records += [
        lease("b-1", "a"),
        {"type": "resume", "job": "j", "attempt": 2, "consumed": ["a"]},
        lease("b-2", "b"),
        {"type": "expire", "batch_id": "b-2"},
        lease("b-3", "b"),
        {"type": "expired", "batches": [["b-0", "j", ["d"], 5.0]]},
    ]
    data = b"".join(frame(msgspec.msgpack.encode(record)) for record in records)
    (tmp_path / "journal.rose").write_bytes(MAGIC + data)
    store = store_of(tmp_path)
    assert store.book.counts("j") == {"consumed": 1, "leased": 1, "finished": 2}
    assert store.ack("b-0", 1, 2) != []
    assert store.ack("b-3", 1, 2) != []
    store.book.check()
    store.journal.close()


CONSUMERS = st.sampled_from(["", "a", "b"])
BACK = st.integers(0, 4)
"""Which of the names in use is meant, newest first."""


class Leases(RuleBasedStateMachine):
    """Three consumers, of which any call may be late, repeated or lost, and a scheduler that restarts.

    A trainer trains on what it was given under a name when its acknowledgement is taken.
    """

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = store_of(self.folder)
        self.num_groups = 0
        self.names: list[tuple[str, str, int]] = [("b0", "", 1)]
        """All that were ever asked for: name, consumer, number of groups."""
        self.held: dict[str, tuple[str, ...]] = {}
        """What each name stands for, from when it was first given."""
        self.trained: list[str] = []
        self.used_up: set[str] = set()
        self.finish([1, 2, 1])

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.journal.close()
            shutil.rmtree(self.folder)

    def named(self, back: int) -> tuple[str, str, int]:
        return self.names[max(0, len(self.names) - 1 - back)]

    def try_(self, call: Any, *args: Any, **fields: Any) -> list[sp.Action]:
        try:
            found = call(*args, **fields)
        except RequestError:
            return []
        return found[1] if isinstance(found, tuple) else found

    @rule(sizes=st.lists(st.integers(1, 2), min_size=1, max_size=3))
    def finish(self, sizes: list[int]) -> None:
        for size in sizes:
            self.num_groups += 1
            group = f"g{self.num_groups % 8}"  # a name may come again once its group is gone
            if ("j", group) in self.store.book.groups:
                continue
            for _ in range(size):
                name = self.store.create(job="j", group_id=group, group_size=size, task=None, sampling={})
                self.store.finish(FinishRecord(id=name, reward=1.0))

    @rule(consumer=CONSUMERS, num_groups=st.integers(1, 2))
    def ask(self, consumer: str, num_groups: int) -> None:
        self.names.append((f"b{len(self.names)}", consumer, num_groups))
        self.ask_again(0)

    @rule(back=BACK)
    def ask_again(self, back: int) -> None:
        name, consumer, num_groups = self.named(back)
        actions = self.try_(
            self.store.lease,
            job="j",
            num_groups=num_groups,
            version=(1, 0),
            ttl_s=1e9,
            name=name,
            consumer=consumer,
        )
        for action in actions:
            if isinstance(action, sp.Leased):
                assert name not in self.used_up
                assert self.held.setdefault(name, action.trajectory_ids) == action.trajectory_ids

    @rule(back=BACK, attempt=st.sampled_from([1, 9, 9, 9]))
    def ack(self, back: int, attempt: int) -> None:
        name = self.named(back)[0]
        actions = self.try_(self.store.ack, name, 1, attempt)
        if actions:
            assert name not in self.used_up
            assert actions == [sp.Consumed(trajectory_ids=self.held[name])]
            self.trained.extend(self.held[name])
            self.used_up.add(name)

    @rule(back=BACK)
    def give_back(self, back: int) -> None:
        name = self.named(back)[0]
        self.try_(self.store.give_back, name)
        assert name not in self.store.book.batches
        self.used_up.add(name)

    @rule(consumer=CONSUMERS, attempt=st.integers(1, 3), back=BACK)
    def resume(self, consumer: str, attempt: int, back: int) -> None:
        """Its checkpoint may hold a batch whose acknowledgement was lost; the others keep what they have."""
        book = self.store.book
        own = {n for part in (book.batches, book.expired) for n, b in part.items() if b.consumer == consumer}
        others = {name for name in book.batches if name not in own}
        name, whose, _ = self.named(back)
        ids = list(self.held.get(name, ())) if whose == consumer else []
        actions = self.try_(self.store.resume, "j", attempt, ids, consumer)
        for action in actions:
            if isinstance(action, sp.Consumed):
                self.trained.extend(action.trajectory_ids)
        if book.attempts.get(("j", consumer)) == attempt:
            self.used_up |= own
            assert set(book.batches) == others

    @rule(which=st.integers(0, 3))
    def expire(self, which: int) -> None:
        for name in list(self.store.book.batches)[which : which + 1]:
            self.store.book.batches[name].expires_at_s = -1.0
        self.store.expire(0.0)

    @rule(compact=st.booleans())
    def restart(self, compact: bool) -> None:
        before = self.picture()
        self.store.journal.close()
        self.store = store_of(self.folder, 1 if compact else 2**30)
        assert self.picture() == before

    def picture(self) -> Any:
        """All that must outlive a restart; what was consumed leaves the journal with its tokens."""
        book = self.store.book
        return (
            {name: sample.state for name, sample in book.samples.items() if sample.state not in sp.FINAL},
            {job: names for job, names in book.ready.items() if names},
            {n: (b.job, b.consumer, b.group_ids) for n, b in book.batches.items()},
            {n: (b.job, b.consumer, b.group_ids) for n, b in book.expired.items()},
            dict(book.acked),
            set(book.returned),
            dict(book.attempts),
        )

    @invariant()
    def nothing_is_lost_or_trained_on_twice(self) -> None:
        if not hasattr(self, "store"):
            return
        book = self.store.book
        book.check()
        waiting = [n for names in book.ready.values() for g in names for n in book.groups[("j", g)].members]
        leased = [
            n for b in book.batches.values() for g in b.group_ids for n in book.groups[("j", g)].members
        ]
        everything = [*waiting, *leased, *self.trained]
        assert len(set(everything)) == len(everything)
        made = [n for n, one in self.store.trajectories.items() if one.finish is not None]
        assert set(made) <= set(everything)


TestLeases = Leases.TestCase
TestLeases.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
