"""A shared file whose name is gone: those who have met read on, those who come later find it again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.coserve.kernel import SUCCESSOR, take_lock
from rose.coserve.ledger import RecordWriter
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import ChunkState
from rose.errors import LedgerError


@pytest.fixture
def node(tmp_path: Path) -> NodeDir:
    return NodeDir(tmp_path / "node")


def unlink(path: Path) -> None:
    path.unlink()


def move_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def put_another_in_its_place(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"not a record")
    other.rename(path)


def remove_the_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


LOSSES: list[Callable[[Path], None]] = [unlink, move_away, put_another_in_its_place, remove_the_directory]
losses = pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)


@losses
def test_who_has_met_the_writer_reads_on(node: NodeDir, lose: Callable[[Path], None]) -> None:
    with node.chunks_writer("serving", 4) as writer:
        reader = node.chunks("serving", 4)
        writer.write(ChunkState(generation=1))
        assert reader.read() == ChunkState(generation=1)
        lose(writer.path)
        word = reader.word()

        writer.extra[:] = b"\1\0\1\0"
        writer.write(ChunkState(generation=2))

        assert (reader.read(), reader.extra) == (ChunkState(generation=2), b"\1\0\1\0")
        assert reader.alive()
        assert reader.wait(word, 20.0), "and is woken by it"


@losses
def test_the_writer_makes_it_anew_for_those_who_come_later(
    node: NodeDir, lose: Callable[[Path], None]
) -> None:
    with node.chunks_writer("serving", 4) as writer:
        early = node.chunks("serving", 4)
        writer.extra[:] = b"\1\1\1\1"
        writer.write(ChunkState(generation=1))
        assert early.alive()
        lose(writer.path)
        assert not writer.named()

        assert writer.mend()

        assert writer.named()
        assert not writer.mend(), "once is enough"
        writer.write(ChunkState(generation=2))
        late = node.chunks("serving", 4)
        for reader in (early, late):
            assert (reader.read(), reader.extra) == (ChunkState(generation=2), b"\1\1\1\1")
            assert reader.alive()
    assert not early.alive()


def test_who_waits_on_a_deleted_file_is_woken_when_it_is_made_anew(node: NodeDir) -> None:
    with node.node_writer() as writer:
        reader = node.node()
        assert reader.alive()
        writer.path.unlink()
        writer.mend()
        assert reader.alive()
        assert os.fstat(reader._fd).st_nlink == 1


def test_a_deleted_file_of_a_dead_writer_is_no_file(node: NodeDir) -> None:
    with node.node_writer() as writer:
        reader = node.node()
        assert reader.alive()
        writer.path.unlink()
    assert reader.read() is None
    assert not reader.alive()


@pytest.fixture
def two(node: NodeDir) -> tuple[RecordWriter[ChunkState], RecordWriter[ChunkState]]:
    """A second writer could come while the first one's file was deleted."""
    first = node.chunks_writer("rollout", 2)
    first.write(ChunkState(generation=1))
    first.path.unlink()
    second = node.chunks_writer("rollout", 2)
    second.write(ChunkState(generation=2))
    return first, second


def test_a_name_that_a_live_writer_has_is_not_taken_from_it(
    node: NodeDir, two: tuple[RecordWriter[ChunkState], RecordWriter[ChunkState]]
) -> None:
    with pytest.raises(LedgerError, match="another live process"):
        two[0].mend()
    assert node.chunks("rollout").read() == ChunkState(generation=2)


def test_of_two_live_writers_both_can_be_counted(node: NodeDir) -> None:
    with node.chunks_writer("rollout", 2) as first:
        reader = node.chunks("rollout", 2)
        first.write(ChunkState(generation=1))
        assert reader.others() is None
        assert reader.alive()
        first.path.unlink()
        with node.chunks_writer("rollout", 2) as second:
            second.write(ChunkState(generation=2))
            other = reader.others()
            assert other is not None
            assert (reader.read(), other.read()) == (ChunkState(generation=1), ChunkState(generation=2))
        assert reader.others() is None


def test_a_dead_writer_does_not_seem_to_live_while_its_successor_makes_a_file(node: NodeDir) -> None:
    """Its last words would be believed: a loan of a production that is dead, or marks that a new worker would obey."""
    node.chunks_writer("rollout", 2).close()
    reader = node.chunks("rollout", 2)
    descriptor = os.open(node.path / "rollout.chunks", os.O_RDWR)
    try:
        assert take_lock(descriptor, SUCCESSOR)
        assert not reader.alive()
        with pytest.raises(LedgerError, match="another live process"):
            node.chunks_writer("rollout", 2)  # one successor at a time
    finally:
        os.close(descriptor)
