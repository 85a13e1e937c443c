"""A publisher of toy weights and a reader of them, over one store that may fail."""

from __future__ import annotations

from typing import Any

import pytest

from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.publisher.kit import SMALL, FlakyStore
from tests.weights.toy import ToyTrainer


@pytest.fixture
def trainer() -> ToyTrainer:
    return ToyTrainer(1)


@pytest.fixture
def store() -> FlakyStore:
    return FlakyStore()


@pytest.fixture
def publisher(trainer: ToyTrainer, store: FlakyStore) -> WeightPublisher:
    return WeightPublisher(trainer.tensors, store, "run", 1, SMALL)


@pytest.fixture
def reader(store: FlakyStore, tmp_path: Any) -> Any:
    subscriber = WeightSubscriber(store, "run", tmp_path / "reader")
    yield subscriber
    subscriber.close()
