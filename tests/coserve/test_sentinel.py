"""The sentinel: an engine that owes memory ends although its node agent is stopped; nobody else is touched."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import (
    Mode,
    NodeState,
    Phase,
    RankState,
    RolloutLease,
    ServingBoard,
    ServingLease,
)
from rose.coserve.sentinel import GRACE_S, HELP_EVERY_S, PERIOD_S, Sentinel, owed_pages
from rose.policy.compat import Support
from rose.policy.coserving.timing import AHEAD_S
from rose.policy.deadlines import MAX_RECLAIM_S
from rose.policy.lending import DEAD_AFTER_S
from rose.proc_tree import is_dying
from tests.coserve.conftest import BY_DEFAULT, Device, alive, ready_in_the_idle_class
from tests.freezer import freezer

pytestmark = pytest.mark.timeout(300)  # some engines are of the idle class
NODE = NodeState(mode=Mode.ON, lend_pages=10, has_serving=1)
CUT = dataclasses.replace(NODE, lend_pages=2, deadline_ns=1)
"""With a deadline that the agent has let pass."""
SERVING = ServingLease(phase=Phase.READY, support=Support.ELASTIC, total_pages=20, reserved_pages=8)
ROLLOUT = RolloutLease(phase=Phase.READY, reserved_pages=10)


@pytest.mark.parametrize(
    ("change", "owed"),
    [
        ({}, 0),
        ({"node": dataclasses.replace(NODE, lend_pages=4)}, 6),
        ({"board": ServingBoard(needed_pages=13)}, 3),  # 20 - 13 = 7 are left
        ({"serving": dataclasses.replace(SERVING, reserved_pages=15)}, 5),
        ({"serving": dataclasses.replace(SERVING, phase=Phase.STARTING)}, 10),
        ({"serving_alive": False}, 10),
        ({"serving": None}, 10),
        ({"serving": dataclasses.replace(SERVING, support=Support.COMPUTE_ONLY, reserved_pages=20)}, 0),
        ({"node": dataclasses.replace(NODE, mode=Mode.OFF)}, 10),
        ({"now_s": DEAD_AFTER_S + 0.1}, 10),  # nobody has been heard of since
        ({"now_s": -AHEAD_S - 0.1}, 10),  # a stamp of the boot before, on a disk
        ({"held_pages": 0, "serving_alive": False}, 0),
        ({"node": None}, 0),
        ({"node": dataclasses.replace(NODE, has_serving=0), "serving_alive": False}, 0),
    ],
)
def test_what_is_owed_follows_from_the_files_alone(change: dict[str, object], owed: int) -> None:
    calm: dict[str, object] = {
        "node": NODE,
        "serving": SERVING,
        "serving_alive": True,
        "board": ServingBoard(),
        "held_pages": 10,
        "now_s": 0.0,
    }
    assert owed_pages(**{**calm, **change}) == owed  # type: ignore[arg-type]


class Files:
    """The files of a device whose agent and production are heard of all the time; times are the test's own."""

    def __init__(self, path: Path) -> None:
        self.dir = NodeDir(path)
        self.node, self.serving, self.rollout = NODE, SERVING, ROLLOUT
        self._writers = [
            self.dir.node_writer(),
            self.dir.serving_lease_writer(),
            self.dir.rollout_lease_writer(),
        ]

    def beat(self, now_s: float) -> float:
        for writer, record in zip(self._writers, (self.node, self.serving, self.rollout), strict=True):
            writer.write(dataclasses.replace(record, heartbeat_ns=int(now_s * 1e9)))  # type: ignore[arg-type]
        return now_s

    def end_core(self) -> None:
        self._writers[2].close()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class Tree:
    """Boundary: the engine's processes, as the sentinel ends them."""

    num_kills = 0

    def kill(self) -> None:
        self.num_kills += 1

    def dying(self) -> bool:
        return False

    def lift(self, on: bool) -> bool:
        raise AssertionError("nothing was dying")


class DyingTree(Tree):
    """One that dies slowly, of a kernel that refuses the first ``num_refused`` changes of a share."""

    def __init__(self, num_refused: int = 0) -> None:
        self.num_refused = num_refused
        self.is_dying = True
        self.normal = False

    def dying(self) -> bool:
        return self.is_dying

    def lift(self, on: bool) -> bool:
        if self.num_refused:
            self.num_refused -= 1
            return False
        self.normal = on
        return True


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path / "n")
    yield files
    files.close()


def test_it_waits_for_the_deadline_and_the_agents_turn_and_gives_time_to_one_that_obeys(files: Files) -> None:
    tree = Tree()
    sentinel = Sentinel(files.dir, tree, deadline_s=0.1)
    assert not sentinel.look(files.beat(0.0))
    files.node = CUT
    patience_s = 0.1 + GRACE_S
    assert not sentinel.look(files.beat(1.0))
    assert not sentinel.look(files.beat(1.0 + patience_s - 0.01))
    files.rollout = dataclasses.replace(ROLLOUT, reserved_pages=5)  # it gives back, slowly
    assert not sentinel.look(files.beat(1.0 + patience_s + 0.01))
    assert not sentinel.look(files.beat(1.0 + 2 * patience_s))
    assert sentinel.look(files.beat(1.0 + 2 * patience_s + 0.02))
    assert tree.num_kills == 1


def test_an_engine_that_obeys_in_time_is_left_alone(files: Files) -> None:
    tree = Tree()
    sentinel = Sentinel(files.dir, tree, deadline_s=0.1)
    for cycle in range(20):
        files.node = CUT
        assert not sentinel.look(files.beat(cycle * 1.0))
        files.rollout = dataclasses.replace(ROLLOUT, reserved_pages=2)
        assert not sentinel.look(files.beat(cycle * 1.0 + 0.3))
        files.rollout, files.node = ROLLOUT, NODE
        assert not sentinel.look(files.beat(cycle * 1.0 + 0.6))
    assert tree.num_kills == 0


def test_without_a_configured_deadline_its_own_steps_say_how_long_the_engine_may_take(files: Files) -> None:
    tree = Tree()
    sentinel = Sentinel(files.dir, tree, deadline_s=None)
    files.rollout = dataclasses.replace(ROLLOUT, step_ns=1_000_000_000)
    files.node = CUT
    assert not sentinel.look(files.beat(1.0))
    assert not sentinel.look(files.beat(1.0 + 2.1 + GRACE_S - 0.01))
    assert sentinel.look(files.beat(1.0 + 2.1 + GRACE_S + 0.01))
    assert tree.num_kills == 1


def test_an_engine_has_until_the_deadline_that_the_agent_has_set(files: Files) -> None:
    # The agent remembers a longer step than the lease tells, and waits longer.
    tree = Tree()
    sentinel = Sentinel(files.dir, tree, deadline_s=None)
    files.rollout = dataclasses.replace(ROLLOUT, step_ns=100_000_000)
    files.node = dataclasses.replace(NODE, lend_pages=2, deadline_ns=int(2.5e9))
    assert not sentinel.look(files.beat(1.0))
    assert not sentinel.look(files.beat(2.5 + GRACE_S - 0.01))
    assert sentinel.look(files.beat(2.5 + GRACE_S + 0.01))
    assert tree.num_kills == 1


def test_a_cut_that_is_not_due_is_waited_for_while_the_agent_is_heard_of(files: Files) -> None:
    # Ahead of production's need: the agent has set no deadline yet.
    tree = Tree()
    sentinel = Sentinel(files.dir, tree, deadline_s=0.1)
    files.node = dataclasses.replace(NODE, lend_pages=2)
    for tenth in range(100):
        assert not sentinel.look(files.beat(tenth / 10))
    silent_s = 9.9 + DEAD_AFTER_S + 0.01
    assert not sentinel.look(silent_s)  # its time begins
    assert sentinel.look(silent_s + 0.1 + GRACE_S + 0.01)
    assert tree.num_kills == 1


def test_a_deadline_that_is_set_for_ever_gives_no_more_than_the_longest_there_is(files: Files) -> None:
    tree = Tree()
    sentinel = Sentinel(files.dir, tree, deadline_s=None)
    files.node = dataclasses.replace(NODE, lend_pages=2, deadline_ns=2**62)
    assert not sentinel.look(files.beat(1.0))
    assert not sentinel.look(files.beat(1.0 + MAX_RECLAIM_S + GRACE_S - 0.01))
    assert sentinel.look(files.beat(1.0 + MAX_RECLAIM_S + GRACE_S + 0.01))
    assert tree.num_kills == 1


def test_workers_that_outlive_their_core_owe_all_that_they_hold(files: Files) -> None:
    tree = Tree()
    sentinel = Sentinel(files.dir, tree, deadline_s=0.1)
    with files.dir.rank_writer("rollout", 0, 4) as rank:
        rank.write(RankState(resident_pages=3))
        assert not sentinel.look(files.beat(0.0))
        files.beat(1.0)
        files.end_core()
        assert not sentinel.look(1.0)
        assert sentinel.look(1.0 + 0.1 + GRACE_S + 0.01)
    assert tree.num_kills == 1


async def test_with_the_agent_and_the_engine_stopped_the_memory_comes_back(device: Device) -> None:
    """The agent runs in this process: it is stopped by not letting its loop run, the engine by SIGSTOP."""
    production = device.produce()
    agent = device.agent(engine=BY_DEFAULT, lending={"reclaim_deadline_s": 0.2})
    await ready_in_the_idle_class(device, agent, 16)
    pid = int(device.report()["pid"])
    rank = NodeDir(device.dir).rank("rollout", 0)
    os.kill(pid, signal.SIGSTOP)
    production.needed = 20
    production.publish()
    looks = 1000
    while rank.alive() and looks:  # blocks the loop: neither the agent nor production takes a step
        looks -= 1
        signal.sigtimedwait([], 0.05)
    assert not rank.alive()
    assert agent.engine.num_kills == 0  # it was not the agent
    production.needed = 0


AGENT = """
import asyncio, sys, time
from pathlib import Path
from rose.config import validate
from rose.coserve.node_config import NodeConfig
from rose.coserve.engine import RolloutEngine
from rose.proc import Child, ProcSpec

config = validate(NodeConfig, {"node_id": "n", "dir": sys.argv[1], "serving": {}, "engine": {"model": "m", "max_model_len": 8}})
engine = RolloutEngine(config)
program = "sleep 600 & echo $!; exec sleep 600"  # in the idle class: an interpreter would take its time to start
child = Child.start(ProcSpec(name="engine", argv=("sh", "-c", program), sched="idle", log_path=Path(sys.argv[2])))
print(child.guard_pid, engine._start_sentinel(child).pid, child.pid, child.share.directory, flush=True)
time.sleep(600)
"""
"""A node agent that holds an engine of two processes and its sentinel, and does nothing else."""


@dataclasses.dataclass
class Held:
    """What :data:`AGENT` holds; the engine is its program and that one's child, the core."""

    agent: subprocess.Popen[str]
    guard: int
    sentinel: int
    program: int
    idle_group: Path | None
    core: int

    def pids(self) -> list[int]:
        return [self.guard, self.program, self.core, self.sentinel]

    def group_share(self) -> str:
        """Of the engine's processes as a whole, by the kernel."""
        if self.idle_group is not None:
            return {"0": "normal", "1": "idle"}[(self.idle_group / "cpu.idle").read_text().strip()]
        group = Path(f"/proc/{self.core}/autogroup")
        if group.exists() and group.read_text().split()[-1] == "19":
            return "idle"
        return "normal" if os.sched_getscheduler(self.core) == os.SCHED_OTHER or group.exists() else "idle"


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    directory, log = tmp_path / "n", tmp_path / "log"
    with NodeDir(directory).node_writer() as node:
        node.write(NODE)
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(directory), str(log)], stdout=subprocess.PIPE, text=True
        )
        assert agent.stdout is not None
        guard, sentinel, program, group = agent.stdout.readline().split()
        wait_until(lambda: log.exists() and "\n" in log.read_text(), "the engine's core runs")
        core = int(log.read_text().split()[0])
        held = Held(
            agent, int(guard), int(sentinel), int(program), None if group == "None" else Path(group), core
        )
        try:
            yield held
        finally:
            for pid in (agent.pid, *held.pids()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()
            agent.stdout.close()


def test_a_share_is_not_taken_from_the_dying_because_the_agent_is_back(files: Files) -> None:
    tree = DyingTree()
    sentinel = Sentinel(files.dir, tree, deadline_s=0.1)
    files.beat(0.0)
    sentinel.look(10.0)  # the agent has been silent
    assert tree.normal
    sentinel.look(files.beat(10.1))
    assert tree.normal
    tree.is_dying = False
    sentinel.look(files.beat(10.1 + HELP_EVERY_S))
    assert not tree.normal


def test_a_share_that_the_kernel_refuses_is_asked_for_again(files: Files) -> None:
    tree = DyingTree(num_refused=2)
    sentinel = Sentinel(files.dir, tree, deadline_s=0.1)
    files.beat(0.0)
    for number in range(3):
        sentinel.look(10.0 + number * HELP_EVERY_S)
    assert tree.normal


def test_an_agent_that_is_silent_for_long_costs_few_looks_at_all_processes(files: Files) -> None:
    class Counting(Tree):
        num_looks = 0

        def dying(self) -> bool:
            self.num_looks += 1
            return False

    tree = Counting()
    sentinel = Sentinel(files.dir, tree, deadline_s=0.1)
    files.rollout = RolloutLease(phase=Phase.READY)  # it owes nothing
    files.beat(0.0)
    looks = 200
    for number in range(looks):
        sentinel.look(10.0 + number * PERIOD_S)
    assert 1 <= tree.num_looks <= looks * PERIOD_S / HELP_EVERY_S + 1


@pytest.mark.parametrize("name", ["serving.board", "serving.lease"])
def test_production_s_damaged_file_is_no_leave_to_keep_its_memory(files: Files, name: str) -> None:
    tree = Tree()
    sentinel = Sentinel(files.dir, tree, deadline_s=0.1)
    sentinel.look(files.beat(0.0))
    path = files.dir.path / name
    path.write_bytes(b"\xff" * (path.stat().st_size if path.exists() else 4096))
    files.node = dataclasses.replace(CUT, lend_pages=0)
    sentinel.look(files.beat(1.0))
    for at_s in (1.2, 1.4, 1.6):
        sentinel.look(files.beat(at_s))
    assert tree.num_kills == 1


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + 240.0
    while not condition():
        assert time.monotonic() < until_s, f"{what} did not come true"
        time.sleep(0.01)


def test_a_core_that_was_killed_while_the_agent_is_silent_gets_a_normal_share_until_it_is_gone(
    held: Held,
) -> None:
    """In the idle class of a busy core it would not get to free its memory.  The freezer keeps it dying for as long as we look."""
    with freezer("v1") as group:
        group.join(held.core)
        group.freeze()
        assert held.group_share() == "idle"
        os.kill(held.agent.pid, signal.SIGSTOP)
        os.kill(held.core, signal.SIGKILL)
        wait_until(lambda: held.group_share() == "normal", "a normal share for the dying")
        group.thaw()
        wait_until(lambda: held.group_share() == "idle", "the share as it was, for the rest")
    assert alive(held.program), "nobody asked for its memory"


@pytest.mark.parametrize("dead", [("agent",), ("agent", "guard")], ids=" and ".join)
def test_what_a_dead_agent_leaves_of_its_engine_is_lifted_and_killed(
    held: Held, dead: tuple[str, ...]
) -> None:
    with freezer("v1") as group:
        group.join(held.core)
        group.freeze()
        for name in dead:
            os.kill(held.agent.pid if name == "agent" else held.guard, signal.SIGKILL)
        held.agent.wait()
        wait_until(lambda: held.group_share() == "normal", "a normal share for the dying")
        wait_until(lambda: is_dying(held.core), "the core was killed")
    wait_until(
        lambda: not [pid for pid in held.pids() if alive(pid)], "nothing is left, the sentinel neither"
    )


def test_a_stopped_guard_does_not_keep_its_tree_from_being_killed(held: Held) -> None:
    os.kill(held.guard, signal.SIGSTOP)
    with freezer("v2") as group:
        group.join(held.guard)
        group.freeze()
        held.agent.kill()
        held.agent.wait()
        wait_until(
            lambda: not [p for p in (held.program, held.core) if alive(p)], "the engine is gone meanwhile"
        )
    wait_until(lambda: not [pid for pid in held.pids() if alive(pid)], "nothing is left")


def test_who_is_dying_is_told_from_the_living_and_the_dead() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert not is_dying(child.pid)
        with freezer("v1") as group:
            group.join(child.pid)
            group.freeze()
            child.kill()
            assert is_dying(child.pid)
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "it has ended")
        assert not is_dying(child.pid), "it has nothing any more"
    finally:
        child.kill()
        child.wait()
    assert not is_dying(child.pid)
