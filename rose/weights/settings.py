"""A publisher's settings against the model that it is given: what would be ignored without a word, or fail much later."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from rose.units import format_bytes
from rose.weights.params import WeightsParams
from rose.weights.ranks import StoreFull
from rose.weights.source import TensorBox
from rose.weights.spec import TensorSpec

_log = logging.getLogger(__name__)
_HALVES = {"F16": "float16", "BF16": "bfloat16"}


def check(params: WeightsParams, specs: Mapping[str, TensorSpec]) -> None:
    """Log a warning for each pattern of ``keep`` that matches no tensor, and for a store that cannot hold two anchors at once."""
    for pattern in params.keep:
        if not any(fnmatchcase(name, pattern) for name in specs):
            _log.warning("weights.keep: no tensor is called %s", pattern)
    copies_bytes = 2 * _copy_bytes(specs)
    if params.max_store_bytes is not None and params.max_store_bytes < copies_bytes:
        _log.warning(
            "weights.max_store_bytes: %s is less than two full copies, %s: no anchor fits beside the one before, and versions go whole now and then",
            format_bytes(params.max_store_bytes),
            format_bytes(copies_bytes),
        )


def say_of_rounding(pieces: Sequence[TensorBox]) -> None:
    """Floats of 16 bits that become the other kind: an engine of the model's own type refuses them."""
    moved = [
        piece
        for piece in pieces
        if piece.own in _HALVES and piece.spec.dtype in _HALVES and piece.own != piece.spec.dtype
    ]
    if moved:
        first = moved[0]
        _log.warning(
            "%d tensors are %s and are published as %s, %s first: for engines of %s say WeightsParams(cast=%r)",
            len({piece.spec.name for piece in moved}),
            first.own,
            first.spec.dtype,
            first.spec.name,
            _HALVES[first.own],
            first.own,
        )


def too_large(error: StoreFull, specs: Mapping[str, TensorSpec]) -> StoreFull:
    """The store is full with nothing left to delete."""
    copy = f"; a full copy of this model takes {format_bytes(_copy_bytes(specs))}" if specs else ""
    return StoreFull(f"{error.message}, and nothing is left to delete{copy}", field=error.field)


def _copy_bytes(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs.values())
