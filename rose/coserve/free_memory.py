"""What a device has left, by its own word: the figure that the reserve is held against.

On the host: ``MemAvailable``, or what the limits of our control groups (version 2) leave, whichever is less.  On a GPU: the
driver's free figure, through NVML, which needs no context and so no memory on the device.

Decides nothing: how little is too little is ``rose.policy.lending``'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rose.errors import LedgerError

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class FreeMemory(Protocol):
    """One device.

    Raises (``free_bytes``):
        LedgerError: It does not say.
    """

    kind: str

    def free_bytes(self) -> int: ...


class HostMemory:
    """Main memory."""

    kind = "host"

    def free_bytes(self) -> int:
        try:
            return free_bytes()
        except (OSError, ValueError, IndexError) as error:
            raise LedgerError(f"free memory cannot be read: {error}", field="device") from error


class GpuMemory:
    """Memory of one GPU.

    Args:
        index: As ``nvidia-smi`` numbers them (not as ``CUDA_VISIBLE_DEVICES`` does).

    Raises:
        LedgerError: No nvidia-ml-py, no driver, or no such GPU.
    """

    kind = "gpu"

    def __init__(self, index: int) -> None:
        try:
            import pynvml  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
        except ImportError as error:
            raise LedgerError(
                "nvidia-ml-py is not installed",
                field="device.kind",
                fix="pip install '.[cuda]' from a checkout of ROSE",
            ) from error
        self._nvml: Any = pynvml
        self._call("device.kind", pynvml.nvmlInit)
        self._device = self._call("device.gpu", pynvml.nvmlDeviceGetHandleByIndex, index)

    def free_bytes(self) -> int:
        return int(self._call("device", self._nvml.nvmlDeviceGetMemoryInfo, self._device).free)

    def total_bytes(self) -> int:
        """Of the whole GPU."""
        return int(self._call("device", self._nvml.nvmlDeviceGetMemoryInfo, self._device).total)

    def driver_version(self) -> str:
        return str(self._call("device", self._nvml.nvmlSystemGetDriverVersion))

    def is_cut_up(self) -> bool:
        """Is it in MIG mode?  A GPU that has no such mode is not."""
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(self._device)[0])
        except self._nvml.NVMLError:
            return False

    def _call(self, field: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise LedgerError(f"NVML: {error}", field=field) from error


def free_bytes() -> int:
    """Main memory that can be taken without pushing anything out: the machine's, and that of our control groups."""
    available = 1 << 62
    for line in (_PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    for group in _limited_groups():
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                used = int((group / "memory.current").read_text())
                available = min(available, int(limit) - used + _droppable_bytes(group))
        except (OSError, ValueError):  # the group is gone, or its controller was taken away
            continue
    return max(0, available)


@functools.cache
def _limited_groups() -> tuple[Path, ...]:
    """Our control group and those above it that can have a limit; in a container the topmost is the container's."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
        path = next(line[3:] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return ()
    parts = [part for part in path.split("/") if part not in ("", "..")]
    groups = [_CGROUPS.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return tuple(group for group in groups if (group / "memory.max").exists())


def _droppable_bytes(group: Path) -> int:
    """Page cache that the kernel drops before it says no."""
    for line in (group / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
