"""Which way a reader takes to the head, and what may be deleted behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rose.errors import NotFound, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights import manifest
from rose.weights.manifest import Base, Kind, Manifest
from rose.weights.routes import route

DENSE_BYTES = 1000


def V(text: str) -> WeightVersion:
    return WeightVersion.parse(text)


@dataclass
class Shelf:
    """Published manifests by (version, kind); remembers which were read."""

    manifests: dict[tuple[WeightVersion, Kind], Manifest] = field(default_factory=dict)
    read_keys: list[str] = field(default_factory=list)

    def add(
        self, version: str, kind: Kind, anchor: str, base: str | None = None, nbytes: int = 10
    ) -> Manifest:
        """Put a manifest there; ``base`` is ``"1.4"``, or ``"1.4a"`` where the base is an anchor alone."""
        identity = V(version)
        at = None
        if base is not None:
            known = V(base.rstrip("a"))
            at = Base(
                attempt=known.attempt, version=known.version, kind="anchor" if base.endswith("a") else "delta"
            )
        record = Manifest(
            schema=manifest.SCHEMA,
            run_id="run",
            attempt=identity.attempt,
            version=identity.version,
            kind=kind,
            base=at,
            anchor=(V(anchor).attempt, V(anchor).version),
            model="",
            objects=(),
            sections=(),
            tensors=(),
            num_changed=0,
            num_elements=0,
            bytes_dense=DENSE_BYTES,
            bytes_sent=nbytes,
            density=0.0,
            created_s=0.0,
        )
        self.manifests[identity, kind] = record
        return record

    def read(self, version: WeightVersion, kind: Kind) -> Manifest:
        self.read_keys.append(f"{version} {kind}")
        if (version, kind) not in self.manifests:
            raise NotFound(f"{version} {kind}")
        return self.manifests[version, kind]


@pytest.fixture
def shelf() -> Shelf:
    """1.0 anchor; deltas 1.1 to 1.6; an anchor besides the delta at 1.4."""
    shelf = Shelf()
    shelf.add("1.0", "anchor", "1.0", nbytes=DENSE_BYTES)
    shelf.add("1.1", "delta", "1.0", "1.0a")
    for n in (2, 3, 4):
        shelf.add(f"1.{n}", "delta", "1.0", f"1.{n - 1}")
    shelf.add("1.4", "anchor", "1.4", nbytes=DENSE_BYTES)
    for n in (5, 6):
        shelf.add(f"1.{n}", "delta", "1.4", f"1.{n - 1}")
    return shelf


def way(shelf: Shelf, held: str | None, to: str = "1.6", kind: Kind = "delta") -> list[str]:
    steps = route(None if held is None else V(held), shelf.manifests[V(to), kind], shelf.read)
    return [f"{step.identity} {step.kind}" for step in steps]


def test_the_next_version_is_one_delta_and_no_further_read(shelf: Shelf) -> None:
    assert way(shelf, "1.5") == ["1.6 delta"]
    assert shelf.read_keys == []


def test_a_reader_some_versions_behind_takes_the_chain_in_order(shelf: Shelf) -> None:
    assert way(shelf, "1.4") == ["1.5 delta", "1.6 delta"]
    assert way(shelf, "1.2") == ["1.3 delta", "1.4 delta", "1.5 delta", "1.6 delta"]
    assert way(shelf, "1.0") == [f"1.{n} delta" for n in range(1, 7)]


@pytest.mark.parametrize("held", [None, "0.99", "1.7", "2.0"])
def test_a_reader_with_nothing_or_of_another_lineage_takes_the_newest_anchor(
    shelf: Shelf, held: str | None
) -> None:
    assert way(shelf, held) == ["1.4 anchor", "1.5 delta", "1.6 delta"]


def test_an_anchor_head_is_taken_as_it_is(shelf: Shelf) -> None:
    shelf.add("1.7", "anchor", "1.7", nbytes=DENSE_BYTES)
    assert way(shelf, "1.6", "1.7", "anchor") == ["1.7 anchor"]
    assert way(shelf, None, "1.7", "anchor") == ["1.7 anchor"]
    assert shelf.read_keys == []


def test_a_new_attempt_leads_to_its_own_anchor(shelf: Shelf) -> None:
    shelf.add("2.3", "anchor", "2.3", nbytes=DENSE_BYTES)
    shelf.add("2.4", "delta", "2.3", "2.3a")
    assert way(shelf, "1.6", "2.4") == ["2.3 anchor", "2.4 delta"]


def test_an_older_attempt_is_not_searched_for_below_the_anchor(shelf: Shelf) -> None:
    shelf.add("2.0", "anchor", "2.0", nbytes=DENSE_BYTES)
    shelf.add("2.1", "delta", "2.0", "2.0a")
    shelf.add("2.2", "delta", "2.0", "2.1")
    shelf.add("2.2", "anchor", "2.2", nbytes=DENSE_BYTES)
    shelf.add("2.3", "delta", "2.2", "2.2")
    assert way(shelf, "1.6", "2.3") == ["2.2 anchor", "2.3 delta"]
    assert shelf.read_keys == ["2.2 anchor"]


def test_a_chain_that_costs_more_than_its_share_of_a_full_copy_gives_way(shelf: Shelf) -> None:
    # The anchor at 1.4 replaces 1.3 and 1.4 for a reader at 1.2; 0.8 * 1000 bytes is the limit.
    shelf.add("1.3", "delta", "1.0", "1.2", nbytes=790)
    assert way(shelf, "1.2") == ["1.3 delta", "1.4 delta", "1.5 delta", "1.6 delta"]
    shelf.add("1.3", "delta", "1.0", "1.2", nbytes=791)
    assert way(shelf, "1.2") == ["1.4 anchor", "1.5 delta", "1.6 delta"]


def test_deltas_after_the_anchor_do_not_count_against_the_chain(shelf: Shelf) -> None:
    shelf.add("1.5", "delta", "1.4", "1.4", nbytes=5 * DENSE_BYTES)  # both ways need it
    assert way(shelf, "1.3")[0] == "1.4 delta"
    assert way(shelf, "1.4") == ["1.5 delta", "1.6 delta"]


def test_a_chain_with_a_piece_deleted_gives_way_to_the_anchor(shelf: Shelf) -> None:
    del shelf.manifests[V("1.3"), "delta"]
    assert way(shelf, "1.2") == ["1.4 anchor", "1.5 delta", "1.6 delta"]


def test_a_version_beside_the_chain_is_not_a_base(shelf: Shelf) -> None:
    # 1.4 was followed by 1.6 directly: a reader that holds the orphan 1.5 cannot go on from it.
    shelf.add("1.6", "delta", "1.4", "1.4")
    assert way(shelf, "1.5") == ["1.4 anchor", "1.6 delta"]


def test_a_missing_anchor_is_reported_not_papered_over(shelf: Shelf) -> None:
    del shelf.manifests[V("1.4"), "anchor"]
    with pytest.raises(NotFound):
        way(shelf, None)


def test_a_store_that_answers_with_another_version_is_caught(shelf: Shelf) -> None:
    shelf.manifests[V("1.5"), "delta"] = shelf.manifests[V("1.3"), "delta"]
    with pytest.raises(SectionCorrupt, match=r"is 1\.3"):
        way(shelf, None)
