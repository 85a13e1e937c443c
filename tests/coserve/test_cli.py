"""``rose node`` against a running agent."""

from __future__ import annotations

import asyncio

import pytest
from typer.testing import CliRunner, Result

from rose.coserve.cli import app
from tests.coserve.conftest import Device


async def turned_on(device: Device, wait_s: float) -> Result:
    arguments = ["on", f"--dir={device.dir}", f"--token-file={device.token_file}", f"--wait={wait_s}"]
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


async def test_who_waits_sees_the_engine_come_and_then_how_it_stands(device: Device) -> None:
    device.produce()
    device.agent(mode="observe")

    done = await turned_on(device, 60.0)

    assert done.exit_code == 0, done.output
    assert "engine down" in done.stderr or "engine starting" in done.stderr
    assert "engine    ready" in done.stdout


@pytest.mark.parametrize("wait_s", [0.001, 60.0])
async def test_an_engine_that_does_not_come_is_a_failure_with_the_reason(
    device: Device, wait_s: float
) -> None:
    """Before the time is over, and when it has been given up."""
    device.produce()
    device.agent("die", mode="observe", engine={"max_restarts": 1})

    done = await turned_on(device, wait_s)

    assert done.exit_code == 1, done.output
    assert "engine    ready" not in done.stdout
