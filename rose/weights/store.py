"""Where versions live between trainer and engines: one protocol, what its implementations share, and the one in memory.

A store keeps immutable objects under keys, one head per run, and leases.  Rules, the same for all (one contract
suite in ``tests/weights/test_stores.py``):

* ``put_new`` creates or fails with Conflict, atomically; an object is never seen half-written, never replaced.
* A head moves forward only, and only from the version that the writer says it follows: of two trainers with one run
  id, one is refused.
* A lease says "do not delete what this version needs" for a while; :mod:`rose.weights.retention` honours it.
* Keys are checked against a narrow grammar before anything else happens; no key leaves the store's folder.
* Nothing here checks contents: readers verify every byte by the manifest, and manifest and head by their signatures
  (:mod:`rose.weights.sealed`).

Methods block and may be called from any thread.  :class:`rose.weights.file_store.FileStore` is the same in a folder,
:class:`rose.weights.http_store.HttpStore` over HTTP.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rose.errors import CapacityError, Conflict, NotFound, RequestError
from rose.lineage import WeightVersion
from rose.weights.leases import MAX_LEASE_S
from rose.weights.manifest import MAX_OBJECT_BYTES, Head, check_key, check_run_id
from rose.weights.upcoming import Upcoming

Buffer = bytes | bytearray | memoryview
Content = bytes | bytearray
"""What a read returns; equal to, and used like, bytes.  Not copied for the sake of its type."""

MAX_HEAD_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectStat:
    """What a store tells of an object without reading it."""

    nbytes: int


class ObjectStore(Protocol):
    """See the module's docstring for what every implementation guarantees."""

    def put_new(self, key: str, data: Buffer) -> None:
        """Raises Conflict if ``key`` exists, TooLarge, CapacityError when full."""
        ...

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> Content:
        """Raises NotFound, or TooLarge above ``max_bytes``."""
        ...

    def get_range(self, key: str, offset: int, nbytes: int) -> Content:
        """Exactly ``nbytes``; raises NotFound, or RequestError when the object ends before."""
        ...

    def stat(self, key: str) -> ObjectStat:
        """Raises NotFound."""
        ...

    def distrust(self, key: str) -> None:
        """What was read of ``key`` is damaged: where there are copies on the way, the next read goes past them."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys below ``prefix`` (one or more whole segments, ending in '/'), sorted."""
        ...

    def delete(self, key: str) -> bool:
        """True if it existed."""
        ...

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        """Move the run's head; raises Conflict unless it is at ``expected`` (None: no head yet) and older.

        Setting the head that is already set, bit by bit, succeeds: a retry is not a conflict.
        """
        ...

    def get_head(self, run_id: str) -> Head | None:
        """The run's head; None when it has none yet."""
        ...

    def runs(self) -> list[str]:
        """Names of the runs that have a head, sorted; for people."""
        ...

    def wait_head(self, run_id: str, after: WeightVersion | None, timeout_s: float) -> Head | None:
        """The head as soon as it is newer than ``after``; None when ``timeout_s`` passes first.

        Raises CapacityError where the store is closed meanwhile.
        """
        ...

    def upcoming(self, run_id: str, mark: str, timeout_s: float) -> Upcoming | None:
        """What is being published, as soon as it is another than at ``mark`` (empty: now); None when ``timeout_s`` passes first.

        Raises NotFound where the store does not tell.
        """
        ...

    def lease(self, run_id: str, holder: str, version: WeightVersion | None, ttl_s: float) -> None:
        """Hold ``version`` for ``ttl_s``, instead of what ``holder`` held before; None lets go."""
        ...

    def leases(self, run_id: str) -> list[WeightVersion]:
        """Versions held now, sorted."""
        ...

    def close(self) -> None:
        """End waiting calls and free connections; the store is not used afterwards."""
        ...


class MovesHeads:
    """What stores with heads of their own have in common."""

    believes: Callable[[Head], bool] | None = None
    """Set by who knows signatures: a head for which it is False does not keep another from being set."""

    def upcoming(self, run_id: str, mark: str, timeout_s: float) -> Upcoming | None:
        """See :meth:`ObjectStore.upcoming`: these do not tell."""
        raise NotFound("this store does not tell what comes", field="upcoming")

    def believed(self, head: Head | None) -> Head | None:
        """The head, None where there is none or it is not believed."""
        return head if head is None or self.believes is None or self.believes(head) else None


def check_move(current: Head | None, head: Head, expected: WeightVersion | None) -> bool:
    """Whether to write ``head``; False when it is there already.

    Raises:
        Conflict: The head is elsewhere than ``expected``, or would go back or change its content.
    """
    if current == head:
        return False
    at = None if current is None else current.identity
    if at != expected:
        raise Conflict(
            f"head is at {at}, not at {expected}", field="expected", fix="another trainer wrote it"
        )
    if at is not None and head.identity <= at:
        raise Conflict(f"head is at {at}; {head.identity} is not newer", field="version")
    return True


def check_lease(run_id: str, holder: str, ttl_s: float) -> None:
    """Raises RequestError that names what is wrong with a lease."""
    check_run_id(run_id)
    try:
        check_run_id(holder)
    except RequestError as error:
        raise RequestError(error.message, field="holder") from None
    if not 0 < ttl_s <= MAX_LEASE_S:
        raise RequestError(f"must be above 0 and at most {MAX_LEASE_S:.0f}, got {ttl_s}", field="ttl_s")


def check_prefix(prefix: str) -> str:
    """A prefix names whole segments: ``run/`` or ``run/1.2/``.

    Raises:
        RequestError: Anything else.
    """
    if not isinstance(prefix, str) or not prefix.endswith("/"):
        raise RequestError(f"{str(prefix)[:80]!r} must end with '/'", field="prefix")
    check_key(prefix[:-1])
    return prefix


class WakesReaders(MovesHeads, ABC):
    """Whoever waits for a head, in the process that sets it."""

    _look_s = math.inf
    """How often to look for one that another process set."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False

    @abstractmethod
    def get_head(self, run_id: str) -> Head | None:
        """See :meth:`ObjectStore.get_head`."""

    def wait_head(self, run_id: str, after: WeightVersion | None, timeout_s: float) -> Head | None:
        """See :meth:`ObjectStore.wait_head`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                head = self.get_head(run_id)
                if head is not None and (after is None or head.identity > after):
                    return head
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                if self._closed:
                    raise CapacityError("store is closed", retry_after_s=None)
                self._changed.wait(min(left_s, self._look_s))

    def close(self) -> None:
        """See :meth:`ObjectStore.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def check_range(key: str, offset: int, nbytes: int, size: int) -> None:
    """Raises RequestError (416) where an object of ``size`` bytes has no such part."""
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise RequestError(f"bytes {offset}+{nbytes} of an object of {size}", field=key, status=416)
