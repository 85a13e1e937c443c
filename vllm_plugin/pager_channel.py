"""What an engine's core and its workers' pagers tell each other: marks one way, reports the other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import closing

from rose.coserve.node_dir import NodeDir, Role
from rose.coserve.records import ChunkState
from rose.errors import LedgerError
from rose.policy.coserving.chunks import MAPPED
from rose.policy.coserving.events import Mark, Report
from rose.policy.coserving.serving import chunks_at_start
from vllm_plugin.memory import engine_number
from vllm_plugin.roles import ENV_PEER_PAGES


def chunks_away(directory: NodeDir, num_chunks: int, num_ranks: int, chunk_pages: int) -> list[int]:
    """Chunks that production's workers have started without, as the rollout engine holds their pages; ask before anybody tells them what
    is wanted.

    Of a worker that has not reported, none: its memory is vLLM's own.  Of one whose report cannot be read, those that it was told to start
    without.
    """
    found: set[int] = set()
    if ENV_PEER_PAGES not in os.environ:
        return []
    for rank in range(num_ranks):
        with closing(directory.rank("serving", rank, num_chunks)) as reader:
            try:
                record = reader.read()
                if record is not None and record.engine == engine_number():
                    found.update(chunk for chunk, state in enumerate(reader.extra) if state != MAPPED)
            except LedgerError:
                first = chunks_at_start(num_chunks, chunk_pages, int(os.environ[ENV_PEER_PAGES]))
                found.update(range(first, num_chunks))
    return sorted(found)


class PagerChannel:
    """See the module.  One thread.

    Args:
        wanted: Is every chunk mapped at first, but for those that are ``away``?

    Attributes:
        marks: The file of the marks, its writer's.
        engine: Whose workers are meant.
        ranks: Readers of their reports.
    """

    def __init__(
        self,
        directory: NodeDir,
        role: Role,
        num_chunks: int,
        num_ranks: int,
        *,
        wanted: bool,
        away: Iterable[int] = (),
    ) -> None:
        self.engine = engine_number()
        self._num_chunks = num_chunks
        self._generation = 0
        self.marks = directory.chunks_writer(role, num_chunks)
        self.marks.extra[:] = bytes([wanted]) * num_chunks
        for chunk in away:
            self.marks.extra[chunk] = 0
        self._write(after_step=0)
        self.ranks = [directory.rank(role, rank, num_chunks) for rank in range(num_ranks)]

    def require_workers(self) -> None:
        """All of this engine's workers have reported their memory, and live.

        Raises:
            RuntimeError: One has not: a file without a writer, or of another engine's worker, which dies; ours has no page pool.
        """
        for reader in self.ranks:
            record = reader.read()
            if record is None or record.engine != self.engine or not reader.alive():
                raise RuntimeError("a worker did not report elastic memory")

    def reports(self) -> tuple[tuple[Report, ...], int]:
        """The workers' reports, and the largest amount of unmapped memory that one of them still retains, in pages.

        Raises:
            LedgerError: A worker's file is gone, and its worker with it.
        """
        reports, retained = [], 0
        for reader in self.ranks:
            record = reader.read()  # the states are at least as new as its generation
            states = reader.extra
            if record is None or len(states) != self._num_chunks:
                raise LedgerError("a worker's file is gone", field=str(reader.path))
            reports.append(Report(record.generation, states))
            retained = max(retained, record.retained_pages)
        return tuple(reports), retained

    def fence(self, after_step: int) -> None:
        """Say which step may be the last to touch what will be given up, before the marks say what: who sees a chunk unmarked
        must find its step."""
        self._write(after_step)

    def write(self, mark: Mark) -> None:
        """Tell the pagers, and wake them."""
        self.marks.extra[:] = mark.marks
        self._generation = mark.generation
        self._write(mark.after_step)
        self.marks.wake()

    def close(self) -> None:
        self.marks.close()

    def __enter__(self) -> PagerChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, after_step: int) -> None:
        self.marks.write(
            ChunkState(
                engine=self.engine,
                generation=self._generation,
                after_step=after_step,
                heartbeat_ns=time.monotonic_ns(),
            )
        )
