"""The ``planes`` codec: a lossless delta between two states of a run of 8-, 16- or 32-bit weights.

It takes about 1.02 times the entropy of changes that fall independently: 1.0-1.3 bytes per changed bf16 element.
A *run* is a contiguous piece of a tensor's flat row-major order, cut into segments of 65,536 elements.  Values are
compared and subtracted as integers on a total-order key, never as floats (``+0 == -0`` and ``NaN != NaN`` would
lose changes)::

    key(u) = u ^ 0xFFFF  if u & 0x8000 else u | 0x8000         bijection on u16, monotone in the float
    d      = (key(new) - key(old)) mod 2**16                   never 0 where the bits differ
    t      = d as int16                                        the step in units of the last place

(Other widths: the same with their number of bits.)  Steps are differences, so that deltas add up without their base.

A payload, little-endian::

    header      u8 format = 2, u8 element bits, u16 zero, u32 elements, u32 changes
    directory   u64 per segment: changes k | big steps e << 17 | bits << 34
    bits        of all segments one after another, least significant bit of a byte first, zeros up to a byte

The bits of a segment are seven planes, each written to the end before the next begins:

==============  ==========================================================================================
``gap low``     the low l bits of g = i - previous - 1 for each change; previous starts one before the segment
``gap high``    g >> l zeros and a one, for each change
``sign``        one bit per change: t < 0
``big low``     the same two planes once more, for *which* of the k changes have \\|t\\| > 1 (about one in ten):
``big high``    gaps between places among 0..k-1, with their own number of low bits
``size high``   for each of those, x = \\|t\\| - 1 in Elias' gamma code: floor(log2(x)) zeros and a one,
``size low``    then the bits of x below its leading one
==============  ==========================================================================================

Golomb and Rice's code is the best prefix code for gaps between independent events, and within 0.04 bit of their
entropy.  Its parameter is not stored but follows from the counts (:func:`rice_width`; the thresholds are those of
A. Kiely, "Selecting the Golomb Parameter in Rice Coding", IPN Progress Report 42-159, 2004).  So one delta has
exactly one encoding, on any machine.  Every plane can be read and written in parallel: places of ones by counting
and scanning, the rest at known offsets.  There is nothing to train and no state between segments.

What it decides: the encoding, nothing else.  When a run is too dense to be worth it, :func:`encode` returns
None at ``max_changes`` and the caller sends the run raw.

What it guarantees: :func:`decode` of any bytes either returns strictly increasing indices inside the run and
nonzero differences, or raises SectionCorrupt; it allocates what the caller's ``num_elements`` and the payload's
own length imply (a change takes at least two bits), whatever the payload says.

The loops are in :mod:`rose.weights.kernels` and release the GIL.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import SectionCorrupt, WeightsError
from rose.weights import indexed, kernels
from rose.weights.kernels import BLOCK, SEGMENT
from rose.weights.statehash import Bits
from rose.weights.statehash import readonly as _ro

FORMAT = 2
MAX_ELEMENTS = 1 << 30
"""Of one run: keeps every count in the header inside u32.  Publishers cut far smaller."""

_HEADER = struct.Struct("<BBHII")
_REASONS = {
    kernels.BITS_TOO_FEW: "fewer bits than its planes need",
    kernels.BITS_LEFT: "bits that belong to no plane",
    kernels.OUT_OF_RUN: "an index past the end of its segment",
    kernels.STEP_TOO_BIG: "a step that no element can take",
}
_MAX_KEPT_WORDS = 1 << 22  # of the scratch that a thread keeps: 32 MB, a 16 M element run at 20 %
_local = threading.local()


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A payload and what the encoder learned on the way.

    Args:
        data: The payload.
        num_changed: Elements that differ.
        dh: By how much the tensor's state hash moves.
    """

    data: bytes = field(repr=False)
    num_changed: int
    dh: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Differences of one run: ``d`` (unsigned, ``[K]``) at ``idx`` (uint32, ``[K]``, increasing)."""

    idx: NDArray[np.uint32] = field(repr=False)
    d: Bits = field(repr=False)


# --- value code -------------------------------------------------------------------------------------------


def difference(old: Bits, new: Bits) -> Bits:
    """``d`` of every pair: what :func:`add_difference` needs to lead from ``old`` to ``new``."""
    sign, mask = _masks(old.dtype)
    _expect(new.dtype == old.dtype and new.shape == old.shape, "old and new must be alike")
    out = np.empty_like(old)
    kernels.differences(_ro(old), _ro(new), out, sign, mask)
    return out


def add_difference(old: Bits, d: Bits) -> Bits:
    """Inverse of :func:`difference`: exact for every pair of bit patterns."""
    sign, mask = _masks(old.dtype)
    _expect(d.dtype == old.dtype and d.shape == old.shape, "old and d must be alike")
    out = np.empty_like(old)
    kernels.add_differences(_ro(old), _ro(d), out, sign, mask)
    return out


# --- encode -----------------------------------------------------------------------------------------------


def rice_width(num_places: int, num_taken: int) -> int:
    """Low bits per gap between ``num_taken`` (at least 1) of ``num_places``: the largest w, or 0, with
    ``num_taken * 2**w * 160 <= 77 * (2 * num_places - num_taken)``.

    That is the best power of two where the density p gives ``2**(w-1) * -ln(1-p) <= -ln(golden ratio - 1)``, with
    ``-ln(1-p)`` taken as ``p / (1 - p/2)`` and the constant 0.4812 as 77/160, to stay in integers.
    """
    width = 0
    while (num_taken << (width + 1)) * 160 <= 77 * (2 * num_places - num_taken):
        width += 1
    return width


def encode(old: Bits, new: Bits, *, start: int = 0, max_changes: int | None = None) -> Encoded | None:
    """Encode what leads from ``old`` to ``new``.

    Args:
        old: uint8, uint16 or uint32, flat, C-contiguous.
        new: The same shape and type.
        start: Flat index of the first element in its tensor; enters dH only.
        max_changes: Give up above this many changes.

    Returns:
        The payload, or None when more than ``max_changes`` elements differ.
    """
    sign, mask = _masks(old.dtype)
    _expect(old.ndim == 1 and new.ndim == 1, "old and new must be flat")
    _expect(old.dtype == new.dtype and old.size == new.size, "old and new must be alike")
    _expect(old.size <= MAX_ELEMENTS, f"a run has at most {MAX_ELEMENTS} elements")
    limit = old.size if max_changes is None else min(max_changes, old.size)
    bits = mask.bit_length()
    directory = _directory(old.size)
    words = _words(old.size, limit, bits)
    positions, gaps, sizes, big = _segment_scratch()
    before, after, d = (np.empty(SEGMENT + BLOCK, old.dtype) for _ in range(3))
    num_changed, num_bits, dh = kernels.encode(
        _contiguous(old), _contiguous(new), np.uint64(start), np.uint64(bits), sign, mask, limit,
        directory, words, positions, before, after, d, gaps, sizes, big,
    )  # fmt: skip
    if num_changed < 0:
        return None
    data = join(bits, old.size, num_changed, directory, _bytes_of(words, num_bits))
    return Encoded(data=data, num_changed=num_changed, dh=int(dh))


def _directory(num_elements: int) -> NDArray[np.uint64]:
    return np.empty(-(-num_elements // SEGMENT), np.uint64)


def join(
    bits: int,
    num_elements: int,
    num_changed: int,
    directory: NDArray[np.uint64],
    stored: bytes | memoryview,
) -> bytes:
    """A payload from its parts; ``stored`` holds the bits of all segments."""
    return b"".join((_HEADER.pack(FORMAT, bits, 0, num_elements, num_changed), directory.data, stored))


def _bytes_of(words: NDArray[np.uint64], num_bits: int) -> memoryview:
    assert num_bits >= 0, "_words leaves room for the worst case"
    return words.view(np.uint8)[: -(-num_bits // 8)].data


# --- decode -----------------------------------------------------------------------------------------------


def decode(data: bytes | memoryview, num_elements: int, dtype: np.dtype[Any] | str = "<u2") -> Delta:
    """Decode a payload for a run of ``num_elements`` of ``dtype`` (``u1``, ``<u2`` or ``<u4``).

    Raises:
        SectionCorrupt: Anything wrong: other size or width, truncated or over-long, counts that do not add up, a
            step or an index that cannot be.
    """
    dtype = np.dtype(dtype)
    sign, mask = _masks(dtype)
    view = memoryview(data)
    num_segments = -(-num_elements // SEGMENT)
    if len(view) < _HEADER.size + 8 * num_segments:
        raise SectionCorrupt(f"{len(view)} bytes, header and directory have more", field="planes")
    version, bits, zero, size, num_changed = _HEADER.unpack_from(view)
    if version != FORMAT or zero:
        raise SectionCorrupt(f"unknown format {version}.{zero}", field="planes")
    if bits != mask.bit_length() or size != num_elements:
        raise SectionCorrupt(
            f"is for {size} elements of {bits} bits, not {num_elements} of {mask.bit_length()}",
            field="planes",
        )
    directory = np.frombuffer(view, "<u8", num_segments, _HEADER.size)
    counted, num_bits = kernels.check_directory(num_elements, _ro(directory))
    if counted != num_changed:
        raise SectionCorrupt("segment counts do not add up", field="planes.directory")
    stored = view[_HEADER.size + 8 * num_segments :]
    if len(stored) != -(-num_bits // 8):
        raise SectionCorrupt(f"{len(stored)} bytes for {num_bits} bits", field="planes.bits")
    if num_bits % 8 and stored[-1] >> num_bits % 8:
        raise SectionCorrupt("bits after the last", field="planes.bits")
    if 2 * num_changed > num_bits:  # before anything is allocated for them
        raise SectionCorrupt(f"{num_changed} changes in {num_bits} bits", field="planes.bits")
    bits_data = np.empty(len(stored) + 8, np.uint8)  # the loops read eight bytes at a time
    bits_data[:-8] = np.frombuffer(stored, np.uint8)
    bits_data[-8:] = 0
    idx = np.empty(num_changed, np.uint32)
    d = np.empty(num_changed, dtype)
    ends = _decode_scratch()
    reason = kernels.decode(num_elements, sign, mask, _ro(directory), bits_data, idx, d, ends)
    if reason:
        raise SectionCorrupt(f"holds {_REASONS[reason]}", field="planes.bits")
    return Delta(idx=idx, d=d)


# --- apply ------------------------------------------------------------------------------------------------


def stage(bits: Bits, delta: Delta, *, start: int = 0) -> tuple[Bits, Bits, int]:
    """Gather the old values of ``delta`` and compute the new ones, changing nothing.

    Args:
        bits: The run's present bits, flat.
        start: Flat index of its first element in the tensor.

    Returns:
        ``(old_K, new_K, dh)``: undo values, values for :func:`scatter`, and the move of the state hash, which
        the caller compares before it scatters.
    """
    sign, mask = _masks(bits.dtype)
    _expect(delta.d.dtype == bits.dtype, "delta and bits must have one element type")
    _expect(not delta.idx.size or int(delta.idx[-1]) < bits.size, "delta reaches past the run")
    old, new = np.empty_like(delta.d), np.empty_like(delta.d)
    dh = kernels.stage(
        _ro(bits), _ro(delta.idx), _ro(delta.d), np.uint64(start), np.uint64(mask.bit_length()),
        sign, mask, old, new,
    )  # fmt: skip
    return old, new, int(dh)


def scatter(bits: Bits, idx: NDArray[np.uint32], values: Bits) -> None:
    """``bits[idx] = values``; writing twice is the same as once."""
    _expect(values.dtype == bits.dtype and values.size == idx.size, "values must match bits and idx")
    _expect(not idx.size or int(idx[-1]) < bits.size, "index past the run")
    indexed.scatter(bits, _ro(idx), _ro(values))


def apply(bits: Bits, delta: Delta, *, start: int = 0) -> int:
    """Apply ``delta`` in place; returns dH."""
    _, new, dh = stage(bits, delta, start=start)
    scatter(bits, delta.idx, new)
    return dh


# --- small things -----------------------------------------------------------------------------------------


def _masks(dtype: np.dtype[Any]) -> tuple[int, int]:
    """(sign bit, all bits) of an element type."""
    if dtype in (np.uint8, np.uint16, np.uint32):
        bits = 8 * dtype.itemsize
        return 1 << (bits - 1), (1 << bits) - 1
    raise WeightsError(f"codes 8-, 16- and 32-bit elements, not {dtype}", field="planes")


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise WeightsError(message, field="planes")


def _contiguous(array: Bits) -> Bits:
    return _ro(array if array.flags.c_contiguous and array.flags.aligned else array.copy())


def _words(num_elements: int, limit: int, bits: int) -> NDArray[np.uint64]:
    """Room for any ``limit`` changes, kept per thread; only what is written becomes memory.

    With w low bits, gaps take at most ``w + 1 + 4.2`` bits each (from the rule for w) and ``w`` times their number is
    at most .51 of the places; that twice, a sign, and ``2 * (bits - 1) + 1`` of gamma code.
    """
    size = (num_elements * 33 // 64 + limit * (2 * bits + 11)) // 64 + 4
    if size > _MAX_KEPT_WORDS:
        return np.empty(size, np.uint64)
    if not hasattr(_local, "words") or _local.words.size < size:
        _local.words = np.empty(size, np.uint64)
    return _local.words


def _segment_scratch() -> list[NDArray[np.uint32]]:
    if not hasattr(_local, "segment"):
        _local.segment = [np.empty(SEGMENT + BLOCK, np.uint32) for _ in range(4)]
    return _local.segment


def _decode_scratch() -> NDArray[np.uint32]:
    if not hasattr(_local, "ends"):
        _local.ends = np.empty(2 * SEGMENT, np.uint32)
    return _local.ends
