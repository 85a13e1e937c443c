"""Start a program so that it cannot outlive us, watch it become ready, and end it with everything below it.

Used by the node agent (the rollout engine) and the demo (everything).  It decides nothing about restarts.

- A child runs in a session of its own (a Ctrl-C in the terminal reaches only us), on given cores, in a given
  scheduling class, below a *guard* process (``rose.proc_guard``).  When we die, even by SIGKILL, the
  guard kills the child and all its descendants: no engine is left without an owner.
- ``wait_ready`` ends early, with the first error in the log and its last lines, when the child dies.
- ``terminate`` returns only when no process of the tree is left, or raises.

Secrets belong in ``env`` (or better in a file named there), never in ``argv``: every user can read argv.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import psutil

from rose.errors import ConfigError, EngineError
from rose.proc_log import first_error_in
from rose.proc_share import IdleShare, idle_share
from rose.proc_tree import GUARD_S, processes_below, set_class

Probe = str | Callable[[], bool]
"""An URL that must answer 2xx, or a function that says whether the child is ready."""
Progress = Callable[[float], None]
"""Called about once per look with the seconds waited so far."""

# Ours alone, ten times a second beside an engine that starts: no client is loaded or kept for it.  Never through a proxy.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_GUARD = Path(__file__).with_name("proc_guard.py")
_LOG_TAIL_BYTES = 16384
_LOOK_EVERY_S = 0.1
_FIRST_PORT = 12_000
"""Above those that programs are known by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcSpec:
    """What to run.

    Args:
        name: For messages.
        argv: Program and arguments; looked up on ``PATH``.
        env: Added to our own environment; a value of None takes the variable away.
        cores: CPU numbers it may use; empty = ours.
        sched: ``idle`` runs only where nothing else wants the core; how far the kernel lets us is
            :attr:`Child.share`.
        nice: 0 to 19.
        log_path: Receives stdout and stderr, appended, mode 0600; None = thrown away.
        cwd: Working directory; None = ours.
        before_kill: A program that is run with the pids of the tree behind its arguments, ahead of the tree's first SIGKILL,
            whoever sends it and why.  Empty = none.
        before_kill_s: What it gets; then the killing begins.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict[str, str | None], repr=False)
    cores: tuple[int, ...] = ()
    sched: Literal["normal", "batch", "idle"] = "normal"
    nice: int = 0
    log_path: Path | None = None
    cwd: Path | None = None
    before_kill: tuple[str, ...] = ()
    before_kill_s: float = 0.15


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket of a process's: while it is open there and listens, no other user's program can listen in its place."""

    path: str
    socket: str

    @classmethod
    def of(cls, pid: int, fd: int) -> Listener:
        """Raises :class:`OSError` where the process or its socket is gone."""
        path = f"/proc/{pid}/fd/{fd}"
        return cls(path, os.readlink(path))

    def is_open(self) -> bool:
        """Has the process it still?  One look."""
        try:
            return os.readlink(self.path) == self.socket
        except OSError:
            return False


class Child:
    """A running program.  Made by :meth:`start`.  Methods may be called from any one thread at a time."""

    def __init__(
        self,
        spec: ProcSpec,
        guard: subprocess.Popen[bytes],
        pid_pipe: BinaryIO,
        share: IdleShare | None,
        log_start: int = 0,
    ) -> None:
        self.spec = spec
        self.share = share
        """How an idle-class child yields; None for the others."""
        self._guard = guard
        self._pid_pipe = pid_pipe
        self._pid: int | None = None
        self._stopping = False
        self._log_start = log_start
        """Where its own output begins in the log, in bytes: others may have written there before."""
        self.started_s = time.monotonic()

    @classmethod
    def start(cls, spec: ProcSpec) -> Child:
        """Start ``spec``.

        Raises:
            ConfigError: No such program, a core that this machine does not give us, log file not writable.
        """
        program = find_program(spec.argv[0]) if spec.argv else None
        if program is None:
            raise ConfigError(
                f"'{spec.argv[0] if spec.argv else ''}' is no program here",
                field=f"{spec.name}.argv",
                fix="give its path",
            )
        require_cores(spec.cores, f"{spec.name}.cores")
        environment = {**os.environ, **spec.env}
        share = idle_share() if spec.sched == "idle" else None
        pid_read, pid_write = os.pipe()
        try:
            settings = json.dumps(
                {
                    "parent": os.getpid(),
                    "cores": list(spec.cores),
                    "sched": spec.sched,
                    "nice": spec.nice,
                    "pid_fd": pid_write,
                    "cgroup": str(share.directory) if share is not None and share.directory else None,
                    # A session is a scheduling group, in which alone the nice value of a process counts.
                    "autogroup_nice": share.autogroup_nice if share is not None else spec.nice or None,
                    "before_kill": list(spec.before_kill),
                    "before_kill_s": spec.before_kill_s,
                }
            )
            log = open_log(spec)
            log_start = os.fstat(log).st_size if log >= 0 else 0
            try:
                guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_GUARD), settings, program, *spec.argv[1:]],
                    env={name: value for name, value in environment.items() if value is not None},
                    cwd=spec.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(pid_write,),
                )
            finally:
                if log >= 0:
                    os.close(log)
        except OSError as error:
            os.close(pid_read)
            if share is not None:
                share.remove()
            raise ConfigError(f"cannot be started: {error.strerror}", field=spec.name) from error
        finally:
            os.close(pid_write)
        return cls(spec, guard, os.fdopen(pid_read, "rb", buffering=0), share, log_start)

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    @property
    def pid(self) -> int:
        """The program's own pid; waits for the guard to tell it (tens of ms after start).

        Raises:
            EngineError: The program never started.
        """
        if self._pid is None:
            readable, _, _ = select.select([self._pid_pipe], [], [], 10.0)
            text = self._pid_pipe.read(32) if readable else b""
            if not text.strip().isdigit():
                raise EngineError(f"did not start{self._last_words()}", field=self.spec.name)
            self._pid = int(text)
        return self._pid

    def returncode(self) -> int | None:
        """None while it runs; 128 + signal when it was killed."""
        return self._guard.poll()

    def processes(self) -> list[psutil.Process]:
        """Everything of it that is alive: guard, program, descendants."""
        return processes_below(self._guard.pid, guard_ended=self._guard.poll() is not None)

    def require_listener(self, port: int) -> Listener:
        """The socket of one of its processes that listens on TCP ``port``.

        A server may bind its port long before it listens there; meanwhile another user's program can do both, and answer in its place.

        Raises:
            EngineError: None of them does, whoever else may.
        """
        for process in self.processes():
            try:
                found = process.net_connections("tcp")
            except psutil.Error:  # it has ended, or does not let us look
                continue
            for one in found:
                if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                    with contextlib.suppress(OSError):
                        return Listener.of(process.pid, one.fd)
        raise EngineError(
            f"port {port} is not the {self.spec.name}'s: none of its processes listens there, whoever may",
            field=self.spec.name,
            fix="end the program that does, or name another port",
        )

    def lift(self, on: bool) -> bool:
        """Give an idle-class tree a normal share of its cores, or take it away again.

        Returns:
            False when the kernel did not let us, or the child is not of the idle class.
        """
        if self.share is None:
            return False
        return self.share.lift(on, self._guard.pid, lambda normal: set_class(self.processes(), normal))

    def rss_bytes(self) -> int:
        """Resident memory of the tree (pages that its processes share count more than once)."""
        total = 0
        for process in self.processes():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines of the log; empty without one."""
        if self.spec.log_path is None:
            return ""
        try:
            with self.spec.log_path.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
        except OSError:
            return ""

    def wait_ready(self, probe: Probe, timeout_s: float, progress: Progress | None = None) -> float:
        """Block until ``probe`` succeeds; seconds it took.

        Raises:
            EngineError: The child died, was stopped, or ``timeout_s`` is over; ends with its first error and last log lines.
        """
        started_s = time.monotonic()
        while not _probe(probe):
            self._check_waiting(started_s, timeout_s, progress)
            time.sleep(_LOOK_EVERY_S)
        return time.monotonic() - started_s

    async def wait_ready_async(
        self, probe: Probe, timeout_s: float, progress: Progress | None = None
    ) -> float:
        """:meth:`wait_ready` for an event loop; the probe runs in a thread."""
        started_s = time.monotonic()
        while not await asyncio.to_thread(_probe, probe):
            self._check_waiting(started_s, timeout_s, progress)
            await asyncio.sleep(_LOOK_EVERY_S)
        return time.monotonic() - started_s

    def _check_waiting(self, started_s: float, timeout_s: float, progress: Progress | None) -> None:
        waited_s = time.monotonic() - started_s
        if self._stopping:
            raise EngineError("was stopped before it was ready", field=self.spec.name)
        code = self.returncode()
        if code is not None:
            raise EngineError(
                f"ended with {code} before it was ready{self._last_words()}", field=self.spec.name
            )
        if waited_s > timeout_s:
            raise EngineError(f"not ready after {timeout_s:.0f} s{self._last_words()}", field=self.spec.name)
        if progress is not None:
            progress(waited_s)

    def _last_words(self) -> str:
        tail, path = self.log_tail(), self.spec.log_path
        if not tail or path is None:
            return ""
        first = first_error_in(path, self._log_start)
        if first and first not in tail:  # far above it, where several processes have handed it on
            return f"; its first error: {first}; the end of {path}:\n{tail}"
        return f"; the end of {path}:\n{tail}"

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` to the program alone (tests: SIGSTOP, SIGKILL)."""
        if self.returncode() is None:
            os.kill(self.pid, number)

    def terminate(self, grace_s: float = 10.0) -> None:
        """SIGTERM, at most ``grace_s`` of patience, then SIGKILL for the whole tree.

        Raises:
            EngineError: A process of the tree still lives; should not happen short of kernel trouble.
        """
        self._stopping = True
        self.lift(True)  # also what ends by itself has memory that others wait for
        if self._guard.poll() is None and grace_s > 0:
            self._guard.send_signal(signal.SIGTERM)
            try:
                self._guard.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    async def terminate_async(self, grace_s: float = 10.0) -> None:
        """:meth:`terminate`.  One that is cancelled is over when its thread is: a child's methods are for one thread."""
        thread = asyncio.ensure_future(asyncio.to_thread(self.terminate, grace_s))
        try:
            await asyncio.shield(thread)
        except asyncio.CancelledError:
            await asyncio.wait({thread})
            if not thread.cancelled():
                thread.exception()  # said by whoever ends it next
            raise

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL for the whole tree, now; returns when nothing is left.  Works on stopped processes too.

        Raises:
            EngineError: A process of the tree still lives after ``timeout_s``.
        """
        self._stopping = True
        self.lift(True)
        until_s = time.monotonic() + timeout_s
        if self.spec.before_kill and self._guard.poll() is None:
            # One place runs it, the guard: it is there also when we are not.
            self._guard.send_signal(signal.SIGUSR2)
            self._guard.send_signal(signal.SIGCONT)
            try:
                self._guard.wait(self.spec.before_kill_s + GUARD_S)
            except subprocess.TimeoutExpired:
                pass
        while True:
            ended = (
                self._guard.poll() is not None
            )  # first: one that ends while we look leaves what we have not seen
            left = self.processes()
            if ended and not left:
                if self.share is not None:
                    self.share.remove()
                return
            if time.monotonic() > until_s:
                pids = [p.pid for p in left] or [self._guard.pid]
                raise EngineError(f"processes {pids} do not end", field=self.spec.name)
            # The guard last: while it lives, orphans come to it and so stay in the tree that we see.
            below = [p for p in left if p.pid != self._guard.pid]
            for process in below or left:
                try:
                    process.kill()
                except psutil.Error:
                    pass
            if self._guard.poll() is None:
                self._guard.send_signal(signal.SIGUSR2)
                self._guard.send_signal(signal.SIGCONT)
            try:
                self._guard.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            psutil.wait_procs(below, timeout=0.2)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


def require_cores(cores: Iterable[int], field_name: str) -> None:
    """Raise :class:`ConfigError` if one of ``cores`` is not among ours."""
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing:
        raise ConfigError(
            f"cores {missing} are not among {sorted(os.sched_getaffinity(0))}", field=field_name
        )


def require_free_port(port: int, field_name: str, host: str = "127.0.0.1") -> None:
    """Raise :class:`ConfigError` if ``port`` of ``host`` cannot be listened on, before a child finds out half a minute later.

    A name is what it is in IPv4, as for vLLM and others; "": every address.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        says = "is taken" if is_taken else f"cannot be listened on at '{host}'"
        raise ConfigError(f"port {port} {says}: {error.strerror}", field=field_name) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now.  Only for children that cannot bind port 0 and tell us.

    None of those that the kernel gives to whoever asks for any, where there are others: by the time that the child binds it, it could be a
    stranger's.
    """
    first = _first_given_port()
    with socket.socket() as probe:
        for _ in range(100 if first > _FIRST_PORT else 0):
            port = _FIRST_PORT + secrets.randbelow(first - _FIRST_PORT)
            with contextlib.suppress(OSError):  # taken
                probe.bind((host, port))
                return port
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _first_given_port() -> int:
    """Of the range that the kernel takes from; 0: nobody knows."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def open_log(spec: ProcSpec) -> int:
    """A descriptor for stdout and stderr; ``subprocess.DEVNULL`` where there is no log.

    Raises:
        ConfigError: It cannot be written.
    """
    if spec.log_path is None:
        return subprocess.DEVNULL
    try:
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{spec.log_path}: {error.strerror}", field=f"{spec.name}.log_path") from error


def _probe(probe: Probe) -> bool:
    if callable(probe):
        return probe()
    try:
        with _opener.open(probe, timeout=2.0) as response:
            return 200 <= response.status < 300
    except (OSError, urllib.error.URLError, ValueError):
        return False


def find_program(program: str) -> str | None:
    """Its path: on the path, or beside this Python: who runs ``/some/venv/bin/rose`` means that environment's ``vllm``."""
    return shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
