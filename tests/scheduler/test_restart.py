"""SIGKILL of the daemon in the middle of a run: after a restart nothing is lost and nothing is doubled."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rose.auth import Tokens, bearer
from rose.scheduler.books import COMPACT_AGAIN_S
from rose.scheduler.journal import Journal
from rose.scheduler.records import FinishRecord, TurnRecord
from rose.scheduler.store import TrajectoryStore, sp
from rose.testing.fake_engine import FakeEngine, serve_engine
from rose.testing.fake_node import FakeNode
from tests.scheduler.conftest import World, user
from tests.scheduler.processes import Daemon


async def agent(session: aiohttp.ClientSession, url: str, tokens: Tokens, number: int) -> dict[str, Any]:
    """Four turns, then finish; asks again, as the OpenAI client does, until it is answered."""

    async def post(path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        for attempt in range(2000):
            try:
                retry = {"x-stainless-retry-count": str(attempt)}
                async with session.post(
                    url + path, json=body, headers={**bearer(tokens.environment), **(headers or {}), **retry}
                ) as response:
                    assert response.status in (200, 503), await response.text()
                    if response.status == 200:
                        return await response.json()
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
        raise AssertionError("never answered")

    create = {"job": "job", "group_id": f"g{number // 2}", "group_size": 2, "task": number}
    name = (await post("/rose/v1/trajectories", create))["id"]
    messages: list[Any] = [user(f"task {number}")]
    answers: list[str] = []
    for _ in range(4):
        body = {"model": "policy", "messages": messages, "max_tokens": 12}
        answer = await post("/v1/chat/completions", body, {"X-Session-ID": name})
        message = answer["choices"][0]["message"]
        answers.append(message["content"])
        messages += [message, user("next")]
    await post(f"/rose/v1/trajectories/{name}/finish", {"reward": number})
    return {"id": name, "answers": answers, "number": number}


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(0.01)


async def test_sigkill_in_the_middle_loses_and_repeats_nothing(tmp_path: Path) -> None:
    tokens = Tokens.generate()
    tokens.save(tmp_path / "tokens.toml")
    daemon = Daemon(tmp_path)
    url = await daemon.start()
    engine = FakeEngine(token_s=0.004)
    runner, engine_url = await serve_engine(engine)
    async with aiohttp.ClientSession() as session:
        node = FakeNode(session, url, tokens.node, engine, engine_url, worker_id="a", period_s=0.05)
        beats = asyncio.create_task(node.run())
        agents = [asyncio.create_task(agent(session, url, tokens, number)) for number in range(6)]
        kills = 0
        await reached(lambda: len(engine.requests) >= 8)
        for goal in (16, 24):
            await daemon.end()
            kills += 1
            await daemon.start()
            await reached(
                lambda goal=goal: len(engine.requests) >= goal or all(task.done() for task in agents)
            )
        done = {item["id"]: item for item in await asyncio.gather(*agents)}
        await daemon.end()  # once more, after everything was promised
        await daemon.start()
        lease = {"job": "job", "num_groups": 3, "version": [0, 0], "ttl_s": 600, "prompts": "whole"}
        async with session.post(
            f"{url}/rose/v1/batches/lease", json=lease, headers=bearer(tokens.trainer)
        ) as response:
            batch = await response.json()
        # A creation whose answer was lost may leave an empty trajectory behind, never a doubled one.
        ids = [trajectory["id"] for trajectory in batch["trajectories"]]
        assert sorted(ids) == sorted(done)
        for trajectory in batch["trajectories"]:
            item = done[trajectory["id"]]
            turns = trajectory["turns"]
            assert trajectory["reward"] == item["number"]
            assert len(turns) == 4
            assert [turn["parent"] for turn in turns] == [None, 0, 1, 2]
            texts = [engine.tokenizer.decode(turn["token_ids"]) for turn in turns]
            assert texts == item["answers"]
            for turn in turns:
                expected, _, _ = engine.greedy(turn["prompt_token_ids"], {"max_tokens": 12})
                assert turn["token_ids"] == expected
        ack = f"{url}/rose/v1/batches/{batch['batch_id']}/ack"
        async with session.post(
            ack, json={"step": 1, "attempt": 0}, headers=bearer(tokens.trainer)
        ) as response:
            assert response.status == 200
        await daemon.end()
        await daemon.start()
        async with session.post(
            ack, json={"step": 1, "attempt": 0}, headers=bearer(tokens.trainer)
        ) as response:
            assert response.status == 200
        async with session.post(
            f"{url}/rose/v1/batches/lease", json={**lease, "num_groups": 1}, headers=bearer(tokens.trainer)
        ) as response:
            assert response.status == 204
        beats.cancel()
    assert await daemon.end(signal.SIGTERM) == 0
    await runner.cleanup()
    assert kills == 2


async def test_a_lease_survives_a_restart(world: World) -> None:
    await world.start()
    await world.add("a")
    name = await world.trajectory()
    await world.chat(name, [user("x")], max_tokens=4)
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})
    lease = {"job": "job", "num_groups": 1, "version": [1, 0], "ttl_s": 600}
    batch = await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")
    await world.ok("POST", "/rose/v1/versions", {"job": "job", "attempt": 1, "version": 4}, role="trainer")
    await world.scheduler.stop(drain_s=0)
    await world.start()
    assert (await world.call("POST", "/rose/v1/batches/lease", lease, role="trainer"))[0] == 204
    await world.ok(
        "POST", f"/rose/v1/batches/{batch['batch_id']}/ack", {"step": 1, "attempt": 1}, role="trainer"
    )
    assert (await world.ok("GET", "/status"))["versions"] == {"job": "1.4"}


async def test_what_a_full_disk_refused_is_refused_when_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start()
    first, second = [await world.trajectory() for _ in range(2)]
    await world.ok("POST", f"/rose/v1/trajectories/{first}/finish", {"reward": 1})
    lease = {"job": "job", "num_groups": 1, "version": [1, 0], "ttl_s": 600}
    await world.ok("PUT", "/rose/v1/batches/b", lease, role="trainer")
    journal_file, real = world.scheduler.journal._file, os.write

    def full(descriptor: int, data: bytes) -> int:
        if descriptor == journal_file:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    ack = ("POST", "/rose/v1/batches/b/ack", {"step": 1, "attempt": 1})
    finish = ("POST", f"/rose/v1/trajectories/{second}/finish", {"reward": 1})
    for _ in range(2):
        assert (await world.call(*ack, role="trainer"))[0] == 503
        assert (await world.call(*finish))[0] == 503
    monkeypatch.undo()
    await world.scheduler.stop(drain_s=0)
    await world.start()
    again = await world.ok("PUT", "/rose/v1/batches/b", lease, role="trainer")
    assert [each["id"] for each in again["trajectories"]] == [first]
    assert (await world.ok(*finish))["state"] == "finished"


async def test_a_compacted_journal_gives_the_same_state(world: World) -> None:
    await world.start()
    await world.add("a")
    for index in range(6):
        name = await world.trajectory(group_id=f"g{index // 2}", group_size=2)
        await world.chat(name, [user("x")], max_tokens=4)
        if index < 5:
            await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": index})
    lease = {"job": "job", "num_groups": 1, "version": [0, 0], "ttl_s": 600}
    acked = await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")
    ack = f"/rose/v1/batches/{acked['batch_id']}/ack"
    await world.ok("POST", ack, {"step": 1, "attempt": 1}, role="trainer")
    open_batch = await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")

    async def listing() -> list[Any]:
        found = (await world.ok("GET", "/rose/v1/trajectories"))["trajectories"]
        return [item for item in found if item["state"] != "consumed"]

    live = await listing()
    await world.scheduler.stop(drain_s=0)
    before = (world.tmp_path / "journal" / "journal.rose").stat().st_size
    await world.start(journal={"compact_bytes": 1})
    assert world.scheduler.journal.size_bytes < before
    assert await listing() == live
    await world.scheduler.stop(drain_s=0)
    await world.start()
    assert await listing() == live
    await world.ok("POST", ack, {"step": 1, "attempt": 1}, role="trainer")
    await world.ok(
        "POST", f"/rose/v1/batches/{open_batch['batch_id']}/ack", {"step": 2, "attempt": 1}, role="trainer"
    )


async def test_a_taken_port_and_a_bad_setting_are_one_line(
    tmp_path: Path, tokens: Tokens, world: World
) -> None:
    await world.start()
    tokens.save(tmp_path / "tokens.toml")
    port = world.url.rsplit(":", 1)[-1]
    for arguments, text in (
        (["--port", port], "port: 127.0.0.1"),
        (["--set", "polcy=x"], "polcy: unknown key (did you mean 'policy'?)"),
        (["--policy", "hash"], "policy: "),
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rose.scheduler.cli",
            *arguments,
            "--token-file",
            str(tmp_path / "tokens.toml"),
            "--journal",
            str(tmp_path / "other"),
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        _, err = await process.communicate()
        assert process.returncode == 2
        assert err.decode().count("\n") == 1
        assert text in err.decode()


def turn_of(name: str, version: str) -> TurnRecord:
    """A first turn of one token."""
    return TurnRecord(
        trajectory_id=name,
        turn=0,
        kind="chat",
        suffix_ids=b"\1\0\0\0",
        token_ids=b"\2\0\0\0",
        logprobs=b"\0" * 8,
        finish_reason="stop",
        versions=[(version, 0, 1)],
        segments=[],
        usage={},
        timing={},
        sampling={},
    )


@pytest.mark.parametrize("compact_bytes", [0, 2**30])
def test_a_kill_while_a_run_is_named_lets_no_other_run_s_samples_through(
    tmp_path: Path, compact_bytes: int
) -> None:
    def store() -> TrajectoryStore:
        return TrajectoryStore(
            Journal(tmp_path),
            sp.SampleParams(),
            max_trajectories=9,
            retained_finals=9,
            compact_bytes=compact_bytes,
        )

    live = store()
    for group, run in (("theirs", "run-b"), ("mine", "run-a")):
        name = live.create(job="j", group_id=group, group_size=1, task=None, sampling={})
        segment = {"worker": "w", "tier": "dedicated", "attempt": 1, "start": 0, "n": 1, "run": run}
        live.add_turn(msgspec.structs.replace(turn_of(name, "1.0"), segments=[segment]))
        live.finish(FinishRecord(id=name, reward=1.0))
    live.require("j", (1, 0), "run-a")
    live.journal.close()  # killed before what "theirs" is was written

    again = store()
    leased, _ = again.lease(job="j", num_groups=1, version=(1, 0), ttl_s=60)
    assert leased is not None
    assert leased.group_ids == ("mine",)
    again.journal.close()
    third = store()
    assert third.book.counts() == again.book.counts() == {"stale": 1, "leased": 1}
    third.journal.close()


def test_replay_reaches_the_state_that_was_live(tmp_path: Path) -> None:
    def store() -> TrajectoryStore:
        return TrajectoryStore(
            Journal(tmp_path),
            sp.SampleParams(alpha=0),
            max_trajectories=100,
            retained_finals=2,
            compact_bytes=2**30,
        )

    live = store()
    names = [
        live.create(job="j", group_id=f"g{i // 2}", group_size=2, task=i, sampling={}) for i in range(10)
    ]
    for index, name in enumerate(names):
        live.add_turn(turn_of(name, f"1.{index // 4}"))
        live.finish(FinishRecord(id=name, reward=1.0))
    leased, _ = live.lease(job="j", num_groups=1, version=(1, 1), ttl_s=5)  # drops g0, g1 as stale
    assert leased is not None
    live.ack(leased.batch_id, 3, 1)
    live.resume("j", 2, [names[6]])
    running = live.create(job="j", group_id="spent", group_size=2, task=None, sampling={})
    live.add_turn(turn_of(running, "1.0"))
    (given_up,) = live.drop_spent(job="j", version=(1, 2), alpha=None, on_stale=None, live={})
    late = live.create(job="j", group_id="late", group_size=2, task=None, sampling={})
    (also,) = live.add_turn(turn_of(late, "1.0"))
    assert [action.trajectory_ids for action in (given_up, also) if isinstance(action, sp.Discard)] == [
        (running,),
        (late,),
    ]
    picture = (
        live.book.counts(),
        live.book.ready,
        live.book.acked,
        live.book.attempts,
        sorted(live.trajectories),
    )
    live.journal.close()
    again = store()
    assert picture == (
        again.book.counts(),
        again.book.ready,
        again.book.acked,
        again.book.attempts,
        sorted(again.trajectories),
    )
    again.journal.close()


async def test_an_acknowledgement_that_comes_after_the_lease_and_a_compaction_survives_a_restart(
    tmp_path: Path,
) -> None:
    def store() -> TrajectoryStore:
        return TrajectoryStore(
            Journal(tmp_path), sp.SampleParams(), max_trajectories=9, retained_finals=9, compact_bytes=2**30
        )

    live = store()
    names = [
        live.create(job="j", group_id=group_id, group_size=1, task=None, sampling={}) for group_id in "ab"
    ]
    for name in names:
        live.add_turn(turn_of(name, "1.0"))
        live.finish(FinishRecord(id=name, reward=1.0))
    leased, _ = live.lease(job="j", num_groups=1, version=(1, 0), ttl_s=0.0)
    assert leased is not None
    live.expire(time.monotonic() + 1.0)
    await live.compact()
    live.ack(leased.batch_id, 0, 1)
    live.journal.close()
    again = store()
    assert again.book.counts() == live.book.counts()
    assert again.book.ready == live.book.ready == {"j": ["b"]}
    again.ack(leased.batch_id, 0, 1)  # said twice
    again.journal.close()


async def test_a_compaction_that_failed_is_tried_again_as_soon_as_the_disk_may_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Journal) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock_s = 1000.0
    monkeypatch.setattr("rose.scheduler.books.time.monotonic", lambda: clock_s)
    live = TrajectoryStore(
        Journal(tmp_path), sp.SampleParams(), max_trajectories=999, retained_finals=0, compact_bytes=5000
    )
    while not live.is_journal_large:
        live.cancel(live.create(job="j", group_id=None, group_size=1, task=None, sampling={}), "test")
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_fresh", full)
        await live.compact()
    assert not live.is_journal_large  # not at every tick
    clock_s += COMPACT_AGAIN_S
    assert live.is_journal_large
    await live.compact()
    assert live.journal.size_bytes < 5000
    live.journal.close()


def test_what_cannot_be_written_is_not_in_memory_either(tmp_path: Path) -> None:
    def store() -> TrajectoryStore:
        return TrajectoryStore(
            Journal(tmp_path), sp.SampleParams(), max_trajectories=9, retained_finals=9, compact_bytes=2**30
        )

    live = store()
    for _ in range(2):  # asked for again, it is no more known than before
        with pytest.raises(UnicodeEncodeError):
            live.create(job="j", group_id="g", group_size=1, task=None, sampling={}, key="t\udce2che-1")
    assert not live.trajectories
    live.finish(
        FinishRecord(id=live.create(job="j", group_id="g", group_size=1, task=None, sampling={}), reward=1.0)
    )
    live.journal.close()
    again = store()
    assert again.trajectories.keys() == live.trajectories.keys()
    again.journal.close()


async def test_a_compaction_that_fails_for_any_reason_is_reported_and_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = TrajectoryStore(
        Journal(tmp_path), sp.SampleParams(), max_trajectories=999, retained_finals=9, compact_bytes=1
    )
    trajectory = live.get(live.create(job="j", group_id=None, group_size=1, task=None, sampling={}))
    trajectory.created = msgspec.structs.replace(trajectory.created, key="t\udce2che-1")
    assert live.is_journal_large
    await live.compact()
    assert "the journal was not compacted" in caplog.text
    assert not live.is_journal_large  # not at every tick
    live.cancel(trajectory.id, "test")
    await live.journal.commit()
    live.journal.close()


def test_names_of_many_batches_are_compacted_into_records_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that lets each lease run out has the same groups under thousands of names."""

    def store(compact_bytes: int) -> TrajectoryStore:
        return TrajectoryStore(
            Journal(tmp_path),
            sp.SampleParams(),
            max_trajectories=99,
            retained_finals=9,
            compact_bytes=compact_bytes,
        )

    live = store(2**30)
    for number in range(4):
        group_id = f"{number:0>250}"
        name = live.create(job="j", group_id=group_id, group_size=1, task=None, sampling={})
        live.finish(FinishRecord(id=name, reward=1.0))
    for number in range(32):
        live.lease(job="j", num_groups=4, version=(1, 0), ttl_s=0.0, name=f"late{number}")
        live.expire(time.monotonic() + 1.0)
    for number in range(2000):
        live.give_back(f"given back {number}")
    live.journal.close()
    before = (tmp_path / "journal.rose").stat().st_ino
    monkeypatch.setattr("rose.scheduler.journal.MAX_RECORD_BYTES", 2**14)
    store(0).journal.close()
    assert (tmp_path / "journal.rose").stat().st_ino != before, "compacted"

    again = store(2**30)
    assert again.book.expired.keys() == live.book.expired.keys()
    assert again.book.returned == live.book.returned
    assert again.book.ready == live.book.ready
    again.journal.close()


def test_a_group_that_was_kept_when_it_was_complete_is_kept_by_a_compaction(tmp_path: Path) -> None:
    """The member that was created first finished last, and equal groups were no longer filtered then."""

    def store(*, filter_equal: bool, compact_bytes: int = 2**30) -> TrajectoryStore:
        params = sp.SampleParams(filter_equal=filter_equal)
        return TrajectoryStore(
            Journal(tmp_path), params, max_trajectories=9, retained_finals=9, compact_bytes=compact_bytes
        )

    live = store(filter_equal=True)
    first, second = (
        live.create(job="j", group_id="g", group_size=2, task=None, sampling={}) for _ in range(2)
    )
    live.finish(FinishRecord(id=second, reward=1.0))
    live.journal.close()
    live = store(filter_equal=False)
    live.finish(FinishRecord(id=first, reward=1.0))
    leased, _ = live.lease(job="j", num_groups=1, version=(1, 0), ttl_s=600)
    assert leased is not None
    live.journal.close()
    store(filter_equal=False, compact_bytes=0).journal.close()

    again = store(filter_equal=False)
    again.ack(leased.batch_id, 0, 1)
    assert again.book.counts() == {"consumed": 2}
    again.journal.close()


@pytest.mark.parametrize("compact_bytes", [0, 2**30])
def test_how_old_a_first_turn_may_be_is_known_after_a_restart(tmp_path: Path, compact_bytes: int) -> None:
    def store() -> TrajectoryStore:
        params = sp.SampleParams(alpha=1, on_stale="wait")
        return TrajectoryStore(
            Journal(tmp_path), params, max_trajectories=9, retained_finals=9, compact_bytes=compact_bytes
        )

    live = store()
    live.require("j", (1, 0))
    name = live.create(job="j", group_id="g", group_size=1, task=None, sampling={})
    live.require("j", (1, 1))
    live.journal.close()
    again = store()
    assert again.book.samples[name].floor == (1, 0)
    again.journal.close()


@pytest.mark.parametrize("count", [0, 1, 5])
def test_prompt_ids_are_put_together_along_the_branch(tmp_path: Path, count: int) -> None:
    from rose.scheduler.ids import pack_ids
    from rose.scheduler.records import CreateRecord
    from rose.scheduler.trajectory import Trajectory

    trajectory = Trajectory(CreateRecord(id="t", job="j", group_id="g", group_size=1, created_at=0.0))
    whole: list[int] = []
    for turn in range(count + 1):
        suffix, output = [turn * 10, turn * 10 + 1], [turn * 10 + 2]
        trajectory.add(
            TurnRecord(
                trajectory_id="t",
                turn=turn,
                kind="chat",
                parent=turn - 1 if turn else None,
                suffix_ids=pack_ids(suffix),
                token_ids=pack_ids(output),
                logprobs=b"",
                finish_reason="stop",
                versions=[],
                segments=[],
                usage={},
                timing={},
                sampling={},
            )
        )
        assert trajectory.prompt_ids(turn) == whole + suffix
        whole += suffix + output
        assert trajectory.full_ids(turn) == whole
        assert [span[:2] for span in trajectory.sampled(turn)] == [[3 * n + 2, 1] for n in range(turn + 1)]
