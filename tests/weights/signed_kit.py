"""Versions as a trainer publishes them through a store that signs."""

from __future__ import annotations

from rose.weights.publisher import WeightPublisher
from rose.weights.store import ObjectStore
from tests.weights.subscriber.kit import PARAMS
from tests.weights.toy import ToyTrainer


def publish(publisher: WeightPublisher, trainer: ToyTrainer, *versions: int) -> None:
    for version in versions:
        if version:
            trainer.step()
        publisher.publish(version)


def published(store: ObjectStore, trainer: ToyTrainer, last: int) -> WeightPublisher:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, PARAMS)
    publish(publisher, trainer, *range(last + 1))
    return publisher
