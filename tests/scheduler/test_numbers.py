"""Numbers that no sane client sends, wherever the scheduler reads one: answered, or refused by the name of the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rose.auth import bearer
from tests.scheduler.conftest import World, user

JSON_NUMBERS = ("-1", "0", "1.5", "-9223372036854775809", "18446744073709551616", "1" + "0" * 400, "1" + "0" * 5000, "1e308", "1e400", "NaN")  # fmt: skip
WRITTEN = ("-1", "0", "+5", "1.5", "1e3", "inf", "nan", "9" * 310, "9" * 4301, "²", "٣")
SAMPLING = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "min_tokens",
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "repetition_penalty",
]
CHAT: dict[str, Any] = {"messages": [user("x")]}
BODIES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("POST", "/v1/chat/completions", CHAT, [*SAMPLING, "max_completion_tokens", "best_of"]),
    ("POST", "/v1/completions", {"prompt": "x"}, SAMPLING),
    ("POST", "/v1/responses", {"input": "x"}, ["max_output_tokens", "temperature", "top_logprobs", "max_tool_calls"]),
    ("POST", "/v1/messages", CHAT, ["max_tokens", "temperature", "top_k", "seed"]),
    ("POST", "/v1/messages/count_tokens", CHAT, ["max_tokens", "top_k"]),
    ("POST", "/tokenize", CHAT, ["max_tokens", "truncate_prompt_tokens"]),
    ("POST", "/rose/v1/trajectories", {"job": "j"}, ["group_size", "task", "prefill_per_decode", "deadline_s"]),
    ("POST", "/rose/v1/trajectories/{id}/score", {}, ["reward", "info"]),
    ("PUT", "/rose/v1/batches/b", {"job": "j", "num_groups": 1, "version": "1.1"}, ["num_groups", "version", "ttl_s", "wait_s", "alpha"]),
    ("POST", "/rose/v1/batches/none/ack", {"step": 1, "attempt": 1}, ["step", "attempt"]),
    ("POST", "/rose/v1/jobs/k/resume", {"attempt": 1, "consumed": []}, ["attempt"]),
    ("POST", "/rose/v1/versions", {"job": "k", "attempt": 1, "version": 1}, ["attempt", "version", "alpha"]),
    ("POST", "/workers/none/heartbeat", {"incarnation": "1", "state": "ready", "seq": 1}, ["seq", "slack_s", "lent_s", "kv_used_tokens", "serving_use"]),
    ("POST", "/admin/settings", {}, ["max_running", "cap_dedicated"]),
    ("POST", "/fleet/on", {}, ["watch_s"]),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "base", "fields"), BODIES, ids=[path for _, path, _, _ in BODIES])
async def test_a_number_in_a_body_is_taken_or_refused(
    world: World, method: str, path: str, base: dict[str, Any], fields: list[str]
) -> None:
    await world.start(timeouts={"max_wait_s": 0.0})
    await world.add("a", mean_tokens=4)
    url = world.url + path.format(id=await world.trajectory())
    for field in fields:
        rest = {name: value for name, value in base.items() if name != field}
        for number in JSON_NUMBERS:
            body = f"{json.dumps(rest)[:-1]}{', ' if rest else ''}{json.dumps(field)}: {number}}}"
            async with world.session.request(
                method, url, data=body, headers=bearer(world.tokens.admin)
            ) as answer:
                text = await answer.text()
                assert answer.status in (200, 204, 400, 404, 409, 410), (field, number[:40], text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/rose/v1/generate"])
async def test_a_deadline_that_is_none_is_refused_with_its_bound(world: World, path: str) -> None:
    await world.start()
    await world.add("a", mean_tokens=4)
    body = CHAT if path.startswith("/v1") else {"token_ids": [5]}
    for written in (*WRITTEN, "604800001"):
        status, answer = await world.call("POST", path, body, headers={"X-ROSE-Deadline-Ms": written})
        assert (status, answer["error"]["param"]) == (400, "X-ROSE-Deadline-Ms"), written[:40]
        assert answer["error"]["message"].endswith(
            "must be a whole number of milliseconds from 1 to 604800000"
        )
    await world.ok("POST", path, body, headers={"X-ROSE-Deadline-Ms": "604800000"})


@pytest.mark.parametrize("name", ["X-ROSE-Min-Version", "x-stainless-retry-count", "x-envoy-attempt-count"])
async def test_a_number_in_another_header_is_taken_or_refused(world: World, name: str) -> None:
    await world.start()
    await world.add("a", mean_tokens=4)
    for written in (*WRITTEN, f"{'9' * 310}.1", f"1.{'9' * 310}"):
        if (name, written) == ("X-ROSE-Min-Version", "1.5"):
            continue  # a version, which nobody has
        status, _ = await world.call("POST", "/rose/v1/generate", {"token_ids": [5]}, headers={name: written})
        assert status == (400 if name == "X-ROSE-Min-Version" else 200), written[:40]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/rose/v1/trajectories", "limit"),
        ("/rose/v1/groups", "limit"),
        ("/rose/v1/trajectories/{id}/tokens", "turn"),
    ],
)
async def test_a_number_in_a_query_is_refused_by_its_name(world: World, path: str, name: str) -> None:
    await world.start()
    await world.add("a", mean_tokens=4)
    session = await world.trajectory()
    await world.chat(session, CHAT["messages"])
    for written in WRITTEN:
        async with world.session.get(
            world.url + path.format(id=session),
            params={name: written},
            headers=bearer(world.tokens.environment),
        ) as answer:
            if (name, written) == ("turn", "0"):
                assert answer.status == 200
                continue
            assert answer.status == 400, written[:40]
            assert (await answer.json())["error"]["param"] == name
