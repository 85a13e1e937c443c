"""The chain of a run's head: the anchor that it starts at, and the deltas from there."""

from __future__ import annotations

from dataclasses import dataclass

from rose.lineage import WeightVersion
from rose.weights import manifest, stored_manifests
from rose.weights.manifest import Kind, Manifest
from rose.weights.routes import route
from rose.weights.store import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """What the head needs.

    Args:
        anchor: Where the chain starts.
        deltas: Versions after it and their bytes, manifests included; the last is the head.
        bytes_anchor: Of the anchor, its manifest included.
    """

    anchor: WeightVersion
    deltas: tuple[tuple[WeightVersion, int], ...]
    bytes_anchor: int

    @property
    def head(self) -> WeightVersion:
        return self.deltas[-1][0] if self.deltas else self.anchor

    @property
    def bytes_deltas(self) -> int:
        return sum(nbytes for _, nbytes in self.deltas)

    @property
    def nbytes(self) -> int:
        return self.bytes_anchor + self.bytes_deltas

    @property
    def versions(self) -> frozenset[WeightVersion]:
        return frozenset({self.anchor, *(version for version, _ in self.deltas)})

    def from_anchor(self, anchor: WeightVersion) -> Chain:
        """The same head reached from a newer anchor."""
        deltas = tuple((version, nbytes) for version, nbytes in self.deltas if version > anchor)
        return Chain(anchor=anchor, deltas=deltas, bytes_anchor=self.bytes_anchor)

    def then(self, version: WeightVersion, nbytes: int) -> Chain:
        return Chain(
            anchor=self.anchor, deltas=(*self.deltas, (version, nbytes)), bytes_anchor=self.bytes_anchor
        )


def chain_of(store: ObjectStore, run_id: str, newest: Manifest) -> Chain:
    """What leads to a head that another process published, read from the store.

    Raises:
        NotFound, SectionCorrupt: It is not whole.
    """

    def read(version: WeightVersion, kind: Kind) -> Manifest:
        return stored_manifests.read(store, run_id, version, kind)

    anchor, *steps = route(None, newest, read)
    sizes = [step.bytes_sent + len(manifest.encode(step)) for step in (anchor, *steps)]
    deltas = tuple((step.identity, nbytes) for step, nbytes in zip(steps, sizes[1:], strict=True))
    return Chain(anchor=anchor.identity, deltas=deltas, bytes_anchor=sizes[0])
