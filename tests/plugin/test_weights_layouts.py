"""Every way of training against every way of serving: random versions, bit by bit what a fresh load gives.

Trainer ranks publish their shards over a relay, a subscriber follows, and engines of one and two tensor-parallel ranks (fused
projections, padded and tied embeddings, experts) take its update files by plans recorded from their loaders.
Engines lag behind by chance, so steps are squashed, skipped and taken whole.  A lineage has 25 versions: the first of each
layout is of masters in fp32 for engines in bf16, those behind it of each type that there is.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose.lineage import WeightVersion
from rose.weights.params import WeightsParams
from rose.weights.store import ObjectStore
from rose.weights.subscriber import WeightSubscriber
from tests.plugin.weights_kit import (
    TYPES,
    VERSIONS,
    Tensors,
    TinyLlama,
    memory_of,
    random_tensor,
    same_memory,
    specs_of,
    stepped,
)
from tests.weights.shards_kit import (
    Held,
    Trainer,
    fsdp,
    grid,
    hsdp,
    megatron,
    tensor_parallel,
)
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights
from vllm_plugin.weight_vote import judge

LINEAGE = 25
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
    ("megatron-pp-2", megatron(1, 1, 2, **HEADS), True, 0),
    ("megatron-tp-2-pp-2-ep-2", megatron(2, 2, 2, **HEADS), False, 4),
]
QUICK = ("fsdp-2", "hsdp-2x2", "tp-2", "tp-2-fsdp-2", "megatron-tp-2-pp-2-ep-2")
"""Each way to divide once; the others, which mix no more of them, in ``make conformance``."""


class Engine:
    """The ranks of one engine, without vLLM around them."""

    def __init__(self, weights: Tensors, world: int, tied: bool, experts: int) -> None:
        dtype = weights["embed"].dtype
        self._kind: dict[str, Any] = {"world": world, "tied": tied, "experts": experts, "dtype": dtype}
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


def share(rng: np.random.Generator) -> float:
    return float(rng.choice([0.0, 0.01, 0.1, 1.0], p=[0.05, 0.5, 0.4, 0.05]))


def train(masters: Tensors, rng: np.random.Generator) -> Tensors:
    """A step: most weights move a little, some not at all, now and then everything moves."""
    moves = share(rng)
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    moved: Tensors = {}
    for name, tensor in masters.items():
        pick = torch.rand(tensor.shape, generator=generator) < moves
        moved[name] = tensor + pick * torch.randn(tensor.shape, generator=generator) * 0.05
    return moved


def run_lineage(
    relay: ObjectStore,
    run_id: str,
    cut: Callable[[Tensors], list[Held]],
    tied: bool,
    experts: int,
    dtype: str | None,
    folder: Path,
) -> Counter[str]:
    """How often each kind of version was published.  ``dtype``: of every tensor; None: fp32 for bf16."""
    rng = np.random.default_rng(zlib.crc32(run_id.encode()))
    params = PARAMS if dtype is None else replace(PARAMS, keep=("*",))
    trainer = Trainer(cut, relay, 1, params, run_id=run_id)
    weights = TinyLlama.weights(seed=int(rng.integers(1 << 31)), tied=tied, experts=experts)
    if dtype is None:
        weights = {name: each.float() for name, each in weights.items()}
    else:
        weights = {name: random_tensor(rng, dtype, tuple(each.shape)) for name, each in weights.items()}
    held = served if dtype is None else dict
    engines = [Engine(held(weights), world, tied, experts) for world in (1, 2)]
    subscriber = WeightSubscriber(relay, run_id, folder / run_id)
    kinds: Counter[str] = Counter()
    try:
        for version in range(LINEAGE):
            kinds[trainer.publish(weights, version).kind] += 1
            newest = subscriber.poll(10)
            assert newest == WeightVersion(1, version)
            for engine in engines:
                if version == LINEAGE - 1 or rng.random() < 0.6:
                    engine.take(subscriber, newest)
                    assert engine.holds(held(weights)), f"version {newest}"
            weights = train(weights, rng) if dtype is None else stepped(rng, weights, share(rng))
    finally:
        subscriber.close()
        trainer.close()
    return kinds


@pytest.mark.timeout(120 + VERSIONS)
@pytest.mark.parametrize(
    ("name", "cut", "tied", "experts"),
    [
        pytest.param(*case, id=case[0], marks=() if case[0] in QUICK else pytest.mark.conformance)
        for case in CASES
    ],
)
def test_random_versions_are_what_a_fresh_load_gives(
    relay: ObjectStore,
    name: str,
    cut: Callable[[Tensors], list[Held]],
    tied: bool,
    experts: int,
    tmp_path: Path,
) -> None:
    kinds: Counter[str] = Counter()
    lineages = max(1, VERSIONS // LINEAGE // len(CASES))
    for number, dtype in zip(range(lineages), itertools.cycle([None, *TYPES])):
        kinds += run_lineage(relay, f"{name}-{number}", cut, tied, experts, dtype, tmp_path)
    assert kinds.total() == lineages * LINEAGE
    assert kinds["delta"] >= 15 * lineages
