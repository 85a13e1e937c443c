"""Shard plan: the recorded loader puts every checkpoint element where the loader itself would."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import WeightsError
from rose.weights.folder import checkpoint_tensors
from tests.plugin.weights_kit import TinyLlama, memory_of, same_memory, specs_of
from tests.tiny_model import write_weights
from vllm_plugin.checkpoint import check_contents
from vllm_plugin.cover import cover, span_of
from vllm_plugin.plan import BoxMap, ShardPlan
from vllm_plugin.plan_recorder import record

RANKS = [(0, 1), (0, 2), (1, 2), (3, 4)]


def write_through(plan: ShardPlan, weights: dict[str, torch.Tensor]) -> None:
    for name, boxes in plan.boxes.items():
        for box in boxes:
            source = weights[name].reshape(-1).view(torch.int16)
            box.view(plan.targets[box.target].bits()).copy_(box.source_view(source))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("rank", "world"), RANKS)
def test_writing_through_the_plan_is_bit_equal_to_the_loader(rank: int, world: int, tied: bool) -> None:
    weights = TinyLlama.weights(tied=tied)
    loaded, patched = (TinyLlama(rank=rank, world=world, tied=tied) for _ in range(2))
    loaded.load_weights(weights.items())

    plan = record(patched, specs_of(weights))
    write_through(plan, weights)

    assert not plan.fallback
    assert not plan.holes
    assert same_memory(memory_of(loaded), memory_of(patched))


@pytest.mark.parametrize(("rank", "world"), RANKS)
def test_located_indices_are_those_that_the_views_name(rank: int, world: int) -> None:
    weights = TinyLlama.weights()
    plan = record(TinyLlama(rank=rank, world=world), specs_of(weights))
    for name, boxes in plan.boxes.items():
        index = torch.arange(weights[name].numel())
        for box in boxes:
            inside, _, storage = box.locate(index.numpy())
            addresses = torch.arange(plan.targets[box.target].flat.numel())
            assert sorted(zip(index[inside].tolist(), storage.tolist(), strict=True)) == sorted(
                zip(
                    box.source_view(index).reshape(-1).tolist(),
                    box.view(addresses).reshape(-1).tolist(),
                    strict=True,
                )
            )


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_an_index_is_located_in_a_box_exactly_when_it_has_coordinates_there(data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3))
    strides, span = [], 1
    for size, gap in reversed(axes):
        strides.insert(0, span + gap)
        span = (span + gap) * (size - 1) + span
    shape = tuple(size for size, _ in axes)
    offset = data.draw(st.integers(0, 5))
    destination = tuple(data.draw(st.permutations([1, 100, 10_000][: len(shape)])))
    box = BoxMap(
        target=0, shape=shape, src_offset=offset, src_strides=tuple(strides),
        dst_offset=7, dst_strides=destination,
    )  # fmt: skip
    expected = {
        offset + sum(c * s for c, s in zip(at, strides, strict=True)):
        7 + sum(c * s for c, s in zip(at, destination, strict=True))
        for at in itertools.product(*(range(size) for size in shape))
    }  # fmt: skip

    asked = data.draw(st.sets(st.integers(0, offset + span + 10)))
    index = np.array(sorted(asked), data.draw(st.sampled_from([np.uint32, np.int64])))
    inside, _, storage = box.locate(index)
    assert dict(zip(index[inside].tolist(), storage.tolist(), strict=True)) == {
        at: place for at, place in expected.items() if at in asked
    }


def test_a_tied_head_has_one_target_and_needs_no_tensor_of_its_own() -> None:
    weights = TinyLlama.weights(tied=False)  # the checkpoint ships the head once more
    plan = record(TinyLlama(tied=True), specs_of(weights))
    assert plan.boxes["head"] == ()
    assert "head" not in plan.fallback
    assert {"embed", "head"} <= set(plan.targets[plan.boxes["embed"][0].target].names)


def test_recording_leaves_the_model_as_it_was() -> None:
    model = TinyLlama()
    model.load_weights(TinyLlama.weights(seed=1).items())
    memory, parameters = memory_of(model), dict(model.named_parameters())
    addresses = {name: each.data_ptr() for name, each in parameters.items()}

    record(model, specs_of(TinyLlama.weights()), load=rebinding(model))

    assert same_memory(memory, memory_of(model))
    assert all(each is parameters[name] for name, each in model.named_parameters())
    assert addresses == {name: each.data_ptr() for name, each in model.named_parameters()}


def rebinding(model: TinyLlama) -> Callable[[Any], None]:
    def load(weights: Any) -> None:
        for name, tensor in weights:
            if name == "norm":
                model.norm.data = tensor.clone()
            else:
                model.load_one(name, tensor)

    return load


def hostile(model: TinyLlama, name: str, act: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
    """A loader that is honest but for one tensor."""

    def load(weights: Any) -> None:
        for each, tensor in weights:
            if each == name:
                act(getattr(model, name).data, tensor)
            else:
                model.load_one(each, tensor)

    return load


@pytest.mark.parametrize(
    ("name", "act", "reason"),
    [
        ("norm", lambda to, tensor: to.copy_(tensor.float()), "converts or rearranges"),
        ("norm", lambda to, tensor: to.copy_(tensor.flip(0)), "converts or rearranges"),
        ("norm", lambda to, tensor: to.copy_(tensor[:1]), "broadcast"),
        ("norm", lambda to, tensor: to.add_(tensor), "add_"),
        ("norm", lambda to, tensor: to.copy_(tensor.add_(1)), "changes it"),
        ("norm", lambda to, tensor: to.fill_(float(tensor[0])), "acts on its values"),
        ("norm", lambda to, tensor: to.copy_(tensor.view(torch.float16)), "checkpoint has"),
        ("out", lambda to, tensor: to.copy_(tensor.t().contiguous().t()), "converts or rearranges"),
        ("norm", lambda to, tensor: None, "left no trace"),
        ("norm", lambda to, tensor: [][0], "the loader refused it"),
    ],
)
def test_a_load_that_is_no_plain_copy_falls_back_alone(name: str, act: Any, reason: str) -> None:
    model = TinyLlama()
    plan = record(model, specs_of(TinyLlama.weights()), load=hostile(model, name, act))
    assert reason in plan.fallback[name]
    assert list(plan.fallback) == [name]
    assert plan.boxes[name] == ()


def test_a_transposed_view_is_still_a_box() -> None:
    model = TinyLlama()
    model.out = torch.nn.Parameter(torch.zeros(16, 12, dtype=torch.bfloat16), requires_grad=False)
    weights = TinyLlama.weights()
    load = hostile(model, "out", lambda to, tensor: to.copy_(tensor.t()))
    plan = record(model, specs_of(weights), load=load)
    write_through(plan, weights)
    assert torch.equal(model.out.data, weights["out"].t())


def test_rebound_memory_falls_back() -> None:
    model = TinyLlama()
    plan = record(model, specs_of(TinyLlama.weights()), load=rebinding(model))
    assert set(plan.fallback) == {"norm"}
    assert plan.holes == ("norm",)


def test_memory_rebound_after_an_honest_copy_falls_back() -> None:
    model = TinyLlama()

    def load(weights: Any) -> None:
        model.load_weights(weights)
        model.down.data = model.down.data.clone()

    plan = record(model, specs_of(TinyLlama.weights()), load=load)
    assert list(plan.fallback) == ["down"]
    assert "replaces the memory" in plan.fallback["down"]


def test_two_tensors_for_one_parameter_both_fall_back() -> None:
    model = TinyLlama()
    model.tied = False  # the loader now writes the shared memory for both names
    plan = record(model, specs_of(TinyLlama.weights(tied=False)))
    assert set(plan.fallback) == {"embed", "head"}
    assert "another tensor writes" in plan.fallback["embed"]


def test_padding_is_neither_written_nor_a_hole() -> None:
    plan = record(TinyLlama(), specs_of(TinyLlama.weights()))
    (box,) = plan.boxes["embed"]
    assert box.num_elements == TinyLlama.VOCAB * TinyLlama.HIDDEN
    assert plan.holes == ()


def test_a_loader_that_reads_ahead_is_attributed_by_memory_and_not_by_order() -> None:
    model, weights = TinyLlama(), TinyLlama.weights()
    plan = record(
        model, specs_of(weights), load=lambda items: model.load_weights(reversed(list(items)))
    )  # fmt: skip
    assert plan.digest == record(TinyLlama(), specs_of(weights)).digest


def test_memory_rearranged_after_loading_falls_back(tmp_path: Path) -> None:
    weights, model = TinyLlama.weights(), TinyLlama()
    write_weights(tmp_path, weights)
    model.load_weights(weights.items())
    model.down.data.copy_(model.down.data.flip(0).clone())

    plan = check_contents(record(model, checkpoint_tensors(tmp_path)), tmp_path)

    assert list(plan.fallback) == ["down"]
    assert plan.boxes["down"] == ()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no \.safetensors file"):
        checkpoint_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(WeightsError, match="cannot be read"):
        checkpoint_tensors(tmp_path)


@settings(max_examples=200, deadline=None)
@given(
    regions=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=5),
    fills=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=2),
    needed=st.tuples(st.integers(0, 6), st.integers(1, 9)),
)
def test_interval_and_counting_proofs_agree(
    regions: list[tuple[int, int]], fills: list[tuple[int, int]], needed: tuple[int, int]
) -> None:
    def region(span: tuple[int, int], gap: int) -> Any:
        return ((span[1],), (gap,), span[0])

    args = ([region(each, 1) for each in regions], [region(each, 1) for each in fills], [region(needed, 1)])
    counted = [0] * 16
    for begin, length in regions:
        for at in range(begin, begin + length):
            counted[at] += 1
    full = {at for at in range(16) if counted[at]}
    full |= {at for begin, length in fills for at in range(begin, begin + length)}
    hole = not set(range(needed[0], needed[0] + needed[1])) <= full
    assert cover(16, *args) == (max(counted) > 1, hole)
    # A stray region with a gap, far away, makes it count.
    far = ((2,), (3,), 20)
    assert span_of(far) is None
    assert cover(32, [*args[0], far], args[1], args[2]) == (max(counted) > 1, hole)
