"""The compiled loops of state hash and codec (:mod:`rose.weights.statehash`, :mod:`rose.weights.codec`).

All of them in one file: numba's disk cache notices a change of the file, not of what it imports.  Kernels
trust their arguments: types, sizes and alignment are the callers' to check.  Everything arrives as arrays and
integers, nothing is allocated here, and the GIL is released, so runs may be coded on several threads.
``sign`` is the sign bit of an element and ``mask`` all its bits (0x8000, 0xFFFF; or 0x80, 0xFF).

Loops are written so that LLVM vectorises them or, where it cannot, so that they hold no branch that the data
decides by chance: the sign of a weight and the place of a change inside a word are coin tosses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

SEGMENT = 65_536
ESCAPE = 255
BUSY = 1500
"""Changes in a segment (2.3 %) above which a branch per word costs more than a list of unequal words:
measured 9.5 against 6.9 GB/s at 1.1 %, 3.8 against 6.9 at 2.9 %."""

ULP_ZERO, OUT_OF_RUN, ESCAPE_COUNT, ESCAPE_SMALL = -1, -2, -3, -4
"""What :func:`decode` answers for a stream it refuses."""


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    """Compile at first use, and keep the result on disk where there is a place to write it."""
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache folder: a read-only container
        return njit(**options)(function)


def _compiled(function: Callable[..., Any]) -> Any:
    return _jit(function, nogil=True)


def _inlined(function: Callable[..., Any]) -> Any:
    return _jit(function, inline="always")


_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@_inlined
def mix64(x: Any) -> Any:
    """The state hash's finaliser, on uint64."""
    x = (x ^ (x >> np.uint64(30))) * _A
    x = (x ^ (x >> np.uint64(27))) * _B
    return x ^ (x >> np.uint64(31))


@_compiled
def hash_scan(bits: Any, start: Any, width: Any) -> Any:
    total = np.uint64(0)
    for i in range(bits.size):
        total += mix64(((start + np.uint64(i)) << width) | np.uint64(bits[i]))
    return total


@_compiled
def hash_gather(index: Any, bits: Any, start: Any, width: Any) -> Any:
    total = np.uint64(0)
    for k in range(index.size):
        total += mix64(((start + np.uint64(index[k])) << width) | np.uint64(bits[k]))
    return total


@_compiled
def hash_delta(index: Any, old: Any, new: Any, start: Any, width: Any) -> Any:
    total = np.uint64(0)
    for k in range(index.size):
        at = (start + np.uint64(index[k])) << width
        total += mix64(at | np.uint64(new[k])) - mix64(at | np.uint64(old[k]))
    return total


@_inlined
def key(u: Any, sign: Any, mask: Any) -> Any:
    """Total-order key of the bits ``u`` (signed integer in and out)."""
    return u ^ (sign | (-np.int64((u & sign) != 0) & mask))


@_inlined
def unkey(k: Any, sign: Any, mask: Any) -> Any:
    return k ^ (sign | (-np.int64((k & sign) == 0) & mask))


@_compiled
def differences(old: Any, new: Any, out: Any, sign: Any, mask: Any) -> None:
    for k in range(old.size):
        out[k] = (key(np.int64(new[k]), sign, mask) - key(np.int64(old[k]), sign, mask)) & mask


@_compiled
def add_differences(old: Any, d: Any, out: Any, sign: Any, mask: Any) -> None:
    for k in range(old.size):
        out[k] = unkey((key(np.int64(old[k]), sign, mask) + np.int64(d[k])) & mask, sign, mask)


@_inlined
def _lanes(differs: Any, base: Any, lanes: Any, found: Any, positions: Any) -> Any:
    """Append the positions of the unequal lanes of one word; one compare per lane, no branch on the data."""
    if lanes == 4:
        positions[found] = base
        found += (differs & np.uint64(0xFFFF)) != 0
        positions[found] = base + 1
        found += (differs & np.uint64(0xFFFF0000)) != 0
        positions[found] = base + 2
        found += (differs & np.uint64(0xFFFF00000000)) != 0
        positions[found] = base + 3
        found += (differs >> np.uint64(48)) != 0
    else:
        for lane in range(lanes):
            positions[found] = base + lane
            found += ((differs >> np.uint64(8 * lane)) & np.uint64(0xFF)) != 0
    return found


@_compiled
def changed_positions(
    old: Any, new: Any, old_words: Any, new_words: Any, begin: Any, end: Any, busy: Any,
    words: Any, positions: Any,
) -> Any:  # fmt: skip
    """Write the positions in [begin, end) that differ, relative to ``begin``; returns how many.

    ``begin`` is a multiple of the elements per 64-bit word; ``positions`` has room for one more than that.
    """
    lanes = 8 // old.itemsize
    first, last = begin // lanes, min(end // lanes, old_words.size)
    found = 0
    if busy:
        num_words = 0
        for word in range(first, last):
            words[num_words] = word - first
            num_words += old_words[word] != new_words[word]
        for k in range(num_words):
            word = np.int64(words[k])
            differs = old_words[first + word] ^ new_words[first + word]
            found = _lanes(differs, word * lanes, lanes, found, positions)
    else:
        for word in range(first, last):
            differs = old_words[word] ^ new_words[word]
            if differs:
                found = _lanes(differs, (word - first) * lanes, lanes, found, positions)
    for i in range(last * lanes, end):  # the tail of a run that is no multiple of a word
        positions[found] = i - begin
        found += old[i] != new[i]
    return found


@_compiled
def encode(
    old: Any, new: Any, old_words: Any, new_words: Any, start: Any, width: Any,
    sign: Any, mask: Any, limit: Any,
    counts: Any, gap_lo: Any, gap_hi: Any, ulp: Any, escape: Any,
    words: Any, positions: Any, before: Any, after: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Fill the five streams; returns (changes, or -1 above ``limit``; escapes; dH).

    ``words``, ``positions`` (u32), ``before``, ``after`` are scratch of SEGMENT + 1 elements.
    """
    total = 0
    num_escapes = 0
    found = 0
    dh = np.uint64(0)
    for segment in range(counts.size):
        begin = segment * SEGMENT
        end = min(begin + SEGMENT, old.size)
        found = changed_positions(old, new, old_words, new_words, begin, end, found > BUSY, words, positions)
        if total + found > limit:
            return -1, 0, dh
        counts[segment] = found
        # One short loop per stream: each vectorises, one loop for all of them does not (measured 4x slower).
        for k in range(found):
            before[k] = old[begin + positions[k]]
            after[k] = new[begin + positions[k]]
        previous = np.int64(-1)
        for k in range(found):
            gap = np.int64(positions[k]) - previous - 1
            previous = np.int64(positions[k])
            gap_lo[total + k] = gap & 0xFF
            gap_hi[total + k] = gap >> 8
        big = 0
        for k in range(found):
            d = (key(np.int64(after[k]), sign, mask) - key(np.int64(before[k]), sign, mask)) & mask
            t = (d ^ sign) - sign  # sign-extended
            z = (t << 1) ^ (t >> 63)  # zigzag
            big += z >= ESCAPE
            ulp[total + k] = min(z, ESCAPE)
        if big and mask > 0xFF:
            for k in range(found):
                if ulp[total + k] == ESCAPE:
                    d = key(np.int64(after[k]), sign, mask) - key(np.int64(before[k]), sign, mask)
                    escape[num_escapes] = d & mask
                    num_escapes += 1
        base = start + np.uint64(begin)
        for k in range(found):
            at = (base + np.uint64(positions[k])) << width
            dh += mix64(at | np.uint64(after[k])) - mix64(at | np.uint64(before[k]))
        total += found
    return total, num_escapes, dh


@_compiled
def decode(
    n: Any, sign: Any, mask: Any, counts: Any, gap_lo: Any, gap_hi: Any, ulp: Any, escape: Any,
    idx: Any, d_out: Any,
) -> Any:  # fmt: skip
    """Fill idx and d; returns 0, or the negative reason of a refusal.  Writes inside ``idx`` only."""
    k = 0
    num_escapes = 0
    for segment in range(counts.size):
        begin = segment * SEGMENT
        length = min(SEGMENT, n - begin)
        position = np.int64(-1)
        for _ in range(counts[segment]):
            position += 1 + np.int64(gap_lo[k]) + (np.int64(gap_hi[k]) << 8)
            if position >= length:
                return OUT_OF_RUN
            z = np.int64(ulp[k])
            if z == 0:
                return ULP_ZERO
            if z == ESCAPE and mask > 0xFF:
                if num_escapes == escape.size:  # the codec sizes it by counting; never read past it
                    return ESCAPE_COUNT
                d = np.int64(escape[num_escapes])
                num_escapes += 1
                if d < 128 or d > mask - 127:  # |t| <= 127 has z < 255; d = 0 is caught here too
                    return ESCAPE_SMALL
            else:
                d = ((z >> 1) ^ -(z & 1)) & mask
            idx[k] = begin + position
            d_out[k] = d
            k += 1
    return 0


@_compiled
def stage(
    bits: Any, idx: Any, d: Any, start: Any, width: Any, sign: Any, mask: Any, old_out: Any, new_out: Any
) -> Any:
    """Gather old values, compute new ones; returns dH."""
    for k in range(idx.size):
        old_out[k] = bits[idx[k]]
    add_differences(old_out, d, new_out, sign, mask)
    dh = np.uint64(0)
    for k in range(idx.size):
        at = (start + np.uint64(idx[k])) << width
        dh += mix64(at | np.uint64(new_out[k])) - mix64(at | np.uint64(old_out[k]))
    return dh


@_compiled
def scatter(bits: Any, idx: Any, values: Any) -> None:
    for k in range(idx.size):
        bits[idx[k]] = values[k]


@_compiled
def squash(idx_a: Any, d_a: Any, idx_b: Any, d_b: Any, mask: Any, idx_out: Any, d_out: Any) -> Any:
    """Merge two deltas by index, adding differences mod 2**bits; returns how many are left."""
    past = np.int64(1) << 62
    a = b = k = 0
    while a < idx_a.size or b < idx_b.size:
        at_a = np.int64(idx_a[a]) if a < idx_a.size else past
        at_b = np.int64(idx_b[b]) if b < idx_b.size else past
        at = min(at_a, at_b)
        d = np.int64(0)
        if at_a == at:
            d += np.int64(d_a[a])
            a += 1
        if at_b == at:
            d += np.int64(d_b[b])
            b += 1
        if d & mask:  # a revert cancels and vanishes
            idx_out[k] = at
            d_out[k] = d & mask
            k += 1
    return k


@_compiled
def round_bf16(wide: Any, out: Any) -> None:
    """fp32 bits to bf16 bits, to nearest, ties to even."""
    for i in range(wide.size):
        u = wide[i]
        if (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            out[i] = np.uint16(0x7FC0)  # as torch: rounding a NaN's payload could make it an infinity
        else:
            out[i] = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
