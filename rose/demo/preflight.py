"""Can this machine run the demo?  One clear line when it cannot, before anything is started.

:func:`gather_facts` looks; :func:`check_facts` decides and is pure, so that made-up facts test every refusal.
The first thing that is wrong is reported, in the order of what a reader can fix last:
machine first (it needs another one), then memory, installation, disk, ports.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rose.errors import ConfigError
from rose.units import format_bytes

GIB = 2**30
MIN_CORES = 2
MIN_TOTAL_BYTES = 11 * GIB
"""A machine sold with 12 GB reports 11.2 GiB or a little more."""
MIN_AVAILABLE_BYTES = 8 * GIB
"""Three vLLM processes, Ray and the trainer together."""
MIN_SHARED_BYTES = 256 * 2**20
"""The run directory: the ledger, weight objects, Ray's object store."""
PYTHON_RANGE = ((3, 11), (3, 13))
MODULES = ("aiohttp", "gymnasium", "numba", "ray", "torch", "transformers", "typer", "vllm")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the machine is, as far as the demo cares.  ``available_bytes`` respects a container's limit."""

    system: str
    machine: str
    python: tuple[int, int]
    num_cores: int
    cpu_flags: frozenset[str]
    total_bytes: int
    available_bytes: int
    run_directory: str
    run_directory_free_bytes: int
    missing_modules: tuple[str, ...]
    ports_taken: Mapping[str, int]
    """Name of the setting -> the port that somebody else listens on."""


def check_facts(facts: Facts) -> None:
    """Raise what keeps the demo from running.

    Raises:
        ConfigError: Names the fact, what was found, what is needed, and what to do.
    """
    if facts.system != "Linux":
        raise ConfigError(f"the demo runs on Linux, this is {facts.system}", field="machine")
    if facts.machine != "x86_64":
        raise ConfigError(f"the CPU build of vLLM needs x86_64, this is {facts.machine}", field="machine")
    if "avx2" not in facts.cpu_flags:
        raise ConfigError("this processor lacks AVX2, which the CPU build of vLLM needs", field="machine")
    if facts.num_cores < MIN_CORES:
        raise ConfigError(
            f"{facts.num_cores} core usable, {MIN_CORES} needed",
            field="machine",
            fix="production and the harvested engine share one core, everything else runs on the other",
        )
    if facts.total_bytes < MIN_TOTAL_BYTES:
        raise ConfigError(
            f"{format_bytes(facts.total_bytes)} in all, a 12 GB machine is needed", field="memory"
        )
    if facts.available_bytes < MIN_AVAILABLE_BYTES:
        raise ConfigError(
            f"{format_bytes(facts.available_bytes)} free, {format_bytes(MIN_AVAILABLE_BYTES)} needed",
            field="memory",
            fix="end other programs",
        )
    if not PYTHON_RANGE[0] <= facts.python < PYTHON_RANGE[1]:
        raise ConfigError(
            f"Python {facts.python[0]}.{facts.python[1]} runs this, 3.11 or 3.12 is needed", field="python"
        )
    if facts.missing_modules:
        raise ConfigError(
            f"not installed: {', '.join(facts.missing_modules)}", field="python", fix="make setup"
        )
    if facts.run_directory_free_bytes < MIN_SHARED_BYTES:
        raise ConfigError(
            f"{facts.run_directory} has {format_bytes(facts.run_directory_free_bytes)} free, "
            f"{format_bytes(MIN_SHARED_BYTES)} needed",
            field="run_directory",
            fix="give the container a larger /dev/shm, or name another place with --run-directory",
        )
    for name, port in facts.ports_taken.items():
        raise ConfigError(f"port {port} is taken", field=name, fix="choose others with --base-port")


def gather_facts(ports: Mapping[str, int], run_directory: Path, modules: Iterable[str] = MODULES) -> Facts:
    """Look at this machine."""
    memory = psutil.virtual_memory()
    limit_bytes, used_bytes = _cgroup_memory(_CGROUP)
    parent = next((p for p in (run_directory, *run_directory.parents) if p.is_dir()), Path("/"))
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        python=(sys.version_info.major, sys.version_info.minor),
        num_cores=len(os.sched_getaffinity(0)),
        cpu_flags=parse_cpu_flags(_read(Path("/proc/cpuinfo"))),
        total_bytes=min(memory.total, limit_bytes or memory.total),
        available_bytes=min(memory.available, limit_bytes - used_bytes if limit_bytes else memory.available),
        run_directory=str(parent),
        run_directory_free_bytes=shutil.disk_usage(parent).free,
        missing_modules=tuple(name for name in modules if importlib.util.find_spec(name) is None),
        ports_taken={name: port for name, port in ports.items() if not is_port_free(port)},
    )


def is_port_free(port: int) -> bool:
    """True when a server could listen on the loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier run in TIME_WAIT must not refuse the next one.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Flags that the first processor of ``/proc/cpuinfo`` names."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _cgroup_memory(root: Path) -> tuple[int | None, int]:
    """Limit and unreclaimable use of our cgroup (version 2, or 1); None where there is no limit."""
    for limit_name, used_name, stat_name, inactive in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, used = _read(root / limit_name).strip(), _read(root / used_name).strip()
        if not limit.isdigit() or not used.isdigit() or int(limit) >= 1 << 60:
            continue
        stat = dict(line.split(maxsplit=1) for line in _read(root / stat_name).splitlines() if " " in line)
        return int(limit), max(0, int(used) - int(stat.get(inactive, "0")))
    return None, 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
