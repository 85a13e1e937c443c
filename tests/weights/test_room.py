"""A subscriber looks at the room before it writes, and says which setting gives it more."""

from __future__ import annotations

import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rose.errors import CapacityError, ConfigError
from rose.lineage import WeightVersion
from rose.weights.cli import app
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.test_faults import PARAMS, FileStore, ToyTrainer, copy_of, same

Usage = namedtuple("Usage", "total used free")


class Disk:
    """What the file system says it has left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 1 << 40
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, self.free))


def written(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.stat().st_size
    )


def test_a_version_that_does_not_fit_is_refused_before_its_first_byte_and_taken_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, trainer = Disk(monkeypatch), ToyTrainer(1)
    model_bytes = sum(bits.nbytes for bits in trainer.bits().values())
    store = FileStore(tmp_path / "store", durable=False)
    WeightPublisher(trainer.tensors, store, "run", 1, PARAMS).publish(0)
    reader = WeightSubscriber(store, "run", tmp_path / "reader")
    disk.free = 2 * model_bytes - 1  # what arrives, and the host copy
    with pytest.raises(CapacityError, match=r"^weights\.directory: .*left, the next version needs") as caught:
        reader.poll(0)
    assert caught.value.status == 507
    assert written(tmp_path / "reader") == ["holder"], "the reader's name, and nothing of the version"

    disk.free = 3 * model_bytes
    assert reader.poll(0) == WeightVersion(1, 0)
    assert same(copy_of(reader), trainer.bits())
    reader.close()


def test_an_update_file_that_does_not_fit_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, trainer = Disk(monkeypatch), ToyTrainer(1)
    store = FileStore(tmp_path / "store", durable=False)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, PARAMS)
    publisher.publish(0)
    reader = WeightSubscriber(store, "run", tmp_path / "reader")
    reader.poll(0)
    before = written(tmp_path / "reader")
    disk.free = sum(bits.nbytes for bits in trainer.bits().values()) - 1
    with pytest.raises(CapacityError, match=r"weights\.directory"):
        reader.fetch(WeightVersion(1, 0), None)
    assert written(tmp_path / "reader") == before
    reader.close()


def test_a_delta_needs_no_more_room_than_it_has_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, trainer = Disk(monkeypatch), ToyTrainer(1)
    store = FileStore(tmp_path / "store", durable=False)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, PARAMS)
    publisher.publish(0)
    reader = WeightSubscriber(store, "run", tmp_path / "reader")
    reader.poll(0)
    trainer.step()
    publisher.publish(1)
    disk.free = sum(bits.nbytes for bits in trainer.bits().values()) // 2
    assert reader.poll(0) == WeightVersion(1, 1)
    reader.close()


def test_a_verification_without_room_names_the_variable_that_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not ``weights.directory``, which the command has not got; and it is no damage of the store."""
    store = FileStore(tmp_path / "store", durable=False)
    WeightPublisher(ToyTrainer(1).tensors, store, "run", 1, PARAMS).publish(0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Disk(monkeypatch).free = 0
    done = CliRunner().invoke(app, ["verify", "run", "--directory", str(store.directory)])
    assert isinstance(done.exception, ConfigError), done.output
    assert done.exception.field == "TMPDIR"
    assert str(tmp_path) in done.exception.message
