"""WeightSubscriber: always one proven version or nothing, whatever arrives."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pytest

from rose.errors import CapacityError, SectionCorrupt, WrongBase
from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights import codec, manifest, stored_manifests
from rose.weights.manifest import Manifest, ManifestSection, ObjectRef
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from rose.weights.update import read_update
from tests.weights.subscriber.kit import PARAMS, V, WatchedStore, apply_update, copy_of, publish_steps, same
from tests.weights.test_codec import payload_of
from tests.weights.toy import ToyTrainer


def sections_of(store: MemoryStore, version: str) -> Manifest:
    return stored_manifests.read(store, "run", V(version), "delta")


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


def other_values(payload: bytes, section: ManifestSection, dtype: str) -> bytes:
    """The same indices with another step in the first place: a decoder or a trainer gone wrong."""
    if section.encoding == "raw":
        return bytes([payload[0] ^ 1]) + payload[1:]
    delta = codec.decode(payload, section.num_elements, dtype)
    d = delta.d.copy()
    d[0] = 2 if d[0] != 2 else 3
    return payload_of(codec.Delta(idx=delta.idx, d=d), section.num_elements)


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
    publish_steps(publisher, trainer, 2, 4)  # 1.3 gets an anchor, from which 1.4 starts
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
    publish_steps(publisher, trainer, 1, 2)
    reader.poll(0)
    name = "model.embed_tokens.weight"
    changed = np.flatnonzero(start[name] != trainer.bits()[name])
    reader._host.bits(name)[changed[0]] ^= 0x100
    step = read_update(reader.fetch(V("1.2"), V("1.0")))
    with pytest.raises(AssertionError):  # the engine refuses it, and takes all
        apply_update(start, step)
    with pytest.raises(SectionCorrupt, match=f"{name}.*damaged in memory"):
        reader.fetch(V("1.2"), None)
    assert reader.poll(0) == V("1.2")  # repaired, without anybody's asking
    for base, held in [(None, {}), (V("1.0"), start)]:
        assert same(apply_update(held, read_update(reader.fetch(V("1.2"), base))), trainer.bits())


def test_the_step_to_the_newest_version_is_what_came_and_not_what_memory_says_since(
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
    assert same(apply_update(start, read_update(reader.fetch(V("1.1"), V("1.0")))), trainer.bits())


def test_what_was_pulled_of_a_version_now_passed_over_makes_room_first(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, store: WatchedStore
) -> None:
    """On a full disk nothing newer would ever arrive."""
    publish_steps(publisher, trainer, 0, 1)
    stale = reader._spool.folder / "1.0"
    stale.mkdir()
    (stale / "0000.00000-abc.part").write_bytes(b"x" * 1000)
    seen: list[bool] = []

    def look(key: str, offset: int, data: bytes) -> bytes:
        seen.append((stale / "0000.00000-abc.part").exists())
        return data

    publisher.publish(2)
    stored_manifests.read(store, "run", V("1.0"), "anchor")
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
    monkeypatch.setattr("rose.weights.spool.PULL_BYTES", 1 << 14)
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
    monkeypatch.setattr("rose.weights.spool.PULL_BYTES", 10_000)
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


def test_a_disk_that_is_full_before_an_update_file_is_whole_is_named_and_no_part_of_it_stays(
    publisher: WeightPublisher, reader: WeightSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(0)
    version = reader.poll(0)
    assert version is not None

    def no_room(file: BinaryIO, *arguments: Any) -> None:
        file.write(b"a part of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("rose.weights.update._save", no_room)
        with pytest.raises(CapacityError, match="No space left") as caught:
            reader.fetch(version, None)
    assert caught.value.status == 507
    assert list(reader._files.folder.iterdir()) == []
    assert reader.fetch(version, None).exists()


def test_a_copy_that_is_of_no_use_any_more_makes_room_first(
    publisher: WeightPublisher,
    reader: WeightSubscriber,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the middle of a commit: the file is there, and of no version."""
    publisher.publish(0)
    reader.poll(0)
    host = reader._host
    host.begin()
    host._unmap()
    assert host.path.exists()
    reserve = os.posix_fallocate

    def reserved(*arguments: Any) -> None:
        assert not host.path.exists()
        reserve(*arguments)

    monkeypatch.setattr("os.posix_fallocate", reserved)
    reader.poll(0)
    assert reader.version == V("1.0")


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
