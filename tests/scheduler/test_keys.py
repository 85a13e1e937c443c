"""A trajectory's key: chats in its own trajectory, and opens nothing else."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rose.auth import PARTS, Tokens, bearer
from rose.errors import Unauthorized
from rose.scheduler.journal import Journal
from rose.scheduler.openapi import describe
from rose.scheduler.records import FinishRecord
from rose.scheduler.store import TrajectoryStore, sp
from tests.scheduler.conftest import PROMPT, World, user

CHATS = {
    (method, base + path)
    for base in ("", "/s/{session}")
    for method, path in (
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("post", "/v1/responses"),
        ("post", "/v1/responses/input_tokens"),
        ("post", "/v1/messages"),
        ("post", "/v1/messages/count_tokens"),
        ("post", "/tokenize"),
        ("post", "/generate"),
        ("post", "/inference/v1/generate"),
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
    )
} | {("post", "/rose/v1/generate")}
"""All that a key is for.  A route that is added here lets an agent do more than sample in its own trajectory."""
PUBLIC = {
    ("get", path)
    for path in ("/openapi.json", "/metrics", "/healthz", "/health", "/readyz", "/", "/learning")
}


async def begin(world: World, **fields: Any) -> tuple[str, str]:
    """A new trajectory's id and key."""
    made = await world.ok("POST", "/rose/v1/trajectories", {"job": "job", **fields})
    return made["id"], made["key"]


async def with_key(
    world: World, key: str, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    async with world.session.request(
        method, world.url + path, json=body, headers={**bearer(key), **headers}
    ) as response:
        data = await response.read()
        return response.status, (await response.json() if data.startswith(b"{") else None)


def described() -> Iterator[tuple[str, str]]:
    for path, operations in describe()["paths"].items():
        for method in operations:
            yield method, path


CHAT = {"messages": [user("x")], "max_tokens": 2}


async def test_no_route_but_its_own_chat_opens_to_a_key(world: World) -> None:
    """Every route that is described, with a trajectory of its own and with a sibling's."""
    await world.start()
    await world.add("a")
    own, key = await begin(world, group_id="g", group_size=2)
    other, _ = await begin(world, group_id="g", group_size=2)
    await world.chat(other, [user("x")], max_tokens=2)
    routes = list(described())
    assert set(routes) >= CHATS | PUBLIC
    before = await world.ok("GET", f"/rose/v1/trajectories/{other}")
    bodies = {
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x", "max_output_tokens": 2},
        "/v1/responses/input_tokens": {"input": "x"},
        "/rose/v1/generate": {"token_ids": PROMPT},
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {}},
        "/generate": {"input_ids": PROMPT},
    }
    for method, path in routes:
        if (method, path) in PUBLIC:
            continue
        for name in (own, other):
            place = path.format(session=name, id=name, job="job", verb="drain", name=name, model="policy")
            body = bodies.get(path.removeprefix("/s/{session}"), CHAT) if method != "get" else None
            headers = {} if path.startswith("/s/") else {"X-Session-ID": name}
            status, answer = await with_key(world, key, method, place, body, **headers)
            if (method, path) in CHATS and name == own:
                assert status == 200, (method, path, answer)
            else:
                assert (status, answer["error"]["code"]) == (401, "unauthorized"), (method, path, name)
    assert await world.ok("GET", f"/rose/v1/trajectories/{other}") == before
    mine = await world.ok("GET", f"/rose/v1/trajectories/{own}")
    assert (mine["state"], mine["reward"], len(mine["turns"])) == ("running", None, 13)
    assert set(world.scheduler.store.trajectories) == {own, other}


@pytest.mark.parametrize("base", ["/v1", "/s/{}/v1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_knows_a_key_and_no_header_chats_in_its_trajectory(
    world: World, base: str, stream: bool
) -> None:
    await world.start()
    await world.add("a")
    name, key = await begin(world)
    async with openai.AsyncOpenAI(base_url=world.url + base.format(name), api_key=key) as client:
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x"}], max_tokens=3, stream=stream
        )
        if stream:
            async for _ in answer:  # type: ignore[union-attr]
                pass
    assert len((await world.ok("GET", f"/rose/v1/trajectories/{name}"))["turns"]) == 1


@pytest.mark.parametrize("way", ["path", "X-Session-ID", "X-SMG-Routing-Key", "body"])
@pytest.mark.parametrize("named", ["sibling", "unknown"])
async def test_a_key_is_refused_with_another_trajectorys_id(world: World, way: str, named: str) -> None:
    await world.start()
    await world.add("a")
    _, key = await begin(world)
    other = (await begin(world))[0] if named == "sibling" else "t-00000000000000000000"
    path = f"/s/{other}/v1/chat/completions" if way == "path" else "/v1/chat/completions"
    body = {**CHAT, "session_id": other} if way == "body" else CHAT
    headers = {way: other} if way.startswith("X-") else {}
    status, answer = await with_key(world, key, "POST", path, body, **headers)
    assert (status, answer["error"]["param"]) == (401, "Authorization")
    assert "another trajectory" in answer["error"]["message"]


async def test_what_is_almost_a_key_is_none(world: World) -> None:
    await world.start()
    await world.add("a")
    (name, key), (other, _) = await begin(world), await begin(world)
    body, _, seal = key.rpartition(".")
    forged = [
        f"{body}.{seal[:-1]}",
        f"{body}.{seal}A",
        f"{body}.{'A' * len(seal)}",
        f"{body}.",
        body,
        key.replace(name, other),
        f"{body}\u00e9.{seal}",
        seal,
        "rose-.",
        f"rose-.{seal}",
        name,
    ]
    for text in forged:
        status, answer = await with_key(world, text, "POST", "/v1/chat/completions", CHAT)
        assert (status, answer["error"]["param"]) == (401, "Authorization"), text
    assert (await with_key(world, key, "POST", "/v1/chat/completions", CHAT))[0] == 200


async def test_bytes_that_are_no_text_are_no_key(world: World) -> None:
    from tests.scheduler.test_hostile import raw

    await world.start()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
    for token in (b"\xff\xfe", b"rose-\xff.abc"):
        assert b" 401 " in (await raw(world, head + token + b"\r\nContent-Length: 2\r\n\r\n{}"))[:16]


async def test_keys_outlive_a_restart_and_end_with_the_trajectory(world: World) -> None:
    await world.start()
    await world.add("a")
    name, key = await begin(world)
    await world.scheduler.stop(drain_s=0)
    await world.start()
    await world.add("b")
    assert (await with_key(world, key, "POST", "/v1/chat/completions", CHAT))[0] == 200
    await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})
    status, answer = await with_key(world, key, "POST", "/v1/chat/completions", CHAT)
    assert (status, answer["error"]["param"]) == (409, "X-Session-ID")


async def test_a_creation_that_is_repeated_gives_the_same_key(world: World) -> None:
    await world.start()
    body, headers = {"job": "j"}, {"Idempotency-Key": "k"}
    first = await world.ok("POST", "/rose/v1/trajectories", body, headers=headers)
    assert await world.ok("POST", "/rose/v1/trajectories", body, headers=headers) == first


async def test_a_key_is_shown_once_and_kept_nowhere(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await world.start()
        await world.add("a")
        name, key = await begin(world, task={"n": 1})
        assert (await with_key(world, key, "POST", "/v1/chat/completions", CHAT))[0] == 200
        await with_key(world, key, "GET", "/status")
    seal = key.rpartition(".")[2]
    assert len(seal) >= 22  # 128 bits
    for path in (f"/rose/v1/trajectories/{name}", "/rose/v1/trajectories", "/status"):
        async with world.session.get(world.url + path, headers=bearer(world.tokens.admin)) as response:
            assert seal not in await response.text()
    await world.scheduler.stop(drain_s=0)
    files = [path for path in (world.tmp_path / "journal").rglob("*") if path.is_file()]
    assert any(name.encode() in path.read_bytes() for path in files)
    assert not any(seal.encode() in path.read_bytes() for path in files)
    assert seal not in caplog.text


# --- token files -----------------------------------------------------------------------------------------


def test_one_token_file_makes_the_same_keys_everywhere_and_another_does_not(tmp_path: Path) -> None:
    made = Tokens.generate()
    made.save(tmp_path / "tokens.toml")
    first, second = (Tokens.load(tmp_path / "tokens.toml") for _ in range(2))
    assert first.key_of("t-1") == second.key_of("t-1") == made.key_of("t-1") != made.key_of("t-2")
    assert Tokens.generate().key_of("t-1") != made.key_of("t-1")
    assert first.trajectory_of(f"Bearer {made.key_of('t-1')}") == "t-1"
    assert made.secret not in repr(made)


def old_file(path: Path) -> dict[str, str]:
    """A token file as it was before there were keys."""
    tokens = {role: f"{role}-0123456789abcdef" for role in ("agent", "trainer", "node", "relay", "admin")}
    path.touch(mode=0o600)
    path.write_text("".join(f'{role} = "{token}"\n' for role, token in tokens.items()))
    return tokens


async def test_a_token_file_without_environment_works_and_says_what_it_lacks(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old_file(tmp_path / "tokens.toml")
    world.tokens = Tokens.load(tmp_path / "tokens.toml")
    await world.start()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "token_file.environment" in warning
    assert "rose tokens FILE --upgrade" in warning
    assert world.tokens.agent not in warning
    await world.add("a")
    made = await world.ok("POST", "/rose/v1/trajectories", {"job": "j"}, role="agent")
    assert (await with_key(world, made["key"], "POST", "/v1/chat/completions", CHAT))[0] == 200
    finish = f"/rose/v1/trajectories/{made['id']}/finish"
    assert (await with_key(world, made["key"], "POST", finish, {"reward": 1}))[0] == 401
    await world.ok("POST", finish, {"reward": 1}, role="agent")


async def test_a_token_file_with_environment_says_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.start()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("name", "value"), [("environment", '"short"'), ("secret", "5"), ("secret", '"short"')]
)
def test_what_a_token_file_says_wrong_is_named(tmp_path: Path, name: str, value: str) -> None:
    from rose.errors import ConfigError

    old_file(tmp_path / "tokens.toml")
    with (tmp_path / "tokens.toml").open("a") as file:
        file.write(f"{name} = {value}\n")
    with pytest.raises(ConfigError, match=f"token_file.{name}"):
        Tokens.load(tmp_path / "tokens.toml")


def test_a_token_file_of_some_roles_is_taken_for_them_alone(tmp_path: Path) -> None:
    from rose.errors import ConfigError

    path = tmp_path / "train.toml"
    whole = Tokens.generate()
    whole.only(PARTS["train"]).save(path)

    tokens = Tokens.load(path, PARTS["train"])

    assert tokens.names == PARTS["train"]
    assert whole.admin not in path.read_text()
    with pytest.raises(ConfigError, match=r"token_file\.node"):
        Tokens.load(path, ["node"])
    with pytest.raises(ConfigError, match=r"token_file\.agent"):
        Tokens.load(path)
    with pytest.raises(ConfigError, match=r"token_file\.secret"):
        tokens.key_of("t-1")


def test_a_role_that_a_file_does_not_have_is_nobody_s() -> None:
    """Not that of who sends nothing, nor of who makes keys with nothing."""
    tokens = Tokens.generate().only(["relay"])
    assert tokens.check(f"Bearer {tokens.relay}", "relay") == "relay"
    for header in ("Bearer ", "Bearer", "bearer  ", "", None, "Bearer x"):
        with pytest.raises(Unauthorized):
            tokens.check(header, "node", "environment")
    seal = base64.urlsafe_b64encode(hmac.digest(b"", b"trajectory key\0t-1", "sha256")[:24]).decode()
    assert tokens.trajectory_of(f"Bearer rose-t-1.{seal}") is None


async def test_a_scheduler_serves_with_its_part_of_the_tokens(world: World, tokens: Tokens) -> None:
    world.tokens = tokens.only(PARTS["scheduler"])
    await world.start()
    await world.add("a")
    for part in ("node", "train"):
        assert set(PARTS[part]) <= {*PARTS["scheduler"], "relay", "publish", "public_key", "publish_key"}, (
            "whom it is to know"
        )
    made = await world.ok("POST", "/rose/v1/trajectories", {"job": "j"})
    assert made["key"] == tokens.key_of(made["id"])
    assert (await with_key(world, made["key"], "POST", "/v1/chat/completions", CHAT))[0] == 200


def test_an_upgraded_token_file_keeps_its_tokens_and_its_keys(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rose.cli import app

    path = tmp_path / "tokens.toml"
    tokens = old_file(path)
    before = Tokens.load(path)
    for _ in range(2):
        done = CliRunner().invoke(app, ["tokens", str(path), "--upgrade"])
        assert done.exit_code == 0, done.output
    after = Tokens.load(path)
    assert {role: getattr(after, role) for role in tokens} == tokens
    assert after.key_of("t-1") == before.key_of("t-1")
    assert after.environment not in (*tokens.values(), "")
    assert after.environment not in done.output
    assert path.stat().st_mode & 0o777 == 0o600


# --- deadlines -------------------------------------------------------------------------------------------


async def test_a_trajectory_past_its_deadline_is_given_up(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    name, key = await begin(world, deadline_s=0.2)
    engine.hold = asyncio.Event()
    status, answer = await with_key(world, key, "POST", "/v1/chat/completions", CHAT)
    assert (status, answer["error"]["code"], answer["error"]["reason"]) == (
        410,
        "trajectory_cancelled",
        "deadline",
    )
    await world.until(lambda: engine.num_running == 0)
    trace = await world.ok("GET", f"/rose/v1/trajectories/{name}")
    assert (trace["state"], trace["reason"]) == ("cancelled", "deadline")
    assert trace["deadline_at"] == pytest.approx(trace["created_at"] + 0.2)
    status, answer = await world.call("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})
    assert (status, answer["error"]["reason"]) == (410, "deadline")


@pytest.mark.parametrize("compact_bytes", [0, 2**30])
def test_deadlines_outlive_a_restart(tmp_path: Path, compact_bytes: int) -> None:
    def store() -> TrajectoryStore:
        journal = Journal(tmp_path)
        return TrajectoryStore(
            journal, sp.SampleParams(), max_trajectories=9, retained_finals=9, compact_bytes=compact_bytes
        )

    live = store()
    late, early, done, free = (
        live.create(job="j", group_id=name, group_size=1, task=None, sampling={}, deadline_s=deadline_s)
        for name, deadline_s in (("l", 100.0), ("e", 10.0), ("d", 10.0), ("f", None))
    )
    live.finish(FinishRecord(id=done, reward=1.0))
    begun = live.trajectories[early].created.created_at
    live.journal.close()
    again = store()
    assert again.expire_late(begun + 9.0) == []
    assert again.expire_late(begun + 11.0) == [sp.Discard(trajectory_ids=(early,), reason="deadline")]
    assert again.expire_late(begun + 11.0) == []
    again.journal.close()
    last = store()
    states = [last.state(name) for name in (late, early, done, free)]
    assert states == [("running", ""), ("cancelled", "deadline"), ("finished", ""), ("running", "")]
    last.journal.close()


def test_deadlines_of_what_has_ended_take_no_room(tmp_path: Path) -> None:
    live = TrajectoryStore(
        Journal(tmp_path), sp.SampleParams(), max_trajectories=9, retained_finals=0, compact_bytes=2**30
    )
    runs = live.create(job="j", group_id=None, group_size=1, task=None, sampling={}, deadline_s=10.0)
    for _ in range(3000):
        live.cancel(
            live.create(job="j", group_id=None, group_size=1, task=None, sampling={}, deadline_s=1e6), "x"
        )
    assert len(live._deadlines) < 1100
    begun = live.trajectories[runs].created.created_at
    assert live.expire_late(begun + 11.0) == [sp.Discard(trajectory_ids=(runs,), reason="deadline")]
    live.journal.close()


@pytest.mark.parametrize("value", [0, -1, "x", 61, True, 1e400])
async def test_a_deadline_out_of_bounds_is_400(world: World, value: Any) -> None:
    await world.start(timeouts={"max_trajectory_s": 60})
    status, answer = await world.call("POST", "/rose/v1/trajectories", {"job": "j", "deadline_s": value})
    assert (status, answer["error"]["param"]) == (400, "deadline_s" if value != 1e400 else "body")
