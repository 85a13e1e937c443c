"""Weights of a scale as trained ones have, from a seed, in an engine that was started without a checkpoint.

vLLM's own dummy weights are within a thousandth of zero: answers tie, and a tie is broken by whatever else is in the batch.
"""

from __future__ import annotations

from typing import Any


def fill(name: str, tensor: Any, seed: int, index: int) -> None:
    """Overwrite ``tensor``: norms around one, matrices with a standard deviation of one over the root of their inputs."""
    import torch

    generator = torch.Generator(device=tensor.device).manual_seed(seed * 100_003 + index)
    if tensor.ndim == 1:
        around = 0.0 if name.endswith("bias") else 1.0
        tensor.normal_(around, 0.05, generator=generator)
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


class SeededWeights:
    """``worker_extension_cls``: one collective call more in every worker."""

    get_model: Any

    def gpu_check_fill_weights(self, seed: int) -> int:
        """Fill every parameter; how many there were."""
        import torch

        named = sorted(self.get_model().named_parameters())
        with torch.no_grad():
            for index, (name, parameter) in enumerate(named):
                fill(name, parameter.data, seed, index)
        return len(named)
