"""Simulated cells on all cores.  They do not know each other: one result is the same wherever it was computed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection, wait
from typing import Protocol

from rose.errors import ConfigError
from rose.sim.cells import CellResult


class Simulation(Protocol):
    """Something to compute, that can be sent to another process."""

    def run(self) -> CellResult:
        """
        Raises:
            ConfigError: Such a fleet cannot exist.
        """
        ...


class ProcessPool:
    """Tasks on all cores; with one worker, in this process.  A context manager: leaving it ends the workers, and an exception does so in
    the middle of what they compute; they end by themselves when this process is gone."""

    def __init__(self, workers: int | None = None) -> None:
        workers = workers or min(8, len(os.sched_getaffinity(0)))
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            context = multiprocessing.get_context("spawn")
            # Closed at this end, it reads as ended at theirs.
            ended, self._wanted = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(ended,))

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            if kind is not None:
                self._wanted.close()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(
        self, tasks: Sequence[Simulation], done: Callable[[], None], *, required: bool = False
    ) -> list[CellResult | None]:
        """Results in the order of ``tasks``; None for one whose fleet cannot exist.

        Raises:
            ConfigError: A fleet cannot exist, where all are ``required``.
        """
        found: list[CellResult | None] = [None] * len(tasks)
        if self._pool is None:
            for index, task in enumerate(tasks):
                found[index] = _run(task, required)
                done()
            return found
        futures = {self._pool.submit(_run, task, required): index for index, task in enumerate(tasks)}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            done()
        return found


def _run(task: Simulation, required: bool) -> CellResult | None:
    try:
        return task.run()
    except ConfigError:
        if required:
            raise
        return None


def _begin_worker(ended: Connection) -> None:
    """Ctrl-C is the parent's; a parent that was killed takes its workers along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, args=(ended,), daemon=True).start()


def _die_with_parent(ended: Connection) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel, ended])
        os._exit(1)
