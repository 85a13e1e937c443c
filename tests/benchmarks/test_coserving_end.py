"""The end of a co-serving run, and rollouts alone: no request of a measured block is lost with the sender, or starved by what is not its arm."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import coserve
from benchmarks.coserving.analysis import BlockRecord, analyse, unanswered
from benchmarks.coserving.plan import SOLO, Arm, Prefix, Schedule, Timing, make_schedule
from benchmarks.coserving.world import answered
from rose.demo.ui import Stages
from rose.errors import ConfigError
from rose.evaluation.arms import RequestLatency, Slo
from rose.evaluation.arrivals import Arrival

TIMING = Timing(lead_s=0.02, traffic_s=0.05, tail_s=0.01)
ARMS = ("alone_1", "alone_2")


def schedule() -> Schedule:
    """Two requests to each of both arms, and rollouts alone at the end."""
    segment = [(Arrival(at_s=at_s, prompt_tokens=4, output_tokens=2), Prefix()) for at_s in (0.01, 0.04)]
    return make_schedule([segment], ARMS, TIMING)


@dataclass
class Sender:
    """Stands in for the fleet with its sender: every request is answered at its moment and the last one late, or when it is told (None)."""

    records: Path
    schedule: Schedule
    late_s: float | None
    at_the_end: list[int] = field(default_factory=list)
    """Requests that have a record when the sender is told to end."""

    def write(self, **line: Any) -> None:
        with self.records.open("a") as out:
            out.write(json.dumps(line) + "\n")

    async def start(self, _: Any) -> None:
        self.write(type="cycle", at_s=time.monotonic())
        loop, last = asyncio.get_running_loop(), len(self.schedule.arrivals) - 1
        for number, one in enumerate(self.schedule.arrivals):
            if number == last and self.late_s is None:
                continue
            delay_s = one.at_s + (self.late_s or 0.0) * (number == last)
            loop.call_later(delay_s, lambda number=number: self.write(type="request", index=number))

    def answer_last(self) -> None:
        self.write(type="request", index=len(self.schedule.arrivals) - 1)

    async def stop(self, _: str) -> None:
        lines = [json.loads(line) for line in self.records.read_text().splitlines()]
        self.at_the_end = [line["index"] for line in lines if line["type"] == "request"]


class World:
    """Stands in for the engines."""

    def __init__(self, records: Path) -> None:
        self.over: Callable[[], None] = lambda: None
        """Called when an arm comes into force for the second time: production has the core to itself again."""
        self.in_force = ""
        self.answered: dict[str, int] = {}
        """By arm: requests that had a record when it came into force last."""
        self.plan = argparse.Namespace(records_path=records, traffic=lambda: None)

    async def enter(self, arm: Arm) -> None:
        self.in_force = arm.name
        if arm.name in self.answered:
            self.over()
        text = self.plan.records_path.read_text()
        self.answered[arm.name] = text.count('"request"')

    async def read(self) -> Any:
        return None


async def run(world: World, sender: Any, plan: Any) -> Any:
    """The blocks that were measured."""
    return await coserve._run(
        argparse.Namespace(minutes=None, run=0),
        world,  # type: ignore[arg-type]
        sender,
        plan,
        Stages(Console(quiet=True)),
    )


async def test_the_sender_ends_when_the_slowest_request_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coserve, "delta", lambda *_: {})
    monkeypatch.setattr(coserve, "SOLO_LEAD_S", 0.0)
    monkeypatch.setattr(coserve, "MAX_LATE_S", 60.0)
    plan = schedule()
    sender = Sender(tmp_path / "records.jsonl", plan, late_s=0.6)
    world = World(sender.records)

    blocks = await run(world, sender, plan)

    assert {block.arm for block in blocks} >= set(ARMS)
    assert sorted(sender.at_the_end) == [0, 1, 2, 3]
    assert world.in_force == "alone_1"  # after rollouts alone, who still waits has the core to itself


@pytest.mark.parametrize(("patience_s", "measured"), [(60.0, True), (0.0, False)])
async def test_rollouts_alone_have_all_the_memory_when_production_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, measured: bool
) -> None:
    monkeypatch.setattr(coserve, "delta", lambda *_: {})
    monkeypatch.setattr(coserve, "SOLO_LEAD_S", 0.0)
    monkeypatch.setattr(coserve, "SOLO_PATIENCE_S", patience_s)
    monkeypatch.setattr(coserve, "MAX_LATE_S", 60.0)
    plan = schedule()
    # Where nobody waits for it, the last answer comes only when the blocks are over: a machine may be as late as it likes.
    sender = Sender(tmp_path / "records.jsonl", plan, late_s=0.6 if measured else None)
    world = World(sender.records)
    if not measured:
        world.over = sender.answer_last

    blocks = await run(world, sender, plan)

    assert world.answered.get(SOLO) == (4 if measured else None)
    assert [block.arm for block in blocks] == [*ARMS, SOLO][: 3 if measured else 2]


async def test_a_run_that_has_measured_nothing_says_so(tmp_path: Path) -> None:
    plan = schedule()
    sender = Sender(tmp_path / "records.jsonl", plan, late_s=0.0)
    with pytest.raises(ConfigError, match=r"--minutes: no block was measured"):
        await coserve._run(
            argparse.Namespace(minutes=1e-9, run=0),
            World(sender.records),  # type: ignore[arg-type]
            sender,  # type: ignore[arg-type]
            plan,
            Stages(Console(quiet=True)),
        )


@pytest.mark.parametrize(("engine", "minutes"), [("plain", 3.5), ("dp2", 7.0)])
def test_a_quick_run_has_time_for_each_engine_core_to_start(
    monkeypatch: pytest.MonkeyPatch, engine: str, minutes: float
) -> None:
    monkeypatch.setattr("sys.argv", ["coserve.py", "--quick", "--engine", engine])
    assert coserve._arguments().minutes == minutes


async def test_who_never_answers_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text(
        '{"type": "cycle"}\n{"type": "request", "index": 7}\n{"type": "request", "index": 1}\n{"ty'
    )
    assert (
        await answered(records, 2, timeout_s=0.0) == 1
    )  # 7 is none of the first two, and the last line is torn


def test_requests_that_have_no_record_are_told_by_their_arm() -> None:
    plan = schedule()
    every = range(len(plan.blocks))
    samples = [
        RequestLatency(
            index=0,
            phase=arm,
            at_s=0.0,
            ttft_s=0.1,
            end_s=0.2,
            itl_s=(),
            num_tokens=1,
            late_s=0.0,
            error=error,
        )
        for arm, error in (("alone_1", None), ("alone_1", "HTTP 500"), ("alone_2", None))
    ]
    assert unanswered(samples, plan, every) == {"alone_2": 1}
    assert unanswered(samples, plan, [0]) == {}


SLO = Slo(ttft_s=1.0, tpot_s=0.15)
JUDGED = ("alone_1", "alone_2", "paper", "rose")


def answers(arm: str, indices: Iterable[int], late: Collection[int] = ()) -> list[RequestLatency]:
    return [
        RequestLatency(
            index=index, phase=arm, at_s=0.0, ttft_s=1.5 if index in late else 0.1, end_s=2.0,
            itl_s=(0.1,) * 5, num_tokens=20, late_s=0.0, error=None,
        )
        for index in indices
    ]  # fmt: skip


def records() -> list[BlockRecord]:
    """Ours harvests more than the paper's way, and enough for both bars."""
    counters = {"seconds": 10.0, "serving_busy_s": 4.0, "serving_steps": 100.0}
    decoded = {"alone_1": 0.0, "alone_2": 0.0, "paper": 5500.0, "rose": 5900.0, SOLO: 10_000.0}
    return [
        BlockRecord(arm=arm, segment=0, run=0, number=number, counters={**counters, "decoded": tokens})
        for number, (arm, tokens) in enumerate([*decoded.items()] * 2)
    ]


def test_violations_are_counted_over_the_requests_that_each_arm_has() -> None:
    """A block that ours lacks, and in which production alone was late, is no credit to it: nor to the paper's way where it has it."""
    samples = [
        *answers("alone_1", range(40), late={38, 39}),
        *answers("alone_2", range(40), late={38, 39}),
        *answers("paper", range(40), late={38, 39}),
        *answers("rose", range(30), late={5}),
    ]

    found = analyse(samples, records(), SLO, JUDGED)

    assert found["summary"]["extra_violations"] == 1.0
    assert found["summary"]["num_pairs"] == 30
    assert found["arms"]["paper"]["extra_violations"] == 0.0
    # One violation more than the paper's way over the thirty, one figure ahead: its harvested share.
    assert (found["summary"]["ahead_of_paper_in"], found["summary"]["behind_paper_in"]) == (1, 1)


@pytest.mark.parametrize(
    ("lost", "met"), [({}, True), ({"alone_1": 1}, True), ({"rose": 1}, False)], ids=["none", "alone", "ours"]
)
def test_no_bar_is_met_while_requests_beside_rollouts_have_no_answer(lost: dict[str, int], met: bool) -> None:
    samples = [sample for arm in JUDGED for sample in answers(arm, range(40))]

    summary = analyse(samples, records(), SLO, JUDGED, unanswered_by_arm=lost)["summary"]

    assert (summary["bar_met"], summary["judged_met"]) == (met, met)
