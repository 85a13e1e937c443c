"""What an operator can do with a running node agent, through its socket and by ``rose node``."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import stat
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from rose.coserve.cli import app as cli
from rose.coserve.records import Mode, Phase
from rose.errors import EngineError, LedgerError, RequestError
from rose.policy.compat import Support
from tests.coserve.conftest import Device, alive, control, stop_sentinel, turned_on, until


async def test_off_does_not_wait_for_an_engine_that_hangs(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.produce()
    agent = device.agent(lending={"reclaim_deadline_s": 0.2})
    await until(lambda: device.resident_pages() == 16)
    await until(lambda: agent.engine.state == "ready")
    ask = agent.engine.refresh_status

    async def without_end(timeout_s: float = 600.0) -> dict[str, Any]:
        return await ask(timeout_s)

    monkeypatch.setattr(agent.engine, "refresh_status", without_end)
    os.kill(device.report()["pid"], signal.SIGSTOP)
    async with control(device) as client:
        off = asyncio.create_task(asyncio.to_thread(client.off, 60.0))
        await until(lambda: agent.mode == Mode.OFF, "it is off while the engine says nothing")
        assert (await off)["given_back"]


@pytest.mark.parametrize("lose", ["the socket", "the directory"])
async def test_operators_find_an_agent_again_whose_socket_was_deleted(device: Device, lose: str) -> None:
    device.produce()
    agent = device.agent()
    await until(lambda: agent.engine.state == "ready")
    path = device.dir / "agent.sock"
    path.unlink() if lose == "the socket" else shutil.rmtree(device.dir)
    await until(path.exists, "the agent listens again")
    async with control(device) as client:
        assert (await asyncio.to_thread(client.off, 30.0))["given_back"]
    assert path.stat().st_mode & 0o077 == 0


async def test_off_proves_that_all_memory_is_back_and_on_lends_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.coserve.control.BEFORE_S", 10.0)  # a busy machine's engine answers too
    production = device.produce()
    agent = device.agent()
    await until(lambda: agent.engine.state == "ready" and device.resident_pages() == 16)
    pid = device.report()["pid"]
    async with control(device) as client:
        answer = await asyncio.to_thread(client.off, 60.0)
        assert answer["given_back"]
        before, after = answer["before"], answer["after"]
        assert (before["reserved_pages"], before["resident_pages"]) == (16, 16)
        assert before["engine_kv_resident_bytes"] == 32 << 20
        assert (after["reserved_pages"], after["resident_pages"]) == (0, 0)
        assert after["engine_kv_resident_bytes"] == 0
        # The process is 32 MiB smaller, by the kernel's count.
        assert before["engine_rss_bytes"] - after["engine_rss_bytes"] > 28 << 20
        assert not after["gate_open"]
        steps = after["steps"]
        assert (await asyncio.to_thread(client.status))["rollout"]["steps"] == steps
        assert alive(pid)
        await asyncio.to_thread(client.set, mode="on")
    await until(lambda: device.resident_pages() == 16)
    assert agent.engine.num_starts == 1
    assert production.overdrawn == 0


async def test_off_needs_a_directory_that_nobody_else_can_write_and_no_more(device: Device) -> None:
    device.produce()
    agent = device.agent()
    await until(lambda: agent.engine.state == "ready")
    device.dir.chmod(0o755)
    async with control(device) as client:
        assert (await asyncio.to_thread(client.off, 30.0))["given_back"]
    device.dir.chmod(0o775)
    async with control(device) as client:  # who listens there may be another
        with pytest.raises(LedgerError, match=rf"chmod 700 {device.dir}"):
            await asyncio.to_thread(client.off, 30.0)
    device.dir.chmod(0o700)


async def test_off_kills_an_engine_that_gives_nothing_back(device: Device) -> None:
    device.produce()
    agent = device.agent("stubborn", lending={"reclaim_deadline_s": 0.2})
    await until(lambda: device.resident_pages() == 16)
    pid = device.report()["pid"]
    stop_sentinel(agent)
    async with control(device) as client:
        answer = await asyncio.to_thread(client.off, 60.0)
    assert answer["given_back"]
    assert not alive(pid)
    assert agent.engine.num_kills == 1


async def test_off_can_end_the_engines_process_and_on_starts_it_again(device: Device) -> None:
    device.produce()
    agent = device.agent()
    await until(lambda: device.resident_pages() == 16)
    pid = device.report()["pid"]
    async with control(device) as client:
        answer = await asyncio.to_thread(client.off, 60.0, False)
        assert answer["given_back"]
        assert answer["after"]["engine_rss_bytes"] == 0
        assert not alive(pid)
        await asyncio.to_thread(client.set, mode="on", engine=True)
    await until(lambda: agent.engine.num_starts == 2 and device.resident_pages() == 16)


async def test_the_command_line_shows_sets_and_switches(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.produce()
    device.agent()
    await until(lambda: device.resident_pages() == 16)
    monkeypatch.setenv("ROSE_DIR", str(device.dir))
    monkeypatch.setenv("ROSE_TOKEN_FILE", str(device.token_file))

    async def rose_node(*args: str) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, cli, list(args), catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    text = await rose_node("status")
    assert "node      n0 (harvested), mode on" in text
    assert "16 reserved, 16 resident" in text
    assert re.search(r"device    host memory: .*iB free, reserve 512\.0 MiB, 0 breaches", text)
    await rose_node("set", "--floor-pages", "15")
    await until(lambda: device.resident_pages() == 3)
    status = json.loads(await rose_node("status", "--json"))
    assert (status["floor_pages"], status["lending"]["cap_pages"]) == (15, 3)
    assert re.search(r"all memory is back; the engine's process keeps [0-9.]+ .iB", await rose_node("off"))
    assert "mode on" in await rose_node("on")


async def test_control_asks_for_a_token_and_names_bad_fields(device: Device) -> None:
    device.produce()
    agent = device.agent()
    await until(lambda: (device.dir / "agent.sock").exists())
    assert stat.S_IMODE((device.dir / "agent.sock").stat().st_mode) == 0o600
    transport = httpx.AsyncHTTPTransport(uds=str(device.dir / "agent.sock"))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        for token in ("", "Basic abc", f"Bearer {device.tokens.agent}"):
            answer = await client.get("/status", headers={"Authorization": token})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "unauthorized"
        good = {"Authorization": f"Bearer {device.tokens.node}"}
        for body, status, field in (
            (b"{", 400, "body"),
            (b"[]", 400, "body"),
            (b"{" + b" " * 5000 + b"}", 413, "body"),
            (b'{"mod": "on"}', 400, "mod"),
            (b'{"mode": "sideways"}', 400, "mode"),
            (b'{"floor_pages": -1}', 400, "floor_pages"),
            (b'{"slo_ttft_ms": 0}', 400, "slo_ttft_ms"),
        ):
            answer = await client.post("/set", content=body, headers=good)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)
    assert agent.floor_pages == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_promise_that_is_no_number_is_refused_by_its_name(device: Device, value: float) -> None:
    async with control(device) as client:
        with pytest.raises(RequestError, match=r"slo_tpot_ms: must be a number, got (nan|inf)"):
            await asyncio.to_thread(lambda: client.set(slo_tpot_ms=value))


async def test_without_an_agent_the_client_says_so(device: Device) -> None:
    async with control(device) as client:
        with pytest.raises(EngineError, match="no node agent answers"):
            client.status()


async def test_a_dedicated_device_refuses_settings_of_serving(device: Device) -> None:
    device.agent(serving=None)
    await until(lambda: (device.dir / "agent.sock").exists())
    async with control(device) as client:
        with pytest.raises(RequestError, match="serving: this device has no serving engine"):
            await asyncio.to_thread(client.set, floor_pages=1)


async def test_who_waits_sees_the_engine_come_and_then_how_it_stands(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    production = device.produce()
    production.phase = Phase.STARTING
    agent = device.agent(mode="observe")
    status, asked = agent.status, []

    def counted() -> dict[str, Any]:
        asked.append(status())
        return asked[-1]

    monkeypatch.setattr(agent, "status", counted)

    waiting = asyncio.create_task(turned_on(device, 100.0))
    await until(lambda: len(asked) >= 2, "it was switched on, and looked at after that")
    production.phase = Phase.READY
    done = await waiting

    assert done.exit_code == 0, done.output
    assert "engine down, waits: serving is not ready" in done.stderr
    assert "engine    ready" in done.stdout


async def test_who_waits_for_a_start_without_cores_is_told_what_helps(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.coserve.cli._SLOW_START_S", 0.0)
    device.produce()
    device.agent("mute", mode="observe", engine={"sched": "idle"})

    done = await turned_on(device, 2.0)

    assert done.exit_code == 1, done.output
    assert (
        "engine starting; in the idle class a start beside busy cores takes minutes: `rose node set --sched normal`"
        in done.stderr
    )


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


async def test_production_that_starts_has_no_verdict_before_it_says_one(device: Device) -> None:
    """Its first word is a phase alone, and a row of zeros is the one of what the table does not know."""
    production = device.produce()
    production.phase, production.support, production.total_pages = Phase.STARTING, Support.REFUSED, 0
    production.publish()
    agent = device.agent(mode="observe")
    await until(lambda: agent.device.lease is not None, "the agent has looked")
    arguments = ["status", f"--dir={device.dir}", f"--token-file={device.token_file}"]
    shown = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    serving = json.loads((await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "--json"])).stdout)[
        "serving"
    ]
    assert "serving   starting, no verdict yet, 0 used" in shown.stdout, shown.output
    assert (serving["phase"], serving["support"], serving["because"]) == ("starting", "unknown", "")

    production.phase = Phase.OFF
    production.publish()
    await until(lambda: agent.status()["serving"]["support"] == "refused", "the verdict is shown")
    assert agent.status()["serving"]["because"] == "anything that is not in this table"


async def test_the_status_says_that_production_has_switched_the_plugin_off(device: Device) -> None:
    production = device.produce()
    production.phase, production.errors = Phase.OFF, 1
    production.publish()
    agent = device.agent(mode="observe")
    await until(lambda: agent.device.lease is not None, "the agent has looked")
    arguments = ["status", f"--dir={device.dir}", f"--token-file={device.token_file}"]
    shown = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert "ROSE IS OFF IN IT until its restart, after an error (its log)" in shown.stdout, shown.output


async def test_what_was_set_is_shown_and_logged(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """``set --rule free`` answered with a status in which nothing of it stood."""
    device.produce()
    agent = device.agent(mode="observe")
    await until(lambda: agent.device.lease is not None, "the agent has looked")
    where = [f"--dir={device.dir}", f"--token-file={device.token_file}"]
    caplog.set_level("INFO", "rose.node")
    changes = ["--rule=free", "--policy=static", "--max-lend-pages=7", "--slo-ttft-ms=123", "--serialise"]
    shown = await asyncio.to_thread(CliRunner().invoke, cli, ["set", *changes, *where])
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("set  ")]
    assert "policy static, rule free, serialised (ROLLOUT STEPS DO NOT WAIT FOR PRODUCTION)" in line
    assert "at most 7 pages lent" in line
    assert "promised 123 ms to a first token" in line
    assert "set max_lend_pages 7, slo_ttft_ms 123.0, policy static, rule free, serialise True" in caplog.text

    await asyncio.to_thread(
        CliRunner().invoke, cli, ["set", "--rule=slack", "--first-token-reserve=0.2", *where]
    )
    shown = await asyncio.to_thread(CliRunner().invoke, cli, ["status", *where])
    assert "rule slack, serialised, leaves 20% of the first-token limit, at most 7 pages lent" in shown.stdout
