"""The bits that a rank's box receives: written, read back, hashed, on the host or a device.  See :mod:`vllm_plugin.rank_weights`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from rose.weights import indexed, statehash
from rose.weights.update import TensorUpdate
from vllm_plugin.cover import span_of
from vllm_plugin.plan import BoxMap

_CHUNK_ELEMENTS = 1 << 20
"""Elements whose indices are spelt out at a time when a box has gaps in the checkpoint."""


@dataclass(kw_only=True, slots=True)
class BoxUpdate:
    """What one box of one tensor receives."""

    name: str
    box: BoxMap
    storage: torch.Tensor | None
    """Destinations, int64 ``[K]``; None: the whole box, in the box's order.  Like ``new`` and ``old`` on the host."""
    index: NDArray[Any] | None
    """Checkpoint indices ``[K]``, for the hash; None with ``storage``."""
    new: torch.Tensor
    old: torch.Tensor


def signed(bits: NDArray[Any]) -> NDArray[Any]:
    """The same bits in the integer type that torch can scatter."""
    return bits if bits.dtype.itemsize == 1 else bits.view(f"<i{bits.dtype.itemsize}")


def flat_of(tensor: TensorUpdate) -> torch.Tensor:
    """The bits of a tensor that comes whole, in the checkpoint's order."""
    assert tensor.dense is not None
    return torch.from_numpy(signed(tensor.dense.reshape(-1)))


def parked(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """On the host, and for a model on a GPU in memory that it reads by itself."""
    return values.pin_memory() if bits.is_cuda else values


def put(bits: torch.Tensor, piece: BoxUpdate, values: torch.Tensor) -> torch.Tensor | bool:
    """Write ``values`` and read them back; returns whether memory differs from them.  On a device the answer is still
    on its way."""
    if piece.storage is None:
        place, there = piece.box.view(bits), values.to(bits.device)
        place.copy_(there)
        return not torch.equal(place, there)
    if bits.device.type == "cpu":
        return not indexed.put(_unsigned(bits), piece.storage.numpy(), _unsigned(values))
    return scatter(bits, piece.storage, values)


def scatter(bits: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write ``values`` (of the host) into a device's ``bits`` at ``at`` (int64, distinct); whether memory differs from them, which the
    device is still to say."""
    at, values = at.to(bits.device, non_blocking=True), values.to(bits.device, non_blocking=True)
    bits.index_copy_(0, at, values)
    return (bits.index_select(0, at) != values).any()


def _unsigned(bits: torch.Tensor) -> NDArray[Any]:
    """CPU memory as the kernels take it."""
    array = bits.numpy()
    return array.view(f"<u{array.itemsize}")


def hash_piece(piece: BoxUpdate, values: torch.Tensor) -> int:
    if piece.index is None:
        return hash_box(piece.box, values)
    return statehash.hash_at(piece.index, values.cpu().numpy())


def hash_box(box: BoxMap, values: torch.Tensor) -> int:
    """Hash of a whole box; ``values`` has the box's shape."""
    span = span_of((box.shape, box.src_strides, box.src_offset))
    if span is not None:
        return statehash.hash_bits(values.contiguous().cpu().numpy().reshape(-1), start=box.src_offset)
    total = 0
    for index, rows in _chunks(box, values):
        total = statehash.add(total, statehash.hash_at(index, rows.contiguous().cpu().numpy().reshape(-1)))
    return total


def _chunks(box: BoxMap, values: torch.Tensor) -> Iterator[tuple[NDArray[Any], torch.Tensor]]:
    """Checkpoint indices of a box with gaps, a bounded number of rows at a time."""
    inner = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(box.shape[1:], box.src_strides[1:], strict=True):
        inner = inner.unsqueeze(-1) + torch.arange(size) * stride
    rows = max(1, _CHUNK_ELEMENTS // max(1, inner.numel()))
    for begin in range(0, box.shape[0], rows):
        end = min(begin + rows, box.shape[0])
        outer = box.src_offset + torch.arange(begin, end) * box.src_strides[0]
        index = (outer.unsqueeze(1) + inner.reshape(1, -1)).reshape(-1)
        yield index.numpy(), values[begin:end]
