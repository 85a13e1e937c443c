"""A relay that lies, and whoever has its token or its folder: refused, with the reason, and the trainer goes on.

The relay is ``rose relay`` in a process of its own, readers and trainer speak HTTP to it.  The liar changes what lies in its folder, as
whoever runs it can; a relay that was given no public key serves it as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rose.auth import Tokens
from rose.errors import (
    ConfigError,
    NotAuthentic,
    RolledBack,
    RoseError,
    SectionCorrupt,
    Unauthorized,
    VersionRefused,
)
from rose.lineage import WeightVersion
from rose.signatures import PublicKeys, SigningKey
from rose.testing.memory_store import MemoryStore
from rose.weights import manifest, stored_manifests
from rose.weights.file_store import FileStore
from rose.weights.http_store import HttpStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.sealed import SealedStore, sealed_head
from rose.weights.source import RawBits
from rose.weights.store import ObjectStore
from rose.weights.stores import open_store, trainer_store
from rose.weights.subscriber import WeightSubscriber
from tests.weights.relay_process import ForkedRelay, RelayProcess
from tests.weights.signed_kit import publish, published
from tests.weights.subscriber.kit import PARAMS, V, copy_of, same
from tests.weights.toy import ToyTrainer


@dataclass
class World:
    """A trainer that published versions 1.0 to 1.2 through a relay, and who reads them."""

    relay: RelayProcess
    folder: Path
    key: SigningKey
    trainer: ToyTrainer = field(default_factory=lambda: ToyTrainer(1))
    readers: list[WeightSubscriber] = field(default_factory=list)

    @property
    def files(self) -> Path:
        return self.folder / "relay"

    def store(self, *, key: SigningKey | None = None, token: str = "") -> SealedStore:
        plain = HttpStore(self.relay.url, token or self.relay.tokens.publish, patience_s=5)
        return SealedStore(plain, key=key or self.key)

    def publisher(self, attempt: int = 1) -> WeightPublisher:
        return WeightPublisher(self.trainer.tensors, self.store(), "run", attempt, PARAMS)

    def reader(self, name: str = "reader") -> WeightSubscriber:
        plain = HttpStore(self.relay.url, self.relay.tokens.relay, patience_s=5)
        trusted = PublicKeys.parse(self.key.public)
        # What was pulled before the lie was told would not hear it.
        params = WeightsParams(pull_ahead=False)
        reader = WeightSubscriber(SealedStore(plain, trusted=trusted), "run", self.folder / name, params)
        self.readers.append(reader)
        return reader

    def object(self, version: str) -> Path:
        folder = self.files / "objects" / "run" / version
        return next(path for path in sorted(folder.iterdir()) if path.suffix != ".json")

    def manifest(self, version: str, kind: str = "delta") -> Path:
        return self.files / "objects" / "run" / version / f"{kind}.json"

    @property
    def head(self) -> Path:
        return self.files / "runs" / "run" / "head.json"


@pytest.fixture
def lying(tmp_path: Path) -> Iterator[World]:
    """Of a relay that checks nothing."""
    yield from a_world(tmp_path, signed=False)


@pytest.fixture
def honest(tmp_path: Path) -> Iterator[World]:
    """Of a relay whose token file is one of ``rose tokens``."""
    yield from a_world(tmp_path, signed=True)


def a_world(folder: Path, *, signed: bool) -> Iterator[World]:
    with ForkedRelay(folder, signed=signed) as relay:
        key = SigningKey.parse(relay.tokens.publish_key) if signed else SigningKey.generate()
        world = World(relay, folder, key)
        yield world
        for reader in world.readers:
            reader.close()


def zeros(world: World) -> dict[str, object]:
    """The trainer's model, with nothing in it."""
    bits = {name: np.zeros_like(each) for name, each in world.trainer.masters.items()}
    return {**world.trainer.tensors(), **bits, "codes": RawBits(np.zeros((40, 40), np.uint8), "F8_E4M3")}


def forged(world: World, attempt: int, version: int, key: SigningKey | None = None) -> ObjectStore:
    """A whole version of zeros in the relay's folder, with a head that agrees: by whoever can write there."""
    files = FileStore(world.files)
    head = files.get_head("run")
    mine = files if key is None else SealedStore(files, key=key)
    if head is not None:
        (world.files / "runs" / "run" / "head.json").unlink()
    WeightPublisher(lambda: zeros(world), mine, "run", attempt, PARAMS).publish(version)
    return files


def test_signed_versions_arrive(honest: World) -> None:
    publisher, reader = honest.publisher(), honest.reader()
    publish(publisher, honest.trainer, 0, 1, 2)
    assert reader.poll(5) == V("1.2")
    assert same(copy_of(reader), honest.trainer.bits())
    assert all(
        each.blake3 for each in stored_manifests.read(honest.store(), "run", V("1.1"), "delta").objects
    )


def replaced_object(world: World) -> None:
    path = world.object("1.1")
    path.write_bytes(bytes(len(path.read_bytes())))


def unsigned_head(world: World) -> None:
    forged(world, 1, 3)


def forged_attempt(world: World) -> None:
    forged(world, 999, 0)


def resigned(world: World) -> None:
    forged(world, 999, 0, SigningKey.generate())


def signed_by_a_delegate(world: World) -> None:
    """A head of a delegated key, which its own program would not make."""
    delegated = world.key.delegate()
    head = FileStore(world.files).get_head("run")
    assert head is not None
    alone = SigningKey(delegated.private)
    bare = msgspec.structs.replace(head, version=9, seal=None)
    bare = msgspec.structs.replace(
        bare,
        manifest=msgspec.structs.replace(
            bare.manifest, key=manifest.manifest_key("run", V("1.9"), bare.kind)
        ),
    )
    seal = sealed_head(bare, alone).seal
    seal = f"{seal}:{delegated.issuer}:{delegated.delegation}"
    world.head.write_bytes(manifest.encode(msgspec.structs.replace(bare, seal=seal)))


def replaced_manifest(world: World) -> None:
    """Another manifest that the same key signed for the same run, in the place of the head's."""
    world.manifest("1.2").write_bytes(world.manifest("1.1").read_bytes())


def unsealed_manifest(world: World) -> None:
    _, body = manifest.split_seal(world.manifest("1.1").read_bytes())
    world.manifest("1.1").write_bytes(body)


def of_another_run(world: World) -> None:
    """What the same key signed under another name."""
    other = WeightPublisher(lambda: zeros(world), world.store(), "other", 1, PARAMS)
    other.publish(0)
    other.publish(1)
    source = world.files / "objects" / "other" / "1.1" / "delta.json"
    world.manifest("1.1").write_bytes(source.read_bytes().replace(b"other", b"run"))


def head_of_another_run(world: World) -> None:
    other = WeightPublisher(lambda: zeros(world), world.store(), "other", 999, PARAMS)
    other.publish(0)
    source = world.files / "runs" / "other" / "head.json"
    world.head.write_bytes(source.read_bytes().replace(b"other", b"run"))


LIES: list[tuple[Callable[[World], None], str]] = [
    (replaced_object, "is not what was signed: damaged at rest, or replaced"),
    (unsigned_head, r"is not signed.*weights\.signed = false"),
    (forged_attempt, "head 999.0 of run: is not signed"),
    (resigned, "head 999.0 of run: is signed by ed25519:.*, which is not pinned here"),
    (signed_by_a_delegate, "delegated key, which may sign anchors only"),
    (replaced_manifest, "is not what the head names"),
    (unsealed_manifest, "1.1/delta.json: is not signed"),
    (of_another_run, "1.1/delta.json: is not what was signed"),
    (head_of_another_run, "head 999.0 of run: is not what was signed"),
]


@pytest.mark.parametrize(("lie", "reason"), LIES, ids=[lie.__name__ for lie, _ in LIES])
def test_a_lie_is_refused_and_named_and_the_copy_stays(
    lying: World, lie: Callable[[World], None], reason: str
) -> None:
    publisher, reader, new = lying.publisher(), lying.reader(), lying.reader("new")
    publish(publisher, lying.trainer, 0)
    assert reader.poll(5) == V("1.0")
    before = copy_of(reader)
    publish(publisher, lying.trainer, 1, 2)

    lie(lying)

    for each in (reader, new):
        with pytest.raises(NotAuthentic if "names" not in reason else SectionCorrupt, match=reason):
            each.poll(1)
    assert reader.version in (V("1.0"), V("1.1"))
    if reader.version == V("1.0"):
        assert same(copy_of(reader), before)
    assert new.version in (None, V("1.0"), V("1.1"))


def test_no_flipped_bit_of_head_or_manifest_is_taken(lying: World) -> None:
    publish(lying.publisher(), lying.trainer, 0, 1)
    rng = np.random.default_rng(7)
    reader = lying.reader()
    for path in (lying.head, lying.manifest("1.1")):
        good = path.read_bytes()
        for place in rng.integers(0, len(good), 60):
            bad = bytearray(good)
            bad[place] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(bad)
            try:
                reader.poll(0)
            except RoseError:
                pass
            else:  # bits of a seal's last characters that no byte has
                assert reader.version in (None, V("1.1"))
        path.write_bytes(good)
    reader.poll(1)
    assert same(copy_of(reader), lying.trainer.bits())


def test_a_store_that_went_back_is_refused_by_who_saw_more_also_after_a_restart(lying: World) -> None:
    publisher, reader = lying.publisher(), lying.reader()
    publish(publisher, lying.trainer, 0, 1)
    old = lying.head.read_bytes()
    publish(publisher, lying.trainer, 2, 3)
    assert reader.poll(5) == V("1.3")

    lying.head.write_bytes(old)

    with pytest.raises(RolledBack, match=r"store is at 1\.1, and 1\.3 was there before"):
        reader.poll(0.2)
    reader.close()
    (lying.folder / "reader" / "state.json").unlink()  # the copy is gone, what was seen is not
    again = lying.reader()
    with pytest.raises(RolledBack, match=r"1\.3 was there before.*seen"):
        again.poll(0.2)
    assert again.version is None
    lying.head.unlink()
    with pytest.raises(RolledBack, match="names no head"):
        again.poll(0.2)


def test_a_node_that_restarts_under_a_store_that_went_back_has_its_own_copy(lying: World) -> None:
    publisher, reader = lying.publisher(), lying.reader()
    publish(publisher, lying.trainer, 0)
    old = lying.head.read_bytes()
    publish(publisher, lying.trainer, 1)
    assert reader.poll(5) == V("1.1")
    reader.close()
    lying.head.write_bytes(old)

    again = lying.reader()
    with pytest.raises(RolledBack):  # it is said, and then the copy is handed out
        again.poll(0.2)
    assert again.poll(0.2) == V("1.1")
    assert same(copy_of(again), lying.trainer.bits())
    with pytest.raises(RolledBack):
        again.poll(0.2)


def test_a_new_reader_has_the_schedulers_word(lying: World) -> None:
    publisher = lying.publisher()
    publish(publisher, lying.trainer, 0, 1)
    old = lying.head.read_bytes()
    publish(publisher, lying.trainer, 2, 3)
    lying.head.write_bytes(old)
    reader = lying.reader()
    reader.require(V("1.3"))

    with pytest.raises(RolledBack, match=r"store is at 1\.1, and the trainer has published 1\.3"):
        reader.poll(0.2)

    publish(publisher, lying.trainer, 4)
    assert reader.poll(5) == V("1.4"), "the trainer went on from the store as it was"
    assert same(copy_of(reader), lying.trainer.bits())


@pytest.mark.parametrize("role", ["agent", "node", "relay"])
def test_a_token_that_is_not_the_trainers_writes_nothing(honest: World, role: str) -> None:
    publisher, reader = honest.publisher(), honest.reader()
    publish(publisher, honest.trainer, 0)
    token = getattr(honest.relay.tokens, role)
    thief = HttpStore(honest.relay.url, token, patience_s=2)
    before = sorted(path for path in honest.files.rglob("*") if path.is_file())

    with pytest.raises(Unauthorized, match="of role publish is needed" if role == "relay" else "is needed"):
        WeightPublisher(lambda: zeros(honest), thief, "run", 999, PARAMS).publish(0)
    with pytest.raises(Unauthorized, match="of role publish"):
        thief.delete(manifest.manifest_key("run", V("1.0"), "anchor"))

    assert sorted(path for path in honest.files.rglob("*") if path.is_file()) == before
    publish(publisher, honest.trainer, 1)
    assert reader.poll(5) == V("1.1")


def test_the_publish_token_without_the_key_moves_no_head(honest: World) -> None:
    publisher, reader = honest.publisher(), honest.reader()
    publish(publisher, honest.trainer, 0)
    thief = HttpStore(honest.relay.url, honest.relay.tokens.publish, patience_s=2)
    for store in (thief, SealedStore(thief, key=SigningKey.generate())):
        with pytest.raises(RoseError, match=r"head 999\.0 of run.*(is not signed|not pinned)"):
            WeightPublisher(lambda: zeros(honest), store, "run", 999, PARAMS).publish(0)

    publish(publisher, honest.trainer, 1)
    assert reader.poll(5) == V("1.1")
    assert same(copy_of(reader), honest.trainer.bits())


def test_a_forged_head_in_the_folder_keeps_nobody_out(honest: World) -> None:
    publisher, reader = honest.publisher(), honest.reader()
    publish(publisher, honest.trainer, 0)
    assert reader.poll(5) == V("1.0")

    forged(honest, 999, 0)
    publish(publisher, honest.trainer, 1)

    assert reader.poll(5) == V("1.1")
    forged(honest, 999, 1, SigningKey.generate())
    restarted = honest.publisher(attempt=2)
    publish(restarted, honest.trainer, 2)
    assert reader.poll(5) == V("2.2")
    assert same(copy_of(reader), honest.trainer.bits())


@pytest.mark.parametrize("content", [b"", b"{}", b"garbage"])
def test_a_forged_manifest_in_the_trainers_way_is_removed(honest: World, content: bytes) -> None:
    publisher, reader = honest.publisher(), honest.reader()
    publish(publisher, honest.trainer, 0)
    thief = HttpStore(honest.relay.url, honest.relay.tokens.publish, patience_s=2)
    thief.put_new(manifest.manifest_key("run", V("1.1"), "delta"), content)
    thief.put_new(manifest.manifest_key("run", V("1.1"), "anchor"), content)

    publish(publisher, honest.trainer, 1)

    assert reader.poll(5) == V("1.1")
    assert same(copy_of(reader), honest.trainer.bits())


def test_a_folder_without_a_relay_locks_the_trainer_out_no_more(tmp_path: Path) -> None:
    key, trainer = SigningKey.generate(), ToyTrainer(1)
    publisher = WeightPublisher(
        trainer.tensors, SealedStore(FileStore(tmp_path / "relay"), key=key), "run", 1, PARAMS
    )
    publish(publisher, trainer, 0)
    head = tmp_path / "relay" / "runs" / "run" / "head.json"
    for bad in (head.read_bytes().replace(b'"attempt":1', b'"attempt":999'), b"garbage", b""):
        head.write_bytes(bad)
        assert publisher.published is not None
        publish(publisher, trainer, publisher.published.version + 1)
    reader = WeightSubscriber(
        SealedStore(FileStore(tmp_path / "relay"), trusted=PublicKeys.parse(key.public)),
        "run",
        tmp_path / "r",
    )
    assert reader.poll(1) == V("1.3")
    reader.close()


def test_a_forged_head_in_any_store_keeps_the_trainer_out_no_more(tmp_path: Path) -> None:
    key, trainer, url = SigningKey.generate(), ToyTrainer(1), f"memory://forged{tmp_path}"
    publisher = WeightPublisher(trainer.tensors, open_store(url, key=key), "run", 1, PARAMS)
    publish(publisher, trainer, 0)
    reader = WeightSubscriber(open_store(url, trusted=PublicKeys.parse(key.public)), "run", tmp_path / "r")
    assert reader.poll(0) == V("1.0")
    head = open_store(url).get_head("run")
    assert head is not None
    forgery = msgspec.structs.replace(
        head, attempt=999, manifest=msgspec.structs.replace(head.manifest, key="run/999.0/anchor.json")
    )
    open_store(url).set_head(forgery, expected=V("1.0"))
    with pytest.raises(NotAuthentic, match=r"head 999\.0 of run: is not what was signed"):
        reader.poll(0)

    publish(publisher, trainer, 1)

    assert reader.poll(0) == V("1.1")
    assert same(copy_of(reader), trainer.bits())
    reader.close()


def test_a_trainer_that_pins_the_old_key_beside_its_new_one_goes_on(tmp_path: Path) -> None:
    """As docs/operating.md says it: both at the relay and the nodes, and both in the trainer's token file."""
    old, new = Tokens.generate(), SigningKey.generate()
    both = f"{old.public_key} {new.public}"
    tokens = replace(old, public_key=both)
    with ForkedRelay(tmp_path, tokens=tokens) as relay:
        trainer = ToyTrainer(1)
        publish(
            WeightPublisher(trainer.tensors, trainer_store(relay.url, tokens), "run", 1, PARAMS), trainer, 0
        )
        reader = WeightSubscriber(
            open_store(relay.url, old.relay, trusted=PublicKeys.parse(both)), "run", tmp_path / "reader"
        )
        assert reader.poll(5) == V("1.0")

        forgot = replace(tokens, publish_key=new.text, public_key=new.public)
        with pytest.raises(
            VersionRefused, match=r"^public_key: head 1\.0 of run.*not pinned.*pin that key here too"
        ):
            WeightPublisher(trainer.tensors, trainer_store(relay.url, forgot), "run", 2, PARAMS).publish(0)

        store = trainer_store(relay.url, replace(tokens, publish_key=new.text))
        publish(WeightPublisher(trainer.tensors, store, "run", 2, PARAMS), trainer, 1)
        assert reader.poll(5) == V("2.1")
        assert same(copy_of(reader), trainer.bits())
        reader.close()


def test_an_unsigned_store_of_before_is_refused_with_the_fix_and_read_where_it_is_trusted(
    tmp_path: Path,
) -> None:
    trainer, plain = ToyTrainer(1), MemoryStore()
    publisher = published(plain, trainer, 2)
    key = SigningKey.generate()
    careful = WeightSubscriber(
        SealedStore(plain, trusted=PublicKeys.parse(key.public)), "run", tmp_path / "c"
    )
    trusting = WeightSubscriber(plain, "run", tmp_path / "t")
    with pytest.raises(NotAuthentic, match=r"is not signed.*rose tokens --upgrade.*weights\.signed = false"):
        careful.poll(0)
    assert trusting.poll(0) == V("1.2")
    publisher.close()

    # From here on the trainer signs: a new attempt, and everybody follows.
    trainer.step()
    WeightPublisher(trainer.tensors, SealedStore(plain, key=key), "run", 2, PARAMS).publish(3)
    for reader in (careful, trusting):
        assert reader.poll(0) == WeightVersion(2, 3)
        assert same(copy_of(reader), trainer.bits())
        reader.close()


def test_a_relays_folder_moved_elsewhere_is_as_authentic_as_before(honest: World, tmp_path: Path) -> None:
    publish(honest.publisher(), honest.trainer, 0, 1)
    shutil.copytree(honest.files, tmp_path / "moved")
    reader = WeightSubscriber(
        SealedStore(FileStore(tmp_path / "moved"), trusted=PublicKeys.parse(honest.key.public)),
        "run",
        tmp_path / "elsewhere",
    )
    assert reader.poll(0) == V("1.1")
    reader.close()


def test_the_key_has_to_be_one_that_is_pinned() -> None:
    tokens = Tokens.generate()
    with pytest.raises(ConfigError, match=r"is not pinned.*nodes would refuse"):
        SealedStore(MemoryStore(), trusted=PublicKeys.parse(tokens.public_key), key=SigningKey.generate())
    with pytest.raises(ConfigError, match="needs a public key"):
        SealedStore(MemoryStore())
