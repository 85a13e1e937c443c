"""Two jobs with the same model name and overlapping version numbers on one fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from rose.scheduler.app import Scheduler
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.testing.fake_engine import FakeEngine
from tests.scheduler.conftest import World, user


async def publish(world: World, job: str, version: tuple[int, int], **fields: Any) -> tuple[int, Any]:
    body = {"job": job, "attempt": version[0], "version": version[1], **fields}
    return await world.call("POST", "/rose/v1/versions", body, role="trainer")


async def generate(world: World, job: str) -> dict[str, Any]:
    name = await world.trajectory(job=job)
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}, "session_id": name}
    return await world.ok("POST", "/rose/v1/generate", body)


async def test_each_job_s_turns_run_on_the_weights_of_its_own_run(world: World) -> None:
    """One worker followed job A at 1.5, job B required 1.3: B's turn ran on A's weights and was leased as B's."""
    await world.start()
    for name, version in (("a", "1.5"), ("b", "1.3")):
        engine = await world.add(name)
        engine.switch(f"run-{name}", version)
        await world.nodes[name].beat()
    assert (await publish(world, "job-a", (1, 5), run="run-a"))[0] == 200
    assert (await publish(world, "job-b", (1, 3), run="run-b"))[0] == 200

    for job, worker in (("job-a", "a"), ("job-b", "b")):
        for _ in range(4):
            answer = await generate(world, job)
            assert [(one["worker"], one["run"]) for one in answer["segments"]] == [(worker, f"run-{worker}")]


async def test_a_turn_that_no_engine_may_run_says_that_none_follows_its_run(world: World) -> None:
    # Where devices are assigned, it would be assigned to nobody or to the job.
    await world.start(timeouts={"max_queue_s": 0.2}, provisioning={"mode": "off"})
    engine = await world.add("a")
    engine.switch("run-a", "1.5")
    await world.nodes["a"].beat()
    await publish(world, "job-b", (1, 3), run="run-b")

    name = await world.trajectory(job="job-b")
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}, "session_id": name}
    status, answer = await world.call("POST", "/rose/v1/generate", body)

    assert status == 503
    assert "run" in answer["error"]["message"]
    queue = (await world.ok("GET", "/status"))["queue"]
    assert (queue["held"], queue["held_by_job"]) == ({"run": 1}, {"job-b": {"run": 1}})


async def test_a_second_trainer_cannot_take_a_job_by_its_name(world: World) -> None:
    """``policy`` is everybody's favourite name."""
    await world.start()
    await publish(world, "policy", (1, 5), run="mine")

    status, answer = await publish(world, "policy", (1, 6), run="theirs")

    assert status == 409
    assert answer["error"]["param"] == "run"
    assert (await publish(world, "policy", (2, 0), run="theirs"))[0] == 409
    body = {"attempt": 2, "consumed": [], "run": "theirs"}
    assert (await world.call("POST", "/rose/v1/jobs/policy/resume", body, role="trainer"))[0] == 409
    status, answer = await publish(world, "policy", (2, 0))
    assert (status, answer["error"]["param"]) == (409, "run"), "who names no run may be anybody's trainer"
    assert "mine" in answer["error"]["message"]
    assert (await world.call("POST", "/rose/v1/jobs/policy/resume", body | {"run": None}, role="trainer"))[
        0
    ] == 409
    assert (await publish(world, "policy", (2, 0), run="mine"))[0] == 200
    assert world.scheduler.book.runs == {"policy": "mine"}


async def test_a_trainer_that_was_replaced_leases_nothing(world: World) -> None:
    """Its acknowledgement would be refused, and until then the new one went without the groups."""
    await world.start()
    resumed = {"attempt": 2, "consumed": []}
    await world.ok("POST", "/rose/v1/jobs/job/resume", resumed, role="trainer")

    lease = {"job": "job", "num_groups": 1, "version": [1, 5]}
    status, answer = await world.call("POST", "/rose/v1/batches/lease", lease, role="trainer")
    assert (status, answer["error"]["param"]) == (409, "version")
    lease["version"] = [2, 0]
    assert (await world.call("POST", "/rose/v1/batches/lease", lease, role="trainer"))[0] == 204


async def test_what_another_run_sampled_before_a_job_named_its_own_is_never_leased(world: World) -> None:
    await world.start()
    (await world.add("a")).switch("run-a", "1.5")
    await world.nodes["a"].beat()
    name = await world.trajectory(job="job-b")
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}, "session_id": name}
    await world.ok("POST", "/rose/v1/generate", body)
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1.0})

    await publish(world, "job-b", (1, 3), run="run-b")

    lease = {"job": "job-b", "num_groups": 1, "version": [1, 3], "run": "run-b"}
    status, _ = await world.call("POST", "/rose/v1/batches/lease", lease, role="trainer")
    assert status == 204
    trace = await world.ok("GET", f"/rose/v1/trajectories/{name}")
    assert trace["state"] == "stale"


async def test_what_an_engine_does_not_stamp_is_not_recorded_for_a_job_that_names_a_run(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its node said whose weights it has, and nobody asked the engine."""
    await world.start()
    await publish(world, "job-a", (1, 5), run="run-a")
    (await world.add("a", report_versions=False)).switch("run-a", "1.5")
    await world.nodes["a"].beat()

    asking = asyncio.create_task(generate(world, "job-a"))
    await world.until(lambda: world.scheduler.book.fleet.workers["a"].unstamped)

    (worker,) = (await world.ok("GET", "/workers", role="node"))["workers"]
    assert "weight_versions" in worker["refused"]
    assert "worker a: its answers do not say" in caplog.text
    await world.nodes["a"].beat()
    (await world.add("b")).switch("run-a", "1.5")
    await world.nodes["b"].beat()
    assert [(one["worker"], one["run"]) for one in (await asking)["segments"]] == [("b", "run-a")]
    answer = await generate(world, "of-no-run")
    assert answer["segments"]


class SlowParser(FakeEngine):
    """Reads an answer when it is let."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.num_parsing = 0
        self.may_parse = asyncio.Event()

    async def _parse_whole(self, request: web.Request) -> web.Response:
        self.num_parsing += 1
        await self.may_parse.wait()
        return await super()._parse_whole(request)


async def test_a_turn_that_ended_under_another_run_is_not_recorded_once_its_job_is_named(
    world: World,
) -> None:
    """Its tokens were there, its text was not, when the trainer said whose the job is."""
    await world.start()
    engine = await world.add("a", kind=SlowParser)
    assert isinstance(engine, SlowParser)
    engine.switch("run-b", "1.3")
    await world.nodes["a"].beat()
    name = await world.trajectory(job="job-a")
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 4}
    asked = {"X-Session-ID": name}
    asking = asyncio.create_task(world.call("POST", "/v1/chat/completions", body, headers=asked))
    await world.until(lambda: engine.num_parsing)

    await publish(world, "job-a", (1, 3), run="run-a")
    engine.may_parse.set()

    status, answer = await asking
    assert status == 503, answer
    assert "run-a" in answer["error"]["message"]
    engine.switch("run-a", "1.3")
    await world.nodes["a"].beat()
    await world.ok("POST", "/v1/chat/completions", body, headers=asked | {"x-stainless-retry-count": "1"})
    trace = await world.ok("GET", f"/rose/v1/trajectories/{name}")
    assert [segment["run"] for turn in trace["turns"] for segment in turn["segments"]] == ["run-a"]


async def test_a_scheduler_that_starts_again_knows_whose_run_a_job_is(world: World) -> None:
    await world.start()
    await publish(world, "job-b", (1, 3), run="run-b")
    await world.scheduler.stop(drain_s=0)

    again = Scheduler(SchedulerConfig(port=0), world.tokens, world.tmp_path / "journal")
    await again.start()
    try:
        assert again.book.runs == {"job-b": "run-b"}
    finally:
        await again.stop(drain_s=0)


async def test_an_engine_with_other_weights_than_its_node_said_refuses_the_turn(world: World) -> None:
    """The scheduler knows what a heartbeat said, half a second ago at best."""
    await world.start()
    for name in ("a", "b"):
        (await world.add(name)).switch(f"run-{name}", "1.5")
        await world.nodes[name].beat()
    await publish(world, "job-a", (1, 5), run="run-a")
    world.silence("a")
    world.engines["a"].switch("run-b", "1.5")

    running = asyncio.create_task(generate(world, "job-a"))
    await world.until(lambda: world.engines["a"].num_refused)
    world.engines["b"].switch("run-a", "1.6")
    await world.nodes["b"].beat()

    answer = await running
    assert [(one["worker"], one["run"]) for one in answer["segments"]] == [("b", "run-a")]


async def test_the_turns_of_a_trajectory_are_of_one_run_also_where_its_job_names_none(world: World) -> None:
    await world.start(timeouts={"max_queue_s": 0.2})
    (await world.add("a")).switch("run-a", "1.5")
    await world.nodes["a"].beat()
    name = await world.trajectory(job="chat")
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}, "session_id": name}
    first = await world.ok("POST", "/rose/v1/generate", body)
    world.engines["a"].switch("run-b", "1.5")
    await world.nodes["a"].beat()

    status, answer = await world.call("POST", "/rose/v1/generate", body | {"token_ids": [4, 5, 6]})

    assert first["segments"][0]["run"] == "run-a"
    assert status == 503
    assert "run" in answer["error"]["message"]


@pytest.mark.parametrize("said", [{"run": "theirs"}, {}], ids=["another", "none"])
async def test_a_trainer_of_another_run_or_of_none_leases_and_acknowledges_nothing(
    world: World, said: dict[str, str]
) -> None:
    await world.start()
    (await world.add("a")).switch("mine", "1.5")
    await world.nodes["a"].beat()
    await publish(world, "policy", (1, 5), run="mine")
    await generate(world, "policy")
    (name,) = world.scheduler.store.trajectories
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1.0})

    lease = {"job": "policy", "num_groups": 1, "version": [1, 5]}
    status, answer = await world.call("PUT", "/rose/v1/batches/b", lease | said, role="trainer")
    assert (status, answer["error"]["param"]) == (409, "run")
    assert '"run": "mine"' in answer["error"]["message"]
    await world.ok("PUT", "/rose/v1/batches/b", {**lease, "run": "mine"}, role="trainer")
    ack = {"step": 0, "attempt": 1}
    for _ in range(2):  # while it is leased, and after the lease has run out
        status, answer = await world.call("POST", "/rose/v1/batches/b/ack", ack | said, role="trainer")
        assert (status, answer["error"]["param"]) == (409, "run")
        world.scheduler.store.expire(float("inf"))
    await world.ok("POST", "/rose/v1/batches/b/ack", {**ack, "run": "mine"}, role="trainer")
