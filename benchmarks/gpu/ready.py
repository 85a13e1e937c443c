"""What each stage of ``gpu_check.py`` lacks: ``--dry-run`` finds all of it by importing it in a child, a real run what is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping

from benchmarks.gpu.common import NEEDS, ROOT, not_installed
from benchmarks.gpu.stages import Stage

_AGENT = (
    "aiohttp",
    "httpx",
    "msgspec",
    "numba",
    "prometheus_client",
    "pydantic",
    "safetensors",
    "uvloop",
    "xxhash",
)
"""Of what runs beside an engine."""
_SIGNED = ("cryptography", "blake3")
"""Of whoever makes tokens (a publisher's key is among them), or publishes or reads weights; the first is imported when a key is made."""
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "device": ("numpy", "torch", "pytest"),
    "engines": ("numpy", "torch", "safetensors", "transformers", "vllm", "msgspec", "xxhash", "numba"),
    "coserve": ("torch", "transformers", "vllm", "rich", "typer", *_SIGNED, *_AGENT),
    "weights": ("torch", "transformers", "vllm", "fsspec", *_SIGNED, *_AGENT),
    "train": ("torch", "transformers", "safetensors", "pydantic", "msgspec", "xxhash", "numba", "pytest", *_SIGNED),
}  # fmt: skip
"""By module of stages: what it, or a process that it starts, imports when it runs."""
_OF_STAGE: Mapping[str, tuple[str, ...]] = {
    "contract": (
        *("aiohttp", "blake3", "httpx", "msgspec", "prometheus_client", "psutil"),
        *("pydantic", "rich", "safetensors", "typer", "xxhash"),
    )
}
"""By stage, beside those of its module: the folders of its tests have fixtures for more than what is asked."""
IMPORT_S = 150.0
_TRY = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        found[name] = f"{error.name} is not installed"
    except BaseException as error:
        found[name] = f"{name} cannot be imported: {type(error).__name__}: {error}"[:300]
    with open(1, "w", closefd=False) as out:
        print("\\n" + json.dumps({"done": name, "found": found}), file=out)
"""


def lacking(table: Mapping[str, Stage]) -> dict[str, list[str]]:
    """All that each stage of ``table`` lacks here; asks no driver, and says it also where there is no GPU."""
    wanted = {
        name: (f"benchmarks.gpu.{stage.module}", *_packages(name, stage)) for name, stage in table.items()
    }
    broken = _import(name for names in wanted.values() for name in names)
    found: dict[str, list[str]] = {}
    for name, stage in table.items():
        told = [reason for need in stage.needs if (reason := NEEDS[need]()) is not None]
        told += [broken[package] for package in wanted[name] if package in broken]
        found[name] = list(dict.fromkeys(told))
    return found


def no_package(name: str, stage: Stage) -> str | None:
    """A package that this stage lacks, in words.  Imports nothing: a real run has no seconds for all of vLLM once more."""
    return next(
        (reason for one in _packages(name, stage) if (reason := not_installed(one, one)) is not None), None
    )


def _packages(name: str, stage: Stage) -> tuple[str, ...]:
    return (*PACKAGES.get(stage.module, ()), *_OF_STAGE.get(name, ()))


def _import(names: Iterable[str]) -> dict[str, str]:
    """Which of ``names`` cannot be imported, and why; one that takes its process along is named and left out."""
    left, found = list(dict.fromkeys(names)), dict[str, str]()
    while left:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _TRY, *left], cwd=ROOT, capture_output=True, text=True,
                timeout=IMPORT_S, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return found | {name: f"{name} was not imported within {IMPORT_S:.0f} s" for name in left}
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"done"')]
        said = json.loads(lines[-1]) if lines else {"done": None, "found": {}}
        found |= said["found"]
        left = left[left.index(said["done"]) + 1 if lines else 0 :]
        if left:
            found[left[0]] = f"importing {left[0]} ended its process with {done.returncode}"
            left = left[1:]
    return found
