"""Which versions are deleted, and when."""

from __future__ import annotations

from rose.weights import retention
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from tests.weights.publisher.kit import FlakyStore, V
from tests.weights.toy import ToyTrainer


def test_only_what_is_older_than_every_anchor_in_use_goes() -> None:
    versions = [V(t) for t in ("2.1", "1.0", "1.1", "1.5", "1.9", "2.0")]
    assert [str(v) for v in retention.plan(versions, [V("2.0"), V("1.5")])] == ["1.0", "1.1"]
    assert [str(v) for v in retention.plan(versions, [V("2.0")])] == ["1.0", "1.1", "1.5", "1.9"]
    assert retention.plan(versions, []) == []


def test_old_versions_are_deleted_once_no_reader_can_need_them(
    trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, WeightsParams(anchor_every=3))
    store.lease("run", "slow-reader", V("1.2"), 60)

    def first_kept() -> str:
        return store.list("run/")[0].split("/")[1]

    def publish(versions: range) -> None:
        for version in versions:
            publisher.publish(version)
            assert publisher.settle(30)
            trainer.step()

    publish(range(7))
    assert first_kept() == "1.0"  # the reader of 1.2 starts from it
    store.lease("run", "slow-reader", None, 60)
    publish(range(7, 8))
    assert first_kept() == "1.6"  # where the chain of 1.7 starts


def test_a_leased_version_that_is_gone_holds_nothing(trainer: ToyTrainer, store: FlakyStore) -> None:
    store.lease("run", "ghost", V("0.1"), 60)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, WeightsParams(anchor_every=1))
    for version in range(4):
        publisher.publish(version)
        assert publisher.settle(30)
        trainer.step()
    assert "run/1.0/anchor.json" not in store.list("run/")


def test_nothing_is_deleted_while_the_heads_own_manifest_cannot_be_read(
    publisher: WeightPublisher, store: FlakyStore
) -> None:
    publisher.publish(0)
    publisher.publish(1)
    store.delete("run/1.1/delta.json")
    store.lease("run", "reader", V("1.0"), 60)
    assert retention.collect(store, "run") == []
