"""What a rollout engine holds that production cannot ask: of a file that says nothing, something is assumed, never nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rose.coserve import record_layout
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import RankState, RolloutLease
from rose.policy.lending_events import ALL_PAGES
from vllm_plugin.peers import Peers, Trouble

HELD = 7
CHUNKS = 16


@pytest.fixture
def node(tmp_path: Path) -> NodeDir:
    return NodeDir(tmp_path / "n")


@pytest.fixture
def engine(node: NodeDir) -> Iterator[tuple[Any, Any]]:
    """Lease and report of a living engine of this version."""
    with ExitStack() as files:
        yield start_engine(node, files)


def start_engine(node: NodeDir, files: ExitStack) -> tuple[Any, Any]:
    lease = files.enter_context(node.rollout_lease_writer())
    rank = files.enter_context(node.rank_writer("rollout", 0, CHUNKS))
    lease.write(RolloutLease(reserved_pages=HELD))
    rank.write(RankState(resident_pages=HELD))
    return lease, rank


def spoil(*writers: Any) -> None:
    for writer in writers:
        writer.path.write_bytes(b"\xff" * writer.path.stat().st_size)


def test_a_living_engine_of_another_version_holds_everything_until_it_ends(
    node: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as files:
        monkeypatch.setattr(record_layout, "VERSION", record_layout.VERSION - 1)
        start_engine(node, files)
        monkeypatch.undo()
        peers = Peers(node, Trouble())
        assert peers.any_alive()
        assert peers.pages() >= ALL_PAGES
    assert peers.pages() == 0


def test_a_lease_of_another_version_whose_workers_nobody_can_find_holds_everything(
    node: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_layout, "VERSION", record_layout.VERSION - 1)
    with node.rollout_lease_writer() as lease:
        lease.write(RolloutLease(reserved_pages=HELD))
        monkeypatch.undo()
        assert Peers(node, Trouble()).pages() >= ALL_PAGES


def test_of_damaged_files_the_last_that_was_read_counts(node: NodeDir, engine: tuple[Any, Any]) -> None:
    lease, rank = engine
    peers = Peers(node, Trouble())
    spoil(lease)
    assert peers.pages() == HELD
    spoil(rank)
    assert peers.pages() == HELD
    rank.close()
    lease.close()
    assert peers.pages() == 0


@pytest.mark.parametrize(
    ("number", "pages"), [(0, HELD), (5, HELD + 3)], ids=["of one engine", "of two engines"]
)
def test_ranks_of_an_engine_hold_their_pages_on_a_device_each_and_engines_add_up(
    node: NodeDir, engine: tuple[Any, Any], number: int, pages: int
) -> None:
    lease, _ = engine
    with node.rank_writer("rollout", 1, CHUNKS) as second:
        second.write(RankState(engine=number, resident_pages=3))
        lease.close()  # its core is dead, its workers not yet
        peers = Peers(node, Trouble())
        assert peers.pages() == pages
        spoil(second)
        assert peers.pages() == pages, "the last that was read"


def test_what_a_dead_engine_left_in_its_files_keeps_nothing(node: NodeDir, engine: tuple[Any, Any]) -> None:
    lease, rank = engine
    spoil(lease, rank)
    for writer in engine:
        writer.close()
    assert Peers(node, Trouble()).pages() == 0


@pytest.mark.parametrize("anew", ["open to others", "a symbolic link"])
def test_a_directory_that_was_made_anew_wrongly_keeps_no_memory_from_production(
    node: NodeDir, engine: tuple[Any, Any], anew: str
) -> None:
    lease, rank = engine
    peers = Peers(node, Trouble())
    assert peers.any_alive()
    shutil.rmtree(node.path)
    if anew == "open to others":
        node.path.mkdir(mode=0o755)
        node.path.chmod(0o755)
    else:
        node.path.symlink_to(node.path.parent)
    lease.close()  # its core is dead, its worker not yet
    assert not peers.any_alive()
    assert peers.pages() == HELD, "who was met before is read on"
    rank.close()
    assert peers.pages() == 0
