"""A store that can be made to lie, and what the tests of the subscriber ask of a copy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights import statehash
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from rose.weights.update import Update
from tests.weights.toy import ToyTrainer

PARAMS = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 16, anchor_every=1000, collect=False)


def V(text: str) -> WeightVersion:
    return WeightVersion.parse(text)


class WatchedStore(MemoryStore):
    """Counts reads, and may answer them with something else."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []
        self.twist: Callable[[str, int, bytes], bytes] = lambda key, offset, data: data
        self.held: list[WeightVersion] = []

    def get_range(self, key: str, offset: int, nbytes: int) -> bytes:
        self.held = self.leases("run")
        data = super().get_range(key, offset, nbytes)
        self.reads.append((key, offset, nbytes))
        return self.twist(key, offset, data)


def copy_of(reader: WeightSubscriber) -> dict[str, np.ndarray]:
    return {name: np.array(reader._host.bits(name)) for name in reader._host.specs}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[n], expected[n]) for n in expected)


def apply_update(bits: dict[str, np.ndarray], update: Update) -> dict[str, np.ndarray]:
    """What an engine does: check h_before, write, check h_after."""
    result = {}
    for name, tensor in update.tensors.items():
        if tensor.dense is not None:
            new = tensor.dense.reshape(-1).copy()
        else:
            new = bits[name].copy()
            if tensor.idx is not None and tensor.val is not None:
                new[tensor.idx] = tensor.val
        if tensor.h_before is not None:
            assert statehash.hash_bits(bits[name]) == tensor.h_before
        assert statehash.hash_bits(new) == tensor.h_after
        result[name] = new
    return result


def publish_steps(publisher: WeightPublisher, trainer: ToyTrainer, first: int, last: int) -> None:
    for version in range(first, last + 1):
        if version:
            trainer.step()
        publisher.publish(version)
        assert publisher.settle(30)
