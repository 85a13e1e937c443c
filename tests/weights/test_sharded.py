"""Trainers of several ranks: each publishes its own shard, readers get the whole, and all fail or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.errors import CapacityError, RoseError, VersionRefused, WeightsError
from rose.lineage import WeightVersion
from rose.signatures import PublicKeys, SigningKey
from rose.testing.memory_store import MemoryStore
from rose.weights import replicas, stored_manifests
from rose.weights.file_store import FileStore
from rose.weights.layout import assign, claims_of
from rose.weights.params import WeightsParams
from rose.weights.sealed import SealedStore
from rose.weights.source import Shard, collect
from rose.weights.subscriber import WeightSubscriber
from rose.weights.update import read_update
from tests.weights.publisher.kit import FlakyStore
from tests.weights.publisher.test_failures import POINTS
from tests.weights.subscriber.kit import apply_update, same

torch = pytest.importorskip("torch")
from tests.weights.shards_kit import (  # noqa: E402
    Held,
    Tensors,
    Trainer,
    fsdp,
    grid,
    hsdp,
    megatron,
    tensor_parallel,
)

HEADS = {"heads": 4, "kv_heads": 2, "head": 8}
PARAMS = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 12, anchor_every=1000)
LAYOUTS: dict[str, Callable[[Tensors], list[Held]]] = {
    "fsdp-1": fsdp(1),
    "fsdp-2": fsdp(2),
    "fsdp-4": fsdp(4),
    "hsdp-2x2": hsdp(2, 2),
    "tp-2": tensor_parallel(2),
    "tp-2-fsdp-2": grid(2),
    "megatron-tp-2": megatron(2, 1, **HEADS),
    "megatron-tp-2-ep-2": megatron(2, 2, **HEADS),
}


def make_weights(seed: int = 0) -> Tensors:
    """Masters in fp32 that start on the bf16 grid."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (101, 48), "norm": (48,), "q": (32, 48), "k": (16, 48), "v": (16, 48), "out": (48, 32)}
    for expert in range(4):
        shapes |= {f"experts.{expert}.{part}": shape for part, shape in (("gate", (20, 48)), ("up", (20, 48)), ("down", (48, 20)))}  # fmt: skip
    return {
        name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16).float()
        for name, shape in shapes.items()
    }


def moved(weights: Tensors, seed: int, lr: float = 2e-6) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {n: w + lr * torch.randn(w.shape, generator=generator) for n, w in weights.items()}


def bits_of(weights: Tensors) -> dict[str, np.ndarray]:
    return {
        n: w.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1)
        for n, w in weights.items()
    }


def copy_of(reader: WeightSubscriber) -> dict[str, np.ndarray]:
    return {name: np.array(reader._host.bits(name)) for name in reader._host.specs}


@pytest.fixture
def store() -> FlakyStore:
    return FlakyStore()


@pytest.fixture
def reader(store: FlakyStore, tmp_path: Path) -> Iterator[WeightSubscriber]:
    subscriber = WeightSubscriber(store, "run", tmp_path / "reader")
    yield subscriber
    subscriber.close()


def test_rank_0_alone_has_the_key_and_every_ranks_objects_are_bound(
    store: FlakyStore, tmp_path: Path
) -> None:
    key = SigningKey.generate()
    trainer = Trainer(fsdp(3), [SealedStore(store, key=key), store, store], 1, PARAMS)
    weights = make_weights()
    reading = SealedStore(store, trusted=PublicKeys.parse(key.public))
    reader = WeightSubscriber(reading, "run", tmp_path / "signed")
    for version in range(2):
        trainer.publish(weights, version)
        assert reader.poll(0) == WeightVersion(1, version)
        bits = copy_of(reader)
        assert all(np.array_equal(bits[name], expected) for name, expected in bits_of(weights).items())
        weights = moved(weights, version)
    record = stored_manifests.read(reading, "run", WeightVersion(1, 0), "anchor")
    assert {Path(each.key).name[:4] for each in record.objects if each.blake3} == {"0000", "0001", "0002"}
    reader.close()


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_readers_get_the_whole_whatever_the_division(
    layout: str, store: FlakyStore, reader: WeightSubscriber
) -> None:
    trainer = Trainer(LAYOUTS[layout], store, 1, PARAMS)
    weights = make_weights()
    engine: dict[str, np.ndarray] = {}
    at: WeightVersion | None = None
    for version in range(4):
        report = trainer.publish(weights, version)
        assert report.kind == ("anchor" if version == 0 else "delta")
        newest = reader.poll(0)
        assert newest == report.version
        assert same(copy_of(reader), bits_of(weights))
        engine = apply_update(engine, read_update(reader.fetch(newest, at)))
        assert same(engine, bits_of(weights))
        at = newest
        weights = moved(weights, seed=version)


def test_the_division_does_not_show_in_the_state(store: FlakyStore) -> None:
    weights = make_weights()
    states = [Trainer(cut, MemoryStore(), 1, PARAMS).publish(weights, 0).state for cut in LAYOUTS.values()]
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_element_is_published_by_one_rank(layout: str, store: FlakyStore) -> None:
    weights = make_weights()
    trainer = Trainer(LAYOUTS[layout], store, 1, PARAMS)
    trainer.publish(weights, 0)
    loads = [publisher._baseline.num_elements for publisher in trainer.publishers]
    total = sum(w.numel() for w in weights.values())
    assert sum(loads) == total
    assert max(loads) < 1.3 * total / len(loads)  # nobody gathers, replicas are spread


def test_a_shard_costs_what_the_whole_costs() -> None:
    """Cutting by columns loses no compression: the codec numbers elements inside the box."""
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn((512, 768), generator=generator) * 0.02 for name in ("up", "down")}
    sizes = {}
    for layout in ("fsdp-1", "tp-2", "tp-2-fsdp-2"):
        trainer = Trainer(LAYOUTS[layout], MemoryStore(), 1, PARAMS)
        trainer.publish(weights, 0)
        sizes[layout] = trainer.publish(moved(weights, 1), 1).bytes_sent
    assert max(sizes.values()) < 1.05 * sizes["fsdp-1"]


def test_manifests_name_the_boxes(store: FlakyStore) -> None:
    Trainer(LAYOUTS["tp-2"], store, 1, PARAMS).publish(make_weights(), 0)
    record = stored_manifests.read(store, "run", WeightVersion(1, 0), "anchor")
    sections = record.sections_by_tensor()
    assert [(s.start, s.num_elements, s.run, s.stride) for s in sections["out"]] == [
        (0, 768, 16, 32),
        (16, 768, 16, 32),
    ]
    assert [(s.start, s.num_elements, s.run) for s in sections["q"]] == [(0, 768, 0), (768, 768, 0)]
    assert len(sections["norm"]) == 1


# -- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("point", "rank"), [*((point, 0) for point in POINTS), ("object", 1)])
def test_after_a_failure_on_one_rank_none_has_advanced_and_the_next_publish_is_right(
    point: str, when: str, rank: int, reader: WeightSubscriber, store: FlakyStore
) -> None:
    stores = [store, _Window(store)]
    trainer = Trainer(LAYOUTS["tp-2"], stores, 1, PARAMS)
    weights = make_weights()
    trainer.publish(weights, 0)
    trainer.publish(weights := moved(weights, 1), 1)
    reader.poll(0)
    stores[rank].fail_at = lambda method, argument: when if POINTS[point](method, argument) else None
    with pytest.raises(RoseError):
        trainer.publish(weights := moved(weights, 2), 2)
    assert all(isinstance(error, RoseError) for error in trainer.errors)
    stores[rank].fail_at = lambda method, argument: None
    assert {p.published for p in trainer.publishers} == {WeightVersion(1, 1)}

    report = trainer.publish(weights := moved(weights, 3), 3)
    reader.poll(0)
    assert same(copy_of(reader), bits_of(weights))
    report = trainer.publish(weights := moved(weights, 4), 4)
    assert report.kind == "delta"
    reader.poll(0)
    assert same(copy_of(reader), bits_of(weights))


class _Window(FlakyStore):
    """Another rank's view of a store, with faults of its own."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._objects, self._heads = store._objects, store._heads


def test_the_failing_rank_is_named(store: FlakyStore) -> None:
    stores = [store, _Window(store)]
    trainer = Trainer(LAYOUTS["fsdp-2"], stores, 1, PARAMS)
    stores[1].fail_at = lambda method, argument: "before"
    with pytest.raises(CapacityError, match="rank 1: cut off"):
        trainer.publish(make_weights(), 0)
    assert str(trainer.errors[1]) == "cut off"


@pytest.mark.parametrize("in_round", [1, 2, 3, 4])
def test_a_rank_that_dies_fails_the_others_and_a_new_attempt_goes_on(
    in_round: int, store: FlakyStore, reader: WeightSubscriber
) -> None:
    trainer = Trainer(LAYOUTS["fsdp-4"], store, 1, PARAMS)
    weights = make_weights()
    trainer.publish(weights, 0)
    reader.poll(0)
    victim = trainer.ranks[2]
    calls = 0
    gather = victim.gather

    def die(data: bytes) -> list[bytes]:
        nonlocal calls
        calls += 1
        if calls == in_round:
            victim.leave()
            raise WeightsError("killed", field="ranks")
        return gather(data)

    victim.gather = die  # type: ignore[method-assign]
    with pytest.raises(WeightsError):
        trainer.publish(moved(weights, 1), 1)
    assert all(isinstance(error, WeightsError) for error in trainer.errors)
    assert reader.poll(0) is None  # the head has not moved: nobody's version is half there

    older = make_weights()
    again = Trainer(LAYOUTS["fsdp-2"], store, 2, PARAMS)  # and with another number of ranks
    assert again.publish(older, 1).kind == "anchor"
    assert reader.poll(0) == WeightVersion(2, 1)
    assert same(copy_of(reader), bits_of(older))


def test_the_same_version_again_agrees_or_is_refused_on_all_ranks(store: FlakyStore) -> None:
    trainer = Trainer(LAYOUTS["megatron-tp-2"], store, 1, PARAMS)
    weights = make_weights()
    trainer.publish(weights, 0)
    assert trainer.publish(weights, 0).bytes_sent == 0
    other = weights | {"out": weights["out"].clone()}
    other["out"][3, 5] += 1  # on one rank only
    with pytest.raises(VersionRefused, match="other weights"):
        trainer.publish(other, 0)
    assert all(isinstance(error, VersionRefused) for error in trainer.errors)


def test_a_restarted_trainer_adopts_its_version_whatever_its_division(store: FlakyStore) -> None:
    weights = make_weights()
    Trainer(LAYOUTS["fsdp-4"], store, 1, PARAMS).publish(weights, 0)
    again = Trainer(LAYOUTS["tp-2"], store, 1, PARAMS)
    assert again.publish(weights, 0).bytes_sent == 0
    assert again.publish(moved(weights, 1), 1).kind == "delta"
    liar = Trainer(LAYOUTS["tp-2"], store, 1, PARAMS)
    with pytest.raises(VersionRefused, match="other weights"):
        liar.publish(moved(weights, 2), 1)


def test_an_anchor_of_all_ranks_pieces_is_composed_beside_them(store: FlakyStore, tmp_path: Path) -> None:
    params = WeightsParams(anchor_every=2, bucket_bytes=1 << 12, collect=False)
    trainer = Trainer(LAYOUTS["tp-2-fsdp-2"], store, 1, params)
    weights = make_weights()
    for version in range(4):
        report = trainer.publish(weights, version)
        assert trainer.publishers[0].settle(30)
        late = WeightSubscriber(store, "run", tmp_path / f"late-{version}")
        late.poll(0)
        assert same(copy_of(late), bits_of(weights))
        late.close()
        weights = moved(weights, version)
    assert report.bytes_anchor == report.bytes_dense
    assert stored_manifests.read(store, "run", report.version, "delta").anchor == (1, 2)


def test_memory_of_one_rank_that_fails_makes_the_version_whole(
    store: FlakyStore, reader: WeightSubscriber
) -> None:
    params = WeightsParams(anchor_every=1, bucket_bytes=1 << 12, collect=False)
    trainer = Trainer(LAYOUTS["tp-2-fsdp-2"], store, 1, params)
    weights = make_weights()
    trainer.publish(weights, 0)
    trainer.publishers[2]._baseline.held[0].bits[0] ^= 0x40
    weights = moved(weights, 4)
    assert trainer.publish(weights, 1).kind == "anchor"
    reader.poll(0)
    assert same(copy_of(reader), bits_of(weights))


def test_a_store_that_one_rank_finds_full_is_cleared_by_the_first_and_all_go_on(
    tmp_path: Path, reader: WeightSubscriber
) -> None:
    shared = FileStore(tmp_path / "store", durable=False)

    class Crowded(FileStore):
        """The same folder, full for this rank until the others' old versions are gone."""

        def put_new(self, key: str, data: Any) -> None:
            if "/1.3/" in key and self.list("run/1.1/"):
                raise CapacityError("store is full", status=507)
            super().put_new(key, data)

    stores = [shared, Crowded(tmp_path / "store", durable=False), shared, shared]
    trainer = Trainer(LAYOUTS["tp-2-fsdp-2"], stores, 1, PARAMS)
    weights = make_weights()
    for version in range(5):
        report = trainer.publish(weights, version)
        assert report.kind == ("anchor" if version in (0, 3) else "delta")
        late = WeightSubscriber(shared, "run", tmp_path / f"late-{version}")
        late.poll(0)
        assert same(copy_of(late), bits_of(weights))
        late.close()
        weights = moved(weights, version)


def test_a_full_store_of_one_rank_and_another_fault_of_the_next_end_the_version_for_all(
    tmp_path: Path,
) -> None:
    class Failing(FileStore):
        error: RoseError | None = None

        def put_new(self, key: str, data: Any) -> None:
            if self.error is not None and not key.endswith(".json"):
                raise self.error
            super().put_new(key, data)

    stores = [Failing(tmp_path / "store", durable=False) for _ in range(2)]
    trainer = Trainer(LAYOUTS["tp-2"], stores, 1, PARAMS)
    weights = make_weights()
    trainer.publish(weights, 0)
    stores[0].error = CapacityError("store is full", status=507)
    stores[1].error = CapacityError("cut off")
    with pytest.raises(CapacityError):
        trainer.publish(weights := moved(weights, 1), 1)
    assert [type(error) for error in trainer.errors] == [CapacityError, CapacityError]
    for store in stores:
        store.error = None
    assert trainer.publish(weights, 1).kind == "delta"


# -- divisions that are none -------------------------------------------------------------------------


def two(first: Held, second: Held) -> Callable[[Tensors], list[Held]]:
    return lambda weights: [first, second]


X = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (two({"x": Shard(X[:2], (4, 6), (0, 0))}, {}), "x: 12 elements are in no piece"),
        (two({"x": Shard(X[:3], (4, 6), (0, 0))}, {"x": Shard(X[:2], (4, 6), (2, 0))}), "x: pieces overlap"),
        (two({"x": X}, {"x": X[:2]}), r"x: rank 1 says BF16\[2, 6\], an earlier rank BF16\[4, 6\]"),
        (
            two({"x": Shard(X[:, :4], (4, 6), (0, 0))}, {"x": Shard(X[:, :3], (4, 6), (0, 3))}),
            "x: pieces overlap",
        ),
    ],
)
def test_a_division_with_holes_or_overlaps_is_refused_by_name(
    cut: Any, message: str, store: FlakyStore
) -> None:
    with pytest.raises(WeightsError, match=message):
        Trainer(cut, store, 1, PARAMS).publish({}, 0)
    assert store.get_head("run") is None


def test_a_division_that_changes_is_refused(store: FlakyStore) -> None:
    turns = iter([fsdp(2), tensor_parallel(2)])
    trainer = Trainer(lambda weights: next(turns)(weights), store, 1, PARAMS)
    trainer.publish(make_weights(), 0)
    with pytest.raises(VersionRefused, match="division"):
        trainer.publish(make_weights(), 1)


def test_ranks_that_ask_for_different_versions_are_stopped(store: FlakyStore) -> None:
    trainer = Trainer(fsdp(2), store, 1, PARAMS)
    trainer.publish(make_weights(), 0)
    publishers = trainer.publishers
    publishers[1].publish, real = lambda version: real(version + 1), publishers[1].publish  # type: ignore[method-assign,assignment]
    with pytest.raises(WeightsError, match="ranks are at different versions"):
        trainer.publish(make_weights(), 1)


# -- copies that are none ------------------------------------------------------------------------------


def test_copies_that_drifted_apart_are_refused_by_name(store: FlakyStore) -> None:
    """Each rank publishes some of the tensors: a mixture of two models would have right checksums."""
    steps = iter([0.0, 0.25])
    trainer = Trainer(lambda weights: [weights, {"x": weights["x"] + next(steps)}], store, 1, PARAMS)
    trainer.publish({"x": X}, 0)
    with pytest.raises(WeightsError, match="x: ranks 0 and 1 hold other values"):
        trainer.publish({"x": X}, 1)
    assert store.get_head("run") is not None
    assert store.get_head("run").version == 0  # type: ignore[union-attr]


def test_copies_may_differ_where_the_trainer_says_so(store: FlakyStore, reader: WeightSubscriber) -> None:
    params = replace(PARAMS, check_replicas=False)
    trainer = Trainer(lambda weights: [weights, {"x": weights["x"] + 1}], store, 1, params)
    trainer.publish({"x": X}, 0)
    assert reader.poll(0) == WeightVersion(1, 0)


@pytest.mark.parametrize("layout", ["fsdp-2", "hsdp-2x2", "megatron-tp-2"])
def test_every_copy_is_compared_in_its_turn(layout: str) -> None:
    weights = make_weights()
    held = [claims_of(collect(lambda held=held: held)) for held in LAYOUTS[layout](weights)]
    shared = assign(held).shared
    twins = [
        number
        for number, claim in enumerate(held[0])
        if any((claim.name, claim.box) == (each.name, each.box) for other in held[1:] for each in other)
    ]
    assert shared[0] == twins
    found = [number for turn in range(5) for number in replicas.due(held[0], shared[0], turn, 5)]
    assert sorted(found) == twins
