"""A small trainer to publish from: fp32 masters that move like training moves them."""

from __future__ import annotations

import numpy as np

from rose.weights.source import RawBits, round_to_bf16

SHAPES = {
    "model.embed_tokens.weight": (500, 32),
    "model.layers.0.mlp.up_proj.weight": (300, 257),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.self_attn.k_proj.weight": (1, 70_001),
    "empty": (0, 4),
}
DEFAULT_LR = 3e-7


class ToyTrainer:
    """Masters in fp32 (published as bf16), fp8 codes with fp32 scales, a counter; every step is seeded."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.masters = {
            name: self._rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            for name, shape in SHAPES.items()
        }
        self.codes = self._rng.integers(0, 256, (40, 40), dtype=np.uint8)
        self.scales = self._rng.standard_normal(40, dtype=np.float32)
        self.counter = np.zeros(3, np.int64)

    def step(self, lr: float = DEFAULT_LR) -> None:
        """One optimiser step; about 1 % of bf16 weights change at the default rate, nearly all at 1e-2."""
        for name, master in self.masters.items():
            if "layernorm" not in name:
                master += self._rng.standard_normal(master.shape, dtype=np.float32) * np.float32(lr)
        changed = self._rng.random(self.codes.shape) < 0.002
        self.codes[changed] ^= self._rng.integers(1, 256, dtype=np.uint8)
        self.scales[self._rng.integers(0, 40)] += np.float32(lr)
        self.counter += 1

    def tensors(self) -> dict[str, object]:
        return {
            **self.masters,
            "codes": RawBits(self.codes, "F8_E4M3"),
            "scales": RawBits(self.scales.view(np.uint32), "F32"),
            "counter": self.counter,
        }

    def bits(self) -> dict[str, np.ndarray]:
        """What an engine must hold now: flat raw bits by name."""
        found: dict[str, np.ndarray] = {n: round_to_bf16(m) for n, m in self.masters.items()}
        found["codes"] = self.codes.reshape(-1).copy()
        found["scales"] = self.scales.view(np.uint32).copy()
        found["counter"] = self.counter.view(np.uint64).copy()
        return found
