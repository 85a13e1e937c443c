"""The operator's socket: nobody else's from its first moment, there again when its name was lost, in nobody's way."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rose.auth import Tokens, bearer
from rose.coserve import cli, control
from rose.coserve.control import ControlServer
from rose.errors import ConfigError, EngineError
from rose.node_client import ControlClient


class Agent:
    """Boundary: of the agent a status alone."""

    def status(self) -> dict[str, Any]:
        return {"mode": "on"}


TOKENS = Tokens.generate()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ControlServer]:
    (tmp_path / "n").mkdir(mode=0o700)
    server = ControlServer(Agent(), tmp_path / "n" / "agent.sock", TOKENS)  # type: ignore[arg-type]
    yield server
    await server.stop()


async def answers(path: Path, **request: Any) -> int:
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, headers=bearer(TOKENS.node)) as client:
        return (await client.request(**{"method": "GET", "url": "http://node/status", **request})).status_code


async def until(condition: Any) -> None:
    """Of a file there is no event to wait for."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_an_agent_of_another_version_is_named_and_not_a_traceback(
    server: ControlServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await server.start()
    status = await asyncio.to_thread(ControlClient(tmp_path / "n", TOKENS).status)

    with pytest.raises(EngineError, match=r"answer has no 'lent_s'.*restart the agent"):
        cli._show(status, as_json=False)
    cli._show(status, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"mode": "on"}


async def test_the_socket_is_ours_alone_and_no_file_made_meanwhile_is_narrowed(
    server: ControlServer, tmp_path: Path
) -> None:
    path, before = tmp_path / "n" / "agent.sock", os.umask(0o022)
    try:
        started = asyncio.create_task(server.start())
        modes: set[int] = set()
        while not started.done():
            await asyncio.sleep(0)
            (tmp_path / "x").write_bytes(b"")
            modes.add(stat.S_IMODE((tmp_path / "x").stat().st_mode))
            (tmp_path / "x").unlink()
        await started
    finally:
        os.umask(before)
    assert modes == {0o644}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await answers(path) == 200


async def test_a_lost_socket_is_made_again_once_its_directory_is_private(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "LOOK_EVERY_S", 0.005)
    path = tmp_path / "n" / "agent.sock"
    await server.start()
    keeps = asyncio.create_task(server.keep())
    try:
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        path.parent.chmod(0o755)
        await until(lambda: keeps.done() or "open to others" in caplog.text)
        assert not keeps.done()
        path.mkdir()  # no socket, and not ours to remove
        path.parent.chmod(0o700)
        await until(lambda: keeps.done() or "cannot be removed" in caplog.text)
        assert not keeps.done()
        path.rmdir()
        await until(path.is_socket)
        await until(lambda: "it is there again" in caplog.text)
        assert await answers(path) == 200
    finally:
        keeps.cancel()


async def test_a_directory_in_its_place_is_an_error_that_names_it(
    server: ControlServer, tmp_path: Path
) -> None:
    (tmp_path / "n" / "agent.sock").mkdir()
    with pytest.raises(ConfigError, match=r"agent\.sock cannot be removed"):
        await server.start()


async def test_a_body_nested_too_deep_is_refused(server: ControlServer, tmp_path: Path) -> None:
    await server.start()
    path = tmp_path / "n" / "agent.sock"
    assert await answers(path, method="POST", url="http://node/set", content=b"[" * 4000) == 400
