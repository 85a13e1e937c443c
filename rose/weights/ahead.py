"""Pull what a trainer is publishing before the run's head names it, where the store tells (:mod:`rose.weights.upcoming`).

The transfer to the reader then runs beside the trainer's, and when the head moves the objects are here.  Nothing is believed: an
object that was pulled ahead is compared with the signed manifest like any other, and what no manifest came to name is dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rose.errors import NotFound, RoseError
from rose.lineage import WeightVersion
from rose.weights.spool import Spool
from rose.weights.store import ObjectStore
from rose.weights.upcoming import Upcoming, version_of

_log = logging.getLogger(__name__)
_WAIT_S = 25.0
_RETRY_S = 1.0
_NOT_TOLD_S = 60.0  # a relay of an earlier build may be replaced


class Ahead:
    """A thread that listens, and some that pull; see the module.

    Args:
        held: What the reader's copy is.
        has_room: Whether so many bytes may be pulled ahead of need.
        num_pulls: At once.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        spool: Spool,
        *,
        held: Callable[[], WeightVersion | None],
        has_room: Callable[[int], bool],
        num_pulls: int,
    ) -> None:
        self._store, self._run_id, self._spool = store, run_id, spool
        self._held, self._has_room = held, has_room
        self._closed = threading.Event()
        self._asked: dict[str, Future[None]] = {}
        self._threads = ThreadPoolExecutor(num_pulls, thread_name_prefix="rose-ahead")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._listen, name="rose-upcoming", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Nothing is written any more when this returns.  A request under way ends first: close a store of one's own before."""
        self._closed.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _listen(self) -> None:
        mark = ""
        while not self._closed.is_set():
            try:
                found = self._store.upcoming(self._run_id, mark, _WAIT_S)
            except NotFound:
                mark = ""
                self._closed.wait(_NOT_TOLD_S)
            except RoseError as error:
                _log.debug("what comes of %s: %s", self._run_id, error)
                self._closed.wait(_RETRY_S)
            else:
                if found is not None:
                    mark = found.mark
                    self._heed(found)

    def _heed(self, found: Upcoming) -> None:
        self._asked = {key: pull for key, pull in self._asked.items() if not pull.done()}
        held = self._held()
        versions: set[WeightVersion] = set()
        for key, nbytes in found.objects:
            owner = version_of(key)
            if owner is None or owner[0] != self._run_id or (held is not None and owner[1] <= held):
                continue
            versions.add(owner[1])
            if key in self._asked:
                continue
            try:
                self._asked[key] = self._threads.submit(self._pull, owner[1], key, nbytes)
            except RuntimeError:  # closed
                return
        self._spool.expect(versions)

    def _pull(self, version: WeightVersion, key: str, nbytes: int) -> None:
        if self._closed.is_set() or not self._has_room(nbytes):
            return
        try:
            self._spool.pull_ahead(version, key, nbytes, self._closed.is_set)
        except RoseError as error:  # it is pulled again when the head names it
            _log.debug("%s was not pulled ahead: %s", key, error)
