"""What an engine without any weights would load: a version's tensors, out of the update file that it would be given."""

from __future__ import annotations

import torch

from rose.lineage import WeightVersion
from rose.weights.subscriber import WeightSubscriber
from rose.weights.update import read_update


def newest(reader: WeightSubscriber, timeout_s: float = 0.0) -> tuple[WeightVersion, dict[str, torch.Tensor]]:
    """Of floats of 16 bits, which is what the trainers of these tests publish."""
    version = reader.poll(timeout_s)
    assert version is not None
    return version, whole(reader, version)


def whole(reader: WeightSubscriber, version: WeightVersion) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, each in read_update(reader.fetch(version, None)).tensors.items():
        assert each.dense is not None
        assert each.spec.dtype == "BF16"
        bits = torch.from_numpy(each.dense.copy().view("<i2"))
        found[name] = bits.view(torch.bfloat16).reshape(each.spec.shape)
    return found
