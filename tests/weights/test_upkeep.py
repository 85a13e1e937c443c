"""Anchors composed beside the trainer, and a store that never fills for good."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.errors import CapacityError, RoseError, WeightsError
from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights import composer, manifest, retention, stored_manifests
from rose.weights.file_store import FileStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.retention import Need
from rose.weights.subscriber import WeightSubscriber
from tests.weights.shards_kit import Trainer, fsdp
from tests.weights.subscriber.kit import copy_of, same
from tests.weights.toy import ToyTrainer

SMALL = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 16, anchor_every=3)
KEEP = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 16, anchor_every=3, collect=False)


def V(text: str) -> WeightVersion:
    return WeightVersion.parse(text)


class WatchedStore(MemoryStore):
    """``before_put`` is called with every key that is about to be written."""

    def __init__(self) -> None:
        super().__init__()
        self.before_put: Callable[[str], None] = lambda key: None

    def put_new(self, key: str, data: Any) -> None:
        self.before_put(key)
        super().put_new(key, data)


def is_part(key: str) -> bool:
    return f"/{manifest.COMPOSED}." in key


@pytest.fixture
def trainer() -> ToyTrainer:
    return ToyTrainer(1)


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def joins(store: WatchedStore, tmp_path: Path) -> Iterator[Callable[[ToyTrainer], bool]]:
    """Whether a reader that has nothing gets what the trainer has."""
    opened: list[WeightSubscriber] = []

    def join(trainer: ToyTrainer) -> bool:
        reader = WeightSubscriber(store, "run", tmp_path / f"late-{len(opened)}")
        opened.append(reader)
        reader.poll(0)
        return same(copy_of(reader), trainer.bits())

    yield join
    for reader in opened:
        reader.close()


def publish(publisher: WeightPublisher, trainer: ToyTrainer, versions: range, lr: float = 3e-7) -> None:
    for version in versions:
        if version:
            trainer.step(lr)
        publisher.publish(version)
        assert publisher.settle(30)


# -- composing ---------------------------------------------------------------------------------------------


def test_a_composed_anchor_is_the_state_of_its_version_bit_by_bit(
    trainer: ToyTrainer, store: WatchedStore, joins: Callable[[ToyTrainer], bool]
) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, KEEP)
    publish(publisher, trainer, range(4))
    record = stored_manifests.read(store, "run", V("1.3"), "anchor")
    assert record.state() == stored_manifests.read(store, "run", V("1.3"), "delta").state()
    assert record.bytes_sent == record.bytes_dense == sum(bits.nbytes for bits in trainer.bits().values())
    for version in ("1.0", "1.1", "1.2"):  # nothing but the new anchor is left
        for key in store.list(f"run/{version}/"):
            store.delete(key)
    publish(publisher, trainer, range(4, 5))
    assert stored_manifests.read(store, "run", V("1.4"), "delta").anchor == (1, 3)
    assert joins(trainer)


def test_an_anchor_of_raw_pieces_columns_and_many_ranks_is_composed_alike(
    store: WatchedStore, tmp_path: Path
) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(33, 8, generator=generator), "n": torch.randn(5, generator=generator)}
    group = Trainer(fsdp(4), store, 1, KEEP)
    for version in range(5):
        group.publish(weights, version)
        assert group.publishers[0].settle(30)
        weights = {"a": weights["a"] + (torch.rand(33, 8, generator=generator) < 0.1), "n": -weights["n"]}
    anchor = stored_manifests.read(store, "run", V("1.3"), "anchor")
    first = stored_manifests.read(store, "run", V("1.0"), "anchor")
    assert [s.box for s in anchor.sections] == [s.box for s in first.sections]
    assert anchor.state() == stored_manifests.read(store, "run", V("1.3"), "delta").state()


def test_publishing_never_waits_for_an_anchor(
    trainer: ToyTrainer, store: WatchedStore, joins: Callable[[ToyTrainer], bool]
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def block(key: str) -> None:
        if is_part(key):
            begun.set()
            assert go_on.wait(60)

    store.before_put = block
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, KEEP)
    for version in range(4):
        publisher.publish_async(version).result(30)
        trainer.step()
    assert begun.wait(30)
    for version in range(
        4, 8
    ):  # twice as many as are due for another anchor: the store still takes the first
        publisher.publish_async(version).result(30)
        if version < 7:
            trainer.step()
    go_on.set()
    assert publisher.settle(30)
    trainer.step()
    assert publisher.publish(8).bytes_anchor > 0
    assert stored_manifests.read(store, "run", V("1.8"), "delta").anchor in {(1, 3), (1, 7)}
    assert joins(trainer)
    publisher.close()


def test_closing_gives_up_an_anchor_and_leaves_nothing_of_it(
    trainer: ToyTrainer, store: WatchedStore
) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, KEEP)
    closing = threading.Event()

    def block(key: str) -> None:
        if is_part(key):
            threading.Thread(target=lambda: (publisher.close(), closing.set())).start()
            while not publisher._upkeep._stop.wait(0.01):  # type: ignore[union-attr]
                pass

    store.before_put = block
    for version in range(4):
        publisher.publish(version)
        trainer.step()
    assert closing.wait(30)
    assert not [key for key in store.list("run/") if is_part(key)]
    assert store.leases("run") == []


@pytest.mark.parametrize("point", ["part", "manifest"])
def test_an_anchor_that_fails_leaves_nothing_and_is_tried_again(
    trainer: ToyTrainer, store: WatchedStore, joins: Callable[[ToyTrainer], bool], point: str
) -> None:
    num_parts = 0

    def fail(key: str) -> None:
        nonlocal num_parts
        num_parts += is_part(key)
        if (point == "part" and num_parts == 3) or (point == "manifest" and key.endswith("1.3/anchor.json")):
            raise CapacityError("cut off")

    publisher = WeightPublisher(trainer.tensors, store, "run", 1, KEEP)
    store.before_put = fail
    publish(publisher, trainer, range(4))
    assert num_parts
    assert not [key for key in store.list("run/") if is_part(key) or key.endswith("1.3/anchor.json")]
    store.before_put = lambda key: None
    publish(publisher, trainer, range(4, 5))
    assert stored_manifests.read(store, "run", V("1.4"), "anchor").bytes_sent
    assert joins(trainer)


@pytest.mark.parametrize("harm", ["damage", "delete", "shorten"])
@pytest.mark.parametrize("victim", ["1.0", "1.2"])
def test_a_chain_that_is_damaged_in_the_store_is_no_anchor_and_the_next_version_is_whole(
    trainer: ToyTrainer,
    store: WatchedStore,
    joins: Callable[[ToyTrainer], bool],
    harm: str,
    victim: str,
) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, KEEP)
    publish(publisher, trainer, range(3))
    key = next(key for key in store.list(f"run/{victim}/") if not key.endswith(".json"))
    data = bytearray(store.get(key))
    store.delete(key)
    data[7] ^= 1
    if harm != "delete":
        store.put_new(key, data if harm == "damage" else data[:-1])
    publish(publisher, trainer, range(3, 4))
    assert "run/1.3/anchor.json" not in store.list("run/")
    assert not [key for key in store.list("run/") if is_part(key)]
    publish(publisher, trainer, range(4, 5))
    assert stored_manifests.read(store, "run", V("1.4"), "anchor").base is None
    assert joins(trainer)


def test_an_anchor_is_not_composed_of_a_state_that_is_not_the_versions(
    trainer: ToyTrainer, store: WatchedStore
) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, KEEP)
    publish(publisher, trainer, range(2))
    publisher._baseline.held[0].bits[7] ^= 0x40  # a delta made of this fits no reader
    trainer.masters["model.embed_tokens.weight"].reshape(-1)[7] += 1
    publisher.publish(2)
    with pytest.raises(WeightsError, match=r"do not lead to 1\.2"):
        composer.compose(store, "run", V("1.2"), KEEP)


def test_a_trainer_that_goes_on_after_a_restart_knows_the_chain_it_found(
    trainer: ToyTrainer, store: WatchedStore, joins: Callable[[ToyTrainer], bool]
) -> None:
    publish(WeightPublisher(trainer.tensors, store, "run", 1, SMALL), trainer, range(3))
    second = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    second.publish(2)  # the same weights: adopted
    trainer.step()
    second.publish(3)
    assert second.settle(30)
    assert "run/1.3/anchor.json" in store.list("run/")
    assert joins(trainer)


# -- what may go -------------------------------------------------------------------------------------------


def versions(store: MemoryStore) -> list[str]:
    return [str(version) for version in manifest.versions_in(store.list("run/"), "run")]


def test_what_failed_publishes_and_anchors_left_goes_and_nothing_that_is_begun(
    trainer: ToyTrainer, store: WatchedStore, joins: Callable[[ToyTrainer], bool]
) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    publish(publisher, trainer, range(2))
    store.put_new("run/1.2/0000.00000-aa", b"of a publish that failed")
    store.put_new("run/1.1/composed.00000-aa", b"of an anchor whose composer was killed")
    trainer.step()
    publisher.publish(3)
    store.put_new("run/1.4/0000.00000-aa", b"of a publish that is under way")
    store.put_new("run/1.3/composed.00000-aa", b"of an anchor that is being composed")
    store.lease("run", "composer", V("1.3"), 60)
    assert publisher.settle(30)
    retention.collect(store, "run")
    assert versions(store) == ["1.0", "1.1", "1.3", "1.4"]
    assert [key for key in store.list("run/") if is_part(key)] == ["run/1.3/composed.00000-aa"]
    assert joins(trainer)


def test_a_version_whose_manifest_was_written_and_whose_head_was_not_goes_with_the_next(
    trainer: ToyTrainer, store: WatchedStore
) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    publish(publisher, trainer, range(2))
    trainer.step()
    move, store.set_head = store.set_head, lambda head, *, expected: fail()  # type: ignore[method-assign]

    def fail() -> None:
        raise CapacityError("cut off")

    with pytest.raises(CapacityError):
        publisher.publish(2)
    store.set_head = move  # type: ignore[method-assign]
    publisher.publish(3)
    assert publisher.settle(30)
    assert versions(store) == ["1.0", "1.1", "1.3"]


@pytest.mark.parametrize(
    ("need", "kept"),
    [
        (Need.TIDY, ["1.0", "1.1", "1.2", "1.3", "1.4", "1.5"]),
        (Need.OVER, ["1.3", "1.4", "1.5"]),
        (Need.FULL, ["1.3", "1.4"]),
        (Need.LAST, ["1.4"]),
    ],
)
def test_each_need_deletes_more(
    trainer: ToyTrainer, store: WatchedStore, need: Need, kept: list[str]
) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, KEEP)
    publish(publisher, trainer, range(5))
    store.lease("run", "reader", V("1.2"), 60)
    store.put_new("run/1.5/0000.00000-aa", b"begun")
    retention.collect(store, "run", need)
    assert versions(store) == kept


def test_a_composed_anchor_of_the_head_goes_with_the_chain_that_nobody_can_follow(
    trainer: ToyTrainer, store: WatchedStore
) -> None:
    publish(WeightPublisher(trainer.tensors, store, "run", 1, KEEP), trainer, range(4))
    retention.collect(store, "run", Need.LAST)
    assert not [key for key in store.list("run/") if is_part(key) or key.endswith("anchor.json")]
    assert "run/1.3/delta.json" in store.list("run/")


# -- room --------------------------------------------------------------------------------------------------


class Small:
    """A trainer of a few thousand weights whose every step moves 2 %."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(5)
        self.weights = {f"layer.{n}": self._rng.standard_normal(2_000).astype(np.float32) for n in range(4)}

    def step(self) -> None:
        for values in self.weights.values():
            values[self._rng.integers(0, values.size, values.size // 50)] *= np.float32(1.01)

    def tensors(self) -> dict[str, np.ndarray]:
        return self.weights


DENSE_BYTES = 16_000


@pytest.mark.parametrize("told", [False, True], ids=["found-out", "told"])
def test_a_store_of_a_little_over_two_copies_never_locks_though_readers_die(
    tmp_path: Path, told: bool
) -> None:
    """Manifests are as large as deltas at this size: the limit counts 2.2 copies of both."""
    trainer, copy_bytes = Small(), DENSE_BYTES + 6_000
    limit = int(2.2 * copy_bytes)
    store = FileStore(tmp_path / "store", max_total_bytes=limit, durable=False)
    params = WeightsParams(
        fragment_elements=65_536, bucket_bytes=4096, max_store_bytes=limit if told else None
    )
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, params)
    rng = np.random.default_rng(7)
    follower = WeightSubscriber(store, "run", tmp_path / "follower")
    num_joined = 0
    last = 160  # the limit is met every dozen
    for version in range(last):
        publisher.publish(version)
        assert store.total_bytes <= limit
        if rng.random() < 0.3:  # a reader that dies at once and is never seen again
            store.lease("run", f"dead-{version}", WeightVersion(1, version), 600)
        with contextlib.suppress(RoseError):  # overtaken: it starts over at the next version
            follower.poll(0)
        if version % 16 == 15:
            assert publisher.settle(120)
            late = WeightSubscriber(store, "run", tmp_path / f"late-{version}")
            assert late.poll(0) == WeightVersion(1, version)
            late.close()
            num_joined += 1
        trainer.step()
    if follower.version != WeightVersion(1, last - 1):  # overtaken by the last one
        follower.poll(0)
    assert follower.version == WeightVersion(1, last - 1)
    assert num_joined == 10
    assert follower.scan() == []
    follower.close()
    publisher.close()


def test_a_budget_that_is_too_small_for_two_copies_is_kept_all_the_same(tmp_path: Path) -> None:
    trainer, limit = Small(), 30_000
    store = FileStore(tmp_path / "store", durable=False)
    params = WeightsParams(fragment_elements=65_536, bucket_bytes=4096, max_store_bytes=limit)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, params)
    most = 0
    for version in range(60):
        publisher.publish(version)
        assert publisher.settle(30)
        most = max(most, store.total_bytes)
        trainer.step()
    one_version = 3_000
    assert most <= limit + one_version  # it is looked at before a version is written


def test_leases_of_dead_readers_do_not_keep_more_than_the_budget(tmp_path: Path) -> None:
    trainer, limit = Small(), 80_000
    store = FileStore(tmp_path / "store", durable=False)
    params = WeightsParams(fragment_elements=65_536, bucket_bytes=4096, anchor_every=5, max_store_bytes=limit)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, params)
    for version in range(60):
        publisher.publish(version)
        store.lease("run", f"dead-{version}", WeightVersion(1, version), 600)
        assert publisher.settle(30)
        assert store.total_bytes <= limit
        trainer.step()
