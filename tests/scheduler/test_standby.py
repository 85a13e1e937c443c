"""A second scheduler on one journal: it takes over from one that died or hangs, and of two that live one alone writes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.auth import Tokens, bearer
from rose.errors import CapacityError, ConfigError, LedgerError
from rose.policy import samples as sp
from rose.scheduler import claim as claims
from rose.scheduler.claim import Claim, owner_of
from rose.scheduler.journal import Journal, Replaced
from rose.scheduler.records import AckRecord, EpochRecord, FinishRecord, Record
from rose.scheduler.store import TrajectoryStore
from rose.testing.fake_engine import FakeEngine, serve_engine
from rose.testing.fake_node import FakeNode
from tests.scheduler.audit import Client, lease_all
from tests.scheduler.conftest import user
from tests.scheduler.processes import Daemon
from tests.scheduler.test_restart import turn_of


def taken(directory: Path, over: int | None = None) -> Claim:
    claim = Claim.take(directory, over=over)
    assert claim is not None
    return claim


def record(number: int) -> AckRecord:
    return AckRecord(batch_id=f"b{number}", step=number, attempt=1)


def successor_of(directory: Path, claim: Claim) -> tuple[Journal, list[Record]]:
    """What it reads; its file is in place."""
    journal = Journal(directory, follows=True)
    journal.take_over(claim)
    records = list(journal.recover())
    if journal.must_move:
        journal.compact(records)
    return journal, records


# --- who may write ---------------------------------------------------------------------------------------


def test_an_epoch_is_free_when_its_owner_has_gone(tmp_path: Path) -> None:
    first = taken(tmp_path)
    assert Claim.take(tmp_path) is None
    first.close()
    second = taken(tmp_path)
    assert (first.epoch, second.epoch, second.is_alone) == (1, 2, True)
    second.close()


def test_an_owner_that_was_taken_over_from_knows_it_for_good(tmp_path: Path) -> None:
    held = [taken(tmp_path)]
    for _ in range(3):
        held.append(taken(tmp_path, over=held[-1].epoch))
        assert [claim.holds() for claim in held] == [False] * (len(held) - 1) + [True]
        assert not held[-1].is_alone
        held[-1].forget_earlier()
        assert [claim.holds() for claim in held] == [False] * (len(held) - 1) + [True]
    for claim in held:
        claim.close()


def test_of_many_who_take_over_one_does(tmp_path: Path) -> None:
    old = taken(tmp_path)
    won = [Claim.take(tmp_path, over=old.epoch) for _ in range(3)]
    assert [claim is not None for claim in won] == [True, False, False]
    for claim in (old, *won):
        if claim is not None:
            claim.close()


def test_whom_to_ask_is_said_while_it_lives(tmp_path: Path) -> None:
    claim = taken(tmp_path)
    claim.announce("http://one:1")
    before = owner_of(tmp_path)
    assert before is not None
    assert (before.url, before.is_locked) == ("http://one:1", True)
    claim.announce("http://1:2")
    claim.close()
    after = owner_of(tmp_path)
    assert after is not None
    assert (after.url, after.is_locked) == ("http://1:2", False)


def test_a_network_file_system_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims.check_shared(tmp_path)
    monkeypatch.setattr(claims, "file_system", lambda path: "nfs4")
    with pytest.raises(ConfigError, match="nfs4"):
        claims.check_shared(tmp_path)


# --- what is written -------------------------------------------------------------------------------------


def test_what_was_promised_is_read_and_what_comes_later_is_refused(tmp_path: Path) -> None:
    old = Journal(tmp_path)
    list(old.recover())
    for number in range(3):
        old.append(record(number))
    claim = taken(tmp_path, over=1)  # it hangs here
    with pytest.raises(CapacityError) as refused:
        old.append(record(3))  # in the old file, which nobody has read yet
    assert refused.value.code == "not_active"
    new, records = successor_of(tmp_path, claim)
    assert records[:3] == [record(number) for number in range(3)]
    with pytest.raises(CapacityError, match="taken over"):
        old.append(record(4))
    new.append(record(5))
    new.close()
    old.close()
    again = Journal(tmp_path)
    assert list(again.recover()) == [*records, record(5)]
    again.close()


async def test_a_compaction_that_wakes_up_late_brings_nothing_back(tmp_path: Path) -> None:
    old = Journal(tmp_path)
    list(old.recover())
    old.append(record(0))
    new, _ = successor_of(tmp_path, taken(tmp_path, over=1))
    new.append(record(1))
    await old.compact_beside([record(9)])
    old.close()
    new.close()
    again = Journal(tmp_path)
    assert list(again.recover()) == [record(0), record(1)]
    again.close()


def test_one_who_died_while_it_took_over_leaves_the_old_file_alone(tmp_path: Path) -> None:
    old = Journal(tmp_path)  # stopped, and never dead
    list(old.recover())
    old.append(record(0))
    taken(tmp_path, over=1).close()
    claim = taken(tmp_path)
    assert not claim.is_alone
    new, records = successor_of(tmp_path, claim)
    with pytest.raises(CapacityError):
        old.append(record(1))
    new.append(record(2))
    new.close()
    old.close()
    again = Journal(tmp_path)
    assert list(again.recover()) == [*records, record(2)] == [record(0), record(2)]
    again.close()


def test_a_follower_reads_what_is_whole_and_notices_another_file(tmp_path: Path) -> None:
    active = Journal(tmp_path)
    list(active.recover())
    follower = Journal(tmp_path, follows=True)
    assert list(follower.follow()) == []
    active.append(record(0))
    assert list(follower.follow()) == [record(0)]
    active.append(record(1))
    whole = active.path.read_bytes()
    for cut in range(1, 12):
        active.path.write_bytes(whole[:-cut])
        assert list(follower.follow()) == []
    active.path.write_bytes(whole)
    assert list(follower.follow()) == [record(1)]
    active.compact([record(7)])
    with pytest.raises(Replaced):
        list(follower.follow())
    follower.close()
    active.close()


def test_a_journal_that_two_have_written_is_refused(tmp_path: Path) -> None:
    store = store_of(Journal(tmp_path))
    store.journal.append(EpochRecord(epoch=store.epoch))
    store.journal.close()
    journal = Journal(tmp_path)
    with pytest.raises(LedgerError, match="two have written"):
        store_of(journal)
    journal.close()


def test_a_journal_brought_to_another_folder_goes_on_above_its_epoch(tmp_path: Path) -> None:
    for _ in range(3):
        store_of(Journal(tmp_path / "a")).journal.close()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "journal.rose").write_bytes((tmp_path / "a" / "journal.rose").read_bytes())
    store = store_of(Journal(tmp_path / "b"))
    assert store.epoch == 4
    store.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    store.journal.close()
    assert store_of(Journal(tmp_path / "b")).epoch == 5


def store_of(journal: Journal, compact_bytes: int = 2**30) -> TrajectoryStore:
    return TrajectoryStore(
        journal, sp.SampleParams(), max_trajectories=100, retained_finals=100, compact_bytes=compact_bytes
    )


@pytest.mark.parametrize("is_alive", [False, True], ids=["after its death", "beside it"])
def test_the_books_of_a_stand_by_are_those_of_the_active_one(tmp_path: Path, is_alive: bool) -> None:
    live = store_of(Journal(tmp_path))
    follower = store_of(Journal(tmp_path, follows=True))
    names = []
    for index in range(6):
        names.append(live.create(job="j", group_id=f"g{index // 2}", group_size=2, task=index, sampling={}))
        live.add_turn(turn_of(names[-1], "1.0"))
        follower.catch_up()
        live.finish(FinishRecord(id=names[-1], reward=float(index)))
    leased, _ = live.lease(job="j", num_groups=1, version=(1, 0), ttl_s=60)
    assert leased is not None
    if not is_alive:
        live.journal.close()
    claim = taken(tmp_path, over=1 if is_alive else None)
    follower.journal.take_over(claim)
    follower.begin()

    def picture(store: TrajectoryStore) -> tuple[Any, ...]:
        return store.book.counts(), store.book.ready, sorted(store.trajectories), list(store.book.batches)

    assert picture(follower) == picture(live)
    assert follower.epoch == 2
    follower.ack(leased.batch_id, 1, 1)
    follower.journal.close()
    live.journal.close()
    again = store_of(Journal(tmp_path))
    assert picture(again)[0] == picture(follower)[0]
    again.journal.close()


def test_a_lease_that_was_renewed_is_not_given_back_by_the_one_who_takes_over(tmp_path: Path) -> None:
    live = store_of(Journal(tmp_path))
    name = live.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    live.finish(FinishRecord(id=name, reward=1.0))
    live.lease(job="j", num_groups=1, version=(1, 0), ttl_s=60, name="b")
    follower = store_of(Journal(tmp_path, follows=True))
    live.lease(job="j", num_groups=1, version=(1, 0), ttl_s=60, name="b")
    live.journal.close()
    follower.journal.take_over(taken(tmp_path))
    at_s = time.monotonic()
    follower.begin()
    assert follower.expire(at_s + 60 - 1e-9) == []
    assert list(follower.book.batches) == ["b"]
    follower.journal.close()


@pytest.mark.parametrize("compact_bytes", [1, 2**30], ids=["compacted", "as written"])
def test_a_lease_is_held_as_long_as_the_longest_ttl_that_it_was_asked_with(
    tmp_path: Path, compact_bytes: int
) -> None:
    live = store_of(Journal(tmp_path))
    name = live.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    live.finish(FinishRecord(id=name, reward=1.0))
    sizes: list[int] = []
    for ttl_s in (60, 600, 600, 60, 600, 599):
        live.lease(job="j", num_groups=1, version=(1, 0), ttl_s=ttl_s, name="b")
        sizes.append(live.journal.size_bytes)
    assert sizes[0] < sizes[1]
    assert len(set(sizes[1:])) == 1, "a renewal that says nothing new is in the journal"
    live.journal.close()
    for _ in range(2):
        at_s = time.monotonic()
        again = store_of(Journal(tmp_path), compact_bytes)
        assert again.expire(at_s + 600 - 1e-9) == []
        assert list(again.book.batches) == ["b"]
        again.journal.close()


async def test_one_that_was_taken_over_from_promises_nothing_when_asked_again(tmp_path: Path) -> None:
    old = store_of(Journal(tmp_path))
    name = old.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    old.finish(FinishRecord(id=name, reward=1.0))
    old.lease(job="j", num_groups=1, version=(1, 0), ttl_s=600, name="b")
    await old.journal.commit()
    taken(tmp_path, over=1).close()
    with pytest.raises(CapacityError):
        old.ack("b", 1, 1)
    old.ack("b", 1, 1)
    with pytest.raises(CapacityError) as refused:
        await old.journal.commit()
    assert refused.value.code == "not_active"
    old.journal.close()


# --- processes -------------------------------------------------------------------------------------------


async def play(client: Client, number: int, num_turns: int) -> str:
    name = await client.create(number)
    messages: list[Any] = [user(f"task {number}")]
    for turn in range(num_turns):
        body = {"model": "policy", "messages": messages, "max_tokens": 12}
        headers = {"X-Session-ID": name, "X-ROSE-Turn": str(turn)}
        answer = await client.post("/v1/chat/completions", body, headers)
        messages += [answer["choices"][0]["message"], user("next")]
    await client.finish(name, number)
    return name


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_stand_by_takes_over_and_nothing_is_lost_or_doubled(tmp_path: Path, how: str) -> None:
    tokens = Tokens.generate()
    tokens.save(tmp_path / "tokens.toml")
    settings = ("standby.dead_s=3.0",)
    first, second = (Daemon(tmp_path, *settings, name=name, stands_by=True) for name in ("one", "two"))
    urls = f"{await first.start()},{await second.start()}"
    engine = FakeEngine(token_s=0.004)
    runner, engine_url = await serve_engine(engine)
    async with contextlib.AsyncExitStack() as ends:
        ends.push_async_callback(runner.cleanup)
        ends.push_async_callback(second.end)
        ends.push_async_callback(first.end)
        session = await ends.enter_async_context(aiohttp.ClientSession())
        async with session.get(f"{second.url}/readyz") as response:
            assert (response.status, (await response.json())["problems"]) == (503, ["standby"])
        async with session.post(f"{second.url}/v1/chat/completions", json={}) as response:
            assert (response.status, "X-ROSE-Active" in response.headers) == (401, False)
        async with session.post(f"{second.url}/x", json={}, headers=bearer(tokens.agent)) as response:
            assert response.status == 503
            assert response.headers["X-ROSE-Active"] == first.url
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "not_active"
        node = FakeNode(session, urls, tokens.node, engine, engine_url, worker_id="a", period_s=0.05)
        beats = asyncio.create_task(node.run())
        ends.callback(beats.cancel)
        client = Client(session, urls, tokens)
        playing = [asyncio.create_task(play(client, number, 4)) for number in range(6)]
        async with asyncio.timeout(100):
            while len(engine.requests) < 8:  # noqa: ASYNC110 - what another process asks
                await asyncio.sleep(0.005)
        first.send(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        await second.is_active()
        if how == "stopped":
            before = sorted((tmp_path / "journal").glob("journal*.rose"))
            first.send(signal.SIGCONT)
            assert first.process is not None
            assert await first.process.wait() == 75
            assert f"at {second.url} has taken over" in first.log.read_text()
            assert sorted((tmp_path / "journal").glob("journal*.rose")) == before
            assert [path.name for path in before] == ["journal.2.rose"]
        else:
            assert first.process is not None
            await first.process.wait()
        names = await asyncio.gather(*playing)

        async def undisturbed(prompt: list[int]) -> list[int]:
            return engine.greedy(prompt, {"max_tokens": 12})[0]

        await lease_all(client, names, num_turns=4, undisturbed=undisturbed)
        # And back: the first one, started again with the same command, stands by now.
        await first.start()
        second.send(signal.SIGKILL)
        await first.is_active()
        counts = (await Client(session, first.url, tokens).status())["trajectories"]
        assert {state: count for state, count in counts.items() if count} == {"consumed": 6}
