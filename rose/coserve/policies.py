"""The policies that a node has on its host: one copy per run, as many as there is room for, least recently used out.

The scheduler says whom a device serves (``rose.wire.workers.HeartbeatAnswer``), and that changes within minutes.  A copy that is
still here costs a switch nothing but the engine's own update; one that is not is a full pull.  So copies of runs that were
served before stay, up to ``weights.max_policies`` and as long as the disk holds them (what another node of the machine uses
stays too); ``weights.run_id``, the node's own, is the
one that is never removed.

Blocking; any thread may call.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rose.errors import RequestError
from rose.lineage import WeightVersion, check_run
from rose.weights.host_copy import remove

logger = logging.getLogger("rose.node")

FOLDER = "runs"
"""Below the directory of the node's own run, which is where that run's copy is."""


class WeightSource(Protocol):
    """What ``rose.weights.subscriber.WeightSubscriber`` offers; blocking, called from a thread."""

    def poll(self, timeout_s: float) -> WeightVersion | None:
        """Newest published version, waiting for one newer than known; None when there is none."""
        ...

    def fetch(self, version: WeightVersion, engine_version: WeightVersion | None) -> Path:
        """Update file that leads from ``engine_version`` (None: from anything) to ``version``."""
        ...

    def busy(self) -> bool:
        """Whether another node of the machine uses the same copy."""
        ...

    def require(self, version: WeightVersion) -> None:
        """The trainer has published this: what is older is not the newest, whatever the store says.  Does not block."""
        ...

    def close(self) -> None:
        """End a ``poll`` in progress and give up what is held."""
        ...


class PolicyCopies:
    """See the module.

    Args:
        own: The run that the node's configuration names.
        directory: Of its copy.
        open_source: Opens the copy of a run in a directory.
        most: Copies that are kept, the own one included.
    """

    def __init__(
        self, own: str, directory: Path, open_source: Callable[[str, Path], WeightSource], *, most: int
    ) -> None:
        self._own, self._directory, self._open, self._most = own, directory, open_source, most
        self._sources: dict[str, WeightSource] = {}
        """Open ones, least recently used first."""
        self._required: dict[str, WeightVersion] = {}
        self._stuck: set[str] = set()
        """Runs whose copies could not be removed: somebody else's files, a disk that is read-only."""
        self._lock = threading.RLock()
        self._closed = False

    def source(self, run: str) -> WeightSource:
        """The copy of ``run``, opened if need be; it is the most recently used from here on.

        Raises:
            RequestError: The node is going down.
        """
        with self._lock:
            if self._closed:
                raise RequestError("the node is stopping", field="run")
            source = self._sources.pop(run, None)
            if source is None:
                self._stuck.discard(run)
                while len(self.runs() - {run} - self._stuck) >= max(1, self._most) and self.make_room(run):
                    pass
                source = self._open(run, self.folder(run))
                if run in self._required:
                    source.require(self._required[run])
            self._sources[run] = source
            return source

    def require(self, run: str, version: WeightVersion) -> None:
        """What the trainer of ``run`` has published, by the scheduler's word.  Does not block."""
        if self._required.get(run) != version:
            self._required[run] = version
            source = self._sources.get(run)
            if source is not None:
                source.require(version)

    def folder(self, run: str) -> Path:
        """Where the copy of ``run`` is, or would be."""
        return self._directory if run == self._own else self._directory / FOLDER / check_run(run)

    def runs(self) -> set[str]:
        """Runs with a copy here, those of an earlier process included."""
        folder = self._directory / FOLDER
        found = {name for name in os.listdir(folder) if _is_run(name)} if folder.is_dir() else set[str]()
        return found | set(self._sources) | {self._own}

    def opened(self) -> set[str]:
        """Runs whose copies are in use here."""
        return set(self._sources)

    def make_room(self, run: str) -> bool:
        """Remove the least recently used copy besides those of ``run`` and the node's own; False: there is none that goes."""
        with self._lock:
            order = {name: place for place, name in enumerate(self._sources)}
            spare = self.runs() - {run, self._own} - self._stuck
            # One that nobody opened is the oldest.
            for name in sorted(spare, key=lambda each: (order.get(each, -1), each)):
                source = self._sources.get(name)
                if source is not None and source.busy():
                    continue
                logger.info("the copy of run %s is removed: another policy needs the room", name)
                if source is not None:
                    del self._sources[name]
                    source.close()
                folder = self.folder(name)
                if remove(folder):
                    return True
                if source is None and not folder.is_symlink() and os.access(folder, os.W_OK):
                    continue  # another node's
                self._stuck.add(name)
                logger.error("%s could not be removed; it is left out of the count from now on", folder)
            return False

    def close(self) -> None:
        """End polls in progress; the copies stay for the next process."""
        with self._lock:
            self._closed = True
            sources = list(self._sources.values())
        for source in sources:
            source.close()


def _is_run(name: str) -> bool:
    try:
        check_run(name)
    except RequestError:
        return False
    return True
