"""The step an engine is missing, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from rose.errors import Gone, NotFound, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights import codec, statehash
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from rose.weights.update import read_update
from tests.weights.subscriber.kit import V, WatchedStore, apply_update, copy_of, publish_steps, same
from tests.weights.toy import ToyTrainer


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


def test_a_step_is_decoded_once(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    publish_steps(publisher, trainer, 2, 2)
    decoded: list[int] = []
    decode = codec.decode

    def counted(payload: Any, num_elements: int, dtype: Any) -> Any:
        decoded.append(num_elements)
        return decode(payload, num_elements, dtype)

    monkeypatch.setattr(codec, "decode", counted)
    reader.poll(0)
    sections = len(decoded)
    assert sections > 0
    reader.fetch(V("1.2"), V("1.1"))
    assert len(decoded) == sections


def test_asking_again_gives_the_very_same_file(publisher: WeightPublisher, reader: WeightSubscriber) -> None:
    """An engine that still stages it tells by its identity that it need not begin anew."""
    publisher.publish(0)
    version = reader.poll(0)
    assert version is not None
    first = reader.fetch(version, None).stat()
    again = reader.fetch(version, None).stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


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
    assert len(list(reader._files.folder.iterdir())) <= 4
    spooled = sum(path.stat().st_size for path in reader._spool.folder.rglob("*") if path.is_file())
    assert spooled <= 0.8 * reader._host.nbytes
    trainer.step(lr=1e-2)
    publisher.publish(12)
    reader.poll(0)
    assert list(reader._spool.folder.iterdir()) == []  # an anchor makes the deltas before it useless


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


def test_the_copy_has_the_layout_of_a_checkpoint(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    torch = pytest.importorskip("torch")
    publish_steps(publisher, trainer, 0, 1)
    reader.poll(0)
    with safe_open(reader._host.path, "pt") as file:
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
