"""Turns over HTTP: tokens in and out, cuts, failures, waiting, deadlines, versions."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections import deque

import pytest

from rose.auth import bearer
from rose.policy.worker import Health
from rose.scheduler.ids import pack_ids
from rose.testing.fake_engine import Fault
from tests.scheduler.conftest import PROMPT, World, generate, user


async def test_generate_answers_tokens_logprobs_versions_and_segments(world: World) -> None:
    await world.start()
    engine = await world.add("a", version="2.17")
    answer = await generate(world)
    expected, reason, _ = engine.greedy(PROMPT, {"max_tokens": 40})
    n = len(expected)
    assert answer["token_ids"] == expected
    assert len(answer["logprobs"]) == n
    assert answer["finish_reason"] == reason
    assert answer["versions"] == [["2.17", 0, n]]
    assert answer["segments"] == [{"worker": "a", "tier": "dedicated", "attempt": 1, "start": 0, "n": n}]
    assert answer["usage"] == {"prompt": 4, "cached": 0, "generated": n, "recomputed": 0}


async def test_a_turn_says_and_keeps_whether_its_context_was_of_other_weights(world: World) -> None:
    """One of its attempts is enough; an engine that says nothing makes it unknown, never exact."""
    await world.start()
    first, second = await world.add("a", mean_tokens=10_000), await world.add("b", mean_tokens=10_000)
    session = await world.trajectory()
    for said, expected in (
        ((False, False), False),
        ((True, False), True),
        ((False, True), True),
        ((None, False), None),
        ((None, True), True),
    ):
        first.kv_mixed, second.kv_mixed = said
        for engine in (first, second):
            engine.faults.append(Fault(kind="reclaim", after=7))
        answer = await generate(world, session)
        assert answer["attempts"] == 3
        assert answer["kv_mixed"] is expected, said
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    assert [turn["kv_mixed"] for turn in trace["turns"]] == [False, True, True, None, True]


async def test_generate_takes_packed_token_ids(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    packed = base64.b64encode(pack_ids(PROMPT)).decode()
    body = {"token_ids_b64": packed, "sampling_params": {"max_tokens": 5}}
    answer = await world.ok("POST", "/rose/v1/generate", body)
    assert answer["token_ids"] == engine.greedy(PROMPT, {"max_tokens": 5})[0]


@pytest.mark.parametrize("kind", ["reclaim", "abort"])
@pytest.mark.parametrize("after", [0, 1, 7])
async def test_a_cut_turn_equals_an_uninterrupted_one(world: World, kind: str, after: int) -> None:
    await world.start()
    engine = await world.add("a", mean_tokens=10_000)
    await world.add("b", mean_tokens=10_000, tier="harvested")
    for item in world.engines.values():
        item.faults.append(Fault(kind=kind, after=after))
    answer = await generate(world)
    assert answer["token_ids"] == engine.greedy(PROMPT, {"max_tokens": 40})[0]
    assert sum(segment["n"] for segment in answer["segments"]) == 40
    assert answer["attempts"] == 3
    status = await world.ok("GET", "/status")
    assert sum(status["reroutes"].values()) == 2


async def test_a_reset_connection_moves_the_turn(world: World) -> None:
    await world.start(policy="round_robin")
    await world.add("a", mean_tokens=10_000)
    engine = await world.add("b", mean_tokens=10_000)
    world.engines["a"].faults.append(Fault(kind="reset", after=5))
    answer = await generate(world)
    assert answer["token_ids"] == engine.greedy(PROMPT, {"max_tokens": 40})[0]
    assert answer["segments"][0]["worker"] == "b"
    # One broken connection of a living engine is no reason to bury it.
    assert world.scheduler.book.fleet.workers["a"].health is Health.READY


async def test_a_streamed_upstream_loses_no_token_when_its_engine_dies(world: World) -> None:
    await world.start(policy="round_robin", stream_upstream=True)
    await world.add("a", mean_tokens=10_000)
    engine = await world.add("b", mean_tokens=10_000)
    world.engines["a"].faults.append(Fault(kind="reset", after=5))
    answer = await generate(world)
    assert answer["token_ids"] == engine.greedy(PROMPT, {"max_tokens": 40})[0]
    assert [(s["worker"], s["n"]) for s in answer["segments"]] == [("a", 5), ("b", 35)]


async def test_a_streamed_upstream_that_stalls_moves_with_its_tokens(world: World) -> None:
    """Though its client does not stream."""
    await world.start(policy="round_robin", stream_upstream=True, timeouts={"stall_s": 0.3})
    await world.add("a", mean_tokens=10_000)
    engine = await world.add("b", mean_tokens=10_000)
    world.engines["a"].faults.append(Fault(kind="stall", after=5))
    answer = await generate(world)
    assert answer["token_ids"] == engine.greedy(PROMPT, {"max_tokens": 40})[0]
    assert [(s["worker"], s["n"]) for s in answer["segments"]] == [("a", 5), ("b", 35)]
    assert world.scheduler.status.reroutes["stall"] == 1


async def test_a_dead_process_moves_all_its_turns_at_once(world: World) -> None:
    await world.start(policy="round_robin")
    held = await world.add("a", mean_tokens=10_000)
    held.hold = asyncio.Event()
    turns = [asyncio.create_task(generate(world)) for _ in range(3)]
    await world.until(lambda: held.num_running == 3)
    engine = await world.add("b", mean_tokens=10_000)
    await world.kill("a")
    for turn in turns:
        answer = await turn
        assert answer["token_ids"] == engine.greedy(PROMPT, {"max_tokens": 40})[0]
        assert answer["segments"][0]["worker"] == "b"
    assert world.scheduler.book.fleet.workers["a"].health is Health.DEAD


async def test_a_seeded_turn_restarts_instead_of_repeating_its_draws(world: World) -> None:
    await world.start()
    engine = await world.add("a", mean_tokens=10_000)
    engine.faults.append(Fault(kind="reclaim", after=7))
    answer = await generate(world, seed=0)
    assert answer["segments"] == [{"worker": "a", "tier": "dedicated", "attempt": 2, "start": 0, "n": 40}]
    assert [len(body["token_ids"]) for body in engine.requests] == [4, 4]


async def test_min_tokens_is_reduced_by_what_was_kept(world: World) -> None:
    await world.start()
    engine = await world.add("a", mean_tokens=10_000)
    engine.faults.append(Fault(kind="reclaim", after=7))
    await generate(world, min_tokens=20)
    assert [body["sampling_params"]["min_tokens"] for body in engine.requests] == [20, 13]
    assert [body["sampling_params"]["max_tokens"] for body in engine.requests] == [40, 33]


@pytest.mark.parametrize("kind", ["error", "garbage"])
async def test_a_failing_answer_is_tried_again(world: World, kind: str) -> None:
    await world.start()
    engine = await world.add("a")
    await world.add("b")
    for item in world.engines.values():
        item.faults.append(Fault(kind=kind))
    answer = await generate(world)
    assert answer["token_ids"] == engine.greedy(PROMPT, {"max_tokens": 40})[0]
    assert answer["attempts"] == 3


@pytest.mark.parametrize(("kind", "most"), [("error", 5), ("reset", 5), ("garbage", 2)])
async def test_so_many_engines_may_fail_a_turn_and_no_more(world: World, kind: str, most: int) -> None:
    await world.start()
    faults = deque([Fault(kind=kind)] * most)
    for number in range(most + 2):
        (await world.add(f"e{number}")).faults = faults
    assert (await generate(world))["attempts"] == most + 1
    faults.extend([Fault(kind=kind)] * (most + 1))
    status, answer = await world.call("POST", "/rose/v1/generate", {"token_ids": PROMPT})
    assert (status, answer["error"]["code"]) == (502, "engine_failed")
    assert re.search(r"worker e\d ", answer["error"]["message"])
    assert not faults


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_whose_engine_dies_goes_on_with_what_had_arrived(world: World, streamed: bool) -> None:
    """Of one that is not streamed nothing had."""
    await world.start(policy="round_robin")
    for name in ("a", "b"):
        await world.add(name, mean_tokens=10_000, token_s=0.001)
    world.engines["a"].faults.append(Fault(kind="reset", after=5))
    session = await world.trajectory()
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 20}, "stream": streamed}
    headers = {"X-Session-ID": session, **bearer(world.tokens.agent)}
    async with world.session.post(f"{world.url}/rose/v1/generate", json=body, headers=headers) as answer:
        await answer.read()
    (turn,) = world.scheduler.store.trajectories[session].turns
    kept = [("a", 5), ("b", 15)] if streamed else [("b", 20)]
    assert [(segment["worker"], segment["n"]) for segment in turn.segments] == kept


async def test_turns_are_held_until_a_worker_comes(world: World) -> None:
    await world.start()
    turn = asyncio.create_task(generate(world))
    await world.until(lambda: not turn.done())
    await world.add("a")
    assert (await turn)["finish_reason"] in ("stop", "length")


async def test_a_turn_that_waits_too_long_gets_503_and_a_retry_rejoins_it(world: World) -> None:
    await world.start(timeouts={"max_queue_s": 0.3})
    await world.add("a")
    world.scheduler.book.fleet.workers["a"].cap = 0
    session = await world.trajectory()
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}}
    headers = {"X-Session-ID": session}
    status, answer = await world.call("POST", "/rose/v1/generate", body, headers=headers)
    assert (status, answer["error"]["code"]) == (503, "no_capacity")
    assert len(world.scheduler.book.queue) == 1
    retry = asyncio.create_task(
        world.ok("POST", "/rose/v1/generate", body, headers={**headers, "x-stainless-retry-count": "1"})
    )
    await world.until(lambda: world.scheduler.status.num_duplicates == 1)
    world.scheduler.book.fleet.workers["a"].cap = 8
    assert len((await retry)["token_ids"]) >= 1
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    assert len(trace["turns"]) == 1


async def test_a_full_queue_answers_429_with_retry_after(world: World) -> None:
    await world.start(limits={"max_queued": 1})
    await world.add("a")
    world.scheduler.book.fleet.workers["a"].cap = 0
    first = asyncio.create_task(generate(world))
    await world.until(lambda: world.scheduler.book.queue)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}}
    async with world.session.post(
        f"{world.url}/rose/v1/generate", json=body, headers=bearer(world.tokens.agent)
    ) as response:
        assert response.status == 429
        assert (await response.json())["error"]["code"] == "queue_full"
        assert 1 <= int(response.headers["Retry-After"]) <= 120
    world.scheduler.book.fleet.workers["a"].cap = 8
    await first


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_choices_of_which_one_finds_the_queue_full_leave_no_turn(world: World, stream: bool) -> None:
    await world.start(limits={"max_queued": 2})
    await world.add("a")
    world.scheduler.book.fleet.workers["a"].cap = 0
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 5, "n": 4, "stream": stream}
    status, answer = await world.call("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert not world.scheduler.book.turns
    assert not world.scheduler.dispatcher.handles


async def test_a_client_that_leaves_is_aborted_in_the_engine(world: World) -> None:
    await world.start(timeouts={"detach_s": 0.05})
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    turn = asyncio.create_task(generate(world))
    await world.until(lambda: engine.num_running == 1)
    turn.cancel()
    await world.until(lambda: engine.aborted and engine.num_running == 0)
    assert world.scheduler.status.outcomes["cancelled"] == 1


async def test_a_deadline_fails_the_turn_and_aborts_it(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}}
    status, answer = await world.call(
        "POST", "/rose/v1/generate", body, headers={"X-ROSE-Deadline-Ms": "100"}
    )
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    await world.until(lambda: engine.num_running == 0)


async def test_a_required_version_holds_old_workers(world: World) -> None:
    await world.start()
    await world.add("a", version="1.0")
    engine = await world.add("b", version="1.0")
    session = await world.trajectory()
    await world.ok("POST", "/rose/v1/versions", {"job": "job", "attempt": 1, "version": 1}, role="trainer")
    turn = asyncio.create_task(generate(world, session))
    await world.until(lambda: world.scheduler.book.queue)
    engine.version = "1.1"
    answer = await turn
    assert answer["segments"][0]["worker"] == "b"
    assert answer["versions"][0][0] == "1.1"


async def test_the_engine_token_is_sent_and_never_shown(world: World) -> None:
    await world.start()
    await world.add("a", token="engine-secret-0123456789")
    await generate(world)
    for path in ("/workers", "/status"):
        assert "engine-secret" not in str(await world.ok("GET", path))
    async with world.session.get(f"{world.url}/metrics") as response:
        assert "engine-secret" not in await response.text()


async def test_generated_tokens_are_streamed_with_their_logprobs(world: World) -> None:
    await world.start(policy="round_robin")
    for name in ("a", "b"):
        engine = await world.add(name, mean_tokens=10_000)
        engine.faults.append(Fault(kind="reclaim", after=5))
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 16}}
    whole = await world.ok("POST", "/rose/v1/generate", body)
    for engine in world.engines.values():
        engine.faults.append(Fault(kind="reclaim", after=5))
    async with world.session.post(
        f"{world.url}/rose/v1/generate", json={**body, "stream": True}, headers=bearer(world.tokens.agent)
    ) as response:
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [token for piece in pieces for token in piece["token_ids"]] == whole["token_ids"]
    assert [value for piece in pieces for value in piece["logprobs"]] == whole["logprobs"]
    assert last["finish_reason"] == "length"
    assert "token_ids" not in last
