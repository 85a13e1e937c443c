"""Independent runs in several processes, each result as it comes, within a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

Key = TypeVar("Key")
NUM_CORES = os.cpu_count() or 1


def processes(jobs: int) -> Executor | None:
    """A pool, or None for one job: then runs stay in this process."""
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None


def each_result(
    pool: Executor | None, asked: Mapping[Key, tuple[Any, ...]], end_s: float
) -> Iterator[tuple[Key, Any]]:
    """``(key, result)`` of each run, in the order in which they end.

    Args:
        asked: By key: a function of a module, and its arguments.
        end_s: Of the monotonic clock; nothing begins after it.

    Raises:
        TimeoutError: Time was up before all had begun; what had begun was yielded.
    """
    if pool is None:
        for key, (function, *arguments) in asked.items():
            if time.monotonic() > end_s:
                raise TimeoutError
            yield key, function(*arguments)
        return
    begun = {pool.submit(*what): key for key, what in asked.items()}
    missing = False
    try:
        for future in as_completed(begun):
            if future.cancelled():
                missing = True
                continue
            yield begun[future], future.result()
            if time.monotonic() > end_s:
                for other in begun:
                    other.cancel()
    finally:
        for future in begun:
            future.cancel()
    if missing:
        raise TimeoutError
