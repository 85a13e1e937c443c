"""Two nodes whose files name one ``node_id``: two agents with an engine each, and the scheduler that both report to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rose.coserve.agent import NodeAgent
from rose.scheduler.app import Scheduler
from rose.scheduler.fleet_cli import holds
from rose.scheduler.scheduler_config import SchedulerConfig
from tests.coserve.conftest import Device, until


class Fleet:
    """Two devices, and a scheduler that gives them orders."""

    def __init__(self, path: Path) -> None:
        self.devices = [Device(path / name) for name in "ab"]
        tokens = self.devices[0].tokens
        self.devices[1].tokens = tokens
        tokens.save(self.devices[1].token_file)
        self.scheduler = Scheduler(SchedulerConfig(port=0), tokens, path / "journal")

    def agent(self, at: int) -> NodeAgent:
        device = self.devices[at]
        device.produce()
        return device.agent(scheduler={"url": self.scheduler.url, "heartbeat_s": 0.05})

    def rows(self) -> list[tuple[bool, int | None, bool]]:
        """Of each node that is heard: is it registered, what it holds, and would `rose fleet off` wait for it?"""
        told = self.scheduler.fleet_routes._status()
        return [(not one["unregistered"], one["held_pages"], holds(dict(one))) for one in told["nodes"]]

    async def close(self) -> None:
        for device in self.devices:
            await device.close()
        await self.scheduler.stop(drain_s=0)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    for name in "ab":
        (tmp_path / name).mkdir()
    fleet = Fleet(tmp_path)
    await fleet.scheduler.start()
    yield fleet
    await fleet.close()


async def test_the_second_lends_nothing_and_says_why_and_the_first_goes_on(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    first, (device, other) = fleet.agent(0), fleet.devices
    await until(lambda: device.resident_pages() > 0, "the first one lends")
    second = fleet.agent(1)
    await until(lambda: second.engine.state == "ready" and len(fleet.rows()) == 2, "both are heard")
    await until(lambda: second.uplink is not None and second.uplink._seq > 3)

    told = second.status()
    assert told["assignment"]["because"] == "another node has the node_id n0"
    assert f"the node at {first.engine.url}" in told["errors"]["node_id"]
    assert "give each node a node_id of its own" in told["errors"]["node_id"]
    assert told["scheduler"]["connected"] is False
    assert (second.policy.lend_pages, other.resident_pages()) == (0, 0)
    assert [record.levelname for record in caplog.records if "answered 409" in record.getMessage()] == [
        "ERROR"
    ]
    assert (first.errors, first.status()["scheduler"]) == ({}, {"connected": True, "error": ""})

    pid = first.engine.describe()["pid"]
    incarnation = first.engine.incarnation
    os.kill(pid, signal.SIGKILL)
    workers = fleet.scheduler.book.fleet.workers
    await until(lambda: first.engine.state == "ready" and first.engine.incarnation != incarnation)
    await until(lambda: workers["n0"].incarnation == first.engine.incarnation, "its engine is let in again")
    await until(lambda: device.resident_pages() > 0)
    assert "node_id" in second.errors


async def test_the_fleet_is_off_when_both_hold_nothing(fleet: Fleet) -> None:
    first = fleet.agent(0)
    await until(lambda: fleet.devices[0].resident_pages() > 0)
    fleet.agent(1)
    await until(lambda: len(fleet.rows()) == 2)
    fleet.scheduler.fleet_routes._switch.off()
    await until(lambda: [row[1:] for row in fleet.rows()] == [(0, False), (0, False)], "all memory is back")
    assert [device.resident_pages() for device in fleet.devices] == [0, 0]

    first.stop()
    await until(lambda: [row[0] for row in fleet.rows()] == [True], "the name is free")
    assert fleet.rows() == [(True, 0, False)]


async def test_one_that_was_let_in_and_lost_its_name_gives_back_what_it_holds(fleet: Fleet) -> None:
    """Cut off for a while, say: the other one has the name by now."""
    first, second = fleet.agent(0), None
    await until(lambda: fleet.devices[0].resident_pages() > 0)
    second = fleet.agent(1)
    await until(lambda: "node_id" in second.errors)
    workers = fleet.scheduler.book.fleet.workers
    while workers["n0"].incarnation != second.engine.incarnation:
        workers["n0"].heard_at_s -= fleet.scheduler.book.fleet.params.dead_s
        await asyncio.sleep(0.001)
    await until(lambda: "node_id" in first.errors and fleet.devices[0].resident_pages() == 0)
    await until(lambda: fleet.devices[1].resident_pages() > 0)
    assert "node_id" not in second.errors
