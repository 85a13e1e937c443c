"""Tiny checkpoints with quantised weights, in the formats that vLLM's CPU build has kernels for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
"""Weights of one scale, in the formats of four bits."""
Tensors = dict[str, torch.Tensor]


def _w8a8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {
        f"{name}.weight": (weight / scale).round().to(torch.int8),
        f"{name}.weight_scale": scale.bfloat16(),
    }


def _packed(*shape: int) -> torch.Tensor:
    """Eight numbers of four bits in each."""
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)


def _scales(num_out: int, num_in: int) -> torch.Tensor:
    return (torch.rand(num_in // GROUP, num_out) * 0.02).half()


def _awq(name: str, weight: torch.Tensor) -> Tensors:
    num_out, num_in = weight.shape
    return {
        f"{name}.qweight": _packed(num_in, num_out // 8),
        f"{name}.qzeros": _packed(num_in // GROUP, num_out // 8),
        f"{name}.scales": _scales(num_out, num_in),
    }


def _gptq(name: str, weight: torch.Tensor) -> Tensors:
    num_out, num_in = weight.shape
    middle = torch.full((num_in // GROUP, num_out // 8), 0x77777777, dtype=torch.int64)
    return {
        f"{name}.qweight": _packed(num_in // 8, num_out),
        f"{name}.qzeros": middle.to(torch.int32),
        f"{name}.scales": _scales(num_out, num_in),
        f"{name}.g_idx": (torch.arange(num_in) // GROUP).int(),
    }


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FORMATS: dict[str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, Any]]] = {
    "w8a8": (
        _w8a8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "all": {
                    "targets": ["Linear"],
                    "weights": {**_INT8, "strategy": "channel", "dynamic": False},
                    "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
                }
            },
        },
    ),
    "awq": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    ),
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
}
"""By name: what a linear layer's weight becomes, and what the checkpoint says of it.  With four bits the weights are random, not the model's."""


def quantize(folder: Path, form: str, *, seed: int = 0) -> None:
    """Put the linear layers' weights of the checkpoint in ``folder`` into that format."""
    torch.manual_seed(seed)
    made, said = FORMATS[form]
    weights: Tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        layer, _, kind = name.rpartition(".")
        weights |= (
            made(layer, weight.float()) if layer.endswith("_proj") and kind == "weight" else {name: weight}
        )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
