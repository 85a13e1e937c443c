"""What one trainer rank last published, and what has changed since: the pieces of its shard, as bits in host memory.

The publisher drives it: :meth:`Baseline.hold` once, then for every version :meth:`Baseline.changes` (encode and
upload), and :meth:`Baseline.advance` only after the version is durable.  A fragment that goes raw is written into
the baseline at once, to save a second copy; it counts as *dirty* until the head has moved, and a dirty fragment
goes raw again.  So after any failure the next version is still a correct step from what readers hold.

It decides nothing about versions and never talks to other ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from rose.weights import boxes, codec, ending, manifest, statehash
from rose.weights.boxes import Box
from rose.weights.buckets import Buckets
from rose.weights.manifest import Encoding, ManifestSection
from rose.weights.params import WeightsParams
from rose.weights.source import TensorBox
from rose.weights.spec import TensorSpec
from rose.weights.statehash import Bits

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Fragment:
    """A part of one piece that is encoded on its own: ``bits[start:stop]`` of the piece, and where that lies."""

    start: int
    stop: int
    box: Box
    h: int = 0
    """State hash as last published."""
    dirty: bool = True
    """The baseline's bits are not the published ones."""


@dataclass(slots=True)
class Held:
    """One piece of the baseline."""

    spec: TensorSpec
    box: Box
    bits: Bits
    fragments: list[Fragment]


@dataclass(slots=True)
class Change:
    """What a fragment needs to become what the trainer has now."""

    held: Held
    fragment: Fragment
    h_after: int
    num_changed: int
    encoding: Encoding | None = None
    """None: unchanged."""
    payload: bytes = b""
    """Of ``planes``; raw bits are in the baseline already."""
    section: ManifestSection | None = None


class Baseline:
    """See the module.  Memory: this rank's shard in the engines' type.  Used by one thread at a time."""

    def __init__(self, params: WeightsParams) -> None:
        self._params = params
        self.held: list[Held] = []
        self._scrubbed = 0
        self._there = True
        """Tensors on a GPU are encoded there."""

    @property
    def num_elements(self) -> int:
        return sum(held.box.num_elements for held in self.held)

    def hold(self, pieces: Sequence[TensorBox]) -> None:
        """Make room for ``pieces``; later versions must bring the same ones."""
        self.held = []
        for piece in pieces:
            fragments = [
                Fragment(begin, begin + box.num_elements, box)
                for begin, box in boxes.cut(piece.box, self._params.fragment_elements)
            ]
            bits = np.empty(piece.box.num_elements, piece.spec.bits_dtype)
            self.held.append(Held(piece.spec, piece.box, bits, fragments))

    def changes(self, pieces: Sequence[TensorBox], whole: bool, buckets: Buckets) -> Iterator[Change]:
        """Encode and upload every fragment, in order; several at a time when there are threads for it."""
        work = [
            (piece, held, fragment)
            for piece, held in zip(pieces, self.held, strict=True)
            for fragment in held.fragments
        ]
        num_threads = self._params.num_threads
        for begin in range(0, len(work), num_threads):  # a window: results wait for their upload
            batch = [partial(self._change, *item, whole) for item in work[begin : begin + num_threads]]
            if len(batch) == 1:
                change = batch[0]()
                _upload(change, buckets)
                yield change
                continue
            encoded = [ending.begin(encode, "rose-encode") for encode in batch]
            try:
                for each in encoded:
                    change = each.result()
                    _upload(change, buckets)
                    yield change
            finally:
                wait(encoded)  # nothing reads the trainer's tensors any more

    def _change(self, piece: TensorBox, held: Held, fragment: Fragment, whole: bool) -> Change:
        old = held.bits[fragment.start : fragment.stop]
        sparse = held.spec.sparse_codec and not (whole or fragment.dirty)
        if sparse and self._there and piece.read_there is not None and fragment.box.contiguous:
            try:
                change = self._sparse_there(piece.read_there, held, fragment, old)
                if change is not None:
                    return change
                sparse = False
            except Exception as error:  # noqa: BLE001 - no compiler, no memory: the host can do it
                _log.warning(
                    "the weights are encoded by the host from now on, not on their device: %r", error
                )
                self._there = False
        new = piece.bits(fragment.start, fragment.stop)
        if whole or fragment.dirty:
            num_changed = new.size
        else:
            if sparse:
                change = self._sparse(held, fragment, old, new)
                if change is not None:
                    return change
            num_changed = int(np.count_nonzero(old != new))
            if not num_changed:
                return Change(held, fragment, fragment.h, 0)
        fragment.dirty = True
        old[:] = new
        return Change(held, fragment, boxes.hash_bits(fragment.box, old), num_changed, "raw")

    def _sparse_there(
        self, read: Callable[[int, int], Any], held: Held, fragment: Fragment, old: Bits
    ) -> Change | None:
        """The same where the trainer's tensor is."""
        new = read(fragment.start, fragment.stop)
        from rose.weights import device  # torch and Triton: a trainer on the host needs neither

        start, limit = fragment.box.start, self._limit(old)
        encoded = device.encode_against(old, new, start=start, max_changes=limit)
        return self._as_change(held, fragment, old, encoded)

    def _sparse(self, held: Held, fragment: Fragment, old: Bits, new: Bits) -> Change | None:
        """None when raw is the better way."""
        encoded = codec.encode(old, new, start=fragment.box.start, max_changes=self._limit(old))
        if encoded is not None and encoded.num_changed and not fragment.box.contiguous:
            # The codec numbers elements by the box, the hash by the tensor.
            index = codec.decode(encoded.data, old.size, old.dtype).idx
            at = boxes.positions(fragment.box, index)
            dh = statehash.delta_hash(at, old[index], new[index], start=fragment.box.start)
            encoded = replace(encoded, dh=dh)
        return self._as_change(held, fragment, old, encoded)

    def _limit(self, old: Bits) -> int:
        """Changes from which on raw is the better way whatever their payload."""
        return int(self._params.raw_density * old.size)

    def _as_change(
        self, held: Held, fragment: Fragment, old: Bits, encoded: codec.Encoded | None
    ) -> Change | None:
        if encoded is None or len(encoded.data) >= old.nbytes:
            return None
        if not encoded.num_changed:
            return Change(held, fragment, fragment.h, 0)
        h_after = statehash.add(fragment.h, encoded.dh)
        return Change(held, fragment, h_after, encoded.num_changed, "planes", encoded.data)

    def make_whole(self, changes: Sequence[Change], buckets: Buckets) -> None:
        """Send raw what has not gone raw yet: the version becomes an anchor."""
        for change in changes:
            if change.encoding != "raw":
                _apply(change)
                change.encoding, change.payload = "raw", b""
                _upload(change, buckets)
            _describe_as_anchor(change)

    def scrub(self, share: float) -> bool:
        """Prove the memory of the next ``share`` of the fragments, in turn; False when it is not what was published.

        A delta made from damaged memory fits no reader.
        """
        every = [(held, fragment) for held in self.held for fragment in held.fragments]
        for _ in range(min(len(every), math.ceil(share * len(every)))):
            held, fragment = every[self._scrubbed % len(every)]
            self._scrubbed += 1
            bits = held.bits[fragment.start : fragment.stop]
            if not fragment.dirty and boxes.hash_bits(fragment.box, bits) != fragment.h:
                return False
        return True

    def advance(self, changes: Sequence[Change]) -> None:
        """The head has moved: the baseline becomes what was published."""
        for change in changes:
            # Dirty until applied: an interrupt in between costs a raw fragment, no more.
            change.fragment.dirty = change.fragment.dirty or change.encoding == "planes"
            change.fragment.h = change.h_after
        for change in changes:
            if change.encoding == "planes":
                _apply(change)
            change.fragment.dirty = False

    def adopt(self, pieces: Sequence[TensorBox]) -> None:
        """Take ``pieces`` as what is published; :meth:`forget` when that turns out wrong."""
        for piece, held in zip(pieces, self.held, strict=True):
            for fragment in held.fragments:
                bits = held.bits[fragment.start : fragment.stop]
                bits[:] = piece.bits(fragment.start, fragment.stop)
                fragment.h, fragment.dirty = boxes.hash_bits(fragment.box, bits), False

    def holds(self, pieces: Sequence[TensorBox]) -> bool:
        """Whether the published state is that of ``pieces``."""
        return all(
            boxes.hash_bits(fragment.box, piece.bits(fragment.start, fragment.stop)) == fragment.h
            for piece, held in zip(pieces, self.held, strict=True)
            for fragment in held.fragments
        )

    def forget(self) -> None:
        """Nothing in memory counts as published."""
        for held in self.held:
            for fragment in held.fragments:
                fragment.dirty = True

    def state(self) -> dict[str, int]:
        """State hash of what this rank holds of each tensor, as published."""
        found: dict[str, int] = {}
        for held in self.held:
            total = sum(fragment.h for fragment in held.fragments)
            found[held.spec.name] = statehash.add(found.get(held.spec.name, 0), total)
        return found


def state_after(changes: Sequence[Change]) -> dict[str, int]:
    """State hash of this rank's part of each tensor once ``changes`` are applied."""
    found: dict[str, int] = {}
    for change in changes:
        name = change.held.spec.name
        found[name] = statehash.add(found.get(name, 0), change.h_after)
    return found


def _upload(change: Change, buckets: Buckets) -> None:
    if change.encoding is None:
        return
    held, fragment = change.held, change.fragment
    raw = held.bits[fragment.start : fragment.stop].view(np.uint8).data
    payload = raw if change.encoding == "raw" else change.payload
    place, offset = buckets.add(payload)
    strided = not fragment.box.contiguous
    change.section = ManifestSection(
        object=place,
        offset=offset,
        nbytes=len(payload),
        xxh3=manifest.digest(payload),
        encoding=change.encoding,
        tensor=held.spec.name,
        start=fragment.box.start,
        num_elements=fragment.box.num_elements,
        num_changed=change.num_changed,
        dh=statehash.to_hex(statehash.subtract(change.h_after, fragment.h)),
        run=fragment.box.run if strided else 0,
        stride=fragment.box.stride if strided else 0,
    )


def _apply(change: Change) -> None:
    """Bring the baseline's fragment to the trainer's state, from our own payload."""
    if change.encoding == "planes":
        fragment = change.fragment
        fragment.dirty = True
        bits = change.held.bits[fragment.start : fragment.stop]
        codec.apply(bits, codec.decode(change.payload, bits.size, bits.dtype))


def _describe_as_anchor(change: Change) -> None:
    """The same bytes, described as a step from nothing."""
    assert change.section is not None
    change.section = msgspec.structs.replace(
        change.section, num_changed=change.section.num_elements, dh=statehash.to_hex(change.h_after)
    )
