"""Thousands of kills and stops of a device's processes, at random instants, and the kernel's own figure of who holds which memory.

All of it is the product's: production's and the rollout engine's side of the plugin with their pagers, the node agent, the guard of the
engine's tree, the sentinel.  Scripted is what a model would be: vLLM's scheduler, block pool and engine core
(:mod:`tests.plugin.scripted_vllm`), and no process is a new interpreter: the agent forks where it would start a program
(:class:`ForkedPopen`), so that a kill and what comes after it cost milliseconds.

Faults, seeded: SIGKILL, or SIGSTOP and SIGCONT some time later, of ``engine`` (its API server), ``core`` and ``worker``, several at once too,
and of ``agent``, ``guard`` and ``sentinel``, all three at once (:data:`KEEPERS`).  Whoever supervises an agent starts it
again; nobody does anything else.  Between faults production has bursts that want all of its memory.  Now and then the storm stands still: then production gets everything back, and after its burst the next
engine gets its loan.

Limits: never a page more than the device has, no error in production; at each stand-still everything back and lent again, and no core stays that
is nobody's; no process left at the end.

    python -m tests.plugin.storm --faults 3000 --json benchmarks/results/coserving/storm/DATE.json
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import http.server
import json
import logging
import mmap
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from rose import private_dir, proc_guard
from rose.auth import Tokens
from rose.config import validate
from rose.coserve import engine as engine_module
from rose.coserve import sentinel
from rose.coserve.agent import NodeAgent
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir
from rose.proc import free_port
from rose.units import PAGE_BYTES
from tests.pair.memory import TORN_S, resident_pages
from tests.plugin.scripted_vllm import TOTAL_PAGES, Block, Core, Scheduler, without_vllm
from vllm_plugin import protocol_log
from vllm_plugin.memory import ChunkPlan, Pager
from vllm_plugin.orphans import end_with_guard
from vllm_plugin.roles import ENV_DECISIONS, ENV_DIR, ENV_ENGINE
from vllm_plugin.rollout import RolloutSide
from vllm_plugin.serving import ServingSide

KEEPERS = ("agent", "guard", "sentinel")
"""Each ends the engine where the others cannot; at the end of each stand-still all of them are killed, while memory is lent."""
VICTIMS = (*KEEPERS, "engine", "core", "worker")
ENV_REGISTER = "STORM_REGISTER"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
libc = ctypes.CDLL(None)
STOPPED_S = (0.01, 0.6)
LONG_S = 3.0
"""Of one stop in twenty: longer than anybody's silence is borne."""
STILL_EVERY = 40
ALL_UP_EVERY = 10
"""Where an engine takes its time to start, most moments find nobody but the agent: so often there is a whole one, and whoever was hit least is."""
GIVE_UP_S = 90.0
MAX_LOGS = 10_000
"""One of each engine.  None of them is thrown away."""


# --- processes


def born(role: str, address: int = 0) -> None:
    """Say who we are to who looks for victims and memory."""
    register = Path(os.environ[ENV_REGISTER])
    path = register / f".{role}.{os.getpid()}"
    path.write_text(str(address))
    path.rename(register / f"{role}.{os.getpid()}")


def forked(run: Callable[[], object], *, keep: Sequence[int] = (), session: bool = False) -> int:
    """A process that runs ``run`` and ends with what it answers; it has no descriptor of ours but ``keep`` and the standard three."""
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        gc.freeze()  # what is collected later would close descriptors that have become ours
        private_dir._opened.clear()  # nor is its descriptor ours
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if session:
            os.setsid()
        below = 3
        for descriptor in sorted(keep):
            os.closerange(below, descriptor)
            below = descriptor + 1
        os.closerange(below, 4096)
        code = run()
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001  # of a process that has no caller
        traceback.print_exc()
    finally:
        os._exit(code if isinstance(code, int) else 0)


class ForkedPopen:
    """``subprocess.Popen`` of the two programs that an agent starts, without a new interpreter."""

    def __init__(
        self,
        argv: list[str],
        *,
        env: dict[str, str],
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        **_: object,
    ) -> None:
        def program() -> object:
            os.environ.clear()
            os.environ.update(env)
            if "-m" in argv:
                sys.argv = argv[2:]
                born("sentinel")
                return sentinel.main()
            sys.argv = argv[3:]
            os.execvp = lambda _program, argv: os._exit(engine(argv))  # in the child of the guard alone
            born("guard")
            return proc_guard.main()

        self.args, self.returncode = argv, None
        self._lock = threading.Lock()
        self.pid = forked(program, keep=pass_fds, session=start_new_session)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until_s = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def agent(table: dict[str, Any]) -> None:
    born("agent")
    subprocess.Popen = ForkedPopen  # type: ignore[assignment,misc]
    engine_module.SENTINEL_AGAIN_S = 0.3  # it costs nothing here
    asyncio.run(NodeAgent(validate(NodeConfig, table), Tokens.generate()).run())


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"role": "rollout", "ranks": [], "scheduler": {}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


def engine(argv: Sequence[str]) -> int:
    """The rollout engine's API server, which starts its core."""
    born("engine")
    forked(rollout_core)
    address = ("127.0.0.1", int(argv[argv.index("--port") + 1]))
    http.server.ThreadingHTTPServer(address, Answers).serve_forever()
    return 0


def rollout_core() -> NoReturn:
    end_with_guard()
    os.environ[ENV_ENGINE] = str(secrets.randbits(62))
    born("core")
    ready, told = os.pipe()
    forked(lambda: rollout_worker(told), keep=(told,))
    os.close(told)
    os.read(ready, 1)
    without_vllm()
    scheduler, core = Scheduler(), Core()
    RolloutSide(scheduler, scheduler.kv_cache_config, 1).attach(core)
    while os.waitpid(-1, os.WNOHANG) == (
        0,
        0,
    ):  # as vLLM's it ends with its worker, and not with its API server
        core.run_callbacks(0.1)
    os._exit(1)


def rollout_worker(told: int) -> NoReturn:
    end_with_guard()
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # vLLM's workers see a pipe close
    plan = ChunkPlan.of(Scheduler().kv_cache_config)
    pager = Pager(NodeDir(os.environ[ENV_DIR]), "rollout", 0, plan, guard=True)
    born("worker", pager.arena.address)
    os.write(told, b"1")
    while True:
        signal.pause()


def production(wish: mmap.mmap) -> NoReturn:
    """Engine core and worker in one process, as its memory is of one.  ``wish[0]``: a burst wants everything."""
    os.environ[ENV_ENGINE] = str(secrets.randbits(62))
    without_vllm()
    scheduler, core = Scheduler(), Core()
    plan = ChunkPlan.of(scheduler.kv_cache_config)
    pager = Pager(NodeDir(os.environ[ENV_DIR]), "serving", 0, plan, guard=True)
    side = ServingSide(scheduler, scheduler.kv_cache_config, 1)
    side.attach(core)
    born("production", pager.arena.address)
    running = SimpleNamespace(num_tokens=9, num_computed_tokens=9, num_output_tokens=1)
    taken: list[Block] = []
    while True:
        core.run_callbacks(0.005)
        side.before_schedule()
        if wish[0]:
            scheduler.running[:] = [running]
            taken += scheduler.pool.take_all()
        elif taken:
            scheduler.running.clear()
            scheduler.pool.free_blocks(taken)
            taken.clear()
            side.after_update(None)
        side.hooks.tell_step()


# --- the storm


@dataclass
class Seen:
    """What was done, and what the kernel said."""

    num_faults: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    num_looks: int = 0
    num_torn_looks: int = 0
    worst_pages: float = 0.0
    most_lent: float = 0.0
    stills: int = 0
    longest_back_s: float = 0.0
    longest_again_s: float = 0.0
    agents: int = 0
    engines: int = 0
    errors: int = 0
    left: list[str] = field(default_factory=list)
    took_s: float = 0.0


class Storm:
    """See the module.

    Args:
        logs: Where all engines keep the logs of their books; None: they keep none.
    """

    def __init__(self, folder: Path, seed: int, logs: Path | None = None) -> None:
        self._rng, self.seen = random.Random(seed), Seen()
        self._register = folder / "register"
        self._register.mkdir()
        self._dir = folder / "node"
        self._dir.mkdir(mode=0o700)
        os.environ |= {ENV_REGISTER: str(self._register), ENV_DIR: str(self._dir)}
        self._log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if logs is not None:
            os.environ[ENV_DECISIONS] = str(logs)
            protocol_log.FLUSH_EVERY_S = 0.0  # an engine that is killed has said all
        self._wish = mmap.mmap(-1, 1)
        self._faults: Counter[str] = Counter()
        self._workers: set[int] = set()
        self._is_up = False
        self._thaw: list[tuple[float, int]] = []
        self._agent = 0
        self._agent_at_s = 0.0
        self._table = {
            "node_id": "n0",
            "dir": str(self._dir),
            "token_file": str(folder / "tokens.toml"),
            "mode": "on",
            "serving": {},
            "device": {"reserve_bytes": 0},
            "decisions": {"directory": str(logs), "max_files": MAX_LOGS} if logs is not None else {},
            "engine": {
                "model": "policy",
                "command": [sys.executable],
                "port": free_port(),
                "max_model_len": 256,
                "sched": "normal",
                "stop_grace_s": 0.2,
                "max_restarts": 1_000_000,
                "restart_window_s": 0.2,
                "restart_pause_s": 0.001,
            },
            "lending": {
                "reclaim_deadline_s": 0.5,
                "grow_period_s": 0.05,
                "cool_down_s": 0.05,
                "growth_window_s": 0.1,
                "use_window_s": 0.01,
                "period_s": 0.02,
                "dead_after_s": 0.5,
                "max_cuts": 1_000_000,
            },
        }

    def run(self, faults: int, say: Callable[[int, int], None] = lambda done, total: None) -> Seen:
        began_s = time.monotonic()
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        seen = self.seen
        self._fork(lambda: production(self._wish))
        self._until(lambda: bool(self._pids("production")), "production is up")
        self._is_up = True
        try:
            self._until(self._is_lent, "memory is lent")
            for number in range(faults):
                if all_up := number % ALL_UP_EVERY == 0:
                    self._wish[0] = 0
                    self._until(self._is_lent, "an engine is up, and memory is lent to it")
                self._fault(least_hit=all_up)
                self._wish[0] = self._rng.random() < 0.3
                self._weather(self._rng.choice((0.0, 0.01, 0.05, 0.1, 0.3)))
                if number % STILL_EVERY == STILL_EVERY - 1 or number == faults - 1:
                    self._stand_still()
                say(number + 1, faults)
        finally:
            self._end()
        seen.faults = dict(sorted(self._faults.items()))
        seen.took_s = time.monotonic() - began_s
        return seen

    def _fork(self, run: Callable[[], object]) -> int:
        def with_log() -> object:
            os.dup2(self._log, 1)
            os.dup2(self._log, 2)
            logging.basicConfig(level=logging.WARNING, force=True)
            return run()

        return forked(with_log, keep=(self._log,))

    def _pids(self, role: str) -> dict[int, int]:
        """Of each living process of a role, where its memory is."""
        found: dict[int, int] = {}
        for path in self._register.glob(f"{role}.*"):
            pid = int(path.suffix[1:])
            if alive(pid):
                found[pid] = int(path.read_text())
            else:
                path.unlink()
        return found

    def _supervise(self) -> None:
        """Reap what is ours, thaw whom it is time for, start the agent again."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid == self._agent:
                self._agent = 0
                self._agent_at_s = time.monotonic() + self._rng.choice((0.0, 0.02, 0.3))
        now_s = time.monotonic()
        for at_s, pid in self._thaw:
            if at_s <= now_s:
                send(pid, signal.SIGCONT)
        self._thaw = [item for item in self._thaw if item[0] > now_s]
        if not self._agent and now_s >= self._agent_at_s:
            self._agent = self._fork(lambda: agent(self._table))
            self.seen.agents += 1

    def _living(self) -> list[tuple[str, int]]:
        return [(role, pid) for role in VICTIMS for pid in sorted(self._pids(role))]

    def _fault(self, *, least_hit: bool) -> None:
        while not (fit := self._living()):
            self._until(lambda: bool(self._living()), "somebody lives who can be killed")
        (role, pid), kill = self._rng.choice(fit), self._rng.random() < 0.5
        if least_hit:
            role, pid = min(
                fit, key=lambda one: self._faults[f"kill {one[0]}"] + self._faults[f"stop {one[0]}"]
            )
        send(pid, signal.SIGKILL if kill else signal.SIGSTOP)
        if not kill:
            held_s = LONG_S if self._rng.random() < 0.05 else self._rng.uniform(*STOPPED_S)
            self._thaw.append((time.monotonic() + held_s, pid))
        self._faults[f"{'kill' if kill else 'stop'} {role}"] += 1
        self.seen.num_faults += 1

    def _look(self) -> None:
        """Memory that goes from one to the other between two looks must not be counted in both: rollout workers are looked at before
        and after."""
        began_s, seen = time.monotonic(), self.seen
        workers = self._pids("worker")
        self._workers.update(workers)
        before = {pid: pages_of(pid, at) for pid, at in workers.items()}
        held = sum(pages_of(pid, at) for pid, at in self._pids("production").items())
        lent = sum(min(pages, pages_of(pid, workers[pid])) for pid, pages in before.items())
        seen.num_looks += 1
        if time.monotonic() - began_s > TORN_S:
            seen.num_torn_looks += 1
            return
        seen.worst_pages = max(seen.worst_pages, held + lent)
        seen.most_lent = max(seen.most_lent, lent)

    def _weather(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while True:
            self._supervise()
            self._look()
            if time.monotonic() >= until_s:
                return
            time.sleep(0.003)  # the cores are theirs

    def _until(self, condition: Callable[[], bool], what: str) -> float:
        began_s = time.monotonic()
        while not condition():
            self._weather(0.01)
            if self._is_up and not self._pids("production"):
                raise AssertionError("production has died")
            if time.monotonic() - began_s > GIVE_UP_S:
                raise AssertionError(f"{what}: not after {GIVE_UP_S:.0f} s")
        return time.monotonic() - began_s

    def _is_lent(self) -> bool:
        return sum(pages_of(pid, at) for pid, at in self._pids("worker").items()) > 2

    def _is_home(self) -> bool:
        return sum(pages_of(pid, at) for pid, at in self._pids("production").items()) == TOTAL_PAGES

    def _is_somebodys(self) -> bool:
        """Each core and worker belongs to the session of a guard that lives."""
        guards = self._pids("guard")
        return all(session_of(pid) in guards for role in ("core", "worker") for pid in self._pids(role))

    def _stand_still(self) -> None:
        """No fault for a while: all comes back for a burst, and is lent again after it."""
        self._thaw = [(0.0, pid) for _, pid in self._thaw]
        seen = self.seen
        self._wish[0] = 1
        seen.longest_back_s = max(seen.longest_back_s, self._until(self._is_home, "all memory is back"))
        record = NodeDir(self._dir).serving_lease().read()
        assert record is not None
        seen.errors = record.errors
        self._wish[0] = 0
        seen.longest_again_s = max(seen.longest_again_s, self._until(self._is_lent, "memory is lent again"))
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees another's end
            for pid in [pid for role in KEEPERS for pid in self._pids(role)]:
                send(pid, number)
        self._until(self._is_somebodys, "what is left of an engine without a guard has ended")
        seen.stills += 1

    def _end(self) -> None:
        """The agent is told to end; what it leaves is left, and is what we say of it."""
        self._thaw = [(0.0, pid) for _, pid in self._thaw]
        self._supervise()
        self.seen.engines = len(self._workers)
        ended, self._agent, self._agent_at_s = self._agent, 0, float("inf")
        if ended:
            send(ended, signal.SIGTERM)
        until_s = time.monotonic() + 60.0
        while time.monotonic() < until_s and self._living():
            self._supervise()
            time.sleep(0.02)
        self.seen.left = [f"{role} {pid}" for role, pid in self._living()]
        for role in (*VICTIMS, "production"):
            for pid in self._pids(role):
                send(pid, signal.SIGKILL)
        while any(self._pids(role) for role in (*VICTIMS, "production")):
            self._supervise()
            time.sleep(0.01)
        self._wish.close()
        os.close(self._log)


def send(pid: int, number: signal.Signals) -> None:
    """Where it has just ended by itself there is nobody to send it to."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def session_of(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return -1


def pages_of(pid: int, address: int) -> float:
    """Of its KV allocation, by the kernel; 0 when it is dead."""
    return resident_pages(pid, address, TOTAL_PAGES * PAGE_BYTES) or 0.0


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--log", action="store_true", help="show what the processes said")
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--logs", type=Path, help="a folder for the decision logs of all engines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rose-storm-") as folder:
        storm = Storm(Path(folder), args.seed, args.logs)
        try:
            storm.run(args.faults, lambda done, total: print(f"\r{done}/{total}", end="", file=sys.stderr))
        finally:
            print(json.dumps(asdict(storm.seen), indent=1))
            if args.log:
                print((Path(folder) / "log").read_text()[-20000:])
    if args.json is not None:
        from benchmarks.lib.report import write  # here: the processes that are forked have none of it

        write(args.json, "storm", asdict(storm.seen), {"seeds": [args.seed]}, seconds=storm.seen.took_s)


if __name__ == "__main__":
    main()
