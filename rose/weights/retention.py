"""Which versions of a run may be deleted, and deleting them.

A reader that starts at a version needs the newest anchor at or before it, and every delta from there on.  ``floor`` is the oldest
anchor that is needed so: by the head, or by a version that a reader leases.  Everything below ``floor`` is deleted.  At or above it
everything stays that a chain may need; leftovers of failed publishes and failed anchors are deleted.  A reader without a lease may find
a piece deleted while it reads; it starts over from the head.

A store that is full is answered in steps (:class:`Need`), each of which deletes more than the one before, so that a run
goes on as long as one full copy and one version fit.

:func:`plan` decides, :func:`collect` moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum

from rose.errors import NotFound, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights import manifest, stored_manifests
from rose.weights.manifest import Head
from rose.weights.store import ObjectStore


class Need(IntEnum):
    """How badly room is needed; each includes the one before."""

    TIDY = 0
    """What no reader can need."""
    OVER = 1
    """Also what only leases keep: those readers start over from the head."""
    FULL = 2
    """Also what was begun above the head.  Only while nobody publishes."""
    LAST = 3
    """Also the head's own chain: until the next version, which must be an anchor, nobody new can join."""


def plan(versions: Iterable[WeightVersion], anchors_in_use: Iterable[WeightVersion]) -> list[WeightVersion]:
    """Versions to delete, oldest first; none while no anchor is known to be in use."""
    floor = min(anchors_in_use, default=None)
    return [] if floor is None else sorted(version for version in versions if version < floor)


def collect(
    store: ObjectStore,
    run_id: str,
    need: Need = Need.TIDY,
    *,
    chain: Collection[WeightVersion] | None = None,
) -> list[WeightVersion]:
    """Delete what ``need`` allows; returns the versions deleted, whole, oldest first.

    Args:
        chain: The versions from the head's anchor to the head, where the caller knows them: any other between is of a
            publish that failed, and goes.

    A leased version whose manifest is gone holds nothing; parts of an anchor stay while its version is leased, for it
    is being composed.  Interrupted, it may simply be called again.
    """
    head = store.get_head(run_id)
    if head is None:
        return []
    keys = store.list(f"{run_id}/")
    versions = list(manifest.versions_in(keys, run_id))
    if need is Need.LAST:
        doomed = [version for version in versions if version != head.identity or head.kind == "anchor"]
        _delete(store, run_id, keys, doomed)
        _delete_anchor(store, run_id, keys, head.identity)
        return doomed
    start = min(chain) if chain else anchor_of(store, run_id, head.identity)
    if start is None:  # the head's own manifest cannot be read: this is no moment to delete anything
        return []
    leased = store.leases(run_id) if need is Need.TIDY else []
    in_use = [start]
    for version in leased:
        anchor = anchor_of(store, run_id, version)
        if anchor is not None:
            in_use.append(anchor)
    doomed = plan(versions, in_use)
    doomed += [
        v for v in versions if v not in doomed and _left_over(v, keys, run_id, head, start, need, chain)
    ]
    _delete(store, run_id, keys, doomed)
    for version in versions:
        finished = manifest.manifest_key(run_id, version, "anchor") in keys
        if version not in doomed and version not in leased and version <= head.identity and not finished:
            _delete_anchor(store, run_id, keys, version)
    return doomed


def _left_over(
    version: WeightVersion,
    keys: list[str],
    run_id: str,
    head: Head,
    start: WeightVersion,
    need: Need,
    chain: Collection[WeightVersion] | None,
) -> bool:
    """Of a publish that failed, and that nobody goes on with."""
    if version > head.identity:
        return need is Need.FULL
    if version < start:  # leased readers may need it
        return False
    if chain is not None and head.identity in chain:
        return version not in chain
    names = {manifest.manifest_key(run_id, version, kind) for kind in ("delta", "anchor")}
    return names.isdisjoint(keys)


def _delete_anchor(store: ObjectStore, run_id: str, keys: list[str], version: WeightVersion) -> None:
    """An anchor that was composed of a version, or what was begun of it; the version's own delta stays."""
    first = manifest.manifest_key(run_id, version, "anchor")
    prefix = f"{manifest.version_prefix(run_id, version)}{manifest.COMPOSED}."
    for key in sorted((k for k in keys if k == first or k.startswith(prefix)), key=lambda k: k != first):
        store.delete(key)


def _delete(store: ObjectStore, run_id: str, keys: list[str], doomed: list[WeightVersion]) -> None:
    for version in doomed:
        prefix = manifest.version_prefix(run_id, version)
        # Manifests first: a reader that comes late finds nothing rather than a version with holes.
        for key in sorted((k for k in keys if k.startswith(prefix)), key=lambda k: not k.endswith(".json")):
            store.delete(key)


def held_bytes(store: ObjectStore, run_id: str) -> int:
    """Bytes of the run's objects and manifests, as the store tells them."""
    total = 0
    for key in store.list(f"{run_id}/"):
        try:
            total += store.stat(key).nbytes
        except NotFound:
            continue
    return total


def anchor_of(store: ObjectStore, run_id: str, version: WeightVersion) -> WeightVersion | None:
    """The anchor from which a reader reaches ``version``; None when the version is not (or no longer) there."""
    for kind in ("delta", "anchor"):
        try:
            return WeightVersion(*stored_manifests.read(store, run_id, version, kind).anchor)
        except (NotFound, SectionCorrupt):
            continue
    return None
