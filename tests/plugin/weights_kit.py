"""Update files for tests, and a small model whose loaders do what vLLM's do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose.lineage import WeightVersion
from rose.weights import statehash
from rose.weights.spec import DTYPE_BYTES, TensorSpec, model_digest
from rose.weights.update import TensorUpdate, Update, write_update

Tensors = dict[str, torch.Tensor]
VERSIONS = int(os.environ.get("ROSE_TEST_VERSIONS", "250"))
"""How many random versions each property looks at; real engines take a hundredth of them, four at least."""
TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
NAME_OF = {each: name for name, each in TYPES.items()}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_tensor(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits at all, NaN payloads included; of booleans the two that there are."""
    width = DTYPE_BYTES[dtype]
    high = 2 if dtype == "BOOL" else 1 << (8 * width)
    bits = rng.integers(0, high, shape, dtype=f"u{width}", endpoint=False)
    signed = np.asarray(bits).view(np.uint8 if width == 1 else f"<i{width}")
    return torch.from_numpy(np.array(signed)).view(TYPES[dtype])


def stepped(rng: np.random.Generator, weights: Tensors, share: float) -> Tensors:
    """Some elements replaced, never in place: what the trainer held before stays as it was."""
    found: Tensors = {}
    for name, tensor in weights.items():
        other = random_tensor(rng, NAME_OF[tensor.dtype], tuple(tensor.shape))
        pick = torch.from_numpy(np.asarray(rng.random(tuple(tensor.shape)) < share))
        found[name] = torch.where(pick, integers(other), integers(tensor)).view(tensor.dtype)
    return found


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits, of a type that torch can work with."""
    return tensor.view(_INTEGER[tensor.element_size()])


def bits_of(tensor: torch.Tensor) -> NDArray[Any]:
    return integers(tensor.detach().contiguous()).numpy().view(f"<u{tensor.element_size()}")


def specs_of(weights: Tensors) -> list[TensorSpec]:
    return [TensorSpec(name, NAME_OF[each.dtype], tuple(each.shape)) for name, each in weights.items()]


def state_hash(tensor: torch.Tensor) -> int:
    return statehash.hash_bits(bits_of(tensor).reshape(-1))


def change(weights: Tensors, *, seed: int, fraction: float = 0.05) -> Tensors:
    """The same weights with a share of the elements of every tensor moved."""
    generator = torch.Generator().manual_seed(seed)
    changed: Tensors = {}
    for name, tensor in weights.items():
        pick = torch.rand(tensor.shape, generator=generator) < fraction
        noise = torch.randn(tensor.shape, generator=generator) * 0.2
        changed[name] = torch.where(pick, (tensor.float() + noise).to(tensor.dtype), tensor)
    return changed


RUN = "test"
"""Whose updates these are, where a test does not say."""


def make_update(
    path: Path,
    old: Tensors,
    new: Tensors,
    *,
    base: str | None,
    target: str,
    dense: bool = False,
    run: str = RUN,
) -> Path:
    """Write the update that leads from ``old`` to ``new``; without a base every tensor is dense."""
    tensors: dict[str, TensorUpdate] = {}
    for spec in specs_of(new):
        before, after = bits_of(old[spec.name]), bits_of(new[spec.name])
        index = np.flatnonzero(before.reshape(-1) != after.reshape(-1)).astype(np.uint32)
        data: dict[str, Any] = {}
        if dense or base is None:
            data = {"dense": after}
        elif index.size:
            data = {"idx": index, "val": after.reshape(-1)[index]}
        tensors[spec.name] = TensorUpdate(
            spec=spec,
            h_before=None if base is None else state_hash(old[spec.name]),
            h_after=state_hash(new[spec.name]),
            **data,
        )
    update = Update(
        run_id=run,
        target=WeightVersion.parse(target),
        base=None if base is None else WeightVersion.parse(base),
        model=model_digest(specs_of(new)),
        tensors=tensors,
    )
    write_update(path, update)
    return path


class TinyLlama(torch.nn.Module):
    """One tensor-parallel rank of a block: fused projections, a column slice, a padded vocabulary, a tied head, and,
    where asked for, experts in two fused tensors.

    ``load_weights`` copies slices of checkpoint tensors into parameters, as vLLM's layers do.
    """

    HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCAB, PADDED = 12, 4, 4, 2, 8, 21, 32

    def __init__(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        tied: bool = True,
        experts: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.q_rows = self.HEADS * self.HEAD // world
        self.kv_rows = max(self.KV_HEADS // world, 1) * self.HEAD
        self.inner = self.INNER // world
        self.vocab = self.PADDED // world

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.embed = parameter(self.vocab, self.HIDDEN)
        self.norm = parameter(self.HIDDEN)
        self.qkv = parameter(self.q_rows + 2 * self.kv_rows, self.HIDDEN)
        self.out = parameter(self.HIDDEN, self.q_rows)
        self.gate_up = parameter(2 * self.inner, self.HIDDEN)
        self.down = parameter(self.HIDDEN, self.inner)
        self.head = self.embed if tied else parameter(self.vocab, self.HIDDEN)
        self.tied = tied
        if experts:
            self.w13 = parameter(experts, 2 * self.inner, self.HIDDEN)
            self.w2 = parameter(experts, self.HIDDEN, self.inner)

    @classmethod
    def weights(cls, *, seed: int = 0, tied: bool = True, experts: int = 0) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (cls.VOCAB, cls.HIDDEN),
            "norm": (cls.HIDDEN,),
            "q": (cls.HEADS * cls.HEAD, cls.HIDDEN),
            "k": (cls.KV_HEADS * cls.HEAD, cls.HIDDEN),
            "v": (cls.KV_HEADS * cls.HEAD, cls.HIDDEN),
            "out": (cls.HIDDEN, cls.HEADS * cls.HEAD),
            "gate": (cls.INNER, cls.HIDDEN),
            "up": (cls.INNER, cls.HIDDEN),
            "down": (cls.HIDDEN, cls.INNER),
        }
        if not tied:
            shapes["head"] = (cls.VOCAB, cls.HIDDEN)
        for expert in range(experts):
            for part in ("gate", "up", "down"):
                shapes[f"experts.{expert}.{part}"] = shapes[part]
        return {
            name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()
        }

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        rank, inner = self.rank, self.inner
        if name.startswith("experts."):
            _, expert, part = name.split(".")
            if part == "down":
                self.w2.data[int(expert)].copy_(tensor.narrow(1, rank * inner, inner))
            else:
                place = self.w13.data[int(expert)].narrow(0, inner if part == "up" else 0, inner)
                place.copy_(tensor.narrow(0, rank * inner, inner))
            return
        kv_rank = rank * self.KV_HEADS // max(self.world, self.KV_HEADS)
        match name:
            case "embed" | "head":
                if name == "head" and self.tied:
                    return
                self._load_vocabulary(getattr(self, name), tensor)
            case "norm":
                self.norm.data.copy_(tensor)
            case "q":
                self.qkv.data[: self.q_rows].copy_(tensor.narrow(0, rank * self.q_rows, self.q_rows))
            case "k" | "v":
                begin = self.q_rows + (self.kv_rows if name == "v" else 0)
                begin_kv = (rank if self.world <= self.KV_HEADS else kv_rank) * self.kv_rows
                self.qkv.data.narrow(0, begin, self.kv_rows).copy_(tensor.narrow(0, begin_kv, self.kv_rows))
            case "out":
                self.out.data.copy_(tensor.narrow(1, rank * self.q_rows, self.q_rows))
            case "gate" | "up":
                begin = inner if name == "up" else 0
                self.gate_up.data.narrow(0, begin, inner).copy_(tensor.narrow(0, rank * inner, inner))
            case "down":
                self.down.data.copy_(tensor.narrow(1, rank * inner, inner))
            case _:
                raise ValueError(f"no parameter for {name}")

    def _load_vocabulary(self, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        begin = min(self.rank * self.vocab, self.VOCAB)
        part = tensor.narrow(0, begin, min(self.vocab, self.VOCAB - begin))
        parameter[: part.shape[0]].data.copy_(part)
        parameter[part.shape[0] :].data.zero_()


def memory_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Bits of every parameter, copied."""
    return {name: integers(each.data).clone() for name, each in model.named_parameters()}


def same_memory(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
