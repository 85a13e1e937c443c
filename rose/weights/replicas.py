"""Are the copies that several ranks hold of a tensor still equal?

Each of them is published by one rank, spread by load: ranks that drifted apart (a wrapper for data parallelism forgotten, an
all-reduce missed) would be published as a mixture that is nobody's model, and every checksum of it would be right.  So at
every publish some of what several ranks hold is hashed by each of them, as the engines would get it, and rank 0 compares.
Which pieces these are follows from their names and the number of publishes alone, so nobody has to be told.

Pure, but for reading the pieces.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from rose.errors import WeightsError
from rose.weights import statehash
from rose.weights.layout import HeldBoxes
from rose.weights.source import TensorBox

_AT_LEAST = 8
"""Pieces at a time, about: a small model is compared whole."""


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds of a piece that others hold too."""

    name: str
    box: tuple[int, int, int, int]
    hash: str


def due(claims: Sequence[HeldBoxes], shared: Sequence[int], turn: int, every: int) -> list[int]:
    """Which of the ``shared`` claims are compared now: about one in ``every``, on each rank the same, and all in ``every`` turns.

    Args:
        claims: What this rank holds.
        shared: Numbers of those that another rank holds too.
        turn: How many versions were published before.
        every: :func:`turns`.
    """
    return [
        number
        for number in shared
        if zlib.crc32(f"{claims[number].name} {claims[number].box}".encode()) % every == turn % every
    ]


def turns(num_shared: int, most: int) -> int:
    """Over how many versions the comparison is spread."""
    return max(1, min(most, num_shared // _AT_LEAST))


def copy_of(claim: HeldBoxes, piece: TensorBox, step: int) -> Copy:
    """The hash of one piece as it is now, read ``step`` elements at a time."""
    total = 0
    for start in range(0, piece.box.num_elements, step):
        bits = piece.bits(start, min(start + step, piece.box.num_elements))
        total = statehash.add(total, statehash.hash_bits(bits, start=start))
    return Copy(claim.name, claim.box, statehash.to_hex(total))


def compare(copies: Sequence[Sequence[Copy]]) -> None:
    """Raises WeightsError where two ranks hold other bits of one piece.

    Args:
        copies: By rank.
    """
    seen: dict[tuple[str, tuple[int, int, int, int]], tuple[int, str]] = {}
    for rank, held in enumerate(copies):
        for copy in held:
            first, found = seen.setdefault((copy.name, copy.box), (rank, copy.hash))
            if found != copy.hash:
                raise WeightsError(
                    f"ranks {first} and {rank} hold other values of it, and each should hold a copy",
                    field=copy.name,
                    fix="make the replicas equal (is a DistributedDataParallel wrapper missing?), or "
                    "WeightsParams(check_replicas=False) to publish one rank's",
                )
