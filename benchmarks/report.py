"""What every benchmark prints and writes: progress, a table, and one JSON file with the machine in it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

EVERY_S = 2.0


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
        result = {
            "schema": 1,
            "benchmark": self.name,
            "summary": summary,
            "details": details,
            "machine": machine(),
            "seconds": round(time.monotonic() - self._start_s, 1),
        }
        path.write_text(json.dumps(result, indent=1, sort_keys=False) + "\n")
        print(f"wrote {path}")


def machine() -> dict[str, Any]:
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip() or None,
    }
