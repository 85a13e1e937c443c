"""The node directory of a device: which shared files there are, and what each holds."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rose.coserve.kernel import is_locked
from rose.coserve.ledger import RecordReader, RecordWriter
from rose.coserve.record_layout import FOUND_BYTES
from rose.coserve.records import (
    ChunkState,
    LayerState,
    NodeState,
    RankState,
    RolloutLease,
    ServingBoard,
    ServingLease,
)
from rose.errors import LedgerError
from rose.private_dir import private_dir

Role = Literal["serving", "rollout"]
ROLES: tuple[Role, ...] = ("serving", "rollout")
MAX_RANKS = 64
MAX_CORES = 64
"""Directories of engine cores that are looked for below a server's."""
_CORE = "dp"


def core_dir(path: Path | str, core: int) -> Path:
    """Node directory of one of the engine cores that an API server has started (``--data-parallel-size``); ``path``: its ``ROSE_DIR``."""
    return Path(path) / f"{_CORE}{core}"


def is_core_dir(path: Path | str, of: Path | str, num_cores: int) -> bool:
    """Is ``path`` the directory of one of the ``num_cores`` cores of the server whose ``ROSE_DIR`` is ``of``?"""
    own, base = os.path.abspath(path), os.path.abspath(of)
    number = os.path.basename(own).removeprefix(_CORE)
    return number.isdecimal() and int(number) < num_cores and own == str(core_dir(base, int(number)))


def core_dirs(path: Path | str) -> list[str]:
    """Names of the directories of engine cores below a server's ``ROSE_DIR``, in order; none where it has one core, which uses that itself."""
    names: list[str] = []
    while len(names) < MAX_CORES and core_dir(path, len(names)).is_dir():
        names.append(core_dir(path, len(names)).name)
    return names


class NodeDir:
    """The shared files of one device, by name.  Making one touches nothing."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.folder = private_dir(path)
        """Held, so that all files of this object are of one directory."""

    def node_writer(self, first: NodeState | None = None) -> RecordWriter[NodeState]:
        return RecordWriter(self.path / "node.state", NodeState, first=first)

    def node(self) -> RecordReader[NodeState]:
        return RecordReader(self.path / "node.state", NodeState)

    def serving_lease_writer(self) -> RecordWriter[ServingLease]:
        return RecordWriter(self.path / "serving.lease", ServingLease, FOUND_BYTES)

    def serving_lease(self) -> RecordReader[ServingLease]:
        return RecordReader(self.path / "serving.lease", ServingLease, FOUND_BYTES)

    def serving_board_writer(self) -> RecordWriter[ServingBoard]:
        return RecordWriter(self.path / "serving.board", ServingBoard)

    def serving_board(self) -> RecordReader[ServingBoard]:
        return RecordReader(self.path / "serving.board", ServingBoard)

    def rollout_lease_writer(self) -> RecordWriter[RolloutLease]:
        return RecordWriter(self.path / "rollout.lease", RolloutLease)

    def rollout_lease(self) -> RecordReader[RolloutLease]:
        return RecordReader(self.path / "rollout.lease", RolloutLease)

    def layers_writer(self) -> RecordWriter[LayerState]:
        return RecordWriter(self.path / "rollout.layers", LayerState)

    def layers(self) -> RecordReader[LayerState]:
        return RecordReader(self.path / "rollout.layers", LayerState)

    def chunks_writer(self, role: Role, num_chunks: int) -> RecordWriter[ChunkState]:
        return RecordWriter(self._named(role, "chunks"), ChunkState, num_chunks)

    def chunks(self, role: Role, num_chunks: int | None = None) -> RecordReader[ChunkState]:
        return RecordReader(self._named(role, "chunks"), ChunkState, num_chunks)

    def rank_writer(self, role: Role, rank: int, num_chunks: int) -> RecordWriter[RankState]:
        return RecordWriter(self._named(role, _rank_name(rank)), RankState, num_chunks)

    def rank(self, role: Role, rank: int, num_chunks: int | None = None) -> RecordReader[RankState]:
        return RecordReader(self._named(role, _rank_name(rank)), RankState, num_chunks)

    def ranks(self, role: Role) -> list[int]:
        """Ranks of ``role`` that have a file."""
        try:
            there = set(os.listdir(self.folder.fd()))
        except FileNotFoundError:
            return []
        return [rank for rank in range(MAX_RANKS) if self._named(role, _rank_name(rank)).name in there]

    def remove(self) -> list[str]:
        """Unlink every file whose writer is gone, and the directory if nothing is left.

        Returns:
            Names that stayed, because a live process writes them.  Taking them away would
            make a living engine invisible to its peer.
        """
        left: list[str] = []
        try:
            folder = self.folder.fd()
            there = os.listdir(folder)
        except FileNotFoundError:
            return left
        known = {"node.state", *(path.name for role in ROLES for path in self._files_of(role))}
        for name in there:
            # A writer killed while it was being made leaves its file under a temporary name.
            if name not in known and not (name.startswith(".") and name[1:].rpartition(".")[0] in known):
                continue
            path = self.path / name
            try:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(name, flags, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise LedgerError(f"cannot be removed: {error.strerror}", field=str(path)) from error
            try:
                if is_locked(descriptor):
                    left.append(name)
                else:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
            finally:
                os.close(descriptor)
        try:
            self.path.rmdir()
        except OSError:  # somebody's files are still there, or it never was
            pass
        return left

    def _files_of(self, role: Role) -> list[Path]:
        names = ["lease", "chunks", *(_rank_name(rank) for rank in range(MAX_RANKS))]
        return [self._named(role, name) for name in (*names, "board", "layers")]

    def _named(self, role: Role, name: str) -> Path:
        if role not in ROLES:
            raise LedgerError(f"'{role}' is neither serving nor rollout", field="role")
        return self.path / f"{role}.{name}"


class RankReaders:
    """What the ranks of a role say, their files kept open: one whose name was lost is read for as long as its writer lives.

    Attributes:
        trouble: Why nobody who is new can be met: the directory cannot be read, or is open to others.  Those met before still count.
    """

    def __init__(self, node: NodeDir, role: Role) -> None:
        self._node = node
        self._role: Role = role
        self._readers: dict[int, RecordReader[RankState]] = {}
        self.trouble: LedgerError | None = None

    def met(self) -> dict[int, RecordReader[RankState]]:
        """The files by rank, those of dead writers among them until they are forgotten."""
        self.trouble = None
        try:
            ranks = self._node.ranks(self._role)
        except LedgerError as error:
            self.trouble, ranks = error, []
        for rank in ranks:
            if rank not in self._readers:
                self._readers[rank] = reader = self._node.rank(self._role, rank)
                with suppress(LedgerError):
                    reader.alive()  # opens it: what is not open when its name is lost is lost with it
        return dict(self._readers)

    def records(self) -> dict[int, RankState]:
        """Of each rank that lives; one whose file cannot be read is left out."""
        found: dict[int, RankState] = {}
        for rank, reader in self.met().items():
            try:
                alive, record = reader.alive(), reader.read()
            except LedgerError:
                alive, record = reader.is_written(), None
            if not alive:
                self.forget(rank)
            elif record is not None:
                found[rank] = record
        return found

    def forget(self, rank: int) -> None:
        self._readers.pop(rank).close()

    def close(self) -> None:
        for rank in list(self._readers):
            self.forget(rank)


def _rank_name(rank: int) -> str:
    if not 0 <= rank < MAX_RANKS:
        raise LedgerError(f"{rank} is not in 0..{MAX_RANKS - 1}", field="rank")
    return f"rank{rank}"
