"""Anchors that others compose of signed versions, and what a composer believes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rose.auth import key_text, write_own
from rose.errors import (
    ConfigError,
    NotAuthentic,
)
from rose.signatures import PublicKeys, SigningKey
from rose.testing.memory_store import MemoryStore
from rose.weights import composer, manifest, stored_manifests
from rose.weights.cli import app as weights_app
from rose.weights.file_store import FileStore
from rose.weights.publisher import WeightPublisher
from rose.weights.sealed import SealedStore
from rose.weights.subscriber import WeightSubscriber
from tests.weights.signed_kit import publish, published
from tests.weights.subscriber.kit import PARAMS, V, copy_of, same
from tests.weights.toy import ToyTrainer


def test_an_anchor_that_a_delegate_composed_is_read(tmp_path: Path) -> None:
    key, trainer, plain = SigningKey.generate(), ToyTrainer(1), MemoryStore()
    published(SealedStore(plain, key=key), trainer, 3)
    elsewhere = SealedStore(plain, key=SigningKey.parse(key.delegate().text))
    record = composer.compose(elsewhere, "run", V("1.3"), PARAMS)
    assert record.kind == "anchor"
    reading = SealedStore(plain, trusted=PublicKeys.parse(key.public))
    assert stored_manifests.read(reading, "run", V("1.3"), "anchor") == record
    with pytest.raises(ConfigError, match="anchors only"):
        WeightPublisher(trainer.tensors, elsewhere, "run", 2, PARAMS).publish(0)
    stranger = SealedStore(plain, trusted=PublicKeys.parse(SigningKey.generate().public))
    with pytest.raises(NotAuthentic, match="not pinned"):
        stored_manifests.read(stranger, "run", V("1.3"), "anchor")


def test_a_trainer_takes_the_anchors_that_rose_weights_compose_makes(tmp_path: Path) -> None:
    key, trainer, folder = SigningKey.generate(), ToyTrainer(1), tmp_path / "store"
    write_own(tmp_path / "composer.key", key_text(key.delegate().text))
    params = replace(PARAMS, compose=False, anchor_every=2)
    publisher = WeightPublisher(trainer.tensors, SealedStore(FileStore(folder), key=key), "run", 1, params)
    publish(publisher, trainer, 0, 1, 2, 3)
    assert publisher.settle(10)
    command = [
        "compose",
        "run",
        "--directory",
        str(folder),
        "--key",
        str(tmp_path / "composer.key"),
        "--every",
        "2",
    ]

    done = CliRunner().invoke(weights_app, command)
    assert (done.exit_code, done.output.split()[:2]) == (0, ["composed", "1.3,"])
    publish(publisher, trainer, 4)
    assert publisher.settle(10)
    publish(publisher, trainer, 5)

    reading = SealedStore(FileStore(folder), trusted=PublicKeys.parse(key.public))
    assert stored_manifests.read(reading, "run", V("1.5"), "delta").anchor == (1, 3)
    reader = WeightSubscriber(reading, "run", tmp_path / "reader")
    assert reader.poll(0) == V("1.5")
    assert same(copy_of(reader), trainer.bits())
    reader.close()


@pytest.mark.parametrize("source", ["1.0", "1.2"])
def test_a_composer_signs_nothing_made_of_what_nobody_signed(source: str, tmp_path: Path) -> None:
    """Bytes with the right checksums and state hashes, which are not cryptographic, but not those of the digest."""
    key, trainer, plain = SigningKey.generate(), ToyTrainer(1), MemoryStore()
    store = SealedStore(plain, key=key)
    published(store, trainer, 3)
    kind = "anchor" if source == "1.0" else "delta"
    record = stored_manifests.read(store, "run", V(source), kind)
    lied = msgspec.structs.replace(
        record, objects=tuple(msgspec.structs.replace(each, blake3="0" * 64) for each in record.objects)
    )
    plain.delete(manifest.manifest_key("run", V(source), kind))
    plain.put_new(
        manifest.manifest_key("run", V(source), kind), store.seal(kind, "run", manifest.encode_manifest(lied))
    )
    before = plain.list("run/")

    with pytest.raises(NotAuthentic, match="is not what was signed"):
        composer.compose(store, "run", V("1.3"), PARAMS)
    assert plain.list("run/") == before
    reader = WeightSubscriber(SealedStore(plain, trusted=PublicKeys.parse(key.public)), "run", tmp_path / "r")
    with pytest.raises(NotAuthentic, match="is not what was signed"):
        reader.poll(0)
    reader.close()


def test_a_manifest_that_binds_no_digest_is_refused(tmp_path: Path) -> None:
    key, trainer, plain = SigningKey.generate(), ToyTrainer(1), MemoryStore()
    store = SealedStore(plain, key=key)
    published(store, trainer, 1)
    name = manifest.manifest_key("run", V("1.0"), "anchor")
    record = stored_manifests.read(store, "run", V("1.0"), "anchor")
    bare = msgspec.structs.replace(
        record, objects=tuple(msgspec.structs.replace(each, blake3=None) for each in record.objects)
    )
    plain.delete(name)
    plain.put_new(name, store.seal("anchor", "run", manifest.encode_manifest(bare)))
    reader = WeightSubscriber(SealedStore(plain, trusted=PublicKeys.parse(key.public)), "run", tmp_path / "r")
    with pytest.raises(NotAuthentic, match="named without a BLAKE3 digest"):
        reader.poll(0)
    reader.close()
