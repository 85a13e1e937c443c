"""The shard plan: where each element of each checkpoint tensor lives in this rank's model memory.

Built once per engine from the model's own loader (:mod:`vllm_plugin.plan_recorder`) and compared with the checkpoint
(:mod:`vllm_plugin.checkpoint`).  A :class:`BoxMap` is an affine piece of a checkpoint tensor and the equally shaped affine
piece of one storage.  A tensor that has none is in ``fallback`` with the reason; the updater refuses to patch it.

Invariants of a plan:
- no element of the model is written by two boxes;
- every element of a parameter is written by a box, or is padding that the loader fills with a constant,
  or its parameter is in ``holes``; with a hole, a tensor that left no trace is in ``fallback``;
- no two boxes of a tensor read the same element, unless they are exact repeats (``mirror``; hashed once).

It moves no weight and knows no versions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose.errors import SectionCorrupt
from rose.weights import indexed
from rose.weights.spec import TensorSpec
from vllm_plugin.cover import Region


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxMap:
    """A block of elements: coordinate ``c`` in ``shape`` is checkpoint element ``src_offset + c . src_strides``, and likewise in storage.

    Neighbouring axes are merged where both sides allow it.  Axes are ordered by falling ``src_strides``, and each stride is larger than the
    extent of all axes after it, so that a checkpoint index has at most one coordinate.
    """

    target: int
    shape: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]
    mirror: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def locate(
        self, index: NDArray[Any]
    ) -> tuple[slice | NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
        """Map flat checkpoint indices (uint32 or int64) to storage indices.  Only those near the box are looked at.

        Returns:
            ``(inside, mine, storage)``: ``mine`` is a copy of ``index[inside]``, those that lie in the box; and where they live.

        Raises:
            SectionCorrupt: They do not increase.
        """
        if not self.num_elements:
            return slice(0, 0), index[:0].copy(), np.empty(0, np.int64)
        shape, src, dst = self.shape or (1,), self.src_strides or (1,), self.dst_strides or (1,)
        last = self.src_offset + sum((size - 1) * stride for size, stride in zip(shape, src, strict=True))
        # A rank's rows of a matrix are one stretch of it: the other ranks' changes are not looked at.
        low = int(np.searchsorted(index, index.dtype.type(self.src_offset)))
        high = int(np.searchsorted(index, index.dtype.type(last), side="right"))
        if (src, dst) == ((1,), (1,)):
            # What is checked is the copy: the original may be a file's.
            mine = index[low:high].copy()
            if mine.size and not (
                mine[0] >= self.src_offset and mine[-1] <= last and indexed.increases(mine)
            ):
                raise SectionCorrupt("indices do not increase", field="idx")
            return slice(low, high), mine, mine.astype(np.int64) + (self.dst_offset - self.src_offset)
        inside, storage = (np.empty(high - low, np.int64) for _ in range(2))
        found = indexed.locate(
            index[low:high], *(np.array(axes, np.int64) for axes in (shape, src, dst)), self.src_offset, inside, storage
        )  # fmt: skip
        if found < 0:
            raise SectionCorrupt("indices do not increase", field="idx")
        inside = inside[:found] + low
        return inside, index[inside], storage[:found] + self.dst_offset

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The box inside a flat storage, shaped ``shape``."""
        return flat.as_strided(self.shape, self.dst_strides, self.dst_offset)

    def source_view(self, flat: torch.Tensor) -> torch.Tensor:
        """The box inside the flat checkpoint tensor, shaped ``shape``."""
        return flat.as_strided(self.shape, self.src_strides, self.src_offset)


@dataclass(frozen=True, kw_only=True)
class TargetStorage:
    """One storage of the model: names of its tensors (several when tied), elements, where parameters lie."""

    names: tuple[str, ...]
    flat: torch.Tensor
    parameters: tuple[Region, ...]

    def bits(self) -> torch.Tensor:
        """The same memory as integers of the element's width."""
        return self.flat.view(INTEGER_OF[self.flat.element_size()])


INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """See the module.

    Attributes:
        tensors: Every tensor of the checkpoint by name.
        boxes: By tensor name; empty for a tensor that this rank does not hold.
        fallback: Reason by tensor name; such tensors cannot be patched in place.
        holes: Parameters that the checkpoint does not fully write.
        digest: Of names, shapes, types and boxes; equal plans have equal digests.
    """

    tensors: Mapping[str, TensorSpec]
    boxes: Mapping[str, tuple[BoxMap, ...]]
    fallback: Mapping[str, str]
    holes: tuple[str, ...]
    targets: Sequence[TargetStorage]
    digest: str

    def is_whole(self, name: str) -> bool:
        """This rank holds every element of the tensor."""
        held = sum(box.num_elements for box in self.boxes[name] if not box.mirror)
        return held == self.tensors[name].num_elements


NO_CHECKPOINT = ShardPlan(tensors={}, boxes={}, fallback={}, holes=(), targets=(), digest="none")
"""Of weights that no checkpoint gave: an update of any tensor is refused."""


def digest_of(tensors: Sequence[TensorSpec], boxes: Mapping[str, Sequence[BoxMap]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype}\n".encode())
        for box in sorted(boxes[tensor.name], key=lambda box: (box.src_offset, box.target, box.dst_offset)):
            digest.update(f" {box}\n".encode())
    return digest.hexdigest()
