"""A store over anything that keeps bytes under names and can create a name once: object stores, caches.

Six primitives of a backend make a whole :class:`~rose.weights.store.ObjectStore`::

    objects/{key}                      immutable, created once
    runs/{run_id}/heads/{number}.json  the head's history: the highest number counts
    runs/{run_id}/leases/{holder}      overwritten by their holder

A head moves by *creating* the next number, which only one of two writers can do: that is the compare-and-swap that
object stores lack.  Waiting for a head is polling.

Backends: :mod:`rose.weights.fsspec_store`, :mod:`rose.weights.mooncake_store`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod

import msgspec

from rose.errors import CapacityError, Conflict, NotFound, RequestError, SectionCorrupt, TooLarge
from rose.lineage import WeightVersion
from rose.weights import manifest
from rose.weights.leases import MAX_LEASE_S
from rose.weights.manifest import MAX_OBJECT_BYTES, Head, check_key, check_run_id
from rose.weights.store import (
    MAX_HEAD_BYTES,
    Buffer,
    MovesHeads,
    ObjectStat,
    check_lease,
    check_move,
    check_prefix,
    check_range,
)

_KEPT_HEADS = 4  # a slow reader may still be about to read one that it found newest
_TRIES = 5


class _LeaseRecord(msgspec.Struct, forbid_unknown_fields=True):
    version: str
    until_s: float  # wall clock: readers are on other machines


class FlatStore(MovesHeads, ABC):
    """See the module.

    Args:
        poll_s: How often a waiting reader looks for a newer head.
    """

    def __init__(self, *, max_object_bytes: int = MAX_OBJECT_BYTES, poll_s: float = 0.5) -> None:
        self._max_object_bytes = max_object_bytes
        self._poll_s = poll_s
        self._closed = threading.Event()

    # -- the backend's six primitives; a missing name raises FileNotFoundError, any other fault a RoseError

    @abstractmethod
    def _create(self, name: str, data: Buffer) -> bool:
        """Whole or not at all; False when the name exists."""

    @abstractmethod
    def _overwrite(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def _read(self, name: str, offset: int, nbytes: int | None) -> bytes:
        """``nbytes`` from ``offset``, less where the object ends before; None: to its end."""

    @abstractmethod
    def _size(self, name: str) -> int: ...

    @abstractmethod
    def _find(self, prefix: str) -> list[str]:
        """Names below ``prefix`` (whole segments), in any order."""

    @abstractmethod
    def _remove(self, name: str) -> bool:
        """True if it existed."""

    # -- objects

    def put_new(self, key: str, data: Buffer) -> None:
        check_key(key)
        if len(data) > self._max_object_bytes:
            raise TooLarge(f"{len(data)} bytes, at most {self._max_object_bytes}", field=key)
        if not self._create(f"objects/{key}", data):
            raise Conflict("exists", field=key)

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        nbytes = self.stat(key).nbytes
        if nbytes > max_bytes:
            raise TooLarge(f"{nbytes} bytes, at most {max_bytes}", field=key)
        return self._read_object(key, 0, nbytes)

    def get_range(self, key: str, offset: int, nbytes: int) -> bytes:
        check_range(key, offset, nbytes, self.stat(key).nbytes)
        return self._read_object(key, offset, nbytes)

    def _read_object(self, key: str, offset: int, nbytes: int) -> bytes:
        try:
            data = self._read(f"objects/{key}", offset, nbytes) if nbytes else b""
        except FileNotFoundError:
            raise NotFound("no such object", field=key) from None
        if len(data) != nbytes:
            raise RequestError(f"{len(data)} bytes came, {nbytes} were asked for", field=key, status=416)
        return data

    def stat(self, key: str) -> ObjectStat:
        try:
            return ObjectStat(nbytes=self._size(f"objects/{check_key(key)}"))
        except FileNotFoundError:
            raise NotFound("no such object", field=key) from None

    def distrust(self, key: str) -> None:
        check_key(key)  # there is one copy

    def list(self, prefix: str) -> list[str]:
        found = self._find(f"objects/{check_prefix(prefix)}")
        return sorted(name.removeprefix("objects/") for name in found)

    def delete(self, key: str) -> bool:
        return self._remove(f"objects/{check_key(key)}")

    # -- heads

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        check_run_id(head.run_id)
        for _ in range(_TRIES):
            number, current = self._head(head.run_id)
            if not check_move(self.believed(current), head, expected):
                return
            if self._create(_head_name(head.run_id, number + 1), manifest.encode(head)):
                for name in self._head_names(head.run_id)[:-_KEPT_HEADS]:
                    self._remove(name)
                return
        raise Conflict("other writers keep moving it", field="head")

    def get_head(self, run_id: str) -> Head | None:
        return self._head(check_run_id(run_id))[1]

    def runs(self) -> list[str]:
        return sorted({name.split("/")[1] for name in self._find("runs/") if _number_of(name) >= 0})

    def _head(self, run_id: str) -> tuple[int, Head | None]:
        for _ in range(_TRIES):
            names = self._head_names(run_id)
            if not names:
                return -1, None
            try:
                data = self._read(names[-1], 0, MAX_HEAD_BYTES + 1)
            except FileNotFoundError:  # pruned meanwhile: the head has moved on
                continue
            number = _number_of(names[-1])
            try:
                return number, manifest.decode_head(data, run_id)
            except SectionCorrupt:
                if self.believes is None:
                    raise
                return number, None  # it keeps nobody out who knows signatures
        raise CapacityError("the head moves faster than it can be read", field=f"head of {run_id}")

    def _head_names(self, run_id: str) -> list[str]:
        return sorted(name for name in self._find(f"runs/{run_id}/heads/") if _number_of(name) >= 0)

    def wait_head(self, run_id: str, after: WeightVersion | None, timeout_s: float) -> Head | None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            head = self.get_head(run_id)
            if head is not None and (after is None or head.identity > after):
                return head
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            if self._closed.wait(min(left_s, self._poll_s)):
                raise CapacityError("store is closed", retry_after_s=None)

    # -- leases

    def lease(self, run_id: str, holder: str, version: WeightVersion | None, ttl_s: float) -> None:
        check_lease(run_id, holder, ttl_s)
        name = f"runs/{run_id}/leases/{holder}"
        if version is None:
            self._remove(name)
            return
        record = _LeaseRecord(version=str(version), until_s=time.time() + ttl_s)
        self._overwrite(name, msgspec.json.encode(record))

    def leases(self, run_id: str) -> list[WeightVersion]:
        held: set[WeightVersion] = set()
        now_s = time.time()
        for name in self._find(f"runs/{check_run_id(run_id)}/leases/"):
            try:
                record = msgspec.json.decode(self._read(name, 0, MAX_HEAD_BYTES), type=_LeaseRecord)
                version = WeightVersion.parse(record.version)
            except (FileNotFoundError, msgspec.DecodeError, RequestError):
                continue
            # A lease from the far future is a clock that went back; it must not hold objects for ever.
            if now_s < record.until_s <= now_s + 2 * MAX_LEASE_S:
                held.add(version)
            else:
                self._remove(name)
        return sorted(held)

    def close(self) -> None:
        self._closed.set()


def _head_name(run_id: str, number: int) -> str:
    return f"runs/{run_id}/heads/{number:012d}.json"


def _number_of(name: str) -> int:
    text = name.rpartition("/")[2].removesuffix(".json")
    return int(text) if len(text) == 12 and text.isascii() and text.isdigit() else -1
