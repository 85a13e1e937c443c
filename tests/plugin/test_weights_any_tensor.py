"""Any tensor that a safetensors file can hold, from a trainer's ranks over a relay to an engine's memory: no wrong bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rose.lineage import WeightVersion
from rose.weights import statehash
from rose.weights.params import WeightsParams
from rose.weights.source import Shard
from rose.weights.spec import DTYPE_BYTES
from rose.weights.store import ObjectStore
from rose.weights.subscriber import WeightSubscriber
from tests.plugin.weights_kit import TYPES, VERSIONS, bits_of, random_tensor, specs_of, state_hash, stepped
from tests.weights.shards_kit import Held, Tensors, Trainer
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights
from vllm_plugin.weight_vote import judge

SHAPES = [(), (0,), (0, 4), (3, 0), (1,), (7,), (1, 1), (5, 3), (13, 17), (2, 3, 5), (4, 1, 6), (300, 257)]
PARAMS = WeightsParams(
    keep=("*",), fragment_elements=65_536, bucket_bytes=1 << 12, anchor_every=2, collect=False
)
SHARES = (1.0, 0.02, 0.0, 0.5)
"""Of the elements, what each version of a run may change."""
_runs = itertools.count()


def divided(size: int, dims: dict[str, int]) -> Any:
    """Trainer ranks that cut every tensor along ``dims``; those that cannot be cut are on all of them."""

    def cut(weights: Tensors) -> list[Held]:
        held: list[Held] = [{} for _ in range(size)]
        for name, tensor in weights.items():
            if tensor.numel() == 0 or tensor.dim() == 0:
                for each in held:
                    each[name] = tensor
                continue
            dim = dims[name] % tensor.dim()
            begin = 0
            for rank, part in enumerate(torch.tensor_split(tensor, size, dim)):
                offset = [0] * tensor.dim()
                offset[dim] = begin
                held[rank][name] = Shard(part, tuple(tensor.shape), tuple(offset))
                begin += part.shape[dim]
        return held

    return cut


class Plain(torch.nn.Module):
    """One tensor-parallel rank of a model that holds each tensor as it is, cut along ``dims`` where that divides."""

    def __init__(self, weights: Tensors, dims: dict[str, int], rank: int, world: int) -> None:
        super().__init__()
        self.names = {name: f"p{number}" for number, name in enumerate(weights)}
        self.dims, self.rank, self.world = dims, rank, world
        for name, tensor in weights.items():
            part = torch.zeros_like(self.part(name, tensor).contiguous())
            self.register_parameter(self.names[name], torch.nn.Parameter(part, requires_grad=False))

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = self.dims[name] % tensor.dim() if tensor.dim() else 0
        if not tensor.dim() or tensor.shape[dim] % self.world:
            return tensor
        count = tensor.shape[dim] // self.world
        return tensor.narrow(dim, self.rank * count, count)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            getattr(self, self.names[name]).data.copy_(self.part(name, tensor))


class Engine:
    """All ranks of an engine: stage, vote, commit."""

    def __init__(self, weights: Tensors, dims: dict[str, int], world: int) -> None:
        self.models = [Plain(weights, dims, rank, world) for rank in range(world)]
        for model in self.models:
            model.load_weights(weights.items())
        self.ranks = [
            RankWeights(record(model, specs_of(weights)), WeightVersion(0, 0)) for model in self.models
        ]
        assert not any(rank.plan.fallback or rank.plan.holes for rank in self.ranks)

    def take(self, path: Path, target: WeightVersion) -> None:
        for rank in self.ranks:
            rank.prefetch(str(path), target)
            rank.join()
        judge([rank.report() for rank in self.ranks], target)
        for rank in self.ranks:
            rank.commit(target)
            rank.finish()

    def check(self, weights: Tensors) -> None:
        for model, rank in zip(self.models, self.ranks, strict=True):
            for name, tensor in weights.items():
                held = getattr(model, model.names[name]).data
                assert np.array_equal(bits_of(held), bits_of(model.part(name, tensor))), name
            assert rank.scan() == rank.hashes


@st.composite
def models(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...], int]]:
    """(type, shape, which dimension is cut) of a few tensors."""
    each = st.tuples(st.sampled_from(list(TYPES)), st.sampled_from(SHAPES), st.integers(0, 2))
    return draw(st.lists(each, min_size=1, max_size=6))


@pytest.mark.timeout(120 + VERSIONS)
@settings(max_examples=max(20, VERSIONS // len(SHARES)), deadline=None)
@given(models(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 2**32 - 1))
@example([("F32", (), 0), ("BF16", (5, 3), 0)], 1, 1, 0)  # the scale of an fp8 matrix
@example([("I64", (300, 257), 0)], 1, 1, 0)  # more than one fragment
@example([("U64", (300, 257), 1), ("C64", (13, 17), 0)], 2, 2, 0)  # columns: boxes with gaps
@example([(dtype, shape, 0) for dtype in TYPES for shape in ((), (0, 4), (7,))], 2, 1, 0)
def test_every_type_and_shape_arrives_bit_by_bit(
    relay: ObjectStore,
    tmp_path_factory: pytest.TempPathFactory,
    model: list[tuple[str, tuple[int, ...], int]],
    trainers: int,
    world: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    weights = {f"{d}-{n}": random_tensor(rng, d, shape) for n, (d, shape, _) in enumerate(model)}
    dims = {name: dim for name, (_, _, dim) in zip(weights, model, strict=True)}
    run_id = f"run-{next(_runs)}"
    trainer = Trainer(divided(trainers, dims), relay, 1, PARAMS, run_id=run_id)
    reader = WeightSubscriber(relay, run_id, tmp_path_factory.mktemp("reader"), PARAMS)
    engine, late = Engine(weights, dims, world), Engine(weights, dims, world)
    try:
        at: WeightVersion | None = None
        for version, share in enumerate(SHARES):
            weights = stepped(rng, weights, share)
            report = trainer.publish(weights, version)
            assert trainer.publishers[0].settle(30)
            newest = reader.poll(10)
            assert newest == report.version
            expected = {name: statehash.to_hex(state_hash(t)) for name, t in weights.items()}
            assert reader.state() == report.state == expected
            engine.take(reader.fetch(newest, at), newest)
            engine.check(weights)
            at = newest
        assert at is not None
        late.take(reader.fetch(at, None), at)
        late.check(weights)
        assert reader.scan() == []
        joined = WeightSubscriber(relay, run_id, tmp_path_factory.mktemp("joined"), PARAMS)
        try:  # by an anchor that was composed of the deltas
            assert joined.poll(10) == at
            assert joined.state() == expected
        finally:
            joined.close()
    finally:
        reader.close()
        trainer.close()


def test_every_type_that_safetensors_can_load_is_in_the_property() -> None:
    assert set(TYPES) == set(DTYPE_BYTES)
    from safetensors import torch as library

    missing = set(library._TYPES) - set(TYPES)
    assert not missing
