"""An exception in any hook of ours on the serving side ends in state off; vLLM schedules on as without us."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.coserve.ledger import RecordReader, RecordWriter
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState, Phase, RankState, RolloutLease, ServingLease
from rose.errors import LedgerError
from rose.policy.compat import row_of_number
from rose.policy.coserving import serving
from tests.plugin import harness
from tests.plugin.stand_in import Beating, eventually

WORD_AT = 1024  # the slots lie before it
HOOKS = [
    "before_add",
    "before_schedule",
    "after_schedule",
    "after_update",
    "usage",
    "reset_prefix_cache",
    "_board.write",
    "rounds.round",
]


@pytest.fixture
def scheduler(config: Any, node_dir: Path, rank: Any) -> Iterator[Any]:
    from vllm_plugin.scheduler import ServingScheduler

    scheduler = harness.build(ServingScheduler, config)
    assert scheduler.rose is not None
    scheduler.rose_attach(harness.engine())
    yield scheduler
    scheduler.rose.stop()


def run(scheduler: Any) -> list[dict[str, int]]:
    """Three requests to their end; what was scheduled, step by step."""
    for number in range(3):
        scheduler.add_request(harness.request(f"r{number}", num_tokens=100 + number))
    steps = []
    while scheduler.requests:
        steps.append(dict(harness.step(scheduler).num_scheduled_tokens))
        scheduler.make_stats()
        assert len(steps) < 100
    return steps


def stock_steps(config: Any) -> list[dict[str, int]]:
    from vllm.v1.core.sched.scheduler import Scheduler

    return run(harness.build(Scheduler, config))


def test_switched_on_it_schedules_what_vllm_schedules(scheduler: Any, config: Any) -> None:
    assert run(scheduler) == stock_steps(config)
    assert scheduler.rose.failed is None


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_a_hook_switches_off_and_vllm_goes_on(
    scheduler: Any, config: Any, node_dir: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("injected")

    if hook in ("reset_prefix_cache", "usage"):  # called only while something is lent
        assert scheduler.rose.balloon.inflate_free(1, budget_s=60.0)
    part, _, name = hook.rpartition(".")
    monkeypatch.setattr(getattr(scheduler.rose, part) if part else scheduler.rose, name, broken)

    assert run(scheduler) == stock_steps(config)
    scheduler.reset_prefix_cache()

    assert "injected" in eventually(lambda: scheduler.rose.failed, "the failure is noted")
    monkeypatch.undo()
    lease = NodeDir(node_dir).serving_lease()
    eventually(lambda: lease.read().phase == Phase.OFF, "phase is off")  # type: ignore[union-attr]


def scribble(path: Path, at: int) -> None:
    """What a program that does not own the file might do to it: it holds no lock and asks nobody."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([(byte[0] + 1) % 256]))


def scribbled(scheduler: Any, path: Path) -> bool:
    """Was it noticed?  Else write again: the owner may just have written over it."""
    if not scheduler.rose.failed:
        scribble(
            path, path.stat().st_size - 1 if path.suffix == ".chunks" else WORD_AT
        )  # a chunk's mark; the number
    return bool(scheduler.rose.failed)


@pytest.fixture(params=[False, True], ids=["alone", "beside"])
def told(request: pytest.FixtureRequest, scheduler: Any, node_dir: Path) -> Iterator[Any]:
    """The scheduler without and with a rollout engine that is told of every step."""
    writers: list[Beating[Any]] = []
    if request.param:
        node = NodeDir(node_dir)
        writers += [Beating(node.node_writer()), Beating(node.rollout_lease_writer())]
        writers[0].write(NodeState(mode=Mode.ON, has_serving=1))
        writers[1].write(RolloutLease())
    eventually(
        lambda: scheduler.rose._board.watched == request.param, "it is known whether a rollout engine lives"
    )
    yield scheduler
    for writer in writers:
        writer.close()


def noticed(scheduler: Any) -> str:
    """Why ROSE is off: beside a rollout engine, which steers by the board, after one step; else after a round, to which nobody steps."""
    watched = scheduler.rose._board.watched
    harness.step(scheduler)
    if not watched:
        eventually(lambda: scheduler.rose.failed, "the background thread has looked")
    return scheduler.rose.failed


def test_a_strangers_write_to_the_board_is_noticed_at_the_next_step_or_round(
    told: Any, node_dir: Path
) -> None:
    told.add_request(harness.request("a"))
    harness.step(told)
    assert told.rose.failed is None
    scribble(node_dir / "serving.board", WORD_AT - 100)
    assert "written by another process" in noticed(told)
    lease = NodeDir(node_dir).serving_lease()
    eventually(lambda: lease.read().phase == Phase.OFF, "phase is off")  # type: ignore[union-attr]
    harness.step(told)  # vLLM goes on


def test_a_board_cut_off_under_production_is_noticed_at_the_next_step_or_round(
    told: Any, node_dir: Path
) -> None:
    told.add_request(harness.request("a"))
    harness.step(told)
    os.truncate(node_dir / "serving.board", 0)
    assert "or cut off" in noticed(told)
    lease = NodeDir(node_dir).serving_lease()
    eventually(lambda: lease.read().phase == Phase.OFF, "phase is off")  # type: ignore[union-attr]
    assert run(told)  # vLLM goes on


@pytest.mark.parametrize("name", ["serving.lease", "serving.chunks"])
def test_what_the_memory_hangs_on_cut_off_ends_in_off_that_everybody_can_read(
    lender: Lender, node_dir: Path, name: str
) -> None:
    os.truncate(node_dir / name, 0)
    eventually(lambda: lender.scheduler.rose.failed, "it is noticed")
    lease = NodeDir(node_dir)  # readers of their own: they look at the header again
    eventually(lambda: readable(lease.serving_lease()) == Phase.OFF, "phase is off")
    eventually(lender.gets_everything_back, "all chunks are back in the pool")


def readable(reader: RecordReader[ServingLease]) -> int | None:
    """Phase of a lease; None while it cannot be read."""
    try:
        record = reader.read()
    except LedgerError:
        return None
    return record.phase if record is not None else None


@pytest.mark.parametrize("name", ["serving.lease", "serving.chunks"])
def test_a_strangers_write_to_what_the_memory_hangs_on_is_noticed(
    scheduler: Any, node_dir: Path, name: str
) -> None:
    eventually(lambda: scribbled(scheduler, node_dir / name), f"the write to {name} is noticed")
    assert "written by another process" in scheduler.rose.failed
    lease = NodeDir(node_dir).serving_lease()

    def is_off() -> bool:
        try:
            record = lease.read()
        except (
            LedgerError
        ):  # of the last write, which came after it had been noticed: mended in the next round
            return False
        return record is not None and record.phase == Phase.OFF

    eventually(is_off, "phase is off")


def test_a_strangers_mark_in_the_middle_of_a_round_does_not_become_ours(
    scheduler: Any, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pager would take memory away that vLLM uses."""
    path, publish = node_dir / "serving.chunks", scheduler.rose._lease.say

    def slowly(reserved_pages: int) -> None:
        monkeypatch.undo()
        scribble(path, path.stat().st_size - 1)
        publish(reserved_pages)

    monkeypatch.setattr(scheduler.rose._lease, "say", slowly)
    eventually(lambda: scheduler.rose.failed, "the write is noticed")


# --- what is lent comes back, whatever goes wrong


@pytest.fixture
def agent(node_dir: Path) -> Iterator[Any]:
    """A node agent that asks for four chunks, for ever."""
    writer = Beating(NodeDir(node_dir).node_writer())
    writer.write(NodeState(mode=Mode.ON, has_serving=1, lend_pages=4))
    yield writer
    writer.close()


class Lender:
    """The scheduler with four chunks lent, and its worker's pager played by :meth:`turn`."""

    def __init__(self, scheduler: Any, node_dir: Path, rank: Any) -> None:
        self.scheduler, self._rank = scheduler, rank
        self._marks = NodeDir(node_dir).chunks("serving")
        self.lease = NodeDir(node_dir).serving_lease()
        eventually(lambda: self.turn() and self.lease.read().lent_pages == 4, "four chunks are lent")

    def turn(self) -> bool:
        """The worker follows the marks, the engine runs what the background thread asked for."""
        try:
            wish = self._marks.read()
            self._rank.extra[:] = self._marks.extra
            self._rank.write(RankState(generation=wish.generation if wish is not None else 0))
        except LedgerError:
            pass  # nothing is known: the pager leaves everything as it is
        engine = self.scheduler.rose.seam.engine
        while engine._idle_state_callbacks:
            engine._idle_state_callbacks.pop()(engine)
        return True

    def gets_everything_back(self) -> bool:
        return self.turn() and not self.scheduler.rose.balloon.inflated


@pytest.fixture
def lender(scheduler: Any, node_dir: Path, rank: Any, agent: Any) -> Lender:
    return Lender(scheduler, node_dir, rank)


@pytest.mark.parametrize("name", ["serving.lease", "serving.chunks", "serving.board"])
def test_a_strangers_write_does_not_keep_what_was_lent(lender: Lender, node_dir: Path, name: str) -> None:
    path = node_dir / name
    if name == "serving.board":
        scribble(path, WORD_AT - 100)
        assert noticed(lender.scheduler)
    else:
        eventually(lambda: scribbled(lender.scheduler, path), "the write is noticed")
    eventually(lender.gets_everything_back, "all chunks are back in the pool")


@pytest.mark.parametrize("part", ["learner.learn", "first_tokens.look", "prefixes.look"])
def test_a_part_that_goes_on_failing_does_not_keep_what_was_lent(
    lender: Lender, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The background thread alone brings memory back, whatever else it does in a round."""

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("injected")

    name, _, method = part.partition(".")
    monkeypatch.setattr(getattr(lender.scheduler.rose, name), method, broken)
    eventually(lender.gets_everything_back, "all chunks are back in the pool")
    assert "injected" in lender.scheduler.rose.failed


def test_a_node_state_that_cannot_be_read_ends_the_loan_and_no_more(
    lender: Lender, node_dir: Path, agent: Any
) -> None:
    """An agent of another version has taken over: its file is of another schema."""
    agent.close()
    RecordWriter(node_dir / "node.state", RankState).write(RankState())
    eventually(lender.gets_everything_back, "all chunks are back in the pool")
    assert lender.scheduler.rose.failed is None


@pytest.mark.parametrize("size", [64, 5000])
def test_a_living_peer_whose_lease_is_damaged_holds_what_was_lent_until_it_mends_it(
    lender: Lender, node_dir: Path, agent: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Nobody can tell what it holds: a page that was given to both would be worse than one that comes late."""
    monkeypatch.setattr(serving, "STRANDED_AFTER_S", 0.3)
    with NodeDir(node_dir).rollout_lease_writer() as peer:
        peer.write(RolloutLease(reserved_pages=4))
        os.truncate(node_dir / "rollout.lease", size)
        agent.write(NodeState(mode=Mode.OFF, has_serving=1))
        agent.wake()
        eventually(lambda: lender.lease.read().stranded_pages, "what does not come back is named")  # type: ignore[union-attr]
        assert len(lender.scheduler.rose.balloon.inflated) == 4
        assert peer.mend()
        peer.write(RolloutLease(reserved_pages=0))
        peer.wake()
        eventually(lender.gets_everything_back, "all chunks are back in the pool")


def test_pages_of_a_worker_that_outlives_its_engine_core_are_waited_for(
    lender: Lender, node_dir: Path, agent: Any
) -> None:
    """The core's lease says nothing any more once it is dead; the memory is its workers'."""
    worker = harness.write_rank(node_dir, "rollout", mapped=True, num_chunks=4)
    agent.write(NodeState(mode=Mode.OFF, has_serving=1))
    agent.wake()
    eventually(lambda: lender.lease.read().lent_pages == 0, "they are asked back")
    beats = {lender.lease.read().heartbeat_ns}  # type: ignore[union-attr]
    eventually(
        lambda: lender.turn() and (beats.add(lender.lease.read().heartbeat_ns) or len(beats) > 3),  # type: ignore[union-attr]
        "three more rounds",
    )
    assert len(lender.scheduler.rose.balloon.inflated) == 4
    worker.close()
    eventually(lender.gets_everything_back, "all chunks are back in the pool")


def test_what_a_frozen_peer_holds_is_named_and_all_is_back_when_it_goes_on(
    lender: Lender, node_dir: Path, agent: Any, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Agent and rollout engine stand still with their locks held, as ``docker pause`` leaves them."""
    monkeypatch.setattr(serving, "STRANDED_AFTER_S", 0.3)
    peer = NodeDir(node_dir).rollout_lease_writer()
    peer.write(RolloutLease(reserved_pages=3))

    def lent(pages: int) -> Any:
        return NodeState(mode=Mode.ON, has_serving=1, lend_pages=pages)

    agent.write(lent(0))
    agent.wake()
    eventually(lambda: lender.turn() and lender.lease.read().stranded_pages == 3, "three pages are stranded")
    (line,) = [line for line in said if "not given back" in line]
    assert line.startswith("WARNING"), "nobody wants them"
    eventually(
        lambda: lender.turn() and len(lender.scheduler.rose.balloon.inflated) == 3, "the fourth is back"
    )
    agent.write(lent(8))
    agent.wake()
    beat = lender.lease.read().heartbeat_ns  # type: ignore[union-attr]
    eventually(lambda: lender.turn() and lender.lease.read().heartbeat_ns > beat, "one more round")  # type: ignore[union-attr]
    assert len(lender.scheduler.rose.balloon.inflated) == 3, "nothing more is lent meanwhile"
    assert lender.scheduler.rose.failed is None
    agent.write(lent(0))
    peer.write(RolloutLease(reserved_pages=0))  # thawed
    peer.wake()
    eventually(lender.gets_everything_back, "all chunks are back in the pool")
    eventually(lambda: lender.lease.read().stranded_pages == 0, "and nothing is stranded any more")  # type: ignore[union-attr]
    peer.close()


def test_what_was_ordered_back_and_does_not_come_is_an_error(
    lender: Lender, node_dir: Path, agent: Any, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(serving, "STRANDED_AFTER_S", 0.3)
    with NodeDir(node_dir).rollout_lease_writer() as peer:
        peer.write(RolloutLease(reserved_pages=3))
        agent.write(NodeState(mode=Mode.OFF, has_serving=1))
        agent.wake()
        eventually(lambda: lender.turn() and lender.lease.read().stranded_pages == 3, "they are stranded")
        (line,) = [line for line in said if "not given back" in line]
        assert line.startswith("ERROR")
        assert "kill or thaw" in line


def test_the_queue_lets_those_past_that_fit_and_keeps_the_order_of_the_others(config: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_plugin import internals

    scheduler = harness.build(Scheduler, config)
    sizes = {"a": 120, "b": 90, "c": 20, "d": 110, "e": 30}
    for name, tokens in sizes.items():
        scheduler.add_request(harness.request(name, num_tokens=tokens))

    def order() -> str:
        return "".join(request.request_id for request in scheduler.waiting)

    internals.let_past(scheduler, lambda request: request.num_tokens < 50, 64)
    assert order() == "ceabd"
    internals.let_past(scheduler, lambda request: request.num_tokens < 50, 64)
    assert order() == "ceabd", "the first fits: nothing to do"
    internals.let_past(scheduler, lambda request: False, 64)
    assert order() == "ceabd", "nobody fits: nobody is let past"
    assert set(harness.step(scheduler).num_scheduled_tokens) == set(sizes)


@pytest.mark.parametrize("name", ["serving.chunks", "serving.rank0", "serving.lease", "serving.board", "all"])
def test_a_deleted_file_strands_nothing_and_is_there_again(
    lender: Lender, node_dir: Path, agent: Any, rank: Any, name: str
) -> None:
    lost = [path for path in node_dir.iterdir() if name in ("all", path.name)]
    assert lost
    for path in lost:
        path.unlink()
    agent.write(NodeState(mode=Mode.OFF, has_serving=1))
    agent.wake()
    eventually(lender.gets_everything_back, "all chunks are back in the pool")
    assert lender.scheduler.rose.failed is None
    ours = {"serving.chunks", "serving.lease", "serving.board"} & {path.name for path in lost}

    def there_again() -> bool:
        harness.step(lender.scheduler)  # beside a rollout engine the board is the engine thread's
        return all((node_dir / each).exists() for each in ours)

    eventually(there_again, "the files are there for those who come later")


def test_chunks_taken_before_an_exception_are_not_lost(
    lender: Lender, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_plugin import internals

    take, calls = internals.take_block, []

    def broken(pool: Any, block_id: int) -> bool:
        calls.append(block_id)
        if len(calls) == 40:  # in the middle of the second chunk
            raise ZeroDivisionError("injected")
        return take(pool, block_id)

    free = lender.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() + 4 * 32
    monkeypatch.setattr(internals, "take_block", broken)
    agent.write(NodeState(mode=Mode.ON, has_serving=1, lend_pages=8))
    agent.wake()
    eventually(lambda: lender.turn() and lender.scheduler.rose.failed, "the hook breaks")
    eventually(lender.gets_everything_back, "all chunks are back in the pool")
    assert lender.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_vllms_own_error_in_a_reset_reaches_vllm_and_switches_nothing_off(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bool:
        raise FloatingPointError("vLLM's own")

    monkeypatch.setattr(lender.scheduler.kv_cache_manager, "reset_prefix_cache", broken)
    with pytest.raises(FloatingPointError):
        lender.scheduler.reset_prefix_cache()
    assert lender.scheduler.rose.failed is None
    assert len(lender.scheduler.rose.balloon.inflated) == 4


# --- before the first step


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin's memory of having refused, put back afterwards."""
    from vllm_plugin import compat

    monkeypatch.setattr(compat, "_refused", None)
    monkeypatch.setattr(compat, "_refusal", None)
    yield
    if compat._refusal is not None:
        compat._refusal.close()


def test_an_engine_that_could_not_be_attached_says_off(
    config: Any, node_dir: Path, rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_plugin.scheduler import ServingScheduler

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("injected")

    scheduler = harness.build(ServingScheduler, config)
    monkeypatch.setattr(scheduler.rose._board, "write", broken)
    scheduler.rose_attach(SimpleNamespace())
    lease = NodeDir(node_dir).serving_lease()
    try:
        eventually(lambda: (record := lease.read()) and record.phase == Phase.OFF, "it says off")
    finally:
        scheduler.rose.stop()


@pytest.mark.parametrize("holder", ["engine core", "worker whose core is dead"])
def test_production_says_starting_before_its_workers_touch_the_device_and_waits_for_the_peer(
    config: Any, node_dir: Path, rank: Any, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    from vllm.v1.executor.abstract import Executor

    from vllm_plugin import compat
    from vllm_plugin.memory import engine_number
    from vllm_plugin.scheduler import ServingScheduler

    seen: list[tuple[int, int]] = []
    node = NodeDir(node_dir)
    of_core = holder == "engine core"
    peer: Any = node.rollout_lease_writer() if of_core else node.rank_writer("rollout", 0, 4)

    def hold(pages: int) -> None:
        peer.write(RolloutLease(reserved_pages=pages) if of_core else RankState(resident_pages=pages))
        peer.wake()

    hold(3)

    class Probe(Executor):
        """Boundary: no worker is started; what would be done before that is vLLM's own."""

        def _init_executor(self) -> None:
            serving = node.serving_lease().read()
            rollout = node.rollout_lease().read() if of_core else node.rank("rollout", 0, 4).read()
            assert serving is not None
            assert rollout is not None
            seen.append((serving.phase, getattr(rollout, "reserved_pages" if of_core else "resident_pages")))

        def collective_rpc(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def check_health(self) -> None:
            return

    def give_back() -> None:
        eventually(lambda: readable(node.serving_lease()) == Phase.STARTING, "production is starting")
        hold(0)

    monkeypatch.setattr(compat, "START_WAIT_S", 60.0)
    monkeypatch.setenv("ROSE_ENGINE", "0")
    monkeypatch.setattr(config.scheduler_config, "scheduler_cls", compat.SCHEDULER_FACTORY)
    monkeypatch.setattr(Executor, "__init__", compat._wrap_executor(Executor.__init__, "serving"))
    other = threading.Thread(target=give_back)
    other.start()
    Probe(config)
    other.join()
    assert seen == [(Phase.STARTING, 0)]
    rank.write(RankState(engine=engine_number()))
    scheduler = harness.build(ServingScheduler, config)  # and the lease is taken over, not fought for
    assert scheduler.rose is not None
    assert readable(node.serving_lease()) == Phase.STARTING
    for writer in (scheduler.rose._lease, scheduler.rose._board.file, scheduler.rose._pagers, peer):
        writer.close()


@pytest.mark.usefixtures("fresh")
def test_a_rank_report_of_a_dead_engine_is_no_elastic_memory(config: Any, node_dir: Path) -> None:
    from vllm_plugin.scheduler import ServingScheduler

    harness.write_rank(node_dir, "serving", mapped=True).close()
    assert harness.build(ServingScheduler, config).rose is None


@pytest.mark.usefixtures("fresh")
def test_a_cache_too_small_to_share_is_named_in_the_lease(
    config: Any, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_plugin.scheduler import ServingScheduler

    monkeypatch.setattr(harness, "NUM_BLOCKS", 96)  # three chunks
    assert harness.build(ServingScheduler, config).rose is None
    lease = NodeDir(node_dir).serving_lease()
    record = lease.read()
    assert record is not None
    assert (record.phase, row_of_number(record.row).name) == (Phase.OFF, "small_cache")
    assert lease.alive()


@pytest.mark.usefixtures("fresh")
def test_without_elastic_workers_the_scheduler_is_stock(config: Any, node_dir: Path) -> None:
    from vllm_plugin.scheduler import ServingScheduler

    scheduler = harness.build(ServingScheduler, config)  # no rank file: the worker has no page pool
    lease = NodeDir(node_dir).serving_lease().read()

    assert lease is not None
    assert lease.phase == Phase.OFF
    assert scheduler.rose is None
    assert run(scheduler) == stock_steps(config)
