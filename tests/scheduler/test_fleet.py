"""The fleet's switch over HTTP: nodes beat, an operator gives orders, a scheduler dies in between."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from rose.auth import Tokens
from rose.errors import ConfigError
from rose.scheduler import fleet_api, fleet_cli
from tests.scheduler.conftest import World

IN_TIME = {"serving_ttft_p99_s": 0.2, "slo_ttft_s": 0.5}
LATE = {"serving_ttft_p99_s": 0.9, "slo_ttft_s": 0.5}


class Node:
    """A node agent, as far as the scheduler can tell, that obeys at once."""

    def __init__(
        self, world: World, name: str, group: str | None = None, incarnation: str = "1", port: int = 9
    ) -> None:
        self.world, self.name, self.group = world, name, group
        self.incarnation, self.port = incarnation, port
        self.seq = 0
        self.held = False
        self.pages = 40
        self.more: dict[str, Any] = {}

    async def register(self, **fields: Any) -> tuple[int, Any]:
        body = {
            "worker_id": self.name,
            "url": f"http://127.0.0.1:{self.port}",
            "tier": "harvested",
            "model": "policy",
            "max_model_len": 512,
            "incarnation": self.incarnation,
        }
        return await self.world.call("POST", "/workers", body | fields, role="node")

    async def beat(self, **fields: Any) -> dict[str, Any]:
        self.seq += 1
        body = {
            "incarnation": self.incarnation,
            "seq": self.seq,
            "state": "ready",
            "version": "0.0",
            "mode": "on",
        }
        body |= {"held": self.held, "held_pages": 0 if self.held else self.pages, "group": self.group}
        answer = await self.world.ok(
            "POST", f"/workers/{self.name}/heartbeat", body | IN_TIME | self.more | fields, role="node"
        )
        self.held = answer["held"] if answer["known"] else self.held
        return answer


async def nodes_of(world: World) -> list[Node]:
    await world.start()
    nodes = [Node(world, "a", "canary"), Node(world, "b"), Node(world, "c", "eu")]
    for node in nodes:
        assert (await node.register())[0] == 200
        await node.beat()
    return nodes


async def order(world: World, what: str, **body: Any) -> Any:
    return await world.ok("POST", f"/fleet/{what}", body, role="admin")


async def test_off_reaches_every_node_with_its_next_heartbeat(world: World) -> None:
    nodes = await nodes_of(world)
    told = await order(world, "off")
    assert [one["ordered"] for one in told["nodes"]] == ["off"] * 3
    for node in nodes:
        assert (await node.beat())["held"] is True
        await node.beat()
    told = await world.ok("GET", "/fleet")
    assert [(one["held"], one["held_pages"]) for one in told["nodes"]] == [(True, 0)] * 3
    newcomer = Node(world, "d", "asia")
    await newcomer.register()
    assert (await newcomer.beat())["held"] is True


async def test_one_group_is_held_and_the_others_go_on(world: World) -> None:
    nodes = await nodes_of(world)
    await order(world, "off", groups=["eu"])
    assert [(await node.beat())["held"] for node in nodes] == [False, False, True]
    await order(world, "on", groups=["eu"])
    assert [(await node.beat())["held"] for node in nodes] == [False, False, False]


async def test_the_canary_first_then_the_rest(world: World) -> None:
    nodes = await nodes_of(world)
    await order(world, "off")
    await order(world, "on", canary=["canary"], watch_s=600.0)
    assert [(await node.beat())["held"] for node in nodes] == [False, True, True]
    release = world.scheduler.fleet_routes._switch.release
    assert release is not None
    release.watch_s = 0.3
    async with asyncio.timeout(60):
        while any([(await node.beat())["held"] for node in nodes]):
            pass
        while (await world.ok("GET", "/fleet"))["release"] is not None:
            pass


async def test_a_canary_that_no_node_is_of_is_refused(world: World) -> None:
    await nodes_of(world)
    status, refused = await world.call(
        "POST", "/fleet/on", {"canary": ["canaries"], "watch_s": 1.0}, role="admin"
    )
    assert (status, refused["error"]["param"]) == (400, "canary")
    assert "no node is of group 'canaries'" in refused["error"]["message"]
    assert (await world.ok("GET", "/fleet"))["release"] is None


@pytest.mark.parametrize(
    ("what", "groups", "said"),
    [
        ("off", ["canari"], "no node is of group 'canari' (there are: canary, default, eu)"),
        ("off", ["eu", "canari"], "no node is of group 'canari' (there are: canary, default, eu)"),
        ("off", ["x", "eu", "y"], "no node is of group 'x' or 'y' (there are: canary, default, eu)"),
        (
            "off",
            ["c"],
            "no node is of group 'c'; 'c' is a node of group 'eu' (there are: canary, default, eu)",
        ),
        ("on", ["canari"], "no node is of group 'canari' (there are: canary, default, eu)"),
    ],
)
async def test_an_order_to_a_group_that_no_node_is_of_is_refused_whole(
    world: World, tmp_path: Path, what: str, groups: list[str], said: str
) -> None:
    nodes = await nodes_of(world)
    status, refused = await world.call("POST", f"/fleet/{what}", {"groups": groups}, role="admin")
    assert (status, refused["error"]["param"], refused["error"]["message"]) == (400, "groups", said)
    assert (await world.ok("GET", "/fleet"))["held"] == {}
    assert not (tmp_path / "journal" / "fleet.json").exists()
    assert [(await node.beat())["held"] for node in nodes] == [False] * 3


async def test_before_any_node_is_heard_all_are_held_but_no_group(world: World) -> None:
    await world.start()
    status, refused = await world.call("POST", "/fleet/off", {"groups": ["eu"]}, role="admin")
    assert (status, "no node has been heard" in refused["error"]["message"]) == (400, True)
    assert (await order(world, "off"))["all_held"] is True
    node = Node(world, "c", "eu")
    await node.register()
    assert (await node.beat())["held"] is True


async def test_an_order_that_was_kept_is_lifted_before_its_nodes_are_heard(world: World) -> None:
    await nodes_of(world)
    await order(world, "off", groups=["eu"])
    await world.scheduler.stop(drain_s=0)
    await world.start()
    await order(world, "on", groups=["eu"])
    node = Node(world, "c", "eu")
    await node.register()
    assert (await node.beat())["held"] is False


async def test_a_canary_that_breaks_its_promise_is_off_again_and_the_rest_was_never_on(world: World) -> None:
    nodes = await nodes_of(world)
    world.scheduler.fleet_routes._switch.late_s = 0.1
    await order(world, "off")
    await order(world, "on", canary=["canary"], watch_s=600.0)
    async with asyncio.timeout(60):
        while not (await nodes[0].beat(**LATE))["held"]:
            assert [(await node.beat())["held"] for node in nodes[1:]] == [True, True]
    told = await world.ok("GET", "/fleet")
    assert told["release"] is None
    assert told["taken_back"] == "a in group canary: P99 first token is 900 ms, 500 ms were promised"


async def test_what_was_ordered_outlives_the_scheduler(world: World, tokens: Tokens, tmp_path: Path) -> None:
    await nodes_of(world)
    await order(world, "off", groups=["canary"])
    await world.scheduler.stop(drain_s=0)
    await world.start()
    nodes = [Node(world, "a", "canary"), Node(world, "b")]
    for node in nodes:
        await node.register()
    assert [(await node.beat())["held"] for node in nodes] == [True, False]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "fleet": {"held": 7}}', "\x00" * 99]
)
async def test_a_file_that_cannot_be_read_holds_everybody(world: World, tmp_path: Path, text: str) -> None:
    (tmp_path / "journal").mkdir(mode=0o700)
    (tmp_path / "journal" / "fleet.json").write_text(text)
    nodes = await nodes_of(world)
    assert [(await node.beat())["held"] for node in nodes] == [True, True, True]
    await order(world, "on")
    assert [(await node.beat())["held"] for node in nodes] == [False, False, False]


async def test_only_admin_gives_orders_and_watchers_may_look(world: World) -> None:
    await world.start()
    for role in ("environment", "trainer", "node", "agent"):
        for what in ("on", "off"):
            assert (await world.call("POST", f"/fleet/{what}", {}, role=role))[0] in (401, 403)
    assert (await world.call("GET", "/fleet", role="node"))[0] == 200
    assert (await world.call("GET", "/fleet", role="agent"))[0] in (401, 403)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"groups": ["x"] * 65}, "groups"),
        ({"groups": [""]}, "groups"),
        ({"groups": ["a"], "canary": ["b"]}, "canary"),
        ({"watch_s": -1}, "watch_s"),
        ({"nodes": ["a"]}, "nodes"),
    ],
)
async def test_a_wrong_order_names_the_field(world: World, body: dict[str, Any], field: str) -> None:
    await world.start()
    status, answer = await world.call("POST", "/fleet/on", body, role="admin")
    assert status == 400
    assert field in answer["error"]["param"] + answer["error"]["message"]


async def test_an_order_that_cannot_be_kept_is_refused_and_changes_nothing(
    world: World, tmp_path: Path
) -> None:
    (node,) = (await nodes_of(world))[:1]
    (tmp_path / "journal" / "fleet.new").mkdir()
    status, _ = await world.call("POST", "/fleet/off", {}, role="admin")
    assert status in (503, 507)
    assert (await node.beat())["held"] is False


async def test_an_order_that_was_refused_is_not_carried_out_by_a_restart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = (await nodes_of(world))[:1]
    await order(world, "off")
    real, failed = os.fsync, list[int]()

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) and not failed:
            failed.append(descriptor)
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    status, _ = await world.call("POST", "/fleet/on", {}, role="admin")
    assert (status in (503, 507), len(failed)) == (True, 1)
    await world.scheduler.stop(drain_s=0)
    await world.start()
    await node.register()
    assert (await node.beat())["held"] is True


async def test_what_could_not_be_kept_is_kept_later(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that was taken back is no order that could be refused."""
    nodes = await nodes_of(world)
    world.scheduler.fleet_routes._switch.late_s = 0.1
    await order(world, "on", watch_s=600.0)
    monkeypatch.setattr(fleet_api, "RETRY_S", 0.05)
    blocked = tmp_path / "journal" / "fleet.new"
    blocked.mkdir()
    async with asyncio.timeout(60):
        while not (await nodes[0].beat(**LATE))["held"]:
            pass
    blocked.rmdir()
    kept = tmp_path / "journal" / "fleet.json"
    await world.until(lambda: json.loads(kept.read_text())["fleet"]["taken_back"])


async def test_one_that_was_deposed_writes_no_order(world: World, tmp_path: Path) -> None:
    """Its successor's would be gone."""
    await nodes_of(world)
    await order(world, "off", groups=["eu"])
    kept = (tmp_path / "journal" / "fleet.json").read_bytes()
    claim = world.scheduler.journal.claim
    assert claim is not None
    (tmp_path / "journal" / f"epoch-{claim.epoch + 1}").touch()
    status, _ = await world.call("POST", "/fleet/on", {}, role="admin")
    assert status == 503
    assert (tmp_path / "journal" / "fleet.json").read_bytes() == kept


# --- the command


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (404, '{"detail": "Not Found"}'),  # vLLM
        (404, '{"error": {"message": "Not Found", "type": "NotFoundError", "param": null, "code": 404}}'),
        (
            404,
            '{"error": {"message": "Not Found", "type": "x", "param": null, "code": "not_found"}}',
        ),  # rose-relay
        (405, "405: Method Not Allowed"),
        (501, "Unsupported method"),  # a plain file server
        (302, ""),
        (200, "<html>hello</html>"),
        (200, "[]"),
    ],
)
async def test_another_program_at_the_address_is_named_as_none_of_ours(
    world: World, tmp_path: Path, status: int, text: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    world.runners["other"] = runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    world.tokens.save(tmp_path / "tokens.toml")
    args = ["off", "--url", url, "--token-file", str(tmp_path / "tokens.toml")]
    found = await asyncio.to_thread(CliRunner().invoke, fleet_cli.app, args)
    assert isinstance(found.exception, ConfigError), found.exception
    assert f"{url} answers, but is no rose-scheduler" in str(found.exception)


async def run(world: World, tmp_path: Path, *words: str) -> tuple[int, str]:
    tokens = tmp_path / "tokens.toml"
    if not tokens.exists():
        world.tokens.save(tokens)
    args = [*words, "--url", world.url, "--token-file", str(tokens)]
    found = await asyncio.to_thread(CliRunner().invoke, fleet_cli.app, args)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


@pytest.fixture
async def obeying(world: World) -> Any:
    nodes = await nodes_of(world)

    async def beat() -> None:
        while True:
            for node in nodes:
                await node.beat()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(beat())
    yield nodes
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_command_waits_until_all_memory_is_back(world: World, tmp_path: Path, obeying: Any) -> None:
    code, text = await run(world, tmp_path, "off")
    assert (code, text.splitlines()[-1]) == (0, "all memory is back")
    code, text = await run(world, tmp_path, "status")
    assert code == 0
    assert "3 nodes, 0 may lend" in text
    code, text = await run(world, tmp_path, "on", "--canary", "canary", "--watch", "0.2")
    assert (code, text.splitlines()[-1]) == (0, "on")
    code, text = await run(world, tmp_path, "status", "--json")
    assert [one["ordered"] for one in json.loads(text)["nodes"]] == ["on"] * 3


async def test_the_command_names_who_keeps_memory(world: World, tmp_path: Path) -> None:
    await nodes_of(world)  # nobody beats: nobody hears of it
    code, text = await run(world, tmp_path, "off", "--wait", "0.1")
    assert (code, text.splitlines()[-1]) == (1, "NOT all memory is back: a, b, c")


def silence(world: World, name: str, silent_s: float) -> None:
    """As if the node had been heard so long ago."""
    routes = world.scheduler.fleet_routes
    heard_s, body = routes._said[name]
    routes._said[name] = heard_s - silent_s, body
    routes._switch._nodes[name].heard_s -= silent_s


async def test_the_command_names_who_was_silent_before_and_is_not_waited_for(
    world: World, tmp_path: Path
) -> None:
    for node in await nodes_of(world):
        silence(world, node.name, 600.0)
    code, text = await run(world, tmp_path, "on", "--watch", "0.1")
    assert code == 0
    assert text.splitlines()[-1] == "on"
    for name in "abc":
        assert re.search(rf"^not waited for: {name}, silent for 60\d s$", text, re.MULTILINE), text
    told = await world.ok("GET", "/fleet")
    assert [one["skipped"] for one in told["nodes"]] == [True] * 3
    assert [one["ordered"] for one in told["nodes"]] == ["on"] * 3


async def test_the_page_says_since_when_it_knows_what_a_silent_node_holds(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    await world.start()
    node = Node(world, "a")
    await node.register()
    await node.beat()
    _, text = await run(world, tmp_path, "status")
    assert "1 node, 1 may lend" in text
    silence(world, "a", 600.0)
    _, text = await run(world, tmp_path, "status")
    assert "held 80 MiB when last heard" in text


async def test_the_command_says_that_a_stage_was_taken_back(
    world: World, tmp_path: Path, obeying: Any
) -> None:
    world.scheduler.fleet_routes._switch.late_s = 0.1
    running = asyncio.create_task(run(world, tmp_path, "on", "--watch", "60"))
    await world.until(lambda: world.scheduler.fleet_routes._switch.release is not None)
    obeying[2].more = LATE
    code, text = await running
    assert code == 1
    assert "off again: c in group eu: P99 first token is 900 ms" in text


async def test_a_stage_that_nobody_measures_says_what_it_waits_for(
    world: World, tmp_path: Path, obeying: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood at 0 s to watch; into a file it said nothing at all."""
    for node in obeying:
        node.more = {"serving_ttft_p99_s": None}
    await world.until(
        lambda: not any(n.measured for n in world.scheduler.fleet_routes._switch._nodes.values())
    )
    stands, said = fleet_cli._stands, list[str]()
    monkeypatch.setattr(fleet_cli, "_stands", lambda told: said.append(stands(told)) or said[-1])
    running = asyncio.create_task(run(world, tmp_path, "on", "--canary", "canary", "--watch", "0.1"))
    await world.until(lambda: any("waits" in line for line in said))
    for node in obeying:
        node.more = {}
    code, text = await running
    assert code == 0
    assert "stage 1 of 2 (canary): waits until production's P99 is measured" in text


async def test_a_second_node_of_one_name_is_refused_while_the_first_is_heard(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pages count all the same, and an engine that was started again is at once let in."""
    a = (await nodes_of(world))[0]
    twin = Node(world, "a", "canary", "2", port=10)
    for _ in range(3):
        status, refused = await twin.register(host="host8")
        assert (status, refused["error"]["param"]) == (409, "worker_id")
    assert "is in use: the node at http://127.0.0.1:9 has this node_id" in refused["error"]["message"]
    assert "give each node a node_id of its own" in refused["error"]["message"]
    said = [record.getMessage() for record in caplog.records if "two nodes have" in record.getMessage()]
    assert len(said) == 1
    assert "http://127.0.0.1:10 (host host8) is refused" in said[0]

    assert (await twin.beat())["known"] is False
    told = await order(world, "off")
    (row,) = (one for one in told["nodes"] if one["unregistered"])
    assert (row["node"], row["ordered"], row["held_pages"]) == ("a", "off", 40)
    assert row["at"] == "http://127.0.0.1:10 (host host8)"

    again = Node(world, "a", "canary", "3")
    assert (await again.register())[0] == 200
    assert (await again.beat())["held"] is True
    assert (await a.beat())["known"] is False


async def test_off_waits_for_a_refused_node_that_fell_silent_with_memory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    await nodes_of(world)
    twin = Node(world, "a", "canary", "2", port=10)
    assert (await twin.register(host="host8"))[0] == 409
    await twin.beat(held_pages=99)
    for _, stranger in world.scheduler.fleet_routes._namesakes.strangers(world.scheduler.dispatcher.now_s()):
        stranger.heard_s -= 300.0
    code, out = await run(world, tmp_path, "off", "--wait", "0.2")
    assert (code, "http://127.0.0.1:10 (host host8)" in out) == (1, True), out
    assert "held 198 MiB when last heard" in (await run(world, tmp_path, "status"))[1]

    assert (await Node(world, "named-anew", "canary", "3", port=10).register(host="host8"))[0] == 200
    assert "198 MiB" not in (await run(world, tmp_path, "status"))[1]


async def test_one_that_falls_silent_leaves_its_name_to_another(world: World) -> None:
    a = (await nodes_of(world))[0]
    twin = Node(world, "a", "canary", "2", port=10)
    assert (await twin.register())[0] == 409
    assert (await a.beat())["known"] is True
    world.scheduler.book.fleet.workers["a"].heard_at_s -= world.scheduler.book.fleet.params.dead_s
    assert (await twin.register())[0] == 200
    assert (await twin.beat())["known"] is True
    assert (await a.register())[0] == 409


async def test_not_all_memory_is_back_while_another_node_of_the_name_holds_some(
    world: World, tmp_path: Path
) -> None:
    """Of an agent that knows no refusal, at the same address: nothing tells it from an engine that was started again."""
    first = (await nodes_of(world))[0]
    twin = Node(world, "a", "canary", "2")
    assert (await twin.register())[0] == 200
    assert (await twin.beat())["known"] is True

    async def beat() -> None:
        while True:
            await twin.beat()
            if not (await first.beat(held=False, held_pages=99))["known"]:
                await first.register()
            await asyncio.sleep(0.02)

    beating = asyncio.create_task(beat())
    for name in ("b", "c"):
        await world.ok("DELETE", f"/workers/{name}", role="node")
    try:
        code, out = await run(world, tmp_path, "off", "--wait", "1.5")
        assert (code, "NOT all memory is back: a at http://127.0.0.1:9" in out) == (1, True), out
        code, out = await run(world, tmp_path, "status")
        assert (code, "198 MiB" in out) == (1, True), out
        assert "a is the node_id of http://127.0.0.1:9 as well, which is not registered" in out
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
