"""The pager of a worker follows its own engine core, not the file that a dead one left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from rose.coserve.ledger import RecordWriter
from rose.coserve.node_dir import NodeDir
from rose.coserve.pages import Arena, HostPagePool, KvGeometry
from rose.coserve.records import ChunkState, Mode, NodeState, Phase, RolloutLease
from rose.errors import LedgerError
from rose.policy.coserving.chunks import MAPPED, MOVING
from rose.units import PAGE_BYTES
from tests.plugin.reports import having_memory
from vllm_plugin import compat
from vllm_plugin.memory import ChunkPlan, Pager

CHUNKS = 8
PLAN = ChunkPlan(
    geometry=KvGeometry(CHUNKS, [(0, PAGE_BYTES, PAGE_BYTES, 1, PAGE_BYTES)]),
    num_blocks=CHUNKS,
    size_bytes=CHUNKS * PAGE_BYTES,
    chunk_blocks=1,
    num_chunks=CHUNKS,
    chunk_pages=1,
    tail_bytes=0,
    aligned=True,
)


@pytest.fixture
def node_dir(tmp_path: Path) -> NodeDir:
    return NodeDir(tmp_path)


@pytest.fixture
def pagers() -> Iterator[list[Pager]]:
    started: list[Pager] = []
    yield started
    for pager in started:
        pager.close()


def wish(writer: RecordWriter[ChunkState], chunks: set[int], generation: int) -> None:
    writer.extra[:] = bytes(int(chunk in chunks) for chunk in range(CHUNKS))
    writer.write(ChunkState(generation=generation, heartbeat_ns=time.monotonic_ns()))
    writer.wake()


def mapped(node_dir: NodeDir, role: str) -> set[int | str]:
    reader = node_dir.rank(role, 0, CHUNKS)
    try:
        return having_memory(reader.extra)
    finally:
        reader.close()


def acts_by(node_dir: NodeDir, generation: int) -> bool:
    reader = node_dir.rank("rollout", 0, CHUNKS)
    try:
        record = reader.read()
        return record is not None and record.generation == generation
    finally:
        reader.close()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "condition did not come true"
        time.sleep(0.005)


def rounds(pager: Pager, number: int) -> None:
    """Let the pager look at its files that many times more."""
    seen = pager.num_rounds
    until(lambda: pager.num_rounds >= seen + number)


def left_by_a_dead_engine(node_dir: NodeDir, role: str, chunks: set[int]) -> None:
    with node_dir.chunks_writer(role, CHUNKS) as writer:
        wish(writer, chunks, generation=57)


def test_a_new_rollout_worker_maps_nothing_of_its_dead_predecessors_loan(
    node_dir: NodeDir, pagers: list[Pager]
) -> None:
    left_by_a_dead_engine(node_dir, "rollout", {0, 1, 2})
    pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
    rounds(pagers[0], 2)
    assert (mapped(node_dir, "rollout"), pagers[0].resident_bytes()) == (set(), 0)


def test_a_new_serving_worker_keeps_what_its_dead_predecessor_had_lent(
    node_dir: NodeDir, pagers: list[Pager]
) -> None:
    left_by_a_dead_engine(node_dir, "serving", {0, 1})
    pagers.append(Pager(node_dir, "serving", 0, PLAN, guard=True))
    rounds(pagers[0], 2)
    assert mapped(node_dir, "serving") == set(range(CHUNKS))


def test_a_rollout_worker_gives_everything_back_when_its_engine_core_dies(
    node_dir: NodeDir, pagers: list[Pager]
) -> None:
    pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, {4, 5}, generation=1)
        until(lambda: mapped(node_dir, "rollout") == {4, 5})
    until(lambda: mapped(node_dir, "rollout") == set())


def test_a_chunk_is_reported_as_going_before_the_wish_is_read_again_and_the_memory_goes(
    node_dir: NodeDir, pagers: list[Pager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine core that takes a chunk back in that moment would use memory that is just taken away."""
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, set(range(CHUNKS)), generation=1)
        pagers.append(Pager(node_dir, "serving", 0, PLAN, guard=True))
        pager, seen = pagers[0], []
        until(lambda: pager.num_rounds > 0)
        look = pager._wanted

        def wanted() -> tuple[bytes, int, int] | None:
            states = bytes(pager._mapped[:2])
            if MOVING in states and not seen:  # the look before the memory goes
                reader = node_dir.rank("serving", 0, CHUNKS)
                seen.append((states, reader.extra[:2]))
                reader.close()
                wish(writer, set(range(1, CHUNKS)), generation=3)  # it wants chunk 1 back, now
            return look()

        monkeypatch.setattr(pager, "_wanted", wanted)
        wish(writer, set(range(2, CHUNKS)), generation=2)
        until(lambda: mapped(node_dir, "serving") == set(range(1, CHUNKS)))
        assert seen == [(bytes([MOVING, MOVING]), bytes([MOVING, MOVING]))]
        assert pager.arena.resident_bytes() == (CHUNKS - 1) * PAGE_BYTES


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_chunk_is_reported_as_coming_before_the_wish_is_read_again_and_the_memory_comes(
    node_dir: NodeDir, pagers: list[Pager], monkeypatch: pytest.MonkeyPatch, withdrawn: bool
) -> None:
    """Whoever counts what workers of a dead engine core hold would miss it, and the page would be there twice."""
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, set(), generation=1)
        pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
        pager, seen = pagers[0], []
        until(lambda: pager.num_rounds > 0)
        look = pager._wanted

        def wanted() -> tuple[bytes, int, int] | None:
            if MOVING in pager._mapped and not seen:  # the look before the memory comes
                reader = node_dir.rank("rollout", 0, CHUNKS)
                record = reader.read()
                assert record is not None
                seen.append((reader.extra[:2], record.resident_pages, pager.arena.resident_bytes()))
                reader.close()
                if withdrawn:
                    wish(writer, set(), generation=3)
            return look()

        monkeypatch.setattr(pager, "_wanted", wanted)
        wish(writer, {1}, generation=2)
        until(lambda: pager._generation == (3 if withdrawn else 2) and bool(seen))
        rounds(pager, 1)
        assert seen == [(bytes([0, MOVING]), 1, 0)]
        assert pager.arena.resident_bytes() == (0 if withdrawn else PAGE_BYTES)


def test_a_step_that_a_dead_engine_core_left_running_keeps_its_memory_and_none_begins_behind_it(
    node_dir: NodeDir, pagers: list[Pager]
) -> None:
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, {0, 1}, generation=1)
        pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
        pager = pagers[0]
        until(lambda: mapped(node_dir, "rollout") == {0, 1})
        pager.fence.begin()
    until(lambda: MOVING in pager._mapped)
    rounds(pager, 1)
    # The step's own write; guarded memory that has gone would end this process.
    pager.arena.buffer[PAGE_BYTES] = 1
    assert pager.arena.resident_bytes() == 2 * PAGE_BYTES
    pager.fence.end()
    until(lambda: mapped(node_dir, "rollout") == set())
    assert pager.arena.resident_bytes() == 0
    with pytest.raises(LedgerError, match="engine core is gone"):
        pager.fence.begin()


def test_a_rollout_worker_that_ends_has_no_memory_left_once_nobody_counts_it(
    node_dir: NodeDir, pagers: list[Pager]
) -> None:
    """Its core was killed: production takes what no living report names."""
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, {0, 1}, generation=1)
        pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
        until(lambda: mapped(node_dir, "rollout") == {0, 1})
        pagers[0].close()
    assert not node_dir.rank("rollout", 0, CHUNKS).alive()
    assert pagers[0].arena.resident_bytes() == 0


def test_a_report_says_by_which_marks_it_was_made(node_dir: NodeDir, pagers: list[Pager]) -> None:
    """Its engine core believes it of a chunk only if it knows of the chunk's mark."""
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
        for generation, chunks in ((1, {4, 5}), (2, {5}), (3, {5})):
            wish(writer, chunks, generation)
            until(partial(acts_by, node_dir, generation))
            assert mapped(node_dir, "rollout") <= chunks | {4} | {f"{chunk} moves" for chunk in (4, 5)}
            until(lambda wanted=chunks: mapped(node_dir, "rollout") == wanted)


def test_a_worker_obeys_no_other_engines_core(
    node_dir: NodeDir, pagers: list[Pager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Production is started again while its predecessor is still dying: that one's loan is not this one's."""
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, {0}, generation=7)
        monkeypatch.setenv("ROSE_ENGINE", "5")
        pagers.append(Pager(node_dir, "serving", 0, PLAN, guard=True))
        rounds(pagers[0], 2)
        assert mapped(node_dir, "serving") == set(range(CHUNKS))


@pytest.mark.parametrize("name", ["serving.rank0", "serving.chunks"])
def test_what_was_lent_comes_back_though_a_file_was_deleted(
    node_dir: NodeDir, pagers: list[Pager], name: str
) -> None:
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, {0}, generation=1)
        pagers.append(Pager(node_dir, "serving", 0, PLAN, guard=True))
        report = node_dir.rank("serving", 0, CHUNKS)
        until(lambda: sum(map(bool, report.extra)) == 1)
        (node_dir.path / name).unlink()
        wish(writer, set(range(CHUNKS)), generation=2)
        until(lambda: all(report.extra))
        until(lambda: (node_dir.path / "serving.rank0").exists())


def test_a_pager_survives_a_file_that_cannot_be_read(node_dir: NodeDir, pagers: list[Pager]) -> None:
    """Its thread is the only one that can bring memory back."""
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, {0, 1}, generation=1)
        pagers.append(Pager(node_dir, "serving", 0, PLAN, guard=True))
        until(lambda: mapped(node_dir, "serving") == {0, 1})
        wish(writer, {0, 1, 2}, generation=2)
        os.truncate(writer.path, 64)
        until(lambda: bool(pagers[0]._trouble))
        writer.path.unlink()
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, set(range(CHUNKS)), generation=3)
        until(lambda: mapped(node_dir, "serving") == set(range(CHUNKS)))


def test_a_pager_that_cannot_have_its_memory_leaves_nothing_behind(
    node_dir: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas: list[Arena] = []
    reserve, map_ = HostPagePool.reserve, Arena.map

    def reserved(self: HostPagePool, num_bytes: int, guard: bool = False) -> Arena:
        arenas.append(reserve(self, num_bytes, guard))
        return arenas[-1]

    def broken(self: Arena, ranges: list[tuple[int, int]]) -> None:
        if self.resident_bytes() + sum(length for _, length in ranges) > 3 * PAGE_BYTES:
            raise LedgerError("no memory")
        map_(self, ranges)

    monkeypatch.setattr(HostPagePool, "reserve", reserved)
    monkeypatch.setattr(Arena, "map", broken)
    with pytest.raises(LedgerError, match="no memory"):
        Pager(node_dir, "serving", 0, PLAN, guard=True)
    assert arenas[0].resident_bytes() == 0
    assert not node_dir.rank("serving", 0, CHUNKS).alive()


def refusing(
    monkeypatch: pytest.MonkeyPatch, call: str, refused: Callable[[Arena, list[tuple[int, int]]], bool]
) -> list[list[tuple[int, int]]]:
    """Let a call of the arena fail where ``refused`` says so; the ranges of each call that was made."""
    made: list[list[tuple[int, int]]] = []
    real = getattr(Arena, call)

    def recorded(self: Arena, ranges: list[tuple[int, int]]) -> None:
        made.append(list(ranges))
        if refused(self, ranges):
            raise LedgerError("injected")
        real(self, ranges)

    monkeypatch.setattr(Arena, call, recorded)
    return made


def pages(*runs: tuple[int, int]) -> list[tuple[int, int]]:
    return [(first * PAGE_BYTES, count * PAGE_BYTES) for first, count in runs]


def test_chunks_come_and_go_with_one_call_and_one_range_for_each_run(
    node_dir: NodeDir, pagers: list[Pager], monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = refusing(monkeypatch, "map", lambda *_: False)
    unmaps = refusing(monkeypatch, "unmap", lambda *_: False)
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, {0, 1, 2, 5, 6}, generation=1)
        pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
        until(lambda: mapped(node_dir, "rollout") == {0, 1, 2, 5, 6})
        wish(writer, {1}, generation=2)
        until(lambda: mapped(node_dir, "rollout") == {1})
        assert maps == [pages((0, 3), (5, 2))]
        assert unmaps[-1] == pages((0, 1), (2, 1), (5, 2))


def test_where_not_all_chunks_fit_the_first_ones_come(
    node_dir: NodeDir, pagers: list[Pager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for three of them must not lie idle because there is none for seven."""
    limit = [3]
    refusing(
        monkeypatch,
        "map",
        lambda arena, ranges: (
            arena.resident_bytes() + sum(size for _, size in ranges) > limit[0] * PAGE_BYTES
        ),
    )
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, set(range(1, CHUNKS)), generation=1)
        pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
        until(lambda: mapped(node_dir, "rollout") == {1, 2, 3})
        assert pagers[0].resident_bytes() == 3 * PAGE_BYTES
        limit[0] = CHUNKS
        until(lambda: mapped(node_dir, "rollout") == set(range(1, CHUNKS)))


def test_chunks_that_could_not_be_reported_first_are_not_taken_for_mapped(
    node_dir: NodeDir, pagers: list[Pager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a growth did not come to be written (a full tmpfs, a disk's error): there is no memory yet."""
    publish, failing = Pager._publish, [LedgerError("injected")]

    def full(self: Pager, wake: bool = True) -> None:
        if failing and MOVING in self._mapped:
            raise failing.pop()
        publish(self, wake)

    monkeypatch.setattr(Pager, "_publish", full)
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, set(range(CHUNKS)), generation=1)
        pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
        until(lambda: mapped(node_dir, "rollout") == set(range(CHUNKS)))
        assert not failing
        assert pagers[0].resident_bytes() == CHUNKS * PAGE_BYTES


def test_a_chunk_whose_memory_has_gone_is_not_given_back_after_an_unmap_that_failed(
    node_dir: NodeDir, pagers: list[Pager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wanted back, it has to be mapped again; its engine would compute on addresses without memory."""
    failing = [True]

    def after_the_first(arena: Arena, ranges: list[tuple[int, int]]) -> bool:
        if failing[0] and len(ranges) > 1:
            os_unmap(arena, ranges[:1])
        return failing[0]

    os_unmap = Arena.unmap
    with node_dir.chunks_writer("serving", CHUNKS) as writer:
        wish(writer, set(range(CHUNKS)), generation=1)
        pagers.append(Pager(node_dir, "serving", 0, PLAN, guard=True))
        pager = pagers[0]
        until(lambda: pager._served)
        refusing(monkeypatch, "unmap", after_the_first)
        wish(writer, {0, 1, 2, 3, 6, 7} - {1}, generation=2)  # 1 goes, and 4 and 5 do not
        until(lambda: "injected" in pager._trouble)
        assert mapped(node_dir, "serving") == {0, 2, 3, "4 moves", "5 moves", 6, 7}
        wish(writer, set(range(CHUNKS)), generation=3)
        rounds(pager, 2)
        reader = node_dir.rank("serving", 0, CHUNKS)
        assert [reader.extra[chunk] for chunk in (1, 4, 5)] == [MAPPED, MOVING, MOVING]
        reader.close()
        failing[0] = False
        until(lambda: bytes(pager._mapped) == bytes([MAPPED] * CHUNKS))
    assert pager.resident_bytes() == CHUNKS * PAGE_BYTES


def test_the_wish_of_a_new_engine_core_replaces_the_old_one(node_dir: NodeDir, pagers: list[Pager]) -> None:
    left_by_a_dead_engine(node_dir, "rollout", {0, 1, 2})
    pagers.append(Pager(node_dir, "rollout", 0, PLAN, guard=True))
    with node_dir.chunks_writer("rollout", CHUNKS) as writer:
        wish(writer, {6}, generation=1)
        until(lambda: mapped(node_dir, "rollout") == {6})


def test_a_report_cut_off_under_the_pager_is_put_back_and_the_worker_lives(
    node_dir: NodeDir, pagers: list[Pager]
) -> None:
    pagers.append(Pager(node_dir, "serving", 0, PLAN, guard=True))
    os.truncate(node_dir.path / "serving.rank0", 0)
    rounds(pagers[0], 2)
    assert mapped(node_dir, "serving") == set(range(CHUNKS))


def test_productions_worker_spins_as_vllm_does_unless_a_rollout_engine_may_run_beside_it(
    node_dir: NodeDir, pagers: list[Pager], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "_spins", False)
    pagers.append(Pager(node_dir, "serving", 0, PLAN, guard=False))
    until(lambda: compat._spins)
    peer, agent = node_dir.rollout_lease_writer(), node_dir.node_writer()
    peer.write(RolloutLease(phase=Phase.READY))
    agent.write(NodeState(mode=Mode.OBSERVE))
    rounds(pagers[0], 2)
    assert compat._spins
    agent.write(NodeState(mode=Mode.ON))
    until(lambda: not compat._spins)
    agent.write(NodeState(mode=Mode.OFF))
    until(lambda: compat._spins)
    peer.write(RolloutLease(phase=Phase.READY, reserved_pages=3))  # production may be waiting for them
    until(lambda: not compat._spins)
    peer.close()
    until(lambda: compat._spins)
    agent.close()
