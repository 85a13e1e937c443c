"""A store that fails when it is told to, and whether a reader has what the trainer has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rose.errors import CapacityError
from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights.manifest import Head
from rose.weights.params import WeightsParams
from rose.weights.subscriber import WeightSubscriber
from tests.weights.toy import ToyTrainer

SMALL = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 16, anchor_every=1000)


def V(text: str) -> WeightVersion:
    return WeightVersion.parse(text)


class FlakyStore(MemoryStore):
    """A store that fails at a chosen call, before or after doing it (the answer is lost)."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_at: Callable[[str, Any], str | None] = lambda method, argument: None

    def put_new(self, key: str, data: Any) -> None:
        self._run("put_new", key, lambda: MemoryStore.put_new(self, key, data))

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        self._run("set_head", head, lambda: MemoryStore.set_head(self, head, expected=expected))

    def _run(self, method: str, argument: Any, call: Callable[[], None]) -> None:
        when = self.fail_at(method, argument)
        if when == "before":
            raise CapacityError("cut off")
        call()
        if when == "after":
            raise CapacityError("answer lost")


def holds(reader: WeightSubscriber, trainer: ToyTrainer) -> bool:
    """Whether the reader's copy is, bit by bit, what the trainer has."""
    reader.poll(0)
    expected = trainer.bits()
    found = {name: np.array(reader._host.bits(name)) for name in reader._host.specs}
    return found.keys() == expected.keys() and all(np.array_equal(found[n], expected[n]) for n in expected)
