"""Which file system a path is on."""

from __future__ import annotations

from pathlib import Path

import psutil


def file_system(path: Path) -> str:
    """Its kind, by the mount that is nearest above ``path``; ``unknown`` where the kernel does not say."""
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    resolved = path.resolve()
    return next((mounts[one] for one in (resolved, *resolved.parents) if one in mounts), "unknown")
