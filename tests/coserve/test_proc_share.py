"""How an idle-class child yields: the ladder, and what the kernel then says of a real child."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rose.proc import Child, ProcSpec
from rose.proc_share import PREFIX, IdleShare, idle_share, lift_what_is_left

pytestmark = pytest.mark.timeout(600)  # children of the idle class get what others leave


def machine(tmp_path: Path, cgroup: str, *, autogroup: str = "1", given: str | None = None) -> IdleShare:
    """``idle_share`` on a machine made of plain files: its kernel puts no ``cpu.idle`` into new directories."""
    root = tmp_path / "cgroup"
    here = root / ("cpu" if ":cpu:" in cgroup else "") / cgroup.rpartition(":")[2].lstrip("/")
    here.mkdir(parents=True)
    if given is not None:
        (here / "cpu.idle").write_text(given)
    (tmp_path / "own").write_text(cgroup + "\n")
    (tmp_path / "switch").write_text(autogroup)
    return idle_share(cgroup_root=root, own_cgroup=tmp_path / "own", autogroup_switch=tmp_path / "switch")


@pytest.mark.parametrize("cgroup", ["1:cpu:/", "0::/"], ids=["v1", "v2"])
def test_in_the_root_group_the_session_yields_by_its_autogroup(tmp_path: Path, cgroup: str) -> None:
    assert machine(tmp_path, cgroup).rung == "autogroup"


@pytest.mark.parametrize("cgroup", ["1:cpu:/service", "0::/service"], ids=["v1", "v2"])
def test_in_a_cgroup_autogroups_do_not_count(tmp_path: Path, cgroup: str) -> None:
    assert machine(tmp_path, cgroup).rung == "class"


def test_a_container_that_reads_as_root_is_not_the_root_group(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/", given="0").rung == "class"


def test_a_cgroup_that_was_made_idle_for_us_is_recognised(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/service", given="1").rung == "given"


def test_without_groups_the_class_is_enough(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/", autogroup="0").rung == "class"


def test_a_directory_that_does_not_become_a_cpu_cgroup_is_not_left_behind(tmp_path: Path) -> None:
    machine(tmp_path, "0::/service")
    assert not list((tmp_path / "cgroup" / "service").iterdir())


def test_a_share_that_was_given_cannot_be_lifted(tmp_path: Path) -> None:
    share = IdleShare(rung="given")
    assert (share.lift(True, 0, lambda _: True), share.lift(False, 0, lambda _: True)) == (False, True)


def share_of(child: Child) -> str:
    """What the kernel says of the running child, in words of the ladder."""
    assert child.share is not None
    if child.share.directory is not None:
        members = (child.share.directory / "cgroup.procs").read_text().split()
        assert str(child.pid) in members
        return "idle" if (child.share.directory / "cpu.idle").read_text().strip() == "1" else "normal"
    if child.share.rung == "autogroup":
        nice = Path(f"/proc/{child.pid}/autogroup").read_text().split()[-1]
        return {"19": "idle", "0": "normal"}[nice]
    pytest.skip(f"this machine offers the rung '{child.share.rung}' only")


def wait_for_line(path: Path) -> None:
    deadline_s = time.monotonic() + 240
    while not path.exists() or "\n" not in path.read_text():
        assert time.monotonic() < deadline_s, "the child did not come up"
        time.sleep(0.01)


@pytest.mark.parametrize("rung", ["best", "autogroup"])
def test_an_idle_child_yields_as_a_group_can_be_lifted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rung: str
) -> None:
    if rung == "autogroup":
        if not Path("/proc/self/autogroup").exists():
            pytest.skip("this kernel has no autogroups")
        monkeypatch.setattr("rose.proc.idle_share", lambda: IdleShare(rung="autogroup"))
    argv = (
        "sh",
        "-c",
        "echo up; exec sleep 60",
    )  # an interpreter of the idle class would take its time to start
    child = Child.start(ProcSpec(name="c", argv=argv, sched="idle", log_path=tmp_path / "log"))
    with child:
        wait_for_line(tmp_path / "log")
        seen = [share_of(child)]
        for on in (True, False):
            deadline_s = time.monotonic() + 240  # without privilege the kernel may ask for patience
            while not child.lift(on):
                assert time.monotonic() < deadline_s, "cannot be lifted"
                time.sleep(0.05)
            seen.append(share_of(child))
    assert seen == ["idle", "normal", "idle"]
    assert child.share is not None
    assert child.share.directory is None or not child.share.directory.exists()


def test_what_a_killed_supervisor_left_gets_a_normal_share_to_die_with(left_group: Path) -> None:
    """Its guard and its sentinel may have been killed with it: in the idle class of a busy core the dying keep their memory."""
    before = (left_group / "cpu.idle").read_text().strip()
    lift_what_is_left()
    assert (before, (left_group / "cpu.idle").read_text().strip()) == ("1", "0")


def test_a_normal_child_is_left_where_it_is(tmp_path: Path) -> None:
    with Child.start(ProcSpec(name="c", argv=("sleep", "60"))) as child:
        assert (child.share, child.lift(True)) == (None, False)
        assert PREFIX not in Path(f"/proc/{child.pid}/cgroup").read_text()


LOOK = """
import os, sys
pid = sys.argv[2]
lines = [line.rstrip("\\n").split(":", 2) for line in open(f"/proc/{pid}/cgroup")]
group = next(path for _, names, path in lines if "cpu" in names.split(",") or not names)
shares = []
for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup"):
    if "rose-idle" in group and os.path.exists(f"{root}{group}/cpu.idle"):
        shares.append("idle" if open(f"{root}{group}/cpu.idle").read().strip() == "1" else "normal")
        break
else:
    if os.path.exists(f"/proc/{pid}/autogroup"):
        shares.append({"19": "idle"}.get(open(f"/proc/{pid}/autogroup").read().split()[-1], "normal"))
with open(sys.argv[1], "w") as file:
    file.write(" ".join(shares))
"""


@pytest.mark.parametrize("rung", ["best", "autogroup"])
@pytest.mark.parametrize("killer", ["supervisor", "sentinel", "the end of the program"])
def test_whoever_kills_a_tree_of_the_idle_class_gives_it_a_normal_share_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rung: str, killer: str
) -> None:
    """The dying have memory that others wait for, and on a busy core they would not get to give it back."""
    if rung == "autogroup":
        if not Path("/proc/self/autogroup").exists():
            pytest.skip("this kernel has no autogroups")
        monkeypatch.setattr("rose.proc.idle_share", lambda: IdleShare(rung="autogroup"))
    spec = ProcSpec(
        name="c",
        argv=("sh", "-c", "sleep 600 & echo up; exec sleep 600"),
        sched="idle",
        log_path=tmp_path / "log",
        before_kill=(sys.executable, "-I", "-S", "-c", LOOK, str(tmp_path / "seen")),
        before_kill_s=120.0,
    )
    with Child.start(spec) as child:
        wait_for_line(tmp_path / "log")
        assert share_of(child) == "idle"
        match killer:
            case "supervisor":
                child.kill()
            case "sentinel":
                os.kill(child.guard_pid, signal.SIGUSR2)
            case _:
                os.kill(child.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 240
        while child.returncode() is None:
            assert time.monotonic() < deadline_s, "it does not end"
            time.sleep(0.01)
    assert (tmp_path / "seen").read_text() == "normal"
