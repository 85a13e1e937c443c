"""Who publishes what: from what every trainer rank holds to one owner for each piece of each tensor.

A piece that several ranks hold (replicated norms, data-parallel copies) is published by one of them, the one with
the least to publish so far, and compared now and then (:mod:`rose.weights.replicas`).  :func:`assign` refuses a division that overlaps or leaves a hole: a tensor that nobody
publishes whole would be found by no checksum.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rose.errors import WeightsError
from rose.weights import boxes
from rose.weights.boxes import Box
from rose.weights.source import TensorBox
from rose.weights.spec import TensorSpec


class HeldBoxes(msgspec.Struct, frozen=True, array_like=True):
    """One piece that a rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: tuple[int, int, int, int]
    """``Box``'s four numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLayout:
    """Args:
    specs: Every tensor of the model, in the order in which the ranks named them.
    owned: By rank, numbers of the claims that it publishes, ascending.
    shared: By rank, numbers of the claims that another rank has too, ascending.
    """

    specs: dict[str, TensorSpec]
    owned: list[list[int]]
    shared: list[list[int]]


def claims_of(pieces: Sequence[TensorBox]) -> list[HeldBoxes]:
    return [
        HeldBoxes(
            piece.spec.name,
            piece.spec.dtype,
            piece.spec.shape,
            (piece.box.start, piece.box.num_elements, piece.box.run, piece.box.stride),
        )
        for piece in pieces
    ]


def assign(claims: Sequence[Sequence[HeldBoxes]]) -> ShardLayout:
    """Choose an owner for every piece.

    Args:
        claims: By rank.

    Raises:
        WeightsError: Ranks describe a tensor differently, or its pieces overlap or leave a hole.
    """
    specs: dict[str, TensorSpec] = {}
    holders: dict[tuple[str, tuple[int, int, int, int]], list[tuple[int, int]]] = {}
    for rank, held in enumerate(claims):
        for number, claim in enumerate(held):
            spec = TensorSpec(claim.name, claim.dtype, claim.shape)
            if specs.setdefault(claim.name, spec) != spec:
                raise WeightsError(
                    f"rank {rank} says {spec.dtype}{list(spec.shape)}, an earlier rank "
                    f"{specs[claim.name].dtype}{list(specs[claim.name].shape)}",
                    field=claim.name,
                    fix="a part of a tensor is given as a Shard or a DTensor",
                )
            holders.setdefault((claim.name, claim.box), []).append((rank, number))
    by_tensor: dict[str, list[Box]] = {name: [] for name in specs}
    for name, box in holders:
        if box[1]:
            by_tensor[name].append(Box(*box))
    for name, found in by_tensor.items():
        wrong = boxes.problem(found, specs[name].num_elements, complete=True)
        if wrong is not None:
            raise WeightsError(wrong, field=name, fix="check the offsets and shapes that the ranks give")
    owned: list[list[int]] = [[] for _ in claims]
    shared: list[list[int]] = [[] for _ in claims]
    load_bytes = [0] * len(claims)
    for (name, box), ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        rank, number = min(ranks, key=lambda holder: (load_bytes[holder[0]], holder[0]))
        owned[rank].append(number)
        load_bytes[rank] += box[1] * specs[name].width_bytes
        for rank, number in ranks if len(ranks) > 1 and box[1] else ():
            shared[rank].append(number)
    return ShardLayout(
        specs=specs,
        owned=[sorted(numbers) for numbers in owned],
        shared=[sorted(numbers) for numbers in shared],
    )
