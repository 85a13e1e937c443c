"""The decision log: a recorded run gives the same actions again, to the last field, and stays bounded."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from rose.auth import Tokens
from rose.cli import app
from rose.decisions.event_format import TURNS
from rose.decisions.log import DecisionLog, logs, replay
from rose.errors import LedgerError
from rose.policy import turn_events as te
from rose.policy.routing import POLICY_NAMES, make_policy
from rose.policy.stop_reasons import RECLAIMED
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier
from rose.testing.fake_engine import FakeEngine, Fault, serve_engine
from rose.testing.fake_node import FakeNode
from tests.policy.turn_kit import join
from tests.scheduler.conftest import World, user
from tests.scheduler.processes import Daemon
from tests.scheduler.test_restart import agent, reached


def live(directory: Path, policy: str, *, events: int = 400, max_bytes: int = 10**9) -> TurnBook:
    """A recorded run: turns come and go on five workers that cut, die and come back."""
    rng = random.Random(5)
    book = TurnBook(make_policy(policy, random.Random(1)))
    log = DecisionLog(directory, "decisions", TURNS, book, max_bytes=max_bytes, max_files=3)
    for index in range(5):
        join(book, f"w{index}", rng.choice(list(Tier)))
    log.roll()
    now_s, number = 1.0, 0
    for _ in range(events):
        now_s += rng.expovariate(5.0)
        turns = sorted(turn.spec.turn_id for turn in book.turns.values() if turn.worker is not None)
        name = rng.choice(turns) if turns else ""
        kind = rng.choice(["submit", "submit", "tokens", "end", "cut", "lost", "tick", "beat"])
        event: te.Event
        if kind in ("submit", "tick", "beat") or not name:
            number += 1
            worker = rng.choice(sorted(book.fleet.workers))
            event = {
                "tick": te.ClockTicked(at_s=now_s),
                "beat": te.WorkerHeartbeat(
                    at_s=now_s,
                    worker_id=worker,
                    incarnation="1",
                    seq=10**6 + number,
                    version=(1, number // 50),
                    state="ready",
                    kv_budget_tokens=2000,
                    reclaim_seq=number // 40,
                    slack_s=0.25,
                    lent_s=3.0,
                ),
            }.get(kind) or te.TurnSubmitted(
                at_s=now_s,
                turn_id=f"n{number}",
                trajectory_id=f"t{rng.randrange(20)}",
                job="j",
                model="m",
                group_id=rng.choice([None, "g"]),
                num_prompt_tokens=rng.randint(1, 400),
                max_tokens=50,
                min_version=rng.choice([None, (1, 0)]),
            )
        elif kind == "tokens":
            attempt, count = book.turns[name].attempt, rng.randint(1, 9)
            event = te.TokensArrived(
                at_s=now_s, turn_id=name, attempt=attempt, token_ids=(7,) * count, logprobs=(-1.0,) * count
            )
        elif kind in ("end", "cut"):
            turn = book.turns[name]
            count = len(turn.token_ids) - turn.attempt_start
            event = te.AttemptEnded(
                at_s=now_s,
                turn_id=name,
                attempt=turn.attempt,
                finish_reason="stop" if kind == "end" else "abort",
                stop_reason=RECLAIMED if kind == "cut" else None,
                num_cached_tokens=3,
                versions=(te.Span(version=(1, 9), start=0, num_tokens=count),) if count else (),
            )
        else:
            event = te.AttemptFailed(
                at_s=now_s, turn_id=name, attempt=book.turns[name].attempt, kind="lost", message="reset"
            )
        log.record(event, book.handle(event))
        log.flush()
    log.close()
    return book


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_action_of_a_recorded_run_comes_out_again(tmp_path: Path, policy: str) -> None:
    live(tmp_path, policy)
    (path,) = logs(tmp_path)
    found = replay(path)
    assert found.difference is None
    assert found.num_events == 400
    assert {"Dispatch", "Requeued", "TurnEnded"} <= set(found.num_actions)


def test_a_full_log_goes_on_in_a_new_file_and_the_oldest_leaves(tmp_path: Path) -> None:
    live(tmp_path, "cost", events=800, max_bytes=10_000)
    paths = logs(tmp_path)
    assert len(paths) == 3
    assert paths[0].name != "decisions-1.rose"  # it is gone
    for path in paths:  # each by itself, from the state it starts with
        found = replay(path)
        assert found.difference is None


def test_a_changed_decision_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live(tmp_path, "sticky_least_loaded")
    assert CliRunner().invoke(app, ["replay", str(tmp_path)]).exit_code == 0
    monkeypatch.setattr(
        "rose.policy.routing.StickyLeastLoadedPolicy.choose", lambda self, turn, able: able[0]
    )
    found = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert found.exit_code == 1
    assert "then" in found.output
    assert "now" in found.output


def test_a_torn_tail_is_said_and_damage_is_an_error(tmp_path: Path) -> None:
    live(tmp_path, "paper")
    (path,) = logs(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    assert replay(path).torn
    assert replay(path).num_events == 399
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(LedgerError, match="damaged"):
        replay(path)


def test_what_cannot_be_encoded_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = TurnBook(make_policy("cost", random.Random(1)))
    log = DecisionLog(tmp_path, "decisions", TURNS, book, max_bytes=10**6, max_files=9)
    log.roll()
    tick = te.ClockTicked(at_s=1.0)
    log.record(tick, book.handle(tick))
    for reason in ("\udce2", "lost"):
        log.record(tick, [te.Requeued(turn_id="a", worker_id="w", reason=reason, num_kept_tokens=0)])
        assert "the decision log ends here" in caplog.text
    assert log.num_lost == 1  # of two: the first ended it
    (path,) = logs(tmp_path)
    assert replay(path).num_events == 1

    book.runs["job"] = "\udce2"
    log.roll()
    log.record(tick, [])
    assert log.num_lost == 2
    del book.runs["job"]
    log.roll()
    log.record(tick, book.handle(tick))
    log.close()
    assert replay(logs(tmp_path)[-1]).num_events == 1


def test_the_log_holds_no_token(tmp_path: Path) -> None:
    book = TurnBook(make_policy("cost", random.Random(1)))
    join(book, "w", Tier.DEDICATED)
    log = DecisionLog(tmp_path, "decisions", TURNS, book, max_bytes=10**6, max_files=1)
    log.roll()
    ids = (4_000_000_001, 4_000_000_002)
    for event in (
        te.TurnSubmitted(
            at_s=1.0, turn_id="a", trajectory_id="t", job="j", model="m", num_prompt_tokens=5, max_tokens=9
        ),
        te.TokensArrived(at_s=1.1, turn_id="a", attempt=1, token_ids=ids, logprobs=(-0.123, -0.456)),
    ):
        log.record(event, book.handle(event))
    log.roll()  # the turn is in the state now
    event = te.AttemptEnded(at_s=1.2, turn_id="a", attempt=1, finish_reason="stop")
    log.record(event, book.handle(event))
    log.close()
    (path,) = logs(tmp_path)
    assert ids[0].to_bytes(4, "little") not in path.read_bytes()
    assert ids[0].to_bytes(4, "big") not in path.read_bytes()
    assert replay(path).num_actions["TurnEnded"] == 1


async def test_a_daemons_own_log_replays(world: World) -> None:
    await world.start(policy="cost")
    await world.add("a")
    await world.add("b", tier="harvested")
    for index in range(6):
        name = await world.trajectory(group_id=f"g{index // 2}", group_size=2)
        await world.chat(name, [user("x")], max_tokens=4)
        await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", {"reward": index})
    await world.scheduler.stop(drain_s=0)
    (path,) = logs(world.tmp_path / "journal", "decisions")
    found = replay(path)
    assert found.difference is None
    assert found.num_actions["TurnEnded"] == 6
    assert path.stat().st_mode & 0o077 == 0


async def test_a_live_scheduler_that_is_killed_decides_the_same_in_replay(tmp_path: Path) -> None:
    """The daemon's own process, engines that cut turns and run out of memory, SIGKILL in the middle."""
    tokens = Tokens.generate()
    tokens.save(tmp_path / "tokens.toml")
    daemon = Daemon(tmp_path)
    url = await daemon.start()
    engines, runners, beats = [], [], []
    async with aiohttp.ClientSession() as session:
        for name, tier in (("own", "dedicated"), ("lent", "harvested")):
            engine = FakeEngine(token_s=0.002)
            runner, engine_url = await serve_engine(engine)
            node = FakeNode(
                session, url, tokens.node, engine, engine_url, worker_id=name, tier=tier, period_s=0.02
            )
            node.kv_budget_tokens = 400 if tier == "harvested" else None
            engines.append(engine)
            runners.append(runner)
            beats.append(asyncio.create_task(node.run()))
        for engine in engines:
            engine.faults.extend(Fault(kind="reclaim", after=after) for after in (1, 4, 7))
        agents = [asyncio.create_task(agent(session, url, tokens, number)) for number in range(8)]
        await reached(lambda: sum(len(engine.requests) for engine in engines) >= 16)
        held = asyncio.Event()  # no agent is done before its scheduler is killed, however slow the machine
        for engine in engines:
            engine.hold = held
        (first,) = logs(tmp_path / "journal", "decisions")
        # It writes what has gathered now and then: what a kill takes away is not in the log.
        await reached(lambda: replay(first).num_actions["Requeued"] > 0)
        await daemon.end()
        await daemon.start()
        held.set()
        await asyncio.gather(*agents)
        for task in beats:
            task.cancel()
    assert await daemon.end(signal.SIGTERM) == 0
    for runner in runners:
        await runner.cleanup()
    found = CliRunner().invoke(app, ["replay", str(tmp_path / "journal")])
    assert found.exit_code == 0, found.output
    both = [replay(path) for path in logs(tmp_path / "journal", "decisions")]
    assert len(both) == 2  # one of each life
    assert both[0].num_actions["Requeued"] > 0
    assert both[1].num_actions["Dispatch"] > 0
