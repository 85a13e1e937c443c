#!/usr/bin/env python
"""How an engine thread may publish its board: what each way costs between two steps, and which survives a file cut off.

A step is stood in for by memory traffic (so that nothing of the write is in the processor's caches) and 3 ms of interpreter
work.  After each the board is published, one way after the other:

- ``store``: into a shared mapping, as ROSE did before: a stranger's ``truncate`` ends the process by SIGBUS;
- ``ours``: ``RecordWriter.put``, one pwrite that keeps the interpreter lock;
- ``os_pwrite``: the same with ``os.pwrite``, which gives the lock up;
- ``vm_writev``: ``process_vm_writev`` into a mapping of our own: an error and no signal;
- ``thread``: into a queue, from which a thread writes.

``NAME_p50_us``, ``NAME_p99_us``: CPU time of the publishing thread.  ``NAME_late_p99_us``: from the call until the file says it, by
the wall clock; the interpreter work goes on meanwhile, as an engine's does.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.lib.report import write
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import ServingBoard
from rose.evaluation.statistics import percentile

RECORD_BYTES, AT = 260, 768
WORK_S = 0.003


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/board_write.json"))
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rose-board-", dir="/dev/shm") as folder:
        summary = _measure(Path(folder), args.rounds)
    for name, value in summary.items():
        print(f"{name:24} {value:10.1f}")
    print("of these only `store` dies when the file is cut off (tests/coserve/test_ledger.py)")
    write(args.json, "board_write", summary, {"work_s": WORK_S})
    print(args.json)
    return 0


def _ways(folder: Path) -> tuple[dict[str, Callable[[int], None]], Callable[[], int], Callable[[], int]]:
    """Ways to publish a number; the last number in the raw file, and the last that our writer published."""
    node = NodeDir(folder / "n")
    ours, reader = node.serving_board_writer(), node.serving_board()
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, 1088)
    mapping = mmap.mmap(fd, 1088)
    view, data = memoryview(mapping), bytearray(RECORD_BYTES)
    number = memoryview(data)[:4].cast("I")
    vm_writev = ctypes.PyDLL(None).process_vm_writev
    vm_writev.restype = ctypes.c_ssize_t
    sources = [ctypes.c_char.from_buffer(data), ctypes.c_char.from_buffer(mapping)]
    local = _Vector(ctypes.addressof(sources[0]), RECORD_BYTES)
    remote = _Vector(ctypes.addressof(sources[1]) + AT, RECORD_BYTES)
    one = ctypes.c_ulong(1)
    call = (ctypes.c_int(os.getpid()), ctypes.byref(local), one, ctypes.byref(remote), one, ctypes.c_ulong(0))
    jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
    rest = tuple(range(len(ServingBoard.__dataclass_fields__) - 1))

    def by_store(n: int) -> None:
        number[0] = n
        view[AT : AT + RECORD_BYTES] = data

    def by_pwrite(n: int) -> None:
        number[0] = n
        os.pwrite(fd, data, AT)

    def by_vm(n: int) -> None:
        number[0] = n
        if vm_writev(*call) != RECORD_BYTES:
            raise OSError("process_vm_writev is not allowed here")

    def follow() -> None:
        while True:
            by_pwrite(jobs.get())

    threading.Thread(target=follow, daemon=True).start()
    ways: dict[str, Callable[[int], None]] = {
        "store": by_store,
        "ours": lambda n: ours.put(n, *rest),
        "os_pwrite": by_pwrite,
        "vm_writev": by_vm,
        "thread": jobs.put,
    }

    def raw() -> int:
        return int.from_bytes(os.pread(fd, 4, AT), "little")

    def published() -> int:
        record = reader.read()
        return record.step if record is not None else 0

    return ways, raw, published


def _measure(folder: Path, rounds: int) -> dict[str, Any]:
    ways, raw, published = _ways(folder)
    traffic = np.zeros(8 << 20, dtype=np.uint8)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    late: dict[str, list[float]] = {name: [] for name in ways}
    count = 0
    for _ in range(rounds):
        for name, publish in ways.items():
            count += 1
            traffic += 1
            _work(0.0005)
            begun_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
            publish(count)
            spent[name].append((time.thread_time_ns() - cpu_ns) / 1e3)
            look = published if name == "ours" else raw
            until_s = time.monotonic() + WORK_S
            while look() != count and time.monotonic() < until_s:
                _work(0.00005)
            late[name].append((time.monotonic_ns() - begun_ns) / 1e3)
            while look() != count:
                time.sleep(0.0005)  # the thread's turn, before the next way
    summary: dict[str, Any] = {}
    for name in ways:
        summary[f"{name}_p50_us"] = percentile(spent[name], 0.5)
        summary[f"{name}_p99_us"] = percentile(spent[name], 0.99)
        summary[f"{name}_late_p99_us"] = percentile(late[name], 0.99)
    return summary


def _work(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        {n: str(n) for n in range(50)}


if __name__ == "__main__":
    sys.exit(main())
