"""The ``planes`` encoder on an accelerator, in Triton: the old bits go there, and nothing but the payload comes back.

The same interface and the same bytes as :mod:`rose.weights.codec`, which is the reference; the format is in its text.
Tensors are the raw bits as torch sees them (``int16`` for bf16 and fp16, ``uint8`` for fp8).  Decoding a payload is
the host's work: it is small, and the host decodes several times faster than a link delivers; engines take places and values
(:mod:`rose.weights.update`), which torch writes.

Not CuPy: CUB's select and scan would do *detect* and the prefix sum, but not the bit planes, so half of this would stay, beside another
library that has to fit the driver.

How: one program per segment of 65,536 elements, four launches.  *detect* compares both states once and compacts the
places that differ; *measure* walks over those, makes steps and counts bits; a prefix sum on the device says where each
segment's bits begin; *pack* writes the planes, each change its own bits, joined by atomic or.  Which segment is written
first does not matter, so the payload is the same every time.

What it has been checked on is Triton's interpreter, element by element against the CPU codec
(``tests/weights/test_device.py``); the tests marked ``gpu`` do the same on a device.  No speed is claimed.

For a trainer whose tensors are on a GPU.  Torch and triton are imported with this module, and nothing else in ``rose.weights``
needs them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from rose.errors import WeightsError
from rose.weights import codec, statehash
from rose.weights.codec import Encoded

SEGMENT = 65_536
_LANES = 1024  # elements that one program looks at together

_jit: Any = triton.jit  # a launch takes plain integers for constexpr, which type checkers do not know


@_jit
def _mix(x):
    """The state hash's finaliser, on uint64."""
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@_jit
def _key(u, SIGN: tl.constexpr, MASK: tl.constexpr):
    return tl.where((u & SIGN) != 0, u ^ MASK, u | SIGN)


@_jit
def _rice_width(num_places, num_taken):
    """See :func:`rose.weights.codec.rice_width`."""
    taken = num_taken.to(tl.int64)
    room = 77 * (2 * num_places.to(tl.int64) - taken)
    width = tl.zeros((), tl.int32)
    for bits in tl.static_range(1, 17):  # pyright: ignore[reportGeneralTypeIssues]
        width += (((taken << bits) * 160) <= room).to(tl.int32)
    return width


@_jit
def _log2(value):
    """Floor, of 1..32767."""
    found = tl.zeros_like(value)
    for bits in tl.static_range(1, 15):  # pyright: ignore[reportGeneralTypeIssues]
        found += (value >= (1 << bits)).to(tl.int32)
    return found


@_jit
def _hash_change(at, old, new, WIDTH: tl.constexpr):
    place = at.to(tl.uint64) << WIDTH
    return (_mix(place | new.to(tl.uint64)) - _mix(place | old.to(tl.uint64))).to(tl.int64)


@_jit
def _put(words, at, value, mask):
    """Or ``value`` (at most 32 bits) into the bits from ``at``; the words are int32."""
    shifted = value.to(tl.uint64) << (at & 31).to(tl.uint64)
    low = (shifted & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (shifted >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (at >> 5), low, mask=mask & (low != 0))
    tl.atomic_or(words + (at >> 5) + 1, high, mask=mask & (high != 0))


@_jit
def _gaps(places, first, k, mask):
    """Gaps between increasing places, which are u16 in a slot that begins at ``first``."""
    here = tl.load(places + first + k, mask=mask, other=0).to(tl.int32) & 0xFFFF
    before = tl.load(places + first + k - 1, mask=mask & (k > 0), other=0).to(tl.int32) & 0xFFFF
    return here, here - tl.where(k > 0, before, -1) - 1


@_jit
def _detect(old, new, n, places, counts, SEGMENT: tl.constexpr, LANES: tl.constexpr):
    """Compact where a segment differs into its slot of ``places``."""
    segment = tl.program_id(0).to(tl.int64)
    first = segment * SEGMENT
    lane = tl.arange(0, LANES)
    found = tl.zeros((), tl.int32)
    for base in range(0, SEGMENT, LANES):
        inside = first + base + lane < n
        before = tl.load(old + first + base + lane, mask=inside, other=0)
        after = tl.load(new + first + base + lane, mask=inside, other=0)
        differs = (before != after).to(tl.int32)
        rank = tl.cumsum(differs, 0)
        tl.store(places + first + found + rank - 1, (base + lane).to(tl.int16), mask=differs != 0)
        found += tl.sum(differs, 0)
    tl.store(counts + segment, found)


@_jit
def _measure(
    old, new, n, start, places, counts, steps, bigs, num_bigs, num_bits, moves,
    WIDTH: tl.constexpr, SIGN: tl.constexpr, MASK: tl.constexpr, SEGMENT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Steps, the list of big ones, and the bits of the planes except the gaps between big steps; dH."""
    segment = tl.program_id(0).to(tl.int64)
    first = segment * SEGMENT
    count = tl.load(counts + segment)
    width = _rice_width(tl.minimum(n - first, SEGMENT), count)
    lane = tl.arange(0, LANES)
    bits = (count * (width + 2)).to(tl.int64)
    found = tl.zeros((), tl.int32)
    move = tl.zeros((), tl.int64)
    for base in range(0, count, LANES):
        k = base + lane
        mask = k < count
        place, gap = _gaps(places, first, k, mask)
        bits += tl.sum(tl.where(mask, gap >> width, 0).to(tl.int64), 0)
        before = tl.load(old + first + place, mask=mask, other=0).to(tl.int32) & MASK
        after = tl.load(new + first + place, mask=mask, other=0).to(tl.int32) & MASK
        difference = (_key(after, SIGN, MASK) - _key(before, SIGN, MASK)) & MASK
        step = (difference ^ SIGN) - SIGN
        tl.store(steps + first + k, step.to(tl.int16), mask=mask)
        size = tl.abs(step)
        big = (mask & (size > 1)).to(tl.int32)
        rank = tl.cumsum(big, 0)
        tl.store(bigs + first + found + rank - 1, k.to(tl.int16), mask=big != 0)
        found += tl.sum(big, 0)
        bits += tl.sum(tl.where(big != 0, 2 * _log2(size - 1) + 1, 0).to(tl.int64), 0)
        moved = _hash_change(start + first + place, before, after, WIDTH)
        move += tl.sum(tl.where(mask, moved, 0), 0)
    tl.store(num_bigs + segment, found)
    tl.store(num_bits + segment, bits)
    tl.store(moves + segment, move)


@_jit
def _measure_big(counts, bigs, num_bigs, num_bits, SEGMENT: tl.constexpr, LANES: tl.constexpr):
    """Add the bits of the gaps between big steps."""
    segment = tl.program_id(0).to(tl.int64)
    first = segment * SEGMENT
    num_big = tl.load(num_bigs + segment)
    width = _rice_width(tl.load(counts + segment), num_big)
    lane = tl.arange(0, LANES)
    bits = (num_big * (width + 1)).to(tl.int64)
    for base in range(0, num_big, LANES):
        k = base + lane
        mask = k < num_big
        _, gap = _gaps(bigs, first, k, mask)
        bits += tl.sum(tl.where(mask, gap >> width, 0).to(tl.int64), 0)
    tl.store(num_bits + segment, tl.load(num_bits + segment) + bits)


@_jit
def _pack_gaps(words, at, places, first, count, width, LANES: tl.constexpr):
    """Low and high plane; returns the bit after them."""
    lane = tl.arange(0, LANES)
    highs = at + count.to(tl.int64) * width
    for base in range(0, count, LANES):
        k = base + lane
        mask = k < count
        _, gap = _gaps(places, first, k, mask)
        _put(words, at + k.to(tl.int64) * width, gap & ((1 << width) - 1), mask)
        taken = tl.where(mask, (gap >> width) + 1, 0).to(tl.int64)
        _put(words, highs + tl.cumsum(taken, 0) - 1, tl.full((LANES,), 1, tl.int32), mask)
        highs += tl.sum(taken, 0)
    return highs


@_jit
def _pack(
    words, begins, n, places, counts, steps, bigs, num_bigs, SEGMENT: tl.constexpr, LANES: tl.constexpr
):
    """Write all planes of a segment from its first bit."""
    segment = tl.program_id(0).to(tl.int64)
    first = segment * SEGMENT
    count = tl.load(counts + segment)
    num_big = tl.load(num_bigs + segment)
    lane = tl.arange(0, LANES)
    width = _rice_width(tl.minimum(n - first, SEGMENT), count)
    at = _pack_gaps(words, tl.load(begins + segment), places, first, count, width, LANES)
    for base in range(0, count, LANES):
        k = base + lane
        step = tl.load(steps + first + k, mask=k < count, other=0)
        _put(words, at + k, tl.full((LANES,), 1, tl.int32), (k < count) & (step < 0))
    at += count
    at = _pack_gaps(words, at, bigs, first, num_big, _rice_width(count, num_big), LANES)
    # Gamma code: the plane of lengths, whose end is where the plane of remainders begins.
    for base in range(0, num_big, LANES):
        k = base + lane
        length = _log2(_size(steps, bigs, first, k, k < num_big))
        taken = tl.where(k < num_big, length + 1, 0).to(tl.int64)
        _put(words, at + tl.cumsum(taken, 0) - 1, tl.full((LANES,), 1, tl.int32), k < num_big)
        at += tl.sum(taken, 0)
    for base in range(0, num_big, LANES):
        k = base + lane
        size = _size(steps, bigs, first, k, k < num_big)
        length = _log2(size)
        taken = tl.where(k < num_big, length, 0).to(tl.int64)
        _put(words, at + tl.cumsum(taken, 0) - taken, size & ((1 << length) - 1), k < num_big)
        at += tl.sum(taken, 0)


@_jit
def _size(steps, bigs, first, k, mask):
    """x = |t| - 1 of the k-th big step."""
    change = tl.load(bigs + first + k, mask=mask, other=0).to(tl.int32) & 0xFFFF
    step = tl.load(steps + first + change, mask=mask, other=2).to(tl.int32)
    return tl.abs(step) - 1


def encode_against(
    old: NDArray[Any], new: torch.Tensor, *, start: int = 0, max_changes: int | None = None
) -> Encoded | None:
    """:func:`encode` of ``new``, on its device, against old bits that are on the host."""
    # The host's bits are read and never written, whatever torch would let one do with them.
    before = torch.from_numpy(old.view(np.uint8 if old.itemsize == 1 else np.int16))
    on = torch.cuda.device(new.device) if new.is_cuda else contextlib.nullcontext()
    with on:  # Triton launches on the current one, which is a thread's
        return encode(before.to(new.device), new, start=start, max_changes=max_changes)


def encode(
    old: torch.Tensor, new: torch.Tensor, *, start: int = 0, max_changes: int | None = None
) -> Encoded | None:
    """As :func:`rose.weights.codec.encode`, of two flat tensors on one device.

    Memory on the device, while it runs: three times the run, of which the share of changes is touched.
    """
    constants = _constants(old)
    if old.dtype != new.dtype or old.shape != new.shape or old.device != new.device or old.ndim != 1:
        raise WeightsError("old and new must be flat and alike", field="planes")
    if not (old.is_contiguous() and new.is_contiguous()):
        raise WeightsError("old and new must be contiguous", field="planes")
    n, device = old.numel(), old.device
    if n > codec.MAX_ELEMENTS:
        raise WeightsError(f"a run has at most {codec.MAX_ELEMENTS} elements", field="planes")
    num_segments = -(-n // SEGMENT)
    if num_segments == 0:
        return Encoded(
            data=codec.join(constants["WIDTH"], 0, 0, np.empty(0, np.uint64), b""), num_changed=0, dh=0
        )
    places, steps, bigs = (
        torch.empty(num_segments * SEGMENT, dtype=torch.int16, device=device) for _ in range(3)
    )
    counts, num_bigs = (torch.empty(num_segments, dtype=torch.int32, device=device) for _ in range(2))
    num_bits, moves = (torch.empty(num_segments, dtype=torch.int64, device=device) for _ in range(2))
    grid = (num_segments,)
    sizes = {"SEGMENT": SEGMENT, "LANES": _LANES}
    _detect[grid](old, new, n, places, counts, **sizes)
    num_changed = int(counts.sum())
    if max_changes is not None and num_changed > max_changes:
        return None
    _measure[grid](
        old, new, n, start, places, counts, steps, bigs, num_bigs, num_bits, moves, **constants, **sizes
    )
    _measure_big[grid](counts, bigs, num_bigs, num_bits, **sizes)
    ends = num_bits.cumsum(0)
    total_bits = int(ends[-1])
    words = torch.zeros(total_bits // 32 + 2, dtype=torch.int32, device=device)
    _pack[grid](words, ends - num_bits, n, places, counts, steps, bigs, num_bigs, **sizes)
    directory = (counts.to(torch.int64) | num_bigs.to(torch.int64) << 17 | num_bits << 34).cpu().numpy()
    stored = words.cpu().numpy().view(np.uint8)[: -(-total_bits // 8)]
    return Encoded(
        data=codec.join(constants["WIDTH"], n, num_changed, directory.view(np.uint64), stored.data),
        num_changed=num_changed,
        dh=int(moves.sum()) & statehash.MASK,
    )


def _constants(bits: torch.Tensor) -> dict[str, Any]:
    width = {torch.uint8: 8, torch.int16: 16}.get(bits.dtype)
    if width is None:
        raise WeightsError(f"codes uint8 and int16 bits, not {bits.dtype}", field="planes")
    return {"WIDTH": width, "SIGN": 1 << (width - 1), "MASK": (1 << width) - 1}
