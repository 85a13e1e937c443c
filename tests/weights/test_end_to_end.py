"""Trainer to engine over a real relay, across restarts of everything: bit-identical at every version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from rose.auth import Tokens, key_text, write_own
from rose.errors import ConfigError, NotAuthentic, NotFound
from rose.lineage import WeightVersion
from rose.signatures import SigningKey
from rose.testing.relay_thread import RelayThread
from rose.weights import manifest, stored_manifests
from rose.weights.cli import app
from rose.weights.file_store import FileStore
from rose.weights.http_store import HttpStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.sealed import SealedStore
from rose.weights.stores import open_store
from rose.weights.subscriber import WeightSubscriber
from rose.weights.update import read_update
from tests.weights.subscriber.kit import apply_update, same
from tests.weights.toy import DEFAULT_LR, ToyTrainer

PARAMS = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 17, anchor_every=6)


class Engine:
    """Holds weights, knows its version, takes update files; checks what a real engine checks."""

    def __init__(self) -> None:
        self.version: WeightVersion | None = None
        self.bits: dict[str, np.ndarray] = {}

    def follow(self, subscriber: WeightSubscriber) -> None:
        newest = subscriber.poll(20)
        assert newest is not None
        update = read_update(subscriber.fetch(newest, self.version))
        assert update.target == newest
        self.bits = apply_update(self.bits, update)
        self.version = newest


@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_random_versions_through_restarts_of_relay_trainer_and_node(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    tokens = Tokens.generate()

    def start_relay(port: int = 0) -> RelayThread:
        return RelayThread(FileStore(tmp_path / "relay", durable=False), tokens, port=port).start()

    relay = start_relay()
    port = int(relay.url.rsplit(":", 1)[1])
    store = HttpStore(relay.url, tokens.publish, patience_s=20)
    trainer, attempt, version = ToyTrainer(seed), 1, 0
    publisher = WeightPublisher(trainer.tensors, store, "run", attempt, PARAMS)
    steady, lazy = Engine(), Engine()  # one takes every version, one only some
    kinds: list[str] = []
    subscribers = {name: WeightSubscriber(store, "run", tmp_path / name) for name in ("steady", "lazy")}
    try:
        for number in range(20):
            if number == 8:  # the trainer dies and comes back from an older checkpoint
                attempt, version = 2, 4
                trainer = ToyTrainer(seed + 100)
                publisher = WeightPublisher(trainer.tensors, store, "run", attempt, PARAMS)
            if number in (5, 13):
                relay.stop()
                relay = start_relay(port)
            if number in (6, 15):  # the node agent restarts; its engine lives on
                subscribers["steady"].close()
                subscribers["steady"] = WeightSubscriber(store, "run", tmp_path / "steady")
                assert subscribers["steady"].poll(0) == steady.version
            report = publisher.publish(version)
            kinds.append(report.kind)
            steady.follow(subscribers["steady"])
            assert same(steady.bits, trainer.bits())
            if rng.random() < 0.3 or number == 19:
                lazy.follow(subscribers["lazy"])
                assert same(lazy.bits, trainer.bits())
            version += 1
            trainer.step(float(rng.choice([0.0, DEFAULT_LR, 5 * DEFAULT_LR, 1e-2], p=[0.1, 0.6, 0.2, 0.1])))
        assert steady.version == lazy.version == WeightVersion(2, 15)
        assert kinds.count("delta") >= 10
        assert kinds[0] == kinds[8] == "anchor"
    finally:
        for subscriber in subscribers.values():
            subscriber.close()
        store.close()
        relay.stop()


# --- the command line -------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path) -> FileStore:
    """Run ``run`` at 1.3: an anchor and three deltas."""
    store = FileStore(tmp_path / "store", durable=False)
    trainer = ToyTrainer(3)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, PARAMS)
    for version in range(4):
        publisher.publish(version, step=version, lr=1e-6)
        trainer.step()
    return store


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_ls_shows_every_version_and_marks_the_head(published: FileStore) -> None:
    code, text = run("ls", "run", "--directory", published.directory)
    lines = text.splitlines()
    assert code == 0
    assert [line.split()[:3] for line in lines[1:]] == [
        ["1.0", "anchor", "-"],
        ["1.1", "delta", "1.0"],
        ["1.2", "delta", "1.1"],
        ["1.3", "delta", "1.2"],
    ]
    assert [line.endswith("<- head") for line in lines[1:]] == [False, False, False, True]


def test_verify_proves_a_good_store(published: FileStore) -> None:
    code, text = run("verify", "run", "--directory", published.directory)
    assert code == 0
    assert "1.3 rebuilt; 8 state hashes prove it" in text
    assert [line.split()[-1] for line in text.splitlines()[:4]] == ["ok"] * 4


def test_verify_names_the_damaged_object(published: FileStore) -> None:
    key = next(k for k in published.list("run/1.2/") if not k.endswith(".json"))
    path = published.path_of(key)
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    code, text = run("verify", "run", "--directory", published.directory)
    assert code == 1
    assert f"{key}: checksum is wrong" in text
    assert "head cannot be rebuilt" in text


def test_a_damaged_manifest_is_one_line_and_hides_no_other_version(published: FileStore) -> None:
    published.path_of("run/1.1/delta.json").write_bytes(b"{")
    code, text = run("verify", "run", "--directory", published.directory)
    assert code == 1
    assert [line.split()[0] for line in text.splitlines()[:4]] == ["1.0", "1.1", "1.2", "1.3"]
    assert "malformed" in text.splitlines()[1]
    assert [line.split()[-1] for line in text.splitlines()[2:4]] == ["ok", "ok"]
    code, text = run("ls", "run", "--directory", published.directory)
    assert code == 0
    assert "damaged" in text.splitlines()[2]
    assert text.splitlines()[4].endswith("<- head")


def test_diff_counts_what_changed_between_two_versions(published: FileStore) -> None:
    code, text = run("diff", "run", "1.0", "1.1", "--directory", published.directory)
    record = stored_manifests.read(published, "run", WeightVersion(1, 1), "delta")
    counts = {t.name: 0 for t in record.tensors}
    for section in record.sections:
        counts[section.tensor] += section.num_changed
    lines = text.splitlines()
    differing = [name for name, count in counts.items() if count]
    assert code == 0
    assert (
        lines[0] == f"1.0 -> 1.1: {len(differing)} tensors differ, {len(counts) - len(differing)} are equal"
    )
    shown = {line.split()[-1]: int(line.split()[0]) for line in lines[2:]}
    assert shown == {name: counts[name] for name in differing}
    assert list(shown.values()) == sorted(shown.values(), reverse=True)


def test_diff_of_a_version_with_itself_and_of_two_lineages(published: FileStore) -> None:
    assert "0 tensors differ" in run("diff", "run", "1.3", "--directory", published.directory)[1]
    WeightPublisher(ToyTrainer(9).tensors, published, "run", 2, WeightsParams(collect=False)).publish(0)
    code, text = run("diff", "run", "1.3", "2.0", "--directory", published.directory)
    assert code == 0
    assert "not joined by deltas" in text
    with pytest.raises(NotFound, match=r"version 1\.9 is not"):
        run("diff", "run", "1.9", "--directory", published.directory)


def test_the_command_line_opens_any_store(tmp_path: Path) -> None:
    url = f"memory://cli{tmp_path}"
    WeightPublisher(ToyTrainer(3).tensors, open_store(url), "run", 1, PARAMS).publish(0)
    assert run("ls", "run", "--relay", url)[1].splitlines()[-1].endswith("<- head")
    assert run("verify", "run", "--relay", url)[0] == 0


def test_gc_deletes_only_what_no_reader_can_need(published: FileStore) -> None:
    assert run("gc", "run", "--directory", published.directory) == (0, "deleted 0 versions\n")
    trainer = ToyTrainer(4)
    WeightPublisher(trainer.tensors, published, "run", 2, WeightsParams(collect=False)).publish(0)
    assert run("gc", "run", "--directory", published.directory) == (0, "deleted 4 versions, up to 1.3\n")
    assert {str(v) for v in manifest.versions_in(published.list("run/"), "run")} == {"2.0"}


def test_the_command_line_speaks_to_a_relay(published: FileStore, tmp_path: Path) -> None:
    tokens = Tokens.generate()
    tokens.save(tmp_path / "tokens.toml")
    with RelayThread(published, tokens) as relay:
        asked = ["verify", "run", "--relay", relay.url, "--token-file", tmp_path / "tokens.toml"]
        code, text = run(*asked)
        assert code == 1, "the token file names a key, and nobody signed this"
        assert "head cannot be rebuilt: head 1.3 of run: is not signed" in text
        code, text = run(*asked, "--public-key", "none")
        assert code == 0
        assert "1.3 rebuilt" in text
        signed = HttpStore(relay.url, tokens.publish)
        key = SigningKey.parse(tokens.publish_key)
        WeightPublisher(ToyTrainer(3).tensors, SealedStore(signed, key=key), "signed", 1, PARAMS).publish(0)
        code, text = run("verify", "signed", *asked[2:])
        assert code == 0
        assert "1.0 rebuilt" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "run"],
        ["ls", "run", "--directory", "/nowhere"],
        ["ls", "run", "--relay", "x", "--directory", "y"],
    ],
)
def test_bad_arguments_are_one_clear_error(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        run(*arguments)


@pytest.mark.parametrize(
    "command", [["ls"], ["verify"], ["gc"], ["diff", "1.0"], ["compose", "--key", "KEY"]], ids=lambda c: c[0]
)
def test_a_run_that_nobody_published_is_said_to_be_none(
    published: FileStore, tmp_path: Path, command: list[str]
) -> None:
    write_own(tmp_path / "anchor.key", key_text(SigningKey.generate().text))
    name, *rest = [str(tmp_path / "anchor.key") if part == "KEY" else part for part in command]
    with pytest.raises(NotFound, match=r"^nobody: no version is published \(there are: run\)$"):
        run(name, "nobody", *rest, "--directory", published.directory)


def test_a_diff_that_goes_backwards_says_how_it_is_meant(published: FileStore) -> None:
    with pytest.raises(ConfigError, match=r"rose weights diff run 1\.1 1\.2"):
        run("diff", "run", "1.2", "1.1", "--directory", published.directory)


def test_a_version_that_is_not_the_head_yet_is_marked(published: FileStore) -> None:
    head = published.get_head("run")
    assert head is not None
    record = stored_manifests.read(published, "run", head.identity, head.kind)
    later = msgspec.structs.replace(record, version=4)
    published.put_new(manifest.manifest_key("run", later.identity, "delta"), manifest.encode_manifest(later))
    code, text = run("ls", "run", "--directory", published.directory)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines() if line.endswith("not the head yet)")] == ["1.4"]


def test_the_command_composes_one_anchor_in_so_many_versions(tmp_path: Path) -> None:
    """Also where the trainer's next delta does not name it yet."""
    key, trainer = SigningKey.generate(), ToyTrainer(3)
    write_own(tmp_path / "tokens.key", key_text(key.text))
    store = SealedStore(FileStore(tmp_path / "store", durable=False), key=key)
    params = replace(PARAMS, compose=False)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, params)
    told = []
    for version in range(7):
        publisher.publish(version)
        trainer.step()
        command = ["compose", "run", "--every", "2", "--key", tmp_path / "tokens.key"]
        told.append(run(*command, "--directory", tmp_path / "store")[1].split(",")[0].strip())
    assert [text for text in told if text.startswith("composed")] == [
        "composed 1.2",
        "composed 1.4",
        "composed 1.6",
    ]
    code, text = run(*command, "--directory", tmp_path / "store")
    assert (code, text.strip()) == (0, "there is an anchor of 1.6")


@pytest.mark.parametrize("delegated", [False, True])
def test_a_composer_with_another_key_is_told_so(delegated: bool, tmp_path: Path) -> None:
    trainer = ToyTrainer(3)
    store = SealedStore(FileStore(tmp_path / "store", durable=False), key=SigningKey.generate())
    WeightPublisher(trainer.tensors, store, "run", 1, PARAMS).publish(0)
    other = SigningKey.generate()
    write_own(tmp_path / "other.key", key_text((other.delegate() if delegated else other).text))
    with pytest.raises(NotAuthentic, match=r"^key: head 1\.0 of run.*not pinned.*--anchor-key"):
        run("compose", "run", "--key", tmp_path / "other.key", "--directory", tmp_path / "store")
