"""Which versions of a run may be deleted, and deleting them.

A reader that starts at a version needs the newest anchor at or before it, and every delta from there on.  So, with
``floor`` = the oldest of: the anchor that the head's chain starts from, and the anchors that leased versions start
from: everything below ``floor`` goes, everything else stays.  Half-published versions and older attempts below the
floor go with it.  A reader without a lease may find a piece gone while it reads; it starts over from the head.

:func:`plan` decides, :func:`collect` moves.  Callers: the publisher after each anchor, ``rose weights gc``.
"""

from __future__ import annotations

from collections.abc import Iterable

from rose.errors import NotFound, SectionCorrupt
from rose.weights import manifest
from rose.weights.manifest import MAX_MANIFEST_BYTES, Kind, Manifest
from rose.weights.store import Store
from rose.weights.version import WeightVersion


def plan(versions: Iterable[WeightVersion], anchors_in_use: Iterable[WeightVersion]) -> list[WeightVersion]:
    """Versions to delete, oldest first; none while no anchor is known to be in use."""
    floor = min(anchors_in_use, default=None)
    return [] if floor is None else sorted(version for version in versions if version < floor)


def collect(store: Store, run_id: str) -> list[WeightVersion]:
    """Delete what no reader can need; returns the versions deleted.

    A leased version whose manifest is gone holds nothing.  Interrupted, it may simply be called again.
    """
    head = store.get_head(run_id)
    if head is None:
        return []
    start = anchor_of(store, run_id, head.identity)
    if start is None:  # the head's own manifest cannot be read: this is no moment to delete anything
        return []
    in_use = [start]
    for version in store.leases(run_id):
        anchor = anchor_of(store, run_id, version)
        if anchor is not None:
            in_use.append(anchor)
    keys = store.list(f"{run_id}/")
    doomed = plan(manifest.versions_in(keys, run_id), in_use)
    for version in doomed:
        prefix = manifest.version_prefix(run_id, version)
        # Manifests first: a reader that comes late finds nothing rather than a version with holes.
        for key in sorted((k for k in keys if k.startswith(prefix)), key=lambda k: not k.endswith(".json")):
            store.delete(key)
    return doomed


def anchor_of(store: Store, run_id: str, version: WeightVersion) -> WeightVersion | None:
    """The anchor from which a reader reaches ``version``; None when the version is not (or no longer) there."""
    for kind in ("delta", "anchor"):
        try:
            return WeightVersion(*read_manifest(store, run_id, version, kind).anchor)
        except (NotFound, SectionCorrupt):
            continue
    return None


def read_manifest(store: Store, run_id: str, version: WeightVersion, kind: Kind) -> Manifest:
    """Fetch and check one manifest.

    Raises:
        NotFound: There is none of this kind.
        SectionCorrupt: It contradicts itself.
    """
    data = store.get(manifest.manifest_key(run_id, version, kind), max_bytes=MAX_MANIFEST_BYTES)
    return manifest.decode_manifest(data, run_id, version, kind)
