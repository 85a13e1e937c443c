"""The OpenAPI description of rose-scheduler, served at ``/openapi.json``.

Our own bodies and answers are described by the types that read and make them (:mod:`rose.wire`); the bodies that are OpenAI's and
Anthropic's are written out here, and their answers are not: those protocols' own descriptions have them.  Each route has its
roles and the statuses that it may answer.  Tests compare the description with the running daemon
(``tests/scheduler/test_hostile.py``) and with the router, route by route.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rose.wire import answers
from rose.wire.fleet import FleetOff, FleetOn
from rose.wire.samples import Ack, Finish, Lease, NewTrajectory, NewVersion, Resume, Score, Settings
from rose.wire.schema import Schema, reference, schemas
from rose.wire.status import History, SchedulerStatus, WatchHistory, WatchNow
from rose.wire.turns import EngineGenerate, Generate, SGLangGenerate
from rose.wire.workers import Heartbeat, HeartbeatAnswer, Registered, Registration

Body = Schema | type[msgspec.Struct] | None

TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
FLAG: Schema = {"type": "boolean"}
TOKEN_IDS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    "minItems": 1,
}


def _object(required: tuple[str, ...] = (), *, closed: bool = True, **properties: Schema) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": not closed}
    return {**schema, "required": list(required)} if required else schema


def _optional(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]} if isinstance(schema.get("type"), str) else schema


MESSAGE = _object(
    ("role",),
    closed=False,
    role={"type": "string", "enum": ["system", "user", "assistant", "tool"]},
    content={"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": "object"}}]},
)
CHAT = _object(
    ("messages",),
    closed=False,
    model=_optional(TEXT),
    messages={"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 4096},
    max_tokens=_optional({"type": "integer", "minimum": 1}),
    temperature=_optional({"type": "number", "minimum": 0, "maximum": 2}),
    n=_optional({"type": "integer", "minimum": 1, "maximum": 16}),
    stream=_optional(FLAG),
    stop={"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": "string"}}]},
    session_id=_optional(TEXT),
)
COMPLETION = _object(
    ("prompt",),
    closed=False,
    model=_optional(TEXT),
    prompt={"anyOf": [{"type": "string", "minLength": 1}, TOKEN_IDS]},
    max_tokens=_optional({"type": "integer", "minimum": 1}),
    stream=_optional(FLAG),
)

ITEMS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "maxItems": 4096}]}
RESPONSE = _object(
    closed=False,
    model=_optional(TEXT),
    input=ITEMS,
    instructions={"type": ["string", "null"]},
    previous_response_id=_optional(TEXT),
    max_output_tokens=_optional({"type": "integer", "minimum": 1}),
    temperature=_optional({"type": "number", "minimum": 0, "maximum": 2}),
    store=_optional(FLAG),
    stream=_optional(FLAG),
    session_id=_optional(TEXT),
)
BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
COUNTED = _object(
    ("messages",),
    closed=False,
    model=_optional(TEXT),
    system={"anyOf": [*BLOCKS["anyOf"], {"type": "null"}]},
    messages={
        "type": "array",
        "items": _object(
            ("role", "content"),
            closed=False,
            role={"type": "string", "enum": ["user", "assistant", "system"]},
            content=BLOCKS,
        ),
        "minItems": 1,
        "maxItems": 4096,
    },
    session_id=_optional(TEXT),
)
MESSAGES = {
    **COUNTED,
    "properties": {
        **COUNTED["properties"],
        "max_tokens": _optional({"type": "integer", "minimum": 1}),
        "temperature": _optional({"type": "number", "minimum": 0, "maximum": 1}),
        "stream": _optional(FLAG),
    },
}
TOKENIZE = _object(
    closed=False,
    model=_optional(TEXT),
    prompt={"type": "string"},
    messages=CHAT["properties"]["messages"],
    return_token_strs=_optional(FLAG),
    session_id=_optional(TEXT),
)

_CHAT = ("agent", "environment", "trajectory")
_WATCH = ("environment", "trainer", "node")
_TURN = (200, 404, 409, 410, 422, 429, 502, 503, 504)
_COUNT = (200, 404, 409, 410, 429, 502, 503)
# (method, path, roles, summary, body, statuses besides 400, 401, 413 and 429 where they apply)
ROUTES: list[tuple[str, str, tuple[str, ...], str, Body, tuple[int, ...]]] = [
    ("post", "/v1/chat/completions", _CHAT, "Chat, as OpenAI has it", CHAT, _TURN),
    ("post", "/v1/completions", _CHAT, "Completions, as OpenAI has them", COMPLETION, _TURN),
    ("post", "/v1/responses", _CHAT, "Responses, as OpenAI has them", RESPONSE, _TURN),
    ("post", "/v1/responses/input_tokens", _CHAT, "How many tokens that is", RESPONSE, _COUNT),
    ("post", "/v1/messages", _CHAT, "Messages, as Anthropic has them", MESSAGES, _TURN),
    ("post", "/v1/messages/count_tokens", _CHAT, "How many tokens that is", COUNTED, _COUNT),
    ("post", "/tokenize", _CHAT, "Tokens of text or of messages, as vLLM has it", TOKENIZE, _COUNT),
    ("get", "/v1/models", _CHAT, "Served models", None, (200,)),
    ("get", "/v1/models/{model}", _CHAT, "One of them", None, (200, 404)),
    ("post", "/s/{session}/v1/chat/completions", _CHAT, "Chat of a trajectory", CHAT, _TURN),
    ("post", "/s/{session}/v1/completions", _CHAT, "Completions of a trajectory", COMPLETION, _TURN),
    ("post", "/s/{session}/v1/responses", _CHAT, "Responses of a trajectory", RESPONSE, _TURN),
    ("post", "/s/{session}/v1/responses/input_tokens", _CHAT, "How many tokens that is", RESPONSE, _COUNT),
    ("post", "/s/{session}/v1/messages", _CHAT, "Messages of a trajectory", MESSAGES, _TURN),
    ("post", "/s/{session}/v1/messages/count_tokens", _CHAT, "How many tokens that is", COUNTED, _COUNT),
    ("post", "/s/{session}/tokenize", _CHAT, "Tokens of text or of messages", TOKENIZE, _COUNT),
    ("get", "/s/{session}/v1/models", _CHAT, "Served models", None, (200,)),
    ("get", "/s/{session}/v1/models/{model}", _CHAT, "One of them", None, (200, 404)),
    ("post", "/rose/v1/generate", _CHAT, "Tokens in, tokens out", Generate, _TURN),
    ("post", "/inference/v1/generate", _CHAT, "The same, as vLLM has it", EngineGenerate, _TURN),
    ("post", "/s/{session}/inference/v1/generate", _CHAT, "That of a trajectory", EngineGenerate, _TURN),
    ("post", "/generate", _CHAT, "Text or tokens in, both out, as SGLang has it", SGLangGenerate, _TURN),
    ("post", "/s/{session}/generate", _CHAT, "That of a trajectory", SGLangGenerate, _TURN),
    ("post", "/rose/v1/trajectories", ("environment",), "Begin a trajectory", NewTrajectory, (200, 409, 422)),
    ("get", "/rose/v1/trajectories", ("environment", "trainer"), "List trajectories", None, (200,)),
    (
        "get",
        "/rose/v1/trajectories/{id}",
        ("environment", "trainer"),
        "Every token of a trajectory",
        None,
        (200, 404),
    ),
    (
        "get",
        "/rose/v1/trajectories/{id}/tokens",
        ("environment", "trainer"),
        "One branch, token by token",
        None,
        (200, 404),
    ),
    ("get", "/events", _WATCH, "Live events of the dashboard", None, (200,)),
    ("get", "/rose/v1/history", _WATCH, "A day of the dashboard's samples, and rewards by job", None, (200,)),
    ("get", "/debug/trace", _WATCH, "Chrome trace of the last turns", None, (200,)),
    (
        "post",
        "/rose/v1/trajectories/{id}/finish",
        ("environment",),
        "It takes no more turns; its reward",
        Finish,
        (200, 404, 409, 410),
    ),
    (
        "post",
        "/rose/v1/trajectories/{id}/score",
        ("environment",),
        "Rewards of it, its turns and its branches",
        Score,
        (200, 404, 409, 410),
    ),
    ("get", "/rose/v1/groups", ("environment", "trainer"), "List groups", None, (200,)),
    ("delete", "/rose/v1/trajectories/{id}", ("environment",), "Cancel it", None, (200, 404, 409)),
    ("post", "/rose/v1/batches/lease", ("trainer",), "Lease whole groups", Lease, (200, 204, 409)),
    ("put", "/rose/v1/batches/{id}", ("trainer",), "The batch of this name", Lease, (200, 204, 409, 410)),
    ("delete", "/rose/v1/batches/{id}", ("trainer",), "Give it back", None, (200, 409)),
    (
        "post",
        "/rose/v1/batches/{id}/ack",
        ("trainer",),
        "Trained on",
        Ack,
        (200, 404, 409, 410),
    ),
    (
        "post",
        "/rose/v1/jobs/{job}/resume",
        ("trainer",),
        "A restarted trainer",
        Resume,
        (200, 404, 409, 410),
    ),
    (
        "post",
        "/rose/v1/versions",
        ("trainer",),
        "New weights",
        NewVersion,
        (200, 409),
    ),
    ("post", "/workers", ("node",), "Register an engine", Registration, (200, 409)),
    ("post", "/workers/{id}/heartbeat", ("node",), "It lives", Heartbeat, (200,)),
    ("post", "/workers/{id}/{verb}", ("node",), "drain, cordon, uncordon", None, (200, 404)),
    ("delete", "/workers/{id}", ("node",), "It is gone", None, (200, 404)),
    ("get", "/workers", _WATCH, "All engines", None, (200,)),
    ("get", "/status", _WATCH, "What runs, and where", None, (200,)),
    ("get", "/fleet", _WATCH, "Who harvests, by group", None, (200,)),
    ("post", "/fleet/off", ("admin",), "Nodes lend nothing", FleetOff, (200,)),
    ("post", "/fleet/on", ("admin",), "They may again, canaries first", FleetOn, (200,)),
    ("get", "/admin/settings", ("admin",), "Caps and policy", None, (200,)),
    ("post", "/admin/settings", ("admin",), "Change them", Settings, (200,)),
    ("get", "/openapi.json", (), "This", None, (200,)),
    ("get", "/metrics", (), "Prometheus", None, (200, 401)),
    ("get", "/healthz", (), "It runs", None, (200,)),
    ("get", "/health", (), "It runs", None, (200,)),
    ("get", "/readyz", (), "It takes turns", None, (200, 503)),
    ("get", "/", (), "The dashboard", None, (200,)),
    ("get", "/learning", (), "The dashboard's page of jobs, groups and trajectories", None, (200,)),
]
_TRAJECTORY = "/rose/v1/trajectories"
ANSWERS: dict[tuple[str, str], type] = {
    ("post", _TRAJECTORY): answers.TrajectoryKey,
    ("get", _TRAJECTORY): answers.TrajectoryList,
    ("get", f"{_TRAJECTORY}/{{id}}"): answers.TrajectoryTrace,
    ("get", f"{_TRAJECTORY}/{{id}}/tokens"): answers.Branch,
    ("post", f"{_TRAJECTORY}/{{id}}/finish"): answers.TrajectoryEnded,
    ("post", f"{_TRAJECTORY}/{{id}}/score"): answers.TrajectoryEnded,
    ("delete", f"{_TRAJECTORY}/{{id}}"): answers.TrajectoryEnded,
    ("get", "/rose/v1/groups"): answers.GroupList,
    ("post", "/rose/v1/batches/lease"): answers.LeasedBatch,
    ("put", "/rose/v1/batches/{id}"): answers.LeasedBatch,
    ("delete", "/rose/v1/batches/{id}"): answers.Empty,
    ("post", "/rose/v1/batches/{id}/ack"): answers.Empty,
    ("post", "/rose/v1/jobs/{job}/resume"): answers.ResumedJob,
    ("post", "/rose/v1/versions"): answers.RequiredVersion,
    ("post", "/workers"): Registered,
    ("post", "/workers/{id}/heartbeat"): HeartbeatAnswer,
    ("post", "/workers/{id}/{verb}"): answers.WorkerDutyStatus,
    ("delete", "/workers/{id}"): answers.Empty,
    ("get", "/workers"): answers.WorkerList,
    ("get", "/status"): SchedulerStatus,
    ("get", "/rose/v1/history"): History,
    ("get", "/fleet"): answers.FleetStatus,
    ("post", "/fleet/off"): answers.FleetStatus,
    ("post", "/fleet/on"): answers.FleetStatus,
    ("get", "/admin/settings"): answers.SettingsNow,
    ("post", "/admin/settings"): answers.SettingsChanged,
    ("get", "/healthz"): answers.HealthStatus,
    ("get", "/health"): answers.HealthStatus,
    ("get", "/readyz"): answers.ReadyStatus,
}
"""What is answered with 200, by method and path."""
EVENTS: dict[tuple[str, str], dict[str, type]] = {
    ("get", "/events"): {"history": WatchHistory, "now": WatchNow}
}
"""Streams of server-sent events: what each event's data is."""
_REFUSED: dict[str, Schema] = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"type": ["string", "null"]},
    "reason": {"type": "string"},
}


def _refused(*required: str) -> Schema:
    return {**_object(required), "properties": _REFUSED}


ERROR = _object(("error",), error=_refused("message", "type", "param", "code"))
ANTHROPIC_ERROR = _object(
    ("type", "error"),
    type={"type": "string", "enum": ["error"]},
    error=_refused("message", "type"),
)


def describe() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, roles, summary, body, statuses in ROUTES:
        refused = {400, 429} | ({401} if roles else set()) | ({413} if body is not None else set())
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": f"{method} {path}",
            "responses": {
                str(status): _response(status, method, path) for status in sorted({*statuses, *refused})
            },
        }
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
        if roles:
            operation["security"] = [{role: []} for role in (*roles, "admin")]
        if body is not None:
            schema = body if isinstance(body, dict) else reference(body)
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "rose-scheduler", "version": "1"},
        "paths": paths,
        "components": {
            "securitySchemes": {
                role: {"type": "http", "scheme": "bearer", "description": f"token of role {role}"}
                for role in ("agent", "environment", "trainer", "node", "admin")
            }
            | {
                "trajectory": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "key of one trajectory, from its creation",
                }
            },
            "schemas": {
                "Error": ERROR,
                "AnthropicError": ANTHROPIC_ERROR,
                **schemas(
                    [
                        *(kind for *_, kind, _ in ROUTES if isinstance(kind, type)),
                        *ANSWERS.values(),
                        *(kind for events in EVENTS.values() for kind in events.values()),
                    ]
                ),
            },
        },
    }


def _response(status: int, method: str, path: str) -> dict[str, Any]:
    if status < 400:
        content: dict[str, Any] = {}
        if status == 200 and (method, path) in ANSWERS:
            content = {"application/json": {"schema": reference(ANSWERS[method, path])}}
        elif status == 200 and (method, path) in EVENTS:
            kinds = [reference(kind) for kind in EVENTS[method, path].values()]
            content = {"text/event-stream": {"schema": {"oneOf": kinds}}}
        return {"description": "done", **({"content": content} if content else {})}
    kind = "AnthropicError" if "/v1/messages" in path else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}
    return {"description": "refused", "content": {} if status == 503 else content}
