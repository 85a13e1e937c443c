"""State hash: one 64-bit number per tensor, the same whoever holds it and however it is cut.

::

    H(S) = sum over i in S of mix((i << width) | bits_i)      mod 2**64

``i`` is the flat row-major index in the whole checkpoint tensor, ``width`` the element width in bits
(8, 16 or 32), ``bits_i`` the raw bits.  Because H is a sum, parts add up to the whole whatever the
sharding, and a change of K elements moves it by a :func:`delta_hash` of K terms.

It decides nothing: callers compare.  It catches a wrong base, a missing element and a double apply; it is
not cryptographic, and equal contents of two tensors hash alike, so state is only ever compared per tensor.
Elements of 64 bits are hashed as their two little-endian 32-bit halves; see :func:`as_bits`.

The loops are in :mod:`rose.weights.kernels`, loaded at first use: the relay and the command line read hashes
without paying for a compiler.  They release the GIL.  Callers: publisher, subscriber, the engine's updater.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import WeightsError

Bits = NDArray[Any]
"""Raw bits of a tensor: uint8, uint16 or uint32."""

MASK = (1 << 64) - 1
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(value: int) -> int:
    """The 64-bit finaliser; published so that others can check their own."""
    x = value & MASK
    x = ((x ^ (x >> 30)) * _A) & MASK
    x = ((x ^ (x >> 27)) * _B) & MASK
    return x ^ (x >> 31)


def as_bits(array: NDArray[Any]) -> Bits:
    """``array`` flat, as uint8, uint16 or uint32, without a copy (a non-contiguous array is refused)."""
    if not array.flags.c_contiguous:
        raise WeightsError("needs a C-contiguous array", field="array")
    if array.dtype.byteorder == ">":
        raise WeightsError("needs little-endian elements", field="array")
    unit = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}.get(array.dtype.itemsize)
    if unit is None:
        raise WeightsError(f"cannot hash elements of {array.dtype}", field="array")
    return array.reshape(-1).view(unit)


def hash_bits(bits: Bits, *, start: int = 0) -> int:
    """H of a contiguous run of elements, the first of which has flat index ``start``."""
    from rose.weights import kernels

    flat = readonly(as_bits(bits))
    return int(kernels.hash_scan(flat, np.uint64(start), _width(flat)))


def hash_at(index: NDArray[Any], bits: Bits, *, start: int = 0) -> int:
    """H of the elements at ``start + index``, which hold ``bits``."""
    from rose.weights import kernels

    flat = readonly(as_bits(bits))
    _same_length(index, flat)
    return int(kernels.hash_gather(readonly(index), flat, np.uint64(start), _width(flat)))


def delta_hash(index: NDArray[Any], old: Bits, new: Bits, *, start: int = 0) -> int:
    """By how much H moves (mod 2**64) when ``old`` becomes ``new`` at ``start + index``."""
    from rose.weights import kernels

    flat_old, flat_new = readonly(as_bits(old)), readonly(as_bits(new))
    if flat_old.dtype != flat_new.dtype:
        raise WeightsError(f"old is {flat_old.dtype}, new is {flat_new.dtype}", field="new")
    _same_length(index, flat_old)
    _same_length(index, flat_new)
    return int(kernels.hash_delta(readonly(index), flat_old, flat_new, np.uint64(start), _width(flat_new)))


def add(first: int, second: int) -> int:
    """Sum of two hashes of disjoint parts, or of a hash and a delta."""
    return (first + second) & MASK


def subtract(first: int, second: int) -> int:
    """The delta that leads from ``second`` to ``first``."""
    return (first - second) & MASK


def to_hex(value: int) -> str:
    """Sixteen lower-case hexadecimal digits: how a hash is written in manifests and update files."""
    return f"{value:016x}"


def from_hex(text: str) -> int:
    """Inverse of :func:`to_hex`; accepts nothing else.

    Raises:
        WeightsError: Not exactly sixteen lower-case hexadecimal digits.
    """
    if isinstance(text, str) and len(text) == 16 and set(text) <= set("0123456789abcdef"):
        return int(text, 16)
    raise WeightsError("needs sixteen hexadecimal digits", field="state_hash")


def _width(bits: Bits) -> np.uint64:
    return np.uint64(bits.dtype.itemsize * 8)


def readonly(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view: one array type, so one compiled version for mapped files and owned memory."""
    view = array.view()
    view.flags.writeable = False
    return view


def _same_length(index: NDArray[Any], bits: Bits) -> None:
    if index.ndim != 1 or index.dtype.kind not in "ui":
        raise WeightsError("needs a 1-D array of integers", field="index")
    if index.size != bits.size:
        raise WeightsError(f"{index.size} indices for {bits.size} elements", field="index")
