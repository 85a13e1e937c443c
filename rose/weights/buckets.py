"""Gather sections into objects of about one bucket, and upload them while the next bucket fills.

Objects are named by their content, so a retry of the same bytes meets what it wrote before.  :meth:`Buckets.close`
returns only when every object is in the store with its full size.  Memory: two buckets.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Self

import msgspec

from rose.errors import Conflict, NotFound, RoseError, TooLarge, WeightsError
from rose.lineage import WeightVersion
from rose.weights import ending, manifest
from rose.weights.manifest import ObjectRef
from rose.weights.store import Buffer, ObjectStore


class Buckets:
    """One writer's objects of one version on their way to the store; a context manager, used by one thread.

    Args:
        bound: Name each object with its BLAKE3 digest, for a manifest that is signed.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        identity: WeightVersion,
        writer: int | str,
        bucket_bytes: int,
        *,
        bound: bool,
    ) -> None:
        self._store, self._run_id, self._identity, self._writer = store, run_id, identity, writer
        self._bucket_bytes, self._bound = bucket_bytes, bound
        self._buffer = bytearray()
        self._objects: list[ObjectRef] = []
        self._upload: Future[str | None] | None = None
        self._created: list[str] = []

    def add(self, payload: Buffer) -> tuple[int, int]:
        """Append a section; returns (index of its object, offset in it)."""
        if self._buffer and len(self._buffer) + len(payload) > self._bucket_bytes:
            self._flush()
        place = len(self._objects), len(self._buffer)
        self._buffer += payload
        return place

    def close(self) -> tuple[ObjectRef, ...]:
        """Upload the rest, make sure that everything arrived, and list the objects.

        Raises:
            WeightsError: The store has an object of another size under the same name.
            RoseError: What the store raised.
        """
        if self._buffer:
            self._flush()
        self._wait()
        for reference in self._objects:
            held = self._store.stat(reference.key).nbytes
            if held != reference.nbytes:
                raise WeightsError(f"store holds {held} bytes of {reference.nbytes}", field=reference.key)
        return tuple(self._objects)

    def _flush(self) -> None:
        data, self._buffer = self._buffer, bytearray()
        xxh3 = manifest.digest(data)
        key = manifest.object_key(self._run_id, self._identity, self._writer, len(self._objects), xxh3)
        self._wait()  # one upload at a time: memory stays at two buckets
        self._objects.append(ObjectRef(key=key, nbytes=len(data), xxh3=xxh3))
        self._upload = ending.begin(lambda: self._put(key, data), "rose-upload")

    def _put(self, key: str, data: bytearray) -> str | None:
        """Returns the digest, which is made here: the next bucket fills meanwhile."""
        strong = manifest.strong_digest(data) if self._bound else None
        try:
            self._created.append(key)
            self._store.put_new(key, data)
        except Conflict:  # an earlier try of the same version, if it has not been damaged since
            if self._is_there(key, data):
                self._created.pop()
            else:
                self._replace(key, data)
        return strong

    def _is_there(self, key: str, data: bytearray) -> bool:
        with contextlib.suppress(NotFound, TooLarge):
            return self._store.get(key, max_bytes=len(data)) == data
        return False

    def _replace(self, key: str, data: bytearray) -> None:
        self._store.delete(key)
        try:
            self._store.put_new(key, data)
        except Conflict as error:
            raise WeightsError("is taken by other bytes, again and again", field=key) from error

    def discard(self) -> None:
        """Delete what was uploaded here, as far as the store can be reached.  Nothing refers to it."""
        with contextlib.suppress(RoseError):
            self._wait()
        for key in self._created:
            with contextlib.suppress(RoseError):
                self._store.delete(key)

    def _wait(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            self._objects[-1] = msgspec.structs.replace(self._objects[-1], blake3=upload.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._upload is not None:
            wait([self._upload], ending.PATIENCE_S if kind is KeyboardInterrupt else None)
