"""What the weight benchmark measures on: checkpoints of a real RL run, and a generator fitted to them.

The fit (``weights_fit.json`` beside this file) holds, per learning rate, the density of changes of each kind of tensor,
how unevenly the rows of the embedding change, and how large steps are, all after the ramp-up.  So the benchmark runs
without the checkpoints, at any size; :func:`fit_of` makes it anew from a folder of ``rl_checkpoints.py``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.weight_transfer.rl_checkpoints import checkpoint_pairs
from rose.weights import codec

FIT_FILE = Path(__file__).with_name("weights_fit.json")
RAMP_UP_STEPS = 100
"""A bf16 start puts the masters on the bf16 grid: fewer bits flip in the first steps than later."""
MAX_EXACT_SIZE = 16  # larger steps are fitted by octave
Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor before and after a step: bf16 bits, flat."""

    name: str
    shape: tuple[int, ...]
    old: Bits
    new: Bits


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3-like model: 12 * hidden**2 parameters per layer and a tied embedding."""

    hidden: int
    layers: int
    vocab: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        h, found = self.hidden, {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            found |= {
                name + "input_layernorm.weight": (h,),
                name + "self_attn.q_proj.weight": (h, h),
                name + "self_attn.k_proj.weight": (h // 2, h),
                name + "self_attn.v_proj.weight": (h // 2, h),
                name + "self_attn.o_proj.weight": (h, h),
                name + "post_attention_layernorm.weight": (h,),
                name + "mlp.gate_proj.weight": (3 * h, h),
                name + "mlp.up_proj.weight": (3 * h, h),
                name + "mlp.down_proj.weight": (h, 3 * h),
            }
        return found | {"model.norm.weight": (h,)}


SHAPES = {"5M": Shape(256, 5, 4096), "50M": Shape(512, 13, 16_384), "200M": Shape(1024, 13, 32_768)}


def kind_of(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``up_proj``; all norms are one kind."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return "norm" if re.search("norm", kind) else kind


def load_pair(before: Path, after: Path) -> list[Pair]:
    """The tensors of two checkpoints."""
    import torch
    from safetensors.torch import load_file

    old, new = load_file(before), load_file(after)
    bits = {
        (side, name): tensor.reshape(-1).view(torch.int16).numpy().view(np.uint16)
        for side, table in (("old", old), ("new", new))
        for name, tensor in table.items()
    }
    return [Pair(name, tuple(old[name].shape), bits["old", name], bits["new", name]) for name in old]


def step_sizes(pairs: list[Pair]) -> NDArray[np.int64]:
    """Signed steps of all changes, in units of the last place."""
    d = [codec.difference(pair.old, pair.new) for pair in pairs]
    return np.concatenate([each[each != 0] for each in d]).view(np.int16).astype(np.int64)


def fit_of(folder: Path) -> dict[str, Any]:
    """Densities, dispersion and step sizes of the pairs after the ramp-up in one run's folder."""
    changed: dict[str, int] = defaultdict(int)
    elements: dict[str, int] = defaultdict(int)
    rows: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    steps = []
    for step, before, after in checkpoint_pairs(folder):
        if step < RAMP_UP_STEPS:
            continue
        steps.append(step)
        pairs = load_pair(before, after)
        sizes.append(np.abs(step_sizes(pairs)))
        for pair in pairs:
            differs = pair.old != pair.new
            changed[kind_of(pair.name)] += int(differs.sum())
            elements[kind_of(pair.name)] += differs.size
            if kind_of(pair.name) == "embed_tokens":
                rows.append(differs.reshape(pair.shape).sum(1))
    if not steps:
        raise SystemExit(f"{folder} has no pair after step {RAMP_UP_STEPS}")
    counts = np.concatenate(rows)
    size = np.concatenate(sizes)
    exact = {str(n): float((size == n).mean()) for n in range(1, MAX_EXACT_SIZE)}
    octaves = {str(2**o): float(((size >= 2**o) & (size < 2 ** (o + 1))).mean()) for o in range(4, 16)}
    return {
        "steps": steps,
        "density": {kind: changed[kind] / elements[kind] for kind in elements},
        "embedding_dispersion": float(counts.var() / counts.mean()),
        "size": exact,
        "size_octave": octaves,
    }


def load_fit(lr: str) -> dict[str, Any]:
    """The committed fit of a learning rate, such as ``5e-06``."""
    return json.loads(FIT_FILE.read_text())["fits"][lr]


def generate(shape: Shape, fit: dict[str, Any], *, density: float | None = None, seed: int = 0) -> list[Pair]:
    """A step of a model of ``shape``, as the fit describes it; ``density`` scales all kinds to a mean."""
    rng = np.random.default_rng(seed)
    tensors = shape.tensors()
    total = sum(int(np.prod(dims)) for dims in tensors.values())
    fitted = sum(
        int(np.prod(dims)) * fit["density"].get(kind_of(name), 0.0) for name, dims in tensors.items()
    )
    scale = 1.0 if density is None else density * total / fitted
    lows = np.array([*map(int, fit["size"]), *map(int, fit["size_octave"])])
    spans = np.array([1] * len(fit["size"]) + [int(low) for low in fit["size_octave"]])
    shares = np.array([*fit["size"].values(), *fit["size_octave"].values()])
    pairs = []
    for name, dims in tensors.items():
        num = int(np.prod(dims))
        kind = kind_of(name)
        if kind == "norm":
            old = np.full(num, 0x3F80, np.uint16)
        else:
            old = (
                (rng.standard_normal(num, dtype=np.float32) * np.float32(0.02)).view(np.uint32) >> 16
            ).astype(np.uint16)
        share = scale * fit["density"].get(kind, 0.0)
        if kind == "embed_tokens" and fit["embedding_dispersion"] > 1.01 and share:
            # Poisson rows whose rate varies: a gamma rate with the fitted variance over mean.
            excess = (fit["embedding_dispersion"] - 1.0) * scale
            rates = rng.gamma(share * dims[1] / excess, excess / dims[1], dims[0])
            chosen = rng.random(dims, dtype=np.float32) < rates[:, None].astype(np.float32)
        else:
            chosen = rng.random(num, dtype=np.float32) < share
        index = np.flatnonzero(chosen)
        pick = rng.choice(len(lows), index.size, p=shares / shares.sum())
        size = lows[pick] + (rng.random(index.size) * spans[pick]).astype(np.int64)
        step = size * rng.choice([-1, 1], index.size)
        new = old.copy()
        new[index] = codec.add_difference(old[index], (step & 0xFFFF).astype(np.uint16))
        pairs.append(Pair(name, dims, old, new))
    return pairs
