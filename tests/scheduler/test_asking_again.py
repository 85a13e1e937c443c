"""The same request again: joined, replayed, or a new turn."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rose.auth import bearer
from rose.frames import FRAME
from rose.scheduler.journal import MAGIC
from tests.scheduler.conftest import World, user


async def test_a_retry_after_the_answer_was_lost_gets_the_same_answer(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory()
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8}
    headers = {"X-Session-ID": session}
    first = await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    again = await world.ok(
        "POST", "/v1/chat/completions", body, headers={**headers, "x-stainless-retry-count": "1"}
    )
    assert again == first
    assert len(engine.requests) == 1


async def test_a_retry_while_the_turn_runs_joins_it(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    session = await world.trajectory()
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8}
    headers = {"X-Session-ID": session}
    first = asyncio.create_task(world.ok("POST", "/v1/chat/completions", body, headers=headers))
    await world.until(lambda: engine.num_running == 1)
    first.cancel()
    await world.until(
        lambda: (
            world.scheduler.book.turns
            and all(turn.detached_at_s is not None for turn in world.scheduler.book.turns.values())
        )
    )
    retry = asyncio.create_task(world.ok("POST", "/v1/chat/completions", body, headers=headers))
    await world.until(lambda: world.scheduler.status.num_duplicates == 1)
    engine.hold.set()
    assert (await retry)["rose"]["turn"] == 0
    assert len(engine.requests) == 1


async def test_an_equal_body_that_is_no_retry_is_a_new_turn(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory()
    for _ in range(2):
        await world.chat(session, [user("x")], max_tokens=8)
    assert len(engine.requests) == 2


async def test_one_turn_number_with_two_bodies_is_a_conflict(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    headers = {"X-Session-ID": session, "X-ROSE-Turn": "0"}
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8}
    first = await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    assert await world.ok("POST", "/v1/chat/completions", body, headers=headers) == first
    body["max_tokens"] = 9
    status, answer = await world.call("POST", "/v1/chat/completions", body, headers=headers)
    assert (status, answer["error"]["code"]) == (422, "turn_conflict")


async def test_the_log_probs_of_a_repeat_are_those_of_the_answer(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    headers = {"X-Session-ID": session, "X-ROSE-Turn": "0"}
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8, "logprobs": True}
    first = await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    again = await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    assert again["choices"][0]["logprobs"] == first["choices"][0]["logprobs"]
    assert len(first["choices"][0]["logprobs"]["content"]) == 8


def ask(world: World, session: str, *, retry: int = 0, **extra: Any) -> asyncio.Task[Any]:
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8}
    headers = {"X-Session-ID": session, **extra}
    if retry:
        headers["x-stainless-retry-count"] = str(retry)
    return asyncio.create_task(world.call("POST", "/v1/chat/completions", body, headers=headers))


async def turns_of(asked: Sequence[Awaitable[Any]]) -> list[int]:
    answers = await asyncio.gather(*asked)
    assert all(status == 200 for status, _ in answers), answers
    return [answer["rose"]["turn"] for _, answer in answers]


@pytest.mark.parametrize("at_once", [True, False])
async def test_equal_samples_that_were_all_asked_again_stay_samples(world: World, at_once: bool) -> None:
    """Their first tries never came through."""
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    if at_once:
        turns = await turns_of([ask(world, session, retry=1) for _ in range(5)])
    else:
        turns = [(await turns_of([ask(world, session, retry=1)]))[0] for _ in range(5)]
    assert sorted(turns) == [0, 1, 2, 3, 4]


async def test_samples_that_were_refused_at_first_are_samples(world: World) -> None:
    await world.start(limits={"max_running": 3})
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    session = await world.trajectory()
    first = [ask(world, session) for _ in range(3)]
    await world.until(lambda: engine.num_running == 3)
    for _ in range(2):
        assert (await ask(world, session))[0] == 429
    engine.hold.set()
    done = await turns_of(first)
    again = await turns_of([ask(world, session, retry=1) for _ in range(2)])
    assert sorted([*done, *again]) == [0, 1, 2, 3, 4]


async def test_a_retry_of_a_sample_that_still_runs_joins_it_once(world: World) -> None:
    """Its connection broke, and we cannot tell yet."""
    await world.start()
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    session = await world.trajectory()
    asked = [ask(world, session) for _ in range(2)]
    await world.until(lambda: engine.num_running == 2)
    asked += [ask(world, session, retry=1) for _ in range(3)]
    await world.until(lambda: engine.num_running == 3)
    engine.hold.set()
    assert sorted(await turns_of(asked)) == [0, 0, 1, 1, 2]


DEMANDS: list[dict[str, Any]] = [
    {"X-ROSE-Min-Version": "0.0"},
    {"X-ROSE-Tier": "dedicated"},
    {"X-ROSE-Side": "yes"},
]


async def left(world: World, session: str, **demands: Any) -> None:
    """A request whose client has gone while it runs."""
    num_before = len(world.scheduler.book.turns)
    asked = ask(world, session, **demands)
    await world.until(lambda: len(world.scheduler.book.turns) > num_before)
    asked.cancel()
    await world.until(lambda: all(t.detached_at_s is not None for t in world.scheduler.book.turns.values()))


@pytest.mark.parametrize("demands", DEMANDS, ids=lambda demands: next(iter(demands)))
async def test_one_that_demands_something_else_joins_none_that_runs(
    world: World, demands: dict[str, Any]
) -> None:
    await world.start(timeouts={"detach_s": 60.0})
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    session = await world.trajectory()
    await left(world, session)
    other = ask(world, session, **demands)
    await world.until(lambda: engine.num_running == 2 or world.scheduler.status.num_duplicates)
    assert world.scheduler.status.num_duplicates == 0
    again = ask(world, session)
    await world.until(lambda: world.scheduler.status.num_duplicates == 1)
    engine.hold.set()
    assert sorted(await turns_of([other, again])) == [0, 1]
    # Nor is it given an answer that was not sampled as it demands.
    assert await turns_of([ask(world, session, retry=1, **DEMANDS[0], **DEMANDS[1])]) == [2]


@pytest.mark.parametrize(
    ("tier", "demands"),
    [("dedicated", {"X-ROSE-Min-Version": "0.5"}), ("harvested", {"X-ROSE-Tier": "dedicated"})],
)
async def test_one_that_demands_less_does_not_wait_with_one_that_no_worker_may_take(
    world: World, tier: str, demands: dict[str, Any]
) -> None:
    await world.start(timeouts={"max_queue_s": 0.05})
    await world.add("a", tier=tier)
    session = await world.trajectory()
    assert (await ask(world, session, **demands))[0] == 503
    assert await turns_of([ask(world, session)]) == [0]
    assert (await ask(world, session, retry=1, **demands))[0] == 503


async def test_a_name_with_other_demands_is_a_conflict(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    name = {"X-ROSE-Turn": "0"}
    assert await turns_of([ask(world, session, **name)]) == [0]
    status, answer = await ask(world, session, **name, **DEMANDS[0])
    assert (status, answer["error"]["code"]) == (422, "turn_conflict")


async def test_an_idempotency_key_decides_where_there_is_one(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    keys: list[dict[str, Any]] = [{"Idempotency-Key": name} for name in ("one", "two", "one", "two", "three")]
    turns = [(await turns_of([ask(world, session, retry=1, **key)]))[0] for key in keys]
    assert turns == [0, 1, 0, 1, 2]
    # One without a key takes nothing from those that have one.
    assert await turns_of([ask(world, session, retry=1)]) == [3]


async def test_an_idempotency_key_holds_over_a_restart(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    key: dict[str, Any] = {"Idempotency-Key": "one"}
    first = (await ask(world, session, **key))[1]
    await world.scheduler.stop(drain_s=0)
    await world.start()
    await rejoin(world)
    assert (await ask(world, session, **key))[1] == first
    status, answer = await world.call(
        "POST",
        "/v1/chat/completions",
        {"model": "policy", "messages": [user("y")], "max_tokens": 8},
        headers={"X-Session-ID": session, **key},
    )
    assert (status, answer["error"]["param"]) == (422, "Idempotency-Key")


@pytest.mark.parametrize("compact_bytes", [1, 2**30])
async def test_a_retry_after_a_restart_takes_what_was_never_delivered(
    world: World, compact_bytes: int
) -> None:
    await world.start(timeouts={"detach_s": 60.0})
    engine = await world.add("a")
    session = await world.trajectory()
    assert await turns_of([ask(world, session)]) == [0]
    engine.hold = asyncio.Event()
    lost = ask(world, session)
    await world.until(lambda: engine.num_running == 1)
    lost.cancel()
    await world.until(lambda: all(t.detached_at_s is not None for t in world.scheduler.book.turns.values()))
    after = ask(world, session)  # joins the one that nobody waits for
    await world.until(lambda: world.scheduler.status.num_duplicates == 1)
    after.cancel()
    await world.until(lambda: all(t.detached_at_s is not None for t in world.scheduler.book.turns.values()))
    engine.hold.set()
    await world.until(lambda: len(world.scheduler.store.trajectories[session].turns) == 2)
    engine.hold = None
    assert await turns_of([ask(world, session)]) == [2]
    for _ in range(2):
        await world.scheduler.stop(drain_s=0)
        await world.start(journal={"compact_bytes": compact_bytes})
    await rejoin(world)
    assert await turns_of([ask(world, session, retry=1)]) == [1]


async def test_an_answer_that_was_continued_has_arrived(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    first = (await ask(world, session))[1]
    await world.chat(session, [user("x"), first["choices"][0]["message"], user("y")], max_tokens=8)
    assert await turns_of([ask(world, session, retry=1)]) == [2]


class Lossy:
    """A proxy that loses the last bytes of answers, and the connection with them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.lose = 0
        """Answers to come whose ends are lost."""

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        onward = asyncio.create_task(self._requests(reader, far_writer))
        try:
            while data := await far_reader.read(2**20):
                if self.lose and (
                    data.endswith(b"}") or data.endswith(b"[DONE]\n\n") or b"\r\n0\r\n" in data
                ):
                    self.lose -= 1
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    break
                writer.write(data)
                await writer.drain()
        finally:
            onward.cancel()
            for end in (writer, far_writer):
                end.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("lost", [(0,), (1,), (0, 2), (0, 1, 2)])
async def test_the_answer_whose_last_bytes_were_lost_is_the_one_that_is_said_again(
    world: World, streamed: bool, lost: tuple[int, ...]
) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    proxy = Lossy(int(world.url.rsplit(":", 1)[-1]))
    url = await proxy.start()
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8, "stream": streamed}
    headers = {"X-Session-ID": session, **bearer(world.tokens.agent)}

    async def asked(client: aiohttp.ClientSession, **more: str) -> bytes:
        async with client.post(
            f"{url}/v1/chat/completions", json=body, headers={**headers, **more}
        ) as response:
            assert response.status == 200
            return await response.read()

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(aiohttp.ClientSession()) for _ in range(3)]
        for at, client in enumerate(clients):
            proxy.lose = int(at in lost)
            if at in lost:
                with pytest.raises(aiohttp.ClientError):
                    await asked(client)
            else:
                await asked(client)
        proxy.lose = 0
        again = [await asked(clients[at], **{"x-stainless-retry-count": "1"}) for at in lost]
    turns = [int(re.findall(rb'"turn":(\d+)', answer)[0]) for answer in again]
    assert sorted(turns) == list(lost)
    assert len(world.scheduler.store.trajectories[session].turns) == 3
    proxy.server.close()


async def test_a_repeat_that_was_lost_is_said_again_too(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    for retry in range(4):
        assert await turns_of([ask(world, session, retry=retry)]) == [0]


async def rejoin(world: World) -> None:
    """The engine's node finds the scheduler at its new port."""
    node = world.nodes["a"]
    node.report_to(world.url)
    await node.register()
    await node.beat()


def cut_behind_first_turn(journal: Path) -> None:
    """As a kill between two choices leaves it."""
    data, at = journal.read_bytes(), len(MAGIC)
    while True:
        length, _ = FRAME.unpack_from(data, at)
        at += FRAME.size + length
        if msgspec.msgpack.decode(data[at - length : at])["type"] == "turn":
            journal.write_bytes(data[:at])
            return


@pytest.mark.parametrize(
    "name",
    [{"Idempotency-Key": "K"}, {"X-ROSE-Turn": "K"}, {"x-stainless-retry-count": "1"}],
    ids=lambda name: next(iter(name)),
)
@pytest.mark.parametrize("compacted", [False, True])
async def test_an_answer_of_which_a_kill_left_one_choice_is_sampled_again(
    world: World, name: dict[str, str], compacted: bool
) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 8, "n": 2}
    headers = {"X-Session-ID": session, **name}
    first = await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    await world.scheduler.stop(drain_s=0)
    cut_behind_first_turn(world.scheduler.journal.path)
    await world.start()
    await world.add("b")
    await world.chat(session, [user("y")], max_tokens=8)
    if compacted:
        await world.scheduler.stop(drain_s=0)
        await world.start(journal={"compact_bytes": 1})
        await world.add("c")
    again = await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    texts = [[choice["message"]["content"] for choice in each["choices"]] for each in (first, again)]
    assert texts[0] == texts[1]
    assert again["rose"]["turns"] == [2, 3]
    if "x-stainless-retry-count" not in name:
        assert await world.ok("POST", "/v1/chat/completions", body, headers=headers) == again
