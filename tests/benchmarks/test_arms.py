"""A benchmark that waits for a program ends, and says for whom it waited."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gateway import check_answers, rose_arms
from benchmarks.lib import arms
from benchmarks.lib.arms import Arm, Stuck, closed_loop, run_load
from benchmarks.lib.wire import answer, connect, request

ASK = request("/", b"{}")


class OneAnswer(asyncio.Protocol):
    """Answers the first request and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(answer(b"{}"))
        self._transport.close()


@pytest.fixture
def arm() -> Iterator[Arm]:
    made = Arm("upstream", [sys.executable, "-m", "benchmarks.scheduling.gateway_fakes", "upstream", "2"])
    yield made
    made.end()


def test_a_stopped_program_ends_the_load_and_is_named(arm: Arm) -> None:
    os.killpg(arm.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Stuck, match=r"closed loop: nothing came(?s:.*)upstream \(\d+\): stopped"):
            run_load("closed loop", lambda: closed_loop(arm.port, [ASK], 1), silence_s=0.2)
    finally:
        os.killpg(arm.process.pid, signal.SIGCONT)


def test_a_program_that_does_not_start_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "START_S", 0.2)
    with pytest.raises(RuntimeError, match="sleeper did not start"):
        Arm("sleeper", ["sleep", "60"])
    Arm.running.pop().end()


async def test_a_connection_that_was_closed_is_not_waited_on() -> None:
    server = await asyncio.get_running_loop().create_server(OneAnswer, "127.0.0.1", 0)
    client = await connect(server.sockets[0].getsockname()[1])
    assert await client.ask(ASK) == (200, b"{}")

    async def go_on() -> None:
        while True:  # the end of the connection may be seen a moment later
            await client.ask(ASK)

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(go_on(), 10)
    server.close()


def test_cpu_time_counts_threads_that_have_ended() -> None:
    burn = """if True:
        import threading, time
        def work():
            while time.thread_time() < 0.2:
                pass
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print("ready http://x:1", flush=True)
        time.sleep(60)
    """
    made = Arm("burner", [sys.executable, "-c", burn])
    try:
        assert made.cpu_s() >= 0.2
    finally:
        made.end()


def test_another_answer_is_not_counted_as_a_turn() -> None:
    with pytest.raises(RuntimeError, match="answers something else"):
        check_answers("bare", "generate", [b'{"choices":[{"token_ids":[1],"finish_reason":"length"}]}'])


def test_what_runs_compiled_is_said_and_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gateway.ROOT", tmp_path / "built")
    for name, has_build in (("built", True), ("plain", False)):
        (tmp_path / name / "rose").mkdir(parents=True)
        if has_build:
            (tmp_path / name / "rose" / "_compiled").mkdir()
    found = rose_arms({"compiled": tmp_path / "built", "other": tmp_path / "plain"})
    assert found == {
        "rose": (tmp_path / "built", False),
        "rose:compiled": (tmp_path / "built", True),
        "rose:other": (tmp_path / "plain", False),
    }


@pytest.mark.parametrize(("compiled", "said"), [(True, "1"), (False, "0"), (None, "none")])
def test_a_program_is_told_whether_to_run_compiled(
    compiled: bool | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_COMPILED", "none")
    tell = "import os; print('ready http://x:' + str(9), os.environ['ROSE_COMPILED'] + ':1')"
    made = Arm("teller", [sys.executable, "-c", tell], compiled=compiled)
    try:
        assert made.url == f"{said}:1"
    finally:
        made.end()
