"""Let a process tree have only what the rest of the machine leaves of a core.

The class ``SCHED_IDLE`` alone does not do that.  The kernel weighs threads only against threads of the same *task group*,
and two programs are rarely in one: each service and container has a cpu cgroup, and outside of cgroups each *session* is a
group of its own (``kernel.sched_autogroup_enabled``, on by default).  Between groups an idle-class engine is worth as much
as production, and takes half of every core that both want.  What yields is the group, so this asks for, in this order:

========== ============================================================= =====================================
rung       what it is                                                    lifted by
========== ============================================================= =====================================
cgroup     a cpu cgroup of our own with ``cpu.idle = 1``                 ``cpu.idle = 0``
given      the cgroup that we were started in has ``cpu.idle = 1``       (not ours to change)
autogroup  the session's group at nice 19: 15 of 1039 parts of a core    nice 0 (needs no privilege)
class      ``SCHED_IDLE`` of the threads: right where there are no groups ``SCHED_OTHER`` (needs CAP_SYS_NICE)
========== ============================================================= =====================================

See sched(7), "The autogroup feature", and the kernel's cgroup-v2 document, ``cpu.idle``.  ``rose node status`` shows the rung in force.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Rung = Literal["cgroup", "given", "autogroup", "class"]
PREFIX = "rose-idle-"
LOWEST, NORMAL = 19, 0
_AUTOGROUP_SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleShare:
    """How one tree yields.  Made by :func:`idle_share` before the tree starts.

    Args:
        directory: The cgroup that the tree has to join; None on the other rungs.
    """

    rung: Rung
    directory: Path | None = None

    @property
    def delay(self) -> float:
        """How much of a second in the tree a normal program on the same core waits for: a tenth where the kernel weighs the
        tree as a whole (5 % in the median, measured: ``docs/decisions/0001``), all of it where only its threads are idle."""
        return 1.0 if self.rung == "class" else 0.1

    @property
    def autogroup_nice(self) -> int | None:
        """What the first process of the tree's session writes to its ``/proc/self/autogroup``."""
        return LOWEST if self.rung == "autogroup" else None

    def lift(self, on: bool, session_leader: int, set_class: Callable[[bool], bool]) -> bool:
        """Give the tree a normal share (``on``), or take it away again; False when the kernel does not let us.

        Args:
            session_leader: Pid of the process that made the tree's session.
            set_class: Moves all threads out of the idle class (True) or back; used on the last rung.
        """
        try:
            if self.directory is not None:
                (self.directory / "cpu.idle").write_text("0" if on else "1")
            elif self.rung == "autogroup":
                Path(f"/proc/{session_leader}/autogroup").write_text(str(NORMAL if on else LOWEST))
            elif self.rung == "class":
                return set_class(on)
            else:
                return not on
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Take the cgroup away once the tree has ended; one that is not empty stays."""
        if self.directory is not None:
            with suppress(OSError):
                self.directory.rmdir()


def idle_share(
    *,
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    own_cgroup: Path = Path("/proc/self/cgroup"),
    autogroup_switch: Path = _AUTOGROUP_SWITCH,
) -> IdleShare:
    """The best rung that this process may take here.  The paths are parameters for tests only."""
    here, is_root_group = cpu_cgroup(cgroup_root, own_cgroup)
    if here is not None:
        _sweep(here)
        made = _make_idle_child(here)
        if made is not None:
            return IdleShare(rung="cgroup", directory=made)
        if _reads(here / "cpu.idle", "1"):
            return IdleShare(rung="given")
    # Autogroups exist only among the tasks of the root group.
    if is_root_group and _reads(autogroup_switch, "1"):
        return IdleShare(rung="autogroup")
    return IdleShare(rung="class")


def lift_what_is_left() -> None:
    """Let what a killed supervisor left in our cgroup die at a normal share.

    Its guard and its sentinel lift it where they live; they may have been killed with it.
    """
    here, _ = cpu_cgroup(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    if here is not None:
        _sweep(here)


def cpu_cgroup(root: Path, own: Path) -> tuple[Path | None, bool]:
    """``(directory of a process's cpu cgroup or None, is it the root group)``; version 1 or 2.  ``own``: its ``/proc/PID/cgroup``."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None, True
    for fields in lines:
        if len(fields) == 3 and "cpu" in fields[1].split(","):
            directory = root / fields[1] / fields[2].lstrip("/")
            if not directory.is_dir():
                directory = root / "cpu" / fields[2].lstrip("/")
            return (directory if directory.is_dir() else None), fields[2] == "/"
    for fields in lines:
        if len(fields) == 3 and fields[0] == "0":
            directory = root / fields[2].lstrip("/")
            # In a container the path reads "/" as well, but only the true root has no cpu.idle.
            is_root = fields[2] == "/" and not (directory / "cpu.idle").exists()
            return (directory if directory.is_dir() else None), is_root
    return None, True


def _make_idle_child(parent: Path) -> Path | None:
    directory = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
    try:
        directory.mkdir()
    except OSError:  # read-only, or not ours
        return None
    try:
        if not (directory / "cpu.idle").exists():  # no cpu controller below our cgroup, or an old kernel
            raise FileNotFoundError
        (directory / "cpu.idle").write_text("1")
    except OSError:
        with suppress(OSError):
            directory.rmdir()
        return None
    return directory


def _sweep(parent: Path) -> None:
    """Cgroups of supervisors that were killed go, and what is in one yet gets a normal share: it is dying, and nobody else lifts it."""
    with suppress(OSError):
        for left in parent.glob(f"{PREFIX}*"):
            if not Path("/proc", left.name.removeprefix(PREFIX).partition("-")[0]).exists():
                try:
                    left.rmdir()
                except OSError:
                    with suppress(OSError):
                        (left / "cpu.idle").write_text("0")


def _reads(path: Path, value: str) -> bool:
    try:
        return path.read_text().strip() == value
    except OSError:
        return False
