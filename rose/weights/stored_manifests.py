"""Manifests in a store: one is read and checked, and one is written once."""

from __future__ import annotations

from rose.errors import Conflict, NotFound, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights import manifest, sealed, standing
from rose.weights.manifest import MAX_STORED_BYTES, Kind, Manifest, ObjectRef
from rose.weights.store import ObjectStore


def read(store: ObjectStore, run_id: str, version: WeightVersion, kind: Kind) -> Manifest:
    """Fetch and check one manifest.

    Raises:
        NotFound: There is none of this kind.
        SectionCorrupt: It contradicts itself, or is not signed where it has to be.
    """
    data = store.get(manifest.manifest_key(run_id, version, kind), max_bytes=MAX_STORED_BYTES)
    return manifest.decode_manifest(data, run_id, version, kind)


def write(store: ObjectStore, record: Manifest) -> ObjectRef:
    """Write a version's manifest once; what an earlier try wrote counts if it means the same.

    Returns:
        How a head names it.

    Raises:
        VersionRefused: An earlier try wrote other weights.
    """
    for kind in ("delta", "anchor"):
        _check_same(store, record, kind)
    key = manifest.manifest_key(record.run_id, record.identity, record.kind)
    data = sealed.stored_manifest(store, record)
    try:
        store.put_new(key, data)
    except Conflict:
        _check_same(store, record, record.kind)
        data = store.get(key, max_bytes=MAX_STORED_BYTES)
    return sealed.reference_of(store, key, data)


def _check_same(store: ObjectStore, record: Manifest, kind: Kind) -> None:
    try:
        existing = read(store, record.run_id, record.identity, kind)
    except NotFound:
        return
    except SectionCorrupt as error:
        if sealed.remove_forged(store, manifest.manifest_key(record.run_id, record.identity, kind), error):
            return
        raise
    standing.same_weights(existing, record)
