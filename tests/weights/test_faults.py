"""What can go wrong between a trainer and its engines, as it happens: killed processes, full disks, two writers.

Faults that need no process are tested where they belong:

======================================  =====================================================================
corrupt, truncated, missing section      ``subscriber``: any section; a short object; a deleted object
duplicated, reordered, left-out section  here (manifests)
wrong base, stale relay, rollback        ``subscriber``; undo: ``plugin/test_weights_rank``, ``.._engine``
two trainers, version published twice    ``publisher``; with several ranks: ``test_sharded``
engine killed in stage and commit        ``coserve/test_links``; real: ``plugin/test_weights_versions_engine``, ``.._ranks_..``
traversal, tokens, bombs                 ``test_stores``, ``test_relay``, ``test_codec``
======================================  =====================================================================

How long recovery takes with real engines is measured by ``benchmarks/weight_transfer/weights_live.py --parts recovery``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rose.errors import CapacityError, SectionCorrupt, WrongBase
from rose.lineage import WeightVersion
from rose.weights import manifest, spool, stored_manifests
from rose.weights.file_store import FileStore
from rose.weights.http_store import HttpStore
from rose.weights.manifest import Head
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.source import RawBits
from rose.weights.subscriber import WeightSubscriber
from tests.weights.relay_process import ForkedRelay, RelayProcess
from tests.weights.subscriber.kit import copy_of, same
from tests.weights.toy import ToyTrainer

PARAMS = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 16, anchor_every=1000)


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[RelayProcess]:
    with ForkedRelay(tmp_path) as process:
        yield process


# -- the relay is killed -----------------------------------------------------------------------------


class Interrupted(HttpStore):
    """Kills the relay before one of its reads and starts it again during the pause."""

    def __init__(self, relay: RelayProcess, at_read: int) -> None:
        super().__init__(relay.url, relay.tokens.publish, patience_s=30)
        self._relay, self._at_read = relay, at_read
        self.bytes_read = 0

    def get_range(self, key: str, offset: int, nbytes: int) -> Any:
        self._at_read -= 1
        if self._at_read == 0:
            self._relay.kill()
            self._relay.restart()
        data = super().get_range(key, offset, nbytes)
        self.bytes_read += nbytes
        return data


def test_a_relay_killed_in_the_middle_of_an_object_costs_no_byte_twice(
    relay: RelayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "PULL_BYTES", 20_000)
    trainer = ToyTrainer(1)
    report = WeightPublisher(
        trainer.tensors, HttpStore(relay.url, relay.tokens.publish), "run", 1, PARAMS
    ).publish(0)
    store = Interrupted(relay, at_read=3)
    reader = WeightSubscriber(store, "run", tmp_path / "reader", owns_store=True)
    assert reader.poll(0) == WeightVersion(1, 0)
    assert same(copy_of(reader), trainer.bits())
    assert store.bytes_read == report.bytes_sent
    reader.close()


def test_a_relay_killed_while_a_version_is_uploaded_loses_nothing(
    relay: RelayProcess, tmp_path: Path
) -> None:
    class Uploading(HttpStore):
        puts = 0

        def put_new(self, key: str, data: Any) -> None:
            type(self).puts += 1
            if self.puts == 2:
                relay.kill()
                relay.restart()
            super().put_new(key, data)

    trainer = ToyTrainer(1)
    store = Uploading(relay.url, relay.tokens.publish, patience_s=30)
    WeightPublisher(trainer.tensors, store, "run", 1, PARAMS).publish(0)
    reader = WeightSubscriber(store, "run", tmp_path / "reader", owns_store=True)
    reader.poll(0)
    assert same(copy_of(reader), trainer.bits())
    reader.close()


# -- the disk is full --------------------------------------------------------------------------------


def test_a_store_that_is_full_refuses_the_version_and_takes_it_once_there_is_room(tmp_path: Path) -> None:
    trainer = ToyTrainer(1)
    full_bytes = sum(bits.nbytes for bits in trainer.bits().values())
    store = FileStore(tmp_path / "store", max_total_bytes=full_bytes + 60_000, durable=False)
    params = replace(PARAMS, collect=False)  # nothing may be deleted to make room
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, params)
    publisher.publish(0)
    trainer.step(lr=1e-2)  # dense: as large as an anchor
    with pytest.raises(CapacityError, match="full") as caught:
        publisher.publish(1)
    assert caught.value.status == 507
    head = store.get_head("run")
    assert head is not None
    assert head.identity == publisher.published == WeightVersion(1, 0)

    wider = FileStore(tmp_path / "store", durable=False)  # somebody made room
    publisher._store = wider
    assert publisher.publish(1).kind == "anchor"
    reader = WeightSubscriber(wider, "run", tmp_path / "reader")
    reader.poll(0)
    assert same(copy_of(reader), trainer.bits())
    reader.close()


def test_a_store_with_room_for_one_copy_takes_one_dense_version_after_the_other(tmp_path: Path) -> None:
    trainer = ToyTrainer(1)
    full_bytes = sum(bits.nbytes for bits in trainer.bits().values())
    store = FileStore(tmp_path / "store", max_total_bytes=full_bytes + 60_000, durable=False)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, PARAMS)
    reader = WeightSubscriber(store, "run", tmp_path / "reader")
    for version in range(6):
        assert publisher.publish(version).kind == "anchor"
        assert reader.poll(0) == WeightVersion(1, version)
        assert same(copy_of(reader), trainer.bits())
        trainer.step(lr=1e-2)
    reader.close()


def test_a_store_that_cannot_hold_one_copy_says_so(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", max_total_bytes=100_000, durable=False)
    publisher = WeightPublisher(ToyTrainer(1).tensors, store, "run", 1, PARAMS)
    with pytest.raises(CapacityError, match="full") as caught:
        publisher.publish(0)
    assert caught.value.status == 507


# -- the trainer is killed ---------------------------------------------------------------------------


class Deadly(FileStore):
    """SIGKILL for its own process before or after one kind of write."""

    point = ""
    armed = False

    def _maybe_die(self, point: str) -> None:
        if self.armed and point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def put_new(self, key: str, data: Any) -> None:
        kind = "manifest" if key.endswith(".json") else "object"
        self._maybe_die(f"before {kind}")
        super().put_new(key, data)
        self._maybe_die(f"after {kind}")

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        self._maybe_die("before head")
        super().set_head(head, expected=expected)
        self._maybe_die("after head")


def doomed_trainer(folder: Path, point: str) -> None:
    store = Deadly(folder, durable=False)
    trainer = ToyTrainer(1)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, PARAMS)
    publisher.publish(0)
    trainer.step()
    publisher.publish(1)
    trainer.step()
    store.point, store.armed = point, True
    publisher.publish(2)


@pytest.mark.parametrize(
    "point",
    ["before object", "after object", "before manifest", "after manifest", "before head", "after head"],
)
def test_a_killed_trainer_restarts_from_an_older_checkpoint_as_a_new_attempt(
    point: str, tmp_path: Path
) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=doomed_trainer, args=(tmp_path / "store", point)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL

    store = FileStore(tmp_path / "store", durable=False)
    reader = WeightSubscriber(store, "run", tmp_path / "reader")
    found = reader.poll(0)
    assert found == WeightVersion(1, 2 if point == "after head" else 1)  # whole, whatever was begun
    trainer = ToyTrainer(1)
    for _ in range(found.version):
        trainer.step()
    assert same(copy_of(reader), trainer.bits())

    older = ToyTrainer(1)  # the checkpoint of step 0
    older.step()
    again = WeightPublisher(older.tensors, store, "run", 2, PARAMS)
    assert again.publish(1).kind == "anchor"
    assert reader.poll(0) == WeightVersion(2, 1)
    older.step()
    assert again.publish(2).kind == "delta"
    reader.poll(0)
    assert same(copy_of(reader), older.bits())
    reader.close()


# -- manifests ---------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path) -> FileStore:
    store = FileStore(tmp_path / "store", durable=False)
    trainer = ToyTrainer(1)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, PARAMS)
    publisher.publish(0)
    trainer.step()
    publisher.publish(1)
    return store


def resend(store: FileStore, record: manifest.Manifest) -> None:
    """Put ``record`` in the place of its version's manifest, with a head that names it."""
    data = manifest.encode(record)
    key = manifest.manifest_key("run", record.identity, record.kind)
    store.path_of(key).write_bytes(data)
    head = store.get_head("run")
    assert head is not None
    reference = manifest.ObjectRef(key=key, nbytes=len(data), xxh3=manifest.digest(data))
    changed = msgspec.structs.replace(head, manifest=reference)
    (store.directory / "runs" / "run" / "head.json").write_bytes(manifest.encode(changed))


def test_a_section_sent_twice_is_refused(published: FileStore, tmp_path: Path) -> None:
    record = stored_manifests.read(published, "run", WeightVersion(1, 1), "delta")
    twice = (*record.sections, record.sections[0])
    resend(published, msgspec.structs.replace(record, sections=twice))
    reader = WeightSubscriber(published, "run", tmp_path / "reader")
    with pytest.raises(SectionCorrupt, match="pieces overlap"):
        reader.poll(0)
    assert reader.version is None
    reader.close()


def test_a_section_left_out_is_refused_and_taken_once_it_is_there(
    published: FileStore, tmp_path: Path
) -> None:
    reader = WeightSubscriber(published, "run", tmp_path / "reader")
    record = stored_manifests.read(published, "run", WeightVersion(1, 1), "delta")
    resend(published, msgspec.structs.replace(record, sections=record.sections[1:]))
    with pytest.raises(SectionCorrupt, match="state hashes do not add up"):
        reader.poll(0)
    assert reader.version is None

    resend(published, record)  # and whole again, it is taken
    assert reader.poll(0) == WeightVersion(1, 1)
    reader.close()


def test_sections_in_another_order_mean_the_same(published: FileStore, tmp_path: Path) -> None:
    first = WeightSubscriber(published, "run", tmp_path / "first")
    first.poll(0)
    record = stored_manifests.read(published, "run", WeightVersion(1, 1), "delta")
    order = np.random.default_rng(1).permutation(len(record.sections))
    shuffled = tuple(record.sections[i] for i in order)
    resend(published, msgspec.structs.replace(record, sections=shuffled))
    second = WeightSubscriber(published, "run", tmp_path / "second")
    assert second.poll(0) == WeightVersion(1, 1)
    assert same(copy_of(second), copy_of(first))
    steps = [reader.fetch(WeightVersion(1, 1), WeightVersion(1, 0)) for reader in (first, second)]
    assert steps[0].read_bytes() == steps[1].read_bytes()
    first.close()
    second.close()


def test_sections_that_swap_their_places_are_caught_by_the_state_hash(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", durable=False)
    rng = np.random.default_rng(1)
    weights = {"w": RawBits(rng.integers(0, 1 << 14, 2 * 65_536, dtype=np.uint16), "BF16")}
    publisher = WeightPublisher(lambda: weights, store, "run", 1, PARAMS)
    publisher.publish(0)
    weights["w"].bits[rng.permutation(2 * 65_536)[:2000]] += 1
    publisher.publish(1)
    record = stored_manifests.read(store, "run", WeightVersion(1, 1), "delta")
    first, second = record.sections
    swapped = (
        msgspec.structs.replace(second, start=first.start),
        msgspec.structs.replace(first, start=second.start),
    )
    resend(store, msgspec.structs.replace(record, sections=swapped))
    reader = WeightSubscriber(store, "run", tmp_path / "reader")
    with pytest.raises(WrongBase, match="state hash comes out wrong"):
        reader.poll(0)
    assert reader.version == WeightVersion(1, 0)
    reader.close()
