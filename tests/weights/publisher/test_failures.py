"""WeightPublisher: failures lose nothing, and the next publish is right."""

from __future__ import annotations

from typing import Any

import pytest

from rose.errors import CapacityError, VersionRefused, WeightsError, WrongBase
from rose.testing.memory_store import MemoryStore
from rose.weights.buckets import Buckets
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.publisher.kit import SMALL, FlakyStore, V, holds
from tests.weights.toy import ToyTrainer

POINTS = {
    "object": lambda method, argument: method == "put_new" and not argument.endswith(".json"),
    "manifest": lambda method, argument: method == "put_new" and argument.endswith(".json"),
    "head": lambda method, argument: method == "set_head",
}


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("retry", ["same-weights", "after-a-step"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", list(POINTS))
def test_after_any_failure_the_next_publish_is_right(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    store: FlakyStore,
    reader: WeightSubscriber,
    point: str,
    when: str,
    retry: str,
    dense: bool,
) -> None:
    for version in (0, 1):
        publisher.publish(version)
        trainer.step()
    assert reader.poll(0) == V("1.1")
    if dense:
        trainer.step(lr=1e-2)
    store.fail_at = lambda method, argument: when if POINTS[point](method, argument) else None
    with pytest.raises(CapacityError):
        publisher.publish(2)
    store.fail_at = lambda method, argument: None

    if retry == "after-a-step":
        trainer.step()
        publisher.publish(3)
    else:
        publisher.publish(2)
    assert holds(reader, trainer)
    # And the baseline is right for what follows: a normal small delta.
    trainer.step()
    report = publisher.publish(4)
    assert report.kind == "delta"
    assert report.bytes_sent < 0.04 * report.bytes_dense
    assert holds(reader, trainer)


def test_a_failed_publish_leaves_head_and_published_version_alone(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher.publish(0)
    trainer.step()
    store.fail_at = lambda method, argument: "before" if POINTS["manifest"](method, argument) else None
    with pytest.raises(CapacityError):
        publisher.publish(1)
    head = store.get_head("run")
    assert head is not None
    assert head.identity == publisher.published == V("1.0")


def test_a_version_whose_manifest_landed_is_taken_even_if_its_head_did_not(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    store.fail_at = lambda method, argument: "before" if method == "set_head" else None
    with pytest.raises(CapacityError):
        publisher.publish(1)
    store.fail_at = lambda method, argument: None
    trainer.step()
    with pytest.raises(VersionRefused, match=r"1\.1 was begun with other weights .*take the next version"):
        publisher.publish(1)
    publisher.publish(2)
    assert holds(reader, trainer)


def test_a_store_that_loses_an_object_is_found_out_before_the_head_moves(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher.publish(0)
    trainer.step()

    def evict(method: str, argument: Any) -> str | None:
        if method == "put_new" and not argument.endswith(".json"):
            MemoryStore.put_new(store, argument, b"")  # the name is taken by other bytes
        return None

    store.fail_at = evict
    with pytest.raises(WeightsError, match="taken by other bytes"):
        publisher.publish(1)
    head = store.get_head("run")
    assert head is not None
    assert head.identity == V("1.0")


def test_an_object_of_an_earlier_try_that_was_damaged_since_is_replaced(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    store.fail_at = lambda method, argument: "before" if POINTS["manifest"](method, argument) else None
    discard = Buckets.discard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buckets, "discard", lambda self: None)  # it was killed before it could
        with pytest.raises(CapacityError):
            publisher.publish(1)
    assert Buckets.discard is discard
    store.fail_at = lambda method, argument: None
    (left,) = [key for key in store.list("run/1.1/") if not key.endswith(".json")]
    data = store.get(left)
    store.delete(left)
    store.put_new(left, bytes(len(data)))  # as long, and something else
    publisher.publish(1)
    assert store.get(left) == data
    assert holds(reader, trainer)


def test_a_store_that_was_wiped_gets_an_anchor(trainer: ToyTrainer, store: FlakyStore, tmp_path: Any) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    publisher.publish(0)
    trainer.step()
    fresh = MemoryStore()
    publisher._store = fresh
    assert publisher.publish(1).kind == "anchor"
    subscriber = WeightSubscriber(fresh, "run", tmp_path / "fresh")
    assert holds(subscriber, trainer)
    subscriber.close()


def test_a_baseline_damaged_in_memory_is_found_in_turn_and_the_version_is_whole(
    trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    params = WeightsParams(
        anchor_every=4, collect=False
    )  # a quarter of the fragments is proved at every version
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, params)
    publisher.publish(0)
    trainer.step()
    publisher.publish(1)
    assert holds(reader, trainer)
    publisher._baseline.held[0].bits[7] ^= 0x40  # which has just been proved
    # Element 7 is sent as a step from what no reader holds: readers refuse it.
    assert publisher.publish(2).kind == "delta"
    with pytest.raises(WrongBase):
        reader.poll(0)
    kinds = [publisher.publish(version).kind for version in (3, 4)]
    assert kinds[-1] == "anchor"
    assert holds(reader, trainer)
    trainer.step()
    assert publisher.publish(5).kind == "delta"
    assert holds(reader, trainer)


def test_a_failing_clean_up_does_not_fail_the_publish(trainer: ToyTrainer) -> None:
    class NoListing(MemoryStore):
        def list(self, prefix: str) -> list[str]:
            raise CapacityError("away")

    publisher = WeightPublisher(trainer.tensors, NoListing(), "run", 1)
    assert publisher.publish(0).kind == "anchor"
