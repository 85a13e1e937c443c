"""Production starts beside a rollout engine that neither gives its memory back nor dies: with the rest, and has all when it can be had."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState, Phase, RankState, RolloutLease, ServingLease
from tests.engine_launcher import EngineServer
from tests.plugin import harness
from tests.plugin.churn import TOTAL_PAGES, Child
from tests.plugin.stand_in import Beating, eventually
from tests.tiny_model import write_tiny_model
from vllm_plugin.roles import ENV_PEER_PAGES

LENT = 10


class Device:
    """An agent that lends, and two engines with real memory."""

    def __init__(self, folder: Path) -> None:
        self.dir = NodeDir(folder / "node")
        self.agent = Beating(self.dir.node_writer())
        self.serving, self.rollout = Child("serving", folder / "model"), Child("rollout", folder / "model")
        self.lease_reader = self.dir.serving_lease()

    def lend(self, pages: int) -> None:
        self.agent.write(NodeState(mode=Mode.ON, has_serving=1, lend_pages=pages))
        self.agent.wake()

    def lease(self) -> ServingLease:
        record = self.lease_reader.read()
        assert record is not None
        return record

    def all_back(self) -> bool:
        lease = self.lease()
        return self.serving.resident_pages() == TOTAL_PAGES and not lease.stranded_pages and not lease.errors


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The loan is out, the rollout engine stands still, and production is killed."""
    (tmp_path / "node").mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "node"))
    write_tiny_model(tmp_path / "model")
    device = Device(tmp_path)
    device.lend(LENT)
    device.serving.start()
    try:
        device.rollout.start()
        try:
            eventually(lambda: device.rollout.resident_pages() == LENT, "the loan is used")
            device.rollout.process.send_signal(signal.SIGSTOP)
            peer = psutil.Process(device.rollout.pid)
            eventually(lambda: peer.status() == psutil.STATUS_STOPPED, "it stands still")
            device.serving.kill()
            device.lend(0)  # as an agent does beside a production that starts
            yield device
        finally:
            device.rollout.kill()
    finally:
        device.serving.kill()
        device.agent.close()


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_production_starts_with_what_a_frozen_peer_leaves_and_has_all_of_it_at_its_thaw_or_end(
    device: Device, end: signal.Signals
) -> None:
    device.serving.start()

    assert device.serving.resident_pages() + device.rollout.resident_pages() == TOTAL_PAGES
    eventually(lambda: device.lease().stranded_pages == LENT, "production says what it cannot get")
    assert (device.lease().phase, device.lease().lent_pages, device.lease().errors) == (Phase.READY, 0, 0)
    assert device.serving.resident_pages() == TOTAL_PAGES - LENT
    device.rollout.process.send_signal(end)
    eventually(device.all_back, "production has all of its memory")


# --- in this process: what is said of it, and what production's scheduler makes of it


@pytest.fixture
def peer(node_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lease of a rollout engine that holds five pages, and will not give them back."""
    from vllm_plugin import compat

    monkeypatch.setattr(compat, "START_WAIT_S", 0.0)
    monkeypatch.setattr(compat, "_starting", None)
    monkeypatch.setenv(ENV_PEER_PAGES, "3")  # of a start before this one
    with NodeDir(node_dir).rollout_lease_writer() as writer:
        writer.write(RolloutLease(reserved_pages=5))
        yield writer
    started = compat.starting_lease()
    if started is not None:
        started.close()


def start(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, elastic: bool = True) -> str:
    """What the core does before it starts its workers; the log of it."""
    import logging

    from vllm_plugin import compat

    monkeypatch.setattr(logging.getLogger("vllm.rose"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    compat._take_everything_back(elastic)
    return caplog.text


def test_the_log_names_what_is_held_and_by_whose_engine(
    peer: Any, node_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = start(caplog, monkeypatch)

    assert f"the rollout engine of {node_dir} holds 5 pages of 2 MiB" in said
    assert "kill or thaw" in said
    assert os.environ[ENV_PEER_PAGES] == "5"


@pytest.mark.parametrize("why", ["all is given back", "its memory is beside theirs"])
def test_otherwise_nothing_is_held_back(
    peer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "all is given back":
        peer.write(RolloutLease())

    said = start(caplog, monkeypatch, elastic=why == "all is given back")

    assert said == ""
    assert ENV_PEER_PAGES not in os.environ


def test_what_cannot_be_read_keeps_no_production_from_its_memory(
    peer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of another version cannot read our lease either, and gives everything back for that."""
    data = bytearray(peer.path.read_bytes())
    data[8] ^= 0xFF
    with open(peer.path, "r+b") as file:
        file.write(data)

    said = start(caplog, monkeypatch)

    assert "cannot be read; production starts with all of its memory" in said
    assert ENV_PEER_PAGES not in os.environ


def half_mapped(rank: Any) -> None:
    """As a worker's pager starts that finds five of 16 pages held."""
    rank.extra[11:] = bytes(5)
    rank.write(RankState(resident_pages=11))


def test_the_pool_has_no_block_without_memory(
    config: Any,
    node_dir: Path,
    rank: Any,
    peer: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_plugin.scheduler import ServingScheduler

    start(caplog, monkeypatch)
    half_mapped(rank)
    scheduler = harness.build(ServingScheduler, config)
    side: Any = scheduler.rose
    lease, marks = NodeDir(node_dir).serving_lease().read(), NodeDir(node_dir).chunks("serving", 16).extra
    for writer in (side._lease, side._board.file, side._pagers):
        writer.close()

    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 11 * 32 - 1  # the null block
    assert side.balloon.inflated == set(range(11, 16))
    assert marks == b"\1" * 11 + bytes(5)
    assert lease is not None
    assert (lease.phase, lease.total_pages, lease.reserved_pages) == (Phase.STARTING, 16, 11)


def test_blocks_without_memory_come_back_with_it_where_we_are_switched_off(
    config: Any,
    node_dir: Path,
    rank: Any,
    peer: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_plugin import compat
    from vllm_plugin.scheduler import ServingScheduler

    monkeypatch.setattr(compat, "_refused", None)
    monkeypatch.setattr(compat, "_refusal", None)
    start(caplog, monkeypatch)
    half_mapped(rank)
    with NodeDir(node_dir).serving_board_writer():  # another process has it
        scheduler = harness.build(ServingScheduler, config)

    assert scheduler.rose is None
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 11 * 32 - 1
    marks = NodeDir(node_dir).chunks("serving", 16)
    peer.write(RolloutLease())
    eventually(lambda: bytes(marks.extra) == b"\1" * 16, "production asks for all of it")
    assert pool.get_num_free_blocks() == 11 * 32 - 1, "what nobody has mapped yet is in no step"
    mapped_by(rank, marks)

    def is_whole() -> bool:
        scheduler.schedule()
        return pool.get_num_free_blocks() == 16 * 32 - 1

    eventually(is_whole, "all blocks are in the pool")
    if compat._refusal is not None:
        compat._refusal.close()


def test_a_report_that_cannot_be_read_puts_no_block_without_memory_into_the_pool(
    config: Any,
    node_dir: Path,
    rank: Any,
    peer: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows which chunks the worker has mapped: not more than what the peer left."""
    from vllm_plugin import compat
    from vllm_plugin.scheduler import ServingScheduler

    monkeypatch.setattr(compat, "_refused", None)
    monkeypatch.setattr(compat, "_refusal", None)
    start(caplog, monkeypatch)
    half_mapped(rank)
    os.truncate(rank.path, 64)
    scheduler = harness.build(ServingScheduler, config)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 11 * 32 - 1

    assert rank.mend()  # as its worker's pager does
    marks = NodeDir(node_dir).chunks("serving", 16)
    peer.write(RolloutLease())
    eventually(lambda: bytes(marks.extra) == b"\1" * 16, "production asks for all of it")
    mapped_by(rank, marks)

    def is_whole() -> bool:
        scheduler.schedule()
        return pool.get_num_free_blocks() == 16 * 32 - 1

    eventually(is_whole, "all blocks are in the pool")
    if compat._refusal is not None:
        compat._refusal.close()


def mapped_by(rank: Any, marks: Any) -> None:
    """As the worker's pager obeys marks for everything."""
    record = marks.read()
    assert record is not None
    rank.extra[:] = b"\1" * 16
    rank.write(RankState(resident_pages=16, generation=record.generation))
    rank.wake()


def test_where_attaching_failed_the_rest_comes_back_too(
    config: Any,
    node_dir: Path,
    rank: Any,
    peer: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_plugin.scheduler import ServingScheduler

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("injected")

    start(caplog, monkeypatch)
    half_mapped(rank)
    scheduler = harness.build(ServingScheduler, config)
    side: Any = scheduler.rose
    marks = NodeDir(node_dir).chunks("serving", 16)
    with monkeypatch.context() as once:
        once.setattr(side._board, "write", broken)
        scheduler.rose_attach(harness.engine())
    try:
        assert side.failed == "ZeroDivisionError: injected"
        peer.write(RolloutLease())
        peer.wake()
        eventually(lambda: bytes(marks.extra) == b"\1" * 16, "production asks for all of it")
        mapped_by(rank, marks)

        def is_whole() -> bool:
            scheduler.schedule()
            return not side.balloon.inflated

        eventually(is_whole, "all blocks are in the pool")
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 16 * 32 - 1
    finally:
        side.stop()


@pytest.mark.engine
@pytest.mark.timeout(240)
def test_a_real_engine_serves_with_what_it_started_with_and_takes_the_rest_when_it_comes(
    tmp_path: Path,
) -> None:
    """Its workers are processes of their own, which hear of the peer from their core."""
    (tmp_path / "node").mkdir(mode=0o700)
    write_tiny_model(tmp_path / "model")
    node = NodeDir(tmp_path / "node")
    env = {"ROSE_DIR": str(node.path), "ROSE_GUARD": "1"}

    def resident() -> int:
        record = node.rank("serving", 0).read()
        return record.resident_pages if record is not None else 0

    with node.rollout_lease_writer() as peer:
        peer.write(RolloutLease(reserved_pages=LENT))
        with EngineServer(tmp_path / "model", role="serving", env=env) as server:
            lease = node.serving_lease()
            eventually(lambda: (record := lease.read()) and record.stranded_pages == LENT, "it is stranded")
            total = getattr(lease.read(), "total_pages", 0)
            assert resident() == total - LENT
            body = {"model": str(server.model_dir), "prompt": list(range(5, 105)), "max_tokens": 8}
            assert server.post("/v1/completions", body).status_code == 200

            peer.write(RolloutLease())
            peer.wake()

            eventually(lambda: resident() == total, "all of its memory is there")
            assert server.post("/v1/completions", body).status_code == 200
            said = server.log_path.read_text(errors="replace")
    assert f"holds {LENT} pages of 2 MiB" in said
    assert "Traceback" not in said
