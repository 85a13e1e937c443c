"""A publisher of toy weights and readers of them, over one store in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.subscriber.kit import PARAMS, WatchedStore
from tests.weights.toy import ToyTrainer


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def trainer() -> ToyTrainer:
    return ToyTrainer(1)


@pytest.fixture
def publisher(trainer: ToyTrainer, store: WatchedStore) -> WeightPublisher:
    return WeightPublisher(trainer.tensors, store, "run", 1, PARAMS)


@pytest.fixture
def open_reader(store: WatchedStore, tmp_path: Path) -> Iterator[Callable[..., WeightSubscriber]]:
    opened: list[WeightSubscriber] = []

    def open_it(name: str = "reader", source: Any = None) -> WeightSubscriber:
        reader = WeightSubscriber(source or store, "run", tmp_path / name)
        opened.append(reader)
        return reader

    yield open_it
    for reader in opened:
        reader.close()


@pytest.fixture
def reader(open_reader: Callable[..., WeightSubscriber]) -> WeightSubscriber:
    return open_reader()
