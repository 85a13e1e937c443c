"""``rose node run`` as a process: how it ends, and what the next one takes over."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from rose.coserve.cli import EXIT_AGAIN
from rose.coserve.cli import app as cli
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode
from rose.errors import AgentHangs, EngineError
from rose.node_client import ControlClient
from rose.policy.admission import Rule
from rose.policy.baselines import StaticLending
from tests.coserve.conftest import Device, alive, lent, ready, until


async def start_program(device: Device, fake: str = "", **change: Any) -> asyncio.subprocess.Process:
    """``rose node run`` as a process of its own."""
    lines = [f"{key} = {_toml(value)}" for key, value in _flat(device.table(fake, **change))]
    path = device.path / "node.toml"
    path.write_text("\n".join(lines))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rose.cli", "node", "run", "--config", str(path), stderr=asyncio.subprocess.PIPE
    )


def _flat(table: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


async def test_a_killed_agent_takes_its_engine_along_and_the_next_one_starts_at_once(device: Device) -> None:
    production = device.produce()
    process = await start_program(device)
    try:
        await lent(device, 16)
        pid = device.report()["pid"]
        device.report_path.unlink()
    finally:
        process.kill()
        await process.wait()
    await until(lambda: not alive(pid), "the engine died with its agent")
    reader = NodeDir(device.dir).node()
    assert not reader.alive()

    agent = device.agent()
    await ready(device, agent)
    await lent(device, 16)
    assert agent.engine.num_starts == 1
    assert production.overdrawn == 0


async def test_the_next_agent_of_a_killed_one_keeps_what_the_operator_had_set(device: Device) -> None:
    device.produce()
    process = await start_program(device)
    try:
        await lent(device, 16)
        client = ControlClient(device.dir, device.tokens)
        turns = {"serialise": True, "stop_at_layers": True, "first_token_reserve": 0.2}
        wishes = {"rule": "paper", "policy": "static", "max_lend_pages": 7, **turns}
        await asyncio.to_thread(client.set, mode="off", floor_pages=3, slo_ttft_ms=123.0, **wishes)
        client.close()
    finally:
        process.kill()
        await process.wait()

    agent = device.agent()
    await until(lambda: agent.waits_for() == "mode is off")
    assert (agent.mode, agent.floor_pages, agent.slo_ttft_ms) == (Mode.OFF, 3, 123.0)
    assert (agent.rule, agent.serialise, agent.max_lend_pages) == (Rule.PAPER, True, 7)
    assert (agent.stop_at_layers, agent.first_token_reserve) == (True, 0.2)
    assert (agent.policy_name, type(agent.policy)) == ("static", StaticLending)


async def test_after_a_clean_end_the_configuration_counts_again(device: Device) -> None:
    device.produce()
    process = await start_program(device)
    try:
        await lent(device, 16)
        client = ControlClient(device.dir, device.tokens)
        await asyncio.to_thread(client.set, mode="off")
        client.close()
    finally:
        process.terminate()
        await process.communicate()

    agent = device.agent()
    await ready(device, agent)
    assert agent.mode == Mode.ON


async def test_sigterm_ends_the_program_cleanly(device: Device) -> None:
    device.produce()
    process = await start_program(device)
    client = ControlClient(device.dir, device.tokens)
    try:
        await lent(device, 16)
        # The engine takes what it is lent before the agent has asked it whether it is up.
        await until(lambda: client.status()["engine"]["state"] == "ready", "ready by the agent's word")
        pid = device.report()["pid"]
    finally:
        client.close()
        process.terminate()
        _, log = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode == 0, log.decode()
    assert not alive(pid)
    assert not (device.dir / "node.state").exists()
    text = log.decode()
    assert "rollout engine ready" in text
    assert not [token for token in (device.tokens.node, device.tokens.relay) if token in text]


async def test_off_beside_an_agent_that_hangs_says_so_and_who_holds_what_and_is_carried_out_later(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.node_client.ASK_S", 0.2)
    monkeypatch.setattr("rose.node_client.SILENT_S", 0.5)
    device.produce()
    process = await start_program(device)
    try:
        await lent(device, 16)
        process.send_signal(signal.SIGSTOP)
        arguments = ["off", f"--dir={device.dir}", f"--token-file={device.token_file}"]
        done = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
        assert isinstance(done.exception, AgentHangs)
        assert done.exception.exit_code == 3
        assert f"node agent of pid {process.pid} is there and does not answer" in str(done.exception)
        assert "s  the agent does not answer yet" in done.stderr
        assert re.search(r"rollout +holds 16 pages \(32", done.stderr), done.stderr
        assert "carried out once it goes on" in done.stderr
        process.send_signal(signal.SIGCONT)
        await until(lambda: device.resident_pages() == 0, "the order is carried out")
    finally:
        process.kill()
        await process.wait()


async def test_off_beside_a_dead_agent_is_kept_for_the_next_one(device: Device) -> None:
    """The next one took over that the dead one had been on, and lent."""
    device.produce()
    process = await start_program(device)
    await lent(device, 16)
    process.kill()
    await process.communicate()

    arguments = ["off", f"--dir={device.dir}", f"--token-file={device.token_file}"]
    done = await asyncio.to_thread(CliRunner().invoke, cli, arguments)

    assert isinstance(done.exception, EngineError)
    assert done.exception.exit_code == 3
    assert "is dead" in done.stderr
    assert "started within 10 minutes, it begins in mode off" in done.stderr
    agent = device.agent()
    await until(lambda: agent.waits_for() == "mode is off")
    assert agent.mode == Mode.OFF


async def test_off_without_an_agent_says_what_is_held(device: Device) -> None:
    device.produce()
    arguments = ["off", f"--dir={device.dir}", f"--token-file={device.token_file}"]
    done = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert "no node agent answers" in str(done.exception)
    assert re.search(r"serving +has 20 of its 20 pages\nrollout +is not there\n", done.stderr), done.stderr
    shown = await asyncio.to_thread(CliRunner().invoke, cli, ["status", *arguments[1:]])
    assert isinstance(shown.exception, EngineError)
    assert shown.exception.exit_code == 3
    assert re.search(r"serving +has 20 of its 20 pages\nrollout +is not there\n", shown.stderr), shown.stderr


async def test_its_exit_code_tells_wrong_settings_from_what_may_pass(device: Device) -> None:
    device.produce()
    (device.path / "file").touch()
    for change, code in ((("nodeid", "x"), 2), (("dir", str(device.path / "file" / "n")), EXIT_AGAIN)):
        process = await start_program(device, **dict([change]))
        _, log = await asyncio.wait_for(process.communicate(), 60.0)
        assert process.returncode == code, log.decode()
