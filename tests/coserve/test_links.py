"""The node agent's links: what rose-scheduler hears, and how new weights reach the engine."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rose.coserve.agent import NodeAgent
from rose.coserve.policies import PolicyCopies
from rose.coserve.records import Mode, Phase
from rose.errors import EngineError, SectionCorrupt
from rose.lineage import WeightVersion
from rose.wire.hosts import host_name
from rose.wire.reading import read
from rose.wire.workers import Heartbeat, Registration
from tests.coserve.conftest import Device, control, turned_on, until


class Registry:
    """rose-scheduler's side of ``docs/architecture.md`` section 3."""

    def __init__(self, token: str) -> None:
        self._token = token
        self.known: dict[str, str] = {}
        self.registrations: list[Registration] = []
        self.beats: list[Heartbeat] = []
        self.removed: list[str] = []
        self.down = False
        self.num_asked = 0
        self.stands_by = False
        self.in_pieces = False
        self.assignment: dict[str, Any] = {}
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/workers", self.register)
        app.router.add_post("/workers/{id}/heartbeat", self.heartbeat)
        app.router.add_delete("/workers/{id}", self.remove)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        server = site._server  # pyright: ignore[reportPrivateUsage]
        assert isinstance(server, asyncio.Server)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _check(self, request: web.Request) -> None:
        self.num_asked += 1
        if self.down:
            raise web.HTTPServiceUnavailable
        if self.stands_by:
            said = json.dumps({"error": {"message": "stands by", "code": "not_active"}})
            raise web.HTTPServiceUnavailable(text=said, content_type="application/json")
        if request.headers.get("Authorization") != f"Bearer {self._token}":
            raise web.HTTPUnauthorized

    async def register(self, request: web.Request) -> web.Response:
        self._check(request)
        body = read(Registration, await request.read())
        self.registrations.append(body)
        self.known[body.worker_id] = body.incarnation
        return web.json_response({})

    async def heartbeat(self, request: web.Request) -> web.Response:
        self._check(request)
        body = read(Heartbeat, await request.read())
        self.beats.append(body)
        known = self.known.get(request.match_info["id"]) == body.incarnation
        # A scheduler of an earlier version says a field more.
        answer = {"known": known, "required_version": "1.3", **self.assignment}
        if not self.in_pieces:
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for byte in json.dumps(answer).encode():
            await response.write(bytes([byte]))
            await asyncio.sleep(0)
        return response

    async def remove(self, request: web.Request) -> web.Response:
        self._check(request)
        self.removed.append(request.match_info["id"])
        return web.json_response({})


@pytest.fixture
async def registry(device: Device) -> AsyncIterator[Registry]:
    registry = Registry(device.tokens.node)
    await registry.start()
    yield registry
    # The agents say good-bye; only then may the registry go.
    await device.stop_agents()
    await registry.stop()


def linked(device: Device, registry: Registry, **change: Any) -> NodeAgent:
    device.produce()
    return device.agent(scheduler={"url": registry.url, "heartbeat_s": 0.02}, **change)


async def test_an_answer_that_arrives_in_pieces_is_one_answer(device: Device, registry: Registry) -> None:
    registry.in_pieces = True
    agent = linked(device, registry)
    await until(lambda: len(registry.beats) > 5)
    uplink = agent.uplink
    assert uplink is not None
    assert (uplink.connected, uplink.error) == (True, "")


async def test_an_engine_is_registered_once_and_then_beats(device: Device, registry: Registry) -> None:
    agent = linked(device, registry, engine={"served_model_name": "policy-7b"})
    await until(lambda: len(registry.beats) > 5)
    assert registry.registrations == [
        Registration(
            worker_id="n0",
            url=agent.engine.url,
            tier="harvested",
            model="policy-7b",
            max_model_len=256,
            incarnation=agent.engine.incarnation,
            engine_token=agent.engine.token,
            vocab_size=1000,
            max_num_seqs=32,
            logprobs_mode="processed_logprobs",
            host=host_name() or None,
        )
    ]
    seqs = [beat.seq for beat in registry.beats]
    assert seqs == sorted(set(seqs))
    await until(lambda: registry.beats[-1].kv_budget_tokens == 1600)
    beat = registry.beats[-1]
    assert (beat.version, beat.state, beat.gated) == ("0.0", "ready", False)
    assert (beat.kv_used_tokens, beat.running) == (7, 3)


async def test_a_scheduler_that_forgot_us_gets_the_registration_again(
    device: Device, registry: Registry
) -> None:
    linked(device, registry)
    await until(lambda: len(registry.beats) > 2)
    registry.known.clear()
    await until(lambda: len(registry.registrations) == 2)
    count = len(registry.beats)
    await until(lambda: len(registry.beats) > count + 2)
    assert len(registry.registrations) == 2


async def test_a_new_engine_process_registers_with_its_own_token(device: Device, registry: Registry) -> None:
    linked(device, registry)
    await until(lambda: len(registry.beats) > 0)
    os.kill(device.report()["pid"], signal.SIGKILL)
    await until(lambda: any(beat.state == "starting" for beat in registry.beats))
    await until(lambda: len(registry.registrations) == 2)
    first, second = registry.registrations
    assert first.incarnation != second.incarnation
    assert first.engine_token != second.engine_token


async def test_a_scheduler_that_is_away_is_tried_again_and_lending_goes_on(
    device: Device, registry: Registry
) -> None:
    agent = linked(device, registry)
    await until(lambda: device.resident_pages() == 16)
    registry.down = True
    await until(lambda: "answered 503" in (agent.status()["scheduler"] or {}).get("error", ""))
    assert device.resident_pages() == 16
    registry.down = False
    await until(lambda: agent.status()["scheduler"]["connected"])


async def test_a_node_finds_the_scheduler_that_is_active(device: Device, registry: Registry) -> None:
    """And the other one, when that has taken over."""
    other = Registry(device.tokens.node)
    await other.start()
    try:
        other.stands_by = True
        device.produce()
        device.agent(scheduler={"url": f"{other.url},{registry.url}", "heartbeat_s": 0.02})
        await until(lambda: len(registry.beats) > 2)
        assert (other.registrations, other.beats) == ([], [])
        other.stands_by = False
        registry.stands_by = True
        await until(lambda: len(other.beats) > 2)
        assert other.beats[-1].incarnation == other.registrations[-1].incarnation
    finally:
        await device.stop_agents()
        await other.stop()


async def test_a_cut_is_told_to_the_scheduler(device: Device, registry: Registry) -> None:
    linked(device, registry)
    await until(lambda: device.resident_pages() == 16)
    assert device.production is not None
    before = registry.beats[-1].reclaim_seq if registry.beats else 0
    device.production.used = 12
    await until(lambda: bool(registry.beats) and registry.beats[-1].reclaim_seq > before)


async def test_switched_off_means_not_ready_and_leaving_means_removed(
    device: Device, registry: Registry
) -> None:
    agent = linked(device, registry)
    await until(lambda: bool(registry.beats) and registry.beats[-1].state == "ready")
    async with control(device) as client:
        await asyncio.to_thread(client.set, mode="off")
    await until(lambda: registry.beats[-1].state == "starting")
    agent.stop()
    await until(lambda: registry.removed == ["n0"])


# --- weights ---


class Source:
    """A subscriber whose publications are ours to make; update files as the fake engine reads them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.published: queue.Queue[WeightVersion] = queue.Queue()
        self.fetched: list[tuple[str, str | None]] = []
        self.failures: list[Exception] = []
        self.away: Exception | None = None
        self.claimed_base: str | None = None
        self.outside = False
        self.fault = ""
        self.required: WeightVersion | None = None
        self.closed = False

    def busy(self) -> bool:
        return False

    def poll(self, timeout_s: float) -> WeightVersion | None:
        if self.away is not None:
            raise self.away
        try:
            return self.published.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def require(self, version: WeightVersion) -> None:
        self.required = version

    def close(self) -> None:
        self.closed = True

    def fetch(self, version: WeightVersion, engine_version: WeightVersion | None) -> Path:
        base = str(engine_version) if engine_version is not None else None
        self.fetched.append((str(version), base))
        if self.failures:
            raise self.failures.pop(0)
        directory = self.directory.parent if self.outside else self.directory
        directory.mkdir(exist_ok=True)
        path = directory / f"{version}.update"
        fault, self.fault = self.fault, ""
        path.write_text(json.dumps({"base": self.claimed_base if base is not None else None, "fault": fault}))
        return path


def updated(device: Device, **change: Any) -> tuple[NodeAgent, Source]:
    device.produce()
    source = Source(device.path / "w")
    weights = {
        "relay_url": "http://127.0.0.1:9",
        "run_id": "r",
        "directory": str(source.directory),
        "poll_s": 0.05,
    }
    return device.agent(source=source, weights=weights, **change), source


async def test_each_published_version_is_staged_and_committed_in_order(device: Device) -> None:
    agent, source = updated(device)
    source.claimed_base = "0.0"
    source.published.put(WeightVersion(1, 1))
    await until(lambda: agent.engine.version == "1.1")
    source.claimed_base = "1.1"
    source.published.put(WeightVersion(1, 2))
    await until(lambda: agent.engine.version == "1.2")
    assert source.fetched == [("1.1", "0.0"), ("1.2", "1.1")]
    assert (await agent.engine.refresh_status())["version"] == "1.2"
    # The version may have come with the engine's status, ahead of the answer to the commit.
    await until(lambda: agent.status()["weights"]["commits"] == 2)
    weights = agent.status()["weights"]
    assert (weights["newest"], weights["error"]) == ("1.2", "")
    assert weights["last"]["num_changed"] == 5
    assert agent.heartbeat("one", 1).version == "1.2"


def weights_of_r(device: Device) -> dict[str, Any]:
    return {
        "relay_url": "http://127.0.0.1:9",
        "run_id": "r",
        "directory": str(device.path / "w"),
        "poll_s": 0.05,
    }


async def test_a_node_serves_the_run_that_the_scheduler_assigns(device: Device, registry: Registry) -> None:
    sources = {run: Source(device.path / "w") for run in ("r", "s")}
    sources["r"].published.put(WeightVersion(1, 5))
    sources["s"].published.put(WeightVersion(1, 3))
    copies = PolicyCopies("r", device.path / "w", lambda run, folder: sources[run], most=2)
    agent = linked(device, registry, source=copies, weights=weights_of_r(device))
    await until(lambda: bool(registry.beats) and registry.beats[-1].run == "r")
    first = registry.beats[-1]
    assert (first.pull_s, first.commit_s, first.num_switches, first.copies) == (None, None, 0, ["r"])
    assert first.follows == "r"
    assert agent.status()["weights"]["run_id"] == "r"

    registry.assignment = {"active": True, "job": "b", "run": "s"}
    await until(lambda: registry.beats[-1].run == "s")

    # An older number of another run, and no delta from what was there.
    assert registry.beats[-1].version == "1.3"
    assert sources["s"].fetched == [("1.3", None)]
    await until(lambda: registry.beats[-1].num_switches == 1)
    there = registry.beats[-1]
    assert there.pull_s is not None
    assert there.commit_s is not None
    assert there.copies == ["s", "r"]
    assert (sources["r"].required, sources["s"].required) == (None, None)
    registry.assignment |= {"floor_run": "s", "floor": "1.4"}
    await until(lambda: sources["s"].required == WeightVersion(1, 4))
    assert sources["r"].required is None
    assert (agent.status()["assignment"], agent.status()["weights"]["switches"]) == (
        {"job": "b", "run": "s", "active": True, "held": False, "told": True, "because": ""},
        1,
    )

    registry.assignment = {"active": True, "job": "a", "run": "r"}
    await until(lambda: registry.beats[-1].run == "r")
    assert registry.beats[-1].version == "1.5"
    assert agent.engine.num_starts == 1
    await until(lambda: registry.beats[-1].num_switches == 2)
    back = registry.beats[-1]
    assert back.copies == ["r", "s"]
    assert back.pull_s == there.pull_s, "nothing had to be pulled"
    assert back.commit_s != there.commit_s


async def test_a_node_goes_back_to_its_own_run_where_nobody_assigns_any_more(
    device: Device, registry: Registry
) -> None:
    """Provisioning was switched off: devices kept the run of whom they had served last, and their own job had none."""
    sources = {run: Source(device.path / "w") for run in ("r", "s")}
    sources["r"].published.put(WeightVersion(1, 5))
    sources["s"].published.put(WeightVersion(1, 3))
    copies = PolicyCopies("r", device.path / "w", lambda run, folder: sources[run], most=2)
    linked(device, registry, source=copies, weights=weights_of_r(device))
    registry.assignment = {"active": True, "job": "b", "run": "s"}
    await until(lambda: bool(registry.beats) and registry.beats[-1].run == "s")
    registry.assignment = {"active": True}  # a scheduler that has just started and will assign again
    asked = registry.num_asked
    await until(lambda: registry.num_asked > asked + 3)
    assert registry.beats[-1].run == "s"

    registry.assignment = {"active": True, "own_run": True}

    await until(lambda: registry.beats[-1].run == "r")
    assert registry.beats[-1].version == "1.5"


async def test_an_order_that_is_taken_back_before_its_weights_came_is_no_switch(
    device: Device, registry: Registry
) -> None:
    """The next version of the own run, however much later, was taken for the end of it."""
    sources = {run: Source(device.path / "w") for run in ("r", "s")}
    sources["r"].published.put(WeightVersion(1, 5))
    copies = PolicyCopies("r", device.path / "w", lambda run, folder: sources[run], most=2)
    agent = linked(device, registry, source=copies, weights=weights_of_r(device))
    await until(lambda: bool(registry.beats) and registry.beats[-1].run == "r")

    registry.assignment = {"active": True, "job": "b", "run": "s"}
    await until(lambda: agent.status()["weights"]["serves"] == "s")
    registry.assignment = {"active": True, "job": "a", "run": "r"}
    await until(lambda: agent.status()["weights"]["serves"] == "r")
    sources["r"].published.put(WeightVersion(1, 6))
    await until(lambda: registry.beats[-1].version == "1.6")

    last = registry.beats[-1]
    assert (last.commit_s, last.pull_s, last.num_switches, last.copies) == (None, None, 0, ["r"])


async def test_a_device_that_no_job_wants_gives_its_memory_back_and_keeps_its_engine(
    device: Device, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.coserve.agent.RELEASE_AFTER_S", 0.0)
    agent = linked(device, registry)
    await until(lambda: agent.engine.state == "ready" and device.resident_pages() > 0)
    num_starts = agent.engine.num_starts

    registry.assignment = {"active": False}
    await until(lambda: device.resident_pages() == 0)

    assert (agent.mode, agent.engine.state, agent.engine.num_starts) == (Mode.ON, "ready", num_starts)
    assert agent.status()["assignment"]["active"] is False
    registry.assignment = {"active": True, "job": "a"}
    await until(lambda: device.resident_pages() > 0)
    assert agent.engine.num_kills == 0
    assert device.production is not None
    assert device.production.overdrawn == 0


async def test_an_agent_that_starts_while_the_scheduler_is_away_lends_nothing_before_it_is_told(
    device: Device, registry: Registry
) -> None:
    """It may have been held, and died since."""
    registry.down = True
    agent = linked(device, registry)
    await until(lambda: agent.engine.state == "ready")
    asked = registry.num_asked
    await until(lambda: registry.num_asked >= asked + 3)
    assert (agent.policy.lend_pages, device.resident_pages()) == (0, 0)

    registry.down = False
    await until(lambda: device.resident_pages() > 0)


async def test_until_the_fleet_is_known_the_node_says_what_it_waits_for(
    device: Device, registry: Registry
) -> None:
    """The scheduler is asked once there is an engine: before that it is not what is waited for."""
    registry.down = True
    agent = linked(device, registry, mode="observe")
    production = device.production
    assert production is not None
    production.phase = Phase.STARTING
    production.publish()
    waiting = asyncio.create_task(turned_on(device, 200.0))
    await until(lambda: agent.mode == Mode.ON)
    told = agent.status()
    assert told["assignment"]["because"].startswith("the rollout engine is not ready yet")
    assert told["scheduler"] == {
        "connected": False,
        "error": "not asked yet: the rollout engine is not ready",
    }

    production.phase = Phase.READY
    away = "rose-scheduler has not answered yet whether the fleet is on"
    await until(lambda: agent.status()["assignment"]["because"] == away)
    assert agent.status()["engine"]["state"] == "ready"
    assert not waiting.done()

    registry.down = False
    done = await waiting
    assert (done.exit_code, done.stderr.splitlines()[-1].startswith("nothing is lent")) == (0, False), (
        done.output
    )


async def test_a_node_whose_fleet_is_switched_off_gives_its_memory_back_at_once_and_keeps_its_mode(
    device: Device, registry: Registry
) -> None:
    agent = linked(device, registry)
    await until(lambda: agent.engine.state == "ready" and device.resident_pages() > 0)

    registry.assignment = {"active": True, "held": True}
    await until(lambda: device.resident_pages() == 0)
    await until(lambda: registry.beats[-1].held_pages == 0)

    assert (registry.beats[-1].held, registry.beats[-1].mode) == (True, "on")
    agent.change(mode=Mode.ON)  # its own operator's word is not the fleet's
    assert agent.policy.lend_pages == 0
    assert agent.status()["lending"]["reason"] == "the fleet is switched off here (rose fleet on)"
    registry.assignment = {"active": True}
    await until(lambda: device.resident_pages() > 0)
    assert agent.engine.num_kills == 0


async def test_a_scheduler_that_has_no_job_for_a_moment_costs_no_memory(
    device: Device, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.coserve.agent.RELEASE_AFTER_S", 3600.0)
    agent = linked(device, registry)
    await until(lambda: device.resident_pages() > 0)
    num_beats = len(registry.beats)

    registry.assignment = {"active": False}
    await until(lambda: len(registry.beats) > num_beats + 5)

    assert not agent.released
    assert agent.policy.lend_pages > 0


async def test_a_restarted_engine_is_brought_to_the_newest_version_again(device: Device) -> None:
    agent, source = updated(device)
    source.claimed_base = "0.0"
    source.published.put(WeightVersion(1, 1))
    await until(lambda: agent.engine.version == "1.1")
    os.kill(device.report()["pid"], signal.SIGKILL)
    await until(lambda: agent.engine.version is None)
    await until(lambda: agent.engine.version == "1.1")
    assert source.fetched == [("1.1", "0.0"), ("1.1", "0.0")]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), SectionCorrupt("checksum")])
async def test_without_news_a_restarted_engine_gets_what_the_node_holds_and_the_node_goes_on(
    device: Device, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("rose.coserve.links._BACK_OFF_S", (0.05,))
    agent, source = updated(device)
    source.claimed_base = "0.0"
    source.published.put(WeightVersion(1, 1))
    await until(lambda: agent.engine.version == "1.1")
    source.away = error
    await until(lambda: str(error) in agent.status()["weights"]["error"])
    os.kill(device.report()["pid"], signal.SIGKILL)
    await until(lambda: agent.engine.version is None)
    await until(lambda: agent.engine.version == "1.1")
    source.away = None
    source.claimed_base = "1.1"
    source.published.put(WeightVersion(1, 2))
    await until(lambda: agent.engine.version == "1.2")
    await until(lambda: agent.status()["weights"]["error"] == "")


async def test_an_update_for_another_base_is_replaced_by_the_whole_version(device: Device) -> None:
    agent, source = updated(device)
    source.claimed_base = "7.7"
    source.published.put(WeightVersion(1, 1))
    await until(lambda: agent.engine.version == "1.1")
    assert source.fetched == [("1.1", "0.0"), ("1.1", None)]


async def test_an_engine_that_is_busy_with_another_call_is_asked_again_for_the_same_update(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan of its memory, say: what it has is what the update is for, and the whole version would be many times as large."""
    monkeypatch.setattr("rose.coserve.links._BACK_OFF_S", (0.05,))
    agent, source = updated(device)
    source.claimed_base = "0.0"
    source.fault = "busy"
    source.published.put(WeightVersion(1, 1))
    await until(lambda: agent.engine.version == "1.1")
    assert source.fetched == [("1.1", "0.0")] * 2


@pytest.mark.parametrize("fault", ["answer", "silent"])
async def test_an_engine_whose_weights_are_of_no_version_is_killed_and_comes_back(
    device: Device, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A commit that failed and could not be undone leaves the engine paused: nothing but a restart helps."""
    monkeypatch.setattr("rose.coserve.agent.STATUS_EVERY_S", 0.05)
    monkeypatch.setattr("rose.coserve.links._BACK_OFF_S", (0.05,))
    agent, source = updated(device)
    source.claimed_base = "0.0"
    source.fault = fault
    source.published.put(WeightVersion(1, 1))
    await until(lambda: agent.engine.num_starts == 2)
    assert agent.engine.num_kills == 1
    await until(lambda: agent.engine.version == "1.1")
    assert agent.engine.weights_broken is False
    assert (agent.engine.num_starts, agent.engine.num_kills) == (2, 1)


@pytest.mark.parametrize("fault", ["die in stage", "die in commit"])
async def test_an_engine_killed_in_an_update_comes_back_and_gets_it(
    device: Device, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("rose.coserve.links._BACK_OFF_S", (0.05,))
    agent, source = updated(device)
    source.claimed_base = "0.0"
    source.fault = fault
    source.published.put(WeightVersion(1, 1))
    await until(lambda: agent.engine.num_starts == 2)
    await until(lambda: agent.engine.version == "1.1")
    assert agent.engine.num_kills == 0


async def test_a_corrupt_object_is_fetched_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.coserve.links._BACK_OFF_S", (0.0,))
    agent, source = updated(device)
    source.claimed_base = "0.0"
    source.failures = [SectionCorrupt("checksum"), EngineError("relay is away")]
    source.published.put(WeightVersion(1, 1))
    await until(lambda: agent.engine.version == "1.1")
    assert source.fetched == [("1.1", "0.0")] * 3
    assert agent.engine.num_starts == 1


async def test_an_update_file_outside_the_weights_directory_is_not_given_to_the_engine(
    device: Device,
) -> None:
    agent, source = updated(device)
    source.outside = True
    source.published.put(WeightVersion(1, 1))
    await until(lambda: "is not below" in (agent.status()["weights"] or {}).get("error", ""))
    assert agent.engine.version == "0.0"
