"""A daemon with provisioning on: workers go to the jobs that have work, within their caps."""

from __future__ import annotations

import asyncio

from tests.scheduler.conftest import World, generate, user

QUICK = {
    "mode": "on",
    "period_s": 0.02,
    "switch_s": 0.0,
    "rest_s": 0.0,
    "min_active_s": 0.0,
    "idle_s": 600,
}


async def test_a_job_gets_workers_within_its_caps_and_its_turns_run(world: World) -> None:
    await world.start(provisioning={**QUICK, "jobs": {"job": {"n_dedicated": 1, "n_harvested": 0}}})
    for name in ("a", "b"):
        await world.add(name)
    await world.add("h", tier="harvested")
    workers = world.scheduler.book.fleet.workers
    # A worker serves everybody until provisioning has looked at it.
    await world.until(lambda: [worker.job for worker in workers.values()] == ["", "", ""])
    name = await world.trajectory()
    await world.chat(name, [user("x")], max_tokens=4)
    assert sorted(str(worker.job) for worker in workers.values()) == ["", "", "job"]
    assert workers["h"].job == ""
    ran = [name for name, engine in world.engines.items() if engine.requests]
    assert [workers[name].job for name in ran] == ["job"]


async def test_a_request_of_no_trajectory_takes_no_device_from_jobs(world: World) -> None:
    """Its job has no name, which is how a parked worker says that it works for none."""
    await world.start(provisioning=QUICK)
    await world.add("a")
    workers = world.scheduler.book.fleet.workers
    await world.until(lambda: workers["a"].job == "")
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 4}
    asked = asyncio.create_task(world.call("POST", "/v1/chat/completions", body, role="agent"))
    await world.until(lambda: world.scheduler.book.num_running[""])
    await world.chat(await world.trajectory(), [user("y")], max_tokens=4)
    assert workers["a"].job == "job"
    assert "" not in world.scheduler.provisioner.assigner.policy.jobs
    assert world.scheduler.book.queue  # and it does not run on a worker that is parked or another's
    asked.cancel()


async def test_a_parked_workers_node_is_told(world: World) -> None:
    await world.start(provisioning=QUICK)
    await world.add("a")
    beat = {"incarnation": world.nodes["a"]._incarnation, "seq": 10**6, "version": "0.0", "state": "ready"}
    await world.until(lambda: world.scheduler.book.fleet.workers["a"].job == "")
    world.silence("a")
    answer = await world.ok("POST", "/workers/a/heartbeat", beat, role="node")
    assert answer["active"] is False


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
    await world.start(provisioning={**QUICK, "mode": "observe"})
    engine = await world.add("a")
    engine.hold = asyncio.Event()

    running = asyncio.create_task(generate(world, await world.trajectory()))
    await world.until(lambda: world.scheduler.provisioner.decided["activate"])
    engine.hold.set()
    await running

    assert world.scheduler.book.fleet.workers["a"].job is None
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
    await world.start()
    await world.add("a")
    name = await world.trajectory()
    await world.chat(name, [user("x")], max_tokens=4)
    assert world.scheduler.book.fleet.workers["a"].job is None
