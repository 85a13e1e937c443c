"""Whether a model holds the values of the safetensors files that it was loaded from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rose.weights.folder import checkpoint_files
from vllm_plugin.plan import INTEGER_OF, ShardPlan, digest_of

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
"""torch's element type by the name that safetensors has for it."""


def check_contents(plan: ShardPlan, folder: Path | str) -> ShardPlan:
    """Compare the model's memory with the checkpoint it came from, bit by bit; what differs becomes ``fallback``.

    Memory that was rearranged *after* loading has the right shape and the wrong order: only its content tells.
    """
    from safetensors import safe_open

    fallback, boxes = dict(plan.fallback), dict(plan.boxes)
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if not boxes.get(name):
                    continue
                stored = file.get_tensor(name).reshape(-1)
                stored = stored.view(INTEGER_OF[stored.element_size()])
                for box in boxes[name]:
                    live = box.view(plan.targets[box.target].bits()).cpu()
                    if not torch.equal(live, box.source_view(stored)):
                        fallback[name] = "the model does not hold the checkpoint's values in this order"
                        boxes[name] = ()
                        break
    return replace(plan, boxes=boxes, fallback=fallback, digest=digest_of(list(plan.tensors.values()), boxes))
