"""Every way of training against every way of serving: 200 random versions, bit by bit what a fresh load gives.

Trainer ranks publish their shards, a subscriber follows, and engines of one and two tensor-parallel ranks (fused
projections, padded and tied embeddings, experts) take its update files by plans recorded from their loaders.
Engines lag behind by chance, so steps are squashed, skipped and taken whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.lineage import WeightVersion
from rose.weights.params import WeightsParams
from rose.weights.store import MemoryStore
from rose.weights.subscriber import WeightSubscriber
from tests.plugin.weights_kit import Tensors, TinyLlama, memory_of, same_memory, specs_of
from tests.weights.shards_kit import (
    Held,
    Trainer,
    fsdp,
    grid,
    hsdp,
    megatron,
    tensor_parallel,
)
from vllm_plugin.plan import record
from vllm_plugin.rank_weights import RankWeights, judge

VERSIONS = 25
HEADS = {"heads": TinyLlama.HEADS, "kv_heads": TinyLlama.KV_HEADS, "head": TinyLlama.HEAD}
PARAMS = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 10, anchor_every=6)
CASES: list[tuple[str, Callable[[Tensors], list[Held]], bool, int]] = [
    # name, trainer's division, tied embeddings, experts
    ("fsdp-1", fsdp(1), True, 0),
    ("fsdp-2", fsdp(2), False, 0),
    ("fsdp-4", fsdp(4), True, 4),
    ("hsdp-2x2", hsdp(2, 2), False, 0),
    ("tp-2", tensor_parallel(2), True, 0),
    ("tp-2-fsdp-2", grid(2), False, 4),
    ("megatron-tp-2", megatron(2, 1, **HEADS), False, 0),
    ("megatron-tp-2-ep-2", megatron(2, 2, **HEADS), True, 4),
]


class Engine:
    """The ranks of one engine, without vLLM around them."""

    def __init__(self, weights: Tensors, world: int, tied: bool, experts: int) -> None:
        self._kind = {"world": world, "tied": tied, "experts": experts}
        self.models = [TinyLlama(rank=rank, **self._kind) for rank in range(world)]
        for model in self.models:
            model.load_weights(weights.items())
        plans = [record(model, specs_of(weights)) for model in self.models]
        assert all(not plan.fallback and not plan.holes for plan in plans)
        self.ranks = [RankWeights(plan, WeightVersion(0, 0)) for plan in plans]

    @property
    def version(self) -> WeightVersion:
        return self.ranks[0].version

    def take(self, subscriber: WeightSubscriber, target: WeightVersion) -> None:
        path = str(subscriber.fetch(target, self.version))
        for rank in self.ranks:
            rank.prefetch(path, target)
            rank.join()
        judge([rank.report() for rank in self.ranks], target)
        for rank in self.ranks:
            rank.commit(target)
            rank.finish()

    def holds(self, weights: Tensors) -> bool:
        fresh = [TinyLlama(rank=rank, **self._kind) for rank in range(len(self.models))]
        for model in fresh:
            model.load_weights(weights.items())
        return all(
            same_memory(memory_of(ours), memory_of(theirs))
            for ours, theirs in zip(self.models, fresh, strict=True)
        )


def served(masters: Tensors) -> Tensors:
    return {name: each.to(torch.bfloat16) for name, each in masters.items()}


def train(masters: Tensors, rng: np.random.Generator) -> Tensors:
    """A step: most weights move a little, some not at all, now and then everything moves."""
    share = float(rng.choice([0.0, 0.01, 0.1, 1.0], p=[0.05, 0.5, 0.4, 0.05]))
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    moved: Tensors = {}
    for name, tensor in masters.items():
        pick = torch.rand(tensor.shape, generator=generator) < share
        moved[name] = tensor + pick * torch.randn(tensor.shape, generator=generator) * 0.05
    return moved


def run_case(
    cut: Callable[[Tensors], list[Held]], tied: bool, experts: int, seed: int, folder: Path, versions: int
) -> tuple[Tensors, Counter[str]]:
    """The last weights, and how often each kind of version was published."""
    rng = np.random.default_rng(seed)
    store = MemoryStore()
    trainer = Trainer(cut, store, 1, PARAMS)
    masters = {n: w.float() for n, w in TinyLlama.weights(seed=seed, tied=tied, experts=experts).items()}
    engines = [Engine(served(masters), world, tied, experts) for world in (1, 2)]
    subscriber = WeightSubscriber(store, "run", folder / "copy")
    kinds: Counter[str] = Counter()
    try:
        for version in range(versions):
            kinds[trainer.publish(masters, version).kind] += 1
            newest = subscriber.poll(0)
            assert newest == WeightVersion(1, version)
            for engine in engines:
                if version == versions - 1 or rng.random() < 0.6:
                    engine.take(subscriber, newest)
                    assert engine.holds(served(masters)), f"version {newest}"
            last, masters = masters, train(masters, rng)
    finally:
        subscriber.close()
    return last, kinds


@pytest.mark.parametrize(("name", "cut", "tied", "experts"), CASES, ids=[case[0] for case in CASES])
def test_200_random_versions_are_what_a_fresh_load_gives(
    name: str, cut: Callable[[Tensors], list[Held]], tied: bool, experts: int, tmp_path: Path
) -> None:
    assert VERSIONS * len(CASES) == 200
    _, kinds = run_case(cut, tied, experts, CASES.index((name, cut, tied, experts)), tmp_path, VERSIONS)
    assert kinds["delta"] >= 15
