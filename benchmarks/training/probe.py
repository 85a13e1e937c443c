"""What a process of the benchmark tells about itself while it runs: event-loop lag, CPU time, memory, counters.

A :class:`Probe` lives in the loop that it watches.  Every 10 ms it asks to be woken and notes how late it was, and how much of
that this thread's own work can explain: processes share a core here, and waiting for it is no fault of the loop.  Every half
second it appends one JSON line to its file; :func:`read` gives the parent those of a window.

Times are CLOCK_MONOTONIC, the same for all processes of the machine.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.evaluation.statistics import percentile

WAKE_S = 0.01
LINE_S = 0.5


class Probe:
    """Watch the running loop and append to ``path`` until cancelled.

    Args:
        counters: Read for every line; cumulative numbers of the process.
    """

    def __init__(self, path: Path, counters: Callable[[], Mapping[str, float]] = dict) -> None:
        self._path = path
        self._counters = counters

    async def run(self) -> None:
        lags: list[tuple[float, float]] = []
        longest = _Collections()
        with self._path.open("a") as file:
            line_s = time.monotonic()
            while True:
                due_s, cpu_s = time.monotonic() + WAKE_S, time.thread_time()
                await asyncio.sleep(WAKE_S)
                now_s = time.monotonic()
                late_s = max(0.0, now_s - due_s)
                lags.append((late_s, min(late_s, time.thread_time() - cpu_s)))
                if now_s - line_s >= LINE_S:
                    line_s = now_s
                    line = {"at_s": now_s, "cpu_s": cpu_of(os.getpid()), "rss": rss_of(os.getpid())}
                    line |= {"lag": [[round(a, 6), round(b, 6)] for a, b in lags], **self._counters()}
                    line["gc_max_s"] = longest.take()
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    lags = []


class _Collections:
    """The longest pause of the garbage collector since it was last asked."""

    def __init__(self) -> None:
        self._longest_s = self._started_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_s = time.thread_time()
        else:
            self._longest_s = max(self._longest_s, time.thread_time() - self._started_s)

    def take(self) -> float:
        longest_s, self._longest_s = self._longest_s, 0.0
        return round(longest_s, 6)


def cpu_of(pid: int) -> float:
    """CPU seconds of all threads of a process: the kernel's own count, in nanoseconds, not in clock ticks."""
    spent_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def rss_of(pid: int) -> int:
    """Resident bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One process between two instants."""

    seconds: float
    cpu_s: float
    rss_bytes: int
    """At the end."""
    counts: Mapping[str, float]
    """What its counters rose by."""
    lags_s: Sequence[float]
    gc_max_s: float
    """The longest pause of the garbage collector."""
    own_lags_s: Sequence[float]
    """The part of each that the thread's own work explains at most."""

    def lag_ms(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, values in (("lag", self.lags_s), ("own_lag", self.own_lags_s)):
            for label, fraction in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                found[f"{name}_{label}_ms"] = round(percentile(values, fraction) * 1e3, 2)
        found["gc_max_ms"] = round(self.gc_max_s * 1e3, 2)
        found["num_passes"] = len(self.lags_s)
        return found


def lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read(path: Path, start_s: float, end_s: float) -> Window:
    """The lines within ``start_s`` and ``end_s``.

    Raises:
        RuntimeError: Fewer than two: the process stood still or the window is too short.
    """
    found = [line for line in lines(path) if start_s <= line["at_s"] <= end_s]
    if len(found) < 2:
        raise RuntimeError(f"{path.name} has {len(found)} lines in {end_s - start_s:.1f} s")
    first, last = found[0], found[-1]
    names = set(last) - {"at_s", "cpu_s", "rss", "lag", "gc_max_s"}
    lags = [pair for line in found[1:] for pair in line["lag"]]
    return Window(
        seconds=last["at_s"] - first["at_s"],
        cpu_s=last["cpu_s"] - first["cpu_s"],
        rss_bytes=last["rss"],
        counts={name: last[name] - first[name] for name in names},
        gc_max_s=max(line["gc_max_s"] for line in found[1:]),
        lags_s=[pair[0] for pair in lags],
        own_lags_s=[pair[1] for pair in lags],
    )
