"""Input that means harm, or was never looked at: answered right, and nothing of it stays in memory."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from hypothesis import HealthCheck, settings

from rose.auth import Tokens, bearer
from rose.scheduler import guard, watch_api
from rose.scheduler.engine import Endpoint, EngineClient, EngineFailure
from rose.scheduler.openapi import ROUTES, describe
from rose.testing.fake_engine import FakeEngine, serve_engine
from tests.scheduler.conftest import World, user

schemathesis = pytest.importorskip("schemathesis")


# --- what the description allows and forbids ---------------------------------------------------------------


class Background:
    """A world on a loop of its own, for clients that block."""

    def __init__(self, folder: Path, tokens: Tokens) -> None:
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self.world = World(folder, tokens)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.clients: dict[str, requests.Session] = {}
        self.thread.start()
        assert self._ready.wait(100)

    def _run(self) -> None:
        import aiohttp

        async def main() -> None:
            self._stop = asyncio.Event()
            async with aiohttp.ClientSession() as session:
                self.world.session = session
                await self.world.start(
                    limits={"max_body_bytes": 256 * 1024, "max_trajectories": 10_000},
                    timeouts={"max_queue_s": 0.2, "max_wait_s": 0.01, "turn_s": 2.0, "drain_s": 0.1},
                )
                await self.world.add("a", mean_tokens=4)
                self._ready.set()
                await self._stop.wait()
                await self.world.close()

        self._loop.run_until_complete(main())

    def client_of(self, path: str) -> requests.Session:
        """On a connection that asks for nothing else, as turns that come the short way need."""
        if path not in self.clients:
            self.clients[path] = requests.Session()
            self.clients[path].trust_env = False  # else it looks for proxies and passwords before each call
        return self.clients[path]

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(100)


@pytest.fixture(scope="module")
def background(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    tokens = Tokens.generate()
    made = Background(tmp_path_factory.mktemp("hostile"), tokens)
    yield made
    made.close()


DESCRIPTION = describe()
checks = pytest.importorskip("schemathesis.specs.openapi.checks")
ENDING = [(method, path) for method, path, *_ in ROUTES if path != "/events"]
"""The events never end."""


TWINS = {(method, path) for method, path in ENDING if path.startswith("/s/{session}/")}
"""Each is another route of a trajectory that its path names."""
FEW_TWINS = {
    ("post", "/s/{session}/v1/chat/completions"),
    ("post", "/s/{session}/generate"),
    ("get", "/s/{session}/v1/models/{model}"),
}
"""One that is answered by the protocols, one by the routes of other engines, one without a body; the others in ``make conformance``."""


def test_a_route_of_a_trajectory_is_described_as_its_twin_is() -> None:
    assert {("post", "/s/{session}/v1/responses"), *FEW_TWINS} <= TWINS
    for method, path in TWINS:
        ours, twin = (DESCRIPTION["paths"][one][method] for one in (path, path.removeprefix("/s/{session}")))
        assert [one["name"] for one in ours["parameters"]][:1] == ["session"]
        assert ours["parameters"][1:] == twin["parameters"]
        for name in ("requestBody", "responses"):
            assert ours.get(name) == twin.get(name), (path, name)


@pytest.fixture(
    params=[
        pytest.param(one, marks=pytest.mark.conformance if one in TWINS - FEW_TWINS else ()) for one in ENDING
    ],
    ids=lambda route: " ".join(route),
)
def route(request: pytest.FixtureRequest) -> Any:
    """The description of one route.  Its cases are made when it is tried: all of them take ten seconds, which each worker would spend before
    its first test."""
    method, path = request.param
    request.node._nodeid = request.node.nodeid  # schemathesis asks for it, and pytest 9.2 has it no more
    paths = {path: {method: DESCRIPTION["paths"][path][method]}}
    return schemathesis.openapi.from_dict({**DESCRIPTION, "paths": paths})


@schemathesis.pytest.from_fixture("route").parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_answers_keep_to_the_description(
    case: Any, background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = background.world.tokens
    headers = {**(case.headers or {}), **bearer(tokens.admin)}
    with caplog.at_level(logging.ERROR):
        client = background.client_of(f"{case.method} {case.path}")
        response = case.call(base_url=background.world.url, headers=headers, timeout=20, session=client)
    assert response.status_code < 500 or response.status_code in (502, 503, 504), response.text
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    case.validate_response(
        response,
        checks=[checks.status_code_conformance, checks.response_schema_conformance],
    )


async def test_every_route_is_described_and_every_description_has_a_route(world: World) -> None:
    await world.start()
    assert world.scheduler._runner is not None
    app = world.scheduler._runner.app
    assert app is not None
    routes = {
        (r.method.lower(), r.resource.canonical)
        for r in app.router.routes()
        if r.resource and r.method != "HEAD"
    }
    assert routes == {(method, path) for method, path, *_ in ROUTES}


async def test_a_role_opens_its_own_routes_only(world: World) -> None:
    await world.start()
    for method, path, roles, *_ in ROUTES:
        for role in ("agent", "environment", "trainer", "node", "relay"):
            if roles and role not in roles:
                place = path.replace("{", "").replace("}", "")
                status, answer = await world.call(method.upper(), place, {}, role=role)
                assert (status, answer["error"]["param"]) == (401, "Authorization"), (method, path, role)


# --- bytes ------------------------------------------------------------------------------------------------


async def raw(world: World, data: bytes, *, until: bytes = b"\r\n\r\n", until_closed: bool = False) -> bytes:
    """Send bytes as they are; what comes back: a head, or all of it until the connection closes."""
    host, port = world.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await writer.drain()
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(60):
            while part := await reader.read(65536):
                parts.append(part)
                if not until_closed and until in b"".join(parts):
                    break
    except TimeoutError:
        raise AssertionError(f"the connection is still open after {parts}") from None
    except ConnectionError:
        pass
    writer.close()
    return b"".join(parts)


def head(world: World, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    first = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {world.tokens.agent}", *lines]
    return ("\r\n".join(first) + "\r\n\r\n").encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [{"role": "user", "content": "' + b"a" * 100,
        b'{"messages": "\xff\xfe"}',
        b'{"messages": ' + b"[" * 200_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'[{"messages": []}]',
        b"null",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 400 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/rose/v1/generate"])
async def test_a_body_that_is_no_request_is_400(world: World, path: str, body: bytes) -> None:
    await world.start()
    await world.add("a")
    async with world.session.post(
        world.url + path, data=body, headers=bearer(world.tokens.agent)
    ) as response:
        answer = await response.json()
        assert response.status == 400, answer
    assert len(answer["error"]["message"]) <= 1000


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/rose/v1/trajectories", {"job": "j", "task": [{"a": 2**70}]}, "task"),
        ("/rose/v1/trajectories", {"job": "j", "sampling": {"top_k": 2**70}}, "sampling"),
        ("/rose/v1/generate", {"token_ids": [5], "sampling_params": {"top_k": 2**70}}, "sampling_params"),
    ],
)
async def test_numbers_that_the_journal_cannot_hold_are_400(
    world: World, path: str, body: dict[str, Any], field: str
) -> None:
    await world.start()
    await world.add("a")
    status, answer = await world.call("POST", path, body)
    assert (status, answer["error"]["param"]) == (400, field), answer


NO_TEXT = b"t\xe2che-1"
"""Latin-1, which is no UTF-8."""


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/rose/v1/trajectories", "Idempotency-Key", b'{"job": "job"}'),
        ("/v1/chat/completions", "Idempotency-Key", b'{"messages": [{"role": "user", "content": "x"}]}'),
        ("/v1/chat/completions", "X-ROSE-Turn", b'{"messages": [{"role": "user", "content": "x"}]}'),
        ("/v1/chat/completions", "X-Session-ID", b'{"messages": [{"role": "user", "content": "x"}]}'),
        ("/v1/chat/completions", "X-SMG-Routing-Key", b'{"messages": [{"role": "user", "content": "x"}]}'),
        ("/rose/v1/generate", "Idempotency-Key", b'{"token_ids": [5]}'),
    ],
)
@pytest.mark.parametrize("value", [NO_TEXT, b"a\tb"], ids=["latin-1", "tab"])
async def test_a_name_in_a_header_that_is_no_text_is_400_before_anything_is_done(
    world: World, path: str, name: str, body: bytes, value: bytes
) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory()
    before = list(world.scheduler.store.trajectories)
    lines = [f"Authorization: Bearer {world.tokens.admin}", f"Content-Length: {len(body)}"]
    if name in ("X-ROSE-Turn", "Idempotency-Key") and "trajectories" not in path:
        lines.append(f"X-Session-ID: {session}")
    request = "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, ""]).encode()
    sent = request + name.encode() + b": " + value + b"\r\n\r\n" + body
    answer = await raw(world, sent, until=b"}}")  # ends every refusal
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert f'"param":"{name}"'.encode() in answer
    assert list(world.scheduler.store.trajectories) == before
    assert not engine.requests


async def test_a_name_in_another_script_is_text(world: World) -> None:
    await world.start()
    names = {
        (await world.ok("POST", "/rose/v1/trajectories", {"job": "job"}, headers={"Idempotency-Key": key}))[
            "id"
        ]
        for key in ("tâche-1", "任务 1", "tâche-1")
    }
    assert len(names) == 2


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on(world: World) -> None:
    await world.start()
    await world.add("a")
    ask = head(world, "Expect: 100-continue", "Content-Length: 1000", path="/rose/v1/generate")
    assert (await raw(world, ask)).startswith(b"HTTP/1.1 100 Continue\r\n")


async def test_a_body_above_the_bound_is_refused_before_it_is_read(world: World) -> None:
    await world.start(limits={"max_body_bytes": 4096})
    answer = await raw(world, head(world, "Content-Length: 1099511627776") + b"x")
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_chunked_body_is_cut_off_at_the_bound(world: World) -> None:
    await world.start(limits={"max_body_bytes": 4096})
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    answer = await raw(world, head(world, "Transfer-Encoding: chunked") + chunk * 64)
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_truncated_body_ends_with_its_connection(world: World) -> None:
    await world.start(timeouts={"read_s": 0.3})
    answer = await raw(world, head(world, "Content-Length: 1000") + b'{"messages"')
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"slow_body" in answer
    assert world.scheduler.guard.intake_bytes == 0


async def test_a_head_that_never_ends_is_closed(world: World) -> None:
    await world.start(timeouts={"read_s": 0.3, "tick_s": 0.02})
    assert await raw(world, b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: ", until_closed=True) == b""
    assert await raw(world, b"", until_closed=True) == b""


async def test_idle_connections_above_the_bound_are_closed(world: World) -> None:
    await world.start(limits={"max_connections": 5}, timeouts={"tick_s": 0.02})
    host, port = world.url.removeprefix("http://").rsplit(":", 1)
    pairs = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
    await world.until(lambda: sum(reader.at_eof() for reader, _ in pairs) == 15)
    # They keep nobody out.
    assert (await raw(world, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    for _, writer in pairs:
        writer.close()


async def test_a_second_head_that_never_ends_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "IDLE_S", 0.3)
    await world.start(timeouts={"tick_s": 0.02})
    first = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = await raw(world, first + b"GET /healthz HTTP/1.1\r\nX-A: ", until_closed=True)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1


async def test_an_open_stream_is_not_quiet(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_api, "PERIOD_S", 0.05)
    await world.start(timeouts={"tick_s": 0.02})
    async with world.session.get(f"{world.url}/events", headers=bearer(world.tokens.environment)) as response:
        parts = [await response.content.readuntil(b"\n\n")]
        monkeypatch.setattr(guard, "IDLE_S", 0.05)
        monkeypatch.setattr(world.scheduler.guard, "_read_s", 0.05)
        parts += [await response.content.readuntil(b"\n\n") for _ in range(5)]
    assert all(parts)


@pytest.mark.parametrize("base", ["", "/s/{}"], ids=["hot-route", "routed"])
async def test_a_turn_that_takes_long_to_answer_is_not_quiet(
    world: World, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    """Agents ask without streaming, and a turn may take minutes without a byte in either direction."""
    await world.start(timeouts={"tick_s": 0.01})
    engine = await world.add("a")
    path = base.format(await world.trajectory()) + "/v1/chat/completions"
    engine.hold = asyncio.Event()
    turn = asyncio.create_task(world.call("POST", path, {"messages": [user("x")], "max_tokens": 3}))
    await world.until(lambda: engine.num_running == 1)
    monkeypatch.setattr(guard, "IDLE_S", 0.03)
    monkeypatch.setattr(world.scheduler.guard, "_read_s", 0.03)
    swept: list[int] = []
    sweep = world.scheduler.guard.sweep
    monkeypatch.setattr(
        world.scheduler.guard,
        "sweep",
        lambda connections: swept.append(len(connections)) or sweep(connections),
    )
    until_s = asyncio.get_running_loop().time() + 0.3  # ten times over
    await world.until(lambda: asyncio.get_running_loop().time() > until_s and len(swept) > 5)
    assert not turn.done()
    engine.hold.set()
    assert (await turn)[0] == 200


async def test_heartbeats_and_probes_have_no_rate(world: World) -> None:
    await world.start(limits={"requests_per_s": 1.0})
    for _ in range(8):
        assert (await world.call("GET", "/healthz"))[0] == 200
        assert (await world.call("POST", "/workers/ghost/heartbeat", {}, role="node"))[0] != 429


async def test_requests_beyond_the_rate_are_told_when_to_come_back(world: World) -> None:
    await world.start(limits={"requests_per_s": 2.0})
    statuses = []
    for _ in range(12):
        async with world.session.get(
            f"{world.url}/v1/models", headers=bearer(world.tokens.agent)
        ) as response:
            statuses.append(response.status)
            if response.status == 429:
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "rate_limited"
    async with world.session.get(f"{world.url}/metrics") as response:
        refused = f'rose_refused_requests_total{{bound="rate"}} {statuses.count(429):.1f}'
        assert refused in await response.text()
    assert statuses[:4] == [200] * 4
    assert 429 in statuses


async def test_too_many_large_bodies_at_once_are_429(world: World) -> None:
    await world.start(
        limits={"max_body_bytes": 200_000, "max_intake_bytes": 300_000}, timeouts={"read_s": 5.0}
    )
    first = asyncio.create_task(raw(world, head(world, "Content-Length: 199999") + b"{"))
    await world.until(lambda: world.scheduler.guard.intake_bytes > 100_000)
    answer = await raw(world, head(world, "Content-Length: 199999") + b"{")
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"Retry-After" in answer
    first.cancel()


@pytest.mark.parametrize(
    "name", ["X-Request-Id", "X-Session-ID", "X-ROSE-Turn", "Idempotency-Key", "traceparent"]
)
async def test_headers_cannot_put_words_into_ours(world: World, name: str) -> None:
    await world.start()
    await world.add("a")
    body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}'
    for value in ("a\x00b", "a\tb: c", "é" * 40, "x" * 7000, "%0d%0aSet-Cookie: a=b", "a\rSet-Cookie: a=b"):
        answer = await raw(world, head(world, f"{name}: {value}", f"Content-Length: {len(body)}") + body)
        top = answer.split(b"\r\n\r\n", 1)[0]
        assert answer.split(b" ", 2)[1] in (b"200", b"400", b"404"), answer
        assert b"set-cookie" not in top.lower().replace(b"%0d%0aset-cookie", b"")


@pytest.mark.usefixtures("only_new_garbage")
async def test_memory_stays_bounded_under_refused_bodies(world: World) -> None:
    """100 bodies of 2 MB, none kept: less than ten of them remain in the process."""
    await world.start(limits={"max_body_bytes": 4 * 2**20})
    await world.add("a")
    process = psutil.Process()
    data = b'{"messages": [{"role": 5, "content": "' + b"a" * (2 * 2**20) + b'"}]}'

    async def send(count: int) -> None:
        for _ in range(count):
            async with world.session.post(
                f"{world.url}/v1/chat/completions", data=data, headers=bearer(world.tokens.agent)
            ) as response:
                assert response.status == 400

    await send(10)
    gc.collect()
    before = process.memory_info().rss
    await send(100)
    gc.collect()
    assert process.memory_info().rss - before < 20 * 2**20


async def test_names_that_agents_make_up_are_forgotten(world: World) -> None:
    await world.start()
    await world.add("a")
    for number in range(300):
        status, _ = await world.call(
            "POST",
            "/v1/chat/completions",
            {"messages": [user("x")]},
            headers={"X-Session-ID": f"ghost-{number}"},
        )
        assert status == 404
    assert not world.scheduler.store.trajectories
    assert not world.scheduler.book.turns


# --- an engine that lies ----------------------------------------------------------------------------------


class Liar(FakeEngine):
    """Its answers are of the right form, with a number that cannot be."""

    lie: tuple[str, int]

    def _choice(self, *args: Any) -> dict[str, Any]:
        choice, (field, value) = super()._choice(*args), self.lie
        if field == "stop_reason" and choice["finish_reason"] is not None:
            choice["stop_reason"] = value
        if field in ("start", "end") and choice["weight_versions"]:
            choice["weight_versions"][0][field] = value
        return choice

    def _usage(self, body: dict[str, Any], num_new: int) -> dict[str, Any]:
        usage, (field, value) = super()._usage(body, num_new), self.lie
        if field == "cached_tokens":
            usage["prompt_tokens_details"][field] = value
        return usage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "lie",
    [
        ("cached_tokens", 10**30),
        ("cached_tokens", -1),
        ("stop_reason", 10**30),
        ("start", -(10**30)),
        ("end", 10**30),
    ],
    ids=lambda lie: f"{lie[0]}={lie[1]:.0e}",
)
async def test_a_number_that_cannot_be_is_a_bad_answer(lie: tuple[str, int], stream: bool) -> None:
    made = Liar(mean_tokens=4)
    made.lie = lie
    runner, url = await serve_engine(made)
    client = EngineClient(connect_s=30, attempt_s=300, render_s=60)
    sampling = {"max_tokens": 3, "logprobs": 0}
    body = {"request_id": "r", "token_ids": [5, 6], "stream": stream, "sampling_params": sampling}
    engine = Endpoint(worker_id="a", url=url)

    async def ask() -> None:
        if not stream:
            await client.generate(engine, body)
            return
        async for _ in client.stream(engine, body):
            pass

    with pytest.raises(EngineFailure) as failure:
        await ask()
    assert failure.value.kind == "bad"
    client.close()
    await runner.cleanup()
