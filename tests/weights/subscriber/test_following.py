"""WeightSubscriber follows versions, and goes on after a restart."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rose.errors import CapacityError, ConfigError, WrongBase
from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights.manifest import Head
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.subscriber.kit import PARAMS, V, WatchedStore, copy_of, publish_steps, same
from tests.weights.toy import ToyTrainer

# --- following --------------------------------------------------------------------------------------------


def test_each_version_is_followed_bit_by_bit(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    assert reader.poll(0) is None
    for version in range(5):
        publish_steps(publisher, trainer, version, version)
        assert reader.poll(0) == V(f"1.{version}")
        assert same(copy_of(reader), trainer.bits())
        assert reader.scan() == []
        assert reader.poll(0) is None


def test_only_the_delta_is_pulled(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)
    reader.poll(0)
    store.reads.clear()
    publish_steps(publisher, trainer, 1, 1)
    reader.poll(0)
    pulled = sum(nbytes for _, _, nbytes in store.reads)
    assert 0 < pulled < 0.04 * reader._host.nbytes


def test_versions_missed_in_between_are_walked_in_order(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    reader.poll(0)
    publish_steps(publisher, trainer, 1, 4)
    assert reader.poll(0) == V("1.4")
    assert same(copy_of(reader), trainer.bits())


def test_a_late_joiner_starts_from_the_anchor(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publish_steps(publisher, trainer, 0, 3)
    assert reader.poll(0) == V("1.3")
    assert same(copy_of(reader), trainer.bits())


def test_a_new_attempt_leads_to_its_anchor_even_with_a_lower_version(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 5)
    reader.poll(0)
    older = ToyTrainer(1)
    restarted = WeightPublisher(older.tensors, store, "run", 2, PARAMS)
    publish_steps(restarted, older, 2, 3)
    assert reader.poll(0) == V("2.3")
    assert same(copy_of(reader), older.bits())


def test_a_new_attempt_may_bring_another_model(
    publisher: WeightPublisher, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)
    reader.poll(0)
    other = {"x": np.ones((3, 3), np.float32)}
    WeightPublisher(lambda: other, store, "run", 2, PARAMS).publish(0)
    assert reader.poll(0) == V("2.0")
    assert list(copy_of(reader)) == ["x"]


def test_a_waiting_reader_is_woken_by_a_publish(publisher: WeightPublisher, reader: WeightSubscriber) -> None:
    found: list[WeightVersion | None] = []
    thread = threading.Thread(target=lambda: found.append(reader.poll(30)))
    thread.start()
    publisher.publish(0)
    thread.join(20)
    assert found == [V("1.0")]


def test_what_is_being_read_is_leased_and_then_let_go(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 2)
    reader.poll(0)
    assert store.held == [V("1.2")]
    assert store.leases("run") == []


def test_a_reader_that_died_is_succeeded_by_the_next_of_its_directory(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    store: WatchedStore,
    open_reader: Callable[..., WeightSubscriber],
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    first, other = open_reader("one"), open_reader("two")
    assert first._holder != other._holder
    first.poll(0)
    first._lease(V("1.0"))  # it dies while it reads
    first.close()
    assert store.leases("run") == [V("1.0")]

    second = open_reader("one")
    assert second._holder == first._holder
    second.poll(0)  # tells what it has
    assert second.poll(0) is None
    assert store.leases("run") == []


def test_a_copied_directory_is_another_reader(
    open_reader: Callable[..., WeightSubscriber], tmp_path: Path
) -> None:
    first = open_reader("one")
    first.close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert open_reader("two")._holder != first._holder


# --- restarts ---------------------------------------------------------------------------------------------


def test_a_restarted_reader_has_its_copy_at_once_and_goes_on_by_deltas(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    store: WatchedStore,
    open_reader: Callable[..., WeightSubscriber],
) -> None:
    publish_steps(publisher, trainer, 0, 2)
    first = open_reader()
    first.poll(0)
    first.close()
    store.reads.clear()

    second = open_reader()
    assert second.version == V("1.2")
    assert second.poll(60) == V("1.2")  # told at once, without waiting for news
    assert same(copy_of(second), trainer.bits())
    assert store.reads == []
    publish_steps(publisher, trainer, 3, 3)
    assert second.poll(0) == V("1.3")
    assert sum(nbytes for _, _, nbytes in store.reads) < 0.04 * second._host.nbytes


def test_a_restored_copy_serves_while_the_store_is_away(
    publisher: WeightPublisher, store: WatchedStore, open_reader: Callable[..., WeightSubscriber]
) -> None:
    publisher.publish(0)
    first = open_reader()
    first.poll(0)
    first.close()

    class Away(MemoryStore):
        def wait_head(self, run_id: str, after: WeightVersion | None, timeout_s: float) -> Head | None:
            raise CapacityError("away")

    second = open_reader(source=Away())
    assert second.poll(0) == V("1.0")
    assert second.fetch(V("1.0"), None).exists()
    with pytest.raises(CapacityError):
        second.poll(0)


def test_a_copy_damaged_on_disk_is_fetched_again(
    publisher: WeightPublisher, trainer: ToyTrainer, open_reader: Callable[..., WeightSubscriber]
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    first = open_reader()
    first.poll(0)
    path = first._host.path
    first.close()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    second = open_reader()
    assert second.version is None
    assert second.poll(0) == V("1.1")
    assert same(copy_of(second), trainer.bits())


@pytest.mark.parametrize("state", [b"", b"{}", b"\xff", None, b'{"schema": 1, "run_id": "run"}'])
def test_a_copy_without_its_state_is_nothing(
    publisher: WeightPublisher, open_reader: Callable[..., WeightSubscriber], state: bytes | None
) -> None:
    publisher.publish(0)
    first = open_reader()
    first.poll(0)
    first.close()
    path = first._host.directory / "state.json"
    path.unlink()
    if state is not None:
        path.write_bytes(state)
    second = open_reader()
    assert second.version is None
    assert second.poll(0) == V("1.0")


def test_a_copy_of_another_run_is_not_taken_over(
    publisher: WeightPublisher, store: WatchedStore, open_reader: Callable[..., WeightSubscriber]
) -> None:
    publisher.publish(0)
    first = open_reader()
    first.poll(0)
    first.close()
    other = WeightSubscriber(store, "other", first._host.directory)
    assert other.version is None
    other.close()


def test_a_head_behind_the_restored_copy_is_an_error_not_silence(
    publisher: WeightPublisher, trainer: ToyTrainer, open_reader: Callable[..., WeightSubscriber]
) -> None:
    publish_steps(publisher, trainer, 0, 2)
    first = open_reader()
    first.poll(0)
    first.close()
    fresh = MemoryStore()
    WeightPublisher(trainer.tensors, fresh, "run", 1, PARAMS).publish(0)
    second = open_reader(source=fresh)
    with pytest.raises(WrongBase, match=r"head is at 1\.0, the host copy at 1\.2"):
        second.poll(0)


def test_a_directory_has_one_owner(reader: WeightSubscriber, store: WatchedStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use"):
        WeightSubscriber(store, "run", tmp_path / "reader")
