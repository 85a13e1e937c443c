"""WeightSubscriber: always one proven version or nothing, whatever arrives; and the step an engine is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from rose.errors import CapacityError, ConfigError, Gone, NotFound, RoseError, SectionCorrupt, WrongBase
from rose.weights import codec, manifest, retention, statehash
from rose.weights.manifest import Head, Manifest, ObjectRef, Section
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.store import MemoryStore
from rose.weights.subscriber import WeightSubscriber
from rose.weights.update import Update, read_update
from rose.weights.version import WeightVersion
from tests.weights.toy import ToyTrainer

PARAMS = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 16, anchor_every=1000, collect=False)


def V(text: str) -> WeightVersion:
    return WeightVersion.parse(text)


class WatchedStore(MemoryStore):
    """Counts reads, and may answer them with something else."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []
        self.twist: Callable[[str, int, bytes], bytes] = lambda key, offset, data: data
        self.held: list[WeightVersion] = []

    def get_range(self, key: str, offset: int, nbytes: int) -> bytes:
        self.held = self.leases("run")
        data = super().get_range(key, offset, nbytes)
        self.reads.append((key, offset, nbytes))
        return self.twist(key, offset, data)


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def trainer() -> ToyTrainer:
    return ToyTrainer(1)


@pytest.fixture
def publisher(trainer: ToyTrainer, store: WatchedStore) -> WeightPublisher:
    return WeightPublisher(trainer.tensors, store, "run", 1, PARAMS)


@pytest.fixture
def open_reader(store: WatchedStore, tmp_path: Path) -> Iterator[Callable[..., WeightSubscriber]]:
    opened: list[WeightSubscriber] = []

    def open_it(name: str = "reader", source: Any = None) -> WeightSubscriber:
        reader = WeightSubscriber(source or store, "run", tmp_path / name)
        opened.append(reader)
        return reader

    yield open_it
    for reader in opened:
        reader.close()


@pytest.fixture
def reader(open_reader: Callable[..., WeightSubscriber]) -> WeightSubscriber:
    return open_reader()


def copy_of(reader: WeightSubscriber) -> dict[str, np.ndarray]:
    return {name: np.array(reader._host.bits(name)) for name in reader._host.specs}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[n], expected[n]) for n in expected)


def apply_update(bits: dict[str, np.ndarray], update: Update) -> dict[str, np.ndarray]:
    """What an engine does: check h_before, write, check h_after."""
    result = {}
    for name, tensor in update.tensors.items():
        if tensor.dense is not None:
            new = tensor.dense.reshape(-1).copy()
        else:
            new = bits[name].copy()
            if tensor.idx is not None and tensor.val is not None:
                new[tensor.idx] = tensor.val
        if tensor.h_before is not None:
            assert statehash.hash_bits(bits[name]) == tensor.h_before
        assert statehash.hash_bits(new) == tensor.h_after
        result[name] = new
    return result


def publish_steps(publisher: WeightPublisher, trainer: ToyTrainer, first: int, last: int) -> None:
    for version in range(first, last + 1):
        if version:
            trainer.step()
        publisher.publish(version)


# --- following --------------------------------------------------------------------------------------------


def test_each_version_is_followed_bit_by_bit(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    assert reader.poll(0) is None
    for version in range(5):
        publish_steps(publisher, trainer, version, version)
        assert reader.poll(0) == V(f"1.{version}")
        assert same(copy_of(reader), trainer.bits())
        assert reader.scan() == []
        assert reader.poll(0) is None


def test_only_the_delta_is_pulled(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)
    reader.poll(0)
    store.reads.clear()
    publish_steps(publisher, trainer, 1, 1)
    reader.poll(0)
    pulled = sum(nbytes for _, _, nbytes in store.reads)
    assert 0 < pulled < 0.04 * reader._host.nbytes


def test_versions_missed_in_between_are_walked_in_order(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    reader.poll(0)
    publish_steps(publisher, trainer, 1, 4)
    assert reader.poll(0) == V("1.4")
    assert same(copy_of(reader), trainer.bits())


def test_a_late_joiner_starts_from_the_anchor(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publish_steps(publisher, trainer, 0, 3)
    assert reader.poll(0) == V("1.3")
    assert same(copy_of(reader), trainer.bits())


def test_a_new_attempt_leads_to_its_anchor_even_with_a_lower_version(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 5)
    reader.poll(0)
    older = ToyTrainer(1)
    restarted = WeightPublisher(older.tensors, store, "run", 2, PARAMS)
    publish_steps(restarted, older, 2, 3)
    assert reader.poll(0) == V("2.3")
    assert same(copy_of(reader), older.bits())


def test_a_new_attempt_may_bring_another_model(
    publisher: WeightPublisher, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)
    reader.poll(0)
    other = {"x": np.ones((3, 3), np.float32)}
    WeightPublisher(lambda: other, store, "run", 2, PARAMS).publish(0)
    assert reader.poll(0) == V("2.0")
    assert list(copy_of(reader)) == ["x"]


def test_a_waiting_reader_is_woken_by_a_publish(publisher: WeightPublisher, reader: WeightSubscriber) -> None:
    found: list[WeightVersion | None] = []
    thread = threading.Thread(target=lambda: found.append(reader.poll(30)))
    thread.start()
    publisher.publish(0)
    thread.join(20)
    assert found == [V("1.0")]


def test_what_is_being_read_is_leased_and_then_let_go(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 2)
    reader.poll(0)
    assert store.held == [V("1.2")]
    assert store.leases("run") == []


# --- restarts ---------------------------------------------------------------------------------------------


def test_a_restarted_reader_has_its_copy_at_once_and_goes_on_by_deltas(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    store: WatchedStore,
    open_reader: Callable[..., WeightSubscriber],
) -> None:
    publish_steps(publisher, trainer, 0, 2)
    first = open_reader()
    first.poll(0)
    first.close()
    store.reads.clear()

    second = open_reader()
    assert second.version == V("1.2")
    assert second.poll(60) == V("1.2")  # told at once, without waiting for news
    assert same(copy_of(second), trainer.bits())
    assert store.reads == []
    publish_steps(publisher, trainer, 3, 3)
    assert second.poll(0) == V("1.3")
    assert sum(nbytes for _, _, nbytes in store.reads) < 0.04 * second._host.nbytes


def test_a_restored_copy_serves_while_the_store_is_away(
    publisher: WeightPublisher, store: WatchedStore, open_reader: Callable[..., WeightSubscriber]
) -> None:
    publisher.publish(0)
    first = open_reader()
    first.poll(0)
    first.close()

    class Away(MemoryStore):
        def wait_head(self, run_id: str, after: WeightVersion | None, timeout_s: float) -> Head | None:
            raise CapacityError("away")

    second = open_reader(source=Away())
    assert second.poll(0) == V("1.0")
    assert second.fetch(V("1.0"), None).exists()
    with pytest.raises(CapacityError):
        second.poll(0)


def test_a_copy_damaged_on_disk_is_fetched_again(
    publisher: WeightPublisher, trainer: ToyTrainer, open_reader: Callable[..., WeightSubscriber]
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    first = open_reader()
    first.poll(0)
    path = first._host.path
    first.close()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    second = open_reader()
    assert second.version is None
    assert second.poll(0) == V("1.1")
    assert same(copy_of(second), trainer.bits())


@pytest.mark.parametrize("state", [b"", b"{}", b"\xff", None, b'{"schema": 1, "run_id": "run"}'])
def test_a_copy_without_its_state_is_nothing(
    publisher: WeightPublisher, open_reader: Callable[..., WeightSubscriber], state: bytes | None
) -> None:
    publisher.publish(0)
    first = open_reader()
    first.poll(0)
    first.close()
    path = first._host.directory / "state.json"
    path.unlink()
    if state is not None:
        path.write_bytes(state)
    second = open_reader()
    assert second.version is None
    assert second.poll(0) == V("1.0")


def test_a_copy_of_another_run_is_not_taken_over(
    publisher: WeightPublisher, store: WatchedStore, open_reader: Callable[..., WeightSubscriber]
) -> None:
    publisher.publish(0)
    first = open_reader()
    first.poll(0)
    first.close()
    other = WeightSubscriber(store, "other", first._host.directory)
    assert other.version is None
    other.close()


def test_a_head_behind_the_restored_copy_is_an_error_not_silence(
    publisher: WeightPublisher, trainer: ToyTrainer, open_reader: Callable[..., WeightSubscriber]
) -> None:
    publish_steps(publisher, trainer, 0, 2)
    first = open_reader()
    first.poll(0)
    first.close()
    fresh = MemoryStore()
    WeightPublisher(trainer.tensors, fresh, "run", 1, PARAMS).publish(0)
    second = open_reader(source=fresh)
    with pytest.raises(WrongBase, match=r"head is at 1\.0, the host copy at 1\.2"):
        second.poll(0)


def test_a_directory_has_one_owner(reader: WeightSubscriber, store: WatchedStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use"):
        WeightSubscriber(store, "run", tmp_path / "reader")


# --- corruption -------------------------------------------------------------------------------------------


def sections_of(store: MemoryStore, version: str) -> Manifest:
    return retention.read_manifest(store, "run", V(version), "delta")


def test_corruption_in_any_section_changes_nothing_and_heals(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    before = copy_of(reader)
    publish_steps(publisher, trainer, 2, 2)
    record = sections_of(store, "1.2")
    assert len(record.sections) >= 5
    clean = dict(store._objects)
    for section in record.sections:
        for position in (0, section.nbytes // 2, section.nbytes - 1):
            key = record.objects[section.object].key
            bad = bytearray(clean[key])
            bad[section.offset + position] ^= 0x40
            store._objects[key] = bytes(bad)
            with pytest.raises(SectionCorrupt, match="checksum is wrong"):
                reader.poll(0)
            assert reader.version == V("1.1")
            assert same(copy_of(reader), before)
            store._objects[key] = clean[key]
    assert reader.poll(0) == V("1.2")
    assert same(copy_of(reader), trainer.bits())


def reseal(store: WatchedStore, version: str, edit: Callable[[Manifest], Manifest]) -> None:
    """Replace a version's manifest, and make the head name it: an attacker, or a broken trainer."""
    record = edit(sections_of(store, version))
    data = manifest.encode(record)
    key = manifest.manifest_key("run", V(version), "delta")
    store._objects[key] = data
    head = store._heads["run"]
    reference = ObjectRef(key=key, nbytes=len(data), xxh3=manifest.digest(data))
    store._heads["run"] = msgspec.structs.replace(head, manifest=reference)


def rebuilt(store: WatchedStore, record: Manifest, number: int, payload: bytes) -> Manifest:
    """``record`` with one section's bytes replaced and every checksum right."""
    pieces = []
    for n, section in enumerate(record.sections):
        data = store._objects[record.objects[section.object].key]
        pieces.append(payload if n == number else data[section.offset : section.offset + section.nbytes])
    sections = []
    offset = 0
    for section, piece in zip(record.sections, pieces, strict=True):
        sections.append(
            msgspec.structs.replace(
                section, object=0, offset=offset, nbytes=len(piece), xxh3=manifest.digest(piece)
            )
        )
        offset += len(piece)
    whole = b"".join(pieces)
    key = record.objects[0].key
    store._objects[key] = whole
    reference = ObjectRef(key=key, nbytes=len(whole), xxh3=manifest.digest(whole))
    return msgspec.structs.replace(record, sections=tuple(sections), objects=(reference,))


def other_values(payload: bytes, section: Section, dtype: str) -> bytes:
    """The same indices with another step in the first place: a decoder or a trainer gone wrong."""
    if section.encoding == "raw":
        return bytes([payload[0] ^ 1]) + payload[1:]
    delta = codec.decode(payload, section.num_elements, dtype)
    d = delta.d.copy()
    d[0] = 2 if d[0] != 2 else 3
    return codec.encode_delta(codec.Delta(idx=delta.idx, d=d), section.num_elements)


def test_wrong_contents_under_right_checksums_are_caught_by_the_state_hash(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    before = copy_of(reader)
    publish_steps(publisher, trainer, 2, 2)
    kept = dict(store._objects), dict(store._heads)
    record = sections_of(store, "1.2")
    dtypes = {spec.name: spec.bits_dtype.str for spec in record.specs().values()}
    for number, section in enumerate(record.sections):
        data = store._objects[record.objects[section.object].key]
        payload = other_values(
            data[section.offset : section.offset + section.nbytes], section, dtypes[section.tensor]
        )
        reseal(store, "1.2", lambda r, n=number, p=payload: rebuilt(store, r, n, p))
        with pytest.raises(WrongBase, match="state hash comes out wrong") as caught:
            reader.poll(0)
        store.reads.clear()
        with pytest.raises(WrongBase, match="state hash comes out wrong"):
            reader.poll(0)
        assert not any(
            "/1.0/" in key for key, _, _ in store.reads
        )  # the anchor was tried once, not every time
        assert section.tensor in str(caught.value)
        assert reader.version == V("1.1")
        assert same(copy_of(reader), before)
        store._objects, store._heads = dict(kept[0]), dict(kept[1])
    assert reader.poll(0) == V("1.2")


def test_a_section_checksum_counts_besides_the_objects(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    publish_steps(publisher, trainer, 2, 2)

    def spoil(record: Manifest) -> Manifest:
        first = msgspec.structs.replace(record.sections[0], xxh3="0" * 32)
        return msgspec.structs.replace(record, sections=(first, *record.sections[1:]))

    reseal(store, "1.2", spoil)
    with pytest.raises(SectionCorrupt, match="checksum is wrong"):
        reader.poll(0)
    assert reader.version == V("1.1")


def test_a_delta_from_another_version_is_refused_even_if_the_state_is_the_same(
    publisher: WeightPublisher, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)
    reader.poll(0)
    publisher.publish(1)
    publisher.publish(2)  # nothing changed in 1.1 and 1.2
    with pytest.raises(WrongBase, match=r"starts from 1\.1, the copy is at 1\.0"):
        reader._follow([sections_of(store, "1.2")])


def test_a_process_that_dies_while_writing_leaves_no_copy(
    publisher: WeightPublisher, open_reader: Callable[..., WeightSubscriber]
) -> None:
    publisher.publish(0)
    first = open_reader()
    first.poll(0)
    first._host.begin()  # and then it is killed
    first.close()
    assert open_reader().version is None


def test_a_delta_for_another_state_is_refused_and_the_anchor_taken(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    reader._host.h["codes"] ^= 1  # what we hold is not what version 1.1 says
    publish_steps(publisher, trainer, 2, 2)
    store.reads.clear()
    assert reader.poll(0) == V("1.2")
    assert same(copy_of(reader), trainer.bits())
    assert any("/1.0/" in key for key, _, _ in store.reads)


def test_a_corrupt_delta_that_the_anchor_needs_too_does_not_pull_the_anchor(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    publish_steps(publisher, trainer, 2, 2)
    key = sections_of(store, "1.2").objects[0].key
    store._objects[key] = bytes(len(store._objects[key]))
    store.reads.clear()
    with pytest.raises(SectionCorrupt):
        reader.poll(0)
    assert {k for k, _, _ in store.reads} == {key}
    assert reader.version == V("1.1")


def test_an_anchor_past_the_corrupt_delta_is_taken(
    trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    params = WeightsParams(fragment_elements=65_536, anchor_every=3, collect=False)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, params)
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    publish_steps(publisher, trainer, 2, 4)  # an anchor besides the delta at 1.3
    key = sections_of(store, "1.2").objects[0].key
    store._objects[key] = bytes(len(store._objects[key]))
    assert reader.poll(0) == V("1.4")
    assert same(copy_of(reader), trainer.bits())


def test_memory_damaged_where_a_delta_lands_heals_through_the_anchor(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    before = trainer.bits()["model.embed_tokens.weight"]
    publish_steps(publisher, trainer, 2, 2)
    changed = np.flatnonzero(before != trainer.bits()["model.embed_tokens.weight"])
    reader._host.bits("model.embed_tokens.weight")[changed[0]] ^= 0x100
    assert reader.poll(0) == V("1.2")
    assert reader.scan() == []
    assert same(copy_of(reader), trainer.bits())


def test_damaged_memory_is_named_and_repaired_from_the_anchor(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    reader._host.bits("scales")[3] ^= 1
    assert reader.scan() == ["scales"]
    assert reader.version is None
    assert reader.poll(0) == V("1.1")
    assert same(copy_of(reader), trainer.bits())


def test_an_update_file_made_from_damaged_memory_is_not_handed_out_after_the_repair(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    reader.poll(0)
    start = trainer.bits()
    publish_steps(publisher, trainer, 1, 1)
    reader.poll(0)
    name = "model.embed_tokens.weight"
    changed = np.flatnonzero(start[name] != trainer.bits()[name])
    reader._host.bits(name)[changed[0]] ^= 0x100
    step = read_update(reader.fetch(V("1.1"), V("1.0")))
    with pytest.raises(AssertionError):  # the engine refuses it, and takes all
        apply_update(start, step)
    with pytest.raises(SectionCorrupt, match=f"{name}.*damaged in memory"):
        reader.fetch(V("1.1"), None)
    assert reader.poll(0) == V("1.1")  # repaired, without anybody's asking
    for base, held in [(None, {}), (V("1.0"), start)]:
        assert same(apply_update(held, read_update(reader.fetch(V("1.1"), base))), trainer.bits())


def test_what_was_pulled_of_a_version_now_passed_over_makes_room_first(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    """On a full disk nothing newer would ever arrive."""
    publish_steps(publisher, trainer, 0, 1)
    stale = reader._spool / "1.0"
    stale.mkdir()
    (stale / "0000.00000-abc.part").write_bytes(b"x" * 1000)
    seen: list[bool] = []

    def look(key: str, offset: int, data: bytes) -> bytes:
        seen.append((stale / "0000.00000-abc.part").exists())
        return data

    publisher.publish(2)
    retention.read_manifest(store, "run", V("1.0"), "anchor")
    other = WeightPublisher(trainer.tensors, store, "run", 2, PARAMS)
    other.publish(0)  # whoever follows now goes to 2.0 and nowhere else
    store.twist = look
    assert reader.poll(0) == V("2.0")
    assert seen
    assert not any(seen)


def test_a_lease_lasts_as_long_as_the_transfer(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    reader: WeightSubscriber,
    store: WatchedStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("rose.weights.store.time.monotonic", lambda: now_s)
    monkeypatch.setattr("rose.weights.subscriber.PULL_BYTES", 1 << 14)
    held: list[list[WeightVersion]] = []

    def slow(key: str, offset: int, data: bytes) -> bytes:
        nonlocal now_s
        held.append(store.leases("run"))
        now_s += 250.0
        return data

    publisher.publish(0)
    store.twist = slow
    assert reader.poll(0) == V("1.0")
    assert len(held) > 4  # a thousand seconds and more, of a lease of 600
    assert all(one == [V("1.0")] for one in held)


def test_a_head_that_falls_behind_a_running_reader_is_an_error_not_silence(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    """Its store was emptied and the run begun again: it would serve the old lineage for ever."""
    publish_steps(publisher, trainer, 0, 2)
    assert reader.poll(0) == V("1.2")
    assert reader.poll(0) is None
    store._objects.clear()
    store._heads.clear()
    WeightPublisher(trainer.tensors, store, "run", 1, PARAMS).publish(0)
    with pytest.raises(WrongBase, match=r"head is at 1\.0, the host copy at 1\.2"):
        reader.poll(0)


def test_a_damaged_transfer_is_repeated(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)
    spoiled: list[str] = []

    def spoil_first(key: str, offset: int, data: bytes) -> bytes:
        if key not in spoiled:
            spoiled.append(key)
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    store.twist = spoil_first
    assert reader.poll(0) == V("1.0")
    assert same(copy_of(reader), trainer.bits())
    assert spoiled


def test_a_broken_transfer_goes_on_where_it_stopped_after_a_restart(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    store: WatchedStore,
    open_reader: Callable[..., WeightSubscriber],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rose.weights.subscriber.PULL_BYTES", 10_000)
    publisher.publish(0)

    def break_third(key: str, offset: int, data: bytes) -> bytes:
        if offset >= 20_000:
            raise CapacityError("relay is gone")
        return data

    store.twist = break_third
    first = open_reader()
    with pytest.raises(CapacityError):
        first.poll(0)
    first.close()
    store.reads.clear()
    store.twist = lambda key, offset, data: data
    assert open_reader().poll(0) == V("1.0")
    assert store.reads[0][1] == 20_000


def test_an_object_shorter_than_its_manifest_is_corrupt(
    publisher: WeightPublisher, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)
    key = next(k for k in store._objects if not k.endswith(".json"))
    store._objects[key] = store._objects[key][:-1]
    with pytest.raises(SectionCorrupt, match="shorter"):
        reader.poll(0)
    assert reader.version is None


def test_a_missing_object_is_reported_and_heals(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    publish_steps(publisher, trainer, 2, 2)
    key = sections_of(store, "1.2").objects[0].key
    data = store._objects.pop(key)
    with pytest.raises(SectionCorrupt, match=r"1\.2 is incomplete"):
        reader.poll(0)
    assert reader.version == V("1.1")
    store._objects[key] = data
    assert reader.poll(0) == V("1.2")


def test_a_manifest_that_is_not_the_one_the_head_names_is_refused(
    publisher: WeightPublisher, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)
    key = "run/1.0/anchor.json"
    store._objects[key] = store._objects[key].replace(b'"step":null', b'"step":1234')
    with pytest.raises(SectionCorrupt, match="not what the head names"):
        reader.poll(0)


def test_a_duplicated_or_older_head_is_no_news(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)
    stale = store.get_head("run")
    publish_steps(publisher, trainer, 1, 1)
    reader.poll(0)
    assert stale is not None
    reader._advance(stale)
    assert reader.version == V("1.1")


def test_a_full_disk_changes_nothing(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    reader: WeightSubscriber,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher.publish(0)

    def no_room(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", no_room)
        with pytest.raises(CapacityError, match="No space left"):
            reader.poll(0)
    assert reader.version is None
    assert reader.poll(0) == V("1.0")


# --- update files -----------------------------------------------------------------------------------------


def test_an_engine_fed_by_updates_equals_one_loaded_whole(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    start = reader.poll(0)
    assert start is not None
    whole = read_update(reader.fetch(start, None))
    assert whole.base is None
    assert all(tensor.dense is not None for tensor in whole.tensors.values())
    engine = apply_update({}, whole)
    at = start
    for version, stride in [(1, 1), (2, 1), (5, 3), (6, 1)]:
        publish_steps(publisher, trainer, version - stride + 1, version)
        newest = reader.poll(0)
        assert newest is not None
        update = read_update(reader.fetch(newest, at))
        assert (update.base, update.target) == (at, newest)
        assert update.num_changed < 0.1 * sum(bits.size for bits in engine.values())
        engine = apply_update(engine, update)
        assert same(engine, trainer.bits())
        at = newest


def test_a_chain_is_merged_into_one_step(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    reader.poll(0)
    before = trainer.bits()
    publish_steps(publisher, trainer, 1, 6)
    reader.poll(0)
    update = read_update(reader.fetch(V("1.6"), V("1.0")))
    assert same(apply_update(before, update), trainer.bits())
    embed = update.tensors["model.embed_tokens.weight"]
    assert embed.idx is not None
    changed = np.flatnonzero(before[embed.spec.name] != trainer.bits()[embed.spec.name])
    assert set(changed.tolist()) <= set(embed.idx.tolist())


@pytest.mark.parametrize("engine", [None, "0.7", "1.9", "3.0"])
def test_an_engine_on_an_unknown_version_gets_everything(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, engine: str | None
) -> None:
    publish_steps(publisher, trainer, 0, 2)
    reader.poll(0)
    update = read_update(reader.fetch(V("1.2"), None if engine is None else V(engine)))
    assert update.base is None
    assert same(apply_update({}, update), trainer.bits())


def test_after_an_anchor_the_older_engine_gets_everything(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    trainer.step(lr=1e-2)
    publisher.publish(2)
    reader.poll(0)
    assert read_update(reader.fetch(V("1.2"), V("1.1"))).base is None


def test_a_tensor_that_changes_densely_is_written_whole(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    reader.poll(0)
    before = trainer.bits()
    trainer.masters["model.layers.0.input_layernorm.weight"] *= -1
    trainer.step()
    publisher.publish(1)
    reader.poll(0)
    update = read_update(reader.fetch(V("1.1"), V("1.0")))
    assert update.base == V("1.0")
    assert update.tensors["model.layers.0.input_layernorm.weight"].dense is not None
    assert update.tensors["counter"].dense is not None  # 64-bit elements travel whole
    assert update.tensors["model.embed_tokens.weight"].idx is not None
    assert same(apply_update(before, update), trainer.bits())


def test_a_version_the_copy_is_not_at_is_gone(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    with pytest.raises(Gone, match="at None"):
        reader.fetch(V("1.0"), None)
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    with pytest.raises(Gone, match=r"at 1\.1, not at 1\.0"):
        reader.fetch(V("1.0"), None)


def test_update_files_and_spool_are_bounded(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    reader.poll(0)
    for version in range(1, 12):
        publish_steps(publisher, trainer, version, version)
        reader.poll(0)
        newest = reader.fetch(V(f"1.{version}"), V(f"1.{version - 1}"))
        assert newest.exists()
    assert len(list(reader._updates.iterdir())) <= 4
    spooled = sum(path.stat().st_size for path in reader._spool.rglob("*") if path.is_file())
    assert spooled <= 0.8 * reader._host.nbytes
    trainer.step(lr=1e-2)
    publisher.publish(12)
    reader.poll(0)
    assert list(reader._spool.iterdir()) == []  # an anchor makes the deltas before it useless


def test_threads_change_nothing(
    publisher: WeightPublisher, trainer: ToyTrainer, store: WatchedStore, tmp_path: Path
) -> None:
    readers = [
        WeightSubscriber(store, "run", tmp_path / str(threads), WeightsParams(num_threads=threads))
        for threads in (1, 3)
    ]
    try:
        for version in range(4):
            publish_steps(publisher, trainer, version, version)
            newest = WeightVersion(1, version)
            assert [reader.poll(0) for reader in readers] == [newest, newest]
            assert same(copy_of(readers[1]), copy_of(readers[0]))
            for base in (None, WeightVersion(1, max(0, version - 2))):
                first, second = (reader.fetch(newest, base).read_bytes() for reader in readers)
                assert first == second
        readers[1]._host.bits(next(iter(readers[1]._host.specs)))[0] ^= 1
        for path in (tmp_path / "3" / "updates").iterdir():
            path.unlink()
        with pytest.raises(SectionCorrupt, match="damaged in memory"):
            readers[1].fetch(newest, None)
        assert readers[1].poll(0) == newest
        assert same(copy_of(readers[1]), copy_of(readers[0]))
    finally:
        for reader in readers:
            reader.close()


def test_the_copy_can_be_written_as_a_checkpoint(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RoseError, match="no copy yet"):
        reader.export(tmp_path / "model.safetensors")
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    assert reader.export(tmp_path / "model.safetensors") == V("1.1")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, master in trainer.masters.items():
            expected = torch.from_numpy(master).to(torch.bfloat16)
            assert torch.equal(file.get_tensor(name), expected)
        assert file.get_tensor("codes").dtype == torch.float8_e4m3fn
        assert torch.equal(file.get_tensor("scales"), torch.from_numpy(trainer.scales))
        assert torch.equal(file.get_tensor("counter"), torch.from_numpy(trainer.counter))


def test_state_is_the_trainers(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    assert reader.state() == {n: statehash.to_hex(statehash.hash_bits(b)) for n, b in trainer.bits().items()}


def test_objects_deleted_while_reading_are_an_error_that_names_the_version(
    publisher: WeightPublisher, reader: WeightSubscriber, store: WatchedStore
) -> None:
    publisher.publish(0)

    def collected(key: str, offset: int, data: bytes) -> bytes:
        raise NotFound("no such object", field=key)

    store.twist = collected
    with pytest.raises(SectionCorrupt, match=r"1\.0 is incomplete"):
        reader.poll(0)
    assert store.leases("run") == []
