"""The compiled loops of state hash and codec (:mod:`rose.weights.statehash`, :mod:`rose.weights.codec`).

These call each other, hence one file: numba's disk cache notices a change of the file, not of what it imports.  Kernels
trust their arguments: types and sizes are the callers' to check.  Everything arrives as arrays and integers,
nothing is allocated here, and the GIL is released, so runs may be coded on several threads.
``sign`` is the sign bit of an element and ``mask`` all its bits (0x8000, 0xFFFF for 16-bit elements).

Loops are written so that LLVM vectorises them or, where it cannot, so that they hold no branch that the data
decides by chance: the sign of a weight and the place of a change inside a block are coin tosses.  Hence one short
loop per thing to do, over scratch that stays in cache, instead of one loop for all of them (measured 4x slower).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rose.weights.jit import compiled, inlined

SEGMENT = 65_536
BLOCK = 64
"""Elements compared at a time: one bit each of a 64-bit mask."""

BITS_TOO_FEW, BITS_LEFT, OUT_OF_RUN, STEP_TOO_BIG = -1, -2, -3, -4
"""What :func:`decode` answers for a payload it refuses."""


# --- what LLVM offers and numba does not ------------------------------------------------------------------

_intrinsic: Any = intrinsic  # it takes away the first parameter, which type checkers do not know


@_intrinsic
def _unequal(typing_context: Any, old: Any, new: Any, at: Any) -> Any:
    """uint64 with bit j set where ``old[at + j] != new[at + j]``; both hold 64 elements from there.

    One vector comparison whatever the machine: two instructions and a move with AVX-512.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(old.dtype.bitwidth), BLOCK)
        loaded = []
        for kind, value in zip(signature.args[:2], arguments[:2], strict=True):
            array = context.make_array(kind)(context, builder, value)
            address = builder.gep(array.data, [arguments[2]])
            loaded.append(
                builder.load(builder.bitcast(address, vector.as_pointer()), align=old.dtype.bitwidth // 8)
            )
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(BLOCK))

    return types.uint64(old, new, types.int64), generate


@_intrinsic
def _lowest(typing_context: Any, word: Any) -> Any:
    """Position of the lowest set bit of a uint64; 64 when there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@_intrinsic
def _ones(typing_context: Any, word: Any) -> Any:
    """Set bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@_intrinsic
def _load64(typing_context: Any, data: Any, at: Any) -> Any:
    """The eight bytes from byte ``at`` of a uint8 array, little-endian."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(array.data, [arguments[1]])
        return builder.load(builder.bitcast(address, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(data, types.int64), generate


# --- state hash -------------------------------------------------------------------------------------------

_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@inlined
def mix64(x: Any) -> Any:
    """The state hash's finaliser, on uint64."""
    x = (x ^ (x >> np.uint64(30))) * _A
    x = (x ^ (x >> np.uint64(27))) * _B
    return x ^ (x >> np.uint64(31))


@compiled
def hash_scan(bits: Any, start: Any, width: Any) -> Any:
    total = np.uint64(0)
    for i in range(bits.size):
        total += mix64(((start + np.uint64(i)) << width) | np.uint64(bits[i]))
    return total


@compiled
def hash_gather(index: Any, bits: Any, start: Any, width: Any) -> Any:
    total = np.uint64(0)
    for k in range(index.size):
        total += mix64(((start + np.uint64(index[k])) << width) | np.uint64(bits[k]))
    return total


@compiled
def hash_delta(index: Any, old: Any, new: Any, start: Any, width: Any) -> Any:
    total = np.uint64(0)
    for k in range(index.size):
        at = (start + np.uint64(index[k])) << width
        total += mix64(at | np.uint64(new[k])) - mix64(at | np.uint64(old[k]))
    return total


# --- value code -------------------------------------------------------------------------------------------


@inlined
def key(u: Any, sign: Any, mask: Any) -> Any:
    """Total-order key of the bits ``u`` (signed integer in and out)."""
    return u ^ (sign | (-np.int64((u & sign) != 0) & mask))


@inlined
def unkey(k: Any, sign: Any, mask: Any) -> Any:
    return k ^ (sign | (-np.int64((k & sign) == 0) & mask))


@compiled
def differences(old: Any, new: Any, out: Any, sign: Any, mask: Any) -> None:
    for k in range(old.size):
        out[k] = (key(np.int64(new[k]), sign, mask) - key(np.int64(old[k]), sign, mask)) & mask


@compiled
def add_differences(old: Any, d: Any, out: Any, sign: Any, mask: Any) -> None:
    for k in range(old.size):
        out[k] = unkey((key(np.int64(old[k]), sign, mask) + np.int64(d[k])) & mask, sign, mask)


# --- bits, least significant first: written to uint64 words, read from bytes (on little-endian machines) ---


@compiled
def _put_lows(words: Any, at: Any, values: Any, count: Any, width: Any) -> Any:
    """Write the low ``width`` bits (0..32) of ``count`` values from bit ``at``; returns the bit after them."""
    if width == 0:
        return at
    low = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    word, fill, held = at >> 6, at & 63, words[at >> 6]
    for k in range(count):
        value = np.uint64(values[k]) & low
        held |= value << np.uint64(fill)
        words[word] = held
        fill += width
        full = fill >> 6
        word += full
        fill &= 63
        held = value >> np.uint64((width - fill) & 63) if full else held
    words[word] = held
    return (word << 6) + fill


@compiled
def _put_highs(words: Any, at: Any, values: Any, count: Any, width: Any) -> Any:
    """Write ``value >> width`` zeros and a one for each value; the words are zero."""
    word = at >> 6
    held = words[word]
    for k in range(count):
        at += np.int64(values[k]) >> width
        if at >> 6 != word:  # a word holds some thirty values
            words[word] = held
            word, held = at >> 6, np.uint64(0)
        held |= np.uint64(1) << np.uint64(at & 63)
        at += 1
    words[word] = held
    return at


@compiled
def _put_signs(words: Any, at: Any, d: Any, count: Any, sign: Any) -> Any:
    """Write whether each of ``count`` differences is negative; the words are zero."""
    word, fill = at >> 6, at & 63
    held = words[word]
    for k in range(count):
        held |= np.uint64((np.int64(d[k]) & sign) != 0) << np.uint64(fill)
        fill += 1
        if fill == 64:
            words[word] = held
            word, fill, held = word + 1, 0, np.uint64(0)
    words[word] = held
    return at + count


@inlined
def _peek(data: Any, at: Any) -> Any:
    """At least 57 bits from bit ``at``; ``data`` has eight bytes more than its bits need."""
    return _load64(data, at >> 3) >> np.uint64(at & 7)


@compiled
def _find_highs(data: Any, at: Any, end: Any, count: Any, ends: Any) -> Any:
    """Inverse of :func:`_put_highs`: where the first ``count`` ones from bit ``at`` are, from 0.

    Returns the bit after the last, or -1 when there are not as many before ``end``.
    """
    found, base = 0, 0
    while found < count:
        if at + base >= end:
            return -1
        word = _peek(data, at + base) & np.uint64(0xFFFFFFFFFFFFFF)
        for _ in range(min(_ones(word), count - found)):
            ends[found] = base + _lowest(word)
            word &= word - np.uint64(1)
            found += 1
        base += 56
    after = at + (np.int64(ends[count - 1]) + 1 if count else 0)
    return after if after <= end else -1


@inlined
def rice_width(num_places: Any, num_taken: Any) -> Any:
    """Low bits per gap between ``num_taken`` of ``num_places``; see :func:`rose.weights.codec.rice_width`."""
    width = 0
    while (num_taken << (width + 1)) * 160 <= 77 * (2 * num_places - num_taken):
        width += 1
    return width


# --- encode -----------------------------------------------------------------------------------------------


@compiled
def changed_positions(old: Any, new: Any, begin: Any, end: Any, positions: Any) -> Any:
    """Write the positions in [begin, end) that differ, relative to ``begin``; returns how many.

    ``positions`` has room for SEGMENT + BLOCK.
    """
    found = 0
    whole = (end - begin) // BLOCK * BLOCK
    for base in range(0, whole, BLOCK):
        differs = _unequal(old, new, begin + base)
        count = _ones(differs)
        # The first four without a branch: they are all there are, below a density of about 3 %.
        for lane in range(4):
            positions[found + lane] = base + _lowest(differs)
            differs &= differs - np.uint64(1)
        for k in range(4, count):
            positions[found + k] = base + _lowest(differs)
            differs &= differs - np.uint64(1)
        found += count
    for i in range(whole, end - begin):
        positions[found] = i
        found += old[begin + i] != new[begin + i]
    return found


@compiled
def pack_segment(
    words: Any, at: Any, length: Any, positions: Any, found: Any, d: Any, sign: Any, mask: Any,
    gaps: Any, sizes: Any, big: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Write one segment's bits from bit ``at``; the word at ``at`` is clear above it.

    Args:
        positions: u32, increasing, below ``length``; the first ``found`` count.
        d: Their differences, nonzero, mod 2**bits.
        gaps, sizes, big: Scratch, u32.

    Returns:
        (the bit after the last one written, or -1 where ``words`` has too little room; number of big steps).
    """
    if found == 0:
        return at, 0
    width = rice_width(length, found)
    num_bits = np.int64(found) * (width + 2)
    previous = np.int64(-1)
    for k in range(found):
        position = np.int64(positions[k])
        gaps[k] = position - previous - 1
        previous = position
    for k in range(found):
        num_bits += np.int64(gaps[k]) >> width
    num_big = 0
    for k in range(found):
        t = (np.int64(d[k]) ^ sign) - sign  # sign-extended
        size = abs(t)
        sizes[k] = size
        big[num_big] = k
        num_big += size > 1
    if num_big:
        big_width = rice_width(found, num_big)
        previous = np.int64(-1)
        num_bits += num_big * (big_width + 1)
        for k in range(num_big):
            at_change = np.int64(big[k])
            num_bits += (at_change - previous - 1) >> big_width
            previous = at_change
            num_bits += 2 * _log2(np.int64(sizes[at_change]) - 1) + 1
    if ((at + num_bits) >> 6) + 2 > words.size:
        return -1, 0
    for word in range((at >> 6) + 1, ((at + num_bits) >> 6) + 1):
        words[word] = 0
    at = _put_lows(words, at, gaps, found, width)
    at = _put_highs(words, at, gaps, found, width)
    at = _put_signs(words, at, d, found, sign)
    if num_big:
        previous = np.int64(-1)
        for k in range(num_big):
            at_change = np.int64(big[k])
            gaps[k] = at_change - previous - 1
            sizes[k] = sizes[at_change] - 1
            previous = at_change
        at = _put_lows(words, at, gaps, num_big, big_width)
        at = _put_highs(words, at, gaps, num_big, big_width)
        for k in range(num_big):
            at += _log2(np.int64(sizes[k]))
            words[at >> 6] |= np.uint64(1) << np.uint64(at & 63)
            at += 1
        for k in range(num_big):
            bits = _log2(np.int64(sizes[k]))
            value = np.uint64(sizes[k]) & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))
            shift = np.uint64(at & 63)
            words[at >> 6] |= value << shift
            words[(at >> 6) + 1] |= (value >> np.uint64(1)) >> (np.uint64(63) - shift)
            at += bits
    return at, num_big


@inlined
def _log2(value: Any) -> Any:
    """Floor, of an int64 from 1 to 2**31; found by counting because most values are 1."""
    found = 0
    while value > 1:
        value >>= 1
        found += 1
    return found


@compiled
def encode(
    old: Any, new: Any, start: Any, width: Any, sign: Any, mask: Any, limit: Any,
    directory: Any, words: Any, positions: Any, before: Any, after: Any, d: Any,
    gaps: Any, sizes: Any, big: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Fill ``directory`` and ``words``; returns (changes, or -1 above ``limit``; bits; dH).

    Everything from ``positions`` on is scratch of SEGMENT + BLOCK elements.
    """
    total, at = 0, 0
    dh = np.uint64(0)
    words[0] = 0
    for segment in range(directory.size):
        begin = segment * SEGMENT
        end = min(begin + SEGMENT, old.size)
        found = changed_positions(old, new, begin, end, positions)
        total += found
        if total > limit:
            return -1, 0, dh
        for k in range(found):
            before[k] = old[begin + positions[k]]
            after[k] = new[begin + positions[k]]
        differences(before[:found], after[:found], d, sign, mask)
        dh += hash_delta(positions[:found], before, after, start + np.uint64(begin), width)
        after_bit, num_big = pack_segment(
            words, at, end - begin, positions, found, d, sign, mask, gaps, sizes, big
        )  # fmt: skip
        if after_bit < 0:
            return -1, 0, dh
        directory[segment] = found | (num_big << 17) | ((after_bit - at) << 34)
        at = after_bit
    return total, at, dh


# --- decode -----------------------------------------------------------------------------------------------


@compiled
def check_directory(n: Any, directory: Any) -> tuple[Any, Any]:
    """(changes, bits) of all segments; changes are -1 when a count is larger than what it counts in."""
    changes, bits = 0, 0
    for segment in range(directory.size):
        entry = np.uint64(directory[segment])
        count = np.int64(entry & np.uint64(0x1FFFF))
        num_big = np.int64((entry >> np.uint64(17)) & np.uint64(0x1FFFF))
        if count > min(SEGMENT, n - segment * SEGMENT) or num_big > count:
            return -1, 0
        changes += count
        bits += np.int64(entry >> np.uint64(34))
    return changes, bits


@compiled
def decode(n: Any, sign: Any, mask: Any, directory: Any, data: Any, idx: Any, d_out: Any, ends: Any) -> Any:
    """Fill idx and d; returns 0, or the negative reason of a refusal.

    The caller has asked :func:`check_directory`; ``data`` holds as many bits, and eight bytes more.  ``ends`` is u32
    scratch of 2 SEGMENT.
    """
    first, at = 0, 0
    one = np.uint64(1)
    for segment in range(directory.size):
        entry = np.int64(directory[segment])
        count, num_big, end = entry & 0x1FFFF, (entry >> 17) & 0x1FFFF, at + (entry >> 34)
        if count == 0:
            if end != at:
                return BITS_LEFT
            continue
        begin = segment * SEGMENT
        length = min(SEGMENT, n - begin)
        width = rice_width(length, count)
        big_width = rice_width(count, num_big) if num_big else 0
        # The least that the planes take: reads below are inside, but for the ones that are searched.
        if at + count * (width + 2) + num_big * (big_width + 2) > end:
            return BITS_TOO_FEW
        highs = at + count * width
        signs = _find_highs(data, highs, end, count, ends)
        if signs < 0 or signs + count + num_big * (big_width + 2) > end:
            return BITS_TOO_FEW
        low = (one << np.uint64(width)) - one
        position = np.int64(-1)
        previous = np.int64(-1)
        for k in range(count):
            high = np.int64(ends[k]) - previous - 1
            previous = np.int64(ends[k])
            position += 1 + (high << width) + np.int64(_peek(data, at + k * width) & low)
            idx[first + k] = begin + position
        if position >= length:
            return OUT_OF_RUN
        for k in range(0, count, 32):
            negative = _peek(data, signs + k)
            for lane in range(min(32, count - k)):
                d_out[first + k + lane] = (1 - 2 * np.int64((negative >> np.uint64(lane)) & one)) & mask
        at = signs + count
        if num_big:
            at = _decode_big(
                data, at, end, count, num_big, big_width, sign, mask, d_out[first : first + count], ends
            )
            if at < 0:
                return at
        if at != end:
            return BITS_LEFT
        first += count
    return 0


@compiled
def _decode_big(
    data: Any,
    at: Any,
    end: Any,
    count: Any,
    num_big: Any,
    width: Any,
    sign: Any,
    mask: Any,
    d_out: Any,
    ends: Any,
) -> Any:
    """Replace the steps that are not +-1; returns the bit after them or a negative reason."""
    one = np.uint64(1)
    low = (one << np.uint64(width)) - one
    lows = at
    at = _find_highs(data, lows + num_big * width, end, num_big, ends)
    if at < 0:
        return BITS_TOO_FEW
    change = np.int64(-1)
    previous = np.int64(-1)
    for k in range(num_big):
        high = np.int64(ends[k]) - previous - 1
        previous = np.int64(ends[k])
        change += 1 + (high << width) + np.int64(_peek(data, lows + k * width) & low)
        if change >= count:
            return OUT_OF_RUN
        ends[k] = change
    # Elias gamma in two planes: the number of bits after the leading one, then those bits.
    lengths = ends[SEGMENT:]
    at = _find_highs(data, at, end, num_big, lengths)
    if at < 0:
        return BITS_TOO_FEW
    previous = np.int64(-1)
    for k in range(num_big):
        bits = np.int64(lengths[k]) - previous - 1
        previous = np.int64(lengths[k])
        if bits > 30:
            return STEP_TOO_BIG
        if at + bits > end:
            return BITS_TOO_FEW
        value = (one << np.uint64(bits)) | (_peek(data, at) & ((one << np.uint64(bits)) - one))
        at += bits
        size = np.int64(value) + 1
        at_change = ends[k]
        negative = np.int64(d_out[at_change]) != 1
        if size > sign or (
            size == sign and not negative
        ):  # the largest step has one sign: mod 2**bits they are equal
            return STEP_TOO_BIG
        d_out[at_change] = (-size if negative else size) & mask
    return at


# --- apply ------------------------------------------------------------------------------------------------


@compiled
def stage(
    bits: Any, idx: Any, d: Any, start: Any, width: Any, sign: Any, mask: Any, old_out: Any, new_out: Any
) -> Any:
    """Gather old values, compute new ones; returns dH."""
    dh = np.uint64(0)
    for first in range(0, idx.size, 4096):  # a piece that stays in the nearest cache
        last = min(first + 4096, idx.size)
        old, new, index = old_out[first:last], new_out[first:last], idx[first:last]
        for k in range(last - first):
            old[k] = bits[index[k]]
        add_differences(old, d[first:last], new, sign, mask)
        dh += hash_delta(index, old, new, start, width)
    return dh
