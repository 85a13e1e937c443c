"""Host copies of several policies: kept while there is room, the least recently used goes first."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from rose.coserve.policies import PolicyCopies
from rose.errors import RequestError
from rose.lineage import WeightVersion


class Copy:
    def __init__(self, folder: Path) -> None:
        self.closed = self.is_busy = False
        self.required: WeightVersion | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights.safetensors").touch()

    def poll(self, timeout_s: float) -> WeightVersion | None:
        return None

    def fetch(self, version: WeightVersion, engine_version: WeightVersion | None) -> Path:
        raise NotImplementedError

    def busy(self) -> bool:
        return self.is_busy

    def require(self, version: WeightVersion) -> None:
        self.required = version

    def close(self) -> None:
        self.closed = True


class Node:
    def __init__(self, folder: Path, most: int) -> None:
        self.opened: list[tuple[str, Copy]] = []
        self.copies = PolicyCopies("own", folder, self._open, most=most)

    def _open(self, run: str, folder: Path) -> Copy:
        self.opened.append((run, Copy(folder)))
        return self.opened[-1][1]


def test_what_a_trainer_has_published_is_told_to_its_copy_now_and_when_it_is_opened(tmp_path: Path) -> None:
    node = Node(tmp_path, most=3)
    node.copies.source("own")
    node.copies.require("own", WeightVersion(1, 2))
    node.copies.require("a", WeightVersion(3, 0))
    node.copies.source("a")
    assert [(run, copy.required) for run, copy in node.opened] == [
        ("own", WeightVersion(1, 2)),
        ("a", WeightVersion(3, 0)),
    ]


def test_the_least_recently_used_copy_goes_and_the_own_one_never(tmp_path: Path) -> None:
    node = Node(tmp_path, most=3)
    for run in ("own", "a", "b", "a", "c"):
        node.copies.source(run)

    assert node.copies.runs() == {"own", "a", "c"}
    assert [run for run, copy in node.opened if copy.closed] == ["b"]
    assert not (tmp_path / "runs" / "b").exists()
    assert (tmp_path / "weights.safetensors").exists()


def test_a_copy_that_an_earlier_process_left_is_used_again_or_makes_room_first(tmp_path: Path) -> None:
    for run in ("a", "b"):
        Copy(tmp_path / "runs" / run)
    node = Node(tmp_path, most=3)

    node.copies.source("b")
    node.copies.source("c")

    assert node.copies.runs() == {"own", "b", "c"}


def test_no_room_on_the_disk_removes_another_policy_and_at_last_none(tmp_path: Path) -> None:
    node = Node(tmp_path, most=9)
    for run in ("own", "a", "b"):
        node.copies.source(run)

    assert node.copies.make_room("b")
    assert node.copies.runs() == {"own", "b"}
    assert not node.copies.make_room("b")


def test_a_copy_that_another_node_uses_stays(tmp_path: Path) -> None:
    node = Node(tmp_path, most=9)
    for run in ("a", "b"):
        node.copies.source(run)
    node.opened[0][1].is_busy = True
    (tmp_path / "runs" / "c").mkdir()

    with (tmp_path / "runs" / "c" / "lock").open("wb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert node.copies.make_room("own")
        assert node.copies.runs() == {"own", "a", "c"}
        assert not node.copies.make_room("own")
    assert not node.opened[0][1].closed
    assert node.copies.make_room("own")
    assert node.copies.runs() == {"own", "a"}


@pytest.mark.parametrize("run", ["..", "../x", "a/b", ".hidden", ""])
def test_a_run_cannot_lead_out_of_the_directory(tmp_path: Path, run: str) -> None:
    with pytest.raises(RequestError):
        Node(tmp_path, most=2).copies.source(run)


def test_nothing_is_opened_once_the_node_goes_down(tmp_path: Path) -> None:
    node = Node(tmp_path, most=2)
    node.copies.source("a")
    node.copies.close()

    assert [copy.closed for _, copy in node.opened] == [True]
    with pytest.raises(RequestError):
        node.copies.source("a")


def test_a_copy_that_cannot_be_removed_is_tried_once_and_does_not_count(tmp_path: Path) -> None:
    """A link in the place of a copy is not followed, and so not removed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    node = Node(tmp_path / "node", most=2)
    (tmp_path / "node" / "runs").mkdir(parents=True)
    (tmp_path / "node" / "runs" / "a").symlink_to(elsewhere)
    tries = 0
    make_room = node.copies.make_room

    def bounded(run: str) -> bool:
        nonlocal tries
        tries += 1
        assert tries < 10, "it is tried again and again"
        return make_room(run)

    node.copies.make_room = bounded  # type: ignore[method-assign]
    node.copies.source("b")
    node.copies.source("c")

    assert elsewhere.is_dir()
    assert node.copies.runs() == {"own", "a", "c"}
    assert not make_room("c")


def test_what_is_no_run_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    (folder / ".lost+found").mkdir(parents=True)
    node = Node(tmp_path, most=2)
    node.copies.source("a")
    node.copies.source("b")

    assert node.copies.runs() == {"own", "b"}
    assert (folder / ".lost+found").is_dir()
