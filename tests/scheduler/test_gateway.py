"""The daemon over HTTP: turns, survival of turns, trajectories, batches, errors."""

from __future__ import annotations

import asyncio
import base64
import json
from itertools import pairwise
from typing import Any

import pytest

from rose.auth import bearer
from rose.policy.fleet import Health
from rose.scheduler import jobs
from rose.scheduler.fake_engine import Fault
from rose.scheduler.ids import pack_ids
from tests.scheduler.conftest import World, user

PROMPT = [10, 11, 12, 13]


async def generate(world: World, session: str | None = None, **params: Any) -> Any:
    headers = {"X-Session-ID": session} if session else {}
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 40, **params}}
    return await world.ok("POST", "/rose/v1/generate", body, headers=headers)


# --- turns -----------------------------------------------------------------------------------------------


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


async def test_required_version_reaches_the_node_and_holds_old_workers(world: World) -> None:
    await world.start()
    await world.add("a", version="1.0")
    engine = await world.add("b", version="1.0")
    session = await world.trajectory()
    await world.ok("POST", "/rose/v1/versions", {"job": "job", "attempt": 1, "version": 1}, role="trainer")
    turn = asyncio.create_task(generate(world, session))
    await world.until(lambda: world.scheduler.book.queue)
    beat = {"incarnation": world.nodes["a"]._incarnation, "seq": 10**6, "version": "1.0", "state": "ready"}
    answer = await world.ok("POST", "/workers/a/heartbeat", beat, role="node")
    assert answer == {"known": True, "required_version": "1.1", "active": True}
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


# --- chat ------------------------------------------------------------------------------------------------


async def test_a_conversation_appends_and_never_encodes_sampled_text_again(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory(sampling={"temperature": 0.7})
    messages: list[dict[str, Any]] = [user("hello")]
    for number in range(4):
        answer = await world.chat(session, messages, max_tokens=30)
        messages += [answer["choices"][0]["message"], user(f"go on {number}")]
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    turns = trace["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, 1, 2]
    assert [turn["fork"] for turn in turns] == [None] * 4
    for before, after in pairwise(turns):
        history = before["prompt_token_ids"] + before["token_ids"]
        assert after["prompt_token_ids"][: len(history)] == history
    last = turns[-1]
    assert last["sampled"][-1] == [len(last["prompt_token_ids"]), len(last["token_ids"]), 3]
    ids = last["prompt_token_ids"] + last["token_ids"]
    for start, count, turn in last["sampled"]:
        assert ids[start : start + count] == turns[turn]["token_ids"]
    # Well-behaved tokenizer: what was accumulated is what rendering the whole would give, wherever the
    # model ended its turns itself.
    if all(turn["finish_reason"] == "stop" for turn in turns[:-1]):
        assert last["prompt_token_ids"] == engine.tokenizer.chat({"messages": messages[:-2]})
    assert last["sampling"]["temperature"] == 0.7
    assert trace["branches"] == [3]


async def test_a_turn_cut_by_length_gets_its_missing_end_token(world: World) -> None:
    await world.start()
    await world.add("a", mean_tokens=10_000)
    session = await world.trajectory()
    first = await world.chat(session, [user("hi")], max_tokens=3)
    message = first["choices"][0]["message"]
    await world.chat(session, [user("hi"), message, user("more")], max_tokens=3)
    turns = (await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"]
    whole = turns[1]["prompt_token_ids"]
    bridge = whole[len(turns[0]["prompt_token_ids"]) + 3 :]
    assert bridge[0] == 2  # IM_END, with mask 0
    assert turns[1]["sampled"][0] == [len(turns[0]["prompt_token_ids"]), 3, 0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: [user("HELLO"), *m[1:]], "history"),
        (lambda m: [{"role": "system", "content": "date"}, *m], "history"),
        (lambda m: [m[0], {"role": "assistant", "content": "not what was said"}, m[2]], "history"),
    ],
)
async def test_rewritten_history_forks_with_a_reason(world: World, change: Any, reason: str) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    first = await world.chat(session, [user("hello")], max_tokens=8)
    messages = [user("hello"), first["choices"][0]["message"], user("next")]
    answer = await world.chat(session, change(messages), max_tokens=8)
    assert answer["rose"]["fork"] == reason
    turns = (await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"]
    assert turns[1]["parent"] is None
    assert turns[1]["fork"] == reason


async def test_a_second_continuation_of_one_answer_is_a_branch(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    first = await world.chat(session, [user("hello")], max_tokens=8)
    base = [user("hello"), first["choices"][0]["message"]]
    for text in ("left", "right"):
        await world.chat(session, [*base, user(text)], max_tokens=8)
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    assert [turn["parent"] for turn in trace["turns"]] == [None, 0, 0]
    assert [turn["fork"] for turn in trace["turns"]] == [None, None, "branch"]
    assert trace["branches"] == [1, 2]


async def test_equal_prompts_are_rendered_once(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    for _ in range(5):
        session = await world.trajectory()
        await world.chat(session, [user("the same map")], max_tokens=4)
    assert engine.num_renders == 1


async def test_the_trajectory_sampling_wins_over_the_agents(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory(sampling={"allowed_token_ids": [100, 101], "max_tokens": 3})
    await world.chat(session, [user("x")], max_completion_tokens=50, temperature=0)
    params = engine.requests[-1]["sampling_params"]
    assert (params["allowed_token_ids"], params["max_tokens"]) == ([100, 101], 3)
    turn = (await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"][0]
    assert set(turn["token_ids"]) <= {100, 101}
    assert turn["sampling"]["allowed_token_ids"] == [100, 101]
    assert all(logprob <= 0 for logprob in turn["logprobs"])


async def test_a_base_url_alone_binds_a_trajectory(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    body = {"model": "gpt-4o", "messages": [user("x")], "max_tokens": 4}
    await world.ok("POST", f"/s/{session}/v1/chat/completions", body)
    assert len((await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"]) == 1


async def test_n_choices_are_n_turns(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    answer = await world.chat(session, [user("x")], max_tokens=4, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["rose"]["turns"] == [0, 1, 2]


async def test_logprobs_are_parsed_when_asked_for(world: World) -> None:
    await world.start()
    await world.add("a")
    plain = await world.chat(None, [user("x")], max_tokens=4)
    assert not plain["choices"][0]["logprobs"]
    asked = await world.chat(None, [user("x")], max_tokens=4, logprobs=True, return_token_ids=True)
    content = asked["choices"][0]["logprobs"]["content"]
    assert len(content) == asked["usage"]["completion_tokens"] == len(asked["choices"][0]["token_ids"])


async def test_text_ends_before_the_stop_string(world: World) -> None:
    await world.start()
    engine = await world.add("a", mean_tokens=10_000)
    text = (await world.chat(None, [user("x")], max_tokens=60))["choices"][0]["message"]["content"]
    stop = text[20:23]
    answer = await world.chat(None, [user("x")], max_tokens=60, stop=[stop])
    assert answer["choices"][0]["message"]["content"] == text[: text.find(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    # Across a cut the whole turn starts again, so that no engine can miss it.
    engine.faults.append(Fault(kind="reclaim", after=text.find(stop) + 1))
    again = await world.chat(None, [user("x")], max_tokens=60, stop=[stop])
    assert again["choices"][0]["message"] == answer["choices"][0]["message"]


async def test_completions_take_text_and_token_ids(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    body: dict[str, Any] = {"model": "policy", "prompt": "abc", "max_tokens": 6}
    text = await world.ok("POST", "/v1/completions", body)
    ids = engine.tokenizer.encode("abc")
    same = await world.ok("POST", "/v1/completions", {**body, "prompt": ids})
    assert text["choices"][0]["text"] == same["choices"][0]["text"]
    assert text["choices"][0]["text"] == engine.tokenizer.decode(engine.greedy(ids, {"max_tokens": 6})[0])
    both = await world.ok("POST", "/v1/completions", {**body, "prompt": ["abc", "xyz"]})
    assert len(both["choices"]) == 2


# --- asking again ----------------------------------------------------------------------------------------


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


# --- trajectories and batches ----------------------------------------------------------------------------


async def test_a_group_goes_to_the_trainer_once(world: World) -> None:
    await world.start()
    await world.add("a", version="1.3")
    names = [await world.trajectory(group_id="g", group_size=2, task={"map": 1}) for _ in range(2)]
    lease = {"job": "job", "num_groups": 1, "version": [1, 3], "ttl_s": 60, "wait_s": 0}
    for number, name in enumerate(names):
        await world.chat(name, [user("x")], max_tokens=4)
        assert (await world.call("POST", "/rose/v1/batches/lease", lease, role="trainer"))[0] == 204
        done = await world.ok(
            "POST", f"/rose/v1/trajectories/{name}/finish", {"reward": number, "success": True}
        )
        assert done["state"] == "finished"
    batch = await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")
    assert [(t["id"], t["reward"], t["task"]) for t in batch["trajectories"]] == [
        (names[0], 0.0, {"map": 1}),
        (names[1], 1.0, {"map": 1}),
    ]
    assert batch["trajectories"][0]["turns"][0]["versions"][0][0] == "1.3"
    ack = f"/rose/v1/batches/{batch['batch_id']}/ack"
    for _ in range(2):
        assert await world.ok("POST", ack, {"step": 4, "attempt": 1}, role="trainer") == {}
    assert (await world.call("POST", "/rose/v1/batches/lease", lease, role="trainer"))[0] == 204
    status = await world.ok("GET", "/status")
    assert status["trajectories"] == {"consumed": 2}


async def test_a_lease_waits_for_a_group(world: World) -> None:
    await world.start()
    await world.add("a")
    name = await world.trajectory()
    await world.chat(name, [user("x")], max_tokens=4)
    lease = {"job": "job", "num_groups": 1, "version": [1, 0], "ttl_s": 60, "wait_s": 30}
    waiting = asyncio.create_task(world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer"))
    await world.until(lambda: not waiting.done())
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})
    assert (await waiting)["trajectories"][0]["id"] == name


async def test_an_unacknowledged_lease_expires_and_is_leased_again(world: World) -> None:
    await world.start()
    await world.add("a")
    name = await world.trajectory()
    await world.chat(name, [user("x")], max_tokens=4)
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})
    lease = {"job": "job", "num_groups": 1, "version": [1, 0], "ttl_s": 0.01, "wait_s": 10}
    first = await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")
    second = await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")
    assert first["batch_id"] != second["batch_id"]
    assert second["trajectories"][0]["id"] == name


async def test_a_restarted_trainer_resumes(world: World) -> None:
    await world.start()
    await world.add("a")
    names = []
    for _ in range(2):
        names.append(await world.trajectory())
        await world.chat(names[-1], [user("x")], max_tokens=4)
        await world.ok("POST", f"/rose/v1/trajectories/{names[-1]}/finish", {"reward": 1})
    lease = {"job": "job", "num_groups": 2, "version": [1, 0], "ttl_s": 600}
    await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")
    resumed = await world.ok(
        "POST", "/rose/v1/jobs/job/resume", {"attempt": 2, "consumed": [names[0]]}, role="trainer"
    )
    assert resumed == {"returned_groups": 2, "consumed": 1}
    batch = await world.ok("POST", "/rose/v1/batches/lease", {**lease, "num_groups": 1}, role="trainer")
    assert [t["id"] for t in batch["trajectories"]] == [names[1]]


async def test_cancelling_a_trajectory_stops_its_turn_in_the_engine(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    session = await world.trajectory()
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}}
    turn = asyncio.create_task(
        world.call("POST", "/rose/v1/generate", body, headers={"X-Session-ID": session})
    )
    await world.until(lambda: engine.num_running == 1)
    await world.ok("DELETE", f"/rose/v1/trajectories/{session}")
    status, answer = await turn
    assert (status, answer["error"]["code"]) == (410, "trajectory_cancelled")
    await world.until(lambda: engine.num_running == 0)
    status, answer = await world.call("POST", "/rose/v1/generate", body, headers={"X-Session-ID": session})
    assert status == 410


async def test_an_idempotency_key_replays_its_answer_without_a_trajectory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_MAX_ANSWERS", 2)
    await world.start()
    engine = await world.add("a")
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}

    async def ask(key: str, **change: Any) -> tuple[int, Any]:
        headers = {"Idempotency-Key": key}
        return await world.call("POST", "/rose/v1/generate", {**body, **change}, headers=headers)

    first = await ask("one")
    assert await ask("one") == first
    assert len(engine.requests) == 1
    assert (await ask("one", token_ids=[9, 9]))[0] == 422
    for key in ("two", "three"):
        await ask(key)
    assert set(world.scheduler.jobs._answers) == {"i::two", "i::three"}
    await ask("one")
    assert len(engine.requests) == 4
    assert world.scheduler.jobs._answer_bytes == sum(
        len(answer) for _, answer in world.scheduler.jobs._answers.values()
    )
    assert not world.scheduler.jobs._by_key  # ended requests leave nothing else


async def test_creating_with_one_key_twice_gives_one_trajectory(world: World) -> None:
    await world.start()
    headers = {"Idempotency-Key": "episode-7"}
    answers = [
        await world.ok("POST", "/rose/v1/trajectories", {"job": "j"}, headers=headers) for _ in range(2)
    ]
    assert answers[0] == answers[1]
    await world.scheduler.stop(drain_s=0)
    await world.start()
    assert await world.ok("POST", "/rose/v1/trajectories", {"job": "j"}, headers=headers) == answers[0]


async def test_an_abandoned_trajectory_is_cancelled(world: World) -> None:
    await world.start(timeouts={"trajectory_idle_s": 0.001})
    session = await world.trajectory()
    world.scheduler.control._swept_at_s = 0.0
    await world.until(lambda: world.scheduler.store.state(session) == ("cancelled", "idle"))


async def test_finish_is_idempotent_and_refuses_another_reward(world: World) -> None:
    await world.start()
    session = await world.trajectory()
    path = f"/rose/v1/trajectories/{session}/finish"
    await world.ok("POST", path, {"reward": 1})
    await world.ok("POST", path, {"reward": 1})
    status, answer = await world.call("POST", path, {"reward": 2})
    assert (status, answer["error"]["param"]) == (409, "reward")


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "role", "status", "param"),
    [
        ("POST", "/v1/chat/completions", {"messages": []}, "agent", 400, "messages"),
        ("POST", "/v1/chat/completions", {"messages": [{"content": "x"}]}, "agent", 400, "messages[0]"),
        ("POST", "/v1/chat/completions", {"messages": [user("x")], "model": 5}, "agent", 400, "model"),
        ("POST", "/v1/chat/completions", {"messages": [user("x")], "model": "no"}, "agent", 404, "model"),
        ("POST", "/v1/chat/completions", {"messages": [user("x")], "n": 0}, "agent", 400, "n"),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [user("x")], "max_tokens": 0},
            "agent",
            400,
            "max_tokens",
        ),
        ("POST", "/v1/completions", {"prompt": ""}, "agent", 400, "prompt"),
        ("POST", "/v1/completions", {"prompt": "x", "echo": True}, "agent", 400, "echo"),
        ("POST", "/rose/v1/generate", {"token_ids": []}, "agent", 400, "token_ids"),
        ("POST", "/rose/v1/generate", {"token_ids": [512]}, "agent", 400, "token_ids"),
        ("POST", "/rose/v1/generate", {"token_ids": [-1]}, "agent", 400, "token_ids"),
        ("POST", "/rose/v1/generate", {"token_ids": [True]}, "agent", 400, "token_ids"),
        ("POST", "/rose/v1/generate", {"token_ids": ["1"]}, "agent", 400, "token_ids"),
        ("POST", "/rose/v1/generate", {"token_ids": [1] * 4096}, "agent", 400, "token_ids"),
        ("POST", "/rose/v1/generate", {"token_ids_b64": "AAA="}, "agent", 400, "token_ids_b64"),
        ("POST", "/rose/v1/generate", {"token_ids": [1], "max_token": 4}, "agent", 400, "max_token"),
        (
            "POST",
            "/rose/v1/generate",
            {"token_ids": [1], "sampling_params": 4},
            "agent",
            400,
            "sampling_params",
        ),
        ("POST", "/rose/v1/trajectories", {}, "agent", 400, "job"),
        ("POST", "/rose/v1/trajectories", {"job": "a\nb"}, "agent", 400, "job"),
        (
            "POST",
            "/rose/v1/trajectories",
            {"job": "j", "sampling": {"temp": 1}},
            "agent",
            400,
            "sampling.temp",
        ),
        ("POST", "/rose/v1/trajectories", {"job": "j", "group_size": 2}, "agent", 400, "group_id"),
        ("GET", "/rose/v1/trajectories/none", None, "agent", 404, "X-Session-ID"),
        ("GET", "/rose/v1/trajectories?state=odd", None, "agent", 400, "state"),
        ("POST", "/rose/v1/trajectories/none/finish", {"reward": 1}, "agent", 404, "X-Session-ID"),
        (
            "POST",
            "/rose/v1/batches/lease",
            {"job": "j", "num_groups": 1, "version": "x"},
            "trainer",
            400,
            "version",
        ),
        ("POST", "/rose/v1/batches/none/ack", {"step": 1, "attempt": 1}, "trainer", 410, "batch_id"),
        ("POST", "/rose/v1/versions", {"job": "j", "attempt": 1, "version": -1}, "trainer", 400, "version"),
        ("POST", "/workers", {"worker_id": "x", "url": "file:///etc/passwd"}, "node", 400, "url"),
        ("DELETE", "/workers/none", None, "node", 404, "worker_id"),
        ("POST", "/workers/a/explode", None, "node", 404, "path"),
        ("POST", "/rose/v1/trajectories", {"job": "j"}, "trainer", 401, "Authorization"),
        ("POST", "/rose/v1/batches/lease", {}, "agent", 401, "Authorization"),
        ("POST", "/workers", {}, "agent", 401, "Authorization"),
        ("GET", "/status", None, "relay", 401, "Authorization"),
        ("GET", "/nothing", None, "agent", 404, None),
        ("PUT", "/v1/models", None, "agent", 405, None),
    ],
)
async def test_bad_requests_get_one_line_that_names_the_field(
    world: World, method: str, path: str, body: Any, role: str, status: int, param: str | None
) -> None:
    await world.start()
    await world.add("a")
    got, answer = await world.call(method, path, body, role=role)
    error = answer["error"]
    assert (got, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]


async def test_unknown_sessions_are_404_unknown_session(world: World) -> None:
    await world.start()
    await world.add("a")
    body = {"messages": [user("x")]}
    got, answer = await world.call("POST", "/v1/chat/completions", body, headers={"X-Session-ID": "ghost"})
    assert (got, answer["error"]["code"]) == (404, "unknown_session")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"nan", b'{"messages": "\xff\xfe"}', b"[" * 100_000, b'{"a":' * 5000]
)
async def test_malformed_bodies_are_400(world: World, data: bytes) -> None:
    await world.start()
    async with world.session.post(
        f"{world.url}/v1/chat/completions", data=data, headers=bearer(world.tokens.agent)
    ) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "body"


async def test_an_oversized_body_is_413(world: World) -> None:
    await world.start(limits={"max_body_bytes": 1000})
    body = {"messages": [user("x" * 2000)]}
    got, answer = await world.call("POST", "/v1/chat/completions", body)
    assert (got, answer["error"]["code"]) == (413, "too_large")


async def test_a_prompt_that_fits_no_context_is_refused(world: World) -> None:
    await world.start()
    await world.add("a", max_model_len=50)
    got, answer = await world.call("POST", "/v1/chat/completions", {"messages": [user("x" * 60)]})
    assert (got, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_what_the_engine_refuses_is_passed_on_with_its_message(world: World) -> None:
    await world.start()
    await world.add("a")
    got, answer = await world.call(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"text": 5}]}]}
    )
    assert got == 400
    assert "cannot render" in answer["error"]["message"]


async def test_no_token_is_401_and_request_ids_are_echoed(world: World) -> None:
    await world.start()
    async with world.session.get(f"{world.url}/v1/models", headers={"X-Request-Id": "mine-1"}) as response:
        assert response.status == 401
        assert response.headers["X-Request-Id"] == "mine-1"
    bad = {"X-Request-Id": "x y;z", **bearer("wrong-token-wrong-token")}
    async with world.session.get(f"{world.url}/v1/models", headers=bad) as response:
        assert response.status == 401
        assert response.headers["X-Request-Id"] != "x y;z"


# --- seeing it -------------------------------------------------------------------------------------------


async def test_status_and_metrics_count_turns_and_tokens_by_tier(world: World) -> None:
    await world.start(policy="round_robin")
    await world.add("d", mean_tokens=10_000)
    await world.add("h", mean_tokens=10_000, tier="harvested")
    world.engines["h"].faults.append(Fault(kind="reclaim", after=5))
    for _ in range(2):
        await generate(world)
    status = await world.ok("GET", "/status")
    assert status["turns"]["done"] == 2
    assert status["tokens"]["by_tier"] == {"dedicated": 75, "harvested": 5}
    assert status["resumed_turns"] == 1
    assert status["continued_turns"] == 1
    assert status["reroutes"] == {"reclaim": 1}
    assert len(status["last_turns"]) == 2
    assert {worker["worker_id"] for worker in status["workers"]} == {"d", "h"}
    async with world.session.get(f"{world.url}/metrics") as response:
        text = await response.text()
    assert 'rose_turns_total{outcome="done",tier="dedicated"} 2.0' in text
    assert 'rose_reroutes_total{reason="reclaim"} 1.0' in text
    assert 'rose_tokens_total{kind="generated"} 80.0' in text


async def test_readiness_follows_the_workers(world: World) -> None:
    await world.start()
    async with world.session.get(f"{world.url}/readyz") as response:
        assert response.status == 503
        assert (await response.json())["problems"] == ["no_worker"]
    await world.add("a")
    async with world.session.get(f"{world.url}/readyz") as response:
        assert response.status == 200


async def test_the_page_needs_nothing_from_the_network(world: World) -> None:
    await world.start()
    async with world.session.get(f"{world.url}/") as response:
        page = await response.text()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert "http://" not in page
    assert "https://" not in page
    assert "src=" not in page


async def test_an_unknown_worker_is_told_to_register_again(world: World) -> None:
    await world.start()
    beat = {"incarnation": "x", "seq": 1, "version": "1.0", "state": "ready"}
    answer = await world.ok("POST", "/workers/ghost/heartbeat", beat, role="node")
    assert answer == {"known": False, "required_version": None, "active": True}


async def test_a_stop_lets_running_turns_end(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    turn = asyncio.create_task(generate(world))
    await world.until(lambda: engine.num_running == 1)
    stop = asyncio.create_task(world.scheduler.stop())
    await world.until(lambda: world.scheduler.dispatcher.draining)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}}
    status, _ = await world.call("POST", "/rose/v1/generate", body)
    assert status == 503
    engine.hold.set()
    assert len((await turn)["token_ids"]) >= 1
    await stop


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
