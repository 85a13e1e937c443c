"""Status, metrics, readiness, a graceful stop."""

from __future__ import annotations

import asyncio

import pytest

from rose.policy.fleet import Fleet
from rose.policy.worker import Tier
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.testing.fake_engine import Fault
from tests.scheduler.conftest import PROMPT, World, generate


async def test_status_and_metrics_count_turns_and_tokens_by_tier(world: World) -> None:
    await world.start(policy="round_robin")
    await world.add("d", mean_tokens=10_000)
    await world.add("h", mean_tokens=10_000, tier="harvested")
    world.engines["h"].faults.append(Fault(kind="reclaim", after=5))
    for _ in range(2):
        await generate(world)
    status = await world.ok("GET", "/status")
    assert status["turns"]["done"] == 2
    assert status["tokens"]["by_tier"] == {"dedicated": 75, "harvested": 5, "borrowed": 0}
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
    assert answer == {
        "known": False,
        "active": True,
        "job": None,
        "run": None,
        "floor_run": None,
        "floor": None,
        "held": False,
        "own_run": False,
    }


async def test_a_node_that_is_newer_or_older_than_the_scheduler_works(world: World) -> None:
    await world.start()
    oldest = {
        "worker_id": "a", "url": "http://127.0.0.1:9", "tier": "dedicated", "model": "policy", "max_model_len": 4096,
        "incarnation": "x",
    }  # fmt: skip
    beat = {"incarnation": "x", "seq": 1, "version": "1.0", "state": "ready"}

    for told in ({}, {"of_tomorrow": {"x": [1]}}):
        await world.ok("POST", "/workers", oldest | told, role="node")
        answer = await world.ok("POST", "/workers/a/heartbeat", beat | told, role="node")
        assert answer["known"]
        beat["seq"] += 1

    async with world.session.get(f"{world.url}/metrics") as response:
        text = await response.text()
    assert 'rose_unread_reports_total{body="Registration"} 1.0' in text
    assert 'rose_unread_reports_total{body="Heartbeat"} 1.0' in text


async def test_nothing_is_kept_of_workers_that_went(world: World) -> None:
    await world.start()
    engine = {"url": "http://127.0.0.1:9", "tier": "dedicated", "model": "policy", "max_model_len": 4096}
    beat = {
        "incarnation": "x",
        "seq": 1,
        "version": "1.0",
        "state": "ready",
        "commit_s": 1.5,
        "copies": ["a"],
    }
    for number in range(3):
        body = {"worker_id": f"w{number}", "incarnation": "x", **engine}
        await world.ok("POST", "/workers", body, role="node")
        await world.ok("POST", f"/workers/w{number}/heartbeat", beat, role="node")
        await world.ok("DELETE", f"/workers/w{number}", role="node")
    assert world.scheduler.dispatcher.endpoints == world.scheduler.dispatcher.switching == {}


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


async def test_whoever_looks_whether_anybody_is_here_is_answered(world: World) -> None:
    await world.start()
    async with world.session.head(world.url) as response:
        assert (response.status, await response.read()) == (200, b"")


@pytest.mark.parametrize("tick_s", [0.25, 1.0])
def test_a_silent_worker_is_found_dead_at_any_tick_that_is_allowed(tick_s: float) -> None:
    config = SchedulerConfig.model_validate({"timeouts": {"tick_s": tick_s}})
    fleet = Fleet(params=config.fleet_params())
    fleet.register(
        at_s=0.0, worker_id="a", incarnation="1", tier=Tier.DEDICATED, model="m", max_model_len=100
    )
    ticks = range(1, int(2 * config.timeouts.dead_s / tick_s))
    down = [one for tick in ticks for one in fleet.tick(1.01 * tick_s * tick)]  # a sleep takes a little more
    assert [one.reason for one in down] == ["silent"]
