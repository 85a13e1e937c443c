"""A daemon with provisioning on: where jobs compete, workers go to those that have work, within their caps; elsewhere all is as without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rose.decisions.log import logs, replay
from rose.policy.provisioning_events import Adopt
from rose.policy.worker import Health
from rose.scheduler.app import Scheduler
from rose.testing.fake_engine import FakeEngine
from tests.scheduler.conftest import World, generate, user

QUICK = {
    "mode": "on",
    "period_s": 0.02,
    "switch_s": 0.0,
    "rest_s": 0.0,
    "min_active_s": 0.0,
    "idle_s": 600,
}


def jobs_of(world: World) -> dict[str, str | None]:
    return {name: worker.job for name, worker in world.scheduler.book.fleet.workers.items()}


async def decided(world: World, count: int = 2) -> None:
    """Provisioning has decided so many times more."""
    provisioner = world.scheduler.provisioner
    for _ in range(count):
        before = provisioner._stepped_s
        await world.until(lambda before=before: provisioner._stepped_s > before)


async def test_nobody_is_parked_and_no_weights_are_ordered_while_one_job_has_the_fleet_to_itself(
    world: World,
) -> None:
    """It is on by default."""
    await world.start(provisioning={"mode": "on", "period_s": 0.02})
    for name in ("a", "b"):
        await world.add(name)
    engine = await world.add("h", tier="harvested")
    assert world.scheduler.provisioner.mode == "on"
    await decided(world)
    assert set(jobs_of(world).values()) == {None}
    engine.hold = asyncio.Event()
    running = asyncio.create_task(generate(world, await world.trajectory()))
    await decided(world, 5)
    assert set(jobs_of(world).values()) == {None}
    answer = world.nodes["h"].answer
    assert answer is not None
    assert (answer.active, answer.job, answer.run) == (True, None, None)
    engine.hold.set()
    await running
    # And a request of no trajectory is answered.
    await world.ok(
        "POST",
        "/v1/chat/completions",
        {"model": "policy", "messages": [user("x")], "max_tokens": 4},
        role="agent",
    )
    assert not world.scheduler.provisioner.decided


async def test_a_job_gets_workers_within_its_caps_and_its_turns_run(world: World) -> None:
    await world.start(provisioning={**QUICK, "jobs": {"job": {"n_dedicated": 1, "n_harvested": 0}}})
    engines = [await world.add("a"), await world.add("b"), await world.add("h", tier="harvested")]
    await hold(world, engines, "job")
    assert sorted(map(str, jobs_of(world).values())) == ["", "", "job"]
    assert jobs_of(world)["h"] == ""
    for engine in engines:
        engine.requests.clear()
    await world.chat(await world.trajectory(), [user("x")], max_tokens=4)
    ran = [name for name, engine in world.engines.items() if engine.requests]
    assert [jobs_of(world)[name] for name in ran] == ["job"]


async def test_a_device_that_comes_back_with_another_base_model_works_for_a_job_of_that_one(
    world: World,
) -> None:
    """As after an operator has changed its node's ``engine.model``: the job that had it has no use for it any more."""
    await world.start(provisioning={**QUICK, "default": {"n_dedicated": 1}})
    engines = [await world.add("a"), await world.add("b")]
    await hold(world, engines, "job")
    (name,) = [name for name, job in jobs_of(world).items() if job == "job"]
    await world.kill(name)
    fleet = world.scheduler.book.fleet
    fleet.workers[name].heard_at_s -= fleet.params.dead_s  # long silent
    engine = await world.add(name, model="other")
    await world.until(lambda: jobs_of(world)[name] != "job")

    await world.chat(await world.trajectory(job="job-2"), [user("x")], model="other", max_tokens=4)
    assert len(engine.requests) == 1
    await world.chat(await world.trajectory(), [user("x")], max_tokens=4)
    assert len(engine.requests) == 1


async def hold(world: World, engines: list[FakeEngine], job: str, count: int = 1) -> None:
    """The job has turns until provisioning has looked at it; then they end."""
    may_go = asyncio.Event()
    for engine in engines:
        engine.hold = may_go
    running = [asyncio.create_task(generate(world, await world.trajectory(job=job))) for _ in range(count)]
    await world.until(lambda: job in world.scheduler.provisioner.assigner.policy.jobs)
    await decided(world)
    may_go.set()
    await asyncio.gather(*running)


async def test_a_request_of_no_trajectory_takes_no_device_from_jobs_that_compete(world: World) -> None:
    """Its job has no name, which is how a parked worker says that it works for none."""
    await world.start(provisioning={**QUICK, "jobs": {"job": {"n_dedicated": 1}}})
    engines = [await world.add("a"), await world.add("b")]
    await hold(world, engines, "job")
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 4}
    asked = asyncio.create_task(world.call("POST", "/v1/chat/completions", body, role="agent"))
    await world.until(lambda: world.scheduler.book.num_running[""])
    await world.chat(await world.trajectory(), [user("y")], max_tokens=4)
    assert sorted(map(str, jobs_of(world).values())) == ["", "job"]
    assert "" not in world.scheduler.provisioner.assigner.policy.jobs
    assert world.scheduler.book.queue  # and it does not run on a worker that is parked or another's
    asked.cancel()


async def test_a_parked_workers_node_is_told(world: World) -> None:
    await world.start(provisioning={**QUICK, "jobs": {"job": {"n_dedicated": 0}}})
    engine = await world.add("a")
    await hold(world, [engine], "job")
    assert jobs_of(world) == {"a": ""}
    beat = {"incarnation": world.nodes["a"]._incarnation, "seq": 10**6, "version": "0.0", "state": "ready"}
    world.silence("a")
    answer = await world.ok("POST", "/workers/a/heartbeat", beat, role="node")
    assert answer["active"] is False


async def test_a_node_is_told_what_the_trainer_of_its_run_has_published(world: World) -> None:
    """By the trainer's word alone: a node that claims a version moves nobody's floor."""
    await world.start()
    await world.add("a")
    world.silence("a")
    beat = {"incarnation": world.nodes["a"]._incarnation, "seq": 10**6, "state": "ready", "follows": "run-a"}
    answer = await world.ok(
        "POST", "/workers/a/heartbeat", beat | {"version": "999.0", "run": "run-a"}, role="node"
    )
    assert (answer["floor_run"], answer["floor"]) == (None, None)
    for job, version, run in (("x", 3, "run-a"), ("y", 5, "run-a"), ("z", 9, "run-b")):
        body = {"job": job, "attempt": 1, "version": version, "run": run}
        await world.ok("POST", "/rose/v1/versions", body, role="trainer")
    answer = await world.ok("POST", "/workers/a/heartbeat", beat | {"seq": 10**6 + 1}, role="node")
    assert (answer["floor_run"], answer["floor"]) == ("run-a", "1.5")
    unknown = beat | {"seq": 10**6 + 2, "follows": "run-c"}
    answer = await world.ok("POST", "/workers/a/heartbeat", unknown, role="node")
    assert answer["floor"] is None


async def test_what_a_node_has_not_measured_any_more_is_forgotten(world: World) -> None:
    """Its process is another one now, and the old figure was never taken back."""
    await world.start()
    await world.add("a")
    world.silence("a")
    beat = {"incarnation": world.nodes["a"]._incarnation, "version": "0.0", "state": "ready"}
    measured = {"commit_s": 90.0, "pull_s": 80.0, "num_switches": 1, "copies": ["x"]}
    await world.ok("POST", "/workers/a/heartbeat", {**beat, **measured, "seq": 10**6}, role="node")
    assert world.scheduler.dispatcher.switching["a"].commit_s == 90.0
    await world.ok("POST", "/workers/a/heartbeat", {**beat, "seq": 10**6 + 1}, role="node")
    assert world.scheduler.dispatcher.switching["a"].commit_s is None


async def publish(world: World, job: str, run: str) -> None:
    body: dict[str, Any] = {"job": job, "attempt": 1, "version": 3, "run": run}
    await world.ok("POST", "/rose/v1/versions", body, role="trainer")


async def test_a_scheduler_that_starts_again_leaves_each_worker_to_the_job_whose_weights_it_has(
    world: World,
) -> None:
    """It parked the whole fleet, and gave one worker a second back."""
    await world.start(provisioning={**QUICK, "period_s": 3600.0})
    runs = {"a0": "run-a", "a1": "run-a", "b0": "run-b", "b1": "run-b"}
    for name, run in runs.items():
        (await world.add(name, tier="harvested")).switch(run, "1.3")
        await world.nodes[name].beat()
    for job in ("a", "b"):
        await publish(world, f"job-{job}", f"run-{job}")
    port = int(world.url.rsplit(":", 1)[1])
    await world.scheduler.stop(drain_s=0)
    again = world.scheduler.config.model_copy(update={"port": port})
    world.scheduler = Scheduler(again, world.tokens, world.tmp_path / "journal")
    await world.scheduler.start()
    workers = world.scheduler.book.fleet.workers
    await world.until(
        lambda: len(workers) == 4 and all(each.health is Health.READY for each in workers.values())
    )
    may_go = asyncio.Event()
    for engine in world.engines.values():
        engine.hold = may_go
    running = [
        asyncio.create_task(generate(world, await world.trajectory(job=f"job-{job}")))
        for job in "ab"
        for _ in range(8)
    ]
    await world.until(lambda: sum(world.scheduler.book.num_running.values()) == 16)

    provisioner = world.scheduler.provisioner
    provisioner._stepped_s = float("-inf")
    provisioner.step()

    assert jobs_of(world) == {name: f"job-{run[-1]}" for name, run in runs.items()}
    assert provisioner.decided == {"adopt": 4}
    may_go.set()
    await asyncio.gather(*running)
    await world.scheduler.stop(drain_s=0)
    told: list[type] = []
    for log in logs(world.tmp_path / "journal", "provisioning"):
        found = replay(log, watch=lambda event, actions: told.extend(map(type, actions)))
        assert found.difference is None
    assert told.count(Adopt) == 4


async def test_a_node_is_told_which_job_and_whose_policy_it_serves(world: World) -> None:
    await world.start(provisioning=QUICK)
    await world.add("a")
    version = {"job": "job", "attempt": 1, "version": 3, "run": "run-a"}
    await world.ok("POST", "/rose/v1/versions", version, role="trainer")
    node = world.nodes["a"]

    running = asyncio.create_task(generate(world, await world.trajectory()))
    await world.until(lambda: node.answer is not None and node.answer.job == "job")

    assert node.answer is not None
    assert (node.answer.active, node.answer.run) == (True, "run-a")
    world.engines["a"].switch("run-a", "1.3")
    answer = await running
    assert [(one["worker"], one["run"]) for one in answer["segments"]] == [("a", "run-a")]


async def test_mode_observe_says_what_it_would_do_and_does_nothing(world: World) -> None:
    share = {"n_dedicated": 1}
    await world.start(provisioning={**QUICK, "mode": "observe", "jobs": {"job": share}})
    await world.add("b")
    engine = await world.add("a")
    engine.hold = world.engines["b"].hold = asyncio.Event()

    running = asyncio.create_task(generate(world, await world.trajectory()))
    await world.until(lambda: world.scheduler.provisioner.decided["activate"])
    engine.hold.set()
    await running

    assert jobs_of(world) == {"a": None, "b": None}
    told = (await world.ok("GET", "/status"))["provisioning"]
    assert (told["mode"], told["held"]) == ("observe", {"job": 1})


async def test_metrics_say_how_many_engines_a_job_would_pay_for(world: World) -> None:
    await world.start(provisioning=QUICK)
    engine = await world.add("a")
    engine.hold = asyncio.Event()
    running = [asyncio.create_task(generate(world, await world.trajectory())) for _ in range(8)]
    await world.until(lambda: world.scheduler.provisioner.wanted().get("job", 0))

    async with world.session.get(f"{world.url}/metrics") as response:
        text = await response.text()

    assert 'rose_wanted_engines{job="job"}' in text
    engine.hold.set()
    await asyncio.gather(*running)


async def test_without_provisioning_every_worker_serves_every_job(world: World) -> None:
    await world.start(provisioning={"mode": "off", "default": {"n_dedicated": 0}})
    await world.add("a")
    name = await world.trajectory()
    await world.chat(name, [user("x")], max_tokens=4)
    assert world.scheduler.book.fleet.workers["a"].job is None


@pytest.mark.parametrize(("mode", "own"), [("off", True), ("observe", True), ("on", False)])
async def test_a_node_is_told_to_serve_its_own_run_unless_devices_are_assigned(
    world: World, mode: str, own: bool
) -> None:
    await world.start(provisioning={"mode": mode})
    await world.add("h", tier="harvested")
    await world.until(lambda: world.nodes["h"].answer is not None)
    answer = world.nodes["h"].answer
    assert answer is not None
    assert (answer.own_run, answer.run) == (own, None)
