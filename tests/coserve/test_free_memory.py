"""The device's own free figure: the machine's, the control groups', the driver's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rose.coserve import free_memory
from rose.coserve.free_memory import GpuMemory, HostMemory
from rose.errors import LedgerError

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A /proc and a /sys/fs/cgroup of 1000 MiB available, in a unit below a slice."""
    monkeypatch.setattr(free_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path / "cgroup")
    free_memory._limited_groups.cache_clear()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {1000 * 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/a.slice/node.service\n")
    (tmp_path / "cgroup/a.slice/node.service").mkdir(parents=True)
    yield tmp_path
    free_memory._limited_groups.cache_clear()


def limit(group: Path, most: str, used: int, droppable: int = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\n")


def test_this_machine_says_what_psutil_says() -> None:
    assert HostMemory().free_bytes() <= psutil.virtual_memory().available + 64 * MIB


def test_without_limits_it_is_what_the_machine_has(machine: Path) -> None:
    limit(machine / "cgroup/a.slice", "max", 5)
    assert HostMemory().free_bytes() == 1000 * MIB


def test_the_tightest_group_counts_with_the_page_cache_that_it_can_drop(machine: Path) -> None:
    limit(machine / "cgroup/a.slice", str(900 * MIB), 100 * MIB)
    limit(machine / "cgroup/a.slice/node.service", str(500 * MIB), 450 * MIB, 30 * MIB)
    assert HostMemory().free_bytes() == 80 * MIB


def test_the_limit_of_a_group_above_ours_counts(machine: Path) -> None:
    limit(machine / "cgroup/a.slice", str(300 * MIB), 290 * MIB)
    limit(machine / "cgroup/a.slice/node.service", str(500 * MIB), 1 * MIB)
    assert HostMemory().free_bytes() == 10 * MIB


def test_a_group_over_its_limit_has_nothing(machine: Path) -> None:
    limit(machine / "cgroup/a.slice", str(300 * MIB), 310 * MIB)
    assert HostMemory().free_bytes() == 0


def test_a_group_that_goes_away_is_no_error(machine: Path) -> None:
    limit(machine / "cgroup/a.slice", str(300 * MIB), 310 * MIB)
    HostMemory().free_bytes()
    (machine / "cgroup/a.slice/memory.max").unlink()
    assert HostMemory().free_bytes() == 1000 * MIB


def test_a_machine_that_does_not_say_is_an_error_with_its_field(machine: Path) -> None:
    (machine / "proc/meminfo").unlink()
    with pytest.raises(LedgerError, match="device: free memory cannot be read"):
        HostMemory().free_bytes()


def test_a_gpu_without_its_library_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(LedgerError, match=r"device\.kind: nvidia-ml-py is not installed"):
        GpuMemory(0)


@pytest.mark.gpu
def test_a_gpu_says_what_it_has_free_without_a_context() -> None:
    memory = GpuMemory(0)
    free = memory.free_bytes()
    assert 0 < free < 1 << 42
    assert abs(memory.free_bytes() - free) < 64 * MIB
    with pytest.raises(LedgerError, match=r"device\.gpu: NVML"):
        GpuMemory(1000)
