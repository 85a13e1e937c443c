"""What each mode, and a device that is dedicated or borrowed, makes of the node agent."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode
from rose.errors import ConfigError, EngineError, RequestError
from rose.node_client import ControlClient
from rose.policy.lending_events import ALL_PAGES
from rose.proc import Child
from tests.coserve.conftest import BY_DEFAULT, Device, alive, control, lent, needs_ipv6, ready, until


async def test_mode_observe_starts_nothing_but_says_what_could_be_lent(device: Device) -> None:
    device.produce()
    agent = device.agent(mode="observe")
    await until(lambda: agent.status()["lending"]["harvestable_pages"] == 18)
    assert agent.engine.num_starts == 0
    assert agent.waits_for() == "mode is observe"
    assert sorted(path.name for path in device.dir.iterdir()) == [
        *("agent.sock", "node.state", "serving.board", "serving.lease")
    ]
    state = NodeDir(device.dir).node().read()
    assert state is not None
    assert (state.mode, state.lend_pages) == (Mode.OBSERVE, 0)


async def test_back_to_observe_ends_the_engine_and_off_does_not_start_it(device: Device) -> None:
    device.produce()
    agent = device.agent(mode="observe")
    await until(lambda: agent.status()["lending"]["harvestable_pages"] == 18)
    agent.change(mode=Mode.ON)
    await lent(device, 16)
    pid = device.report()["pid"]
    agent.change(mode=Mode.OBSERVE)
    await until(lambda: agent.engine.state == "down")
    assert not alive(pid)
    assert agent.engine.num_kills == 0
    agent.change(mode=Mode.OFF)
    await until(lambda: agent.waits_for() == "mode is off")
    assert agent.engine.num_starts == 1
    assert not agent.engine.running


async def test_off_leaves_an_engine_that_runs_and_starts_one_only_where_it_shall_be_kept_warm(
    device: Device,
) -> None:
    device.produce()
    agent = device.agent(mode="off", engine={"warm": True})
    await ready(device, agent)
    assert device.resident_pages() == 0
    agent.change(mode=Mode.ON)
    await lent(device, 16)
    agent.change(mode=Mode.OFF)
    await lent(device, 0)
    assert agent.engine.running
    assert agent.engine.num_starts == 1


async def test_an_engine_that_is_stopped_while_its_start_is_prepared_is_not_started(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no process yet that could be ended."""
    device.produce()
    agent = device.agent()
    preparing, may_go_on, begin = threading.Event(), threading.Event(), agent.engine.log.begin

    def slow() -> Path | None:
        preparing.set()
        may_go_on.wait(60.0)
        return begin()

    monkeypatch.setattr(agent.engine.log, "begin", slow)
    try:
        await until(preparing.is_set)
        async with control(device) as client:
            off = asyncio.create_task(asyncio.to_thread(client.off, 60.0, False))
            await until(lambda: agent.engine.stop_asked, "the stop waits for the start")
            may_go_on.set()
            await off
    finally:
        may_go_on.set()
    await until(lambda: "was stopped before" in caplog.text or agent.engine.state == "ready")
    assert not device.report_path.exists()
    await until(lambda: agent.engine.state == "down")
    assert agent.waits_for() == "an operator stopped it"


async def test_an_operators_stop_that_did_not_end_the_engine_is_carried_on(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.produce()
    agent = device.agent()
    await ready(device, agent)
    terminate, slow = Child.terminate, [EngineError("processes [7] do not end")]

    def once(child: Child, grace_s: float = 10.0) -> None:
        if child.spec.name == "rollout engine" and slow:
            raise slow.pop()
        terminate(child, grace_s)

    monkeypatch.setattr(Child, "terminate", once)
    with pytest.raises(EngineError, match="do not end"):
        await agent.set_engine(False)
    await until(lambda: agent.engine.state == "down")
    assert not alive(device.report()["pid"])


@needs_ipv6
async def test_an_engine_that_listens_on_every_ipv6_address_comes_up(device: Device) -> None:
    agent = device.agent(serving=None, engine={"host": "::"})
    await until(lambda: agent.engine.state == "ready" or device.agents[0][1].done())
    assert agent.engine.url == f"http://[::1]:{agent.config.engine.port}"
    assert agent.engine.state == "ready", device.agents[0][1]


async def test_a_dedicated_device_lends_everything_and_runs_in_the_normal_class(device: Device) -> None:
    agent = device.agent(serving=None, engine=BY_DEFAULT)
    await lent(device, 16)
    assert agent.policy.lend_pages == ALL_PAGES
    assert not device.report()["idle_class"]
    state = NodeDir(device.dir).node().read()
    assert state is not None
    assert state.has_serving == 0
    assert agent.config.tier == "dedicated"


async def test_a_dedicated_device_where_production_comes_to_live_gives_everything_back(
    device: Device,
) -> None:
    """Its ``dir`` is production's ROSE_DIR by mistake: neither would hear the other's claims."""
    agent = device.agent(serving=None)
    await lent(device, 16)
    production = device.produce()
    await lent(device, 0)
    await until(lambda: agent.policy.lend_pages == 0)
    assert "node.toml has no [serving]" in agent.status()["lending"]["reason"]
    assert "node.toml has no [serving]" in (agent.waits_for() or "")

    await production.stop()
    device.production = None
    await lent(device, 16)


async def test_an_agent_starts_no_engine_where_production_lives_that_it_was_not_told_of(
    device: Device,
) -> None:
    device.produce()
    agent = device.agent(serving=None)
    await until(lambda: "node.toml has no [serving]" in agent.released_because)
    assert "node.toml has no [serving]" in (agent.waits_for() or "")
    assert agent.engine.num_starts == 0


async def test_a_borrowed_device_is_its_engines_only_while_its_owner_lends_it(device: Device) -> None:
    agent = device.agent(serving=None, borrowed=True)
    await until(lambda: agent.waits_for() == "its owner does not lend it now")
    assert agent.engine.num_starts == 0

    agent.lend(3600.0)
    await lent(device, 16)
    await ready(device, agent)
    assert 3500.0 < (agent.heartbeat("i", 1).lent_s or 0.0) <= 3600.0

    agent.lend(0.0)  # taken back before the time was over
    assert agent.heartbeat("i", 2).lent_s == 0.0
    await lent(device, 0)
    assert (agent.engine.state, agent.engine.num_starts, agent.engine.num_kills) == ("ready", 1, 0)

    agent.lend(0.5)  # and a loan that nobody renews ends by itself
    await until(lambda: agent.released)
    await lent(device, 0)


async def test_an_owner_hears_whether_the_engine_has_given_everything_back(device: Device) -> None:
    agent = device.agent(serving=None, borrowed=True, fake="stubborn", lending={"reclaim_deadline_s": 3600.0})
    client = ControlClient(device.dir, device.tokens)
    await until(lambda: (device.dir / "agent.sock").exists())
    assert (await asyncio.to_thread(client.lend, 600.0))["given_back"] is False
    await lent(device, 16)
    assert (await asyncio.to_thread(client.lend, 0.0, 0.05)) == {"lent_s": 0.0, "given_back": False}
    await agent.engine.kill("it keeps what it owes")
    assert (await asyncio.to_thread(client.lend, 0.0, 30.0)) == {"lent_s": 0.0, "given_back": True}
    client.close()


async def test_only_a_borrowed_device_is_lent(device: Device) -> None:
    agent = device.agent(serving=None)
    with pytest.raises(RequestError, match="not borrowed") as refused:
        agent.lend(1.0)
    assert refused.value.field == "seconds"
    assert agent.heartbeat("i", 1).lent_s is None


async def test_steps_stop_at_layers_only_where_they_take_turns(device: Device) -> None:
    with pytest.raises(ConfigError) as caught:
        device.agent(gate={"stop_at_layers": True})
    assert (caught.value.field, caught.value.fix) == ("gate.stop_at_layers", "gate.serialise = true")

    device.produce()
    agent = device.agent()
    await ready(device, agent)
    reader = NodeDir(device.dir).node()

    def told() -> tuple[int, int]:
        state = reader.read()
        assert state is not None
        return state.serialise, state.stop_at_layers

    with pytest.raises(RequestError, match="take turns"):
        agent.change(stop_at_layers=True)
    assert told() == (0, 0)
    agent.change(serialise=True, stop_at_layers=True)
    assert told() == (1, 1)
    with pytest.raises(RequestError, match="take turns"):
        agent.change(serialise=False)
    assert told() == (1, 1)
