#!/usr/bin/env python
"""How fast production gets memory back, and what happens when nobody gives it.

Four parts, each with the real code and real pages but without a model:

``release``   the page pool alone: microseconds per 2 MiB page to map and to give back, with the kernel's own word on
              huge pages (``AnonHugePages`` of the range).  Limit: release <= 10 us where they are there.
``usable``    production's real scheduler, pager and claim against a rollout process that looks up only between its steps: time
              from the claim to the first block that production can use, and to all it asked for, by step length.
``backstop``  a real node agent and an engine process with real pages; production claims everything while the engine is
              stopped, while engine and agent are stopped, and when both are killed.  Time from the *deadline*
              until the engine's memory is free.  Limit: 500 ms.
``audit``     what it costs to hold a book against the kernel's word: a pager's look (``mincore`` of its ranges) at 1 GiB of
              chunks, of which every other is mapped, beside what ``smaps`` and ``smaps_rollup`` of the same process cost.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import write
from rose.evaluation.statistics import percentile
from rose.units import PAGE_BYTES

RELEASE_LIMIT_US, BACKSTOP_LIMIT_S = 10.0, 0.5
STEP_LENGTHS_S = (0.005, 0.02, 0.05, 0.1)
LENT_PAGES = 12
DEADLINE_S = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/reclaim.json"))
    parser.add_argument("--repeats", type=int, default=30, help="reclaims per step length")
    parser.add_argument("--kills", type=int, default=5, help="kills per backstop case")
    parser.add_argument("--only", choices=("release", "usable", "backstop", "audit"))
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        _peer(Path(args.peer[0]), float(args.peer[1]))
        return 0
    summary: dict[str, Any] = {}
    for name, part in (("release", release), ("usable", usable), ("backstop", backstop), ("audit", audit)):
        if args.only in (None, name):
            print(f"{name} ...", flush=True)
            found = part(args.repeats) if name != "backstop" else part(args.kills)
            summary |= found
            for key, value in found.items():
                print(f"  {key:38} {round(value, 3) if isinstance(value, float) else value}")
    write(args.json, "reclaim", summary, {"step_lengths_s": STEP_LENGTHS_S, "deadline_s": DEADLINE_S})
    print(args.json)
    return 0


# --- the page pool


def release(repeats: int) -> dict[str, Any]:
    from rose.coserve.pages import HostPagePool

    num = 64
    arena = HostPagePool().reserve(num * PAGE_BYTES)
    page_us: dict[str, list[float]] = {"map": [], "release": [], "release_batch": []}
    huge = 0
    for _ in range(repeats):
        for page in range(num):
            begun = time.perf_counter_ns()
            arena.map([(page * PAGE_BYTES, PAGE_BYTES)])
            page_us["map"].append((time.perf_counter_ns() - begun) / 1e3)
        huge = _huge_bytes(arena.address, arena.address + arena.size)
        for page in range(num // 2):
            begun = time.perf_counter_ns()
            arena.unmap([(page * PAGE_BYTES, PAGE_BYTES)])
            page_us["release"].append((time.perf_counter_ns() - begun) / 1e3)
        begun = time.perf_counter_ns()
        arena.unmap([(num // 2 * PAGE_BYTES, num // 2 * PAGE_BYTES)])
        page_us["release_batch"].append((time.perf_counter_ns() - begun) / 1e3 / (num // 2))
    arena.close()
    found: dict[str, Any] = {"huge_page_fraction": huge / (num * PAGE_BYTES)}
    for name, values in page_us.items():
        found |= {
            f"{name}_p50_us": percentile(values, 0.5),
            f"{name}_p99_us": percentile(values, 0.99),
        }
    found["release_limit_met"] = found["release_p50_us"] <= RELEASE_LIMIT_US
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found["huge_page_mode"] = mode.read_text().split("[")[1].split("]")[0] if mode.exists() else "none"
    return found


def _huge_bytes(start: int, end: int) -> int:
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(None, 1)[0]
        if not head.endswith(":"):
            low, _, high = head.partition("-")
            inside = int(low, 16) >= start and int(high, 16) <= end
        elif inside and head == "AnonHugePages:":
            total += int(line.split()[1]) * 1024
    return total


# --- the audit


def audit(repeats: int) -> dict[str, Any]:
    """Microseconds of one look; of ``smaps`` what a process with these pages alone costs, without any weights."""
    from rose.coserve.pages import HostPagePool

    num, found = 512, {}
    for kind in ("huge", "small"):
        arena = HostPagePool(huge=kind == "huge").reserve(num * PAGE_BYTES)
        mapped = [(page * PAGE_BYTES, PAGE_BYTES) for page in range(0, num, 2)]
        released = [(page * PAGE_BYTES, PAGE_BYTES) for page in range(1, num, 2)]
        arena.map(mapped)
        looks: dict[str, list[float]] = {"mincore": [], "smaps": [], "smaps_rollup": []}
        for _ in range(repeats):
            begun = time.perf_counter_ns()
            assert arena.resident_bytes(mapped) == num // 2 * PAGE_BYTES
            assert arena.touched_bytes(released) == 0
            looks["mincore"].append((time.perf_counter_ns() - begun) / 1e3)
            for name in ("smaps", "smaps_rollup"):
                begun = time.perf_counter_ns()
                Path(f"/proc/self/{name}").read_bytes()
                looks[name].append((time.perf_counter_ns() - begun) / 1e3)
        arena.close()
        for name, values in looks.items():
            found[f"audit_{name}_{kind}_p50_us"] = percentile(values, 0.5)
            found[f"audit_{name}_{kind}_p99_us"] = percentile(values, 0.99)
    found["audit_ranges"] = num
    found["audit_bytes"] = num * PAGE_BYTES
    return found


# --- from the claim to a usable block


def _peer(path: Path, step_s: float) -> None:
    """The rollout engine and the node agent of one device: a step of ``step_s``, then it looks and obeys."""
    from rose.coserve.node_dir import NodeDir
    from rose.coserve.pages import HostPagePool
    from rose.coserve.records import Mode, NodeState, Phase, RolloutLease
    from rose.policy.coserving.rollout import allowed_pages

    node = NodeDir(path)
    state, lease = node.node_writer(), node.rollout_lease_writer()
    serving, board = node.serving_lease(), node.serving_board()
    arena, held = HostPagePool().reserve(LENT_PAGES * PAGE_BYTES), 0
    print("up", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        now_ns = time.monotonic_ns()
        state.write(
            NodeState(mode=Mode.ON, epoch=1, lend_pages=LENT_PAGES, has_serving=1, heartbeat_ns=now_ns)
        )
        record_, claim = serving.read(), board.read()
        allowed, _ = allowed_pages(
            mode=Mode.ON, lend_pages=LENT_PAGES, has_serving=True,
            serving_phase=record_.phase if record_ else Phase.ABSENT, serving_alive=serving.alive(),
            serving_total=record_.total_pages if record_ else 0,
            serving_reserved=record_.reserved_pages if record_ else 0,
            serving_needed=claim.needed_pages if claim else 0, node_age_s=0.0, serving_age_s=0.0,
        )  # fmt: skip
        allowed = min(allowed, LENT_PAGES)
        if allowed < held:
            arena.unmap([(allowed * PAGE_BYTES, (held - allowed) * PAGE_BYTES)])
            held = allowed
        elif allowed > held:
            lease.write(RolloutLease(phase=Phase.READY, reserved_pages=allowed, heartbeat_ns=now_ns))
            again = serving.read()
            if again is not None and again.total_pages - again.reserved_pages >= allowed:
                arena.map([(held * PAGE_BYTES, (allowed - held) * PAGE_BYTES)])
                held = allowed
        lease.write(RolloutLease(phase=Phase.READY, reserved_pages=held, heartbeat_ns=now_ns))
        lease.wake()
        state.wake()
        time.sleep(step_s)


def usable(repeats: int) -> dict[str, Any]:
    from tests.plugin import harness
    from tests.tiny_model import write_tiny_model

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rose-reclaim-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_tiny_model(model)
        config = harness.engine_config(model)
        config.scheduler_config.max_num_seqs = 512
        config.scheduler_config.max_num_batched_tokens = 1 << 16
        for step_s in STEP_LENGTHS_S:
            first, whole = _usable_at(Path(folder) / f"n{step_s}", config, step_s, repeats)
            key = f"{step_s * 1e3:.0f}ms"
            for name, values in (("first", first), ("all", whole)):
                found[f"usable_{name}_p50_ms_step_{key}"] = percentile(values, 0.5)
                found[f"usable_{name}_p99_ms_step_{key}"] = percentile(values, 0.99)
    return found


def _usable_at(path: Path, config: Any, step_s: float, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds from the claim to the first chunk back in the pool, and to the last one asked for."""
    from rose.coserve.node_dir import NodeDir
    from tests.plugin import harness
    from vllm_plugin.memory import ChunkPlan, Pager
    from vllm_plugin.scheduler import ServingScheduler

    os.environ |= {"ROSE_ROLE": "serving", "ROSE_DIR": str(path)}
    pager = Pager(NodeDir(path), "serving", 0, ChunkPlan.of(harness.kv_cache_config(config)), guard=False)
    scheduler = harness.build(ServingScheduler, config)
    side = scheduler.rose
    engine = SimpleNamespace(_idle_state_callbacks=[], input_queue=queue.Queue(), is_running=lambda: True)
    scheduler.rose_attach(engine)
    peer = subprocess.Popen(
        [sys.executable, __file__, "--peer", str(path), str(step_s)], stdout=subprocess.PIPE, text=True
    )
    first: list[float] = []
    whole: list[float] = []
    try:
        assert peer.stdout is not None
        peer.stdout.readline()
        for number in range(repeats):
            _run_until(
                scheduler, engine, lambda: len(side.balloon.inflated) == LENT_PAGES and not side.seam.mapped
            )
            peer_lease = NodeDir(path).rollout_lease()
            _run_until(
                scheduler,
                engine,
                lambda r=peer_lease: (
                    (r.read() or SimpleNamespace(reserved_pages=0)).reserved_pages == LENT_PAGES
                ),
            )
            for index in range(200):
                scheduler.add_request(harness.request(f"r{number}-{index}", num_tokens=100, max_tokens=4))
            harness.step(scheduler)  # as many as fit; the rest waits for memory
            inflated = len(side.balloon.inflated)
            begun = time.perf_counter()
            side.before_schedule()  # here the claim is stated
            asked = side.steps.claim_chunks
            _run_until(scheduler, engine, lambda before=inflated: len(side.balloon.inflated) < before)
            first.append((time.perf_counter() - begun) * 1e3)
            _run_until(scheduler, engine, lambda goal=inflated - asked: len(side.balloon.inflated) <= goal)
            whole.append((time.perf_counter() - begun) * 1e3)
            from vllm.v1.request import RequestStatus

            scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    finally:
        peer.kill()
        peer.wait()
        side.stop()
        pager.close()
    return first, whole


def _run_until(scheduler: Any, engine: Any, condition: Any, timeout_s: float = 30.0) -> None:
    """Be the engine's loop: our hooks run between steps of 2 ms, idle callbacks when there is no request.

    The condition is looked at where a step would start: what came back is lent again when no step takes it.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        scheduler.rose.before_schedule()
        if condition():
            return
        scheduler.rose.hooks.tell_step()
        while engine._idle_state_callbacks and not scheduler.requests:
            engine._idle_state_callbacks.pop(0)(engine)
        if time.monotonic() > until_s:
            raise SystemExit(f"not reached in {timeout_s:.0f} s: {scheduler.rose.status()}")
        time.sleep(0.002)


# --- the backstop


def backstop(repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in ("engine_stopped", "engine_and_agent_stopped", "both_killed"):
        late = [_backstop_once(case) for _ in range(repeats)]
        found[f"free_after_deadline_max_ms_{case}"] = max(late) * 1e3
        found[f"free_after_deadline_p50_ms_{case}"] = percentile(late, 0.5) * 1e3
        found[f"limit_met_{case}"] = max(late) <= BACKSTOP_LIMIT_S
    return found


class _Production:
    """Writes production's files from a thread: lends what is asked for, or claims all of it."""

    def __init__(self, path: Path, total: int) -> None:
        from rose.coserve.node_dir import NodeDir

        node = NodeDir(path)
        self._lease, self._board, self._node = (
            node.serving_lease_writer(),
            node.serving_board_writer(),
            node.node(),
        )
        self.total_pages, self.needed = total, 0
        self._stopping = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        from rose.coserve.records import Phase, ServingBoard, ServingLease
        from rose.policy.compat import Support

        node = self._node.read()
        reserved = self.total_pages - min(self.total_pages, node.lend_pages if node is not None else 0)
        self._lease.write(
            ServingLease(
                phase=Phase.READY, support=Support.ELASTIC, total_pages=self.total_pages,
                reserved_pages=reserved, heartbeat_ns=time.monotonic_ns(),
            )
        )  # fmt: skip
        self._board.write(ServingBoard(needed_pages=self.needed))
        self._board.wake()

    def _run(self) -> None:
        while not self._stopping.wait(0.01):
            self._write()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._lease.close()
        self._board.close()


def _backstop_once(case: str) -> float:
    """Seconds from the deadline until the stopped engine's pages are free (its writer's lock is gone)."""
    from rose.auth import Tokens
    from rose.coserve.node_dir import NodeDir
    from rose.demo.programs import to_toml
    from rose.proc import free_port

    fake_engine = Path(__file__).resolve().parents[2] / "tests" / "coserve" / "fake_engine.py"
    with tempfile.TemporaryDirectory(prefix="rose-backstop-") as text:
        folder = Path(text)
        Tokens.generate().save(folder / "tokens.toml")
        table = {
            "node_id": "n0",
            "dir": folder / "n",
            "token_file": folder / "tokens.toml",
            "serving": {},
            "mode": "on",
            "engine": {
                "model": "policy", "command": [sys.executable, str(fake_engine)], "port": free_port(),
                "max_model_len": 256, "env": {"FAKE_MODE": "", "FAKE_REPORT": str(folder / "engine.json")},
                "log_path": folder / "engine.log", "sched": "normal",
            },
            "lending": {"reclaim_deadline_s": DEADLINE_S, "grow_period_s": 0.05, "growth_window_s": 1.0},
        }  # fmt: skip
        (folder / "node.toml").write_text(to_toml(table))
        production = _Production(folder / "n", total=20)
        agent = subprocess.Popen(
            [sys.executable, "-m", "rose.cli", "node", "run", "--config", str(folder / "node.toml")],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "agent.log").open("w"),
        )
        rank = NodeDir(folder / "n").rank("rollout", 0)
        try:
            _wait(lambda: (r := rank.read()) is not None and r.resident_pages >= 16, 60.0, "16 pages lent")
            engine = int(json.loads((folder / "engine.json").read_text())["pid"])
            match case:
                case "engine_stopped":
                    os.kill(engine, signal.SIGSTOP)
                case "engine_and_agent_stopped":
                    os.kill(engine, signal.SIGSTOP)
                    os.kill(agent.pid, signal.SIGSTOP)
                case _:
                    os.kill(agent.pid, signal.SIGKILL)
                    os.kill(engine, signal.SIGKILL)
            production.needed = production.total_pages
            deadline_s = time.monotonic() + DEADLINE_S
            _wait(lambda: not rank.alive(), 30.0, "the memory is free")
            return max(0.0, time.monotonic() - deadline_s)
        finally:
            agent.kill()
            agent.wait()
            production.close()


def _wait(condition: Any, timeout_s: float, what: str) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            raise SystemExit(f"never: {what}")
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())
