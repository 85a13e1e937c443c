"""What the agent decides about production's promises: the observed report, switching off by itself, impossible promises.

The agent's round is called by hand on files that the test writes; no process is started.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.auth import Tokens
from rose.config import validate
from rose.coserve import cli
from rose.coserve.agent import NodeAgent
from rose.coserve.latency import ServingLatency
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, Phase, RankState, RolloutLease, ServingBoard, ServingLease
from rose.coserve.state_file import StateFile, take_over
from rose.errors import LedgerError, RequestError
from rose.policy.compat import Support, row
from rose.policy.deadlines import EXITS_REMEMBERED
from rose.units import PAGE_BYTES


class Bench:
    """An agent without its loop, and both engines' files."""

    def __init__(self, path: Path, **lending: Any) -> None:
        table = {
            "node_id": "n0",
            "dir": str(path / "n"),
            "serving": {"slo_ttft_ms": 500, "slo_tpot_ms": 100},
            "mode": "on",
            "engine": {"model": "policy", "max_model_len": 64},
            "lending": lending,
        }
        self.agent = NodeAgent(validate(NodeConfig, table), Tokens.generate())
        node = NodeDir(path / "n")
        self.agent._state = StateFile(self.agent)
        self.writers = [
            node.serving_lease_writer(),
            node.serving_board_writer(),
            node.rollout_lease_writer(),
        ]
        self.lease = ServingLease(
            phase=Phase.READY, support=Support.ELASTIC, total_pages=100, reserved_pages=50
        )
        self.board = ServingBoard(running=1, step_ns=20_000_000, used_pages=10)
        self.rollout = RolloutLease(phase=Phase.READY)
        self.agent._set_mode()
        self.round()
        self.round()

    def round(self, **board: int) -> None:
        """Production writes its board anew; the agent looks."""
        self.board = dataclasses.replace(self.board, **board)
        now_ns = time.monotonic_ns()
        records = (dataclasses.replace(self.lease, heartbeat_ns=now_ns), self.board, self.rollout)
        for writer, record in zip(self.writers, records, strict=False):  # the dead write nothing
            writer.write(record)  # type: ignore[arg-type]
        self.agent._round()
        self.rollout = dataclasses.replace(
            self.rollout, reserved_pages=self.agent.policy.lend_pages
        )  # it obeys

    def close(self) -> None:
        for writer in [*self.writers, self.agent._state]:
            writer.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, max_slo_breaches=3)
    yield bench
    bench.close()


def test_the_status_says_what_a_cut_may_take_at_the_worst_by_the_longest_kill(bench: Bench) -> None:
    short_s = bench.agent.status()["lending"]["worst_reclaim_s"]
    bench.agent.engine.exits_s.append(2.5)
    bench.round()
    assert bench.agent.status()["lending"]["worst_reclaim_s"] == pytest.approx(short_s - 0.5 + 2 * 2.5)


def test_a_long_kill_is_no_promise_for_ever(bench: Bench) -> None:
    short_s = bench.agent.status()["lending"]["worst_reclaim_s"]
    bench.agent.engine.exits_s.extend([2.5, *[0.3] * EXITS_REMEMBERED])
    bench.round()
    assert bench.agent.status()["lending"]["worst_reclaim_s"] == pytest.approx(short_s - 0.5 + 2 * 0.3)


def test_harvesting_ends_by_itself_after_broken_promises_and_begins_again_by_hand(bench: Bench) -> None:
    bench.round(breaches=2)
    assert bench.agent.mode == Mode.ON
    bench.round(breaches=3)
    assert bench.agent.mode == Mode.OFF
    assert "3 broken promises" in bench.agent.status()["errors"]["slo"]
    beat = bench.agent.heartbeat("one", 1)
    assert (beat.switched_off, beat.slo_breaches_while_lending, beat.lent_pages) == ("slo", 3, 0)
    assert bench.agent.status()["serving"]["slo_breaches_while_lending"] == 3
    bench.agent.change(mode=Mode.ON)
    bench.round()
    assert bench.agent.mode == Mode.ON
    assert "slo" not in bench.agent.status()["errors"]
    beat = bench.agent.heartbeat("one", 2)
    assert (beat.switched_off, beat.engine_kills, beat.lent_pages) == (None, 0, bench.agent.policy.lend_pages)


def test_what_production_says_of_itself_reaches_whoever_watches_the_fleet(bench: Bench) -> None:
    bench.lease = dataclasses.replace(bench.lease, phase=Phase.OFF, stranded_pages=27, errors=1)
    bench.round()
    beat = bench.agent.heartbeat("one", 1)
    assert (beat.stranded_pages, beat.plugin_errors) == (27, 1)


def test_a_promise_broken_after_the_engine_was_killed_is_not_its_loans(bench: Bench) -> None:
    """Its file stays, with what it had."""
    assert bench.rollout.reserved_pages > 0
    bench.writers.pop().close()
    for breaches in (1, 2, 3, 4):
        bench.round(breaches=breaches)
    assert bench.agent.device.held_pages() == 0
    assert bench.agent.breaches_while_lending == 0
    assert bench.agent.mode == Mode.ON


def test_what_a_production_that_is_gone_said_last_is_not_told_of_it(bench: Bench) -> None:
    bench.lease = dataclasses.replace(bench.lease, phase=Phase.OFF, stranded_pages=27, errors=1)
    bench.round()
    while bench.writers:
        bench.writers.pop().close()
    bench.round()
    beat = bench.agent.heartbeat("one", 1)
    assert (beat.stranded_pages, beat.plugin_errors) == (0, 0)


def test_a_promise_below_productions_own_step_is_refused(bench: Bench) -> None:
    for step in range(200):
        bench.round(step=step)
    with pytest.raises(RequestError, match=r"step of 20\.0 ms"):
        bench.agent.change(slo_tpot_ms=19.0)
    assert bench.agent.slo_tpot_ms == 100
    for step in range(200, 1000):
        bench.round(step=step, step_ns=150_000_000)  # slower than what the settings promise
    assert bench.agent.mode == Mode.OFF
    assert "below production's own step" in bench.agent.status()["errors"]["slo"]


def test_a_floor_larger_than_the_device_is_refused_and_changes_nothing(bench: Bench) -> None:
    with pytest.raises(RequestError, match="the 100 pages of the device"):
        bench.agent.change(floor_pages=101, mode=Mode.OFF)
    assert (bench.agent.mode, bench.agent.floor_pages) == (Mode.ON, 0)


def test_mode_observe_lends_nothing_and_reports_what_could_be_lent(bench: Bench) -> None:
    bench.agent.change(mode=Mode.OBSERVE)
    bench.round()
    bench.round()
    status = bench.agent.status()
    assert status["lending"]["lend_pages"] == 0
    assert status["observed"]["most_pages"] == 80  # 100 - 10 used - 10 headroom


def test_the_status_says_what_production_can_share_and_why(bench: Bench) -> None:
    assert bench.agent.status()["serving"]["support"] == "elastic"
    bench.lease = dataclasses.replace(
        bench.lease, phase=Phase.OFF, support=Support.REFUSED, row=row("lora").number
    )
    bench.round()
    status = bench.agent.status()
    assert (status["serving"]["support"], status["serving"]["because"]) == ("refused", "LoRA adapters")
    assert "LoRA adapters" in status["engine"]["waits_for"]
    assert status["lending"]["lend_pages"] == 0


class Memory:
    """A device that has as much free as a test says."""

    kind = "host"

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes: int | None = num_bytes

    def free_bytes(self) -> int:
        if self.num_bytes is None:
            raise LedgerError("free memory cannot be read", field="device")
        return self.num_bytes


def test_less_free_memory_than_the_reserve_is_a_cut_and_the_status_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.coserve.device._FREE_EVERY_S", 0.0)
    reserve = 512 << 20
    bench.agent.free.memory = memory = Memory(reserve)
    bench.round()
    lent = bench.agent.policy.lend_pages
    assert lent > 10
    assert bench.agent.status()["device"] == {
        "kind": "host", "free_bytes": reserve, "reserve_bytes": reserve, "short": False, "breaches": 0
    }  # fmt: skip
    memory.num_bytes = reserve - 9 * PAGE_BYTES - 1
    bench.round()
    state = NodeDir(bench.agent.config.dir).node().read()
    assert state is not None
    assert state.lend_pages == bench.agent.policy.lend_pages == lent - 10
    assert state.deadline_ns > 0
    assert (bench.agent.status()["device"]["short"], bench.agent.status()["device"]["breaches"]) == (True, 1)
    assert "the reserve of 512.0 MiB" in bench.agent.status()["lending"]["reason"]


def test_a_device_that_cannot_be_asked_is_an_error_in_the_status(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.coserve.device._FREE_EVERY_S", 0.0)
    bench.agent.free.memory = memory = Memory(1 << 40)
    bench.round()
    memory.num_bytes = None
    bench.round()
    assert "free memory cannot be read" in bench.agent.status()["errors"]["device"]
    memory.num_bytes = 1 << 40
    bench.round()
    assert "device" not in bench.agent.status()["errors"]


def test_policies_can_be_changed_while_something_is_lent(bench: Bench) -> None:
    lent = bench.agent.policy.lend_pages
    assert lent > 0
    bench.agent.change(policy="static", max_lend_pages=50)
    bench.round()
    assert bench.agent.policy.lend_pages == 50
    state = NodeDir(bench.agent.config.dir).node().read()
    assert state is not None
    assert (state.fixed, state.lend_pages) == (1, 50)


def test_the_heartbeat_tells_how_much_production_uses_and_which_promises_broke(bench: Bench) -> None:
    bench.round(used_pages=25, breaches=2)
    beat = bench.agent.heartbeat("one", 1)
    assert (beat.serving_use, beat.slo_breaches) == (0.25, 2)


def test_the_heartbeat_tells_how_the_engine_is_short_of_memory(bench: Bench) -> None:
    beat = bench.agent.heartbeat("one", 1)
    assert (beat.waiting, beat.num_preemptions) == (0, 0)
    bench.agent._engine_status = {"running": 4, "waiting": 3, "num_preemptions": 2}
    beat = bench.agent.heartbeat("one", 1)
    assert (beat.running, beat.waiting, beat.num_preemptions) == (4, 3, 2)


def test_the_heartbeat_tells_productions_p99_beside_what_is_promised_now(bench: Bench) -> None:
    beat = bench.agent.heartbeat("one", 1)
    assert (beat.serving_ttft_p99_s, beat.serving_tpot_p99_s, beat.slo_ttft_s, beat.slo_tpot_s) == (None,) * 4
    bench.agent.latency = ServingLatency("http://production/metrics")
    bench.agent.latency._p99_s = {"ttft": 0.2}
    bench.agent.change(slo_ttft_ms=400.0)
    beat = bench.agent.heartbeat("one", 1)
    assert (beat.serving_ttft_p99_s, beat.slo_ttft_s) == (0.2, 0.4)
    assert beat.slo_tpot_s is None
    assert bench.agent.status()["serving"]["p99_s"] == {"ttft": 0.2}


def test_production_is_told_the_bound_on_what_a_loan_may_cost_its_cache(bench: Bench) -> None:
    reader = NodeDir(bench.agent.config.dir).node()

    def told() -> int:
        state = reader.read()
        assert state is not None
        return state.max_loss_ppm

    assert told() == 10_000
    bench.agent.change(policy="paper")  # it is there to be compared with, as it was published
    assert told() == 0


def test_the_strictest_bound_on_the_cache_is_not_told_as_none(bench: Bench) -> None:
    """In millionths it rounds to 0, which stands for whatever a loan costs."""
    bench.agent.policy.params = dataclasses.replace(bench.agent.policy.params, max_hit_rate_loss=4e-7)
    bench.round()
    state = NodeDir(bench.agent.config.dir).node().read()
    assert state is not None
    assert state.max_loss_ppm == 1


def test_the_status_says_how_much_production_keeps_for_its_prefixes(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.lease = dataclasses.replace(bench.lease, queried_tokens=20_000, lost_tokens=100, kept_pages=7)
    bench.round()
    cli._show(bench.agent.status(), as_json=False)
    said = capsys.readouterr().out
    assert "missed 100 of 20000 tokens" in said
    assert "7 are kept" in said


def test_a_directory_made_anew_that_is_open_to_others_does_not_end_the_agent(
    bench: Bench, tmp_path: Path
) -> None:
    agent = bench.agent
    with NodeDir(tmp_path / "n").rank_writer("rollout", 0, 4) as worker:
        worker.write(RankState(resident_pages=7, audited_ns=1))
        assert agent.device.resident_pages() == {0: 7}
        shutil.rmtree(tmp_path / "n")
        (tmp_path / "n").mkdir()
        (tmp_path / "n").chmod(0o755)

        bench.round()
        agent.compare_books()

        assert "open to others" in agent.errors["node.state"]
        assert agent.device.held_pages() >= 7, "who was met before counts on"
    (tmp_path / "n").chmod(0o700)
    bench.round()
    assert "node.state" not in agent.errors


def test_another_agent_in_our_place_ends_us(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "n" / "node.state").unlink()
    with NodeDir(tmp_path / "n").node_writer(), pytest.raises(LedgerError, match="another live process"):
        bench.round()


async def test_an_agent_killed_while_it_stops_leaves_the_next_one_what_was_ordered(bench: Bench) -> None:
    agent = bench.agent
    assert agent.policy.lend_pages > 0
    await agent._leave([], Control())  # type: ignore[arg-type]
    state = NodeDir(agent.config.dir).node().read()
    assert state is not None
    assert state.lend_pages == 0
    agent._state.close()  # killed: the file stays
    after = NodeAgent(agent.config, Tokens.generate())
    assert take_over(after)
    assert after.mode == Mode.ON


def test_an_agent_that_stops_offers_its_engine_to_nobody(bench: Bench) -> None:
    bench.agent.engine.state = "ready"
    assert bench.agent.heartbeat("one", 1).state == "ready"
    bench.agent.stop()
    assert bench.agent.heartbeat("one", 2).state == "stopping"


class Control:
    """The agent's server of commands, for one that never had any."""

    async def stop(self) -> None:
        pass
