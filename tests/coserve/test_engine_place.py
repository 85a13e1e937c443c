"""Another program listens where the rollout engine should: it gets no token, and is not taken for the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rose.errors import EngineError
from tests.coserve.conftest import Device, ready, until

pytestmark = pytest.mark.timeout(300)


class Stranger(ThreadingHTTPServer):
    """Answers everything as a well engine would, and notes what it is sent."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.asked: list[str] = []
        self.tokens: list[str] = []
        super().__init__(("127.0.0.1", port), _Answers)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Answers(BaseHTTPRequestHandler):
    server: Stranger

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.tokens += self.headers.get_all("Authorization", [])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def strangers() -> Iterator[list[Stranger]]:
    found: list[Stranger] = []
    yield found
    for one in found:
        one.shutdown()
        one.server_close()


async def test_a_stranger_on_the_engines_port_gets_no_token_and_is_not_ready(
    device: Device, strangers: list[Stranger]
) -> None:
    """It bound the port between the engine's own bind and its listen."""
    device.produce()
    agent = device.agent("mute", engine={"restart_pause_s": 3600.0})
    await until(lambda: device.report_path.exists(), "the engine runs")
    strangers.append(stranger := Stranger(agent.config.engine.port))
    await until(lambda: "is not the rollout engine's" in agent.engine.error, "it is refused")
    assert stranger.asked
    assert stranger.tokens == []
    assert agent.engine.state != "ready"


async def test_who_takes_the_port_of_an_engine_that_has_left_it_gets_no_token(
    device: Device, strangers: list[Stranger]
) -> None:
    device.produce()
    agent = device.agent("leaves", engine={"max_restarts": 1})
    await ready(device, agent)
    (device.path / "leave").touch()

    def taken() -> bool:
        try:
            strangers.append(Stranger(agent.config.engine.port))
        except OSError:
            return False
        return True

    await until(taken, "the port is free")
    with pytest.raises(EngineError, match="is not the rollout engine's"):
        await agent.engine.refresh_status()
    assert strangers[0].tokens == []
