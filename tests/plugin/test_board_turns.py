"""Who writes the board: the engine thread while a rollout engine may run, else the background thread; never both."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState, RolloutLease
from tests.plugin import harness
from tests.plugin.stand_in import Beating
from tests.tiny_model import write_tiny_model
from vllm_plugin import compat, internals


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return harness.engine_config(folder)


class Device:
    """A serving scheduler whose background thread is not running: a test calls ``_round`` itself."""

    def __init__(self, config: Any, path: Path) -> None:
        from vllm_plugin.scheduler import ServingScheduler

        self.node = NodeDir(path)
        self._agent = Beating(self.node.node_writer())
        self._peer: Any = None
        self._rank = harness.write_rank(path, "serving", mapped=True)
        self.scheduler = harness.build(ServingScheduler, config)
        self.side = self.scheduler.rose
        self._board = self.node.serving_board()
        self._number = 0
        self.mode(Mode.ON)

    def mode(self, mode: Mode) -> None:
        self._agent.write(NodeState(mode=mode, has_serving=1))

    def peer(self, lives: bool) -> None:
        if lives and self._peer is None:
            self._peer = Beating(self.node.rollout_lease_writer())
            self._peer.write(RolloutLease())
        elif not lives and self._peer is not None:
            self._peer.close()
            self._peer = None

    def board_step(self) -> int:
        """The step that the board tells of."""
        record = self._board.read()
        return record.step if record is not None else 0

    def told(self, steps: int) -> int:
        """Of so many steps, how many stood on the board when they ended."""
        count = 0
        for _ in range(steps):
            self.step()
            count += self.board_step() == self.side.steps.step
        return count

    def step(self) -> None:
        while len(self.scheduler.requests) < 3:
            self._number += 1
            self.scheduler.add_request(harness.request(f"r{self._number}", max_tokens=50))
        harness.step(self.scheduler)

    def close(self) -> None:
        self.peer(False)
        for writer in (self.side._lease, self.side._board.file, self.side._pagers, self._rank, self._agent):
            writer.close()


@pytest.fixture
def device(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    path = tmp_path / "node"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(path))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    device = Device(config, path)
    yield device
    device.close()


def test_a_rollout_engine_that_may_run_is_told_of_every_step(device: Device) -> None:
    device.peer(True)
    device.side.rounds.round()
    assert device.told(3) == 3


@pytest.mark.parametrize(
    ("peer", "mode", "spins"),
    [
        (False, Mode.ON, True),
        (True, Mode.ON, False),
        (True, Mode.OBSERVE, True),
        (True, Mode.OFF, True),
    ],
)
def test_the_engine_core_spins_as_vllm_does_unless_a_rollout_engine_may_run_beside_it(
    device: Device, monkeypatch: pytest.MonkeyPatch, peer: bool, mode: Mode, spins: bool
) -> None:
    monkeypatch.setattr(compat, "_spins", not spins)
    device.peer(peer)
    device.mode(mode)
    device.side.rounds.round()
    assert compat._spins == spins


@pytest.mark.parametrize(("peer", "mode"), [(False, Mode.ON), (True, Mode.OBSERVE), (True, Mode.OFF)])
def test_where_none_may_run_the_board_comes_with_the_background_threads_round(
    device: Device, peer: bool, mode: Mode
) -> None:
    device.peer(peer)
    device.mode(mode)
    device.side.rounds.round()
    assert device.told(3) == 0
    device.side.rounds.round()
    assert device.board_step() == 3


def test_nothing_is_written_until_the_engine_thread_has_let_go(device: Device) -> None:
    """It may be in the middle of a write when it is asked."""
    before = device.node.serving_board().word()
    device.side.rounds.round()  # asks
    device.side.rounds.round()
    assert device.node.serving_board().word() == before
    device.step()  # answers
    device.side.rounds.round()
    assert device.board_step() == 1


def test_who_takes_the_board_over_finds_the_last_step_on_it(device: Device) -> None:
    """An idle engine makes no step that would bring it."""
    device.side.rounds.round()
    device.told(2)
    device.peer(True)
    device.side.rounds.round()
    assert device.board_step() == 2
    assert device.told(2) == 2


def test_a_deleted_board_is_made_anew_by_nobody_but_its_writer(device: Device) -> None:
    """Else the file is closed under the thread that writes it, or a look at it in that moment is taken for a stranger's write."""
    side, board = device.side, device.side._board
    side.rounds.round()
    device.told(1)
    board.file.path.unlink()
    board.watched, board._asked = False, board._given + 1  # asked for, and not given yet
    side.rounds.check_own_files()
    assert not board.file.path.exists()
    board._given = board._asked
    side.rounds.check_own_files()
    assert board.file.path.exists()


def test_the_board_changes_hands_at_any_moment_and_no_write_of_ours_is_taken_for_a_strangers(
    device: Device,
) -> None:
    """Both threads at full speed, the interpreter switching between them every few operations."""
    ended, rounds = threading.Event(), 0

    def background() -> None:
        nonlocal rounds
        while not ended.is_set():
            rounds += 1
            device.peer(rounds % 3 == 0)
            device.side.rounds.round()

    interval_s = sys.getswitchinterval()
    thread = threading.Thread(target=background)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while rounds <= 600 and thread.is_alive():
            device.told(20)
    finally:
        sys.setswitchinterval(interval_s)
        ended.set()
        thread.join()
    assert rounds > 600, "the background thread has broken"
    assert device.side.failed is None
    device.peer(False)
    device.side.rounds.round()
    device.step()
    device.side.rounds.round()
    assert device.board_step() == device.side.steps.step


def test_who_waits_is_read_while_the_engine_thread_takes_and_adds() -> None:
    """A deque that changes between an iterator and its first element raises, and the round would have failed for good."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    queues = SimpleNamespace(kv_holding_waiting=FCFSRequestQueue(), waiting=FCFSRequestQueue())
    ended = threading.Event()

    def engine() -> None:
        while not ended.is_set():
            queues.waiting.append(1)
            queues.waiting.popleft()

    interval_s = sys.getswitchinterval()
    thread = threading.Thread(target=engine)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        lengths = {len(internals.waiting_requests(queues, 2)) for _ in range(50_000)}
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    assert lengths <= {0, 1}
