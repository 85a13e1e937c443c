"""Where the sentinel can go: hierarchies as files say them, and the real ones where they may be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from rose.coserve import outside
from rose.coserve.outside import PREFIX, Place, places
from tests.freezer import freezer

SLEEPER = "import sys, time; from rose.coserve import outside; outside.leave('t'); print('up', flush=True); time.sleep(600)"


def machine(tmp_path: Path, root: str, cgroup: str, kind: str = "cgroup2 cgroup2 rw") -> list[Place]:
    mount = tmp_path / "mount"
    mount.mkdir(exist_ok=True)
    (tmp_path / "info").write_text(f"30 23 0:26 {root} {mount} rw shared:4 - {kind}\n")
    (tmp_path / "cgroup").write_text(cgroup)
    return list(outside._places(tmp_path / "cgroup", tmp_path / "info"))


@pytest.mark.parametrize(
    ("root", "cgroup", "kind", "group"),
    [
        ("/", "0::/a/b\n", "cgroup2 cgroup2 rw", "a/b"),
        ("/a", "0::/a/b\n", "cgroup2 cgroup2 rw", "b"),
        ("/", "4:memory:/x\n3:freezer:/a\n0::/\n", "cgroup cgroup rw,freezer", "a"),
    ],
)
def test_the_group_is_where_the_mount_shows_it(
    tmp_path: Path, root: str, cgroup: str, kind: str, group: str
) -> None:
    (tmp_path / "mount" / group).mkdir(parents=True)
    (place,) = machine(tmp_path, root, cgroup, kind)
    assert place.group == tmp_path / "mount" / group
    assert place.hierarchy == ("v1" if "freezer" in kind else "v2")


def test_a_hierarchy_that_cannot_freeze_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "mount" / "a").mkdir(parents=True)
    assert machine(tmp_path, "/", "4:memory:/a\n", "cgroup cgroup rw,memory") == []


def test_all_that_a_container_sees_is_one_group_that_others_freeze(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "cgroup.freeze").write_text("0")
    (place,) = machine(tmp_path, "/", "0::/\n")
    assert (place.can_freeze, place.confined) == (True, True)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_it_leaves_the_group_that_it_was_started_in_and_the_kernel_says_so(
    version: Literal["v1", "v2"],
) -> None:
    with freezer(version) as group:
        child = subprocess.Popen(
            group.command(sys.executable, "-c", SLEEPER), stdout=subprocess.PIPE, text=True
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            left = places(child.pid)
            assert str(child.pid) not in (group.directory / "cgroup.procs").read_text().split()
            group.freeze()
            assert [p.group.name.startswith(PREFIX) for p in left if p.hierarchy == version] == [True]
        finally:
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]
        outside.remove(left)
        assert not [p.group for p in left if p.group.name.startswith(PREFIX) and p.group.exists()]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_one_that_is_in_our_own_group_would_stop_with_us(version: Literal["v1", "v2"]) -> None:
    """Asked from inside a group, of a process that is in it and of one that is not."""
    code = "import sys; from rose.coserve.outside import standing; print(standing(int(sys.argv[1]))['outside'], standing(int(sys.argv[2]))['outside'])"
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        with freezer(version) as group:
            group.join(sleeper.pid)
            argv = group.command(sys.executable, "-c", code, str(sleeper.pid), str(os.getpid()))
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            assert done.stdout.split() == ["False", "True"]
    finally:
        sleeper.kill()
        sleeper.wait()
