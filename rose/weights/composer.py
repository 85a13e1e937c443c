"""Compose an anchor from the one before and the deltas since: a full copy that cost the trainer nothing.

:func:`compose` reads both from the store, tensor by tensor, and writes the same state as one anchor of a version that is
published already.  Any process that reaches the store may do it; nothing of the trainer's is needed, so a slow store
delays the anchor and nobody else.  What comes out is proved before it counts: every section by its checksum, every
tensor by the state hash that the version's own delta claims, bit for bit, and where versions are signed every object by its digest.
Only then is the manifest written; a failure before that deletes what it had uploaded.

Memory: the largest tensor, two buckets, and a window of each object that is being read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from rose.errors import Conflict, NotAuthentic, NotFound, RequestError, SectionCorrupt, WeightsError
from rose.lineage import WeightVersion
from rose.weights import boxes, codec, manifest, sealed, statehash, stored_manifests
from rose.weights.buckets import Buckets
from rose.weights.manifest import ManifestSection, ObjectRef, TensorState
from rose.weights.params import WeightsParams
from rose.weights.routes import route
from rose.weights.spec import TensorSpec
from rose.weights.statehash import Bits
from rose.weights.store import Content, ObjectStore

WINDOW_BYTES = 1 << 20
"""Read at a time where sections are smaller: those of one object lie in the order in which they are needed."""


class Stopped(WeightsError):
    """Composing was given up at the caller's wish; nothing of it is left in the store."""


def compose(
    store: ObjectStore,
    run_id: str,
    target: WeightVersion,
    params: WeightsParams,
    stopped: Callable[[], bool] = lambda: False,
) -> manifest.Manifest:
    """Write the anchor of ``target``, which is published as a delta; returns its manifest.

    Args:
        params: Of these, ``bucket_bytes``.
        stopped: Asked before every tensor.

    Raises:
        Stopped: ``stopped`` said so.
        WeightsError: Anchor and deltas do not lead to the state that ``target`` claims, or are damaged or gone.
        CapacityError: The store cannot be reached or is full (507).
        After any of these the store holds nothing of the new anchor, if it can still be reached.
    """
    try:
        newest = stored_manifests.read(store, run_id, target, "delta")
        steps = route(None, newest, lambda version, kind: stored_manifests.read(store, run_id, version, kind))
    except NotFound as error:
        raise WeightsError(f"the chain of {target} is not whole: {error}", field=run_id) from error
    sources = [_Source(store, step) for step in steps]
    anchor = steps[0]
    sections: list[ManifestSection] = []
    bound = sealed.is_sealed(store)
    with Buckets(store, run_id, target, manifest.COMPOSED, params.bucket_bytes, bound=bound) as buckets:
        try:
            for tensor in newest.tensors:
                if stopped():
                    raise Stopped(f"the anchor of {target} was given up", field=run_id)
                spec = TensorSpec(tensor.name, tensor.dtype, tensor.shape)
                bits = _bits(spec, sources)
                if statehash.to_hex(statehash.hash_bits(bits)) != tensor.h_after:
                    raise WeightsError(
                        f"anchor {anchor.identity} and the deltas since do not lead to {target}",
                        field=spec.name,
                    )
                sections += _written(spec, bits, sources[0].of(spec.name), buckets)
            for source in sources:
                source.close()
            record = _described(newest, buckets.close(), sections)
            _put(store, manifest.manifest_key(run_id, target, "anchor"), record)
        except BaseException:
            buckets.discard()
            raise
    return record


def _put(store: ObjectStore, key: str, record: manifest.Manifest) -> None:
    data = sealed.stored_manifest(store, record)
    try:
        store.put_new(key, data)
    except Conflict:
        try:
            stored_manifests.read(store, record.run_id, record.identity, "anchor")
        except SectionCorrupt as error:
            if not sealed.remove_forged(store, key, error):
                raise
            store.put_new(key, data)
        else:
            raise


@dataclass(slots=True)
class _Reading:
    """How far an object has been read: once, from its beginning, so that what is used is what its digest is of."""

    num_left: int
    """Sections that nobody has asked for."""
    hasher: Any
    """None: no digest binds it."""
    begin: int = 0
    window: Content = b""

    @property
    def end(self) -> int:
        return self.begin + len(self.window)


class _Source:
    """One version on the way: its sections by tensor, and their payloads, checked."""

    def __init__(self, store: ObjectStore, record: manifest.Manifest) -> None:
        self._store, self.record = store, record
        self._by_tensor = record.sections_by_tensor()
        for reference in record.objects:
            sealed.require_bound(store, reference)
        counts = Counter(section.object for section in record.sections)
        self._readings = {
            number: _Reading(counts[number], blake3() if reference.blake3 else None)
            for number, reference in enumerate(record.objects)
        }

    def of(self, tensor: str) -> list[ManifestSection]:
        return self._by_tensor.get(tensor, [])

    def payload(self, section: ManifestSection) -> memoryview:
        """Raises WeightsError when it is damaged, replaced or gone; of what was replaced, :meth:`close` at the latest."""
        reference, reading = self.record.objects[section.object], self._readings[section.object]
        if section.offset < reading.begin:  # not in the order of its object
            whole = self._read(reference, 0, reference.nbytes)
            if not sealed.check_content(reference, whole):
                raise SectionCorrupt("is damaged", field=reference.key)
            found = memoryview(whole)[section.offset : section.offset + section.nbytes]
        else:
            if section.offset + section.nbytes > reading.end:
                self._read_on(reference, reading, section)
            offset = section.offset - reading.begin
            found = memoryview(reading.window)[offset : offset + section.nbytes]
        if manifest.digest(found) != section.xxh3:
            raise SectionCorrupt("checksum is wrong", field=reference.key)
        reading.num_left -= 1
        if not reading.num_left:
            self._finish(reference, reading)
        return found

    def close(self) -> None:
        """Raises WeightsError where something that was used is not what its manifest binds."""
        for number, reading in self._readings.items():
            if reading.end:
                self._finish(self.record.objects[number], reading)

    def _read_on(self, reference: ObjectRef, reading: _Reading, section: ManifestSection) -> None:
        """Move the window to the section."""
        kept = bytes(reading.window[section.offset - reading.begin :])
        if reading.hasher is not None:
            self._hash_up_to(reference, reading, section.offset)
        at = max(reading.end, section.offset)
        count = min(max(section.offset + section.nbytes - at, WINDOW_BYTES), reference.nbytes - at)
        fresh = self._read(reference, at, count)
        if reading.hasher is not None:
            reading.hasher.update(fresh)
        reading.begin, reading.window = section.offset, kept + fresh

    def _hash_up_to(self, reference: ObjectRef, reading: _Reading, stop: int) -> None:
        """Bytes that no section has."""
        while reading.end < stop:
            piece = self._read(reference, reading.end, min(WINDOW_BYTES, stop - reading.end))
            reading.hasher.update(piece)
            reading.begin, reading.window = reading.end, piece

    def _finish(self, reference: ObjectRef, reading: _Reading) -> None:
        if reading.hasher is not None:
            self._hash_up_to(reference, reading, reference.nbytes)
            if reading.hasher.hexdigest() != reference.blake3:
                raise NotAuthentic("is not what was signed", field=reference.key)
            reading.hasher = None
        reading.begin, reading.window = reference.nbytes, b""

    def _read(self, reference: ObjectRef, offset: int, nbytes: int) -> Content:
        try:
            return self._store.get_range(reference.key, offset, nbytes)
        except NotFound as error:
            raise WeightsError("is gone", field=reference.key) from error
        except RequestError as error:
            if error.status == 416:
                raise SectionCorrupt("is shorter than its manifest says", field=reference.key) from error
            raise


def _bits(spec: TensorSpec, sources: list[_Source]) -> Bits:
    """All bits of a tensor after the last of ``sources``, flat."""
    bits = np.zeros(spec.num_elements, spec.bits_dtype)
    for source in sources:
        for section in source.of(spec.name):
            payload = source.payload(section)
            if section.encoding == "raw":
                place = boxes.view(section.box, bits)
                place[:] = np.frombuffer(payload, spec.bits_dtype).reshape(place.shape)
            else:
                delta = codec.decode(payload, section.num_elements, spec.bits_dtype)
                moved = codec.Delta(idx=boxes.positions(section.box, delta.idx), d=delta.d)
                codec.apply(bits[section.start : section.box.end], moved, start=section.start)
    return bits


def _written(
    spec: TensorSpec, bits: Bits, cut: list[ManifestSection], buckets: Buckets
) -> Iterator[ManifestSection]:
    """The tensor as raw sections, cut as the anchor before was."""
    for old in cut:
        piece = np.ascontiguousarray(boxes.view(old.box, bits)).reshape(-1)
        payload = piece.view(np.uint8).data
        place, offset = buckets.add(payload)
        yield ManifestSection(
            object=place,
            offset=offset,
            nbytes=len(payload),
            xxh3=manifest.digest(payload),
            encoding="raw",
            tensor=spec.name,
            start=old.start,
            num_elements=old.num_elements,
            num_changed=old.num_elements,
            dh=statehash.to_hex(boxes.hash_bits(old.box, piece)),
            run=old.run,
            stride=old.stride,
        )


def _described(
    newest: manifest.Manifest, objects: tuple[ObjectRef, ...], sections: list[ManifestSection]
) -> manifest.Manifest:
    return msgspec.structs.replace(
        newest,
        kind="anchor",
        base=None,
        anchor=(newest.attempt, newest.version),
        objects=objects,
        sections=tuple(sections),
        tensors=tuple(
            TensorState(name=t.name, dtype=t.dtype, shape=t.shape, h_before=None, h_after=t.h_after)
            for t in newest.tensors
        ),
        num_changed=newest.num_elements,
        bytes_sent=sum(reference.nbytes for reference in objects),
        density=1.0,
        created_s=time.time(),
    )
