"""What the stages of ``benchmarks/gpu_check.py`` share: why a stage cannot run, keeping figures as they come, steps, and a peer process.

torch and vLLM are imported inside functions: a machine without a GPU lists the stages and says what is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.kv_plan import KvPlan
from rose.coserve.cuda_driver import CudaDriver
from rose.coserve.cuda_pages import CudaPagePool
from rose.errors import LedgerError
from rose.units import PAGE_BYTES

GIB = 1 << 30
ROOT = Path(__file__).resolve().parent.parent.parent
PARTIAL = "ROSE_GPU_CHECK_PARTIAL"
ALLOW_MPS = "ROSE_GPU_CHECK_ALLOW_MPS"
TRACE = "ROSE_GPU_CHECK_TRACE"
RATE = "ROSE_GPU_CHECK_RATE"
REHEARSE = "ROSE_GPU_CHECK_REHEARSE"
GRAPHS = "ROSE_GPU_CHECK_GRAPHS"
"""1: the stage ``engine_graphs`` is done, so production beside an engine has them too."""
MEMORY = "ROSE_GPU_CHECK_MEMORY"
SHARED_MEMORY = Path("/dev/shm")
MPS_CONTROL = "nvidia-cuda-mps-control"
Figures = dict[str, Any]
START_S = 30.0
"""Longest wait for a load to begin."""
ARM_S = 1.0
"""An arm lasts so long at least, however quick its steps: what runs beside it comes in pieces of a sixteenth of a second."""
REHEARSAL_PAGES = 2048
"""Of the driver's stand-in: 4 GiB, of which only what is used is taken from this machine."""


class Skip(Exception):
    """This machine lacks what a stage needs."""


# --- what is needed


def not_installed(module: str, what: str) -> str | None:
    """In words; None where it is.  Imports nothing."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"{what} is not installed"


def rehearsing() -> bool:
    """Is this the rehearsal: a CPU engine, and a stand-in for the driver?"""
    return os.environ.get(REHEARSE) == "1"


def _gpu() -> str | None:
    if rehearsing():
        return None
    return None if Path("/dev/nvidiactl").exists() else "no NVIDIA GPU here"


def _driver() -> str | None:
    if not rehearsing():
        return _gpu()
    if importlib.util.find_spec("tests.coserve.fakecuda") is None:
        return "no stand-in for the driver here"
    return None if shutil.which("gcc") else "gcc, which compiles the driver's stand-in, is not on PATH"


def _kernels() -> str | None:
    return "the driver's stand-in runs no kernels" if rehearsing() else _gpu()


def _plugin() -> str | None:
    names = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    return None if "rose" in names else "ROSE is not installed: vLLM would not load its plugin"


def _mps() -> str | None:
    if os.environ.get(ALLOW_MPS) != "1":
        return "MPS is one fault domain: only with --allow-mps"
    return None if shutil.which(MPS_CONTROL) else f"{MPS_CONTROL} is not on PATH"


NEEDS: Mapping[str, Callable[[], str | None]] = {
    "gpu": _gpu,
    "driver": _driver,
    "kernels": _kernels,
    "torch": lambda: not_installed("torch", "torch"),
    "triton": lambda: not_installed("triton", "triton"),
    "transformers": lambda: not_installed("transformers", "transformers"),
    "bindings": lambda: not_installed("cuda.bindings", "cuda-bindings"),
    "vllm": lambda: not_installed("vllm", "vLLM"),
    "plugin": _plugin,
    "mps": _mps,
}


def missing(needs: tuple[str, ...]) -> str | None:
    """Why a stage with these needs cannot run here; None when it can.  Asks no driver."""
    return next((reason for need in needs if (reason := NEEDS[need]()) is not None), None)


# --- figures


def keep(figures: Figures) -> None:
    """Write down what a stage has so far: it is what is left of it if it is cut off."""
    path = os.environ.get(PARTIAL)
    if path:
        temporary = Path(path + ".new")
        temporary.write_text(json.dumps(figures))
        os.replace(temporary, path)


def logs_folder() -> Path:
    """Where what a stage starts may write ``*.log``: their ends go behind the stage's own log, however it ended."""
    path = os.environ.get(PARTIAL)
    folder = Path(path).parent / "logs" if path else Path(tempfile.mkdtemp(prefix="rose-gpu-check-"))
    folder.mkdir(exist_ok=True)
    return folder


def memory_folder() -> Path | None:
    """In memory, and gone with the stage however it ends; None: this machine has no such folder, or this is no stage."""
    name = os.environ.get(MEMORY)
    if not name or not SHARED_MEMORY.is_dir():
        return None
    folder = SHARED_MEMORY / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


# --- the device


@dataclass(frozen=True, slots=True)
class Place:
    """The device, or what stands for it in a rehearsal.

    Attributes:
        device: ``cuda`` or ``cpu``.
        gib: Bytes that a stage takes where it speaks of a GiB.
        steps: Steps of an arm, at least.
    """

    torch: Any
    device: str
    gib: int
    steps: int

    def free_bytes(self) -> int:
        return int(self.torch.cuda.mem_get_info()[0]) if self.device == "cuda" else driver().free_bytes()

    def settle(self) -> None:
        """Wait for what this thread has launched."""
        if self.device == "cuda":
            self.torch.cuda.current_stream().synchronize()

    def stream(self) -> int:
        """That this thread launches on."""
        return int(self.torch.cuda.current_stream().cuda_stream) if self.device == "cuda" else 0

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Launch on a stream of the driver's meanwhile."""
        if self.device != "cuda":
            yield
            return
        with self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream)):
            yield


def place() -> Place:
    """Where the stages run.

    Raises:
        LedgerError: torch sees no device, and this is no rehearsal.
    """
    if not rehearsing():
        return Place(torch_on_gpu(), "cuda", GIB, 500)
    import torch

    torch.set_num_threads(1)
    return Place(torch, "cpu", 64 << 20, 40)


def torch_on_gpu() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise LedgerError("torch sees no CUDA device")
    torch.cuda.init()
    return torch


def pool(**settings: Any) -> CudaPagePool:
    return CudaPagePool(0, **settings)


def driver() -> CudaDriver:
    return CudaDriver(0)


def us(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1e3


def decode_step(here: Place, before_layer: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """What a decode step does to the device: it reads all weights once (36 layers of 8B, a batch of 16)."""
    return _products(here, num_layers=36, num_tokens=16, before_layer=before_layer)


def prefill_step(here: Place) -> Callable[[], None]:
    """What a chunk of a prompt does to it: it computes (2,048 tokens, 4 layers of 8B)."""
    return _products(here, num_layers=4, num_tokens=2048)


def _products(
    here: Place, *, num_layers: int, num_tokens: int, before_layer: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    torch, on = here.torch, here.device
    wide, deep = (24576, 4096) if on == "cuda" else (512, 128)
    weights = [torch.randn(deep, wide, device=on, dtype=torch.bfloat16) for _ in range(num_layers)]
    batch = torch.randn(num_tokens, deep, device=on, dtype=torch.bfloat16)

    def step() -> None:
        for weight in weights:
            before_layer()
            batch @ weight

    return step


def step_times(here: Place, step: Callable[[], None], count: int) -> list[float]:
    """Milliseconds of each step, the host's wait included."""
    found: list[float] = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        here.settle()
        found.append((time.perf_counter() - begun) * 1e3)
    return found


def arm_times(here: Place, step: Callable[[], None]) -> list[float]:
    """Milliseconds of the steps of one arm: as many as the place asks for, and for as long as every arm lasts."""
    found: list[float] = []
    until_s = time.monotonic() + ARM_S
    while not found or time.monotonic() < until_s:
        found += step_times(here, step, here.steps)
    return found


# --- work beside the steps, that is known to have been done


class Background(threading.Thread):
    """A thread whose error is the stage's."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error

    def check(self) -> None:
        """Raises what it died of."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait for its end; raises what it died of."""
        self.join()
        self.check()


class Mover:
    """Maps and unmaps memory at a rate, in pieces of a sixteenth of a GiB.

    Attributes:
        moved_bytes: So far.
    """

    def __init__(self, size: int, rate_bytes_s: float) -> None:
        self._size, self._rate = size, rate_bytes_s
        self.moved_bytes = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        piece = int(self._rate) // 16
        arena = pool(handle_bytes=PAGE_BYTES).reserve(self._size, guard=True)
        index, begun = 0, time.monotonic()
        while not self.stopping.is_set():
            offset = index % (self._size // piece) * piece
            arena.map([(offset, piece)])
            arena.unmap([(offset, piece)])
            index, self.moved_bytes = index + 1, self.moved_bytes + piece
            self.stopping.wait(max(0.0, begun + self.moved_bytes / self._rate - time.monotonic()))
        arena.close()


@contextmanager
def moving_here(here: Place) -> Iterator[Callable[[], int]]:
    """A thread of this process maps and unmaps one GiB a second; yields what tells the bytes so far.

    Raises:
        LedgerError: It could not, or not to the end.
    """
    mover = Mover(2 * here.gib, here.gib)
    thread = Background(mover.run)
    thread.start()
    try:
        _first(lambda: mover.moved_bytes, thread)
        yield lambda: mover.moved_bytes
        thread.check()
    finally:
        mover.stopping.set()
        thread.join()
    thread.check()


def _first(count: Callable[[], int], thread: Background) -> None:
    until_s = time.monotonic() + START_S
    while not count():
        thread.check()
        if time.monotonic() > until_s:
            raise LedgerError(f"nothing was moved within {START_S:.0f} s")
        time.sleep(0.001)


def beside(count: Callable[[], int], steps: Callable[[], list[float]]) -> tuple[list[float], float]:
    """Step times, and what ``count`` rose by a second meanwhile.

    Raises:
        LedgerError: By nothing: there was no load.
    """
    begun_s, before = time.monotonic(), count()
    found = steps()
    rate = (count() - before) / (time.monotonic() - begun_s)
    if rate <= 0:
        raise LedgerError("nothing ran beside the steps")
    return found, rate


# --- another process on the same device


class Peer:
    """A process that does one thing with the device: :func:`be_peer` is its other end.

    Args:
        what: ``hold``, ``lend`` (hold as an engine's plan does), ``traffic``, ``decode`` or ``prefill``.
        size: Bytes that it holds, or moves in a second.

    Raises:
        LedgerError: It did not start; it died before its ``with`` block ended, or before an answer.  Why is in the stage's log.
    """

    def __init__(self, what: str, size: int = 0, env: Mapping[str, str] | None = None) -> None:
        self._what, self._killed = what, False
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--peer", what, str(size)]
            + (["--rehearse"] if rehearsing() else []),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        if self._line() != "up":
            self.kill()
            raise LedgerError(f"the peer '{what}' did not start; its error is in the log")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, what: str) -> str:
        """Say a word; its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
            answer = self._line()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise LedgerError(f"the peer '{self._what}' has died; its error is in the log")
        return answer

    def count(self) -> int:
        """Bytes that it has moved, or steps that it has made."""
        return int(self.ask("count"))

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._killed = True
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        died = not self._killed and not self.alive()
        self.kill()
        if died and kind is None:
            raise LedgerError(f"the peer '{self._what}' has died; its error is in the log")


def be_peer(what: str, size: int) -> None:
    """The other end of :class:`Peer`: until it is killed, or its starter is gone."""
    if what in ("hold", "lend"):
        plan = KvPlan(size)
        held = plan.going if what == "lend" else [(0, size)]
        arena = pool(reserve_bytes=0).reserve(max(size, plan.size), guard=True)
        arena.map(held)
        print("up", flush=True)
        for line in sys.stdin:
            if line.strip() == "release":
                took_us = us(lambda: arena.unmap(held))
                print(f"{took_us:.1f}", flush=True)
        return
    if what == "traffic":
        mover = Mover(2 * size, size)
        _listen(lambda: mover.moved_bytes, mover.stopping)
        mover.run()
        return
    here = place()
    step = decode_step(here) if what == "decode" else prefill_step(here)
    share = os.environ.get("ROSE_GPU_CHECK_SMS")
    steps, stopped = 0, threading.Event()
    stream = driver().green_stream(int(share))[0] if share else here.stream()
    with here.on_stream(stream):
        step_times(here, step, 5)
        _listen(lambda: steps, stopped, at_once=True)
        while not stopped.is_set():
            step_times(here, step, 1)
            steps += 1


def _listen(count: Callable[[], int], stopped: threading.Event, *, at_once: bool = False) -> None:
    """Say ``up`` when there is something to count, then answer with the count until our starter is gone."""

    def listen() -> None:
        while not at_once and not count():
            time.sleep(0.001)
        print("up", flush=True)
        for _ in sys.stdin:
            print(count(), flush=True)
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
