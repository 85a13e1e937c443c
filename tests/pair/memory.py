"""Both engines' KV memory by the kernel's own figure: which pages of the allocations are present."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rose.units import PAGE_BYTES

OS_PAGE = 4096
KV_BYTES = 72 << 20
"""Four chunks of a cache of latents, whose blocks of 18 KiB a layer are whole pages nine at a time."""
TOTAL_PAGES = KV_BYTES // PAGE_BYTES
TORN_S = 0.02
"""A look that took longer may have seen a page that went there and came back: it counts for nothing."""


def present(where: tuple[int, int] | None) -> float | None:
    """Pages of 2 MiB of a KV allocation that have memory, by the kernel; None: the process has none (any more)."""
    if where is None:
        return None
    try:
        return resident_pages(*where, KV_BYTES)
    except OSError:
        return None


def resident_pages(pid: int, address: int, size_bytes: int) -> float | None:
    """Pages of 2 MiB of that part of a process's memory that are there, by the kernel; None: the process has none (any more)."""
    length = size_bytes // OS_PAGE * 8
    try:
        with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as entries:
            there = os.pread(entries.fileno(), length, address // OS_PAGE * 8)
    except (FileNotFoundError, ProcessLookupError):
        return None
    if len(there) < length:
        return None
    return sum(byte >> 7 for byte in there[7::8]) * OS_PAGE / PAGE_BYTES  # the highest bit of each entry


def present_bytes(pages: float) -> int:
    return int(pages * PAGE_BYTES)


def allocation(pids: Sequence[int], rank_file: Path) -> tuple[int, int] | None:
    """The worker among ``pids`` that writes ``rank_file``, and where its KV memory begins: the only range of its size between
    two that are inaccessible."""
    pid = writer_of(pids, rank_file)
    if pid is None:
        return None
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return None
    rows = [(*(int(end, 16) for end in line.split()[0].split("-")), line.split()[1]) for line in lines]
    for before, here, after in zip(rows, rows[1:], rows[2:], strict=False):
        fenced = before[2] == after[2] == "---p" and before[1] == here[0] and here[1] == after[0]
        if fenced and here[1] - here[0] == KV_BYTES:
            return pid, here[0]
    return None


def writer_of(pids: Sequence[int], file: Path) -> int | None:
    """The process that has a shared file open for writing, whatever has become of its name."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if not _is_file(target, file):
                    continue
                flags = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & os.O_ACCMODE == os.O_RDWR:
                    return pid
    return None


def _is_file(target: str, file: Path) -> bool:
    """A link of ``/proc/PID/fd``: a file is renamed into its place, so it may be known by its temporary name."""
    name = Path(target.removesuffix(" (deleted)")).name
    return name == file.name or name.startswith(f".{file.name}.")


class Memory:
    """Looks at both KV allocations all the time, from a thread of its own.

    Args:
        directory: The node directory.
        serving_pids, rollout_pids: Where their workers are to be looked for.

    Attributes:
        worst_pages: The most that both had together.
        worst_look: When that was, and what of it was whose.
    """

    def __init__(
        self, directory: Path, serving_pids: Callable[[], list[int]], rollout_pids: Callable[[], list[int]]
    ) -> None:
        self._directory, self._serving_pids, self._rollout_pids = directory, serving_pids, rollout_pids
        self.worst_pages = 0.0
        self.worst_look = ""
        self.serving_pages = 0.0
        self.num_samples = 0
        self._rollout: tuple[int, int] | None = None
        self._serving: tuple[int, int] | None = None
        self._searched_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def forget_production(self) -> None:
        """It is about to be another process."""
        self._serving = None
        self.serving_pages = 0.0

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self._look()

    def _look(self) -> None:
        if time.monotonic() - self._searched_s > 0.2:
            self._searched_s = time.monotonic()
            if self._serving is None:
                self._serving = allocation(self._serving_pids(), self._directory / "serving.rank0")
            if self._rollout is None:
                self._rollout = allocation(self._rollout_pids(), self._directory / "rollout.rank0")
        # Memory that goes from one to the other between two looks must not be counted in both.
        began_s = time.monotonic()
        before, held, after = present(self._rollout), present(self._serving), present(self._rollout)
        pages = (held or 0.0) + min(before or 0.0, after or 0.0)
        took_s = time.monotonic() - began_s
        if pages > self.worst_pages and took_s <= TORN_S:
            self.worst_look = f"{began_s:.3f} s, in {took_s:.3f} s: rollout {before} of {self._rollout}, serving {held}, rollout {after}"
            self.worst_pages = pages
        if after is None:
            self._rollout = None
        if held is None:
            self._serving = None
        self.serving_pages = held or 0.0
        self.num_samples += 1
