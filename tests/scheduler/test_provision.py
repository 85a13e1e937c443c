"""A daemon with provisioning on: workers go to the jobs that have work, within their caps."""

from __future__ import annotations

from tests.scheduler.conftest import World, user

QUICK = {
    "enabled": True,
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


async def test_a_parked_workers_node_is_told(world: World) -> None:
    await world.start(provisioning=QUICK)
    await world.add("a")
    beat = {"incarnation": world.nodes["a"]._incarnation, "seq": 10**6, "version": "0.0", "state": "ready"}
    await world.until(lambda: world.scheduler.book.fleet.workers["a"].job == "")
    world.silence("a")
    answer = await world.ok("POST", "/workers/a/heartbeat", beat, role="node")
    assert answer["active"] is False


async def test_without_provisioning_every_worker_serves_every_job(world: World) -> None:
    await world.start()
    await world.add("a")
    name = await world.trajectory()
    await world.chat(name, [user("x")], max_tokens=4)
    assert world.scheduler.book.fleet.workers["a"].job is None
