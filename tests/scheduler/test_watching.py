"""What people look at: live events, the trajectory viewer, traces, the console, the dashboard in a real browser."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rose.auth import bearer
from rose.errors import ConfigError
from rose.policy import turn_events as te
from rose.policy.fleet import Fleet, FleetParams
from rose.policy.worker import Tier
from rose.scheduler import app, cli, console
from rose.scheduler.timeline import Timeline
from rose.testing.fake_engine import Fault
from rose.wire import samples
from tests.scheduler.browser import CHROMIUM, Browser
from tests.scheduler.conftest import World, user

ROOT = Path(__file__).resolve().parents[2]


async def first_events(world: World, count: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    async with world.session.get(f"{world.url}/events", headers=bearer(world.tokens.environment)) as response:
        assert response.content_type == "text/event-stream"
        buffer = b""
        async for part in response.content.iter_any():
            buffer += part
            *blocks, buffer = buffer.split(b"\n\n")
            for block in blocks:
                name, data = block.decode().split("\n", 1)
                found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            if len(found) >= count:
                return found
    return found


async def moved_conversation(world: World) -> str:
    """Two turns; the first was cut on one engine after five tokens and went on at another."""
    await world.start(policy="round_robin")
    await world.add("a", mean_tokens=10_000)
    await world.add("b", mean_tokens=10_000, tier="harvested")
    name = await world.trajectory()
    for engine in world.engines.values():
        engine.faults.append(Fault(kind="reclaim", after=5))
    first = await world.chat(name, [user("hello")], max_tokens=12)
    for engine in world.engines.values():
        engine.faults.clear()
    await world.chat(name, [user("hello"), first["choices"][0]["message"], user("more")], max_tokens=8)
    return name


async def test_events_begin_with_history_and_tell_what_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FRESH_S", -1.0)
    name = await moved_conversation(world)
    (kind, history), (now_kind, now) = await first_events(world, 2)
    assert (kind, now_kind) == ("history", "now")
    mine = [span for span in history["spans"] if span[3] == name]
    assert [span[7] for span in mine].count("done") == 2
    assert len(mine) >= 3
    assert all(span[6] is not None and span[6] >= span[5] for span in mine)
    assert any(mark[2] == "reclaim" for mark in history["marks"])
    assert {worker["worker_id"] for worker in now["status"]["workers"]} == {"a", "b"}


async def test_a_leased_trajectory_is_as_stale_as_its_worst_token_of_any_attempt(world: World) -> None:
    """For a trainer at 2.10: 1.10 is where it is, 2.3 seven versions behind, and 1.3, of an attempt of before, as many."""
    await world.start()
    engine = await world.add("a")

    async def played(*versions: str) -> None:
        name, messages = await world.trajectory(), [user("x")]
        for version in versions:
            engine.version = version
            assert await world.nodes["a"].beat()
            answer = await world.chat(name, messages, max_tokens=4)
            messages += [answer["choices"][0]["message"], user("y")]
        await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": 1})

    await played("1.3")
    await played("1.10", "2.3")
    await world.ok("POST", f"/rose/v1/trajectories/{await world.trajectory()}/finish", {"reward": 1})
    lease = {"job": "job", "num_groups": 3, "version": [2, 10], "ttl_s": 60, "alpha": 9}
    await world.ok("POST", "/rose/v1/batches/lease", lease, role="trainer")

    _, (_, now) = await first_events(world, 2)
    assert now["staleness"] == [[7, 2]]


async def test_broken_promises_are_counted_from_the_first_heartbeat_on(world: World) -> None:
    await world.start()
    node = world.nodes
    await world.add("h", tier="harvested")
    timeline = world.scheduler.timeline
    node["h"].slo_breaches = 3
    await world.until(lambda: timeline.num_broken == 3)
    node["h"].slo_breaches = 1  # production was restarted
    await world.until(lambda: timeline._broken["h"] == 1)
    node["h"].slo_breaches = 2
    await world.until(lambda: timeline.num_broken == 4)
    assert [mark[1:] for mark in timeline.marks] == [("h", "slo")] * 2


class Moved:
    """A timeline on a clock of the test, with one worker."""

    def __init__(self) -> None:
        self.now_s = 0.0
        fleet = Fleet(params=FleetParams())
        fleet.register(
            at_s=0.0,
            worker_id="w",
            incarnation="i",
            tier=Tier.DEDICATED,
            model="m",
            max_model_len=9,
            cap=None,
        )
        self.seconds: list[float] = []
        self.timeline = Timeline(
            lambda: self.now_s, fleet, lambda turn_id: "t", on_rerouted=self.seconds.append
        )

    def at(self, at_s: float, action: te.Action) -> None:
        self.now_s = at_s
        self.timeline.on_action(action)

    def dispatch(self, at_s: float, attempt: int) -> None:
        self.at(
            at_s,
            te.Dispatch(
                turn_id="x", attempt=attempt, worker_id="w", num_kept_tokens=0, max_tokens=9, affinity="miss",
                queued_s=0.25,
            ),
        )  # fmt: skip

    def cut(self, at_s: float) -> None:
        self.at(at_s, te.Requeued(turn_id="x", worker_id="w", reason="reclaim", num_kept_tokens=0))

    def token(self, at_s: float) -> None:
        self.at(at_s, te.TokensKept(turn_id="x", attempt=1, start=0, num_tokens=1))


def test_reroute_latency_is_from_the_cut_to_the_next_token() -> None:
    moved = Moved()
    moved.dispatch(0.0, 1)
    moved.token(1.0)
    moved.cut(2.0)
    moved.dispatch(2.5, 2)
    assert moved.seconds == []  # a worker is not yet an answer
    moved.cut(3.0)  # again, before it said anything
    moved.dispatch(3.5, 3)
    moved.token(6.0)
    moved.token(7.0)
    assert moved.seconds == [4.0]
    moved.timeline.sample({"tokens": {}, "queue": {"depth": 0}, "turns": {"done": 0}})
    assert moved.timeline.samples[-1]["reroute_s"] == (4.0, 4.0)


async def test_productions_p99_is_shown_beside_its_promise(world: World, tmp_path: Path) -> None:
    await world.start()
    for name, ttft_s in (("a", 0.2), ("b", 0.45)):
        await world.add(name, tier="harvested")
        world.nodes[name].serving_p99_s = {"ttft": (ttft_s, 0.5)}
    world.nodes["a"].serving_p99_s["tpot"] = (0.2, 0.1)
    world.nodes["a"].waiting, world.nodes["a"].num_preemptions = 3, 7
    worst = {"ttft": {"p99_s": 0.45, "slo_s": 0.5}, "tpot": {"p99_s": 0.2, "slo_s": 0.1}}
    timeline = world.scheduler.timeline
    await world.until(lambda: len(timeline.worst_promises()) == 2 and len(timeline._promises) == 2)
    status = await world.ok("GET", "/status")
    assert status["serving_p99"] == worst
    assert [(row["waiting"], row["num_preemptions"]) for row in status["workers"]] == [(3, 7), (0, 0)]
    async with world.session.get(f"{world.url}/metrics") as response:
        metrics = await response.text()
    assert 'rose_serving_p99_seconds{promise="ttft"} 0.45' in metrics
    assert 'rose_serving_slo_seconds{promise="tpot"} 0.1' in metrics
    world.tokens.save(tmp_path / "tokens.toml")
    where = ["--url", world.url, "--token-file", str(tmp_path / "tokens.toml")]
    shown = await asyncio.to_thread(CliRunner().invoke, console.app, ["top", "--once", *where])
    assert "first token 450 of 500 ms, between two 200 of 100 ms" in " ".join(shown.output.split())
    # A node that does not know it any more, and one that went away, leave no number behind.
    world.nodes["a"].serving_p99_s = {}
    await world.until(lambda: list(timeline.worst_promises()) == ["ttft"])
    await world.kill("b")
    await world.ok("DELETE", "/workers/b", role="node")
    timeline.sample(status)
    assert timeline.worst_promises() == {}


async def test_the_chrome_trace_has_every_attempt_on_its_worker(world: World) -> None:
    name = await moved_conversation(world)
    trace = await world.ok("GET", "/debug/trace")
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in spans} == {name}
    assert all(event["dur"] >= 0 and {"pid", "tid", "ts"} <= set(event) for event in spans)
    threads = {
        e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert threads <= {"a", "b"}
    assert any(event["ph"] == "i" and event["name"] == "reclaim" for event in trace["traceEvents"])


async def test_every_token_of_a_branch_says_where_it_came_from(world: World) -> None:
    name = await moved_conversation(world)
    shown = await world.ok("GET", f"/rose/v1/trajectories/{name}/tokens")
    trace = await world.ok("GET", f"/rose/v1/trajectories/{name}")
    last = trace["turns"][-1]
    assert [row["id"] for row in shown["tokens"]] == last["prompt_token_ids"] + last["token_ids"]
    sampled = [row for row in shown["tokens"] if row["sampled"]]
    assert [row["logprob"] for row in sampled] == [v for turn in trace["turns"] for v in turn["logprobs"]]
    assert {row["version"] for row in sampled} == {"0.0"}
    first_turn = [row["worker"] for row in sampled if row["turn"] == 0]
    assert len(set(first_turn)) == 2
    tokenizer = world.engines["a"].tokenizer
    assert [row["text"] for row in shown["tokens"]] == [
        tokenizer.decode([row["id"]]) for row in shown["tokens"]
    ]
    status, error = await world.call("GET", f"/rose/v1/trajectories/{name}/tokens?turn=7")
    assert (status, error["error"]["param"]) == (400, "turn")


async def test_tokens_are_shown_without_text_when_no_engine_lives(world: World) -> None:
    await world.start(timeouts={"max_queue_s": 0.05})
    await world.add("a")
    name = await world.trajectory()
    await world.chat(name, [user("hello")], max_tokens=5)
    await world.kill("a")
    shown = await world.ok("GET", f"/rose/v1/trajectories/{name}/tokens")
    assert shown["tokens"]
    assert {row["text"] for row in shown["tokens"]} == {None}


async def test_the_console_shows_lists_and_exports_trajectories(world: World, tmp_path: Path) -> None:
    name = await moved_conversation(world)
    world.tokens.save(tmp_path / "tokens.toml")
    where = ["--url", world.url, "--token-file", str(tmp_path / "tokens.toml")]

    async def rose(*arguments: str, columns: int = 200) -> str:
        result = await asyncio.to_thread(
            CliRunner().invoke, console.app, [*arguments, *where], env={"COLUMNS": str(columns)}
        )
        assert result.exit_code == 0, result.output
        return result.output

    shown = await rose("show", name)
    assert "hello" in shown
    assert "harvested" in shown
    assert name in await rose("ls")
    assert name in await rose("ls", columns=40), "as other commands take it"
    out = tmp_path / "all.jsonl"
    await rose("export", "--out", str(out))
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["id"] == name
    assert "reclaim" in await rose("top", "--once")


async def test_a_listing_and_an_export_have_all_and_what_was_let_go_is_said(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start()
    world.tokens.save(tmp_path / "tokens.toml")
    where = ["--url", world.url, "--token-file", str(tmp_path / "tokens.toml")]
    names = [await world.trajectory(group_id="g") for _ in range(2)]

    async def rose(*arguments: str) -> Result:
        return await asyncio.to_thread(
            CliRunner().invoke, console.app, [*arguments, *where], env={"COLUMNS": "200"}
        )

    monkeypatch.setattr(samples, "USUAL_FOUND", 1)  # what a listing has that does not ask for more
    listed = (await rose("ls")).output
    assert all(name in listed for name in names)
    out = tmp_path / "all.jsonl"
    assert (await rose("export", "--out", str(out))).exit_code == 0
    assert len(out.read_text().splitlines()) == 2

    asked = console.CliClient.get

    def forgets(client: Any, path: str, **query: Any) -> Any:
        """As a scheduler that lets the first go between its listing and its reading."""
        return asked(client, path.replace(names[0], "trajectory-that-was-let-go"), **query)

    monkeypatch.setattr(console.CliClient, "get", forgets)
    exported = await rose("export", "--out", str(out))
    assert exported.exit_code == 0, exported.output
    assert "1 were gone before they were read" in exported.output
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["id"] == names[1]


async def test_a_file_that_cannot_be_written_is_named(world: World, tmp_path: Path) -> None:
    await world.start()
    await world.trajectory(group_id="g")
    world.tokens.save(tmp_path / "tokens.toml")
    for out, why in ((tmp_path / "missing" / "all.jsonl", "No such file"), (Path("/dev/full"), "No space")):
        arguments = ["export", "--out", str(out), "--url", world.url]
        arguments += ["--token-file", str(tmp_path / "tokens.toml")]
        result = await asyncio.to_thread(CliRunner().invoke, console.app, arguments)
        assert isinstance(result.exception, ConfigError), result.output
        assert str(out) in str(result.exception)
        assert why in str(result.exception)


async def test_names_and_words_cannot_reach_into_the_terminal(world: World, tmp_path: Path) -> None:
    await world.start()
    await world.add("a")
    world.tokens.save(tmp_path / "tokens.toml")
    name = await world.trajectory(group_id="[red]g[/red]\x9b2J")
    ids = world.engines["a"].tokenizer.encode("\x1b]0;title\x07hi")
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 2}}
    await world.ok("POST", "/rose/v1/generate", body, headers={"X-Session-ID": name})
    where = ["--url", world.url, "--token-file", str(tmp_path / "tokens.toml")]
    for arguments in (["show", name], ["ls"]):
        result = await asyncio.to_thread(
            CliRunner().invoke, console.app, [*arguments, *where], env={"COLUMNS": "200"}
        )
        assert result.exit_code == 0, result.output
        assert not set(result.output) & {"\x1b", "\x07", "\x9b"}
        assert "hi" in result.output or "[red]g[/red]" in result.output


async def test_grafana_panels_name_metrics_that_exist(world: World) -> None:
    await moved_conversation(world)
    async with world.session.get(f"{world.url}/metrics") as response:
        metrics = await response.text()
    known = set(re.findall(r"^# TYPE (\S+)", metrics, re.MULTILINE))
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"rose_\w+", query)}
    assert len(asked) >= 12
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} <= known


async def test_the_trace_context_goes_through_to_the_engine(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    given = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01", "tracestate": "vendor=1"}
    await world.ok("POST", "/v1/chat/completions", {"messages": [user("x")], "max_tokens": 2}, headers=given)
    (seen,) = list(engine.trace_parents)
    assert seen is not None
    version, trace, span, flags = seen.split("-")
    assert (version, trace, flags) == ("00", trace_id, "01")
    assert span != "00f067aa0ba902b7"
    await world.ok(
        "POST",
        "/v1/chat/completions",
        {"messages": [user("y")], "max_tokens": 2},
        headers={"traceparent": "nonsense"},
    )
    assert engine.trace_parents[-1] is None


def test_a_logged_error_is_one_json_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord(
            "rose.scheduler", logging.ERROR, "", 1, "went %s", ("wrong",), sys.exc_info()
        )
    line = cli.JsonFormatter().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("error", "rose.scheduler", "went wrong")
    assert "ValueError: two\nlines" in told["error"]


# --- operations ------------------------------------------------------------------------------------------


async def test_settings_change_while_running_and_the_old_value_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.start(cap_dedicated=3)
    await world.add("a")
    changed = await world.ok(
        "POST", "/admin/settings", {"cap_dedicated": 7, "policy": "random"}, role="admin"
    )
    assert changed == {"changed": {"cap_dedicated": [3, 7], "policy": ["cost", "random"]}}
    assert "cap_dedicated changed from 3 to 7" in caplog.text
    assert (await world.ok("GET", "/workers"))["workers"][0]["cap"] == 7
    assert (await world.ok("GET", "/admin/settings", role="admin"))["policy"] == "random"
    await world.chat(None, [user("x")], max_tokens=2)
    status, answer = await world.call("POST", "/admin/settings", {"policy": "best"}, role="admin")
    assert (status, answer["error"]["param"]) == (400, "policy")
    assert (await world.call("POST", "/admin/settings", {"policy": "random"}, role="agent"))[0] == 401


# --- the page --------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
async def test_the_dashboard_draws_live_data_in_a_browser(world: World) -> None:
    name = await moved_conversation(world)
    async with Browser() as page:
        await page.open(f"{world.url}/#token={world.tokens.environment}")
        await page.until("document.body.dataset.draws >= 1")  # no body while it loads
        assert await page.run("document.body.dataset.lanes") == "2"
        assert int(await page.run("document.body.dataset.spans")) >= 3
        assert await page.run("location.hash") == ""
        await page.until("/2\\s+turns done/.test(document.getElementById('cards').innerText)")
        # It updates by itself.
        await world.chat(None, [user("again")], max_tokens=3)
        await page.until("/3\\s+turns done/.test(document.getElementById('cards').innerText)")
        # The viewer shows the words and where they came from.
        await page.run(f"location.hash = '#t={name}'")
        await page.until("document.querySelectorAll('#tokens .s').length == 20")
        titles = await page.run("[...document.querySelectorAll('#tokens .s')].map((e) => e.title).join('|')")
        assert "harvested, attempt" in titles
        assert not page.errors
        # Chromium's own start page may ask for nothing else either.
        assert all(url.startswith((world.url, "about:", "data:", "chrome")) for url in page.requests), (
            page.requests
        )
