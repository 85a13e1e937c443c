"""What an agent outlasts: a job of it that breaks, an engine that answers nonsense, a worker's figure below nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rose.auth import Tokens
from rose.config import validate
from rose.coserve import agent as agents
from rose.coserve import engine as engines
from rose.coserve import engine_keeper
from rose.coserve.agent import NodeAgent
from rose.coserve.engine import RolloutEngine
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import RankState
from rose.errors import ConfigError, EngineError, RequestError
from rose.lineage import Lineage, WeightVersion
from rose.wire.http_client import open_client


def settings(path: Path, port: int = 8100, **more: Any) -> NodeConfig:
    engine = {"model": "policy", "max_model_len": 64, "port": port}
    table = {"node_id": "n0", "dir": str(path / "n"), "serving": {}, "engine": engine, **more}
    return validate(NodeConfig, table)


async def test_a_job_that_breaks_begins_anew_and_one_that_is_refused_ends_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agents, "AGAIN_S", 0.0)
    agent = NodeAgent(settings(tmp_path), Tokens.generate())
    errors: list[Exception] = [RecursionError("deep"), RecursionError("deep"), RequestError("no", field="x")]

    async def job() -> None:
        raise errors.pop(0)

    with pytest.raises(RequestError):
        await agent._outlast(job)
    assert not errors
    assert caplog.text.count("begins anew") == 1


async def test_an_engine_that_is_slow_to_die_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_keeper, "AGAIN_S", 0.0)
    agent = NodeAgent(settings(tmp_path), Tokens.generate())
    left, said, gone = [EngineError("processes [7] do not end")], list[str](), asyncio.Event()

    async def start(size: object) -> None:
        raise EngineError("not ready after 900 s")

    async def stop(grace_s: float) -> None:
        if left:
            raise left.pop()
        said.append(agent.engine.error)
        agent.want_engine = False
        gone.set()

    monkeypatch.setattr(agent, "waits_for", lambda: None if agent.want_engine else "a test")
    monkeypatch.setattr(agent, "engine_size", lambda: None)
    monkeypatch.setattr(agent.engine, "start", start)
    monkeypatch.setattr(agent.engine, "stop", stop)
    keeping = asyncio.create_task(agent._keeper.keep())
    waiting = asyncio.create_task(gone.wait())
    await asyncio.wait({keeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert not keeping.done()
    keeping.cancel()
    assert "do not end" in said[0]


async def test_a_kill_that_takes_two_tries_is_one_kill_with_one_exit(tmp_path: Path) -> None:
    engine = RolloutEngine(settings(tmp_path))
    engine._child = child = SlowToDie()  # type: ignore[assignment]
    with pytest.raises(EngineError, match="do not end"):
        await engine.kill("a test")
    assert not engine.exits_s
    await engine.kill("a test again")
    assert child.num_kills == 2
    assert (engine.num_kills, len(engine.exits_s)) == (1, 1)


async def test_who_stops_an_engine_that_is_being_stopped_waits_for_it(tmp_path: Path) -> None:
    engine = RolloutEngine(settings(tmp_path))
    engine._child = child = SlowToStop()  # type: ignore[assignment]
    await asyncio.gather(engine.stop(), engine.stop(grace_s=0.0))
    assert (child.num_stops, child.most_at_once) == (2, 1)


async def test_a_stop_that_waited_for_another_leaves_the_engine_that_was_started_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RolloutEngine(settings(tmp_path))
    engine._child = SlowToStop()  # type: ignore[assignment]
    child, started = SlowToStop(), asyncio.Event()

    async def start_up(*_: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    child.wait_ready_async = start_up  # type: ignore[attr-defined]
    monkeypatch.setattr(engine, "_require", lambda: None)
    monkeypatch.setattr(engine, "_start_sentinel", lambda child: None)
    monkeypatch.setattr(engines.Child, "start", lambda spec: child)
    first, second = (asyncio.create_task(engine.stop()) for _ in range(2))
    await first
    starting = asyncio.create_task(engine.start())
    await asyncio.gather(second, started.wait())
    assert (child.num_stops, engine.state) == (0, "starting")
    starting.cancel()


async def test_an_engine_that_is_no_longer_wanted_runs_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An agent that leaves wants no engine first, has its pages back next, and stops it last: its requests end with their tokens.
    monkeypatch.setattr(engine_keeper, "FITS_EVERY_S", 0.0)
    agent = NodeAgent(settings(tmp_path), Tokens.generate())
    engine, exited, looks = agent.engine, asyncio.Event(), asyncio.Semaphore(0)
    stopped = list[int]()

    async def stop() -> None:
        stopped.append(1)
        exited.set()

    def outgrown() -> None:
        looks.release()

    monkeypatch.setattr(engine, "wait_exit", exited.wait)
    monkeypatch.setattr(engine, "stop", stop)
    monkeypatch.setattr(agent, "outgrown", outgrown)
    agent.want_engine = False
    keeping = asyncio.create_task(agent._keeper._while_it_fits())
    waiting = asyncio.gather(*(looks.acquire() for _ in range(3)))
    await asyncio.wait({keeping, asyncio.ensure_future(waiting)}, return_when=asyncio.FIRST_COMPLETED)
    assert not stopped
    exited.set()
    await keeping


class SlowToStop:
    """A process tree that takes some turns of the loop to end."""

    num_stops = num_at_once = most_at_once = 0

    def returncode(self) -> int:
        return 0

    async def terminate_async(self, grace_s: float) -> None:
        self.num_stops += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        for _ in range(3):
            await asyncio.sleep(0)
        self.num_at_once -= 1


class SlowToDie:
    """A process tree that is there still when the first kill has no more patience."""

    share = None
    num_kills = 0

    def returncode(self) -> None:
        return None

    def lift(self, on: bool) -> bool:
        return False

    def kill(self) -> None:
        self.num_kills += 1
        if self.num_kills == 1:
            raise EngineError("processes [7] do not end")


async def test_a_failure_to_end_what_observe_forbids_is_forgotten_once_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_keeper, "LOOK_EVERY_S", 0.0)
    agent = NodeAgent(settings(tmp_path), Tokens.generate())
    engine, said = agent.engine, list[dict[str, str]]()
    failures, gone = [EngineError("processes [7] do not end")], asyncio.Event()

    async def give_back() -> None:
        said.append(dict(agent.errors))

    async def stop() -> None:
        if failures:
            raise failures.pop()
        monkeypatch.setattr(type(engine), "running", False)
        gone.set()

    monkeypatch.setattr(type(engine), "running", True)
    monkeypatch.setattr(agent._keeper, "_give_back", give_back)
    monkeypatch.setattr(engine, "stop", stop)
    ending = asyncio.create_task(agent._keeper.end_unwanted())
    await gone.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    ending.cancel()
    assert "do not end" in said[1]["engine"]
    assert "engine" not in agent.errors


async def test_an_answer_nested_too_deep_is_no_json_object(tmp_path: Path) -> None:
    async def nested(request: web.Request) -> web.Response:
        return web.Response(body=b"[" * 200_000, content_type="application/json")

    app = web.Application()
    app.router.add_get("/rose/status", nested)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    engine = RolloutEngine(settings(tmp_path, listener.getsockname()[1]))
    engine._client = open_client()
    try:
        with pytest.raises(EngineError, match="without a JSON object"):
            await engine.refresh_status()
    finally:
        await engine._client.aclose()
        await runner.cleanup()


async def test_a_status_asked_for_before_a_commit_does_not_take_its_version_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer may be read behind the commit's: the node would call itself out of date, and send the whole version."""
    engine, old, new = RolloutEngine(settings(tmp_path)), WeightVersion(1, 1), WeightVersion(1, 2)
    engine.lineage, answered = Lineage("r", old), asyncio.Event()

    async def call(*_: Any, **__: Any) -> dict[str, Any]:
        await answered.wait()
        return {"run": "r", "version": str(old)}

    monkeypatch.setattr(engine, "call", call)
    asking = asyncio.create_task(engine.refresh_status())
    await asyncio.sleep(0)
    engine.lineage = Lineage("r", new)
    answered.set()
    await asking
    assert engine.version == str(new)
    await engine.refresh_status()
    assert engine.version == str(old), "asked for after it, it counts"


async def test_who_asks_an_engine_that_is_being_stopped_is_told_that_it_does_not_run(tmp_path: Path) -> None:
    engine = RolloutEngine(settings(tmp_path))
    engine._client = client = open_client()
    closing = client.aclose

    async def slow() -> None:
        await closing()
        await asyncio.sleep(0)

    client.aclose = slow  # type: ignore[method-assign]
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    assert client.is_closed
    with pytest.raises(EngineError, match="is not running"):
        await engine.call("GET", "/rose/status")
    await stopping


def test_a_workers_figure_below_nothing_counts_as_nothing(tmp_path: Path) -> None:
    agent: Any = NodeAgent(settings(tmp_path), Tokens.generate())
    with NodeDir(tmp_path / "n").rank_writer("rollout", 0, 4) as worker:
        worker.write(RankState(resident_pages=-5))
        assert agent.device.rollout_event().reserved_pages == 0
        assert agent.device.held_pages() == 0


@pytest.mark.parametrize(("max_bytes", "logs"), [(4096, True), (0, False)])
def test_the_engines_decision_log_has_the_nodes_name_and_bounds(
    tmp_path: Path, max_bytes: int, logs: bool
) -> None:
    decisions = {"directory": str(tmp_path / "d"), "max_bytes": max_bytes, "max_files": 3}
    env = RolloutEngine(settings(tmp_path, decisions=decisions)).planned(None).env
    assert env["ROSE_DECISIONS"] == (str(tmp_path / "d") if logs else None)
    assert (env["ROSE_DECISIONS_NAME"], env["ROSE_DECISIONS_MAX_FILES"]) == ("n0", "3")
    assert env["ROSE_DECISIONS_MAX_BYTES"] == str(max_bytes)


def test_a_pattern_that_is_not_met_is_shown_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[A-Za-z0-9\]"):
        settings(tmp_path, weights={"relay_url": "http://r:1", "run_id": "a b"})
