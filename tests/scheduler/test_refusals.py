"""Requests that are refused: one line that names the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rose.auth import bearer
from rose.scheduler.openapi import ROUTES
from tests.scheduler.conftest import World, user

WORKER = {
    "worker_id": "x",
    "url": "http://127.0.0.1:1",
    "tier": "dedicated",
    "model": "m",
    "max_model_len": 8,
    "incarnation": "1",
}


@pytest.mark.parametrize(
    ("method", "path", "body", "role", "status", "param"),
    [
        ("POST", "/v1/chat/completions", {"messages": []}, "agent", 400, "messages"),
        ("POST", "/v1/chat/completions", {"messages": [{"content": "x"}]}, "agent", 400, "messages[0]"),
        ("POST", "/v1/chat/completions", {"messages": [user("x")], "model": 5}, "agent", 400, "model"),
        ("POST", "/v1/chat/completions", {"messages": [user("x")], "model": "no"}, "agent", 404, "model"),
        ("POST", "/v1/chat/completions", {"messages": [user("x")], "n": 0}, "agent", 400, "n"),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [user("x")], "max_tokens": 0},
            "agent",
            400,
            "max_tokens",
        ),
        ("POST", "/v1/completions", {"prompt": ""}, "agent", 400, "prompt"),
        ("POST", "/v1/completions", {"prompt": "x", "echo": True}, "agent", 400, "echo"),
        ("POST", "/rose/v1/generate", {"token_ids": []}, "agent", 400, "token_ids"),
        ("POST", "/rose/v1/generate", {"token_ids": [512]}, "agent", 400, "token_ids"),
        ("POST", "/rose/v1/generate", {"token_ids": [-1]}, "agent", 400, "token_ids[0]"),
        ("POST", "/rose/v1/generate", {"token_ids": [True]}, "agent", 400, "token_ids[0]"),
        ("POST", "/rose/v1/generate", {"token_ids": ["1"]}, "agent", 400, "token_ids[0]"),
        ("POST", "/rose/v1/generate", {"token_ids": [1] * 4096}, "agent", 400, "token_ids"),
        ("POST", "/rose/v1/generate", {"token_ids_b64": "AAA="}, "agent", 400, "token_ids_b64"),
        ("POST", "/rose/v1/generate", {"token_ids": [1], "max_token": 4}, "agent", 400, "max_token"),
        (
            "POST",
            "/rose/v1/generate",
            {"token_ids": [1], "sampling_params": 4},
            "agent",
            400,
            "sampling_params",
        ),
        ("POST", "/rose/v1/trajectories", {}, "environment", 400, "job"),
        ("POST", "/rose/v1/trajectories", {"job": "a\nb"}, "environment", 400, "job"),
        (
            "POST",
            "/rose/v1/trajectories",
            {"job": "j", "sampling": {"temp": 1}},
            "environment",
            400,
            "sampling.temp",
        ),
        ("POST", "/rose/v1/trajectories", {"job": "j", "group_size": 2}, "environment", 400, "group_id"),
        ("GET", "/rose/v1/trajectories/none", None, "environment", 404, "id"),
        ("GET", "/rose/v1/trajectories?state=odd", None, "environment", 400, "state"),
        ("POST", "/rose/v1/trajectories/none/finish", {"reward": 1}, "environment", 404, "id"),
        ("POST", "/rose/v1/trajectories/none/score", {"reward": 1}, "environment", 404, "id"),
        ("DELETE", "/rose/v1/trajectories/none", None, "environment", 404, "id"),
        ("GET", "/rose/v1/trajectories?jobb=x", None, "environment", 400, "jobb"),
        (
            "POST",
            "/rose/v1/trajectories",
            {"job": "j", "sampling": {"temperature": "x"}},
            "environment",
            400,
            "sampling.temperature",
        ),
        (
            "POST",
            "/rose/v1/trajectories",
            {"job": "j", "metadata": {"epoch": 1}},
            "environment",
            400,
            "metadata",
        ),
        (
            "POST",
            "/rose/v1/generate",
            {"token_ids": [1], "sampling_params": {"max_token": 2}},
            "agent",
            400,
            "sampling_params.max_token",
        ),
        (
            "POST",
            "/rose/v1/batches/lease",
            {"job": "j", "num_groups": 1, "version": "x"},
            "trainer",
            400,
            "version",
        ),
        ("POST", "/rose/v1/batches/none/ack", {"step": 1, "attempt": 1}, "trainer", 410, "batch_id"),
        ("POST", "/rose/v1/versions", {"job": "j", "attempt": 1, "version": -1}, "trainer", 400, "version"),
        ("POST", "/workers", {**WORKER, "url": "file:///etc/passwd"}, "node", 400, "url"),
        ("POST", "/workers", {"worker_id": "x"}, "node", 400, "url"),
        ("POST", "/workers", {**WORKER, "tier": "spot"}, "node", 400, "tier"),
        ("DELETE", "/workers/none", None, "node", 404, "worker_id"),
        ("POST", "/workers/a/explode", None, "node", 404, "path"),
        ("POST", "/rose/v1/trajectories", {"job": "j"}, "trainer", 401, "Authorization"),
        ("POST", "/rose/v1/trajectories", {"job": "j"}, "agent", 401, "Authorization"),
        ("GET", "/rose/v1/trajectories", None, "agent", 401, "Authorization"),
        ("POST", "/rose/v1/batches/lease", {}, "environment", 401, "Authorization"),
        ("POST", "/workers", {}, "agent", 401, "Authorization"),
        ("GET", "/status", None, "relay", 401, "Authorization"),
        ("GET", "/nothing", None, "agent", 404, None),
        ("PUT", "/v1/models", None, "agent", 405, None),
    ],
)
async def test_bad_requests_get_one_line_that_names_the_field(
    world: World, method: str, path: str, body: Any, role: str, status: int, param: str | None
) -> None:
    await world.start()
    await world.add("a")
    got, answer = await world.call(method, path, body, role=role)
    error = answer["error"]
    assert (got, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]


async def test_unknown_sessions_are_404_unknown_session(world: World) -> None:
    await world.start()
    await world.add("a")
    body = {"messages": [user("x")]}
    got, answer = await world.call("POST", "/v1/chat/completions", body, headers={"X-Session-ID": "ghost"})
    assert (got, answer["error"]["code"]) == (404, "unknown_session")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"nan", b'{"messages": "\xff\xfe"}', b"[" * 100_000, b'{"a":' * 5000]
)
async def test_malformed_bodies_are_400(world: World, data: bytes) -> None:
    await world.start()
    async with world.session.post(
        f"{world.url}/v1/chat/completions", data=data, headers=bearer(world.tokens.agent)
    ) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "body"


async def test_an_oversized_body_is_413(world: World) -> None:
    await world.start(limits={"max_body_bytes": 1000})
    body = {"messages": [user("x" * 2000)]}
    got, answer = await world.call("POST", "/v1/chat/completions", body)
    assert (got, answer["error"]["code"]) == (413, "too_large")


async def test_a_prompt_that_fits_no_context_is_refused(world: World) -> None:
    await world.start()
    await world.add("a", max_model_len=50)
    got, answer = await world.call("POST", "/v1/chat/completions", {"messages": [user("x" * 60)]})
    assert (got, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_prompt_of_exactly_the_context_length_is_refused_as_one_beyond_it(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    body = {"messages": [user("x" * 60)], "max_tokens": 4}
    engine.max_model_len = len(engine.tokenizer.chat(body))
    got, answer = await world.call("POST", "/v1/chat/completions", body)
    assert (got, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "messages"
    assert "the prompt fills the context length" in answer["error"]["message"]


async def test_what_the_engine_refuses_is_passed_on_with_its_message(world: World) -> None:
    await world.start()
    await world.add("a")
    got, answer = await world.call(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"text": 5}]}]}
    )
    assert got == 400
    assert "cannot render" in answer["error"]["message"]


async def test_no_token_is_401_and_request_ids_are_echoed(world: World) -> None:
    await world.start()
    async with world.session.get(f"{world.url}/v1/models", headers={"X-Request-Id": "mine-1"}) as response:
        assert response.status == 401
        assert response.headers["X-Request-Id"] == "mine-1"
    bad = {"X-Request-Id": "x y;z", **bearer("wrong-token-wrong-token")}
    async with world.session.get(f"{world.url}/v1/models", headers=bad) as response:
        assert response.status == 401
        assert response.headers["X-Request-Id"] != "x y;z"


async def test_an_image_is_refused_and_not_left_out(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": "what is this?"}
    headers = {"X-Session-ID": session}
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": [text, picture]}], "stream": stream}
        status, answer = await world.call("POST", "/v1/chat/completions", body, headers=headers)
        assert (status, answer["error"]["code"]) == (400, "multimodal_unsupported")
        assert answer["error"]["param"] == "messages[0].content[1]"
    assert not engine.requests
    await world.chat(session, [{"role": "user", "content": [text]}], max_tokens=2)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("temperature", "hot", "must be a number of at least 0"),
        ("seed", "x", "must be a whole number"),
        ("stop", [1], "must be text"),
        ("top_logprobs", 50, "must be a whole number from 0 to 20"),
        ("response_format", 5, "must be an object"),
        ("logit_bias", [], "must be an object"),
        ("tool_choice", 5, "must be text or an object"),
        ("bad_words", "no", "must be a list"),
    ],
)
async def test_a_field_of_sampling_that_cannot_be_is_named(
    world: World, name: str, value: Any, says: str
) -> None:
    await world.start()
    await world.add("a")
    body = {"messages": [user("x")], name: value}
    status, answer = await world.call("POST", "/v1/chat/completions", body)
    error = answer["error"]
    assert (status, error["param"].partition("[")[0]) == (400, name)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("content", "param"),
    [({"a": 1}, "messages[2].content"), (7, "messages[2].content"), ([3], "messages[2].content[0]")],
)
async def test_a_tools_result_that_is_no_text_is_named(world: World, content: Any, param: str) -> None:
    await world.start()
    await world.add("a")
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    messages = [user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"messages": [*messages, {"role": "tool", "tool_call_id": "c", "content": content}]}
    status, answer = await world.call("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_tool_that_returns_nothing_says_null(world: World) -> None:
    await world.start()
    await world.add("a")
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    messages = [user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {
        "messages": [*messages, {"role": "tool", "tool_call_id": "c", "content": None}],
        "max_tokens": 2,
    }
    status, _ = await world.call("POST", "/v1/chat/completions", body)
    assert status == 200


def test_the_page_of_the_endpoint_has_a_row_for_each_refusal_of_a_turn() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/endpoint.md").read_text()
    rows = {int(status) for status in re.findall(r"^\| (\d{3}) `", page, re.MULTILINE)}
    turns = [statuses for method, path, *_, statuses in ROUTES if path == "/v1/chat/completions"]
    assert rows >= {400, 401, 413, *turns[0]} - {200}
