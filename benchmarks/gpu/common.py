"""What the stages of ``benchmarks/gpu_check.py`` share: why a stage cannot run, keeping figures as they come, steps, and a peer process.

torch and vLLM are imported inside functions: a machine without a GPU lists the stages and says what is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
MPS_CONTROL = "nvidia-cuda-mps-control"
Figures = dict[str, Any]


class Skip(Exception):
    """This machine lacks what a stage needs."""


# --- what is needed


def _installed(module: str, what: str) -> str | None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"{what} is not installed"


def _gpu() -> str | None:
    return None if Path("/dev/nvidiactl").exists() else "no NVIDIA GPU here"


def _mps() -> str | None:
    if os.environ.get(ALLOW_MPS) != "1":
        return "MPS is one fault domain: only with --allow-mps"
    return None if shutil.which(MPS_CONTROL) else f"{MPS_CONTROL} is not on PATH"


NEEDS: Mapping[str, Callable[[], str | None]] = {
    "gpu": _gpu,
    "torch": lambda: _installed("torch", "torch"),
    "bindings": lambda: _installed("cuda.bindings", "cuda-bindings"),
    "vllm": lambda: _installed("vllm", "vLLM"),
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


# --- the device


def torch_on_gpu() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise Skip("torch sees no CUDA device")
    torch.cuda.init()
    return torch


def pool(**settings: Any) -> CudaPagePool:
    try:
        return CudaPagePool(0, **settings)
    except LedgerError as error:
        raise Skip(str(error)) from error


def driver() -> CudaDriver:
    try:
        return CudaDriver(0)
    except LedgerError as error:
        raise Skip(str(error)) from error


def us(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1e3


def decode_step(torch: Any) -> Callable[[], None]:
    """What a decode step does to the device: it reads all weights once (36 layers of 8B, a batch of 16)."""
    return _products(torch, num_layers=36, num_tokens=16)


def prefill_step(torch: Any) -> Callable[[], None]:
    """What a chunk of a prompt does to it: it computes (2,048 tokens, 4 layers of 8B)."""
    return _products(torch, num_layers=4, num_tokens=2048)


def _products(torch: Any, *, num_layers: int, num_tokens: int) -> Callable[[], None]:
    weights = [torch.randn(4096, 24576, device="cuda", dtype=torch.bfloat16) for _ in range(num_layers)]
    batch = torch.randn(num_tokens, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for weight in weights:
            batch @ weight

    return step


def step_times(torch: Any, step: Callable[[], None], count: int) -> list[float]:
    """Milliseconds of each step, the host's wait included."""
    found: list[float] = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        torch.cuda.current_stream().synchronize()
        found.append((time.perf_counter() - begun) * 1e3)
    return found


def move(size: int, stop: Callable[[], bool], rate_bytes_s: float = GIB) -> None:
    """Map and unmap ``rate_bytes_s`` in pieces of 64 MiB until told to stop."""
    piece = 64 << 20
    arena = pool(handle_bytes=PAGE_BYTES).reserve(size, guard=True)
    index = moved = 0
    begun = time.monotonic()
    while not stop():
        offset = index % (size // piece) * piece
        arena.map([(offset, piece)])
        arena.unmap([(offset, piece)])
        index, moved = index + 1, moved + piece
        time.sleep(max(0.0, begun + moved / rate_bytes_s - time.monotonic()))
    arena.close()


@contextmanager
def moving_here(size: int) -> Any:
    """Memory is mapped and unmapped by a thread of this process meanwhile."""
    stopping = threading.Event()
    mover = threading.Thread(target=move, args=(size, stopping.is_set))
    mover.start()
    try:
        yield
    finally:
        stopping.set()
        mover.join()


# --- another process on the same device


class Peer:
    """A process that does one thing with the device: :func:`be_peer` is its other end.

    Args:
        what: ``hold``, ``traffic``, ``decode`` or ``prefill``.
        size: Bytes that it holds, or moves.
    """

    def __init__(self, what: str, size: int = 0, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--peer", what, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        if self._line() != "up":
            self.kill()
            raise LedgerError(f"the peer '{what}' did not start")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, what: str) -> str:
        """Say a word; its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._line()

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def be_peer(what: str, size: int) -> None:
    """The other end of :class:`Peer`: until it is killed, or its starter is gone."""
    if what == "hold":
        arena = pool(reserve_bytes=0).reserve(size, guard=True)
        arena.map([(0, size)])
        print("up", flush=True)
        for line in sys.stdin:
            if line.strip() == "release":
                took_us = us(lambda: arena.unmap([(0, size)]))
                print(f"{took_us:.1f}", flush=True)
        return
    stopped = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stopped.set()

    if what == "traffic":
        print("up", flush=True)
        threading.Thread(target=listen, daemon=True).start()
        move(size, stopped.is_set)
        return
    torch = torch_on_gpu()
    step = decode_step(torch) if what == "decode" else prefill_step(torch)
    share = os.environ.get("ROSE_GPU_CHECK_SMS")
    if share:
        stream, _ = driver().green_stream(int(share))
        torch.cuda.set_stream(torch.cuda.ExternalStream(stream))
    step_times(torch, step, 5)
    print("up", flush=True)
    threading.Thread(target=listen, daemon=True).start()
    while not stopped.is_set():
        step_times(torch, step, 20)
