"""What a publisher's ranks say to each other in its rounds (:func:`rose.weights.ranks.agree`), and how parts add up.

Messages are JSON.  It decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from rose.lineage import WeightVersion
from rose.weights import statehash
from rose.weights.layout import HeldBoxes
from rose.weights.manifest import SCHEMA, Base, Head, Kind, Manifest, ManifestSection, ObjectRef, TensorState
from rose.weights.replicas import Copy
from rose.weights.spec import TensorSpec


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    identity: str
    published: str | None
    pending: Head | None
    damaged: bool
    claims: list[HeldBoxes] | None
    """At the first publish: what this rank holds."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    head: Head | None
    damaged: bool
    bound: bool
    """Objects are named with their BLAKE3 digests."""
    owned: list[list[int]] | None
    shared: list[list[int]] | None = None
    turns: int = 1
    """Over how many versions the comparison of what is shared is spread."""


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    num_changed: int
    copies: list[Copy] = []


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    num_changed: int


class RankShare(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of a version."""

    objects: tuple[ObjectRef, ...]
    sections: tuple[ManifestSection, ...]
    before: dict[str, str]
    after: dict[str, str]


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A version whose manifest is written."""

    head: Head
    anchor: tuple[int, int]
    bytes_dense: int
    bytes_sent: int
    num_elements: int
    state: dict[str, str]


class State(msgspec.Struct, frozen=True, kw_only=True):
    state: dict[str, str]


class Nothing(msgspec.Struct, frozen=True):
    pass


ZERO = statehash.to_hex(0)


def added(states: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """State hashes of the parts, added up by tensor."""
    total: dict[str, int] = {}
    for state in states:
        for name, text in state.items():
            total[name] = statehash.add(total.get(name, 0), statehash.from_hex(text))
    return {name: statehash.to_hex(h) for name, h in total.items()}


def merged(parts: Sequence[RankShare], specs: Mapping[str, TensorSpec]) -> tuple[ManifestSection, ...]:
    """All ranks' sections, by tensor and place, numbered by the objects of all ranks."""
    found: list[ManifestSection] = []
    num_objects = 0
    for part in parts:
        found += [
            msgspec.structs.replace(section, object=section.object + num_objects) for section in part.sections
        ]
        num_objects += len(part.objects)
    order = {name: number for number, name in enumerate(specs)}
    return tuple(sorted(found, key=lambda section: (order[section.tensor], section.start)))


def manifest_of(
    parts: Sequence[RankShare],
    specs: Mapping[str, TensorSpec],
    *,
    run_id: str,
    identity: WeightVersion,
    kind: Kind,
    base: Base | None,
    anchor: WeightVersion,
    model: str,
    num_changed: int,
    created_s: float,
    lr: float | None,
    step: int | None,
) -> Manifest:
    """All ranks' parts of a version as its manifest.

    Args:
        base, anchor: What it starts from, and the last whole version of its chain; an anchor has itself and no base.
        model: Digest of ``specs``.
        created_s: Unix time.
    """
    before, after = added([part.before for part in parts]), added([part.after for part in parts])
    objects = tuple(itertools.chain.from_iterable(part.objects for part in parts))
    num_elements = sum(spec.num_elements for spec in specs.values())
    return Manifest(
        schema=SCHEMA,
        run_id=run_id,
        attempt=identity.attempt,
        version=identity.version,
        kind=kind,
        base=base,
        anchor=(anchor.attempt, anchor.version),
        model=model,
        objects=objects,
        sections=merged(parts, specs),
        tensors=tuple(
            TensorState(
                name=name,
                dtype=spec.dtype,
                shape=spec.shape,
                h_before=None if kind == "anchor" else before.get(name, ZERO),
                h_after=after.get(name, ZERO),
            )
            for name, spec in specs.items()
        ),
        num_changed=num_changed,
        num_elements=num_elements,
        bytes_dense=sum(spec.nbytes for spec in specs.values()),
        bytes_sent=sum(reference.nbytes for reference in objects),
        density=num_changed / num_elements if num_elements else 0.0,
        created_s=created_s,
        lr=lr,
        step=step,
    )
