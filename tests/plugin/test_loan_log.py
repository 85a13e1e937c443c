"""What production's engine decided about its loans is in its log, and is decided again when that is replayed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from rose.decisions.log import Replayed, replay
from rose.policy.coserving.loans import AgentSaid, LoanBook
from rose.policy.coserving.search import LoanSearch
from rose.policy.coserving.steps import StepBook
from tests.plugin import harness
from tests.plugin.stand_in import Beating, eventually
from vllm_plugin import loan_log
from vllm_plugin.loan_log import LoanLog

CHUNKS, CHUNK_BLOCKS = 16, 32
KINDS = {"Lend", "WorthSearch", "ClaimBack", "Take"}


class Bench:
    """Both threads' books and the log between them, at random; nothing of it is a clock's or a file's but the log."""

    def __init__(self, seed: int) -> None:
        self.steps, self.search = StepBook(CHUNKS * CHUNK_BLOCKS, CHUNK_BLOCKS), LoanSearch()
        self.log = LoanLog(LoanBook(CHUNKS * CHUNK_BLOCKS, CHUNK_BLOCKS, CHUNKS, 1), self.steps)
        self.rng, self.at_s, self.target, self.lent = random.Random(seed), 100.0, 0, 0

    def step(self) -> None:
        rng = self.rng
        self.steps.claim(
            lent_chunks=self.lent, free_blocks=rng.randrange(80), waiting_blocks=rng.choice((0, 0, 50))
        )
        if rng.random() < 0.05 and self.steps.claim_chunks:
            self.steps.withdraw()
        self.lent += self.steps.to_lend(self.target, self.lent, came_back=rng.random() < 0.2)
        if rng.random() < 0.2:
            self.search.freed()
        elif rng.random() < 0.3:
            self.search.looked(self.at_s, self._offer(), num_missing=2, none_left=rng.random() < 0.7)

    def round(self) -> None:
        self.at_s += self.rng.random() * 3
        self.target = self.log.lendable(
            AgentSaid(
                at_s=self.at_s,
                mode=int(self.rng.choice((Mode.ON, Mode.ON, Mode.OFF))),
                lend_pages=self.rng.randrange(20),
                floor_pages=2,
                node_age_s=self.rng.random() * 4,
            )
        )
        self.lent = min(self.lent, self.target)
        self.log.may_find_more(self.at_s, self._offer(), self.search)
        self.log.round()

    def _offer(self) -> tuple[int, ...] | None:
        return self.rng.choice((None, (), (3, 4)))

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for _ in range(self.rng.randrange(6)):
                self.step()
            self.round()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROSE_DECISIONS", str(tmp_path / "logs"))
    return tmp_path / "logs"


@pytest.fixture
def scheduler(folder: Path, config: Any, node_dir: Path) -> Iterator[Any]:
    """vLLM's, with the side's background thread; 12 of 16 pages go out."""
    from vllm_plugin.scheduler import ServingScheduler

    rank, agent = (
        harness.write_rank(node_dir, "serving", mapped=False),
        Beating(NodeDir(node_dir).node_writer()),
    )
    wish = NodeState(mode=Mode.ON, lend_pages=12, has_serving=1)
    agent.write(wish)
    scheduler = harness.build(ServingScheduler, config)
    scheduler.rose_attach(harness.engine())

    def lent() -> bool:
        scheduler.rose.before_schedule()
        return len(scheduler.rose.balloon.inflated) == 12

    eventually(lent, "the loan is out")
    scheduler.agent, scheduler.wish = agent, wish
    yield scheduler
    if not scheduler.rose._stopping:
        scheduler.rose.stop()
    rank.close()
    agent.close()


def replayed(folder: Path) -> Replayed:
    (path,) = folder.glob("loans-*.rose")
    return replay(path)


def test_what_a_live_engine_decided_replays(scheduler: Any, folder: Path) -> None:
    """A loan goes out, requests claim it and are aborted, and the agent wants no more of it."""
    from vllm.v1.request import RequestStatus

    names = [f"waits{number}" for number in range(300)]
    for name in names:
        scheduler.add_request(harness.request(name, num_tokens=300))
    scheduler.rose.before_schedule()
    assert scheduler.rose.steps.claim_chunks > 0
    scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    scheduler.rose.hooks.idle()
    assert scheduler.rose.steps.claim_chunks == 0
    scheduler.agent.write(replace(scheduler.wish, mode=Mode.OFF))
    scheduler.agent.wake()
    eventually(lambda: scheduler.rose.seam.target_chunks == 0, "nothing may be lent")
    scheduler.rose.stop()

    found = replayed(folder)

    assert found.difference is None
    assert {"Lend", "ClaimBack", "Take"} <= set(found.num_actions)
    assert found.num_actions["Lend"] == 2


@pytest.mark.parametrize("seed", range(10))
def test_all_decisions_that_change_something_are_in_the_log_and_replay(folder: Path, seed: int) -> None:
    bench = Bench(seed)
    bench.run(300)
    bench.log.close()

    found = replayed(folder)

    assert found.difference is None
    assert set(found.num_actions) == KINDS
    assert min(found.num_actions.values()) > 20


def claims_less(patch: pytest.MonkeyPatch) -> None:
    claim = StepBook.claim
    patch.setattr(
        StepBook,
        "claim",
        lambda self, *, lent_chunks, **more: claim(self, lent_chunks=lent_chunks // 2, **more),
    )


def lends_under_pressure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        StepBook, "to_lend", lambda self, target, lent, *, came_back=False: max(0, target - lent - 1)
    )


@pytest.mark.parametrize(
    ("change", "event"),
    [
        (lambda patch: patch.setattr("rose.policy.coserving.serving.NODE_DEAD_S", 1.0), "AgentSaid"),
        (lambda patch: patch.setattr("rose.policy.coserving.search.ROUND_S", 0.0), "MoreWanted"),
        (claims_less, "BlocksCounted"),
        (lends_under_pressure, "RoomSeen"),
    ],
    ids=["lendable", "search", "claim", "room"],
)
def test_a_decision_that_would_be_another_one_now_is_found_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], event: str
) -> None:
    bench = Bench(3)
    bench.run(300)
    bench.log.close()
    change(monkeypatch)

    difference = replayed(folder).difference

    assert difference is not None
    assert event in difference


def test_each_file_of_a_log_replays_by_itself_and_they_stay_within_their_bounds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_DECISIONS_MAX_BYTES", "3000")
    monkeypatch.setenv("ROSE_DECISIONS_MAX_FILES", "3")
    monkeypatch.setattr("vllm_plugin.protocol_log.FLUSH_EVERY_S", 0.0)
    bench = Bench(4)
    bench.run(500)
    bench.log.close()

    paths = list(folder.iterdir())

    assert len(paths) == 3
    assert all(path.stat().st_size < 20_000 for path in paths)
    for path in paths:
        assert replay(path).difference is None


def test_after_more_decisions_than_are_kept_between_two_rounds_the_log_begins_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loan_log, "MAX_BEHIND", 8)
    bench = Bench(5)
    bench.run(50)
    for _ in range(100):
        bench.target = bench.lent = 5
        bench.step()
    bench.run(50)
    bench.log.close()

    paths = sorted(folder.iterdir())

    assert len(paths) > 1
    for path in paths:
        assert replay(path).difference is None


def test_without_the_variable_steps_note_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_DECISIONS", raising=False)
    bench = Bench(6)
    bench.run(20)
    assert bench.steps.decided is None
