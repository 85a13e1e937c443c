"""What other formats take for the same step, and the bounds that no format can beat without knowing more.

Bytes are those of the tensors' data; only where a format names tensors in a text of its own (vLLM's) is that counted,
as our manifest is in ``planes_manifest``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import numba
import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.weight_transfer.weights_data import Bits, Pair
from rose.weights import codec
from rose.weights.kernels import SEGMENT
from rose.weights.manifest import ManifestSection

LEVEL = 1


def entropy_bits(counts: NDArray[np.int64]) -> float:
    """Bits that ``counts`` of symbols take in all, coded ideally with their own frequencies."""
    counts = counts[counts > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def mask_bits(num_changed: int, num: int) -> float:
    """Of an iid mask with ``num_changed`` ones."""
    return entropy_bits(np.array([num_changed, num - num_changed]))


def shannon_bits(pair: Pair) -> float:
    """The iid bound of one tensor: entropy of the mask, and of the steps."""
    d = codec.difference(pair.old, pair.new)
    d = d[d != 0]
    return mask_bits(d.size, pair.old.size) + entropy_bits(np.bincount(d)) if d.size else 0.0


def side_information_bits(pair: Pair) -> float:
    """The same given each element's old exponent, which the receiver knows: small weights flip more often.

    Frequencies per exponent count as known; with few changes per exponent that flatters the bound.
    """
    d = codec.difference(pair.old, pair.new)
    exponent = (pair.old >> 7) & 0xFF
    total = 0.0
    for value in np.unique(exponent[d != 0]):
        chosen = d[exponent == value]
        steps = chosen[chosen != 0]
        total += mask_bits(steps.size, chosen.size) + entropy_bits(np.bincount(steps))
    return total


def planes(pair: Pair) -> int:
    """Ours: the payload, or the raw tensor where that is smaller; nothing for an unchanged tensor."""
    encoded = codec.encode(pair.old, pair.new)
    assert encoded is not None
    return min(len(encoded.data), pair.new.nbytes) if encoded.num_changed else 0


def manifest_entry(pair: Pair, nbytes: int) -> int:
    """Bytes of the JSON that describes a section in the manifest."""
    entry = ManifestSection(
        object=1,
        offset=10_000_000,
        nbytes=nbytes,
        xxh3="0" * 32,
        encoding="planes",
        tensor=pair.name,
        start=0,
        num_elements=pair.old.size,
        num_changed=pair.old.size // 100,
        dh="0" * 16,
    )
    return len(msgspec.json.encode(entry))


def compress(data: Bits) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(memoryview(data).cast("B"))


def gaps_zstd(pair: Pair) -> int:
    """u16 gaps inside segments of 65,536 and new values, each zstd-1 or stored; u32 counts."""
    index = np.flatnonzero(pair.old != pair.new)
    if not index.size:
        return 0
    local = index % SEGMENT
    starts = np.flatnonzero(np.diff(index // SEGMENT, prepend=-1))
    gaps = np.diff(local, prepend=-1) - 1
    gaps[starts] = local[starts]
    streams = gaps.astype(np.uint16), pair.new[index]
    return sum(min(len(compress(each)), each.nbytes) for each in streams) + 4 * -(-pair.old.size // SEGMENT)


def xor_zstd(pair: Pair) -> int:
    """The whole tensor old XOR new, zstd-1."""
    return len(compress(pair.old ^ pair.new))


def vllm_sparse(pairs: Sequence[Pair]) -> int:
    """vLLM 0.32 ``sparse_nccl``: int32 index and bf16 value per change, and a JSON text naming tensors.

    Fields as in ``SparseNCCLWeightTransferUpdateInfo``.
    """
    counts = [(pair, int(np.count_nonzero(pair.old != pair.new))) for pair in pairs]
    sent = [(pair, count) for pair, count in counts if count]
    info = {
        "names": [pair.name for pair, _ in sent],
        "dtype_names": ["bfloat16"] * len(sent),
        "shapes": [list(pair.shape) for pair, _ in sent],
        "num_updates_list": [count for _, count in sent],
    }
    return 6 * sum(count for _, count in sent) + len(json.dumps(info))


def sizes(pairs: Sequence[Pair]) -> dict[str, float]:
    """Bytes of one step in every format, with ``changes`` and ``elements``."""
    changes = sum(int(np.count_nonzero(pair.old != pair.new)) for pair in pairs)
    ours = [planes(pair) for pair in pairs]
    return {
        "elements": sum(pair.old.size for pair in pairs),
        "changes": changes,
        "shannon": sum(map(shannon_bits, pairs)) / 8,
        "side_information": sum(map(side_information_bits, pairs)) / 8,
        "planes": sum(ours),
        "planes_manifest": sum(ours)
        + sum(manifest_entry(pair, size) for pair, size in zip(pairs, ours, strict=True) if size),
        "coo_int32": 6 * changes,
        "coo_int64": 10 * changes,
        "vllm_sparse": vllm_sparse(pairs),
        "gaps_u16_zstd": sum(map(gaps_zstd, pairs)),
        "xor_zstd": sum(map(xor_zstd, pairs)),
        "dense": sum(pair.new.nbytes for pair in pairs),
    }


@numba.njit(nogil=True)
def gather(bits: Bits, index: NDArray[np.uint32], out: Bits) -> None:
    """Read ``bits[index]`` and nothing else."""
    for k in range(index.size):
        out[k] = bits[index[k]]
