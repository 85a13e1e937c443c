"""Trajectories and batches over HTTP: groups, leases, restarts of the trainer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rose.scheduler import inflight
from tests.scheduler.conftest import PROMPT, World, user


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


async def test_prompts_may_come_without_what_their_parents_hold(world: World) -> None:
    await world.start()
    await world.add("a")
    name = await world.trajectory()
    messages = [user("x")]
    for _ in range(3):
        answer = await world.chat(name, messages, max_tokens=4)
        messages += [answer["choices"][0]["message"], user("y")]
    await world.chat(name, [user("another beginning")], max_tokens=4)
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})
    lease = {"job": "job", "num_groups": 1, "version": [1, 0], "ttl_s": 60, "prompts": "suffix"}
    batch = await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")
    whole = (await world.ok("GET", f"/rose/v1/trajectories/{name}"))["turns"]
    turns = batch["trajectories"][0]["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, 1, None]
    for turn, expected in zip(turns, whole, strict=True):
        before = [] if turn["parent"] is None else whole[turn["parent"]]
        held = before["prompt_token_ids"] + before["token_ids"] if before else []
        assert held + turn["suffix_token_ids"] == expected["prompt_token_ids"]
        assert turn["num_prompt_tokens"] == len(expected["prompt_token_ids"])
        same = turn.keys() - {"suffix_token_ids", "num_prompt_tokens"}
        assert {key: turn[key] for key in same} == {key: expected[key] for key in same}
        assert expected.keys() - same == {"prompt_token_ids", "sampled"}
    status, refused = await world.call(
        "POST", "/rose/v1/batches/lease", lease | {"prompts": "no"}, role="trainer"
    )
    assert (status, refused["error"]["param"]) == (400, "prompts")


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
    assert resumed == {"returned_groups": 2, "consumed": 1, "dropped_groups": 0, "cancelled": 0}
    other = {"attempt": 1, "consumed": [], "consumer": "critic"}
    await world.ok("POST", "/rose/v1/jobs/job/resume", other, role="trainer")
    assert (await world.ok("GET", "/status"))["attempts"] == {"job": 2}
    batch = await world.ok(
        "POST", "/rose/v1/batches/lease", {**lease, "num_groups": 1, "version": [2, 0]}, role="trainer"
    )
    assert [t["id"] for t in batch["trajectories"]] == [names[1]]


async def test_a_trainer_that_begins_afresh_gets_nothing_that_was_sampled_before(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.start()
    await world.add("a")

    async def member(group: str, size: int, *, is_done: bool) -> str:
        name = await world.trajectory(group_id=group, group_size=size)
        if is_done:
            await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})
        return name

    await member("leased", 1, is_done=True)
    lease = {"job": "job", "num_groups": 1, "version": [1, 0], "ttl_s": 600}
    await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")
    await member("waits", 1, is_done=True)
    await member("half", 2, is_done=True)
    running = [await member("half", 2, is_done=False), await member("runs", 1, is_done=False)]
    other = await world.trajectory(job="another")

    resumed = await world.ok(
        "POST", "/rose/v1/jobs/job/resume", {"attempt": 1, "consumed": [], "afresh": True}, role="trainer"
    )
    assert resumed == {"returned_groups": 1, "consumed": 0, "dropped_groups": 3, "cancelled": 2}
    for name in running:
        finish = f"/rose/v1/trajectories/{name}/finish"
        assert (await world.call("POST", finish, {"reward": 1}))[0] == 410
    assert (await world.call("POST", "/rose/v1/batches/lease", lease, role="trainer"))[0] == 204
    await world.ok("POST", f"/rose/v1/trajectories/{other}/finish", {"reward": 1})

    told = await world.ok("GET", "/status")
    assert told["dropped_unleased"] == 0, "nobody was late for it"
    assert {cause: sum(row) for cause, row in told["discards"]["job"].items()} == {"afresh": 5}
    said = [record.getMessage() for record in caplog.records if "afresh" in record.getMessage()]
    assert said == [
        "a trainer of job 'job' begins afresh: 3 groups that waited and 2 episodes that ran are given up"
    ]


async def test_a_trainer_that_begins_anew_far_below_its_own_steps_hears_what_it_loses(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its checkpoint, say: its groups went without a word."""
    await world.start()
    await world.add("a", version="1.9")
    news = {"job": "job", "attempt": 1, "version": 9}
    assert "warning" not in await world.ok("POST", "/rose/v1/versions", news, role="trainer")
    name = await world.trajectory()
    await world.chat(name, [user("x")], max_tokens=4)
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})
    near = await world.ok("POST", "/rose/v1/versions", {**news, "attempt": 2, "version": 5}, role="trainer")
    assert "warning" not in near, "its checkpoint is a few steps old"
    caplog.clear()

    await world.ok("POST", "/rose/v1/versions", {**news, "attempt": 3, "version": 9}, role="trainer")
    told = await world.ok("POST", "/rose/v1/versions", {**news, "attempt": 4, "version": 0}, role="trainer")
    lease = {"job": "job", "num_groups": 1, "version": [4, 0]}
    assert (await world.call("POST", "/rose/v1/batches/lease", lease, role="trainer"))[0] == 204

    assert "attempt 4 begins at step 0, 9 below step 9 of attempt 3" in told["warning"]
    lost = [record.getMessage() for record in caplog.records if "are dropped" in record.getMessage()]
    assert [one.startswith("job job: 1 trajectories are dropped: weights of up to 1.9") for one in lost] == [
        True
    ]
    async with world.session.get(f"{world.url}/metrics") as response:
        assert "rose_dropped_ahead_total 1.0" in await response.text()


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


async def test_what_is_too_old_for_a_new_version_is_stopped_in_the_engine(world: World) -> None:
    """One trajectory is between two turns, the other in the middle of its second."""
    await world.start()
    engine = await world.add("a", version="1.0")
    names = [await world.trajectory(group_id="g", group_size=2) for _ in range(2)]
    for name in names:
        await world.chat(name, [user("x")], max_tokens=4)
    engine.hold = asyncio.Event()
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}}

    async def ask(name: str) -> tuple[int, Any]:
        return await world.call("POST", "/rose/v1/generate", body, headers={"X-Session-ID": name})

    turn = asyncio.create_task(ask(names[0]))
    await world.until(lambda: engine.num_running == 1)
    news = {"job": "job", "attempt": 1, "version": 1, "alpha": 1, "on_stale": "cancel"}
    await world.ok("POST", "/rose/v1/versions", news, role="trainer")
    assert world.scheduler.store.state(names[0]) == ("running", "")

    await world.ok("POST", "/rose/v1/versions", {**news, "version": 2}, role="trainer")
    for status, answer in (await turn, await ask(names[1])):
        assert (status, answer["error"]["code"], answer["error"]["reason"]) == (
            410,
            "trajectory_cancelled",
            "stale",
        )
    await world.until(lambda: engine.num_running == 0)
    assert world.scheduler.store.book.counts("job") == {"stale": 2}


async def test_a_turn_that_was_too_long_ends_its_trajectory(world: World) -> None:
    """A plain turn's tokens are seen when it ends: its client gets them, and is told at the next turn."""
    await world.start()
    engine = await world.add("a", version="1.0")
    engine.hold = asyncio.Event()
    name = await world.trajectory()
    turn = asyncio.create_task(world.chat(name, [user("x")], max_tokens=4))
    await world.until(lambda: engine.num_running == 1)
    news = {"job": "job", "attempt": 1, "version": 9}
    await world.ok("POST", "/rose/v1/versions", news, role="trainer")
    assert world.scheduler.store.state(name) == ("running", "")
    engine.hold.set()
    assert (await turn)["choices"]
    assert world.scheduler.store.state(name) == ("stale", "stale")
    headers = {"X-Session-ID": name}
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 4}
    status, answer = await world.call("POST", "/v1/chat/completions", body, headers=headers)
    assert (status, answer["error"]["reason"]) == (410, "stale")


async def test_an_idempotency_key_replays_its_answer_without_a_trajectory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight, "_MAX_ANSWERS", 2)
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
    assert set(world.scheduler.inflight._answers) == {"i::two", "i::three"}
    await ask("one")
    assert len(engine.requests) == 4
    assert world.scheduler.inflight._answer_bytes == sum(
        len(answer) for _, answer in world.scheduler.inflight._answers.values()
    )
    assert not world.scheduler.inflight._named  # ended requests leave nothing else


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


async def test_two_jobs_that_use_one_key_have_a_trajectory_each(world: World) -> None:
    await world.start()
    headers = {"Idempotency-Key": "task-7"}
    made = [
        await world.ok("POST", "/rose/v1/trajectories", {"job": job}, headers=headers) for job in ("a", "b")
    ]
    assert made[0]["id"] != made[1]["id"]
    assert made[0]["key"] != made[1]["key"]


@pytest.mark.parametrize(
    "other", [{"task": 8}, {"group_id": "g"}, {"metadata": {"split": "test"}}, {"sampling": {"top_p": 0.5}}]
)
async def test_a_key_that_stands_for_another_trajectory_is_refused(
    world: World, other: dict[str, Any]
) -> None:
    await world.start()
    headers = {"Idempotency-Key": "task-7"}
    await world.ok("POST", "/rose/v1/trajectories", {"job": "j", "task": 7}, headers=headers)
    status, answer = await world.call(
        "POST", "/rose/v1/trajectories", {"job": "j", "task": 7, **other}, headers=headers
    )
    assert (status, answer["error"]["param"]) == (422, "Idempotency-Key")


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
