"""Start real ``vllm serve`` processes for tests, fast, and end them without a trace.

A server costs 25-50 s on CPU, nearly all of it three interpreters importing vLLM in turn.  Here one
*nursery* process per pytest run imports it once and forks every server from that image::

    with EngineServer(model_dir, role="rollout", env={"ROSE_DIR": str(tmp)}) as server:
        server.post("/inference/v1/generate", {...}).json()

A role gets the command-line arguments of its kind (:data:`ROLE_ARGS`); ``args`` come after them and
win.  :func:`fork_module` is ``python -m MODULE`` from the same image,
for whatever else would import vLLM first.  The server's standard
output and error are in ``server.log_path``; a failed start raises with its tail.

Only for CPU and only for tests: the forked server has one OpenMP thread and no preloaded allocator,
its workers are forked where vLLM would spawn them, and its idle processes spin for 20 ms, not for a second.  Everything else
is the real program.

Leaving the ``with`` block ends the whole process session: SIGTERM, then SIGKILL for what is left.
When pytest itself dies, the nursery sees its pipe close and does the same for every server.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import json
import os
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Protocol

import httpx
import psutil

from rose.proc import free_port
from vllm_plugin.lines import TRIED, line_of

ROOT = Path(__file__).resolve().parent.parent
Role = Literal["serving", "rollout"]
Image = Literal["vllm", "relay"]
"""What a process is forked from."""

BASE_ARGS = (
    "--host=127.0.0.1",
    "--enforce-eager",  # with a given KV size this skips the CPU warm-up
    f"--kv-cache-memory-bytes={32 << 20}",
    "--max-model-len=512",
    "--max-num-seqs=8",
    "--dtype=bfloat16",
)
ROLE_ARGS: dict[str, tuple[str, ...]] = {
    "serving": (),
    "rollout": ("--enable-scale-out", '--weight-transfer-config={"backend":"rose"}'),
}
# Variables that would change what a server does are taken from the test, never from the caller's shell.
SCRUBBED = ("ROSE_", "VLLM_", "LD_PRELOAD", "OMP_", "CUDA_VISIBLE_DEVICES")
BASE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "rose",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONUNBUFFERED": "1",
}
if line_of(importlib.metadata.version("vllm")) in TRIED:  # its tests are what tries the rest
    BASE_ENV["ROSE_ALLOW_UNMEASURED"] = "1"
TERM_GRACE_S = 5.0
SPIN_S = 0.02
LOADED_LATER = (
    "model_hosting_container_standards.sagemaker",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.engine.async_llm",
)
"""What the modules of :func:`_import_engine` do not import, and every server does."""
OVERRIDES = "register_triton_kernel_overrides"


class EngineStartError(RuntimeError):
    """The server ended, or did not become healthy in time; the message ends with its log's tail."""


class EngineServer:
    """One ``vllm serve`` process tree; a context manager.

    Args:
        model_dir: Folder of a Hugging Face checkpoint.
        role: ``ROSE_ROLE`` of the server; None leaves the plugin installed and off.
        env: Variables added last.
        args: Arguments added last.
        spawns: It spawns its processes, as the installed command does, though it is forked itself.
        start_timeout_s: How long ``/health`` may take.

    Attributes:
        url: ``http://127.0.0.1:PORT``.
        node_token: Value of ``ROSE_NODE_TOKEN``; :meth:`get` and :meth:`post` send it.
        rose_dir: Value of ``ROSE_DIR``; a fresh folder unless ``env`` names one.
        argv: Of the ``vllm`` command.
        pid: Of the API server, which is also the id of the session of the whole tree.
        start_s: What the start took.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        role: Role | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        spawns: bool = False,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.model_dir = Path(model_dir)
        self.role: Role | None = role
        self.spawns = spawns
        self.start_timeout_s = start_timeout_s
        self.node_token = secrets.token_urlsafe(24)
        self.start_s = 0.0
        self._extra_env = dict(env or {})
        self._extra_args = tuple(args)
        self._process: _Process | None = None
        self._client: httpx.Client | None = None

    def __enter__(self) -> EngineServer:
        self._folder = Path(tempfile.mkdtemp(prefix="rose-engine-"))
        self.log_path = self._folder / "server.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        env = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
        env |= BASE_ENV
        if self.role is not None:
            (self._folder / "rose").mkdir(mode=0o700)
            env |= {
                "ROSE_ROLE": self.role,
                "ROSE_DIR": str(self._folder / "rose"),
                "ROSE_NODE_TOKEN": self.node_token,
            }
        env |= self._extra_env
        self.node_token = env.get("ROSE_NODE_TOKEN", self.node_token)
        self.rose_dir = Path(env.get("ROSE_DIR", self._folder))
        self.argv = argv = ["serve", str(self.model_dir), *BASE_ARGS, f"--port={self.port}"]
        argv += [*ROLE_ARGS.get(self.role or "", ()), *self._extra_args]
        began_s = time.monotonic()
        try:
            self._process = _Nursery.shared().start(argv, env, self.log_path, spawns=self.spawns)
            self._client = httpx.Client(
                base_url=self.url, headers={"Authorization": f"Bearer {self.node_token}"}, timeout=60.0
            )
            self._wait_healthy(began_s + self.start_timeout_s)
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.monotonic() - began_s
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            end_session(self._process)
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """Every live process of the tree: API server, engine core, workers; none where it does not run (any more)."""
        process = self._process  # another thread may end it
        return session_processes(process.pid) if process is not None else []

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self._http().get(path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self._http().post(path, json=body, **kwargs)

    def generate(self, token_ids: Sequence[int], *, max_tokens: int, **sampling: Any) -> dict[str, Any]:
        """One greedy turn over ``/inference/v1/generate``; the parsed answer."""
        sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | sampling
        answer = self.post(
            "/inference/v1/generate", {"token_ids": list(token_ids), "sampling_params": sampling}
        )
        answer.raise_for_status()
        return answer.json()

    def log_tail(self, num_lines: int = 120) -> str:
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def _http(self) -> httpx.Client:
        if self._client is None:
            raise RuntimeError("the server is not running")
        return self._client

    def _wait_healthy(self, until_s: float) -> None:
        assert self._process is not None
        while time.monotonic() < until_s:
            if not self._process.alive():
                raise EngineStartError(f"the server ended while starting\n{self.log_tail(150)}")
            try:
                if self._http().get("/health", timeout=2.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)  # another program's port: there is no event to wait for
        raise EngineStartError(f"not healthy after {self.start_timeout_s:.0f} s\n{self.log_tail(150)}")


def session_processes(session_id: int) -> list[psutil.Process]:
    """Live processes of one process session."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found


class _Process(Protocol):
    """A session leader that somebody else reaps."""

    @property
    def pid(self) -> int: ...

    def alive(self) -> bool: ...


def end_session(process: _Process) -> None:
    """End a process session: its leader politely, so that it cleans up, then whatever is left.

    A forked engine core ends without finalisers, so vLLM's message queues are unlinked here.
    """
    segments = {path for each in session_processes(process.pid) for path in _shared_memory_of(each)}
    if process.alive():
        try:
            os.kill(process.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
    until_s = time.monotonic() + TERM_GRACE_S
    while time.monotonic() < until_s and (process.alive() or session_processes(process.pid)):
        time.sleep(0.05)
    left = session_processes(process.pid)
    for each in left:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(left, timeout=5.0)
    process.alive()  # reaps
    for path in segments:
        path.unlink(missing_ok=True)


def _shared_memory_of(process: psutil.Process) -> list[Path]:
    """Shared-memory segments of Python and of vLLM's CPU ranks that a process has mapped."""
    try:
        mapped = {Path(each.path) for each in process.memory_maps()}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
    return [
        path
        for path in mapped
        if path.parent == Path("/dev/shm") and path.name.startswith(("psm_", "vllm_dist_"))
    ]


class _Nursery:
    """Client side of the process that others are forked from; one per pytest run and image, started when needed."""

    _shared: ClassVar[dict[Image, _Nursery]] = {}
    _shared_lock = threading.Lock()

    @classmethod
    def shared(cls, image: Image = "vllm") -> _Nursery:
        with cls._shared_lock:
            found = cls._shared.get(image)
            if found is None or found._popen.poll() is not None:
                found = cls._shared[image] = cls(image)
                atexit.register(found.close)
            return found

    def __init__(self, image: Image) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.engine_launcher", "nursery", image],
            env=env | BASE_ENV,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()

    def start(self, argv: Sequence[str], env: Mapping[str, str], log_path: Path, *, spawns: bool) -> Forked:
        log = str(log_path)
        command = {"op": "start", "argv": list(argv), "env": dict(env), "files": {"1": log, "2": log}}
        answer = self.ask(command | {"spawns": spawns})
        return Forked(self, int(answer["pid"]))

    def start_module(
        self, module: str, argv: Sequence[str], env: Mapping[str, str], files: Mapping[int, Path]
    ) -> Forked:
        command = {"op": "start", "module": module, "argv": list(argv), "env": dict(env)}
        answer = self.ask(command | {"files": {str(number): str(path) for number, path in files.items()}})
        return Forked(self, int(answer["pid"]))

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with self._lock:
            self._popen.stdin.write(json.dumps(command) + "\n")
            self._popen.stdin.flush()
            line = self._popen.stdout.readline()
        if not line:
            raise EngineStartError("the nursery process ended; its error is on standard error")
        return json.loads(line)

    def close(self) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.close()
            self._popen.wait(timeout=2 * TERM_GRACE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._popen.kill()
            self._popen.wait()


class Forked:
    """As :class:`subprocess.Popen`, of a process that the nursery forked."""

    stdout: IO[str] | None = None
    """Of :func:`fork_piped`'s."""

    def __init__(self, nursery: _Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def alive(self) -> bool:
        if self.returncode is None:
            try:
                self.returncode = self._nursery.ask({"op": "poll", "pid": self.pid})["returncode"]
            except EngineStartError:
                self.returncode = -signal.SIGTERM  # it ends with the nursery
        return self.returncode is None

    def poll(self) -> int | None:
        return None if self.alive() else self.returncode

    def send_signal(self, number: int) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        until_s = time.monotonic() + timeout
        while self.alive():
            if time.monotonic() >= until_s:
                end_session(self)
                raise TimeoutError(f"process {self.pid} did not end in {timeout:.0f} s; it was killed")
            time.sleep(0.02)  # another process's child: there is no event to wait for
        assert self.returncode is not None
        return self.returncode


def fork_module(
    module: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    files: Mapping[int, Path],
    image: Image = "vllm",
) -> Forked:
    """``python -m MODULE ARGV`` in the repository's folder, a session of its own, forked from an image that has its imports.

    Args:
        env: All of its environment.
        files: What its descriptors open, for reading and writing, made where they are not; nothing where they name none.
    """
    return _Nursery.shared(image).start_module(module, argv, env, files)


def fork_piped(
    module: str, argv: Sequence[str], env: Mapping[str, str], image: Image = "vllm"
) -> tuple[Forked, IO[str]]:
    """:func:`fork_module` with its standard output as a pipe, which the caller closes; its errors go nowhere."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "stdout"
        os.mkfifo(pipe)
        process = fork_module(module, argv, env, {1: pipe}, image)
        process.stdout = pipe.open()  # once the child has it open
        return process, process.stdout


def run_module(
    module: str,
    *argv: str,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    files: Mapping[int, Path] | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """:func:`fork_module` to its end; what it wrote to both outputs is ``stdout``."""
    with tempfile.TemporaryDirectory() as folder:
        given, output = Path(folder) / "stdin", Path(folder) / "stdout"
        given.write_text(stdin)
        files = {0: given, 1: output, 2: output, **(files or {})}
        process = fork_module(module, argv, os.environ if env is None else env, files)
        process.wait(timeout)
        return subprocess.CompletedProcess([module, *argv], process.returncode or 0, output.read_text())


# -- the nursery process ---------------------------------------------------------------------------


def _nursery_main(image: str) -> None:
    """Import once, then fork a process per ``start`` line until standard input closes."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the client's: it ends its servers, then closes our input
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the imports print must not get between the answers
    IMAGES[image]()
    pids: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "start":
            pid = os.fork()
            if pid == 0:
                _become(command, answers)
            pids.add(pid)
            answer: dict[str, Any] = {"pid": pid}
        else:
            pid, status = os.waitpid(command["pid"], os.WNOHANG)
            pids.discard(pid)
            answer = {"returncode": os.waitstatus_to_exitcode(status) if pid else None}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in pids:
        end_session(_OwnChild(pid))


class _OwnChild:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False

    def alive(self) -> bool:
        self._ended = self._ended or os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return not self._ended


def _import_engine() -> None:
    """Load what every server process loads, and do once what each of them would do."""
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.platforms.cpu import CpuPlatform

    for name in LOADED_LATER:
        with contextlib.suppress(ImportError):  # another release has it elsewhere
            importlib.import_module(name)
    if hasattr(CpuPlatform, OVERRIDES):
        # Looks at all that every module holds, and stumbles over llvmlite's: before numba is loaded, as in a worker.
        with warnings.catch_warnings(action="ignore"):
            getattr(CpuPlatform, OVERRIDES)()
        import numpy as np

        from rose.weights.statehash import hash_bits

        hash_bits(np.zeros(1, np.uint16))  # numba, and a kernel of ours from the disk
    gc.collect()
    gc.freeze()  # vLLM collects garbage several times in each process: what is loaded here is none
    atexit.register(gc.unfreeze)  # bindings that look for leaks at the end would find all of it


def _import_relay() -> None:
    """What ``rose relay`` loads."""
    import rose.weights.cli
    import rose.weights.pull_through
    import rose.weights.relay  # noqa: F401

    gc.collect()
    gc.freeze()


IMAGES: dict[str, Callable[[], None]] = {"vllm": _import_engine, "relay": _import_relay}


def _fork_workers() -> None:
    """Make vLLM fork where it would spawn, and its queues spin for a shorter time."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms.cpu import CpuPlatform

    # A reader of vLLM's message queue spins for a second after each message: on two cores, beside other tests, a fifth of what the servers take.
    shm_broadcast.SpinCondition.__init__.__defaults__ = (SPIN_S,)

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: Any) -> None:
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the original insists on spawn

    setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))  # noqa: B010
    if hasattr(CpuPlatform, OVERRIDES):
        setattr(CpuPlatform, OVERRIDES, classmethod(lambda cls: None))  # the image has done it


def _become(command: dict[str, Any], answers: IO[str]) -> None:
    """Turn this fork into ``vllm serve``, or into ``python -m MODULE``; never returns."""
    status = 1
    try:
        answers.close()
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the nursery
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        files = command["files"]
        for number in (0, 1, 2):
            files.setdefault(str(number), os.devnull)
        for number, path in files.items():
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, int(number))
            if opened != int(number):
                os.close(opened)
        os.environ.clear()
        os.environ.update(command["env"])
        module = command.get("module")
        sys.argv = [module or "vllm", *command["argv"]]
        if module is not None:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            if not command["spawns"]:
                _fork_workers()
            from vllm.entrypoints.cli.main import main

            main()
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:  # noqa: BLE001 - the last frame of a process: print and end
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve_main(argv: Sequence[str]) -> None:
    """``vllm ARGV`` with one import for all of its processes: for those who must be its parents themselves."""
    _import_engine()
    _fork_workers()
    sys.argv = ["vllm", *argv]
    from vllm.entrypoints.cli.main import main

    main()


SERVE_COMMAND = (sys.executable, "-m", "tests.engine_launcher", "serve")
"""In place of ``vllm serve``, a third of its start; run in the repository's folder."""


if __name__ == "__main__":
    _nursery_main(sys.argv[2]) if sys.argv[1] == "nursery" else _serve_main(sys.argv[1:])
