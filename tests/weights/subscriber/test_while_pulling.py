"""Whoever asks while a version is on its way gets the one at hand; what is found damaged meanwhile is not built upon."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from rose.errors import CapacityError
from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.shared_copy import SharedCopy
from rose.weights.subscriber import WeightSubscriber
from rose.weights.update import read_update
from tests.weights.subscriber.kit import V, WatchedStore, apply_update, copy_of, publish_steps, same
from tests.weights.toy import ToyTrainer

LIMIT_S = 30


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class SlowLink:
    """Object data of a store waits until it is let through."""

    def __init__(self, store: WatchedStore) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        store.twist = self._wait

    def _wait(self, key: str, offset: int, data: bytes) -> bytes:
        self.reached.set()
        assert self.open.wait(2 * LIMIT_S)
        return data


@pytest.fixture
def link(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> Iterator[SlowLink]:
    """The reader is at 1.1; what comes next is slow."""
    publish_steps(publisher, trainer, 0, 1)
    assert reader.poll(0) == V("1.1")
    link = SlowLink(store)
    yield link
    link.open.set()


def pulling(
    threads: ThreadPoolExecutor, reader: WeightSubscriber, link: SlowLink
) -> Future[WeightVersion | None]:
    """A poll that is in the middle of a version."""
    poll = threads.submit(reader.poll, 0)
    assert link.reached.wait(LIMIT_S)
    return poll


@pytest.mark.parametrize("lr", [None, 1e-2])  # a delta, or so much that it is a whole version
def test_a_fetch_does_not_wait_for_the_version_that_is_on_its_way(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    reader: WeightSubscriber,
    threads: ThreadPoolExecutor,
    link: SlowLink,
    lr: float | None,
) -> None:
    before = trainer.bits()
    if lr is None:
        trainer.step()
    else:
        trainer.step(lr=lr)
    publisher.publish(2)
    poll = pulling(threads, reader, link)
    paths = [threads.submit(reader.fetch, V("1.1"), base).result(LIMIT_S) for base in (None, V("1.0"))]
    assert not poll.done()
    assert same(apply_update({}, read_update(paths[0])), before)
    assert read_update(paths[1]).base == V("1.0")
    link.open.set()
    assert poll.result(LIMIT_S) == V("1.2")
    assert same(copy_of(reader), trainer.bits())
    assert same(apply_update({}, read_update(reader.fetch(V("1.2"), None))), trainer.bits())


def test_a_copy_that_is_found_damaged_while_a_delta_arrives_is_not_built_upon(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    reader: WeightSubscriber,
    threads: ThreadPoolExecutor,
    link: SlowLink,
) -> None:
    publish_steps(publisher, trainer, 2, 2)
    poll = pulling(threads, reader, link)
    reader._host.bits("scales")[3] ^= 1
    assert threads.submit(reader.scan).result(LIMIT_S) == ["scales"]
    link.open.set()
    assert poll.result(LIMIT_S) == V("1.2")
    assert reader.scan() == []
    assert same(copy_of(reader), trainer.bits())


@pytest.fixture
def many(store: WatchedStore, tmp_path: Path) -> Iterator[WeightSubscriber]:
    """A reader of three threads."""
    reader = WeightSubscriber(store, "run", tmp_path / "many", WeightsParams(num_threads=3))
    yield reader
    reader.close()


def test_objects_are_pulled_beside_each_other(
    publisher: WeightPublisher, trainer: ToyTrainer, store: WatchedStore, many: WeightSubscriber
) -> None:
    publisher.publish(0)
    together, calls = threading.Barrier(2), itertools.count()

    def twist(key: str, offset: int, data: bytes) -> bytes:
        if next(calls) < 2:
            together.wait(LIMIT_S)
        return data

    store.twist = twist
    assert many.poll(0) == V("1.0")
    assert same(copy_of(many), trainer.bits())


def test_a_poll_that_failed_pulls_nothing_any_more(
    publisher: WeightPublisher, trainer: ToyTrainer, store: WatchedStore, many: WeightSubscriber
) -> None:
    publisher.publish(0)
    calls, failed, over = itertools.count(), threading.Event(), threading.Event()
    beside: list[bool] = []

    def twist(key: str, offset: int, data: bytes) -> bytes:
        if next(calls) == 0:
            assert failed.wait(LIMIT_S)
            beside.append(over.wait(0.3))  # ends by itself where the poll waits for it
            return data
        failed.set()
        raise CapacityError("is away", field="store")

    store.twist = twist
    with pytest.raises(CapacityError):
        many.poll(0)
    over.set()
    assert beside == [False]
    store.twist = lambda key, offset, data: data
    assert many.poll(0) == V("1.0")
    assert same(copy_of(many), trainer.bits())


def test_an_agent_that_starts_while_its_neighbour_pulls_has_a_version_at_once(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    store: WatchedStore,
    threads: ThreadPoolExecutor,
    tmp_path: Path,
) -> None:
    def agent(source: MemoryStore) -> SharedCopy:
        return SharedCopy(
            "run", tmp_path / "copy", lambda: WeightSubscriber(source, "run", tmp_path / "copy")
        )

    publisher.publish(0)
    before = trainer.bits()
    keeper = agent(store)
    assert keeper.poll(LIMIT_S) == V("1.0")
    link = SlowLink(store)
    publish_steps(publisher, trainer, 1, 1)
    poll = threads.submit(keeper.poll, LIMIT_S)
    neighbour = agent(MemoryStore())
    try:
        assert link.reached.wait(LIMIT_S)
        assert threads.submit(neighbour.poll, LIMIT_S).result(LIMIT_S) == V("1.0")
        path = threads.submit(neighbour.fetch, V("1.0"), None).result(LIMIT_S)
        assert same(apply_update({}, read_update(path)), before)
        link.open.set()
        assert poll.result(LIMIT_S) == V("1.1")
        assert neighbour.poll(LIMIT_S) == V("1.1")
    finally:
        link.open.set()
        neighbour.close()
        keeper.close()
