"""Ledger and lending over real processes: random steps, SIGKILL and SIGSTOP; every invariant after each operation.

Three kinds of process, each the one writer of its files: production, the rollout engine and the node agent, with
the real ledger, the real page pool and the real policies; only the models are missing.  Growth is two operations,
*reserve* and *map*, so that a kill, a stop or the peer's own step falls between them too.

Invariants, in this order (:meth:`Device.check`):

1. the pages mapped by both engines never exceed the device;
2. no engine has more mapped than it says it reserved;
3. production keeps its floor;
4. every file reads as a whole record;
5. a reader calls a writer alive exactly while its process is there.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.pages import HostPagePool
from rose.coserve.records import Mode, NodeState, Phase, RolloutLease, ServingBoard, ServingLease
from rose.policy.baselines import make_lending
from rose.policy.coserving.rollout import allowed_pages
from rose.policy.lending import LendingParams
from rose.policy.lending_events import ModeSet, RolloutReported, ServingReported, Tick
from rose.units import NS_PER_S, PAGE_BYTES

TOTAL, FLOOR = 12, 2
DEAD_AFTER_S = 0.05
"""Short, so that a stopped peer is a silent one within a few operations."""
NUM_OPERATIONS = 10_000
KINDS = ("serving", "rollout", "node")


class _Memory:
    """Real pages, the first ``mapped`` of the arena."""

    def __init__(self) -> None:
        self._arena = HostPagePool().reserve(TOTAL * PAGE_BYTES, guard=True)
        self.mapped = 0

    def resize(self, pages: int) -> None:
        low, high = sorted((self.mapped, pages))
        if pages > self.mapped:
            self._arena.map([(low * PAGE_BYTES, (high - low) * PAGE_BYTES)])
        elif pages < self.mapped:
            self._arena.unmap([(low * PAGE_BYTES, (high - low) * PAGE_BYTES)])
        self.mapped = pages
        resident = self._arena.resident_bytes([(0, TOTAL * PAGE_BYTES)]) if pages == 0 else pages * PAGE_BYTES
        assert resident == pages * PAGE_BYTES


class _Serving:
    def __init__(self, path: str) -> None:
        node = NodeDir(path)
        self._lease, self._board = node.serving_lease_writer(), node.serving_board_writer()
        self._node, self._peer = node.node(), node.rollout_lease()
        self._memory = _Memory()
        self._phase, self._used = Phase.STARTING, 0
        self._reserved = TOTAL  # starting takes everything back
        self._publish()

    def _publish(self) -> None:
        self._lease.write(
            ServingLease(
                phase=self._phase,
                total_pages=TOTAL,
                reserved_pages=self._reserved,
                heartbeat_ns=time.monotonic_ns(),
            )
        )
        needed = self._used if self._used > self._memory.mapped else 0
        self._board.write(ServingBoard(used_pages=self._used, needed_pages=needed, busy=int(self._used > 0)))

    def do(self, what: str, argument: int) -> None:
        match what:
            case "reserve":
                node = self._node.read()
                ready = self._phase == Phase.READY and node is not None and self._node.alive()
                lend = node.lend_pages if ready and node is not None and node.mode == Mode.ON else 0
                keep = max(TOTAL - lend, self._used, FLOOR)
                if keep < self._memory.mapped:
                    self._memory.resize(keep)  # unmap first, then say so
                self._reserved = keep
            case "map":
                peer = self._peer.read()
                held = peer.reserved_pages if peer is not None and self._peer.alive() else 0
                self._memory.resize(max(self._memory.mapped, min(self._reserved, TOTAL - held)))
                if self._memory.mapped == TOTAL:
                    self._phase = Phase.READY
            case "load":
                self._used = argument
        self._publish()

    def report(self) -> dict[str, int]:
        return {"mapped": self._memory.mapped, "reserved": self._reserved}


class _Rollout:
    def __init__(self, path: str) -> None:
        node = NodeDir(path)
        self._lease = node.rollout_lease_writer()
        self._node, self._serving, self._board = node.node(), node.serving_lease(), node.serving_board()
        self._memory = _Memory()
        self._reserved = self._cuts = 0
        self._publish()

    def _publish(self) -> None:
        self._lease.write(
            RolloutLease(
                phase=Phase.READY,
                reserved_pages=self._reserved,
                reclaim_seq=self._cuts,
                heartbeat_ns=time.monotonic_ns(),
            )
        )

    def _allowed(self) -> int:
        node, serving, board = self._node.read(), self._serving.read(), self._board.read()
        now_ns = time.monotonic_ns()
        alive = node is not None and self._node.alive()
        pages, _ = allowed_pages(
            mode=node.mode if node else Mode.OFF,
            lend_pages=node.lend_pages if node else 0,
            has_serving=True,
            serving_phase=serving.phase if serving else Phase.ABSENT,
            serving_alive=serving is not None and self._serving.alive(),
            serving_total=serving.total_pages if serving else 0,
            serving_reserved=serving.reserved_pages if serving else 0,
            serving_needed=board.needed_pages if board else 0,
            node_age_s=(now_ns - node.heartbeat_ns) / NS_PER_S
            if node is not None and alive
            else float("inf"),
            serving_age_s=(now_ns - serving.heartbeat_ns) / NS_PER_S if serving else float("inf"),
            dead_after_s=DEAD_AFTER_S,
        )
        return min(pages, TOTAL)

    def do(self, what: str, argument: int) -> None:
        allowed = self._allowed()
        if allowed < self._memory.mapped:
            self._memory.resize(allowed)
            self._cuts += 1
            self._reserved = allowed
        elif what == "reserve":
            self._reserved = allowed
        elif what == "map":
            # Reserved before, read again now: production keeps its reservation, we step back.
            self._reserved = max(self._memory.mapped, min(self._reserved, allowed))
            self._memory.resize(self._reserved)
        self._publish()

    def report(self) -> dict[str, int]:
        return {"mapped": self._memory.mapped, "reserved": self._reserved}


class _Node:
    def __init__(self, path: str) -> None:
        node = NodeDir(path)
        self._state = node.node_writer()
        self._serving, self._board, self._rollout = (
            node.serving_lease(),
            node.serving_board(),
            node.rollout_lease(),
        )
        params = LendingParams(
            grow_period_s=0.001,
            cool_down_s=0.005,
            cut_window_s=0.01,
            growth_window_s=0.05,
            use_window_s=0.05,
            dead_after_s=DEAD_AFTER_S,
        )
        self._policy = make_lending(random.choice(["rose", "rose", "paper"]), params)
        self._mode, self._epoch, self._kill = Mode.ON, 0, 0
        self._set_mode()

    def _set_mode(self) -> None:
        event = ModeSet(at_s=time.monotonic(), mode=self._mode, floor_pages=FLOOR)
        self._policy.handle(event)
        self._write()

    def _write(self) -> None:
        self._epoch += 1
        self._policy.check()
        self._state.write(
            NodeState(
                mode=self._mode,
                epoch=self._epoch,
                lend_pages=self._policy.lend_pages,
                floor_pages=FLOOR,
                has_serving=1,
                heartbeat_ns=time.monotonic_ns(),
            )
        )

    def do(self, what: str, argument: int) -> None:
        if what == "mode":
            self._mode = Mode(argument)
            self._set_mode()
        lease, board, rollout = self._serving.read(), self._board.read(), self._rollout.read()
        actions: list[Any] = []
        if lease is not None:
            actions += self._policy.handle(
                ServingReported(
                    at_s=time.monotonic(),
                    alive=self._serving.alive(),
                    phase=lease.phase,
                    total_pages=lease.total_pages,
                    reserved_pages=lease.reserved_pages,
                    used_pages=board.used_pages if board else 0,
                    needed_pages=board.needed_pages if board else 0,
                )
            )
        alive = rollout is not None and self._rollout.alive()
        actions += self._policy.handle(
            RolloutReported(
                at_s=time.monotonic(),
                alive=alive,
                phase=rollout.phase if rollout else Phase.ABSENT,
                reserved_pages=rollout.reserved_pages if rollout is not None and alive else 0,
                reclaim_seq=rollout.reclaim_seq if rollout else 0,
            )
        )
        actions += self._policy.handle(Tick(at_s=time.monotonic()))
        self._kill = any(type(action).__name__ == "KillRollout" for action in actions)
        self._write()

    def report(self) -> dict[str, int]:
        return {"kill": self._kill}


def _process(kind: str, path: str, pipe: Connection) -> None:
    """One engine or agent: does what it is told, one operation at a time, and reports."""
    actor = {"serving": _Serving, "rollout": _Rollout, "node": _Node}[kind](path)
    pipe.send(actor.report())
    while True:
        what, argument = pipe.recv()
        actor.do(what, argument)
        pipe.send(actor.report())


class Device:
    """The processes of one device and what each reported last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._processes: dict[str, Any] = {}
        self._pipes: dict[str, Connection] = {}
        self.stopped: set[str] = set()
        self.reports: dict[str, dict[str, int]] = {}
        node = NodeDir(path)
        self._files = {
            "serving": (node.serving_lease(), node.serving_board()),
            "rollout": (node.rollout_lease(),),
            "node": (node.node(),),
        }
        self.counts: Counter[str] = Counter()

    def alive(self, kind: str) -> bool:
        return kind in self._processes

    def start(self, kind: str) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_process, args=(kind, str(self.path), theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes[kind], self._pipes[kind] = process, ours
        self.reports[kind] = self._answer(kind)
        self.counts["start"] += 1

    def _answer(self, kind: str) -> dict[str, int]:
        assert self._pipes[kind].poll(30.0), f"{kind} does not answer"
        return self._pipes[kind].recv()

    def do(self, kind: str, what: str, argument: int = 0) -> None:
        if not self.alive(kind) or kind in self.stopped:
            return
        self._pipes[kind].send((what, argument))
        self.reports[kind] = self._answer(kind)
        self.counts[f"{kind} {what}"] += 1

    def kill(self, kind: str, *, in_flight: str | None = None) -> None:
        """SIGKILL, perhaps just after it was told to do something: then nobody knows how far it got."""
        if not self.alive(kind):
            return
        if in_flight is not None and kind not in self.stopped:
            self._pipes[kind].send((in_flight, 0))
            self.counts["killed in flight"] += 1
        process = self._processes.pop(kind)
        process.kill()
        process.join(30.0)
        self._pipes.pop(kind).close()
        self.reports.pop(kind, None)
        self.stopped.discard(kind)
        self.counts["kill"] += 1

    def stop(self, kind: str) -> None:
        if self.alive(kind) and kind not in self.stopped:
            os.kill(self._processes[kind].pid, signal.SIGSTOP)
            self.stopped.add(kind)
            self.counts["stop"] += 1

    def go_on(self, kind: str) -> None:
        if kind in self.stopped:
            os.kill(self._processes[kind].pid, signal.SIGCONT)
            self.stopped.discard(kind)

    def check(self) -> None:
        serving, rollout = self.reports.get("serving"), self.reports.get("rollout")
        mapped = sum(report["mapped"] for report in (serving, rollout) if report)
        assert mapped <= TOTAL, f"{mapped} of {TOTAL} pages are mapped: {self.reports}"
        for report in (serving, rollout):
            assert report is None or report["mapped"] <= report["reserved"], self.reports
        assert serving is None or serving["reserved"] >= FLOOR
        for kind, files in self._files.items():
            for file in files:
                file.read()
                assert file.alive() == self.alive(kind), f"{file.path.name} of {kind}"

    def close(self) -> None:
        for kind in list(self._processes):
            self.kill(kind)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    device = Device(tmp_path / "n")
    yield device
    device.close()


def one_operation(device: Device, rng: random.Random) -> None:
    """A step nearly always; a signal now and then."""
    kind = rng.choice(KINDS)
    draw = rng.random()
    if not device.alive(kind):
        device.start(kind)
    elif draw < 0.010:
        device.kill(kind, in_flight=rng.choice([None, "reserve", "map"]))
    elif draw < 0.020:
        device.stop(kind)
    elif kind in device.stopped:
        if draw < 0.3:
            device.go_on(kind)
        elif draw < 0.32:
            time.sleep(DEAD_AFTER_S)  # long enough to count as silent
    elif kind == "node":
        device.do("node", *(("mode", rng.choice([0, 1, 2, 2, 2, 2])) if draw < 0.06 else ("round", 0)))
        if device.reports["node"]["kill"]:
            device.kill("rollout")
    elif kind == "serving" and draw < 0.2:
        device.do("serving", "load", rng.choice([0, 0, 1, 3, TOTAL - 1, rng.randint(0, TOTAL)]))
    else:
        device.do(kind, rng.choice(["reserve", "map"]))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_interleaving_of_steps_kills_and_stops_breaks_an_invariant(device: Device) -> None:
    rng = random.Random(0)
    most = 0
    for _ in range(NUM_OPERATIONS):
        one_operation(device, rng)
        device.check()
        most = max(most, device.reports.get("rollout", {}).get("mapped", 0))
    # The run must have been where it hurts: memory lent, processes killed and stopped in the middle of it.
    assert most >= TOTAL // 2
    assert device.counts["kill"] > 50
    assert device.counts["stop"] > 20
    assert device.counts["killed in flight"] > 20


def test_the_check_sees_memory_that_is_counted_twice(device: Device) -> None:
    device.start("serving")
    device.start("rollout")
    device.reports["rollout"] = {"mapped": TOTAL, "reserved": TOTAL}
    device.reports["serving"] = {"mapped": 1, "reserved": TOTAL}
    with pytest.raises(AssertionError, match="are mapped"):
        device.check()


def test_production_that_was_killed_gets_everything_back_with_a_dead_agent(device: Device) -> None:
    for kind in KINDS:
        device.start(kind)
    for _ in range(400):
        for kind, what in (
            ("serving", "map"),
            ("node", "round"),
            ("serving", "reserve"),
            ("rollout", "reserve"),
        ):
            device.do(kind, what)
            device.check()
        device.do("rollout", "map")
        if device.reports["rollout"]["mapped"] >= TOTAL // 2:
            break
    assert device.reports["rollout"]["mapped"] >= TOTAL // 2
    device.kill("node")
    device.kill("serving")
    device.start("serving")
    device.do("serving", "map")
    assert device.reports["serving"]["mapped"] <= TOTAL - TOTAL // 2  # it never takes what the peer still has
    device.do("rollout", "map")
    device.check()
    device.do("serving", "map")
    assert device.reports["serving"]["mapped"] == TOTAL
