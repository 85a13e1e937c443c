"""The trainer's side: turn the weights of this moment into a version that engines can fetch.

Main path, :meth:`WeightPublisher.publish`: diff every fragment of every tensor against the baseline, upload what
changed in buckets, write the manifest, move the run's head, advance the baseline.

* The **baseline** is a copy of what was last *published*.  It advances only once manifest and head are durable;
  after any failure the next publish is again a correct step from what readers hold.  (A fragment that goes raw is
  written into the baseline at once, to save a second copy; it counts as *dirty* until the head has moved, and a
  dirty fragment goes raw again.)
* A version is final.  Publishing it again with the same weights succeeds and sends nothing; with others it is
  refused.  An attempt that another process has used, or an older one, is refused: a restarted trainer takes the
  next attempt.  Of two trainers with one run id, one is refused at its next publish.
* First an **anchor** (everything raw), then deltas; above ``anchor_density`` the version is an anchor instead, and
  every ``anchor_every`` versions there is an anchor besides the delta, made from the baseline after the head moved,
  so that no engine waits for it.

The weights must not change while :meth:`publish` runs; :meth:`publish_async` takes a copy first and lets the trainer
go on.  One lock: any thread may call, one publish runs at a time.

Callers: the train loop, and any trainer: ``WeightPublisher(model, store, run_id, attempt).publish(version)``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from rose.errors import Conflict, NotFound, RoseError, VersionRefused, WeightsError
from rose.weights import codec, manifest, retention, statehash
from rose.weights.buckets import Buckets
from rose.weights.manifest import Base, Encoding, Head, Kind, Manifest, ObjectRef, Section, TensorState
from rose.weights.params import WeightsParams
from rose.weights.source import Tensor, collect
from rose.weights.spec import TensorSpec, model_digest
from rose.weights.statehash import Bits
from rose.weights.store import Store
from rose.weights.version import WeightVersion

__all__ = ["PublishReport", "WeightPublisher", "WeightsParams"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What one publish did.

    Args:
        kind: ``delta`` or ``anchor``.
        bytes_dense: A full copy of the model as the engines hold it.
        bytes_sent: Objects of this version, as a reader pulls them; 0 when it was published before.
        bytes_anchor: Objects of the anchor written besides a delta, else 0.
        density: ``num_changed / num_elements``.
        state: State hash by tensor name, in hex.
    """

    version: WeightVersion
    kind: Kind
    bytes_dense: int
    bytes_sent: int
    bytes_anchor: int
    num_changed: int
    num_elements: int
    density: float
    seconds: float
    state: Mapping[str, str] = field(repr=False)


@dataclass(slots=True)
class _Fragment:
    """A contiguous range of one tensor: the unit of encoding."""

    start: int
    stop: int
    h: int = 0
    """State hash of the range as last published."""
    dirty: bool = True
    """The baseline's bits are not the published ones."""


@dataclass(slots=True)
class _Held:
    """One tensor of the baseline."""

    spec: TensorSpec
    bits: Bits
    fragments: list[_Fragment]

    @property
    def h(self) -> int:
        return sum(fragment.h for fragment in self.fragments) & statehash.MASK


@dataclass(slots=True)
class _Change:
    """What a fragment needs to become what the trainer has now."""

    held: _Held
    fragment: _Fragment
    h_after: int
    num_changed: int
    encoding: Encoding | None = None
    """None: unchanged."""
    payload: bytes = b""
    """Of ``planes``; raw bits are in the baseline already."""
    section: Section | None = None


@dataclass(slots=True)
class _Pending:
    """A version whose head may or may not have moved: the answer was lost."""

    head: Head
    changes: list[_Change]


class WeightPublisher:
    """Publishes the versions of one attempt of one run; see the module's docstring.

    Args:
        tensors: A torch module, or a function returning tensors by name (:mod:`rose.weights.source`).
        store: Where to; see :mod:`rose.weights.store`.
        attempt: Raised by one at every restart of the trainer.

    Memory: one copy of the model in the engines' type, two buckets, and the compressed delta.
    """

    def __init__(
        self,
        tensors: Any,
        store: Store,
        run_id: str,
        attempt: int,
        params: WeightsParams | None = None,
    ) -> None:
        self._source = tensors
        self._store = store
        self._run_id = manifest.check_run_id(run_id)
        self._attempt = WeightVersion(attempt, 0).attempt
        self._params = params or WeightsParams()
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._model = ""
        self._published: WeightVersion | None = None
        self._kind: Kind = "anchor"
        self._anchor: WeightVersion | None = None
        self._num_since_anchor = 0
        self._pending: _Pending | None = None
        self._damaged = False
        self._executor: ThreadPoolExecutor | None = None

    @property
    def published(self) -> WeightVersion | None:
        """The last version that is durable."""
        return self._published

    def publish(self, version: int, *, step: int | None = None, lr: float | None = None) -> PublishReport:
        """Make the present weights version ``attempt.version``.

        Args:
            step: RL step, for people.
            lr: Learning rate, for people.

        Raises:
            VersionRefused: Going back, other weights under a published version, another trainer on this run,
                or another model.
            WeightsError: A tensor that cannot travel, or a store that lost bytes.
            CapacityError: The store cannot be reached or is full.  After any of these the baseline is what
                readers hold, and publishing again is right.
        """
        identity = WeightVersion(self._attempt, version)
        with self._lock:
            return self._publish(identity, self._collect(), step, lr)

    def publish_async(
        self, version: int, *, step: int | None = None, lr: float | None = None
    ) -> Future[PublishReport]:
        """Copy the weights now, publish the copy in a background thread.

        Waits for an earlier background publish first, so that one extra copy exists at most.
        """
        identity = WeightVersion(self._attempt, version)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="rose-publish")
        self._executor.submit(lambda: None).result()
        copies = [_copied(tensor) for tensor in self._collect()]

        def work() -> PublishReport:
            with self._lock:
                return self._publish(identity, copies, step, lr)

        return self._executor.submit(work)

    def close(self) -> None:
        """Wait for a background publish and end its thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None

    # -- one publish, step by step

    def _collect(self) -> list[Tensor]:
        return collect(self._source, cast=self._params.cast, keep=self._params.keep)

    def _publish(
        self, identity: WeightVersion, tensors: list[Tensor], step: int | None, lr: float | None
    ) -> PublishReport:
        started_s = time.monotonic()
        head = self._store.get_head(self._run_id)
        self._resolve_pending(head)
        self._admit(identity, head)
        self._hold(tensors)
        if head is not None and head.identity == identity:
            return self._again(identity, head, tensors, started_s)

        whole = self._published is None or head is None or self._damaged
        with Buckets(self._store, self._run_id, identity, self._params.bucket_bytes) as buckets:
            changes = list(self._changes(tensors, whole, buckets))
            num_changed = sum(change.num_changed for change in changes)
            num_elements = sum(held.spec.num_elements for held in self._held.values())
            density = num_changed / num_elements if num_elements else 0.0
            kind: Kind = "anchor" if whole or density > self._params.anchor_density else "delta"
            if kind == "anchor":
                self._complete(changes, buckets)
            objects = buckets.close()
        record = self._manifest(identity, kind, changes, objects, step, lr)
        reference = self._put_manifest(record)
        report = PublishReport(
            version=identity,
            kind=kind,
            bytes_dense=record.bytes_dense,
            bytes_sent=record.bytes_sent,
            bytes_anchor=0,
            num_changed=num_changed,
            num_elements=num_elements,
            density=density,
            seconds=time.monotonic() - started_s,
            state=record.state(),
        )
        self._set_head(identity, kind, reference, head, changes)
        return self._afterwards(report, started_s)

    def _resolve_pending(self, head: Head | None) -> None:
        """An earlier publish whose head's fate was unknown: it landed, or it never will."""
        pending, self._pending = self._pending, None
        if pending is not None and head == pending.head:
            self._advance(pending)

    def _admit(self, identity: WeightVersion, head: Head | None) -> None:
        """Refuse what would contradict what is published."""
        if self._published is not None:
            if identity < self._published:
                raise VersionRefused(f"{self._published} is published, {identity} goes back", field="version")
            if head is not None and head.identity != self._published:
                raise VersionRefused(
                    f"head is at {head.identity}, this trainer published {self._published}",
                    field="run_id",
                    fix="another trainer writes to this run; give each its own run_id",
                )
        elif head is not None:
            if head.attempt > self._attempt:
                raise VersionRefused(
                    f"attempt {head.attempt} has begun, this is attempt {self._attempt}", field="attempt"
                )
            if head.attempt == self._attempt and head.identity != identity:
                raise VersionRefused(
                    f"attempt {self._attempt} is in use, at {head.identity}",
                    field="attempt",
                    fix=f"a restarted trainer takes attempt {self._attempt + 1}",
                )

    def _hold(self, tensors: list[Tensor]) -> None:
        """Make room for the baseline at the first publish; later ones must bring the same model."""
        model = model_digest(tensor.spec for tensor in tensors)
        if self._held:
            if model != self._model:
                raise VersionRefused("tensors changed their names, types or shapes", field="model")
            return
        size = self._params.fragment_elements
        for tensor in tensors:
            spec = tensor.spec
            fragments = [
                _Fragment(start, min(start + size, spec.num_elements))
                for start in range(0, spec.num_elements, size)
            ]
            self._held[spec.name] = _Held(spec, np.empty(spec.num_elements, spec.bits_dtype), fragments)
        self._model = model

    def _changes(self, tensors: list[Tensor], whole: bool, buckets: Buckets) -> Iterator[_Change]:
        """Encode and upload every fragment, in order; several at a time when there are threads for it."""
        work = [
            (tensor, self._held[tensor.spec.name], fragment)
            for tensor in tensors
            for fragment in self._held[tensor.spec.name].fragments
        ]
        num_threads = self._params.num_threads
        with ThreadPoolExecutor(num_threads, thread_name_prefix="rose-encode") as pool:
            for begin in range(0, len(work), num_threads):  # a window: results wait for their upload
                batch = work[begin : begin + num_threads]
                run = pool.map if num_threads > 1 else map
                for change in run(lambda item: self._change(item[0], item[1], item[2], whole), batch):
                    self._upload(change, buckets)
                    yield change

    def _change(self, tensor: Tensor, held: _Held, fragment: _Fragment, whole: bool) -> _Change:
        new = tensor.bits(fragment.start, fragment.stop)
        old = held.bits[fragment.start : fragment.stop]
        if whole or fragment.dirty:
            num_changed = new.size
        elif held.spec.sparse_codec:
            limit = int(self._params.raw_density * new.size)
            encoded = codec.encode(old, new, start=fragment.start, max_changes=limit)
            if encoded is not None and len(encoded.data) < new.nbytes:
                h_after = statehash.add(fragment.h, encoded.dh)
                if not encoded.num_changed:
                    return _Change(held, fragment, h_after, 0)
                return _Change(held, fragment, h_after, encoded.num_changed, "planes", encoded.data)
            num_changed = int(np.count_nonzero(old != new))
        else:
            num_changed = int(np.count_nonzero(old != new))
        if not num_changed:
            return _Change(held, fragment, fragment.h, 0)
        fragment.dirty = True
        old[:] = new
        return _Change(held, fragment, statehash.hash_bits(old, start=fragment.start), num_changed, "raw")

    def _upload(self, change: _Change, buckets: Buckets) -> None:
        if change.encoding is None:
            return
        held, fragment = change.held, change.fragment
        raw = held.bits[fragment.start : fragment.stop].view(np.uint8).data
        payload = raw if change.encoding == "raw" else change.payload
        place, offset = buckets.add(payload)
        change.section = Section(
            object=place,
            offset=offset,
            nbytes=len(payload),
            xxh3=manifest.digest(payload),
            encoding=change.encoding,
            tensor=held.spec.name,
            start=fragment.start,
            num_elements=fragment.stop - fragment.start,
            num_changed=change.num_changed,
            dh=statehash.to_hex(statehash.subtract(change.h_after, fragment.h)),
        )

    def _complete(self, changes: list[_Change], buckets: Buckets) -> None:
        """Send raw what has not gone raw yet: the version becomes an anchor."""
        for change in changes:
            if change.encoding != "raw":
                _apply(change)
                change.encoding, change.payload = "raw", b""
                self._upload(change, buckets)
            assert change.section is not None
            change.section = _of_anchor(change.section, change.h_after)

    def _manifest(
        self,
        identity: WeightVersion,
        kind: Kind,
        changes: list[_Change],
        objects: tuple[ObjectRef, ...],
        step: int | None,
        lr: float | None,
    ) -> Manifest:
        after: dict[str, int] = dict.fromkeys(self._held, 0)
        for change in changes:
            name = change.held.spec.name
            after[name] = statehash.add(after[name], change.h_after)
        num_elements = sum(held.spec.num_elements for held in self._held.values())
        num_changed = sum(change.num_changed for change in changes)
        base = None
        if kind == "delta":
            assert self._published is not None
            base = Base(attempt=self._attempt, version=self._published.version, kind=self._kind)
            assert self._anchor is not None
        anchor = identity if kind == "anchor" else self._anchor
        assert anchor is not None
        return Manifest(
            schema=manifest.SCHEMA,
            run_id=self._run_id,
            attempt=identity.attempt,
            version=identity.version,
            kind=kind,
            base=base,
            anchor=(anchor.attempt, anchor.version),
            model=self._model,
            objects=objects,
            sections=tuple(change.section for change in changes if change.section is not None),
            tensors=tuple(
                TensorState(
                    name=name,
                    dtype=held.spec.dtype,
                    shape=held.spec.shape,
                    h_before=None if kind == "anchor" else statehash.to_hex(held.h),
                    h_after=statehash.to_hex(after[name]),
                )
                for name, held in self._held.items()
            ),
            num_changed=num_changed,
            num_elements=num_elements,
            bytes_dense=sum(held.spec.nbytes for held in self._held.values()),
            bytes_sent=sum(reference.nbytes for reference in objects),
            density=num_changed / num_elements if num_elements else 0.0,
            created_s=time.time(),
            lr=lr,
            step=step,
        )

    def _put_manifest(self, record: Manifest) -> ObjectRef:
        """Write the manifest once; what an earlier try wrote counts if it means the same."""
        for kind in ("delta", "anchor"):
            self._check_same(record, kind)
        key = manifest.manifest_key(self._run_id, record.identity, record.kind)
        data = manifest.encode(record)
        try:
            self._store.put_new(key, data)
        except Conflict:
            self._check_same(record, record.kind)
            data = self._store.get(key, max_bytes=manifest.MAX_MANIFEST_BYTES)
        return ObjectRef(key=key, nbytes=len(data), xxh3=manifest.digest(data))

    def _check_same(self, record: Manifest, kind: Kind) -> None:
        try:
            existing = retention.read_manifest(self._store, self._run_id, record.identity, kind)
        except NotFound:
            return
        same_base = existing.base == record.base or kind != record.kind
        if existing.model != record.model or existing.state() != record.state() or not same_base:
            raise VersionRefused(
                f"{record.identity} is published with other weights",
                field="version",
                fix="take the next version",
            )

    def _set_head(
        self,
        identity: WeightVersion,
        kind: Kind,
        reference: ObjectRef,
        before: Head | None,
        changes: list[_Change],
    ) -> None:
        head = Head(
            schema=manifest.SCHEMA,
            run_id=self._run_id,
            attempt=identity.attempt,
            version=identity.version,
            kind=kind,
            manifest=reference,
        )
        self._pending = _Pending(head, changes)
        try:
            self._store.set_head(head, expected=None if before is None else before.identity)
        except Conflict as error:
            self._pending = None
            raise VersionRefused(
                str(error), field="run_id", fix="another trainer writes to this run; give each its own run_id"
            ) from error
        pending, self._pending = self._pending, None
        self._advance(pending)

    def _advance(self, pending: _Pending) -> None:
        """The head has moved: the baseline becomes what was published."""
        planes = [change for change in pending.changes if change.encoding == "planes"]
        for change in planes:
            change.fragment.dirty = (
                True  # until applied: an interrupt in between costs a raw fragment, no more
            )
        for change in pending.changes:
            change.fragment.h = change.h_after
        self._published, self._kind = pending.head.identity, pending.head.kind
        if self._kind == "anchor":
            self._anchor, self._num_since_anchor = self._published, 0
            self._damaged = False
        else:
            self._num_since_anchor += 1
        for change in pending.changes:
            if change.encoding == "planes":
                _apply(change)
            change.fragment.dirty = False

    def _again(
        self, identity: WeightVersion, head: Head, tensors: list[Tensor], started_s: float
    ) -> PublishReport:
        """The head is at this very version: agree if the weights are the same, refuse if not."""
        record = retention.read_manifest(self._store, self._run_id, identity, head.kind)
        state: dict[str, str] = {}
        for tensor in tensors:
            held = self._held[tensor.spec.name]
            for fragment in held.fragments:
                bits = tensor.bits(fragment.start, fragment.stop)
                h_now = statehash.hash_bits(bits, start=fragment.start)
                if self._published is None:  # a restarted process that finds its version published: adopt it
                    held.bits[fragment.start : fragment.stop] = bits
                    fragment.h, fragment.dirty = h_now, False
                elif h_now != fragment.h:
                    raise VersionRefused(f"{identity} is published with other weights", field="version")
            state[tensor.spec.name] = statehash.to_hex(held.h)
        if record.model != self._model or record.state() != state:
            for held in self._held.values():
                for fragment in held.fragments:
                    fragment.dirty = True
            raise VersionRefused(f"{identity} is published with other weights", field="version")
        if self._published is None:
            self._published, self._kind, self._anchor = identity, head.kind, WeightVersion(*record.anchor)
        return PublishReport(
            version=identity,
            kind=head.kind,
            bytes_dense=record.bytes_dense,
            bytes_sent=0,
            bytes_anchor=0,
            num_changed=0,
            num_elements=record.num_elements,
            density=0.0,
            seconds=time.monotonic() - started_s,
            state=state,
        )

    def _afterwards(self, report: PublishReport, started_s: float) -> PublishReport:
        """With the head moved, nothing below can fail the publish: a regular anchor, and deleting the old."""
        bytes_anchor = 0
        try:
            if self._num_since_anchor >= self._params.anchor_every:
                bytes_anchor = self._anchor_besides(report)
            if self._params.collect and self._num_since_anchor == 0:
                retention.collect(self._store, self._run_id)
        except RoseError as error:
            _log.warning("version %s is published; anchor or clean-up is not: %s", report.version, error)
        return replace(report, bytes_anchor=bytes_anchor, seconds=time.monotonic() - started_s)

    def _anchor_besides(self, report: PublishReport) -> int:
        """Write the anchor of the version just published, from the baseline; returns its bytes."""
        identity = report.version
        with Buckets(self._store, self._run_id, identity, self._params.bucket_bytes) as buckets:
            changes = [
                _Change(held, fragment, fragment.h, fragment.stop - fragment.start, "raw")
                for held in self._held.values()
                for fragment in held.fragments
            ]
            for change in changes:
                self._check_baseline(change.held, change.fragment)
                self._upload(change, buckets)
                assert change.section is not None
                change.section = _of_anchor(change.section, change.h_after)
            objects = buckets.close()
        record = self._manifest(identity, "anchor", changes, objects, None, None)
        self._put_manifest(record)
        self._anchor, self._num_since_anchor = identity, 0
        return record.bytes_sent

    def _check_baseline(self, held: _Held, fragment: _Fragment) -> None:
        """Prove the baseline's memory before it becomes an anchor.

        Deltas made from damaged memory fit no reader, so only a whole version mends it.
        """
        bits = held.bits[fragment.start : fragment.stop]
        if statehash.hash_bits(bits, start=fragment.start) != fragment.h:
            self._damaged = True
            raise WeightsError(
                "baseline is damaged in memory; the next version is whole", field=held.spec.name
            )


def _apply(change: _Change) -> None:
    """Bring the baseline's fragment to the trainer's state, from our own payload."""
    if change.encoding == "planes":
        fragment = change.fragment
        fragment.dirty = True
        bits = change.held.bits[fragment.start : fragment.stop]
        codec.apply(bits, codec.decode(change.payload, bits.size, bits.dtype))


def _of_anchor(section: Section, h_after: int) -> Section:
    """The same bytes, described as a step from nothing."""
    return msgspec.structs.replace(section, num_changed=section.num_elements, dh=statehash.to_hex(h_after))


def _copied(tensor: Tensor) -> Tensor:
    bits = np.array(tensor.bits(0, tensor.spec.num_elements), copy=True)
    return Tensor(tensor.spec, lambda start, stop: bits[start:stop])
