"""What keeps a run's store in order beside its publisher: old versions go, anchors are composed.

One thread, of rank 0.  It holds no lock that a publish takes: the publisher says after every version what there is
(:meth:`Upkeep.published`, which returns at once) and asks before the next what came of it (:meth:`Upkeep.news`).  So a
slow store delays an anchor, and neither a publish nor a training step.

An anchor is due every ``anchor_every`` versions, and sooner where room is short: once the deltas since the last take half
of what would be left beside two full copies.  How much room there is, the settings say (``max_store_bytes``) or the
store does, by being full.

A publish that finds the store full calls :meth:`Upkeep.make_room`, the one thing here that a publish waits for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rose.errors import CapacityError, NotFound, RoseError, SectionCorrupt, WeightsError
from rose.lineage import WeightVersion
from rose.weights import composer, manifest, retention, stored_manifests
from rose.weights.chain import Chain
from rose.weights.manifest import Kind
from rose.weights.params import WeightsParams
from rose.weights.retention import Need
from rose.weights.store import ObjectStore

_log = logging.getLogger(__name__)
HOLDER = "rose-composer"
"""Holder of the lease on what is being composed: one per run, so that a restarted trainer replaces its own."""
_LEASE_S = 600.0
FULL = 507
_NO_LIMIT = 1 << 62
_KINDS: tuple[Kind, Kind] = ("anchor", "delta")


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """What happened since the last look.

    Args:
        anchor: A version whose anchor is there now.
        bytes_anchor: Of its objects.
        broken: Anchor and deltas in the store do not lead to what was published: only a whole version mends that.
    """

    anchor: WeightVersion | None = None
    bytes_anchor: int = 0
    broken: bool = False


class Upkeep:
    """See the module.  Any thread may call; one publisher per object."""

    def __init__(self, store: ObjectStore, run_id: str, params: WeightsParams) -> None:
        self._store, self._run_id, self._params = store, run_id, params
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wanted: Chain | None = None
        self._working = False
        self._composed: WeightVersion | None = None
        self._stop = threading.Event()  # give up what is being composed
        self._closed = False
        self._room_bytes = params.max_store_bytes
        self._news = News()

    def published(self, chain: Chain) -> None:
        """The head has moved to ``chain.head``.  Returns at once."""
        with self._changed:
            self._wanted = chain
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rose-upkeep", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def news(self) -> News:
        """What happened since the last call."""
        with self._changed:
            news, self._news = self._news, News()
            return news

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until everything asked for is done; False when ``timeout_s`` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._wanted is None and not self._working, timeout_s)

    def make_room(self, need: Need) -> None:
        """The store is full: give up an anchor that is being composed, and delete what ``need`` allows.

        Never raises: when the store cannot be reached, the next try says so.
        """
        try:
            self._learn(retention.held_bytes(self._store, self._run_id))
            with self._changed:
                self._stop.set()
                self._wanted = None
                self._changed.wait_for(lambda: not self._working)
            deleted = retention.collect(self._store, self._run_id, need)
            if deleted:  # else the publish says it, once nothing else helps
                _log.warning("store is full; deleted %d versions of %s", len(deleted), self._run_id)
        except RoseError as error:
            _log.warning("store is full, and room cannot be made: %s", error)
        finally:
            self._stop.clear()

    def close(self, timeout_s: float | None = None) -> None:
        """Give up what is being composed, delete its parts, and end the thread; that is waited for ``timeout_s`` at most."""
        with self._changed:
            self._closed, self._wanted = True, None
            self._stop.set()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return  # its store does not answer
        self._thread, self._closed = None, False
        self._stop.clear()

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._wanted is not None or self._closed)
                if self._closed:
                    return
                chain, self._wanted = self._wanted, None
                self._working = True
            assert chain is not None
            try:
                self._tidy(chain)
                if not self._params.compose:
                    self._take_found(chain)
                elif self._due(chain):
                    self._compose(chain)
            except RoseError as error:
                _log.warning("upkeep of %s: %s", self._run_id, error)
            except Exception:  # noqa: BLE001 - the boundary of a thread: the publisher goes on without it
                _log.exception("upkeep of %s failed", self._run_id)

    def _tidy(self, chain: Chain) -> None:
        if not self._params.collect:
            return
        need, most = Need.TIDY, self._params.max_store_bytes
        if most is not None and retention.held_bytes(self._store, self._run_id) > most:
            need = Need.OVER
        retention.collect(self._store, self._run_id, need, chain=chain.versions)

    def _due(self, chain: Chain) -> bool:
        if self._composed is not None and self._composed in chain.versions:
            chain = chain.from_anchor(self._composed)  # the publisher has not heard of it yet
        room = self._room_bytes
        if not chain.deltas or (room is not None and chain.bytes_anchor + chain.nbytes > room):
            return False
        spare = None if room is None else room - 2 * chain.bytes_anchor
        short = spare is not None and 2 * chain.bytes_deltas >= spare
        return short or len(chain.deltas) >= self._params.anchor_every

    def _take_found(self, chain: Chain) -> None:
        """Adopt the newest anchor of the chain that another process composed, if it has the state that was published."""
        keys = set(self._store.list(f"{self._run_id}/"))
        for version, _ in reversed(chain.deltas):
            if version == self._composed:
                return
            if manifest.manifest_key(self._run_id, version, "anchor") not in keys:
                continue
            try:
                record, delta = (stored_manifests.read(self._store, self._run_id, version, k) for k in _KINDS)
            except (NotFound, SectionCorrupt) as error:
                _log.warning("no anchor of %s: %s", version, error)
                continue
            if record.state() != delta.state():
                _log.warning("no anchor of %s: what was composed is not what was published", version)
                continue
            with self._changed:
                self._composed = version
                self._news = News(anchor=version, bytes_anchor=record.bytes_sent, broken=self._news.broken)
            return

    def _compose(self, chain: Chain) -> None:
        target = chain.head
        try:
            with holding(self._store, self._run_id, target, self._stop.is_set) as stopped:
                record = composer.compose(self._store, self._run_id, target, self._params, stopped)
        except composer.Stopped:
            return
        except CapacityError as error:
            if error.status == FULL:
                self._learn(chain.bytes_anchor + chain.nbytes - 1)
            _log.warning("no anchor of %s: %s", target, error)
        except WeightsError as error:
            _log.warning("no anchor of %s, the next version is whole: %s", target, error)
            with self._changed:
                self._news = News(broken=True)
        else:
            with self._changed:
                if self._room_bytes is not None:  # found out, perhaps too low: there may be more by now
                    self._room_bytes = min(
                        int(self._room_bytes * 1.05), self._params.max_store_bytes or _NO_LIMIT
                    )
                self._composed = target
                self._news = News(anchor=target, bytes_anchor=record.bytes_sent, broken=self._news.broken)

    def _learn(self, room_bytes: int) -> None:
        """More than this the store does not hold of this run."""
        with self._changed:
            self._room_bytes = min(room_bytes, self._room_bytes or room_bytes)


@contextlib.contextmanager
def holding(
    store: ObjectStore, run_id: str, target: WeightVersion, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Callable[[], bool]]:
    """Keep the chain of ``target`` from being deleted while an anchor of it is composed.

    Gives what :func:`rose.weights.composer.compose` asks before every tensor: ``stopped``, and the lease is renewed.
    """

    def hold(version: WeightVersion | None) -> None:
        # A store that cannot is no reason to stop.
        try:
            store.lease(run_id, HOLDER, version, _LEASE_S)
        except RoseError as error:
            _log.info("no lease on %s: %s", version, error)

    held_at_s = time.monotonic()

    def asked() -> bool:
        nonlocal held_at_s
        # A large model behind a slow store takes longer than a lease.
        if time.monotonic() - held_at_s > _LEASE_S / 3:
            hold(target)
            held_at_s = time.monotonic()
        return stopped()

    hold(target)
    try:
        yield asked
    finally:
        hold(None)
