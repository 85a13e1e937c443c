"""A weight store inside one process: for tests, and for trainer and engine in one program."""

from __future__ import annotations

import time

from rose.errors import Conflict, NotFound, TooLarge
from rose.lineage import WeightVersion
from rose.weights.leases import LeaseBook
from rose.weights.manifest import MAX_OBJECT_BYTES, Head, check_key, check_run_id
from rose.weights.store import (
    Buffer,
    ObjectStat,
    WakesReaders,
    check_lease,
    check_move,
    check_prefix,
    check_range,
)


class MemoryStore(WakesReaders):
    """A store inside one process: tests, and trainer and engine in one program."""

    def __init__(self, *, max_object_bytes: int = MAX_OBJECT_BYTES) -> None:
        super().__init__()
        self._max_object_bytes = max_object_bytes
        self._objects: dict[str, bytes] = {}
        self._heads: dict[str, Head] = {}
        self._leases = LeaseBook()

    def put_new(self, key: str, data: Buffer) -> None:
        check_key(key)
        if len(data) > self._max_object_bytes:
            raise TooLarge(f"{len(data)} bytes, at most {self._max_object_bytes}", field=key)
        with self._changed:
            if key in self._objects:
                raise Conflict("exists", field=key)
            self._objects[key] = bytes(data)

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        data = self._find(key)
        if len(data) > max_bytes:
            raise TooLarge(f"{len(data)} bytes, at most {max_bytes}", field=key)
        return data

    def get_range(self, key: str, offset: int, nbytes: int) -> bytes:
        data = self._find(key)
        check_range(key, offset, nbytes, len(data))
        return data[offset : offset + nbytes]

    def stat(self, key: str) -> ObjectStat:
        return ObjectStat(nbytes=len(self._find(key)))

    def distrust(self, key: str) -> None:
        check_key(key)  # there is one copy

    def _find(self, key: str) -> bytes:
        data = self._objects.get(check_key(key))
        if data is None:
            raise NotFound("no such object", field=key)
        return data

    def list(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        with self._changed:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._objects.pop(check_key(key), None) is not None

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        check_run_id(head.run_id)
        with self._changed:
            if check_move(self.believed(self._heads.get(head.run_id)), head, expected):
                self._heads[head.run_id] = head
                self._changed.notify_all()

    def get_head(self, run_id: str) -> Head | None:
        return self._heads.get(check_run_id(run_id))

    def runs(self) -> list[str]:
        return sorted(self._heads)

    def lease(self, run_id: str, holder: str, version: WeightVersion | None, ttl_s: float) -> None:
        check_lease(run_id, holder, ttl_s)
        now_s = time.monotonic()
        with self._changed:
            self._leases.hold(run_id, holder, version, now_s + ttl_s, now_s)

    def leases(self, run_id: str) -> list[WeightVersion]:
        check_run_id(run_id)
        with self._changed:
            return self._leases.held(run_id, time.monotonic())
