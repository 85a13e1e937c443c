"""Bodies between the daemons: read as what they are declared, refused by the name of the field, described as they are read."""

from __future__ import annotations

import logging
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import CapacityError, EngineError, Gone, NotFound, RequestError, RoseError
from rose.policy.routing import POLICY_NAMES
from rose.policy.samples import STALE_RULES
from rose.policy.worker import Tier
from rose.wire.errors import error_body, error_headers, error_of, read_refusal
from rose.wire.reading import Reports, read
from rose.wire.samples import (
    Ack,
    Finish,
    Lease,
    NewTrajectory,
    NewVersion,
    Resume,
    RoutingName,
    Settings,
    StaleRule,
)
from rose.wire.schema import schemas
from rose.wire.turns import Generate
from rose.wire.workers import Heartbeat, HeartbeatAnswer, Registered, Registration

BODIES = [
    Ack,
    Finish,
    Generate,
    Heartbeat,
    HeartbeatAnswer,
    Lease,
    NewTrajectory,
    NewVersion,
    Registered,
    Registration,
    Resume,
    Settings,
]
BEAT = {"incarnation": "1", "seq": 1, "state": "ready"}
LEASE = {"job": "j", "num_groups": 1, "version": "1.2"}


def encoded(body: Any) -> bytes:
    return msgspec.json.encode(body)


@pytest.mark.parametrize(
    ("kind", "body", "field", "says"),
    [
        (Heartbeat, {**BEAT, "seq": -1}, "seq", "must be a whole number from 0 to 9007199254740992"),
        (Heartbeat, {**BEAT, "state": "fine"}, "state", "must be one of ready, starting, stopping"),
        (Heartbeat, {**BEAT, "gated": 1}, "gated", "must be true or false"),
        (Heartbeat, {**BEAT, "serving_use": 1.5}, "serving_use", "must be a number from 0 to 1"),
        (Heartbeat, {**BEAT, "copies": ["a/b"]}, "copies[0]", "must be 1 to 64 of"),
        (Heartbeat, {**BEAT, "copies": ["a"] * 65}, "copies", "must be a list, each"),
        (Heartbeat, {**BEAT, "lent_s": -1}, "lent_s", "must be a number from 0 to "),
        (Heartbeat, {**BEAT, "version": "x"}, "version", "must be a version like '2.17'"),
        (Heartbeat, {"seq": 1, "state": "ready"}, "incarnation", "is required"),
        (Ack, {"step": 1, "attempt": True}, "attempt", "must be a whole number from 0 to 9999999999"),
        (Ack, {"step": 1, "attempt": 1, "stpe": 2}, "stpe", "unknown field"),
        (Lease, {**LEASE, "job": ""}, "job", "must be text of 1 to 256 printable characters"),
        (Lease, {**LEASE, "job": "a\n"}, "job", "must be text of 1 to 256 printable characters"),
        (Lease, {**LEASE, "job": "a\0b"}, "job", "must be text of 1 to 256 printable characters"),
        (Lease, {**LEASE, "version": [1]}, "version", "must be a version like '2.17' or a list of 2, each "),
        (Resume, {"attempt": 1, "consumed": [1]}, "consumed[0]", "must be text"),
        (Resume, {"attempt": 1, "consumed": "a"}, "consumed", "must be a list, each text"),
        (Finish, [], "body", "must be a JSON object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_what_it_must_be(kind: Any, body: Any, field: str, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(kind, encoded(body))

    assert refused.value.field == field
    assert refused.value.message.startswith(says)


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 100_000, b"nul"])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        read(Ack, data)

    assert refused.value.field == "body"


REGISTRATION = {"worker_id": "a", "url": "http://h:1", "tier": "dedicated", "model": "m", "max_model_len": 9, "incarnation": "1"}  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), [(Registration, REGISTRATION), (Heartbeat, BEAT)])
def test_a_newer_node_is_read_without_what_is_new_counted_and_named_once(
    kind: Any, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[str] = []
    reports = Reports(logging.getLogger("rose.test"), counted.append)

    for value in (1.0, {"nested": [1]}, None):
        assert reports.read(kind, encoded({**body, "said_by_nobody_yet": value})) == read(kind, encoded(body))
    assert reports.read(kind, encoded(body)) == read(kind, encoded(body))

    assert counted == [kind.__name__] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{kind.__name__} of a newer node: not read here: 'said_by_nobody_yet'; upgrade this program"
    ]


def test_a_report_that_names_a_million_fields_is_told_of_briefly(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports(logging.getLogger("rose.test"))

    for start in range(0, 4000, 1000):
        reports.read(
            Heartbeat, encoded({**BEAT, **{f"x\n{n:06}" * 20: 0 for n in range(start, start + 1000)}})
        )

    assert len(caplog.records) == 1
    assert len(caplog.text) < 1000
    assert "\n" not in caplog.records[0].getMessage()


@pytest.mark.parametrize("kind", [Heartbeat, HeartbeatAnswer, Registered])
def test_an_older_program_reads_what_a_newer_one_says(kind: Any) -> None:
    """It knows the first two fields, say, and one more that the newer one has not."""
    old = [(field.name, field.type, field.default) for field in msgspec.structs.fields(kind)[:2]]
    older = msgspec.defstruct("Older", [*old, ("was_once", int, 7)], kw_only=True)

    assert read(older, encoded({**BEAT, "worker_id": "a", "known": True})).was_once == 7


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_says_of_itself_how_it_is_read(kind: Any) -> None:
    """What may be left out has a default, and nothing but reports of nodes and answers lets unknown fields through."""
    schema = schemas([kind])[kind.__name__]

    open_ = kind in (Registration, Heartbeat, HeartbeatAnswer, Registered)
    assert schema.get("additionalProperties", True) is open_
    required = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
    assert schema.get("required", []) == required


@pytest.mark.parametrize("kind", BODIES)
def test_no_union_has_a_tuple(kind: Any) -> None:
    """With one of a fixed length msgspec 0.22 crashes in the garbage collector."""
    hints = get_type_hints(kind)
    unions = [get_args(hint) for hint in hints.values() if len(get_args(hint)) > 1]

    assert not [one for union in unions for one in union if get_origin(one) is tuple]


def test_the_names_are_those_of_the_policies() -> None:
    assert get_args(StaleRule) == STALE_RULES
    assert set(get_args(RoutingName)) == set(POLICY_NAMES)
    assert set(get_args(msgspec.structs.fields(Registration)[2].type)) == {tier.value for tier in Tier}


@given(st.builds(Heartbeat, incarnation=st.just("1"), seq=st.integers(0, 9), state=st.just("ready"), running=st.integers(0, 9)))  # fmt: skip
def test_what_is_sent_is_what_is_read(beat: Heartbeat) -> None:
    assert read(Heartbeat, encoded(beat)) == beat


# --- refusals


@pytest.mark.parametrize(
    "error",
    [
        NotFound("is not known", field="worker_id", fix="register it"),
        Gone("was cancelled", field="id", reason="stale"),
        CapacityError("is full", status=429, field="job", retry_after_s=7.0),
        CapacityError("took too long", status=504, retry_after_s=None),
        EngineError("died", field="engine"),
        RequestError("is odd", field="x", code="odd"),
    ],
)
def test_an_error_is_the_same_on_the_other_side(error: RoseError) -> None:
    headers = error_headers(error)

    got = error_of(error.status, encoded(error_body(error)), headers.get("Retry-After"))

    assert type(got) is type(error)
    assert (got.status, got.code, got.field) == (error.status, error.code, error.field)
    assert got.message.startswith(error.message)
    assert (error.fix or "") in got.message
    assert getattr(got, "reason", None) == getattr(error, "reason", None)
    assert getattr(got, "retry_after_s", None) == getattr(error, "retry_after_s", None)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"error": "x"}', b'{"error": {"message": 4}}', b"[" * 100_000]
)
def test_a_refusal_in_another_shape_says_nothing(body: bytes) -> None:
    said = read_refusal(body)

    assert (said.message, said.field, said.code) == ("", None, None)


def test_what_a_refusal_says_is_bounded() -> None:
    said = read_refusal(
        encoded({"error": {"message": "x" * 10**6, "param": "y" * 10**6, "code": "z" * 10**6}})
    )

    assert (len(said.message), len(said.field or ""), len(said.code or "")) == (1000, 300, 64)
