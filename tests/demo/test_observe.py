"""From counters, status answers and log lines to curves, events and sums; restarts and torn lines included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import NodeState, RolloutLease, ServingBoard
from rose.demo.observe import Counter, JsonLines, Observer
from rose.demo.result import DEDICATED, HARVESTED, TierCount

Append = Callable[[dict[str, Any]], None]


@pytest.fixture
def observer(tmp_path: Path) -> Observer:
    return Observer(
        start_s=100.0,
        node_dir=tmp_path / "node",
        records_path=tmp_path / "records.jsonl",
        steps_path=tmp_path / "metrics.jsonl",
    )


def status(dedicated: int, harvested: int, resumed: int = 0) -> dict[str, Any]:
    return {
        "turns": {"queued": 3, "by_tier": {"dedicated": dedicated, "harvested": harvested}},
        "tokens": {"by_tier": {"dedicated": 2 * dedicated, "harvested": 2 * harvested}},
        "resumed_turns": resumed,
    }


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = {
        "step": number,
        "success_rate": 0.5,
        "end_s": 160.0 + number,
        "step_s": 10.0,
        "lr": 1e-3,
        "tiers": {"dedicated": {"turns": 7, "tokens": 9}},
        "update": {"kind": "delta", "bytes_dense": 100, "bytes_sent": 40, "density": 0.3},
    }
    return {**record, **changes}


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_a_counter_sums_over_restarts() -> None:
    counter = Counter()
    assert [counter.see(value) for value in (3, 5, 2, 2, 4)] == [3, 2, 2, 0, 2]
    assert counter.total == 9


def test_lines_are_read_once_whole_and_bad_ones_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = JsonLines(path)
    assert lines.poll() == []
    path.write_bytes(b'{"a": 1}\nnot json\n[1]\n{"b"')
    assert lines.poll() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert lines.poll() == [{"b": 2}]
    assert lines.num_bad == 2


def test_pressure_and_cuts_come_from_the_shared_files(observer: Observer, tmp_path: Path) -> None:
    node = NodeDir(tmp_path / "node")
    observer.sample(101.0)  # nothing there yet: no harm
    with node.serving_board_writer() as board, node.rollout_lease_writer() as rollout:
        with node.node_writer() as agent:
            board.write(ServingBoard(pressure_seq=2, needed_pages=12))
            rollout.write(RolloutLease(reclaim_seq=1, cut_requests=5, cut_ns=31_000_000))
            agent.write(NodeState(lend_pages=40))
            observer.sample(102.0)
        board.write(ServingBoard(pressure_seq=3, needed_pages=4))
        observer.sample(103.0)

    reclaim = observer.reclaim()
    assert (reclaim.pressure_events, reclaim.cuts, reclaim.cut_requests) == (3, 1, 5)
    assert [(event.at_s, event.kind) for event in observer.events] == [
        (2.0, "pressure"),
        (2.0, "cut"),
        (3.0, "pressure"),
    ]
    assert "31.0 ms, 5 requests" in observer.events[1].text
    assert observer.curves()["lent"].points[0] == (2.0, 40.0)


def test_tiers_between_two_times_is_a_difference_over_a_scheduler_restart(observer: Observer) -> None:
    observer.see_status(110.0, status(10, 0))
    observer.see_status(120.0, status(30, 20, resumed=2))
    observer.see_status(130.0, status(5, 5))  # restarted: its counters began again
    observer.see_status(140.0, status(6, 8, resumed=1))

    assert observer.tiers_between(10.0, 40.0) == {
        DEDICATED: TierCount(num_turns=26, num_tokens=52),
        HARVESTED: TierCount(num_turns=28, num_tokens=56),
    }
    assert observer.reclaim().resumed_turns == 3
    assert observer.curves()[HARVESTED].points[0] == (20.0, 4.0)


def test_engine_kills_are_counted_over_a_restart_of_the_agent(observer: Observer) -> None:
    for kills in (0, 2, 0, 1):
        observer.see_node({"engine": {"kills": kills, "idle_by": "cgroup"}})
    observer.see_node({"engine": None})
    assert (observer.reclaim().engine_kills, observer.idle_by) == (3, "cgroup")


def test_nonsense_in_a_status_changes_nothing(observer: Observer) -> None:
    observer.see_status(110.0, status(10, 1))
    for bad in (
        {},
        {"turns": []},
        {"turns": {"by_tier": {"dedicated": "x", "harvested": -4}}, "resumed_turns": None},
    ):
        observer.see_status(111.0, bad)

    assert observer.tier_totals()[DEDICATED] == TierCount(num_turns=10, num_tokens=20)


def test_traffic_lines_count_requests_errors_and_cycles(observer: Observer, tmp_path: Path) -> None:
    append(
        tmp_path / "records.jsonl",
        {"type": "cycle", "phase": "alone_1", "at_s": 110.0},
        {"type": "request", "at_s": 110.5, "error": None},
        {"type": "request", "at_s": 110.7, "error": "HTTP 500"},
        {"type": "request"},
    )
    observer.sample(112.0)

    assert (observer.num_requests, observer.num_errors) == (2, 1)
    assert observer.cycles == [("alone_1", 110.0)]
    assert observer.curves()["production"].points[10] == (10.0, 2.0)


def test_a_step_line_becomes_a_step(observer: Observer, tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", step(1, lr=5e-6, success_rate=0.75), {"note": "no step"})
    observer.sample(200.0)

    (found,) = observer.steps
    assert (found.step, found.start_s, found.end_s, found.success_rate) == (1, 51.0, 61.0, 0.75)
    assert found.tiers[DEDICATED] == TierCount(num_turns=7, num_tokens=9)
    assert found.tiers[HARVESTED] == TierCount()
    assert (found.update_kind, found.bytes_dense, found.bytes_sent, found.density) == ("delta", 100, 40, 0.3)


def test_steps_between_two_times_count_the_part_that_lies_inside(observer: Observer, tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", *(step(n, end_s=110.0 + 10 * n, step_s=10.0) for n in range(3)))
    observer.sample(200.0)  # of the run: 0 to 10, 10 to 20, 20 to 30

    assert observer.steps_between(0.0, 30.0) == pytest.approx(3.0)
    assert observer.steps_between(5.0, 12.0) == pytest.approx(0.7)
    assert observer.steps_between(30.0, 60.0) == 0.0


def test_a_run_that_begins_later_counts_from_there(observer: Observer) -> None:
    observer.start(150.0)
    observer.note(151.0, "note", "x")
    assert observer.events[0].at_s == 1.0


def test_a_step_repeated_after_a_restart_counts_once(observer: Observer, tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", step(1), step(2), step(2, success_rate=0.9), step(3))
    observer.sample(200.0)

    assert [(one.step, one.success_rate) for one in observer.steps] == [(1, 0.5), (2, 0.9), (3, 0.5)]
