"""Units that cross module borders, and how to print them."""

from __future__ import annotations

PAGE_BYTES = 2 * 1024 * 1024
"""One page: the unit of lending.  2 MiB is CUDA's VMM granularity and the kernel's huge page."""

NS_PER_S = 1_000_000_000


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``'1.5 KiB'``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_s(seconds: float) -> str:
    """``0.0042`` -> ``'4.2 ms'``."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s"
