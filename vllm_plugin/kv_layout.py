"""Where the layers of a KV cache lie in its allocation: read from vLLM's ``KVCacheConfig``, checked, and set apart.

Nothing is guessed.  :func:`kv_entries` answers for layers that fill one allocation exactly and do not overlap, and refuses everything
else by name: a chunk of blocks then has a size that is true.

Several groups lie over each other: vLLM gives a block to one of them at a time, and each group's layers take the same pages of a
block, from the first on.  The group with most layers fills the allocation; what it takes of a block is what any of them takes.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from rose.errors import ConfigError
from rose.units import format_bytes

Entry = tuple[int, int, int, int, int]
"""``(offset, block_stride, layer_stride, num_layers, page_bytes)``: layer ``l`` of block ``b`` is ``page_bytes`` at
``offset + l * layer_stride + b * block_stride``."""


def allocation_bytes(kv_cache_config: Any) -> int:
    """Size of the one allocation behind a KV cache.

    Raises:
        ConfigError: There is none, or there are several.
    """
    sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
    if len(sizes) != 1:
        raise _refused(f"{len(sizes)} allocations; one is expected")
    return sizes.pop()


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedCache:
    """A KV cache whose memory is counted and never moved (compute-only): any groups, any kinds, in one allocation."""

    num_blocks: int
    size_bytes: int

    @classmethod
    def of(cls, kv_cache_config: Any) -> CountedCache:
        """Of a ``KVCacheConfig``.  Raises as :func:`allocation_bytes`."""
        return cls(num_blocks=kv_cache_config.num_blocks, size_bytes=allocation_bytes(kv_cache_config))


def kv_entries(kv_cache_config: Any, piece_bytes: int) -> tuple[int, int, list[Entry]]:
    """Geometry of the KV allocation as :func:`page_layers` sets its layers apart: ``(num_blocks, size_bytes, entries)``.

    Raises:
        ConfigError: Not one allocation, or blocks that differ between groups; a layer is missing or there twice; pages overlap, lie
            outside the allocation, or leave something of it over.
    """
    size_bytes, num_blocks = allocation_bytes(kv_cache_config), kv_cache_config.num_blocks
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    page_bytes, _ = _only({(spec.page_size_bytes, spec.block_size) for spec in specs})
    entries = max(_entries_by_group(kv_cache_config, page_bytes), key=_num_layers)
    _check_filled(entries, num_blocks, size_bytes)
    places = set(_starts(entries))
    for others in _entries_by_group(kv_cache_config, page_bytes):
        starts = _starts(others)
        if (
            len(set(starts)) != len(starts)
            or not places.issuperset(starts)
            or {one[1] for one in others} != {one[1] for one in entries}
        ):
            raise _refused("layers of one group lie between the pages of another's")
    paged = page_layers(kv_cache_config, piece_bytes)
    entries = max(_entries_by_group(paged, page_bytes), key=_num_layers)
    return num_blocks, allocation_bytes(paged), entries


def _only(pages: set[tuple[int, int]]) -> tuple[int, int]:
    """Bytes and tokens of a page: the same in every group."""
    if len(pages) != 1:
        said = ", ".join(f"{tokens} tokens in {size} bytes" for size, tokens in sorted(pages))
        raise _refused(f"blocks differ between groups: {said}")
    return pages.pop()


def _tensors_by_group(kv_cache_config: Any) -> list[list[Any]]:
    """Of each group the tensors with its layers.

    Raises:
        ConfigError: A layer is missing or there twice, or a tensor has layers of several groups.
    """
    tensors, found = kv_cache_config.kv_cache_tensors, []
    for group in kv_cache_config.kv_cache_groups:
        names = set(group.layer_names)
        of_group = [tensor for tensor in tensors if not names.isdisjoint(tensor.layers)]
        if sorted(name for tensor in of_group for name in tensor.layers) != sorted(group.layer_names):
            raise _refused("its layers are not those of its group, each once")
        found.append(of_group)
    if not found or not all(found) or sum(map(len, found)) != len(tensors):
        raise _refused("its layers are not those of its group, each once")
    return found


def _entries_by_group(kv_cache_config: Any, page_bytes: int) -> list[list[Entry]]:
    return [
        [(t.offset, t.block_stride, t.layer_stride, len(t.layers), page_bytes) for t in tensors]
        for tensors in _tensors_by_group(kv_cache_config)
    ]


def _num_layers(entries: list[Entry]) -> int:
    return sum(num_layers for _, _, _, num_layers, _ in entries)


def _starts(entries: list[Entry]) -> list[int]:
    """Where the layers of an entry begin, in order."""
    return sorted(
        offset + layer * layer_stride
        for offset, _, layer_stride, num_layers, _ in entries
        for layer in range(num_layers)
    )


def _check_filled(entries: list[Entry], num_blocks: int, size_bytes: int) -> None:
    """Every byte of the allocation belongs to one page of one layer and one block.

    Either each layer's blocks follow one another, or each block's layers do: then what a layer has (or what a block has) is one
    piece, and it is enough to look at the pieces.
    """
    page_bytes = entries[0][4]
    block_bytes = page_bytes * _num_layers(entries)
    if block_bytes * num_blocks != size_bytes:
        raise _refused(
            f"{num_blocks} blocks of {block_bytes} bytes are {format_bytes(block_bytes * num_blocks)}, "
            f"and the allocation is {format_bytes(size_bytes)}"
        )
    strides = {block_stride for _, block_stride, _, _, _ in entries}
    if strides == {page_bytes}:
        piece_bytes = page_bytes * num_blocks  # a layer
    elif strides == {block_bytes}:
        piece_bytes = page_bytes  # of the first block
    else:
        raise _refused(f"blocks are {sorted(strides)} bytes apart, pages have {page_bytes}")
    expected = itertools.count(0, piece_bytes)
    for start, free in zip(_starts(entries), expected, strict=False):
        if start != free:
            what = "overlap" if start < free else "leave a gap"
            raise _refused(f"layers {what} at byte {min(start, free)}")


def _refused(reason: str) -> ConfigError:
    return ConfigError(reason, field="KV cache")


def page_layers(kv_cache_config: Any, piece_bytes: int) -> Any:
    """The same ``KVCacheConfig`` with every layer at a multiple of ``piece_bytes``, so that a run of blocks is whole pieces.

    Only layouts that give each layer a region of its own need it, and only where the number of blocks does not happen to
    fit.  The blocks of a layer stay as they were: an attention kernel sees one layer, and no difference.  It costs addresses, and
    memory for less than a piece per layer.

    Raises:
        ConfigError: Layers lie over each other, or between each other's blocks.
    """
    tensors = kv_cache_config.kv_cache_tensors
    apart = [tensor.layer_stride > tensor.block_stride for tensor in tensors]
    strides = [tensor.layer_stride if flag else 0 for tensor, flag in zip(tensors, apart, strict=True)]
    if not any(stride % piece_bytes for stride in strides) and not any(
        t.offset % piece_bytes for t in tensors
    ):
        return kv_cache_config
    moved: dict[int, tuple[int, int]] = {}
    size_bytes = 0
    for of_group in _tensors_by_group(kv_cache_config):
        at = 0
        if not all(apart) or len({tensor.offset for tensor in of_group}) != len(of_group):
            raise _refused("layers lie over each other, or among each other's blocks")
        for tensor in sorted(of_group, key=lambda tensor: tensor.offset):
            stride = -(-tensor.layer_stride // piece_bytes) * piece_bytes
            moved[id(tensor)] = (at, stride)
            at += stride * len(tensor.layers)
        size_bytes = max(size_bytes, at)
    paged = copy.copy(kv_cache_config)
    paged.kv_cache_tensors = [
        dataclasses.replace(
            tensor, size=size_bytes, offset=moved[id(tensor)][0], layer_stride=moved[id(tensor)][1]
        )
        for tensor in tensors
    ]
    return paged
