"""Spans of turns: by the official SDK, to a collector that speaks OTLP; and nothing at all where none is set."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rose.errors import ConfigError
from rose.scheduler.tracing import Tracing
from rose.testing.fake_engine import Fault
from tests.scheduler.conftest import World, user

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector:
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.status = 200

    async def export(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(status=self.status)


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made.export)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"  # type: ignore[attr-defined]
    yield made
    await runner.cleanup()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


async def test_a_turn_that_moved_is_told_as_spans(world: World, collector: Collector) -> None:
    await world.start(tracing={"otlp_endpoint": collector.url})  # type: ignore[attr-defined]
    for name in ("a", "b"):
        engine = await world.add(name, mean_tokens=10_000)
        engine.faults.append(Fault(kind="reclaim", after=3))
    session = await world.trajectory()
    headers = {"X-Session-ID": session, "traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"messages": [user("secret words")], "max_tokens": 8}
    await world.ok("POST", "/v1/chat/completions", body, headers=headers)
    await world.scheduler.stop(drain_s=1)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    (turn,) = [span for span in collector.spans if span.name == "turn"]
    inner = sorted(
        (span for span in collector.spans if span is not turn), key=lambda span: span.start_time_unix_nano
    )
    names = [span.name for span in inner]
    assert names == ["queue", "engine", "move", "engine", "move", "engine"][: len(names)]
    assert len(names) >= 4
    assert turn.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in inner} == {turn.span_id}
    # Engines carry on below the turn.
    sent = [parent for engine in world.engines.values() for parent in engine.trace_parents]
    assert set(sent) == {f"00-{TRACE}-{turn.span_id.hex()}-01"}
    told = attributes(turn)
    assert (told["rose.trajectory"], told["rose.tokens"], told["rose.outcome"]) == (session, 8, "done")
    assert attributes(inner[2])["rose.reason"] == "reclaim"
    assert attributes(inner[1])["rose.worker"] in ("a", "b")
    ends = [span.end_time_unix_nano for span in inner]
    assert ends == sorted(ends)
    assert not [span for span in collector.spans if "secret" in str(span)]


async def test_a_turn_that_fails_has_its_span_ended(world: World, collector: Collector) -> None:
    await world.start(tracing={"otlp_endpoint": collector.url})  # type: ignore[attr-defined]
    await world.add("a", token_s=10.0)
    headers = {"X-ROSE-Deadline-Ms": "100"}
    body = {"model": "policy", "messages": [user("go")], "max_tokens": 8}
    status, _ = await world.call("POST", "/v1/chat/completions", body, headers=headers)
    assert status == 504
    await world.scheduler.stop(drain_s=1)
    (turn,) = [span for span in collector.spans if span.name == "turn"]
    assert attributes(turn)["rose.reason"] == "deadline"
    assert not turn.parent_span_id


async def test_a_collector_that_refuses_costs_no_turn(world: World, collector: Collector) -> None:
    collector.status = 400
    await world.start(tracing={"otlp_endpoint": collector.url})  # type: ignore[attr-defined]
    await world.add("a")
    for number in (1, 2):
        await world.chat(None, [user("go")], max_tokens=2)
        tracing = world.scheduler.tracing
        assert tracing is not None
        await asyncio.to_thread(tracing._provider.force_flush)
        assert [span.name for span in collector.spans].count("turn") == number


@pytest.mark.parametrize("why", ["draining", "too many turns"])
async def test_a_turn_that_is_refused_has_its_span_ended(
    world: World, collector: Collector, why: str
) -> None:
    await world.start(tracing={"otlp_endpoint": collector.url})  # type: ignore[attr-defined]
    await world.add("a")
    dispatcher, tracing = world.scheduler.dispatcher, world.scheduler.tracing
    assert tracing is not None
    dispatcher.draining = why == "draining"
    dispatcher.max_running = 0
    body = {"model": "policy", "messages": [user("go")], "max_tokens": 2}
    status, answer = await world.call("POST", "/v1/chat/completions", body)
    assert status in (429, 503)
    assert tracing.num_open == 0
    await world.scheduler.stop(drain_s=0)
    (turn,) = [span for span in collector.spans if span.name == "turn"]
    told = attributes(turn)
    assert (told["rose.outcome"], told["rose.reason"]) == ("refused", answer["error"]["code"])


def test_a_collector_that_never_answers_holds_up_no_exit() -> None:
    """The program would not end."""
    program = (
        "import asyncio, threading\n"
        "from opentelemetry.sdk.trace import SpanProcessor\n"
        "from rose.scheduler.tracing import Tracing\n"
        "class Away(SpanProcessor):\n"
        "    def shutdown(self): threading.Event().wait()\n"
        "asyncio.run(Tracing(Away()).stop(0.01))\n"
        "print('ended')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "ended"


async def test_without_an_endpoint_there_is_no_tracing(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    await world.chat(None, [user("go")], max_tokens=2)
    assert world.scheduler.tracing is None
    assert list(engine.trace_parents) == [None]


def test_without_an_endpoint_the_packages_are_not_touched() -> None:
    program = (
        "import sys; import rose.scheduler.app; from rose.scheduler.tracing import Tracing; "
        "assert Tracing.make(None) is None; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_packages_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError) as refused:
        Tracing.make("http://127.0.0.1:4318/v1/traces")
    assert refused.value.field == "tracing.otlp_endpoint"
    assert ".[tracing]" in str(refused.value)
