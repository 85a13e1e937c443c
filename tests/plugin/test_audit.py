"""The books of the page pools against the kernel: a real pager, real pages, and an agent that reads its report."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rose.coserve.audit import TOLERANCE_BYTES, Finding, ResidentAudit, disagreement
from rose.coserve.ledger import RecordWriter
from rose.coserve.node_dir import NodeDir
from rose.coserve.pages import KvGeometry
from rose.coserve.records import ChunkState, Mode, RankState
from rose.units import PAGE_BYTES
from tests.coserve.test_agent_watch import Bench
from vllm_plugin.memory import ChunkPlan, Pager

CHUNKS = 16
LAYERS = 2
LAYER_BYTES = CHUNKS * PAGE_BYTES
PLAN = ChunkPlan(
    geometry=KvGeometry(CHUNKS, [(0, PAGE_BYTES, LAYER_BYTES, LAYERS, PAGE_BYTES)]),
    num_blocks=CHUNKS,
    size_bytes=LAYERS * LAYER_BYTES,
    chunk_blocks=1,
    num_chunks=CHUNKS,
    chunk_pages=LAYERS,
    tail_bytes=0,
    aligned=True,
)
"""Chunk ``c``: page ``c`` of each of two layers."""


class Engine:
    """What an engine core writes, and its worker's pager."""

    def __init__(self, node_dir: NodeDir, role: str, warm_up: Callable[[Pager], None] | None = None) -> None:
        if warm_up is not None:
            self.pager = Pager(node_dir, role, 0, PLAN, guard=False)
            warm_up(self.pager)
        self.chunks: RecordWriter[ChunkState] = node_dir.chunks_writer(role, CHUNKS)  # type: ignore[arg-type]
        self._report = node_dir.rank(role, 0, CHUNKS)  # type: ignore[arg-type]
        self.want(set(range(CHUNKS)) if role == "serving" else set())
        if warm_up is None:
            self.pager = Pager(node_dir, role, 0, PLAN, guard=False)

    def want(self, chunks: set[int]) -> None:
        self.chunks.extra[:] = bytes(int(chunk in chunks) for chunk in range(CHUNKS))
        self.chunks.write(ChunkState(generation=1, heartbeat_ns=time.monotonic_ns()))
        self.chunks.wake()

    def audited(self, condition: Callable[[RankState], bool]) -> RankState:
        """A report of an audit that fits."""
        deadline_s = time.monotonic() + 60
        while True:
            record = self._report.read()
            if record is not None and record.audited_ns and condition(record):
                return record
            assert time.monotonic() < deadline_s, f"last: {record}"
            time.sleep(0.005)

    def close(self) -> None:
        self.pager.close()
        self.chunks.close()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    monkeypatch.setattr("vllm_plugin.memory.AUDIT_EVERY_S", 0.01)
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An agent that lends, without its loop; the rank files are the pager's."""
    bench = Bench(tmp_path, reclaim_deadline_s=60.0)  # nobody runs who could kill
    yield bench
    bench.close()


def test_books_that_agree_are_counted_and_change_nothing(bench: Bench, engines: list[Engine]) -> None:
    engines.append(Engine(NodeDir(bench.agent.config.dir), "rollout"))
    engines[0].want({3, 4, 9})
    record = engines[0].audited(lambda r: r.booked_bytes == 6 * PAGE_BYTES)
    assert (record.missing_bytes, record.touched_bytes) == (0, 0)
    bench.agent.compare_books()
    assert bench.agent.mode == Mode.ON
    audit = bench.agent.status()["audit"]
    assert (audit["looks"], audit["disagreements"]) == (1, 0)
    assert audit["ranks"][0]["booked_bytes"] == 6 * PAGE_BYTES


@pytest.mark.parametrize("role", ["rollout", "serving"])
@pytest.mark.parametrize("use", ["read", "write"])
def test_a_use_of_released_memory_stops_the_lending(
    bench: Bench, engines: list[Engine], role: str, use: str
) -> None:
    engine = Engine(NodeDir(bench.agent.config.dir), role)
    engines.append(engine)
    engine.want({0, 1, 2})
    engine.audited(lambda r: r.booked_bytes == 6 * PAGE_BYTES and r.touched_bytes == 0)
    bench.agent.compare_books()
    assert bench.agent.mode == Mode.ON

    view = engine.pager.arena.buffer
    at = LAYER_BYTES + 7 * PAGE_BYTES  # chunk 7, second layer
    if use == "write":
        view[at] = 1
    else:
        assert view[at] == 0
    record = engine.audited(lambda r: r.touched_bytes > 0)
    assert record.touched_bytes <= PAGE_BYTES
    bench.agent.compare_books()
    assert bench.agent.mode == Mode.OFF
    bench.round()
    status = bench.agent.status()
    assert status["lending"]["lend_pages"] == 0
    assert status["audit"]["disagreements"] == 1
    assert f"{role}.rank0: " in status["errors"]["audit"]
    assert "that it gave back were used" in status["errors"]["audit"]

    bench.agent.change(mode=Mode.ON)  # an operator who did not look
    assert "audit" not in bench.agent.status()["errors"]
    engine.audited(lambda r: r.audited_ns > record.audited_ns)
    bench.agent.compare_books()
    assert bench.agent.mode == Mode.OFF


def test_what_a_warm_up_used_is_given_back_and_is_no_disagreement(
    bench: Bench, engines: list[Engine]
) -> None:
    def warm_up(pager: Pager) -> None:
        pager.arena.buffer[5 * PAGE_BYTES] = 1
        assert pager.resident_bytes() == PAGE_BYTES

    engines.append(Engine(NodeDir(bench.agent.config.dir), "rollout", warm_up))
    engines[0].audited(lambda r: r.touched_bytes == 0)
    assert engines[0].pager.resident_bytes() == 0
    bench.agent.compare_books()
    assert bench.agent.status()["audit"]["disagreements"] == 0


def test_memory_that_is_booked_and_not_there_stops_the_lending(bench: Bench, engines: list[Engine]) -> None:
    engine = Engine(NodeDir(bench.agent.config.dir), "serving")
    engines.append(engine)
    engine.audited(lambda r: r.booked_bytes == LAYERS * LAYER_BYTES)
    engine.pager.arena.unmap([(0, TOLERANCE_BYTES)])  # behind the pager's back
    engine.audited(lambda r: r.missing_bytes == TOLERANCE_BYTES)
    bench.agent.compare_books()
    assert bench.agent.mode == Mode.ON
    engine.pager.arena.unmap([(LAYER_BYTES, PAGE_BYTES)])
    engine.audited(lambda r: r.missing_bytes == TOLERANCE_BYTES + PAGE_BYTES)
    bench.agent.compare_books()
    assert bench.agent.mode == Mode.OFF
    assert "18.0 MiB of the 64.0 MiB that it booked are not in memory" in bench.agent.errors["audit"]


def test_the_report_of_a_dead_rank_says_nothing(tmp_path: Path) -> None:
    node_dir, audit = NodeDir(tmp_path), ResidentAudit(NodeDir(tmp_path))
    writer = node_dir.rank_writer("rollout", 0, CHUNKS)
    writer.write(RankState(touched_bytes=5, audited_ns=1))
    assert len(audit.look()) == 1
    assert audit.look() == []  # one report counts once
    writer.write(RankState(touched_bytes=5, audited_ns=2))
    writer.close()
    assert audit.look() == []
    assert audit.report()["ranks"] == []


@pytest.mark.parametrize(
    ("missing", "touched", "wrong"),
    [(0, 0, False), (TOLERANCE_BYTES, 0, False), (TOLERANCE_BYTES + 1, 0, True), (0, 1, True)],
)
def test_any_use_and_only_much_missing_is_a_disagreement(missing: int, touched: int, wrong: bool) -> None:
    found = Finding(rank="r", booked_bytes=1 << 30, missing_bytes=missing, touched_bytes=touched)
    assert (disagreement(found) is not None) == wrong


def test_runs_of_chunks_cover_every_byte_once() -> None:
    state = bytes([1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0])
    mapped, released = PLAN.run_ranges(state)
    assert len(mapped) == LAYERS * 3
    assert mapped[:2] == [(0, 2 * PAGE_BYTES), (LAYER_BYTES, 2 * PAGE_BYTES)]
    pieces = sorted(mapped + released)
    assert pieces[0][0] == 0
    assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert sum(length for _, length in pieces) == PLAN.size_bytes
    assert sum(length for _, length in mapped) == 7 * LAYERS * PAGE_BYTES
