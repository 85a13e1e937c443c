"""State hash: one 64-bit number per tensor, the same whoever holds it and however it is cut.

::

    H(S) = sum over i in S of mix((i << width) | bits_i)      mod 2**64

``i`` is the flat row-major index in the whole checkpoint tensor, ``width`` the element width in bits
(8, 16 or 32), ``bits_i`` the raw bits.  An element of 64 bits counts as its two little-endian 32-bit halves: element
``i`` is the halves ``2 * i`` and ``2 * i + 1``.  Callers always speak of elements; the halves are counted here.
Because H is a sum, parts add up to the whole whatever the sharding, and a change of K elements moves it by a
:func:`delta_hash` of K terms.

It decides nothing: callers compare.  It catches a wrong base, a missing element and a double apply; it is
not cryptographic, and equal contents of two tensors hash alike, so state is only ever compared per tensor.

The loops are in :mod:`rose.weights.kernels`, loaded at first use: the relay and the command line read hashes
without paying for a compiler.  They release the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import WeightsError

Bits = NDArray[Any]
"""Raw bits of a tensor: unsigned integers of its element's width."""

MASK = (1 << 64) - 1
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(value: int) -> int:
    """The 64-bit finaliser; published so that others can check their own."""
    x = value & MASK
    x = ((x ^ (x >> 30)) * _A) & MASK
    x = ((x ^ (x >> 27)) * _B) & MASK
    return x ^ (x >> 31)


def _units(array: NDArray[Any]) -> tuple[Bits, int]:
    """``array`` flat and read-only, as what is hashed (uint8, uint16 or uint32), and how many of those an element is.

    Never a copy: a non-contiguous array is refused.
    """
    if not array.flags.c_contiguous:
        raise WeightsError("needs a C-contiguous array", field="array")
    if array.dtype.byteorder == ">":
        raise WeightsError("needs little-endian elements", field="array")
    unit = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}.get(array.dtype.itemsize)
    if unit is None:
        raise WeightsError(f"cannot hash elements of {array.dtype}", field="array")
    return readonly(array.reshape(-1).view(unit)), 2 if array.dtype.itemsize == 8 else 1


def _unit_index(index: NDArray[Any], num_elements: int, per_element: int) -> NDArray[Any]:
    """Of every element the indices of its units."""
    if index.ndim != 1 or index.dtype.kind not in "ui":
        raise WeightsError("needs a 1-D array of integers", field="index")
    if index.size != num_elements:
        raise WeightsError(f"{index.size} indices for {num_elements} elements", field="index")
    if per_element == 1:
        return readonly(index)
    return (index.astype(np.int64)[:, None] * per_element + np.arange(per_element)).reshape(-1)


def hash_bits(bits: Bits, *, start: int = 0) -> int:
    """H of a contiguous run of elements, the first of which has flat index ``start``."""
    from rose.weights import kernels

    flat, per_element = _units(bits)
    return int(kernels.hash_scan(flat, np.uint64(start * per_element), _width(flat)))


def hash_at(index: NDArray[Any], bits: Bits, *, start: int = 0) -> int:
    """H of the elements at ``start + index``, which hold ``bits``."""
    from rose.weights import kernels

    flat, per_element = _units(bits)
    at = readonly(_unit_index(index, bits.size, per_element))
    return int(kernels.hash_gather(at, flat, np.uint64(start * per_element), _width(flat)))


def delta_hash(index: NDArray[Any], old: Bits, new: Bits, *, start: int = 0) -> int:
    """By how much H moves (mod 2**64) when ``old`` becomes ``new`` at ``start + index``."""
    from rose.weights import kernels

    flat_old, per_element = _units(old)
    flat_new, _ = _units(new)
    if old.dtype.itemsize != new.dtype.itemsize:
        raise WeightsError(f"old is {old.dtype}, new is {new.dtype}", field="new")
    at = readonly(_unit_index(index, old.size, per_element))
    if new.size != old.size:
        raise WeightsError(f"{index.size} indices for {new.size} elements", field="index")
    first = np.uint64(start * per_element)
    return int(kernels.hash_delta(at, flat_old, flat_new, first, _width(flat_new)))


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
