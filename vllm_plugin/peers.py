"""Who else has memory of the device: the rollout engine, by its lease, or by its workers where its core is dead.

Files are kept open: one whose name was deleted is still read for as long as its writer lives (:mod:`rose.coserve.ledger`), so that
the pages that its writer holds are not overlooked.
"""

from __future__ import annotations

import logging
from typing import Any

from rose.coserve.ledger import RecordReader, RecordWriter
from rose.coserve.node_dir import NodeDir, RankReaders
from rose.errors import LedgerError
from rose.policy.lending_events import ALL_PAGES

logger = logging.getLogger("vllm.rose")


class Trouble:
    """Files that cannot be read or mended: one line for each, not one in every round."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def say(self, name: str, error: LedgerError) -> None:
        if self._said.get(name) != str(error):
            self._said[name] = str(error)
            logger.error("ROSE: %s", error)

    def over(self, name: str) -> None:
        self._said.pop(name, None)

    def mend(self, writer: RecordWriter[Any]) -> None:
        """Put a file of ours back under its name.  Where that cannot be done, those who have met us go on with the file they hold."""
        name = writer.path.name
        try:
            if writer.mend():
                logger.warning(
                    "ROSE: %s was deleted, cut off or written over; it is there again", writer.path
                )
            self.over(name)
        except LedgerError as error:
            self.say(name, error)


def require_own(writer: RecordWriter[Any]) -> None:
    """Nobody else has written our file: numbers that a stranger can change must steer nothing.

    Raises:
        LedgerError: Somebody did.
    """
    if not writer.intact():
        raise LedgerError("was written by another process, or cut off", field=str(writer.path))


class Peers:
    """See the module."""

    def __init__(self, node_dir: NodeDir, trouble: Trouble) -> None:
        self._trouble = trouble
        self._lease = node_dir.rollout_lease()
        self._ranks = RankReaders(node_dir, "rollout")
        self._last_read: dict[int, tuple[int, int]] = {}
        self._met = 0

    def close(self) -> None:
        self._lease.close()
        self._ranks.close()

    def any_alive(self) -> bool:
        """Is there a rollout engine?  It says ``starting`` long before it runs a step.  Unreadable counts as one."""
        try:
            alive = self._lease.alive()
        except LedgerError:
            return True
        if alive and self._lease.incarnation != self._met:  # its workers were there before it
            self._met = self._lease.incarnation
            self._meet_workers()
        return alive

    def pages(self) -> int:
        """Pages that rollout engines hold of a device: each rank of an engine has one, and the same chunks there.

        By the lease; where that has no writer or cannot be read, by what living workers say: a dead engine core keeps no memory from
        production, and a worker may outlive its core for a moment.  Of a living process whose files cannot be read, the last that was
        read; where nothing ever was (an engine of another ROSE version), everything.
        """
        readable = True
        try:
            if self._lease.alive():
                record, second = self._lease.read(), self._lease.others()
                self._trouble.over("rollout.lease")
                held = max(0, record.reserved_pages) if record is not None else 0
                if second is not None:  # two live engines, which only a deleted file allows
                    other = second.read()
                    held += max(0, other.reserved_pages) if other is not None else 0
                    second.close()
                return held
        except LedgerError as error:
            self._trouble.say("rollout.lease", error)
            readable = False
        workers = self._meet_workers()
        if not workers and not readable and self._lease.is_written():
            return ALL_PAGES
        held_by: dict[int, int] = {}
        for rank, reader in workers.items():
            engine, pages = self._held_by(rank, reader)
            held_by[engine] = max(pages, held_by.get(engine, 0))
        return sum(held_by.values())

    def _meet_workers(self) -> dict[int, RecordReader[Any]]:
        """A directory that was made anew with a wrong mode has nobody in it whom we could meet, and keeps no memory from production."""
        workers = self._ranks.met()
        if self._ranks.trouble is not None:
            self._trouble.say("the directory", self._ranks.trouble)
        else:
            self._trouble.over("the directory")
        return workers

    def _held_by(self, rank: int, reader: RecordReader[Any]) -> tuple[int, int]:
        """Its engine, and the pages that it has."""
        try:
            if reader.alive():
                record = reader.read()
                found = (record.engine, max(0, record.resident_pages)) if record is not None else (0, 0)
                self._last_read[rank] = found
                return found
        except LedgerError as error:
            self._trouble.say(reader.path.name, error)
            if reader.is_written():
                return self._last_read.get(rank, (0, ALL_PAGES))
        self._ranks.forget(rank)
        self._last_read.pop(rank, None)
        return 0, 0
