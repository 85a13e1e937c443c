"""The sender against a small streaming server: what it sends, when, and what it writes down."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rose.demo.traffic import LoadGenerator, PhaseFile, TrafficPlan, load_plan, prompt_tokens, write_phase
from rose.errors import ConfigError

Plan = Callable[..., TrafficPlan]


class Production:
    """A streaming completions endpoint; ``misbehave`` is asked what to do with each request."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.misbehave: Callable[[int, web.Request], Awaitable[web.StreamResponse | None]] | None = None
        self.url = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.misbehave and (answer := await self.misbehave(len(self.bodies) - 1, request)):
            return answer
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            await asyncio.sleep(0)
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return response


@pytest.fixture
async def production() -> AsyncIterator[Production]:
    server = Production()
    app = web.Application()
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
def plan(production: Production, tmp_path: Path) -> Plan:
    def make(**changes: Any) -> TrafficPlan:
        values: dict[str, Any] = {
            "url": production.url,
            "model": "m",
            "period_s": 0.2,
            "arrivals": [(0.0, 5, 3), (0.05, 7, 2)],
            "seed": 1,
            "token_id_low": 10,
            "token_id_high": 90,
            "phase_file": str(tmp_path / "phase.json"),
            "out_file": str(tmp_path / "records.jsonl"),
            "request_timeout_s": 60.0,
        }
        return TrafficPlan(**{**values, **changes})

    return make


async def run_cycles(plan: TrafficPlan, num_requests: int) -> list[dict[str, Any]]:
    """Run a sender until it has written ``num_requests`` request records."""
    done = asyncio.Event()
    lines: list[dict[str, Any]] = []

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            lines.append(json.loads(text))
            if sum(line["type"] == "request" for line in lines) >= num_requests:
                done.set()
            return len(text)

    sender = LoadGenerator(plan, Out())
    running = asyncio.create_task(sender.run())
    await asyncio.wait_for(done.wait(), 60)
    sender.stop()
    await asyncio.wait_for(running, 60)
    return lines


def requests(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As they were sent; written down they are as they end."""
    found = [line for line in lines if line["type"] == "request"]
    return sorted(found, key=lambda line: (line["cycle"], line["index"]))


async def test_a_record_says_what_was_sent_and_received(production: Production, plan: Plan) -> None:
    first, second = requests(await run_cycles(plan(), 2))[:2]

    assert (first["index"], first["prompt_tokens"], first["num_tokens"]) == (0, 5, 3)
    assert (second["index"], second["prompt_tokens"], second["num_tokens"]) == (1, 7, 2)
    assert first["error"] is None
    assert len(first["itl_s"]) == 2
    assert 0 < first["ttft_s"] <= first["end_s"]
    body = next(body for body in production.bodies if len(body["prompt"]) == 5)
    assert all(10 <= token < 90 for token in body["prompt"])
    assert body["ignore_eos"] is True


async def test_each_request_asks_for_its_own_model(production: Production, plan: Plan) -> None:
    await run_cycles(plan(models=["m", "adapter"]), 2)

    assert {len(body["prompt"]): body["model"] for body in production.bodies} == {5: "m", 7: "adapter"}


async def test_first_token_counts_from_the_schedule_not_from_the_sending(
    production: Production, plan: Plan
) -> None:
    """Hold the event loop over a scheduled moment: the delay is the request's."""

    async def block(index: int, request: web.Request) -> None:
        if index == 0:
            import time

            time.sleep(0.6)  # noqa: ASYNC251 - a stuck sender is the point

    production.misbehave = block

    changed = plan(arrivals=[(0.0, 5, 3), (0.4, 7, 2)], period_s=0.5)
    second = next(r for r in requests(await run_cycles(changed, 2)) if r["index"] == 1)

    assert second["late_s"] > 0.05
    assert second["ttft_s"] > second["late_s"]


async def test_open_loop_sends_on_while_earlier_requests_hang(production: Production, plan: Plan) -> None:
    release = asyncio.Event()

    async def hang(index: int, request: web.Request) -> None:
        if index == 0:
            await release.wait()
        else:
            release.set()  # the second request is what frees the first

    production.misbehave = hang

    assert all(r["error"] is None for r in requests(await run_cycles(plan(), 2)))


async def test_cycles_repeat_sizes_but_never_prompts(production: Production, plan: Plan) -> None:
    lines = await run_cycles(plan(), 4)

    assert [r["prompt_tokens"] for r in requests(lines)[:4]] == [5, 7, 5, 7]
    prompts = [tuple(body["prompt"]) for body in production.bodies[:4]]
    assert len(set(prompts)) == 4


def test_prompts_are_a_function_of_seed_cycle_and_index(tmp_path: Path) -> None:
    plan = TrafficPlan(
        url="http://x",
        model="m",
        period_s=1,
        arrivals=[(0, 1, 1)],
        seed=1,
        token_id_low=0,
        token_id_high=1000,
        phase_file="p",
        out_file="o",
    )
    assert prompt_tokens(plan, 2, 3, 50) == prompt_tokens(plan, 2, 3, 50)
    assert prompt_tokens(plan, 2, 3, 50) != prompt_tokens(plan, 2, 4, 50)


def waits_once(monkeypatch: pytest.MonkeyPatch, moment: int, happened: asyncio.Event) -> None:
    """However slow the machine, the sender has not come to that moment of its plan before ``happened``."""
    sleep, num_moments = LoadGenerator._sleep_until, 0

    async def sleep_until(sender: LoadGenerator, at_s: float) -> bool:
        nonlocal num_moments
        num_moments += 1
        if num_moments == moment:
            await happened.wait()
        return await sleep(sender, at_s)

    monkeypatch.setattr(LoadGenerator, "_sleep_until", sleep_until)


async def test_phase_in_force_at_the_cycles_start_labels_all_of_it(
    production: Production, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "phase.json", asyncio.Event()
    write_phase(path, "alone_1")

    async def switch(index: int, request: web.Request) -> None:
        if index == 0:
            write_phase(path, "alone_2")
            written.set()

    production.misbehave = switch
    waits_once(monkeypatch, 3, written)  # after two requests, the end of the cycle

    assert [r["phase"] for r in requests(await run_cycles(plan(), 4))[:4]] == [
        "alone_1",
        "alone_1",
        "alone_2",
        "alone_2",
    ]


async def test_restart_begins_a_new_cycle_at_once(
    production: Production, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "phase.json", asyncio.Event()

    async def switch(index: int, request: web.Request) -> None:
        if index == 0:
            write_phase(path, "shared", restart=True)
            written.set()

    production.misbehave = switch
    waits_once(monkeypatch, 2, written)

    found = requests(await run_cycles(plan(), 2))

    assert [(r["phase"], r["index"]) for r in found[:2]] == [("startup", 0), ("shared", 0)]


def test_torn_phase_file_keeps_the_last_phase(tmp_path: Path) -> None:
    path = tmp_path / "phase.json"
    write_phase(path, "alone_1")
    phases = PhaseFile(path)
    assert phases.current() == ("alone_1", False)

    path.write_text('{"phase": ')
    assert phases.current() == ("alone_1", False)
    path.unlink()
    assert phases.current() == ("alone_1", False)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (web.json_response({"error": "no"}, status=503), "HTTP 503"),
        (web.Response(text="data: {bad\n\n"), "JSONDecodeError"),
        (web.Response(text='data: {"error": {"message": "boom"}}\n\n'), "boom"),
        (web.Response(text='data: {"choices": [{}]}\n\n'), "ended early"),
        (web.Response(text='data: {"choices": [{}]}\n\ndata: [DONE]\n\n'), "0 tokens, asked for 3"),
        (web.Response(text="data: 7\n\n"), "not a stream of completions"),
        (web.Response(text='data: {"usage": {}, "choices": [{}], "usage": {"x": 1}}\n\n'), "not a stream"),
    ],
    ids=["status", "garbage", "error-event", "cut", "too-few", "number", "usage"],
)
async def test_every_kind_of_failure_is_a_record(
    production: Production, plan: Plan, answer: web.Response, says: str
) -> None:
    async def fail(index: int, request: web.Request) -> web.StreamResponse | None:
        return answer if index == 0 else None

    production.misbehave = fail

    first, second = requests(await run_cycles(plan(), 2))[:2]

    assert says in first["error"]
    assert second["error"] is None  # the sender went on


async def test_a_dead_endpoint_is_a_record_too(plan: Plan) -> None:
    found = requests(await run_cycles(plan(url="http://127.0.0.1:9"), 2))

    assert all("ClientConnectorError" in r["error"] for r in found[:2])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"arrivals": []}, "arrivals"),
        ({"arrivals": [[0.1, 1, 1], [0.0, 1, 1]]}, "arrivals"),
        ({"arrivals": [[0.0, 0, 1]]}, "arrivals"),
        ({"token_id_high": 10}, "token_id_high"),
        ({"models": ["m"]}, "models"),
        ({"burstiness": 3}, "burstiness"),
    ],
)
def test_a_wrong_plan_names_the_field(plan: Plan, tmp_path: Path, change: dict[str, Any], field: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**plan().model_dump(), **change}))
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    assert caught.value.field == field


async def test_the_process_ends_cleanly_on_sigterm(
    production: Production, plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan().model_dump_json())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rose.demo.traffic", str(path), stderr=subprocess.PIPE
    )
    records = tmp_path / "records.jsonl"
    async with asyncio.timeout(90):
        while not records.exists() or records.read_text().count('"request"') < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert process.pid
    os.kill(process.pid, signal.SIGTERM)

    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert all(json.loads(line) for line in records.read_text().splitlines())


async def test_an_idle_connection_is_dropped_before_the_server_drops_it(
    production: Production, plan: Plan
) -> None:
    """vLLM's server closes after 5 s; a request on a connection that is being closed would be lost."""
    peers: list[Any] = []

    async def remember(index: int, request: web.Request) -> None:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))

    production.misbehave = remember
    await run_cycles(plan(arrivals=[(0.0, 1, 1), (2.5, 1, 1)], period_s=2.6), 2)

    assert peers[0] != peers[1]
