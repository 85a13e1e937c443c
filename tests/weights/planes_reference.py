"""The ``planes`` format in plain Python, one bit at a time: what the compiled codec is compared with.

It follows the text of :mod:`rose.weights.codec` and shares no code with it.  :func:`payload` takes any planes, so that
tests can also build what no encoder writes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction

SEGMENT = 65_536
HEADER = struct.Struct("<BBHII")
PLANES = ("gap_low", "gap_high", "sign", "big_low", "big_high", "size_high", "size_low")


def key(u: int, bits: int = 16) -> int:
    """Total-order key of raw bits."""
    top = 1 << (bits - 1)
    return u ^ (2 * top - 1) if u & top else u | top


def step(old: int, new: int, bits: int = 16) -> int:
    """Signed step in units of the last place."""
    t = (key(new, bits) - key(old, bits)) % (1 << bits)
    return t - (1 << bits) if t >> (bits - 1) else t


def width_of(places: int, taken: int) -> int:
    """The published rule, in fractions."""
    fitting = [w for w in range(40) if taken * 2**w <= Fraction(77, 160) * (2 * places - taken)]
    return max(fitting, default=0)


def number(value: int, width: int) -> str:
    """Least significant bit first."""
    return "".join(str(value >> bit & 1) for bit in range(width))


def gaps(places: Sequence[int], width: int) -> tuple[str, str]:
    """Low and high plane of increasing places."""
    lows, highs = "", ""
    for previous, place in zip([-1, *places], places, strict=False):
        gap = place - previous - 1
        lows += number(gap, width)
        highs += "0" * (gap >> width) + "1"
    return lows, highs


def planes(positions: Sequence[int], steps: Sequence[int], length: int) -> dict[str, str]:
    """The seven planes of one segment, as text of zeros and ones."""
    if not positions:
        return dict.fromkeys(PLANES, "")
    low, high = gaps(positions, width_of(length, len(positions)))
    big = [k for k, t in enumerate(steps) if abs(t) > 1]
    big_low, big_high = gaps(big, width_of(len(positions), len(big))) if big else ("", "")
    size_high, size_low = "", ""
    for k in big:
        size = abs(steps[k]) - 1
        width = int(math.log2(size))
        size_high += "0" * width + "1"
        size_low += number(size, width)
    sign = "".join("1" if t < 0 else "0" for t in steps)
    return dict(zip(PLANES, (low, high, sign, big_low, big_high, size_high, size_low), strict=True))


def directory_entry(changes: int, big: int, bits: int) -> int:
    return changes | big << 17 | bits << 34


def payload(num_elements: int, segments: Sequence[dict[str, str]], **header: int) -> bytes:
    """Header, directory and bits.  ``header`` replaces fields: format, bits, zero, elements, changes, and
    ``entry`` the first segment's directory entry."""
    entries, text = [], ""
    for segment in segments:
        joined = "".join(segment.values())
        changes, big = len(segment["sign"]), segment["size_high"].count("1")
        entries.append(directory_entry(changes, big, len(joined)))
        text += joined
    changes = sum(entry & 0x1FFFF for entry in entries)
    if "entry" in header:
        entries[0] = header.pop("entry")
    fields = {"format": 2, "bits": 16, "zero": 0, "elements": num_elements, "changes": changes} | header
    text += "0" * (-len(text) % 8)
    stored = bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8))
    return HEADER.pack(*fields.values()) + struct.pack(f"<{len(entries)}Q", *entries) + stored


def encode(old: Sequence[int], new: Sequence[int], bits: int = 16) -> bytes:
    """What the codec must write, byte for byte."""
    segments = []
    for begin in range(0, len(old), SEGMENT):
        pairs = list(zip(old[begin : begin + SEGMENT], new[begin : begin + SEGMENT], strict=True))
        positions = [i for i, (a, b) in enumerate(pairs) if a != b]
        segments.append(planes(positions, [step(*pairs[i], bits) for i in positions], len(pairs)))
    return payload(len(old), segments, bits=bits)
