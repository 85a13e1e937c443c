"""Moves the sentinel to a cgroup where a pause of the agent's container or service does not stop it.

``docker pause`` and ``systemctl freeze`` stop a whole cgroup.  Where the kernel lets us, the sentinel moves into a group of its own,
as near to the root as can be, in every hierarchy that can freeze (:func:`leave`); what came of it is read from the kernel
(:func:`standing`), not assumed.  Whether a frozen engine can be killed depends on the kernel too: under cgroup v2 SIGKILL ends
a frozen process at once, under cgroup v1 it waits for the thaw.

Inside a container the groups are the container's or read-only: there is no way out, and the status says so.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PREFIX = "rose-sentinel-"
Hierarchy = Literal["v1", "v2"]
_FREEZES = {"v1": "freezer.state", "v2": "cgroup.freeze"}
"""A file that every group has which can be frozen: all but the true root."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is in one hierarchy that can freeze."""

    hierarchy: Hierarchy
    mount: Path
    group: Path
    """Directory, ``mount`` or below it."""

    @property
    def can_freeze(self) -> bool:
        return (self.group / _FREEZES[self.hierarchy]).exists()

    @property
    def confined(self) -> bool:
        """Is all that we see of the hierarchy one group that others can freeze: a container's?"""
        return (self.mount / _FREEZES[self.hierarchy]).exists()


def places(pid: int | str = "self") -> list[Place]:
    """Of a process; empty where nothing here can freeze, or it is gone."""
    return list(_places(Path(f"/proc/{pid}/cgroup"), Path("/proc/self/mountinfo")))


def _places(cgroup: Path, mountinfo: Path) -> Iterator[Place]:
    try:
        memberships = [line.split(":", 2) for line in cgroup.read_text().splitlines()]
        mounts = [line.split() for line in mountinfo.read_text().splitlines()]
    except OSError:
        return
    for fields in mounts:
        kind = fields[fields.index("-") + 1]
        options = fields[-1].split(",")
        hierarchy: Hierarchy
        if kind == "cgroup2":
            hierarchy = "v2"
        elif kind == "cgroup" and "freezer" in options:
            hierarchy = "v1"
        else:
            continue
        root, mount = fields[3], Path(fields[4])
        for number, names, path in memberships:
            if (number == "0") if hierarchy == "v2" else ("freezer" in names.split(",")):
                # Of a mount that shows a part of the hierarchy, the path begins above it.
                inner = path[len(root) :] if root != "/" and path.startswith(root) else path
                group = mount / inner.lstrip("/")
                if group.is_dir():
                    yield Place(hierarchy, mount, group)


def leave(name: str) -> None:
    """Move this process into a group ``rose-sentinel-NAME-...`` outside of its own, wherever the kernel lets us."""
    for place in places():
        if not place.can_freeze or place.confined:  # the true root, where nothing stops it; or no way out
            continue
        above = [parent for parent in place.group.parents if _is_below(parent, place.mount)]
        for parent in reversed(above):  # from the root down
            if _move_below(parent, name):
                break


def _move_below(parent: Path, name: str) -> bool:
    _sweep(parent)
    for _ in range(3):
        directory = parent / f"{PREFIX}{name}-{secrets.token_hex(3)}"
        try:
            directory.mkdir()
        except OSError:  # read-only, or not ours
            return False
        try:
            (directory / "cgroup.procs").write_text("0")
        except (FileNotFoundError, ProcessLookupError):
            continue  # another sentinel has swept it while it was still empty
        except OSError as error:
            with suppress(OSError):
                directory.rmdir()
            if error.errno != errno.ENODEV:
                return False
            continue
        return True
    return False


def _sweep(parent: Path) -> None:
    """Groups of sentinels that have ended; those in use cannot be removed."""
    with suppress(OSError):
        for left in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                left.rmdir()


def remove(left: list[Place]) -> None:
    """The groups of a sentinel that has ended, as :func:`places` told them while it lived."""
    for place in left:
        if place.group.name.startswith(PREFIX):
            with suppress(OSError):
                place.group.rmdir()


def standing(pid: int) -> dict[str, object]:
    """Does process ``pid`` go on when this process's group is frozen, and what can it do then?

    Returns:
        ``outside``: True, False, or None where nothing here can freeze; ``frozen_dies``: ``at once`` (cgroup v2), ``at the thaw``
        (v1), or by hierarchy where there are both; ``why``: in words.
    """
    ours = {place.mount: place for place in places()}
    theirs = {place.mount: place for place in places(pid)}
    if not theirs or not os.path.exists(f"/proc/{pid}"):
        return {
            "outside": None,
            "frozen_dies": "",
            "why": "no cgroup hierarchy that can freeze is mounted here",
        }
    caught = [
        place.hierarchy
        for mount, place in ours.items()
        if mount in theirs
        and place.can_freeze
        and (place.confined or _is_below(theirs[mount].group, place.group))
    ]
    dies = {"v1": "at the thaw", "v2": "at once"}
    hierarchies = sorted({place.hierarchy for place in theirs.values()})
    frozen_dies = (
        dies[hierarchies[0]]
        if len(hierarchies) == 1
        else ", ".join(f"{dies[name]} (cgroup {name})" for name in hierarchies)
    )
    if caught:
        why = (
            f"in our own group of cgroup {' and '.join(caught)}, which we may not leave: a pause of it stops the sentinel too; "
            "pause production with it, or run the agent outside of a container"
        )
        return {"outside": False, "frozen_dies": frozen_dies, "why": why}
    return {
        "outside": True,
        "frozen_dies": frozen_dies,
        "why": "a pause of our group does not stop the sentinel",
    }


def _is_below(group: Path, above: Path) -> bool:
    return group == above or above in group.parents
