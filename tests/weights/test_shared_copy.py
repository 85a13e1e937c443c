"""One host copy for several node agents: pulled once, told to all, and taken over when its keeper is killed.

A lock belongs to an open file, so two agents in one process exclude each other as two processes do.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose.errors import CapacityError, ConfigError, Gone, SectionCorrupt
from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights.file_store import FileStore
from rose.weights.publisher import WeightPublisher
from rose.weights.shared_copy import SOCKET, SharedCopy
from rose.weights.store import ObjectStore
from rose.weights.subscriber import WeightSubscriber
from rose.weights.update import read_update
from tests.weights.subscriber.kit import WatchedStore, apply_update, same
from tests.weights.test_relay import wait_until
from tests.weights.test_stores import V
from tests.weights.toy import ToyTrainer

Open = Callable[..., SharedCopy]


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def trainer() -> ToyTrainer:
    return ToyTrainer(4)


@pytest.fixture
def publisher(store: WatchedStore, trainer: ToyTrainer) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1)
    yield publisher
    publisher.close()


@pytest.fixture
def agent(store: WatchedStore, tmp_path: Path) -> Iterator[Open]:
    opened: list[SharedCopy] = []

    def open_it(source: ObjectStore = store, run_id: str = "run") -> SharedCopy:
        def subscribe() -> WeightSubscriber:
            return WeightSubscriber(source, run_id, tmp_path / "copy")

        opened.append(SharedCopy(run_id, tmp_path / "copy", subscribe))
        return opened[-1]

    yield open_it
    for copy in opened:
        copy.close()


@contextmanager
def keeper_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Of the copy in ``folder``, to be killed; it is at 1.0."""
    command = [
        sys.executable,
        "-m",
        "tests.weights.copy_process",
        str(folder / "store"),
        str(folder / "copy"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "1.0"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_a_version_is_pulled_once_for_all(
    publisher: WeightPublisher, trainer: ToyTrainer, agent: Open, store: WatchedStore
) -> None:
    copies = [agent(), agent(MemoryStore()), agent(MemoryStore())]  # two that could pull nothing
    assert [copy.keeps for copy in copies] == [True, False, False]
    publisher.publish(0)
    assert [copy.poll(20) for copy in copies] == [V("1.0")] * 3
    assert [copy.poll(0) for copy in copies] == [None] * 3
    held = trainer.bits()
    trainer.step()
    publisher.publish(1)
    assert [copy.poll(20) for copy in copies] == [V("1.1")] * 3
    assert len({key for key, _, _ in store.reads}) == len(store.reads)
    paths = {copy.fetch(V("1.1"), V("1.0")) for copy in copies}
    assert len(paths) == 1
    assert same(apply_update(held, read_update(paths.pop())), trainer.bits())


def test_all_who_wait_are_woken_by_a_publish(publisher: WeightPublisher, agent: Open) -> None:
    copies = [agent() for _ in range(4)]
    found: list[WeightVersion | None] = []
    threads = [threading.Thread(target=lambda copy=copy: found.append(copy.poll(60))) for copy in copies]
    for thread in threads:
        thread.start()
    publisher.publish(0)
    for thread in threads:
        thread.join(30)
    assert found == [V("1.0")] * 4


def test_what_the_keeper_says_no_to_is_said_to_the_others(publisher: WeightPublisher, agent: Open) -> None:
    keeper, other = agent(), agent()
    publisher.publish(0)
    assert other.poll(20) == V("1.0")
    for copy in (keeper, other):
        with pytest.raises(Gone, match=r"the host copy is at 1\.0, not at 1\.9"):
            copy.fetch(V("1.9"), None)


def test_another_runs_agent_is_refused_by_name(agent: Open) -> None:
    agent()
    with pytest.raises(ConfigError, match="holds the copy of run run, not of other"):
        agent(run_id="other").poll(5)


def test_the_next_one_keeps_it_when_the_keeper_goes(
    publisher: WeightPublisher, trainer: ToyTrainer, agent: Open
) -> None:
    keeper, other = agent(), agent()
    publisher.publish(0)
    assert (keeper.poll(20), other.poll(20)) == (V("1.0"), V("1.0"))
    assert (keeper.busy(), other.busy()) == (True, True)
    keeper.close()
    assert not other.busy()
    trainer.step()
    publisher.publish(1)
    assert other.poll(20) == V("1.1")
    assert other.keeps


def test_a_copy_that_was_repaired_is_news_to_who_found_it_damaged(
    publisher: WeightPublisher, agent: Open, tmp_path: Path
) -> None:
    keeper, other = agent(), agent()
    publisher.publish(0)
    assert (keeper.poll(20), other.poll(20)) == (V("1.0"), V("1.0"))
    assert keeper._keeper is not None
    keeper._keeper.subscriber._host.bits("scales")[3] ^= 1
    with pytest.raises(SectionCorrupt, match="damaged in memory"):
        other.fetch(V("1.0"), None)
    assert other.poll(20) == V("1.0")
    assert other.fetch(V("1.0"), None).exists()
    keeper.close()
    (
        tmp_path / "copy" / "state.json"
    ).unlink()  # as a keeper leaves it that is killed while it writes the copy
    with pytest.raises(Gone, match="the host copy is at None"):
        other.fetch(V("1.0"), None)
    assert other.poll(20) == V("1.0")
    assert other.fetch(V("1.0"), None).exists()


def test_a_keeper_that_goes_ends_a_neighbours_wait_and_tells_no_error(
    publisher: WeightPublisher, agent: Open, tmp_path: Path
) -> None:
    class Patient(FileStore):
        def close(self) -> None:
            super().close()
            wait_until(lambda: not callers)  # each has been answered, before its connection is cut

    def subscribe() -> WeightSubscriber:
        return WeightSubscriber(Patient(tmp_path / "store"), "run", tmp_path / "copy", owns_store=True)

    keeper = SharedCopy("run", tmp_path / "copy", subscribe)
    assert keeper._keeper is not None
    callers = keeper._keeper._callers
    other = agent()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.poll, 600)
        wait_until(keeper.busy)
        keeper.close()
        publisher.publish(0)
        assert (waiting.result(30) or other.poll(20)) == V("1.0")
    assert other.keeps


def test_the_next_one_keeps_it_when_the_keeper_is_killed(
    tmp_path: Path, trainer: ToyTrainer, agent: Open
) -> None:
    files = FileStore(tmp_path / "store", durable=False)
    publisher = WeightPublisher(trainer.tensors, files, "run", 1)
    publisher.publish(0)
    with keeper_process(tmp_path) as process:
        other = agent(files)
        assert not other.keeps
        assert other.poll(20) == V("1.0")
        found: list[WeightVersion | None] = []
        waiting = threading.Thread(target=lambda: found.append(other.poll(60)))
        waiting.start()
        process.kill()
        process.wait(10)
        trainer.step()
        publisher.publish(1)
        waiting.join(60)
        assert found == [V("1.1")]
        assert other.keeps
        assert other.fetch(V("1.1"), V("1.0")).exists()
    publisher.close()


def test_a_keeper_that_is_killed_while_it_is_asked_for_a_file_leaves_the_copy_to_who_asked(
    tmp_path: Path, trainer: ToyTrainer, agent: Open
) -> None:
    files = FileStore(tmp_path / "store", durable=False)
    publisher = WeightPublisher(trainer.tensors, files, "run", 1)
    publisher.publish(0)
    with ThreadPoolExecutor(1) as threads, keeper_process(tmp_path) as process:
        other = agent(files)
        assert other.poll(20) == V("1.0")
        assert not other.keeps
        process.send_signal(signal.SIGSTOP)
        asking = threads.submit(other.fetch, V("1.0"), None)
        wait_until(lambda: bool(other._asking))
        process.kill()
        assert same(apply_update({}, read_update(asking.result(30))), trainer.bits())
        assert other.keeps
    publisher.close()


def test_closing_ends_a_poll_that_waits_for_the_keeper(agent: Open) -> None:
    keeper, copy = agent(), agent()
    ended: list[object] = []

    def wait() -> None:
        try:
            ended.append(copy.poll(60))
        except CapacityError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(keeper.busy)
    copy.close()
    waiting.join(20)
    assert len(ended) == 1
    assert keeper.keeps


@pytest.mark.parametrize(
    "said", [b"", b"nonsense\n", b"{}\n", b"x" * 200_000, b'{"run_id":"run","do":"fetch"}\n']
)
def test_nonsense_on_the_socket_is_survived(
    publisher: WeightPublisher, agent: Open, tmp_path: Path, said: bytes
) -> None:
    agent()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(str(tmp_path / "copy" / SOCKET))
        try:
            caller.sendall(said)
            caller.shutdown(socket.SHUT_WR)
            caller.recv(4096)
        except OSError:
            pass
    publisher.publish(0)
    assert agent().poll(20) == V("1.0")
