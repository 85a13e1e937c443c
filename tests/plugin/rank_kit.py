"""A rank of a model small enough to read, and what it would hold after loading the next version afresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rose.errors import WeightsError
from rose.lineage import WeightVersion
from tests.plugin.weights_kit import (
    TinyLlama,
    change,
    make_update,
    memory_of,
    same_memory,
    specs_of,
)
from vllm_plugin import rank_weights
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights

V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)


class Bench:
    """A rank that holds ``old`` as version 0.0, and what it would hold after loading ``new`` afresh."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        world: int = 1,
        load: Any = None,
        streams: bool | None = None,
        threads: int = 1,
    ) -> None:
        self.folder = folder
        self.old = TinyLlama.weights()
        self.new = change(self.old, seed=1)
        self.model = TinyLlama(rank=rank, world=world)
        self.model.load_weights(self.old.items())
        loader = None if load is None else load(self.model)
        plan = record(self.model, specs_of(self.old), load=loader)
        self.rank = RankWeights(plan, WeightVersion(0, 0), streams=streams, num_threads=threads)
        self.before = memory_of(self.model)
        fresh = TinyLlama(rank=rank, world=world)
        fresh.load_weights(self.new.items())
        self.after = memory_of(fresh)

    def update(self, *, base: str | None = "0.0", target: str = "1.1", **kwargs: Any) -> str:
        path = self.folder / f"{target}.safetensors"
        return str(make_update(path, self.old, self.new, base=base, target=target, **kwargs))

    def stage(self, path: str, target: WeightVersion = V1) -> dict[str, Any]:
        self.rank.prefetch(path, target)
        self.rank.join()
        return self.rank.report()

    @property
    def unchanged(self) -> bool:
        return same_memory(self.before, memory_of(self.model))

    @property
    def changed(self) -> bool:
        return same_memory(self.after, memory_of(self.model))


def refused(bench: Bench, path: str, target: WeightVersion = V1) -> dict[str, Any]:
    report = bench.stage(path, target)
    assert report["phase"] == "failed"
    assert bench.unchanged
    with pytest.raises(WeightsError, match="not staged"):
        bench.rank.commit(target)
    assert bench.unchanged
    return report["error"]


def ranks(folder: Path, world: int) -> list[Bench]:
    return [Bench(folder, rank=rank, world=world) for rank in range(world)]


def commit_all(rank: RankWeights, target: WeightVersion = V1) -> int:
    """Calls until nothing is left."""
    for calls in range(1, 1000):
        rank.commit(target)
        if not rank.more:
            return calls
    raise AssertionError("it does not end")


def spoil(monkeypatch: pytest.MonkeyPatch, on_call: int) -> None:
    """Memory that takes one element wrong at the n-th write."""
    real, calls = rank_weights.put, iter(range(1_000))

    def put(bits: torch.Tensor, piece: Any, values: torch.Tensor) -> torch.Tensor | bool:
        if next(calls) != on_call:
            return real(bits, piece, values)
        values = values.clone()
        values.view(-1)[-1] ^= 1
        real(bits, piece, values)
        return True  # what reading back would say

    monkeypatch.setattr(rank_weights, "put", put)
