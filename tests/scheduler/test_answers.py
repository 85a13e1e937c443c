"""What the daemon answers is what ``rose.wire`` says that it answers, field for field."""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import msgspec
import pytest

from rose.scheduler import app
from rose.scheduler.openapi import ANSWERS, EVENTS, ROUTES, describe
from tests.scheduler.conftest import World, user
from tests.scheduler.test_watching import first_events, moved_conversation

NOT_OURS = {
    # OpenAI's, Anthropic's, vLLM's and SGLang's, as their own descriptions have them.
    *(("post", path) for method, path, *_ in ROUTES if method == "post" and re.search("/v1/|/tokenize$|/generate$", path)),
    *(("get", path) for _, path, *_ in ROUTES if "/v1/models" in path),
    # Other programs' formats: Chrome's traces, OpenAPI, Prometheus, HTML.
    *(("get", path) for path in ("/debug/trace", "/openapi.json", "/metrics", "/", "/learning")),
}  # fmt: skip


def test_every_route_of_ours_says_what_it_answers() -> None:
    routes = {(method, path) for method, path, *_ in ROUTES}
    assert (ANSWERS.keys() | EVENTS.keys()) <= routes
    assert routes - ANSWERS.keys() - EVENTS.keys() - NOT_OURS == set()
    described = describe()

    def content(method: str, path: str) -> Any:
        return described["paths"][path][method]["responses"]["200"]["content"]

    said = [(content(*route)["application/json"]["schema"], kind) for route, kind in ANSWERS.items()]
    for route, kinds in EVENTS.items():
        said += zip(content(*route)["text/event-stream"]["schema"]["oneOf"], kinds.values(), strict=True)
    for schema, kind in said:
        name = schema["$ref"].rpartition("/")[2]
        assert name == kind.__name__
        assert name in described["components"]["schemas"]


def unknown(value: Any, kind: Any) -> list[str]:
    """Fields of ``value`` that ``kind`` does not have, at any depth."""
    if is_typeddict(kind):
        fields = get_type_hints(kind)
        inner = [name for field in value for name in unknown(value[field], fields.get(field))]
        return [f"{kind.__name__}.{field}" for field in value if field not in fields] + inner
    if get_origin(kind) is list:
        return [name for one in value for name in unknown(one, get_args(kind)[0])]
    if get_origin(kind) is dict:
        return [name for one in value.values() for name in unknown(one, get_args(kind)[1])]
    if get_args(kind) and isinstance(value, dict):  # a union with None
        return [name for one in get_args(kind) if is_typeddict(one) for name in unknown(value, one)]
    return []


def is_what_is_said(answer: Any, kind: Any) -> None:
    msgspec.convert(answer, kind)
    assert unknown(answer, kind) == []


class Checked:
    """Asks, and reads each answer as what is said of its route."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: set[tuple[str, str]] = set()

    async def __call__(
        self, method: str, route: str, body: Any = None, *, query: str = "", role: str = "admin", **names: str
    ) -> Any:
        answer = await self.world.ok(method.upper(), route.format(**names) + query, body, role=role)
        is_what_is_said(answer, ANSWERS[method, route])
        self.seen.add((method, route))
        return answer


async def test_a_job_s_answers_are_what_is_said_of_them(world: World) -> None:
    await world.start()
    await world.add("a")
    ask = Checked(world)
    trajectories, one = "/rose/v1/trajectories", "/rose/v1/trajectories/{id}"
    batch = "/rose/v1/batches/{id}"
    made = await ask("post", trajectories, {"job": "job", "task": [7], "metadata": {"kind": "easy"}})
    empty = await ask("get", f"{one}/tokens", id=made["id"])
    assert empty["branches"] == []
    await world.chat(made["id"], [user("x")], max_tokens=3)
    await ask("post", f"{one}/score", {"turns": [{"turn": 0, "reward": 0.5}]}, id=made["id"])
    await ask("post", f"{one}/finish", {"reward": 1, "success": True, "info": {"a": 1}}, id=made["id"])
    trace = await ask("get", one, id=made["id"])
    assert len(trace["turns"]) == 1
    rows = (await ask("get", f"{one}/tokens", id=made["id"]))["tokens"]
    assert {row["sampled"] for row in rows} == {True, False}
    listed = await ask("get", trajectories)
    assert [each["id"] for each in listed["trajectories"]] == [made["id"]]
    assert len((await ask("get", "/rose/v1/groups"))["groups"]) == 1

    await ask("post", "/rose/v1/versions", {"job": "job", "attempt": 1, "version": 0})
    lease = {"job": "job", "num_groups": 1, "version": "1.0"}
    first = await ask("put", batch, lease, id="one")
    assert "suffix_token_ids" in first["trajectories"][0]["turns"][0]
    await ask("delete", batch, id="one")
    second = await ask("post", "/rose/v1/batches/lease", lease)
    await ask("post", f"{batch}/ack", {"step": 1, "attempt": 1}, id=second["batch_id"])
    other = await ask("post", trajectories, {"job": "job"})
    await ask("delete", one, id=other["id"])
    await ask("post", "/rose/v1/jobs/{job}/resume", {"attempt": 1, "consumed": []}, job="job")

    assert (await ask("get", "/workers"))["workers"]
    engine = {"worker_id": "b", "url": "http://127.0.0.1:9", "tier": "harvested", "model": "policy"}
    await ask("post", "/workers", {**engine, "max_model_len": 64, "incarnation": "i"})
    beat = {"incarnation": "i", "seq": 1, "state": "ready", "slo_ttft_s": 0.5, "serving_ttft_p99_s": 1.0}
    await ask("post", "/workers/{id}/heartbeat", beat, id="b")
    await ask("post", "/workers/{id}/{verb}", id="b", verb="cordon")
    assert (await ask("get", "/fleet"))["nodes"]
    await ask("post", "/fleet/off", {})
    assert (await ask("post", "/fleet/on", {"canary": ["default"]}))["release"] is not None
    await ask("delete", "/workers/{id}", id="b")
    await ask("post", "/admin/settings", {"cap_harvested": 3})
    await ask("get", "/admin/settings")
    for probe in ("/healthz", "/health", "/readyz"):
        await ask("get", probe)
    assert ask.seen == ANSWERS.keys() - WATCHED


WATCHED = {("get", "/status"), ("get", "/rose/v1/history")}


async def test_what_is_watched_is_what_is_said_of_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "FRESH_S", -1.0)
    name = await moved_conversation(world)
    world.nodes["b"].serving_p99_s = {"ttft": (1.0, 0.5)}
    waiting = world.scheduler.timeline
    await world.until(lambda: waiting.samples and waiting.samples[-1]["p99"] and waiting.hours)
    await world.ok("POST", "/rose/v1/versions", {"job": "job", "attempt": 1, "version": 0}, role="trainer")
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1}, role="environment")
    ask = Checked(world)
    status = await ask("get", "/status")
    assert status["last_turns"]
    assert status["resumed_turns"]
    assert status["serving_p99"]["ttft"] == {"p99_s": 1.0, "slo_s": 0.5}
    history = await ask("get", "/rose/v1/history")
    assert history["hours"]
    assert [rows[-1][1] for rows in history["jobs"].values()] == [1]
    assert ask.seen == WATCHED
    events = await first_events(world, 2)
    kinds = EVENTS["get", "/events"]
    assert [event for event, _ in events] == list(kinds)
    for event, data in events:
        is_what_is_said(data, kinds[event])
        assert data["spans"] or event == "now"
        assert data["marks"]
        assert data["steps"]
