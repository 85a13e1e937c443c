"""WeightPublisher: which version of which trainer is refused, and which is the same once more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rose.errors import VersionRefused
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.publisher.kit import SMALL, FlakyStore, V, holds
from tests.weights.toy import ToyTrainer


def test_the_same_version_with_the_same_weights_sends_nothing(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher.publish(0)
    trainer.step()
    first = publisher.publish(1)
    keys = store.list("run/")
    again = publisher.publish(1)
    assert (again.kind, again.bytes_sent, again.state) == (first.kind, 0, first.state)
    assert store.list("run/") == keys


def test_the_same_version_with_other_weights_is_refused_and_the_next_is_right(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    publisher.publish(1)
    trainer.step()
    with pytest.raises(VersionRefused, match=r"1\.1 is published with other weights"):
        publisher.publish(1)
    assert publisher.publish(2).kind == "delta"
    assert holds(reader, trainer)


def test_going_back_is_refused(publisher: WeightPublisher) -> None:
    publisher.publish(5)
    with pytest.raises(VersionRefused, match=r"1\.4 goes back"):
        publisher.publish(4)


def test_another_model_is_refused(publisher: WeightPublisher, trainer: ToyTrainer) -> None:
    publisher.publish(0)
    trainer.masters["new"] = np.zeros(3, np.float32)
    with pytest.raises(VersionRefused, match=r"^model: .*it has besides new \("):
        publisher.publish(1)


def test_a_restarted_trainer_takes_the_next_attempt(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    for version in (0, 1, 2):
        publisher.publish(version)
        trainer.step()
    older = ToyTrainer(1)
    restarted = WeightPublisher(older.tensors, store, "run", 2, SMALL)
    older.step()
    report = restarted.publish(1)
    assert (report.kind, report.version) == ("anchor", V("2.1"))
    assert holds(reader, older)
    # The zombie of the first attempt learns it at its next publish.
    with pytest.raises(VersionRefused, match=r"head is at 2\.1"):
        publisher.publish(3)
    with pytest.raises(VersionRefused, match="attempt 2 has begun"):
        WeightPublisher(trainer.tensors, store, "run", 1, SMALL).publish(4)
    assert holds(reader, older)


def test_an_attempt_in_use_is_refused_with_the_fix(publisher: WeightPublisher, store: FlakyStore) -> None:
    publisher.publish(0)
    second = WeightPublisher(ToyTrainer(2).tensors, store, "run", 1, SMALL)
    for version in (0, 1):
        with pytest.raises(VersionRefused) as caught:
            second.publish(version)
    assert caught.value.fix == "a restarted trainer takes attempt 2"


def test_a_restarted_process_may_adopt_the_version_it_finds_published(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    publisher.publish(1)
    second = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    assert second.publish(1).bytes_sent == 0
    trainer.step()
    assert second.publish(2).kind == "delta"
    assert holds(reader, trainer)


def test_two_trainers_with_one_run_id_cannot_interleave(trainer: ToyTrainer, store: FlakyStore) -> None:
    one = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    two = WeightPublisher(ToyTrainer(2).tensors, store, "run", 2, SMALL)
    one.publish(0)
    two.publish(0)
    for version in (1, 2):
        trainer.step()
        with pytest.raises(VersionRefused, match="another trainer"):
            one.publish(version)
    assert two.publish(1).version == V("2.1")


def test_a_copy_of_this_trainer_that_went_on_is_found_out(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    # The same attempt twice, for example a trainer that was thought dead: only one may write the next version.
    publisher.publish(0)
    twin = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    twin.publish(0)
    trainer.step()
    twin.publish(1)
    keys = store.list("run/")
    with pytest.raises(VersionRefused, match=r"head is at 1\.1, this trainer published 1\.0"):
        publisher.publish(2)
    assert store.list("run/") == keys  # refused before anything was sent


def test_a_head_that_moves_during_the_publish_refuses_it(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher.publish(0)
    twin = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    twin.publish(0)

    def meddle(method: str, argument: Any) -> None:
        if method == "put_new" and argument.endswith("1.2/delta.json"):
            store.fail_at = lambda method, argument: None
            twin.publish(1)

    store.fail_at = meddle
    trainer.step()
    with pytest.raises(VersionRefused, match="another trainer"):
        publisher.publish(2)
    head = store.get_head("run")
    assert head is not None
    assert head.identity == V("1.1")
