"""The ``planes`` codec: a lossless delta between two states of a run of 16- or 8-bit weights.

It takes 1.1-1.4 bytes per changed element.  A *run* is a contiguous piece of a tensor's flat row-major order,
cut into segments of 65,536 elements.  Values are compared and subtracted as integers on a total-order key,
never as floats (``+0 == -0`` and ``NaN != NaN`` would lose changes)::

    key(u) = u ^ 0xFFFF  if u & 0x8000 else u | 0x8000         bijection on u16, monotone in the float
    d      = (key(new) - key(old)) mod 2**16                   never 0 where the bits differ
    t      = d as int16;   z = 2t if t >= 0 else -2t - 1       zigzag: -1 -> 1, +1 -> 2

(8-bit elements: the same with 8 bits.)  A payload is a 32-byte header and five streams in segment order, each
one zstd-1 frame, or stored where that is not smaller:

====================  ================  ==================================================================
``count``             u32 per segment   changed elements, 0..65536
``gap_lo, gap_hi``    u8 per change     bytes of g = i - prev - 1; prev starts one before the segment
``ulp``               u8 per change     z, or 255 for an escape (16-bit elements); 0 is illegal
``escape``            u16 per escape    d itself.  A difference, so that deltas add up without their base
====================  ================  ==================================================================

``header``: u8 format = 1, u8 element bits, u8 zstd flags (bit s: stream s is a frame), u8 zero, u32 elements,
u32 changes, 5 x u32 stored bytes per stream; little-endian.

What it decides: the encoding, nothing else.  When a run is too dense to be worth it, :func:`encode` returns
None at ``max_changes`` and the caller sends the run raw.

What it guarantees: :func:`decode` of any bytes either returns strictly increasing indices inside the run and
nonzero differences, or raises SectionCorrupt; it never allocates more than the caller's ``num_elements``
implies (which the caller knows from the model, not from the payload).  One delta has one encoding, up to zstd's
choices.

The loops are in :mod:`rose.weights.kernels` and release the GIL.  Callers: publisher, subscriber.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from rose.errors import SectionCorrupt, WeightsError
from rose.weights import kernels
from rose.weights.kernels import SEGMENT
from rose.weights.statehash import Bits
from rose.weights.statehash import readonly as _ro

FORMAT = 1
MAX_ELEMENTS = 1 << 30
"""Of one run: keeps every length in the header inside u32.  Publishers cut far smaller."""

ZSTD_LEVEL = 1  # measured: higher levels gain under 1 % and cost 3-10x
_HEADER = struct.Struct("<BBBBII5I")
_STREAMS = ("count", "gap_lo", "gap_hi", "ulp", "escape")
_REASONS = {
    kernels.ULP_ZERO: "a change by zero",
    kernels.OUT_OF_RUN: "an index past the end of its segment",
    kernels.ESCAPE_COUNT: "more escapes than the escape stream holds",
    kernels.ESCAPE_SMALL: "an escape for a step that needs none",
}
_MAX_KEPT = 1 << 22  # changes of the scratch that a thread keeps: 20 MB; holds a 16 M element run at 20 %
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
    """Differences of one run: ``d`` (uint8 or uint16, ``[K]``) at ``idx`` (uint32, ``[K]``, increasing)."""

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


def encode(old: Bits, new: Bits, *, start: int = 0, max_changes: int | None = None) -> Encoded | None:
    """Encode what leads from ``old`` to ``new``.

    Args:
        old: uint8 or uint16, flat, C-contiguous.
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
    num_segments = -(-old.size // SEGMENT)
    counts = np.empty(num_segments, np.uint32)
    gap_lo, gap_hi, ulp, escape, words, positions = _scratch(limit)
    before, after = (np.empty(SEGMENT + 1, old.dtype) for _ in range(2))
    old, new = _aligned(old), _aligned(new)
    num_changed, num_escapes, dh = kernels.encode(
        old, new, _words(old), _words(new), np.uint64(start), np.uint64(mask.bit_length()), sign, mask, limit,
        counts, gap_lo, gap_hi, ulp, escape, words, positions, before, after,
    )  # fmt: skip
    if num_changed < 0:
        return None
    streams = (
        counts, gap_lo[:num_changed], gap_hi[:num_changed], ulp[:num_changed], escape[:num_escapes]
    )  # fmt: skip
    data = _pack(mask.bit_length(), old.size, num_changed, streams)
    return Encoded(data=data, num_changed=num_changed, dh=int(dh))


def encode_delta(delta: Delta, num_elements: int) -> bytes:
    """The payload of a :class:`Delta`, such as a squashed chain; the same that :func:`encode` writes."""
    old = np.zeros(num_elements, delta.d.dtype)
    new = old.copy()
    new[delta.idx] = add_difference(old[delta.idx], delta.d)
    encoded = encode(old, new)
    assert encoded is not None, "without a limit the encoder always succeeds"
    return encoded.data


def _pack(bits: int, num_elements: int, num_changed: int, streams: tuple[NDArray[Any], ...]) -> bytes:
    flags = 0
    parts: list[bytes] = []
    for number, stream in enumerate(streams):
        raw = stream.tobytes()
        frame = _compressor().compress(raw) if raw else raw
        if len(frame) < len(raw):
            flags |= 1 << number
            parts.append(frame)
        else:
            parts.append(raw)
    header = _HEADER.pack(FORMAT, bits, flags, 0, num_elements, num_changed, *map(len, parts))
    return b"".join((header, *parts))


# --- decode -----------------------------------------------------------------------------------------------


def decode(data: bytes | memoryview, num_elements: int, dtype: np.dtype[Any] | str = "<u2") -> Delta:
    """Decode a payload for a run of ``num_elements`` of ``dtype`` (``<u2`` or ``u1``).

    Raises:
        SectionCorrupt: Anything wrong: other size or width, a truncated or over-long stream, bytes left over,
            a zero step, an index outside the run.
    """
    dtype = np.dtype(dtype)
    sign, mask = _masks(dtype)
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise SectionCorrupt(f"{len(view)} bytes, a header has {_HEADER.size}", field="planes")
    version, bits, flags, zero, size, num_changed, *stored = _HEADER.unpack_from(view)
    if version != FORMAT or zero or flags >> len(_STREAMS):
        raise SectionCorrupt(f"unknown format {version}.{zero}, flags {flags:#x}", field="planes")
    if bits != mask.bit_length() or size != num_elements:
        raise SectionCorrupt(
            f"is for {size} elements of {bits} bits, not {num_elements} of {mask.bit_length()}",
            field="planes",
        )
    if num_changed > num_elements:
        raise SectionCorrupt(f"{num_changed} changes of {num_elements} elements", field="planes")
    if _HEADER.size + sum(stored) != len(view):
        raise SectionCorrupt(f"{len(view)} bytes, header says {_HEADER.size + sum(stored)}", field="planes")

    ends = np.cumsum([_HEADER.size, *stored]).tolist()
    pieces = [view[a:b] for a, b in pairwise(ends)]

    def stream(number: int, nbytes: int) -> NDArray[np.uint8]:
        return _unpack(pieces[number], nbytes, bool(flags >> number & 1), _STREAMS[number])

    num_segments = -(-num_elements // SEGMENT)
    counts = stream(0, 4 * num_segments).view("<u4")
    if int(counts.sum(dtype=np.uint64)) != num_changed or int(counts.max(initial=0)) > SEGMENT:
        raise SectionCorrupt("segment counts do not add up", field="planes.count")
    gap_lo, gap_hi, ulp = (stream(number, num_changed) for number in (1, 2, 3))
    num_escapes = int(np.count_nonzero(ulp == kernels.ESCAPE)) if mask > 0xFF else 0
    escape = stream(4, 2 * num_escapes).view("<u2")
    idx = np.empty(num_changed, np.uint32)
    d = np.empty(num_changed, dtype)
    reason = kernels.decode(num_elements, sign, mask, counts, gap_lo, gap_hi, ulp, escape, idx, d)
    if reason:
        raise SectionCorrupt(f"holds {_REASONS[reason]}", field="planes")
    return Delta(idx=idx, d=d)


def _unpack(piece: memoryview, nbytes: int, is_frame: bool, name: str) -> NDArray[np.uint8]:
    """One stream of exactly ``nbytes``; a frame that says or holds anything else is refused unread."""
    field_name = f"planes.{name}"
    if not is_frame:
        if len(piece) != nbytes:
            raise SectionCorrupt(f"{len(piece)} bytes, needs {nbytes}", field=field_name)
        return np.frombuffer(piece, np.uint8)
    try:
        # The declared size is checked first: zstandard allocates what the frame declares.
        if zstandard.frame_content_size(piece) != nbytes:
            raise SectionCorrupt("the frame declares another size", field=field_name)
        raw = _decompressor().decompress(
            piece, max_output_size=nbytes, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise SectionCorrupt(f"not a zstd frame: {error}", field=field_name) from error
    if len(raw) != nbytes:
        raise SectionCorrupt(f"{len(raw)} bytes, needs {nbytes}", field=field_name)
    return np.frombuffer(raw, np.uint8)


# --- apply and squash -------------------------------------------------------------------------------------


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
    kernels.scatter(bits, _ro(idx), _ro(values))


def apply(bits: Bits, delta: Delta, *, start: int = 0) -> int:
    """Apply ``delta`` in place; returns dH."""
    _, new, dh = stage(bits, delta, start=start)
    scatter(bits, delta.idx, new)
    return dh


def squash(first: Delta, second: Delta) -> Delta:
    """One delta that does what ``first`` and then ``second`` do.  Needs no base; reverts vanish."""
    _, mask = _masks(first.d.dtype)
    _expect(first.d.dtype == second.d.dtype, "deltas must have one element type")
    idx = np.empty(first.idx.size + second.idx.size, np.uint32)
    d = np.empty(idx.size, first.d.dtype)
    size = kernels.squash(_ro(first.idx), _ro(first.d), _ro(second.idx), _ro(second.d), mask, idx, d)
    return Delta(idx=idx[:size].copy(), d=d[:size].copy())


# --- small things -----------------------------------------------------------------------------------------


def _masks(dtype: np.dtype[Any]) -> tuple[int, int]:
    """(sign bit, all bits) of an element type."""
    if dtype == np.uint16:
        return 0x8000, 0xFFFF
    if dtype == np.uint8:
        return 0x80, 0xFF
    raise WeightsError(f"codes 8- and 16-bit elements, not {dtype}", field="planes")


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise WeightsError(message, field="planes")


def _aligned(array: Bits) -> Bits:
    """Read-only, on an 8-byte border: mapped checkpoints may start anywhere."""
    return _ro(array if array.ctypes.data % 8 == 0 and array.flags.c_contiguous else array.copy())


def _words(array: Bits) -> NDArray[np.uint64]:
    lanes = 8 // array.itemsize
    return array[: array.size // lanes * lanes].view(np.uint64)


def _scratch(limit: int) -> tuple[NDArray[Any], ...]:
    """Room for ``limit`` changes, kept per thread: fresh memory costs more than the loops that fill it."""
    if limit > _MAX_KEPT:
        return _new_scratch(limit)
    if not hasattr(_local, "scratch") or _local.scratch[0].size < limit:
        _local.scratch = _new_scratch(limit)
    return _local.scratch


def _new_scratch(limit: int) -> tuple[NDArray[Any], ...]:
    gap_lo, gap_hi, ulp = (np.empty(limit, np.uint8) for _ in range(3))
    words, positions = (np.empty(SEGMENT + 1, np.uint32) for _ in range(2))
    return gap_lo, gap_hi, ulp, np.empty(limit, np.uint16), words, positions


def _compressor() -> zstandard.ZstdCompressor:
    """One per thread: zstandard's contexts must not be shared between threads."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True)
    return _local.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        # A run's largest stream is 4 bytes per element at most, so an honest window fits in 2**27 bytes.
        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    return _local.decompressor
