"""Random life of arenas on one device, with calls that fail: by hand for as long as one likes, in the suite for seconds.

    python -m tests.coserve.cuda_fuzz --seconds 300            # processes race for one device, and some are killed

Each arena has a model beside it: which pieces hold what.  Held against it after every call are the books, the bytes behind every address that
may be read, and what the driver says there is; kernels are launched at what is mapped and waited for as the pager's fence does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rose.coserve import cuda_driver
from rose.coserve.cuda_driver import CudaDriver
from rose.coserve.cuda_pages import CudaArena, CudaPagePool
from rose.errors import LedgerError
from rose.units import PAGE_BYTES
from tests.coserve.fakecuda import NOT_READY, OUT_OF_MEMORY, Device, Hooks

P = PAGE_BYTES
FAULTS = {
    "cuMemCreate": (0.02, OUT_OF_MEMORY),
    "cuMemMap": (0.01, OUT_OF_MEMORY),
    "cuMemSetAccess": (0.15, NOT_READY),
    "cuMemUnmap": (0.01, OUT_OF_MEMORY),
    "cuMemsetD8Async": (0.01, OUT_OF_MEMORY),
    "cuStreamSynchronize": (0.01, OUT_OF_MEMORY),
    "cuEventCreate": (0.01, OUT_OF_MEMORY),
}
_TRIES = 100
"""No call fails so often by chance."""
QUIRKS = ("", "", "access-one-mapping", "unmap-one-mapping", "access-one-handle", "unmap-one-handle")


class Life:
    """One arena from its reservation to its end.

    Attributes:
        calls, refused: How many were made, and how many ended with an error.
    """

    def __init__(self, gpu: Hooks, cuda: CudaDriver, seed: int, *, pages: int = 16) -> None:
        self.gpu, self.cuda, self.rng = gpu, cuda, random.Random(seed)
        self.calls = self.refused = 0
        self._handle = P * self.rng.choice([1, 1, 2, 4])
        self._guard = self.rng.random() < 0.5
        self._stream = cuda.green_stream(64)[0] if self.rng.random() < 0.2 else 0
        pool = CudaPagePool(
            driver=cuda,
            handle_bytes=self._handle,
            retain_bytes=self.rng.choice([0, 2, 8]) * P,
            reserve_bytes=self.rng.choice([0, 0, 2 * P]),
        )
        self._arena = pool.reserve(pages * P, guard=self._guard)
        self._tags: dict[int, int] = {}

    def run(self, num_calls: int) -> None:
        """Raises AssertionError where something is not as the model says."""
        for _ in range(num_calls):
            self.calls += 1
            try:
                self._one_call()
            except LedgerError:
                self.refused += 1
                self._agree_with_the_books()
            self._check()

    def end(self) -> None:
        """Close it, however often that takes; nothing of it is left."""
        for _ in range(_TRIES):
            try:
                self._drain()
                self._arena.close()
                return
            except LedgerError:
                self.refused += 1
        raise AssertionError("it cannot be closed")

    def _one_call(self) -> None:
        arena, count = self._arena, self._arena.size // self._handle
        first = self.rng.randrange(count)
        pieces = range(first, first + self.rng.randint(1, count - first))
        match self.rng.choices(["map", "unmap", "trim", "mend", "look", "kernel"], [8, 8, 1, 2, 1, 2])[0]:
            case "map":
                free = [piece for piece in pieces if piece not in self._tags]
                arena.map([(piece * self._handle, self._handle) for piece in free])
                for piece in free:
                    assert self._seen(piece) == bytes(128), f"piece {piece} is mapped and not zeros"
                    self._tag(piece)
            case "unmap":
                self._drain()
                arena.unmap([(pieces.start * self._handle, len(pieces) * self._handle)])
                for piece in pieces:
                    self._tags.pop(piece, None)
            case "trim":
                arena.trim()
            case "mend":
                arena.mend()
                assert not arena._bare or self._guard
            case "look":
                assert arena.touched_bytes([(0, arena.size)]) == 0
            case "kernel" if self._tags:
                piece = self.rng.choice(sorted(self._tags))
                tag = self._tags[piece]
                self.gpu.kernel(self._stream, arena.address + piece * self._handle, 64, tag)

    def _drain(self) -> None:
        """As the pager's fence does."""
        event = self.cuda.record(self._stream)
        while not self.cuda.passed(event):
            pass
        self.cuda.drop(event)

    def _agree_with_the_books(self) -> None:
        """Behind an error: what has gone has gone, and what came without being wanted goes before anything else."""
        resident = {
            piece
            for piece in range(self._arena.size // self._handle)
            if self._arena.resident_bytes([(piece * self._handle, self._handle)])
        }
        for piece in self._tags.keys() - resident:
            del self._tags[piece]
        left = [(piece * self._handle, self._handle) for piece in sorted(resident - self._tags.keys())]
        for _ in range(_TRIES):
            try:
                self._arena.unmap(left)
                return
            except LedgerError:
                self.refused += 1
        raise AssertionError("what a failed call left cannot be taken away")

    def _check(self) -> None:
        arena: CudaArena = self._arena
        arena.check()
        assert arena.resident_bytes([(0, arena.size)]) == len(self._tags) * self._handle
        assert self.gpu.count("handles") == arena.resident_bytes() // self._handle
        for piece in range(arena.size // self._handle):
            if (tag := self._tags.get(piece)) is not None:
                assert self._seen(piece)[:64] == bytes([tag]) * 64, f"piece {piece} lost its bytes"
            elif not self._guard and piece not in arena._bare | arena._dark:
                assert self._seen(piece) == bytes(128), f"piece {piece} is unmapped and not zeros"

    def _tag(self, piece: int) -> None:
        self._tags[piece] = tag = self.rng.randrange(1, 256)
        ctypes.memset(self._arena.address + piece * self._handle, tag, 64)

    def _seen(self, piece: int) -> bytes:
        at = self._arena.address + piece * self._handle
        return ctypes.string_at(at, 64) + ctypes.string_at(at + self._handle - 64, 64)


def lives(gpu: Hooks, seeds: range, num_calls: int = 60) -> tuple[int, int]:
    """Arenas one after the other; how many calls were made and how many refused."""
    cuda_driver._PATIENT_PAUSE_S = 0.0
    calls = refused = 0
    cuda = CudaDriver(0)
    for seed in seeds:
        for call in FAULTS:
            gpu.fail(call)
        try:
            cuda.spans()  # what is asked once is asked of a healthy driver
        except LedgerError:
            continue  # the others hold all of it
        for call, (probability, code) in FAULTS.items():
            gpu.fail(call, probability=probability, code=code)
        with contextlib.suppress(LedgerError):  # one that cannot be had
            life = Life(gpu, cuda, seed)
            life.run(num_calls)
            life.end()
            calls, refused = calls + life.calls, refused + life.refused
        assert (left := gpu.left().keys() - {"used"}) == set(), f"seed {seed} leaves {left}"
    return calls, refused


def race(
    device: Device, seed: int, *, seconds: float = 0.0, num_kills: int = 0, num_workers: int = 2
) -> dict[str, int]:
    """Processes race for one device; one is killed and replaced, again and again.  Returns what they did.

    Until ``num_kills`` were killed and ``seconds`` have passed.

    Raises:
        AssertionError: A worker found something wrong.
    """
    rng = random.Random(seed)
    until_s = time.monotonic() + seconds
    done = {"calls": 0, "refused": 0, "killed": 0, "arenas": 0}
    workers = [_worker(device, seed + number) for number in range(num_workers)]
    try:
        while done["killed"] < num_kills or time.monotonic() < until_s:
            turn = rng.randrange(num_workers)
            for _ in range(rng.randint(1, 4)):
                _count(done, workers[turn])
            if rng.random() < 0.5:
                workers[turn].kill()
                workers[turn].communicate()
                done["killed"] += 1
                seed += num_workers
                workers[turn] = _worker(device, seed + turn)
        for worker in workers:
            _count(done, worker)
            worker.kill()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return done


def _count(done: dict[str, int], worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    assert line, f"a worker ended by itself: {worker.args}"
    calls, refused = map(int, line.split())
    done["calls"] += calls
    done["refused"] += refused
    done["arenas"] += 1


def _worker(device: Device, seed: int) -> subprocess.Popen[str]:
    """Says after each arena what it did; what is wrong is on its stderr, which is ours."""
    quirks = QUIRKS[seed % len(QUIRKS)]
    env = {**os.environ, **device.env(seed=seed, quirks=quirks)}
    command = [sys.executable, "-m", "tests.coserve.cuda_fuzz", "--worker", str(seed)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _work(seed: int) -> None:
    logging.disable()
    gpu = Hooks()
    for number in range(1_000_000):
        first = seed * 1_000_000 + number
        print(*lives(gpu, range(first, first + 1)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes that race (default 2)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker is not None:
        _work(chosen.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        device = Device(Path(folder), pages=20)
        done = race(device, chosen.seed, seconds=chosen.seconds, num_workers=chosen.workers)
        with device.plugged() as gpu:
            CudaDriver(0)
            pages_left = gpu.count("used") // P
            print({**done, "pages_left": pages_left, "broken_rules": len(device.broken_rules())})
    if pages_left:
        raise SystemExit(f"{pages_left} pages of processes that are gone are left")


if __name__ == "__main__":
    main()
